"""A serving process as its parent sees it: started, asked, killed. It can never hang the parent."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from kvdepot.errors import KVDepotError

TICK_S: Final = 0.2
LAST_WORDS: Final = 12
MANNERS: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Nothing is looked up in the network; libraries keep their advice to themselves; threads that wait
for each other sleep: spinning is no faster on an idle machine, and much slower on a busy one. What
the caller's environment says comes first."""

PROGRAM: Final = (sys.executable, "-m", "kvdepot.cli.demo.server")
"""What is started; settings follow as one argument."""

Document = dict[str, Any]
Tell = Callable[[str], None]


class ServerError(KVDepotError):
    """The serving process failed, or did not answer in time."""


class Server:
    """A child process, normally `kvdepot.cli.demo.server`. Killed at the end of its scope.

    What it says on stderr goes to `log`. `tell` is called several times a second, while the parent
    waits, with a text that says for what.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, tell: Tell
    ) -> None:
        self._log = log
        self._tell = tell
        self._unread = b""
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**MANNERS, **env},
                # Ctrl-C is for the parent, which then ends the child.
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self, what: str, timeout_s: float) -> Document:
        """Wait until it serves. Raises ServerError when it does not."""
        return self._await("ready", what, timeout_s)

    def ask(self, request: Document, what: str, timeout_s: float) -> Document:
        """Send a request and wait for the answer. Raises ServerError when there is none."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure("has ended") from error
        return self._await("answer", what, timeout_s)

    def kill(self) -> None:
        """SIGKILL, wherever it is, and wait until it is gone."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # a request that nobody took

    def _await(self, kind: str, what: str, timeout_s: float) -> Document:
        deadline_s = time.monotonic() + timeout_s
        while True:
            document = self._read(what, deadline_s, timeout_s)
            if document["is"] == kind:
                return document
            if document["is"] == "error":
                raise ServerError(document["message"], hint=document["hint"])
            what = document["text"]

    def _read(self, what: str, deadline_s: float, timeout_s: float) -> Document:
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            if time.monotonic() > deadline_s:
                self.kill()
                raise self._failure(f"did not answer within {timeout_s:.0f} s")
            self._tell(what)
            if not select.select([self._process.stdout], [], [], TICK_S)[0]:
                continue
            received = os.read(self._process.stdout.fileno(), 1 << 16)
            if not received:
                raise self._failure(f"ended with status {self._process.wait()}")
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        document: Document = json.loads(line)
        return document

    def _failure(self, what: str) -> ServerError:
        words = self._log.read_text(errors="replace").splitlines()[-LAST_WORDS:]
        said = "".join(f"\n  {word}" for word in words)
        return ServerError(
            f"the serving process {what}" + (f"; its last words:{said}" if said else "")
        )
