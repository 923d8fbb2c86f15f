"""Changes values in the text of a TOML file; everything else, including comments, is kept."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvdepot.config.loader import toml_value
from kvdepot.errors import ConfigError

_KEY: Final = re.compile(r"\s*([\w\-.\"' ]+?)\s*=")
Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Statement:
    """A table header, an assignment, or other lines."""

    text: str
    table: Path
    """The table that contains the statement, or that a header starts."""
    key: Path = ()
    """The full name of the assigned key; empty if it is not an assignment."""


def set_values(text: str, changes: Mapping[str, Any]) -> str:
    """Returns `text` with the values of dotted names changed or added.

    ConfigError if that would change other values.
    """
    expected = tomllib.loads(text)
    for name, value in changes.items():
        *above, last = name.split(".")
        tree = expected
        for part in above:
            tree = tree.setdefault(part, {})
            if not isinstance(tree, dict):
                raise ConfigError(name, f"{part} is not a table in this file")
        tree[last] = value
        text = _set_one(text, tuple(name.split(".")), toml_value(value))
    try:
        done = tomllib.loads(text) == expected
    except tomllib.TOMLDecodeError:
        done = False
    if not done:
        names = ", ".join(changes)
        reason = "cannot be changed without changing other values of the file"
        raise ConfigError(names, reason, hint="edit the file by hand")
    return text


def _set_one(text: str, name: Path, value: str) -> str:
    statements = list(_statements(text))
    for number, statement in enumerate(statements):
        if statement.key == name:
            before = statement.text[: statement.text.index("=") + 1]
            changed = f"{before} {value}{_comment(statement.text)}\n"
            return _joined(statements[:number], changed, statements[number + 1 :])
    for number, statement in enumerate(statements, start=1):
        is_header = not statement.key and statement.text.lstrip().startswith("[")
        if is_header and statement.table == name[:-1]:
            return _joined(statements[:number], f"{name[-1]} = {value}\n", statements[number:])
    table = ".".join(name[:-1])
    return f"{text.rstrip()}\n\n[{table}]\n{name[-1]} = {value}\n".lstrip()


def _joined(before: list[Statement], between: str, after: list[Statement]) -> str:
    head = "".join(one.text for one in before)
    if head and not head.endswith("\n"):
        head += "\n"
    return head + between + "".join(one.text for one in after)


def _statements(text: str) -> Iterator[Statement]:
    lines = text.splitlines(keepends=True)
    table: Path = ()
    start = 0
    while start < len(lines):
        end = start + 1
        while (tree := _parsed("".join(lines[start:end]))) is None and end < len(lines):
            end += 1  # an array or a text of several lines
        piece = "".join(lines[start:end])
        key = _KEY.match(piece)
        if piece.lstrip().startswith("[") and tree is not None:
            table = tuple(_only_path(tree))
            yield Statement(piece, table)
        elif key and tree and (path := _parsed(f"{key[1]} = 0")) is not None:
            yield Statement(piece, table, (*table, *_only_path(path)))
        else:
            yield Statement(piece, table)
        start = end


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def _only_path(tree: Any) -> Iterator[str]:
    while isinstance(tree, dict) and tree:
        name = next(iter(tree))
        yield name
        tree = tree[name]


def _comment(statement: str) -> str:
    """The comment after a value of one line; empty if there is none."""
    line = statement.rstrip("\n")
    if "\n" in line:
        return ""
    whole = _parsed(line)
    for match in re.finditer(r"\s*#", line):
        if _parsed(line[: match.start()]) == whole:
            return "  " + line[match.start() :].lstrip()
    return ""
