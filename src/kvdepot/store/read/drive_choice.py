"""Which of its drives a block is read from, where a tier has it twice. The stock's lock is held."""

from collections.abc import Mapping
from typing import TypeAlias

from kvdepot.core.tier import drive_of
from kvdepot.index.table import NONE
from kvdepot.policy.placing.extra_copies import PlaceFacts, nearer
from kvdepot.store.read.request import Errand
from kvdepot.store.state.lower_tier import Level

Queued: TypeAlias = Mapping[tuple[Level, int], int]


def drive_for(errand: Errand, index: int, level: Level, queued_bytes: Queued, last: int) -> int:
    """The drive to read a want from.

    `queued_bytes`: what the errand reads from each drive already; `last`: the drive of the block
    before. Drives where it was not to be had are left out.
    """
    places = level.places(errand.wants[index].row)
    if len(places) == 1:
        return drive_of(places[0])
    tried = errand.tried.get(index, ())
    left = [place for place in places if place not in tried] or places
    if len(left) < len(places) or not all(map(level.works, places)):
        errand.rescued.add(index)
    nbytes = errand.wants[index].payload_bytes
    facts = [
        PlaceFacts(
            works=level.works(place),
            queued_bytes=nbytes + queued_bytes.get((level, drive), 0) + _others_bytes(level, drive),
            slowdown=level.tier.drives[drive].gauge.slowdown,
            running_on=drive == last,
        )
        for place, drive in zip(left, map(drive_of, left), strict=True)
    ]
    return drive_of(left[nearer(facts, level.run_bytes)])


def place_for(errand: Errand, index: int, level: Level, drive: int) -> tuple[int, bool]:
    """Where a want is read from a drive, or else; and whether another place is left for it."""
    places = level.places(errand.wants[index].row)
    tried = errand.tried.get(index, ())
    chosen = next((place for place in places if drive_of(place) == drive), [*places, NONE][0])
    return chosen, any(place != chosen and place not in tried for place in places)


def _others_bytes(level: Level, drive: int) -> int:
    """What other calls read from a drive now, about."""
    return level.tier.drives[drive].gauge.running * level.wave_bytes
