"""Writes second copies of what is expensive to recompute, to other drives of the same tier.

It follows the first copies some time behind, a prompt in one piece where that matters, and rests
while others read. What lost a copy gets one again as far as there is room for it.
"""

import json
import threading
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from kvdepot.codec.record import record_bytes
from kvdepot.core.block import TAG_BYTES, CopyState
from kvdepot.core.tier import Removal, drive_of
from kvdepot.index.paths import path_blocks, path_order
from kvdepot.index.table import NONE
from kvdepot.native import COPY, address_of
from kvdepot.policy.placing.extra_copies import MirrorFacts, worth_mirroring
from kvdepot.store.move.append import MakeRoom, append
from kvdepot.store.move.demote import Piece, rest
from kvdepot.store.state.lower_tier import Level
from kvdepot.store.state.second_copies import Mirrors
from kvdepot.store.state.state import TEMPORARY, Stock
from kvdepot.store.state.yielding import Stride
from kvdepot.tiers.memory.copy_ops import transfers

_LOOK_S = 0.25
_LOOKS_MAX: Final = 8
"""Blocks wait for others of their prompt until none has come between two looks, no longer."""
_TRIES: Final = 8
_GATHER_MAX: Final = 1024
"""Blocks looked at in one go, lock held."""
_PIECE_BYTES: Final = 4 << 20
"""Copied in one go at most: a read which comes meanwhile should not notice."""


class Mirrorer:
    """The background thread of one tier that mirrors."""

    def __init__(self, stock: Stock, level: Level, make_room: MakeRoom) -> None:
        assert level.mirrors is not None
        self._stock = stock
        self._level = level
        self._mirrors: Mirrors = level.mirrors
        self._make_room = make_room
        self._left: array[int] = array("q")
        """Rows still to be looked at again."""
        self._seen, self._looks = 0, 0
        self._turn = 0
        self._stride = Stride(_PIECE_BYTES)
        self._tries: Counter[int] = Counter()
        """How often rows were put off for lack of room."""
        self._block_tokens: dict[bytes, int] = {}
        name = f"kvdepot-{level.name}-mirrorer"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        stock = self._stock
        while not stock.closing:
            self.look()
            with stock.changed:
                stock.changed.wait_for(lambda: stock.closing, _LOOK_S)

    def look(self) -> None:
        """Mirror what is new and no longer grows, then what lost a copy."""
        with self._stock.changed:
            fresh = self._take_fresh()
            self._list_all()
        for start in range(0, len(fresh), _GATHER_MAX):
            self._mirror(fresh[start : start + _GATHER_MAX], reclaim=True)
        while self._left and not self._stock.closing and not self._mirrors.fresh:
            some = self._left[-_GATHER_MAX:].tolist()
            del self._left[-_GATHER_MAX:]
            self._mirror(some, reclaim=False)

    def _take_fresh(self) -> list[int]:
        """Rows that came to a place since, unless more are coming. Lock held."""
        fresh = self._mirrors.fresh
        grows = len(fresh) != self._seen
        self._looks = self._looks + 1 if fresh else 0
        self._seen = len(fresh)
        if not fresh or (grows and self._looks < _LOOKS_MAX):
            return []
        self._mirrors.fresh = {}
        self._seen = self._looks = 0
        return list(fresh)

    def _list_all(self) -> None:
        """Look at every block again if that is due and can help. Lock held."""
        up = [drive.breaker.closed for drive in self._level.tier.drives if not drive.draining]
        if self._mirrors.look_at_all and all(up) and len(up) > 1:
            self._mirrors.look_at_all = False
            alone = self._mirrors.location.array == NONE
            ready = self._level.copies.state.array == CopyState.READY
            self._left = array("q", np.flatnonzero(ready & alone).tobytes())

    def _mirror(self, rows: Sequence[int], *, reclaim: bool) -> None:
        """Write second copies of what is worth it of `rows` and of their prompts' heads.

        `reclaim`: others may have to leave for it.
        """
        with self._stock.changed:
            gathered = self._gather(rows)
        for source, run in self._runs(gathered):
            if self._stock.closing:
                return
            target = self._target(source, run, reclaim=reclaim)
            if target is not None:
                self._copy_run(run, target, reclaim=reclaim)

    def _gather(self, rows: Sequence[int]) -> list[int]:
        """What is worth it, in the order of prompts. Lock held."""
        catalog, level = self._stock.catalog, self._level
        groups: dict[int, list[int]] = {}
        for row in rows:
            if self._wanted(row):
                groups.setdefault(self._tokens(row), []).append(row)
        chosen: list[int] = []
        for tokens, group in groups.items():
            blocks = path_blocks(catalog.tree, group, -(-level.config.mirror // tokens))
            found = np.array([row for row in blocks if self._wanted(row)], dtype=np.int64)
            facts = MirrorFacts(
                prompt_tokens=np.array([blocks[row] for row in found.tolist()], np.int64) * tokens,
                below=catalog.residency.array[found] >= 2 * level.copies.bit,
                closed=catalog.closed.mask(found),
            )
            chosen += found[worth_mirroring(facts, level.config.mirror)].tolist()
        return path_order(catalog.tree, chosen)

    def _wanted(self, row: int) -> bool:
        catalog = self._stock.catalog
        places = self._level.places(row) if catalog.is_live(row) else []
        return len(places) == 1 and self._level.works(places[0])

    def _tokens(self, row: int) -> int:
        """Of one block, as its namespace says."""
        tag = self._stock.catalog.table.key(row)[:TAG_BYTES]
        if tag in self._block_tokens:
            return self._block_tokens[tag]
        spaces = [notebook.spaces.get(tag) for notebook in self._level.tier.notebooks]
        texts = [found[1] for found in spaces if found is not None]
        told = _block_tokens(texts[0]) if texts else 0
        if told:
            self._block_tokens[tag] = told
        return told or self._stock.config.block_tokens

    def _runs(self, rows: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """Rows that lie on one drive and go to one other, with the first one's number."""
        nbytes, location = self._stock.catalog.nbytes, self._level.copies.location
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
                if total >= max(self._level.run_bytes, _PIECE_BYTES):
                    yield drive, run
                    run, total = [], 0
            if run:
                yield drive, run

    def _target(self, source: int, run: list[int], *, reclaim: bool) -> int | None:
        """The drive for second copies: of those that work the next in turn, with room at best."""
        drives = self._level.tier.drives
        order = [(self._turn + step) % len(drives) for step in range(1, len(drives) + 1)]
        others = [index for index in order if index != source and not drives[index].draining]
        up = [index for index in others if drives[index].breaker.closed and not drives[index].lost]
        if not up:
            self._mirrors.look_at_all |= bool(others)
            return None
        nbytes = max(record_bytes(self._stock.catalog.nbytes[row]) for row in run)
        up = [index for index in up if not drives[index].wear.spent]
        roomy = [index for index in up if drives[index].has_room(nbytes)]
        found = next(iter([*roomy, *(up if reclaim else [])]), None)
        if found is not None:
            self._turn = found
        return found

    def _copy_run(self, rows: list[int], target: int, *, reclaim: bool) -> None:
        left = rows
        while left and not self._stock.closing:
            started_s = self._stock.clock.now()
            with self._stock.changed:
                piece, left = self._claim(left)
                if not piece.rows and left:  # memory is short: some other time
                    self._mirrors.fresh.update(dict.fromkeys(left))
                    return
            if piece.rows:
                if not self._copy(piece, target, reclaim=reclaim):
                    if reclaim:
                        self._put_off(left)
                    return
                self._stride.took(sum(map(len, piece.images)), self._stock.clock.now() - started_s)
            rest(self._stock, [self._level], started_s)

    def _put_off(self, rows: list[int]) -> None:
        """Try rows again at the next looks, a few times: others may hold the room now."""
        with self._stock.changed:
            for row in rows:
                self._tries[row] += 1
                if self._tries[row] < _TRIES:
                    self._mirrors.fresh[row] = None
                else:
                    del self._tries[row]

    def _claim(self, rows: list[int]) -> tuple[Piece, list[int]]:
        """Take as many rows as there is memory for. Lock held."""
        stock, catalog = self._stock, self._stock.catalog
        budget = min(self._stride.nbytes, max(1, stock.staging.capacity_bytes // 4))
        piece = Piece([], [], [], [])
        left: list[int] = []
        for index, row in enumerate(rows):
            nbytes = record_bytes(catalog.nbytes[row])
            if not self._wanted(row):
                continue
            slot = None
            if not piece.rows or nbytes <= budget:
                slot = stock.staging.allocate(nbytes, TEMPORARY)
            if slot is None:
                left = rows[index:]
                break
            if not catalog.memory.ready(row):
                piece.fetch.append(len(piece.rows))
            piece.rows.append(row)
            piece.images.append(stock.staging.image(slot, nbytes))
            piece.slots.append(slot)
            budget -= nbytes
        self._mirrors.writing.update(piece.rows)
        catalog.lease(piece.rows)
        return piece, left

    def _copy(self, piece: Piece, target: int, *, reclaim: bool) -> bool:
        """Read and append. False: the drive took nothing."""
        good = self._fill(piece)
        images = [piece.images[index] for index in good]
        tier = self._level.tier
        drive = tier.drives[target]
        places = append(tier, target, images, self._make_room if reclaim else None)
        with self._stock.changed:
            if drive.lost or tier.drives[target] is not drive:
                places = [None] * len(images)
            removed = self._enter(piece, dict(zip(good, places, strict=True)))
        self._release(piece, removed)
        if None in places and not drive.breaker.closed:
            self._mirrors.look_at_all = True
        elif reclaim:
            self._put_off([piece.rows[n] for n, at in zip(good, places, strict=True) if at is None])
        return not images or any(place is not None for place in places)

    def _fill(self, piece: Piece) -> list[int]:
        """Bring the blocks into the images, from memory or from their drive; which are intact."""
        stock, catalog, level = self._stock, self._stock.catalog, self._level
        fetched = set(piece.fetch)
        ops = []
        for index, (row, image) in enumerate(zip(piece.rows, piece.images, strict=True)):
            if index not in fetched:
                source = stock.arena.address + catalog.memory.location[row]
                ops.append((0, source, *address_of(image), 0, 0, COPY))
        transfers(ops)
        rows = [piece.rows[index] for index in piece.fetch]
        found = level.tier.read_images(
            [catalog.table.key(row) for row in rows],
            [level.readable(row) for row in rows],
            [piece.images[index] for index in piece.fetch],
        )
        lost = {index for index, intact in zip(piece.fetch, found, strict=True) if not intact}
        return [index for index in range(len(piece.rows)) if index not in lost]

    def _enter(self, piece: Piece, places: dict[int, int | None]) -> list[Removal]:
        """Enter what was written. Returns removals that came meanwhile. Lock held."""
        stock, level, catalog = self._stock, self._level, self._stock.catalog
        removed = []
        for index, location in places.items():
            if location is None:
                continue
            row = piece.rows[index]
            stock.counters.mirrored += level.enter_mirror(row, location)
            self._tries.pop(row, None)
            if catalog.is_doomed(row):
                removed.append(level.tier.removal(catalog.table.key(row)))
        return removed

    def _release(self, piece: Piece, removed: list[Removal]) -> None:
        """Write removals down, and give back what a piece held."""
        stock, level = self._stock, self._level
        unrecorded = bool(removed) and bool(level.tier.erase(removed))
        with stock.changed:
            stock.counters.removal_unrecorded += unrecorded
            for slot in piece.slots:
                stock.staging.free(slot)
            self._mirrors.writing.difference_update(piece.rows)
            stock.unlease(piece.rows)


def _block_tokens(description: bytes) -> int:
    """What a namespace's description says of its blocks; 0 if it is not one of ours."""
    try:
        tokens = json.loads(description)["layout"]["block_tokens"]
    except (ValueError, KeyError, TypeError):
        return 0
    return tokens if isinstance(tokens, int) and tokens > 0 else 0
