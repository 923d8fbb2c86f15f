"""The leases, slots and hints of one client, and their limits, from first to last connection.

The connections of a client end together: when one ends, the daemon shuts the others down. It
releases the resources when the client has closed all connections, or its process has ended (pidfd),
and never because of time: a process that was stopped may read or fill its slots when it continues.
What one client holds is bounded instead, so that the others have room.
"""

import itertools
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvdepot.core.block import PutResult
from kvdepot.core.keys import Keys, tag_word
from kvdepot.core.requests import BLOCK_DTYPE, Array, BlockSize, Offer
from kvdepot.daemon.wire.frames import NOWHERE, TOKEN_BYTES, Channel
from kvdepot.daemon.wire.versions import LENDS_FROM_ARENA
from kvdepot.errors import ConfigError, WireError
from kvdepot.format.record import record_bytes, record_sizes
from kvdepot.store.engine import Caller, Engine
from kvdepot.store.read.prefetch import Hint
from kvdepot.store.state.state import BlockLease
from kvdepot.store.write.put import NewBlock

HELLO_TIMEOUT_S: Final = 5.0
"""A connection that sends no HELLO within this time is closed."""
TAKE_TIMEOUT_S: Final = 10.0
"""A client that does not confirm lent blocks (TAKEN) within this time is disconnected."""


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
        "overdue",
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


class Holdings:
    """The leases and reserved slots of one client, and the memory that they take. Thread-safe."""

    def __init__(self, engine: Engine, limits: ClientLimits, counters: ServerCounters) -> None:
        self._nbytes = engine.state.catalog.nbytes
        dram = engine.state.config.dram
        self._bytes_max = int(dram.client_share * engine.state.arena.capacity_bytes)
        self._time_s = dram.client_time
        self._limits = limits
        self._counters = counters
        self._changed = threading.Condition()
        self._numbers = itertools.count(NO_LEASE + 1)
        self._leases: dict[int, BlockLease] = {}
        self._slots: dict[int, dict[int, NewBlock]] = {}
        self._since: dict[int, float] = {}
        """When each lease and reservation was made, the oldest first."""
        self._rows: Counter[int] = Counter()
        """Number of leases on each block."""
        self._leased = 0
        self._reserved = 0
        """Reserved slots, and those that are being reserved."""
        self._bytes = 0
        """Memory for all of these, each block once."""

    def may_lease(self) -> bool:
        """True unless the client has too many leases, or too many blocks in them."""
        with self._changed:
            full = len(self._leases) >= self._limits.leases or self._leased >= self._limits.leased
        if full:
            self._counters.count("limited")
        return not full

    def take(self, rows: list[int], *, whole: bool = False) -> int:
        """Count leases on the leading rows for which there is room; `whole`: on all or none.
        Returns their number. The first block of a client always has room.
        """
        with self._changed:
            new = np.array([row not in self._rows for row in rows], bool)
            sizes = np.where(new, record_sizes(self._nbytes.array[np.asarray(rows, int)]), 0)
            count = self._fitting(sizes)
            if count < len(rows):
                self._counters.count("limited")
                count = 0 if whole else count
            self._rows.update(rows[:count])
            self._leased += count
            self._bytes += int(sizes[:count].sum())
        return count

    def give_back(self, rows: list[int]) -> None:
        """Undo `take`. Called before the rows are released, while they have their sizes."""
        with self._changed:
            self._rows.subtract(rows)
            free = [row for row in dict.fromkeys(rows) if not self._rows[row]]
            for row in free:
                del self._rows[row]
            self._leased -= len(rows)
            self._bytes -= int(record_sizes(self._nbytes.array[np.asarray(free, int)]).sum())
            self._changed.notify_all()

    def keep(self, lease: BlockLease) -> int:
        """Store a lease until it is taken out. Returns its number."""
        with self._changed:
            number = self._next_number()
            self._leases[number] = lease
        return number

    def held(self, number: int) -> BlockLease | None:
        with self._changed:
            return self._leases.get(number)

    def take_out(self, numbers: list[int]) -> list[BlockLease | None]:
        """Remove leases; None for an unknown number. The caller releases them."""
        with self._changed:
            for number in numbers:
                self._since.pop(number, None)
            return [self._leases.pop(number, None) for number in numbers]

    def take_slots(self, sizes: Array, timeout_s: float) -> int:
        """Count slots of these sizes as reserved: the leading ones for which there is room, after
        waiting for the first. Returns their number.
        """
        with self._changed:
            if len(sizes):
                self._changed.wait_for(lambda: self._slots_fitting(sizes), timeout_s)
            count = self._slots_fitting(sizes)
            if count < len(sizes):
                self._counters.count("limited")
            self._reserved += count
            self._bytes += int(sizes[:count].sum())
        return count

    def give_back_slots(self, count: int, nbytes: int) -> None:
        with self._changed:
            self._reserved -= count
            self._bytes -= nbytes
            self._changed.notify_all()

    def keep_slots(self, slots: dict[int, NewBlock]) -> int:
        """Store a reservation. Returns its number."""
        with self._changed:
            number = self._next_number()
            self._slots[number] = slots
        return number

    def slots(self, number: int, indices: list[int] | None = None) -> list[NewBlock]:
        """Take slots out of a reservation, all or those with these indices. WireError if one is
        not reserved. The caller ends with `give_back_slots`.
        """
        with self._changed:
            slots = self._slots.get(number, {})
            if indices is None:
                indices = list(slots)
            if len(set(indices)) != len(indices) or any(index not in slots for index in indices):
                raise WireError("a slot was sealed that is not reserved")
            found = [slots.pop(index) for index in indices]
            if not slots:
                self._slots.pop(number, None)
                self._since.pop(number, None)
        return found

    def clear(self) -> tuple[list[BlockLease], list[NewBlock]]:
        """Take out everything."""
        with self._changed:
            leases, slots = list(self._leases.values()), list(self._slots.values())
            self._leases, self._slots, self._since = {}, {}, {}
        return leases, [slot for part in slots for slot in part.values()]

    def are_overdue(self) -> bool:
        """True if a lease or reservation is held for longer than `dram.client_time`."""
        with self._changed:
            oldest_s = next(iter(self._since.values()), None)
        return oldest_s is not None and time.monotonic() - oldest_s > self._time_s

    def describe(self) -> dict[str, int]:
        with self._changed:
            return {
                "leases": len(self._leases),
                "leased": self._leased,
                "reserved": self._reserved,
                "held_bytes": self._bytes,
            }

    def _next_number(self) -> int:
        number = next(self._numbers)
        self._since[number] = time.monotonic()
        return number

    def _slots_fitting(self, sizes: Array) -> int:
        return min(self._fitting(sizes), self._limits.slots - self._reserved)

    def _fitting(self, sizes: Array) -> int:
        """How many leading blocks of these sizes there is room for."""
        count = int(np.searchsorted(np.cumsum(sizes), self._bytes_max - self._bytes, "right"))
        return max(count, int(not self._bytes and len(sizes) > 0))


class ClientLease(BlockLease):
    """A lease of a client. Protects the leading blocks for which its holdings have room: the others
    can be delivered as long as they are in the store.
    """

    __slots__ = ("_counted", "_holdings")

    def __init__(self, engine: Engine, holdings: Holdings) -> None:
        super().__init__(engine.state)
        self._holdings = holdings
        self._counted = 0
        """Leading rows that are counted in the holdings."""

    def adopt(self, lease: BlockLease) -> None:
        """Take over the blocks of a new lease."""
        count = self._counted = self._holdings.take(lease.rows)
        self.rows, lease.rows, self.words = lease.rows[:count], lease.rows[count:], lease.words
        lease.release()

    def fits(self) -> bool:
        """Count the rows that were added. False if the holdings have no room for them: the client
        must be waited for, and then the lease released.
        """
        new = self.rows[self._counted :]
        count = self._holdings.take(new, whole=True)
        self._counted += count
        return count == len(new)

    def release(self) -> None:
        self._holdings.give_back(self.rows[: self._counted])
        self._counted = 0
        super().release()


class ClientResources:
    """The resources of one client. Thread-safe."""

    def __init__(
        self,
        engine: Engine,
        limits: ClientLimits,
        counters: ServerCounters,
        channel: Channel,
        protocol: int,
    ) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.peer = peer = channel.peer()
        self.protocol = protocol
        """The agreed version of the protocol."""
        self._engine = engine
        self.caller = Caller(f"client {peer.pid}")
        with engine.state.lock:
            self.caller.told.update(engine.state.catalog.left_unwritten)
        self._limits = limits
        self._counters = counters
        self.pidfd = channel.peer_pidfd()
        """Readable when the client's process has ended; -1 if it cannot be watched."""
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        self._holdings = Holdings(engine, limits, counters)
        self._hint_numbers = itertools.count(NO_LEASE + 1)
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
            hints, self._hints = self._hints, {}
        leases, slots = self._holdings.clear()
        with ExitStack() as rest:  # all run, even if one raises
            rest.callback(self._engine.unregister, self.caller)
            for hint in hints.values():
                rest.callback(hint.cancel)
            for lease in leases:
                rest.callback(lease.release)
            rest.callback(self._engine.abandon, self.caller, slots)
        return True

    def is_overdue(self) -> bool:
        """True if the client has held a lease or slots for too long, and is still connected."""
        return not self.over and self._holdings.are_overdue()

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

    def may_lease(self) -> bool:
        """True if the client may lease more blocks. Counts a refusal."""
        return self._holdings.may_lease()

    def lease(self, keys: Keys) -> tuple[int, BlockLease]:
        """Lease the resident prefix of keys. The lease is empty if the client has too many."""
        lease = self.new_lease()
        if self.may_lease():
            lease.adopt(self._engine.lease(self.caller, keys))
        if self.protocol < LENDS_FROM_ARENA:
            lease.words = lease.words[: len(lease.rows)]
        return self.keep(lease), lease

    def new_lease(self) -> ClientLease:
        """An empty lease, to which blocks are added."""
        return ClientLease(self._engine, self._holdings)

    def keep(self, lease: BlockLease) -> int:
        """Store a lease until its release or the end of the client. Returns its number."""
        return self._holdings.keep(lease) if lease.rows or len(lease.words) else NO_LEASE

    def held(self, number: int) -> BlockLease:
        """The lease with a number. WireError if there is none."""
        lease = self._holdings.held(number)
        if lease is None:
            raise WireError("an unknown lease")
        return lease

    def release(self, numbers: list[int]) -> None:
        """End leases. WireError if a number is unknown, after the others were released."""
        leases = self._holdings.take_out(numbers)
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
        holdings, deadline_s = self._holdings, time.monotonic() + timeout_s
        blocks = np.zeros(len(keys), BLOCK_DTYPE)
        blocks["key"] = keys
        self._engine.access.set_sizes(self.caller, blocks)
        sizes = record_sizes(blocks["payload_bytes"])
        count = holdings.take_slots(sizes, timeout_s)
        slots: dict[int, NewBlock] = {}
        offers: list[NewBlock | None] = []
        answers: list[PutResult] = []
        try:
            if count:
                left_s = max(0.0, deadline_s - time.monotonic()) if timeout_s else 0.0
                offers, answers = self._engine.reserve(
                    self.caller, Offer(blocks[:count]), left_s, pad=pad
                )
                slots = {index: offer for index, offer in enumerate(offers) if offer is not None}
        finally:
            unused = int(sizes[:count].sum()) - _slot_bytes(slots.values())
            holdings.give_back_slots(count - len(slots), unused)
        number = holdings.keep_slots(slots) if slots else NO_LEASE
        if pad or not count:
            left = len(keys) - len(answers)
            offers, answers = offers + [None] * left, answers + [PutResult.THROTTLED] * left
        return number, offers, answers

    def seal(
        self, number: int, indices: list[int], *, tokens: bool = False, producer: bool = False
    ) -> None:
        """Seal filled slots. `tokens`, `producer`: the client has written these into the slots."""
        wave = self._holdings.slots(number, indices)
        try:
            self._engine.seal(self.caller, wave, in_slots=(tokens, producer))
        finally:
            self._holdings.give_back_slots(len(wave), _slot_bytes(wave))

    def abandon(self, number: int) -> None:
        """Free the unsealed slots of a reservation."""
        slots = self._holdings.slots(number)
        self._engine.abandon(self.caller, slots)
        self._holdings.give_back_slots(len(slots), _slot_bytes(slots))

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
            number = next(self._hint_numbers)
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
                "is_over": self.over,
                **self._holdings.describe(),
                "hints": sum(not hint.wait(0.0) for hint in self._hints.values()),
            }


def _slot_bytes(slots: Iterable[NewBlock]) -> int:
    return sum([record_bytes(slot.payload_bytes) for slot in slots])


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
