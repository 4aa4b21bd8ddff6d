"""
A rank that runs a training script on the simulated accelerator, or on a GPU, under the race checker.

After the script, its threads and its exit functions have ended, the rank reports its observations and waits until every
other rank has reported. So rank 0's store exists as long as any rank needs it.
"""

from __future__ import annotations

import functools
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.harness import context
from fsdp_conformance.harness import rank as harness_rank
from fsdp_conformance.harness.context import log, running
from fsdp_conformance.harness.processes.foreground import ignore_breakpoints
from fsdp_conformance.harness.recording.collective_log import CollectiveObserver
from fsdp_conformance.harness.recording.process_group import register_recording_backend
from fsdp_conformance.outcome.records import RankError
from fsdp_conformance.script_ranks import recorded_calls
from fsdp_conformance.script_ranks.launch import OBSERVED_SUFFIX, ScriptPayload
from fsdp_conformance.script_ranks.patience import wait_patiently
from fsdp_conformance.simulator.checker.labels import caller_of_backward
from fsdp_conformance.simulator.collectives.agreement import Agreement, CollectiveMismatch
from fsdp_conformance.simulator.collectives.new_groups import compare_new_groups
from fsdp_conformance.simulator.frames import calling_frame
from fsdp_conformance.simulator.replacements import Replacements
from fsdp_conformance.simulator.sanitize import observer, script
from fsdp_conformance.simulator.sanitize.forked_process import report_forks
from fsdp_conformance.simulator.sanitize.order import ScriptOrder, torchrun_variables

#: How many collectives are remembered: a script may issue millions.
_REMEMBERED = 4096


class ScriptRank:
    """The entry point of a rank; the harness finds it by name."""

    def __init__(self, payload: ScriptPayload, run: harness_rank.RankRun) -> None:
        self.order: ScriptOrder = payload.order
        self.payload = payload
        self.run = run
        self._observer: observer.Observer | None = None
        self._has_begun = False

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, pipe: Connection, **options: Any) -> None:
        run = running()
        code = run.body(cls(cast(ScriptPayload, run.payload), run), "run_script")
        if code:
            sys.exit(code)

    def init_rank(self) -> None:
        """Activate the simulated accelerator in this process, or trace the GPU, and observe it."""
        case = self.run.order.case
        rank = self.run.order.rank
        os.environ.update(torchrun_variables(rank, case.world_size, port=self.payload.port, run_id=self.payload.run_id))
        agreement = Agreement(case.directory, rank, case.world_size, caller_of_backward)
        self._observer = observer.begin(self.order, case.directory, agreement)
        if self.payload.children:
            children = self.payload.children[rank]
            os.environ.update(children.variables)
            report_forks(Path(children.directory), children.inherited, self._observer.described, leave_rank=_leave_rank)
        register_recording_backend(case.device_type)
        log().observers.append(_Forgetful())
        log().issuer = functools.partial(recorded_calls.issue, agreement, rank, on_gpus=self.order.on_gpus)
        compare_new_groups(lambda: agreement, Replacements())
        if case.debugged is not None:
            wait_patiently(Replacements())
        elif os.environ.get("PYTHONBREAKPOINT", "") in ("", "pdb.set_trace"):  # another debugger may need no terminal
            ignore_breakpoints(self._note_breakpoint)

    def _note_breakpoint(self) -> None:
        place = calling_frame()
        at = f" at {place}" if place is not None else ""
        if self._observer is not None:
            self._observer.notes[
                f"the breakpoint{at} was passed over, because no rank has the terminal: --rank 0 gives it to rank 0"
            ] = None

    def finish_body(self) -> None:
        """A script has no referee to be told."""

    def leave_body(self) -> None:
        """Nor when it has failed."""

    def run_script(self) -> None:
        """Run the script; the observations go into the report, however it ends."""
        if self._observer is None:
            raise EnvironmentUnavailable("the simulated accelerator is not active")
        file = Path(self.run.order.files.output).with_suffix(OBSERVED_SUFFIX)
        with script.saving_observations(self._observer, file):
            try:
                script.prepare(self.order, self.run.order.rank, own_path_entry=self.payload.own_path_entry)
                self._has_begun = True
                script.execute(self.order)
                self._observer.agreement.end()
            except BaseException:
                self._observer.agreement.compare_devices()
                raise
            finally:
                self.run.report.measurements["observed"] = self._observer.observed()

    def describe_error(self, error: BaseException) -> RankError:
        """The exception, with the script's frames and without those that started it."""
        described = harness_rank.describe_error(error)
        reason = self._observer.agreement.stopped_by if self._observer is not None else None
        if reason is not None:
            # The script's error only says that its collectives were aborted.
            error = CollectiveMismatch(reason.sentence()).with_traceback(error.__traceback__)
            described = harness_rank.describe_error(error)
        return RankError(
            kind=described.kind,
            message=described.message,
            traceback=script.traceback_of(error),
            blame="implementation" if self._has_begun else "suite",
            time=described.time,
        )


class _Forgetful(CollectiveObserver):
    """Keeps the log from growing without bound; the trace file has the last collectives anyway."""

    def after(self, record: Any, work: Any) -> None:
        if len(log().records) >= _REMEMBERED:
            log().clear()


def _leave_rank() -> None:
    """Called in a process that the script has forked: its collectives are not this rank's."""
    context.switch_to(context.RankContext())
