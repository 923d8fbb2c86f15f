"""States and slot files as llama.cpp writes them, made by other code than the one under test."""

import random
import struct
from dataclasses import dataclass, field


@dataclass
class MadeState:
    """A state of one sequence: rows of random bytes, cells in any order."""

    seed: int = 1
    version: int = 4
    layers: int = 2
    cells: int = 40
    k_row: int = 12
    v_row: int = 8
    element: int = 2
    transposed: bool = False
    streams: int = 1
    stream: int = 0
    first: int = 0
    positions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.positions:
            self.positions = list(range(self.first, self.first + self.cells))

    def rows(self, kind: str, layer: int, size: int) -> dict[int, bytes]:
        """What each position has."""
        found = {}
        for position in self.positions:
            found[position] = random.Random(f"{self.seed} {kind} {layer} {position}").randbytes(
                size
            )
        return found

    def state(self) -> bytes:
        out = struct.pack("<I", self.streams)
        for stream in range(self.streams):
            if stream != self.stream:
                out += struct.pack("<I", 0)
                continue
            out += struct.pack("<I", self.cells)
            for position in self.positions:
                out += struct.pack("<iIi", position, 1, self.stream)
            out += struct.pack("<II", self.transposed, self.layers)
            if self.version == 4:
                out += struct.pack("<II", 64, 0)
            for layer in range(self.layers):
                rows = self.rows("k", layer, self.k_row)
                out += struct.pack("<iQ", 8, self.k_row)
                out += b"".join(rows[position] for position in self.positions)
            for layer in range(self.layers if self.v_row else 0):
                out += self._values(self.rows("v", layer, self.v_row))
        return out

    def _values(self, rows: dict[int, bytes]) -> bytes:
        if not self.transposed:
            head = struct.pack("<iQ", 1, self.v_row)
            return head + b"".join(rows[position] for position in self.positions)
        out = struct.pack("<iII", 1, self.element, self.v_row // self.element)
        for at in range(0, self.v_row, self.element):
            out += b"".join(rows[pos][at : at + self.element] for pos in self.positions)
        return out

    def payload(self, start: int, stop: int) -> bytes:
        """Of a block: layer by layer K, then V."""
        out = b""
        for layer in range(self.layers):
            keys, values = self.rows("k", layer, self.k_row), self.rows("v", layer, self.v_row)
            out += b"".join(keys[position] for position in range(start, stop))
            step = self.element if self.transposed and self.v_row else max(1, self.v_row)
            for at in range(0, self.v_row, step):
                out += b"".join(values[pos][at : at + step] for pos in range(start, stop))
        return out

    def file(self, tokens: list[int], *, packed: bool = True) -> bytes:
        words = [-1, 1, len(tokens), *tokens, 0] if packed else tokens
        head = struct.pack(f"<III{len(words)}i", 0x67677371, self.version, len(words), *words)
        return head + self.state()
