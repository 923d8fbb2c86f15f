"""The messages between the stores of a site: JSON of a bounded size, with a version.

    kvdepot.SITE.changed    a store has published something in the bucket or folder that they share
    kvdepot.SITE.hint       a prompt will be needed on a node, within a number of seconds

Messages are hints; the bucket is the source of truth. A message causes a refresh or verified reads,
so that a forged or stale one only costs time.
"""

import json
import math
from dataclasses import dataclass
from typing import Any, Final

from kvdepot.core.block import KEY_BYTES, BlockKey

VERSION: Final = 1
MESSAGE_BYTES_MAX: Final = 1_000_000
"""Below 1 MiB, the default limit of servers."""
KEYS_MAX: Final = 8192
TOKENS_MAX: Final = 1 << 17
WITHIN_S_MAX: Final = 3600.0
_TEXT_MAX: Final = 400
_TOKEN_LIMIT: Final = 1 << 32


class MalformedMessageError(Exception):
    """The message is malformed, or of a version that this program does not know."""


def subject(site: str, kind: str) -> str:
    """The NATS subject of the messages of one kind."""
    return f"kvdepot.{site}.{kind}"


@dataclass(frozen=True, slots=True)
class ChangedMessage:
    """A store has published changes in the shared tier."""

    sender: str
    """A random name of one opening of a store."""

    def pack(self) -> bytes:
        return json.dumps({"v": VERSION, "from": self.sender}).encode()

    @classmethod
    def parse(cls, raw: bytes) -> "ChangedMessage":
        return cls(_text(_opened(raw), "from"))


@dataclass(frozen=True, slots=True)
class HintMessage:
    """A prompt that will be needed, given by its session, its keys or its tokens."""

    node: str
    """The node that needs it; empty: every node."""
    within_s: float
    """Seconds from now, because clocks of machines are not compared."""
    session: str = ""
    tenant: str = ""
    """The tenant of the session."""
    keys: tuple[BlockKey, ...] = ()
    """Keys of one prompt in one namespace, head first."""
    tokens: tuple[int, ...] = ()
    model: str = ""
    """Model of the tokens; empty: all models."""

    def __post_init__(self) -> None:
        given = [name for name in ("session", "keys", "tokens") if getattr(self, name)]
        if len(given) != 1:
            raise MalformedMessageError("must have exactly one of session, keys and tokens")
        if len(self.keys) > KEYS_MAX or len(self.tokens) > TOKENS_MAX:
            raise MalformedMessageError("is too long")
        if not (0 <= self.within_s <= WITHIN_S_MAX and math.isfinite(self.within_s)):
            raise MalformedMessageError(f"within_s is not 0 to {WITHIN_S_MAX:.0f} seconds from now")

    def pack(self) -> bytes:
        """Serialize the message. MalformedMessageError if it is too long."""
        fields: dict[str, Any] = {"v": VERSION, "node": self.node, "within_s": self.within_s}
        texts = {"session": self.session, "tenant": self.tenant, "model": self.model}
        fields |= {name: text for name, text in texts.items() if text}
        if self.keys:
            fields["keys"] = [key.hex() for key in self.keys]
        if self.tokens:
            fields["tokens"] = list(self.tokens)
        raw = json.dumps(fields, separators=(",", ":")).encode()
        if len(raw) > MESSAGE_BYTES_MAX:
            raise MalformedMessageError("is too long")
        return raw

    @classmethod
    def parse(cls, raw: bytes) -> "HintMessage":
        fields = _opened(raw)
        within_s = fields.get("within_s")
        if isinstance(within_s, bool) or not isinstance(within_s, int | float):
            raise MalformedMessageError("within_s is not a number")
        return cls(
            node=_text(fields, "node"),
            within_s=float(within_s),
            session=_text(fields, "session"),
            tenant=_text(fields, "tenant"),
            keys=tuple(map(_key, _list(fields, "keys", KEYS_MAX))),
            tokens=tuple(map(_token, _list(fields, "tokens", TOKENS_MAX))),
            model=_text(fields, "model"),
        )


def _opened(raw: bytes) -> dict[str, Any]:
    if len(raw) > MESSAGE_BYTES_MAX:
        raise MalformedMessageError("is too long")
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise MalformedMessageError("is not JSON") from error
    if not isinstance(fields, dict) or fields.get("v") != VERSION:
        raise MalformedMessageError("is of another version")
    return fields


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str) or len(value) > _TEXT_MAX or not value.isprintable():
        raise MalformedMessageError(f"{name} is not text")
    return value


def _list(fields: dict[str, Any], name: str, most: int) -> list[Any]:
    value = fields.get(name, [])
    if not isinstance(value, list) or len(value) > most:
        raise MalformedMessageError(f"{name} is not a list, or too long")
    return value


def _key(value: Any) -> BlockKey:
    try:
        key = bytes.fromhex(value)
    except (TypeError, ValueError) as error:
        raise MalformedMessageError("has an invalid key") from error
    if len(key) != KEY_BYTES:
        raise MalformedMessageError("has an invalid key")
    return BlockKey(key)


def _token(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _TOKEN_LIMIT:
        raise MalformedMessageError("has an invalid token")
    return value
