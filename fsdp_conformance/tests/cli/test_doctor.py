"""The command `doctor` tries what cases need on this machine and reports what does not work."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from torch import distributed

from fsdp_conformance.cli import leftovers
from fsdp_conformance.cli.child import answers
from fsdp_conformance.cli.command import main
from fsdp_conformance.cli.commands import doctor
from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.harness.exact_collectives import ExactCollectives, check_collectives, first_wrong
from fsdp_conformance.tests.cli.cli_runs import said

_MACHINE: dict[str, Any] = {
    "what": "machine",
    "torch": "2.13.0",
    "device": "cpu",
    "backend": "gloo",
    "problem": "",
    "present": ["gloo"],
    "num_devices": 2,
    "num_ranks": None,
    "simulated": {
        "device": "sim",
        "present": ["accelerator", "gloo", "pinned_memory", "stream_order"],
        "num_ranks": None,
        "problem": "",
    },
    "simulator_built": True,
}
_NO_COMPILER = {**_MACHINE["simulated"], "present": [], "problem": "no C++ compiler"}
_WARM = {"what": "warm", "seconds": 1.9}


def exact(world_size: int, **changes: Any) -> dict[str, Any]:
    """The child's answer about ranks that communicate correctly."""
    names = ["all_gather", "reduce_scatter", "all_reduce"]
    answer = {"world_size": world_size, "seconds": 0.06, "rendezvous": "", "wrong": {}, "operations": names}
    return {"what": "collectives", **answer, **changes}


def told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *answers: dict[str, Any], words: str = ""
) -> tuple[int, str]:
    """Status and text of a doctor with these options, whose child says this."""

    @contextlib.contextmanager
    def told_by_child(job: str, *, timeout_s: float, device: str, shared: bool) -> Iterator[Iterator[dict[str, Any]]]:
        assert (device, shared) == (words.partition("--device ")[2].split(" ")[0] or "cpu", "--share" in words)
        yield iter([dict(answer) for answer in answers])

    monkeypatch.setattr(doctor, "answers", told_by_child)
    status = main(["doctor", *words.split()])
    return status, capsys.readouterr().out


def line_of(text: str, what: str) -> str:
    """The lines about `what`, joined into one line that ends with the state."""
    lines = text.splitlines()
    at = next((index for index, line in enumerate(lines) if line.strip().startswith(what)), None)
    if at is None:
        return ""
    first, state = lines[at].rsplit("  ", 1)
    more = itertools.takewhile(lambda line: line.startswith(" " * 19), lines[at + 1 :])
    return " ".join(" ".join([first, *more]).split()) + f"  {state}"


@pytest.mark.nightly
def test_a_machine_that_can_run_cases_is_ready() -> None:
    """Real ranks, real collectives: every line is there, and none has failed."""
    result = said("doctor")

    assert result.status == 0, result.out + result.err
    for what in ("packages", "C++ compiler", "temporary files", "earlier runs", "devices", "backend", "cases"):
        assert line_of(result.out, what) != ""
    for what in ("launch", "rendezvous", "collectives"):
        assert line_of(result.out, what).endswith("  ok")
    words = [word for word in result.out.split() if word != "ok"]  # which follows the first of several lines
    assert "exact on 2 and 4 ranks" in " ".join(words)
    assert "ready (" in result.out


@pytest.mark.nightly
@pytest.mark.slow
def test_a_device_that_is_absent_is_told() -> None:
    """Status 3, and nothing is launched."""
    result = said("doctor", "--device", "mtia")

    assert result.status == 3
    assert line_of(result.out, "devices").endswith("  failed")
    assert line_of(result.out, "launch") == ""


@pytest.mark.parametrize(
    ("answers", "what", "expected"),
    [
        ([{**_MACHINE, "num_ranks": 0}], "devices", "none of type 'cpu'"),
        ([{**_MACHINE, "backend": "", "problem": "no backend is available"}], "backend", "no backend is available"),
        ([_MACHINE, {"what": "unlaunched", "problem": "2 ranks cannot be launched"}], "launch", "cannot be launched"),
        ([{"what": "died", "how": "ended with status 1", "output": "no torch"}], "launch", "ended with status 1"),
        ([_MACHINE, _WARM, exact(2, rendezvous="rank 1 timed out")], "rendezvous", "rank 1 timed out"),
        (
            [_MACHINE, _WARM, exact(2), exact(4, wrong={"all_reduce": "on rank 3 element 0: expected 2, got 1"})],
            "collectives",
            "all_reduce on 4 ranks: on rank 3 element 0: expected 2, got 1",
        ),
    ],
    ids=["no device", "no backend", "not launched", "child died", "no rendezvous", "wrong sum"],
)
def test_each_failure_is_status_3_and_its_own_line(
    answers: list[dict[str, Any]],
    what: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The oracle is shown to speak: a wrong element, a missing device, a child that dies."""
    status, text = told(monkeypatch, capsys, *answers)

    assert status == 3
    assert expected in line_of(text, what)
    assert line_of(text, what).endswith("  failed")


def test_what_is_merely_absent_keeps_nobody_from_running(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No compiler, cases that need another machine, ranks of a dead run: said, and status 0."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(leftovers, "processes", lambda: [4711])
    status, text = told(monkeypatch, capsys, {**_MACHINE, "simulated": _NO_COMPILER}, _WARM, exact(2), exact(4))
    own = [line for line in text.splitlines() if not line.startswith("fsdp-conformance ")]

    assert status == 0, text
    assert [line for line in own if len(line) > 80 and "/" not in line] == []
    assert line_of(text, "C++ compiler").endswith("  absent")
    assert line_of(text, "simulator").endswith("  absent")
    assert line_of(text, "not here").endswith("  absent")
    assert "need accelerator" in line_of(text, "not here")
    assert "kill 4711" in line_of(text, "earlier runs")


@pytest.mark.parametrize(
    ("changes", "expected", "state"),
    [
        ({}, "compiled: init modes, offload, memory", "ok"),
        ({"simulator_built": False}, "will be compiled on first use", "ok"),
        ({"simulated": _NO_COMPILER}, "cannot be compiled: no C++ compiler", "absent"),
        ({"simulated": _NO_COMPILER, "device": "sim"}, "cannot be compiled: no C++ compiler", "failed"),
    ],
    ids=["built", "to be built", "no compiler", "asked for without a compiler"],
)
def test_the_simulated_accelerator_is_told_of(
    changes: dict[str, Any],
    expected: str,
    state: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The output tells if it is available, and what it offers."""
    _, text = told(monkeypatch, capsys, {**_MACHINE, **changes}, _WARM, exact(2), exact(4))

    assert expected in line_of(text, "simulator")
    assert line_of(text, "simulator").endswith(f"  {state}")


#: A machine with one GPU.
_ONE_GPU = {**_MACHINE, "device": "cuda", "backend": "nccl", "num_devices": 1, "num_ranks": 1,
            "present": ["accelerator", "cuda", "gloo", "nccl", "pinned_memory"]}  # fmt: skip


def test_what_shared_devices_would_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """How many cases with and without, over what, and what it says nothing of."""
    words = "--device cuda --share-devices"
    status, text = told(monkeypatch, capsys, _ONE_GPU, _WARM, exact(2), exact(4), words=words)
    total = len(load_profile("core").entries)

    assert status == 0, text
    assert line_of(text, "devices") == "devices cuda, 1 device  ok"
    assert line_of(text, "backend") == "backend gloo  ok"
    assert "because NCCL wants a device for each rank" in line_of(text, "sharing")
    assert "nothing is certified" in line_of(text, "sharing")
    assert f"{total} of {total} in core-" in line_of(text, "cases")
    assert f"can run here with --share-devices, and {_on_one_device()} without" in line_of(text, "cases")
    assert "exact on 2 and 4 ranks" in line_of(text, "collectives")
    assert text.rstrip().endswith("run --device cuda --share-devices")
    assert [line for line in text.splitlines() if len(line) > 80 and "/" not in line and "ready" not in line] == []


def _on_one_device() -> int:
    """How many cases of the core need one device at most, or simulated ones, of which there are enough."""
    return sum(entry.world_size == 1 or "stream_order" in entry.environment for entry in load_profile("core").entries)


def test_devices_that_are_not_shared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the option nothing is said of it, but what else would need it."""
    _, text = told(monkeypatch, capsys, _ONE_GPU, _WARM, exact(1), words="--device cuda")

    assert line_of(text, "sharing") == ""
    assert f"{_on_one_device()} of " in line_of(text, "cases")
    assert "need devices" in line_of(text, "not here")


def test_sharing_needs_devices_to_share(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """None is a failure; on the CPU there is nothing to share, and that is a mistake of usage."""
    none = {**_ONE_GPU, "num_devices": 0, "num_ranks": 0, "present": ["gloo"]}
    status, text = told(monkeypatch, capsys, none, words="--device cuda --share-devices")
    assert (status, line_of(text, "devices")) == (3, "devices none of type 'cuda'  failed")
    assert main(["doctor", "--share-devices"]) == 2
    assert "on the CPU any number of ranks can run" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.nightly
def test_ranks_that_share_a_device_are_launched() -> None:
    """On the simulated accelerator: as many as cases have, on one device."""
    result = said("doctor", "--device", "sim", "--share-devices")

    assert result.status == 0, result.out + result.err
    assert "same single device" in line_of(result.out, "sharing")
    assert line_of(result.out, "collectives").endswith("  ok")


def test_temporary_files_that_cannot_be_written_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stores, logs and stacks go there."""
    monkeypatch.setattr("tempfile.NamedTemporaryFile", mock.Mock(side_effect=OSError(28, "No space left")))
    status, text = told(monkeypatch, capsys, _MACHINE, _WARM, exact(2))

    assert status == 3
    assert "cannot be written: No space left; set TMPDIR" in line_of(text, "temporary files")


def test_a_child_that_dies_is_an_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The answer has its status and the end of its output; other output of the child is not taken for an answer."""
    text = """echo noise; echo '{"what": "warm"}'; echo why >&2; exit 7"""
    monkeypatch.setattr("sys.executable", program(tmp_path, text))
    with answers("doctor", device="cpu", shared=False) as coming:
        answers_read = list(coming)

    assert answers_read == [{"what": "warm"}, {"what": "died", "how": "ended with status 7", "output": "why\n"}]


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Everything that the child has started is ended with it."""
    monkeypatch.setattr("sys.executable", program(tmp_path, "sleep 300 & sleep 300"))
    with answers("doctor", timeout_s=0.2, device="cpu", shared=False) as coming:
        (answer,) = coming

    assert answer["what"] == "died"
    assert "was ended by SIGKILL" in answer["how"]


class ForgetfulAllReduce(ExactCollectives):
    """A backend whose all-reduce leaves every rank with its own."""

    def collectives(self) -> None:
        with mock.patch.object(distributed, "all_reduce"):
            super().collectives()


class NobodyComes(ExactCollectives):
    """Ranks of which one never comes to the rendezvous."""

    def init_rank(self) -> None:
        if self.rank == 1:
            raise RuntimeError("rank 1 stays away")
        super().init_rank()


@pytest.mark.slow
def test_a_wrong_collective_is_seen() -> None:
    """Rank 0's element 0 of the sum is 1024 + 2048; alone it is 1024."""
    check = check_collectives("cpu", 2, kind=ForgetfulAllReduce)

    assert check.wrong == {"all_reduce": "on rank 0 element 0: expected 3072, got 1024"}
    assert check.rendezvous == ""


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_seen() -> None:
    """It is the rendezvous that failed, not a collective."""
    check = check_collectives("cpu", 2, kind=NobodyComes)

    assert "rank 1" in check.rendezvous
    assert check.wrong == {}


def test_the_first_wrong_element_is_named() -> None:
    """Index, value, and what it should be."""
    assert first_wrong(torch.tensor([1.0, 2.0, 7.0]), torch.tensor([1.0, 2.0, 3.0])) == "element 2: expected 3, got 7"


def test_ranks_without_a_parent_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this user's marked ranks whose parent has ended are listed."""
    marked, mine = {"HOME": "/x", "FSDP_CONFORMANCE_PRELOAD": "{}"}, os.getuid()
    table = [
        (10, 1, marked, mine), (11, 10, marked, mine), (12, 1, {"HOME": "/x"}, mine), (1, 0, marked, mine),
        (14, 1, marked, mine + 1), (13, 1, psutil.NoSuchProcess(13), mine), (15, 1, psutil.AccessDenied(15), mine),
    ]  # fmt: skip
    processes = [
        mock.Mock(pid=pid, info={"ppid": parent}, **{
            "environ.side_effect": [environment], "uids.return_value": mock.Mock(real=user),
        })
        for pid, parent, environment, user in table
    ]  # fmt: skip
    monkeypatch.setattr("psutil.process_iter", lambda attributes: iter(processes))

    assert leftovers.processes() == [10]


def test_a_warm_process_carries_the_mark() -> None:
    """The harness sets the variable that `doctor` looks for."""
    from fsdp_conformance.harness.processes import preload

    assert preload.ORDERS_VARIABLE == leftovers._MARK


def test_only_stale_entries_are_left_over(tmp_path: Path) -> None:
    """Files touched within the hour may belong to a running case, and leases are never leftovers."""
    for name, age_s in (("fsdp-conformance-old", 7200), ("fsdp-conformance-new", 60), ("other", 7200)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1e9 - age_s, 1e9 - age_s))
    (tmp_path / "fsdp-conformance-leases-0").mkdir()
    os.utime(tmp_path / "fsdp-conformance-leases-0", (1e9 - 7200, 1e9 - 7200))

    assert [tmp_path / "fsdp-conformance-old"] == leftovers.directories(tmp_path, now=1e9)


def program(directory: Path, text: str) -> str:
    """A shell script that takes any arguments."""
    path = directory / "program"
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)
