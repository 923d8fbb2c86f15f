"""The kinds of failure that CI never forgives, as exceptions.

A test that fails in CI is run once more, alone (tests/support/rerun_failed.py). A failure of one of
these kinds counts even if the test passes the second time.
"""


class DataError(AssertionError):
    """A block had wrong bytes, was lost after it was acknowledged, or came back after removal."""


class HangError(AssertionError):
    """A thread, a process or a condition did not come to its end within a generous limit."""


def check_data(holds: bool, otherwise: object) -> None:
    """Raise a DataError with the text of `otherwise` unless the claim about blocks holds."""
    if not holds:
        raise DataError(str(otherwise))
