"""
Runs small training scripts under `fsdp-conformance sanitize`, one after another, and compares what was found.

The scripts share one warm process, so each takes about as long as it runs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_conformance.script_ranks.endings import script_end
from fsdp_conformance.script_ranks.launch import ScriptLaunch, end_server, warm_server
from fsdp_conformance.simulator.sanitize.alerts import Alert, alerts_of
from fsdp_conformance.simulator.sanitize.order import ScriptOrder
from fsdp_conformance.simulator.sanitize.report import ExitStatus, ScriptReport

#: The comment on the line of a mistake.
MARK = "# wrong"

#: Seconds for one script on a busy machine.
_TIMEOUT_S = 120.0

#: What every script begins with.
PRELUDE = """\
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
device = torch.device("cuda", rank)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """A script, and what must be found in it."""

    name: str
    what: str
    """In a few words."""
    text: str
    """Below PRELUDE; a mistake's line ends with MARK."""
    kind: str = ""
    """The only kind of finding; empty for a correct script."""
    beyond: str = ""
    """Why the checker cannot find it, if it cannot."""
    prelude: str = PRELUDE
    reuse: str = "exact"
    waits: str = "all"
    ordering_only: bool = False
    memory: int | None = None
    world_size: int = 2

    @property
    def source(self) -> str:
        """The whole file."""
        return f"{self.prelude}\n{self.text.strip()}\n"

    @property
    def lines(self) -> set[int]:
        """The numbers of the lines with a mistake; any of them will do."""
        return {number for number, line in enumerate(self.source.splitlines(), 1) if line.endswith(MARK)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The findings in a script."""

    script: Script
    status: ExitStatus
    alerts: tuple[Alert, ...]
    verdict: str
    text: str
    """Everything that was printed about the run."""
    seconds: float

    @property
    def kinds(self) -> set[str]:
        """The kinds of what was found."""
        return {str(alert.rule) for alert in self.alerts}

    @property
    def lines(self) -> set[int]:
        """The lines of the script that the findings name."""
        return {line.line for alert in self.alerts for _, line in alert.lines if line.file.endswith("script.py")}

    @property
    def is_found(self) -> bool:
        """True if the mistake was found, at its line, and nothing else."""
        return self.kinds == {self.script.kind} and bool(self.lines & self.script.lines)

    @property
    def is_silent(self) -> bool:
        """True if the script ran and nothing was found."""
        return self.status is ExitStatus.CLEAN

    @property
    def is_right(self) -> bool:
        """True if it is as expected: a mistake that the checker can find is found, and nothing else is."""
        return self.is_found if self.script.kind and not self.script.beyond else self.is_silent

    def line(self) -> str:
        """The outcome in one line."""
        if self.script.kind:
            word = "found" if self.is_found else "missed" if self.is_right else "MISSED"
        else:
            word = "silent" if self.is_silent else "FALSE ALARM"
        note = f"  ({self.script.beyond})" if self.script.beyond else ""
        note += "" if self.is_right else f"  [{self.verdict}; {', '.join(sorted(self.kinds))} at {sorted(self.lines)}]"
        return f"{word:12}{self.script.name:34}{self.script.what}{note}"


@dataclass(slots=True)
class _Printed:
    """The output of a script."""

    lines: list[str] = field(default_factory=list)

    def add(self, rank: int, line: str) -> None:
        self.lines.append(f"[rank {rank}] {line}")


def run_scripts(scripts: Iterable[Script]) -> Iterator[Outcome]:
    """Run each script to its end."""
    server = warm_server(as_cuda=True)
    try:
        with tempfile.TemporaryDirectory(prefix="fsdp-conformance-scripts-") as directory:
            for script in scripts:
                path = Path(directory) / script.name / "script.py"
                path.parent.mkdir()
                path.write_text(script.source, encoding="utf-8")
                order = ScriptOrder(
                    target=str(path),
                    is_module=False,
                    arguments=(),
                    world_size=script.world_size,
                    mode="record",
                    as_cuda=True,
                    timeout_s=_TIMEOUT_S,
                    reuse=script.reuse,
                    waits=script.waits,
                    ordering_only=script.ordering_only,
                    memory=script.memory,
                )
                began = time.monotonic()
                printed = _Printed()
                with ScriptLaunch(order, printed.add, server) as launch:
                    launch.start()
                    reports, exits = launch.wait()
                seconds = time.monotonic() - began
                report = ScriptReport(
                    order,
                    observed=launch.observed,
                    end=script_end(reports, exits),
                    seconds=seconds,
                    calls=launch.calls,
                )
                yield Outcome(
                    script=script,
                    status=report.status,
                    alerts=tuple(alerts_of(report)),
                    verdict=report.verdict(),
                    text="\n".join([*printed.lines, *(text for text, _ in report.paragraphs())]),
                    seconds=seconds,
                )
    finally:
        end_server(server)
