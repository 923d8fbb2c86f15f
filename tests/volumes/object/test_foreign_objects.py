"""A bucket or folder that other programs use: nothing of theirs is deleted or overwritten."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.object_nodes import (
    Node,
    keys_of,
    memory_bucket,
    object_config,
    paths_of,
    same_bucket,
)
from tests.support.store_contract import small

import kvdepot
from kvdepot.core.volume import Outcome
from kvdepot.errors import FormatError
from kvdepot.testing.fakes import CONTEXT
from kvdepot.volumes.object.bucket import Bucket, open_bucket
from kvdepot.volumes.object.manifest import (
    writer_of_data,
)
from kvdepot.volumes.object.volume import BucketVolume

pytest.importorskip("obstore", reason="the extra s3 is not installed")

GRACE_S = 60.0
OTHERS = [
    "data/customers/2026.parquet",
    "data/backups/db/monday.dump",
    "data/0123456789abcdef/000000000001",
    "data/000000000001",
    "meta/alive/customers",
    "meta/alive/others/new",
    "meta/writers/customers",
    "meta/index/customers/1",
    "notes.txt",
]
OpenNode = Callable[..., Node]


@pytest.fixture(params=["memory", "folder"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    if request.param == "memory":
        return memory_bucket()
    return open_bucket(object_config(url=f"file://{tmp_path}/shared"))


@pytest.fixture
def node() -> Iterator[OpenNode]:
    opened: list[Node] = []

    def open_node(bucket: Bucket, **more: Any) -> Node:
        opened.append(Node(bucket, grace=GRACE_S, **more))
        return opened[-1]

    yield open_node
    for one in opened:
        one.volume.close()


def pass_grace_periods(nodes: list[Node]) -> None:
    for _ in range(12):
        for one in nodes:
            one.clock.advance(GRACE_S / 3)
            one.wall.advance(GRACE_S / 3)
            one.step()


def put_others(bucket: Bucket) -> None:
    for path in OTHERS:
        bucket.overwrite(path, path.encode())


def assert_others_are_whole(bucket: Bucket) -> None:
    for path in OTHERS:
        assert bucket.get(path) == path.encode()


def test_objects_of_other_programs_that_come_later_stay(bucket: Bucket, node: OpenNode) -> None:
    node(bucket).put([1])
    put_others(bucket)
    dead = node(bucket)
    dead.put([2])
    dead.die()
    living = [node(bucket), node(bucket)]
    pass_grace_periods(living)
    assert_others_are_whole(bucket)
    for one in living:
        assert one.knows() == keys_of([1, 2])


@pytest.mark.parametrize("path", ["data/customers/2026.parquet", "a", "meta/other"])
@pytest.mark.parametrize("writable", [True, False])
def test_a_prefix_of_other_programs_is_refused(bucket: Bucket, path: str, writable: bool) -> None:
    bucket.create(path, b"theirs")
    with pytest.raises(FormatError, match="not a depot") as caught:
        BucketVolume(object_config(), replace(CONTEXT, writable=writable), same_bucket(bucket))
    assert caught.value.hint
    assert paths_of(bucket) == [path]
    assert bucket.get(path) == b"theirs"


@pytest.mark.parametrize(
    "told", ['{"version": 1}', '{"kvdepot": "other", "version": 1}', "[1]", ""]
)
def test_a_format_of_another_program_is_refused(bucket: Bucket, told: str) -> None:
    bucket.create("meta/format", told.encode())
    with pytest.raises(FormatError, match="not a depot"):
        BucketVolume(object_config(), CONTEXT, same_bucket(bucket))
    assert paths_of(bucket) == ["meta/format"]


@pytest.mark.parametrize(("path", "told"), [("data/a", b"theirs"), ("meta/format", b"[1]")])
def test_such_a_setting_is_an_error_beside_drives_too(
    tmp_path: Path, path: str, told: bytes
) -> None:
    """A store with a wrong prefix does not go on with its drives alone."""
    theirs = tmp_path / "shared" / path
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(told)
    shared = {"url": f"file://{tmp_path}/shared", "capacity": "64MiB"}
    with pytest.raises(FormatError, match="not a depot") as caught:
        kvdepot.open(None, **small(tmp_path / "kv"), object=shared)
    assert caught.value.hint
    assert [one for one in (tmp_path / "shared").rglob("*") if one.is_file()] == [theirs]
    assert theirs.read_bytes() == told
    with kvdepot.open(None, **small(tmp_path / "kv")):
        pass  # the drives are closed


def test_a_new_filesystem_is_empty(tmp_path: Path) -> None:
    folder = tmp_path / "mount"
    (folder / "lost+found").mkdir(parents=True)
    (folder / "lost+found" / "#12").write_bytes(b"an inode without a name")
    bucket = open_bucket(object_config(url=f"file://{folder}"))
    BucketVolume(object_config(), CONTEXT, bucket).close()
    assert json.loads((folder / "meta" / "format").read_bytes())["kvdepot"] == "object"


def test_a_crash_during_the_first_opening_leaves_an_empty_folder(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    (folder / "meta").mkdir(parents=True)
    (folder / "meta" / "format#1").write_bytes(b'{"kvd')
    bucket = open_bucket(object_config(url=f"file://{folder}"))
    BucketVolume(object_config(), CONTEXT, bucket).close()
    assert (folder / "meta" / "format").exists()


@pytest.mark.parametrize(
    "below", ["second", "data/second", "data", "meta/alive", "meta/index/second"]
)
def test_two_depots_one_below_the_other_lose_nothing(
    tmp_path: Path, node: OpenNode, below: str
) -> None:
    outer = open_bucket(object_config(url=f"file://{tmp_path}/depot"))
    node(outer).volume.close()
    inner = open_bucket(object_config(url=f"file://{tmp_path}/depot/{below}"))
    second, first = node(inner), node(outer)
    first.put([1, 2])
    second.put([3, 4])
    pass_grace_periods([first, second])
    first.die()
    second.die()
    heirs = [node(outer), node(inner)]
    pass_grace_periods(heirs)
    for heir, numbers in zip(heirs, ([1, 2], [3, 4]), strict=True):
        assert heir.knows() == keys_of(numbers)
        assert {heir.read(number) for number in numbers} == {Outcome.OK}
    assert {"meta/format"} <= set(paths_of(outer)) & set(paths_of(inner))


def test_a_depot_is_not_made_among_the_objects_of_another(tmp_path: Path, node: OpenNode) -> None:
    first = node(open_bucket(object_config(url=f"file://{tmp_path}/depot")))
    first.put([1])
    (writer,) = (tmp_path / "depot" / "data").iterdir()
    for place in (writer, tmp_path / "depot" / "meta"):
        before = sorted(place.rglob("*"))
        with pytest.raises(FormatError, match="not a depot"):
            node(open_bucket(object_config(url=f"file://{place}")))
        assert sorted(place.rglob("*")) == before


def test_garbage_of_a_writer_that_no_manifest_lists_any_more_is_collected(
    bucket: Bucket, node: OpenNode
) -> None:
    """Its last block was released, and it ended before the object could be deleted."""
    first = node(bucket)
    first.put([1])
    (segment,) = first.owned()
    assert first.volume.release(segment)
    first.step()
    first.volume.close()
    assert len(paths_of(bucket, "data/")) == 1
    heir = node(bucket)
    pass_grace_periods([heir])
    assert paths_of(bucket, "data/") == []
    heir.volume.close()
    last = node(bucket)
    pass_grace_periods([last])
    assert len(paths_of(bucket, "meta/writers/")) == 1, "of writers without data there are none"


@pytest.mark.parametrize(
    ("path", "writer"),
    [
        ("data/0123456789abcdef/00000000000f", "0123456789abcdef"),
        ("data/0123456789abcdef/probe", "0123456789abcdef"),
        ("data/0123456789abcdef/00000000000F", None),
        ("data/0123456789abcdef/00000000000f/x", None),
        ("data/0123456789abcdef/00000000000f\n", None),
        ("data/0123456789abcde/00000000000f", None),
        ("data/+123456789abcdef/00000000000f", None),
        ("data/0123456789abcdef/", None),
        ("data/0123456789abcdef", None),
        ("0123456789abcdef/00000000000f", None),
    ],
)
def test_which_paths_this_program_can_have_made(path: str, writer: str | None) -> None:
    assert writer_of_data(path) == writer
