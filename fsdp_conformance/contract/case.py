"""
A case: one stable id, the requirements it binds, and its needs. `cases.declaration` binds it to a test method.

Case ids look like `R001/exact-probe-sgd-ws2`: the primary requirement, the slug of the method, its axis values. They
are the keys of manifests, expectation files and run files, so an id is never renamed or reused. pytest's node ids would
not do, because they differ between a checkout and a wheel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Attribute of a generated test method that holds its Case.
CASE_ATTRIBUTE = "conformance_case"

#: The slug of a case that `explore` has drawn begins with this.
EXPLORED = "explored-"

#: The slug of a case that trains another scenario in each run begins with this.
FRESH = "fresh-"

#: What a case can ask of the user's own model (--workload), each with what a model lacks that does not have it.
OF_WORKLOAD = {
    "own_workload": "no model",
    "own_adam": "no optimizer called 'adam'",
    "own_meta": "no build_on_meta",
    "own_units": "no units",
    "own_frozen": "no frozen parameter",
    "own_tied": "no parameter that is used under two names",
    "own_float32": "parameters with a dtype other than float32",
    "own_exact": "no exact arithmetic: its training rounds",
}

#: Environments that a case can ask for; the harness knows which are present.
#: "stream_order": the device can be asked what each operation of a stream waits for; only the simulated one answers.
ENVIRONMENTS = frozenset({"accelerator", "cuda", "nccl", "gloo", "pinned_memory", "stream_order", *OF_WORKLOAD})

#: The deadline of a case that names none, in seconds.
TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A case, as far as a run must know it before running it."""

    id: str
    requirements: tuple[str, ...]
    """Requirement ids, the primary one first."""
    chapter: str
    """Letter of the contract's chapter."""
    world_size: int
    title: str
    """The method's docstring: the expected behaviour in one statement."""
    needs: tuple[str, ...] = ()
    """Capability flags; the verdict is UNSUPPORTED if one is not declared."""
    environment: tuple[str, ...] = ()
    """Members of ENVIRONMENTS; the verdict is NOT_RUN_ENV if one is absent."""
    kills: tuple[str, ...] = ()
    """Known-wrong implementations (names in `fsdp_conformance.mutants`) that must fail this case."""
    timeout_s: float = TIMEOUT_S
    """The case's deadline."""
    starts_early: bool = False
    """Some engines make ranks wait for the deadline: start the case first, so that others run while it waits."""
    processes: str = ""
    """Why the ranks of this case must be processes; empty if they can be simulated."""
    live: str = ""
    """Why the ranks of this case judge by themselves; empty if a referee judges what they observe."""
    faults: tuple[str, ...] = ()
    """Descriptions of the case's faults that strike collectives which an engine may not issue."""
    axes: tuple[tuple[str, Any], ...] = ()
    """The arguments of the test method, by name."""

    @property
    def is_saved(self) -> bool:
        """True if `explore` drew it and a user saved it: then it belongs to no profile."""
        return self.id.partition("/")[2].startswith(EXPLORED)

    @property
    def is_fresh(self) -> bool:
        """True if it trains another scenario in each run."""
        return self.id.partition("/")[2].startswith(FRESH)

    @property
    def is_own(self) -> bool:
        """True if it trains the model that the user names with --workload: then it belongs to a separate profile."""
        return "own_workload" in self.environment


def case_of(method: Any) -> Case | None:
    """The case that a test method is bound to, or None."""
    return getattr(method, CASE_ATTRIBUTE, None)
