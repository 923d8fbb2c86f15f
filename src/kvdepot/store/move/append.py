"""Writing copies to a drive that may have to make room first."""

from collections.abc import Callable

from kvdepot.tiers.log.tier import SegmentTier

MakeRoom = Callable[[int, int], bool]
"""Drive and bytes: do what lets a refused write succeed. False: nothing helps."""


def append(
    tier: SegmentTier, drive: int, images: list[memoryview], make_room: MakeRoom | None
) -> list[int | None]:
    """Append record images to one drive, a second time where room could be made.

    Returns a location each, None where the drive did not take it. Without `make_room` nothing has
    to leave for them.
    """
    places = tier.append(drive, images)
    left = [index for index, place in enumerate(places) if place is None]
    if left and make_room is not None and make_room(drive, max(len(images[n]) for n in left)):
        again = tier.append(drive, [images[index] for index in left])
        for index, place in zip(left, again, strict=True):
            places[index] = place
    return places
