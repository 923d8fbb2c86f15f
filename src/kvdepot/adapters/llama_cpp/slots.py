"""The slots of a llama-server: the request that has each slot, and the slot's assumed content.

The assumed content decides which slot a request gets, and whether it may use the KV there: only if
it is of the same user, with the same scales of LoRAs. The server itself compares tokens.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from kvdepot.adapters.llama_cpp.sequence_state import Tokens

_SAVED_S: Final = 2.0
Scales = tuple[float, ...]
"""The strength of each loaded LoRA, by its number; 0: it is off."""


class Owner(NamedTuple):
    """The owner of KV, which is shared only between requests with equal owners."""

    user: bytes = b""
    """A digest of the API key; empty without one."""
    scales: Scales = ()
    """The scales of the LoRAs that the KV was computed with."""


@dataclass(slots=True)
class Slot:
    """One slot. The lock of `Slots` guards `owner` and `scales`; the rest belongs to the request
    that has the slot."""

    number: int
    tokens: Tokens = field(default_factory=lambda: np.zeros(0, np.int32))
    """The tokens assumed to be in the slot; empty if `owner` is None."""
    owner: Owner | None = None
    """The owner of the tokens; None: not known."""
    scales: Scales = ()
    """The scales of the last request that was sent to it; empty: not known. The server empties a
    slot for a request with other scales."""
    used: int = 0
    """The count of `take` calls when it was last taken."""
    holders: int = 0
    """The number of users: the request that has the slot, and the thread that saves it."""
    answering: bool = False
    """True until its request has ended."""


class Slots:
    """Gives slots to requests, one at a time each. Thread-safe.

    If the slots share one cache (`shared`), the server empties all idle slots when a request
    begins. So a request whose slot was restored must begin before the next one may.
    """

    def __init__(
        self, numbers: Sequence[int], *, shared: bool = False, saved_s: float = _SAVED_S
    ) -> None:
        """`saved_s`: how long a request waits for a slot that is being saved if another is free."""
        self._slots = [Slot(number) for number in numbers]
        self._shared = shared and len(numbers) > 1
        self._saved_s = saved_s
        self._changed = threading.Condition()
        self._uses = 0
        self._launching: Slot | None = None

    def take(self, tokens: Tokens, owner: Owner) -> Slot:
        """The slot in which `owner` has most of the prompt; of several the least recently used. The
        tokens of another owner are forgotten.

        Blocks while all slots are busy, and for up to `saved_s` for a slot that is being saved.
        """
        began_s = time.monotonic()
        with self._changed:
            while True:
                patient = time.monotonic() - began_s < self._saved_s
                free = [
                    slot
                    for slot in self._slots
                    if not slot.answering and (patient or not slot.holders)
                ]
                if free:
                    best = max(free, key=lambda slot: _preference(slot, tokens, owner))
                    if not best.holders:
                        self._uses += 1
                        if best.owner != owner:
                            best.owner, best.tokens = owner, tokens[:0]
                        best.holders, best.answering, best.used = 1, True, self._uses
                        return best
                self._changed.wait(self._saved_s if patient else None)

    def leave(self, slot: Slot, tokens: Tokens, owner: Owner) -> bool:
        """Record the tokens that the slot's request has left in it. False, and the slot counts as
        empty, if a request of another owner may have used it meanwhile."""
        with self._changed:
            own = slot.owner == owner
            slot.tokens = tokens if own else tokens[:0]
            slot.scales = owner.scales if own else ()
            return own

    def disturb(self, owner: Owner | None) -> None:
        """Forget the content of other owners' slots: the server chooses the slot of a request of
        `owner` (None: not known), and it may be any of them."""
        with self._changed:
            for slot in self._slots:
                if slot.owner != owner:
                    slot.owner, slot.tokens, slot.scales = None, slot.tokens[:0], ()

    def hold(self, slot: Slot) -> None:
        """A thread is going to save the slot. It is free after two calls of `free`."""
        with self._changed:
            slot.holders += 1

    def free(self, slot: Slot) -> None:
        """Called first by the request, then by the thread that saves the slot."""
        with self._changed:
            slot.holders -= 1
            slot.answering = False
            self._changed.notify_all()

    def begin_launch(self, slot: Slot) -> None:
        """Block until no other request is about to begin, if that could empty this slot."""
        if not self._shared:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._launching is None)
            self._launching = slot
            for other in self._slots:
                if other is not slot and not other.answering:
                    other.tokens = other.tokens[:0]

    def is_launching(self, slot: Slot) -> bool:
        with self._changed:
            return self._launching is slot

    def end_launch(self, slot: Slot) -> None:
        """May be called twice."""
        with self._changed:
            if self._launching is slot:
                self._launching = None
                self._changed.notify_all()


def _preference(slot: Slot, tokens: Tokens, owner: Owner) -> tuple[int, int]:
    return (common(slot.tokens, tokens) if slot.owner == owner else 0), -slot.used


def common(one: Tokens, other: Tokens) -> int:
    """The length of the common prefix."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length
