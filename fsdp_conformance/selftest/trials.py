"""
The trials of `fsdp-conformance selftest`, and the result of each.

    kill     a case must kill a known-wrong engine, by a finding that shows its defect
    right    a case must not object to a correct engine
    loss     a plain comparison of losses, on the same known-wrong engine

The plan is the same in every process that makes it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from fsdp_conformance.adapters import registry
from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.cases.places import places
from fsdp_conformance.contract.case import Case
from fsdp_conformance.contract.gate import gate
from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.mutants import MUTANTS, Mutant, kill
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.selftest.cases import BoundCase, bound_cases, run_case
from fsdp_conformance.selftest.correct import BUNDLED, CORRECT, has_upstream_defect
from fsdp_conformance.selftest.plain import STRICT, USUAL, difference, plain_loss
from fsdp_conformance.verdict import RAN, Verdict

#: Engines of which a plain comparison of losses trains a model; others are parts that training does not reach.
_TRAINED = frozenset({"torch-fsdp2", "torch-fsdp1", "torch-ddp", "reference"})

#: The profile of the cases that judge the reference engine's components, and nothing else.
_COMPONENTS = "components-2026.11"


class Kind(StrEnum):
    """The claim that a trial tests."""

    KILL = "kill"
    RIGHT = "right"
    LOSS = "loss"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One case on one engine."""

    kind: Kind
    group: str
    """The class of defects: the module of the mutant; for a correct engine, its name."""
    engine: str
    """The mutant, or the correct engine."""
    case: str
    """Empty for the comparison of losses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of a trial."""

    trial: Trial
    good: bool
    """Killed for its reason, not objected to, or seen in the losses."""
    text: str
    """The finding, or why there is none."""
    strict: bool = False
    """True if the strict comparison of losses sees it."""
    failed: bool = False
    """True if the suite itself failed, so that nothing is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The trials, and the mutants that no case can meet on this machine."""

    trials: tuple[Trial, ...]
    groups: dict[str, str]
    """Class of defects to what it is about."""
    not_here: dict[str, str]
    """Mutant to the reason."""


def plan(*, quick: bool, suites: str = "fsdp_conformance.suites") -> Plan:
    """All pairs of a case and a mutant that it names, or one mutant of each class; and the trials to go with them."""
    settings = RunSettings()
    here = places(settings)
    meetings: dict[str, list[BoundCase]] = {}
    absent: dict[str, str] = {}
    for bound in bound_cases(suites):
        record = gate(bound.case, declared=lambda _: frozenset(CAPABILITIES), settings=settings, places=here).record
        for name in bound.case.kills:
            if record is not None:
                absent.setdefault(name, record.reason)
            else:
                meetings.setdefault(name, []).append(bound)
    met = [MUTANTS[name] for name in MUTANTS if name in meetings]
    if quick:
        met = list({_group(mutant): mutant for mutant in reversed(met)}.values())[::-1]
    pairs = [
        (mutant, bound)
        for mutant in met
        for bound in (_smallest(meetings[mutant.name], 1) if quick else meetings[mutant.name])
    ]
    kills = [
        Trial(kind=Kind.KILL, group=_group(mutant), engine=mutant.name, case=bound.case.id) for mutant, bound in pairs
    ]
    losses = [
        Trial(kind=Kind.LOSS, group=_group(mutant), engine=mutant.name, case="")
        for mutant in met
        if mutant.engine in _TRAINED
    ]
    tried = {bound.case.id: bound for _, bound in pairs}.values()
    right = _right([bound.case for bound in (tried if quick else _one_of_each_method(tried))], each_variant=not quick)
    return Plan(
        trials=(*sorted([*kills, *losses], key=lambda trial: list(MUTANTS).index(trial.engine)), *right),
        groups={group: _about(group) for group in dict.fromkeys(trial.group for trial in kills)},
        not_here={name: reason for name, reason in absent.items() if name not in meetings},
    )


def run(trial: Trial, suites: str = "fsdp_conformance.suites") -> Result:
    """Run a trial."""
    try:
        if trial.kind is Kind.LOSS:
            return _compare_losses(trial)
        (bound,) = (bound for bound in bound_cases(suites) if bound.case.id == trial.case)
        return _killed(trial, bound) if trial.kind is Kind.KILL else _unobjected(trial, bound)
    except SuiteError as error:
        return Result(trial=trial, good=False, failed=True, text=str(error))


def _killed(trial: Trial, bound: BoundCase) -> Result:
    mutant = MUTANTS[trial.engine]
    record = run_case(bound, mutant.spec)
    reason = kill.reason(record, mutant)
    failed = record.verdict is Verdict.ERROR_SUITE
    text = kill.survival(record, mutant) if reason is None else reason.sentence()
    return Result(trial=trial, good=reason is not None, failed=failed, text=text)


def _unobjected(trial: Trial, bound: BoundCase) -> Result:
    record = run_case(bound, CORRECT[trial.engine])
    good = record.verdict in (Verdict.PASS, Verdict.UNSUPPORTED)
    text = "" if good else f"{trial.engine} on {trial.case}: {record.verdict}: {record.reason}"
    return Result(trial=trial, good=good, failed=record.verdict is Verdict.ERROR_SUITE, text=text)


def _compare_losses(trial: Trial) -> Result:
    record = run_case(plain_loss(), MUTANTS[trial.engine].spec)
    distance = difference(record)
    if distance is None:
        # A training that ends in an exception cannot be overlooked.
        raised = record.verdict not in RAN or bool(record.findings)
        return Result(trial=trial, good=raised, strict=raised, text=f"{record.verdict}: {record.reason}")
    return Result(trial=trial, good=distance > USUAL, strict=distance > STRICT, text=f"losses differ by {distance:.3g}")


def _right(cases: Sequence[Case], *, each_variant: bool) -> list[Trial]:
    """Every case on the bundled engines that offer what it needs, and on each of their variants or on one in turn."""
    variants = [name for name in CORRECT if name not in BUNDLED]
    parts = {entry.id for entry in load_profile(_COMPONENTS).entries}
    trials = []
    for index, case in enumerate(cases):
        # The components shard nothing by themselves.
        whole = [*BUNDLED[:2], *(variants if each_variant else variants[index % len(variants) :][:1])]
        trials += [
            Trial(kind=Kind.RIGHT, group=name, engine=name, case=case.id)
            for name in (BUNDLED[2:] if case.id in parts else whole)
            if _declared(name).issuperset(case.needs) and not has_upstream_defect(name, case.id)
        ]
    return trials


@cache
def _declared(name: str) -> frozenset[str]:
    return frozenset(registry.load(CORRECT[name]).declared())


def _smallest(cases: Iterable[BoundCase], number: int) -> list[BoundCase]:
    return sorted(cases, key=lambda bound: (len(bound.case.environment), bound.case.world_size))[:number]


def _one_of_each_method(cases: Iterable[BoundCase]) -> list[BoundCase]:
    methods: dict[tuple[str, str], list[BoundCase]] = {}
    for bound in cases:
        methods.setdefault((bound.owner.__qualname__, bound.case.title), []).append(bound)
    return [_smallest(members, 1)[0] for members in methods.values()]


def _group(mutant: Mutant) -> str:
    """The class of a defect: the module that it is in."""
    return mutant.spec.partition(":")[0].rpartition(".")[2]


def _about(group: str) -> str:
    """The first line of the module's docstring."""
    text = importlib.import_module(f"fsdp_conformance.mutants.{group}").__doc__ or ""
    return text.strip().partition("\n")[0].rstrip(".:")
