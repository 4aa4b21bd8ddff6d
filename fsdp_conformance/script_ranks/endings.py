"""How the ranks of a script ended, for the report of `sanitize`."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_conformance.outcome.endings import Ending, RankEnding, attribute
from fsdp_conformance.outcome.records import RankExit, RankReport
from fsdp_conformance.simulator.sanitize.report import RankEnd, ScriptEnd


def script_end(reports: Sequence[RankReport | None], exits: Sequence[RankExit]) -> ScriptEnd | None:
    """The end of a run, from the report and the exit of each rank; None without exits: it was interrupted."""
    if not exits:
        return None
    attribution = attribute(reports, exits)
    return ScriptEnd(
        ranks=tuple(map(_rank_end, attribution.endings, reports, exits)),
        first=attribution.first.rank if attribution.first is not None else None,
        is_hang=attribution.is_hang,
        consequences=attribution.consequences,
    )


def _rank_end(ending: RankEnding, report: RankReport | None, end: RankExit) -> RankEnd:
    error = report.error if report is not None else None
    return RankEnd(
        ending=str(ending.ending),
        sentence=ending.sentence,
        is_failure=ending.ending not in (Ending.FINISHED, Ending.LEFT_OUT),
        error=f"{error.kind}: {error.message}" if error is not None else "",
        traceback=error.traceback if error is not None else "",
        is_own_error=error is not None and error.blame == "suite",
        not_run=report.not_run or "" if report is not None else "",
        stack=end.stack or "",
        last_collectives=tuple(end.last_collectives),
        was_ended=end.ended_by_controller,
    )
