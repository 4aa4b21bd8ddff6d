"""Two agents of torchrun on the loopback: they run the same cases together, and one that is lost is noticed."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.cli.child import end_family
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.report import runfile
from fsdp_conformance.run_settings import TorchrunWorker

#: Until anything that should come has come; nothing is judged by it.
FOREVER_S = 400.0

#: Between two looks at what another process does.
POLL_S = 0.05


@contextmanager
def agents(report: Path, *words: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two agents with two workers each. On leaving, nothing of them is left."""
    port = _free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", f"test{port}"]
    # An agent that is silent for 15 s counts as lost, and a busy machine may keep it silent for longer.
    command += ["--rdzv-conf", "keep_alive_interval=20,keep_alive_max_attempt=6"]
    command += ["--log-dir", str(report.parent / "torchrun")]
    command += ["-m", "fsdp_conformance", "run", "--ranks", "torchrun", "--implementation", "torch-fsdp2"]
    command += ["--report", str(report), *words]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(2):
            log = (report.parent / f"agent{number}.log").open("wb")
            started.append(
                subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
                )
            )
            log.close()
            # Whoever comes first holds the store of the rendezvous: the agent that a test keeps.
            _await_listener(port)
        yield started
    finally:
        for agent in started:
            if agent.poll() is None:
                end_family(agent.pid)
            agent.wait()


def _free_port() -> int:
    """
    A port that is free now, and below those that the system gives to sockets that ask for any.

    The agent takes seconds to come to it. By then one of those could be a connection of another test.
    """
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", random.randint(15_000, 32_000)))
            except OSError:
                continue
            return int(probe.getsockname()[1])


def _await_listener(port: int) -> None:
    until = time.monotonic() + FOREVER_S
    while time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(POLL_S)
    raise AssertionError(f"no process listens at port {port}")


def records(report: Path) -> list[dict[str, Any]]:
    """The verdicts in the run file, as far as they are there."""
    try:
        lines = (report / runfile.NAME).read_text().splitlines()
    except FileNotFoundError:
        return []
    return [line for line in map(json.loads, lines) if "verdict" in line and "case" in line]


def await_end(agent: subprocess.Popen[bytes], log: Path) -> None:
    try:
        agent.wait(FOREVER_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the first agent has not ended:\n{log.read_text()[-3000:]}") from None


@pytest.mark.nightly
def test_two_agents(tmp_path: Path) -> None:
    """Cases of two and of four ranks, each on fresh processes of both agents; the first worker alone reports."""
    report = tmp_path / "report"
    with agents(report, "--case", "R001/exact-probe-ws2", "--case", "R001/exact-probe-ws4") as (first, _):
        await_end(first, tmp_path / "agent0.log")

    by_case = {record["case"]: record for record in records(report)}
    assert {"R001/exact-probe-ws2": "PASS", "R001/exact-probe-ws4": "PASS"} == {
        case: record["verdict"] for case, record in by_case.items()
    }, "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in sorted(tmp_path.glob("agent*.log")))
    assert {"torchrun"} == {record["ranks"] for record in by_case.values()}
    assert 4 == len({end["pid"] for end in by_case["R001/exact-probe-ws4"]["exits"]})
    # A partial profile cannot certify, and torchrun got the reason.
    assert "--case left cases out" in (tmp_path / "agent0.log").read_text()
    assert "PASS" not in (tmp_path / "agent1.log").read_text()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_lost_host(tmp_path: Path) -> None:
    """The case that runs when a host goes has its verdict by its deadline, and the run ends with what it had."""
    report = tmp_path / "report"
    with agents(report, "--case", "R001", "--world-size", "4", "--deadline-scale", "0.4") as (first, second):
        begun = time.monotonic()
        while not records(report) and time.monotonic() - begun < FOREVER_S and first.poll() is None:
            time.sleep(POLL_S)
        assert [] != records(report), (tmp_path / "agent0.log").read_text()[-3000:]
        end_family(second.pid)
        await_end(first, tmp_path / "agent0.log")

    verdicts = [record["verdict"] for record in records(report) if record["verdict"] != "DISABLED"]
    assert 5 == len(verdicts)
    assert "PASS" == verdicts[0]
    # It went in the middle of a case, or between two; the cases after that are not waited for.
    assert "NOT_RUN_ENV" == verdicts[-1]
    assert {"PASS", "HANG", "NOT_RUN_ENV"} >= set(verdicts)


def test_variables_of_torchrun() -> None:
    """Every one that is missing is named, and what to do."""
    with pytest.raises(ConfigError) as raised:
        TorchrunWorker.from_environment({"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "x"})

    *problems, advice = raised.value.problems
    assert problems == [
        "RANK must be a number, got ''",
        "MASTER_PORT must be a number, got 'x'",
        "MASTER_ADDR must be a host, got ''",
    ]
    assert "torchrun --nproc-per-node" in advice

    worker = TorchrunWorker.from_environment(
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    )
    assert (3, 4, 1, False) == (worker.rank, worker.world_size, worker.local_rank, worker.holds_store)


@pytest.mark.slow
def test_without_torchrun(tmp_path: Path) -> None:
    """The command says what is missing, and starts nothing."""
    variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_conformance", "run", "--ranks", "torchrun", "--report", str(tmp_path / "report")],
        check=False,
        capture_output=True,
        text=True,
        timeout=FOREVER_S,
        env=variables,
    )

    assert 2 == done.returncode
    assert "RANK must be a number, got ''" in done.stderr
