"""What can be said of a case before anything is started."""

from __future__ import annotations

from fsdp_conformance.capability import CAPABILITIES, Asked
from fsdp_conformance.case import Case
from fsdp_conformance.config import RunSettings
from fsdp_conformance.outcome import CaseRecord
from fsdp_conformance.verdict import Verdict


def gate(
    case: Case,
    *,
    declared: frozenset[str],
    settings: RunSettings,
    present: frozenset[str],
    devices: int | None = None,
) -> CaseRecord | None:
    """
    The record of a case that need not be started, or None if it must run.

    `present` are the members of `case.ENVIRONMENTS` that this machine has, `devices` the number of ranks that it can
    hold (None: any). A flag that only the *model* asks for does not stop a case: the refusal itself is what is tested.
    """
    record = empty_record(case, settings.implementation, settings.device)
    wanted = not settings.cases or not {case.id, *case.requirements}.isdisjoint(settings.cases)
    if not wanted or (settings.world_sizes and case.world_size not in settings.world_sizes):
        option = "--world-size" if wanted else "--case"
        return decided(record, Verdict.DISABLED, f"left out by {option}")
    missing = [flag for flag in case.needs if flag not in declared and not _asked_by_model(flag)]
    if missing:
        record.measurements["undeclared"] = missing
        return decided(record, Verdict.UNSUPPORTED, f"{', '.join(missing)} not declared by {settings.implementation}")
    absent = [name for name in case.environment if name not in present]
    if absent:
        record.measurements["absent"] = absent
        return decided(record, Verdict.NOT_RUN_ENV, f"needs {', '.join(absent)}, which this machine does not have")
    if devices is not None and case.world_size > devices:
        record.measurements["absent"] = ["devices"]
        reason = f"needs {case.world_size} devices of type {settings.device}, but {devices} are present"
        return decided(record, Verdict.NOT_RUN_ENV, reason)
    return None


def empty_record(
    case: Case, implementation: str, device: str, *, ranks: str = "processes", seconds: float = 0.0
) -> CaseRecord:
    """A record of the case that says nothing yet; `decided` gives it its verdict."""
    words = ["fsdp-conformance run"]
    if implementation:
        words.append(f"--implementation {implementation}")
    if device != "cpu":
        words.append(f"--device {device}")
    return CaseRecord(
        case=case.id,
        requirements=list(case.requirements),
        chapter=case.chapter,
        # Whoever forgets to decide has made a mistake of ours.
        verdict=Verdict.ERROR_SUITE,
        world_size=case.world_size,
        device=device,
        ranks=ranks,
        repro=" ".join([*words, f"--case {case.id}"]),
        seconds=seconds,
    )


def decided(record: CaseRecord, verdict: Verdict, reason: str) -> CaseRecord:
    """The record with its verdict and the sentence that gives the reason."""
    record.verdict, record.reason = verdict, reason
    return record


def _asked_by_model(flag: str) -> bool:
    return flag in CAPABILITIES and CAPABILITIES[flag].asked is Asked.MODEL
