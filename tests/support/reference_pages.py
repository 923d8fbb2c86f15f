"""Makes the pages of docs/reference from the source: settings, Python calls, HTTP, the protocol.

python -m tests.support.reference_pages    write the pages
"""

import ast
import dataclasses
import inspect
import re
import struct
import textwrap
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import kvdepot
from kvdepot.config.loader import developer_options
from kvdepot.config.settings import Config
from kvdepot.core.admin import DepotAdmin, DepotVolumes
from kvdepot.core.audit import DepotAudits
from kvdepot.core.depot import Lease, PrefetchHint, Reservation
from kvdepot.core.sessions import DepotSessions
from kvdepot.core.units import format_bytes
from kvdepot.daemon.wire import frames, versions
from kvdepot.depot import Depot

FOLDER: Final = Path(__file__).parents[2] / "docs" / "reference"
WRITTEN: Final = "Written by `python -m tests.support.reference_pages`. Do not edit.\n"

DEVELOPER: Final = textwrap.fill(
    "For tests and experiments. They are accepted in every source and may change in any release. "
    "`kvdepot config show` prints one only if it differs from its default.",
    120,
)


def configuration() -> str:
    """Every setting, its default and what it does."""
    lines = ["# Configuration\n", WRITTEN]
    lines.append(
        textwrap.fill(
            "Settings come from a TOML file, from environment variables (`KVDEPOT_SSD__PATH` sets "
            "`ssd.path`) and from `--set ssd.path=/mnt/nvme/kv` or keyword arguments of "
            "`kvdepot.open`; the later wins. An unknown setting is an error that names the known "
            "ones. Sizes are written as 64GiB, times as 250ms.",
            120,
        )
    )
    for name, table in tables(Config):
        lines += ["", f"## {f'[{name}]' if name else 'Top level'}\n"]
        if name:
            lines += [" ".join((inspect.getdoc(table) or "").split()), ""]
        lines += ["| setting | default | |", "|---|---|---|", *rows(table)]
    lines += [
        "",
        "## Developer options\n",
        DEVELOPER,
        "",
        "| option | default | |",
        "|---|---|---|",
    ]
    for name, table in tables(Config):
        lines += rows(table, name)
    return "\n".join(lines) + "\n"


def tables(root: type) -> Iterator[tuple[str, type]]:
    """The tables of the configuration, the top level first."""
    yield "", root
    for field, hint in fields(root):
        nested = table_in(hint)
        if nested is not None:
            yield f"{field.name}.NAME" if "dict" in str(hint) else field.name, nested


def fields(table: type) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(table, include_extras=False)
    for field in dataclasses.fields(table):
        yield field, hints[field.name]


def table_in(hint: Any) -> type | None:
    found = [hint, *typing.get_args(hint)]
    return next((one for one in found if dataclasses.is_dataclass(one)), None)  # type: ignore[return-value]


def rows(table: type, developer: str | None = None) -> Iterator[str]:
    """The settings of a table; if its name is given as `developer`, its developer options."""
    said = meanings(table)
    for field, hint in fields(table):
        is_option = field.name in developer_options(table)
        if table_in(hint) is None and is_option == (developer is not None):
            name = f"{developer}.{field.name}" if developer else field.name
            yield f"| `{name}` | {default(field)} | {escaped(said.get(field.name, ''))} |"


def meanings(table: type) -> dict[str, str]:
    """The docstring below each field, those of the base classes too."""
    found: dict[str, str] = {}
    owners = [owner for owner in table.__mro__ if owner.__module__.startswith("kvdepot.")]
    for owner in reversed(owners):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(node, ast.ClassDef)
        for before, after in zip(node.body, node.body[1:], strict=False):
            match before, after:
                case (
                    ast.AnnAssign(target=ast.Name(id=name))
                    | ast.Assign(targets=[ast.Name(id=name)]),
                    ast.Expr(value=ast.Constant(value=text)),
                ):
                    found[name] = " ".join(str(text).split())
    return found


def default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return "required"
    value: Any = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value in (None, "", (), {}):
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if "Bytes" in str(field.type) or "BYTES" in str(field.type):
        return f"`{format_bytes(value).replace(' ', '')}`"
    if "Seconds" in str(field.type) or "SECONDS" in str(field.type):
        return f"`{seconds(value)}`"
    return f"`{value}`"


def seconds(value: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if value >= size and value % size == 0:
            return f"{value / size:g}{unit}"
    return f"{value * 1000:g}ms"


def escaped(text: str) -> str:
    return re.sub(r"`(kvdepot [^`]*)`", r"\1", text).replace("|", "\\|").replace("<", "&lt;")


CLASSES: Final = (
    ("Depot", Depot, "Returned by `kvdepot.open`."),
    ("depot.sessions", DepotSessions, ""),
    ("depot.volumes", DepotVolumes, ""),
    ("depot.audits", DepotAudits, ""),
    ("depot.admin", DepotAdmin, ""),
    ("Lease", Lease, ""),
    ("Reservation", Reservation, ""),
    ("PrefetchHint", PrefetchHint, ""),
)


def python() -> str:
    """The public calls and classes of the package."""
    lines = [
        "# Python\n",
        WRITTEN,
        "```text\n" + signature("kvdepot.open", kvdepot.open) + "\n```\n",
    ]
    lines += [inspect.getdoc(kvdepot.open) or "", ""]
    for name, owner, note in CLASSES:
        lines += [f"## {name}\n", note or paragraph(owner), ""]
        if note:
            lines += [paragraph(owner), ""]
        for call, function in calls_of(owner):
            lines += [f"### {name}.{call}\n", "```text", signature(call, function), "```\n"]
            lines += [paragraph(function), ""]
    lines += [
        "## Errors\n",
        "All are subclasses of `kvdepot.KVDepotError`; `error.hint` says what to do.\n",
    ]
    lines += ["| error | |", "|---|---|"]
    for name in sorted(kvdepot.__all__):
        known = getattr(kvdepot, name)
        if inspect.isclass(known) and issubclass(known, Exception):
            lines.append(
                f"| `{name}` | {escaped(' '.join((inspect.getdoc(known) or '').split()))} |"
            )
    return "\n".join(lines) + "\n"


def calls_of(owner: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, function in vars(owner).items():
        if inspect.isfunction(function) and not name.startswith("_"):
            yield name, function


def paragraph(one: Any) -> str:
    return inspect.getdoc(one) or ""


def signature(name: str, function: Callable[..., Any]) -> str:
    text = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", str(inspect.signature(function)))
    text = re.sub(r"^\(self(, )?", "(", text)
    return textwrap.fill(f"{name}{text}", 100, subsequent_indent="    ")


HTTP_INTRODUCTION: Final = """\
The daemon serves this description as JSON at `/openapi.json`.

If the daemon has a token (`--http-token-file`), requests to the paths marked `yes` must carry it.
Without a token the daemon listens on the loopback address only, answers GET requests, replaces
names of sessions and tenants, paths and addresses by pseudonyms, and refuses changes.
"""


def http() -> str:
    """Every path of the HTTP interface, from the OpenAPI description."""
    from kvdepot.daemon.http.service import described

    said = described()
    lines = ["# HTTP\n", WRITTEN, HTTP_INTRODUCTION]
    lines += ["| method | path | token | |", "|---|---|---|---|"]
    for path, methods in sorted(said["paths"].items()):
        for method, one in methods.items():
            token = "yes" if one.get("security") or method == "post" else ""
            lines.append(f"| {method.upper()} | `{path}` | {token} | {escaped(summary(one))} |")
    for name, schema in sorted(said.get("components", {}).get("schemas", {}).items()):
        properties = schema.get("properties")
        if not properties or name.endswith("Error"):
            continue
        lines += ["", f"## {name}\n", " ".join(schema.get("description", "").split()), ""]
        lines += ["| field | type | |", "|---|---|---|"]
        for field, facts in properties.items():
            needed = ", required" if field in schema.get("required", ()) else ""
            lines.append(
                f"| `{field}` | {kind(facts)}{needed} | {escaped(facts.get('description', ''))} |"
            )
    return "\n".join(lines) + "\n"


def summary(operation: dict[str, Any]) -> str:
    return " ".join(operation.get("description", operation.get("summary", "")).split())


def kind(facts: dict[str, Any]) -> str:
    if "anyOf" in facts:
        return " or ".join(kind(one) for one in facts["anyOf"] if one.get("type") != "null")
    if "enum" in facts:
        return ", ".join(f"`{one}`" for one in facts["enum"])
    return str(facts.get("type", facts.get("$ref", "").rpartition("/")[2]))


PROTOCOL_INTRODUCTION: Final = """\
The protocol between a client and the daemon. One frame is one datagram on a SOCK_SEQPACKET Unix
socket, at most {bytes_max} bytes. All numbers are little-endian. Formats on disk are in
[formats](../formats.md).

| fact | value |
|---|---|
| newest protocol | {newest} |
| oldest protocol | {oldest} |
| keys in one frame | {keys_max} at most |
| keys | 32 bytes each |
| head of a frame | {head_bytes} bytes: kind (u8), flags (u8), zero (u16), request serial (u32) |
"""
TYPES: Final = {"B": "u8", "H": "u16", "I": "u32", "Q": "u64", "q": "i64", "d": "f64"}


def protocol() -> str:
    """The frames between client and daemon, from the enumerations and the structs."""
    lines = ["# Protocol of the daemon\n", WRITTEN]
    lines.append(
        PROTOCOL_INTRODUCTION.format(
            bytes_max=frames.FRAME_BYTES_MAX,
            newest=versions.PROTOCOL,
            oldest=versions.PROTOCOL_OLDEST,
            keys_max=frames.KEYS_MAX,
            head_bytes=frames.HEAD_BYTES,
        )
    )
    for title, enumeration in (("Kinds", frames.FrameKind), ("Flags", frames.Flag)):
        notes = meanings(enumeration)
        lines += [f"## {title}\n", " ".join((inspect.getdoc(enumeration) or "").split()), ""]
        lines += ["| name | value | |", "|---|---|---|"]
        lines += [
            f"| {member.name} | {member.value} | {escaped(notes.get(member.name, ''))} |"
            for member in sorted(enumeration)
        ]
        lines.append("")
    lines.append("## Bodies of a fixed form\n")
    for name, form in sorted(vars(frames).items()):
        if not (inspect.isclass(form) and issubclass(form, frames.Fixed)) or form is frames.Fixed:
            continue
        lines += [f"### {name}\n"]
        note = " ".join((inspect.getdoc(form) or "").split())
        lines += [] if note.startswith(f"{form.__name__}(") else [note, ""]
        lines += ["| offset | type | field | |", "|---|---|---|---|", *struct_rows(form), ""]
    lines.append("## Rows of a table\n")
    for name, dtype in (
        ("LEASED", frames.PLACE_DTYPE),
        ("ARRIVED", frames.ARRIVAL_DTYPE),
        ("RESERVED", frames.SLOT_DTYPE),
    ):
        columns = ", ".join(
            f"`{field}` ({TYPES[dtype[field].char.replace('l', 'q').replace('L', 'Q')]})"
            for field in dtype.names or ()
        )
        lines.append(f"- {name}: {columns}")
    return "\n".join(lines) + "\n"


def struct_rows(form: type[frames.Fixed]) -> Iterator[str]:
    """The fields of a body with their offsets."""
    notes, layout = meanings(form), "<"
    parts = iter(re.findall(r"\d*[a-zA-Z]", re.sub(r"(\d+)x", "", form.FORM.format)))
    codes = [
        code
        for part in parts
        for code in ([part] if part.endswith("s") else part[-1] * int(part[:-1] or 1))
    ]
    names = [name for name in vars(form)["__annotations__"] if name != "FORM"]
    for name, code in zip(names, codes, strict=True):
        kind = TYPES.get(code, f"{code[:-1]} bytes")
        offset = struct.calcsize(layout)
        yield f"| {offset} | {kind} | `{name}` | {escaped(notes.get(name, ''))} |"
        layout += code


PAGES: Final = {
    "configuration.md": configuration,
    "python.md": python,
    "http.md": http,
    "protocol.md": protocol,
}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make())
