"""ci/compare-ranks: the table of verdicts that differ between kinds of ranks, from run files made by hand."""

from __future__ import annotations

import itertools
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.errors import ConfigError, RunFileError
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.report.runfile import RunFileWriter, read
from fsdp_conformance.run_settings import RANKS
from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import ROOT
from fsdp_conformance.tests.report.evidence import a_record
from fsdp_conformance.verdict import Verdict

pytestmark = [checkout.required, pytest.mark.nightly]

FIRST, SECOND = "R001/exact-probe-ws2", "R001/exact-probe-ws4"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """The names that the script defines."""
    return runpy.run_path(str(ROOT / "ci/compare-ranks"))


@pytest.fixture(scope="module", autouse=True)
def neighbours() -> Iterator[None]:
    """A script finds the modules next to it."""
    sys.path.insert(0, str(ROOT / "ci"))
    yield
    sys.path.remove(str(ROOT / "ci"))


def write(directory: Path, *records: CaseRecord, seconds: float | None = 3.0) -> RunFile:
    """A run file with these records; without a footer if `seconds` is None."""
    writer = RunFileWriter(directory)
    writer.header({})
    for record in records:
        writer.case(record)
    if seconds is not None:
        writer.footer({"seconds": seconds})
    writer.close()
    return read(directory)


def test_equal_verdicts(script: dict[str, Any], tmp_path: Path) -> None:
    """Nothing but the seconds and the count."""
    failure = a_record(SECOND, Verdict.FAIL, reason="loss: expected 1, got 3")
    runs = {
        "processes": write(tmp_path / "a", a_record(FIRST), failure, seconds=12.34),
        "simulated": write(tmp_path / "b", failure, a_record(FIRST), seconds=4.0),
    }

    lines, number = script["table"](runs)

    assert 0 == number
    assert [["case", "processes", "simulated"], ["seconds", "12.3", "4.0"]] == [line.split() for line in lines[:2]]
    assert "compare-ranks: 0 of 2 verdicts differ" == lines[-1]


def test_verdicts_that_differ(script: dict[str, Any], tmp_path: Path) -> None:
    """The case, its verdict on each kind, and the reasons; a run without a verdict differs from one that has it."""
    runs = {
        "processes": write(tmp_path / "a", a_record(FIRST), a_record(SECOND)),
        "simulated": write(tmp_path / "b", a_record(FIRST, Verdict.HANG, reason="rank 1 waits"), a_record(SECOND)),
        "torchrun": write(tmp_path / "c", a_record(FIRST)),
    }

    lines, number = script["table"](runs)

    assert 2 == number
    assert [FIRST, "PASS", "HANG", "PASS"] == lines[1].split()
    assert "  simulated: rank 1 waits" == lines[2]
    assert f"{SECOND} PASS PASS no verdict" == " ".join(lines[3].split())
    assert "compare-ranks: 2 of 2 verdicts differ" == lines[-1]


def test_ranks_that_must_be_processes(script: dict[str, Any], tmp_path: Path) -> None:
    """Such a case is counted where it was not run, and differs only between the other kinds."""
    absent = a_record(FIRST, Verdict.NOT_RUN_ENV, measurements={"absent": ["processes"]})
    gone = a_record(SECOND, Verdict.NOT_RUN_ENV, reason="the workers of ranks [1] did not come")
    runs = {
        "processes": write(tmp_path / "a", a_record(FIRST), a_record(SECOND)),
        "simulated": write(tmp_path / "b", absent, a_record(SECOND)),
        "torchrun": write(tmp_path / "c", a_record(FIRST), gone),
    }

    lines, number = script["table"](runs)

    assert 1 == number
    assert [SECOND, "PASS", "PASS", "NOT_RUN_ENV"] == lines[1].split()
    assert "not run on simulated ranks (need processes): 1 case" == lines[-2]


def test_a_run_that_did_not_end(script: dict[str, Any], tmp_path: Path) -> None:
    """A part of a run is not compared."""
    write(tmp_path / "aborted", a_record(FIRST), seconds=None)
    write(tmp_path / "whole", a_record(FIRST))

    assert [FIRST] == [record.case for record in script["finished"](tmp_path / "whole", 1).records]
    with pytest.raises(RunFileError, match="the run did not finish"):
        script["finished"](tmp_path / "aborted", 1)
    with pytest.raises(RunFileError, match="status 130"):
        script["finished"](tmp_path / "whole", 130)
    with pytest.raises(RunFileError, match="cannot be read"):
        script["finished"](tmp_path / "absent", 1)


def test_kinds(script: dict[str, Any]) -> None:
    """Each must be known, and one alone is compared with nothing."""
    assert list(RANKS) == script["kinds_of"](",".join(RANKS))
    with pytest.raises(ConfigError, match=r"one of processes, simulated, torchrun, hosts, got 'thread'.*two kinds"):
        script["kinds_of"]("thread")


def test_the_largest_world(script: dict[str, Any]) -> None:
    """The largest world of the selected cases is the number of workers that torchrun starts."""
    assert 4 == script["largest_world"]("torch-fsdp2", ["--case", "R001"])
    assert 2 == script["largest_world"]("torch-fsdp2", ["--case", FIRST, "--deadline-scale", "2"])


@pytest.mark.parametrize(("other", "status"), [(Verdict.PASS, 0), (Verdict.FAIL, 1)])
def test_the_command(
    script: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    other: Verdict,
    status: int,
) -> None:
    """A run for each kind, with the options that are its own, then the table."""
    started: list[Sequence[str]] = []

    def run(words: Sequence[str]) -> int:
        started.append(words)
        kind = words[words.index("--ranks") + 1]
        write(tmp_path / kind, a_record(FIRST, other if kind == "simulated" else Verdict.PASS))
        return 1

    monkeypatch.setitem(script["compare"].__globals__, "run", run)
    words = ["torch-fsdp2", "--report", str(tmp_path), "-n", "2", "--case", FIRST]

    assert status == script["main"](words)
    assert f"compare-ranks: {status} of 1 verdicts differ" in capsys.readouterr().out
    assert [True, True, False] == ["-n" in words for words in started]
    assert ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"] == list(started[2][2:6])
    assert all(str(tmp_path / kind) in words for kind, words in zip(RANKS, started, strict=True))


def test_a_run_that_fails_ends_the_comparison(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the run's own status, and no table."""
    monkeypatch.setitem(script["compare"].__globals__, "run", lambda words: 3)

    assert 3 == script["main"](["torch-fsdp2", "--report", str(tmp_path), "--case", FIRST])
    assert "ended with status 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["torch-fsdp2", "--ranks", "processes"], "at least two kinds"),
        (["torch-fsdp2", "--case", "R999"], "R999"),
        (["torch-fsdp2", "--delay-ms", "2"], "delay_ms and loss are for hosts"),
        (["torch-fsdp2", "--ranks", "processes,hosts", "--loss", "1", "--delay-ms", "-1"], "less than 1, got 1"),
    ],
)
def test_wrong_usage(
    script: dict[str, Any], words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong usage is reported before anything runs."""
    assert 2 == script["main"](words)
    assert message in capsys.readouterr().err


class Hosts:
    """Two hosts that are this one."""

    addresses = ("10.213.0.1", "10.213.0.2")

    def __init__(self, *, delay_ms: float, loss: float) -> None:
        self.link = delay_ms, loss

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *exc: object) -> None:
        return

    def words(self, host: int, command: Sequence[str]) -> list[str]:
        return [f"host{host}", f"{self.link}", *command]


def test_two_hosts(script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent on each with half of the workers; the first one judges, and the options go to both."""
    started: list[list[Sequence[str]]] = []

    def run_on_hosts(commands: list[Sequence[str]], log: Path) -> int:
        started.append(commands)
        write(tmp_path / "hosts", a_record(FIRST))
        return 1

    def run(words: Sequence[str]) -> int:
        write(tmp_path / "processes", a_record(FIRST))
        return 1

    names = script["compare"].__globals__
    for name, value in (("run", run), ("run_on_hosts", run_on_hosts), ("TwoHosts", Hosts)):
        monkeypatch.setitem(names, name, value)
    words = ["torch-fsdp2", "--ranks", "processes,hosts", "--report", str(tmp_path), "-n", "2"]
    words += ["--delay-ms", "2", "--loss", "0.01", "--case", "R001/*-ws3"]

    assert script["main"](words) == 0
    ((first, second),) = started
    assert (first[:2], second[:2]) == (["host0", "(2.0, 0.01)"], ["host1", "(2.0, 0.01)"])
    for number, command in enumerate((first, second)):
        options = dict(itertools.pairwise(command))
        assert (options["--node-rank"], options["--nproc-per-node"]) == (str(number), "2")
        assert (options["--master-addr"], options["--ranks"], options["--case"]) == (
            "10.213.0.1", "torchrun", "R001/*-ws3"
        )  # fmt: skip
        assert "-n" not in command


def test_the_second_host_does_not_outlive_the_first(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status is that of the first; a second one that hangs is killed, and its log is named."""
    monkeypatch.setitem(script["run_on_hosts"].__globals__, "_END_S", 0.05)
    log = tmp_path / "second.log"

    assert script["run_on_hosts"]([["sh", "-c", "exit 3"], ["sh", "-c", "echo up; sleep 300"]], log) == 3
    assert "had not ended" in capsys.readouterr().err
    assert script["run_on_hosts"]([["sh", "-c", "exit 0"], ["sh", "-c", "exit 5"]], log) == 0


@pytest.mark.parametrize(
    ("ip", "message"), [(None, "iproute2"), ("echo 'Operation not permitted' >&2; exit 1", "Operation not permitted")]
)
def test_a_machine_without_namespaces(
    script: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ip: str | None,
    message: str,
) -> None:
    """NOT_RUN_ENV, with the reason, after the kinds before it have run."""
    (tmp_path / "bin").mkdir()
    if ip is not None:
        (tmp_path / "bin/ip").write_text(f"#!/bin/sh\n{ip}\n")
        (tmp_path / "bin/ip").chmod(0o755)

    def run(words: Sequence[str]) -> int:
        write(tmp_path / "processes", a_record(FIRST))
        return 1

    monkeypatch.setitem(script["compare"].__globals__, "run", run)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin" if ip is not None else str(tmp_path / "bin"))
    words = ["torch-fsdp2", "--ranks", "processes,hosts", "--report", str(tmp_path), "--case", FIRST]

    assert script["main"](words) == 3
    complaint = capsys.readouterr().err
    assert "NOT_RUN_ENV" in complaint
    assert message in complaint


def allows_namespaces() -> str:
    """Why this machine has no network namespaces for us, or ""."""
    name = "fsdp-conformance-test"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        return "iproute2 is not installed"
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=60)
    return made.stderr.strip()


#: Sends a megabyte from the first host to the second.
SERVER = """
import socket
server = socket.create_server(("10.213.0.2", 7000))
print("up", flush=True)
connection, _ = server.accept()
print(sum(len(part) for part in iter(lambda: connection.recv(65536), b"")))
"""
CLIENT = """
import socket
with socket.create_connection(("10.213.0.2", 7000), 60) as connection:
    connection.sendall(bytes(1 << 20))
"""


@pytest.mark.parametrize("link", [{}, {"delay_ms": 1.0, "loss": 0.02}], ids=["plain", "slow and lossy"])
def test_the_link_between_two_hosts(script: dict[str, Any], link: dict[str, float]) -> None:
    """A megabyte arrives whole, over the only interface that they have in common; then nothing of them is left."""
    problem = allows_namespaces()
    if problem:
        pytest.skip(f"NOT_RUN_ENV: no network namespaces here: {problem}")
    names: Sequence[str] = ()
    with script["TwoHosts"](**link) as hosts:
        names = hosts.names
        with subprocess.Popen(
            hosts.words(1, [sys.executable, "-c", SERVER]), stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "up\n"
            subprocess.run(hosts.words(0, [sys.executable, "-c", CLIENT]), check=True, timeout=120)
            assert server.communicate(timeout=120)[0] == f"{1 << 20}\n"
        route = "from fsdp_conformance.harness.torchrun.interface import interface_towards; "
        route += f"print([interface_towards(host) for host in ('{hosts.addresses[0]}', 'localhost')])"
        result = subprocess.run(
            hosts.words(0, [sys.executable, "-c", route]), check=True, capture_output=True, text=True
        )
        assert result.stdout.strip() == "['link0', 'link0']"
    left = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    assert not any(name in left for name in names)


def test_a_comparison_that_is_told_to_end(script: dict[str, Any], tmp_path: Path) -> None:
    """Its hosts and all that runs on them go with it."""
    problem = allows_namespaces()
    if problem:
        pytest.skip(f"NOT_RUN_ENV: no network namespaces here: {problem}")
    code = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT / "ci")!r})
script = runpy.run_path({str(ROOT / "ci/compare-ranks")!r})
def words_on_hosts(hosts, *_):
    print(*hosts.names, flush=True)
    return [hosts.words(host, ["sh", "-c", "sleep 300", "sh"]) for host in range(2)]
script["main"].__globals__["words_on_hosts"] = words_on_hosts
options = ["--ranks", "hosts,processes", "--case", {FIRST!r}, "--report", {str(tmp_path)!r}]
sys.exit(script["main"](["torch-fsdp2", *options]))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as comparison:
        assert comparison.stdout is not None
        names = next(line for line in comparison.stdout if line.startswith("fsdp-conformance-")).split()
        comparison.terminate()
        assert comparison.wait(60) == 143
    left = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    assert not any(name in left for name in names)


def test_cases_across_two_hosts(tmp_path: Path) -> None:
    """The same verdicts as on one host, over a link that delays and loses packets."""
    problem = allows_namespaces()
    if problem:
        pytest.skip(f"NOT_RUN_ENV: no network namespaces here: {problem}")
    words = [
        "torch-fsdp2",
        "--ranks",
        "processes,hosts",
        "--delay-ms",
        "1",
        "--loss",
        "0.01",
        "--report",
        str(tmp_path),
    ]
    done = subprocess.run(
        [sys.executable, ROOT / "ci/compare-ranks", *words, "--case", f"{FIRST},R001/exact-probe-ws3"],
        capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    assert "compare-ranks: 0 of 2 verdicts differ" in done.stdout
    hosts = {record.case: record for record in read(tmp_path / "hosts").records}
    assert {record.verdict for record in hosts.values()} == {Verdict.PASS}
    variables = hosts[FIRST].environment["variables"]
    assert (variables["GLOO_SOCKET_IFNAME"], variables["LOCAL_RANK"]) == ("link0", "0")
