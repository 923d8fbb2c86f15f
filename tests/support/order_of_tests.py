"""In which order tests are run by several processes."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")


def longest_first(
    items: Sequence[Item], takes_long: Callable[[Item], bool], processes: int
) -> list[Item]:
    """In order, but each of xdist's processes begins with its part of those that take longest:
    one that came last would be waited for alone.
    """
    longest = [item for item in items if takes_long(item)]
    others = iter([item for item in items if not takes_long(item)])
    dealt: list[Item] = []
    for number in range(processes):
        share = (len(items) - len(dealt)) // (processes - number)  # as --dist worksteal cuts it
        begins = longest[number::processes]
        dealt += [*begins, *islice(others, max(0, share - len(begins)))]
    return [*dealt, *others]
