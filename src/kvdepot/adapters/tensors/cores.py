"""Which processor cores threads of ours run on.

An engine on the CPU pins its threads, each to a core that it keeps busy. Threads and processes that
are started from a pinned thread inherit that, and would take turns with it while others idle.
"""

import contextlib
import os


def use_all_cores(task: int = 0) -> None:
    """Let a thread or process (0: the caller's thread) run on every core that there is for us."""
    # A machine that does not allow this leaves it where it is.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(task, range(os.cpu_count() or 1))
