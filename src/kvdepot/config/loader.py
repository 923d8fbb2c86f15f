"""Builds a tree of frozen dataclasses from TOML, environment and overrides, and writes it as TOML.

The type of a field determines how its value is read: `Annotated[int, Unit.BYTES]` takes "64GiB",
`Annotated[float, Unit.SECONDS]` takes "250ms", a tuple takes one value or a list, `X | None` takes
"none", a class with a `SHORTHAND` takes that field's value alone. The string under a field is its
documentation and becomes the comment in `to_toml`.
"""

import ast
import builtins
import contextlib
import dataclasses
import difflib
import functools
import inspect
import json
import math
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar

from kvdepot.core.units import exact_bytes, exact_duration, parse_bytes, parse_duration
from kvdepot.errors import ConfigError

REMOVED_SETTINGS: Final[dict[str, str]] = {
    "cxl.lock": "removed in 0.3.0: dram.lock locks this memory too",
    "cxl.prefault": "removed in 0.3.0: dram.prefault touches this memory too",
    "events.memory_medium": "removed in 0.3.0: it is CPU, which routers know",
    "events.storage_medium": "removed in 0.3.0: it is STORAGE, which routers know",
    "hdd.emulate": "removed in 0.3.0: use the plug-in kvdepot.testing.emulation:emulated_drive",
    "hdd.io_engine": "removed in 0.3.0: io_uring is used where the kernel allows it, else threads",
    "hdd.mirror": "removed in 0.3.0: use RAID 1 below the drive",
    **{
        f"ledger.{tier}_price": "removed in 0.3.0: `kvdepot plan` has what tiers cost"
        for tier in ("cxl", "dram", "hdd", "object", "plugin", "ssd")
    },
    "plugin.eviction": "removed in 0.3.0: it is the default order",
    "plugin.promote": "removed in 0.3.0: blocks that are read are copied into memory",
    "sessions.keep_max": "removed in 0.3.0: a pin lasts 366 days at most",
    "ssd.emulate": "removed in 0.3.0: use the plug-in kvdepot.testing.emulation:emulated_drive",
    "ssd.io_engine": "removed in 0.3.0: io_uring is used where the kernel allows it, else threads",
    "ssd.mirror": "removed in 0.3.0: use RAID 1 below the drive",
    "writeback.batch": "removed in 0.3.0: one write to a drive has 32MiB at most",
}
"""Error for each setting of an older version: the release that removed it and the replacement."""

T = TypeVar("T")
Tree = dict[str, Any]

_TRUE: Final = ("true", "1", "yes", "on")
_FALSE: Final = ("false", "0", "no", "off")
_MASK: Final = "***"
_COMMENT_WIDTH: Final = 96
_SERVICE_NAME: Final = re.compile(
    r"(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT(?:_\d+_(?:TCP|UDP|SCTP)\w*)?)"
)
_SERVICE_VALUE: Final = re.compile(r"(?:tcp|udp|sctp)(?:://.*)?|\d+|\d+(?:\.\d+){3}|[0-9a-f:]+")


class Unit(Enum):
    """The unit of a number in the configuration; marks a field by Annotated."""

    BYTES = "bytes"
    SECONDS = "seconds"


class Secret(Enum):
    """Marks a field by Annotated whose value is never shown."""

    HIDDEN = "hidden"


def load_settings(cls: type[T], given: Mapping[str, Any], setting: str) -> T:
    """A `cls` from the values that an engine was given as `setting`, which errors name."""
    try:
        return load_tree(cls, prefix="", env={}, overrides=given)
    except ConfigError as error:
        reason = str(error).removeprefix(f"{error.path}: ")
        raise ConfigError(f"{setting}.{error.path}", reason, hint=error.hint) from error


def load_tree(
    cls: type[T],
    path: Path | str | None = None,
    *,
    prefix: str,
    env: Mapping[str, str],
    overrides: Mapping[str, Any],
) -> T:
    """A `cls` from its defaults, the TOML file, `env` and `overrides`; later sources win.

    Names in `env` without `prefix` are ignored, and those that Kubernetes sets for a service;
    PREFIX_SSD__PATH is ssd.path. `overrides` may be nested and its top-level names dotted. An
    unknown key in any source is a ConfigError.
    """
    sources: list[Tree] = [_read_toml(Path(path))] if path is not None else []
    for name in sorted(env):
        setting = name.removeprefix(prefix)
        if name.startswith(prefix) and not _is_set_by_kubernetes(setting, env[name]):
            sources.append(_nest(setting.lower().split("__"), env[name]))
    sources += [_nest(name.split("."), value) for name, value in overrides.items()]
    tree: Tree = {}
    for source in sources:
        tree = _merge(tree, _normalise(cls, source, ""))
    return typing.cast(T, _build(cls, tree, ""))


def _is_set_by_kubernetes(name: str, value: str) -> bool:
    """True for PORT=tcp://10.0.0.1:80, SERVICE_HOST=10.0.0.1 and the like.

    A pod has such variables for each service of its namespace, prefixed with the service's name.
    """
    if "__" in name or not _SERVICE_NAME.fullmatch(name):
        return False
    return _SERVICE_VALUE.fullmatch(value) is not None


def _read_toml(path: Path) -> Tree:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), f"is not UTF-8 text: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), f"is not valid TOML: {error}") from error


def _nest(names: list[str], value: Any) -> Tree:
    for name in reversed(names):
        value = {name: value}
    return typing.cast(Tree, value)


def _merge(low: Any, high: Any) -> Any:
    if isinstance(low, dict) and isinstance(high, dict):
        return {**low, **{name: _merge(low.get(name), value) for name, value in high.items()}}
    return high


def _normalise(hint: Any, value: Any, path: str) -> Any:
    """`value` as nested dicts, with shorthands, inline tables and objects expanded."""
    shape = _shape(hint)
    if value is None or not shape.is_table or (shape.optional and _is_none(value)):
        return value
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _inline(value, path)
    if shape.is_class and isinstance(value, shape.base):
        value = {name: getattr(value, name) for name in _hints(shape.base)}
    if not isinstance(value, Mapping):
        shorthand = getattr(shape.base, "SHORTHAND", None)
        if shorthand is None:
            return value
        value = {shorthand: value}
    hints = _hints_for(shape, value, path)
    return {name: _normalise(hints[name], item, _join(path, name)) for name, item in value.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class _Shape:
    """The parts of a field's type."""

    base: Any
    marks: tuple[Any, ...]
    optional: bool

    @property
    def is_class(self) -> bool:
        return dataclasses.is_dataclass(self.base)

    @property
    def is_table(self) -> bool:
        return self.is_class or typing.get_origin(self.base) is dict

    @property
    def has_tables(self) -> bool:
        """True if the field is written as separate tables, not in one line."""
        return self.is_class or (self.is_table and _shape(typing.get_args(self.base)[1]).is_class)


def _shape(hint: Any) -> _Shape:
    marks: tuple[Any, ...] = ()
    if typing.get_origin(hint) is typing.Annotated:
        hint, *rest = typing.get_args(hint)
        marks = tuple(rest)
    optional = typing.get_origin(hint) in (types.UnionType, typing.Union)
    if optional:
        (hint,) = (arm for arm in typing.get_args(hint) if arm is not types.NoneType)
    return _Shape(hint, marks, optional)


def _is_none(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.lower() == "none")


def _hints_for(shape: _Shape, value: Mapping[Any, Any], path: str) -> Mapping[str, Any]:
    """The type of each name in `value`. Raises ConfigError for a name that the class lacks."""
    for name in value:
        if not isinstance(name, str):
            raise ConfigError(path, f"names must be text, got {name!r}")
    if not shape.is_class:
        return dict.fromkeys(value, typing.get_args(shape.base)[1])
    hints = _hints(shape.base)
    for name in value:
        if name not in hints:
            if removed := REMOVED_SETTINGS.get(_join(path, name)):
                raise ConfigError(_join(path, name), removed)
            close = difflib.get_close_matches(name, hints, n=1)
            raise ConfigError(
                _join(path, name),
                f"unknown key; known: {', '.join(hints)}",
                hint=f"did you mean {_join(path, close[0])}?" if close else "",
            )
    return hints


@functools.cache
def _hints(cls: type) -> Mapping[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {item.name: hints[item.name] for item in dataclasses.fields(cls)}


def _inline(text: str, path: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(path, f"is not a TOML value: {error}") from error


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _build(cls: Any, tree: Any, path: str) -> Any:
    missing = dataclasses.MISSING
    required = [
        item.name
        for item in dataclasses.fields(cls)
        if item.default is missing and item.default_factory is missing
    ]
    if not isinstance(tree, Mapping):
        needs = f" with {' and '.join(required)}" if required else ""
        example = ", ".join(f"{name} = ..." for name in required)
        raise ConfigError(
            path,
            f"needs a table{needs}, not a single value",
            hint=f"write {path} = {{ {example} }}, or set {path}.{required[0]}" if required else "",
        )
    for name in required:
        if name not in tree:
            raise ConfigError(_join(path, name), "missing; it has no default")
    hints = _hints(cls)
    return cls(**{name: _convert(hints[name], tree[name], _join(path, name)) for name in tree})


def _convert(hint: Any, value: Any, path: str) -> Any:
    shape = _shape(hint)
    if shape.optional and _is_none(value):
        return None
    if shape.is_class:
        return _build(shape.base, value, path)
    match typing.get_origin(shape.base):
        case builtins.dict:
            return _convert_dict(shape.base, value, path)
        case builtins.tuple:
            return _convert_tuple(shape.base, value, path)
        case typing.Literal:
            choices = typing.get_args(shape.base)
            if value not in choices:
                raise ConfigError(path, f"{value!r} is not one of {', '.join(map(str, choices))}")
            return value
    reader: Callable[[Any], Any] = _READERS[shape.marks[0] if shape.marks else shape.base]
    try:
        return reader(value)
    except ValueError as error:
        raise ConfigError(path, str(error)) from error


def _convert_dict(hint: Any, value: Any, path: str) -> dict[str, Any]:
    item = typing.get_args(hint)[1]
    if not isinstance(value, Mapping):
        content = "tables" if _shape(item).is_class else "values"
        raise ConfigError(path, f"needs a table of {content}")
    return {name: _convert(item, content, _join(path, name)) for name, content in value.items()}


def _convert_tuple(hint: Any, value: Any, path: str) -> tuple[Any, ...]:
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _inline(value, path)
    items = value if isinstance(value, list | tuple) else [value]
    element = typing.get_args(hint)[0]
    return tuple(_convert(element, item, path) for item in items)


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in (*_TRUE, *_FALSE):
        return value.lower() in _TRUE
    raise ValueError(f"{value!r} is not true or false")


def _integer(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d{1,30}\s*", value):
        return int(value)
    raise ValueError(f"{value!r} is not a whole number")


def _number(value: Any) -> float:
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            if math.isfinite(number := float(value)):
                return number
    raise ValueError(f"{value!r} is not a number")


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"{value!r} is not text")


def _hidden(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ValueError("is not text")


def _path(value: Any) -> Path:
    if isinstance(value, Path):
        return value
    if not _text(value).strip() or "\0" in value:
        raise ValueError(f"{value!r} is not a path")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{value!r} has no home directory to start from") from error


_READERS: Final[dict[Any, Callable[[Any], Any]]] = {
    Unit.BYTES: parse_bytes,
    Unit.SECONDS: parse_duration,
    Secret.HIDDEN: _hidden,
    bool: _boolean,
    int: _integer,
    float: _number,
    str: _text,
    Path: _path,
}


def show(config: Any) -> dict[str, Any]:
    """The values of a dataclass tree for JSON, sizes and times with units, secrets masked."""
    cls: Any = type(config)
    hints = _hints(cls)
    return {
        item.name: _shown(hints[item.name], getattr(config, item.name))
        for item in _shown_fields(type(config), config)
    }


def developer_options(cls: type) -> frozenset[str]:
    """The fields of a class that are no settings: accepted, and not part of the reference."""
    return frozenset(getattr(cls, "DEVELOPER", "").split())


def _shown_fields(cls: type, config: Any) -> "Iterator[dataclasses.Field[Any]]":
    """The settings of a class, and the developer options of `config` that are not the default."""
    for item in dataclasses.fields(cls):
        is_hidden = item.name in developer_options(cls)
        if not is_hidden or (config and getattr(config, item.name) != _default(item)):
            yield item


def _shown(hint: Any, value: Any) -> Any:
    shape = _shape(hint)
    if Secret.HIDDEN in shape.marks:
        return _MASK if value else ""
    if value is None:
        return None
    if Unit.BYTES in shape.marks:
        return exact_bytes(value)
    if Unit.SECONDS in shape.marks:
        return exact_duration(value)
    if dataclasses.is_dataclass(value):
        return show(value)
    if isinstance(value, dict):
        return {name: _shown(typing.get_args(shape.base)[1], item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_shown(typing.get_args(shape.base)[0], item) for item in value]
    return str(value) if isinstance(value, Path) else value


def to_toml(config: Any) -> str:
    """`config` as TOML with every field and its documentation; unset fields are comments.

    Loading the text gives an equal tree, except for secrets, which are left out.
    """
    return "\n".join(_table_lines(type(config), config, "")).strip() + "\n"


def _table_lines(cls: type, config: Any, path: str) -> list[str]:
    """The lines of one table; a template with the defaults when `config` is None."""
    lines: list[str] = []
    tables: list[str] = []
    for item in _shown_fields(cls, config):
        shape, comment = _shape(_hints(cls)[item.name]), _field_docs(cls).get(item.name, "")
        value = _default(item) if config is None else getattr(config, item.name)
        if shape.has_tables:
            tables += ["", *_comment(comment), *_subtables(shape, value, _join(path, item.name))]
        else:
            lines += [*_comment(comment), _assignment(item.name, _hints(cls)[item.name], value)]
    return lines + tables


def _default(item: "dataclasses.Field[Any]") -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return None if item.default is dataclasses.MISSING else item.default


def _subtables(shape: _Shape, value: Any, path: str) -> list[str]:
    if shape.is_class:
        named = {path: value}
        cls = shape.base
    else:
        cls = typing.get_args(shape.base)[1]
        named = {f"{path}.{_toml_key(name)}": item for name, item in value.items()}
    lines: list[str] = []
    for name, item in (named or {f"{path}.NAME": None}).items():
        for line in (f"[{name}]", *_table_lines(cls, item, name)):
            is_set = item is not None or line.startswith("#") or not line
            lines.append(line if is_set else f"# {line}")
    return lines


def _assignment(name: str, hint: Any, value: Any) -> str:
    if Secret.HIDDEN in _shape(hint).marks:
        return f"# {name} = {'(set, not shown)' if value else '...'}"
    shown = _shown(hint, value)
    return f"# {name} = ..." if shown is None else f"{name} = {toml_value(shown)}"


def toml_value(value: Any) -> str:
    """A value as TOML writes it, on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        pairs = [f"{_toml_key(name)} = {toml_value(item)}" for name, item in value.items()]
        return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, _COMMENT_WIDTH)]


@functools.cache
def _field_docs(cls: type) -> Mapping[str, str]:
    """The documentation of each field; empty if the source is not available."""
    docs: dict[str, str] = {}
    for owner in reversed(cls.__mro__[:-1]):
        with contextlib.suppress(OSError):
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
            for field, below in pairwise(node.body if isinstance(node, ast.ClassDef) else ()):
                match field, below:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(ast.Constant(str(text))),
                    ):
                        docs[name] = " ".join(text.split())
    return docs
