"""What the tags of namespaces stand for, as the tiers have it written down.

A description is on a tier while there are blocks of its namespace, or a handle: a program that has
registered it. Without blocks it may make room for others; it is written again when blocks are.
All descriptions of a tier take a part of its room at most.
"""

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvdepot.codec.notes import parse_object
from kvdepot.codec.record import record_bytes
from kvdepot.core.block import TAG_BYTES
from kvdepot.core.tier import KeepsNotes
from kvdepot.errors import ConfigError
from kvdepot.store.state.lower_tier import LowerTier

if TYPE_CHECKING:
    from kvdepot.store.state.state import StoreState

DESCRIPTION_BYTES_MAX: Final = 16 << 10
_SHARE: Final = 8
"""All descriptions take one part in so many of a drive at most."""


class Descriptions:
    """Of one store. Its fields are guarded by the store's lock; tiers are written without it."""

    def __init__(self, state: "StoreState") -> None:
        self._state = state
        self._handles: dict[bytes, tuple[int, bytes]] = {}
        """Tag to how many have registered it, and its description."""
        self.missing: set[bytes] = set()
        """Tags with a handle whose description found no room, made some, or went with a removal."""

    def register(self, tag: bytes, description: bytes) -> None:
        """A program has a handle from now on, until `unregister`. ConfigError: there is no room."""
        if len(description) > DESCRIPTION_BYTES_MAX:
            raise ConfigError(
                "namespace",
                f"its description takes {len(description)} bytes, {DESCRIPTION_BYTES_MAX} at most",
                hint="give it shorter names",
            )
        for lower in self._writable():
            if not self._has_room(lower, tag, description):
                raise ConfigError(
                    "namespace",
                    f"{lower.name} has blocks of many namespaces, and no room to describe more",
                    hint=f"remove those that are not used, or raise {lower.name}.capacity",
                )
        with self._state.lock:
            count, _ = self._handles.get(tag, (0, b""))
            self._handles[tag] = (count + 1, description)
            self.missing.add(tag)
        if self._write(tag, description):
            with self._state.lock:
                self.missing.discard(tag)

    def unregister(self, tags: Iterable[bytes]) -> list[bytes]:
        """Handles are gone. Returns the tags that have none any more."""
        gone = []
        with self._state.lock:
            for tag in tags:
                count, description = self._handles.pop(tag)
                if count > 1:
                    self._handles[tag] = (count - 1, description)
                else:
                    self.missing.discard(tag)
                    gone.append(tag)
        return gone

    def of(self, tag: bytes) -> bytes:
        """What is known of a tag: from a program that has registered it, or from the tiers."""
        with self._state.lock:
            _, description = self._handles.get(tag, (0, b""))
        for lower in self._state.lower_tiers if not description else ():
            description = description or lower.tier.descriptions().get(tag, b"")
        return description

    def all(self) -> dict[bytes, bytes]:
        """By tag what programs have registered, and what the tiers have written down."""
        found: dict[bytes, bytes] = {}
        for lower in self._state.lower_tiers:
            found |= lower.tier.descriptions()
        with self._state.lock:
            return found | {tag: text for tag, (_, text) in self._handles.items()}

    def facts(self, tag: bytes) -> dict[str, Any]:
        """What a namespace's description says; empty where none is known."""
        _, text = self._handles.get(tag, (0, b""))
        if not text:
            known = (lower.tier.descriptions().get(tag) for lower in self._state.lower_tiers)
            text = next((found for found in known if found), b"")
        try:
            return parse_object(text)
        except ValueError:
            return {}

    def tenant(self, tag: bytes) -> str:
        """Whose blocks these are, as far as is known."""
        return str(self.facts(tag).get("tenant", ""))

    def removed(self, tag: bytes) -> None:
        """A namespace was removed: its description goes with the segments that hold it."""
        for lower in self._writable():
            self._forget(lower, [tag])

    def ensure(self, rows: Iterable[int]) -> None:
        """Blocks were written: write the descriptions that are missing."""
        with self._state.lock:
            tags = {self._state.catalog.table.key(row)[:TAG_BYTES] for row in rows}
            known = [(tag, self._handles[tag][1]) for tag in tags & self.missing]
            self.missing -= tags
        for tag, description in known:
            if not self._write(tag, description):
                with self._state.lock:
                    self.missing.update({tag} & self._handles.keys())

    def drop_unneeded(self, lower: LowerTier, drive: int, slot: int) -> None:
        """Forget what a segment that is reclaimed describes without need."""
        if not isinstance(lower.tier, KeepsNotes):
            return
        described = lower.tier.described_in(drive, slot)
        with self._state.lock:
            described = [tag for tag in described if tag not in self._handles]
        if described:
            in_use = self._with_blocks()
            self._forget(lower, [tag for tag in described if tag not in in_use])

    def _writable(self) -> list[LowerTier]:
        return [lower for lower in self._state.lower_tiers if lower.tier.writable]

    def _write(self, tag: bytes, description: bytes) -> bool:
        done = [
            self._has_room(lower, tag, description) and lower.tier.remember(tag, description)
            for lower in self._writable()
        ]
        return all(done)

    def _has_room(self, lower: LowerTier, tag: bytes, description: bytes) -> bool:
        """Whether there is room for a description; others, without blocks, make some."""
        tier = lower.tier
        if not isinstance(tier, KeepsNotes):
            return True
        known = {tag: record_bytes(len(text)) for tag, text in tier.descriptions().items()}
        if tag in known:
            return True
        facts = [tier.drive(drive) for drive in range(tier.drive_count())]
        sizes = [fact.segments_max * fact.segment_bytes for fact in facts if not fact.draining]
        sizes = [size for size in sizes if size]  # a drive that is absent has none
        left = min(sizes, default=1 << 62) // _SHARE - record_bytes(len(description))
        if sum(known.values()) <= left:
            return True
        in_use = self._with_blocks()
        self._forget(lower, [tag for tag in known if tag not in in_use])
        return sum(known[tag] for tag in known if tag in in_use) <= left

    def _forget(self, lower: LowerTier, tags: Collection[bytes]) -> None:
        if tags and isinstance(lower.tier, KeepsNotes):
            lower.tier.forget(tags)
            with self._state.lock:
                self.missing.update(tag for tag in tags if tag in self._handles)

    def _with_blocks(self) -> set[bytes]:
        """Tags of all namespaces that have blocks."""
        with self._state.lock:
            catalog = self._state.catalog
            words = catalog.table.tags()[catalog.live_rows()]
        return {word.tobytes() for word in np.unique(words)}
