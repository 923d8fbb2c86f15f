"""The object tier over obstore's stores in memory and in a folder: no server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.object_nodes import memory_bucket

from kvdepot.core.config import ObjectConfig
from kvdepot.core.tier import Tier
from kvdepot.testing.contract import Reopen, TierContract
from kvdepot.tiers.object.bucket import Bucket
from kvdepot.tiers.object.tier import ObjectTier

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
        from kvdepot.tiers.object.bucket import open_bucket

        return open_bucket(settings(url=f"file://{tmp_path}/shared"))
