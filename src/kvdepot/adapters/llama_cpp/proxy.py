"""An HTTP proxy before an unmodified llama-server, which restores the KV of prompts to its slots.

Every request is passed on, and every answer as it arrives. For a completion the server tokenizes
the prompt, the longest prefix that the depot has is written to a slot file and restored, and the
request names that slot. Afterwards the slot is saved, and its new blocks are stored. If any of this
fails, the request is passed on unchanged.

Users are distinguished by their API keys. Each has a namespace for each set of scales of the
server's LoRAs. A request uses KV in a slot only if the same user left it there, and on a server
with LoRAs only what has just been restored to the slot.
"""

import contextlib
import hashlib
import json
import math
import mmap
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from kvdepot.adapters.llama_cpp.blocks import LOG, SequenceBlocks
from kvdepot.adapters.llama_cpp.sequence_state import (
    Tokens,
    read_slot_file,
    read_slot_tokens,
    slot_file_head,
)
from kvdepot.adapters.llama_cpp.server_link import (
    SLOT_FILE,
    KeyRefusedError,
    LinkSettings,
    LlamaServerLink,
    read_timing,
)
from kvdepot.adapters.llama_cpp.server_watch import FAILURES, ServedModel, ServerWatch
from kvdepot.adapters.llama_cpp.slots import Owner, Slot, common
from kvdepot.adapters.prefill_report import PrefillReport
from kvdepot.core.private import make_private_folder, open_private_file
from kvdepot.depot import Depot
from kvdepot.errors import KVDepotError, ModelError
from kvdepot.policy.fetching.speed_models import attention_work

CHAT: Final = frozenset({"/v1/chat/completions", "/chat/completions"})
COMPLETION: Final = frozenset({"/completion", "/completions", "/v1/completions"})
_SLOTLESS: Final = frozenset({"/apply-template", "/detokenize", "/lora-adapters", "/tokenize"})
"""Requests that use no slot. Completions are sent with their own scales of LoRAs: a change by
`/lora-adapters` does not affect those in progress."""
_LAUNCH_LOOK_S: Final = 0.02
_SLOTS_S: Final = 10.0
_SAVERS: Final = 64
_FORGOTTEN_S: Final = 1.0
"""A save that has not begun this long after its request is requested again: llama-server puts a
save off while its slot is busy, and may forget it if several slots end together."""
_SAVE_LIMIT_S: Final = 60.0
_REPORT_LIMIT_S: Final = 10.0
_ACCEPTED_S: Final = 60.0
_ACCEPTED_MAX: Final = 1024


@dataclass
class ProxyCounters:
    """Counters since the start of the proxy."""

    requests: int = 0
    completions: int = 0
    restored: int = 0
    restored_tokens: int = 0
    saved_slots: int = 0
    stored_blocks: int = 0
    failed: int = 0
    """Requests that continued without the depot because something failed."""
    last_failure: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **more: int) -> None:
        with self.lock:
            for name, count in more.items():
                setattr(self, name, getattr(self, name) + count)

    def fail(self, text: str, error: BaseException) -> None:
        with self.lock:
            self.failed += 1
            self.last_failure = f"{text}: {error}"
        LOG.warning("%s: %s", text, error)

    def as_dict(self) -> dict[str, Any]:
        with self.lock:
            return {name: value for name, value in vars(self).items() if name != "lock"}


@dataclass(slots=True)
class PreparedRequest:
    """A request that has a slot."""

    served: ServedModel
    owner: Owner
    blocks: SequenceBlocks
    """The owner's."""
    slot: Slot
    tokens: Tokens
    body: bytes
    """The request, which names the slot."""
    restored: int
    """Tokens that were restored to the slot."""
    took_s: float
    """The time of the lookup and of the restore."""
    alone: bool
    """The server has no other request."""
    reuses: bool
    """It may use the KV in its slot."""
    mixed: bool = False
    """Its slot may have KV of other LoRAs."""
    ended: threading.Event = field(default_factory=threading.Event)
    """The client has its answer, or has disconnected."""
    ended_s: float = math.inf


class LlamaProxy:
    """Prepares requests before they are sent to the server, and stores their slots afterwards."""

    def __init__(self, settings: LinkSettings, depot: Depot) -> None:
        make_private_folder(settings.slots)
        for left in settings.slots.glob(f"{SLOT_FILE}*.bin"):
            left.unlink(missing_ok=True)
        self.watch = ServerWatch(settings, depot)
        self.link = self.watch.link
        self.counters = ProxyCounters()
        self._depot = depot
        self._lock = threading.Lock()
        """Guards the three fields below."""
        self._users: set[bytes] = set()
        """The first two users of slots."""
        self._accepted: OrderedDict[bytes, float] = OrderedDict()
        """Users whose keys llama-server has accepted, and until when that counts."""
        self._reports: dict[bytes, PrefillReport] = {}
        """Reports by the tag of the model's namespace."""
        self._savers = ThreadPoolExecutor(_SAVERS, "kvdepot-llama-save")

    def close(self) -> None:
        """Store the slots of finished requests, then stop."""
        self.watch.close()
        self._savers.shutdown()
        for report in self._reports.values():
            report.reporter.wait(_REPORT_LIMIT_S)

    def status(self) -> dict[str, Any]:
        served = self.watch.latest
        space = served.blocks.space if served is not None else None
        audits: dict[str, Any] = {}
        with contextlib.suppress(KVDepotError):
            known, tags = self._depot.audits.list(), served.blocks.tags if served else []
            audits = {
                "audited_blocks": known["compared"],
                "mismatched_blocks": known["mismatched"],
                # Nothing of this model is served to at least one user.
                "quarantined": any(
                    bytes.fromhex(entry["namespace"]) in tags for entry in known["quarantined"]
                ),
            }
        return {
            "ready": served is not None and not served.spoiled,
            "reason": self.watch.reason if served is None else served.spoiled,
            "model": space.namespace.model if space else "",
            "block_tokens": self.link.settings.block_tokens,
            "block_bytes": space.block_bytes if space else 0,
            **self.counters.as_dict(),
            **audits,
        }

    def accepts(self, key: bytes) -> bool:
        """False if llama-server refuses this API key. It is asked once in _ACCEPTED_S; it checks
        the key of the request itself, too. Raises one of FAILURES if it does not answer."""
        user, now = user_of(key), time.monotonic()
        with self._lock:
            if self._accepted.get(user, now) > now:
                return True
        try:
            self._link_with(key).call("/tokenize", {"content": ""})
        except KeyRefusedError:
            return False
        with self._lock:
            self._accepted[user] = now + _ACCEPTED_S
            if len(self._accepted) > _ACCEPTED_MAX:
                self._accepted.popitem(last=False)
        return True

    def keep_apart(self, key: bytes, body: bytes) -> bytes:
        """The body for a request whose slot the server chooses. From the second user on such a
        request must not use the KV in the slot."""
        with self._lock:
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
        """A request is passed on whose slot the server chooses. On a server with LoRAs its scales
        are not known."""
        served = self.watch.latest
        if served is not None and path not in _SLOTLESS:
            served.slots.disturb(None if served.loras else Owner(user_of(key)))

    def prepare(self, path: str, body: bytes, key: bytes) -> PreparedRequest | None:
        """Give a completion a slot, with the longest known prefix in it. None: pass it on
        unchanged. `key` is the API key of the request. Failures are counted."""
        served = self.watch.served()
        if served is None:
            return None
        slot: Slot | None = None
        tokens: Tokens = np.zeros(0, np.int32)
        began_s = time.monotonic()
        try:
            request = json.loads(body)
            if not _can_have_slot(request):
                return None
            tokens = self._tokenize(path, request, key)
            owner = Owner(user_of(key), served.loras.scales_of(self.link, request))
            blocks = served.blocks_of(owner)
            slot = served.slots.take(tokens, owner)
            served.slots.begin_launch(slot)
            if served.loras:
                # The server's own caches may have put KV of other LoRAs there.
                slot.tokens = tokens[:0]
            restored = self._restore(served, owner, blocks, slot, tokens)
            reuses = served.slots.leave(slot, slot.tokens, owner) and len(slot.tokens) > 0
            named = {
                **request,
                **served.loras.options(owner.scales),
                "id_slot": slot.number,
                "n_cache_reuse": 0,
                "cache_prompt": reuses,
            }
        except FAILURES as error:
            self.counters.fail("a request continues without the depot", error)
            if slot is not None:
                slot.tokens = tokens[:0]
                served.slots.end_launch(slot)
                served.slots.free(slot)
            return None
        self.counters.add(completions=1)
        return PreparedRequest(
            served,
            owner,
            blocks,
            slot,
            tokens,
            json.dumps(named).encode(),
            restored,
            time.monotonic() - began_s,
            alone=not self.watch.is_busy,
            reuses=reuses,
        )

    def launched(self, ready: PreparedRequest, answered: Callable[[], bool]) -> None:
        """The request was sent. Wait until it has begun, if that would empty other slots, and have
        its slot saved when it has ended."""
        slots, slot = ready.served.slots, ready.slot
        try:
            while slots.is_launching(slot) and not answered():
                found = self.link.call("/slots", timeout_s=_SLOTS_S)
                if any(each["id"] == slot.number and each["is_processing"] for each in found):
                    break
                self.watch.pause(_LAUNCH_LOOK_S)
        except FAILURES as error:
            LOG.debug("cannot find out whether a request has begun: %s", error)
        slots.end_launch(slot)
        if _may_fill_block(ready):
            slots.hold(slot)
            self._savers.submit(self._save, ready)

    def _tokenize(self, path: str, request: dict[str, Any], key: bytes) -> Tokens:
        """The tokens of a prompt. The server is always asked, with the API key of the request: a
        key that it refuses gets no namespace."""
        link = self._link_with(key)
        prompt = (link.call("/apply-template", request) if path in CHAT else request)["prompt"]
        if isinstance(prompt, str):
            return np.asarray(link.tokenize(prompt), np.int32)
        link.tokenize("")
        return np.asarray(prompt, np.int32)

    def _link_with(self, key: bytes) -> LlamaServerLink:
        return LlamaServerLink(replace(self.link.settings, api_key=key.decode("latin-1")))

    def _restore(
        self,
        served: ServedModel,
        owner: Owner,
        blocks: SequenceBlocks,
        slot: Slot,
        tokens: Tokens,
    ) -> int:
        """Restore a known prefix to a slot if it is longer than the one there. Returns its tokens,
        or 0."""
        if blocks.known(tokens) < common(slot.tokens, tokens) + blocks.block_tokens:
            return 0
        if slot.scales != owner.scales:
            options = served.loras.options(owner.scales)
            self.link.send_empty_request(slot.number, int(tokens[0]), options)
        with self.link.slot_file() as path, contextlib.ExitStack() as mapped:

            def allocate(cells: int, nbytes: int) -> memoryview:
                head = slot_file_head(blocks.layout, tokens[:cells])
                flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
                file = mapped.enter_context(os.fdopen(open_private_file(path, flags), "r+b"))
                os.truncate(file.fileno(), len(head) + nbytes)
                file.write(head)
                file.flush()
                return memoryview(mmap.mmap(file.fileno(), 0))[len(head) :]

            cells = blocks.load(tokens, served.streams, allocate, busy=self.watch.is_busy)
            if not cells:
                return 0
            slot.tokens = tokens[:0]
            restored = self.link.restore_slot(slot.number, path, served.sockets)
        if restored != cells:
            raise ModelError(f"llama-server restored {restored} of {cells} tokens")
        slot.tokens = tokens[:cells]
        self.counters.add(restored=1, restored_tokens=cells)
        return cells

    def finish(self, ready: PreparedRequest, tail: bytes, *, good: bool) -> None:
        """A request has ended with these last bytes. Its slot is free when it is saved."""
        self.look_for_shift(ready.served, tail)
        timing, slots = read_timing(tail), ready.served.slots
        if ready.served.loras:
            # The server may have replaced what was restored by KV from a cache of its own.
            pure = not ready.restored or (timing is not None and timing.cached <= ready.restored)
            ready.mixed = not (good and pure)
        slots.leave(ready.slot, ready.tokens if good else ready.tokens[:0], ready.owner)
        slots.end_launch(ready.slot)
        ready.ended_s = time.monotonic()
        ready.ended.set()
        slots.free(ready.slot)
        if timing is None or timing.prompt_s is None:
            return
        # Prompts that are computed together wait for each other: their times are not reported.
        if good and ready.alone and not self.watch.is_busy:
            report = self._report_of(ready.served.blocks)
            work = attention_work(timing.computed, timing.cached)
            report.observe(timing.computed, work, timing.prompt_s)
            whole = timing.computed + timing.cached
            if 0 < ready.restored <= whole:
                seconds = ready.took_s + timing.prompt_s
                report.report_first_token(whole, ready.restored, seconds)

    def _report_of(self, blocks: SequenceBlocks) -> PrefillReport:
        with self._lock:
            if blocks.space.tag not in self._reports:
                self._reports[blocks.space.tag] = PrefillReport(self._depot, blocks.tags, LOG)
            return self._reports[blocks.space.tag]

    def look_for_shift(self, served: ServedModel | None, tail: bytes) -> None:
        """An answer that is longer than the context has moved KV to other positions."""
        timing = read_timing(tail)
        if served is None or timing is None:
            return
        if timing.computed + timing.cached + timing.predicted > served.slot_tokens:
            served.spoiled = "llama-server shifts contexts: start it without --context-shift"
            LOG.warning("requests are only passed on: %s", served.spoiled)

    def _save(self, ready: PreparedRequest) -> None:
        """Store a slot's new blocks, once its request has ended."""
        served, slot = ready.served, ready.slot
        try:
            with contextlib.ExitStack() as files:
                try:
                    content = self._save_when_ended(ready, files)
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

    def _save_when_ended(self, ready: PreparedRequest, files: contextlib.ExitStack) -> Any:
        """Have the server save the slot, after the request. The content of the file."""
        patience_s = _FORGOTTEN_S
        if not ready.reuses:
            # Until the request begins, the slot has KV of another owner, perhaps of equal tokens.
            ready.ended.wait()
        while True:
            ended, asked_s = ready.ended.is_set(), time.monotonic()
            # One file for each try: the server may still write one that was given up.
            path = files.enter_context(self.link.slot_file())

            def is_forgotten(since_s: float = asked_s, limit_s: float = patience_s) -> bool:
                return time.monotonic() - max(since_s, ready.ended_s) > limit_s

            try:
                content = self.link.save_slot(
                    ready.slot.number, path, ready.served.sockets, is_forgotten
                )
            except TimeoutError:
                if patience_s > _SAVE_LIMIT_S:
                    raise
                patience_s *= 2
                continue
            tokens = read_slot_tokens(content)
            if ended or common(tokens, ready.tokens) == len(ready.tokens):
                return content
            # The server saved the slot before the request began.
            ready.ended.wait(_LAUNCH_LOOK_S)


def user_of(key: bytes) -> bytes:
    """A digest of an API key, which identifies its user; empty for requests without a key."""
    return hashlib.blake2b(key, digest_size=32, person=b"kvdepot-llama").digest() if key else b""


def _may_fill_block(ready: PreparedRequest) -> bool:
    """Returns True if a request may fill a block that the depot lacks."""
    request, size = json.loads(ready.body), ready.blocks.block_tokens
    names = ("n_predict", "max_tokens", "max_completion_tokens")
    limits = [limit for limit in map(request.get, names) if isinstance(limit, int) and limit >= 0]
    if not limits:
        return True
    # The last token that is generated is not in the cache.
    total = len(ready.tokens) + max(0, min(limits) - 1)
    return total // size > ready.blocks.known(ready.tokens) // size


def _can_have_slot(request: object) -> bool:
    """Returns True if a request has one prompt of text or tokens, one answer, and does not choose
    a slot itself."""
    if not isinstance(request, dict) or request.get("cache_prompt", True) is not True:
        return False
    if any(request.get(name, usual) != usual for name, usual in _USUAL.items()):
        return False
    if "messages" in request:
        return _is_text(request["messages"])
    prompt = request.get("prompt")
    if isinstance(prompt, str):
        return True
    return isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt)


_USUAL: Final = {"id_slot": -1, "n": 1, "n_cmpl": 1}


def _is_text(messages: object) -> bool:
    """Returns True if no message has an image or sound."""
    if not isinstance(messages, list):
        return False
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(isinstance(part, dict) and part.get("type") == "text" for part in parts)
