"""Token ids of blocks, from the heads of their records: in memory, else wherever they lie."""

from collections.abc import Sequence

from kvdepot.core.block import BlockKey
from kvdepot.core.tier import KeepsTokens
from kvdepot.format.record import HEAD_BYTES, token_ids
from kvdepot.index.table import NONE
from kvdepot.store.state.lower_tier import LowerTier
from kvdepot.store.state.state import StoreState


class TokenReader:
    """Reads token ids. Thread-safe; not a use of the blocks."""

    def __init__(self, state: StoreState) -> None:
        self._state = state

    def read(self, keys: Sequence[BlockKey]) -> list[bytes]:
        """For each block its token ids, little-endian u32; empty where they are not known, or the
        block is not here. Reads a page of each block that is not in memory.
        """
        found = [b""] * len(keys)
        below: dict[LowerTier, list[tuple[int, int]]] = {}
        with self._state.lock:
            for index, row in enumerate(self._state.catalog.rows(keys)):
                if row == NONE:
                    continue
                memory = self._state.memory_of(row)
                if memory is not None:
                    found[index] = token_ids(memory.image(row)[:HEAD_BYTES], keys[index])
                    continue
                lower = self._state.source(row)
                if lower is not None:
                    below.setdefault(lower, []).append((index, lower.place(row)))
        for lower, places in below.items():
            if isinstance(lower.tier, KeepsTokens):
                asked = [keys[index] for index, _ in places]
                answers = lower.tier.read_tokens(asked, [location for _, location in places])
                for (index, _), tokens in zip(places, answers, strict=True):
                    found[index] = tokens
        return found
