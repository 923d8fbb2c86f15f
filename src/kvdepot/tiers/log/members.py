"""Which drives of a tier belong together, so that one that is away is missed.

A removal is recorded on every drive. A drive that is away gets it when it returns; until then the
others keep it, although they have no use for it any more. Each superblock has the list of all
drives, with a version: the newest list is right. A drive that the newest list has not was given
up, and what it holds does not count: removals that it missed may be forgotten.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Final

from kvdepot.core.tier import Removal
from kvdepot.tiers.log.drive import Drive

_NAME_CHARS: Final = 8
_KEPT_SHARE: Final = 16
_REMOVAL_BYTES: Final = 64
_log: Final = logging.getLogger("kvdepot.tiers")


@dataclass(frozen=True, slots=True)
class MemberList:
    """As a superblock has it: `3:0a1b2c3d,4e5f6a7b`."""

    version: int = 0
    names: frozenset[str] = frozenset()

    def pack(self) -> str:
        return f"{self.version}:{','.join(sorted(self.names))}" if self.names else ""

    @classmethod
    def parse(cls, text: str) -> "MemberList":
        version, _, names = text.partition(":")
        if not version.isdecimal() or len(version) > _NAME_CHARS or not names:
            return cls()
        return cls(int(version), frozenset(names.split(",")))


class Members:
    """The drives of one tier, and which are missing. Thread-safe."""

    def __init__(self, drives: Callable[[], Sequence[Drive]], *, writable: bool) -> None:
        self._drives = drives
        self._writable = writable
        self._known = MemberList()
        self._lock = threading.Lock()
        """Held while the list changes, until it is written down."""
        self._owed_lock = threading.Lock()
        self.owed: dict[Drive, dict[Removal, None]] = {}
        """Removals that drives could not record while they were down."""

    def settle(self) -> list[Drive]:
        """Read the lists of all drives that are there. Returns those that were given up."""
        lists = {drive: MemberList.parse(drive.members) for drive in self._present()}
        self._known = max(lists.values(), key=lambda one: one.version, default=MemberList())
        given_up = [drive for drive, told in lists.items() if self._is_given_up(drive, told)]
        self._change(add={_name(drive) for drive in lists})
        return given_up

    def admit(self, drive: Drive, before: Drive | None = None) -> bool:
        """A drive has come, perhaps in place of another. False: it had been given up."""
        told = MemberList.parse(drive.members)
        given_up = self._is_given_up(drive, told)
        gone = set()
        if before is not None:
            self._settle_debt(before)
            gone = {_name(before)}
        self._change(add={_name(drive)}, drop=gone)
        return not given_up

    def leave(self, drive: Drive) -> None:
        """A drive has gone for good."""
        self._settle_debt(drive)
        self._change(drop={_name(drive)})

    def are_missing(self) -> bool:
        """Whether a drive is away, or down, that may lack a removal which the others have."""
        present = {_name(drive) for drive in self._present()}
        away = any(drive.lost and not drive.retired for drive in self._drives())
        return away or bool(self.owed) or not self._known.names <= present

    def share_removals(self, leaving: Drive | None = None) -> None:
        """Record on every drive, but for one that leaves, what the others have recorded and it may
        need.
        """
        known = {drive: _recorded(drive) for drive in self._present()}
        every = dict.fromkeys(itertools.chain.from_iterable(known.values()))
        for drive, recorded in known.items():
            if drive is leaving or drive.draining:
                continue
            ids = [segment.segment_id for segment in list(drive.segments.values())]
            ids += list(drive.parting.values())
            oldest = 0 if self.are_missing() else min(ids, default=1 << 63)
            lacking = [
                removal
                for removal in every
                if removal.until_segment >= oldest and removal not in recorded
            ]
            if lacking:
                self._hand_over(drive, lacking)

    def record(self, drive: Drive, removals: Sequence[Removal]) -> bool:
        """Record removals on a drive. False: it could not; it owes them, or gets them from the
        others when it is mounted.
        """
        done = drive.notes.remove(removals)
        if done and drive in self.owed:
            self._settle_debt(drive, removals)
        elif not done and not drive.lost:
            with self._owed_lock:
                self.owed.setdefault(drive, {}).update(dict.fromkeys(removals))
        return done

    def _hand_over(self, drive: Drive, removals: Sequence[Removal]) -> None:
        """Record durably what other drives have recorded: from then on they may drop it, or go.
        A sync that fails is counted against the drive, and the next flush says so.
        """
        if self.record(drive, removals) and drive.settings.fsync != "never":
            drive.sync()

    def _settle_debt(self, drive: Drive, removals: Sequence[Removal] | None = None) -> None:
        """A drive does not owe these removals any more, or none at all."""
        with self._owed_lock:
            owed = self.owed.get(drive, {})
            for removal in list(owed) if removals is None else removals:
                owed.pop(removal, None)
            if not owed:
                self.owed.pop(drive, None)

    def look_after(self, drive: Drive) -> None:
        """Have a drive that is up record what it owes; give up drives that are away too long."""
        owed = list(self.owed.get(drive, ()))
        if owed and drive.breaker.closed and not drive.lost:
            self._hand_over(drive, owed)
        kept_bytes = _REMOVAL_BYTES * len(_recorded(drive))
        if kept_bytes > drive.slots_max * drive.settings.segment_bytes // _KEPT_SHARE:
            present = {_name(one) for one in self._present()}
            if not self._known.names <= present:
                _log.warning(
                    "%s: too many removals wait for drives that are away: if they come back, their "
                    "blocks do not count",
                    drive.medium.label,
                )
                self._change(drop=self._known.names - present)

    def _is_given_up(self, drive: Drive, told: MemberList) -> bool:
        """Whether the drive knew one of the others, and they do not know it any more."""
        others = self._known.names - {_name(drive)}
        return _name(drive) not in self._known.names and bool(told.names & others)

    def _change(self, add: Set[str] = frozenset(), drop: Set[str] = frozenset()) -> None:
        with self._lock:
            names = self._known.names - drop | add
            if names != self._known.names:
                self._known = MemberList(self._known.version + 1, names)
            if not self._writable or (len(names) < 2 and self._known.version < 2):
                return  # a drive alone needs no list
            text = self._known.pack()
            for drive in self._present():
                if drive.members != text:
                    drive.keep_members(text)

    def _present(self) -> list[Drive]:
        return [drive for drive in self._drives() if not (drive.lost or drive.retired)]


def _name(drive: Drive) -> str:
    return drive.store.hex()[:_NAME_CHARS]


def _recorded(drive: Drive) -> set[Removal]:
    return set(itertools.chain.from_iterable(list(drive.notes.removals.values())))
