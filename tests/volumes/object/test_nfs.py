"""Stores on several clients of a real NFS server, which is killed and comes back."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.nfs import NfsServer, missing_tool, nfs_server
from tests.support.object_nodes import object_config
from tests.support.small_store import prompt, put, space_of, tiers
from tests.support.waiting import until

from kvdepot.core.volume import Volume
from kvdepot.store.open import open_store
from kvdepot.store.store import Store
from kvdepot.testing.contract import Reopen, VolumeContract
from kvdepot.testing.fakes import CONTEXT
from kvdepot.volumes.object.volume import BucketVolume

pytest.importorskip("obstore", reason="the extra s3 is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.skipif(missing_tool() is not None, reason=f"no NFS here: {missing_tool()}"),
]
OpenStore = Callable[..., Store]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NfsServer]:
    with nfs_server(tmp_path_factory.mktemp("nfs")) as one:
        for name in ("a", "b", "c"):
            one.mount(name)
        yield one


@pytest.fixture
def stores(server: NfsServer, request: pytest.FixtureRequest) -> Iterator[OpenStore]:
    """Stores on machines `a`, `b` and `c`: each has a mount of its own."""
    opened: list[Store] = []

    def open_one(machine: str, **more: Any) -> Store:
        url = f"file://{server.folder / machine}/{request.node.name}"
        opened.append(
            open_store(
                dram={"capacity": "2MiB", "prefault": False, "huge_pages": "never"},
                writeback={"staging": "2MiB"},
                object={"url": url, "capacity": "32MiB", "retry_max": "500ms", **more},
            )
        )
        space_of(opened[-1])
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def wait_for(store: Store, keys: list[Any]) -> None:
    until(lambda: len(store.match(keys)) == len(keys))


def test_a_removal_goes_to_all_machines(stores: OpenStore) -> None:
    first, second = stores("a"), stores("b")
    keys = prompt(space_of(first), 2, 4)
    assert all(put(first, keys))
    assert first.flush()
    wait_for(second, keys)
    first.remove(keys)
    until(lambda: not len(second.match(keys)))


@pytest.mark.slow(longest=True)
def test_the_server_is_killed_and_comes_back(server: NfsServer, stores: OpenStore) -> None:
    first, second = stores("a"), stores("b")
    keys = prompt(space_of(first), 3, 8)
    assert all(put(first, keys))
    assert first.flush()
    wait_for(second, keys)
    server.kill()
    try:
        buffers = [bytearray(space_of(second).block_bytes) for _ in keys]
        answers = second.get_many(keys, buffers, timeout_s=0.5)
        assert not any(answers), "they wait for their deadline, not for the server"
        more = prompt(space_of(first), 4, 4)
        assert all(put(first, more)), "a put waits for nothing"
    finally:
        server.start()
    until(lambda: first.flush().complete)
    until(lambda: tiers(second, keys) in (["object"] * 8, ["dram"] * 8))
    wait_for(second, more)
    assert tiers(second, more) == ["object"] * 4


class TestNfsFolder(VolumeContract):
    @pytest.fixture
    def config(self, server: NfsServer, tmp_path: Path) -> Any:
        return object_config(url=f"file://{server.folder}/a/contract-{tmp_path.name}")

    @pytest.fixture
    def volume(self, config: Any) -> Iterator[Volume]:
        volume = BucketVolume(config, CONTEXT)
        yield volume
        volume.close()

    @pytest.fixture
    def reopen(self, config: Any, volume: Volume) -> Iterator[Reopen]:
        opened: list[Volume] = []

        def again() -> Volume:
            volume.close()
            opened.append(BucketVolume(config, CONTEXT))
            return opened[-1]

        yield again
        for one in opened:
            one.close()
