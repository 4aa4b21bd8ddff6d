"""
The report of a rank whose case has a referee: what the rank did, with what the referee says of it.

A rank says how it was started, what it issued and how it ended. Findings, comparisons, and why nothing can be judged
come from the referee alone, which no code under test has entered.
"""

from __future__ import annotations

from dataclasses import replace

from fsdp_conformance.outcome.records import RankError, RankExit, RankReport

#: The errors of a referee whose rank has not sent what the body asks for, or has sent something invalid.
_ENDED = "fsdp_conformance.harness.observations.ObservationsEnded"
_INVALID = "fsdp_conformance.harness.observations.ObservationsInvalid"

#: The end of that message for a rank that has sent nothing yet. Only such a rank may say that the machine lacks
#: something.
_SHOWN_NOTHING = "before it had sent observation 0"


def refereed_report(report: RankReport | None, judgement: RankReport | None, end: RankExit) -> RankReport | None:
    """
    The report of a rank after the referee's `judgement`; None if the rank made none.

    `end` is how the referee ended.
    """
    if report is None:
        return None
    if judgement is None:
        ended = "took too long" if end.ended_by_controller else f"ended with exit code {end.exitcode}"
        text = f"the referee of rank {report.rank} {ended} before it had judged\n{end.stack or end.output}"
        return _with_error(report, _error("SuiteError", text, "suite", end.time))
    merged = replace(
        judgement,
        environment=report.environment,
        seconds={**report.seconds, "referee": judgement.seconds.get("body", 0.0)},
    )
    error = judgement.error
    if error is not None and has_ended_early(error):
        return _ended_early(merged, report, error)
    if error is not None and error.kind == _INVALID:
        return _with_error(merged, replace(error, blame="implementation"))
    if error is None and report.error is not None:
        # The referee has judged the whole body, and no code of the suite runs after it on a rank. So the error is the
        # implementation's, whoever the report blames.
        return _with_error(merged, replace(report.error, blame="implementation"))
    return merged


def has_ended_early(error: RankError) -> bool:
    """True if the referee's error only says that a rank has sent no more observations."""
    return error.kind == _ENDED


def without_directory(report: RankReport | None, why: str) -> RankReport | None:
    """The report of a rank whose case's directory was changed: the referee can judge nothing. None if it made none."""
    if report is None:
        return None
    text = f"a rank has changed the directory of its case, so that nothing can be judged: {why}"
    return _with_error(RankReport(rank=report.rank), _error("AdapterError", text, "implementation", 0.0))


def _ended_early(merged: RankReport, report: RankReport, error: RankError) -> RankReport:
    """The report of a rank that has ended in the middle of its body: by its own error, or by saying so."""
    merged = replace(merged, error=None)
    if report.error is not None:
        return _with_error(merged, report.error)
    excuse = report.not_run or report.inconclusive
    if excuse is not None and error.blame == "suite" and _SHOWN_NOTHING in error.message:
        return replace(merged, not_run=report.not_run, inconclusive=report.inconclusive)
    ended = f"ended inside the code under test ({excuse})" if excuse is not None else "reported that its body had ended"
    text = f"rank {report.rank} {ended}, but it has not shown all of it: {error.message}"
    return _with_error(merged, _error("ObservationsEnded", text, "implementation", error.time))


def _with_error(report: RankReport, error: RankError) -> RankReport:
    return replace(report, error=error)


def _error(kind: str, text: str, blame: str, time: float) -> RankError:
    return RankError(kind=f"fsdp_conformance.errors.{kind}", message=text, traceback=text, blame=blame, time=time)
