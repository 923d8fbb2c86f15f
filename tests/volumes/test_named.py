"""Volumes on named values: damage is noticed, and the metadata has two copies."""

import pytest

from kvdepot.core.volume import Outcome
from kvdepot.errors import FormatError
from kvdepot.format.record import HEAD_BYTES
from kvdepot.testing.contract import contents_of, read, store
from kvdepot.testing.fakes import MemoryVolume
from kvdepot.testing.images import Reads, make_key, removal_of

NBYTES = 10_000
CAPACITY_BYTES = 1 << 20
KEY = make_key(1)


def test_a_memory_volume_notices_damage() -> None:
    volume = MemoryVolume(CAPACITY_BYTES)
    (place,) = store(volume, [KEY], NBYTES)
    (name,) = [name for name in volume.medium if name.startswith("record-")]
    record = bytearray(volume.medium[name])
    record[HEAD_BYTES + 5000] ^= 1
    volume.medium[name] = bytes(record)
    reads = Reads().add(KEY, place, NBYTES).add(KEY, place, NBYTES, span=(0, 4096))
    assert read(volume, reads) == [Outcome.CORRUPT, Outcome.OK]


@pytest.mark.parametrize("lost", ["metadata-a", "metadata-b"])
def test_one_copy_of_the_metadata_of_named_values_is_enough(lost: str) -> None:
    volume = MemoryVolume(CAPACITY_BYTES)
    store(volume, [KEY], NBYTES)
    assert volume.put_meta(removal_of(KEY))
    for damaged in (b"", volume.medium[lost][:-9], None):
        if damaged is None:
            del volume.medium[lost]
        else:
            volume.medium[lost] = damaged
        again = MemoryVolume(CAPACITY_BYTES, volume.medium)
        assert not contents_of(again)
        assert again.put_meta(removal_of(KEY))
        volume = again
    for name in [name for name in volume.medium if name.startswith("metadata-")]:
        del volume.medium[name]
    with pytest.raises(FormatError, match="both copies"):
        MemoryVolume(CAPACITY_BYTES, volume.medium)
