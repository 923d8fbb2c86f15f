"""What stores of a site tell each other: JSON, of a bounded size, with a version.

    kvdepot.SITE.changed    a store has published something in the bucket or folder that they share
    kvdepot.SITE.hint       a prompt will be wanted on a node, within so many seconds

A message is word of what may be so. What it leads to is a look, or reads that are verified as all
are: one that is forged or stale costs time.
"""

import json
import math
from dataclasses import dataclass
from typing import Any, Final

from kvdepot.core.block import KEY_BYTES, BlockKey

VERSION: Final = 1
MESSAGE_BYTES_MAX: Final = 1_000_000
"""A server takes 1 MiB, unless it is set up otherwise."""
KEYS_MAX: Final = 8192
TOKENS_MAX: Final = 1 << 17
WITHIN_S_MAX: Final = 3600.0
_TEXT_MAX: Final = 400
_TOKEN_LIMIT: Final = 1 << 32


class MalformedMessageError(Exception):
    """Not a message that this program knows."""


def subject(site: str, kind: str) -> str:
    """Where messages of a kind go."""
    return f"kvdepot.{site}.{kind}"


@dataclass(frozen=True, slots=True)
class ChangedMessage:
    """A store has published something."""

    sender: str
    """A name that each opening of a store makes for itself."""

    def pack(self) -> bytes:
        return json.dumps({"v": VERSION, "from": self.sender}).encode()

    @classmethod
    def parse(cls, raw: bytes) -> "ChangedMessage":
        return cls(_text(_opened(raw), "from"))


@dataclass(frozen=True, slots=True)
class HintMessage:
    """A prompt that will be wanted: a session's, or by its keys, or by its tokens."""

    node: str
    """Where; empty: on every node."""
    within_s: float
    """How soon, from now: no clock is compared with another machine's."""
    session: str = ""
    tenant: str = ""
    """Whose session it is."""
    keys: tuple[BlockKey, ...] = ()
    """Of one prompt in one namespace, head first."""
    tokens: tuple[int, ...] = ()
    model: str = ""
    """Of the tokens; empty: all models."""

    def __post_init__(self) -> None:
        given = [name for name in ("session", "keys", "tokens") if getattr(self, name)]
        if len(given) != 1:
            raise MalformedMessageError("names not one of a session, keys and tokens")
        if len(self.keys) > KEYS_MAX or len(self.tokens) > TOKENS_MAX:
            raise MalformedMessageError("is too long")
        if not (0 <= self.within_s <= WITHIN_S_MAX and math.isfinite(self.within_s)):
            raise MalformedMessageError(f"is not for 0 to {WITHIN_S_MAX:.0f} seconds from now")

    def pack(self) -> bytes:
        """MalformedMessageError if it is too long to be sent."""
        told: dict[str, Any] = {"v": VERSION, "node": self.node, "within_s": self.within_s}
        texts = {"session": self.session, "tenant": self.tenant, "model": self.model}
        told |= {name: text for name, text in texts.items() if text}
        if self.keys:
            told["keys"] = [key.hex() for key in self.keys]
        if self.tokens:
            told["tokens"] = list(self.tokens)
        raw = json.dumps(told, separators=(",", ":")).encode()
        if len(raw) > MESSAGE_BYTES_MAX:
            raise MalformedMessageError("is too long")
        return raw

    @classmethod
    def parse(cls, raw: bytes) -> "HintMessage":
        told = _opened(raw)
        within_s = told.get("within_s")
        if isinstance(within_s, bool) or not isinstance(within_s, int | float):
            raise MalformedMessageError("within_s is no number")
        return cls(
            node=_text(told, "node"),
            within_s=float(within_s),
            session=_text(told, "session"),
            tenant=_text(told, "tenant"),
            keys=tuple(map(_key, _list(told, "keys", KEYS_MAX))),
            tokens=tuple(map(_token, _list(told, "tokens", TOKENS_MAX))),
            model=_text(told, "model"),
        )


def _opened(raw: bytes) -> dict[str, Any]:
    if len(raw) > MESSAGE_BYTES_MAX:
        raise MalformedMessageError("is too long")
    try:
        told = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise MalformedMessageError("is not JSON") from error
    if not isinstance(told, dict) or told.get("v") != VERSION:
        raise MalformedMessageError("is of another version")
    return told


def _text(told: dict[str, Any], name: str) -> str:
    value = told.get(name, "")
    if not isinstance(value, str) or len(value) > _TEXT_MAX or not value.isprintable():
        raise MalformedMessageError(f"{name} is no text")
    return value


def _list(told: dict[str, Any], name: str, most: int) -> list[Any]:
    value = told.get(name, [])
    if not isinstance(value, list) or len(value) > most:
        raise MalformedMessageError(f"{name} is no list, or too long")
    return value


def _key(value: Any) -> BlockKey:
    try:
        key = bytes.fromhex(value)
    except (TypeError, ValueError) as error:
        raise MalformedMessageError("has a key that is none") from error
    if len(key) != KEY_BYTES:
        raise MalformedMessageError("has a key that is none")
    return BlockKey(key)


def _token(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _TOKEN_LIMIT:
        raise MalformedMessageError("has a token that is none")
    return value
