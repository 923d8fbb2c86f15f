"""Which protocol two sides agree on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.daemon.wire.frames import FrameKind
from kvdepot.daemon.wire.versions import (
    PROTOCOL,
    PROTOCOL_OLDEST,
    SINCE,
    SpokenVersions,
)

_SPANS = st.tuples(st.integers(1, 9), st.integers(1, 9)).map(sorted)


@given(ours=_SPANS, theirs=_SPANS)
def test_the_highest_common_protocol_is_agreed_on(ours: list[int], theirs: list[int]) -> None:
    mine, other = (SpokenVersions(span[0], span[1], 1, 1) for span in (ours, theirs))
    both = set(range(ours[0], ours[1] + 1)) & set(range(theirs[0], theirs[1] + 1))
    assert mine.common(other) == other.common(mine) == max(both, default=0)


@pytest.mark.parametrize("other", [SpokenVersions(5, 6, 2, 1), SpokenVersions(5, 6, 1, 2)])
def test_format_and_record_must_be_equal(other: SpokenVersions) -> None:
    assert SpokenVersions(5, 6, 1, 1).common(other) == 0


def test_versions_are_told_in_words() -> None:
    assert str(SpokenVersions(5, 5, 1, 2)) == "protocol 5, format 1, record 2"
    assert str(SpokenVersions(5, 7, 1, 2)) == "protocol 5 to 7, format 1, record 2"


def test_requests_that_came_later_are_requests_of_a_spoken_protocol() -> None:
    assert all(PROTOCOL_OLDEST < since <= PROTOCOL for since in SINCE.values())
    assert all(kind < FrameKind.WELCOME for kind in SINCE)
