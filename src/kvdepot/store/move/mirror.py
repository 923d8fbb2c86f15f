"""Writes second copies of what is expensive to recompute, to other drives of the same tier.

It follows the first copies some time behind, a prompt in one piece where that matters, and rests
while foreground reads go on. What lost a copy gets one again as far as there is room for it.
"""

import threading
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from kvdepot.codec.notes import parse_object
from kvdepot.codec.record import record_bytes
from kvdepot.core.block import TAG_BYTES, CopyState
from kvdepot.core.tier import drive_of
from kvdepot.index.paths import path_blocks, path_order
from kvdepot.index.table import NONE
from kvdepot.policy.placing.extra_copies import MirrorFacts, worth_mirroring
from kvdepot.store.move.copy_run import PIECE_BYTES, CopyJob, RecordMover
from kvdepot.store.state.lower_tier import LowerTier, SecondCopies
from kvdepot.store.state.state import StoreState
from kvdepot.store.state.yielding import PieceSize

_LOOK_S = 0.25
_LOOKS_MAX: Final = 8
"""Blocks wait for others of their prompt until none has come between two looks, no longer."""
_TRIES: Final = 8
_GATHER_MAX: Final = 1024
"""Blocks looked at in one go, with the lock."""


class Mirror(CopyJob):
    def __init__(self, state: StoreState, lower: LowerTier, tries: Counter[int]) -> None:
        super().__init__(lower)
        self._state = state
        self._tries = tries
        self.refused: list[int] = []
        """Rows that no drive took."""

    def is_wanted(self, row: int) -> bool:
        places = self.target.places(row) if self._state.catalog.is_live(row) else []
        return len(places) == 1 and self.target.is_up(places[0])

    def source(self, row: int) -> tuple[LowerTier, int] | None:
        return self.target, self.target.best_place(row)

    def enter(self, row: int, location: int) -> None:
        self._state.counters.mirrored += self.target.enter_second(row, location)
        self._tries.pop(row, None)

    def give_up(self, row: int) -> None:
        self.refused.append(row)


class Mirrorer:
    """The background thread of one tier that mirrors."""

    def __init__(self, state: StoreState, lower: LowerTier, mover: RecordMover) -> None:
        assert lower.second_copies is not None
        self._state = state
        self._lower = lower
        self._second: SecondCopies = lower.second_copies
        self._mover = mover
        self._left: array[int] = array("q")
        """Rows still to be looked at again."""
        self._seen, self._looks = 0, 0
        self._last_target = 0
        self._size = PieceSize(PIECE_BYTES)
        self._tries: Counter[int] = Counter()
        """How often rows were postponed for lack of room."""
        self._block_tokens: dict[bytes, int] = {}
        name = f"kvdepot-{lower.name}-mirror"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        while True:
            self.look()
            if self._state.closing.wait(_LOOK_S):
                return

    def look(self) -> None:
        """Mirror what is new and no longer grows, then what lost a copy."""
        with self._state.lock:
            fresh = self._take_candidates()
            self._list_all()
        for start in range(0, len(fresh), _GATHER_MAX):
            self._mirror(fresh[start : start + _GATHER_MAX], reclaim=True)
        while self._left and not self._state.closing.is_set() and not self._second.candidates:
            some = self._left[-_GATHER_MAX:].tolist()
            del self._left[-_GATHER_MAX:]
            self._mirror(some, reclaim=False)

    def _take_candidates(self) -> list[int]:
        """Rows that came to a place since, unless more are coming."""
        assert self._state.held()
        fresh = self._second.candidates
        grows = len(fresh) != self._seen
        self._looks = self._looks + 1 if fresh else 0
        self._seen = len(fresh)
        if not fresh or (grows and self._looks < _LOOKS_MAX):
            return []
        self._second.candidates = {}
        self._seen = self._looks = 0
        return list(fresh)

    def _list_all(self) -> None:
        """Look at every block again if that is due and can help."""
        assert self._state.held()
        tier = self._lower.tier
        facts = [tier.drive(drive) for drive in range(tier.drive_count())]
        up = [fact.up for fact in facts if not fact.draining]
        if self._second.check_all and all(up) and len(up) > 1:
            self._second.check_all = False
            alone = self._second.location.array == NONE
            ready = self._lower.copies.state.array == CopyState.READY
            self._left = array("q", np.flatnonzero(ready & alone).tobytes())

    def _mirror(self, rows: Sequence[int], *, reclaim: bool) -> None:
        """Write second copies of what is worth it of `rows` and of their prompts' heads.

        `reclaim`: other blocks may have to leave for it.
        """
        job = Mirror(self._state, self._lower, self._tries)
        with self._state.lock:
            gathered = self._gather(job, rows)
        for source, run in self._runs(gathered):
            if self._state.closing.is_set():
                return
            target = self._target(source, run, reclaim=reclaim)
            if target is not None:
                self._copy_run(job, run, target, reclaim=reclaim)

    def _gather(self, job: Mirror, rows: Sequence[int]) -> list[int]:
        """What is worth it, in the order of prompts."""
        assert self._state.held()
        catalog, lower = self._state.catalog, self._lower
        groups: dict[int, list[int]] = {}
        for row in rows:
            if job.is_wanted(row):
                groups.setdefault(self._tokens(row), []).append(row)
        chosen: list[int] = []
        for tokens, group in groups.items():
            blocks = path_blocks(catalog.tree, group, -(-lower.config.mirror // tokens))
            found = np.array([row for row in blocks if job.is_wanted(row)], dtype=np.int64)
            facts = MirrorFacts(
                prompt_tokens=np.array([blocks[row] for row in found.tolist()], np.int64) * tokens,
                below=catalog.residency.array[found] >= 2 * lower.copies.bit,
                closed=catalog.closed.mask(found),
            )
            chosen += found[worth_mirroring(facts, lower.config.mirror)].tolist()
        return path_order(catalog.tree, chosen)

    def _tokens(self, row: int) -> int:
        """Of one block, as its namespace's description says."""
        tag = self._state.catalog.table.key(row)[:TAG_BYTES]
        if tag not in self._block_tokens:
            described = self._lower.tier.descriptions().get(tag)
            tokens = _block_tokens(described) if described is not None else 0
            if not tokens:
                return self._state.config.block_tokens
            self._block_tokens[tag] = tokens
        return self._block_tokens[tag]

    def _runs(self, rows: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """Rows that lie on one drive and go to one other, with the first one's number."""
        nbytes, location = self._state.catalog.nbytes, self._lower.copies.location
        drives: dict[int, list[int]] = {}
        for row in rows:
            if location[row] != NONE:
                drives.setdefault(drive_of(location[row]), []).append(row)
        for drive, here in drives.items():
            run: list[int] = []
            total = 0
            for row in here:
                run.append(row)
                total += record_bytes(nbytes[row])
                if total >= max(self._lower.run_bytes, PIECE_BYTES):
                    yield drive, run
                    run, total = [], 0
            if run:
                yield drive, run

    def _target(self, source: int, run: list[int], *, reclaim: bool) -> int | None:
        """The drive for second copies: the next that is up, one with room if there is any."""
        tier = self._lower.tier
        count = tier.drive_count()
        order = [(self._last_target + step) % count for step in range(1, count + 1)]
        facts = {drive: tier.drive(drive) for drive in order if drive != source}
        others = {drive: fact for drive, fact in facts.items() if not fact.draining}
        if not any(fact.up and not fact.lost for fact in others.values()):
            self._second.check_all |= bool(others)
            return None
        able = [drive for drive, fact in others.items() if fact.takes_blocks]
        nbytes = max(record_bytes(self._state.catalog.nbytes[row]) for row in run)
        roomy = [drive for drive in able if tier.has_room(drive, nbytes)]
        found = next(iter([*roomy, *(able if reclaim else [])]), None)
        if found is not None:
            self._last_target = found
        return found

    def _copy_run(self, job: Mirror, rows: list[int], target: int, *, reclaim: bool) -> None:
        job.refused.clear()
        left = self._mover.copy_all(
            job,
            rows,
            lambda: [target],
            size=self._size,
            make_room=reclaim,
            rests=(self._lower,),
        )
        with self._state.lock:
            if not self._lower.tier.is_up(target):
                self._second.check_all |= bool(job.refused)
            elif reclaim:
                self._postpone(job.refused)
            if left and not job.refused:  # memory is short
                self._second.candidates.update(dict.fromkeys(left))
            elif reclaim:
                self._postpone(left)

    def _postpone(self, rows: list[int]) -> None:
        """Try rows again at the next looks, a few times: the room may be held by leases now."""
        for row in rows:
            self._tries[row] += 1
            if self._tries[row] < _TRIES:
                self._second.candidates[row] = None
            else:
                del self._tries[row]


def _block_tokens(description: bytes) -> int:
    """What a namespace's description says of its blocks; 0 if it is not one of ours."""
    try:
        tokens = parse_object(description)["layout"]["block_tokens"]
    except (ValueError, KeyError, TypeError):
        return 0
    return tokens if isinstance(tokens, int) and tokens > 0 else 0
