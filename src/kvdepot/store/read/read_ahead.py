"""Read-ahead: who reads a prompt piece by piece from a hard drive finds the next piece in memory.

Only for who does: a read that goes on where one ended before. An engine asks for a whole prompt at
once, and what continues it in the books is another turn of the conversation.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvdepot.codec.record import record_bytes
from kvdepot.core.block import BlockKey
from kvdepot.index.table import NONE
from kvdepot.store.read.prefetch import Hinter
from kvdepot.store.read.request import Want
from kvdepot.store.state.state import Stock

_ENDS_MAX: Final = 1024
_DEADLINE_S: Final = 10.0


class ReadAhead:
    """Watches reads, and hints at what continues them."""

    def __init__(self, stock: Stock, hinter: Hinter) -> None:
        self._stock = stock
        self._hinter = hinter
        self._ends: OrderedDict[BlockKey, BlockKey | None] = OrderedDict()
        """The last blocks of the latest reads; with each the block whose reading calls for more."""
        self._run_bytes = max((level.run_bytes for level in stock.levels), default=0)

    @property
    def is_useful(self) -> bool:
        """Whether there is a tier where a prompt should be read in one piece."""
        return self._run_bytes > 0

    def saw(self, wants: Sequence[Want]) -> None:
        """Blocks were read, those of one prompt head first."""
        stock = self._stock
        with stock.changed:
            wanted = self._continue(wants)
        if wanted:
            self._hinter.take(wanted, _DEADLINE_S)

    def _continue(self, wants: Sequence[Want]) -> list[Want]:
        """What to read ahead after these. Lock held."""
        catalog = self._stock.catalog
        first = next(filter(self._is_known, wants), None)
        last = next(filter(self._is_known, reversed(wants)), None)
        if first is None or last is None:
            return []
        parent = catalog.tree.parent[first.row]
        end = catalog.table.key(parent) if parent != NONE else None
        goes_on = end in self._ends
        marker = self._ends.pop(end) if goes_on and end is not None else None
        rows: list[int] = []
        if goes_on and (marker is None or any(want.key == marker for want in wants)):
            rows = self._following(last.row)
            marker = catalog.table.key(rows[len(rows) // 2]) if rows else None
        self._ends[last.key] = marker
        if len(self._ends) > _ENDS_MAX:
            self._ends.popitem(last=False)
        whole = replace(last, target=0, start=0, stop=last.payload_bytes, row=NONE)
        return [replace(whole, key=catalog.table.key(row)) for row in rows]

    def _is_known(self, want: Want) -> bool:
        """Whether a block is still what it was when it was read. Lock held."""
        return want.row != NONE and self._stock.catalog.row(want.key) == want.row

    def _following(self, row: int) -> list[int]:
        """What continues a block on a tier of runs and is not in memory, where there is one way.

        Not further than a run from here. Lock held.
        """
        catalog = self._stock.catalog
        nbytes = catalog.nbytes[row]
        found: list[int] = []
        for _ in range(max(1, self._run_bytes // record_bytes(nbytes))):
            children = list(catalog.tree.children(row))
            if len(children) != 1 or catalog.nbytes[children[0]] != nbytes:
                break
            row = children[0]
            level = self._stock.source(row)
            if level is not None and level.run_bytes and not catalog.in_memory(row):
                found.append(row)
        return found
