"""Blocks that are on their way to memory for somebody else: whoever wants them too waits for that.

So a prefix that many users share is read once when they return together, and a hint that is under
way when its request comes is not read again.
"""

from typing import Final

from kvdepot.core.block import CopyState
from kvdepot.store.read.request import Errand, Want
from kvdepot.store.state.state import Stock

_FILLING: Final = int(CopyState.FILLING)
_PATIENCE: Final = 0.5
"""Of the time that is left: then a block is read after all."""


def is_coming(stock: Stock, want: Want) -> bool:
    """Whether a block is being read into memory. Lock held."""
    return bool(stock.catalog.memory.state.view[want.row] == _FILLING)


def await_arrival(stock: Stock, errand: Errand) -> dict[int, int]:
    """Wait for what was left to others, not too long. Those of it that came, and their slots.

    They are leased: they stay. Takes the lock.
    """
    wants, memory = errand.wants, stock.catalog.memory
    with stock.changed:
        patience_s = _PATIENCE * max(0.0, errand.deadline - stock.clock.now())
        stock.changed.wait_for(
            lambda: not any(is_coming(stock, wants[index]) for index in errand.later), patience_s
        )
        here = [index for index in errand.later if memory.ready(wants[index].row)]
        return {index: memory.location[wants[index].row] for index in here}
