"""What plain LRU would have hit: a small LRU of a sample of the keys, beside the real tier.

LRU keeps whole prefixes by itself when a prompt's tail is touched before its head, so a sample of
keys tells the truth about it.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

_KEYS_MAX: Final = 2048


class LruShadow:
    """Sampled keys in order of use, as many as the tier's share of them."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()
        self.bits = 0
        """One key in 2 ** bits is in the sample."""
        self.capacity = 1

    def fit(self, blocks: int) -> None:
        """The tier holds `blocks` now."""
        while blocks >> self.bits > _KEYS_MAX:
            self.bits += 1
            kept = [digest for digest in self._order if self.has(digest)]
            self._order = OrderedDict.fromkeys(kept)
        self.capacity = max(1, blocks >> self.bits)
        while len(self._order) > self.capacity:
            self._order.popitem(last=False)

    def has(self, digest: int) -> bool:
        """Whether the key is in the sample. Other bits than those that places are chosen by."""
        return not digest >> 64 - self.bits

    def sampled(self, digests: npt.NDArray[np.uint64]) -> list[int]:
        """Those of the keys that are in the sample."""
        if self.bits:
            digests = digests[digests >> np.uint64(64 - self.bits) == 0]
        chosen: list[int] = digests.tolist()
        return chosen

    def touch(self, digests: Iterable[int]) -> int:
        """Keys of the sample were asked for. Returns how many of them LRU would have had."""
        order, had = self._order, 0
        for digest in digests:
            if digest in order:
                order.move_to_end(digest)
                had += 1
            else:
                order[digest] = None
        while len(order) > self.capacity:
            order.popitem(last=False)
        return had
