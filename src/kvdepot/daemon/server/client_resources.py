"""What one client holds and may hold: leases, slots, hints; from its first connection to its last.

The connections of a session live and die together: when one ends, for whatever reason, the daemon
hangs up on the others, and when the last is gone everything is given back. A client that was killed
ends like any other, since the kernel closes its sockets; where a child of it has them too, the
daemon sees the process itself end.
"""

import itertools
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvdepot.core.block import PutResult
from kvdepot.core.keys import Keys, tag_word
from kvdepot.core.requests import BLOCK_DTYPE, BlockSize, Offer
from kvdepot.daemon.wire.frames import Channel, Peer
from kvdepot.daemon.wire.messages import TOKEN_BYTES
from kvdepot.errors import ConfigError, WireError
from kvdepot.store.access import Caller
from kvdepot.store.engine import Engine
from kvdepot.store.read.lease import BlockLease
from kvdepot.store.read.prefetch import Hint
from kvdepot.store.write.put import NewBlock

HELLO_TIMEOUT_S: Final = 5.0
"""A connection that does not say who it is for this long is closed."""
TAKE_TIMEOUT_S: Final = 10.0
"""A client that does not take what it was lent for this long is given up."""
LINGER_S: Final = 30.0
"""After a client was hung up on, it may have this long to let go of what it holds."""


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Beyond these, connections are refused, leases are empty, reservations are throttled, and
    hints bring nothing.
    """

    clients: int = 64
    connections: int = 16
    """Of one client."""
    leases: int = 4096
    """Leases of one client at a time."""
    leased: int = 1 << 20
    """Blocks in them."""
    slots: int = 1 << 16
    """Slots reserved by one client at a time."""
    hints: int = 64
    """Hints of one client under way at a time."""
    namespaces: int = 1024
    """Namespaces that one client has registered."""


class ServerCounters:
    """What happened so far, counted. Thread-safe."""

    NAMES: Final = (
        "sessions", "connections", "requests", "refused", "malformed", "limited", "failed",
    )  # fmt: skip

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(self.NAMES, 0)

    def count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def as_dict(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


NO_LEASE = 0
"""The number of a lease or a reservation of nothing."""


def _pidfd_of(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (OSError, ValueError):
        return -1


class ClientResources:
    """One client. Thread-safe."""

    def __init__(
        self,
        engine: Engine,
        limits: ClientLimits,
        counters: ServerCounters,
        peer: Peer,
        protocol: int,
    ) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.peer = peer
        self.protocol = protocol
        """What was agreed on with it."""
        self._engine = engine
        self.caller = Caller(f"client {peer.pid}")
        self._limits = limits
        self._counters = counters
        self.pidfd = _pidfd_of(peer.pid)
        """Readable when the client's process has ended; -1 where that cannot be seen from here."""
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        self._numbers = itertools.count(NO_LEASE + 1)
        self._leases: dict[int, BlockLease] = {}
        self._slots: dict[int, dict[int, NewBlock]] = {}
        self._hints: dict[int, Hint] = {}
        self.over = False

    def join(self, channel: Channel) -> bool:
        """Add a connection. False: the session is over, or has enough of them."""
        with self._lock:
            if self.over or len(self._channels) >= self._limits.connections:
                return False
            self._channels.add(channel)
            return True

    def leave(self, channel: Channel) -> bool:
        """A connection has ended. True: it was the last, and nothing is held any more."""
        self.hang_up()
        with self._lock:
            self._channels.discard(channel)
            if self._channels:
                return False
            leases, self._leases = self._leases, {}
            slots, self._slots = self._slots, {}
            hints, self._hints = self._hints, {}
        with ExitStack() as rest:  # each of them, whatever another one raises
            rest.callback(self._engine.unregister, self.caller)
            for hint in hints.values():
                rest.callback(hint.cancel)
            for lease in leases.values():
                rest.callback(lease.release)
            left = [offer for part in slots.values() for offer in part.values()]
            rest.callback(self._engine.abandon, self.caller, left)
        return True

    def hang_up(self, how: Callable[[Channel], None] = Channel.hang_up) -> None:
        """The session is over: serve it no more. What it holds stays until its sockets close."""
        with self._lock:
            self.over = True
            channels = list(self._channels)
        for channel in channels:
            how(channel)

    def register(self, tag: bytes, size: BlockSize, description: bytes) -> None:
        """Let the client use a namespace while it is there. Raises as Engine.register."""
        spaces = self.caller.spaces
        full = tag_word(tag) not in spaces and len(spaces) >= self._limits.namespaces
        if full:
            self._counters.count("limited")
            raise ConfigError(
                "namespace",
                f"a client may register {self._limits.namespaces} namespaces",
                hint="use fewer of them at a time in one process",
            )
        self._engine.register(self.caller, tag, size, description)

    def has_registered(self, tag: bytes) -> bool:
        """Whether a namespace is one of the client's."""
        return tag_word(tag) in self.caller.spaces

    def may_hold(self) -> bool:
        """Whether the client may hold more blocks than it does."""
        with self._lock:
            leased = sum(len(lease.rows) for lease in self._leases.values())
            full = len(self._leases) >= self._limits.leases or leased >= self._limits.leased
        if full:
            self._counters.count("limited")
        return not full

    def lease(self, keys: Keys) -> tuple[int, BlockLease]:
        """Lease the resident prefix of keys; nothing if the client holds too much."""
        if not self.may_hold():
            return NO_LEASE, self.new_lease()
        lease = self._engine.lease(self.caller, keys)
        return self.keep(lease), lease

    def new_lease(self) -> BlockLease:
        """A lease of nothing, to which blocks are added."""
        return BlockLease(self._engine.state)

    def keep(self, lease: BlockLease) -> int:
        """End a lease when the client goes. Returns its number."""
        if not lease.rows:
            return NO_LEASE
        with self._lock:
            number = next(self._numbers)
            self._leases[number] = lease
        return number

    def held(self, number: int) -> BlockLease:
        """The lease with a number. WireError if there is none."""
        with self._lock:
            lease = self._leases.get(number)
        if lease is None:
            raise WireError("a lease that is not held")
        return lease

    def release(self, numbers: list[int]) -> None:
        """End leases. WireError, after all others have ended, if a number is none of a lease."""
        with self._lock:
            leases = [self._leases.pop(number, None) for number in numbers]
        for lease in leases:
            if lease is not None:
                lease.release()
        if None in leases:
            raise WireError("a lease that is not held was released")

    def reserve(
        self, keys: Keys, timeout_s: float, *, pad: bool
    ) -> tuple[int, list[NewBlock | None], list[PutResult]]:
        """Slots for new blocks: their number as a reservation, and the answers."""
        with self._lock:
            reserved = sum(len(part) for part in self._slots.values())
        if reserved + len(keys) > self._limits.slots:
            self._counters.count("limited")
            return NO_LEASE, [None] * len(keys), [PutResult.THROTTLED] * len(keys)
        blocks = np.zeros(len(keys), BLOCK_DTYPE)
        blocks["key"] = keys
        offer = Offer(blocks)
        offers, answers = self._engine.reserve(self.caller, offer, timeout_s, pad=pad)
        slots = {index: offer for index, offer in enumerate(offers) if offer is not None}
        number = NO_LEASE
        if slots:
            with self._lock:
                number = next(self._numbers)
                self._slots[number] = slots
        return number, offers, answers

    def seal(
        self, number: int, indices: list[int], *, tokens: bool = False, producer: bool = False
    ) -> None:
        """Make blocks of slots. `tokens`, `producer`: the client has laid these into them."""
        with self._lock:
            slots = self._slots.get(number, {})
            if len(set(indices)) != len(indices) or any(index not in slots for index in indices):
                raise WireError("a slot was sealed that is not reserved")
            wave = [slots.pop(index) for index in indices]
            if not slots:
                self._slots.pop(number, None)
        self._engine.seal(self.caller, wave, in_slots=(tokens, producer))

    def abandon(self, number: int) -> None:
        """Give the slots of a reservation back that were not sealed."""
        with self._lock:
            slots = self._slots.pop(number, {})
        self._engine.abandon(self.caller, list(slots.values()))

    def may_hint(self) -> bool:
        with self._lock:
            under_way = sum(not hint.wait(0.0) for hint in self._hints.values())
        if under_way >= self._limits.hints:
            self._counters.count("limited")
        return under_way < self._limits.hints

    def keep_hint(self, hint: Hint) -> int:
        """Call a hint off when the client goes. Returns its number."""
        if not hint.wanted:
            return NO_LEASE
        with self._lock:
            while len(self._hints) >= 2 * self._limits.hints:
                ended = [number for number, one in self._hints.items() if one.wait(0.0)]
                self._hints.pop(ended[0] if ended else next(iter(self._hints))).cancel()
            number = next(self._numbers)
            self._hints[number] = hint
        return number

    def hint(self, number: int) -> Hint | None:
        """A hint by its number; None for one that is long over."""
        with self._lock:
            return self._hints.get(number)

    def describe(self) -> dict[str, Any]:
        with self._lock:
            return {
                "pid": self.peer.pid,
                "uid": self.peer.uid,
                "protocol": self.protocol,
                "connections": len(self._channels),
                "leases": len(self._leases),
                "leased": sum(len(lease.rows) for lease in self._leases.values()),
                "reserved": sum(len(part) for part in self._slots.values()),
                "hints": sum(not hint.wait(0.0) for hint in self._hints.values()),
            }
