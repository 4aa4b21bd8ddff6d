"""A known-wrong implementation, as the registry has it. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """A known-wrong implementation."""

    name: str
    spec: str
    """For `--implementation`."""
    requirement: str
    """The one that kills it, whatever else does."""
    defect: str
    """What is wrong, in one sentence."""
    environment: tuple[str, ...] = ()
    """Members of `case.ENVIRONMENTS` without which the defect cannot be seen."""


def mutants_of(
    module: str, requirement_and_defect: dict[str, tuple[str, str, str]], **more: tuple[str, ...]
) -> list[Mutant]:
    """The mutants of a module, by name; `more` has the environments of a class that needs one."""
    return [
        Mutant(
            name=name, spec=f"fsdp_conformance.mutants.{module}:{cls}", requirement=requirement, defect=defect,
            environment=more.get(cls, ()),
        )
        for name, (cls, requirement, defect) in requirement_and_defect.items()
    ]  # fmt: skip
