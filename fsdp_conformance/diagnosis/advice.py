"""Where to look for the defect behind a finding: what the contract says of values, and other advice for bad ends."""

from __future__ import annotations

from collections.abc import Callable

from fsdp_conformance import contract
from fsdp_conformance.outcome.records import CaseRecord, Finding


def look_at(record: CaseRecord, finding: Finding) -> str:
    """One or two sentences; empty if there is nothing to say."""
    ended = _BY_END.get(finding.check)
    if ended is not None:
        return ended(record, finding)
    requirement = contract.load().requirements.get(finding.requirement)
    return requirement.look_at if requirement is not None else ""


#: DDP names this option in its error if a parameter gets no gradient.
_OPTION_OF_DDP = "find_unused_parameters"


def _of_exception(record: CaseRecord, finding: Finding) -> str:
    if _OPTION_OF_DDP in finding.message:
        return (
            "How the adapter wraps the model: DistributedDataParallel needs find_unused_parameters=True for models of "
            "which a step does not use every parameter."
        )
    where = "The engine's innermost frames above" if record.traceback else "The exception's message"
    if (finding.likely or "").startswith("only rank"):
        return f"{where}, and what is different on rank {finding.rank}: its shards, its batch, a branch on the rank."
    return f"{where}. What the ranks did before is under `fsdp-conformance explain {record.case}`."


def _of_hang(record: CaseRecord, finding: Finding) -> str:
    last = f" Rank {finding.rank} came as far as: {finding.call}." if finding.call else ""
    return (
        "The line where each rank waits: a collective that some ranks skip, issue in another order, or on another "
        f"group.{last}"
    )


def _of_crash(record: CaseRecord, finding: Finding) -> str:
    return (
        f"What rank {finding.rank} printed, and its last collectives (`fsdp-conformance explain {record.case}`): "
        "native code, an exit that the engine calls, or the system ending a process that takes too much memory."
    )


#: Checks of how a case ended.
_BY_END: dict[str, Callable[[CaseRecord, Finding], str]] = {
    "training": _of_exception,
    "deadline": _of_hang,
    "process end": _of_crash,
}
