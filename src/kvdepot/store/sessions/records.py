"""Stores sessions and pins as metadata: one entry for each on every volume (core.metadata).

The entry of a session has some keys of its prompt; the index finds those between them. The entry of
a pin has all of its keys.
"""

import base64
import binascii
import json
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np

from kvdepot.core.block import KEY_BYTES, TAG_BYTES, BlockKey
from kvdepot.core.json_object import parse_object
from kvdepot.core.metadata import Metadata, MetaEntry, MetaKind
from kvdepot.core.sessions import SessionState, checked_name
from kvdepot.errors import ConfigError
from kvdepot.index.catalog import Catalog
from kvdepot.index.table import NONE
from kvdepot.store.sessions.session_table import PACKED_BYTES, Pin, Prompt, SessionId, Sessions
from kvdepot.store.state.state import StoreState

_ANCHORS: Final = 4
_SHARE: Final = 128
"""Sessions may take 1/128 of the smallest drive, and at least `_BYTES_MIN`."""
_BYTES_MIN: Final = 256 << 10
_BYTES_MAX: Final = 64 << 20
_PIN_SHARE: Final = 2
"""One pin may take half of that."""


class SessionRecords:
    """The sessions of one store on its drives. Thread-safe; drives are written without the store's
    lock.
    """

    def __init__(self, state: StoreState, sessions: Sessions) -> None:
        self._state = state
        self._sessions = sessions
        self._written: dict[tuple[MetaKind, bytes], MetaEntry] = {}
        """The entries on the drives, as last written or read."""
        self._bytes = 0
        """Bytes of the sessions' entries on a drive."""
        self.dirty: set[SessionId] = set()
        """Sessions to be written. The store's lock guards this and the fields above."""
        self._writing = threading.Lock()

    @property
    def exist(self) -> bool:
        """True if there is a drive to which sessions can be written."""
        tiers = self._state.lower_tiers
        return any(lower.writable and not lower.volumes.is_remote for lower in tiers)

    @property
    def pin_bytes_max(self) -> int:
        """The most bytes that one pin may take."""
        return self._bytes_max() // _PIN_SHARE

    def changed(self, session: SessionId) -> None:
        """Mark a session that was changed or dropped, to be written. With the store's lock."""
        self.dirty.add(session)

    def load(self) -> None:
        """Load the entries of the drives: at the start, and when a drive was reopened. With the
        store's lock.
        """
        known = self._state.volumes.metadata.known()
        pins = known.values(MetaKind.PIN)
        for (kind, name), entry in known.entries.items():
            before = self._written.get((kind, name))
            if kind not in (MetaKind.SESSION, MetaKind.PIN):
                continue
            if before is not None and before.stamp >= entry.stamp:
                continue
            self._remember(entry)
            if kind is MetaKind.PIN and (MetaKind.SESSION, name) in known.entries:
                continue  # with its session
            self._restore(name, known, pins)

    def write(self, sync_s: float | None = None) -> bool:
        """Write changes; with `sync_s` make them durable within that time. False: no drive has
        them. Entries that a drive lacks are written again later.
        """
        with self._writing:
            with self._state.lock:
                sessions, self.dirty = self.dirty, set()
                entries = [entry for one in sorted(sessions) for entry in self._entries(one)]
            if not entries:
                return True
            written = self._state.volumes.metadata.put(entries, sync_s)
            with self._state.lock:
                for entry in entries:
                    self._remember(entry)
                if not written.have:
                    self.dirty |= sessions
                    for entry in entries:
                        self._written.pop((entry.kind, entry.name), None)
                    return False
        return True

    def _remember(self, entry: MetaEntry) -> None:
        before = self._written.get((entry.kind, entry.name))
        self._bytes += len(entry.value or b"") - len((before and before.value) or b"")
        self._written[entry.kind, entry.name] = entry

    def _entries(self, session: SessionId) -> Iterator[MetaEntry]:
        """The entries to write for a session. One without a pin is left out if there is no room."""
        tag, name = session
        label = tag + name.encode()
        prompt = self._sessions.find(tag, name)
        pin = prompt.pin if prompt is not None else None
        texts = {
            MetaKind.SESSION: _session_text(prompt) if prompt is not None else None,
            MetaKind.PIN: _pin_text(pin) if pin is not None else None,
        }
        if pin is None and self._bytes > self._bytes_max():
            texts[MetaKind.SESSION] = None
        for kind, text in texts.items():
            before = self._written.get((kind, label))
            if (before.value if before is not None else None) != text:
                yield MetaEntry(kind, label, self._state.stamps.next(), text)

    def _bytes_max(self) -> int:
        tiers = [lower for lower in self._state.lower_tiers if not lower.volumes.is_remote]
        facts = [one for lower in tiers for _, one in lower.volumes.all_facts()]
        rooms = [one.capacity_bytes for one in facts if one.capacity_bytes]
        return max(_BYTES_MIN, min(_BYTES_MAX, min(rooms, default=0) // _SHARE))

    def _restore(self, label: bytes, known: Metadata, pins: dict[bytes, bytes]) -> None:
        """Add a session from its entry. Ignores an invalid entry."""
        entry = known.entries.get((MetaKind.SESSION, label))
        tag = label[:TAG_BYTES]
        try:
            name = checked_name(label[TAG_BYTES:].decode())
            pin = _parse_pin(pins[label]) if label in pins else None
            found = _parse_session(self._state.catalog, tag, entry, pin)
        except (KeyError, TypeError, ValueError, OverflowError, ConfigError):
            return
        self._sessions.clear_pin(tag, name)
        if found is None:
            self._sessions.forget(tag, name)
            return
        self._sessions.enter(tag, name, replace(found, pin=pin))
        if pin is not None:
            self._sessions.bind(tag, pin)


def _session_text(prompt: Prompt) -> bytes:
    fields = {
        "state": int(prompt.state),
        "turns": prompt.turns,
        "named_s": round(prompt.named_s, 3),
        "keys": list(_anchors(prompt.packed)),
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def _parse_session(
    catalog: Catalog, tag: bytes, entry: MetaEntry | None, pin: Pin | None
) -> Prompt | None:
    """Parse a session; None if it was dropped, or the index has none of its blocks."""
    if entry is None or entry.value is None:
        return None
    fields = parse_object(entry.value)
    state, turns, named_s = SessionState(fields["state"]), int(fields["turns"]), fields["named_s"]
    packed = _chain(catalog, tag, fields["keys"]) or (pin.packed if pin is not None else b"")
    return Prompt(packed, state, turns, float(named_s)) if packed else None


def _pin_text(pin: Pin) -> bytes:
    fields = {
        "number": pin.number,
        "granted": pin.granted_s,
        "until": pin.until_s,
        "owner": pin.owner,
        "keys": base64.b64encode(pin.packed).decode(),
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def _parse_pin(text: bytes) -> Pin:
    fields = parse_object(text)
    try:
        packed = base64.b64decode(fields["keys"], validate=True)
    except binascii.Error as error:
        raise ValueError("keys of a pin") from error
    if not packed or len(packed) % PACKED_BYTES:
        raise ValueError("keys of a pin")
    return Pin(
        int(fields["number"]),
        packed,
        float(fields["granted"]),
        float(fields["until"]),
        np.zeros(len(packed) // PACKED_BYTES, dtype=bool),
        str(fields.get("owner", "")),
    )


def _anchors(packed: bytes) -> Iterator[tuple[int, str]]:
    """Some keys of a prompt with their indices, the last first."""
    count = len(packed) // PACKED_BYTES
    places = {count * part // _ANCHORS - 1 for part in range(1, _ANCHORS + 1)} - {-1}
    for place in sorted(places, reverse=True):
        yield place, packed[place * PACKED_BYTES : (place + 1) * PACKED_BYTES].hex()


def _chain(catalog: Catalog, tag: bytes, anchors: Iterable[Any]) -> bytes:
    """The keys of a prompt up to the last anchor for which the index has all; empty if none."""
    for place, text in anchors:
        key = tag + bytes.fromhex(text)
        if len(key) != KEY_BYTES:
            raise ValueError("a key of another length")
        row, rows = catalog.table.find(BlockKey(key)), list[int]()
        while row != NONE and len(rows) <= int(place):
            rows.append(row)
            row = catalog.tree.parent[row]
        if rows and len(rows) == int(place) + 1:
            words = catalog.table.words(np.array(rows[::-1], np.int64))
            return np.ascontiguousarray(words[:, 1:]).tobytes()
    return b""
