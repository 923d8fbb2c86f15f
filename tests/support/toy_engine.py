"""A toy of vLLM's scheduler and workers, as the connector sees them, with a model to check against.

The "model" is a hash: what a token leaves in its page and the token that follows depend on all
tokens before it. Every step looks at the pages of everything a request has computed, as attention
would, so a page with wrong bytes fails at once. Pages are shared by prefix, freed, preempted and
taken again as vLLM does it: contents stay until a page is given to another request.

A model may have several KV groups, whose layers lie in the same memory under different page ids:
full attention, a sliding window whose pages are dropped behind it, and a state of which there is
one at the end of each chunk. It may be divided over workers by heads and by layers; each layer and
head leaves values of its own in its pages.
"""

import hashlib
import itertools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvdepot.adapters.vllm.config import ConnectorConfig
from kvdepot.adapters.vllm.groups import GroupRule, KVGroups
from kvdepot.adapters.vllm.loaded_weights import LEAVE_WEIGHTS, LoadedAdapters, digest_in_worker
from kvdepot.adapters.vllm.messages import BlockOrigin, StepPlan, WorkerRank
from kvdepot.adapters.vllm.scheduler import ConnectorScheduler, EngineFacts
from kvdepot.adapters.vllm.shared_depot import hold
from kvdepot.adapters.vllm.worker import ConnectorWorker, FinishedTransfers
from kvdepot.config.settings import load
from kvdepot.core.depot import NamespaceHandle
from kvdepot.io.files import Files
from kvdepot.store.open import assemble
from kvdepot.store.store import Store

PAGE_TOKENS = 4
LAYERS = 3
HEADS = 2
WIDTH = 256
VOCABULARY = 50
WINDOW = 10
NULL = 0
MODEL = "toy"
PROMPT = [(7 * number) % VOCABULARY for number in range(43)]
FULL_PAGES = len(PROMPT) // PAGE_TOKENS
ALL = len(PROMPT) + 2
"""Tokens that are computed for PROMPT and an answer of three tokens, without hits."""
REST = len(PROMPT) % PAGE_TOKENS + 2
"""The same if all full pages are hit, of every kind of group."""


def state_of(tokens: list[int], salt: str = "") -> int:
    packed = salt.encode() + b"|" + bytes(tokens)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=2).digest(), "little")


@dataclass
class ToyRequest:
    """As vLLM's Request."""

    request_id: str
    all_token_ids: list[int]
    max_tokens: int
    cache_salt: str | None = None
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    kv_transfer_params: dict[str, Any] | None = None
    num_prompt_tokens: int = 0
    tables: list[list[int]] = field(default_factory=list)
    """Page ids, one list for each KV group."""
    status: str = "waiting"
    loaded_tokens: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def answer(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def is_over(self) -> bool:
        return len(self.answer) >= self.max_tokens


def answer_of(prompt: list[int], count: int, salt: str = "") -> list[int]:
    """What the model says, computed without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(state_of(tokens, salt) % VOCABULARY)
    return tokens[len(prompt) :]


PageName = tuple[int, str, tuple[int, ...]]
"""KV group, salt, and the tokens up to the page's end."""


def full_attention(block_tokens: int) -> KVGroups:
    """The groups of a model that has full attention only."""
    return KVGroups((GroupRule("full", 0, block_tokens),), block_tokens)


class PagePool:
    """vLLM's block pool: pages with users, and what complete pages hold."""

    def __init__(self, count: int) -> None:
        self.users = [0] * count
        self.free = deque(range(1, count))  # page 0 stands for pages that are not kept
        self.known: dict[PageName, int] = {}
        self.names: dict[int, PageName] = {}

    def take(self) -> int:
        page = self.free.popleft()
        self.known.pop(self.names.pop(page, (0, "", ())), None)
        self.users[page] = 1
        return page

    def share(self, page: int) -> None:
        if page == NULL:
            return
        if not self.users[page]:
            self.free.remove(page)
        self.users[page] += 1

    def give_back(self, pages: list[int]) -> None:
        for page in reversed([page for page in pages if page != NULL]):
            self.users[page] -= 1
            if not self.users[page]:
                self.free.append(page)

    def name(self, page: int, prefix: PageName) -> None:
        if page != NULL and prefix not in self.known:
            self.known[prefix] = page
            self.names[page] = prefix


def first_token(kind: str, stop: int) -> int:
    """The first token that a group needs to go on from `stop`."""
    return {"full": 0, "window": max(0, stop - WINDOW + 1), "state": max(0, stop - 1)}[kind]


@dataclass(frozen=True)
class Split:
    """How a model is divided over workers."""

    shards: int = 1
    stages: int = 1
    heads: int = HEADS
    """The model's; `latent`: each shard has all of them."""
    latent: bool = False
    layout: str = "LBHNC"
    device: str = "cpu"

    def heads_of(self, rank: int) -> range:
        """Where there are more shards than heads, several have the same."""
        shards = 1 if self.latent else min(self.shards, self.heads)
        count = self.heads // shards
        first = rank // (self.shards // shards) * count if not self.latent else 0
        return range(first, first + count)

    def layers_of(self, stage: int) -> range:
        """The last stage has what is left."""
        count = -(-LAYERS // self.stages)
        return range(LAYERS)[stage * count : (stage + 1) * count]

    def pages(self, count: int, rank: int) -> torch.Tensor:
        """The cache of one layer, as [page, head, token, element]."""
        heads = len(self.heads_of(rank))
        if self.layout == "LBNHC":
            tokens_first = (count, PAGE_TOKENS, heads, WIDTH)
            return torch.zeros(tokens_first, device=self.device).transpose(1, 2)
        return torch.zeros(count, heads, PAGE_TOKENS, WIDTH, device=self.device)


def engine_config(heads: int = HEADS) -> Any:
    """As vLLM's VllmConfig, as far as the worker looks at it."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=MODEL,
            dtype="torch.float32",
            quantization=None,
            seed=0,
            hf_config=SimpleNamespace(to_dict=lambda: {"layers": LAYERS}, _commit_hash="toy"),
            model_arch_config=SimpleNamespace(per_layer_overrides=None),
            get_total_num_kv_heads=lambda: heads,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        load_config=SimpleNamespace(load_format="auto"),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


@dataclass
class FullAttentionSpec:
    """As vLLM's, which goes by the same name; the others likewise."""

    num_kv_heads: int = HEADS
    max_tp_shards: int | None = None
    block_size = PAGE_TOKENS


@dataclass
class SlidingWindowSpec:
    num_kv_heads: int = HEADS
    max_tp_shards: int | None = None
    block_size = PAGE_TOKENS
    sliding_window = WINDOW


@dataclass
class MambaSpec:
    num_kv_heads: int = 0
    max_tp_shards: int | None = None
    block_size = PAGE_TOKENS
    mamba_cache_mode = "align"
    num_speculative_blocks = 0


WHOLE = Split()
ALONE = WorkerRank(0, 1, "toy 1")
SPECS = {"full": FullAttentionSpec, "window": SlidingWindowSpec, "state": MambaSpec}


def layer_name(group: int, layer: int) -> str:
    return f"layer{group}.{layer}"


def cache_config(
    pages: int, kinds: Sequence[str] = ("full",), split: Split = WHOLE, place: WorkerRank = ALONE
) -> Any:
    heads = len(split.heads_of(place.rank))
    groups = [
        SimpleNamespace(
            kv_cache_spec=SPECS[kind](heads if kind != "state" else 0, 1 if split.latent else None),
            layer_names=[layer_name(group, layer) for layer in split.layers_of(place.stage)],
        )
        for group, kind in enumerate(kinds)
    ]
    return SimpleNamespace(num_blocks=pages, kv_cache_groups=groups, kv_cache_layout=split.layout)


class ToyEngine:
    """One engine over a store. `step` until nothing is left to do."""

    def __init__(
        self,
        store: Store,
        settings: ConnectorConfig,
        *,
        pages: int = 64,
        budget: int = 24,
        roles: str = "both",
        split: Split = WHOLE,
        kinds: Sequence[str] = ("full",),
    ) -> None:
        self.split = split
        self.kinds = kinds
        name = f"toy {id(store)}"
        self._depots = [hold(name, lambda: store)]
        self.pool = PagePool(pages)
        self.budget = budget
        self.side = ConnectorScheduler(
            settings,
            store,
            EngineFacts(
                budget,
                shares_pages=True,
                loads=roles in ("both", "consumer"),
                saves=roles in ("both", "producer"),
            ),
        )
        self.workers = []
        self.caches = []
        self.heads = []
        for stage, rank in itertools.product(range(split.stages), range(split.shards)):
            place = WorkerRank(rank, split.shards, "toy 1", stage, split.stages)
            caches = {layer: split.pages(pages, rank) for layer in split.layers_of(stage)}
            cache = cache_config(pages, kinds, split, place)
            self._depots.append(hold(name, lambda: store))
            named = {
                layer_name(group, layer): tensor
                for group in range(len(kinds))
                for layer, tensor in caches.items()
            }
            config = engine_config(split.heads)
            loaded = LoadedAdapters()
            self.workers.append(
                ConnectorWorker(config, cache, settings, store, loaded, named, place)
            )
            self.caches.append(caches)
            self.heads.append(split.heads_of(rank))
        self.side.set_workers([worker.facts for worker in self.workers])
        self.requests: dict[str, ToyRequest] = {}
        self.waiting: list[ToyRequest] = []
        self.running: list[ToyRequest] = []
        self.held: dict[str, list[list[int]]] = {}
        self.recv_left: dict[str, int] = {}
        self.sent_left: dict[str, int] = {}
        self.done: dict[str, ToyRequest] = {}
        self.computed_tokens = 0
        self.preemptions = 0
        self.preempted: list[str] = []
        self.waits = 0
        self.failed_loads = 0
        self.weights = ""
        """What the model computes depends on them."""
        self.is_sleeping = False
        self.digests = 0

    def add(self, request: ToyRequest) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.side.add(request)

    def call(self, method: str, weights: str | None = None) -> None:
        """As vLLM's executor calls its workers; the call leaves other weights if they are given."""
        if method not in LEAVE_WEIGHTS:
            self.side.weights.about_to_call(method, self, self._digests)
        if weights is not None:
            self.weights = weights

    def _digests(self, function: Any) -> list[str]:
        assert function is digest_in_worker
        self.digests += 1
        return [f"digest of {self.weights} on {at}" for at, _ in enumerate(self.workers)]

    def run(self, limit: int = 20_000) -> None:
        """Step until all is over."""
        for _ in range(limit):
            if not (self.waiting or self.running or self.held or self.recv_left):
                self.settle()
                return
            self.step()
        raise AssertionError(f"not over after {limit} steps: {list(self.requests)}")

    def settle(self) -> None:
        """Return when everything that was saved can be found."""
        for worker in self.workers:
            worker.saver.wait()

    def abort(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is not None:
            for queue in (self.waiting, self.running):
                if request in queue:
                    queue.remove(request)
            self._finish(request, loading=request.status == "loading")

    def step(self) -> None:
        scheduled = self._schedule()
        plan = self.side.plan(self._output(scheduled))
        for worker in self.workers:
            worker.preempt(plan)
            worker.begin(plan)
        for name, count in scheduled.items():
            self._compute(self.requests[name], count)
        ends = []
        for worker in self.workers:
            over = self._end_step(worker, plan)
            self._failed(over.failed)
            ends.append((over.sent, over.received, worker.take_invalid(), worker.take_report()))
        invalid = set().union(*(end[2] for end in ends))
        assert not invalid or len(self.kinds) == 1, "vLLM raises"
        self._truncate(invalid)
        for name, count in scheduled.items():
            self._sample(self.requests.get(name), count)
        for report in (end[3] for end in ends):
            self.side.step_ended(report)
        for sent, received, _, _ in ends:
            self._moved(sent, received)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.side.close()
        for depot in self._depots:
            depot.close()

    def spaces(self) -> list[NamespaceHandle]:
        """The namespaces of all groups and shards, without a LoRA."""
        groups = self.side.names.spaces(BlockOrigin(generation=self.side.names.generation))
        return [space for group in groups for space in group]

    def _output(self, scheduled: dict[str, int]) -> Any:
        """As vLLM's SchedulerOutput."""
        table = SimpleNamespace(
            get_block_ids=lambda name: tuple(list(one) for one in self.requests[name].tables),
            boundary_state_offloads=self._offers(scheduled),
        )
        preempted, self.preempted = self.preempted, []
        return SimpleNamespace(
            num_scheduled_tokens=scheduled,
            kv_connector_block_state=table,
            preempted_req_ids=set(preempted),
        )

    def _end_step(self, worker: ConnectorWorker, plan: StepPlan) -> FinishedTransfers:
        worker.save(plan)
        return worker.finished(plan)

    def _offers(self, scheduled: dict[str, int]) -> dict[str, list[tuple[int, int, int]]]:
        """States at the ends of chunks, as vLLM hands them over."""
        offers: dict[str, list[tuple[int, int, int]]] = {}
        for name, count in scheduled.items():
            request = self.requests[name]
            end = request.num_computed_tokens + count
            if end % PAGE_TOKENS == 0 and end <= request.num_tokens:
                offers[name] = [
                    (group, request.tables[group][end // PAGE_TOKENS - 1], end)
                    for group, kind in enumerate(self.kinds)
                    if kind == "state"
                ]
        return offers

    def _chunk(self, request: ToyRequest, budget: int) -> int:
        """Tokens of the next step; where there are states, chunks end at the ends of pages."""
        start, tokens = request.num_computed_tokens, request.num_tokens
        end = min(start + budget, tokens)
        if "state" in self.kinds:
            last = (tokens - 1) // PAGE_TOKENS * PAGE_TOKENS
            if start < last < end:
                end = last
            elif end < tokens:
                end = max(end // PAGE_TOKENS * PAGE_TOKENS, start)
            if start % PAGE_TOKENS:
                end = min(end, (start // PAGE_TOKENS + 1) * PAGE_TOKENS)
        return end - start

    def _schedule(self) -> dict[str, int]:
        budget, scheduled = self.budget, {}
        for request in list(self.running):
            count = self._chunk(request, budget)
            if request not in self.running or not count:
                continue
            if not self._room(request, request.num_computed_tokens + count, preempt=True):
                continue
            scheduled[request.request_id] = count
            budget -= count
        for request in [one for one in self.waiting if one.status == "waiting"]:
            if not budget:
                break
            if not self.running:
                self._make_way(request)
            if not self._admit(request):
                continue
            if request.status == "loading":
                continue
            count = self._chunk(request, budget)
            if not count:
                continue
            if not self._room(request, request.num_computed_tokens + count, preempt=False):
                break
            self.waiting.remove(request)
            self.running.append(request)
            request.status = "running"
            scheduled[request.request_id] = count
            budget -= count
        return {name: count for name, count in scheduled.items() if name in self._running_names()}

    def _make_way(self, request: ToyRequest) -> None:
        """Nothing runs: no other request may hold pages that this one needs. vLLM reserves."""
        need = self._pages_of(request.num_tokens + 1) * len(self.kinds)
        need -= sum(page != NULL for table in request.tables for page in table)
        holders = [one for one in self.waiting if one.tables and one.status == "waiting"]
        for other in reversed(holders):
            if other is not request and need > len(self.pool.free):
                self._free(other)

    def _free(self, request: ToyRequest) -> None:
        for table in request.tables:
            self.pool.give_back(table)
        request.tables, request.num_computed_tokens = [], 0

    def _running_names(self) -> set[str]:
        return {request.request_id for request in self.running}

    @staticmethod
    def _pages_of(tokens: int) -> int:
        return -(-tokens // PAGE_TOKENS)

    def _admit(self, request: ToyRequest) -> bool:
        """Prefix hits of a request that has nothing computed; False if there is no room."""
        if request.num_computed_tokens:
            return True
        local = self._local_hit(request)
        external = self.side.match(request, local)
        if external is None:
            self.waits += 1
            return False
        assert 0 <= external <= request.num_tokens - local
        total = local + external
        tables, need, unused = [], 0, 0
        for group, kind in enumerate(self.kinds):
            skipped = first_token(kind, total) // PAGE_TOKENS
            have = [
                NULL if at < skipped else self._known(request, group, at)
                for at in range(local // PAGE_TOKENS)
            ]
            have += [NULL] * (skipped - len(have))
            tables.append(have)
            need += self._pages_of(total) - len(have)
            unused += sum(1 for page in have if page != NULL and not self.pool.users[page])
        if need + len(self.kinds) > len(self.pool.free) - unused:
            return False
        for table in tables:
            for page in table:
                self.pool.share(page)
        for table in tables:
            table += [self.pool.take() for _ in range(self._pages_of(total) - len(table))]
        request.tables = tables
        request.num_computed_tokens = total
        self.side.allocated(request.request_id, request.tables, external)
        if external:
            assert sum(self.side.sources(request.request_id, external).values()) == external
            request.status = "loading"
            request.loaded_tokens = local
            self.recv_left[request.request_id] = len(self.workers)
        return True

    def _known(self, request: ToyRequest, group: int, at: int) -> int:
        """The page of a prefix that the pool still has; NULL if none."""
        prefix = tuple(request.all_token_ids[: (at + 1) * PAGE_TOKENS])
        return self.pool.known.get((group, request.cache_salt or "", prefix), NULL)

    def _local_hit(self, request: ToyRequest) -> int:
        """Tokens of the longest prefix from which all groups can go on."""
        for pages in range((request.num_tokens - 1) // PAGE_TOKENS, 0, -1):
            if all(
                self._known(request, group, at)
                for group, kind in enumerate(self.kinds)
                for at in range(first_token(kind, pages * PAGE_TOKENS) // PAGE_TOKENS, pages)
            ):
                return pages * PAGE_TOKENS
        return 0

    def _room(self, request: ToyRequest, tokens: int, *, preempt: bool) -> bool:
        """Pages for this many tokens; pages behind windows and old states are freed first."""
        request.tables = request.tables or [[] for _ in self.kinds]
        for kind, table in zip(self.kinds, request.tables, strict=True):
            last = first_token(kind, request.num_computed_tokens) // PAGE_TOKENS
            self.pool.give_back(table[:last])
            table[:last] = [NULL] * min(last, len(table))
        need = sum(self._pages_of(tokens) - len(table) for table in request.tables)
        if not preempt and need > len(self.pool.free):
            return False
        for kind, table in zip(self.kinds, request.tables, strict=True):
            while len(table) < self._pages_of(tokens):
                if kind == "state" and len(table) + 1 < self._pages_of(tokens):
                    table.append(NULL)
                elif self.pool.free:
                    table.append(self.pool.take())
                else:
                    victim = self.running[-1]
                    self._preempt(victim)
                    if victim is request:
                        return False
        return True

    def _preempt(self, request: ToyRequest) -> None:
        self.running.remove(request)
        self._free(request)
        request.status = "waiting"
        self.waiting.insert(0, request)
        self.preemptions += 1
        self.preempted.append(request.request_id)

    def _values(self, request: ToyRequest, position: int) -> float:
        tokens = request.all_token_ids[: position + 1]
        return float(state_of(tokens, self.weights + (request.cache_salt or "")))

    def _compute(self, request: ToyRequest, count: int) -> None:
        """Look at all pages that attention would read, then write the new tokens'."""
        computed = request.num_computed_tokens
        for group, kind in enumerate(self.kinds):
            for position in range(first_token(kind, computed), computed):
                slot = 0 if kind == "state" else position % PAGE_TOKENS
                self._look(request, group, position, slot)
        for group, kind in enumerate(self.kinds):
            for position in range(computed, computed + count):
                if kind != "state":
                    self._write(request, group, position, position % PAGE_TOKENS)
            if kind == "state":
                self._write(request, group, computed + count - 1, 0)
        self.computed_tokens += count

    def _look(self, request: ToyRequest, group: int, position: int, slot: int) -> None:
        page = request.tables[group][position // PAGE_TOKENS]
        want = self._values(request, position) + 100 * group
        for heads, caches in zip(self.heads, self.caches, strict=True):
            for layer, cache in caches.items():
                row = cache[page, :, slot]
                found = [(float(head[0]), float(head[-1])) for head in row]
                where = (request.request_id, group, position, found)
                wanted = [want + layer + 7 * head for head in heads]
                assert found == [(each, each) for each in wanted], where

    def _write(self, request: ToyRequest, group: int, position: int, slot: int) -> None:
        page = request.tables[group][position // PAGE_TOKENS]
        value = self._values(request, position) + 100 * group
        assert page != NULL
        for heads, caches in zip(self.heads, self.caches, strict=True):
            for layer, cache in caches.items():
                for at, head in enumerate(heads):
                    cache[page, at, slot] = value + layer + 7 * head

    def _sample(self, request: ToyRequest | None, count: int) -> None:
        if request is None:
            return
        request.num_computed_tokens += count
        self._remember(request, request.num_computed_tokens)
        if request.num_computed_tokens < request.num_tokens:
            return
        salt = self.weights + (request.cache_salt or "")
        request.all_token_ids.append(state_of(request.all_token_ids, salt) % VOCABULARY)
        if request.is_over:
            self.running.remove(request)
            self._finish(request)

    def _remember(self, request: ToyRequest, tokens: int) -> None:
        """Complete pages can be found by others from now on."""
        for count in range(1, tokens // PAGE_TOKENS + 1):
            prefix = tuple(request.all_token_ids[: count * PAGE_TOKENS])
            for group, table in enumerate(request.tables):
                self.pool.name(table[count - 1], (group, request.cache_salt or "", prefix))

    def _finish(self, request: ToyRequest, *, loading: bool = False) -> None:
        keep = self.side.finish(request, request.tables or [[] for _ in self.kinds])
        del self.requests[request.request_id]
        self.done[request.request_id] = request
        request.status = "over"
        if keep or loading:
            self.held[request.request_id] = request.tables
            self.sent_left[request.request_id] = len(self.workers)
        else:
            self._free(request)

    def _failed(self, names: set[str]) -> None:
        """vLLM computes a request from the start if it has nothing of its load."""
        for request in self.waiting:
            if request.request_id in names and request.status == "loading":
                request.num_computed_tokens = 0
                self.failed_loads += 1

    def _truncate(self, invalid: set[int]) -> None:
        """vLLM takes a request back to its first page that could not be loaded."""
        for request in self.waiting:
            if request.status == "loading":
                last = self._pages_of(request.num_computed_tokens)
                bad = [at for at in range(last) if request.tables[0][at] in invalid]
                if bad:
                    request.num_computed_tokens = bad[0] * PAGE_TOKENS

    def _moved(self, sent: set[str], received: set[str]) -> None:
        for name in received:
            self.recv_left[name] -= 1
            if self.recv_left[name]:
                continue
            del self.recv_left[name]
            self.side.step_ended(None, loaded=[name])
            if name in self.held:
                self._release(name)
                continue
            self._loaded(self.requests[name])
        for name in sent:
            self.sent_left[name] -= 1
            if not self.sent_left[name]:
                self.side.step_ended(None, saved=[name])
                self._release(name)

    def _release(self, name: str) -> None:
        for table in self.held.pop(name):
            self.pool.give_back(table)

    def _loaded(self, request: ToyRequest) -> None:
        request.status = "waiting"
        if not request.num_computed_tokens:
            self._free(request)
            return
        self._remember(request, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1


def prompts(chance: random.Random, count: int) -> list[list[int]]:
    """Prompts that share beginnings."""
    trunk = [chance.randrange(VOCABULARY) for _ in range(60)]
    found = []
    for _ in range(count):
        shared = chance.randrange(0, len(trunk))
        own = chance.randrange(1, 20)
        found.append(trunk[:shared] + [chance.randrange(VOCABULARY) for _ in range(own)])
    return found


def ask(engine: ToyEngine, name: str, prompt: list[int], count: int = 3, **more: Any) -> int:
    """Serve one prompt alone; check the answer; how many tokens were computed for it."""
    before = engine.computed_tokens
    engine.add(ToyRequest(name, list(prompt), count, **more))
    engine.run()
    salt = more.get("cache_salt") or ""
    assert engine.done[name].answer == answer_of(prompt, count, engine.weights + salt)
    return engine.computed_tokens - before


def forget_local(engine: ToyEngine) -> None:
    """Empty the engine's own prefix cache."""
    engine.pool.known.clear()
    engine.pool.names.clear()
    engine.side.weights.cache_was_emptied()


class Toys:
    """Opens depots in a folder, and toy engines over them. `close` closes what is still open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: list[Store | ToyEngine] = []

    def settings(self, dram: Any = 8 << 20, **ssd: Any) -> dict[str, Any]:
        place = {"path": str(self.folder / "kv"), "capacity": "64MiB", "segment": "1MiB"}
        memory = {"capacity": dram, "huge_pages": "never", "prefault": False}
        return {"dram": memory, "writeback": {"staging": 4 << 20}, "ssd": {**place, **ssd}}

    def store(self, files: Files | None = None, **settings: Any) -> Store:
        """A depot with an SSD tier; `settings` are its, or `dram`."""
        return self._opened_store(self.settings(**settings), files)

    def depot(self, dram: Any = 8 << 20, **tiers: Any) -> Store:
        """A depot with these tiers below its memory."""
        return self._opened_store({**self.settings(dram), "ssd": None, **tiers}, None)

    def _opened_store(self, settings: dict[str, Any], files: Files | None) -> Store:
        store = assemble(load(overrides=settings), files=files)
        self._opened.append(store)
        return store

    def engine(
        self, store: Store | None = None, *, settings: Any = None, **facts: Any
    ) -> ToyEngine:
        config = ConnectorConfig(**{"load_timeout": 20.0, "decide": False, **(settings or {})})
        engine = ToyEngine(store or self.store(), config, **facts)
        self._opened.append(engine)
        return engine

    def saved(self, store: Store | None = None, **more: Any) -> ToyEngine:
        """An engine that has computed and saved PROMPT, and has forgotten it."""
        engine = self.engine(store, **more)
        assert ask(engine, "cold", PROMPT) == ALL
        forget_local(engine)
        return engine

    def restarted(self, files: Files | None = None, **more: Any) -> ToyEngine:
        """An engine that was started after one had saved PROMPT."""
        self.saved(**more).close()
        return self.engine(self.store(files), **more)

    def close(self) -> None:
        for opened in reversed(self._opened):
            opened.close()


def answer_at_random(engine: ToyEngine, chance: random.Random, count: int, forgets: float) -> None:
    """Requests come, some are aborted, vLLM forgets its own hits now and then: each answer is right
    as far as it goes, and no page is held afterwards.
    """
    pages = len(engine.pool.free)
    wanted = {}
    for number, prompt in enumerate(prompts(chance, count)):
        name, salt = f"r{number}", chance.choice(["", "", "s"])
        tokens = chance.randrange(1, 16)
        wanted[name] = (prompt, tokens, salt)
        engine.add(ToyRequest(name, list(prompt), tokens, cache_salt=salt or None))
        for _ in range(chance.randrange(6)):
            engine.step()
        if chance.random() < 0.2:
            engine.abort(chance.choice(list(wanted)))
        if chance.random() < forgets:
            forget_local(engine)
    engine.run()
    for name, (prompt, tokens, salt) in wanted.items():
        said = engine.done[name].answer
        assert said == answer_of(prompt, tokens, salt)[: len(said)]
    assert not engine.held
    assert sorted(engine.pool.free) == list(range(1, 1 + pages))
