"""Recognizes the llama-server behind the proxy, again whenever it was restarted.

The server is the same as long as its listening sockets are. If they change, everything is asked
again: the model's file is digested, the probe is computed, the slots are emptied.
"""

import contextlib
import http.client
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvdepot.adapters.file_digests import process_start_ns
from kvdepot.adapters.llama_cpp.blocks import (
    LOG,
    PROBE_TOKENS,
    SequenceBlocks,
    gguf_digest,
    probe_digest,
)
from kvdepot.adapters.llama_cpp.sequence_state import SequenceState, read_slot_file
from kvdepot.adapters.llama_cpp.server_link import (
    SLOT_S,
    LinkSettings,
    LlamaServerLink,
    LoadedLoras,
)
from kvdepot.adapters.llama_cpp.slots import Owner, Slots
from kvdepot.depot import Depot
from kvdepot.errors import KVDepotError, ModelError

_LOOK_S: Final = 0.25
_RETRY_S: Final = 10.0
_DRAIN_S: Final = 2.0
"""A probe waits this long for requests in progress."""
RECOGNIZE_S: Final = 10.0
"""A request waits this long until a server that has just started is recognized."""
_FORBIDDEN: Final = frozenset(
    {
        "--cache-reuse",
        "--context-shift",
        "LLAMA_ARG_CACHE_REUSE",
        "LLAMA_ARG_CONTEXT_SHIFT",
    }
)
"""Options of a server that moves KV to other positions."""
FAILURES: Final = (
    OSError,
    http.client.HTTPException,
    KVDepotError,
    ValueError,
    KeyError,
    TypeError,
    OverflowError,
    RecursionError,
)
"""Errors between the proxy, the server and the depot: the request continues without the depot."""


@dataclass(slots=True)
class ServedModel:
    """One run of a server: its model and its slots."""

    blocks: SequenceBlocks
    slots: Slots
    streams: int
    slot_tokens: int
    """The size of a slot."""
    sockets: frozenset[int]
    loras: LoadedLoras
    spoiled: str = ""
    """The reason why nothing is stored or restored any more in this run."""

    def blocks_of(self, owner: Owner) -> SequenceBlocks:
        return self.blocks.variant(owner.user, self.loras.name(owner.scales))


class ServerWatch:
    """Knows the server that listens now. Keeps requests and probes apart."""

    def __init__(self, settings: LinkSettings, depot: Depot) -> None:
        self.link = LlamaServerLink(settings)
        self.latest: ServedModel | None = None
        self.reason = "llama-server has not answered yet"
        """The reason why `latest` is None."""
        self._depot = depot
        self._changed = threading.Condition()
        """Guards the fields below."""
        self._requests = 0
        """Requests that the server has. There is no probe meanwhile."""
        self._probing = False
        self._seen: frozenset[int] = frozenset()
        """The sockets at the last attempt to recognize a server, first seen at `_seen_s`."""
        self._seen_s = 0.0
        self._tried: frozenset[int] = frozenset()
        """The sockets of the last server that was recognized or refused."""
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kvdepot-llama-watch")
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._wake.set()
        self._thread.join()

    def served(self) -> ServedModel | None:
        """The model of the server that listens now; None if it cannot be served."""
        model = self.latest
        if model is None or model.spoiled or model.sockets != self.link.listening():
            return None
        return model

    @property
    def is_busy(self) -> bool:
        """The server has more than one request."""
        return self._requests > 1

    def pause(self, seconds: float) -> None:
        """Sleep, but not longer than until `close`."""
        self._closed.wait(seconds)

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """The scope in which the server has a request. Waits for the end of a probe, and for up to
        10 s until a server that has just started is recognized."""
        sockets = self.link.listening()
        with self._changed:
            if sockets and sockets != self._tried:
                self._wake.set()
                waited_s = time.monotonic() - self._seen_s if sockets == self._seen else 0.0
                left_s = max(0.0, RECOGNIZE_S - waited_s)
                self._changed.wait_for(lambda: sockets == self._tried, left_s)
            self._changed.wait_for(lambda: not self._probing, RECOGNIZE_S)
            self._requests += 1
        try:
            yield
        finally:
            with self._changed:
                self._requests -= 1
                self._changed.notify_all()

    def _watch(self) -> None:
        retry_s = _LOOK_S
        while not self._closed.is_set():
            sockets = self.link.listening()
            if sockets and (self.latest is None or self.latest.sockets != sockets):
                self._try(sockets)
                retry_s = _LOOK_S if self.latest else min(2 * retry_s, _RETRY_S)
            self._wake.wait(retry_s)
            self._wake.clear()

    def _try(self, sockets: frozenset[int]) -> None:
        with self._changed:
            self.latest = None
            if self._seen != sockets:
                self._seen, self._seen_s = sockets, time.monotonic()
        served, reason = None, ""
        try:
            served = self._recognize()
            LOG.info("llama-server serves %s", served.blocks.space.namespace.model)
        except FAILURES as error:
            reason = str(error) or type(error).__name__
            if reason != self.reason:
                hint = getattr(error, "hint", "")
                LOG.warning(
                    "requests are only passed on: %s%s", reason, f"; hint: {hint}" * bool(hint)
                )
        with self._changed:
            self.latest, self.reason, self._tried = served, reason, sockets
            self._changed.notify_all()

    def _recognize(self) -> ServedModel:
        """Find out what the server is. The first time this reads the whole model file.

        OSError or HTTPException while the server does not answer; ModelError, with the reason, if
        it cannot be served.
        """
        link, settings = self.link, self.link.settings
        sockets = link.listening() if _is_local(link.host) else frozenset()
        if not sockets:
            raise ModelError(
                f"no process of this machine listens on port {link.port}",
                hint="run llama-server and the proxy in one network namespace",
            )
        process = process_of(sockets)
        check_options(process)
        facts = link.call("/props")
        path = Path(str(facts["model_path"]))
        if not path.is_absolute():
            path = Path(os.readlink(f"/proc/{process}/cwd")) / path
        began_ns = process_start_ns(process)
        fingerprint = gguf_digest(path, settings.memo, began_ns)
        loras = LoadedLoras.of(link, settings.memo, began_ns)
        off = (0.0,) * len(loras.digests)
        with self._no_requests():
            slots, state = _probe(link, loras.options(off))
        blocks = SequenceBlocks(
            self._depot,
            state.layout,
            block_tokens=settings.block_tokens,
            tenant=settings.tenant,
            model=path.name,
            fingerprint=fingerprint,
            adapter=loras.name(off),
            audit=settings.audit,
            extra=(
                ("engine", "llama.cpp"),
                ("build", str(facts.get("build_info", ""))),
                ("probe", probe_digest(state)),
            ),
        )
        return ServedModel(
            blocks,
            Slots([slot["id"] for slot in slots], shared=state.streams == 1),
            state.streams,
            int(slots[0]["n_ctx"]),
            sockets,
            loras,
        )

    @contextlib.contextmanager
    def _no_requests(self) -> Iterator[None]:
        """The scope of a probe: no request is in progress, and new ones wait."""
        with self._changed:
            self._probing = True
            idle = self._changed.wait_for(lambda: not self._requests, _DRAIN_S)
        try:
            if not idle:
                raise ModelError("llama-server is busy; the probe waits")
            yield
        finally:
            with self._changed:
                self._probing = False
                self._changed.notify_all()


def _probe(
    link: LlamaServerLink, options: dict[str, Any]
) -> tuple[list[dict[str, Any]], SequenceState]:
    """Compute the probe, and empty all slots. Returns the slots and the probe's state."""
    slots = link.call("/slots")
    if any(slot["is_processing"] for slot in slots):
        raise ModelError("llama-server is busy; the probe waits")
    request = {"prompt": list(PROBE_TOKENS), "n_predict": 1, "temperature": 0, "id_slot": 0}
    link.call("/completion", {**request, "cache_prompt": False, **options}, SLOT_S)
    with link.slot_file() as path:
        tokens, state = read_slot_file(link.save_slot(0, path))
    if tokens[: len(PROBE_TOKENS)].tolist() != list(PROBE_TOKENS):
        raise ModelError("another client has used the probe's slot")
    for slot in slots:
        link.erase_slot(slot["id"])
    return slots, state


def process_of(inodes: frozenset[int]) -> int:
    """The oldest process with one of these sockets open. ModelError if none can be seen."""
    names = {f"socket:[{inode}]" for inode in inodes}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a process of another user, or it has ended
            files = os.listdir(folder / "fd")
            if any(_target(folder / "fd" / name) in names for name in files):
                found.append((process_start_ns(int(folder.name)), int(folder.name)))
    if not found:
        raise ModelError(
            "llama-server's process cannot be seen",
            hint="run the proxy on the same machine, as the same user",
        )
    return min(found)[1]


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""  # closed meanwhile


def check_options(process: int) -> None:
    """Raise ModelError if the server was started with an option that spoils a cache."""
    given: set[str] = set()
    for name in ("cmdline", "environ"):
        with contextlib.suppress(OSError):
            content = Path("/proc", str(process), name).read_bytes()
            given |= {part.partition("=")[0] for part in content.decode("latin-1").split("\0")}
    for option in sorted(given & _FORBIDDEN):
        raise ModelError(f"llama-server was started with {option}: it moves KV to other positions")


def _is_local(host: str) -> bool:
    """Returns True if a host's name means this machine."""
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
