"""The descriptions of namespaces on the drives, by tag.

A description is stored while the namespace has blocks or a handle (a program has registered it).
Without blocks it may be deleted to make room for others; it is written again with new blocks.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvdepot.core.block import TAG_BYTES
from kvdepot.core.json_object import parse_object
from kvdepot.core.metadata import MetaEntry, MetaKind
from kvdepot.errors import ConfigError

if TYPE_CHECKING:
    from kvdepot.store.state.state import StoreState

DESCRIPTION_BYTES_MAX: Final = 16 << 10
_SHARE: Final = 128
"""Descriptions may take 1/128 of a drive, and at least `_BYTES_MIN`."""
_BYTES_MIN: Final = 16 << 10
_ENTRY_BYTES: Final = 64
"""Bytes of an entry without its text."""


class Descriptions:
    """The descriptions of one store. Its lock guards the fields, and is not held during I/O."""

    def __init__(self, state: "StoreState") -> None:
        self._state = state
        self._handles: dict[bytes, tuple[int, bytes]] = {}
        """Number of registrations and description, by tag."""
        self.missing: set[bytes] = set()
        """Tags with a handle whose description is not on all drives."""
        self._kept: dict[bytes, bytes] = {}
        """Descriptions on this node's volumes, by tag."""
        self._kept |= state.volumes.metadata.values(MetaKind.NAMESPACE)
        self._bytes = sum(map(_size, self._kept.values()))

    def register(self, tag: bytes, description: bytes) -> None:
        """Add a handle until `unregister`. ConfigError if there is no room for the description."""
        if len(description) > DESCRIPTION_BYTES_MAX:
            raise ConfigError(
                "namespace",
                f"its description has {len(description)} bytes, limit {DESCRIPTION_BYTES_MAX}",
                hint="use shorter names",
            )
        self._make_room(tag, description)
        with self._state.lock:
            count, _ = self._handles.get(tag, (0, b""))
            self._handles[tag] = (count + 1, description)
            if self._kept.get(tag) == description and not self._state.volumes.are_shared:
                return
            self.missing.add(tag)
        if self._write(tag, description):
            with self._state.lock:
                self.missing.discard(tag)

    def unregister(self, tags: Iterable[bytes]) -> list[bytes]:
        """Remove handles. Returns the tags that have no handle any more."""
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
        """The description of a tag, from a handle or the drives; empty if unknown."""
        with self._state.lock:
            _, description = self._handles.get(tag, (0, self._kept.get(tag, b"")))
        return description or self._remote().get(tag, b"")

    def all(self) -> dict[bytes, bytes]:
        """All descriptions of handles and drives by tag."""
        found = self._remote()
        with self._state.lock:
            return found | self._kept | {tag: text for tag, (_, text) in self._handles.items()}

    def facts(self, tag: bytes) -> dict[str, Any]:
        """The fields of a namespace's description; empty if it is unknown."""
        try:
            return parse_object(self.of(tag))
        except ValueError:
            return {}

    def tenant(self, tag: bytes) -> str:
        """The tenant of a namespace; empty if unknown."""
        return str(self.facts(tag).get("tenant", ""))

    def removed(self, tag: bytes) -> None:
        """Delete the description of a removed namespace; it is written again with new blocks."""
        self._forget([tag])

    def ensure(self, rows: Iterable[int]) -> None:
        """Write missing descriptions for the namespaces of blocks that were written."""
        with self._state.lock:
            tags = {self._state.catalog.table.key(row)[:TAG_BYTES] for row in rows}
            known = [(tag, self._handles[tag][1]) for tag in tags & self.missing]
            self.missing -= tags
        for tag, description in known:
            if not self._write(tag, description):
                with self._state.lock:
                    self.missing.update({tag} & self._handles.keys())

    def _remote(self) -> dict[bytes, bytes]:
        """Descriptions of other nodes on shared volumes, by tag."""
        return self._state.volumes.metadata.remote_values(MetaKind.NAMESPACE)

    def _write(self, tag: bytes, description: bytes) -> bool:
        """Write a description. False: not all volumes have it."""
        entry = MetaEntry(MetaKind.NAMESPACE, tag, self._state.stamps.next(), description)
        written = self._state.volumes.metadata.put([entry])
        with self._state.lock:
            self._bytes += _size(description) - _size(self._kept.get(tag))
            self._kept[tag] = description
        return written.have == written.should

    def _make_room(self, tag: bytes, description: bytes) -> None:
        """Delete descriptions without blocks if there is no room. ConfigError if that is not
        enough.
        """
        limit = self._bytes_max()
        if tag in self._kept or self._bytes + _size(description) <= limit:
            return
        in_use = self._with_blocks()
        with self._state.lock:
            unused = [one for one in self._kept if one not in in_use]
        self._forget(unused)
        if self._bytes + _size(description) > limit:
            raise ConfigError(
                "namespace",
                "the drives have no room for the description of another namespace",
                hint="remove unused namespaces, or raise the tier's capacity",
            )

    def _bytes_max(self) -> int:
        facts = [one for lower in self._state.lower_tiers for _, one in lower.volumes.all_facts()]
        sizes = [one.capacity_bytes for one in facts if one.may_write and one.capacity_bytes]
        smallest = min(sizes, default=1 << 62)
        return max(_BYTES_MIN, smallest // _SHARE)

    def _forget(self, tags: Iterable[bytes]) -> None:
        """Delete descriptions; those with a handle are written again with new blocks."""
        with self._state.lock:
            gone = [tag for tag in tags if tag in self._kept]
            for tag in gone:
                self._bytes -= _size(self._kept.pop(tag))
            self.missing.update(tag for tag in gone if tag in self._handles)
            stamp = self._state.stamps.next()
        if gone:
            self._state.volumes.metadata.put(
                [MetaEntry(MetaKind.NAMESPACE, tag, stamp, None) for tag in gone]
            )

    def _with_blocks(self) -> set[bytes]:
        """Tags of all namespaces that have blocks."""
        with self._state.lock:
            catalog = self._state.catalog
            words = catalog.table.tags()[catalog.live_rows()]
        return {word.tobytes() for word in np.unique(words)}


def _size(description: bytes | None) -> int:
    return 0 if description is None else _ENTRY_BYTES + len(description)
