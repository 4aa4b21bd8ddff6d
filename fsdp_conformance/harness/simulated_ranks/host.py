"""
The process that runs all simulated ranks of a case, and the controller's seat for it.

To the controller it is one process that reports for all ranks: started from the warm process, ended by the same
deadlines, with its output and stacks in the same files. Inside, each rank runs the case as a rank in its own process
does, reports, and waits for the others.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from fsdp_conformance.harness import context
from fsdp_conformance.harness.accounting import Part
from fsdp_conformance.harness.order import RankFiles, RankOrder, Role
from fsdp_conformance.harness.processes import rank_process
from fsdp_conformance.harness.processes.stacks import last_collectives
from fsdp_conformance.harness.processes.supervisor import Seat, report_of_text
from fsdp_conformance.harness.rank import ERROR_EXIT_CODE, RankRun, skip_message
from fsdp_conformance.harness.simulated_ranks import scheduler as rank_scheduler
from fsdp_conformance.harness.simulated_ranks.ranks import simulated_world, start_ranks
from fsdp_conformance.harness.simulated_ranks.state import RankState
from fsdp_conformance.outcome.endings import class_of
from fsdp_conformance.outcome.records import RankExit, RankReport, rank_report_from_json


class _SimulatedRankRun(RankRun):
    """One case on one simulated rank."""

    @property
    def start(self) -> str:  # type: ignore[override]
        """How the rank came to be."""
        return "referee" if self.order.case.role is Role.REFEREE else "simulated"

    def turn_to(self, part: Part) -> Part:
        """Tell the controller whose code this rank runs. In a referee it is always the suite's."""
        return self.part if self.order.case.role is Role.REFEREE else super().turn_to(part)

    def prepare(self) -> None:
        """Open this rank's trace. The process was prepared for all ranks."""
        context.log().trace_to(self.order.files.collectives)

    def wait_for_goodbye(self) -> None:
        """Return when every rank has reported: rank 0 waits for the controller's goodbye on behalf of all."""
        error = self.report.error
        failure = f"{class_of(error)}: {error.message.splitlines()[0]}" if error is not None else ""
        left_out = self.report.not_run or self.report.inconclusive or ""
        rank_scheduler.running().finish(failure or left_out)
        if rank_scheduler.running().rank == 0:
            super().wait_for_goodbye()

    def collect_garbage(self) -> None:
        """Collect once for all ranks: each collection walks through what all of them have."""
        rank_scheduler.running().once_together(super().collect_garbage)


def main(pipe: Connection, directory: Path) -> NoReturn:
    """The whole life of a process that runs all ranks of one case, whose files are in `directory`."""
    rank_process.enter(directory)
    rank_process.leave(_run_case(rank_process.first_orders(pipe, directory), pipe), pipe)


def running_file(files: RankFiles) -> Path:
    """The file in which the process notes whose turn it is, in case it dies."""
    return Path(files.collectives).with_name("running")


def _run_case(orders: Sequence[RankOrder], pipe: Connection) -> int:
    """Run the case on every rank. Returns the exit code of the process; what a rank raised is in its report."""
    first = orders[0]
    rank_process.prepare_process(first)
    first.case.determinism.apply()
    differing = {
        name for order in orders for name, value in order.environment.items() if value != first.environment.get(name)
    }
    states = [RankState({name: order.environment[name] for name in differing}) for order in orders]
    note = os.open(running_file(first.files), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    codes: dict[int, int] = {}

    def body(rank: int) -> None:
        run = _SimulatedRankRun(orders[rank], pipe)
        context.current().begin(run)
        codes[rank] = run.run()

    with simulated_world(states) as scheduler:
        scheduler.on_turn = lambda rank: os.pwrite(note, b"%6d" % rank, 0)
        for thread in start_ranks(scheduler, body):
            thread.join()
    # If a rank raised or skipped, its report says it.
    reported = {0, ERROR_EXIT_CODE}
    return next((code for code in codes.values() if code not in reported and skip_message(code) is None), 0)


@dataclass(slots=True)
class HostSeat(Seat):
    """The process of all ranks of a case, as the controller sees it."""

    rank_files: tuple[RankFiles, ...] = ()
    spoke: dict[int, RankReport] = field(default_factory=dict)
    """The reports that have arrived, by rank."""
    parts_by_rank: dict[int, Part] = field(default_factory=dict)
    """The parts of the ranks that have changed theirs, by rank."""
    _in_part: Counter[Part] = field(default_factory=Counter)
    """The number of ranks that have not reported and run each part, less those that began in it."""

    @property
    def parts(self) -> list[Part]:
        """Whose code the ranks run that have not reported; each part once."""
        # Asked for with every message, so the ranks are counted and not gone through.
        at_first = Counter({self.part: len(self.rank_files)})
        at_first.update(self._in_part)
        return [part for part, number in at_first.items() if number]

    @property
    def spoken(self) -> bool:
        """True once every rank has reported, or the process has ended."""
        return len(self.spoke) == len(self.rank_files) or self.end is not None

    @property
    def failed(self) -> bool:
        """True if the process ended before every rank had reported. Ranks notice each other's failures inside."""
        return self.end is not None and len(self.spoke) < len(self.rank_files)

    def accept(self, message: bytes) -> None:
        """Handle one message of the process."""
        if self.mute:
            return
        data: dict[str, Any] = json.loads(message)
        if "report" in data:
            report = rank_report_from_json(data["report"])
            report.error = report.error or self.unreadable
            self._take(report)
        elif "part" in data:
            rank, part = data["rank"], Part(data["part"])
            if rank not in self.spoke:
                self._in_part[self._part_of(rank)] -= 1
                self._in_part[part] += 1
            self.parts_by_rank[rank] = part

    def fail(self, text: str) -> None:
        """
        Take a traceback as the report of every rank that has not reported, or of rank 0.

        Any of them may have sent what cannot be read.
        """
        waiting = [rank for rank in range(len(self.rank_files)) if rank not in self.spoke]
        for rank in waiting or [0]:
            self._take(report_of_text(rank, text))
        self.unreadable = report_of_text(0, text).error

    def _take(self, report: RankReport) -> None:
        if report.rank not in range(len(self.rank_files)):
            raise ValueError(f"there is no rank {report.rank}")
        if report.rank not in self.spoke:
            self._in_part[self._part_of(report.rank)] -= 1
        self.spoke[report.rank] = report

    def blame_suite(self) -> None:
        """Note that the ranks that work for the suite have kept the case waiting."""
        waiting = [rank for rank in range(len(self.rank_files)) if rank not in self.spoke]
        self.late = frozenset(rank for rank in waiting if self._part_of(rank) is not Part.ENGINE)

    def reports(self) -> list[RankReport | None]:
        """The report of each rank."""
        return [self.spoke.get(rank) for rank in range(len(self.rank_files))]

    def exits(self, end: RankExit) -> list[RankExit]:
        """The end of the process as the end of each rank. The rank that had the turn ended first."""
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
                suite_was_late=rank in self.late,
            )
            for rank, files in enumerate(self.rank_files)
        ]

    def _part_of(self, rank: int) -> Part:
        return self.parts_by_rank.get(rank, self.part)

    def _running(self) -> int:
        try:
            return int(running_file(self.files).read_text())
        except (OSError, ValueError):
            return 0
