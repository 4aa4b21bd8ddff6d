"""Refusals: deliberate errors that name what they refuse count, breakdowns do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fsdp_conformance.cases.checks import CaseChecks
from fsdp_conformance.cases.rank import CaseRank
from fsdp_conformance.cases.refusal import why_no_refusal
from fsdp_conformance.contract.case import Case
from fsdp_conformance.errors import ConfigError, Unsupported
from fsdp_conformance.outcome.records import RankReport
from fsdp_conformance.references.reference_set import References
from fsdp_conformance.workload.definition import Regime, Workload

NAMES = ("replicas", "mesh")


class PoolEmpty(LookupError):
    """An engine's own error, which derives from one of Python's."""


def raised(act: Callable[[], object]) -> Exception:
    """The exception that `act` raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the caller knows which
        act()
    return caught.value


def throw(error: Exception) -> Any:
    """Raise it."""
    raise error


@pytest.mark.parametrize(
    "error",
    [
        ValueError("replicas must divide 4, got 3"),
        RuntimeError("Invalid MESH"),
        NotImplementedError("no replicas here"),
        AssertionError("replicas"),
        TypeError("replicas must be an int, got str"),
        ConfigError(["replicas must divide 4, got 3"], where="Plan"),
        PoolEmpty("no mesh left"),
        Unsupported("hsdp"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_refusals(error: Exception) -> None:
    """Errors that torch's engines and others raise on purpose; what is Unsupported names its flag."""
    assert why_no_refusal(raised(lambda: throw(error)), NAMES) is None


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda: None.replicas, "broke down (AttributeError: 'NoneType' object has no attribute 'replicas')"),  # type: ignore[attr-defined]
        (lambda: dict[str, int]()["replicas"], "broke down (KeyError: 'replicas')"),
        (lambda: list(NAMES)[2], "broke down (IndexError: list index out of range)"),
        (lambda: len(3), "broke down (TypeError: object of type 'int' has no len())"),  # type: ignore[arg-type]
        (lambda: 1 / 0, "broke down (ZeroDivisionError: division by zero)"),
        (lambda: throw(AttributeError("no replicas")), "broke down (AttributeError: no replicas)"),
        (lambda: throw(RuntimeError("size mismatch")), "names none of replicas, mesh (RuntimeError: size mismatch)"),
        (lambda: throw(AssertionError()), "names none of replicas, mesh (AssertionError: without a message)"),
    ],
)
def test_breakdowns(act: Callable[[], object], why: str) -> None:
    """An exception that Python raises itself is a defect, whatever its text; an error must name what was requested."""
    assert (why_no_refusal(raised(act), NAMES) or "").endswith(why)


def _here() -> CaseRank:
    """A case without ranks, about a refusal."""
    case = Case(id="R054/a-mesh", requirements=("R054",), chapter="F", title="A mesh is refused", world_size=1)
    return CaseRank(
        case=case,
        rank=0,
        world_size=1,
        device_type="cpu",
        local_rank=0,
        declared=frozenset(),
        report=RankReport(rank=0),
    )


def _no_references(workload: Workload, regime: Regime | None) -> References:
    raise AssertionError("a refusal needs no references")


@pytest.mark.parametrize(
    ("error", "excused", "shown"),
    [(KeyError("mesh"), False, True), (ValueError("no mesh here"), False, False), (KeyError("mesh"), True, False)],
    ids=["a breakdown", "a refusal", "excused"],
)
def test_what_is_no_refusal_is_shown_to_a_debugger(error: Exception, excused: bool, shown: bool) -> None:
    """`debug --pdb` stops where the case has caught what it holds against the engine, and nowhere else."""
    here = _here()
    examined: list[BaseException] = []
    checks = CaseChecks(here, references=_no_references, examine=examined.append, observe=lambda name, look: look())

    def refuse() -> None:
        raise error

    with checks.refusal("R054", "a mesh", names=NAMES) as outcome:
        outcome.excused = excused
        refuse()

    assert examined == ([error] if shown else [])
    assert bool(here.report.findings) is shown
