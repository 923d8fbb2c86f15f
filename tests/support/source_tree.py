"""The Python files of a folder with their syntax trees, for tests about the source."""

import ast
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "kvdepot"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Module:
    path: Path
    name: str
    """The path below the folder."""
    text: str
    tree: ast.Module


@cache
def modules(folder: Path = SRC) -> tuple[Module, ...]:
    """All modules of a folder. Tests clear the cache after use: the trees are millions of objects,
    through which the tests that follow would look for garbage.
    """
    found = []
    gc.disable()  # nothing of a tree is garbage while it grows
    try:
        for path in sorted(folder.rglob("*.py")):
            text = path.read_text()
            found.append(Module(path, path.relative_to(folder).as_posix(), text, ast.parse(text)))
    finally:
        gc.enable()
    assert found
    return tuple(found)


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each module that is imported, and of names that may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
