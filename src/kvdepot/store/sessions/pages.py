"""What is known of sessions, written down: pages of JSON beside the blocks, on every drive.

A page has some sessions and a generation: of several versions the highest counts, so that a drive
that was away does not bring back what has changed since. A store that is opened while a drive is
away leaves pages that this drive may have in a later version as they are, and begins a book of its
own: when the drives meet, each session is as it was told of last, with the last contract that was
granted and not ended. A page whose sessions are gone is written empty.

Of a session without a contract a few keys of its prompt are kept, from which the index knows the
others; a contract has all of its own.
"""

import base64
import binascii
import json
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np

from kvdepot.codec.notes import parse_object
from kvdepot.core.block import KEY_BYTES, TAG_BYTES, BlockKey
from kvdepot.core.order import SessionState
from kvdepot.core.tier import KeepsPages
from kvdepot.errors import ConfigError
from kvdepot.index.catalog import Catalog
from kvdepot.index.table import NONE
from kvdepot.store.sessions.known import (
    PACKED_BYTES,
    Contract,
    Prompt,
    SessionId,
    Sessions,
    checked_name,
)
from kvdepot.store.state.ledger import Account
from kvdepot.store.state.state import StoreState

VERSION: Final = 1
LEDGER_PAGE: Final = 0
"""It has the tenants' accounts too."""
_ANCHORS: Final = 4
_PAGE_BYTES: Final = 32 << 10
_PAGE_BYTES_MIN: Final = 4 << 10
_SHARE: Final = 16
"""A page takes one part in so many of a segment, unless one session alone takes more."""
_ENTRY_SHARE: Final = 8
_TOTAL_SHARE: Final = 32
"""All pages take one part in so many of the smallest drive."""
_BOOKS: Final = 1 << 12
_BOOK_BITS: Final = 12
"""The number of a page is that of its book, above these bits, and its place in it."""
_TOTAL_BYTES_MAX: Final = 64 << 20
Entry = dict[str, Any]


class SessionPages:
    """The pages of one store. Thread-safe; tiers are written without the store's lock."""

    def __init__(self, state: StoreState, sessions: Sessions) -> None:
        self._state = state
        self._sessions = sessions
        self._tiers = [
            (lower, lower.tier) for lower in state.lower_tiers if isinstance(lower.tier, KeepsPages)
        ]
        self._page_of: dict[SessionId, int] = {}
        self._members: defaultdict[int, set[SessionId]] = defaultdict(set)
        self._sizes: dict[int, int] = {}
        """Bytes of each page, as last written."""
        self._book = self._open = 0
        """The page that new sessions join, and its book."""
        self._apart = False
        """A drive is away: pages of other books are not written."""
        self.dirty: set[int] = set()
        """Pages to be written. Guarded by the store's lock, as all above."""
        self._generation = 0
        self._writing = threading.Lock()

    @property
    def exist(self) -> bool:
        """Whether anything can be written down."""
        return any(lower.tier.writable for lower, _ in self._tiers)

    @property
    def entry_bytes_max(self) -> int:
        """What one session may take."""
        return max(_PAGE_BYTES_MIN, self._segment_bytes() // _ENTRY_SHARE)

    def changed(self, session: SessionId) -> None:
        """A session is to be written down as it is, or as forgotten. With the store's lock."""
        page = self._page_of.get(session)
        known = self._sessions.find(*session) is not None
        if page is not None and not self._may_write(page):
            self._leave_page(session)
            page = None
        if page is None and not known:
            return
        if page is None:
            page = self._page_of[session] = self._page_with_room()
            self._members[page].add(session)
        elif not known:
            self._leave_page(session)
        self.dirty.add(page)

    def _leave_page(self, session: SessionId) -> None:
        self._members[self._page_of.pop(session)].discard(session)

    def _may_write(self, page: int) -> bool:
        return not self._apart or page >> _BOOK_BITS == self._book

    def tenants_changed(self) -> None:
        """The tenants' accounts are to be written down."""
        with self._state.lock:
            self.dirty.add(LEDGER_PAGE)

    def all_changed(self) -> None:
        """All that is known is to be written: a drive has none or goes, or accounts are old."""
        with self._state.lock:
            for page, sessions in list(self._members.items()):
                if self._may_write(page):
                    self.dirty.add(page)
                else:
                    for session in list(sessions):
                        self.changed(session)

    def load(self) -> None:
        """Know what the drives have: once before anything else, and when a drive is back. With the
        store's lock.
        """
        drives = [tier.drive(at) for _, tier in self._tiers for at in range(tier.drive_count())]
        used = [fact for fact in drives if not fact.draining]
        apart = any(fact.lost or not fact.up for fact in used)
        newest: dict[int, dict[str, Any]] = {}
        on_drives: Counter[int] = Counter()
        for _, tier in self._tiers:
            for text in tier.pages():
                page = _parsed(text)
                if page is None:
                    continue
                number, before = page["page"], newest.get(page["page"])
                if before is None or before["generation"] < page["generation"]:
                    newest[number], on_drives[number] = page, 0
                on_drives[number] += newest[number]["generation"] == page["generation"]
        if apart and not self._apart:
            others = {number >> _BOOK_BITS for number in newest}
            free = [book for book in range(1, _BOOKS - 1) if book not in others]
            self._book = random.choice(free or range(1, _BOOKS - 1))
            self._open = self._book << _BOOK_BITS
        elif not self._members and newest:
            self._open = max(newest)
        self._apart = apart
        for number, page in sorted(newest.items()):
            self._generation = max(self._generation, page["generation"])
            self._members[number] |= set()
            found = [self._restore(number, entry) for entry in page["sessions"]]
            if not apart and (not all(found) or on_drives[number] < len(used)):
                self.dirty.add(number)
            if number == LEDGER_PAGE:
                self._state.ledger.restore(page.get("tenants"))

    def write(self, sync_s: float | None = None) -> bool:
        """Write the pages that have changed; with `sync_s`, make them durable. False: a page is on
        no drive. What is not on all of them is written again another time.
        """
        with self._writing:
            with self._state.lock:
                pages = {page for page in self.dirty if self._may_write(page)}
                self.dirty -= pages
                texts = {number: self._text(number) for number in pages}
            again, done = set(), True
            for number, text in texts.items():
                have, should = self._write_page(number, text, sync_s)
                done = done and have > 0
                if have < should:
                    again.add(number)
            with self._state.lock:
                self.dirty |= again
        return done

    def _write_page(self, number: int, text: bytes, sync_s: float | None) -> tuple[int, int]:
        have = should = 0
        for lower, tier in self._tiers:
            if lower.tier.writable:
                here, wanted = tier.keep_page(number, text, sync_s)
                have, should = have + here, should + wanted
        return have, should

    def _text(self, number: int) -> bytes:
        """A page as it is now. Sessions that find no room in it are left out, those under contract
        never.
        """
        self._generation += 1
        entries, size = [], 0
        room = max(_PAGE_BYTES_MIN, self._total_bytes() - sum(self._sizes.values()))
        for session in sorted(self._members[number]):
            prompt = self._sessions.find(*session)
            if prompt is None:
                continue
            entry = _entry(*session, prompt)
            size += len(json.dumps(entry, ensure_ascii=False).encode())
            if prompt.contract is not None or size <= room:
                entries.append(entry)
        page = {"v": VERSION, "page": number, "generation": self._generation, "sessions": entries}
        if number == LEDGER_PAGE:
            page["tenants"] = self._state.ledger.packed()
        text = json.dumps(page, ensure_ascii=False, separators=(",", ":")).encode()
        self._sizes[number] = len(text)
        return text

    def _page_with_room(self) -> int:
        limit = max(_PAGE_BYTES_MIN, min(_PAGE_BYTES, self._segment_bytes() // _SHARE))
        per_entry = 512
        if len(self._members[self._open]) * per_entry >= limit:
            mine = [page for page in self._members if self._may_write(page)]
            empty = (page for page in mine if not self._members[page])
            self._open = next(empty, max(mine) + 1)
        return self._open

    def _segment_bytes(self) -> int:
        facts = [tier.drive(at) for _, tier in self._tiers for at in range(tier.drive_count())]
        return min((fact.segment_bytes for fact in facts if fact.segment_bytes), default=1 << 20)

    def _total_bytes(self) -> int:
        facts = [tier.drive(at) for _, tier in self._tiers for at in range(tier.drive_count())]
        rooms = [fact.segment_bytes * fact.segments_max for fact in facts if fact.segments_max]
        return min(_TOTAL_BYTES_MAX, min(rooms, default=0) // _TOTAL_SHARE)

    def _restore(self, number: int, entry: Entry) -> bool:
        """Know a session that was written down. False: it makes no sense, or is better known."""
        catalog = self._state.catalog
        try:
            tag, name = bytes.fromhex(entry["t"]), checked_name(entry["n"])
            told_s, turns = float(entry["w"]), int(entry["u"])
            state, ended_s = SessionState(entry["s"]), float(entry.get("x", 0.0))
            contract = _contract(entry["c"]) if entry.get("c") else None
            packed = _chain(catalog, tag, entry["k"]) or (contract.packed if contract else b"")
        except (KeyError, TypeError, ValueError, OverflowError, ConfigError):
            return False
        if len(tag) != TAG_BYTES or not packed:
            return False
        account = Account.unpacked(entry.get("l"))
        found = Prompt(packed, state, turns, told_s, account=account)
        known = self._sessions.find(tag, name)
        is_later = known is None or known.told_s < told_s
        contracts = [contract, known.contract if known is not None else None]
        ended_s = max(ended_s, known.ended_s if known is not None else 0.0)
        valid = [one for one in contracts if one is not None and one.granted_s > ended_s]
        agreed = max(valid, key=lambda one: one.granted_s, default=None)
        prompt = found if known is None or is_later else known
        self._sessions.withdraw(tag, name)
        self._sessions.enter(tag, name, replace(prompt, contract=agreed, ended_s=ended_s))
        self._sessions.own_blocks(tag, name)
        if agreed is not None:
            agreed.held[:] = False
            self._sessions.bind(tag, agreed)
        return self._settle((tag, name), number, is_later=is_later)

    def _settle(self, session: SessionId, number: int, *, is_later: bool) -> bool:
        """A session was found in a page: one of those that it was found in is its own, and is
        written as the others say too. False: it is another.
        """
        here = self._page_of.get(session)
        if here is not None and here != number:
            self.dirty.add(here)
            if not is_later or not self._may_write(number):
                return False
            self._leave_page(session)
            self.dirty.add(number)
        self._page_of[session] = number
        self._members[number].add(session)
        return True


def _parsed(text: bytes) -> dict[str, Any] | None:
    """A page that was written down; None where it makes no sense, or is of a later version."""
    try:
        page = parse_object(text)
    except ValueError:
        return None
    if page.get("v") != VERSION or not isinstance(page.get("sessions"), list):
        return None
    numbers = (page.get("page"), page.get("generation"))
    if not all(isinstance(number, int) and 0 <= number < 1 << 62 for number in numbers):
        return None
    page["sessions"] = [entry for entry in page["sessions"] if isinstance(entry, dict)]
    return page


def _entry(tag: bytes, name: str, prompt: Prompt) -> Entry:
    contract = prompt.contract
    entry: Entry = {
        "t": tag.hex(),
        "n": name,
        "s": int(prompt.state),
        "u": prompt.turns,
        "w": round(prompt.told_s, 3),
        "k": list(_anchors(prompt.packed)),
        "l": prompt.account.packed(),
    }
    if prompt.ended_s:
        entry["x"] = prompt.ended_s
    if contract is not None:
        entry["c"] = {
            "number": contract.number,
            "granted": contract.granted_s,
            "until": contract.until_s,
            "turn": contract.through_turn,
            "keys": base64.b64encode(contract.packed).decode(),
        }
    return entry


def _anchors(packed: bytes) -> Iterator[tuple[int, str]]:
    """Some keys of a prompt, the last first, with their places."""
    count = len(packed) // PACKED_BYTES
    places = {count * part // _ANCHORS - 1 for part in range(1, _ANCHORS + 1)} - {-1}
    for place in sorted(places, reverse=True):
        yield place, packed[place * PACKED_BYTES : (place + 1) * PACKED_BYTES].hex()


def _chain(catalog: Catalog, tag: bytes, anchors: Iterable[Any]) -> bytes:
    """The keys of a prompt up to the last anchor that the index knows all of; none: empty."""
    for place, text in anchors:
        key = tag + bytes.fromhex(text)
        if len(key) != KEY_BYTES:
            raise ValueError("a key of another length")
        row, rows = catalog.row(BlockKey(key)), list[int]()
        while row != NONE and len(rows) <= int(place):
            rows.append(row)
            row = catalog.tree.parent[row]
        if rows and len(rows) == int(place) + 1:
            words = catalog.table.words(np.array(rows[::-1], np.int64))
            return np.ascontiguousarray(words[:, 1:]).tobytes()
    return b""


def _contract(said: dict[str, Any]) -> Contract:
    try:
        packed = base64.b64decode(said["keys"], validate=True)
    except binascii.Error as error:
        raise ValueError("keys of a contract") from error
    if not packed or len(packed) % PACKED_BYTES:
        raise ValueError("keys of a contract")
    held = np.zeros(len(packed) // PACKED_BYTES, dtype=bool)
    times = float(said["granted"]), float(said["until"])
    return Contract(int(said["number"]), packed, *times, bool(said["turn"]), held)
