"""A store for processes that map its memory: keys in, places in that memory out.

What the daemon serves. Keys come as arrays, and answers are arrays too, so that a call costs little
more for many blocks than for one. Sizes and places are the store's own, never the client's. Needs
a store whose memory is shared (`dram.shared`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvdepot.core.block import ANSWERS, TAG_BYTES, BlockKey, CopyState, PutResult
from kvdepot.core.depot import Arrival
from kvdepot.core.order import SessionState
from kvdepot.core.volume import TIER_NAMES
from kvdepot.errors import ConfigError
from kvdepot.format.record import HEAD_BYTES, chunk_count, filled_producer, filled_tokens
from kvdepot.index.table import NONE, Keys, Rows
from kvdepot.native import address_of
from kvdepot.store.read.disk_reads import BlockRead
from kvdepot.store.read.prefetch import Hint, Prefetcher
from kvdepot.store.read.reader import Reader
from kvdepot.store.sessions.session_table import Sessions
from kvdepot.store.state.state import StoreState
from kvdepot.store.state.traffic import StoreTraffic
from kvdepot.store.write.put import NewBlock, Putter

_READY: Final = int(CopyState.READY)
_ALL: Final = (0, 0)
_CODES: Final = {(answer.tier, answer.reason): code for code, answer in enumerate(ANSWERS)}
_IN_MEMORY: Final = _CODES["dram", ""]
_IN_CXL: Final = _CODES["cxl", ""]
_ABSENT: Final = _CODES[None, "absent"]
Array = npt.NDArray[Any]
RegisterTag = Callable[[bytes, int, bytes], None]
"""Refuse a namespace whose blocks do not fit, or write down what its tag stands for: tag, bytes of
a block, description.
"""


class BlockSize(NamedTuple):
    """Of the blocks of one namespace."""

    block_bytes: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class MappedBlocks:
    """Blocks that lie in memory: which of those asked for, and where their slots are."""

    indices: Array
    locations: Array
    """In the arena, or in the slower memory as if that began where the arena ends."""
    staged: Array
    """In staging, and good only until `arrive` returns; else in the arena."""
    verified: bool
    """Compared with their checksums just now."""


Span = tuple[int, int]
"""Bytes of a payload, start and stop; (0, 0) is all of it."""
Arrive = Callable[[MappedBlocks, bool], None]
"""Told of blocks as they come, and whether they are the last."""


@dataclass(slots=True)
class Hold:
    """Blocks that stay in the tiers where they are until `MappedStore.release`."""

    rows: list[int] = field(default_factory=list)
    words: Keys = field(default_factory=lambda: np.empty((0, 4), np.uint64))
    """Their keys, where they are asked for again."""


class MappedStore:
    """The daemon's view of a store. Made by `Store.mapped`."""

    def __init__(
        self,
        state: StoreState,
        putter: Putter,
        reader: Reader,
        prefetcher: Prefetcher,
        sessions: Sessions,
        register_tag: RegisterTag,
    ) -> None:
        self._state = state
        self._putter = putter
        self._reader = reader
        self._prefetcher = prefetcher
        self._sessions = sessions
        self._register_tag = register_tag
        self._sizes: dict[int, BlockSize] = {}
        self._arena_bytes = self._state.arena.memory.nbytes
        tiers = [TIER_NAMES.index(copies.tier) for copies in self._state.catalog.tiers]
        lowest = [(bits & -bits).bit_length() - 1 for bits in range(1, 1 << len(tiers))]
        self._codes = np.array([0, *(tiers[bit] for bit in lowest)], np.uint8)
        """By residency, the fastest tier's place in TIER_NAMES."""

    @property
    def descriptors(self) -> list[int]:
        """Of the arena, of the slower memory if there is one, and of staging, for others to map."""
        return [arena.memory.fd for arena in self._state.all_arenas]

    @property
    def nbytes(self) -> list[int]:
        """Lengths of what the descriptors stand for."""
        return [arena.memory.nbytes for arena in self._state.all_arenas]

    @property
    def traffic(self) -> StoreTraffic:
        return self._state.traffic

    def is_prefaulted(self) -> bool:
        """Whether all memory has been touched, or will not be."""
        return all(arena.memory.prefaulted(0.0) for arena in self._state.all_arenas)

    def register(self, tag: bytes, size: BlockSize, description: bytes) -> None:
        """Know a namespace, until `unregister`. ConfigError if its blocks do not fit, or are not as
        they were.
        """
        if size.block_bytes <= 0 or size.chunk_bytes <= 0:
            raise ConfigError("layout", "a block without bytes")
        chunk_count(size.block_bytes, size.chunk_bytes)
        known = self._sizes.get(_word(tag), size)
        if known != size:
            raise ConfigError("layout", f"the namespace is known with {known.block_bytes} bytes")
        self._register_tag(tag, size.block_bytes, description)
        self._sizes.setdefault(_word(tag), size)

    def unregister(self, tags: Iterable[bytes]) -> None:
        """A client that has registered namespaces, each once, is gone."""
        for tag in self._state.descriptions.unregister(tags):
            self._sizes.pop(_word(tag), None)

    def match(self, keys: Keys) -> bytes:
        """For each block of the longest resident prefix its fastest tier: a place in TIER_NAMES."""
        recorder = self._state.recorder
        if recorder is not None:
            recorder.add(keys)
        residency = self._all_resident(keys)
        if residency is None:
            with self._state.lock:
                residency = self._state.catalog.residency.array[self._resident(keys)]
        found = bytes(self._codes[residency])
        counts = self._state.traffic.match
        counts.add(len(keys), len(found))
        counts.add_found(found)
        return found

    def lease(self, keys: Keys) -> Hold:
        """Hold the longest resident prefix, and count it as used."""
        catalog, recorder = self._state.catalog, self._state.recorder
        if recorder is not None:
            recorder.add(keys)
        with self._state.lock:
            rows = self._resident(keys).tolist()
            catalog.use(rows)
            self._state.lease(rows)
            self._state.traffic.lease.add(len(keys), len(rows))
        return Hold(rows, keys[: len(rows)])

    def where(self, hold: Hold) -> tuple[Array, Array]:
        """Location of each held block, -1 if it is on disk only; and its payload's length."""
        rows = np.asarray(hold.rows, np.int64)
        with self._state.lock:
            return self._locations(rows), self._state.catalog.nbytes.array[rows]

    def release(self, hold: Hold) -> None:
        """End a hold. A second time does nothing."""
        rows, hold.rows = hold.rows, []
        self._state.release(rows)

    def fetch(
        self,
        keys: Keys,
        span: Span,
        timeout_s: float,
        hold: Hold,
        arrive: Arrive,
        *,
        verify: bool = False,
    ) -> bytes:
        """Bring blocks, or `span` of their bytes, to memory, and keep them there with `hold`.

        `arrive` is called as they come: those that are in memory at once and unverified, then what
        is read from disk, verified. What it raises is passed on. Returns for each key an index of
        ANSWERS. `verify`: verify what is in memory too; a damaged copy is dropped, and read anew.
        """
        answers = bytearray([_ABSENT]) * len(keys)
        if verify:
            self._read(ReadPlan(self._wants(keys, span), timeout_s, True, hold), arrive, answers)
            return bytes(answers)
        hot, cold = self._sort(keys, span, hold)
        if len(hot.indices) == len(keys) and len(self._state.memory_tiers) == 1:
            answers = bytearray(len(keys))
        else:
            for index, place in zip(hot.indices.tolist(), hot.locations.tolist(), strict=True):
                answers[index] = _IN_MEMORY if place < self._arena_bytes else _IN_CXL
        count = len(hold.rows)
        if len(hot.indices):
            arrive(hot, not cold)
        self._read(ReadPlan(cold, timeout_s, True, hold, is_rest=True), arrive, answers)
        if self._reader.after_read is not None:
            wants = self._known(keys, hot.indices, hold.rows[:count], span) | cold
            self._reader.after_read([wants[index] for index in sorted(wants)])
        return bytes(answers)

    def deliver(
        self, keys: Keys, timeout_s: float, arrive: Arrive, *, beside: bool = False
    ) -> bytes:
        """`Lease.deliver` for blocks that the caller holds: not a further use of them."""
        answers = bytearray([_ABSENT]) * len(keys)
        plan = ReadPlan(self._wants(keys, _ALL), timeout_s, None, hold=None, beside=beside)
        self._read(plan, arrive, answers)
        return bytes(answers)

    def reserve(
        self, keys: Keys, timeout_s: float, *, pad: bool
    ) -> tuple[list[NewBlock | None], list[PutResult]]:
        """Slots for new blocks, and an answer for each key, as Store.reserve has them.

        Without `pad` there is no answer for keys that were not tried, see Putter.admit.
        """
        offers = [
            NewBlock(key, 0, *size) if size is not None else None
            for key, size in zip(_listed(keys), self._sizes_of(keys), strict=True)
        ]
        asked = [offer for offer in offers if offer is not None]
        found = iter((self._putter.reserve if pad else self._putter.admit)(asked, timeout_s))
        answers: list[PutResult] = []
        for offer in offers:
            answer = PutResult.REFUSED if offer is None else next(found, None)
            if answer is None:
                break
            answers.append(answer)
        slots = [
            offer if answer is PutResult.STORED else None
            for offer, answer in zip(offers, answers, strict=False)
        ]
        return slots, answers

    def seal(self, slots: list[NewBlock], *, tokens: bool = False, producer: bool = False) -> None:
        """Make blocks of slots that were filled and checksummed. `tokens`: token ids too;
        `producer`: what computed them.
        """
        for offer in slots if producer else ():
            image = self._state.arena.image(offer.slot, HEAD_BYTES)
            offer.producer = filled_producer(image)
        for offer in slots if tokens else ():
            image = self._state.arena.image(offer.slot, HEAD_BYTES)
            offer.tokens = filled_tokens(image, offer.payload_bytes, offer.chunk_bytes)
        self._putter.finish(slots, summed=True)

    def abandon(self, slots: list[NewBlock]) -> None:
        """Give slots back."""
        self._putter.abandon(slots)

    def hint(self, keys: Keys, deadline_s: float) -> tuple[Hint, int]:
        """`Store.hint` for keys, and how many of them are in the store."""
        wants, resident = self._away(keys)
        if resident < len(keys):
            self._state.request_refresh()
        return self._prefetcher.start(wants, deadline_s), resident

    def hint_session(self, tag: bytes, name: str, deadline_s: float) -> tuple[Hint, int]:
        """`Store.hint` for a session's prompt in one namespace."""
        with self._state.lock:
            prompt = self._sessions.find(tag, name)
        if prompt is None:
            return Hint([], 0.0), 0
        wants, resident = self._away(prompt.words(tag))
        return self._prefetcher.start(wants, deadline_s, prompt.state), resident

    def tell(
        self, tag: bytes, name: str, keys: Keys | None, state: SessionState, start: int
    ) -> int:
        """`Store.session` for one namespace, whose prompt may come in parts."""
        if _word(tag) not in self._sizes:
            return 0
        with self._state.lock:
            if keys is not None:
                self._state.ledger.session_told(tag, name, keys)
            return self._sessions.tell(tag, name, keys, state, start)

    def _away(self, keys: Keys) -> tuple[list[BlockRead], int]:
        """What of a prompt could come to memory, and how much of it is in the store."""
        catalog, sizes = self._state.catalog, self._sizes_of(keys)
        with self._state.lock:
            rows = self._resident(keys)
            absent = (self._locations(rows) == NONE).tolist()
            nbytes = catalog.nbytes.array[rows].tolist()
        wants = [
            _want(keys[index], size, _ALL)
            for index, size in enumerate(sizes[: len(rows)])
            if absent[index] and size is not None and size.block_bytes == nbytes[index]
        ]
        return wants, len(rows)

    def _all_resident(self, keys: Keys) -> Array | None:
        """Residency of blocks that are all there, found without the lock; None: look with it.

        Other threads may be changing the index. A row that has a key before and after its residency
        is read was that block's, and resident, at a moment of this call, which is all that a match
        says. What is not found may be on its way to another place of the table.
        """
        catalog = self._state.catalog
        if self._state.quarantined:
            return None
        try:
            rows = catalog.table.find_many(keys)
            residency: Array = catalog.residency.array[rows]
            same = catalog.table.words(rows).tobytes() == keys.tobytes()
        except IndexError:  # the table grows just now
            return None
        all_up = not self._state.volumes.down
        return residency if same and all_up and (rows != NONE).all() and residency.all() else None

    def _resident(self, keys: Keys) -> Rows:
        """Rows of the longest usable prefix."""
        assert self._state.held()
        catalog = self._state.catalog
        rows = catalog.table.find_many(keys)
        there = (rows != NONE) & (catalog.residency.array[rows] != 0)
        if self._state.quarantined:
            there &= ~np.isin(keys[:, 0], [_word(tag) for tag in self._state.quarantined])
        count = len(rows) if there.all() else int(there.argmin())
        if self._state.volumes.down:
            count = len(self._state.usable_prefix(rows[:count].tolist()))
        return rows[:count]

    def _locations(self, rows: Rows) -> Array:
        """Where blocks are in memory, -1 for those that are not."""
        assert self._state.held()
        first, *others = self._state.memory_tiers
        ready = first.copies.state.array[rows] == _READY
        found: Array = np.where(ready, first.copies.location.array[rows], NONE)
        for memory in others:
            here = (found == NONE) & (memory.copies.state.array[rows] == _READY)
            found[here] = memory.copies.location.array[rows[here]] + self._arena_bytes
        return found

    def _place(self, arrival: Arrival) -> int:
        """Where a slot is that the reader tells of."""
        at = address_of(arrival.view)[0] - HEAD_BYTES
        if not arrival.lasting:
            return at - self._state.staging.address
        first, *others = self._state.memory_tiers
        if 0 <= at - first.arena.address < self._arena_bytes:
            return at - first.arena.address
        return at - others[0].arena.address + self._arena_bytes

    def _sort(
        self, keys: Keys, span: Span, hold: Hold
    ) -> tuple[MappedBlocks, dict[int, BlockRead]]:
        """Hold what is in memory; what is on disk becomes wants."""
        state, catalog = self._state, self._state.catalog
        sizes = self._sizes_of(keys, span)
        expected = np.array([size.block_bytes if size else 0 for size in sizes], np.int64)
        with state.lock:
            rows = catalog.table.find_many(keys)
            known = (rows != NONE) & (catalog.nbytes.array[rows] == expected)
            locations = self._locations(rows)
            hot = known & (locations != NONE)
            cold = known & ~hot & (catalog.residency.array[rows] != 0)
            catalog.use(rows[hot | cold].tolist())
            state.write_used(rows[hot].tolist())
            held = rows[hot].tolist()
            self._state.lease(held)
            hold.rows += held
            locations = locations[hot]
            self._count_hot(rows[hot], locations, span, expected[hot])
            state.counters.get_miss += len(rows) - int((hot | cold).sum())
        indices = np.flatnonzero(hot)
        arrivals = MappedBlocks(indices, locations, np.zeros(len(indices), bool), verified=False)
        wanted = np.flatnonzero(cold).tolist()
        return arrivals, {index: _want(keys[index], sizes[index], span) for index in wanted}

    def _count_hot(self, rows: Rows, locations: Array, span: Span, expected: Array) -> None:
        """Blocks at those rows are served from memory; `expected` has their bytes."""
        state, part = self._state, span[1] - span[0]
        tiers: list[tuple[str, Any]] = [("dram", slice(None))]
        if len(state.memory_tiers) > 1:
            slower = locations >= self._arena_bytes
            state.memory_tiers[0].note_hits_below(rows[slower].tolist())
            tiers = [("cxl", slower), ("dram", ~slower)]
        for tier, mine in tiers:
            own, sizes = rows[mine], expected[mine]
            if len(own):
                nbytes = len(own) * part or int(sizes.sum())
                state.counters.add("get", tier, len(own))
                state.counters.get_bytes += nbytes
                state.traffic.served_bytes[tier] += nbytes
                self._count_tokens(tier, own, part / np.maximum(sizes, 1) if part else 1.0)

    def _count_tokens(self, tier: str, rows: Rows, shares: Array | float) -> None:
        """Tell the ledger of blocks that were served, or of these shares of their bytes."""
        state, catalog = self._state, self._state.catalog
        tags = catalog.table.tags()[rows]
        shares = np.broadcast_to(np.asarray(shares, np.float64), len(rows))
        for word in np.unique(tags) if tags[0] != tags[-1] else tags[:1]:
            mine = tags == word
            first, last = (int(row) for row in rows[mine][[0, -1]])
            before, digest = catalog.tree.depth(first) - 1, catalog.table.digest(last)
            state.ledger.served(word.tobytes(), tier, float(shares[mine].sum()), before, digest)

    def _wants(self, keys: Keys, span: Span) -> dict[int, BlockRead]:
        """Reads of all keys whose blocks have the size that was registered, or are unknown."""
        catalog = self._state.catalog
        sizes = self._sizes_of(keys, span)
        with self._state.lock:
            rows = catalog.table.find_many(keys)
            nbytes = np.where(rows != NONE, catalog.nbytes.array[rows], 0).tolist()
        return {
            index: _want(keys[index], size, span)
            for index, (size, found) in enumerate(zip(sizes, nbytes, strict=True))
            if size is not None and found in (0, size.block_bytes)
        }

    def _known(
        self, keys: Keys, indices: Array, rows: Sequence[int], span: Span
    ) -> dict[int, BlockRead]:
        """Reads of blocks that were served from memory, for read-ahead."""
        sizes, found = self._sizes_of(keys), indices.tolist()
        wants = {index: _want(keys[index], sizes[index], span) for index in found}
        for want, row in zip(wants.values(), rows, strict=True):
            want.row = row
        return wants

    def _read(self, plan: "ReadPlan", arrive: Arrive, answers: bytearray) -> None:
        """Have the reader fetch; what stays in memory is added to the hold."""
        hold = plan.hold
        indices, asked = list(plan.wants), list(plan.wants.values())

        def sink(arrived: list[Arrival]) -> None:
            places = [self._place(arrival) for arrival in arrived]
            if hold is not None:
                lasting = [asked[arrival.index].row for arrival in arrived if arrival.lasting]
                with self._state.lock:
                    self._state.lease(lasting)
                    hold.rows += lasting
            numbers = [indices[arrival.index] for arrival in arrived]
            staged = [not arrival.lasting for arrival in arrived]
            arrays = np.array(numbers), np.array(places), np.array(staged)
            arrive(MappedBlocks(*arrays, verified=bool(plan.verify)), False)

        if not asked:
            return
        found = self._reader.fetch(
            asked,
            plan.timeout_s,
            verify=plan.verify,
            sink=sink,
            beside=plan.beside,
            counts_as_use=hold is not None and not plan.is_rest,
            read_ahead=not plan.is_rest,
        )
        for index, answer in zip(indices, found, strict=True):
            answers[index] = _CODES[answer.tier, answer.reason]

    def _sizes_of(self, keys: Keys, span: Span = _ALL) -> list[BlockSize | None]:
        """Of each key's namespace; None for one that is not registered or in quarantine, or without
        that span.
        """
        tags = keys[:, 0].tolist()
        sizes = {tag: self._sizes.get(tag) for tag in set(tags)}
        for tag, size in sizes.items():
            if size is not None and span[1] > size.block_bytes:
                sizes[tag] = None
        for tag in map(_word, self._state.quarantined):
            if tag in sizes:
                sizes[tag] = None
        return [sizes[tag] for tag in tags]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """One call of the reader."""

    wants: dict[int, BlockRead]
    """By index of the key."""
    timeout_s: float
    verify: bool | None
    hold: Hold | None
    """None: the caller has a lease, which has counted the use."""
    is_rest: bool = False
    """`fetch` has served other blocks of the same call from memory, and counted the use of all."""
    beside: bool = False
    """See Lease.deliver."""


def _want(words: Array, size: BlockSize | None, span: Span) -> BlockRead:
    assert size is not None
    start, stop = span if span != _ALL else (0, size.block_bytes)
    key = BlockKey(words.tobytes())
    return BlockRead(key, 0, size.block_bytes, size.chunk_bytes, start, stop)


def _listed(keys: Keys) -> list[BlockKey]:
    raw = keys.tobytes()
    return [BlockKey(raw[at : at + 32]) for at in range(0, len(raw), 32)]


def _word(tag: bytes) -> int:
    return int.from_bytes(tag[:TAG_BYTES], "little")
