"""The documents as a reader goes through them: what is to be typed, in the order of the page."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvdepot.cli.command import COMMANDS
from kvdepot.cli.main import UsageError, build_parser

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks" / "README.md",
]
SHELL = ("", "sh", "bash")
"""Languages of blocks that are typed into a shell; a block without a language is one."""
DATA = ("text", "json", "yaml", "toml")
_FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"(?<!`)`kvdepot ([^`]+)`")
_PLACEHOLDER = re.compile(r"[…|\[<]|\b[A-Z]{2,}\b(?!=)")


@dataclass(frozen=True)
class Step:
    """One block, or one command within a sentence."""

    page: str
    line: int
    kind: str
    """Language of the block; `sentence` for a command within one."""
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def steps_of(page: Path) -> list[Step]:
    """All that has to be typed or read as settings on a page, from its top to its end."""
    text = page.read_text()
    found = [(match.start(), match[1], match[2]) for match in _FENCE.finditer(text)]
    prose = _FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    for match in _INLINE.finditer(prose):
        words = " ".join(match[1].split())
        if is_whole(words):
            found.append((match.start(), "sentence", f"kvdepot {words}"))
    return [
        Step(name_of(page), text.count("\n", 0, at) + 1, kind, typed)
        for at, kind, typed in sorted(found)
    ]


def is_whole(words: str) -> bool:
    """Whether it could be typed as it stands: nothing is left out, nothing stands for a name."""
    command, *rest = shlex.split(words.partition(" > ")[0])
    if command not in COMMANDS or _PLACEHOLDER.search(words):
        return False
    try:
        build_parser({command}).parse_args([command, *rest])
    except UsageError:
        return False
    return True


def typed_commands(text: str) -> Iterator[list[str]]:
    """The words of each `kvdepot …` in fenced text, as a reader would type it."""
    for kind, block in _FENCE.findall(text):
        if kind not in (*SHELL, "console"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"^(\$|sudo(?: -u \w+)?) ", "", line.strip())
            if re.match(r"(\S*/)?kvdepot \S", line):
                words = shlex.split(line, comments=True)
                ends = [at for at, word in enumerate(words) if re.match(r"[|>&]|2>", word)]
                yield words[1 : min(ends, default=len(words))]


def inline_commands(text: str) -> Iterator[list[str]]:
    """The words of each `kvdepot …` within a sentence that has an option or a place to name."""
    for command in _INLINE.findall(_FENCE.sub("", text)):
        words = shlex.split(command.partition(" >")[0])
        if not re.search(r"[…|[]", command) and words[0] in COMMANDS and words[1:]:
            yield words
