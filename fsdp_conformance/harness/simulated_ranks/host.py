"""
The process that simulated ranks live in, and the controller's seat for it.

For the controller it is one rank that speaks for all: started from the warm process, ended by the same deadlines, with
its output and stacks in the same files. Inside, each rank runs the case as a rank that is a process does, reports, and
waits for the others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from fsdp_conformance.harness import rank as rank_process
from fsdp_conformance.harness.processes.stacks import last_collectives
from fsdp_conformance.harness.processes.supervisor import Seat
from fsdp_conformance.harness.rank import RankFiles, RankRun, RankStart
from fsdp_conformance.harness.recording.collective_log import log
from fsdp_conformance.harness.simulated_ranks import scheduler as rank_scheduler
from fsdp_conformance.harness.simulated_ranks.ranks import simulated_world, start_ranks
from fsdp_conformance.harness.simulated_ranks.state import RankState
from fsdp_conformance.outcome import RankExit, RankReport, rank_report_from_json


class _SimulatedRankRun(RankRun):
    """One case on one simulated rank."""

    def prepare(self) -> None:
        """Take over what is this rank's own: the process was prepared for all of them."""
        log().trace_to(self.start.files.collectives)
        self.take_over(start="simulated")

    def wait_for_goodbye(self) -> None:
        """Return when every rank has spoken: the process waits for the controller's goodbye, for all."""
        error = self.report.error
        failure = f"{error.kind.rsplit('.', 1)[-1]}: {error.message.splitlines()[0]}" if error is not None else ""
        left_out = self.report.not_run or self.report.inconclusive or ""
        rank_scheduler.running().finish(failure or left_out)
        if rank_scheduler.running().rank == 0:
            super().wait_for_goodbye()


def main(starts: Sequence[RankStart], pipe: Connection) -> NoReturn:
    """The whole life of a process that runs all ranks of one case."""
    rank_process.enter()
    rank_process.leave(_run_case(starts, pipe), pipe)


def running_file(files: RankFiles) -> Path:
    """Where the process notes whose turn it is, for the case that it dies."""
    return Path(files.collectives).with_name("running")


def _run_case(starts: Sequence[RankStart], pipe: Connection) -> int:
    """Run the case on every rank. The exit code of the process: what a rank's body raised is in its report."""
    first = starts[0]
    rank_process.prepare_process(first)
    first.determinism.apply()
    own = {name for start in starts for name, value in start.variables.items() if value != first.variables.get(name)}
    states = [RankState({name: start.variables[name] for name in own}) for start in starts]
    note = os.open(running_file(first.files), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    codes: dict[int, int] = {}

    def body(rank: int) -> None:
        run = _SimulatedRankRun(starts[rank], pipe)
        rank_process.use(run)
        codes[rank] = run.run()

    with simulated_world(states) as scheduler:
        scheduler.on_turn = lambda rank: os.pwrite(note, b"%6d" % rank, 0)
        for thread in start_ranks(scheduler, body):
            thread.join()
    # A rank that raised or skipped has said so in its report.
    reported = {0, rank_process.ERROR_EXIT_CODE}
    return next(
        (code for code in codes.values() if code not in reported and rank_process.skip_message(code) is None), 0
    )


@dataclass(slots=True)
class HostSeat(Seat):
    """The process of all ranks of a case, as the controller sees it."""

    rank_files: tuple[RankFiles, ...] = ()
    spoke: dict[int, RankReport] = field(default_factory=dict)
    """By rank, what it has reported."""

    @property
    def spoken(self) -> bool:
        """True once nothing more is to be expected of any rank."""
        return len(self.spoke) == len(self.rank_files) or self.end is not None

    @property
    def failed(self) -> bool:
        """True if the process has ended before each rank has spoken. What one rank does, the others see inside."""
        return self.end is not None and len(self.spoke) < len(self.rank_files)

    def accept(self, message: bytes) -> None:
        """Take in what one of the ranks says."""
        if self.mute:
            return
        data: dict[str, Any] = json.loads(message)
        if "report" in data:
            report = rank_report_from_json(data["report"])
            self.spoke[report.rank] = report

    def reports(self) -> list[RankReport | None]:
        """What each rank said."""
        return [self.spoke.get(rank) for rank in range(len(self.rank_files))]

    def exits(self, end: RankExit) -> list[RankExit]:
        """The end of the process, as that of each rank. Whoever had the turn ended first."""
        running = self._running()
        return [
            replace(
                end,
                rank=rank,
                reported=rank in self.spoke,
                time=end.time - (rank == running) * 1e-6,
                stack=end.stack if rank == running else None,
                last_collectives=last_collectives(Path(files.collectives)),
                output=end.output if rank == 0 else "",
            )
            for rank, files in enumerate(self.rank_files)
        ]

    def _running(self) -> int:
        try:
            return int(running_file(self.files).read_text())
        except (OSError, ValueError):
            return 0
