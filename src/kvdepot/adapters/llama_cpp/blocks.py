"""Sequences of llama.cpp as blocks of a depot: stored by token range, joined again.

What K and V depend on is in the namespace: the model's file, byte for byte, its LoRAs, the layout
of the state, and a probe, a short prompt of fixed tokens that the engine itself computes: the
digest of its K and V covers what no file shows, rope settings, control vectors and the build.
"""

import copy
import hashlib
import logging
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

import kvdepot
from kvdepot.adapters.audit import AuditedHits
from kvdepot.adapters.file_digests import digest_of_files
from kvdepot.adapters.llama_cpp.sequence_state import (
    SequenceState,
    StateLayout,
    Tokens,
    write_state,
)
from kvdepot.config.settings import AuditConfig
from kvdepot.core.block import BlockKey, PutResult
from kvdepot.core.depot import Arrival, Depot
from kvdepot.errors import ModelError

BLOCK_TOKENS: Final = 32
"""Of a block unless set: what is not in a whole block is computed again."""
PROBE_TOKENS: Final = tuple(range(256, 280))
"""Ordinary tokens of every vocabulary."""
_WAVE_BYTES: Final = 64 << 20
_logger: Final = logging.getLogger("kvdepot.llama")
_VARIANTS_MAX: Final = 1024
"""Namespaces that are remembered; they are registered again after that."""
_PARTS: Final = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")


def gguf_files(path: Path) -> list[Path]:
    """A model's file, or all parts of one that was split."""
    parts = _PARTS.fullmatch(path.name)
    if parts is None:
        return [path]
    name, count = parts[1], int(parts[2])
    return [path.with_name(f"{name}-{at:05}-of-{count:05}.gguf") for at in range(1, count + 1)]


def gguf_digest(path: Path, memo: Path | None, began_ns: int | None) -> str:
    """Of every byte of a model's or a LoRA's file, which has to be older than its process."""
    files = gguf_files(path)
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file}: llama.cpp's model file cannot be read here")
    return digest_of_files(path.parent, files, memo, began_ns, "llama.cpp")


def probe_digest(state: SequenceState) -> str:
    """Of K and V of the probe's tokens."""
    count = len(PROBE_TOKENS)
    if state.first or state.cells < count:
        raise ModelError(f"the probe has {state.cells} cells, not {count}")
    payload = np.zeros(state.layout.cell_bytes * count, np.uint8)
    state.take(0, count, payload)
    return hashlib.blake2b(payload.data, digest_size=32).hexdigest()


def _producer(layout: StateLayout, extra: dict[str, str], fingerprint: str) -> str:
    """What computes the blocks, for people."""
    kinds = sorted({rows.type for rows in (*layout.keys, *layout.values)})
    parts = (
        "llama.cpp",
        f"build {extra.get('build') or 'unknown'}",
        f"kvdepot {kvdepot.__version__}",
        f"flash attention {'off' if layout.transposed else 'on'}",
        f"types {kinds}",
        f"model {fingerprint[:16]}",
    )
    return ", ".join(parts)


class SequenceBlocks:
    """The blocks of one engine's sequences in a depot."""

    def __init__(
        self,
        depot: Depot,
        layout: StateLayout,
        *,
        block_tokens: int = BLOCK_TOKENS,
        tenant: str = "",
        audit: AuditConfig | None = None,
        **identity: Any,
    ) -> None:
        """`identity`: `model`, `fingerprint`, `adapter` and `extra` of the namespace. `audit`:
        which hits are computed again.
        """
        self._depot = depot
        self.layout = layout
        self.block_tokens = block_tokens
        extra = (*identity.pop("extra", ()), ("state", layout.digest()))
        self.space = depot.namespace(
            layout=layout.block_layout(block_tokens), tenant=tenant, extra=extra, **identity
        )
        producer = _producer(layout, dict(extra), self.space.namespace.fingerprint)
        self._producer = depot.audits.producer(producer)
        self.space.made_by(self._producer)
        self._hits = AuditedHits(depot, audit or AuditConfig(), producer, _logger)
        self._lock = threading.Lock()
        self._variants: dict[tuple[bytes, str], SequenceBlocks] = {}
        self.tags = [self.space.tag]
        """The namespaces of these blocks and of the variants that have been asked for."""
        self._keeps_ids = True

    def variant(self, user: bytes, adapter: str) -> "SequenceBlocks":
        """The blocks of one user with the LoRAs that `adapter` names. Returns these blocks if there
        is no user and the LoRAs are theirs. The namespace is keyed with `user`, a digest of a
        secret of the user. A user's blocks are stored without token ids, which the depot may tell
        to routers. Call it on the blocks that were constructed, not on a variant. Thread-safe."""
        namespace = self.space.namespace
        if not user and adapter == namespace.adapter:
            return self
        with self._lock:
            if (user, adapter) not in self._variants:
                if len(self._variants) >= _VARIANTS_MAX:
                    self._variants.clear()
                    del self.tags[1:]
                made = copy.copy(self)
                made.space = self._depot.register(
                    replace(namespace, adapter=adapter, secret=user + namespace.secret)
                )
                made.space.made_by(self._producer)
                made._keeps_ids = not user
                self._variants[user, adapter] = made
                self.tags.append(made.space.tag)
            return self._variants[user, adapter]

    def known(self, tokens: Sequence[int] | Tokens) -> int:
        """How many leading tokens the depot has; up to a block that is to be compared."""
        keys = self.space.keys(np.asarray(tokens))
        count = len(self._depot.match(keys))
        waiting = (at for at in range(count) if self._hits.auditor.is_waiting(keys[at]))
        return next(waiting, count) * self.block_tokens

    def load(
        self,
        tokens: Sequence[int] | Tokens,
        streams: int,
        make: Callable[[int, int], Any],
        timeout_s: float | None = None,
        *,
        busy: bool = False,
    ) -> int:
        """Write the state of the longest known prefix to a buffer; returns its length in tokens.

        `make` is called with that length and the bytes of its state, and returns the buffer. It is
        called again, for a shorter prefix, if a block cannot be read after all. `busy`: the engine
        has other requests, and no hit is audited unless that is set.
        """
        keys = self.space.keys(np.asarray(tokens))
        size = self.block_tokens
        with self._depot.lease(keys) as lease:
            blocks = self._hits.served(keys[: len(lease)], busy=busy)
            while blocks:
                cells = blocks * size
                buffer = make(cells, self.layout.state_bytes(cells, streams))
                state = write_state(buffer, self.layout, streams, cells)

                def place(arrivals: list[Arrival], state: SequenceState = state) -> None:
                    for block in arrivals:
                        source = np.frombuffer(block.view, np.uint8)
                        state.give(block.index * size, (block.index + 1) * size, source)

                answers = lease.deliver(place, stop=blocks, timeout_s=timeout_s)
                good = next((at for at, got in enumerate(answers) if not got), blocks)
                if good == blocks:
                    return cells
                blocks = good
        return 0

    def store(self, tokens: Sequence[int] | Tokens, state: SequenceState) -> int:
        """Store the whole blocks of a sequence that the depot lacks; returns how many.

        `tokens` are all from position 0 on; the state may begin later.
        """
        if state.layout != self.layout:
            raise ModelError("the layout of llama.cpp's state has changed")
        size = self.block_tokens
        end = state.first + state.cells
        known = np.asarray(tokens)[:end]
        keys = self.space.keys(known)
        begin = -(-state.first // size)
        for at in range(begin, len(keys)):
            if self._hits.auditor.expected(keys[at]):
                self._compare(keys[at], at * size - state.first, state)
        first = max(len(self._depot.match(keys)), begin)
        return self._store_from(keys, first, state, known) if first < len(keys) else 0

    def _compare(self, key: BlockKey, start: int, state: SequenceState) -> None:
        """Audit a block that was computed again, from cell `start` of a state on."""
        size, layout = self.block_tokens, self.space.layout
        computed = np.zeros(layout.block_bytes, np.uint8)
        state.take(start, start + size, computed)
        self._hits.auditor.check(key, computed, layout, lambda raw: self.layout.numbers(raw, size))

    def _store_from(
        self, keys: Sequence[BlockKey], first: int, state: SequenceState, tokens: Tokens
    ) -> int:
        size = self.block_tokens
        wave = max(1, _WAVE_BYTES // self.space.block_bytes)
        stored = 0
        while first < len(keys):
            part = keys[first : first + wave]
            ids = tokens[first * size : (first + len(part)) * size]
            with self._depot.reserve(part, token_ids=ids if self._keeps_ids else None) as slots:
                fresh = [at for at, put in enumerate(slots.outcomes) if put is PutResult.STORED]
                for at in fresh:
                    start = (first + at) * size - state.first
                    view = slots.view(at)
                    if view is not None:
                        state.take(start, start + size, np.frombuffer(view, np.uint8))
                slots.seal(fresh)
                done = sum(put is not PutResult.THROTTLED for put in slots.outcomes)
            stored += len(fresh)
            if not done:
                break
            first += done
        return stored
