"""A prompt that lies on the hard drive only, as of somebody who was away for a while."""

from pathlib import Path

from tests.support.stores import settings

import kvdepot
from kvdepot.core.block import BlockKey
from kvdepot.testing.store_contract import prompt, put, space_of

SLOW = {"read_bandwidth": "2MB", "write_bandwidth": "100MB", "seek": "5ms"}
"""A drive that takes long enough for something else to happen meanwhile."""


def left_on_the_hard_drive(folder: Path, blocks: int) -> list[BlockKey]:
    with kvdepot.open(**settings(folder, hdd={"write_mode": "pass-through"})) as store:
        found = prompt(space_of(store), 1, blocks)
        assert all(put(store, found))
    return found
