"""The wait for blocks that another machine is writing: when to look again, and when to give up."""

from typing import Final

IDLE_S: Final = 1.0
"""Time without a further block after which nothing more is expected, unless configured."""
_PAUSE_S: Final = (0.02, 0.25)
"""First and longest time between two looks. A bucket is listed four times a second at most."""


class BlockWait:
    """One wait for the blocks of a prompt. Times are those of the caller's clock."""

    def __init__(self, now_s: float, timeout_s: float, idle_s: float) -> None:
        """Ends after `timeout_s`, or when no further block has come for `idle_s`."""
        self.until_s = now_s + timeout_s
        self.look_s = now_s
        """The time of the next look."""
        self._idle_s = idle_s
        self._sign_s = now_s
        self._pause_s = _PAUSE_S[0]
        self.found: int | None = None
        """The leading blocks that the last look has found; None: there was none yet."""

    def left_s(self, now_s: float) -> float:
        """The time that is left; not positive if the wait is over."""
        return min(self.until_s, self._sign_s + self._idle_s) - now_s

    def note(self, now_s: float, found: int) -> bool:
        """A look has found so many leading blocks. True if these are more than at the last look;
        those that were there at the first are no sign that others come.
        """
        has_come = self.found is not None and found > self.found
        if has_come:
            self._sign_s, self._pause_s = now_s, _PAUSE_S[0]
        self.look_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _PAUSE_S[1])
        self.found = found
        return has_come
