"""House rules that a linter does not know, checked as tests.

Limits may be lowered, never raised, without a line in docs/decisions/. The limits of classes,
protocols, imports and files are in test_limits.py.
"""

import ast
import re
from collections.abc import Callable, Iterator, Set

import pytest
from tests.support.source_tree import ROOT, SRC, Function, Module, imported, modules

ARGUMENTS_MAX = 7
# native/build.py runs by itself, where the package cannot be installed.
# The last one only hands it on, to a daemon.
READS_ENVIRONMENT = {"cli/main.py", "native/build.py", "adapters/vllm/shared_depot.py"}
TALKS_TO_PEOPLE = {"cli/output.py", "native/build.py"}
# Each of them makes files of this user alone: docs/security.md has the list of paths.
MAKES_FILES = {
    "core/private.py",
    "io/files.py",
    "cli/directories.py",
    "cli/torture.py",
    "adapters/hf/smollm2.py",
    "bench/daemon.py",
    "bench/raw.py",
    "native/build.py",
}
BANNED = {
    r"\b(FIXME|TODO|XXX|HACK)\b": "fix it or file an issue",
    r"(?m)^\s*#\s*[-=#*]{4,}": "no section banners: split the file by noun",
}
# Names only: the text may have to quote somebody else's, such as the model type "deepseek_v3".
BANNED_NAMES = {
    r"_v\d+(_|$)": "replace, do not version",
    r"(^|_)(mgr|ctx)(_|$)": "write the word",
}
# Methods that SGLang calls by these names.
NAMED_BY_AN_ENGINE = {
    "batch_exists_v2",
    "batch_get_v1",
    "batch_get_v2",
    "batch_set_v1",
    "batch_set_v2",
    "register_mem_host_pool_v2",
}
UNNAMED = re.compile(r"(?i)\b(somebody|nobody|whoever|anybody)\b")
IMPORTS_TESTS: set[str] = set()
REACHES_INTO_A_STORE = {"daemon/server/test_clients_die.py", "store/read/test_prefetch.py"}
BANNED_FILE_WORDS = {"common", "helper", "helpers", "misc", "util", "utils"}

Offences = Iterator[tuple[int, str]]
"""Line numbers, and what is wrong there."""


@pytest.fixture(scope="module", autouse=True)
def no_tree_is_kept() -> Iterator[None]:
    yield
    modules.cache_clear()


def assert_none(offences: Callable[[Module], Offences], but: Set[str] = frozenset()) -> None:
    """Names every offence in the tree, not only the first."""
    checked = [module for module in modules() if module.name not in but]
    found = [f"{one.name}:{line}: {what}" for one in checked for line, what in offences(one)]
    assert not found, "\n".join(found)


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def positional_count(function: Function) -> int:
    """Arguments that a caller may give without naming them."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    return len([argument for argument in arguments if argument.arg not in ("self", "cls")])


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        for field in ("name", "id", "attr", "arg"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield getattr(node, "lineno", 1), name


def test_functions_have_few_arguments() -> None:
    def offences(module: Module) -> Offences:
        for function in functions(module.tree):
            if positional_count(function) > ARGUMENTS_MAX:
                yield function.lineno, f"{function.name}: group its arguments in a dataclass"

    assert_none(offences)


def test_modules_say_what_they_are() -> None:
    def offences(module: Module) -> Offences:
        if module.text.strip() and not ast.get_docstring(module.tree):
            yield 1, "say what the file is for"

    assert_none(offences)


def test_banned_words() -> None:
    def offences(module: Module) -> Offences:
        for pattern, instead in BANNED.items():
            for found in re.finditer(pattern, module.text):
                line = module.text.count("\n", 0, found.start()) + 1
                yield line, f"{found.group(0)!r}: {instead}"
        for line, name in (*names_in(module.tree), (1, module.path.stem)):
            for pattern, instead in BANNED_NAMES.items():
                if re.search(pattern, name) and name not in NAMED_BY_AN_ENGINE:
                    yield line, f"{name}: {instead}"
        if BANNED_FILE_WORDS & set(module.path.stem.split("_")):
            yield 1, "name the file by its noun"

    assert_none(offences)


def test_texts_name_the_actor() -> None:
    texts = [path for path in SRC.rglob("*") if path.suffix in (".py", ".pyi", ".c", ".h")]
    found = {path: words for path in texts if (words := UNNAMED.findall(path.read_text()))}
    assert not found, f"say which part of the program it is: {found}"


def test_one_class_one_name() -> None:
    where: dict[str, list[str]] = {}
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(f"{module.name}:{node.lineno}")
    twice = {name: places for name, places in where.items() if len(places) > 1}
    assert not twice, f"one word, one meaning: {twice}"


def test_environment_is_read_in_one_place() -> None:
    def offences(module: Module) -> Offences:
        for node in ast.walk(module.tree):
            names = []
            if isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and node.module == "os":
                names = [alias.name for alias in node.names]
            if {"environ", "environb", "getenv"} & set(names):
                yield getattr(node, "lineno", 0), "take it from the config"

    assert_none(offences, but=READS_ENVIRONMENT)


def test_files_are_made_private() -> None:
    """By core/private.py, or by a module that is known to make them so."""
    makes = re.compile(r"^(mkdir|makedirs|write_text|write_bytes|mkdtemp|mkstemp|touch)$")

    def offences(module: Module) -> Offences:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            name, given = node.func.attr, [*node.args, *(word.value for word in node.keywords)]
            on_path = name != "touch" or not given
            texts = [one.value for one in given if isinstance(one, ast.Constant)]
            writes = any(isinstance(text, str) and re.fullmatch("[wxa]b?", text) for text in texts)
            if (makes.match(name) and on_path) or (name == "open" and writes):
                yield node.lineno, f"{name}: use kvdepot.core.private"
            if name == "open" and "O_CREAT" in ast.unparse(node):
                yield node.lineno, "open: use kvdepot.core.private"

    under_test = {module.name for module in modules() if module.name.startswith("testing/")}
    assert_none(offences, but=MAKES_FILES | under_test)


def test_only_the_output_module_prints() -> None:
    def offences(module: Module) -> Offences:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call):
                if isinstance(node.func, ast.Name) and node.func.id == "print":
                    yield node.lineno, "use kvdepot.cli.output, or return it"
            elif isinstance(node, ast.Attribute):
                of_sys = isinstance(node.value, ast.Name) and node.value.id == "sys"
                if of_sys and node.attr in ("stdout", "stderr"):
                    yield node.lineno, "use kvdepot.cli.output, or return it"

    assert_none(offences, but=TALKS_TO_PEOPLE)


ANSWERS_FOR_OTHERS = {
    "daemon/server/daemon.py",
    "store/events.py",
}
"""The daemon hangs up on a client, and the store detaches an observer, whatever serving it raises.
"""


def test_no_catch_all() -> None:
    def offences(module: Module) -> Offences:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler) and catches_everything(node.type):
                last = node.body[-1]
                if not (isinstance(last, ast.Raise) and last.exc is None):
                    yield node.lineno, "name what you expect, or end with raise"
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "attr", "") == "suppress"
                and any(catches_everything(argument) for argument in node.args)
            ):
                yield node.lineno, "name what you expect"

    assert_none(offences, but=ANSWERS_FOR_OTHERS)


def catches_everything(caught: ast.expr | None) -> bool:
    if caught is None:
        return True
    if isinstance(caught, ast.Tuple):
        return any(catches_everything(one) for one in caught.elts)
    return isinstance(caught, ast.Name) and caught.id in ("Exception", "BaseException")


def test_tests_are_not_imported() -> None:
    """What two test modules share is in tests/support or in a fixture."""
    found = []
    for module in modules(ROOT / "tests"):
        for line, name in imported(module.tree):
            last = name.split(".")[-1]
            if name.startswith("tests.") and (last.startswith("test_") or last == "conftest"):
                found.append(f"tests/{module.name}:{line}: {name}")
    assert {entry.split(":")[0] for entry in found} <= IMPORTS_TESTS, "\n".join(found)


def test_tests_do_not_reach_into_a_store() -> None:
    """What they need to see of it is in `store.inspect()`."""
    found = []
    for module in modules(ROOT / "tests"):
        if module.name in REACHES_INTO_A_STORE:
            continue
        for node in ast.walk(module.tree):
            if (
                isinstance(node, ast.Attribute)
                and re.fullmatch(r"_[a-z]\w*", node.attr)
                and isinstance(node.value, ast.Name)
                and node.value.id == "store"
            ):
                found.append(f"tests/{module.name}:{node.lineno}: store.{node.attr}")
    assert not found, "\n".join(found)
