"""A small store on a disk that fails, and what it must still do."""

import shutil
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.failures import check_data
from tests.support.waiting import until

from kvdepot.core.block import BlockKey, PutResult
from kvdepot.core.depot import NamespaceHandle
from kvdepot.core.layout import KVLayout
from kvdepot.store.store import Store

BLOCK = 64 << 10
LAYOUT = KVLayout.opaque(BLOCK, 16, layers=4)


def payload(key: BlockKey) -> bytes:
    """What the block of a key must hold."""
    return np.random.default_rng(list(key)).bytes(BLOCK)


def settings(path: Path | list[Path], **ssd: object) -> dict[str, Any]:
    return {
        "dram": {"capacity": "2MiB", "prefault": False},
        "ssd": {
            "path": path,
            "capacity": "8MiB",
            "segment": "512KiB",
            "retry_initial": "1ms",
            "retry_max": "5ms",
            "read_timeout": "500ms",
            "write_timeout": "500ms",
            **ssd,
        },
        "writeback": {"staging": "1MiB", "put_timeout": "5s"},
    }


def space_of(store: Store) -> NamespaceHandle:
    return store.namespace(model="m", layout=LAYOUT)


def prompt(space: NamespaceHandle, user: int, blocks: int) -> list[BlockKey]:
    return space.keys(np.arange(16 * blocks) + 100_000 * user)


def put_all(store: Store, keys: list[BlockKey]) -> list[PutResult]:
    return [store.put_many([key], [payload(key)])[0] for key in keys]


def verified_hits(store: Store, keys: list[BlockKey]) -> int:
    """How many keys are served; every one served must be right."""
    target = bytearray(BLOCK)
    hits = 0
    for key in keys:
        if store.get_many([key], [target])[0]:
            check_data(target == payload(key), f"wrong bytes for {key.hex()}")
            hits += 1
    return hits


def unplug(path: Path) -> None:
    """Take a drive's folder away at once; what the store makes there meanwhile goes with it."""
    gone = path.with_name(f"{path.name}-gone")
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def healthy(store: Store) -> bool:
    return all(tier.get("healthy", True) for tier in store.stats()["tiers"].values())


def works_again(store: Store, space: NamespaceHandle, user: int) -> None:
    """New blocks reach the disk, and every drive is up, after as many attempts as pauses ask for.

    The blocks of one attempt may all go to another drive than the one that failed.
    """

    users = count(user)

    def stored() -> bool:
        put_all(store, prompt(space, next(users), 2))
        return bool(store.flush(5.0))

    until(lambda: stored() and healthy(store))


def assert_quiet(store: Store) -> None:
    """Nothing is left behind: no staging memory, no lease, no dirty block, clean books."""
    stats = store.stats()
    assert stats["staging_bytes"] == 0
    assert stats["leased"] == 0
    assert stats["dirty_bytes"] == 0
    report = store.admin.check()
    assert report.ok, report.findings
