"""Pins of sessions, granted when the blocks and the pin are durable.

Pinned blocks are not evicted from drives: a reclaim moves them and drops other blocks. All pins
together may take a limited share of a tier, and those of one user of the machine a smaller one, so
that there is room for other blocks. Tenants are names that a client chooses, so no limit goes by
them. A pin that cannot be kept is refused.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from kvdepot.core.block import CopyState
from kvdepot.core.clock import Clock
from kvdepot.core.depot import Durability, FlushReport
from kvdepot.core.endurance import DAY_S
from kvdepot.core.keys import Keys, as_words
from kvdepot.core.sessions import PinReceipt
from kvdepot.core.units import format_bytes, format_count
from kvdepot.errors import KVDepotError
from kvdepot.format.record import record_sizes
from kvdepot.index.table import NONE, Bools, Rows
from kvdepot.store.sessions.records import SessionRecords
from kvdepot.store.sessions.session_table import Pin, Prompt, Sessions, unpacked
from kvdepot.store.state.state import StoreState

_LOOK_S: Final = 1.0
_WRITE_EVERY: Final = 5
"""Number of `look` calls between two writes of changes."""
_TOTAL_SHARE: Final = 0.5
"""Share of each tier that all pins together may take."""
_DURABLE_S: Final = 30.0
_DAYS_MAX: Final = 366
_KEY_BYTES: Final = 58
"""Bytes of a key in a page."""
Flush = Callable[[float, Keys | None], FlushReport]


class RefusedPinError(KVDepotError):
    """A pin cannot be granted."""


class PinnedBlocks:
    """Rows of pinned blocks, and the bytes that they take in each tier."""

    def __init__(self, state: StoreState, sessions: Sessions) -> None:
        self._state = state
        self._sessions = sessions

    def rows(self, parts: Sequence[tuple[bytes, bytes]]) -> Rows:
        """The rows of packed keys, given by tag, that are in the index."""
        table = self._state.catalog.table
        found = [table.find_many(unpacked(tag, packed)) for tag, packed in parts]
        rows: Rows = np.concatenate([np.zeros(0, np.int64), *found])
        known: Rows = rows[rows != NONE]
        return known

    def is_durable(self, rows: Rows) -> Bools:
        """True for rows that are on a durable tier."""
        found: Bools = np.zeros(len(rows), dtype=bool)
        for lower in self._state.lower_tiers:
            if lower.volumes.is_durable:
                found |= lower.copies.state.array[rows] == CopyState.READY
        return found

    def sizes(self, rows: Rows) -> Rows:
        """Bytes of each block's record."""
        return record_sizes(self._state.catalog.nbytes.array[rows])

    def missing(self, tag: bytes, pin: Pin) -> int:
        """Number of blocks of a pin that no durable tier has. With the store's lock."""
        rows = self.rows([(tag, pin.packed)])
        return len(pin) - int(self.is_durable(rows).sum())

    def has_missing(self) -> bool:
        """True if pinned blocks are missing: their drive may be away."""
        with self._state.lock:
            return any(self.missing(tag, one) for (tag, _), one in self._sessions.pins.items())

    def pinned_bytes(self, tier: str) -> int:
        """Bytes of a tier that pins take. With the store's lock."""
        rows = np.flatnonzero(self._sessions.pinned.pins.array > 0)
        return sum(
            int(self.sizes(rows[lower.bound(rows)]).sum())
            for lower in self._state.lower_tiers
            if lower.name == tier
        )

    def check_share(self, new: Rows, owner: str) -> None:
        """Raise RefusedPinError if pins, or those of this owner, would take too much of a tier."""
        state, pins = self._state, self._sessions.pins
        known = np.flatnonzero(self._sessions.pinned.pins.array > 0)
        own = [(tag, pin.packed) for (tag, _), pin in pins.items() if pin.owner == owner]
        share = state.config.sessions.pinned_share
        limits = (
            ("all pins", known, _TOTAL_SHARE, "{}.capacity"),
            (f"pins of {owner}", self.rows(own), share, "sessions.pinned_share"),
        )
        for lower in state.lower_tiers:
            if not lower.volumes.is_durable:
                continue
            stay = [facts for _, facts in lower.volumes.all_facts() if facts.may_write]
            room = sum(facts.capacity_bytes for facts in stay)
            for whose, rows, most, setting in limits:
                rows = np.union1d(rows, new)
                here = rows[lower.copies.state.array[rows] == CopyState.READY]
                taken = int(self.sizes(here).sum())
                if taken > most * room:
                    raise RefusedPinError(
                        f"{whose} would take {format_bytes(taken)} of {lower.name}'s "
                        f"{format_bytes(room)}, the limit is {most:.0%}",
                        hint=f"end other pins, or raise {setting.format(lower.name)}",
                    )


class PinManager:
    """Grants and ends pins, and writes sessions and pins to the drives in a thread."""

    def __init__(
        self,
        state: StoreState,
        sessions: Sessions,
        records: SessionRecords,
        wall: Clock,
        flush: Flush,
    ) -> None:
        self._state = state
        self._sessions = sessions
        self._records = records
        self._wall = wall
        self._flush = flush
        self.blocks = PinnedBlocks(state, sessions)
        self._granting = threading.Lock()
        self._last_number = 0
        self._granted = self._refused = 0
        self._tally = {"pinned_blocks": 0, "pinned_bytes": 0, "pinned_missing_blocks": 0}
        self._thread = threading.Thread(target=self._run, name="kvdepot-sessions", daemon=True)
        self._writer: threading.Thread | None = None
        """The last thread of `write_in_time`."""

    def start(self) -> None:
        """Load the entries of the drives and start the thread."""
        with self._state.lock:
            self._records.load()
            self._number_on()
            self._sessions.changed = self._records.changed
            self._sessions.pinned.renew = self._drive_is_back
        self._thread.start()

    def _drive_is_back(self) -> None:
        """Load the entries of a drive that was reopened, and pin its blocks.
        With the store's lock.
        """
        self._records.load()
        self._number_on()
        self._sessions.bind_all()

    def _number_on(self) -> None:
        numbers = (pin.number for pin in self._sessions.pins.values())
        self._last_number = max(numbers, default=self._last_number)

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads after the store began to close. False: one is still running."""
        threads = [one for one in (self._thread, self._writer) if one and one.is_alive()]
        deadline_s = self._state.clock.now() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline_s - self._state.clock.now()))
        return not any(thread.is_alive() for thread in threads)

    def grant(self, name: str, tags: Sequence[bytes], until_s: float, owner: str) -> PinReceipt:
        """Pin a session's blocks in these namespaces: all of them, or nothing changes. Blocks until
        they and the pin are durable. `owner`: the user whose pins it counts with.
        """
        with self._granting:
            before: dict[bytes, Pin] = {}
            try:
                prompts = self._prompts(name, tags)
                self._check_terms(until_s, prompts)
                self._make_durable(prompts)
                granted = self._bind(name, prompts, (until_s, owner), before)
                self._write_down(name, granted, before)
            except RefusedPinError as refused:
                self._refused += 1
                return PinReceipt(False, name, reason=str(refused), hint=refused.hint)
        with self._state.lock:
            rows = self.blocks.rows([(tag, one.packed) for tag, one in granted.items()])
            nbytes = int(self.blocks.sizes(rows).sum())
            self._granted += len(granted)
        self.tally()
        return PinReceipt(
            True,
            name,
            blocks=sum(map(len, granted.values())),
            nbytes=nbytes,
            until_s=until_s,
            numbers=tuple(one.number for one in granted.values()),
        )

    def end(self, name: str, tags: Sequence[bytes]) -> int:
        """End the pins of a session. Returns their number. The change is written soon."""
        with self._state.lock:
            ended = sum(self._sessions.end_pin(tag, name) for tag in tags)
        self.tally()
        return ended

    def look(self) -> None:
        """End expired pins, pin blocks that were stored again, and drop sessions that were not
        named for `sessions.ttl`.
        """
        now_s, sessions = self._wall.now(), self._sessions
        with self._state.lock:
            for (tag, name), pin in list(sessions.pins.items()):
                if pin.until_s <= now_s:
                    sessions.end_pin(tag, name)
                elif not pin.held.all():
                    sessions.bind(tag, pin)
            sessions.forget_older(now_s - self._state.config.sessions.ttl)

    def tally(self) -> None:
        """Count pinned blocks for `describe`. Takes the store's lock for one pin at a time."""
        with self._state.lock:
            pins = list(self._sessions.pins.items())
        missing = 0
        for (tag, _), pin in pins:
            with self._state.lock:
                missing += self.blocks.missing(tag, pin)
        rows = np.flatnonzero(self._sessions.pinned.pins.array)
        self._tally = {
            "pinned_blocks": len(rows),
            "pinned_bytes": int(self.blocks.sizes(rows).sum()),
            "pinned_missing_blocks": missing,
        }

    def describe(self) -> dict[str, int]:
        """Counts of pins for `stats`. Counts of blocks are some seconds old."""
        return {
            "pins_granted": self._granted,
            "pins_refused": self._refused,
            **self._tally,
        }

    def write(self, sync_s: float | None = None) -> bool:
        """Write changes to the drives; with `sync_s` durably. True if there is nothing to write."""
        if not self._records.exist or not self._records.dirty:
            return True
        return self._records.write(sync_s)

    def write_in_time(self, timeout_s: float) -> None:
        """`write` in a thread of its own, and wait for `timeout_s` at most: a drive may stall."""
        if not self._records.exist or not self._records.dirty:
            return
        with self._state.lock:
            thread = self._writer
            if thread is None or not thread.is_alive():
                name = "kvdepot-sessions-write"
                thread = self._writer = threading.Thread(target=self.write, name=name, daemon=True)
                thread.start()
        thread.join(timeout_s)

    def _run(self) -> None:
        looks = 0
        while not self._state.closing.wait(_LOOK_S):
            looks += 1
            self.look()
            if not looks % _WRITE_EVERY:
                self.tally()
                self.write()

    def _prompts(self, name: str, tags: Sequence[bytes]) -> dict[bytes, Prompt]:
        with self._state.lock:
            found = {tag: self._sessions.find(tag, name) for tag in tags}
        return {tag: prompt for tag, prompt in found.items() if prompt is not None}

    def _check_terms(self, until_s: float, prompts: dict[bytes, Prompt]) -> None:
        durable = [one for one in self._state.lower_tiers if one.volumes.is_durable]
        if not durable or not self._records.exist:
            raise RefusedPinError(
                "this store has no durable tier",
                hint='use ssd or hdd, with fsync other than "never"',
            )
        if not all(one.volumes.are_up for one in durable):
            raise RefusedPinError(
                "a drive is missing, and may have removals of blocks of the session",
                hint="attach it again, or drain it: kvdepot tiers list",
            )
        if until_s <= self._wall.now():
            raise RefusedPinError("the end of the pin is in the past")
        if until_s > self._wall.now() + _DAYS_MAX * DAY_S:
            raise RefusedPinError(f"a pin may last {_DAYS_MAX} days at most")
        for prompt in prompts.values():
            if len(prompt) * _KEY_BYTES > self._records.pin_bytes_max:
                raise RefusedPinError("the session has too many blocks for one pin")

    def _make_durable(self, prompts: dict[bytes, Prompt]) -> None:
        """Write and sync all blocks. RefusedPinError if one is not durable then."""
        state = self._state
        keys = [key for tag, prompt in prompts.items() for key in prompt.keys(tag)]
        with state.lock:
            rows = [row for row in state.catalog.rows(keys) if row != NONE]
            away = np.array(rows, np.int64)
            for row in away[~self.blocks.is_durable(away)].tolist():
                if not state.writes.is_dirty(row) and state.catalog.is_live(row):
                    state.writes.add_again(row)
            state.lock.work.notify_all()
        report = self._flush(_DURABLE_S, as_words(keys))
        if report.not_durable:
            raise _refusal(report, len(keys))

    def _bind(
        self,
        name: str,
        prompts: dict[bytes, Prompt],
        terms: tuple[float, str],
        before: dict[bytes, Pin],
    ) -> dict[bytes, Pin]:
        """Pin the blocks in the index, with these terms: the end and the owner. RefusedPinError if
        a tier has no room for pins.
        """
        state, sessions = self._state, self._sessions
        until_s, owner = terms
        with state.lock:
            rows = self.blocks.rows([(tag, prompt.packed) for tag, prompt in prompts.items()])
            count = sum(map(len, prompts.values()))
            if len(rows) < count or not self.blocks.is_durable(rows).all():
                raise RefusedPinError(
                    "some blocks of the session were evicted during the call", hint="try again"
                )
            self.blocks.check_share(rows, owner)
            granted = {}
            for tag, prompt in prompts.items():
                known = sessions.pins.get((tag, name))
                if known is not None:
                    before[tag] = known
                self._last_number += 1
                held = np.zeros(len(prompt), dtype=bool)
                now_s = self._wall.now()
                granted[tag] = Pin(self._last_number, prompt.packed, now_s, until_s, held, owner)
                sessions.set_pin(tag, name, granted[tag])
            return granted

    def _write_down(self, name: str, granted: dict[bytes, Pin], before: dict[bytes, Pin]) -> None:
        """Make the pins durable. RefusedPinError: that failed, and nothing has changed."""
        tiers = self._state.lower_tiers
        if self._records.write(sync_s=max(lower.config.write_timeout for lower in tiers)):
            return
        with self._state.lock:
            for tag, pin in granted.items():
                if self._sessions.pins.get((tag, name)) is pin:
                    self._sessions.clear_pin(tag, name)
                    if tag in before:
                        before[tag].held[:] = False
                        self._sessions.set_pin(tag, name, before[tag])
        raise RefusedPinError("the pin could not be written", hint="see kvdepot tiers list")


_WHY: Final = {
    Durability.WAITING: "were not written in time",
    Durability.POLICY: "are kept in memory by the write mode",
    Durability.BUDGET: "cannot be written: the drives' write budget is used up",
    Durability.READ_ONLY: "cannot be written: the store is read-only",
    Durability.NO_DRIVE: "cannot be written: the store has no drive",
    Durability.FAILED: "could not be written",
    Durability.EVICTED: "were evicted from their drive",
    Durability.ABSENT: "are not in the store",
}


def _refusal(report: FlushReport, count: int) -> RefusedPinError:
    parts = [f"{number} {_WHY.get(why, why.value)}" for why, number in report.not_durable.items()]
    return RefusedPinError(
        f"of {format_count(count, 'block')} {', '.join(parts)}",
        hint="see kvdepot session show, and kvdepot tiers list",
    )
