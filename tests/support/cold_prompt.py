"""A prompt that lies on the hard drive only, as of somebody who was away for a while."""

from pathlib import Path

from tests.support.store_contract import prompt, put, space_of
from tests.support.stores import settings

import kvdepot
from kvdepot.core.block import BlockKey
from kvdepot.testing.emulation import DriveModel

SLOW = DriveModel(read_bandwidth=2 * 10**6, write_bandwidth=10**8, seek=0.005)
"""A drive that takes long enough for something else to happen meanwhile."""


def left_on_the_hard_drive(folder: Path, blocks: int) -> list[BlockKey]:
    with kvdepot.open(**settings(folder, hdd={"write_mode": "pass-through"})) as store:
        found = prompt(space_of(store), 1, blocks)
        assert all(put(store, found))
    return found
