"""
The source of a function, with all that it uses of this package: classes, functions, constants, in an order that runs.

It is printed from the syntax tree, without docstrings, annotations and comments, and `module.name` is `name` where
the module is one of ours.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from fsdp_conformance.repro.refused import NoScript

_PACKAGE = "fsdp_conformance"

#: Calls that a script leaves out: they refuse a plan or a kind of ranks, both of which a script has settled.
LEFT_OUT = frozenset({"refuse_undeclared", "refuse_other_norm", "refuse_gpus_and_simulated_ranks"})


#: Short forms of what most scripts need; `dataclasses.replace` cannot take these tuples.
SHORT = {
    (
        "fsdp_conformance.workload.definition",
        "Batch",
    ): 'Batch = namedtuple("Batch", "args kwargs target", defaults=[(), {}, None])',
    (
        "fsdp_conformance.workload.definition",
        "BatchKey",
    ): 'BatchKey = namedtuple("BatchKey", "step micro rank world_size", defaults=[0, 0, 1])',
}


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
        self._modules: dict[str, dict[str, ast.stmt]] = {}

    def need(self, module: str, name: str) -> None:
        """Add what a module calls `name`, after what it uses itself. Raises NoScript if that cannot be copied."""
        if (module, name) in self._provided:
            if text := self._provided[module, name]:
                self.provide(module, name)
                for used, _ in _uses(ast.parse(text)):
                    if used in self._read(module) and used != name:
                        self.need(module, used)
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

    def function(self, name: str) -> Callable[..., Any] | None:
        """The function of the fixtures that the script defines under this name."""
        owner = self._owners.get(name, "")
        return getattr(sys.modules[owner], name) if owner.startswith(f"{_PACKAGE}.fixtures.") else None

    def definition(self, module: str, name: str) -> ast.stmt | None:
        """The statement at the top of a module that defines a name."""
        return self._read(module).get(name)

    def text_of(self, module: str, node: ast.stmt) -> str:
        """The text of a module's statement, or of one in a class; what it uses is added first."""
        defined = self._read(module)
        ours = self._our_modules(defined)
        short = _Short(ours).visit(copy.deepcopy(node))
        for used, attribute in _uses(node):
            if used in ours and attribute:
                self.need(ours[used], attribute)
            elif used in ours:
                raise NoScript(f"a definition at line {node.lineno} of {module} uses the module {used} as a value")
            elif used in defined:
                self.need(module, used)
        # Without the blank lines that separate methods.
        return textwrap.indent(re.sub(r"\n\n+", "\n", ast.unparse(short)), " " * node.col_offset)

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

    def _read(self, module: str) -> dict[str, ast.stmt]:
        """The statements at the top of a module that define a name."""
        if module not in self._modules:
            text = inspect.getsource(importlib.import_module(module))
            self._modules[module] = {name: node for node in ast.parse(text).body for name in names_of(node)}
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

    def __init__(self) -> None:
        self.names: dict[tuple[str, str], None] = {}

    def visit_Expr(self, node: ast.Expr) -> None:
        if not _is_left_out(node):
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


def _uses(node: ast.AST) -> list[tuple[str, str]]:
    visitor = _Uses()
    visitor.visit(node)
    return list(visitor.names)


class _Short(ast.NodeTransformer):
    """Takes out docstrings, annotations and calls that a script leaves out, and modules of ours before a name."""

    def __init__(self, ours: Mapping[str, str]) -> None:
        self._ours = ours

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if isinstance(node.value, ast.Name) and node.value.id in self._ours:
            return ast.Name(node.attr, node.ctx)
        self.generic_visit(node)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.stmt | None:
        if _is_left_out(node) or isinstance(node.value, ast.Constant):
            return None
        self.generic_visit(node)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt | None:
        self.generic_visit(node)
        return None if node.value is None else ast.Assign([node.target], node.value, lineno=node.lineno)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        # The fields of a dataclass are its annotations, whatever they say.
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        is_data = any("dataclass" in ast.unparse(each) for each in node.decorator_list)
        self.generic_visit(node)
        if is_data:
            kept = [ast.AnnAssign(each.target, ast.Name("object"), self.visit(each.value) if each.value else None, 1)
                    for each in fields]  # fmt: skip
            node.body = [*kept, *(each for each in node.body if not isinstance(each, ast.Assign))]
        node.body = node.body or [ast.Pass()]
        return node
