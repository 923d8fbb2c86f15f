"""The state of one sequence as llama.cpp writes it: read, cut by tokens, written again.

A state (`llama_state_seq_get_data`), all little-endian:

    streams u32, then for each stream
      cells u32; a stream with none ends here
      for each cell: position i32, sequences u32 (1), sequence i32
      transposed u32, layers u32, in version 4 also the sizes of K's and V's rotation, u32 each
      for each layer: type of K i32, bytes of a row u64, a row for each cell
      for each layer: type of V i32, bytes of a row u64, a row for each cell; where V is transposed
        (without flash attention): type i32, bytes of an element u32, elements of a row u32, then
        for each element its values of all cells

A slot file puts before it: magic "ggsq" u32, version u32, a count u32 and that many words i32: the
tokens, or -1, 1, a count, the tokens, and 0 (a count of media). Models with sliding windows,
recurrent layers or positions of several parts have more in their states; they are refused.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.core.keys import encode
from kvdepot.core.layout import KVLayout
from kvdepot.errors import ModelError

MAGIC: Final = 0x67677371
VERSIONS: Final = {2: 0, 4: 2}
"""Versions of the state that are understood, and how many words follow `layers` in each."""
_PACKED: Final = -1
_PACKED_VERSION: Final = 1
_STREAMS_MAX: Final = 1 << 16
_LAYERS_MAX: Final = 1 << 16
_ROW_MAX: Final = 1 << 30
_CELL: Final = np.dtype([("pos", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
Bytes = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Rows:
    """What a cell has of one layer's K or V."""

    type: int
    """GGML's number: 1 is f16, 2 is q4_0, 8 is q8_0."""
    nbytes: int
    """Of one cell."""
    element_bytes: int = 0
    """Where the rows are transposed; else 0."""

    def header(self) -> bytes:
        if self.element_bytes:
            elements = self.nbytes // self.element_bytes
            return struct.pack("<iII", self.type, self.element_bytes, elements)
        return struct.pack("<iQ", self.type, self.nbytes)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """All of a state but its cells: equal layouts can be joined."""

    version: int
    transposed: bool
    words: tuple[int, ...]
    keys: tuple[Rows, ...]
    values: tuple[Rows, ...]
    """One for each layer; none where K and V are one (MLA)."""

    @property
    def layer_bytes(self) -> list[int]:
        """Of one cell, K and V, layer by layer."""
        values = [rows.nbytes for rows in self.values] or [0] * len(self.keys)
        return [rows.nbytes + more for rows, more in zip(self.keys, values, strict=True)]

    @property
    def cell_bytes(self) -> int:
        return sum(self.layer_bytes)

    def block_layout(self, block_tokens: int) -> KVLayout:
        """What a block of that many tokens is to a depot: layer by layer, K then V."""
        layers = len(self.keys) if len(set(self.layer_bytes)) == 1 else 1
        return KVLayout.opaque(self.cell_bytes * block_tokens, block_tokens, layers)

    def numbers(self, payload: Any, block_tokens: int) -> npt.NDArray[np.float32]:
        """A block's payload as numbers, layer after layer. ValueError for a type that is not
        understood.
        """
        raw, found, at = np.frombuffer(payload, np.uint8), [], 0
        for layer, keys in enumerate(self.keys):
            for rows in (keys, self.values[layer]) if self.values else (keys,):
                end = at + rows.nbytes * block_tokens
                found.append(_numbers(rows.type, raw[at:end]))
                at = end
        return np.concatenate(found)

    def digest(self) -> str:
        """The layout as text, for a namespace."""
        rows = tuple((r.type, r.nbytes, r.element_bytes) for r in (*self.keys, *self.values))
        facts = (self.version, int(self.transposed), self.words, len(self.keys), rows)
        return hashlib.blake2b(encode(facts), digest_size=16).hexdigest()

    def state_bytes(self, cells: int, streams: int) -> int:
        """The size of a state of one sequence."""
        head = 4 + 4 * streams + _CELL.itemsize * cells + 8 + 4 * len(self.words)
        rows = sum(len(r.header()) + r.nbytes * cells for r in (*self.keys, *self.values))
        return head + rows


def _numbers(kind: int, raw: Bytes) -> npt.NDArray[np.float32]:
    """Of GGML's types f32, f16, q4_0, q8_0 and bf16."""
    if kind in (0, 1):
        return raw.view(np.float32 if kind == 0 else np.float16).astype(np.float32)
    if kind == 30:
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if kind not in (2, 8):
        raise ValueError(f"numbers of GGML's type {kind} cannot be compared")
    # Groups of 32 numbers: a scale in f16, then a byte for each, or half of one.
    group = raw.reshape(-1, 34 if kind == 8 else 18)
    scale = np.ascontiguousarray(group[:, :2]).view(np.float16).astype(np.float32)
    if kind == 8:
        return (group[:, 2:].view(np.int8) * scale).astype(np.float32).ravel()
    halves = np.concatenate([group[:, 2:] & 15, group[:, 2:] >> 4], axis=1)
    return ((halves.astype(np.float32) - 8) * scale).ravel()


class SequenceState:
    """One sequence's state in a buffer: where its rows lie. Cells are in the order of positions."""

    def __init__(self, layout: StateLayout, streams: int, positions: Tokens) -> None:
        self.layout = layout
        self.streams = streams
        self.first = int(positions.min()) if len(positions) else 0
        """The position of the first cell."""
        self.cells = len(positions)
        self._order = _order_of(positions)
        self._keys: list[Bytes] = []
        self._values: list[Bytes] = []

    def add_rows(self, keys: list[Bytes], values: list[Bytes]) -> None:
        self._keys, self._values = keys, values

    def take(self, start: int, stop: int, target: Bytes) -> None:
        """Copy cells start <= i < stop, as the payload of a block, to `target`."""
        cells = slice(start, stop) if self._order is None else self._order[start:stop]
        for rows, (at, end), across in self._parts(stop - start):
            part = target[at:end]
            if across:
                part.reshape(rows.shape[0], stop - start, rows.shape[2])[:] = rows[:, cells]
            else:
                part.reshape(stop - start, rows.shape[1])[:] = rows[cells]

    def give(self, start: int, stop: int, source: Bytes) -> None:
        """Copy a block's payload to cells start <= i < stop."""
        for rows, (at, end), across in self._parts(stop - start):
            part = source[at:end]
            if across:
                rows[:, start:stop] = part.reshape(rows.shape[0], stop - start, rows.shape[2])
            else:
                rows[start:stop] = part.reshape(stop - start, rows.shape[1])

    def _parts(self, cells: int) -> list[tuple[Bytes, tuple[int, int], bool]]:
        """For each layer K, then V: its rows, where they lie in a payload, whether transposed."""
        found = []
        at = 0
        for layer, keys in enumerate(self._keys):
            both = [(keys, False)]
            if self._values:
                both.append((self._values[layer], self.layout.transposed))
            for rows, across in both:
                width = rows.shape[0] * rows.shape[2] if across else rows.shape[1]
                found.append((rows, (at, at + width * cells), across))
                at += width * cells
        return found


def _order_of(positions: Tokens) -> npt.NDArray[np.int64] | None:
    """How to bring cells into the order of their positions; None if they are."""
    if not len(positions):
        return None
    order = np.argsort(positions, kind="stable")
    if not np.array_equal(positions[order], np.arange(len(positions)) + positions.min()):
        raise ModelError("the positions of a sequence are not consecutive: it is not cut")
    return None if np.array_equal(order, np.arange(len(order))) else order


class _Reader:
    """A cursor over a buffer; ModelError where the buffer ends too early."""

    def __init__(self, buffer: Any) -> None:
        self.bytes: Bytes = np.frombuffer(buffer, np.uint8)
        self.at = 0

    def take(self, count: int) -> Bytes:
        if not 0 <= count <= len(self.bytes) - self.at:
            raise ModelError("a state of llama.cpp ends before it should")
        self.at += count
        return self.bytes[self.at - count : self.at]

    def words(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}I", self.take(4 * count).data)

    @property
    def left(self) -> int:
        return len(self.bytes) - self.at


def read_state(buffer: Any, version: int) -> SequenceState:
    """The state of one sequence. ModelError, with the reason, for one that cannot be cut."""
    if version not in VERSIONS:
        known = ", ".join(map(str, VERSIONS))
        raise ModelError(
            f"llama.cpp's sequence state has version {version}; known are {known}",
            hint="a newer kvdepot may know it",
        )
    reader = _Reader(buffer)
    (streams,) = reader.words(1)
    if not 0 < streams <= _STREAMS_MAX:
        raise ModelError(f"a state of llama.cpp with {streams} streams makes no sense")
    state: SequenceState | None = None
    for _ in range(streams):
        (cells,) = reader.words(1)
        if not cells:
            continue
        if state is not None:
            raise ModelError("a sequence lies in several streams: it is not cut")
        state = _read_stream(reader, version, streams, cells)
    if reader.left:
        raise ModelError(
            f"a sequence's state has {reader.left} bytes more than one attention cache: "
            "models with sliding windows or recurrent layers are not cut into blocks"
        )
    if state is None:
        raise ModelError("the sequence is empty")
    return state


def _read_stream(reader: _Reader, version: int, streams: int, cells: int) -> SequenceState:
    table = np.frombuffer(reader.take(cells * _CELL.itemsize), _CELL)
    if not (table["sequences"] == 1).all():
        raise ModelError(
            "the cells of a sequence's state are not as expected: recurrent layers, or positions "
            "of several parts, are not cut into blocks"
        )
    transposed, layers = reader.words(2)
    if transposed > 1 or not 0 < layers <= _LAYERS_MAX:
        raise ModelError("a state of llama.cpp makes no sense after its cells: it is not cut")
    words = reader.words(VERSIONS[version])
    keys, key_rows = _read_rows(reader, layers, cells, across=False)
    values: list[Rows] = []
    value_rows: list[Bytes] = []
    if reader.left >= layers * 12:  # else there is no V: only counts of empty streams may follow
        values, value_rows = _read_rows(reader, layers, cells, across=bool(transposed))
    layout = StateLayout(version, bool(transposed), words, tuple(keys), tuple(values))
    state = SequenceState(layout, streams, table["pos"])
    state.add_rows(key_rows, value_rows)
    return state


def _read_rows(
    reader: _Reader, layers: int, cells: int, *, across: bool
) -> tuple[list[Rows], list[Bytes]]:
    kinds: list[Rows] = []
    found: list[Bytes] = []
    for _ in range(layers):
        kind, small, large = reader.words(3)
        nbytes = small * large if across else small | large << 32
        if not 0 < nbytes <= _ROW_MAX or kind >= 1 << 31:
            raise ModelError(f"rows of {nbytes} bytes in a state of llama.cpp make no sense")
        kinds.append(Rows(kind, nbytes, small if across else 0))
        rows = reader.take(nbytes * cells)
        found.append(rows.reshape(large, cells, small) if across else rows.reshape(cells, nbytes))
    return kinds, found


def write_state(target: Any, layout: StateLayout, streams: int, cells: int) -> SequenceState:
    """Write everything but the rows of a state with positions 0, 1, …; `give` fills those in.

    `target` has `layout.state_bytes(cells, streams)` writable bytes.
    """
    into: Bytes = np.frombuffer(target, np.uint8)
    table = np.zeros(cells, _CELL)
    table["pos"] = np.arange(cells)
    table["sequences"] = 1
    head = struct.pack("<2I", streams, cells) + table.tobytes()
    head += struct.pack(
        f"<{2 + len(layout.words)}I", layout.transposed, len(layout.keys), *layout.words
    )
    at = _place(into, 0, head)
    keys: list[Bytes] = []
    values: list[Bytes] = []
    for rows in layout.keys:
        at = _place(into, at, rows.header())
        keys.append(into[at : at + rows.nbytes * cells].reshape(cells, rows.nbytes))
        at += rows.nbytes * cells
    for rows in layout.values:
        at = _place(into, at, rows.header())
        part = into[at : at + rows.nbytes * cells]
        if layout.transposed:
            elements = rows.nbytes // rows.element_bytes
            values.append(part.reshape(elements, cells, rows.element_bytes))
        else:
            values.append(part.reshape(cells, rows.nbytes))
        at += rows.nbytes * cells
    _place(into, at, bytes(4 * (streams - 1)))
    state = SequenceState(layout, streams, table["pos"])
    state.add_rows(keys, values)
    return state


def _place(into: Bytes, at: int, content: bytes) -> int:
    into[at : at + len(content)] = np.frombuffer(content, np.uint8)
    return at + len(content)


def read_slot_tokens(buffer: Any) -> Tokens:
    """The tokens in a slot file; none if the slot is empty."""
    return _read_head(_Reader(buffer))[1]


def _read_head(reader: _Reader) -> tuple[int, Tokens]:
    magic, version, count = reader.words(3)
    if magic != MAGIC:
        raise ModelError("this is no slot file of llama-server")
    return version, _tokens_of(np.frombuffer(reader.take(4 * count), "<i4"))


def read_slot_file(buffer: Any) -> tuple[Tokens, SequenceState]:
    """The tokens and the state in a slot file. ModelError, with the reason, if it is not one."""
    reader = _Reader(buffer)
    version, tokens = _read_head(reader)
    state = read_state(reader.bytes[reader.at :], version)
    if state.first or state.cells != len(tokens):
        raise ModelError(
            f"a slot file has {len(tokens)} tokens and {state.cells} cells: it is not cut"
        )
    return tokens, state


def _tokens_of(words: Tokens) -> Tokens:
    """The tokens of a slot file, which newer servers pack together with media."""
    tokens = words
    if len(words) and words[0] == _PACKED:
        if len(words) < 4 or words[1] != _PACKED_VERSION or not 0 <= words[2] <= len(words) - 4:
            raise ModelError("the tokens of a slot file are packed in an unknown way")
        tokens, media = words[3 : 3 + words[2]], words[3 + words[2] :]
        if len(media) != 1 or media[0]:
            raise ModelError("a slot with images or sound is not cut into blocks")
    if len(tokens) and tokens.min() < 0:
        raise ModelError("a slot file has tokens below 0")
    return tokens


def slot_file_head(layout: StateLayout, tokens: Sequence[int] | Tokens) -> bytes:
    """What comes before the state in a slot file."""
    words = np.asarray(tokens, "<i4")
    return struct.pack("<3I", MAGIC, layout.version, len(words)) + words.tobytes()
