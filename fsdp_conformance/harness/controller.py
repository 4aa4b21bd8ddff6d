"""
The controller's half of `ShardedTrainingTestCase`: the order for the ranks, and the outcome as torch's harness has it.

No rank imports this module: the test case does when it starts its ranks.
"""

from __future__ import annotations

import unittest
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_conformance.harness import devices
from fsdp_conformance.harness.order import CaseOrder, packed
from fsdp_conformance.harness.processes.launcher import Launch, launch
from fsdp_conformance.harness.rank import ERROR_EXIT_CODE
from fsdp_conformance.harness.torchrun.worker import CaseMeeting
from fsdp_conformance.outcome.endings import Attribution, Ending, attribute
from fsdp_conformance.outcome.mismatch import differing_calls
from fsdp_conformance.outcome.records import RankExit, RankReport

if TYPE_CHECKING:
    from fsdp_conformance.harness.testcase import ShardedTrainingTestCase


def start(test: ShardedTrainingTestCase, test_name: str, directory: Path) -> Launch | None:
    """Start the ranks. None for a torchrun worker that has no part in the case."""
    owner = type(test)
    meeting = _meet_workers(test)
    if meeting is not None and not meeting.takes_part:
        return None
    return launch(
        CaseOrder(
            module=owner.__module__,
            qualname=owner.__qualname__,
            test_name=test_name,
            file_name=test.file_name,
            directory=directory,
            world_size=int(test.world_size),
            device_type=test.device_type,
            deadlines=test.deadlines,
            determinism=test.determinism,
            variables={**test.preload_environment, **test.rank_environment},
            preload=(*devices.preload(test.device_type), owner.__module__, *test.preload),
            preload_environment={
                **test.preload_environment,
                **devices.preload_environment(test.device_type, shared=test.share_devices),
            },
            payload=packed(test.launch_payload),
            options={"fake_pg": getattr(test, "fake_pg", False)},
            imports_main=owner.__module__ == "__main__",
            reuse=test.reuse_ranks and not test.simulated_ranks and test.torchrun_worker is None,
            simulated=test.simulated_ranks,
            share_devices=test.share_devices,
            slots_per_device=test.slots_per_device,
            group=test.first_group,
            name=meeting.name if meeting is not None else "",
            worker=test.torchrun_worker,
            debugged=test.debugged,
            first_part=test.first_part,
        ),
        meeting,
    )


def _meet_workers(test: ShardedTrainingTestCase) -> CaseMeeting | None:
    """The meeting with the other torchrun workers. Raises EnvironmentUnavailable if one of them is missing."""
    if test.torchrun_worker is None:
        return None
    meeting = CaseMeeting(test.torchrun_worker, test.id(), int(test.world_size))
    if meeting.takes_part:
        meeting.begin(test.deadlines.case_s)
    return meeting


def conclude(
    test: ShardedTrainingTestCase,
    function: Any,
    reports: Sequence[RankReport | None],
    exits: Sequence[RankExit],
    *,
    elapsed_s: float,
) -> None:
    """As torch's harness concludes; `ShardedTrainingTestCase.conclude` says how."""
    attribution = attribute(reports, exits)
    raised = any(report is not None and report.error is not None for report in reports)
    if not raised and function in test.skip_return_code_checks:
        return
    special = getattr(test, "special_return_code_checks", {})  # since torch 2.7
    if not raised and function in special:
        expected = special[function]
        test.assertEqual(
            expected, exits[0].exitcode, msg=f"Expected exit code {expected} but got {exits[0].exitcode} on rank 0"
        )
        return
    if attribution.first is not None:
        raise RuntimeError(failure_text(attribution, reports, exits, elapsed_s=elapsed_s))
    for note in attribution.notes:
        warnings.warn(f"{test.id()}: {note}", stacklevel=3)
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
    Why a case failed: the first failure, its consequences, then the evidence rank by rank.

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
