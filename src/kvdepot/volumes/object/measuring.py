"""How fast a bucket is when nothing else is asked of it: measured with a probe object at opening.

A fetch-or-recompute decision starts from this, until loads say otherwise.
"""

from concurrent.futures import Executor
from statistics import median
from typing import Final

from kvdepot.core.clock import Clock
from kvdepot.io.speed import Profile
from kvdepot.volumes.object.bucket import Bucket, BucketError
from kvdepot.volumes.object.manifest import DATA, PROBE

_PROBE_BYTES: Final = 1 << 20
_SMALL_BYTES: Final = 4096
_SMALL_READS: Final = 3
_ROUNDS: Final = 2


def measure(
    bucket: Bucket, writer: str, pool: Executor, parallel: int, clocks: tuple[Clock, Clock]
) -> Profile | None:
    """Put a probe object, read it with `parallel` requests at once, and delete it.

    `clocks`: the steady one and the calendar. None: the bucket did not answer, or no time passed.
    Should this process die meanwhile, the probe is garbage of a dead writer, which others collect.
    """
    steady, wall = clocks
    path = f"{DATA}{writer}/{PROBE}"

    def seconds_of(size: int, requests: int) -> float:
        began_s = steady.now()
        bodies = list(pool.map(lambda _: bucket.get_range(path, 0, size), range(requests)))
        if any(len(body) != size for body in bodies):
            raise BucketError("the answer is too short")
        return steady.now() - began_s

    try:
        began_s = steady.now()
        bucket.create(path, bytes(_PROBE_BYTES))
        write_s = steady.now() - began_s
        latency_s = median([seconds_of(_SMALL_BYTES, 1) for _ in range(_SMALL_READS)])
        alone_s = seconds_of(_PROBE_BYTES, 1)
        together_s = min(seconds_of(_PROBE_BYTES, parallel) for _ in range(_ROUNDS))
        bucket.delete([path])
    except BucketError:
        return None
    if min(latency_s, alone_s, together_s) <= 0:
        return None
    # A load waits for its first byte once, whatever its size.
    moving_s = max(together_s - latency_s, together_s / 2)
    return Profile(
        read_bytes_per_s=int(parallel * _PROBE_BYTES / moving_s),
        write_bytes_per_s=int(_PROBE_BYTES / max(write_s, 1e-6)),
        random_read_bytes_per_s=int(_PROBE_BYTES / alone_s),
        random_write_bytes_per_s=int(_PROBE_BYTES / max(write_s, 1e-6)),
        random_bytes=_PROBE_BYTES,
        read_latency_us=int(latency_s * 1e6),
        write_latency_us=int(write_s * 1e6),
        direct_io=True,
        emulated=False,
        measured_at_s=int(wall.now()),
    )
