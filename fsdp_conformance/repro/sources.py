"""
The source of a function, with all that it uses of this package: classes, functions, constants, in an order that runs.

Text is copied as it stands; only `module.name` becomes `name` where the module is one of ours. Annotations are not
followed, because `from __future__ import annotations` leaves them alone.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType

from fsdp_conformance.repro.refused import NoScript

_PACKAGE = "fsdp_conformance"

#: Calls that a script leaves out: they refuse a plan or a kind of ranks, both of which a script has settled.
LEFT_OUT = frozenset({"refuse_undeclared", "refuse_other_norm", "refuse_gpus_and_simulated_ranks"})


class Sources:
    """
    The definitions that a script needs, gathered by `need`.

    `provided` maps (module, name) to the text that stands for a definition, or to "" if the script has it anyway. What
    modules whose names begin with one of `refused` define cannot be copied.
    """

    def __init__(self, *, provided: Mapping[tuple[str, str], str] | None = None, refused: tuple[str, ...] = ()) -> None:
        self.imports: dict[str, None] = {}
        self.definitions: list[str] = []
        self._provided = dict(provided or {})
        self._refused = refused
        self._owners: dict[str, str] = {}
        self._begun: set[tuple[str, int]] = set()
        self._modules: dict[str, tuple[str, dict[str, ast.stmt]]] = {}

    def need(self, module: str, name: str) -> None:
        """Add what a module calls `name`, after what it uses itself. Raises NoScript if that cannot be copied."""
        if (module, name) in self._provided:
            if text := self._provided[module, name]:
                self.provide(module, name)
                self.definitions.append(text)
            return
        node = self.definition(module, name)
        if node is None:
            raise NoScript(f"{name} of {module} has no definition that can be copied")
        if isinstance(node, ast.Import | ast.ImportFrom):
            self._follow_import(node, name)
            return
        owner = self._owners.setdefault(name, module)
        if owner != module:
            raise NoScript(f"{owner} and {module} both define {name}, and a script has one of each name")
        if (module, node.lineno) in self._begun:
            return
        if module.startswith(self._refused):
            raise NoScript(f"{name} of {module} is part of this package, and no code of an adapter")
        self._begun.add((module, node.lineno))
        self.definitions.append(self.text_of(module, node))

    def provide(self, module: str, name: str) -> None:
        """The script has this definition already."""
        self._provided[module, name] = ""

    def definition(self, module: str, name: str) -> ast.stmt | None:
        """The statement at the top of a module that defines a name."""
        return self._read(module)[1].get(name)

    def text_of(self, module: str, node: ast.stmt) -> str:
        """The text of a module's statement, or of one in a class; what it uses is added first."""
        text, defined = self._read(module)
        ours = self._our_modules(defined)
        left_out = [each for each in ast.walk(node) if _is_left_out(each)]
        for used, attribute in _uses(node, left_out):
            if used in ours and attribute:
                self.need(ours[used], attribute)
            elif used in ours:
                raise NoScript(f"a definition at line {node.lineno} of {module} uses the module {used} as a value")
            elif used in defined:
                self.need(module, used)
        return _without_prefixes(text, node, ours, left_out)

    def _follow_import(self, node: ast.Import | ast.ImportFrom, name: str) -> None:
        alias = next(each for each in node.names if (each.asname or each.name.partition(".")[0]) == name)
        if isinstance(node, ast.ImportFrom) and node.level:
            raise NoScript(f"{name} is imported from {'.' * node.level}{node.module or ''}, relative to its package")
        source = node.module if isinstance(node, ast.ImportFrom) else ""
        if source and source.partition(".")[0] == _PACKAGE:
            if alias.asname not in (None, alias.name):
                raise NoScript(f"{source} is imported with {alias.name} as {alias.asname}")
            self.need(source, alias.name)
            return
        renamed = f" as {alias.asname}" if alias.asname else ""
        self.imports[f"from {source} import {alias.name}{renamed}" if source else f"import {alias.name}{renamed}"] = (
            None
        )

    def _our_modules(self, defined: dict[str, ast.stmt]) -> dict[str, str]:
        """Names under which a module has imported modules of ours."""
        modules = {}
        for name, node in defined.items():
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == _PACKAGE:
                alias = next(each for each in node.names if (each.asname or each.name) == name)
                inside = getattr(importlib.import_module(str(node.module)), alias.name, None)
                if isinstance(inside, ModuleType):
                    modules[name] = inside.__name__
        return modules

    def _read(self, module: str) -> tuple[str, dict[str, ast.stmt]]:
        if module not in self._modules:
            text = inspect.getsource(importlib.import_module(module))
            defined = {name: node for node in ast.parse(text).body for name in names_of(node)}
            self._modules[module] = text, defined
        return self._modules[module]


def names_of(node: ast.stmt) -> Iterator[str]:
    """The names that a statement at the top of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Assign):
        walked = (each for target in node.targets for each in ast.walk(target))
        yield from (each.id for each in walked if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


class _Uses(ast.NodeVisitor):
    """Names that a definition reads, with the attribute that is read of them, without annotations."""

    def __init__(self, left_out: Sequence[ast.AST]) -> None:
        self.names: dict[tuple[str, str], None] = {}
        self._left_out = {id(each) for each in left_out}

    def visit_Expr(self, node: ast.Expr) -> None:
        if id(node) not in self._left_out:
            self.visit(node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name):
            self.names[node.value.id, node.attr] = None
        else:
            self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        self.names[node.id, ""] = None

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        """Only its annotation could be visited."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for each in (*node.decorator_list, node.args, *node.body):
            self.visit(each)


def _is_left_out(node: ast.AST) -> bool:
    """True if a statement is a call that a script leaves out."""
    called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    name = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
    return name in LEFT_OUT


def _uses(node: ast.AST, left_out: Sequence[ast.AST] = ()) -> list[tuple[str, str]]:
    visitor = _Uses(left_out)
    visitor.visit(node)
    return list(visitor.names)


def _without_prefixes(text: str, node: ast.stmt, ours: dict[str, str], left_out: Sequence[ast.AST]) -> str:
    """The statement's text without some calls, with `name` for `module.name` where the module is one of ours."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(each.lineno for each in decorators)]) - 1
    lines = text.encode().split(b"\n")[first : node.end_lineno]
    places = sorted(
        ((each.lineno - 1 - first, each.col_offset, each.value.id) for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id in ours),
        reverse=True,
    )  # fmt: skip
    for line, column, prefix in places:
        lines[line] = lines[line][:column] + lines[line][column + len(prefix) + 1 :]
    gone = {line - 1 - first for each in left_out if isinstance(each, ast.stmt)
            for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)}  # fmt: skip
    return b"\n".join(line for number, line in enumerate(lines) if number not in gone).decode()
