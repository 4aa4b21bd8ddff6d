"""The pytest plugin at work on a small suite: outcomes, order, run file, certificate, exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.pytest_plugin.controller import EXIT_ENVIRONMENT, EXIT_SUITE
from fsdp_conformance.pytest_plugin.options import ERROR_FILE, ORDER_OPTION
from fsdp_conformance.report import certificate
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.report.runfile import read
from fsdp_conformance.report.verify import verify
from fsdp_conformance.run_settings import RunOrder, RunSettings
from fsdp_conformance.tests import warm_interpreter
from fsdp_conformance.tests.pytest_plugin import mini_suite
from fsdp_conformance.tests.pytest_plugin.mini_suite import MiniSuite
from fsdp_conformance.verdict import Verdict

#: Each test is a run in its own processes.
pytestmark = pytest.mark.slow

TIMEOUT_S = 240


@pytest.fixture
def suite(tmp_path: Path) -> MiniSuite:
    """The small suite."""
    return mini_suite.write(tmp_path)


@dataclass(frozen=True)
class Ran:
    """The output of a pytest run."""

    status: int
    output: str
    directory: Path

    @property
    def run(self) -> RunFile:
        """Its run file."""
        return read(self.directory)

    @property
    def verdicts(self) -> dict[str, str]:
        """Case to verdict, in the order in which they came."""
        return {record.case: record.verdict.value for record in self.run.records}

    @property
    def certificate(self) -> dict[str, Any]:
        """As the footer has it."""
        footer = self.run.footer
        assert footer is not None
        certified: dict[str, Any] = footer["certificate"]
        return certified


def ran(suite: MiniSuite, acts: Mapping[str, str] | None = None, *options: str, **variables: str) -> Ran:
    """Run the suite; `acts` say what cases do."""
    directory = suite.root / "report"
    done = warm_interpreter.run(
        suite.pytest_command("--conformance-report", str(directory), *options),
        env=suite.environment(acts, **variables),
        cwd=suite.root,
        timeout=TIMEOUT_S,
        merged=True,
    )
    return Ran(done.returncode, done.stdout, directory)


# A whole run.


def test_a_run_in_which_all_is_well(suite: MiniSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Certified, status 0; what was not judged is a skip with its reason, and is counted."""
    monkeypatch.setattr(certificate, "shipped", {suite.profile.name: suite.profile.sha256}.get)
    result = ran(suite, None, "-rs")

    assert result.status == 0
    assert result.certificate["certified"] is True
    assert result.certificate["counts"] == {"PASS": 5, "UNSUPPORTED": 1, "NOT_RUN_ENV": 1}
    assert "UNSUPPORTED: no_sync not declared by torch-fsdp2" in result.output
    assert "NOT_RUN_ENV: needs cuda, which this machine does not have" in result.output
    assert "CERTIFIED base (0 of 2 extensions)  mini   5 PASS" in result.output
    assert f"run file: {result.directory / 'run.jsonl'}" in result.output
    assert "conformance: mine 1.2 · cpu · mini" in result.output
    assert verify(result.directory, suite.profile).discrepancies == ()


@pytest.mark.nightly
def test_the_largest_world_comes_first(suite: MiniSuite) -> None:
    """Then cases that may wait for a deadline, then the order of ids; plain tests keep their place behind."""
    result = ran(suite, None, "-v")
    sizes = [record.world_size for record in result.run.records]

    assert sizes == sorted(sizes, reverse=True)
    assert list(result.verdicts)[:3] == ["R001/probe-ws4", "R188/it-shards-ws2", "R001/probe-ws2"]
    assert "test_that_is_no_case PASSED" in result.output


def test_every_verdict_is_an_outcome(suite: MiniSuite) -> None:
    """FAIL and its kind fail with the whole argument, whatever the test did."""
    acts = {"R001/probe-ws4": "HANG", "R001/probe-ws2": "FAIL", "R188/it-shards-ws2": "INCONCLUSIVE"}
    result = ran(suite, acts)

    assert result.status == 1
    assert "3 failed, 3 passed, 2 skipped" in result.output
    assert "likely    gradients are summed, not averaged" in result.output
    assert "repro     fsdp-conformance run --implementation torch-fsdp2 --case R001/probe-ws2" in result.output
    assert [reason for reason in result.certificate["reasons"] if "FAIL" in reason] == ["FAIL: R001/probe-ws2"]


@pytest.mark.nightly
@pytest.mark.nightly_params("setup-error-its setup failed: ")
@pytest.mark.parametrize(
    ("act", "reason"),
    [
        ("no-record", "the test ended without a verdict"),
        ("raise", "RuntimeError: the oracle stumbled"),
        ("pass-and-raise", "the verdict was PASS, but the test failed: "),
        ("setup-error", "its setup failed: "),
    ],
)
def test_a_test_that_loses_its_verdict_is_the_suites_error(suite: MiniSuite, act: str, reason: str) -> None:
    """It fails, even if the test method did not."""
    result = ran(suite, {"R188/it-shards-ws2": act})
    record = {record.case: record for record in result.run.records}["R188/it-shards-ws2"]

    assert (result.status, record.verdict) == (1, Verdict.ERROR_SUITE)
    assert record.reason.startswith(reason)
    assert result.certificate["status"] == 4


@pytest.mark.nightly
def test_a_case_that_pytest_skips_is_disabled(suite: MiniSuite) -> None:
    """The mark makes no difference; the run is incomplete, and pytest's status shows it."""
    result = ran(suite, {"R001/probe-ws1": "mark-skip"})

    assert result.verdicts["R001/probe-ws1"] == "DISABLED"
    assert result.certificate["reasons"] == ["incomplete: DISABLED: R001/probe-ws1"]
    assert result.status == 1


def test_a_mark_cannot_turn_a_failure_into_an_expected_one(suite: MiniSuite) -> None:
    """The verdict is the outcome."""
    result = ran(suite, {"R001/probe-ws1": "mark-xfail"})

    assert (result.status, result.verdicts["R001/probe-ws1"]) == (1, "FAIL")


# Options.


@pytest.mark.nightly
def test_a_case_that_is_chosen_runs_alone(suite: MiniSuite) -> None:
    """pytest's status is the cases'; the certificate says that the run was not whole."""
    result = ran(suite, None, "--conformance-case", "R001/probe-ws2,R188")

    assert result.status == 0
    assert list(result.verdicts) == ["R188/it-shards-ws2", "R001/probe-ws2"]
    assert result.certificate["certified"] is False
    assert "incomplete: --case left cases out" in result.certificate["reasons"]


@pytest.mark.nightly
def test_a_world_size_disables_the_others(suite: MiniSuite) -> None:
    """They are in the run file, with the reason."""
    result = ran(suite, None, "--conformance-world-size", "4")

    assert result.verdicts["R001/probe-ws4"] == "PASS"
    assert set(result.verdicts.values()) == {"PASS", "DISABLED"}
    assert result.status == 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--conformance-case", "R001/*-ws[24]"), ["R001/probe-ws4", "R001/probe-ws2"]),
        pytest.param(
            ("--conformance-requirement", "R001"),
            ["R001/probe-ws4", "R001/probe-ws2", "R001/probe-ws1"],
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            ("--conformance-binding", "R003", "--conformance-case", "*-ws1"),
            ["R001/probe-ws1"],
            marks=pytest.mark.nightly,
        ),
        (("--conformance-chapter", "J,G", "-n", "2"), ["R070/order-ws2", "R093/deferred-ws2"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_cases_can_be_selected_in_several_ways(suite: MiniSuite, options: tuple[str, ...], expected: list[str]) -> None:
    """The run file names the options that left cases out."""
    result = ran(suite, None, *options)

    assert sorted(result.verdicts) == sorted(expected)
    assert f"incomplete: {options[0].replace('conformance-', '')} left cases out" in result.certificate["reasons"]


@pytest.mark.nightly
@pytest.mark.parametrize("acts", [None, {"R001/probe-ws2": "exit"}], ids=["all is well", "a worker dies"])
def test_cases_that_own_devices_are_dealt_by_size(suite: MiniSuite, acts: dict[str, str] | None) -> None:
    """By our scheduler, to real workers: each case once, plain tests too, and a worker that dies is replaced."""
    sizes = {f"test_cases.py::Parity::test_probe_ws{size}": size for size in (1, 2, 4)}
    result = ran(suite, acts, "-v", "-n", "2", MINI_SUITE_OWNED=json.dumps(sizes))

    assert "scheduling tests via DevicesScheduling" in result.output
    assert sorted(result.verdicts) == sorted(entry.id for entry in suite.profile.entries)
    assert len(result.run.records) == len(suite.profile.entries)
    assert result.output.count("PASSED") == (6 if acts is None else 5)
    assert ("replacing crashed worker" in result.output) == (acts is not None)
    assert result.verdicts["R001/probe-ws2"] == ("PASS" if acts is None else "ERROR_SUITE")


@pytest.mark.nightly
def test_workers_get_one_case_at_a_time(suite: MiniSuite) -> None:
    """That is the default for conformance runs only, and the user can set another number."""
    says = "def pytest_sessionfinish(session): print('at a time:', session.config.option.maxschedchunk)"
    (suite.root / "says.py").write_text(says, encoding="utf-8")
    others = suite.root / "test_others.py"
    others.write_text("def test_nothing(): pass", encoding="utf-8")
    options = ("-p", "says", "-s", "--collect-only")

    assert "at a time: 1\n" in ran(suite, None, *options).output
    assert "at a time: 5\n" in ran(suite, None, *options, "--maxschedchunk", "5").output
    command = [word for word in suite.pytest_command(*options) if word != str(suite.package)]
    done = subprocess.run(
        [*command, str(others)], env=suite.environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert "at a time: None\n" in done.stdout


@pytest.mark.parametrize(
    "workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.nightly)], ids=["one process", "workers"]
)
def test_fail_fast_stops_after_the_first_failure(suite: MiniSuite, workers: tuple[str, ...]) -> None:
    """The run has a footer, the status of a failure, and a note on what was not run."""
    acts = {"R001/probe-ws4": "FAIL"}
    if workers:  # The other worker must not run out of cases before the controller knows of the failure.
        others = [entry.id for entry in suite.profile.entries if not entry.id.startswith("R001/")]
        acts |= dict.fromkeys(others, "after-failure")
    result = ran(suite, acts, "--conformance-fail-fast", *workers)

    assert result.status == pytest.ExitCode.TESTS_FAILED
    assert result.verdicts["R001/probe-ws4"] == "FAIL"
    left = 7 - len(result.verdicts)
    assert left > 0
    note = f"stopped by --fail-fast after R001/probe-ws4: {left} of 7 cases were not run"
    assert note in result.certificate["remarks"]
    assert note in result.output
    assert result.run.unfinished() == []


@pytest.mark.nightly
def test_fail_fast_does_not_stop_a_run_without_failures(suite: MiniSuite) -> None:
    """UNSUPPORTED and NOT_RUN_ENV are none, and the certificate is whole."""
    result = ran(suite, None, "--conformance-fail-fast")

    assert (result.status, len(result.verdicts)) == (0, 7)
    assert result.certificate["certified"] is True


@pytest.mark.nightly
def test_last_failed_runs_the_failures_again(suite: MiniSuite) -> None:
    """Those of the last run in the working directory; without one, that is a usage error."""
    without = ran(suite, None, "--conformance-last-failed")
    (suite.root / ".fsdp-conformance").mkdir()
    (suite.root / ".fsdp-conformance" / "last").symlink_to(suite.root / "report", target_is_directory=True)
    ran(suite, {"R001/probe-ws2": "FAIL", "R070/order-ws2": "HANG"})
    again = ran(suite, {"R070/order-ws2": "FAIL"}, "--conformance-last-failed", "-n", "2").verdicts
    once_more = ran(suite, None, "--conformance-last-failed").verdicts

    assert without.status == pytest.ExitCode.USAGE_ERROR
    assert "--last-failed needs an earlier run" in without.output
    assert again == {"R001/probe-ws2": "PASS", "R070/order-ws2": "FAIL"}
    assert once_more == {"R070/order-ws2": "PASS"}


@pytest.mark.nightly
def test_settings_reach_the_run_file(suite: MiniSuite) -> None:
    options = ("--implementation", "my.py:Mine", "--conformance-deadline-scale", "2.5", "--reuse-ranks")
    result = ran(suite, None, *options)
    settings = result.run.header["settings"]

    assert (settings["implementation"], settings["deadline_scale"], settings["reuse_ranks"]) == (
        "my.py:Mine",
        2.5,
        True,
    )
    assert (
        "incomplete: --reuse-ranks, and a certificate needs fresh ranks for every case" in result.certificate["reasons"]
    )


@pytest.mark.nightly
def test_declared_flags_reach_the_cases(suite: MiniSuite) -> None:
    """The description is asked once and handed on."""
    result = ran(suite, None, MINI_SUITE_FLAGS="zero3 no_sync")

    assert result.verdicts["R093/deferred-ws2"] == "PASS"


@pytest.mark.nightly
def test_an_order_says_everything_at_once(suite: MiniSuite, tmp_path: Path) -> None:
    """The settings and the adapter's description, which is not asked for again."""
    settings = RunSettings(
        implementation="mine", profile=str(suite.profile_path), report_dir=str(suite.root / "report"),
        cases=("R093",), deadline_scale=2.0,
    )  # fmt: skip
    description = {"spec": "mine", "name": "told", "version": "9", "capabilities": ["no_sync"], "shims": []}
    order = RunOrder(settings=settings, description=description)
    (tmp_path / "order.json").write_text(order.to_json(), encoding="utf-8")

    for workers in ((), ("-n", "2")):
        result = ran(suite, None, ORDER_OPTION, str(tmp_path / "order.json"), *workers)

        header = result.run.header
        assert (header["implementation"]["name"], header["settings"]["deadline_scale"]) == ("told", 2.0)
        assert result.verdicts == {"R093/deferred-ws2": "PASS"}


@pytest.mark.nightly
def test_a_keyword_leaves_the_status_to_pytest(suite: MiniSuite) -> None:
    """A run that was narrowed by hand is not expected to earn a certificate."""
    result = ran(suite, None, "-k", "shards")

    assert (result.status, result.certificate["certified"]) == (0, False)


def test_a_whole_run_that_earns_no_certificate_is_not_a_success(suite: MiniSuite) -> None:
    """No test failed; a mandatory requirement was declined."""
    result = ran(suite, {"R188/it-shards-ws2": "UNSUPPORTED"})

    assert "failed" not in result.output.splitlines()[-1]
    assert "R188/it-shards-ws2" in result.certificate["reasons"][0]
    assert result.status == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param(
            ("--conformance-case", "R999"),
            "or a glob such as 'R005/*-ws2', got 'R999'",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            ("--conformance-case", "R150"),
            "case 'R150' is in the suites, but not in profile mini. Use --profile core-2026.11 or full-2026.11",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            ("--conformance-world-size", "7"),
            "world_size must be one of 1, 2, 4, got 7",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            ("--conformance-world-size", "two"),
            "world_size must be a positive integer, got 'two'",
            marks=pytest.mark.nightly,
        ),
        (("--conformance-deadline-scale", "-1"), "deadline_scale must be a positive number, got '-1'"),
        pytest.param(
            ("--conformance-device", "cuda:0"),
            "device must be a type such as cpu, sim or cuda, without an index",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            ("--conformance-profile", "none"), "or the path of a .json file, got 'none'", marks=pytest.mark.nightly
        ),
        pytest.param(
            ("--implementation", "missing"), "implementation='missing' cannot be imported", marks=pytest.mark.nightly
        ),
        (("--implementation", "broken"), "broken has no wrap()\nbroken has no step()"),
    ],
)
def test_a_mistake_is_one_message(suite: MiniSuite, options: tuple[str, str], words: str, tmp_path: Path) -> None:
    """pytest's usage status, no traceback, no run file; the message is also left for the caller."""
    result = ran(suite, None, *options, **{ERROR_FILE: str(tmp_path / "error.json")})

    assert result.status == pytest.ExitCode.USAGE_ERROR
    assert words in result.output
    assert "Traceback" not in result.output
    assert not result.directory.exists()
    error = json.loads((tmp_path / "error.json").read_text(encoding="utf-8"))
    assert (error["status"], words in error["message"]) == (2, True)


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        pytest.param(
            ("--implementation", "elsewhere"),
            EXIT_ENVIRONMENT,
            "backend 'nccl' is absent",
            marks=pytest.mark.nightly,
        ),
        (("--implementation", "deadly"), EXIT_SUITE, "rank 0 died of SIGSEGV while the adapter was imported"),
        (
            ("--conformance-device", "cuda", "--conformance-world-size", "4"),
            EXIT_ENVIRONMENT,
            "expected at least 4 devices of type 'cuda', found 2",
        ),
    ],
)
def test_a_run_that_cannot_begin_says_why(suite: MiniSuite, options: tuple[str, ...], status: int, words: str) -> None:
    """It ends with a status beyond pytest's own."""
    result = ran(suite, None, *options)

    assert result.status == status
    assert words in result.output
    assert not result.directory.exists()


# What ends a run.


def test_a_run_that_is_interrupted_has_no_footer(suite: MiniSuite) -> None:
    """The cases judged before the interruption can be read."""
    result = ran(suite, {"R017/elsewhere-ws2": "interrupt"})

    assert result.status == pytest.ExitCode.INTERRUPTED
    assert list(result.verdicts) == ["R001/probe-ws4", "R188/it-shards-ws2", "R001/probe-ws2"]
    assert (result.run.aborted, result.run.unfinished(), result.run.problems) == (True, ["R017/elsewhere-ws2"], [])
    assert "ABORTED: the run was interrupted, and its file has no footer" in result.output


@pytest.mark.nightly
def test_a_full_disk_ends_the_run(suite: MiniSuite) -> None:
    """The file is intact, and there is a message and the environment's status."""
    result = ran(suite, None, MINI_SUITE_FILE_SIZE="5000")

    assert result.status == EXIT_ENVIRONMENT
    assert result.run.problems == []
    assert 0 < len(result.run.records) < 5
    assert "ABORTED: the run file" in result.output
    assert "File too large" in result.output


def test_a_report_directory_that_cannot_be_made_ends_the_run(suite: MiniSuite) -> None:
    """Before the first case."""
    (suite.root / "report").write_text("a file", encoding="utf-8")
    result = ran(suite)

    assert result.status == EXIT_ENVIRONMENT
    assert "cannot be created" in result.output


@pytest.mark.nightly
def test_reruns_are_not_comparable(suite: MiniSuite) -> None:
    """A plugin that reruns failed cases refuses the certificate, by its option or by its mark."""
    by_option = ran(suite, None, "-p", "rerunner", "--reruns", "2")
    by_mark = ran(suite, {"R001/probe-ws1": "mark-flaky"})

    for result in (by_option, by_mark):
        reason = "not comparable: a plugin reran failed cases, and a case must run only once"
        assert result.certificate["reasons"] == [reason]
        assert result.status == 1


# pytest-xdist.


@pytest.mark.nightly
def test_workers_come_to_the_same_verdicts(suite: MiniSuite) -> None:
    """The verdicts are those of one process; records travel with the reports."""
    acts = {"R001/probe-ws4": "HANG", "R001/probe-ws2": "FAIL"}
    alone = ran(suite, acts).verdicts
    shared = ran(suite, acts, "-n", "2")

    assert shared.verdicts == alone
    assert shared.run.problems == []
    assert shared.status == 1


@pytest.mark.nightly
def test_auto_is_as_many_workers_as_there_are_slots(suite: MiniSuite) -> None:
    """The harness says how many: two here."""
    result = ran(suite, None, "-n", "auto")

    assert result.status == 0
    assert "2 workers" in result.output or "2/2 workers" in result.output


@pytest.mark.nightly
def test_a_worker_that_dies_is_the_suites_error(suite: MiniSuite) -> None:
    """The case that it ran has a record; the others run on."""
    result = ran(suite, {"R001/probe-ws2": "exit"}, "-n", "2")
    record = {record.case: record for record in result.run.records}["R001/probe-ws2"]

    assert (record.verdict, record.reason) == (
        Verdict.ERROR_SUITE,
        "the pytest worker itself died during this case, not one of its ranks",
    )
    assert len(result.verdicts) == 7
    assert result.certificate["reasons"] == ["ERROR_SUITE: R001/probe-ws2"]


def test_a_mistake_is_one_message_with_workers_too(suite: MiniSuite) -> None:
    """The controller finds it before a worker is started."""
    result = ran(suite, None, "-n", "2", "--conformance-case", "R999")

    assert result.status == pytest.ExitCode.USAGE_ERROR
    assert "got 'R999'" in result.output


# Everybody else's tests.


def test_other_tests_are_left_alone(tmp_path: Path) -> None:
    """No run file, no section, no torch: of our modules only the plugins and the table of options."""
    (tmp_path / "test_other.py").write_text(
        "import sys\n"
        "def test_light():\n"
        "    ours = sorted(name for name in sys.modules if name.startswith('fsdp_conformance.'))\n"
        "    words = {'run_settings', 'errors', 'plan', 'status', 'stress', 'suggestions'}\n"
        "    assert {name.split('.')[1] for name in ours} == {'pytest_plugin', 'simulator', *words}\n"
        "    room = 'fsdp_conformance.simulator.simulated_cuda'\n"
        "    simulator = {name for name in ours if '.simulator' in name}\n"
        "    assert simulator == {'fsdp_conformance.simulator', room, room + '.plugin'}\n"
        "    assert 'torch' not in sys.modules\n",
        encoding="utf-8",
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "test_other.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout
    assert "conformance" not in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["test_other.py"]
