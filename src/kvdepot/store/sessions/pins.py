"""Contracts of retention: granted once the blocks and the contract are durable, and kept.

A contract binds blocks to the drives: reclaiming moves them on, and drops other blocks. It is
refused where it could not be kept. All contracts take a part of a tier at most, those of one tenant
a smaller one, so that there is always room to go on.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from kvdepot.core.block import CopyState
from kvdepot.core.clock import Clock
from kvdepot.core.depot import Durability, FlushReport
from kvdepot.core.keys import Keys, as_words
from kvdepot.core.sessions import KEEP_S, RetentionReceipt
from kvdepot.core.units import format_bytes, format_count
from kvdepot.errors import KVDepotError
from kvdepot.format.record import HEAD_BYTES, PAGE
from kvdepot.index.table import NONE, Bools, Rows
from kvdepot.store.sessions.records import SessionRecords
from kvdepot.store.sessions.session_table import Pin, Prompt, Sessions, unpacked
from kvdepot.store.state.lower_tier import LowerTier
from kvdepot.store.state.state import StoreState

_LOOK_S: Final = 1.0
_WRITE_EVERY: Final = 5
"""Looks between two writes of what has changed."""
_TOTAL_SHARE: Final = 0.5
"""Of each tier that all contracts may take."""
_DURABLE_S: Final = 30.0
_KEY_BYTES: Final = 58
"""That a key takes in a page."""
Flush = Callable[[float, Keys | None], FlushReport]
Renewing = Callable[[LowerTier, list[int]], bool]


class RefusedPromiseError(KVDepotError):
    """A contract cannot be granted; says why."""


class PinManager:
    """Grants, ends and remembers contracts, and writes sessions down. One thread of its own."""

    def __init__(
        self,
        state: StoreState,
        sessions: Sessions,
        records: SessionRecords,
        wall: Clock,
        flush: Flush,
        renew: Renewing,
    ) -> None:
        self._state = state
        self._sessions = sessions
        self._records = records
        self._wall = wall
        self._flush = flush
        self._renew = renew
        self._since_s = wall.now()
        self._granting = threading.Lock()
        self._last_number = 0
        self._granted = self._refused = 0
        self._tally = {"contract_blocks": 0, "contract_bytes": 0, "contract_missing_blocks": 0}
        self._thread = threading.Thread(target=self._run, name="kvdepot-sessions", daemon=True)
        self._writer: threading.Thread | None = None
        """The last thread that wrote for a caller who waits for so long only."""

    def start(self) -> None:
        """Know what the drives have, and look after it from now on."""
        with self._state.lock:
            self._records.load()
            self._number_on()
            self._sessions.changed = self._records.changed
            self._sessions.promises.renew = self._drive_is_back
        self._thread.start()

    def _drive_is_back(self) -> None:
        """Know what a drive has that was away, and keep its blocks. With the store's lock."""
        self._records.load()
        self._number_on()
        self._sessions.bind_all()

    def _number_on(self) -> None:
        numbers = (contract.number for contract in self._sessions.contracts.values())
        self._last_number = max(numbers, default=self._last_number)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread of a store that closes. False: it is still busy."""
        threads = [one for one in (self._thread, self._writer) if one and one.is_alive()]
        deadline_s = self._state.clock.now() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline_s - self._state.clock.now()))
        return not any(thread.is_alive() for thread in threads)

    def grant(
        self, name: str, tags: Sequence[bytes], until_s: float, *, through_turn: bool
    ) -> RetentionReceipt:
        """Put a session's blocks of these namespaces under contract: all, or nothing changes."""
        with self._granting:
            before: dict[bytes, Pin] = {}
            try:
                prompts = self._prompts(name, tags)
                self._check_terms(until_s, prompts)
                self._make_young(name, prompts)
                self._make_durable(prompts)
                granted = self._bind(name, prompts, until_s, through_turn, before)
                self._write_down(name, granted, before)
            except RefusedPromiseError as refused:
                self._refused += 1
                return RetentionReceipt(False, name, reason=str(refused), hint=refused.hint)
        with self._state.lock:
            rows = self._rows([(tag, one.packed) for tag, one in granted.items()])
            nbytes = int(self._sizes(rows).sum())
            self._granted += len(granted)
        self.tally()
        return RetentionReceipt(
            True,
            name,
            blocks=sum(map(len, granted.values())),
            nbytes=nbytes,
            until_s=until_s,
            through_turn=through_turn,
            numbers=tuple(one.number for one in granted.values()),
        )

    def end(self, name: str, tags: Sequence[bytes]) -> int:
        """End the contracts of a session. Returns how many there were. Written down soon."""
        with self._state.lock:
            ended = sum(self._sessions.end_contract(tag, name) for tag in tags)
        self.tally()
        return ended

    def default_until_s(self, for_s: float | None) -> float:
        return self._wall.now() + (KEEP_S if for_s is None else for_s)

    def missing(self, tag: bytes, contract: Pin) -> int:
        """Blocks of a contract that are on no durable tier any more. With the store's lock."""
        rows = self._rows([(tag, contract.packed)])
        return len(contract) - int(self._is_durable(rows).sum())

    def promised_bytes(self, tier: str) -> int:
        """What contracts take of a tier. With the store's lock."""
        rows = np.flatnonzero(self._sessions.promises.contracts.array > 0)
        return sum(
            int(self._sizes(rows[lower.bound(rows)]).sum())
            for lower in self._state.lower_tiers
            if lower.name == tier
        )

    def has_missing(self) -> bool:
        """Whether blocks under contract are not there: their drive may be away."""
        with self._state.lock:
            return any(self.missing(tag, one) for (tag, _), one in self._sessions.contracts.items())

    def look(self) -> None:
        """End contracts that are over; put blocks under contract that have come back; forget
        sessions that were not told of for long.
        """
        now_s, sessions = self._wall.now(), self._sessions
        with self._state.lock:
            for (tag, name), contract in list(sessions.contracts.items()):
                if contract.until_s <= now_s:
                    sessions.end_contract(tag, name)
                elif not contract.held.all():
                    sessions.bind(tag, contract)
            sessions.forget_older(now_s - self._state.config.sessions.ttl)

    def tally(self) -> None:
        """Count the blocks under contract, for `describe`. The store's lock is taken for one
        contract at a time.
        """
        with self._state.lock:
            contracts = list(self._sessions.contracts.items())
        missing = 0
        for (tag, _), contract in contracts:
            with self._state.lock:
                missing += self.missing(tag, contract)
        rows = np.flatnonzero(self._sessions.promises.contracts.array)
        self._tally = {
            "contract_blocks": len(rows),
            "contract_bytes": int(self._sizes(rows).sum()),
            "contract_missing_blocks": missing,
        }

    def describe(self) -> dict[str, int]:
        """Contracts, for `stats`; blocks as they were counted last, some seconds ago at most."""
        return {
            "contracts_granted": self._granted,
            "contracts_refused": self._refused,
            **self._tally,
        }

    def write(self, sync_s: float | None = None) -> bool:
        """Write down what has changed."""
        if not self._records.exist or not self._records.dirty:
            return True
        return self._records.write(sync_s)

    def write_in_time(self, timeout_s: float) -> None:
        """`write`, in a thread of its own: a drive that stalls lets go of it later."""
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
            raise RefusedPromiseError(
                "this store has no durable tier",
                hint='use ssd or hdd, with fsync other than "never"',
            )
        if until_s <= self._wall.now():
            raise RefusedPromiseError("the end lies in the past")
        most_s = self._state.config.sessions.keep_max
        if until_s > self._wall.now() + most_s:
            days = most_s / 86400
            raise RefusedPromiseError(
                f"contracts last {days:g} days at most", hint="raise sessions.keep_max"
            )
        for prompt in prompts.values():
            if len(prompt) * _KEY_BYTES > self._records.pin_bytes_max:
                raise RefusedPromiseError(
                    "the session is too long to be written down as one contract"
                )

    def _make_young(self, name: str, prompts: dict[bytes, Prompt]) -> None:
        """Where a drive is away, have blocks written again that another opening has left here: that
        drive may know that they were removed. What this opening has under contract was."""
        since_s = self._since_s
        for lower in self._state.lower_tiers:
            if lower.volumes.is_remote or lower.volumes.are_up:
                continue
            with self._state.lock:
                held = self._sessions.contracts
                known = [(tag, held[tag, name]) for tag in prompts if (tag, name) in held]
                done = [(tag, one.packed) for tag, one in known if one.granted_s >= since_s]
                rows = self._rows([(tag, prompt.packed) for tag, prompt in prompts.items()])
                rows = np.setdiff1d(rows, self._rows(done))
                rows = rows[lower.copies.state.array[rows] == CopyState.READY]
            if not self._renew(lower, rows.tolist()):
                raise RefusedPromiseError(
                    "a drive is away, and its blocks could not be written again meanwhile",
                    hint="see kvdepot tiers list",
                )

    def _make_durable(self, prompts: dict[bytes, Prompt]) -> None:
        """Have all blocks written and synced, or RefusedPromiseError."""
        state = self._state
        keys = [key for tag, prompt in prompts.items() for key in prompt.keys(tag)]
        with state.lock:
            rows = [row for row in state.catalog.rows(keys) if row != NONE]
            away = np.array(rows, np.int64)
            for row in away[~self._is_durable(away)].tolist():
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
        until_s: float,
        through_turn: bool,
        before: dict[bytes, Pin],
    ) -> dict[bytes, Pin]:
        """Put the blocks under contract in the index, if there is room for them in the tiers."""
        state, sessions = self._state, self._sessions
        with state.lock:
            rows = self._rows([(tag, prompt.packed) for tag, prompt in prompts.items()])
            count = sum(map(len, prompts.values()))
            if len(rows) < count or not self._is_durable(rows).all():
                raise RefusedPromiseError(
                    "some of its blocks have just made room on their drive", hint="try again"
                )
            self._check_share(rows)
            granted = {}
            for tag, prompt in prompts.items():
                known = sessions.contracts.get((tag, name))
                if known is not None:
                    before[tag] = known
                self._last_number += 1
                held = np.zeros(len(prompt), dtype=bool)
                terms = (self._wall.now(), until_s, through_turn)
                granted[tag] = Pin(self._last_number, prompt.packed, *terms, held)
                sessions.agree(tag, name, granted[tag])
            return granted

    def _write_down(self, name: str, granted: dict[bytes, Pin], before: dict[bytes, Pin]) -> None:
        """Make the contracts durable. RefusedPromiseError: that failed, and all is as before."""
        if self._records.write(sync_s=self._write_timeout_s()):
            return
        with self._state.lock:
            for tag, contract in granted.items():
                if self._sessions.contracts.get((tag, name)) is contract:
                    self._sessions.withdraw(tag, name)
                    if tag in before:
                        before[tag].held[:] = False
                        self._sessions.agree(tag, name, before[tag])
        raise RefusedPromiseError(
            "the contract could not be written down", hint="see kvdepot tiers list"
        )

    def _write_timeout_s(self) -> float:
        return max(lower.config.write_timeout for lower in self._state.lower_tiers)

    def _check_share(self, new: Rows) -> None:
        """RefusedPromiseError where contracts would take too much of a tier."""
        state, catalog = self._state, self._state.catalog
        known = np.flatnonzero(self._sessions.promises.contracts.array > 0)
        rows = np.union1d(known, new)
        tags = catalog.table.tags()
        tenants = {
            word: state.descriptions.tenant(word.tobytes()) for word in np.unique(tags[rows])
        }
        mine = {tenants[word] for word in np.unique(tags[new])}
        share = state.config.sessions.pinned_share
        for lower in state.lower_tiers:
            if not lower.volumes.is_durable:
                continue
            here = rows[lower.copies.state.array[rows] == CopyState.READY]
            stay = [facts for _, facts in lower.volumes.all_facts() if facts.may_write]
            room = sum(facts.capacity_bytes for facts in stay)
            taken: Counter[str] = Counter()
            for word in np.unique(tags[here]):
                taken[tenants[word]] += int(self._sizes(here[tags[here] == word]).sum())
            if taken.total() > _TOTAL_SHARE * room:
                raise RefusedPromiseError(
                    f"all contracts would take {format_bytes(taken.total())} of {lower.name}'s "
                    f"{format_bytes(room)}, {_TOTAL_SHARE:.0%} at most",
                    hint=f"end others, or raise {lower.name}.capacity",
                )
            for tenant in mine:
                if taken[tenant] > share * room:
                    raise RefusedPromiseError(
                        f"contracts of tenant {tenant!r} would take {format_bytes(taken[tenant])} "
                        f"of {lower.name}'s {format_bytes(room)}, {share:.0%} at most",
                        hint="end others, or raise sessions.pinned_share",
                    )

    def _rows(self, parts: Sequence[tuple[bytes, bytes]]) -> Rows:
        """Rows that the index has of packed keys, by tag."""
        table = self._state.catalog.table
        found = [table.find_many(unpacked(tag, packed)) for tag, packed in parts]
        rows: Rows = np.concatenate([np.zeros(0, np.int64), *found])
        known: Rows = rows[rows != NONE]
        return known

    def _is_durable(self, rows: Rows) -> Bools:
        """Which rows are on a tier that a contract may rest on."""
        found: Bools = np.zeros(len(rows), dtype=bool)
        for lower in self._state.lower_tiers:
            if lower.volumes.is_durable:
                found |= lower.copies.state.array[rows] == CopyState.READY
        return found

    def _sizes(self, rows: Rows) -> Rows:
        """Of the blocks' records."""
        payload_bytes = self._state.catalog.nbytes.array[rows].astype(np.int64)
        sizes: Rows = HEAD_BYTES + -(-payload_bytes // PAGE) * PAGE
        return sizes


_WHY: Final = {
    Durability.WAITING: "were not written in time",
    Durability.POLICY: "are kept in memory by the write mode",
    Durability.BUDGET: "found no writes left in the drives' budget",
    Durability.READ_ONLY: "cannot be written: the store is read-only",
    Durability.NO_DRIVE: "have no drive to go to",
    Durability.FAILED: "could not be written",
    Durability.EVICTED: "had to make room on their drive",
    Durability.ABSENT: "are not in the store",
}


def _refusal(report: FlushReport, count: int) -> RefusedPromiseError:
    parts = [f"{number} {_WHY.get(why, why.value)}" for why, number in report.not_durable.items()]
    return RefusedPromiseError(
        f"of {format_count(count, 'block')} {', '.join(parts)}",
        hint="see kvdepot session show, and kvdepot tiers list",
    )
