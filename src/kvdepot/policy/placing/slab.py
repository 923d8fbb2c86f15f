"""Which stretch of an arena is emptied for a size class that has no slot left. Pure."""

from typing import Final

import numpy as np
import numpy.typing as npt

FREE: Final = -1
HELD: Final = int(np.iinfo(np.int64).max)


def coldest_stretch(stamps: npt.NDArray[np.int64], chunks: int) -> int | None:
    """Start of the stretch of `chunks` whose hottest block is the coldest, or None if all are held.

    `stamps` has a value a chunk: FREE, HELD, or the newest stamp of the blocks in its slab.
    """
    if len(stamps) < chunks:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(stamps, chunks)
    hottest = windows.max(axis=1)
    start = int(hottest.argmin())
    return None if hottest[start] == HELD else start
