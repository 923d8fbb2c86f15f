"""The default order: evicts the block with the fewest expected reuses for its place.

The kind of a block is the number of times its session has come back and the number of its own uses.
A tail inherits the count of the prefix it continues; blocks that many sessions share count the uses
of all. `ReuseRates` measures how soon each kind is reused, also after eviction (ghosts.py), which
shows the hits that a longer stay would have brought.

In a large tier recency is hard to beat and counts are noise. So the least recently used block is
evicted unless another one has a clearly smaller expectation. The threshold is learnt: the fewer
reuses of ghosts, the closer to LRU; and trust in the counts rises or falls with the difference
between real hits and those that plain LRU would have had (`LruShadow`).
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from math import exp
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdepot.core.sessions import SessionState
from kvdepot.index.queues import LinkedQueues
from kvdepot.index.table import NONE, Column, KeyTable
from kvdepot.index.tree import PrefixTree
from kvdepot.policy.eviction.ghosts import Ghosts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Ages = Sequence[int] | memoryview
"""The time of each row's last use, by row."""

_STEPS_PER_OCTAVE: Final = 2
_OCTAVES: Final = 34
_AGE_MIN: Final = 16
_DECAY: Final = 0.99
"""The factor by which counts fall in each period."""
_PRIOR: Final = 0.05
"""Weight of the average of all kinds, as a share of the tier watched for one period."""

AGES: Final[list[int]] = [
    (_AGE_MIN * (_STEPS_PER_OCTAVE + step) << octave) // _STEPS_PER_OCTAVE if octave + step else 0
    for octave in range(_OCTAVES)
    for step in range(_STEPS_PER_OCTAVE)
]
"""Start of each age bucket, in block uses."""
_AGES: Final = np.array(AGES, dtype=np.int64)
_WIDTHS: Final = np.diff(np.append(_AGES, 2 * _AGES[-1])).astype(np.float64)


def bucket(age: int) -> int:
    return bisect_right(AGES, age) - 1


def buckets(ages: Ints) -> Ints:
    numbers: Ints = np.searchsorted(_AGES, ages, side="right") - 1
    return numbers


class ReuseRates:
    """Reuses and exposure by kind and age."""

    def __init__(self, kinds: int) -> None:
        self._shape = (kinds, len(AGES))
        self._reuses: Floats = np.zeros(self._shape)
        self._exposure: Floats = np.zeros(self._shape)
        self._cells = self._reuses.reshape(-1)
        self._cell = self._cells.data
        self.density: list[list[float]] = np.zeros(self._shape).tolist()

    def reused(self, kind: int, age: int) -> None:
        self._cell[kind * len(AGES) + bisect_right(AGES, age) - 1] += 1

    def reused_many(self, kinds: Ints, ages: Ints) -> None:
        np.add.at(self._cells, kinds * len(AGES) + buckets(ages), np.float64(1.0))

    def exposed(self, kinds: Ints, ages: Ints, each: float) -> None:
        """Add `each` blocks times uses of exposure for each of these kinds and ages."""
        cells = kinds * self._shape[1] + buckets(ages)
        counts = np.bincount(cells, minlength=self._reuses.size).reshape(self._shape)
        self._exposure += each * counts.astype(np.float64)

    def refresh(self, now: int, prior: float, boost: Sequence[int]) -> None:
        """Update `density`, each kind's multiplied by its boost, and decay the counts.

        `prior`: blocks times uses of one period.
        """
        seen = bucket(now) + 1
        reuses, exposure = self._reuses[:, :seen], self._exposure[:, :seen]
        total = exposure.sum(axis=0)
        average = np.divide(reuses.sum(axis=0), total, out=np.zeros(seen), where=total > 0)
        weight = prior * _PRIOR
        rates: Floats = (reuses + weight * average) / (exposure + weight + 1e-9)
        # Kinds without counts are all alike, so one of them is computed for all.
        seen_kinds = reuses.any(axis=1) | exposure.any(axis=1)
        alike = np.flatnonzero(~seen_kinds)
        worked_out = np.append(np.flatnonzero(seen_kinds), alike[:1])
        known: Floats = np.zeros(self._shape)
        known[worked_out, :seen] = _densities(rates[worked_out], _WIDTHS[:seen])
        known[alike] = known[alike[:1]]
        known *= np.array(boost, np.float64)[:, None]
        known[:, seen:] = known[:, seen - 1 : seen]
        self.density = known.tolist()
        self._reuses *= _DECAY
        self._exposure *= _DECAY


def _densities(rates: Floats, widths: Floats) -> Floats:
    """The maximum, over all later ages, of chance of reuse per time spent, by kind and age.

    `rates` are constant within a bucket; time ends with the reuse.
    """
    spent = rates * widths
    before = np.cumsum(spent, axis=1) - spent
    survival = np.exp(-np.maximum(before[:, None, :] - before[:, :, None], 0.0))
    within = np.where(spent > 1e-12, -np.expm1(-spent) / np.maximum(rates, 1e-300), widths)
    later = np.triu(np.ones((len(widths), len(widths))))
    time = np.cumsum(later * survival * within[:, None, :], axis=2)
    chance = later * (1.0 - survival * np.exp(-spent)[:, None, :])
    best: Floats = (chance / np.maximum(time, 1e-300)).max(axis=2)
    return best


_KEYS_MAX: Final = 2048


class LruShadow:
    """Simulates LRU on a sample of keys, with the tier's capacity scaled to the sample."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()
        self.bits = 0
        """One in 2 ** bits keys is in the sample."""
        self.capacity = 1

    def fit(self, blocks: int) -> None:
        """Adapt to a tier of `blocks`."""
        while blocks >> self.bits > _KEYS_MAX:
            self.bits += 1
            kept = [digest for digest in self._order if self.has(digest)]
            self._order = OrderedDict.fromkeys(kept)
        self.capacity = max(1, blocks >> self.bits)
        while len(self._order) > self.capacity:
            self._order.popitem(last=False)

    def has(self, digest: int) -> bool:
        """True if the key is in the sample, by other bits than those that choose its place."""
        return not digest >> 64 - self.bits

    def sampled(self, digests: npt.NDArray[np.uint64]) -> list[int]:
        if self.bits:
            digests = digests[digests >> np.uint64(64 - self.bits) == 0]
        chosen: list[int] = digests.tolist()
        return chosen

    def touch(self, digests: Iterable[int]) -> int:
        """Record requests for keys of the sample. Returns the number of LRU hits."""
        order, had = self._order, 0
        to_end = order.move_to_end
        for digest in digests:
            if digest in order:
                to_end(digest)
                had += 1
            else:
                order[digest] = None
        while len(order) > self.capacity:
            order.popitem(last=False)
        return had


_TURNS_MAX: Final = 3
_USE_LEVELS: Final = 5
"""Classes of use counts: 0, 1, 2 to 3, 4 to 7, more."""
_KINDS: Final = (_TURNS_MAX + 1) * _USE_LEVELS
_ALIVE, _PENDING, _CLOSED = _KINDS, _KINDS + 1, _KINDS + 2
QUEUES: Final = _KINDS + 3
_BY_STATE: Final = {
    SessionState.ALIVE: _ALIVE,
    SessionState.PENDING: _PENDING,
    SessionState.CLOSED: _CLOSED,
}
_BOOST: Final = [1] * _KINDS + [4, 16, 1]
"""Factor for each queue: a hinted block has more expected reuses and a smaller age by it."""
_OUT: Final = 255
_COUNT_MAX: Final = 255
_FEW: Final = 12
"""Below this many rows a loop is faster than numpy."""

_GHOSTS_PER_BLOCK: Final = 1.5
_PERIOD_MIN: Final = 100
_PERIODS_PER_TIER: Final = 8
_SAMPLE_MAX: Final = 1 << 16
_MUCH: Final = 1e300

_OVERRULE_MAX: Final = 0.8
"""Upper limit of `trust`."""
_TRUST_FIRST, _TRUST_MIN, _TRUST_MAX = 0.8, 0.05, 4.0
_HASTE: Final = 4.0
"""Exponent by which trust changes if as many hits are won or lost as the tier has blocks."""
_LATE_WEIGHT: Final = 4.0
"""Weight of a reuse after eviction relative to a hit."""

_KIND_OF: Final = [
    [turns * _USE_LEVELS + min(uses.bit_length(), _USE_LEVELS - 1) for uses in range(256)]
    for turns in range(_TURNS_MAX + 1)
]
"""The kind of a block, by the turns of its session and its uses."""
_KIND_OF_ARRAY: Final = np.array(_KIND_OF, np.uint8)

_Look = tuple[int, int, int, float, float, int]
"""The cold and the warm end of a queue; age and expected reuses of the cold end; the smaller
expectation of both ends, and its row."""
_NEVER: Final = -1
_UNSEEN: Final[_Look] = (NONE, NONE, 0, 0.0, 0.0, NONE)


class LearntTrust:
    """How far expected reuses overrule recency, learnt from hits and from LRU's hits."""

    def __init__(self) -> None:
        self.shadow = LruShadow()
        self.hits = 0.0
        self.late = 0.0
        """Reuses after eviction."""
        self._trust = _TRUST_FIRST

    @property
    def share(self) -> float:
        """The share of the LRU victim's expected reuses below which another block is evicted.

        0 means plain LRU.
        """
        late = _LATE_WEIGHT * self.late / (self.hits + 1.0)
        return min(_OVERRULE_MAX, self._trust * late, self._trust)

    def learn(self, gained: int) -> None:
        """Adapt to `gained`, the hits of sampled keys minus those of plain LRU."""
        gain = min(1.0, max(-1.0, gained / self.shadow.capacity))
        self._trust = min(_TRUST_MAX, max(_TRUST_MIN, self._trust * exp(_HASTE * gain)))

    def refresh(self, blocks: int) -> None:
        """Called in each period, with the number of blocks in the tier."""
        self.hits, self.late = self.hits * 0.99, self.late * 0.99
        self.shadow.fit(blocks)


class VictimSearch:
    """Finds the victim among the ends of queues. What it sees at an end is kept until a block
    enters or is used.
    """

    def __init__(self, worths: Sequence[float], rates: ReuseRates) -> None:
        self._worths = worths
        self._rates = rates
        self._queues = range(QUEUES * len(worths))
        self._closed = self._queues[_CLOSED::QUEUES]
        self._age_boost = [boost * worth for worth in worths for boost in _BOOST]
        self.moment = _NEVER
        """The time of what was seen; _NEVER after ages or rates have changed."""
        self._looks: list[_Look] = []
        self._filled_by_bits: dict[int, tuple[int, ...]] = {}

    def victim(self, queues: LinkedQueues, group: int, since: Ages, now: int, trust: float) -> int:
        """The oldest block, or the end of a queue with clearly fewer expected reuses."""
        colds, warms = queues.ends(group)
        if not colds:
            return NONE
        for closed in self._closed:
            if colds[closed] != NONE:
                return colds[closed]
        if now != self.moment:
            self.moment, self._looks = now, [_UNSEEN] * len(self._queues)
        looks, boosts = self._looks, self._age_boost
        victim = least_promising = NONE
        oldest, promise, least = -1.0, 0.0, _MUCH
        for queue in self._filled(queues.occupied(group)):
            look = looks[queue]
            if look[0] != colds[queue] or look[1] != warms[queue]:
                look = looks[queue] = self._look(queue, colds[queue], warms[queue], since)
            cold, _, age, promised, lesser, lesser_promising = look
            boost = boosts[queue]
            if age > oldest * boost:
                victim, oldest, promise = cold, age / boost, promised
            if lesser < least:
                least, least_promising = lesser, lesser_promising
        return least_promising if least < promise * trust else victim

    def _look(self, queue: int, cold: int, warm: int, since: Ages) -> _Look:
        now, worth = self.moment, self._worths[queue // QUEUES]
        promises = self._rates.density[queue % QUEUES]
        age = now - since[cold]
        promised = later = worth * promises[bisect_right(AGES, age) - 1]
        if warm != cold:
            later = worth * promises[bisect_right(AGES, now - since[warm]) - 1]
        if later < promised:
            return cold, warm, age, promised, later, warm
        return cold, warm, age, promised, promised, cold

    def _filled(self, occupied: int) -> tuple[int, ...]:
        queues = self._filled_by_bits.get(occupied)
        if queues is None:
            queues = tuple(queue for queue in self._queues if occupied >> queue & 1)
            self._filled_by_bits[occupied] = queues
        return queues


class ReuseDensity:
    """Evicts the block with the fewest expected reuses per place and time."""

    moves_on_use = True
    takes_chains = True

    def __init__(self, worths: Sequence[float] = (1.0,)) -> None:
        """`worths`: the worth of a reuse in each class of blocks. A class has its own queues, and
        the age of a block is divided by its worth, because chances of reuse fall with age.
        """
        self.queues = QUEUES * len(worths)
        self._rates = ReuseRates(QUEUES)
        self._search = VictimSearch(worths, self._rates)
        self._trust = LearntTrust()
        self._ghosts = Ghosts(_GHOSTS_PER_BLOCK)
        self._count = 0
        self._events = 0
        self._refreshed = 0

    def bind(self, rows: KeyTable, tree: PrefixTree, queues: LinkedQueues) -> None:
        self._rows, self._tree, self._queues = rows, tree, queues
        self._since = rows.column(np.int64, 0)
        self._kind = rows.column(np.uint8, _OUT)
        self._turns = rows.column(np.uint8, 0)
        self._uses = rows.column(np.uint8, 0)

    @property
    def stamps(self) -> Column:
        return self._since

    def queue(self, row: int) -> int:
        kind: int = self._kind.view[row]
        return kind

    def entered(self, row: int) -> None:
        digest, now = self._rows.digest(row), self._tree.now
        ghost = self._ghosts.recall(digest)
        if ghost is None:
            parent, turns, uses = self._tree.parent.view[row], 0, 0
            if parent != NONE:  # its session has come back once more if the parent was used
                turns = min(self._turns.view[parent] + (self._uses.view[parent] > 0), _COUNT_MAX)
            self._kind.view[row] = _KIND_OF[min(turns, _TURNS_MAX)][0]
        else:
            turns, uses = ghost.note >> 8 & 15, min((ghost.note >> 12) + 1, 15)
            self._rates.reused(ghost.note & 255, now - ghost.stamp)
            self._trust.late += 1
            self._kind.view[row] = _KIND_OF[min(turns + 1, _TURNS_MAX)][uses]
        self._turns.view[row], self._uses.view[row] = turns, uses
        self._since.view[row] = now
        self._search.moment = _NEVER
        self._count += 1
        shadow = self._trust.shadow
        if not digest >> 64 - shadow.bits and shadow.touch([digest]):
            self._trust.learn(-1)
        self._events += 1
        if self._events >= max(_PERIOD_MIN, self._count // _PERIODS_PER_TIER):
            self._refresh()

    def used(self, rows: Sequence[int], *, hit: bool) -> None:
        if len(rows) < _FEW:
            kind, since, now = self._kind.view, self._since.view, self._tree.now
            few = [(row, now - age) for age, row in enumerate(rows) if kind[row] != _OUT]
            if hit and few:
                self._hit_few(few)
            for row, stamp in few:
                since[row] = stamp
            return
        at = np.asarray(rows, dtype=np.int64)
        stamps = self._tree.now - np.arange(len(at))
        here = self._kind.array[at] != _OUT
        if not here.all():
            at, stamps = at[here], stamps[here]
        if not len(at):
            return
        if hit:
            self._hit(at, stamps)
        self._since.array[at] = stamps

    def left(self, row: int) -> None:
        kind, since = self._kind.view, self._since.view
        turns, uses = self._turns.view[row], self._uses.view[row]
        note = kind[row] | (turns if turns < 15 else 15) << 8 | (uses if uses < 15 else 15) << 12
        self._ghosts.remember(self._rows.digest(row), since[row], note)
        kind[row] = _OUT
        self._count -= 1
        parent = self._tree.parent.view[row]
        if parent != NONE and since[parent] < since[row]:
            since[parent] = since[row]

    def session_changed(self, rows: Sequence[int], state: SessionState) -> None:
        """Set the kind of the session's blocks.

        Blocks with more uses than their session came back are shared, and do not become CLOSED.
        """
        if not rows:
            return
        kind, turns, uses = self._kind.view, self._turns.view, self._uses.view
        comebacks = turns[rows[-1]] + 1
        for row in rows:
            if kind[row] == _OUT or (state == SessionState.CLOSED and uses[row] > comebacks):
                continue
            ordinary = _KIND_OF[min(turns[row], _TURNS_MAX)][uses[row]]
            kind[row] = _BY_STATE.get(state, ordinary)

    def victim(self, group: int) -> int:
        now, trust = self._tree.now, self._trust.share
        return self._search.victim(self._queues, group, self._since.view, now, trust)

    def _hit(self, at: Ints, stamps: Ints) -> None:
        kinds = self._kind.array[at]
        self._rates.reused_many(kinds.astype(np.int64), stamps - self._since.array[at])
        uses = np.minimum(self._uses.array[at], _COUNT_MAX - 1) + 1
        self._uses.array[at] = uses
        turns = min(int(self._turns.view[at[-1]]) + 1, _TURNS_MAX)
        self._kind.array[at] = _KIND_OF_ARRAY[turns][uses]
        self._count_hits(len(at), self._trust.shadow.sampled(self._rows.digests(at)))

    def _hit_few(self, here: list[tuple[int, int]]) -> None:
        kind, since, uses = self._kind.view, self._since.view, self._uses.view
        reused, digest_of, bits = self._rates.reused, self._rows.digest, self._trust.shadow.bits
        kinds = _KIND_OF[min(self._turns.view[here[-1][0]] + 1, _TURNS_MAX)]
        asked = []
        for row, stamp in here:
            reused(kind[row], stamp - since[row])
            if uses[row] < _COUNT_MAX:
                uses[row] += 1
            kind[row] = kinds[uses[row]]
            digest = digest_of(row)
            if not digest >> 64 - bits:
                asked.append(digest)
        self._count_hits(len(here), asked)

    def _count_hits(self, blocks: int, asked: list[int]) -> None:
        """Count hits; `asked` are the digests of those in the sample."""
        trust = self._trust
        trust.hits += blocks
        if asked and (gained := len(asked) - trust.shadow.touch(reversed(asked))):
            trust.learn(gained)
        self._events += blocks
        if self._events >= max(_PERIOD_MIN, self._count // _PERIODS_PER_TIER):
            self._refresh()

    def _refresh(self) -> None:
        now = self._tree.now
        period, self._refreshed = now - self._refreshed, now
        self._events = 0
        self._search.moment = _NEVER
        step = max(1, len(self._kind.array) // _SAMPLE_MAX)
        kinds, since = self._kind.array[::step], self._since.array[::step]
        here = kinds != _OUT
        ages = np.maximum(now - since[here], 0)
        self._rates.exposed(kinds[here].astype(np.int64), ages, period * step)
        since, notes, step = self._ghosts.sample(_SAMPLE_MAX)
        self._rates.exposed(notes & 255, np.maximum(now - since, 0), period * step)
        self._rates.refresh(now, period * self._count, _BOOST)
        self._ghosts.fit(self._count)
        self._trust.refresh(self._count)
