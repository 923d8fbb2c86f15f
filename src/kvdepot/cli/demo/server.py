"""The demo's serving process: a chat model that answers requests, one JSON document a line.

    python -m kvdepot.cli.demo.server SETTINGS

SETTINGS is a JSON document: `model` (a folder, or null for SmolLM2), `cache` (where that is kept),
`store` (arguments of kvdepot.open, or null to serve without a depot), `block_tokens`. Says `ready`
when it is, then answers one request after the other until its input ends. It is made to be killed.
"""

import dataclasses
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from kvdepot.cli.demo.script import opening
from kvdepot.core.depot import Depot
from kvdepot.errors import KVDepotError
from kvdepot.store.open import open_store

FINISH_WITHIN_S: Final = 5.0
FAILED: Final = 1

Document = dict[str, Any]


class Line:
    """The pipes to whoever started this process."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        # Whatever a library prints must not end up among the answers.
        os.dup2(2, 1)
        self._requests = os.fdopen(os.dup(0), encoding="utf-8")
        self._waiting: queue.SimpleQueue[Document | None] = queue.SimpleQueue()
        self._finished = threading.Event()
        threading.Thread(target=self._listen, name="demo-line", daemon=True).start()

    def say(self, document: Document) -> None:
        self._answers.write(json.dumps(document) + "\n")
        self._answers.flush()

    def requests(self) -> Iterator[Document]:
        while (request := self._waiting.get()) is not None:
            yield request

    def finish(self) -> None:
        self._finished.set()

    def _listen(self) -> None:
        """Take requests in. When nobody is there any more, the process ends, busy or not."""
        for line in self._requests:
            self._waiting.put(json.loads(line))
        self._waiting.put(None)
        if not self._finished.wait(FINISH_WITHIN_S):
            os._exit(FAILED)


def main(settings: Document) -> int:
    line = Line()
    try:
        serve(line, settings)
    except KVDepotError as error:
        line.say({"is": "error", "message": str(error), "hint": error.hint})
        return FAILED
    except OSError as error:
        # A full or failing disk is nothing a trace would explain better.
        line.say({"is": "error", "message": str(error), "hint": ""})
        return FAILED
    finally:
        line.finish()
    return 0


def serve(line: Line, settings: Document) -> None:
    from kvdepot.adapters.demo.chat import ChatModel

    started_s = time.perf_counter()
    name, folder = find_model(line, settings)
    chat = ChatModel.load(folder)
    loaded_s = time.perf_counter()
    with opened(settings["store"]) as store:
        if store is not None:
            chat.attach(store, block_tokens=settings["block_tokens"])
        line.say(
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
        for request in line.requests():
            reply = chat.reply(request["messages"], request["new_tokens"])
            line.say({"is": "answer", **dataclasses.asdict(reply)})


def find_model(line: Line, settings: Document) -> tuple[str, Path]:
    """Name and folder of the model to serve; SmolLM2 is made ready if need be."""
    if settings["model"] is not None:
        folder = Path(settings["model"])
        return folder.name, folder
    from kvdepot.adapters.demo import smollm2

    cache = Path(settings["cache"])
    if not smollm2.is_prepared(cache):
        line.say({"is": "progress", "text": f"making {smollm2.NAME} ready, once, in {cache}"})
    return smollm2.NAME, smollm2.prepare(cache)


@contextmanager
def opened(arguments: Document | None) -> Iterator[Depot | None]:
    if arguments is None:
        yield None
        return
    with open_store(**arguments) as store:
        yield store


if __name__ == "__main__":
    raise SystemExit(main(json.loads(sys.argv[1])))
