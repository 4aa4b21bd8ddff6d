"""A requirement, and the contract that holds all of them, read from `requirements.toml`."""

from __future__ import annotations

import functools
import importlib.resources
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fsdp_conformance.errors import ConfigError, UsageError
from fsdp_conformance.suggestions import near

#: Chapter letter to title, in the order of the contract.
CHAPTERS: Mapping[str, str] = {
    "0": "Everywhere",
    "A": "Numerical parity with DDP",
    "B": "Init modes and device placement",
    "C": "Deferred (meta) initialisation",
    "D": "Parameter lifecycle and memory",
    "E": "Full-parameter access outside forward and backward",
    "F": "State machine and misuse",
    "G": "Communication schedule and volume",
    "H": "Overlap, prefetch, stream safety",
    "I": "Mixed precision",
    "J": "Gradient accumulation",
    "K": "Gradient clipping and loss scaling",
    "L": "Shared (tied) parameters",
    "M": "Frozen and ignored parameters",
    "N": "Unused parameters and rank-divergent graphs",
    "O": "Uneven and padded shards",
    "P": "Nesting and auto-wrap",
    "Q": "Buffers and batch norm",
    "R": "Activation checkpointing",
    "S": "Parameter and optimizer offload",
    "T": "Optimizer integration and optimizer state",
    "U": "State dict, checkpoint, resharding",
    "V": "Hybrid sharding, sub-groups, experts, composition",
    "W": "Multiple forwards and re-entrancy",
    "X": "Inputs and outputs",
    "Y": "Hooks",
    "Z": "Failure",
    "AA": "Reducer semantics (component)",
    "AB": "Reduce-scatter bucketing (component)",
    "AC": "Chunk and memory pool (component)",
    "AD": "Mesh collectives and cost model (component)",
    "AE": "Simulated ranks (component)",
}

#: How a requirement can be observed.
OBSERVATIONS: Mapping[str, str] = {
    "BB": "black box: build, forward, backward, step, compare",
    "FULL": "full parameters or gradients under original names, through the adapter",
    "COMM": "collectives recorded at the process group",
    "MEM": "bytes held",
    "ST": "the adapter's view of shards and of unsharded units",
    "API": "the operation itself, through the adapter",
    "ORDER": "what each operation of a stream waits for, on the simulated accelerator",
}


class Level(StrEnum):
    """How binding a requirement is."""

    MUST = "M"
    """Binding for every implementation."""
    DECLARED = "C"
    """Binding for implementations that declare the flag; all others must raise (R000)."""
    SHOULD = "S"
    """Measured and reported; does not affect certification."""

    @property
    def word(self) -> str:
        """The level as a word for reports."""
        return {"M": "MUST", "C": "MUST if declared", "S": "SHOULD"}[self.value]


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """One thing that an implementation owes its users."""

    id: str
    name: str
    """A few words, for headlines."""
    level: Level
    chapter: str
    """A key of CHAPTERS."""
    sentence: str
    """The requirement itself, as a statement of what holds."""
    observation: tuple[str, ...]
    """Keys of OBSERVATIONS."""
    flags: tuple[str, ...] = ()
    """Capabilities that it concerns. In a mandatory requirement, a flag excuses only the part that needs it."""
    source: tuple[str, ...] = ()
    """Upstream tests and issues that establish it; "derived" if it is an inference."""
    look_at: str = ""
    """Where to look if it fails."""


@dataclass(frozen=True, slots=True)
class Contract:
    """All requirements by id, in order, and flags that are not yet in `capability.CAPABILITIES`."""

    requirements: Mapping[str, Requirement]
    future_flags: Mapping[str, str]
    """Flag to its future description."""

    def __getitem__(self, requirement_id: str) -> Requirement:
        """The requirement with that id. Raises UsageError with the closest ids if there is none."""
        try:
            return self.requirements[requirement_id]
        except KeyError:
            close = near(requirement_id, self.requirements)
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            last = max(self.requirements, default="none")
            raise UsageError(f"requirement must be one of R000 to {last}, got {requirement_id!r}{hint}") from None

    def chapter(self, requirement_id: str) -> str:
        """The letter of the requirement's chapter."""
        return self[requirement_id].chapter


@functools.cache
def load() -> Contract:
    """The contract shipped with this package."""
    return parse(importlib.resources.files(__package__).joinpath("requirements.toml").read_text(encoding="utf-8"))


@functools.cache
def uncovered() -> Mapping[str, str]:
    """The requirements that no case binds, each with the reason; a guard test holds the list to the suites."""
    return _reasons("uncovered")


@functools.cache
def undeclared() -> Mapping[str, str]:
    """The requirements whose cases need what no bundled adapter declares, each with the reason; guarded as well."""
    return _reasons("undeclared")


def _reasons(table: str) -> Mapping[str, str]:
    text = importlib.resources.files(__package__).joinpath("uncovered.toml").read_text(encoding="utf-8")
    return {entry["id"]: entry["reason"] for entry in tomllib.loads(text)[table]}


def parse(text: str) -> Contract:
    """
    A contract from the text of a `requirements.toml`.

    Raises ConfigError with every problem found: fields that are missing, unknown or of the wrong type, and duplicate
    ids.
    """
    document = tomllib.loads(text)
    problems: list[str] = []
    requirements: dict[str, Requirement] = {}
    for number, table in enumerate(document.get("requirement", []), start=1):
        where = table.get("id", f"entry {number}")
        wrong = _problems(table)
        if where in requirements:
            wrong.append("duplicate id")
        problems += [f"{where}: {problem}" for problem in wrong]
        if not wrong:
            requirements[table["id"]] = _requirement(table)
    if problems:
        raise ConfigError(problems, where="requirements.toml")
    return Contract(requirements=requirements, future_flags=dict(document.get("future_flags", {})))


_TEXTS = ("id", "name", "level", "chapter", "sentence")
_OPTIONAL_TEXTS = ("look_at",)
_LISTS = ("observation",)
_OPTIONAL_LISTS = ("flags", "source")


def _problems(table: Mapping[str, Any]) -> list[str]:
    problems = [f"{key} is missing" for key in (*_TEXTS, *_LISTS) if key not in table]
    fields = (*_TEXTS, *_OPTIONAL_TEXTS, *_LISTS, *_OPTIONAL_LISTS)
    problems += [f"unknown field {key}; fields are {', '.join(fields)}" for key in table if key not in fields]
    problems += [
        f"{key} must be a non-empty string, got {table[key]!r}"
        for key in (*_TEXTS, *_OPTIONAL_TEXTS)
        if key in table and not (isinstance(table[key], str) and table[key].strip())
    ]
    problems += [
        f"{key} must be a list of strings, got {table[key]!r}"
        for key in (*_LISTS, *_OPTIONAL_LISTS)
        if key in table and not (isinstance(table[key], list) and all(isinstance(item, str) for item in table[key]))
    ]
    if "level" in table and table["level"] not in tuple(Level):
        problems.append(f"level must be M, C or S, got {table['level']!r}")
    return problems


def _requirement(table: Mapping[str, Any]) -> Requirement:
    return Requirement(
        id=table["id"],
        name=table["name"],
        level=Level(table["level"]),
        chapter=table["chapter"],
        sentence=table["sentence"],
        observation=tuple(table["observation"]),
        flags=tuple(table.get("flags", ())),
        source=tuple(table.get("source", ())),
        look_at=table.get("look_at", ""),
    )
