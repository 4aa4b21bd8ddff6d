"""Cases, reports, exits and records made by hand, for the tests of the judge and of the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp_conformance.adapters.registry import identity
from fsdp_conformance.contract.case import Case
from fsdp_conformance.outcome.records import CaseRecord, CheckCount, Finding, RankError, RankExit, RankReport
from fsdp_conformance.verdict import Verdict

#: What gloo says on the peers of a rank that has gone.
LOST_PEER = "[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:35173"
#: ... and of one that does not come.
TIMED_OUT = "[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation to complete"


def a_case(*, world_size: int = 2, requirements: Sequence[str] = ("R001", "R003"), **changes: Any) -> Case:
    """R001/probe-ws2, unless changed."""
    fields: dict[str, Any] = {
        "id": f"{requirements[0]}/probe-ws{world_size}",
        "requirements": tuple(requirements),
        "chapter": "A",
        "world_size": world_size,
        "title": "Losses equal DDP's.",
    }
    return Case(**{**fields, **changes})


def a_report(rank: int, *findings: Finding, comparisons: int = 4, **changes: Any) -> RankReport:
    """A rank that got through its body and made comparisons."""
    fields: dict[str, Any] = {
        "findings": list(findings),
        "checks": {"gradient parity": CheckCount(comparisons=comparisons, elements=10 * comparisons)},
    }
    return RankReport(rank=rank, **{**fields, **changes})


def an_error(
    message: str = "boom",
    *,
    kind: str = "builtins.RuntimeError",
    blame: str = "implementation",
    time: float = 1.0,
    **changes: Any,
) -> RankError:
    """An exception of a rank."""
    return RankError(kind=kind, message=message, traceback=f"Traceback: {message}", blame=blame, time=time, **changes)


def failed(rank: int, error: RankError, *findings: Finding, **changes: Any) -> RankReport:
    """A rank whose body raised."""
    return a_report(rank, *findings, comparisons=0, error=error, **changes)


def an_exit(rank: int, *, code: int | None = 0, time: float = 9.0, reported: bool = True, **changes: Any) -> RankExit:
    """A process that ended; by itself, unless changed."""
    return RankExit(rank=rank, pid=1000 + rank, exitcode=code, time=time, reported=reported, **changes)


def stuck(rank: int, **changes: Any) -> RankExit:
    """A rank that the controller ended at its deadline."""
    fields: dict[str, Any] = {"code": -9, "reported": False, "ended_by_controller": True, "stack": "Thread 0x1"}
    return an_exit(rank, **{**fields, **changes})


def exits(count: int) -> list[RankExit]:
    """Ranks that all ended well."""
    return [an_exit(rank) for rank in range(count)]


def a_finding(requirement: str = "R003", **changes: Any) -> Finding:
    """A gradient that is summed instead of averaged, on rank 0 at step 0."""
    fields: dict[str, Any] = {
        "check": "gradient parity",
        "message": "gradient of '0.weight': expected 0.5, got 1.0",
        "step": 0,
        "phase": "reduce",
        "fqn": "0.weight",
        "rank": 0,
        "element": (3, 1),
        "got": "1.0",
        "expected": "0.5",
        "ratio": 2.0,
        "bound": "bitwise",
        "differing": 16,
        "elements": 16,
        "likely": "gradients are summed, not averaged",
    }
    return Finding(requirement=requirement, **{**fields, **changes})


#: The adapter that `a_record` is about, as the header of a run has to describe it.
DESCRIBED: dict[str, Any] = {
    "spec": "mine.py",
    "name": "mine",
    "version": "1.2",
    "capabilities": ["no_sync"],
    "class_name": "Mine",
    "file_sha256": "f11e" * 16,
    "source_sha256": "ada9" * 16,
}
DESCRIBED["identity"] = identity(DESCRIBED)

#: What the ranks of `a_record` had loaded.
LOADED = {"torch": "2.13.0", "adapter": DESCRIBED["identity"]}


def a_record(
    case: str = "R001/probe-ws2", verdict: Verdict = Verdict.PASS, *findings: Finding, **changes: Any
) -> CaseRecord:
    """A line of the run file. A PASS comes with the evidence for it: four comparisons on each rank."""
    primary = case.partition("/")[0]
    world_size = int(case.rpartition("ws")[2])
    fields: dict[str, Any] = {
        "requirements": [primary],
        "chapter": "A",
        "reason": findings[0].sentence() if findings else "",
        "findings": list(findings),
        "world_size": world_size,
        "adapter": LOADED["adapter"],
        "environment": dict(LOADED),
        "device": "cpu",
        "refereed": True,
        "comparisons": 4 * world_size if verdict in (Verdict.PASS, Verdict.FAIL) else 0,
        "elements": 40 * world_size if verdict in (Verdict.PASS, Verdict.FAIL) else 0,
        "repro": f"fsdp-conformance run --implementation torch-fsdp2 --case {case}",
        "seconds": 0.5,
    }
    if verdict is Verdict.PASS:
        fields |= {"exits": exits(world_size), "evidence": [a_report(rank) for rank in range(world_size)]}
    return CaseRecord(case=case, verdict=verdict, **{**fields, **changes})
