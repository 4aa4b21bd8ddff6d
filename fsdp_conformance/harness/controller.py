"""
The controller's half of `ShardedTrainingTestCase`: the start of the ranks, and the outcome as torch's harness has it.

No rank imports this module: the test case does when it starts its ranks.
"""

from __future__ import annotations

import unittest
import warnings
from collections.abc import Sequence
from dataclasses import replace

from fsdp_conformance.harness.order import CaseOrder
from fsdp_conformance.harness.processes.launcher import Launch, launch
from fsdp_conformance.harness.rank import ERROR_EXIT_CODE
from fsdp_conformance.harness.torchrun.worker import CaseMeeting
from fsdp_conformance.outcome.endings import Attribution, Ending, attribute
from fsdp_conformance.outcome.mismatch import differing_calls
from fsdp_conformance.outcome.records import RankExit, RankReport


def start(order: CaseOrder, test_id: str) -> Launch | None:
    """Start the ranks. None for a torchrun worker that has no part in the case."""
    meeting = _meet_workers(order, test_id)
    if meeting is None:
        return launch(order, None)
    return launch(replace(order, name=meeting.name), meeting) if meeting.takes_part else None


def _meet_workers(order: CaseOrder, test_id: str) -> CaseMeeting | None:
    """The meeting with the other torchrun workers. Raises EnvironmentUnavailable if one of them is missing."""
    if order.worker is None:
        return None
    meeting = CaseMeeting(order.worker, test_id, order.world_size)
    if meeting.takes_part:
        meeting.begin(order.deadlines.case_s)
    return meeting


def conclude(
    test_id: str, reports: Sequence[RankReport | None], exits: Sequence[RankExit], *, elapsed_s: float
) -> None:
    """Raise RuntimeError if a rank failed, and SkipTest if the first one left the test with a skip code."""
    attribution = attribute(reports, exits)
    if attribution.first is not None:
        raise RuntimeError(failure_text(attribution, reports, exits, elapsed_s=elapsed_s))
    for note in attribution.notes:
        warnings.warn(f"{test_id}: {note}", stacklevel=3)
    first = reports[0]
    if first is not None and first.not_run is not None:
        raise unittest.SkipTest(first.not_run)


def failure_text(
    attribution: Attribution,
    reports: Sequence[RankReport | None],
    exits: Sequence[RankExit],
    *,
    elapsed_s: float,
) -> str:
    """
    The text that explains a failed case: the first failure, its consequences, then the evidence rank by rank.

    The lines that begin with "Process" are those of torch's harness, and tests look for them.
    """
    lines = [attribution.headline]
    lines += [differing_calls(exits)] if attribution.is_hang and differing_calls(exits) else []
    lines += [f"  then {sentence}" for sentence in attribution.consequences]
    first = attribution.first.rank if attribution.first is not None else 0
    for index in sorted(range(len(exits)), key=lambda index: (index != first, index)):
        report, end = reports[index], exits[index]
        ending = attribution.endings[index].ending
        if ending in (Ending.FINISHED, Ending.LEFT_OUT):
            continue
        if report is not None and report.error is not None:
            lines.append(
                f"Process {index} exited with error code {ERROR_EXIT_CODE} and exception:\n{report.error.traceback}"
            )
        elif end.ended_by_controller:
            lines.append(f"Process {index} terminated or timed out after {elapsed_s:.1f} seconds")
        else:
            lines.append(f"Process {index} exited with code {end.exitcode} before it reported")
        if end.stack:
            lines.append(f"Python stacks of rank {index}:\n{end.stack.rstrip()}")
        if end.last_collectives:
            lines.append(f"Last collectives of rank {index}:")
            lines += [f"  {line}" for line in end.last_collectives]
        if end.output.strip():
            lines.append(f"Output of rank {index} ends with:\n{end.output.rstrip()}")
    return "\n".join(lines)
