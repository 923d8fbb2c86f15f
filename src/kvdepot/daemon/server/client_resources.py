"""The leases, slots and hints of one client, and their limits, from first to last connection.

The connections of a client end together: when one ends, the daemon shuts the others down, and when
the last is closed all resources are released. The kernel closes the sockets of a killed process; if
a child still has them open, the daemon notices the end of the process itself (pidfd).
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
from kvdepot.core.requests import BLOCK_DTYPE, Array, BlockSize, Offer
from kvdepot.daemon.wire.frames import NOWHERE, TOKEN_BYTES, Channel, Peer
from kvdepot.errors import ConfigError, WireError
from kvdepot.store.engine import Caller, Engine
from kvdepot.store.read.prefetch import Hint
from kvdepot.store.state.state import BlockLease
from kvdepot.store.write.put import NewBlock

HELLO_TIMEOUT_S: Final = 5.0
"""A connection that sends no HELLO within this time is closed."""
TAKE_TIMEOUT_S: Final = 10.0
"""A client that does not confirm lent blocks (TAKEN) within this time is disconnected."""
LINGER_S: Final = 30.0
"""Time for a client to close its connections after the daemon has ended its session."""


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits of one client. Beyond them connections are refused, leases are empty, reservations are
    throttled, and hints prefetch nothing.
    """

    clients: int = 64
    connections: int = 16
    """Open connections."""
    leases: int = 4096
    """Leases at a time."""
    leased: int = 1 << 20
    """Blocks in these leases."""
    slots: int = 1 << 16
    """Reserved slots at a time."""
    hints: int = 64
    """Running hints at a time."""
    namespaces: int = 1024
    """Registered namespaces."""


class ServerCounters:
    """Counters of events since the start. Thread-safe."""

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
"""The number of an empty lease or reservation."""


def _pidfd_of(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (OSError, ValueError):
        return -1


class ClientResources:
    """The resources of one client. Thread-safe."""

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
        """The agreed version of the protocol."""
        self._engine = engine
        self.caller = Caller(f"client {peer.pid}")
        self._limits = limits
        self._counters = counters
        self.pidfd = _pidfd_of(peer.pid)
        """Readable when the client's process has ended; -1 if it cannot be watched."""
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        self._numbers = itertools.count(NO_LEASE + 1)
        self._leases: dict[int, BlockLease] = {}
        self._slots: dict[int, dict[int, NewBlock]] = {}
        self._hints: dict[int, Hint] = {}
        self.over = False

    def join(self, channel: Channel) -> bool:
        """Add a connection. False if the session is over or has `connections` already."""
        with self._lock:
            if self.over or len(self._channels) >= self._limits.connections:
                return False
            self._channels.add(channel)
            return True

    def leave(self, channel: Channel) -> bool:
        """Remove a connection. True if it was the last: all resources were released."""
        self.hang_up()
        with self._lock:
            self._channels.discard(channel)
            if self._channels:
                return False
            leases, self._leases = self._leases, {}
            slots, self._slots = self._slots, {}
            hints, self._hints = self._hints, {}
        with ExitStack() as rest:  # all run, even if one raises
            rest.callback(self._engine.unregister, self.caller)
            for hint in hints.values():
                rest.callback(hint.cancel)
            for lease in leases.values():
                rest.callback(lease.release)
            left = [offer for part in slots.values() for offer in part.values()]
            rest.callback(self._engine.abandon, self.caller, left)
        return True

    def hang_up(self, how: Callable[[Channel], None] = Channel.hang_up) -> None:
        """End the session. Its resources are kept until its connections close."""
        with self._lock:
            self.over = True
            channels = list(self._channels)
        for channel in channels:
            how(channel)

    def register(self, tag: bytes, size: BlockSize, description: bytes) -> None:
        """Let the client use a namespace until it ends. Raises as Engine.register does."""
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
        """True if the client has registered the namespace."""
        return tag_word(tag) in self.caller.spaces

    def may_hold(self) -> bool:
        """True if the client may lease more blocks. Counts a refusal."""
        with self._lock:
            leased = sum(len(lease.rows) for lease in self._leases.values())
            full = len(self._leases) >= self._limits.leases or leased >= self._limits.leased
        if full:
            self._counters.count("limited")
        return not full

    def lease(self, keys: Keys) -> tuple[int, BlockLease]:
        """Lease the resident prefix of keys. The lease is empty if the client is at its limits."""
        if not self.may_hold():
            return NO_LEASE, self.new_lease()
        lease = self._engine.lease(self.caller, keys)
        return self.keep(lease), lease

    def new_lease(self) -> BlockLease:
        """An empty lease, to which blocks are added."""
        return BlockLease(self._engine.state)

    def keep(self, lease: BlockLease) -> int:
        """Store a lease until its release or the end of the client. Returns its number."""
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
            raise WireError("an unknown lease")
        return lease

    def release(self, numbers: list[int]) -> None:
        """End leases. WireError if a number is unknown, after the others were released."""
        with self._lock:
            leases = [self._leases.pop(number, None) for number in numbers]
        for lease in leases:
            if lease is not None:
                lease.release()
        if None in leases:
            raise WireError("an unknown lease was released")

    def reserve(
        self, keys: Keys, timeout_s: float, *, pad: bool
    ) -> tuple[int, list[NewBlock | None], list[PutResult]]:
        """Reserve slots for new blocks. Returns the number of the reservation,
        slots and answers.
        """
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
        """Seal filled slots. `tokens`, `producer`: the client has written these into the slots."""
        with self._lock:
            slots = self._slots.get(number, {})
            if len(set(indices)) != len(indices) or any(index not in slots for index in indices):
                raise WireError("a slot was sealed that is not reserved")
            wave = [slots.pop(index) for index in indices]
            if not slots:
                self._slots.pop(number, None)
        self._engine.seal(self.caller, wave, in_slots=(tokens, producer))

    def abandon(self, number: int) -> None:
        """Free the unsealed slots of a reservation."""
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
        """Store a hint, to be cancelled at the end of the client. Returns its number."""
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
        """A hint by its number; None if it was dropped after its end."""
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


class SharedMemory:
    """The shared memory of a store (`dram.shared`), and offsets in the mappings of clients.

    Clients map the arena and the slower memory, if any, as one area, and staging as another.
    """

    def __init__(self, engine: Engine) -> None:
        self._memories = engine.memories
        self.descriptors = [memory.fd for memory in self._memories]
        self.nbytes = [memory.nbytes for memory in self._memories]

    def is_prefaulted(self) -> bool:
        """True if prefaulting has ended, or was not configured."""
        return all(memory.prefaulted(0.0) for memory in self._memories)

    def places(self, addresses: Array) -> tuple[Array, Array]:
        """The offset of each address in its area, NOWHERE for 0; and True if
        the area is staging.
        """
        places, staged = np.full(len(addresses), NOWHERE, np.int64), np.zeros(len(addresses), bool)
        before = 0
        for memory in self._memories:
            is_staging = memory is self._memories[-1]
            here = (addresses >= memory.address) & (addresses < memory.address + memory.nbytes)
            places[here] = addresses[here] - memory.address + (0 if is_staging else before)
            staged |= here & is_staging
            before += memory.nbytes
        return places, staged
