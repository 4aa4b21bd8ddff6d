"""
A known-wrong implementation, a correct one that is unusual, and how they are registered. Standard library only.

`@known_wrong("R003")` on an adapter class registers it where it is written: its name is the class name in kebab case,
its defect is the docstring. `registered` finds these classes in the source text, so that the list can be had without
importing torch; the classes themselves are imported in the ranks. `@legal_variant("torch-fsdp2")` and
`registered_variants` do the same for correct variants of an engine.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

C = TypeVar("C", bound=type)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """A known-wrong implementation."""

    name: str
    spec: str
    """For `--implementation`."""
    requirement: str
    """The requirement that names the defect; other requirements may fail as well."""
    defect: str
    """What is wrong, in one sentence."""
    environment: tuple[str, ...] = ()
    """Members of `case.ENVIRONMENTS` without which the defect cannot be seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A correct implementation that is unusual."""

    name: str
    spec: str
    """For `--implementation`."""
    base: str
    """The name of the engine that it is a variant of."""
    difference: str
    """What it does otherwise, in one sentence."""


def known_wrong(requirement: str, *, name: str | None = None, environment: tuple[str, ...] = ()) -> Callable[[C], C]:
    """
    Register the class below as a known-wrong implementation. All arguments must be literals: they are read as text.

    `name` is only needed where it differs from the class name in kebab case.
    """
    return lambda cls: cls


def legal_variant(base: str) -> Callable[[C], C]:
    """Register the class below as a correct variant of an engine. The argument must be a literal."""
    return lambda cls: cls


def registered(package: Path, import_name: str) -> Iterator[Mutant]:
    """The mutants in the modules of a package directory, by module and line. Raises ValueError for unusable ones."""
    for node, decorator, spec in _decorated(package, import_name, known_wrong.__name__):
        yield _mutant(node, decorator, spec)


def registered_variants(package: Path, import_name: str) -> Iterator[Variant]:
    """The correct variants in the modules of a package directory, by module and line."""
    for node, decorator, spec in _decorated(package, import_name, legal_variant.__name__):
        (base,) = map(ast.literal_eval, decorator.args)
        yield Variant(name=_kebab_case(node.name), spec=spec, base=base, difference=_first_paragraph(node, spec))


def _decorated(package: Path, import_name: str, name: str) -> Iterator[tuple[ast.ClassDef, ast.Call, str]]:
    """The classes with a decorator, the decorator's call, and the path to import each class by."""
    for path in sorted(package.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8"), filename=str(path)).body:
            if isinstance(node, ast.ClassDef):
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == name:
                        yield node, decorator, f"{import_name}.{path.stem}:{node.name}"


def _first_paragraph(cls: ast.ClassDef, spec: str) -> str:
    docstring = ast.get_docstring(cls)
    if not docstring:
        raise ValueError(f"{spec} has no docstring: the first paragraph must say what it does otherwise")
    return " ".join(docstring.partition("\n\n")[0].split())


def _mutant(cls: ast.ClassDef, decorator: ast.Call, spec: str) -> Mutant:
    defect = _first_paragraph(cls, spec)
    try:
        (requirement,) = map(ast.literal_eval, decorator.args)
        given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in decorator.keywords}
    except ValueError:
        raise ValueError(
            f"{spec}: known_wrong takes one requirement and literals, got {ast.unparse(decorator)}"
        ) from None
    return Mutant(
        name=given.get("name") or _kebab_case(cls.name),
        spec=spec,
        requirement=requirement,
        defect=defect,
        environment=given.get("environment", ()),
    )


def _kebab_case(name: str) -> str:
    """ "ReducesOverDDP" to "reduces-over-ddp"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower()
