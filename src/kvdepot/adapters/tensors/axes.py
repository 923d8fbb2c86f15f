"""Names of tensor axes, and the order in which a block's payload runs through them.

batch and page only select: they are no part of the payload. "token" in an order stands for page
and token together, so that a payload does not depend on how an engine cuts its pages.
"""

from collections.abc import Sequence
from typing import Final

from kvdepot.errors import ConfigError

NAMES: Final = ("layer", "batch", "kv", "page", "token", "head", "dim")
PAYLOAD: Final = ("kv", "token", "head", "dim")
DEFAULT_ORDER: Final = "kv token head dim"


def parse(setting: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """The names in `text`, each once and each among `known`; else a ConfigError for `setting`."""
    names = tuple(text.split())
    for name in names:
        if name not in known:
            raise ConfigError(setting, f"{name!r} is not one of {', '.join(known)}")
        if names.count(name) > 1:
            raise ConfigError(setting, f"{name!r} is named twice")
    return names


def tensor_axes(text: str, *, planes: bool) -> tuple[str, ...]:
    """The axes of one layer's tensor; with `planes` a tuple of tensors stands for the kv axis."""
    names = parse("axes", text, [name for name in NAMES if name != "layer"])
    for name in ("token", "dim"):
        if name not in names:
            raise ConfigError("axes", f"{name!r} is missing in {text!r}")
    if "batch" in names and "page" in names:
        raise ConfigError("axes", "pages belong to no batch: name one of batch and page")
    if planes and "kv" in names:
        raise ConfigError("axes", "a tuple of tensors is the kv axis: its tensors have none")
    return names


def payload_order(text: str, present: Sequence[str]) -> tuple[str, ...]:
    """The payload axes that are `present`, outermost first; page goes before its token."""
    names = parse("order", text, PAYLOAD)
    for name in present:
        if name in PAYLOAD and name not in names:
            raise ConfigError("order", f"{name!r} is missing in {text!r}")
    order = [name for name in names if name in present]
    if "page" in present:
        order.insert(order.index("token"), "page")
    return tuple(order)
