"""Sequences of llama.cpp as blocks of a depot: stored by token range, joined again.

The namespace names everything that K and V depend on: the model's file, byte for byte, its LoRAs,
the layout of the state, and a probe. The probe is a short prompt of fixed tokens that the engine
computes. The digest of its K and V covers rope settings, control vectors and the build, which no
file shows.
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
from kvdepot.adapters.block_writes import store_blocks
from kvdepot.adapters.file_digests import digest_of_files
from kvdepot.adapters.llama_cpp.sequence_state import (
    SequenceState,
    StateLayout,
    Tokens,
    write_state,
)
from kvdepot.config.settings import AuditConfig
from kvdepot.core.block import PutResult
from kvdepot.core.depot import Arrival
from kvdepot.depot import Depot
from kvdepot.errors import ModelError

BLOCK_TOKENS: Final = 32
"""The default. Tokens that do not fill a block are computed again."""
PROBE_TOKENS: Final = tuple(range(256, 280))
"""Ordinary tokens of every vocabulary."""
LOG: Final = logging.getLogger("kvdepot.llama")
_VARIANTS_MAX: Final = 1024
"""Namespaces that are kept; others are registered again."""
_PARTS: Final = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")


def gguf_files(path: Path) -> list[Path]:
    """A model's file, or all parts of a model that was split."""
    parts = _PARTS.fullmatch(path.name)
    if parts is None:
        return [path]
    name, count = parts[1], int(parts[2])
    return [path.with_name(f"{name}-{at:05}-of-{count:05}.gguf") for at in range(1, count + 1)]


def gguf_digest(path: Path, memo: Path | None, began_ns: int | None) -> str:
    """A digest of every byte of a model's or a LoRA's file. The file must be older than the process
    that uses it, which started at `began_ns`."""
    files = gguf_files(path)
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file}: llama.cpp's model file cannot be read here")
    return digest_of_files(path.parent, files, memo, began_ns, "llama.cpp")


def probe_digest(state: SequenceState) -> str:
    """A digest of K and V of the probe's tokens."""
    count = len(PROBE_TOKENS)
    if state.first or state.cells < count:
        raise ModelError(f"the probe has {state.cells} cells, not {count}")
    payload = np.zeros(state.layout.cell_bytes * count, np.uint8)
    state.take(0, count, payload)
    return hashlib.blake2b(payload.data, digest_size=32).hexdigest()


class SequenceBlocks:
    """The blocks of one engine's sequences in one namespace of a depot."""

    def __init__(
        self,
        depot: Depot,
        layout: StateLayout,
        *,
        block_tokens: int = BLOCK_TOKENS,
        tenant: str = "",
        audit: AuditConfig | None = None,
        extra: tuple[tuple[str, str], ...] = (),
        **identity: Any,
    ) -> None:
        """`identity`: `model`, `fingerprint` and `adapter` of the namespace. `audit`: which hits
        are computed again."""
        self._depot = depot
        self.layout = layout
        self.block_tokens = block_tokens
        self.space = depot.namespace(
            layout=layout.block_layout(block_tokens),
            tenant=tenant,
            extra=(*extra, ("state", layout.digest())),
            **identity,
        )
        producer = (
            f"llama.cpp, build {dict(extra).get('build') or 'unknown'}, "
            f"kvdepot {kvdepot.__version__}, "
            f"flash attention {'off' if layout.transposed else 'on'}, "
            f"types {sorted({plane.type for plane in (*layout.keys, *layout.values)})}, "
            f"model {self.space.namespace.fingerprint[:16]}"
        )
        self.space.made_by(depot.audits.producer(producer))
        self._hits = AuditedHits(depot, audit or AuditConfig(), producer, LOG)
        self._keeps_ids = True
        self._lock = threading.Lock()
        self._variants: dict[tuple[bytes, str], SequenceBlocks] = {}
        self.tags = [self.space.tag]
        """The namespaces of these blocks and of all variants so far."""

    def variant(self, user: bytes, adapter: str) -> "SequenceBlocks":
        """The blocks of one user with the LoRAs that `adapter` names.

        `user` is a digest of the user's secret, and a part of the namespace's secret; empty means
        no user. Returns these blocks if there is no user and the LoRAs are the same. A user's
        blocks are stored without token ids, which the depot may announce to routers. Must be called
        on the blocks that were constructed, not on a variant. Thread-safe.
        """
        namespace = self.space.namespace
        if not user and adapter == namespace.adapter:
            return self
        with self._lock:
            if (user, adapter) not in self._variants:
                if len(self._variants) >= _VARIANTS_MAX:
                    self._variants.clear()
                    del self.tags[1:]
                made = copy.copy(self)
                made.space = self._depot.namespace(
                    replace(namespace, adapter=adapter, secret=user + namespace.secret)
                )
                made.space.made_by(self.space.producer)
                made._keeps_ids = not user
                self._variants[user, adapter] = made
                self.tags.append(made.space.tag)
            return self._variants[user, adapter]

    def known(self, tokens: Sequence[int] | Tokens) -> int:
        """The number of leading tokens that the depot has, up to a block that is to be audited."""
        keys = self.space.keys(np.asarray(tokens))
        count = len(self._depot.match(keys))
        expected = (block for block in range(count) if self._hits.is_expected(keys[block]))
        return next(expected, count) * self.block_tokens

    def load(
        self,
        tokens: Sequence[int] | Tokens,
        streams: int,
        allocate: Callable[[int, int], Any],
        *,
        busy: bool = False,
    ) -> int:
        """Write the state of the longest known prefix to a buffer; returns its length in tokens.

        `allocate` gets that length and the bytes of its state, and returns the buffer. It is called
        again, for a shorter prefix, if a block cannot be read. `busy`: the engine has other
        requests; hits are not audited then.
        """
        keys, size = self.space.keys(np.asarray(tokens)), self.block_tokens
        with self._depot.lease(keys) as lease:
            blocks = self._hits.served_blocks(keys[: len(lease)], busy=busy)
            while blocks:
                cells = blocks * size
                buffer = allocate(cells, self.layout.state_bytes(cells, streams))
                state = write_state(buffer, self.layout, streams, cells)

                def give(arrivals: list[Arrival], state: SequenceState = state) -> None:
                    for block in arrivals:
                        source = np.frombuffer(block.view, np.uint8)
                        state.give(block.index * size, (block.index + 1) * size, source)

                answers = lease.deliver(give, stop=blocks)
                good = next((at for at, answer in enumerate(answers) if not answer), blocks)
                if good == blocks:
                    return cells
                blocks = good
        return 0

    def store(self, tokens: Sequence[int] | Tokens, state: SequenceState) -> int:
        """Store the whole blocks of a sequence that the depot lacks; returns their number.

        `tokens` are those from position 0 on. The state may begin later.
        """
        if state.layout != self.layout:
            raise ModelError("the layout of llama.cpp's state has changed")
        size = self.block_tokens
        known = np.asarray(tokens)[: state.first + state.cells]
        keys = self.space.keys(known)
        first = -(-state.first // size)

        def take(block: int, target: Any) -> None:
            start = block * size - state.first
            state.take(start, start + size, np.frombuffer(target, np.uint8))

        for block in range(first, len(keys)):
            if self._hits.take_expected(keys[block]):
                computed = bytearray(self.space.block_bytes)
                take(block, computed)
                self._hits.check(
                    keys[block],
                    computed,
                    self.space.layout,
                    lambda raw: self.layout.numbers(raw, size),
                )
        first = max(first, len(self._depot.match(keys)))

        def fill(blocks: Sequence[int], views: Sequence[memoryview]) -> None:
            for block, view in zip(blocks, views, strict=True):
                take(first + block, view)

        token_ids = known[first * size : len(keys) * size] if self._keeps_ids else None
        results = store_blocks(self._depot, self.space, keys[first:], fill, token_ids=token_ids)
        return results.count(PutResult.STORED)
