"""
The controller's side of the warm process: run a scenario, and survive whatever the engine does to it.

A runner that passes its deadline is killed, and its scenario has hung; one that dies has crashed. Both are verdicts on
the scenario. The warm process itself is started again if it ends.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from fsdp_conformance.errors import AdapterError, SuiteError
from fsdp_conformance.explore.case import case_for, declined_by
from fsdp_conformance.judge import Observed, judge
from fsdp_conformance.outcome.records import CaseRecord, RankExit, case_record_from_json
from fsdp_conformance.run_settings import RunOrder, RunSettings
from fsdp_conformance.scenarios.scenario import Scenario
from fsdp_conformance.verdict import FINE, Verdict

#: How long importing torch and the adapter may take.
_START_S = 300.0

#: What the references, which are the suite's own work, add to the deadline of a scenario.
_SUITE_S = 120.0

#: Verdicts that say nothing about the engine, and why.
_NOT_JUDGED = {
    Verdict.INCONCLUSIVE: "inconclusive: the bounds are too wide",
    Verdict.UNSUPPORTED: "the engine does not declare it, and refused it",
    Verdict.NOT_RUN_ENV: "this machine cannot run it",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of one scenario."""

    record: CaseRecord | None = None
    rejected: str = ""
    """Why the example could not be judged; empty if it was."""
    declined: str = ""
    """With what the engine refused the combination, in one line; empty if it did not."""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """True if the example is evidence against the engine."""
        return self.record is not None and not self.rejected and not self.declined and self.record.verdict not in FINE


class WarmWorker:
    """The warm process. Use it as a context manager: it ends with all its processes on exit."""

    def __init__(self, order: RunOrder) -> None:
        self.order = order
        self.starts = 0
        """How often a warm process was started; once, unless it died."""
        self._process: subprocess.Popen[bytes] | None = None
        self._runner = 0
        self._unread = b""
        self._directory = tempfile.TemporaryDirectory(prefix="fsdp-conformance-", ignore_cleanup_errors=True)
        self._file = Path(self._directory.name) / "order.json"
        self._file.write_text(order.to_json(), encoding="utf-8")
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed on leaving

    def __enter__(self) -> WarmWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._errors.close()
        self._directory.cleanup()

    def run(self, scenario: Scenario) -> Outcome:
        """Run a scenario. Raises AdapterError if the adapter cannot be loaded, SuiteError for our own mistakes."""
        began = time.monotonic()
        self._require_runner()
        self._send({"scenario": scenario.to_json(), "digest": scenario.digest})
        deadline = case_for(scenario).timeout_s * self.order.settings.deadline_scale + _SUITE_S
        answer = self._receive(deadline, scenario.digest)
        if answer is None:
            self._kill_runner()
            return Outcome(record=self._ended(scenario, None), seconds=time.monotonic() - began)
        if answer.get("last") or "ended" in answer:
            self._runner = 0
        if "ended" in answer:
            return Outcome(record=self._ended(scenario, int(answer["ended"])), seconds=time.monotonic() - began)
        if "broken" in answer:
            raise SuiteError(f"scenario {scenario.to_json()} broke the worker:\n{answer['broken']}")
        if "rejected" in answer:
            return Outcome(rejected=answer["rejected"], seconds=time.monotonic() - began)
        return outcome_of(case_record_from_json(answer["record"]), time.monotonic() - began)

    def _ended(self, scenario: Scenario, status: int | None) -> CaseRecord:
        """The record of a scenario whose runner crashed, or (status None) hung."""
        case = case_for(scenario)
        exits = [
            RankExit(
                rank=rank, pid=self._runner or None, exitcode=-signal.SIGKILL if status is None else status,
                time=time.monotonic(), reported=False, ended_by_controller=status is None,
            )
            for rank in range(scenario.world_size)
        ]  # fmt: skip
        return judge(
            case,
            Observed(reports=[None] * scenario.world_size, exits=exits, device=self.order.device),
            RunSettings(implementation=self.order.settings.implementation, ranks="simulated"),
        )

    def _require_runner(self) -> None:
        """Make sure that a runner waits for an order."""
        for _ in range(2):
            if self._process is None:
                self._start()
            while not self._runner:
                answer = self._receive(_START_S)
                if answer is None or self._process is None:
                    break
                if "ready" in answer:
                    self._runner = int(answer["ready"])
            if self._runner:
                return
            output = self._output()
            self._end()
        raise AdapterError(f"the implementation cannot be loaded in a process that runs scenarios:\n{output}")

    def _start(self) -> None:
        self.starts += 1
        self._unread = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fsdp_conformance.explore.worker", str(self._file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )

    def _send(self, content: dict[str, Any]) -> None:
        assert self._process is not None, "a runner waits for orders"
        assert self._process.stdin is not None, "it is started with a pipe"
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(content).encode() + b"\n")
            self._process.stdin.flush()

    def _receive(self, timeout_s: float, digest: str = "") -> dict[str, Any] | None:
        """The next answer, if not about another scenario; None at the deadline, or if the warm process has ended."""
        until = time.monotonic() + timeout_s
        while True:
            while b"\n" not in self._unread:
                if self._process is None or self._process.stdout is None:
                    return None
                ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))
                part = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
                if not part:
                    return None
                self._unread += part
            line, _, self._unread = self._unread.partition(b"\n")
            with suppress(ValueError):
                message: dict[str, Any] = json.loads(line)
                if message.get("digest", digest) == digest:
                    return message

    def _kill_runner(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._runner, signal.SIGKILL)
        self._runner = 0

    def _output(self) -> str:
        self._errors.flush()
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 3000))
        return self._errors.read().decode(errors="replace").strip()

    def _end(self) -> None:
        if self._runner:
            self._kill_runner()
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
            self._process = None


def outcome_of(record: CaseRecord, seconds: float) -> Outcome:
    """The outcome that a record shows. Raises SuiteError if the suite is at fault, AdapterError if the adapter is."""
    declined = declined_by(record.measurements) if record.verdict is Verdict.PASS else None
    if record.verdict is Verdict.ERROR_SUITE:
        raise SuiteError(f"{record.case}: {record.reason}\n{record.traceback}")
    if record.verdict is Verdict.ERROR_ADAPTER:
        raise AdapterError(record.reason)
    return Outcome(
        record=record, rejected=_NOT_JUDGED.get(record.verdict, ""), declined=declined or "", seconds=seconds
    )
