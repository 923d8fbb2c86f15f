"""The probe at opening: what it finds, costs and leaves behind."""

from dataclasses import replace
from typing import Any

import pytest
from tests.support.object_nodes import MemoryBucket, memory_bucket, object_config, paths_of

from kvdepot.testing.clocks import ManualClock
from kvdepot.testing.fakes import CONTEXT
from kvdepot.volumes.object.bucket import BucketError
from kvdepot.volumes.object.volume import BucketVolume

pytest.importorskip("obstore", reason="the extra s3 is not installed")
MIB = 1 << 20
LATENCY_S = 0.02


class TimedBucket(MemoryBucket):
    """A read takes a latency, and then the time of its bytes."""

    clock: ManualClock
    bytes_per_s = 40 * MIB
    fails = False

    def get_range(self, path: str, start: int, stop: int) -> memoryview:
        if self.fails:
            raise BucketError("the server answers 503")
        self.clock.advance(LATENCY_S + (stop - start) / self.bytes_per_s)
        return super().get_range(path, start, stop)


def opened(**more: Any) -> tuple[TimedBucket, BucketVolume]:
    plain = memory_bucket()
    bucket = TimedBucket(plain._reader, plain._writer, plain.label)
    bucket.clock = ManualClock(5.0)
    bucket.fails = more.pop("fails", False)
    config = object_config(refresh=1e6, parallel=1, **{"measure": True, **more})
    return bucket, BucketVolume(config, replace(CONTEXT, clock=bucket.clock), bucket)


def profile_of(volume: BucketVolume) -> Any:
    return volume.facts(details=True).details["profile"]


def test_it_tells_latency_from_bandwidth_and_leaves_nothing() -> None:
    bucket, volume = opened()
    found = profile_of(volume)
    volume.close()
    assert found["read_latency_us"] == pytest.approx(LATENCY_S * 1e6, rel=0.01)
    assert found["read_bytes_per_s"] == pytest.approx(bucket.bytes_per_s, rel=0.05)
    assert not [path for path in paths_of(bucket) if path.endswith("probe")]
    assert bucket.requests.received_bytes <= 4 * MIB


@pytest.mark.parametrize("more", [{"measure": False}, {"fails": True}])
def test_nothing_is_assumed_where_it_cannot_be_measured(more: dict[str, Any]) -> None:
    _, volume = opened(**more)
    assert profile_of(volume) is None
    volume.close()
