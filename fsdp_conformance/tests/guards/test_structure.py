"""
Guard: modules can be read one at a time.

No import cycles, no use of another file's private names, and every package says in its `__init__` what each of its
modules is for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import Module

pytestmark = checkout.required

#: Parts that may use private names of others: tests look inside, and a mutant breaks what it derives from.
_MAY_LOOK_INSIDE = frozenset({"tests", "mutants"})

#: Private names of torch and the standard library, where they are used: files of ours define equal names.
_FOREIGN = frozenset(
    {
        "tensor._indices",  # torch.Tensor: of one that is not coalesced, without a synchronization
        "tensor._values",
        "tensor._base",  # torch.Tensor: what it is a view of
        "leaf._post_accumulate_grad_hooks",  # torch.Tensor
        "distributed_c10d._world",  # torch: the process groups that are registered
        "owner._run",  # torch.testing: the entry of a rank, which MultiProcessTestCase defines
        "multiprocessing.process.current_process()._config",  # where multiprocessing keeps its temporary directory
    }
)

#: Private by convention, public in effect: a namedtuple's methods, and the tables of nn.Module.
_CONVENTIONS = frozenset(
    {"_replace", "_asdict", "_fields", "_make", "_modules", "_parameters", "_buffers", "_backward_hooks"}
)


def import_graph(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Module name to the modules of the package that it imports when it is loaded, or for type checking."""
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, module in modules.items():
        for item in checkout.imports(module):
            target = _module_of(item.name, modules)
            # A package's __init__ re-exports its own modules; that they also import siblings is not a real cycle.
            if target is not None and target != name and not name.startswith(target + "."):
                graph[name].add(target)
    return graph


def _module_of(name: str, modules: Mapping[str, Module]) -> str | None:
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def cycles(graph: Mapping[str, set[str]]) -> list[frozenset[str]]:
    """The strongly connected components of more than one module (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[frozenset[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = set(stack[stack.index(node) :])
            del stack[stack.index(node) :]
            if len(component) > 1:
                components.append(frozenset(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return components


def private_names(module: Module) -> set[str]:
    """The private names that a module defines: functions, classes, variables, methods and attributes of instances."""
    names = set()
    for node in module.nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            names.add(node.value)  # __slots__
    return {name for name in names if _is_private(name)}


def uses_of_private_names(module: Module, defined_elsewhere: set[str]) -> Iterator[tuple[int, str]]:
    """Line and text of each use of a private name that another file of the package defines."""
    own = private_names(module)
    for node in module.nodes():
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(checkout.PACKAGE):
            for alias in node.names:
                if _is_private(alias.name):
                    yield node.lineno, f"imports {alias.name}"
        elif (
            isinstance(node, ast.Attribute)
            and _is_private(node.attr)
            and node.attr in defined_elsewhere - own
            and not _is_own(node.value)
            and ast.unparse(node) not in _FOREIGN
        ):
            yield node.lineno, f"uses {ast.unparse(node)}"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in _CONVENTIONS


def _is_own(node: ast.expr) -> bool:
    """True if an expression is the object itself, whose private names a class shares with those it derives from."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def listed(docstring: str) -> set[str]:
    """The names that an index in a docstring begins its lines with; a line may begin with several."""
    names: set[str] = set()
    for line in docstring.splitlines():
        match = re.match(r"    (\w+(?:(?:, | / )\w+)*)(?:  +|$)", line)
        if match:
            names |= set(re.split(r", | / ", match[1]))
    return names


def packages() -> list[Module]:
    """The `__init__` files of the package that have modules or packages next to them."""
    return [module for module in checkout.modules() if module.path.name == "__init__.py" and module.part != "tests"]


def children(package: Module) -> set[str]:
    """The modules and packages in a package's directory that git tracks or would add."""
    places = {module.path for module in checkout.modules() if module.part != "tests"}
    own = {path.stem for path in places if path.parent == package.path.parent} - {"__init__", "__main__"}
    inner = {path.parent.name for path in places if path.name == "__init__.py"
             and path.parent.parent == package.path.parent}  # fmt: skip
    return own | inner


def test_imports_have_no_cycles() -> None:
    """No module needs, however far away, a module that needs it."""
    modules = {module.name: module for module in checkout.modules() if module.part != "tests"}

    assert sorted(sorted(cycle) for cycle in cycles(import_graph(modules))) == []


@pytest.mark.slow
def test_no_module_uses_private_names_of_another() -> None:
    """Objects that another file needs have public names."""
    modules = [module for module in checkout.modules() if module.part not in _MAY_LOOK_INSIDE]
    names = {module.name: private_names(module) for module in modules}
    problems = []
    for module in modules:
        others = set().union(*(defined for name, defined in names.items() if name != module.name))
        problems += [f"{module.place}:{line}: {use}" for line, use in uses_of_private_names(module, others)]

    assert problems == []


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.name)
def test_a_package_lists_its_modules(package: Module) -> None:
    """The docstring of `__init__` has one line for each module and inner package, and none for what is not there."""
    inside = children(package)
    names = listed(ast.get_docstring(package.tree(), clean=False) or "")

    assert inside - names == set(), "modules that the docstring does not list"
    assert names & {"__init__"} == set()
    assert {name for name in names if name.islower()} - inside == set(), "listed, but not there"


def test_the_cycle_guard_sees_a_cycle() -> None:
    """A cycle over three modules is found, a chain is not."""
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [frozenset({"a", "b", "c"})]
    assert cycles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("from fsdp_conformance.engine.chunks.chunk import _shard", 1),
        ("def f(chunk):\n    return chunk._shard", 1),
        ("class A:\n    def f(self):\n        return self._shard", 0),
        ("class A:\n    def f(self, other):\n        self._shard = other._shard", 0),
        ("def f(chunk):\n    return chunk.shard", 0),
        ("def f(values):\n    return values._replace(x=1)", 0),
    ],
)
def test_the_guard_of_private_names_sees_a_use(source: str, seen: int, tmp_path: Path) -> None:
    """Imports and attributes of others are seen; a class's own, and two objects of one class, are not."""
    path = tmp_path / "some.py"
    path.write_text(source, encoding="utf-8")
    module = Module("fsdp_conformance.engine.some", path)

    assert len(list(uses_of_private_names(module, {"_shard", "_replace"}))) == seen


def test_the_index_guard_reads_names() -> None:
    """One name or several begin a line of an index; other lines do not."""
    assert listed("Text.\n\n    chunk    storage\n    a, b     two\n    one / two   more\nNo entry here\n") == {
        "chunk", "a", "b", "one", "two",
    }  # fmt: skip
