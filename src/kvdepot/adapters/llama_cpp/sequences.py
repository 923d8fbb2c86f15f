"""Sequences of a llama.cpp context in this process, through its C interface.

    library = ctypes.CDLL(path of libllama)      # or the library that a binding has loaded
    cache = SequenceCache(depot, library, context, model=path of the GGUF)
    known = cache.restore(tokens, sequence)      # then decode tokens[known:]
    cache.store(tokens, sequence)                # after decoding

Only the thread that uses the context may use the cache.
"""

import ctypes
import struct
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from kvdepot.adapters.file_digests import process_start_ns
from kvdepot.adapters.llama_cpp.blocks import (
    BLOCK_TOKENS,
    PROBE_TOKENS,
    SequenceBlocks,
    gguf_digest,
    probe_digest,
)
from kvdepot.adapters.llama_cpp.sequence_state import VERSIONS, SequenceState, read_state
from kvdepot.config.settings import AuditConfig
from kvdepot.depot import Depot
from kvdepot.errors import ModelError

_UNBOUNDED: Final = -1
_STATE_MAGIC: Final = 0xAF143CD8
"""Newer versions write this and the number of the sequence before a state in memory."""


class LlamaBatch(ctypes.Structure):
    """llama_batch."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


_POINTER, _SIZE, _NUMBER = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32
_FUNCTIONS: Final[dict[str, tuple[Any, list[Any]]]] = {
    "llama_state_seq_get_size": (_SIZE, [_POINTER, _NUMBER]),
    "llama_state_seq_get_data": (_SIZE, [_POINTER, _POINTER, _SIZE, _NUMBER]),
    "llama_state_seq_set_data": (_SIZE, [_POINTER, _POINTER, _SIZE, _NUMBER]),
    "llama_memory_seq_rm": (ctypes.c_bool, [_POINTER, _NUMBER, _NUMBER, _NUMBER]),
    "llama_memory_seq_cp": (None, [_POINTER, _NUMBER, _NUMBER, _NUMBER, _NUMBER]),
    "llama_n_seq_max": (ctypes.c_uint32, [_POINTER]),
    "llama_get_memory": (_POINTER, [_POINTER]),
    "llama_decode": (_NUMBER, [_POINTER, LlamaBatch]),
}
"""The functions of the C interface that are used: types of the result and of the arguments."""


def _functions_of(library: ctypes.CDLL) -> SimpleNamespace:
    """The functions, without the prefix of their names."""
    found = {}
    for name, (result, arguments) in _FUNCTIONS.items():
        try:
            # By item: an attribute is shared with the binding, and so are its types.
            function = library[name]
        except AttributeError as error:
            raise ModelError(
                f"the library has no {name}: it is not llama.cpp, or too old"
            ) from error
        function.restype, function.argtypes = result, arguments
        found[name.removeprefix("llama_")] = function
    return SimpleNamespace(**found)


class SequenceCache:
    """Stores and restores sequences of one context, which must outlive it.

    The last sequence of the context belongs to this cache, for the probe and for parts of
    sequences. The context needs at least two sequences (`n_seq_max`).
    """

    def __init__(
        self,
        depot: Depot,
        library: ctypes.CDLL,
        context: int,
        *,
        model: Path,
        adapter: str = "",
        block_tokens: int = BLOCK_TOKENS,
        memo: Path | None = None,
        audit: AuditConfig | None = None,
    ) -> None:
        """`context` is the address of the llama_context. `adapter` names the LoRAs that are applied
        to it. `memo` is a file that keeps digests of model files. `audit`: which hits are computed
        again (docs/audit.md). ModelError, with the reason, if the sequences cannot be cut.
        """
        self._calls = _functions_of(library)
        self._context = context
        self._has_head = False
        self._scratch = int(self._calls.n_seq_max(context)) - 1
        if self._scratch < 1:
            raise ModelError(
                "the context has one sequence only", hint="create it with n_seq_max of 2 or more"
            )
        probe = self._probe()
        self._streams = probe.streams
        self.blocks = SequenceBlocks(
            depot,
            probe.layout,
            block_tokens=block_tokens,
            model=model.name,
            fingerprint=gguf_digest(model, memo, process_start_ns()),
            adapter=adapter,
            audit=audit,
            extra=(("engine", "llama.cpp"), ("probe", probe_digest(probe))),
        )

    def restore(self, tokens: Sequence[int], sequence: int = 0) -> int:
        """Replace a sequence by the longest known prefix of `tokens`; returns its length.

        At least the last token must be decoded. Returns 0 if no prefix is known, and the sequence
        is unchanged; or if llama.cpp has no room, and the sequence is empty.
        """
        head = struct.pack("<II", _STATE_MAGIC, sequence) if self._has_head else b""
        state = np.zeros(0, np.uint8)

        def allocate(_: int, nbytes: int) -> Any:
            nonlocal state
            state = np.zeros(len(head) + nbytes, np.uint8)
            state[: len(head)] = np.frombuffer(head, np.uint8)
            return state[len(head) :]

        cells = self.blocks.load(np.asarray(tokens)[:-1], self._streams, allocate)
        if not cells:
            return 0
        taken = self._calls.state_seq_set_data(
            self._context, state.ctypes.data, len(state), sequence
        )
        return cells if taken else 0

    def store(self, tokens: Sequence[int], sequence: int = 0) -> int:
        """Store the whole blocks of a sequence that the depot lacks; returns their number.

        `tokens` are those that were decoded into it, from position 0 on.
        """
        known = self.blocks.known(tokens)
        if len(tokens) - known < self.blocks.block_tokens:
            return 0
        return self.blocks.store(tokens, self._read(sequence, known))

    def _read(self, sequence: int, start: int) -> SequenceState:
        """A sequence's state from a position on, or all of it. If all sequences share one stream,
        the part is first assigned to the scratch sequence, which copies no rows."""
        if not start or self._streams > 1:
            return self._state(sequence)
        memory = self._calls.get_memory(self._context)
        self._calls.memory_seq_cp(memory, sequence, self._scratch, start, _UNBOUNDED)
        try:
            return self._state(self._scratch)
        finally:
            self._calls.memory_seq_rm(memory, self._scratch, _UNBOUNDED, _UNBOUNDED)

    def _state(self, sequence: int) -> SequenceState:
        size = self._calls.state_seq_get_size(self._context, sequence)
        buffer = np.zeros(size, np.uint8)
        got = self._calls.state_seq_get_data(self._context, buffer.ctypes.data, size, sequence)
        self._has_head = bytes(buffer[:4]) == struct.pack("<I", _STATE_MAGIC)
        return _read_any_version(buffer[8 * self._has_head : got])

    def _probe(self) -> SequenceState:
        """Compute the probe in the scratch sequence, and read it."""
        count = len(PROBE_TOKENS)
        numbers = ctypes.c_int32 * count
        scratch = (ctypes.c_int32 * 1)(self._scratch)
        pointer = ctypes.POINTER(ctypes.c_int32)
        batch = LlamaBatch(
            count,
            numbers(*PROBE_TOKENS),
            None,
            numbers(*range(count)),
            numbers(*[1] * count),
            (pointer * count)(*[ctypes.cast(scratch, pointer)] * count),
            (ctypes.c_int8 * count)(*[0] * (count - 1), 1),
        )
        memory = self._calls.get_memory(self._context)
        self._calls.memory_seq_rm(memory, self._scratch, _UNBOUNDED, _UNBOUNDED)
        status = self._calls.decode(self._context, batch)
        if status:
            raise ModelError(
                f"llama.cpp could not decode the probe: llama_decode returned {status}"
            )
        try:
            return self._state(self._scratch)
        finally:
            self._calls.memory_seq_rm(memory, self._scratch, _UNBOUNDED, _UNBOUNDED)


def _read_any_version(buffer: Any) -> SequenceState:
    """A state in memory has no version number: only one of the known versions fits."""
    reasons = []
    for version in sorted(VERSIONS, reverse=True):
        try:
            return read_state(buffer, version)
        except ModelError as error:
            reasons.append(error)
    raise reasons[0]
