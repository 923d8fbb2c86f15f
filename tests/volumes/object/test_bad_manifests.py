"""Manifests with an intact checksum that make no sense: they are refused, and the rest goes on."""

import json
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.object_nodes import (
    CAPACITY_BYTES,
    PAYLOAD,
    Node,
    keys_of,
    memory_bucket,
    object_config,
    paths_of,
)
from tests.support.small_store import prompt, put, space_of
from tests.support.waiting import until

from kvdepot.core.clock import STAMP_MAX
from kvdepot.core.metadata import MetaKind
from kvdepot.core.volume import Outcome
from kvdepot.native import checksum
from kvdepot.store.metrics import values
from kvdepot.store.open import open_store
from kvdepot.testing.images import STAMPS
from kvdepot.volumes.object.bucket import open_bucket
from kvdepot.volumes.object.manifest import (
    MANIFEST_BYTES_MAX,
    ROW,
    VERSION,
    DamagedManifestError,
    Listing,
    Manifest,
    ManifestName,
)
from kvdepot.volumes.object.upkeep import OtherManifests

pytest.importorskip("obstore", reason="the extra s3 is not installed")

WRITER = "00000000000000bb"
PATH = f"data/{WRITER}/000000000001"
TOMBSTONE = int(MetaKind.TOMBSTONE)
MAX = 2**64 - 1
TAG = "11" * 8


def packed(text: bytes, rows: bytes = b"", count: int | None = None) -> bytes:
    """A manifest with this JSON and a checksum that fits."""
    count = len(rows) // ROW.itemsize if count is None else count
    digest = checksum(text + rows)
    return struct.pack("<4sHHQII", b"KVDM", VERSION, 0, digest, len(text), count) + text + rows


def row(**fields: int) -> bytes:

    one = np.zeros(1, ROW)
    one["payload"], one["stamp"] = PAYLOAD, STAMPS.next()
    for name, value in fields.items():
        one[name] = value
    return one.tobytes()


def fields(**more: Any) -> bytes:
    known = {"objects": [[PATH, 1 << 20, 1, 1]], "metadata": [], "tokens": {}}
    return json.dumps({**known, **more}).encode()


def tombstone(stamp: object, below: int = 1) -> list[object]:
    return [TOMBSTONE, TAG, stamp, struct.pack("<Q", below).hex()]


DEEP = b'{"objects":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BAD = {
    "deep": packed(DEEP),
    "deep map": packed(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "a list": packed(b"[]"),
    "a number": packed(b"1"),
    "no JSON": packed(b"\xff\xfe"),
    "nothing": packed(b""),
    "no objects": packed(b"{}"),
    "objects are a map": packed(fields(objects={"a": 1}), row()),
    "objects are text": packed(fields(objects="abcd"), row()),
    "metadata is a map": packed(fields(metadata={"abcd": 1}), row()),
    "tokens are a list": packed(fields(tokens=[]), row()),
    "tokens of a list": packed(fields(tokens={PATH: [1]}), row()),
    "tokens of no record": packed(fields(tokens={PATH: {"7": "AAAA"}}), row()),
    "tokens of a huge page": packed(fields(tokens={PATH: {"9" * 4000: "AAAA"}}), row()),
    "tokens are a number": packed(fields(tokens={PATH: {"0": 7}}), row()),
    "a path of others": packed(fields(objects=[["data/customers/1", 1 << 20, 1, 1]]), row()),
    "a path is a number": packed(fields(objects=[[7, 1 << 20, 1, 1]]), row()),
    "an object twice": packed(fields(objects=[[PATH, 1 << 20, 1, 0]] * 2)),
    "bytes 2^64-1": packed(fields(objects=[[PATH, MAX, 1, 1]]), row()),
    "bytes 2^63": packed(fields(objects=[[PATH, 2**63, 1, 1]]), row()),
    "bytes negative": packed(fields(objects=[[PATH, -1, 1, 0]])),
    "bytes 1e400": packed(fields().replace(b"1048576", b"1e400"), row()),
    "bytes NaN": packed(fields().replace(b"1048576", b"NaN"), row()),
    "bytes are text": packed(fields(objects=[[PATH, "1048576", 1, 1]]), row()),
    "time 2^64-1": packed(fields(objects=[[PATH, 1 << 20, MAX, 1]]), row()),
    "count negative": packed(fields(objects=[[PATH, 1 << 20, 1, -1]]), row()),
    "count too high": packed(fields(objects=[[PATH, 1 << 20, 1, MAX]]), row()),
    "count true": packed(fields(objects=[[PATH, 1 << 20, 1, True]]), row()),
    "rows of no object": packed(fields(objects=[]), row()),
    "page out of range": packed(fields(objects=[[PATH, MAX, 1, 1]]), row(page=2**32 - 1)),
    "payload out of range": packed(fields(), row(payload=MAX)),
    "stamp 2^64-1": packed(fields(), row(stamp=MAX)),
    "the last stamp": packed(fields(), row(stamp=STAMP_MAX)),
    "a stamp of the year 9000": packed(fields(), row(stamp=220_000_000_000_000_000)),
    "tombstone 2^64-1": packed(fields(metadata=[tombstone(MAX)]), row()),
    "tombstone of the last stamp": packed(fields(metadata=[tombstone(STAMP_MAX)]), row()),
    "tombstone below the last": packed(fields(metadata=[tombstone(1, STAMP_MAX)]), row()),
    "tombstone of text": packed(fields(metadata=[tombstone("1")]), row()),
    "kind unknown": packed(fields(metadata=[[200, TAG, 1, None]]), row()),
    "kind a list": packed(fields(metadata=[[[1], TAG, 1, None]]), row()),
    "a name of 4 KiB": packed(fields(metadata=[[1, "00" * 4096, 1, ""]]), row()),
    "count without rows": packed(fields(), b"", count=2**32 - 1),
    "another version": struct.pack("<4sHHQII", b"KVDM", VERSION + 1, 0, 0, 0, 0),
    "half a header": b"KVDM",
    "empty": b"",
}


@pytest.fixture
def bucket() -> Any:
    return memory_bucket()


@pytest.fixture
def node(bucket: Any) -> Iterator[Callable[..., Node]]:
    opened: list[Node] = []

    def open_node() -> Node:
        opened.append(Node(bucket))
        return opened[-1]

    yield open_node
    for one in opened:
        one.volume.close()


def refused(node: Node) -> int:
    return int(node.volume.facts(details=True).details["refused_manifests"])


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
def test_it_is_refused_and_the_rest_goes_on(
    bucket: Any, node: Callable[..., Node], body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    first = node()
    first.put([1])
    bucket.create(ManifestName(WRITER, 1, 1, 1).path, body)
    for _ in range(2):
        first.step()
    assert refused(first) == 1, "counted once"
    late = node()
    assert refused(late) == 1 and late.knows() == keys_of([1])
    for number, one in ((2, first), (3, late)):
        one.put([number])
    for one in (first, late, node()):
        one.step()
        assert one.knows() == keys_of([1, 2, 3])
        assert {one.read(number) for number in (1, 2, 3)} == {Outcome.OK}
        assert one.volume.facts().room_bytes <= CAPACITY_BYTES


def test_it_replaces_no_other_manifest(bucket: Any, node: Callable[..., Node]) -> None:
    first, reader = node(), node()
    first.put([1])
    writer = first.volume._contents.writer
    name = ManifestName(writer, 0, 2**48 - 1, 2**48 - 1)
    bucket.create(name.path, BAD["deep"])
    for one in (reader, node()):
        one.step()
        assert one.knows() == keys_of([1])
    first.put([2])
    for _ in range(3):
        first.clock.advance(100.0)
        first.step()
    assert name.path not in paths_of(bucket), "its writer deletes it"
    reader.step()
    assert reader.knows() == keys_of([1, 2])


def test_a_valid_manifest_that_its_writer_did_not_write_goes(
    bucket: Any, node: Callable[..., Node]
) -> None:
    first, reader = node(), node()
    first.put([1])
    name = ManifestName(first.volume._contents.writer, 0, 2**48 - 1, 2**48 - 1)
    bucket.create(name.path, Manifest().pack())
    for _ in range(3):
        first.clock.advance(100.0)
        first.step()
    reader.step()
    assert reader.knows() == keys_of([1])


def test_a_huge_one_is_not_fetched(
    bucket: Any, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = node()
    listed = first.bucket.list_all

    def larger(prefix: str) -> list[Any]:
        from dataclasses import replace

        return [
            replace(one, nbytes=MANIFEST_BYTES_MAX + 1) if WRITER in one.path else one
            for one in listed(prefix)
        ]

    bucket.create(ManifestName(WRITER, 1, 1, 1).path, Manifest().pack())
    monkeypatch.setattr(first.bucket, "list_all", larger)
    gets = first.bucket.requests.gets
    first.step()
    assert refused(first) == 1 and first.bucket.requests.gets == gets


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 2**31, 2**32, 2**48, 2**63, MAX, 2**70, 1e300, PATH, TAG, "0"])
    | st.floats()
    | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=12,
)
LISTED = st.lists(st.tuples(st.just(PATH) | JSON, JSON, JSON, JSON), max_size=3)
ENTRIES = st.lists(st.tuples(st.sampled_from([1, 2]) | JSON, JSON, JSON, JSON), max_size=3)


@given(
    fields=st.fixed_dictionaries(
        {}, optional={"objects": LISTED | JSON, "metadata": ENTRIES | JSON, "tokens": JSON}
    )
    | JSON,
    rows=st.lists(st.binary(min_size=ROW.itemsize, max_size=ROW.itemsize), max_size=3),
    twice=st.booleans(),
)
def test_every_form_is_a_manifest_or_refused(fields: Any, rows: list[bytes], twice: bool) -> None:
    text = json.dumps(fields).encode()
    if twice and text.startswith(b"{") and len(text) > 2:
        text = text[:-1] + b"," + text[1:]  # each key twice
    try:
        manifest = Manifest.parse(packed(text, b"".join(rows)))
    except DamagedManifestError:
        return
    assert manifest.last_stamp <= STAMP_MAX
    assert all(0 <= one.nbytes < 2**37 and one.created_s >= 0 for one in manifest.objects)
    again = Manifest.parse(manifest.pack())
    assert again.paths == manifest.paths and again.metadata == manifest.metadata


@given(image=st.binary(max_size=200))
def test_any_bytes_are_a_manifest_or_refused(image: bytes) -> None:
    with pytest.raises(DamagedManifestError):
        Manifest.parse(image)


def folder_store(path: Path, **more: Any) -> Any:
    return open_store(
        dram={"capacity": "2MiB", "prefault": False, "huge_pages": "never"},
        writeback={"staging": "2MiB"},
        object={
            "url": f"file://{path}", "capacity": "32MiB", "refresh": "20ms",
            "retry_initial": "20ms", "retry_max": "100ms", **more,
        },
    )  # fmt: skip


def test_a_store_counts_it_in_a_metric(tmp_path: Path) -> None:
    config = object_config(url=f"file://{tmp_path}/shared")
    with folder_store(tmp_path / "shared") as store:
        open_bucket(config).create(ManifestName(WRITER, 1, 1, 1).path, BAD["deep"])
        name = f'kvdepot_refused_manifests_total{{tier="object",drive="{config.url}"}}'
        until(lambda: values(store.stats()).get(name) == 1.0)
        put(store, prompt(space_of(store), 1, 4))
        assert store.flush()


def test_upkeep_that_ends_on_an_error_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda failed: ended.append(failed.exc_value))
    with folder_store(tmp_path / "shared") as store:
        keys = prompt(space_of(store), 1, 4)
        put(store, keys)
        assert store.flush()
        read = OtherManifests.read

        def fails_once(self: Any, names: Any, living: Any) -> None:
            monkeypatch.setattr(OtherManifests, "read", read)
            raise ZeroDivisionError("unexpected")

        monkeypatch.setattr(OtherManifests, "read", fails_once)
        until(lambda: bool(ended))
        assert "upkeep has ended" in caplog.text
        until(lambda: bool(store.stats()["tiers"]["object"]["healthy"]))
        more = prompt(space_of(store), 2, 4)
        put(store, more)
        until(lambda: bool(store.flush()))
        with folder_store(tmp_path / "shared") as other:
            space_of(other)
            until(lambda: len(other.match(keys)) == len(other.match(more)) == 4)


def test_a_format_that_is_damaged_while_it_runs_does_not_end_the_upkeep(tmp_path: Path) -> None:
    bucket = open_bucket(object_config(url=f"file://{tmp_path}/shared"))
    with folder_store(tmp_path / "shared") as store:
        bucket.delete(["meta/format"])
        until(lambda: "meta/format" in paths_of(bucket))
        put(store, prompt(space_of(store), 1, 4))
        until(lambda: bool(store.flush()))


def test_an_object_that_is_adopted_again_is_listed_once() -> None:
    """Else the manifest would be refused by all other nodes, for good."""
    path = f"data/{'0' * 16}/{1:012d}"
    rows = np.zeros(2, ROW)
    rows["page"] = 0, 4
    first = Listing(path, 1 << 20, 1, rows)
    whole = Manifest.joined([Manifest([first]), Manifest([replace(first, records=rows[:1])])])
    assert [len(one.records) for one in Manifest.parse(whole.pack()).objects] == [1]
