"""
A known-wrong implementation, a correct one that is unusual, and how they are registered. Standard library only.

`@known_wrong("R003")` on an adapter class registers it where it is written: its name is the class name in kebab case,
its defect is the docstring, its engine the adapter that it derives from. `registered` finds these classes in the source
text, so that the list can be had without importing torch; the classes themselves are imported in the ranks. Reports and
certificates call a mutant `mutant:NAME`, which is also what `--implementation` takes.
`@legal_variant("torch-fsdp2")` and `registered_variants` do the same for correct variants of an engine.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from fsdp_conformance.adapters.base import Adapter

C = TypeVar("C", bound="type[Adapter]")

_PACKAGE = Path(__file__).parents[1]


class Symptom(StrEnum):
    """How a defect shows in the record of a case."""

    FINDING = "finding"
    """A comparison that the case makes does not hold."""
    REFUSAL = "refusal"
    """A misuse that must be refused is accepted."""
    HAZARD = "hazard"
    """Accesses to memory are not ordered."""
    RAISED = "raised"
    """The engine raises the exception that is the defect: see `Mutant.raises`."""
    HANG = "hang"
    """A rank passes its deadline."""
    CRASH = "crash"
    """A rank is ended by a signal, or exits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """A known-wrong implementation."""

    name: str
    spec: str
    """For `--implementation`."""
    engine: str
    """The implementation that it changes: `torch-fsdp2`, `reference`, ... Without the defect it is this one."""
    requirements: tuple[str, ...]
    """The requirements that name the defect, the one that names it best first; others may fail as well."""
    defect: str
    """The defect, in one sentence."""
    shows: tuple[Symptom, ...] = (Symptom.FINDING,)
    """How the defect shows: a case kills it by one of these."""
    raises: str = ""
    """The class of the exception that is the defect; any other exception is none of this mutant's."""
    environment: tuple[str, ...] = ()
    """Members of `case.ENVIRONMENTS` without which the defect cannot be seen."""

    @property
    def requirement(self) -> str:
        """The requirement that names the defect best."""
        return self.requirements[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A correct implementation that is unusual."""

    name: str
    spec: str
    """For `--implementation`."""
    base: str
    """The name of the engine that it is a variant of; empty if it is a separate engine."""
    difference: str
    """The legal difference, in one sentence."""


def known_wrong(
    *requirements: str,
    name: str | None = None,
    engine: str | None = None,
    shows: tuple[str, ...] = ("finding",),
    raises: str = "",
    environment: tuple[str, ...] = (),
) -> Callable[[C], C]:
    """
    Register the class below as a known-wrong implementation. All arguments must be literals: they are read as text.

    `name` is only needed where it differs from the class name in kebab case, `engine` where no base class is a bundled
    adapter. `shows` lists members of `Symptom`; it contains "raised" if and only if `raises` names an exception.
    """

    def named(cls: C) -> C:
        # Otherwise it inherits the name of the engine that it breaks, and a report would accuse that engine.
        cls.name = f"mutant:{name or _kebab_case(cls.__name__)}"
        return cls

    return named


def legal_variant(base: str = "") -> Callable[[C], C]:
    """Register the class below as correct: a variant of `base`, a literal, or a separate engine."""
    return lambda cls: cls


def registered(package: Path, import_name: str) -> Iterator[Mutant]:
    """The mutants in the modules of a package directory, by module and line. Raises ValueError for unusable ones."""
    for node, decorator, module, spec in _decorated(package, import_name, known_wrong.__name__):
        yield _mutant(node, decorator, module, spec)


def registered_variants(package: Path, import_name: str) -> Iterator[Variant]:
    """The correct variants in the modules of a package directory, by module and line."""
    for node, decorator, _, spec in _decorated(package, import_name, legal_variant.__name__):
        base = ast.literal_eval(decorator.args[0]) if decorator.args else ""
        yield Variant(name=_kebab_case(node.name), spec=spec, base=base, difference=_first_paragraph(node, spec))


def _decorated(package: Path, import_name: str, name: str) -> Iterator[tuple[ast.ClassDef, ast.Call, ast.Module, str]]:
    """The classes with a decorator, the decorator's call, their module, and the path to import each class by."""
    for path in sorted(package.glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == name:
                        yield node, decorator, module, f"{import_name}.{path.stem}:{node.name}"


def _first_paragraph(cls: ast.ClassDef, spec: str) -> str:
    docstring = ast.get_docstring(cls)
    if not docstring:
        raise ValueError(f"{spec} has no docstring: the first paragraph must say what is wrong, or what is unusual")
    return " ".join(docstring.partition("\n\n")[0].split())


def _mutant(cls: ast.ClassDef, decorator: ast.Call, module: ast.Module, spec: str) -> Mutant:
    defect = _first_paragraph(cls, spec)
    try:
        requirements = tuple(map(ast.literal_eval, decorator.args))
        given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in decorator.keywords}
    except ValueError:
        requirements = ()
    if not requirements:
        raise ValueError(f"{spec}: known_wrong takes requirements and literals, got {ast.unparse(decorator)}")
    engine = given.get("engine") or _engine_of(cls, module)
    if engine is None:
        raise ValueError(f"{spec}: no base class is a bundled adapter; name the engine with `engine=`")
    shows, raises = tuple(map(Symptom, given.get("shows", ("finding",)))), given.get("raises", "")
    if (Symptom.RAISED in shows) != bool(raises):
        raise ValueError(f'{spec}: shows="raised" and raises="CLASS" go together, got {ast.unparse(decorator)}')
    return Mutant(
        name=given.get("name") or _kebab_case(cls.name),
        spec=spec,
        engine=engine,
        requirements=requirements,
        defect=defect,
        shows=shows,
        raises=raises,
        environment=given.get("environment", ()),
    )


def _engine_of(cls: ast.ClassDef, module: ast.Module) -> str | None:
    """The `name` of the first adapter among the base classes, or None."""
    for base in cls.bases:
        base_engine = _resolved(ast.unparse(base), module)
        if base_engine is not None:
            own, where, is_adapter = base_engine
            engine = (_name_in(own) if is_adapter else None) or _engine_of(own, where)
            if engine is not None:
                return engine
    return None


def _resolved(name: str, module: ast.Module) -> tuple[ast.ClassDef, ast.Module, bool] | None:
    """A class by the name that it has in a module, the module that defines it, and whether that is an adapter's."""
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node, module, False
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name and (source := _source(node.module)):
                    target = _resolved(alias.name, source)
                    is_adapter = node.module.startswith("fsdp_conformance.adapters.")
                    return target and (*target[:2], is_adapter or target[2])
    return None


@cache
def _source(module: str) -> ast.Module | None:
    """A module of this package as text; None for others."""
    head, *rest = module.split(".")
    path = _PACKAGE.joinpath(*rest).with_suffix(".py")
    if head != _PACKAGE.name or not path.is_file():
        return None
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _name_in(adapter: ast.ClassDef) -> str | None:
    """The literal that an adapter's class body gives to `name`."""
    for node in adapter.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "name" and node.value is not None:
            return str(ast.literal_eval(node.value))
    return None


def _kebab_case(name: str) -> str:
    """ "ReducesOverDDP" to "reduces-over-ddp"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower()
