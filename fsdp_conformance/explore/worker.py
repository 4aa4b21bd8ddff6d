"""
The warm process that runs scenarios: `python -m fsdp_conformance.explore.worker ORDER_FILE`.

It imports torch and the adapter once, and forks a *runner*, which runs one scenario after another on simulated ranks. A
runner that crashed, hung, or may have been left in a bad state is replaced by a fork, which takes a few milliseconds.
Orders come from stdin and answers go to the original stdout, as lines of JSON; what an engine prints goes to stderr.

    {"ready": PID}                  a new runner takes orders
    {"scenario": JSON}          ->   {"record": ...}, {"rejected": why} or {"broken": traceback}; with "digest" of the
                                    example, and "last" if the runner ends after it
    {"ended": STATUS}               the runner has ended; the next one follows
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, cast

from fsdp_conformance import codec
from fsdp_conformance.adapters import registry
from fsdp_conformance.errors import ConformanceError, NotExact
from fsdp_conformance.explore import case as drawn_case
from fsdp_conformance.explore.case import DrawnCase, case_for, payload
from fsdp_conformance.explore.references import trained
from fsdp_conformance.harness import context, devices
from fsdp_conformance.harness.accounting import Part
from fsdp_conformance.harness.deadlines import Deadlines
from fsdp_conformance.harness.environment import Determinism, apply_collective_timeout, apply_variables, rank_variables
from fsdp_conformance.harness.order import CaseOrder, FirstGroup, RankFiles, RankOrder, packed
from fsdp_conformance.harness.processes.priority import keep_priority
from fsdp_conformance.harness.rank import RankRun, destroy_process_group
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.harness.simulated_ranks import scheduler as rank_scheduler
from fsdp_conformance.harness.simulated_ranks.ranks import simulated_world, start_ranks
from fsdp_conformance.harness.simulated_ranks.state import RankState
from fsdp_conformance.judge import Observed, judge
from fsdp_conformance.outcome.endings import class_of
from fsdp_conformance.outcome.records import CaseRecord, RankExit, RankReport
from fsdp_conformance.run_settings import RunOrder, RunSettings, order_from_json
from fsdp_conformance.scenarios.scenario import Scenario, scenario_from_json
from fsdp_conformance.verdict import Verdict

#: A runner is replaced after this many scenarios, so that what an engine leaks does not add up.
SCENARIOS_PER_RUNNER = 200

#: Verdicts after which a process is as it was before.
_CLEAN = frozenset({Verdict.PASS, Verdict.INCONCLUSIVE})

_NOWHERE = RankFiles(output=os.devnull, stack=os.devnull, collectives=os.devnull)


class _NoController:
    """Stands in for a pipe: there is no reader for the messages of a running rank."""

    def send_bytes(self, message: bytes) -> None:
        """Nothing."""

    def poll(self, timeout: float = 0.0) -> bool:
        """Nothing ever comes."""
        return False


class _WarmRun(RankRun):
    """One scenario on one simulated rank of a runner."""

    start = "simulated"

    def prepare(self) -> None:
        """The runner was prepared for all ranks."""

    def wait_for_goodbye(self) -> None:
        """Return when every rank has reported."""
        error = self.report.error
        failure = f"{class_of(error)}: {error.message.splitlines()[0]}" if error is not None and error.message else ""
        if error is not None and not failure:
            failure = class_of(error)
        rank_scheduler.running().finish(failure or self.report.not_run or self.report.inconclusive or "")


def run_scenario(
    scenario: Scenario, order: RunOrder, *, scratch: Path | None = None
) -> tuple[CaseRecord, list[RankReport]]:
    """
    Run a scenario on simulated ranks in this process, and judge it.

    Checkpoints go into a directory below `scratch`, and are deleted. Raises NotExact if its references cannot judge it.
    """
    with tempfile.TemporaryDirectory(prefix="scenario-", dir=scratch) as directory:
        return _run_in(Path(directory), scenario, order)


def _run_in(directory: Path, scenario: Scenario, order: RunOrder) -> tuple[CaseRecord, list[RankReport]]:
    began = time.monotonic()
    drawn_case.prepared.clear()
    drawn_case.prepared[scenario.digest] = trained(scenario)
    case = case_for(scenario)
    hook = sys.excepthook
    determinism = Determinism(seed=order.settings.seed, num_threads=order.settings.num_threads)
    determinism.apply()
    orders = _rank_orders(scenario, order, determinism, directory)
    differing = ("RANK", "LOCAL_RANK")
    runs: dict[int, _WarmRun] = {}
    codes: dict[int, int] = {}

    def body(rank: int) -> None:
        run = _WarmRun(orders[rank], cast(Connection, _NoController()))
        context.current().begin(run)
        runs[rank] = run
        codes[rank] = run.run()

    with simulated_world([RankState({name: each.environment[name] for name in differing}) for each in orders]) as world:
        for thread in start_ranks(world, body):
            thread.join()
    # torch wraps the hook whenever a group is made, and never unwraps it.
    sys.excepthook = hook
    drawn_case.prepared.clear()
    reports = [runs[rank].report for rank in range(scenario.world_size)]
    description = _description(order)
    record = judge(
        case,
        Observed(
            reports=reports,
            exits=[
                RankExit(rank=rank, pid=os.getpid(), exitcode=0, time=time.monotonic(), reported=True)
                for rank in range(scenario.world_size)
            ],
            declared=description.declared(order.device),
            device=order.device,
            seconds=time.monotonic() - began,
        ),
        RunSettings(implementation=order.settings.implementation, ranks="simulated"),
    )
    return record, reports


def _description(order: RunOrder) -> registry.AdapterDescription:
    """The description in the order; if there is none, the adapter's own."""
    if order.description:
        return codec.typed(registry.AdapterDescription, order.description)
    return registry.describe_here(order.settings.implementation)


def _rank_orders(scenario: Scenario, order: RunOrder, determinism: Determinism, directory: Path) -> list[RankOrder]:
    case = CaseOrder(
        module=DrawnCase.__module__,
        qualname=DrawnCase.__qualname__,
        test_name="test_drawn",
        file_name=os.devnull,
        directory=directory,
        world_size=scenario.world_size,
        device_type=order.device,
        deadlines=Deadlines.nested(case_for(scenario).timeout_s, scale=order.settings.deadline_scale),
        determinism=determinism,
        payload=packed(payload(order.to_json(), scenario)),
        options={"fake_pg": False},
        simulated=True,
        group=FirstGroup(only=order.settings.backend),
        first_part=Part.SUITE,
    )
    return [
        RankOrder(
            case=case,
            rank=rank,
            files=_NOWHERE,
            environment=rank_variables(rank, scenario.world_size, determinism=determinism),
        )
        for rank in range(scenario.world_size)
    ]


def _answer(text: str, order: RunOrder, scratch: Path) -> tuple[dict[str, Any], bool]:
    """The answer to an order, and whether this process may run another scenario."""
    try:
        scenario = scenario_from_json(text)
        record, _ = run_scenario(scenario, order, scratch=scratch)
    except NotExact as error:
        return {"rejected": "not exact: the mantissa is used up", "detail": str(error)}, True
    except ConformanceError as error:
        return {"rejected": f"the references cannot be trained: {type(error).__name__}", "detail": str(error)}, False
    except Exception:  # noqa: BLE001 - it goes to the parent
        return {"broken": traceback.format_exc()}, False
    return {"record": record.to_json()}, record.verdict in _CLEAN


def main(words: list[str]) -> None:
    """Fork runners until there are no more orders."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    order = order_from_json(Path(words[0]).read_text(encoding="utf-8"))
    description = _description(order)
    environment = {**os.environ, **description.environment, "OMP_NUM_THREADS": str(order.settings.num_threads)}
    apply_variables(environment)
    # Before the first fork, and for good: a device type cannot be unloaded.
    devices.activate(order.device)
    registry.load(order.settings.implementation)
    process_group.register_recording_backend(order.device)
    while True:
        pid = os.fork()
        if pid == 0:
            # The controller deletes its own directory, even if this process is killed.
            _run(order, answers, Path(words[0]).parent)
        _say(answers, {"ready": pid})
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) == _NO_MORE:
            return
        _say(answers, {"ended": os.waitstatus_to_exitcode(status)})


#: Exit status of a runner that has found the end of its orders.
_NO_MORE = 99


def _run(order: RunOrder, answers: Any, scratch: Path) -> NoReturn:
    """The whole life of a runner."""
    os.setsid()
    keep_priority()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = 1
    try:
        apply_collective_timeout(case_seconds(order))
        for number in range(SCENARIOS_PER_RUNNER):
            # Not through a buffer: what it held would be lost to the next runner.
            text = _line_of(0)
            if not text:
                status = _NO_MORE
                break
            sent = json.loads(text)
            answer, clean = _answer(sent["scenario"], order, scratch)
            last = not clean or number == SCENARIOS_PER_RUNNER - 1
            _say(answers, {**answer, "digest": sent["digest"], "last": last})
            status = 0
            if last:
                break
            with suppress(Exception):
                destroy_process_group()
    finally:
        # Threads of ranks that hang are daemons; nothing of this process is needed any more.
        sys.stderr.flush()
        os._exit(status)


def case_seconds(order: RunOrder) -> float:
    """How long a scenario may take."""
    return case_for(Scenario()).timeout_s * order.settings.deadline_scale


def _line_of(descriptor: int) -> str:
    received = bytearray()
    while True:
        part = os.read(descriptor, 1)
        if not part or part == b"\n":
            return received.decode()
        received += part


def _say(answers: Any, content: dict[str, Any]) -> None:
    answers.write(json.dumps(content) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
