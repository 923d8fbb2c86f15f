"""Makes docs/reference/cli.md from the commands themselves.

python -m tests.support.cli_reference    write the page
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvdepot.cli.command import Command, Option, command_tree

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
INTRODUCTION: Final = """\
# Command line

Written by `python -m tests.support.cli_reference`. Do not edit.

Every command has `--help` and `--json`. Answers are printed on stdout, messages on stderr.

| exit status | meaning |
|---|---|
| 0 | done |
| 1 | done, and a problem was found; each command says which |
| 2 | the command failed: `error:` says why, `hint:` what to do |
| 130, 141 | interrupted by Ctrl-C; the reader of stdout is gone |

Sizes are numbers with a unit, such as 64GiB or 2GB; times are such as 250ms, 2s, 5min, 1h or 3d.
Numbers take k, M, G (powers of 1000) and Ki, Mi (of 1024).
"""


def page() -> str:
    return "\n".join([INTRODUCTION, *(line for one in command_tree() for line in section(*one))])


def section(name: str, command: Command) -> Iterator[str]:
    """One command: its description, its verbs, its arguments and options."""
    if name == "kvdepot":
        return
    level = "#" * min(4, name.count(" ") + 1)
    yield f"{level} {name}\n"
    yield textwrap.fill(escaped(command.description), 120) + "\n"
    options = command.parsed_options()
    if options:
        yield "| option | meaning |\n|---|---|"
        yield from (f"| `{typed(one)}` | {escaped(meaning(one))} |" for one in options)
        yield ""


def typed(option: Option) -> str:
    if option.name.startswith("--"):
        return escaped(f"{option.name} {option.metavar}".strip())
    several = "..." if option.many in ("*", "+") else ""
    return f"{option.metavar}{several}"


def meaning(option: Option) -> str:
    """The help, with what `--help` leaves out."""
    notes = ["required"] if option.required else []
    notes += ["without other options"] if option.alone else []
    notes += [f"with `{other}`" for other in option.needs]
    notes += [f"not with {' or '.join(f'`{other}`' for other in option.not_with)}"] * bool(
        option.not_with
    )
    return option.help + (f" ({', '.join(notes)})" if notes else "")


def escaped(text: str) -> str:
    """For a cell of a table, with commands as plain text: no page types them."""
    return re.sub(r"`(kvdepot [^`]*)`", r"\1", text).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
