"""
What the contract's data must obey beyond its shape: ids without gaps, known chapters, flags that exist.

The lint guards the register, not the meaning: a sentence that changes its meaning needs a new id, and only a reader
sees that.
"""

from __future__ import annotations

import re

from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.contract.requirement import CHAPTERS, OBSERVATIONS, Contract, Level, Requirement

_ID = re.compile(r"R\d{3}")
_SOURCE = re.compile(
    r"(pytorch|fairscale|deepspeed|colossalai)[ #]|[\w.-]+(/[\w.-]+)?#\d+|derived|ddp reducer", re.IGNORECASE
)
_MAX_NAME = 72


def lint(contract: Contract) -> list[str]:
    """Everything that is wrong with the contract, one sentence each; empty if nothing is."""
    problems = []
    for position, requirement in enumerate(contract.requirements.values()):
        expected = f"R{position:03d}"
        if not _ID.fullmatch(requirement.id):
            problems.append(f"id={requirement.id!r}, but should be R and three digits")
        elif requirement.id != expected:
            problems.append(
                f"id={requirement.id}, but should be {expected}: ids are contiguous, and new ones go to the end"
            )
        problems += [f"{requirement.id}: {problem}" for problem in _lint_requirement(requirement, contract)]
    for flag in contract.future_flags:
        if flag in CAPABILITIES:
            problems.append(f"future flag {flag} is a capability now, so it should be deleted from [future_flags]")
        elif not any(flag in requirement.flags for requirement in contract.requirements.values()):
            problems.append(f"future flag {flag} is named by no requirement")
    return problems


def _lint_requirement(requirement: Requirement, contract: Contract) -> list[str]:
    problems = []
    if requirement.chapter not in CHAPTERS:
        problems.append(f"chapter={requirement.chapter!r}, but should be one of {', '.join(CHAPTERS)}")
    problems += [
        f"observation {item!r} is not one of {', '.join(OBSERVATIONS)}"
        for item in requirement.observation
        if item not in OBSERVATIONS
    ]
    if not requirement.observation:
        problems.append("observation is empty")
    problems += [
        f"flag {flag!r} is neither a capability nor a future flag"
        for flag in requirement.flags
        if flag not in CAPABILITIES and flag not in contract.future_flags
    ]
    if requirement.level is Level.DECLARED and not requirement.flags:
        problems.append("level C, but no flag says who is bound")
    if len(requirement.name) > _MAX_NAME:
        problems.append(f"name has {len(requirement.name)} characters, but should have at most {_MAX_NAME}")
    if not requirement.sentence.rstrip().endswith("."):
        problems.append("sentence should end with a full stop")
    if not requirement.source:
        problems.append("source is empty, but should name what pins it, or say 'derived'")
    problems += [
        f"source {item!r} names no public test or issue" for item in requirement.source if not _SOURCE.search(item)
    ]
    for field in ("name", "sentence", "look_at"):
        text = getattr(requirement, field)
        if text != " ".join(text.split()):
            problems.append(f"{field} has stray white space")
    return problems
