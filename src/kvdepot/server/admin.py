"""AdminRequests to a store while it is served. For the daemon's own user and root only."""

import json
import os
from collections.abc import Callable
from typing import Any, Final

from kvdepot.errors import ConfigError, KVDepotError, StateError, WireError
from kvdepot.store.store import Store
from kvdepot.wire import messages
from kvdepot.wire.frames import Channel, Frame, FrameKind


class AdminRequests:
    """Serves what the person on call asks for, over one connection."""

    def __init__(self, channel: Channel, store: Store) -> None:
        self._channel = channel
        self._calls: Final[dict[str, Callable[[str, str], int | None]]] = {
            "set_write_mode": store.set_write_mode,
            "add_drive": store.add_drive,
            "drain_drive": store.drain_drive,
            "resize": store.resize,
            "record": lambda _, path: store.record(path),
            "stop_recording": lambda *_: store.stop_recording(),
        }
        self.handlers: Final[dict[FrameKind, Callable[[Frame], None]]] = {
            FrameKind.CHANGE: self._change
        }

    def _change(self, frame: Frame) -> None:
        call, tier, value = self._asked(bytes(frame.body))
        try:
            self._check_allowed()
            result = call(tier, value)
        except StateError:
            raise
        except (KVDepotError, OSError, ValueError) as error:
            self._refuse(frame, tier, error)
        else:
            body = messages.Number(result or 0).body()
            self._channel.send(FrameKind.NUMBER, frame.serial, body)

    def _asked(self, body: bytes) -> tuple[Callable[[str, str], int | None], str, str]:
        try:
            said: Any = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise WireError("a change that is no JSON") from error
        if not isinstance(said, dict) or set(said) != {"call", "tier", "value"}:
            raise WireError("a change of another form")
        if not all(isinstance(part, str) for part in said.values()):
            raise WireError("a change of another form")
        if said["call"] not in self._calls:
            raise WireError(f"an unknown change {said['call']!r:.40}")
        return self._calls[said["call"]], said["tier"], said["value"]

    def _check_allowed(self) -> None:
        """By who is at the other end, as the kernel knows it."""
        peer = self._channel.peer()
        if peer.uid not in (0, os.getuid()):
            raise ConfigError(
                "daemon",
                f"user {peer.uid} may use the store, not change its tiers",
                hint=f"ask as root, or as the daemon's user ({os.getuid()})",
            )

    def _refuse(self, frame: Frame, tier: str, error: Exception) -> None:
        path = getattr(error, "path", "") or tier
        hint = getattr(error, "hint", "")
        refusal = {"path": str(path), "reason": str(error)[:2000], "hint": hint}
        self._channel.send(FrameKind.REFUSED, frame.serial, json.dumps(refusal).encode())
