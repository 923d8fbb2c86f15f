"""What every test gets: Hypothesis profiles, a folder, a printed seed, a look for leftover threads.

A `tmp_path` is in memory: on disk most tests would only wait for fsync. It is on disk for slow
tests, for tests that are about disks (ON_DISK, and what is marked so), and for all with --on-disk,
as in ./dev ci.
"""

import gc
import os
import re
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import pytest
from hypothesis import HealthCheck, settings

# Failed comparisons in these modules show both sides, and CI sees which of them compared blocks.
_SUPPORT = {f"tests.support.{path.stem}" for path in Path(__file__).parent.glob("support/*.py")}
pytest.register_assert_rewrite("kvdepot.testing", *(_SUPPORT - sys.modules.keys()))

from tests.support.daemon_store import DaemonStore, open_daemon
from tests.support.failures import HangError
from tests.support.forked_daemons import ForkServer
from tests.support.order_of_tests import longest_first
from tests.support.store_contract import OpenDepot

from kvdepot.depot import Depot
from kvdepot.testing.daemons import DaemonProcess, RunningCommand, run_command

THREAD_PREFIX = "kvdepot"
THREADS_END_WITHIN_S = 60.0
TESTS = Path(__file__).parent
ON_DISK = ("e2e", "native", "stress", "tiers")
MEMORY = Path("/dev/shm")
MEMORY_FREE_BYTES = 4 << 30
"""What must be free there."""
MEMORY_PREFIX = "kvdepot-tests-"

# Machines are shared and noisy: time limits per example would only report the neighbours.
settings.register_profile("dev", deadline=None, print_blob=True, max_examples=25)
settings.register_profile(
    "ci",
    deadline=None,
    print_blob=True,
    derandomize=False,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="replay randomized tests from a seed")
    parser.addoption("--on-disk", action="store_true", help="no test's folder is in memory")
    parser.addoption(
        "--whole-documents", action="store_true", help="what takes minutes in documents too"
    )


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """What was imported stays: it need not be looked through for garbage."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # of the tests that are left: others have been deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.geteuid() != 0:
        for item in items:
            if item.get_closest_marker("root"):
                item.add_marker(pytest.mark.skip(reason="needs root for mounts and loop devices"))
    processes = getattr(config, "workerinput", {}).get("workercount", 1)
    items[:] = longest_first(items, takes_long, processes)


def takes_long(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("slow")
    return mark is not None and bool(mark.kwargs.get("longest"))


@pytest.fixture(scope="session")
def memory_folder(request: pytest.FixtureRequest) -> Iterator[Path | None]:
    """None: not on this machine, or not wanted."""
    try:
        free_bytes = shutil.disk_usage(MEMORY).free
    except FileNotFoundError:
        free_bytes = 0
    if free_bytes < MEMORY_FREE_BYTES or request.config.getoption("--on-disk"):
        yield None
        return
    for left in MEMORY.glob(f"{MEMORY_PREFIX}*"):  # by a run that was killed
        if not Path("/proc", left.name.split("-")[2]).exists():
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{MEMORY_PREFIX}{os.getpid()}-", dir=MEMORY))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def tmp_path(
    tmp_path: Path, memory_folder: Path | None, request: pytest.FixtureRequest
) -> Iterator[Path]:
    node = request.node
    about_disks = node.path.relative_to(TESTS).parts[0] in ON_DISK
    marked = node.get_closest_marker("slow") or node.get_closest_marker("disk")
    if memory_folder is None or about_disks or marked:
        yield tmp_path
        return
    name = re.sub(r"\W", "_", node.name)[:30]
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=memory_folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def daemons_are_forked() -> Iterator[None]:
    """But for a user who is another one than the fork server's."""
    server, itself = ForkServer(), (os.geteuid(), os.getegid())

    def run(arguments: Sequence[str], log: TextIO) -> RunningCommand:
        is_itself = (os.geteuid(), os.getegid()) == itself
        return (server.start if is_itself else run_command)(arguments, log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DaemonProcess, "run", staticmethod(run))
        yield
    server.close()


@pytest.fixture
def open_through_daemon(tmp_path: Path) -> Iterator[OpenDepot]:
    """Opens stores of daemons; those that are still there at the end are killed."""
    stores: list[DaemonStore] = []

    def opens(**settings: Any) -> Depot:
        folder = tmp_path / f"daemon-{len(stores)}"
        folder.mkdir()
        stores.append(open_daemon(folder, settings))
        return stores[-1]

    yield opens
    for store in stores:
        with store.daemon:
            pass


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A fresh seed for this test, or the one given with --seed; shown when the test fails."""
    given: int | None = request.config.getoption("--seed")
    chosen = secrets.randbits(32) if given is None else given
    print(f"seed {chosen}; replay with: ./dev test {request.node.nodeid} --seed {chosen}")
    return chosen


@pytest.fixture(autouse=True)
def no_leftover_threads() -> Iterator[None]:
    """Fail a test that leaves one of our threads, or any non-daemon thread, behind it."""
    before = set(threading.enumerate())
    native_before = native_threads()
    yield
    deadline = time.monotonic() + THREADS_END_WITHIN_S
    for thread in leftover(before):
        thread.join(max(0.0, deadline - time.monotonic()))
    left = [thread.name for thread in leftover(before)]
    if left:
        raise HangError(f"threads still running after the test: {left}")
    while (native := native_threads() - native_before) and time.monotonic() < deadline:
        time.sleep(0.01)
    if native:
        raise HangError(f"native threads still running after the test: {sorted(native)}")


def leftover(before: set[threading.Thread]) -> list[threading.Thread]:
    return [
        thread
        for thread in threading.enumerate()
        if thread not in before
        and (not thread.daemon or thread.name.startswith(THREAD_PREFIX))
        and thread is not threading.current_thread()
    ]


def native_threads() -> set[str]:
    """Threads that the kernel knows by our prefix, whether Python or C started them."""
    found = set()
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as comm:
                name = comm.read().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        if name.startswith(THREAD_PREFIX) and task != str(os.getpid()):
            found.add(f"{name} ({task})")
    return found
