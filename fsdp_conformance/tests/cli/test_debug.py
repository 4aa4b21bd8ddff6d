"""The command `debug`: one rank has the terminal, deadlines are long, and nothing is stored."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fsdp_conformance.cli.arguments import parse
from fsdp_conformance.cli.commands import debug
from fsdp_conformance.errors import ConfigError, UsageError
from fsdp_conformance.harness.deadlines import Deadlines
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.tests.cli.cli_runs import with_adapter, words
from fsdp_conformance.tests.simulator.simulator_ranks import compiled
from fsdp_conformance.verdict import Verdict

_CASE = "R001/exact-probe-ws2"

#: Stops on every rank; raises on the rank in the variable.
_ADAPTER = """
import os

import torch.distributed as dist

from fsdp_conformance.adapters.vendors.torch_fsdp2 import TorchFSDP2


class Stops(TorchFSDP2):
    name = "stops"

    def wrap(self, model, plan):
        secret = dist.get_rank() + 41
        if os.environ.get("RAISES") == str(dist.get_rank()):
            raise ValueError("oops")
        breakpoint()
        return super().wrap(model, plan)
"""


#: Breaks down when it is wrapped again.
_BREAKS = """
from fsdp_conformance.adapters.vendors.torch_fsdp2 import TorchFSDP2


class Breaks(TorchFSDP2):
    name = "breaks"

    def wrap_again(self):
        secret = 41
        raise KeyError("oops")
"""


def _debugged(
    directory: Path, *options: str, typed: str, raises: str = "", monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str]:
    """Debug the case with `typed` as the user's words. Returns the exit status and all that was printed."""
    monkeypatch.setenv("RAISES", raises)
    spec = f"{with_adapter(directory, _ADAPTER)}:Stops"
    done = subprocess.run(
        words("debug", _CASE, "--implementation", spec, *options),
        cwd=directory,
        input=typed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=240.0,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("rank", ["-1", "x", "1.5", ""])
def test_a_rank_is_a_number(rank: str) -> None:
    """Anything else is rejected before torch is imported."""
    with pytest.raises(ConfigError, match="--rank must be a rank"):
        debug.main(parse(["debug", _CASE, f"--rank={rank}"]))


def test_a_rank_that_the_case_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the world size."""
    monkeypatch.setattr("fsdp_conformance.cli.single.prepare", lambda device, implementation: None)

    with pytest.raises(ConfigError, match="less than the world size 2"):
        debug.main(parse(["debug", _CASE, "--rank", "2"]))


def test_a_mistyped_case_is_told_with_what_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest ids are named."""
    monkeypatch.setattr("fsdp_conformance.cli.single.prepare", lambda device, implementation: None)

    with pytest.raises(UsageError, match=f"Did you mean '{_CASE}'"):
        debug.main(parse(["debug", "R001/exact-prob-ws2"]))


def test_deadlines_without_hurry_nest_and_let_a_failure_end_the_case_as_usual() -> None:
    """Whatever may wait for a person has a day; what follows a failure does not."""
    usual = Deadlines.nested(60.0)
    patient = usual.without_hurry()

    assert min(patient.collective_s, patient.rank_s, patient.case_s, patient.suite_s) >= 86400.0
    assert (patient.settle_s, patient.grace_s) == (usual.settle_s, usual.grace_s)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_breakpoint_has_the_input_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chosen rank stops, the other runs past the breakpoint, and the case is judged; nothing is written."""
    status, out = _debugged(tmp_path, "--rank", "1", typed="p secret\nc\n", monkeypatch=monkeypatch)

    assert status == 0, out
    assert "(Pdb) 42" in out
    assert f"✓ {_CASE}  PASS" in out
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["my_adapter.py"]


@pytest.mark.nightly
@compiled
def test_the_simulated_accelerator_can_be_debugged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is on the simulated device when the rank stops, and the case is judged there."""
    typed = "p self.device.type\nc\n"
    status, out = _debugged(tmp_path, "--device", "sim", typed=typed, monkeypatch=monkeypatch)

    assert status == 0, out
    assert "'sim'" in out
    assert f"✓ {_CASE}  PASS" in out


@pytest.mark.nightly
def test_a_rank_in_the_debugger_outlives_a_peer_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither called hung nor ended, however long it takes; then the peer's failure is the verdict."""
    wait = f"import time; time.sleep({Deadlines.nested(60.0).grace_s + 1.5})"
    status, out = _debugged(tmp_path, typed=f"{wait}\np 'still', secret\nc\n", raises="1", monkeypatch=monkeypatch)

    assert status == 1, out
    assert "('still', 41)" in out
    assert "rank 1 raised ValueError: oops" in out


@pytest.mark.nightly
def test_post_mortem_opens_where_the_rank_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The locals of the frame that raised are there."""
    status, out = _debugged(tmp_path, "--pdb", typed="p secret * 2\nq\n", raises="0", monkeypatch=monkeypatch)

    assert status == 1, out
    assert "(Pdb) 82" in out
    assert "rank 0 raised ValueError: oops" in out


@pytest.mark.nightly
def test_post_mortem_opens_where_a_case_has_caught_what_is_no_refusal(tmp_path: Path) -> None:
    """The engine should refuse to be wrapped again, and breaks down."""
    spec = f"{with_adapter(tmp_path, _BREAKS)}:Breaks"
    done = subprocess.run(
        words("debug", "R054/wrapped-already-ws2", "--implementation", spec, "--pdb"),
        cwd=tmp_path,
        input="p secret * 2\nq\n",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=240.0,
        check=False,
    )

    assert "(Pdb) 82" in done.stdout, done.stdout
    assert "the engine broke down (KeyError: 'oops')" in done.stdout
    assert done.returncode == 1


def test_a_debugger_that_was_left_has_judged_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`quit` is not a failure of the engine."""
    left = CaseRecord(
        case=_CASE, requirements=["R001"], chapter="A", verdict=Verdict.FAIL, traceback="  raise BdbQuit\nbdb.BdbQuit\n"
    )
    monkeypatch.setattr("fsdp_conformance.cli.single.prepare", lambda device, implementation: None)
    monkeypatch.setattr("fsdp_conformance.selftest.cases.record_of", lambda test, chosen: left)

    assert debug.main(parse(["debug", _CASE])) == 1
    out = capsys.readouterr().out
    assert "nothing was judged" in out
    assert "✗" not in out
