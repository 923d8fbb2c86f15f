"""The state of one sequence as llama.cpp writes it: read, cut by tokens, written again.

A state (`llama_state_seq_get_data`), all little-endian:

    streams u32, then for each stream
      cells u32; an empty stream ends here
      for each cell: position i32, sequences u32 (1), sequence i32
      transposed u32, layers u32; in version 4 also the sizes of K's and V's rotation, u32 each
      for each layer: type of K i32, bytes of a row u64, a row for each cell
      for each layer: type of V i32, bytes of a row u64, a row for each cell; if V is transposed
        (without flash attention): type i32, bytes of an element u32, elements of a row u32, then
        for each element its values of all cells

A slot file begins with: magic "ggsq" u32, version u32, a count u32 and that many words i32: the
tokens, or -1, 1, a count, the tokens, and 0 (a count of media). The state follows. Models with
sliding windows, recurrent layers or positions of several parts have more in their states; they are
refused.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.core.keys import encode
from kvdepot.core.layout import KVLayout
from kvdepot.errors import ModelError

MAGIC: Final = 0x67677371
VERSIONS: Final = {2: 0, 4: 2}
"""Known versions of the state, and the number of words that follow `layers`."""
_PACKED: Final = -1
_PACKED_VERSION: Final = 1
_STREAMS_MAX: Final = 1 << 16
_LAYERS_MAX: Final = 1 << 16
_ROW_MAX: Final = 1 << 30
_CELL: Final = np.dtype([("pos", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
Bytes = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Plane:
    """K or V of one layer."""

    type: int
    """GGML's number: 1 is f16, 2 is q4_0, 8 is q8_0."""
    nbytes: int
    """Bytes of one cell."""
    element_bytes: int = 0
    """0 unless the plane is transposed."""

    def header(self) -> bytes:
        if self.element_bytes:
            elements = self.nbytes // self.element_bytes
            return struct.pack("<iII", self.type, self.element_bytes, elements)
        return struct.pack("<iQ", self.type, self.nbytes)

    def rows(self, content: Bytes, cells: int) -> Bytes:
        """The content as [element, cell, byte]; a plane that is not transposed is one element."""
        step = self.element_bytes or self.nbytes
        return content.reshape(self.nbytes // step, cells, step)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """All of a state but its cells. States with equal layouts can be joined."""

    version: int
    transposed: bool
    words: tuple[int, ...]
    keys: tuple[Plane, ...]
    values: tuple[Plane, ...]
    """One for each layer; empty if K and V are one (MLA)."""

    @property
    def cell_bytes(self) -> int:
        return sum(plane.nbytes for plane in (*self.keys, *self.values))

    def block_layout(self, block_tokens: int) -> KVLayout:
        """The layout of a block: layer by layer K, then V."""
        sizes = {
            sum(plane.nbytes for plane in layer) for layer in _by_layer(self.keys, self.values)
        }
        layers = len(self.keys) if len(sizes) == 1 else 1
        return KVLayout.opaque(self.cell_bytes * block_tokens, block_tokens, layers)

    def numbers(self, payload: Any, block_tokens: int) -> npt.NDArray[np.float32]:
        """A block's payload as numbers, layer after layer. ValueError for an unknown type."""
        raw, found, at = np.frombuffer(payload, np.uint8), [], 0
        for layer in _by_layer(self.keys, self.values):
            for plane in layer:
                end = at + plane.nbytes * block_tokens
                found.append(_numbers(plane.type, raw[at:end]))
                at = end
        return np.concatenate(found)

    def digest(self) -> str:
        """A text that identifies the layout, for a namespace."""
        planes = tuple((p.type, p.nbytes, p.element_bytes) for p in (*self.keys, *self.values))
        facts = (self.version, int(self.transposed), self.words, len(self.keys), planes)
        return hashlib.blake2b(encode(facts), digest_size=16).hexdigest()

    def state_bytes(self, cells: int, streams: int) -> int:
        """The size of a state of one sequence."""
        head = 4 + 4 * streams + _CELL.itemsize * cells + 8 + 4 * len(self.words)
        planes = (*self.keys, *self.values)
        return head + sum(len(plane.header()) + plane.nbytes * cells for plane in planes)


def _by_layer(keys: Sequence[Any], values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    return zip(keys, values, strict=True) if values else zip(keys, strict=True)


def _numbers(kind: int, raw: Bytes) -> npt.NDArray[np.float32]:
    """Numbers of GGML's types f32, f16, q4_0, q8_0 and bf16."""
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
    """One sequence's state in a buffer. Cells are counted in the order of their positions."""

    def __init__(
        self,
        layout: StateLayout,
        streams: int,
        positions: Tokens,
        keys: Sequence[Bytes],
        values: Sequence[Bytes],
    ) -> None:
        """`keys` and `values`: see `Plane.rows`."""
        self.layout = layout
        self.streams = streams
        self.first = int(positions.min())
        """The position of the first cell."""
        self.cells = len(positions)
        self._planes = [plane for layer in _by_layer(keys, values) for plane in layer]
        self._order: npt.NDArray[np.int64] | None = None
        """Brings cells into the order of their positions; None if they are in that order."""
        order = np.argsort(positions, kind="stable")
        if not np.array_equal(positions[order], np.arange(self.cells) + self.first):
            raise ModelError("the positions of a sequence are not consecutive: it cannot be cut")
        if not np.array_equal(order, np.arange(self.cells)):
            self._order = order

    def take(self, start: int, stop: int, target: Bytes) -> None:
        """Copy the cells start <= i < stop to `target`, as the payload of a block."""
        cells = slice(start, stop) if self._order is None else self._order[start:stop]
        for rows, part in self._parts(stop - start, target):
            part[:] = rows[:, cells]

    def give(self, start: int, stop: int, source: Bytes) -> None:
        """Copy a block's payload to the cells start <= i < stop."""
        for rows, part in self._parts(stop - start, source):
            rows[:, start:stop] = part

    def _parts(self, cells: int, payload: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
        """Each plane, and its part of the payload of a block with this many cells."""
        at = 0
        for rows in self._planes:
            elements, _, step = rows.shape
            end = at + elements * cells * step
            yield rows, payload[at:end].reshape(elements, cells, step)
            at = end


class _Reader:
    """A cursor over a buffer. ModelError if the buffer ends too early."""

    def __init__(self, buffer: Any) -> None:
        self.bytes: Bytes = np.frombuffer(buffer, np.uint8)
        self.at = 0

    def take(self, count: int) -> Bytes:
        if not 0 <= count <= self.left:
            raise ModelError("a state of llama.cpp is too short")
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
            f"llama.cpp's sequence state has version {version} (known: {known})",
            hint="use a newer kvdepot",
        )
    reader = _Reader(buffer)
    (streams,) = reader.words(1)
    if not 0 < streams <= _STREAMS_MAX:
        raise ModelError(f"invalid state of llama.cpp: {streams} streams")
    state: SequenceState | None = None
    for _ in range(streams):
        (cells,) = reader.words(1)
        if cells and state is not None:
            raise ModelError("a sequence lies in several streams: it cannot be cut")
        if cells:
            state = _read_stream(reader, version, streams, cells)
    if reader.left:
        raise ModelError(
            f"a sequence's state has {reader.left} bytes more than one attention cache: "
            "models with sliding windows or recurrent layers cannot be cut into blocks"
        )
    if state is None:
        raise ModelError("the sequence is empty")
    return state


def _read_stream(reader: _Reader, version: int, streams: int, cells: int) -> SequenceState:
    table = np.frombuffer(reader.take(cells * _CELL.itemsize), _CELL)
    if not (table["sequences"] == 1).all():
        raise ModelError(
            "a sequence's state has unknown cells: recurrent layers, or positions of several "
            "parts, cannot be cut into blocks"
        )
    transposed, layers = reader.words(2)
    if transposed > 1 or not 0 < layers <= _LAYERS_MAX:
        raise ModelError(f"invalid state of llama.cpp: {layers} layers, transposed {transposed}")
    words = reader.words(VERSIONS[version])
    keys = [_read_plane(reader, cells, transposed=False) for _ in range(layers)]
    values = []
    if reader.left >= layers * 12:  # less is no V, only counts of empty streams
        values = [_read_plane(reader, cells, transposed=bool(transposed)) for _ in range(layers)]
    layout = StateLayout(
        version,
        bool(transposed),
        words,
        tuple(plane for plane, _ in keys),
        tuple(plane for plane, _ in values),
    )
    rows = [[rows for _, rows in planes] for planes in (keys, values)]
    return SequenceState(layout, streams, table["pos"], *rows)


def _read_plane(reader: _Reader, cells: int, *, transposed: bool) -> tuple[Plane, Bytes]:
    kind, small, large = reader.words(3)
    nbytes = small * large if transposed else small | large << 32
    if not 0 < nbytes <= _ROW_MAX or kind >= 1 << 31:
        raise ModelError(f"invalid state of llama.cpp: rows of {nbytes} bytes")
    plane = Plane(kind, nbytes, small if transposed else 0)
    return plane, plane.rows(reader.take(nbytes * cells), cells)


def write_state(target: Any, layout: StateLayout, streams: int, cells: int) -> SequenceState:
    """Write all of a state with the positions 0, 1, … but its rows; `give` fills those in.

    `target` has `layout.state_bytes(cells, streams)` writable bytes.
    """
    into: Bytes = np.frombuffer(target, np.uint8)
    table = np.zeros(cells, _CELL)
    table["pos"], table["sequences"] = np.arange(cells), 1
    words = (layout.transposed, len(layout.keys), *layout.words)
    head = struct.pack("<2I", streams, cells) + table.tobytes()
    at = _place(into, 0, head + struct.pack(f"<{len(words)}I", *words))
    rows = []
    for plane in (*layout.keys, *layout.values):
        at = _place(into, at, plane.header())
        rows.append(plane.rows(into[at : at + plane.nbytes * cells], cells))
        at += plane.nbytes * cells
    _place(into, at, bytes(4 * (streams - 1)))
    layers = len(layout.keys)
    return SequenceState(layout, streams, table["pos"], rows[:layers], rows[layers:])


def _place(into: Bytes, at: int, content: bytes) -> int:
    into[at : at + len(content)] = np.frombuffer(content, np.uint8)
    return at + len(content)


def read_slot_tokens(buffer: Any) -> Tokens:
    """The tokens in a slot file; none if the slot is empty."""
    return _read_head(_Reader(buffer))[1]


def read_slot_file(buffer: Any) -> tuple[Tokens, SequenceState]:
    """The tokens and the state in a slot file. ModelError, with the reason, if it is not one."""
    reader = _Reader(buffer)
    version, tokens = _read_head(reader)
    state = read_state(reader.bytes[reader.at :], version)
    if state.first or state.cells != len(tokens):
        raise ModelError(
            f"a slot file has {len(tokens)} tokens and {state.cells} cells: it cannot be cut"
        )
    return tokens, state


def _read_head(reader: _Reader) -> tuple[int, Tokens]:
    """Version and tokens. Newer servers pack the tokens together with media."""
    magic, version, count = reader.words(3)
    if magic != MAGIC:
        raise ModelError("the file is not a slot file of llama-server")
    words: Tokens = np.frombuffer(reader.take(4 * count), "<i4")
    tokens = words
    if count and words[0] == _PACKED:
        if count < 4 or words[1] != _PACKED_VERSION or not 0 <= words[2] <= count - 4:
            raise ModelError("the tokens of a slot file are packed in an unknown way")
        tokens, media = words[3 : 3 + words[2]], words[3 + words[2] :]
        if len(media) != 1 or media[0]:
            raise ModelError("a slot with images or sound cannot be cut into blocks")
    if len(tokens) and tokens.min() < 0:
        raise ModelError("a slot file has tokens below 0")
    return version, tokens


def slot_file_head(layout: StateLayout, tokens: Sequence[int] | Tokens) -> bytes:
    """The bytes before the state in a slot file."""
    words = np.asarray(tokens, "<i4")
    return struct.pack("<3I", MAGIC, layout.version, len(words)) + words.tobytes()
