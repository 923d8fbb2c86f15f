"""Reads token ids and producers of blocks from the heads of their records."""

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np

from kvdepot.core.block import BlockKey
from kvdepot.core.keys import as_words
from kvdepot.core.volume import READ_DTYPE, Outcome, Priority, place_of, volume_of
from kvdepot.format.record import HEAD_BYTES
from kvdepot.index.table import NONE
from kvdepot.io.files import aligned
from kvdepot.native import address_of
from kvdepot.store.state.state import StoreState

_HEADS_AT_ONCE: Final = 64
_TIMEOUT_S: Final = 10.0
Fact = TypeVar("Fact")


def read_heads(
    state: StoreState,
    keys: Sequence[BlockKey],
    parse: Callable[[memoryview, BlockKey], Fact],
    unknown: Fact,
) -> list[Fact]:
    """Parse the head of each block; `unknown` for a missing block or one that cannot be read.

    Does not count as a use. Blocks: reads one page of each block that is not in memory.
    """
    facts = [unknown] * len(keys)
    below: dict[int, list[tuple[int, int, int]]] = {}
    """Place, payload bytes and index of each block to read, by volume."""
    with state.lock:
        for index, row in enumerate(state.catalog.rows(keys)):
            memory = state.memory_of(row) if row != NONE else None
            if memory is not None:
                facts[index] = parse(memory.image(row)[:HEAD_BYTES], keys[index])
                continue
            lower = state.source(row) if row != NONE else None
            if lower is not None:
                location = lower.place(row)
                place = (place_of(location), state.catalog.nbytes[row], index)
                below.setdefault(volume_of(location), []).append(place)
    for number, places in below.items():
        volume = state.volumes[number]
        for first in range(0, len(places), _HEADS_AT_ONCE):
            part = sorted(places)[first : first + _HEADS_AT_ONCE]
            memory_of_heads = aligned(len(part) * HEAD_BYTES)
            reads = np.zeros(len(part), READ_DTYPE)
            reads["key"] = as_words([keys[index] for _, _, index in part])
            reads["place"] = [place for place, _, _ in part]
            reads["payload_bytes"] = [nbytes for _, nbytes, _ in part]
            reads["image"] = address_of(memory_of_heads)[0] + HEAD_BYTES * np.arange(len(part))
            reading = volume.read(reads, Priority.BACKGROUND, _TIMEOUT_S)
            outcomes = reading.result()
            while not reading.released(_TIMEOUT_S):
                pass
            for at, (_, _, index) in enumerate(part):
                if outcomes[at] == Outcome.OK:
                    head = memory_of_heads[at * HEAD_BYTES : (at + 1) * HEAD_BYTES]
                    facts[index] = parse(head, keys[index])
    return facts
