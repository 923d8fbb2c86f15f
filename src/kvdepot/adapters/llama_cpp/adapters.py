"""The LoRAs of a llama-server: which are loaded, and which are in force for a request.

A server loads LoRAs when it starts. Their scales change while it runs: for all requests by
`POST /lora-adapters`, for one by its `lora`. The server's own caches do not tell KV of one set of
scales from KV of another. So a request is sent with the scales that its blocks are named by, and
uses nothing that was in its slot but what the depot has just put there.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvdepot.adapters.llama_cpp.blocks import gguf_digest
from kvdepot.errors import ModelError

Scales = tuple[float, ...]
"""How strong each loaded LoRA is, by its number; 0: it is off."""


class RequestLink(Protocol):
    """What can ask a llama-server."""

    def call(self, path: str) -> Any:
        """The JSON answer to a GET."""


@dataclass(frozen=True, slots=True)
class ServerAdapters:
    """The LoRAs of one run of a server."""

    digests: tuple[str, ...] = ()
    """Of their files, by their numbers."""

    def __bool__(self) -> bool:
        return bool(self.digests)

    def in_force(self, link: RequestLink, request: dict[str, Any]) -> Scales:
        """The scales that the server would use for a request. ModelError: they make no sense."""
        if not self.digests:
            return ()
        if request.get("lora"):
            return self._read(request["lora"])
        return self._read(link.call("/lora-adapters"))

    def name(self, scales: Scales) -> str:
        """For the namespace: every LoRA by its bytes, with its scale."""
        pairs = zip(self.digests, scales, strict=True)
        return " ".join(f"{digest}×{scale}" for digest, scale in pairs)

    def pinned(self, scales: Scales) -> dict[str, Any]:
        """The part of a request that has the server use these scales, whatever it is told
        meanwhile."""
        if not self.digests:
            return {}
        return {"lora": [{"id": at, "scale": scale} for at, scale in enumerate(scales)]}

    def _read(self, entries: object) -> Scales:
        """As the server reads them: a LoRA that is not named is off."""
        if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
            raise ModelError("the LoRAs of a request or of llama-server make no sense")
        given = {one.get("id"): float(np.float32(one.get("scale", 0.0))) for one in entries}
        return tuple(given.get(at, 0.0) for at in range(len(self.digests)))


def load_adapters(link: RequestLink, memo: Path | None, began_ns: int) -> ServerAdapters:
    """Ask a server for its LoRAs, and read their files. ModelError for one that is not served."""
    digests = []
    for number, adapter in enumerate(link.call("/lora-adapters")):
        path = Path(str(adapter["path"]))
        if adapter["id"] != number:
            raise ModelError("llama-server numbers its LoRAs in an unknown way")
        if adapter.get("alora_invocation_tokens"):
            raise ModelError(
                f"{path} is an activated LoRA: the KV of a prefix depends on what follows it"
            )
        digests.append(gguf_digest(path, memo, began_ns))
    return ServerAdapters(tuple(digests))
