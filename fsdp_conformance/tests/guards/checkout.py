"""
The checkout as the guard tests see it: its files, its modules under their installed names, and what each one imports.

The guards judge a checkout. They are skipped, with that reason, where the package is installed from a wheel.
"""

from __future__ import annotations

import ast
import functools
import gc
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import fsdp_conformance

PACKAGE = "fsdp_conformance"
ROOT = Path(fsdp_conformance.__file__).resolve().parent.parent

#: Directory of the checkout to the package that it is installed as.
PACKAGE_DIRS = {
    "fsdp_conformance": PACKAGE,
    "docs": f"{PACKAGE}.docs",
    "suites": f"{PACKAGE}.suites",
    "fixtures": f"{PACKAGE}.fixtures",
}

#: Mark of every guard module.
required = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").is_file(),
    reason="guards judge a checkout, and this package is installed from a wheel",
)


#: Functions that import a module by name.
_IMPORTERS = frozenset({"importlib.import_module", "import_module", "__import__"})


@dataclass(frozen=True, slots=True)
class Import:
    """One name that a module imports, anywhere in it: at its top, inside a function, or for type checking only."""

    name: str
    """Absolute and dotted. `from a import b` counts as `a.b`, whether b is a module or not."""
    line: int


@dataclass(frozen=True, slots=True)
class Module:
    """A Python file of the package."""

    name: str
    """As it is installed: fsdp_conformance.suites.test_parity."""
    path: Path

    @property
    def part(self) -> str:
        """The first name below the package: `checks`, `errors`, `suites`; empty for the package itself."""
        return self.name.removeprefix(PACKAGE).lstrip(".").partition(".")[0]

    @property
    def place(self) -> str:
        """The path in the checkout."""
        return self.path.relative_to(ROOT).as_posix()

    def tree(self) -> ast.Module:
        """The syntax tree."""
        return parse(self.path)

    def nodes(self) -> tuple[ast.AST, ...]:
        """The nodes of the syntax tree, in the order of ast.walk."""
        return nodes_of(self.path)


@functools.cache
def parse(path: Path) -> ast.Module:
    """The syntax tree of a file. Trees stay, and looking for garbage among them takes longer than parsing does."""
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    finally:
        gc.freeze()
        gc.enable()


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """The nodes of a file's syntax tree. Walked once for all guards: a dozen of them need those of every module."""
    return tuple(walk(parse(path)))


def walk(tree: ast.AST) -> list[ast.AST]:
    """As ast.walk, in a third of the time."""
    nodes = [tree]
    for node in nodes:
        for value in vars(node).values():
            if isinstance(value, ast.AST):
                nodes.append(value)
            elif isinstance(value, list):
                nodes.extend(item for item in value if isinstance(item, ast.AST))
    return nodes


@functools.cache
def files() -> tuple[Path, ...]:
    """Every file that git tracks or would add, relative to ROOT."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = {Path(name) for name in listed.stdout.decode().split("\0") if name}
    return tuple(sorted(name for name in names if (ROOT / name).is_file()))


@functools.cache
def modules() -> tuple[Module, ...]:
    """Every Python file that belongs to the package."""
    result = []
    for file in files():
        top, *rest = file.parts
        if top in PACKAGE_DIRS and file.suffix == ".py":
            names = [PACKAGE_DIRS[top], *rest[:-1], *([] if file.stem == "__init__" else [file.stem])]
            result.append(Module(".".join(names), ROOT / file))
    return tuple(result)


def imports(module: Module) -> list[Import]:
    """The imports of `module`, in the order of its lines."""
    is_package = module.path.name == "__init__.py"
    return sorted(_imports(module.nodes(), module.name, is_package=is_package), key=lambda item: item.line)


def imports_of(source: str, name: str) -> list[str]:
    """The names that `source` imports if it is the module `name`."""
    return [item.name for item in _imports(walk(ast.parse(source)), name, is_package=False)]


def _imports(nodes: Iterable[ast.AST], name: str, *, is_package: bool) -> Iterator[Import]:
    package = name if is_package else name.rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = package
            for _ in range(node.level - 1):
                base = base.rpartition(".")[0]
            stem = ".".join(part for part in (base if node.level else "", node.module) if part)
            for alias in node.names:
                yield Import(stem if alias.name == "*" else f"{stem}.{alias.name}", node.lineno)
        elif isinstance(node, ast.Call) and called_name(node) in _IMPORTERS:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield Import(first.value, node.lineno)


def called_name(node: ast.Call) -> str:
    """The dotted name that a call is written with: `torch.load`; empty if it is not a name."""
    return dotted(node.func)


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a chain of attributes; empty if it begins with anything but a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def is_below(name: str, *packages: str) -> bool:
    """True if `name` is one of `packages` or lies in one of them."""
    return any(name == package or name.startswith(package + ".") for package in packages)
