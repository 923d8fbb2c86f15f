"""A small store to be damaged, and a reader of its files written from docs/formats.md."""

import shutil
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.failures import check_data

from kvdepot.core.block import BlockKey
from kvdepot.core.depot import NamespaceHandle
from kvdepot.core.layout import KVLayout
from kvdepot.store.open import open_store as opened
from kvdepot.store.store import Store
from kvdepot.testing.images import payload_for

PAGE = 4096
SEGMENT_BYTES = 64 << 10
BLOCK_BYTES = 6000
LAYOUT = KVLayout.opaque(BLOCK_BYTES, 16, 3)
BLOCKS = 22
REMOVED = (3, 11)


def open_store(path: Path, **settings: Any) -> Store:
    """Memory for few blocks only, so that most gets read the disk."""
    ssd = {"path": str(path), "capacity": "2MiB", "segment": SEGMENT_BYTES, "read_timeout": 10.0}
    small = {"dram": {"capacity": "256KiB", "huge_pages": "never", "prefault": False}}
    return opened(ssd=ssd, writeback={"staging": "1MiB"}, **{**small, **settings})


def space_of(store: Store) -> NamespaceHandle:
    return store.namespace(model="m", layout=LAYOUT, tenant="t", secret=b"never printed")


def keys_of(space: NamespaceHandle, chain: int, count: int = BLOCKS) -> list[BlockKey]:
    return space.keys([chain * 1000 + token for token in range(16 * count)])


@dataclass(frozen=True)
class Closed:
    """A store that was closed properly, to be copied and damaged."""

    path: Path
    keys: list[BlockKey]
    removed: list[BlockKey]

    def copy(self, to: Path) -> Path:
        return Path(shutil.copytree(self.path, to))


def build(path: Path, chain: int) -> Closed:
    with open_store(path) as store:
        keys = keys_of(space_of(store), chain)
        for key in keys:
            assert store.put_many([key], [payload_for(key, BLOCK_BYTES)], timeout_s=10.0)[0]
        assert store.flush()
        removed = [keys[index] for index in REMOVED]
        assert store.remove(removed) == len(removed)
    return Closed(path, [key for key in keys if key not in removed], removed)


@dataclass
class Used:
    """The bytes of one file that mean something, by what they mean."""

    spans: list[tuple[int, int, str, bytes]] = field(default_factory=list)

    def add(self, start: int, length: int, what: str, key: bytes = b"") -> None:
        self.spans.append((start, start + length, what, key))

    def at(self, offset: int) -> tuple[str, bytes]:
        for start, stop, what, key in self.spans:
            if start <= offset < stop:
                return what, key
        return "unused", b""


def map_file(file: Path, live: set[bytes]) -> Used:
    """Read a file as docs/formats.md tells."""
    used, data = Used(), file.read_bytes()
    if file.name == "superblock":
        used.add(0, 24 + struct.unpack_from("<I", data, 20)[0], "superblock")
    if not file.name.startswith("segment-") or not any(data[:PAGE]):
        return used
    used.add(0, 56, "header")
    used.add(len(data) - PAGE, 96, "trailer")
    trailer = struct.unpack_from("<QIIQQQQQQQQ16s", data, len(data) - PAGE)
    footer_offset, count = trailer[6], trailer[8]
    used.add(footer_offset, 64 * count, "footer")
    for index in range(count):
        key, page, kind, nbytes, _, _ = struct.unpack_from(
            "<32sIIQQQ", data, footer_offset + 64 * index
        )
        what = {1: "block", 2: "removal", 3: "space"}[kind]
        if what == "block" and key not in live:
            continue
        (head_bytes,) = struct.unpack_from("<I", data, page * PAGE + 64)
        used.add(page * PAGE, head_bytes, what, key)
        used.add(page * PAGE + PAGE, nbytes, what, key)
    return used


def read_all(path: Path, store: Closed, **settings: Any) -> set[BlockKey]:
    """The keys that can be read, each with exactly the right bytes."""
    with open_store(path, **settings) as opened:
        space_of(opened)
        return get_all(opened, [*store.keys, *store.removed])


def get_all(store: Store, keys: list[BlockKey]) -> set[BlockKey]:
    targets = [bytearray(BLOCK_BYTES) for _ in keys]
    found = set()
    for key, target, got in zip(keys, targets, store.get_many(keys, targets), strict=True):
        if got:
            check_data(target == payload_for(key, BLOCK_BYTES), f"wrong bytes for {key.hex()}")
            found.add(key)
    return found
