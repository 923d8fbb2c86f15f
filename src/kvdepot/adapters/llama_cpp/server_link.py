"""A running llama-server as the proxy sees it: which process it is, what it serves, its slots.

The server is the same as long as its listening socket is. When that changes everything is asked
again: the model's file is digested, the probe is computed, the slots are emptied.
"""

import contextlib
import http.client
import json
import logging
import os
import re
import select
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvdepot.adapters.file_digests import process_start_ns
from kvdepot.adapters.llama_cpp.adapters import ServerAdapters, load_adapters
from kvdepot.adapters.llama_cpp.blocks import (
    BLOCK_TOKENS,
    PROBE_TOKENS,
    SequenceBlocks,
    gguf_digest,
    probe_digest,
)
from kvdepot.adapters.llama_cpp.sequence_state import SequenceState, read_slot_file
from kvdepot.adapters.llama_cpp.slots import Owner, Slots
from kvdepot.config.settings import AuditConfig
from kvdepot.core.depot import Depot
from kvdepot.errors import ModelError

_logger = logging.getLogger("kvdepot.llama")
_LISTENING: Final = "0A"
_QUICK_S: Final = 5.0
_SLOT_S: Final = 60.0
"""An action on a slot waits until the server is between two batches."""
_REQUEST_S: Final = 3600.0
"""A slot is saved when its request has ended; llama-server's own limit."""
_LOOK_S: Final = 0.1
_FORBIDDEN: Final = {
    "--cache-reuse": "moves KV to other positions",
    "LLAMA_ARG_CACHE_REUSE": "moves KV to other positions",
    "--context-shift": "moves KV to other positions",
    "LLAMA_ARG_CONTEXT_SHIFT": "moves KV to other positions",
}
"""Options of a server whose KV does not depend on the tokens before it alone."""
SLOT_FILE: Final = "kvdepot-"
_TIMINGS: Final = re.compile(
    rb'"(cache_n|prompt_n|prompt_ms|predicted_n)"\s*:\s*([0-9.eE+-]{1,32})'
)


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Where the server is, and how its blocks are kept."""

    url: str
    slots: Path
    """The server's --slot-save-path."""
    block_tokens: int = BLOCK_TOKENS
    tenant: str = ""
    api_key: str = field(default="", repr=False)
    memo: Path | None = None
    """A file that remembers digests of model files."""
    audit: AuditConfig = field(default_factory=AuditConfig)
    """Which hits are computed again."""


class LlamaServerLink:
    """Calls to a llama-server. Every call may raise OSError or http.client.HTTPException when the
    server does not answer, and ModelError when it refuses."""

    def __init__(self, settings: LinkSettings) -> None:
        parts = urllib.parse.urlsplit(settings.url)
        if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
            raise ModelError(
                f"{settings.url!r} is not the address of a llama-server",
                hint="http://127.0.0.1:8080, for example",
            )
        self.host, self.port = parts.hostname, parts.port or 80
        self.settings = settings
        self._count = 0
        self._lock = threading.Lock()

    def connection(self, timeout_s: float | None) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)

    def call(
        self,
        path: str,
        body: object = None,
        timeout_s: float = _QUICK_S,
        sockets: frozenset[int] | None = None,
        hopeless: Callable[[], bool] | None = None,
    ) -> Any:
        """One request and its JSON answer; with `sockets`, of the run that listens on them.

        TimeoutError when `hopeless` says so before the answer begins.
        """
        headers = {"content-type": "application/json"}
        if self.settings.api_key:
            headers["authorization"] = f"Bearer {self.settings.api_key}"
        with contextlib.closing(self.connection(timeout_s)) as connection:
            # Connected first: what listened before and after has this connection.
            connection.connect()
            if sockets is not None and self.listening() != sockets:
                raise ModelError("llama-server was restarted")
            method = "GET" if body is None else "POST"
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            while hopeless is not None and not select.select([connection.sock], [], [], _LOOK_S)[0]:
                if hopeless():
                    raise TimeoutError(f"llama-server did not answer {path}")
            response = connection.getresponse()
            content = response.read()
        try:
            answer = json.loads(content)
        except ValueError as error:
            raise ModelError(f"llama-server answered {path} with no JSON") from error
        if response.status != http.HTTPStatus.OK:
            raise ModelError(f"llama-server refused {path}: {_reason(answer, response.status)}")
        return answer

    def tokenize(self, text: str) -> list[int]:
        body = {"content": text, "add_special": True, "parse_special": True}
        tokens = self.call("/tokenize", body).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise ModelError("llama-server tokenized in an unknown way")
        return tokens

    def slot_action(
        self,
        slot: int,
        action: str,
        filename: str = "",
        sockets: frozenset[int] | None = None,
        hopeless: Callable[[], bool] | None = None,
    ) -> dict[str, Any]:
        path = f"/slots/{slot}?action={action}"
        limit_s = _REQUEST_S if action == "save" else _SLOT_S
        answer = self.call(path, {"filename": filename}, limit_s, sockets, hopeless)
        return answer if isinstance(answer, dict) else {}

    @contextlib.contextmanager
    def slot_file(self) -> Iterator[Path]:
        """A name in the folder of slot files, for the time of the scope."""
        with self._lock:
            self._count += 1
            name = f"{SLOT_FILE}{os.getpid()}-{self._count}.bin"
        path = self.settings.slots / name
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def choose_adapters(self, slot: int, token: int, pinned: dict[str, Any]) -> None:
        """Have a slot's last request be one with these LoRAs."""
        request = {
            "prompt": [token],
            "n_predict": 0,
            "id_slot": slot,
            "cache_prompt": False,
            **pinned,
        }
        self.call("/completion", request, _SLOT_S)

    def save_slot(
        self,
        slot: int,
        path: Path,
        sockets: frozenset[int] | None = None,
        hopeless: Callable[[], bool] | None = None,
    ) -> "np.memmap[Any, np.dtype[np.uint8]]":
        """Have the server write a slot to a file, and map that. TimeoutError: as of `call`."""
        self.slot_action(slot, "save", path.name, sockets, hopeless)
        try:
            return np.memmap(path, np.uint8, "r")
        except FileNotFoundError as error:
            raise ModelError(
                f"llama-server saves its slots elsewhere, not to {self.settings.slots}",
                hint="give its --slot-save-path as --slots",
            ) from error

    def listening(self) -> frozenset[int]:
        """The listening sockets of the server's port on this machine, by inode."""
        found = set()
        for name in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                    fields = line.split()
                    port = int(fields[1].rpartition(":")[2], 16)
                    if port == self.port and fields[3] == _LISTENING:
                        found.add(int(fields[9]))
        return frozenset(found)


def _reason(answer: object, status: int) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or f"status {status}")


def process_of(inodes: frozenset[int]) -> int:
    """The process that has one of these sockets open; the oldest, if several. ModelError: none."""
    names = {f"socket:[{inode}]" for inode in inodes}
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _has_open(folder / "fd", names):
            with contextlib.suppress(OSError):
                found.append((process_start_ns(int(folder.name)), int(folder.name)))
    if not found:
        raise ModelError(
            "llama-server's process cannot be seen",
            hint="run the proxy on the same machine, as the same user",
        )
    return min(found)[1]


def _has_open(folder: Path, names: set[str]) -> bool:
    """Whether a process has one of these files open; False if it may not be looked at."""
    try:
        descriptors = os.listdir(folder)
    except OSError:
        return False
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(folder / descriptor) in names:
                return True
    return False


def check_options(process: int) -> None:
    """ModelError where the server was started with an option that spoils a cache."""
    given: set[str] = set()
    for name in ("cmdline", "environ"):
        with contextlib.suppress(OSError):
            content = Path("/proc", str(process), name).read_bytes()
            given |= {part.partition("=")[0] for part in content.decode("latin-1").split("\0")}
    for option in sorted(given & set(_FORBIDDEN)):
        raise ModelError(f"llama-server was started with {option}, which {_FORBIDDEN[option]}")


@dataclass(slots=True)
class ServedModel:
    """One run of a server: what it serves, and its slots. Made by `recognise`."""

    link: LlamaServerLink
    blocks: SequenceBlocks
    slots: Slots
    streams: int
    slot_tokens: int
    """How many tokens a slot has room for."""
    sockets: frozenset[int]
    adapters: ServerAdapters = field(default_factory=ServerAdapters)
    spoiled: str = ""
    """Why nothing is stored or restored any more in this run."""

    def blocks_of(self, owner: Owner) -> SequenceBlocks:
        """The blocks of a user, with the LoRAs at the scales that are in force for a request."""
        return self.blocks.variant(owner.user, self.adapters.name(owner.scales))


def recognise(
    link: LlamaServerLink, depot: Depot, quiet: Callable[[], AbstractContextManager[None]]
) -> ServedModel:
    """Find out what the server is. Takes as long as reading the model's file takes the first time.

    OSError or HTTPException while the server does not answer; ModelError, with the reason, if it
    cannot be served. In the scope of `quiet` nothing else may be asked of the server.
    """
    settings = link.settings
    sockets = link.listening() if resolves_here(link.host) else frozenset()
    if not sockets:
        raise ModelError(
            f"no process of this machine listens on port {link.port}",
            hint="llama-server and the proxy must run in one network namespace",
        )
    process = process_of(sockets)
    check_options(process)
    facts = link.call("/props")
    path = Path(str(facts["model_path"]))
    if not path.is_absolute():
        path = Path(os.readlink(f"/proc/{process}/cwd")) / path
    began_ns = process_start_ns(process)
    fingerprint = gguf_digest(path, settings.memo, began_ns)
    adapters = load_adapters(link, settings.memo, began_ns)
    off = (0.0,) * len(adapters.digests)
    with quiet():
        slots, state = _probe(link, adapters.pinned(off))
    blocks = SequenceBlocks(
        depot,
        state.layout,
        block_tokens=settings.block_tokens,
        tenant=settings.tenant,
        model=path.name,
        fingerprint=fingerprint,
        adapter=adapters.name(off),
        audit=settings.audit,
        extra=(
            ("engine", "llama.cpp"),
            ("build", str(facts.get("build_info", ""))),
            ("probe", probe_digest(state)),
        ),
    )
    found = Slots([slot["id"] for slot in slots], shared=state.streams == 1)
    room = int(slots[0]["n_ctx"])
    return ServedModel(link, blocks, found, state.streams, room, sockets, adapters)


def _probe(
    link: LlamaServerLink, without_adapters: dict[str, Any]
) -> tuple[list[dict[str, Any]], SequenceState]:
    """Compute the probe, and empty all slots. The slots, and the probe's state."""
    slots = link.call("/slots")
    if any(slot["is_processing"] for slot in slots):
        raise ModelError("llama-server is busy; the probe waits")
    request = {
        "prompt": list(PROBE_TOKENS),
        "n_predict": 1,
        "temperature": 0,
        "id_slot": 0,
        "cache_prompt": False,
        **without_adapters,
    }
    link.call("/completion", request, _SLOT_S)
    with link.slot_file() as path:
        tokens, state = read_slot_file(link.save_slot(0, path))
    if tokens[: len(PROBE_TOKENS)].tolist() != list(PROBE_TOKENS):
        raise ModelError("the probe's slot was used by another client")
    for slot in slots:
        link.slot_action(slot["id"], "erase")
    return slots, state


@dataclass(frozen=True, slots=True)
class PromptTiming:
    """What an answer says of its prompt: tokens computed, in the slot before, and answered."""

    computed: int
    cached: int
    predicted: int
    prompt_s: float | None
    """What computing took."""


def read_timing(tail: bytes) -> PromptTiming | None:
    """From the last bytes of an answer, its `timings`; None where they do not have it."""
    try:
        found = {name: float(value) for name, value in _TIMINGS.findall(tail)}
        names = (b"prompt_n", b"cache_n", b"predicted_n")
        computed, cached, predicted = (int(found[name]) for name in names)
    except (KeyError, ValueError, OverflowError):
        return None
    took_ms = found.get(b"prompt_ms", 0.0)
    prompt_s = took_ms / 1e3 if 0.0 < took_ms < inf else None
    return PromptTiming(computed, cached, predicted, prompt_s)


def resolves_here(host: str) -> bool:
    """Whether a host's name means this machine."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    for address in addresses:
        with contextlib.suppress(OSError):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((address, 0))
            return True
    return False
