"""Removals in a second place: a small file beside the segments of a drive.

The log has a note of every removal too. With both, neither damage to one nor an older segment file
that is put back brings removed blocks back.

    | head: magic, store, floor | removal | removal | …        64 bytes each, with a checksum

Removals are added at the end. One is dropped only when the file is written anew with a higher
floor: segments below the floor have been given up, and do not count if they are there again.
"""

import os
import struct
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kvdepot.codec.notes import pack_removals, parse_removals
from kvdepot.codec.record import PAGE, round_up
from kvdepot.core.tier import Removal
from kvdepot.native import checksum
from kvdepot.tiers.device.files import Files

NAME: Final = "removals"
_MAGIC: Final = b"KVREMOV1"
_HEAD: Final = struct.Struct("<8s16sQ24x")
_ITEM_BYTES: Final = 64
_TRIM_FROM: Final = 4096
"""Removals from which on it is worth while to look for those that are not needed."""


class RemovalFile:
    """Of one drive; `path` None: its medium has no files. Thread-safe. Methods raise OSError."""

    def __init__(self, path: Path | None, files: Files, store: bytes, *, writable: bool) -> None:
        self.floor = 0
        self.known: dict[Removal, None] = {}
        """In the order in which they came."""
        self._path = path
        self._files = files
        self._store = store
        self._writable = writable
        self._lock = threading.Lock()
        self._fd = -1
        self._base = 0
        """Where the last page begins; `_tail` is what it holds."""
        self._tail = b""
        self._unsynced = False

    def load(self) -> None:
        """Take in what is there; what does not match its checksum is left out."""
        if self._path is None:
            return
        try:
            fd = self._files.open_file(self._path, os.O_RDWR if self._writable else os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            data = bytes(self._files.read(fd, 0, round_up(os.fstat(fd).st_size or 1)))
        finally:
            os.close(fd)
        for at in range(0, len(data) - _ITEM_BYTES + 1, _ITEM_BYTES):
            item, digest = data[at : at + 56], data[at + 56 : at + _ITEM_BYTES]
            if digest != self._digest(item):
                continue
            if at == 0 and item.startswith(_MAGIC):
                self.floor = _HEAD.unpack(item)[2]
            else:
                self.known.update(dict.fromkeys(parse_removals(item)))

    def add(self, removals: Iterable[Removal]) -> None:
        """Write removals down, but for those that are. Not durable before `sync`."""
        with self._lock:
            new = [removal for removal in removals if removal not in self.known]
            if self._path is None or not new:
                return
            self.known.update(dict.fromkeys(new))
            if self._fd < 0:
                self._write_anew()
                return
            self._tail += b"".join(map(self._packed, new))
            self._write_tail()

    def raise_floor(self, oldest: int, *, at_once: bool = False) -> None:
        """`oldest` is the lowest segment in use: forget removals that speak of lower ones only, if
        they are many, or at once.
        """
        with self._lock:
            if self._path is None or not (at_once or len(self.known) >= _TRIM_FROM):
                return
            floor = max(self.floor, oldest)
            needed = {one: None for one in self.known if one.until_segment >= floor}
            if len(needed) < len(self.known) and (at_once or 2 * len(needed) <= len(self.known)):
                self.known, self.floor = needed, floor
                self._write_anew()

    def sync(self) -> None:
        """What was added is durable."""
        with self._lock:
            if self._unsynced:
                self._files.sync(self._fd)
                self._unsynced = False

    def remove(self) -> None:
        """The drive holds nothing: forget everything."""
        self.close()
        with self._lock:
            self.known, self.floor = {}, 0
            if self._path is not None:
                self._files.unlink(self._path)
                self._sync_directory(self._path)

    def close(self) -> None:
        with self._lock:
            fd, self._fd, self._unsynced = self._fd, -1, False
            if fd >= 0:
                self._files.descriptors.give_up(fd)

    def _write_anew(self) -> None:
        """Replace the file by one with what is known now, durable at once."""
        assert self._path is not None
        partial = self._path.with_name(f"{NAME}.new")
        fd, before = self._files.open_file(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC), self._fd
        head = _HEAD.pack(_MAGIC, self._store, self.floor)
        self._fd, self._base, self._tail = fd, 0, head + self._digest(head)
        self._tail += b"".join(map(self._packed, self.known))
        if before >= 0:
            self._files.descriptors.give_up(before)
        try:
            self._write_tail()
            self._files.sync(fd)
            self._files.replace(partial, self._path)
            self._sync_directory(self._path)
        except OSError:
            self._fd = -1  # the next removal writes it anew
            self._files.descriptors.give_up(fd)
            raise
        finally:
            self._unsynced = False

    def _write_tail(self) -> None:
        self._unsynced = True
        self._files.write(self._fd, self._base, self._tail.ljust(round_up(len(self._tail)), b"\0"))
        whole = len(self._tail) // PAGE * PAGE
        self._base, self._tail = self._base + whole, self._tail[whole:]

    def _sync_directory(self, path: Path) -> None:
        fd = self._files.open_directory(path.parent)
        try:
            self._files.sync_directory(fd)
        finally:
            os.close(fd)

    def _packed(self, removal: Removal) -> bytes:
        item = pack_removals([removal])
        return item + self._digest(item)

    def _digest(self, item: bytes) -> bytes:
        return checksum(item + self._store).to_bytes(8, "little")


assert _HEAD.size + 8 == _ITEM_BYTES
