"""House rules that a linter does not know, checked as tests.

Limits may be lowered, never raised, without a line in docs/decisions/.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "kvdepot"
FILE_LINES_MAX = 1000
FUNCTION_LINES_MAX = 60
ARGUMENTS_MAX = 7
# native/build.py runs by itself, where the package cannot be installed.
READS_ENVIRONMENT = {"cli/main.py", "native/build.py"}
TALKS_TO_PEOPLE = {"cli/output.py", "native/build.py"}
HANDLES_EVERYTHING: set[str] = set()
BANNED = {
    r"\b(FIXME|TODO|XXX|HACK)\b": "fix it or file an issue",
    r"(?m)^\s*#\s*[-=#*]{4,}": "no section banners: split the file by noun",
}
# Names only: the text may have to quote somebody else's, such as the model type "deepseek_v3".
BANNED_NAMES = {
    r"_v\d+(_|$)": "replace, do not version",
    r"(^|_)(mgr|ctx)(_|$)": "write the word",
}
BANNED_FILE_WORDS = {"common", "helper", "helpers", "misc", "util", "utils"}

MODULES = sorted(SRC.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


@pytest.fixture(params=MODULES, ids=name_of)
def module(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def code_lines(function: Function) -> int:
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        assert docstring.end_lineno is not None
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def positional_count(function: Function) -> int:
    """Arguments that a caller may give without naming them."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    return len([argument for argument in arguments if argument.arg not in ("self", "cls")])


def names_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for field in ("name", "id", "attr", "arg"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield name


def test_sizes(module: Path) -> None:
    text = module.read_text()
    assert text.count("\n") <= FILE_LINES_MAX, "split the file by noun"
    for function in functions(ast.parse(text)):
        assert code_lines(function) <= FUNCTION_LINES_MAX, function.name
        count = positional_count(function)
        assert count <= ARGUMENTS_MAX, f"{function.name}: group its arguments in a dataclass"


def test_module_says_what_it_is(module: Path) -> None:
    text = module.read_text()
    assert not text.strip() or ast.get_docstring(ast.parse(text)), "say what the file is for"


def test_banned_words(module: Path) -> None:
    text = module.read_text()
    for pattern, instead in BANNED.items():
        found = re.search(pattern, text)
        assert not found, f"{found.group(0)!r}: {instead}"
    for name in (*names_in(ast.parse(text)), module.stem):
        for pattern, instead in BANNED_NAMES.items():
            assert not re.search(pattern, name), f"{name}: {instead}"
    assert not BANNED_FILE_WORDS & set(module.stem.split("_")), "name the file by its noun"


def test_environment_is_read_in_one_place(module: Path) -> None:
    if name_of(module) in READS_ENVIRONMENT:
        return
    for node in ast.walk(ast.parse(module.read_text())):
        names = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = [alias.name for alias in node.names]
        for name in names:
            assert name not in ("environ", "environb", "getenv"), "take it from the config"


def test_only_the_output_module_prints(module: Path) -> None:
    if name_of(module) in TALKS_TO_PEOPLE:
        return
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Call):
            prints = isinstance(node.func, ast.Name) and node.func.id == "print"
            assert not prints, f"line {node.lineno}: use kvdepot.cli.output, or return it"
        if isinstance(node, ast.Attribute):
            stream = isinstance(node.value, ast.Name) and node.value.id == "sys"
            assert not (stream and node.attr in ("stdout", "stderr")), f"line {node.lineno}"


def test_no_catch_all(module: Path) -> None:
    if name_of(module) in HANDLES_EVERYTHING:
        return
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ExceptHandler) and catches_everything(node.type):
            last = node.body[-1]
            passes_on = isinstance(last, ast.Raise) and last.exc is None
            assert passes_on, f"line {node.lineno}: name what you expect, or end with raise"
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "suppress":
            broad = any(catches_everything(argument) for argument in node.args)
            assert not broad, f"line {node.lineno}: name what you expect"


def catches_everything(caught: ast.expr | None) -> bool:
    if caught is None:
        return True
    if isinstance(caught, ast.Tuple):
        return any(catches_everything(one) for one in caught.elts)
    return isinstance(caught, ast.Name) and caught.id in ("Exception", "BaseException")
