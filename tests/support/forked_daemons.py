"""Daemons without the time that an interpreter takes to start: forks of one that has imported all.

Run as a program it is the process that forks; from the tests' side it is `ForkServer`. The tests of
`python -m kvdepot serve` itself start it as a person does.
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TextIO

ROOT = Path(__file__).parents[2]
_MESSAGE_MAX = 1 << 20


class ForkedDaemon:
    """A child of the fork server, with what is used of a Popen."""

    def __init__(self, server: "ForkServer", pid: int, stdout: IO[str]) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._server = server
        self._pidfd = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if not poll.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired("kvdepot serve", timeout or 0.0)
            self.returncode = self._server.ask({"reap": self.pid})
            os.close(self._pidfd)
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Starts with its first daemon. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, arguments: Sequence[str], log: TextIO) -> ForkedDaemon:
        """`kvdepot` with these arguments, in the environment and folder of this process."""
        wanted = {"argv": list(arguments), "environment": dict(os.environ), "cwd": os.getcwd()}
        reads, writes = os.pipe()
        try:
            pid = self.ask(wanted, [writes, log.fileno()])
        finally:
            os.close(writes)
        return ForkedDaemon(self, pid, os.fdopen(reads))

    def ask(self, wanted: Mapping[str, object], descriptors: Sequence[int] = ()) -> int:
        with self._lock:
            if self._asked is None:
                self._begin()
            assert self._asked is not None
            socket.send_fds(self._asked, [json.dumps(wanted).encode()], descriptors)
            return int(self._asked.recv(_MESSAGE_MAX))

    def close(self) -> None:
        if self._asked is not None and self._process is not None:
            self._asked.close()
            self._process.wait()

    def _begin(self) -> None:
        self._asked, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'src'}"
        command = [sys.executable, "-m", "tests.support.forked_daemons", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()]
        )
        theirs.close()


def serve(asked: socket.socket) -> list[str] | None:
    """Fork as asked until nobody asks. The arguments in a child, None in the server."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(asked, _MESSAGE_MAX, 2)
        if not message:
            return None
        wanted = json.loads(message)
        if "reap" in wanted:
            status = os.waitpid(wanted["reap"], 0)[1]
            asked.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        child = os.fork()
        if child == 0:
            asked.close()
            become(wanted, descriptors)
            return list(wanted["argv"])
        for descriptor in descriptors:
            os.close(descriptor)
        asked.send(str(child).encode())


def become(wanted: Mapping[str, object], descriptors: Sequence[int]) -> None:
    for descriptor, number in zip(descriptors, (1, 2), strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    assert isinstance(wanted["environment"], dict)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    os.chdir(str(wanted["cwd"]))


def end(status: int) -> None:
    """Exit, without taking apart what was imported. Threads are waited for as ever."""
    threading._shutdown()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    gc.disable()
    import kvdepot.__main__
    import kvdepot.cli.main
    import kvdepot.cli.serve

    with contextlib.suppress(ImportError):  # an extra
        import kvdepot.daemon.http.service

    # What was imported stays: a child that looked through it, or took it apart at its end, would
    # copy all of it.
    gc.freeze()
    gc.enable()
    arguments = serve(socket.socket(fileno=int(sys.argv[1])))
    if arguments is not None:
        sys.argv = ["kvdepot", *arguments]
        end(kvdepot.__main__.run())
