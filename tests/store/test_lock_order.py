"""Locks are taken in the order of docs/concurrency.md."""

import linecache
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.small_store import prompt, put, space_of, tiers

import kvdepot
from kvdepot.store.state import state as state_module
from kvdepot.store.state.state import StoreLock

PACKAGE = str(Path(kvdepot.__file__).parent)
ATTRIBUTE = re.compile(r"self\.(\w+)")
DOCUMENT = Path(__file__).parents[2] / "docs" / "concurrency.md"
ROW = re.compile(r"^\| (\d+) \| `([\w/]+\.py: \w+\.\w+)`", re.MULTILINE)
LOCK = re.compile(r"`([\w/]+\.py: \w+\.\w+)`")
STORE = "store/state/state.py: StoreLock._lock"
NAMED = re.compile(r"`([\w/]+\.py): (?:\w+\.)?(\w+)`")
MADE = re.compile(
    r"^ *(?:self\.)?(\w+)(?:: [^=\n]+)? = .*threading\.(?:R?Lock|Condition)\b(?!\(self\.lock)",
    re.MULTILINE,
)
NOT_SERVING = ("bench", "cli", "testing")
"""Folders whose locks no store, daemon or engine takes."""


def ranks() -> dict[str, int]:
    """The order in the document: each lock, as the document names it, and its number."""
    return {name: int(number) for number, name in ROW.findall(DOCUMENT.read_text())}


def test_each_lock_has_one_row() -> None:
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")]
    names = Counter(name for row in rows for name in LOCK.findall(row))
    assert len(names) > 20
    assert [name for name, rows in names.items() if rows > 1] == []


def test_the_document_names_every_lock() -> None:
    source = Path(PACKAGE)
    made = {
        (str(path.relative_to(source)), name)
        for path in source.rglob("*.py")
        if path.relative_to(source).parts[0] not in NOT_SERVING
        for name in MADE.findall(path.read_text())
    }
    assert len(made) > 20
    assert made - set(NAMED.findall(DOCUMENT.read_text())) == set()


class Watched:
    """A lock that notes which others its thread has when it is taken."""

    def __init__(self, inner: Any, name: str, seen: "LockOrder") -> None:
        self._inner = inner
        self.name = name
        self._seen = seen

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        mine: bool = self._inner.acquire(blocking, timeout)
        if mine:
            self._seen.taken(self)
        return mine

    def release(self) -> None:
        self._seen.held().remove(self)
        self._inner.release()

    def locked(self) -> bool:
        return bool(self._inner.locked())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class WatchedR(Watched):
    """One that its thread may take twice; conditions wait on it."""

    def _is_owned(self) -> bool:
        return bool(self._inner._is_owned())

    def _release_save(self) -> Any:
        held = self._seen.held()
        count = held.count(self)
        for _ in range(count):
            held.remove(self)
        return count, self._inner._release_save()

    def _acquire_restore(self, saved: Any) -> None:
        count, inner = saved
        self._inner._acquire_restore(inner)
        self._seen.held().extend([self] * count)


class LockOrder:
    """All locks that the package makes, and in which order threads take them."""

    def __init__(self) -> None:
        self.pairs: set[tuple[str, str]] = set()
        self._local = threading.local()

    def held(self) -> list[Watched]:
        if not hasattr(self._local, "held"):
            self._local.held = []
        held: list[Watched] = self._local.held
        return held

    def taken(self, lock: Watched) -> None:
        held = self.held()
        if lock not in held:
            self.pairs |= {(other.name, lock.name) for other in held}
        held.append(lock)

    def factory(self, make: Callable[[], Any], kind: type[Watched]) -> Callable[[], Any]:
        def watched() -> Any:
            frame = sys._getframe(1)
            file = frame.f_code.co_filename
            found = ATTRIBUTE.search(linecache.getline(file, frame.f_lineno))
            if not file.startswith(PACKAGE) or found is None:
                return make()
            owner = frame.f_code.co_qualname.partition(".")[0]
            place = Path(file).relative_to(PACKAGE).as_posix()
            return kind(make(), f"{place}: {owner}.{found[1]}", self)

        return watched


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Iterator[LockOrder]:
    seen = LockOrder()
    monkeypatch.setattr(threading, "Lock", seen.factory(threading.Lock, Watched))
    monkeypatch.setattr(threading, "RLock", seen.factory(threading.RLock, WatchedR))

    class WatchedStoreLock(StoreLock):  # type: ignore[misc]
        """The store's lock, which is a lock itself."""

        def __init__(self) -> None:
            self.noted = WatchedR(super(), STORE, seen)
            super().__init__()

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            return self.noted.acquire(blocking, timeout)

        def release(self) -> None:
            self.noted.release()

        def __enter__(self) -> bool:  # type: ignore[override]
            return self.noted.acquire()

        def __exit__(self, *_: object) -> None:
            self.noted.release()

        def _release_save(self) -> Any:
            return self.noted._release_save()

        def _acquire_restore(self, saved: Any) -> None:
            self.noted._acquire_restore(saved)

    monkeypatch.setattr(state_module, "StoreLock", WatchedStoreLock)
    yield seen


def test_locks_are_taken_in_order(order: LockOrder, tmp_path: Path) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    settings: dict[str, Any] = {
        "dram": {"capacity": "2MiB", "prefault": False, "huge_pages": "never"},
        "ssd": {"path": drives, "capacity": "4MiB", "segment": "256KiB"},
        "hdd": {"path": tmp_path / "hdd", "capacity": "32MiB", "segment": "1MiB"},
        "writeback": {"staging": "2MiB"},
    }
    store = kvdepot.open(**settings)
    space = space_of(store)
    for number in range(40):
        put(store, prompt(space, number, 10))
    assert store.flush(60.0)
    for number in range(0, 40, 4):
        tiers(store, prompt(space, number, 10))
    with store.lease(prompt(space, 38, 10)):
        store.remove(prompt(space, 38, 10))
        store.volumes.drain("ssd", drives[0])
    store.prefetch(prompt(space, 1, 10), 5.0).wait(5.0)
    store.volumes.resize("ssd", "2MiB")
    assert store.admin.check().ok
    store.close()
    known = ranks()
    assert STORE in known
    unknown = {name for pair in order.pairs for name in pair} - known.keys()
    assert not unknown, f"locks that docs/concurrency.md does not name: {unknown}"
    wrong = {
        (first, then)
        for first, then in order.pairs
        if known[first] > known[then] or (known[first] == known[then] and first != then)
    }
    assert not wrong, f"taken against the order: {wrong}"
    seen = {
        (STORE, "volumes/log/segments.py: SegmentSet.state_lock"),
        ("store/move/reclaim.py: VolumeRoom._locks", STORE),
        ("store/drives/maintenance.py: VolumeMaintenance._change", STORE),
    }
    assert seen <= order.pairs, "drives were not written to, reclaimed and drained"
