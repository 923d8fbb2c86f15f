"""A drive that is full to the brim goes on: what stands in the way is waited for, or carried."""

import threading
from pathlib import Path

import kvdepot
from kvdepot.core.depot import Lease, NamespaceHandle
from kvdepot.testing.images import payload_for

SIZE = 48 << 10
TOKENS = 16


def opened(folder: Path) -> tuple[kvdepot.Store, NamespaceHandle]:
    store = kvdepot.open(
        dram={"capacity": "8MiB", "prefault": False},
        ssd={"path": folder / "ssd", "capacity": "4MiB", "segment": "1MiB"},
        writeback={"staging": "2MiB", "put_timeout": "5s"},
    )
    return store, store.namespace(model="m", layout=kvdepot.KVLayout.opaque(SIZE, TOKENS))


def prompt(space: NamespaceHandle, number: int, blocks: int) -> list[kvdepot.BlockKey]:
    return space.keys([number, *range(1, TOKENS * blocks)])


def put(store: kvdepot.Store, keys: list[kvdepot.BlockKey]) -> None:
    assert all(store.put_many(keys, [payload_for(key, SIZE) for key in keys]))


def release(leases: list[Lease]) -> None:
    for lease in leases:
        lease.release()


def test_removals_are_recorded_while_leases_hold_all_segments(tmp_path: Path) -> None:
    store, space = opened(tmp_path)
    with store:
        for number in range(4):
            put(store, prompt(space, number, 10))
            assert store.flush()
        leases = [store.lease(prompt(space, number, 10)) for number in range(4)]
        for number in range(400):
            store.remove(prompt(space, 1000 + number, 1))
        store.remove(prompt(space, 3, 10))
        assert store.stats()["counters"]["removal_unrecorded"] == 0
        release(leases)
        for number in range(10, 16):
            put(store, prompt(space, number, 10))
            assert store.flush(), "the drive takes no blocks any more"
        assert store.stats()["counters"]["write_failed"] == 0
        assert store.admin.check()


def test_blocks_wait_for_room_that_a_lease_holds(tmp_path: Path) -> None:
    store, space = opened(tmp_path)
    with store:
        for number in range(6):
            put(store, prompt(space, number, 10))
            assert store.flush()
        leases = [store.lease(prompt(space, number, 10)) for number in range(6)]
        later = threading.Timer(0.5, release, [leases])
        later.start()
        put(store, prompt(space, 10, 40))
        assert store.flush()
        later.join()
        assert store.stats()["counters"]["write_failed"] == 0
        assert len(store.match(prompt(space, 10, 40))) == 40


def test_blocks_are_given_up_when_a_lease_does_not_end(tmp_path: Path) -> None:
    store, space = opened(tmp_path)
    with store:
        for number in range(6):
            put(store, prompt(space, number, 10))
            assert store.flush()
        leases = [store.lease(prompt(space, number, 10)) for number in range(6)]
        put(store, prompt(space, 10, 20))
        assert not store.flush()
        assert store.stats()["counters"]["write_failed"] > 0
        release(leases)
