"""`pytest --simulate-cuda=N` on the tests of a project that knows nothing of this package."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fsdp_conformance.tests.simulator.simulated_cuda.runs import PROJECT, Run, compiled, run_pytest

pytestmark = [compiled, pytest.mark.slow]


def left_behind() -> set[Path]:
    """Directories of runs, in the system's directory for temporary files."""
    return set(Path(tempfile.gettempdir()).glob("fsdp-conformance-cuda-*"))


def test_the_plugin_is_light() -> None:
    """Whoever does not ask for GPUs does not pay for them: loading it imports no torch."""
    plugin = "fsdp_conformance.simulator.simulated_cuda.plugin"
    code = f"import sys, {plugin}; print(sorted({{'torch', 'numpy'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == "[]\n"


def test_without_the_option_marked_tests_are_skipped(tmp_path: Path) -> None:
    """Tests with the fixture are skipped, too; the others run."""
    text = """
import sys
import pytest

@pytest.mark.simulated_cuda
def test_marked(): raise RuntimeError

def test_fixture(simulated_cuda): raise RuntimeError

def test_other(): assert "torch" not in sys.modules
"""
    run = run_pytest(tmp_path, texts={"alone": text})

    assert run.outcomes == {"test_other": "PASSED"}, run.out
    assert run.out.count("needs --simulate-cuda") == 2
    assert "simulated CUDA" not in run.out


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--simulate-cuda=0"], "the number of GPUs must be an integer from 1 to 127, got 0"),
        (["--simulate-cuda=128"], "the number of GPUs must be an integer from 1 to 127, got 128"),
        (["--simulate-cuda=many"], "invalid int value"),
        (["--simulate-cuda=1", "--hazards=perhaps"], "invalid choice"),
    ],
)
def test_a_wrong_option_is_refused(
    typed: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is one line, before anything runs."""
    status = pytest.main(["--rootdir", str(tmp_path), str(tmp_path), *typed])
    out, err = capsys.readouterr()

    assert status == pytest.ExitCode.USAGE_ERROR
    assert message in out + err
    assert "Traceback" not in out + err


@pytest.mark.nightly_params(
    "devices=0-the number of GPUs must be an integer from 1 to 127, got 0",
    "gpus=2-the marker simulated_cuda takes devices and hazards, got gpus",
    "1, 2-the marker simulated_cuda takes devices and hazards, got 2 positional arguments",
)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("devices=0", "the number of GPUs must be an integer from 1 to 127, got 0"),
        ("hazards='no'", "hazards must be one of fail, report, off, got 'no'"),
        ("gpus=2", "the marker simulated_cuda takes devices and hazards, got gpus"),
        ("1, 2", "the marker simulated_cuda takes devices and hazards, got 2 positional arguments"),
    ],
)
def test_a_wrong_marker_is_refused(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the test that has it."""
    test = tmp_path / f"{tmp_path.name}.py"  # a unique module name
    test.write_text(
        f"import pytest\n@pytest.mark.simulated_cuda({arguments})\ndef test_marked(): pass\n", encoding="utf-8"
    )
    status = pytest.main(["--rootdir", str(tmp_path), "-p", "no:cacheprovider", str(test)])
    out, err = capsys.readouterr()

    assert status == pytest.ExitCode.USAGE_ERROR
    assert message in out + err
    assert f"{test.name}::test_marked" in out + err


@pytest.mark.nightly
def test_tests_see_gpus(tmp_path: Path) -> None:
    """Constants, texts, device-type tests, child processes; and nothing is left behind."""
    before = left_behind()
    run = run_pytest(tmp_path, "--simulate-cuda=2", files=("basics",))

    assert run.status == 0, run.out
    assert set(run.outcomes.values()) == {"PASSED"}
    assert {"test_add_cpu", "test_add_cuda", "test_stream_cuda"} <= run.outcomes.keys()
    assert not any(test.endswith("_sim") or "privateuse" in test for test in run.outcomes)
    assert "needs 8 simulated GPUs, --simulate-cuda=2 gives 2" in run.out
    assert "0 tests failed with hazards" in run.out
    assert before >= left_behind()


@pytest.fixture(name="races", scope="module")
def _races(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_pytest(tmp_path_factory.mktemp("races"), "--simulate-cuda=2", files=("races",))


@pytest.mark.nightly
@pytest.mark.slow
def test_a_race_fails_the_test_that_has_it(races: Run) -> None:
    """No other test fails."""
    assert races.status == pytest.ExitCode.TESTS_FAILED, races.out
    assert races.outcomes == {
        "test_race": "FAILED",
        "test_no_race": "PASSED",
        "test_race_and_failure": "FAILED",
        "test_race_in_a_class": "FAILED",
        "test_race_in_a_fixture": "ERROR",
        "test_race_in_a_program": "FAILED",
        "test_race_in_a_forked_process": "FAILED",
        "test_race_in_a_process_that_is_killed": "PASSED",
        "test_race_that_is_reported": "PASSED",
        "test_race_that_is_not_looked_for": "PASSED",
        "test_race_that_is_expected": "PASSED",
        "test_race_that_is_known": "XFAIL",
    }
    assert "6 tests failed with hazards, 2 reported" in races.out


@pytest.mark.slow
@pytest.mark.parametrize(
    "test", ["test_race", "TestRace.test_race_in_a_class", "test_race_in_a_fixture", "test_race_in_a_program"]
)
def test_a_race_is_shown_with_both_lines(test: str, races: Run) -> None:
    """The line that writes and the line that should have waited, without a frame of pytest's or of ours."""
    section = races.section(test)

    assert "read after write on cuda:0" in section, races.out
    source = (PROJECT / "races.py").read_text(encoding="utf-8").splitlines()
    for code in ("data = torch.ones(4", "data.mul_(2)"):
        line = next(number for number, text in enumerate(source, start=1) if code in text)
        assert f"test_races.py:{line} in race" in section
    assert "wait_stream" in section
    assert "_pytest" not in section
    assert "pluggy" not in section
    assert "fsdp_conformance" not in section


@pytest.mark.slow
def test_a_race_beside_a_failure_is_shown_too(races: Run) -> None:
    """The test's own failure comes first."""
    section = races.section("test_race_and_failure")

    assert "assert race().sum() == 0" in section
    assert section.index("AssertionError") < section.index("read after write")


@pytest.mark.nightly
@pytest.mark.parametrize("hazards", ["report", "off"])
def test_hazards_can_be_reported_or_not_looked_for(hazards: str, tmp_path: Path) -> None:
    """The tests pass; with `report` the hazards are in the summary."""
    chosen = "test_race and not is_reported and not is_expected and not is_killed"
    run = run_pytest(tmp_path, "--simulate-cuda=2", f"--hazards={hazards}", "-k", chosen, files=("races",))
    failed = {test for test, outcome in run.outcomes.items() if outcome in ("FAILED", "ERROR")}

    # The one that fails anyway, and the one that is marked as failing.
    assert failed == {"test_race_and_failure", "test_race_that_is_known"}, run.out
    assert ("read after write" in run.out) is (hazards == "report")


@pytest.mark.nightly
def test_workers_find_the_same(races: Run, tmp_path: Path) -> None:
    """Each test has the same outcome under pytest-xdist as without it."""
    pytest.importorskip("xdist")
    run = run_pytest(tmp_path, "--simulate-cuda=2", "-n", "2", files=("races",))

    assert run.outcomes == races.outcomes, run.out
    assert "6 tests failed with hazards, 2 reported" in run.out


@pytest.mark.nightly
def test_ranks_of_ours_see_gpus(tmp_path: Path) -> None:
    """Those that are forked from a warm process, for tests that import `harness.torch_compat`."""
    text = """
import torch, torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from fsdp_conformance.harness.torch_compat import DTensorTestBase, FSDPTest, skip_if_lt_x_gpu, with_comms

class TestWarm(FSDPTest):
    @property
    def world_size(self): return min(2, torch.cuda.device_count())

    @skip_if_lt_x_gpu(2)
    def test_fsdp(self):
        total = torch.ones(2, device="cuda")
        dist.all_reduce(total)
        self.assertEqual(total, torch.full((2,), 2.0, device="cuda"))

class TestMesh(DTensorTestBase):
    @property
    def world_size(self): return 2

    @with_comms
    def test_dtensor(self):
        whole = torch.arange(4.0, device="cuda")
        sharded = distribute_tensor(whole, self.build_device_mesh(), [Shard(0)])
        self.assertTrue(sharded.to_local().is_cuda)
        self.assertEqual(sharded.full_tensor(), whole)
"""
    run = run_pytest(tmp_path, "--simulate-cuda=2", texts={"ours": text})

    assert run.outcomes == {"test_fsdp": "PASSED", "test_dtensor": "PASSED"}, run.out


@pytest.mark.nightly
def test_ranks_see_gpus_and_their_races_fail_the_test(tmp_path: Path) -> None:
    """mp.spawn, MultiProcessTestCase and torchrun; a race on both ranks is one finding."""
    before = left_behind()
    run = run_pytest(tmp_path, "--simulate-cuda=2", files=("ranks",))

    assert run.outcomes == {
        "test_ddp[right]": "PASSED",
        "test_ddp[wrong]": "FAILED",
        "test_torchrun": "PASSED",
        "test_training": "PASSED",
        "test_gathered": "PASSED",
    }, run.out
    section = run.section("test_ddp[wrong]")
    assert "batch = " not in section  # the explanation has lines by number
    assert "in SpawnProcess-3, SpawnProcess-4" in section
    assert section.count("read after write") == 1
    assert before >= left_behind()


#: Two tests, each with its own race.
KNOWN = """
import torch

def race():
    data = torch.ones(4, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        data.mul_(2)

def test_known():
    race()

def test_new():
    race()
"""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "workers"])
def test_suppressed_findings_fail_no_test(workers: tuple[str, ...], tmp_path: Path) -> None:
    """They are listed at the end, also those of workers; others fail. A line that matches nothing is named."""
    (tmp_path / "known.supp").write_text("race:test_known\nany:old  # gone\n", encoding="utf-8")
    run = run_pytest(
        tmp_path, "--simulate-cuda=1", "-o", "hazard_suppressions=known.supp", *workers, texts={"a": KNOWN}
    )

    assert run.outcomes == {"test_known": "PASSED", "test_new": "FAILED"}, run.out
    assert "[known.supp:1 race:test_known]" in run.out
    assert "matched nothing: known.supp:2 any:old" in run.out
    assert "1 test failed with hazards" in run.out


@pytest.mark.nightly
@pytest.mark.slow
def test_a_suppression_that_matches_nothing_fails_the_run_if_asked(tmp_path: Path) -> None:
    """All tests pass, and the run fails."""
    (tmp_path / "known.supp").write_text("race:race\nrace:old\n", encoding="utf-8")
    typed = ("--simulate-cuda=1", "--hazard-suppressions=known.supp", "--strict-hazard-suppressions")
    run = run_pytest(tmp_path, *typed, texts={"a": KNOWN})

    assert set(run.outcomes.values()) == {"PASSED"}, run.out
    assert run.status == pytest.ExitCode.TESTS_FAILED
    assert "matched nothing: known.supp:2 race:old" in run.out


def test_a_bad_file_of_suppressions_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every bad line, before anything runs."""
    (tmp_path / "known.supp").write_text("races:x\nx\n", encoding="utf-8")
    typed = ["--simulate-cuda=1", f"--hazard-suppressions={tmp_path / 'known.supp'}"]
    status = pytest.main(["--rootdir", str(tmp_path), str(tmp_path), *typed])
    out, err = capsys.readouterr()

    assert status == pytest.ExitCode.USAGE_ERROR
    assert "line 1: the kind must be one of" in out + err
    assert "line 2 must be KIND:PATTERN" in out + err


#: A program that is right and one that is wrong, which uses what nothing has written; in this process and in another.
UNWRITTEN = """
import subprocess, sys
import pytest
import torch

WRONG = "import torch; print(torch.empty(4, device='cuda').sum().item())"

def test_right():
    buffer = torch.empty(8, device="cuda")
    buffer[:5] = 1.0
    padded = buffer * 2
    assert padded[:5].sum().item() == 10.0

def test_wrong():
    buffer = torch.empty(8, device="cuda")
    buffer[:5] = 1.0
    (buffer * 2).sum().item()

def test_wrong_in_a_child():
    subprocess.run([sys.executable, "-c", WRONG], check=True)

class TestBuffer:
    buffer = None

    def test_fills(self):
        type(self).buffer = torch.empty(4, device="cuda")
        self.buffer.fill_(1.0)

    def test_uses(self):
        assert self.buffer.sum().item() == 4.0

@pytest.mark.simulated_cuda(hazards="off")
def test_fills_unseen():
    TestBuffer.buffer = torch.empty(4, device="cuda")
    TestBuffer.buffer.copy_(torch.ones(4, device="cuda"))

def test_uses_what_was_filled_unseen():
    assert TestBuffer.buffer.sum().item() == 4.0
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_uses_of_uninitialized_memory_fail_the_test(tmp_path: Path) -> None:
    """As `sanitize` finds them; memory may be filled in one test and used in another."""
    run = run_pytest(tmp_path, "--simulate-cuda=1", texts={"unwritten": UNWRITTEN})

    wrong = {"test_wrong", "test_wrong_in_a_child"}
    assert {test for test, outcome in run.outcomes.items() if outcome == "FAILED"} == wrong, run.out
    assert len(run.outcomes) == 7
    assert "use of uninitialized memory on cuda:0: aten::item" in run.section("test_wrong")
