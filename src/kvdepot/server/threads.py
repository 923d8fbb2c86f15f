"""Threads that do what may take long. As many as there is to do at once, and none of it waits."""

import queue
import threading
from collections.abc import Callable
from typing import Final

_IDLE_S: Final = 5.0
"""A thread without work for this long ends."""

Job = Callable[[], None]


class Crew:
    """Starts a thread for a job unless one is free."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0

    def do(self, job: Job) -> None:
        """Have a job done. Does not block."""
        with self._lock:
            needed = not self._free
            if not needed:
                self._free -= 1
        if needed:
            thread = threading.Thread(target=self._work, args=(job,), name=self._name, daemon=True)
            thread.start()
        else:
            self._jobs.put(job)

    def _work(self, job: Job) -> None:
        while True:
            job()
            with self._lock:
                self._free += 1
            try:
                job = self._jobs.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._free:
                        self._free -= 1
                        return
                # Somebody has counted on this thread just now.
                job = self._jobs.get()
