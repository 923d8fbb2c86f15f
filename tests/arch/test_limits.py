"""Limits that shape code: of classes, protocols, imports and files. See docs/decisions/025.

OVER lists what is over a limit today, with its number. A number may only fall: lower the entry with
the code, and delete it when the limit is met. Nothing may be added.
"""

import ast
import sys
from collections.abc import Iterator

import pytest
from tests.support.source_tree import SRC, Function, Module, imported, modules

METHODS_MAX = 25
PROTOCOL_METHODS_MAX = 12
ATTRIBUTES_MAX = 16
IMPORTS_MAX = 20
FILE_LINES_MAX = 900

OVER: dict[str, int] = {}

Counted = Iterator[tuple[str, int]]
"""What is over a limit, and its number."""


@pytest.fixture(scope="module", autouse=True)
def no_tree_is_kept() -> Iterator[None]:
    yield
    modules.cache_clear()


def methods_of(node: ast.ClassDef) -> list[Function]:
    """All functions of a class but those that the language calls, such as `__init__`."""
    functions = [one for one in node.body if isinstance(one, Function)]
    return [one for one in functions if not (one.name.startswith("__") and one.name[-2:] == "__")]


def assigned(node: ast.ClassDef) -> set[str]:
    """Attributes that the methods of a class assign to."""
    return {
        one.attr
        for function in node.body
        if isinstance(function, Function)
        for one in ast.walk(function)
        if isinstance(one, ast.Attribute)
        and isinstance(one.ctx, ast.Store)
        and isinstance(one.value, ast.Name)
        and one.value.id == "self"
    }


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Attributes of the objects of a class: those assigned to, and the fields of a dataclass."""
    fields = {
        one.target.id
        for one in node.body
        if isinstance(one, ast.AnnAssign)
        and isinstance(one.target, ast.Name)
        and not ast.unparse(one.annotation).startswith("ClassVar")
    }
    return fields | assigned(node)


def is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).partition("[")[0] == "Protocol" for base in node.bases)


def is_value_type(node: ast.ClassDef) -> bool:
    """A dataclass whose methods change nothing of it."""
    decorators = {ast.unparse(one).partition("(")[0] for one in node.decorator_list}
    return "dataclass" in decorators and not assigned(node)


def is_test_suite(node: ast.ClassDef) -> bool:
    return any(method.name.startswith("test_") for method in methods_of(node))


def foreign_names(module: Module) -> set[str]:
    """Names that a module imports from other packages than its own and the standard library."""
    return {
        name.rpartition(".")[2]
        for _, name in imported(module.tree)
        if name.partition(".")[0] not in sys.stdlib_module_names | {"kvdepot", "numpy"}
    }


def is_foreign_interface(node: ast.ClassDef, module: Module) -> bool:
    """It implements a class of an engine or a library, which chose the methods."""
    bases = {ast.unparse(base).partition("[")[0].partition(".")[0] for base in node.bases}
    return not bases.isdisjoint(foreign_names(module))


def classes_over(module: Module) -> Counted:
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ClassDef):
            continue
        if is_test_suite(node) or is_foreign_interface(node, module):
            continue
        methods, attributes = len(methods_of(node)), len(attributes_of(node))
        if methods > (PROTOCOL_METHODS_MAX if is_protocol(node) else METHODS_MAX):
            yield f"{module.name}: methods of {node.name}", methods
        if attributes > ATTRIBUTES_MAX and not is_value_type(node):
            yield f"{module.name}: attributes of {node.name}", attributes


def project_imports(tree: ast.Module) -> set[str]:
    """Modules of the project that a module imports, anywhere in it."""
    found = set()
    for _, name in imported(tree):
        path = SRC.parent / name.replace(".", "/")
        if name.startswith("kvdepot.") and (path.with_suffix(".py").is_file() or path.is_dir()):
            found.add(name)
    return {one for one in found if not any(other.startswith(f"{one}.") for other in found)}


def modules_over(module: Module) -> Counted:
    imports, lines = len(project_imports(module.tree)), module.text.count("\n")
    if imports > IMPORTS_MAX:
        yield f"{module.name}: imports", imports
    if lines > FILE_LINES_MAX:
        yield f"{module.name}: lines", lines


def test_limits() -> None:
    found = {
        what: number
        for module in modules()
        for what, number in (*classes_over(module), *modules_over(module))
    }
    higher = {what: number for what, number in found.items() if number > OVER.get(what, 0)}
    assert not higher, f"over the limit, or more than before: {higher}"
    lower = {what: found.get(what) for what in OVER if found.get(what) != OVER[what]}
    assert not lower, f"lower these entries of OVER, delete those without a number: {lower}"


def a_class(text: str) -> tuple[ast.ClassDef, Module]:
    tree = ast.parse(text)
    node = tree.body[-1]
    assert isinstance(node, ast.ClassDef)
    return node, Module(SRC / "a.py", "a.py", text, tree)


def test_methods_and_attributes_are_counted() -> None:
    methods = "".join(f"    def f{number}(self): self.a{number} = 1\n" for number in range(26))
    _, module = a_class(f"class A:\n    def __init__(self): self.b, self.c[0] = 1, 2\n{methods}")
    assert dict(classes_over(module)) == {
        "a.py: methods of A": 26,
        "a.py: attributes of A": 27,
    }
    protocol = "class P(Protocol[T]):\n" + "".join(f"    def f{n}(self): ...\n" for n in range(13))
    assert dict(classes_over(a_class(protocol)[1])) == {"a.py: methods of P": 13}


def test_exemptions() -> None:
    fields = "".join(f"    f{number}: int\n" for number in range(17))
    value = f"@dataclass(frozen=True)\nclass V:\n{fields}    def total(self): return self.f0\n"
    assert list(classes_over(a_class(value)[1])) == []
    changing = f"@dataclass\nclass V:\n{fields}    def grow(self): self.f0 += 1\n"
    assert dict(classes_over(a_class(changing)[1])) == {"a.py: attributes of V": 17}
    many = "".join(f"    def f{number}(self): pass\n" for number in range(26))
    engine = f"from vllm.base import Connector\nclass C(Connector):\n{many}"
    assert list(classes_over(a_class(engine)[1])) == []
    own = f"from kvdepot.core.depot import Depot\nclass C(Depot):\n{many}"
    assert dict(classes_over(a_class(own)[1])) == {"a.py: methods of C": 26}
    suite = f"class S:\n{many}    def test_it(self): pass\n"
    assert list(classes_over(a_class(suite)[1])) == []


def test_imports_are_counted_once_a_module() -> None:
    tree = ast.parse(
        "import kvdepot.config.settings, os\n"
        "from kvdepot.config.settings import load, Config\n"
        "from kvdepot.core import depot\n"
        "def f():\n    from kvdepot.errors import KVDepotError\n"
    )
    assert project_imports(tree) == {
        "kvdepot.config.settings",
        "kvdepot.core.depot",
        "kvdepot.errors",
    }
