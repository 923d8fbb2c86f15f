"""Writes the lookups of a store to a file, as a trace that `kvdepot sim` reads."""

import errno
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdepot.core.clock import Clock
from kvdepot.core.private import open_private_file
from kvdepot.core.recording import header, request
from kvdepot.errors import ConfigError
from kvdepot.store.events import Event, LookedUp

Digests = npt.NDArray[np.uint64]

_SAME_S: Final = 10.0
"""A repeated lookup of a prompt within this time belongs to the same request."""
_RECENT_MAX: Final = 4096
_QUEUE_MAX: Final = 1 << 16
_FILE_BYTES_MAX: Final = 1 << 30
_PAUSE_S: Final = 0.2


def _hint(path: Path, error: OSError) -> str:
    if error.errno == errno.EEXIST:
        return "name a file that does not exist yet"
    if error.errno == errno.ENOENT:
        return f"mkdir -p {path.parent}, where the daemon runs"
    return "name a file that the daemon's user may write"


class TraceRecorder:
    """One recording: an observer of the store. A thread writes; a full disk ends the recording."""

    def __init__(self, path: Path, block_tokens: int, clock: Clock) -> None:
        """Create the file and start the thread. ConfigError if the file cannot be created."""
        try:
            fd = open_private_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            self._file = os.fdopen(fd, "w")
            self._file.write(header(block_tokens) + "\n")
            self._file.flush()
        except OSError as error:
            reason = f"cannot write to {path}: {error.strerror}"
            raise ConfigError("record", reason, hint=_hint(path, error)) from error
        self.path = path
        self.requests = 0
        """Requests written so far."""
        self._block_tokens = block_tokens
        self._began_s = clock.now()
        self._bytes = 0
        self._recent: OrderedDict[int, float] = OrderedDict()
        self._queue: deque[tuple[float, Digests]] = deque(maxlen=_QUEUE_MAX)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvdepot-recorder", daemon=True)
        self._thread.start()

    def observe(self, events: Sequence[Event]) -> None:
        """Queue the lookups, except for those of the same request."""
        for event in events:
            if not isinstance(event, LookedUp) or not len(event.keys) or event.at_s < self._began_s:
                continue
            last = int(event.keys[-1, 2])
            before_s = self._recent.pop(last, None)
            self._recent[last] = event.at_s
            if len(self._recent) > _RECENT_MAX:
                self._recent.popitem(last=False)
            if before_s is None or event.at_s - before_s > _SAME_S:
                self._queue.append((event.at_s - self._began_s, event.keys[:, 2]))

    def close(self) -> int:
        """Write the queued requests and end. Returns the number of recorded requests."""
        self._stop.set()
        self._thread.join()
        return self.requests

    def _run(self) -> None:
        try:
            while not self._stop.wait(_PAUSE_S):
                self._write()
            self._write()
            self._file.close()
        except OSError:
            self._stop.set()  # the lines written so far are a valid trace

    def _write(self) -> None:
        while self._queue:
            at_s, names = self._queue.popleft()
            line = request(at_s, names.tolist(), self._block_tokens) + "\n"
            self._bytes += len(line)
            if self._bytes > _FILE_BYTES_MAX:
                self._stop.set()
                self._queue.clear()
                break
            self._file.write(line)
            self.requests += 1
        self._file.flush()
