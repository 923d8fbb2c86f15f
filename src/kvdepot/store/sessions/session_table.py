"""The prompts of sessions by name, and their states: alive, pending, closed.

They are stored on the drives too (records.py). A name belongs to one namespace, so that tenants may
use the same name. Number and size are bounded: at the bound the namespace with the most bytes drops
its oldest session that is not pinned.
"""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

import numpy as np

from kvdepot.core.block import BlockKey
from kvdepot.core.clock import Clock
from kvdepot.core.keys import Keys, as_keys
from kvdepot.core.sessions import SessionState
from kvdepot.index.catalog import Catalog
from kvdepot.index.pinned_rows import PinnedRows
from kvdepot.index.table import NONE, Bools

NUMBER_MAX: Final = 1 << 16
BYTES_MAX: Final = 64 << 20
_WORD_BYTES: Final = 8
PACKED_BYTES: Final = 3 * _WORD_BYTES
"""Bytes of a key without the tag of its namespace."""
_LOOKED_AT: Final = 4096
_OVERHEAD_BYTES: Final = 600
"""Estimated bytes of a session without its keys."""


SessionId = tuple[bytes, str]
"""The tag of a session's namespace, and its name."""


def unpacked(tag: bytes, packed: bytes) -> Keys:
    """Restore the keys of a namespace that are stored without its tag."""
    words = np.empty((len(packed) // PACKED_BYTES, 4), np.uint64)
    words[:, 0] = np.frombuffer(tag, np.uint64)[0]
    words[:, 1:] = np.frombuffer(packed, np.uint64).reshape(-1, 3)
    return words


@dataclass(slots=True, eq=False)
class Pin:
    """Blocks that stay on drives until a time, even if other blocks need room."""

    number: int
    packed: bytes
    """The keys of the blocks without tags."""
    granted_s: float
    until_s: float
    """End of the pin, by the time of day."""
    held: Bools
    """True for blocks that are counted in PinnedRows for this pin."""
    owner: str
    """Who made it, as the kernel says: "user 1000". Limits of pins go by this."""

    def __len__(self) -> int:
        return len(self.packed) // PACKED_BYTES


@dataclass(frozen=True, slots=True)
class Prompt:
    """The stored prompt of a session in one namespace."""

    packed: bytes
    state: SessionState
    turns: int = 1
    """Number of times it was named."""
    named_s: float = 0.0
    """Time of day at which it was last named."""
    pin: Pin | None = None

    def __len__(self) -> int:
        return len(self.packed) // PACKED_BYTES

    @property
    def tail(self) -> bytes:
        return self.packed[-PACKED_BYTES:]

    @property
    def nbytes(self) -> int:
        return len(self.packed) + _OVERHEAD_BYTES

    def words(self, tag: bytes) -> Keys:
        """The keys with their tag, four words each."""
        return unpacked(tag, self.packed)

    def keys(self, tag: bytes) -> list[BlockKey]:
        return as_keys(self.words(tag))


SESSION_ORDERS: Final[dict[str, Callable[[tuple[bytes, str, Prompt]], float]]] = {
    "recent": lambda one: -one[2].named_s,
    "cold": lambda one: one[2].named_s,
    "busy": lambda one: -one[2].turns,
}
"""Sort keys of the orders in which sessions are listed."""


class Sessions:
    """All sessions of a store. Call with the store's lock held."""

    def __init__(
        self,
        catalog: Catalog,
        clock: Clock,
        pinned: PinnedRows,
        number_max: int = NUMBER_MAX,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        self._catalog = catalog
        self._clock = clock
        self.pinned = pinned
        self._number_max = number_max
        self._bytes_max = bytes_max
        self._known: dict[bytes, OrderedDict[str, Prompt]] = {}
        """Sessions by tag and name, the one named longest ago first."""
        self._tails: Counter[tuple[bytes, bytes]] = Counter()
        """Number of known prompts that end with a key, by tag and key without it."""
        self._held: Counter[bytes] = Counter()
        """Bytes of all sessions by tag."""
        self._number = 0
        self._forgotten = 0
        self.pins: dict[SessionId, Pin] = {}
        self.pins_ended = 0
        """Pins that have ended since the store was opened, except for replaced ones."""
        self.changed: Callable[[SessionId], None] = lambda _: None
        """Called for every session that was changed or dropped."""

    def remember(
        self, tag: bytes, name: str, words: Keys, state: SessionState, start: int = 0
    ) -> None:
        """Set the prompt of a session, or its blocks from `start` on.

        A part that does not continue the known prompt is ignored.
        """
        before = self.find(tag, name)
        packed = np.ascontiguousarray(words[:, 1:]).tobytes()
        if start:
            if before is None or len(before) != start:
                return
            packed = before.packed + packed
        if len(packed) > self._bytes_max // 2:
            return
        turns = before.turns + (not start) if before is not None else 1
        pin = before.pin if before is not None else None
        self.enter(tag, name, Prompt(packed, state, turns, self._clock.now(), pin))
        while self._number > self._number_max or self._held.total() > self._bytes_max:
            if not self._forget_oldest():
                break

    def enter(self, tag: bytes, name: str, prompt: Prompt) -> None:
        """Add or replace a session."""
        self._take_out(tag, name)
        self._known.setdefault(tag, OrderedDict())[name] = prompt
        self._tails[tag, prompt.tail] += 1
        self._held[tag] += prompt.nbytes
        self._number += 1
        if prompt.pin is not None:
            self.pins[tag, name] = prompt.pin
        self.changed((tag, name))

    def _forget_oldest(self) -> bool:
        """Drop the oldest session of the namespace with the most bytes. False: all are pinned."""
        for tag in sorted(self._held, key=self._held.__getitem__, reverse=True):
            names = self._known[tag]
            oldest = next((name for name, one in names.items() if one.pin is None), None)
            if oldest is not None:
                self.forget(tag, oldest)
                self._forgotten += 1
                return True
        return False

    def forget_older(self, named_s: float) -> None:
        """Drop sessions that were not named since `named_s`, except for pinned ones."""
        for tag, names in list(self._known.items()):
            old = itertools.takewhile(lambda one: one[1].named_s < named_s, list(names.items()))
            for name in [name for name, prompt in old if prompt.pin is None]:
                self.forget(tag, name)

    def set_pin(self, tag: bytes, name: str, pin: Pin) -> None:
        """Set the pin of a session; replaces the one it had."""
        self.clear_pin(tag, name)
        prompt = self.find(tag, name)
        if prompt is not None:
            self._known[tag][name] = replace(prompt, pin=pin)
            self.pins[tag, name] = pin
            self.bind(tag, pin)
            self.changed((tag, name))

    def bind(self, tag: bytes, pin: Pin) -> None:
        """Count the blocks of a pin that are in the index and not counted yet."""
        rows = self._catalog.table.find_many(unpacked(tag, pin.packed))
        found = (rows != NONE) & ~pin.held
        self.pinned.add(np.unique(rows[found]))
        pin.held |= found

    def bind_all(self) -> None:
        """Count the blocks of all pins again, after rows were freed and reused."""
        self.pinned.clear()
        for (tag, _), pin in self.pins.items():
            pin.held[:] = False
            self.bind(tag, pin)

    def end_pin(self, tag: bytes, name: str) -> bool:
        """End the pin of a session; a closed one is dropped. False: it had none."""
        pin = self.clear_pin(tag, name)
        if pin is None:
            return False
        self.pins_ended += 1
        prompt = self.find(tag, name)
        if prompt is not None and prompt.state is SessionState.CLOSED:
            self.tell(tag, name, None, SessionState.CLOSED)
        return True

    def clear_pin(self, tag: bytes, name: str) -> Pin | None:
        """Remove the pin of a session without counting it as ended. Returns it, or None."""
        pin = self.pins.pop((tag, name), None)
        if pin is None:
            return None
        rows = self._catalog.table.find_many(unpacked(tag, pin.packed))
        self.pinned.take_off(np.unique(rows[(rows != NONE) & pin.held]))
        prompt = self.find(tag, name)
        if prompt is not None:
            self._known[tag][name] = replace(prompt, pin=None)
        self.changed((tag, name))
        return pin

    def find(self, tag: bytes, name: str) -> Prompt | None:
        names = self._known.get(tag)
        return names.get(name) if names is not None else None

    def forget(self, tag: bytes, name: str) -> None:
        """Drop a session and its pin, if it is known."""
        self.end_pin(tag, name)
        if self._take_out(tag, name) is not None:
            self.changed((tag, name))

    def _take_out(self, tag: bytes, name: str) -> Prompt | None:
        names = self._known.get(tag)
        prompt = names.pop(name, None) if names else None
        if prompt is None:
            return None
        self._number -= 1
        self._held[tag] -= prompt.nbytes
        self._tails[tag, prompt.tail] -= 1
        if not self._tails[tag, prompt.tail]:
            del self._tails[tag, prompt.tail]
        if not names:
            del self._known[tag], self._held[tag]
        return prompt

    def tell(
        self, tag: bytes, name: str, words: Keys | None, state: SessionState, start: int = 0
    ) -> int:
        """Set the state of a session and its prompt; without `words` the prompt is unchanged. A
        closed session is dropped unless it is pinned.

        Returns how many of its leading blocks are in the store.
        """
        if words is None:
            prompt = self.find(tag, name)
            if prompt is None:
                return 0
            words = prompt.words(tag)
        if state is SessionState.CLOSED and (tag, name) not in self.pins:
            self.forget(tag, name)
        else:
            self.remember(tag, name, words, state, start)
        rows = self._resident(words)
        self._mark(tag, words, rows, state)
        return len(rows)

    def describe(self) -> dict[str, Any]:
        """The counts for `stats`."""
        total = self._held.total()
        return {
            "remembered": self._number,
            "bytes": total,
            "forgotten": self._forgotten,
            "pins": len(self.pins),
            "pins_ended": self.pins_ended,
        }

    def known(self, order: str, limit: int) -> list[tuple[bytes, str, Prompt]]:
        """The first sessions of an order, with their tags. Looks at some thousands at most, so that
        the lock is held briefly: `busy` only considers those named last.
        """
        limit = _LOOKED_AT if order == "busy" else min(limit, _LOOKED_AT)
        found: list[tuple[bytes, str, Prompt]] = []
        for tag, names in self._known.items():
            ordered = names.items() if order == "cold" else reversed(names.items())
            found += [(tag, name, prompt) for name, prompt in islice(ordered, limit)]
            if len(found) > 2 * _LOOKED_AT:
                break
        return found

    def bytes_of(self, tag: bytes, prompt: Prompt) -> dict[str, int]:
        """Bytes of a prompt's blocks in each tier."""
        catalog = self._catalog
        rows = np.array(self._resident(prompt.words(tag)), np.int64)
        sizes, where = catalog.nbytes.array[rows].astype(np.int64), catalog.residency.array[rows]
        found = {one.tier: int(sizes[where & one.bit != 0].sum()) for one in catalog.tiers}
        return {tier: nbytes for tier, nbytes in found.items() if nbytes}

    def tags_of(self, name: str) -> list[bytes]:
        """Tags of the namespaces that have a session of that name."""
        return [tag for tag, names in self._known.items() if name in names]

    def tiers_of(self, tag: bytes, prompt: Prompt) -> dict[str, int]:
        """Number of a prompt's blocks by their fastest tier."""
        rows = self._resident(prompt.words(tag))
        return dict(Counter(self._catalog.fastest(rows)))

    def _mark(self, tag: bytes, words: Keys, rows: list[int], state: SessionState) -> None:
        """Report the state to the eviction orders and the file tiers."""
        catalog = self._catalog
        if state is not SessionState.CLOSED:
            catalog.closed.discard(rows)
        else:
            packed = np.ascontiguousarray(words[:, 1:]).tobytes()
            tails = [packed[at : at + PACKED_BYTES] for at in range(0, len(packed), PACKED_BYTES)]
            pairs = zip(rows, tails, strict=False)
            rows = catalog.closed.unshared(
                rows, {row for row, tail in pairs if (tag, tail) in self._tails}
            )
            catalog.closed.add(rows)
        catalog.leaves.session_changed(rows, state)

    def _resident(self, words: Keys) -> list[int]:
        catalog = self._catalog
        rows = catalog.table.find_many(words)
        there = (rows != NONE) & (catalog.residency.array[rows] != 0)
        found: list[int] = rows[: len(rows) if there.all() else int(there.argmin())].tolist()
        return found
