"""Laws of docs/concurrency.md: no I/O under the store's lock, few threads, a safe close."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.store_contract import prompt, put, space_of, tiers

import kvdepot
from kvdepot.config.settings import load
from kvdepot.io.files import Files, Ops, Pending
from kvdepot.store.open import assemble
from kvdepot.store.store import Store

THREADS_MAX = 40


class UnlockedFiles(Files):
    """Notes every I/O that a thread does while it has the store's lock."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Callable[[], bool] = bool
        self.under_lock: list[str] = []
        self.calls = 0

    def _look(self, name: str) -> None:
        self.calls += 1
        if self.held():
            self.under_lock.append(name)

    def run(self, ops: Ops, timeout_s: float) -> Pending | None:
        self._look("run")
        return super().run(ops, timeout_s)

    def read(self, fd: int, offset: int, nbytes: int) -> memoryview:
        self._look("read")
        return super().read(fd, offset, nbytes)

    def write(self, fd: int, offset: int, data: bytes) -> None:
        self._look("write")
        super().write(fd, offset, data)

    def sync(self, fd: int) -> None:
        self._look("sync")
        super().sync(fd)

    def allocate(self, fd: int, nbytes: int) -> None:
        self._look("allocate")
        super().allocate(fd, nbytes)


def tree(path: Path, ssds: int, hdds: int, **dram: Any) -> dict[str, Any]:
    return {
        "dram": {"capacity": "4MiB", "prefault": False, "huge_pages": "never", **dram},
        "ssd": {
            "path": [str(path / f"ssd{number}") for number in range(ssds)],
            "capacity": f"{ssds}MiB",
            "segment": "128KiB",
        },
        "hdd": {
            "path": [str(path / f"hdd{number}") for number in range(hdds)],
            "capacity": f"{8 * hdds}MiB",
            "segment": "256KiB",
        },
        "writeback": {"staging": "4MiB"},
    }


def fill(store: Store, prompts: int) -> list[Any]:
    space = space_of(store)
    everything = [prompt(space, number, 8) for number in range(prompts)]
    for keys in everything:
        put(store, keys)
    return everything


def test_no_io_under_the_lock(tmp_path: Path) -> None:
    files = UnlockedFiles()
    with assemble(load(overrides=tree(tmp_path, 2, 2)), files=files) as store:
        files.held = store.inspect().state.lock.held
        everything = fill(store, 40)
        assert store.flush()
        for keys in everything[::3]:
            tiers(store, keys)
        store.remove(everything[0])
        store.remove(namespace=space_of(store, "another"))
        store.volumes.add("ssd", tmp_path / "ssd-new")
        store.volumes.drain("ssd", tmp_path / "ssd0")
        store.volumes.resize("hdd", "8MiB")
        assert store.admin.check().ok
        before = files.calls
        fill(store, 60)
        assert store.flush() and files.calls > before
        files.held = bool
    assert not files.under_lock


def test_lookups_go_on_while_a_drain_gives_its_segments_back(tmp_path: Path) -> None:
    """Every write of a drain waits until a lookup has been answered."""
    files = UnlockedFiles()
    with assemble(load(overrides=tree(tmp_path, 2, 1)), files=files) as store:
        keys = fill(store, 10)[-1]
        assert store.flush()
        answered: list[int] = []

        def look_up() -> bool:
            thread = threading.Thread(target=lambda: answered.append(len(store.match(keys))))
            thread.start()
            thread.join(60.0)
            assert not thread.is_alive(), "a lookup waits for I/O"
            return False

        files.held = look_up
        store.volumes.drain("ssd", tmp_path / "ssd0")
        files.held = bool
        assert answered and set(answered) == {len(keys)}


def test_many_drives_need_few_threads(tmp_path: Path) -> None:
    most = 0
    with kvdepot.open(**tree(tmp_path, 4, 12)) as store:
        assert isinstance(store, Store)
        stop = threading.Event()

        def count() -> None:
            nonlocal most
            while not stop.wait(0.002):
                names = [thread.name for thread in threading.enumerate()]
                most = max(most, sum(name.startswith("kvdepot") for name in names))

        counter = threading.Thread(target=count)
        counter.start()
        everything = fill(store, 60)
        assert store.flush()
        readers = [
            threading.Thread(target=lambda part=part: [tiers(store, keys) for keys in part])
            for part in (everything[0::4], everything[1::4], everything[2::4], everything[3::4])
        ]
        for reader in readers:
            reader.start()
        store.prefetch(everything[0], 10.0)
        for reader in readers:
            reader.join()
        stop.set()
        counter.join()
    assert 10 < most <= THREADS_MAX


def test_blocks_stay_when_a_store_closes_during_a_reclaim(tmp_path: Path) -> None:
    """What a reclaim could not demote because the store closes is not dropped."""
    settings = tree(tmp_path, 1, 1)
    store = kvdepot.open(**settings)
    assert isinstance(store, Store)
    everything = fill(store, 12)
    assert store.flush()
    inspector = store.inspect()
    with inspector.state.lock:
        inspector.state.closing.set()
    room = inspector.drives.rooms[inspector.lower()]
    while room.reclaimer.reclaim(0):
        pass
    inspector.state.closing.clear()
    present = [len(store.match(keys)) for keys in everything]
    assert present == [8] * 12
    store.close()
