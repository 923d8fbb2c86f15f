"""Every hop that docs/tour.md names exists, and there are at most nine of them.

A hop is one numbered line: "1. `src/kvdepot/core/keys.py: Namespace.keys` – what happens there".
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOUR = ROOT / "docs" / "tour.md"
HOPS_MAX = 9
NUMBERED = re.compile(r"^\d+\. ")
HOP = re.compile(r"^\d+\. `(?P<file>[^`:]+): (?P<name>[^`]+)`")


@dataclass(frozen=True, slots=True)
class Hop:
    file: str
    name: str


def hops(text: str) -> list[Hop]:
    found = []
    for line in filter(NUMBERED.match, text.splitlines()):
        hop = HOP.match(line)
        assert hop, f"not a hop: {line!r}; write: 1. `src/kvdepot/file.py: Class.method` – text"
        found.append(Hop(hop["file"], hop["name"].removesuffix("()")))
    return found


def defined_names(body: list[ast.stmt], prefix: str = "") -> set[str]:
    """Names of functions, classes and assignments, with those inside classes dotted."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(prefix + node.name)
        elif isinstance(node, ast.ClassDef):
            names.add(prefix + node.name)
            names |= defined_names(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
    return names


def exists(hop: Hop) -> bool:
    path = ROOT / hop.file
    if not path.is_file():
        return False
    if path.suffix == ".py":
        return hop.name in defined_names(ast.parse(path.read_text()).body)
    return re.search(rf"\b{re.escape(hop.name)}\(", path.read_text()) is not None


def test_every_hop_of_the_tour_exists() -> None:
    if not TOUR.exists():
        pytest.skip("docs/tour.md is not written yet")
    found = hops(TOUR.read_text())
    assert 0 < len(found) <= HOPS_MAX
    missing = [hop for hop in found if not exists(hop)]
    assert not missing, f"the tour names what is not there: {missing}"


def test_a_wrong_hop_is_noticed() -> None:
    text = (
        "1. `tests/arch/test_tour.py: Hop.file` – here\n2. `tests/arch/test_tour.py: gone` – no\n"
    )
    assert [exists(hop) for hop in hops(text)] == [True, False]
