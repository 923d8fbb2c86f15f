"""An HTTP proxy before an unmodified llama-server that gives its slots back what they have lost.

Every request is passed on, and every answer as it comes. Of a completion the prompt is tokenized by
the server; the longest prefix that the depot has is written to a slot file and restored, and the
request names that slot. Afterwards the slot is saved and its new blocks are stored. Whatever fails
of this, the request is passed on as it came.

Users are told apart by their API keys. Each has a namespace of the depot for each set of scales of
the server's LoRAs. A request uses what is in a slot only if the same user left it there, and on a
server with LoRAs only what has just been restored to the slot.
"""

import contextlib
import hashlib
import http.client
import json
import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from kvdepot.adapters.llama_cpp.blocks import SequenceBlocks
from kvdepot.adapters.llama_cpp.sequence_state import (
    Tokens,
    read_slot_file,
    read_slot_tokens,
    slot_file_head,
)
from kvdepot.adapters.llama_cpp.server_link import (
    SLOT_FILE,
    LinkSettings,
    LlamaServerLink,
    ServedModel,
    read_timing,
    recognise,
)
from kvdepot.adapters.llama_cpp.slots import Owner, Slot, common
from kvdepot.adapters.prefill_report import PrefillReport
from kvdepot.core.depot import Depot
from kvdepot.core.private import make_private_folder, open_private_file
from kvdepot.errors import KVDepotError, ModelError
from kvdepot.policy.fetching.speed_models import attention_work

_logger = logging.getLogger("kvdepot.llama")
CHAT: Final = frozenset({"/v1/chat/completions", "/chat/completions"})
COMPLETION: Final = frozenset({"/completion", "/completions", "/v1/completions"})
_SLOTLESS: Final = frozenset({"/apply-template", "/detokenize", "/lora-adapters", "/tokenize"})
"""Requests that use no slot. Completions are sent with their own scales of LoRAs: a change by
`/lora-adapters` does not concern those that are under way."""
_LOOK_S: Final = 0.25
_RETRY_S: Final = 10.0
_DRAIN_S: Final = 2.0
"""How long requests wait for those that are under way, so that a server can be recognised."""
_LAUNCH_LOOK_S: Final = 0.02
_SAVERS: Final = 64
_FORGOTTEN_S: Final = 1.0
"""A save that has not begun so long after its request is asked for again: llama-server puts one off
while its slot is busy, and may forget it when several slots end together."""
_SAVE_LIMIT_S: Final = 60.0
_TELL_LIMIT_S: Final = 10.0
_RECOGNISE_S: Final = 10.0
"""How long a request waits for a server that has just started to be recognised."""
FAILURES: Final = (
    OSError,
    http.client.HTTPException,
    KVDepotError,
    ValueError,
    KeyError,
    TypeError,
    OverflowError,
    RecursionError,
)
"""What may go wrong between the proxy, the server and the depot: the request goes on without."""


@dataclass
class ProxyCounters:
    """What has happened since the proxy was started."""

    requests: int = 0
    completions: int = 0
    restored: int = 0
    restored_tokens: int = 0
    saved_slots: int = 0
    stored_blocks: int = 0
    failed: int = 0
    """Requests that went on without the depot because something failed."""
    last_failure: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **more: int) -> None:
        with self.lock:
            for name, count in more.items():
                setattr(self, name, getattr(self, name) + count)

    def fail(self, what: str, error: BaseException) -> None:
        with self.lock:
            self.failed += 1
            self.last_failure = f"{what}: {error}"
        _logger.warning("%s: %s", what, error)

    def as_dict(self) -> dict[str, Any]:
        with self.lock:
            return {name: value for name, value in vars(self).items() if name != "lock"}


@dataclass(slots=True)
class Prepared:
    """A request that has a slot."""

    served: ServedModel
    owner: Owner
    blocks: SequenceBlocks
    """The owner's."""
    slot: Slot
    tokens: Tokens
    body: bytes
    """The request with the slot named."""
    restored: int
    """Tokens that the depot gave the slot."""
    took_s: float
    """To look them up and to restore them."""
    alone: bool
    """The server has no other request."""
    reuses: bool
    """It may use what is in the slot."""
    mixed: bool = False
    """Its slot may have KV of other LoRAs."""
    ended: threading.Event = field(default_factory=threading.Event)
    """The client has its answer, or is gone."""
    ended_s: float = math.inf
    """When."""


class LlamaProxy:
    """Requests on their way to a server, and blocks on their way to and from a depot."""

    def __init__(self, settings: LinkSettings, depot: Depot) -> None:
        make_private_folder(settings.slots)
        for left in settings.slots.glob(f"{SLOT_FILE}*.bin"):
            left.unlink(missing_ok=True)
        self.link = LlamaServerLink(settings)
        self.counters = ProxyCounters()
        self._depot = depot
        self._served: ServedModel | None = None
        self.reason = "llama-server has not answered yet"
        """Why there is no `_served`."""
        self._changed = threading.Condition()
        self._under_way = 0
        """Requests that the server has; no probe meanwhile. `_changed` guards it."""
        self._probing = False
        self._users: set[bytes] = set()
        """The first two users of slots. `_changed` guards it."""
        self._seen: frozenset[int] = frozenset()
        """The sockets of the run of the server that was looked at last, since `_seen_s`; `_tried`:
        it is known whether that run can be served."""
        self._seen_s = 0.0
        self._tried: frozenset[int] = frozenset()
        self._reports: dict[bytes, PrefillReport] = {}
        """Of the models that were served, by their namespace."""
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._savers = ThreadPoolExecutor(_SAVERS, "kvdepot-llama-save")
        self._watch = threading.Thread(target=self._watch_server, name="kvdepot-llama-watch")
        self._watch.start()

    def close(self) -> None:
        """Store what was asked for, then stop."""
        self._closed.set()
        self._wake.set()
        self._watch.join()
        self._savers.shutdown()
        for report in self._reports.values():
            report.teller.wait(_TELL_LIMIT_S)

    def status(self) -> dict[str, Any]:
        served = self._served
        ready = served is not None and not served.spoiled
        reason = self.reason if served is None else served.spoiled
        space = served.blocks.space if served is not None else None
        return {
            "ready": ready,
            "reason": reason,
            "model": space.namespace.model if space else "",
            "block_tokens": self.link.settings.block_tokens,
            "block_bytes": space.block_bytes if space else 0,
            **self.counters.as_dict(),
            **self._audits(served.blocks.tags if served is not None else []),
        }

    def _audits(self, tags: list[bytes]) -> dict[str, Any]:
        """What the depot knows of audits; `quarantined`: nothing of this model is served, to at
        least one user."""
        try:
            known = self._depot.audits.known()
        except KVDepotError:
            return {}
        return {
            "audited_blocks": known["compared"],
            "mismatched_blocks": known["mismatched"],
            "quarantined": any(
                bytes.fromhex(one["namespace"]) in tags for one in known["quarantined"]
            ),
        }

    def _watch_server(self) -> None:
        """Recognise the server whenever it was started anew."""
        retry_s = _LOOK_S
        while not self._closed.is_set():
            served = self._served
            sockets = self.link.listening()
            if sockets and (served is None or served.sockets != sockets):
                self._recognise(sockets)
                retry_s = _LOOK_S if self._served else min(2 * retry_s, _RETRY_S)
            self._wake.wait(retry_s)
            self._wake.clear()

    def _recognise(self, sockets: frozenset[int]) -> None:
        with self._changed:
            self._served = None
            if self._seen != sockets:
                self._seen, self._seen_s = sockets, time.monotonic()
        found, reason = None, ""
        try:
            found = recognise(self.link, self._depot, self._quiet)
            _logger.info("llama-server serves %s", found.blocks.space.namespace.model)
        except FAILURES as error:
            reason = str(error) or type(error).__name__
            if reason != self.reason:
                hint = getattr(error, "hint", "")
                _logger.warning("passing on only: %s%s", reason, f"; hint: {hint}" * bool(hint))
        with self._changed:
            self._served, self.reason, self._tried = found, reason, sockets
            self._changed.notify_all()

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """The time of a probe: no request is under way, and new ones wait."""
        with self._changed:
            self._probing = True
            idle = self._changed.wait_for(lambda: not self._under_way, _DRAIN_S)
        try:
            if not idle:
                raise ModelError("llama-server is busy; the probe waits")
            yield
        finally:
            with self._changed:
                self._probing = False
                self._changed.notify_all()

    def served(self) -> ServedModel | None:
        """What the server is, if that is known."""
        served = self._served
        if served is None or served.spoiled or served.sockets != self.link.listening():
            return None
        return served

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """The time in which the server has a request. Waits for the end of a probe, and a little
        for a server that has just started to be recognised."""
        sockets = self.link.listening()
        with self._changed:
            if sockets and sockets != self._tried:
                self._wake.set()
                fresh_s = time.monotonic() - self._seen_s if sockets == self._seen else 0.0
                left_s = max(0.0, _RECOGNISE_S - fresh_s)
                self._changed.wait_for(lambda: sockets == self._tried, left_s)
            self._changed.wait_for(lambda: not self._probing, _RECOGNISE_S)
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def keep_apart(self, key: bytes, body: bytes) -> bytes:
        """The body of a request that the server gives a slot of its own choice. Once the proxy has
        seen a second user such a request uses nothing that is in the slot."""
        with self._changed:
            if len(self._users) < 2:
                self._users.add(user_of(key))
            several = len(self._users) > 1
        if several:
            with contextlib.suppress(ValueError, RecursionError):
                request = json.loads(body)
                if isinstance(request, dict):
                    return json.dumps({**request, "cache_prompt": False}).encode()
        return body

    def disturb(self, path: str, key: bytes) -> None:
        """A request is passed on for which the server chooses the slot. On a server with LoRAs the
        scales that the request is computed with are not known."""
        served = self._served
        if served is not None and path not in _SLOTLESS:
            served.slots.disturb(None if served.adapters else Owner(user_of(key)))

    def prepare(self, path: str, body: bytes, key: bytes) -> Prepared | None:
        """Give a completion its slot, with the longest known prefix in it; None: pass it on as it
        is. What fails is counted. `key` is the API key of the request."""
        served = self.served()
        if served is None:
            return None
        slot: Slot | None = None
        tokens: Tokens = np.zeros(0, np.int32)
        began_s = time.monotonic()
        try:
            request = json.loads(body)
            if not _has_one_prompt(request):
                return None
            tokens = self._tokenize(path, request, key)
            owner = Owner(user_of(key), served.adapters.in_force(self.link, request))
            blocks = served.blocks_of(owner)
            slot = served.slots.take(tokens, owner)
            served.slots.begin_launch(slot)
            if served.adapters:
                # The server's own caches may have put KV of other LoRAs there.
                slot.tokens = tokens[:0]
            restored = self._restore(served, owner, blocks, slot, tokens)
            own = served.slots.leave(slot, slot.tokens, owner) and len(slot.tokens) > 0
            named = {
                **request,
                **served.adapters.pinned(owner.scales),
                "id_slot": slot.number,
                "n_cache_reuse": 0,
                "cache_prompt": own,
            }
        except FAILURES as error:
            self.counters.fail("a request goes on without the depot", error)
            if slot is not None:
                slot.tokens = tokens[:0]
                served.slots.end_launch(slot)
                served.slots.free(slot)
            return None
        self.counters.add(completions=1)
        body, took_s = json.dumps(named).encode(), time.monotonic() - began_s
        alone = self._under_way <= 1
        return Prepared(served, owner, blocks, slot, tokens, body, restored, took_s, alone, own)

    def launched(self, ready: Prepared, answered: Callable[[], bool]) -> None:
        """The server has been sent a request: wait until it has begun, where that would empty other
        slots, and have the slot saved when it is done."""
        slots, slot = ready.served.slots, ready.slot
        try:
            while slots.is_launching(slot) and not answered():
                found = self.link.call("/slots", timeout_s=_RECOGNISE_S)
                if any(one["id"] == slot.number and one["is_processing"] for one in found):
                    break
                self._closed.wait(_LAUNCH_LOOK_S)
        except FAILURES as error:
            _logger.debug("whether a request has begun is not known: %s", error)
        slots.end_launch(slot)
        if self._may_add(ready):
            slots.hold(slot)
            self._savers.submit(self._save, ready)

    def _may_add(self, ready: Prepared) -> bool:
        """Whether a request may fill a block that the depot lacks."""
        blocks = ready.blocks
        request = json.loads(ready.body)
        limits = [
            request.get(name) for name in ("n_predict", "max_tokens", "max_completion_tokens")
        ]
        most = min((one for one in limits if isinstance(one, int) and one >= 0), default=None)
        # The last token that is generated is not in the cache.
        total = None if most is None else len(ready.tokens) + max(0, most - 1)
        size = blocks.block_tokens
        return total is None or total // size > blocks.known(ready.tokens) // size

    def _tokenize(self, path: str, request: dict[str, Any], key: bytes) -> Tokens:
        """The tokens of a prompt. The server is asked with the API key of the request, also about a
        prompt of tokens: for a key that it refuses no namespace is made."""
        link = LlamaServerLink(replace(self.link.settings, api_key=key.decode("latin-1")))
        prompt = link.call("/apply-template", request) if path in CHAT else request
        text = prompt["prompt"]
        tokens = link.tokenize(text if isinstance(text, str) else "")
        return np.asarray(tokens if isinstance(text, str) else text, np.int32)

    def _restore(
        self,
        served: ServedModel,
        owner: Owner,
        blocks: SequenceBlocks,
        slot: Slot,
        tokens: Tokens,
    ) -> int:
        """Bring a longer prefix into a slot than it has, if the depot knows one; its tokens."""
        warm = common(slot.tokens, tokens)
        if blocks.known(tokens) < warm + blocks.block_tokens:
            return 0
        if slot.scales != owner.scales:
            pinned = served.adapters.pinned(owner.scales)
            self.link.choose_adapters(slot.number, int(tokens[0]), pinned)
        with self.link.slot_file() as path, contextlib.ExitStack() as mapped:

            def make(cells: int, nbytes: int) -> memoryview:
                head = slot_file_head(blocks.layout, tokens[:cells])
                flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
                file = mapped.enter_context(os.fdopen(open_private_file(path, flags), "r+b"))
                os.truncate(file.fileno(), len(head) + nbytes)
                file.write(head)
                file.flush()
                return memoryview(mmap.mmap(file.fileno(), 0))[len(head) :]

            busy = self._under_way > 1
            cells = blocks.load(tokens, served.streams, make, busy=busy)
            if not cells:
                return 0
            slot.tokens = tokens[:0]
            answer = self.link.slot_action(slot.number, "restore", path.name, served.sockets)
        if answer.get("n_restored") != cells:
            raise ModelError(f"llama-server restored {answer.get('n_restored')} of {cells} tokens")
        slot.tokens = tokens[:cells]
        self.counters.add(restored=1, restored_tokens=cells)
        return cells

    def finish(self, ready: Prepared, tail: bytes, *, good: bool) -> None:
        """A request has ended; its slot is free when it is saved."""
        self.look_for_shift(ready.served, tail)
        ready.mixed = bool(ready.served.adapters) and not (good and _is_pure(ready, tail))
        left = ready.tokens if good else ready.tokens[:0]
        ready.served.slots.leave(ready.slot, left, ready.owner)
        ready.served.slots.end_launch(ready.slot)
        ready.ended_s = time.monotonic()
        ready.ended.set()
        ready.served.slots.free(ready.slot)
        if good and ready.alone and self._under_way <= 1:
            self._tell_timing(ready, tail)

    def _tell_timing(self, ready: Prepared, tail: bytes) -> None:
        """What the server says of a prompt that it had to itself: others wait for each other."""
        timing = read_timing(tail)
        if timing is None or timing.prompt_s is None:
            return
        blocks = ready.served.blocks
        tag = blocks.space.tag
        with self._changed:
            if tag not in self._reports:
                self._reports[tag] = PrefillReport(self._depot, blocks.tags, _logger)
            report = self._reports[tag]
        work = attention_work(timing.computed, timing.cached)
        report.observe(timing.computed, work, timing.prompt_s)
        whole = timing.computed + timing.cached
        if 0 < ready.restored <= whole:
            report.answered(whole, ready.restored, ready.took_s + timing.prompt_s)

    def look_for_shift(self, served: ServedModel | None, tail: bytes) -> None:
        """An answer that is longer than the context moved KV to other positions."""
        timing = read_timing(tail)
        if served is None or timing is None:
            return
        if timing.computed + timing.cached + timing.predicted > served.slot_tokens:
            served.spoiled = "llama-server shifts contexts: start it without --context-shift"
            _logger.warning("passing on only: %s", served.spoiled)

    def _save(self, ready: Prepared) -> None:
        """Store a slot's new blocks. The server saves a slot when its request has ended."""
        served, slot = ready.served, ready.slot
        try:
            with contextlib.ExitStack() as files:
                try:
                    content = self._save_when_done(ready, files)
                    ready.ended.wait()
                    tokens, state = read_slot_file(content)
                    if common(tokens, ready.tokens) < min(len(tokens), len(ready.tokens)):
                        raise ModelError("another client has used the slot")
                    saved = np.array(tokens)
                    if not served.slots.leave(slot, saved, ready.owner):
                        raise ModelError("another request may have used the slot")
                finally:
                    ready.ended.wait()
                    served.slots.free(slot)
                usable = not ready.mixed and not served.spoiled
                stored = ready.blocks.store(saved, state) if usable else 0
            self.counters.add(saved_slots=1, stored_blocks=stored)
        except FAILURES as error:
            self.counters.fail("a slot was not stored", error)

    def _save_when_done(self, ready: Prepared, files: contextlib.ExitStack) -> Any:
        """The slot's file, saved after the request: one that came before it is not enough."""
        patience_s = _FORGOTTEN_S
        if not ready.reuses:
            # Until the request begins, the slot has KV of another owner, perhaps of equal tokens.
            ready.ended.wait()
        while True:
            ended, asked_s = ready.ended.is_set(), time.monotonic()
            # One file for each try: a save that was given up may still be written.
            path = files.enter_context(self.link.slot_file())

            def forgotten(since_s: float = asked_s, limit_s: float = patience_s) -> bool:
                return time.monotonic() - max(since_s, ready.ended_s) > limit_s

            try:
                content = self.link.save_slot(
                    ready.slot.number, path, ready.served.sockets, forgotten
                )
            except TimeoutError:
                if patience_s > _SAVE_LIMIT_S:
                    raise
                patience_s *= 2
                continue
            tokens = read_slot_tokens(content)
            if ended or common(tokens, ready.tokens) == len(ready.tokens):
                return content
            ready.ended.wait(_LAUNCH_LOOK_S)


def user_of(key: bytes) -> bytes:
    """A digest of an API key, which names its user; empty for requests without a key."""
    return hashlib.blake2b(key, digest_size=32, person=b"kvdepot-llama").digest() if key else b""


def _is_pure(ready: Prepared, tail: bytes) -> bool:
    """Whether the server has used no KV but what the depot gave the slot: it may put a prompt from
    a cache of its own in the place of what was restored."""
    timing = read_timing(tail)
    return not ready.restored or (timing is not None and timing.cached <= ready.restored)


def _has_one_prompt(request: object) -> bool:
    """Whether a request is one that gets a slot: one prompt of text or tokens, one answer, and no
    wish of its own about slots."""
    if not isinstance(request, dict) or request.get("cache_prompt", True) is not True:
        return False
    if request.get("id_slot", -1) != -1 or request.get("n", 1) != 1:
        return False
    if request.get("n_cmpl", 1) != 1:
        return False
    if "messages" in request:
        return not _has_media(request["messages"])
    prompt = request.get("prompt")
    if isinstance(prompt, str):
        return True
    return isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt)


def _has_media(messages: object) -> bool:
    if not isinstance(messages, list):
        return True
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else []
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in parts):
            return True
    return False
