"""Every place that docs/tour.md names exists, and its walks are those of a running store."""

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "kvdepot"
TOUR = ROOT / "docs" / "tour.md"
WALK = ROOT / "benchmarks" / "walk.py"
PLACE = re.compile(r"`(?P<file>[a-z_/]+\.py)(?:: (?P<name>[^`]+))?`")
HOP = re.compile(r"^- `(?P<file>[^`:]+): (?P<name>[^`]+)` –")
BY_TIMING = {"server/daemon.py", "server/connection.py"}
"""Whether a thread or the loop serves a request."""
TRIES = 3


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


@cache
def names_of(path: Path) -> set[str]:
    return defined_names(ast.parse(path.read_text()).body)


def missing(text: str) -> list[str]:
    """Places that a text names and that are not there."""
    gone = []
    for place in PLACE.finditer(text):
        path = ROOT / place["file"]
        if not path.is_file():
            path = SOURCE / place["file"]
        if "/" not in place["file"]:
            continue  # a neighbour of the file named before it
        if not path.is_file():
            gone.append(place["file"])
        elif place["name"] and place["name"] not in names_of(path):
            gone.append(place[0])
    return gone


def told_walks(text: str) -> dict[str, dict[str, str]]:
    """The walks in the tour: for each the function by file."""
    walks: dict[str, dict[str, str]] = {}
    hops: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            hops = walks.setdefault(line.lstrip("# "), {})
        elif hop := HOP.match(line):
            hops[hop["file"]] = hop["name"]
    return walks


def difference(told: dict[str, str], seen: dict[str, list[str]]) -> list[str]:
    """What of a walk in the tour is not what was seen."""
    files = (told.keys() ^ seen.keys()) - BY_TIMING
    names = {
        f"{file}: {name}"
        for file, name in told.items()
        if file not in BY_TIMING and file in seen and name not in seen[file]
    }
    return sorted(files | names)


def test_every_place_in_the_tour_exists() -> None:
    assert missing(TOUR.read_text()) == []


def test_a_place_that_is_gone_is_noticed() -> None:
    text = "`store/store.py: Store.match` `store/store.py: Store.gone` `store/gone.py`"
    assert missing(text) == ["`store/store.py: Store.gone`", "store/gone.py"]


def test_a_changed_walk_is_noticed() -> None:
    told = {"a.py": "f", "b.py": "g"}
    assert difference(told, {"a.py": ["f"], "b.py": ["h", "g"]}) == []
    assert difference(told, {"a.py": ["e"], "c.py": ["g"]}) == ["a.py: f", "b.py", "c.py"]


def test_the_walks_are_true() -> None:
    told = told_walks(TOUR.read_text())
    wrong: dict[str, list[str]] = {}
    for _ in range(TRIES):
        done = subprocess.run(
            [sys.executable, str(WALK), "--quick", "--json"],
            stdout=subprocess.PIPE,
            timeout=300,
            check=True,
        )
        seen = json.loads(done.stdout)
        assert len(seen) == 4
        wrong = {name: difference(told[name], walk["stack"]) for name, walk in seen.items()}
        if not any(wrong.values()):
            return
    raise AssertionError(f"run python benchmarks/walk.py --write: {wrong}")
