"""The demo's serving process: a chat model that answers requests, one JSON document a line.

    python -m kvdepot.cli.demo.server SETTINGS

SETTINGS is a JSON document: `model` (a folder, or null for SmolLM2), `cache` (where that is kept),
`store` (arguments of kvdepot.open, or null to serve without a depot), `block_tokens`. It says
`ready`, then answers one request after the other until its input ends. It is made to be killed.

`Server` is the process as its parent sees it: started, asked, killed. It never hangs the parent.
"""

import dataclasses
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final, Self

from kvdepot.cli.demo.script import opening
from kvdepot.errors import KVDepotError
from kvdepot.store.open import open_store

FINISH_WITHIN_S: Final = 5.0
FAILED: Final = 1
TICK_S: Final = 0.2
LAST_WORDS: Final = 12
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Nothing is looked up in the network, and libraries print no advice. Waiting threads sleep:
spinning is no faster on an idle machine, and much slower on a busy one. The caller's environment
comes first."""
PROGRAM: Final = (sys.executable, "-m", "kvdepot.cli.demo.server")
"""What is started; settings follow as one argument."""
Document = dict[str, Any]


class ServerError(KVDepotError):
    """The serving process failed, or did not answer in time."""


class Server:
    """A child process, normally this module. Killed at the end of its scope.

    What it says on stderr goes to `log`. `tell` is called several times a second, while the parent
    waits, with a text that says for what.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, tell: Callable[[str], None]
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
                env={**ENVIRONMENT, **env},
                # Ctrl-C is for the parent, which then ends the child.
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
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
                continue  # a request that was never read

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


class ParentPipes:
    """The pipes to the parent, inside the serving process."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # what a library prints must not end up among the answers
        self._requests = os.fdopen(os.dup(0), encoding="utf-8")
        self._waiting: queue.SimpleQueue[Document | None] = queue.SimpleQueue()
        self._finished = threading.Event()
        threading.Thread(target=self._listen, name="demo-requests", daemon=True).start()

    def say(self, document: Document) -> None:
        self._answers.write(json.dumps(document) + "\n")
        self._answers.flush()

    def requests(self) -> Iterator[Document]:
        while (request := self._waiting.get()) is not None:
            yield request

    def finish(self) -> None:
        self._finished.set()

    def _listen(self) -> None:
        """Take requests in. When the parent is gone the process ends, busy or not."""
        for line in self._requests:
            self._waiting.put(json.loads(line))
        self._waiting.put(None)
        if not self._finished.wait(FINISH_WITHIN_S):
            os._exit(FAILED)


def main(settings: Document) -> int:
    parent = ParentPipes()
    try:
        serve(parent, settings)
    except (KVDepotError, OSError) as error:
        # A full or failing disk is an OSError, and a trace would not explain it better.
        hint = error.hint if isinstance(error, KVDepotError) else ""
        parent.say({"is": "error", "message": str(error), "hint": hint})
        return FAILED
    finally:
        parent.finish()
    return 0


def serve(parent: ParentPipes, settings: Document) -> None:
    from kvdepot.adapters.demo.chat import ChatModel

    started_s = time.perf_counter()
    name, folder = find_model(parent, settings)
    chat = ChatModel.load(folder)
    loaded_s = time.perf_counter()
    with open_store(**settings["store"]) if settings["store"] else nullcontext() as store:
        if store is not None:
            chat.attach(store, block_tokens=settings["block_tokens"])
        parent.say(
            {
                "is": "ready",
                "model": name,
                "device": chat.device,
                "context_tokens": chat.context_tokens,
                "shared_tokens": chat.shared_tokens(opening()),
                "token_bytes": chat.token_bytes,
                "load_s": loaded_s - started_s,
                "open_s": time.perf_counter() - loaded_s,
            }
        )
        for request in parent.requests():
            reply = chat.reply(request["messages"], request["new_tokens"])
            parent.say({"is": "answer", **dataclasses.asdict(reply)})


def find_model(parent: ParentPipes, settings: Document) -> tuple[str, Path]:
    """Name and folder of the model to serve; SmolLM2 is prepared if it is not there yet."""
    if settings["model"] is not None:
        folder = Path(settings["model"])
        return folder.name, folder
    from kvdepot.adapters.demo import smollm2

    cache = Path(settings["cache"])
    if not smollm2.is_prepared(cache):
        parent.say({"is": "progress", "text": f"making {smollm2.NAME} ready, once, in {cache}"})
    return smollm2.NAME, smollm2.prepare(cache)


if __name__ == "__main__":
    raise SystemExit(main(json.loads(sys.argv[1])))
