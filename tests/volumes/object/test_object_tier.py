"""The object tier over obstore's stores in memory and in a folder: no server."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.object_nodes import memory_bucket
from tests.support.waiting import eventually

from kvdepot.config.settings import ObjectConfig
from kvdepot.core.metadata import MetaEntry, MetaKind
from kvdepot.core.tier import Tier
from kvdepot.testing.contract import Reopen, TierContract
from kvdepot.testing.images import STAMPS
from kvdepot.volumes.object.bucket import Bucket
from kvdepot.volumes.object.tier import ObjectTier

obstore = pytest.importorskip("obstore", reason="the extra s3 is not installed")

CAPACITY_BYTES = 4 << 20


def settings(**more: object) -> ObjectConfig:
    known: dict[str, object] = {"url": "s3://memory/p", "capacity": CAPACITY_BYTES}
    return ObjectConfig(**{**known, "measure": False, **more})  # type: ignore[arg-type]


class TestObjectTier(TierContract):
    @pytest.fixture
    def bucket(self) -> Bucket:
        return memory_bucket()

    @pytest.fixture
    def tier(self, bucket: Bucket) -> Iterator[Tier]:
        tier = ObjectTier(settings(), bucket=bucket)
        yield tier
        tier.close()

    @pytest.fixture
    def reopen(self, bucket: Bucket, tier: ObjectTier) -> Iterator[Reopen]:
        opened: list[ObjectTier] = []

        def again() -> Tier:
            tier.close()
            opened.append(ObjectTier(settings(), bucket=bucket))
            return opened[-1]

        yield again
        for one in opened:
            one.close()

    @pytest.mark.slow
    def test_agrees_with_a_dict(self, tier: Tier) -> None:
        super().test_agrees_with_a_dict(tier)


class TestSharedFolder(TestObjectTier):
    @pytest.fixture
    def bucket(self, tmp_path: Path) -> Bucket:
        from kvdepot.volumes.object.bucket import open_bucket

        return open_bucket(settings(url=f"file://{tmp_path}/shared"))


def described(tag: bytes) -> MetaEntry:
    return MetaEntry(MetaKind.NAMESPACE, tag, STAMPS.next(), b"text")


def test_a_namespace_does_not_wait_for_a_bucket_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = memory_bucket()
    tier = ObjectTier(settings(), bucket=bucket)
    create, begun, go_on = bucket.create, threading.Event(), threading.Event()

    def waits(path: str, data: bytes) -> object:
        begun.set()
        assert go_on.wait(60)
        return create(path, data)

    monkeypatch.setattr(bucket, "create", waits)
    tier.put_meta([described(b"first")])
    round_ = threading.Thread(target=tier.upkeep.step)
    asked = threading.Thread(target=tier.put_meta, args=([described(b"other")],))
    round_.start()
    assert begun.wait(60)
    asked.start()
    answered = eventually(lambda: not asked.is_alive(), 20.0)
    known = tier.descriptions()
    go_on.set()
    for thread in (round_, asked):
        thread.join()
    tier.close()
    assert answered
    assert known == {b"first": b"text", b"other": b"text"}
    again = ObjectTier(settings(), bucket=bucket)
    assert again.descriptions() == known
    again.close()
