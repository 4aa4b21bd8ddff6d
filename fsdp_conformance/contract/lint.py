"""
Rules for the contract's data beyond its format: ids without gaps, known chapters, existing flags.

The lint guards the register, not the meaning: a sentence that changes its meaning needs a new id, which only a reader
can notice.
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
    """Every problem of the contract, one sentence each."""
    problems = []
    for position, requirement in enumerate(contract.requirements.values()):
        expected = f"R{position:03d}"
        if not _ID.fullmatch(requirement.id):
            problems.append(f"id must be R and three digits, got {requirement.id!r}")
        elif requirement.id != expected:
            problems.append(
                f"id: expected {expected}, got {requirement.id}; ids are contiguous, and new ones go at the end"
            )
        problems += [f"{requirement.id}: {problem}" for problem in _lint_requirement(requirement, contract)]
    for flag in contract.future_flags:
        if flag in CAPABILITIES:
            problems.append(f"future flag {flag} is a capability now: delete it from [future_flags]")
        elif not any(flag in requirement.flags for requirement in contract.requirements.values()):
            problems.append(f"no requirement names future flag {flag}")
    return problems


def _lint_requirement(requirement: Requirement, contract: Contract) -> list[str]:
    problems = []
    if requirement.chapter not in CHAPTERS:
        problems.append(f"chapter must be one of {', '.join(CHAPTERS)}, got {requirement.chapter!r}")
    problems += [
        f"observation must be one of {', '.join(OBSERVATIONS)}, got {item!r}"
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
        problems.append("a requirement of level C must name the flags that make it binding")
    if len(requirement.name) > _MAX_NAME:
        problems.append(f"name must have at most {_MAX_NAME} characters, got {len(requirement.name)}")
    if not requirement.sentence.rstrip().endswith("."):
        problems.append("sentence must end with a full stop")
    if not requirement.source:
        problems.append("source must name a public test or issue, or be 'derived'")
    problems += [
        f"source must name a public test or issue, got {item!r}"
        for item in requirement.source
        if not _SOURCE.search(item)
    ]
    for field in ("name", "sentence", "look_at"):
        text = getattr(requirement, field)
        if text != " ".join(text.split()):
            problems.append(f"{field} has stray whitespace")
    return problems
