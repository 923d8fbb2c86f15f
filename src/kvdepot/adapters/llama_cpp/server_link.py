"""Calls to a llama-server: its slots, tokens and LoRAs."""

import contextlib
import http.client
import json
import os
import re
import select
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvdepot.adapters.llama_cpp.blocks import BLOCK_TOKENS, gguf_digest
from kvdepot.adapters.llama_cpp.slots import Scales
from kvdepot.config.settings import AuditConfig
from kvdepot.errors import ModelError

QUICK_S: Final = 5.0
SLOT_S: Final = 60.0
"""An action on a slot waits until the server is between two batches."""
_SAVE_S: Final = 3600.0
"""A slot is saved when its request has ended; llama-server's own limit."""
_LOOK_S: Final = 0.1
_LISTENING: Final = "0A"
_KEY_REFUSED: Final = (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN)
SLOT_FILE: Final = "kvdepot-"
_TIMINGS: Final = re.compile(
    rb'"(cache_n|prompt_n|prompt_ms|predicted_n)"\s*:\s*([0-9.eE+-]{1,32})'
)


class KeyRefusedError(ModelError):
    """llama-server refuses the API key of a request."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """The address of the server, and how its blocks are kept."""

    url: str
    slots: Path
    """The server's --slot-save-path."""
    block_tokens: int = BLOCK_TOKENS
    tenant: str = ""
    api_key: str = field(default="", repr=False)
    memo: Path | None = None
    """The file that keeps digests of model files."""
    audit: AuditConfig = field(default_factory=AuditConfig)
    """The share of hits that are computed again and compared."""


class LlamaServerLink:
    """Calls to a llama-server. Every call may raise OSError or http.client.HTTPException if the
    server does not answer, and ModelError if it refuses."""

    def __init__(self, settings: LinkSettings) -> None:
        parts = urllib.parse.urlsplit(settings.url)
        if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
            raise ModelError(
                f"invalid address of a llama-server: {settings.url!r}",
                hint="write http://HOST:PORT, such as http://127.0.0.1:8080",
            )
        self.host, self.port = parts.hostname, parts.port or 80
        self.settings = settings
        self._files = 0
        self._lock = threading.Lock()

    def call(
        self,
        path: str,
        body: object = None,
        timeout_s: float = QUICK_S,
        sockets: frozenset[int] | None = None,
        give_up: Callable[[], bool] | None = None,
    ) -> Any:
        """The JSON answer to one request.

        With `sockets` only the server that listens on them is asked. TimeoutError if `give_up`
        returns True before the answer begins; it is called every 0.1 s.
        """
        headers = {"content-type": "application/json"}
        if self.settings.api_key:
            headers["authorization"] = f"Bearer {self.settings.api_key}"
        method = "GET" if body is None else "POST"
        connected = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        with contextlib.closing(connected) as connection:
            # First connect, then compare: the same server listened before and after.
            connection.connect()
            if sockets is not None and self.listening() != sockets:
                raise ModelError("llama-server was restarted")
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answered = select.poll()
            answered.register(connection.sock, select.POLLIN)
            while give_up is not None and not answered.poll(_LOOK_S * 1000):
                if give_up():
                    raise TimeoutError(f"llama-server did not answer {path}")
            response = connection.getresponse()
            content = response.read()
        try:
            answer = json.loads(content)
        except ValueError as error:
            raise ModelError(f"llama-server answered {path} without JSON") from error
        if response.status != http.HTTPStatus.OK:
            error_fields = answer.get("error") if isinstance(answer, dict) else None
            message = error_fields.get("message") if isinstance(error_fields, dict) else None
            reason = message or f"status {response.status}"
            refused = KeyRefusedError if response.status in _KEY_REFUSED else ModelError
            raise refused(f"llama-server refused {path}: {reason}")
        return answer

    def tokenize(self, text: str) -> list[int]:
        body = {"content": text, "add_special": True, "parse_special": True}
        tokens = self.call("/tokenize", body).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise ModelError("llama-server tokenized in an unknown way")
        return tokens

    @contextlib.contextmanager
    def slot_file(self) -> Iterator[Path]:
        """An unused name in the folder of slot files. The file is removed at the end."""
        with self._lock:
            self._files += 1
            name = f"{SLOT_FILE}{os.getpid()}-{self._files}.bin"
        path = self.settings.slots / name
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def save_slot(
        self,
        slot: int,
        path: Path,
        sockets: frozenset[int] | None = None,
        give_up: Callable[[], bool] | None = None,
    ) -> "np.memmap[Any, np.dtype[np.uint8]]":
        """Have the server write a slot to a file, and map that. See `call` for TimeoutError."""
        action, body = f"/slots/{slot}?action=save", {"filename": path.name}
        self.call(action, body, _SAVE_S, sockets, give_up)
        try:
            return np.memmap(path, np.uint8, "r")
        except FileNotFoundError as error:
            raise ModelError(
                f"llama-server saves its slots elsewhere, not to {self.settings.slots}",
                hint="give its --slot-save-path as --slots",
            ) from error

    def restore_slot(self, slot: int, path: Path, sockets: frozenset[int]) -> int:
        """Have the server read a slot from a file. Returns how many tokens it has restored."""
        body = {"filename": path.name}
        answer = self.call(f"/slots/{slot}?action=restore", body, SLOT_S, sockets)
        return int(answer["n_restored"])

    def erase_slot(self, slot: int) -> None:
        self.call(f"/slots/{slot}?action=erase", {"filename": ""}, SLOT_S)

    def send_empty_request(self, slot: int, token: int, options: dict[str, Any]) -> None:
        """Make a request with these options the slot's last one: one token, no answer."""
        request = {"prompt": [token], "n_predict": 0, "id_slot": slot, "cache_prompt": False}
        self.call("/completion", {**request, **options}, SLOT_S)

    def listening(self) -> frozenset[int]:
        """The inodes of the sockets of this machine that listen on the server's port."""
        found = set()
        for name in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                    fields = line.split()
                    port = int(fields[1].rpartition(":")[2], 16)
                    if port == self.port and fields[3] == _LISTENING:
                        found.add(int(fields[9]))
        return frozenset(found)


@dataclass(frozen=True, slots=True)
class LoadedLoras:
    """The LoRAs of one run of a server.

    A server loads LoRAs when it starts. Their scales change while it runs: for all requests by
    `POST /lora-adapters`, for one by its `lora`. The server's own caches do not distinguish KV of
    different scales. So a request is sent with the scales that its blocks are named by, and uses
    only the KV in its slot that the depot has just put there.
    """

    digests: tuple[str, ...] = ()
    """The digests of their files, by their numbers."""

    @classmethod
    def of(cls, link: LlamaServerLink, memo: Path | None, began_ns: int) -> "LoadedLoras":
        """Ask a server for its LoRAs, and read their files. ModelError for one that cannot be
        served."""
        digests = []
        for number, lora in enumerate(link.call("/lora-adapters")):
            path = Path(str(lora["path"]))
            if lora["id"] != number:
                raise ModelError("llama-server numbers its LoRAs in an unknown way")
            if lora.get("alora_invocation_tokens"):
                raise ModelError(
                    f"{path} is an activated LoRA: the KV of a prefix depends on what follows it"
                )
            digests.append(gguf_digest(path, memo, began_ns))
        return cls(tuple(digests))

    def __bool__(self) -> bool:
        return bool(self.digests)

    def scales_of(self, link: LlamaServerLink, request: dict[str, Any]) -> Scales:
        """The scales that the server would use for a request. ModelError for invalid ones."""
        if not self.digests:
            return ()
        loras = request.get("lora") or link.call("/lora-adapters")
        if not isinstance(loras, list) or not all(isinstance(lora, dict) for lora in loras):
            raise ModelError("invalid LoRAs of a request or of llama-server (expected objects)")
        given = {lora.get("id"): float(np.float32(lora.get("scale", 0.0))) for lora in loras}
        return tuple(given.get(number, 0.0) for number in range(len(self.digests)))

    def name(self, scales: Scales) -> str:
        """A name for the namespace: every LoRA by its bytes, with its scale."""
        pairs = zip(self.digests, scales, strict=True)
        return " ".join(f"{digest}×{scale}" for digest, scale in pairs)

    def options(self, scales: Scales) -> dict[str, Any]:
        """The part of a request that sets these scales, also if the server's change meanwhile."""
        if not self.digests:
            return {}
        return {"lora": [{"id": number, "scale": scale} for number, scale in enumerate(scales)]}


@dataclass(frozen=True, slots=True)
class PromptTiming:
    """The timings in an answer: tokens of the prompt that were computed, tokens that were in the
    slot, and tokens of the answer."""

    computed: int
    cached: int
    predicted: int
    prompt_s: float | None
    """The time to compute the prompt."""


def read_timing(tail: bytes) -> PromptTiming | None:
    """Reads the `timings` in the last bytes of an answer; None without them."""
    try:
        found = {name: float(value) for name, value in _TIMINGS.findall(tail)}
        names = (b"prompt_n", b"cache_n", b"predicted_n")
        computed, cached, predicted = (int(found[name]) for name in names)
    except (KeyError, ValueError, OverflowError):
        return None
    took_ms = found.get(b"prompt_ms", 0.0)
    return PromptTiming(computed, cached, predicted, took_ms / 1e3 if 0 < took_ms < inf else None)
