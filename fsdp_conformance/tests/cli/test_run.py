"""`fsdp-conformance run`, end to end on cases that start no rank: statuses, messages, files."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import subprocess
from pathlib import Path

import pytest

from fsdp_conformance.report import runfile
from fsdp_conformance.tests.cli.cli_runs import Said, said, with_adapter, with_quick_survey, words
from fsdp_conformance.tests.pytest_plugin import mini_suite

#: Each test is a run in its own processes.
pytestmark = pytest.mark.slow


@pytest.fixture(name="suite", scope="module")
def _suite(tmp_path_factory: pytest.TempPathFactory) -> mini_suite.MiniSuite:
    return mini_suite.write(tmp_path_factory.mktemp("suite"))


def typed(suite: mini_suite.MiniSuite, directory: Path, *more: str) -> list[str]:
    """`run` on the mini suite, into `directory`/report."""
    chosen = [] if "--implementation" in more else ["--implementation", "mine.py"]
    report = [] if "--report" in more else ["--report", str(directory / "report")]
    profile = ["--profile", str(suite.profile_path), "--suites", mini_suite.PACKAGE]
    return ["run", *profile, *chosen, *report, *more]


def run(
    suite: mini_suite.MiniSuite, directory: Path, *more: str, acts: dict[str, str] | None = None, **variables: str
) -> Said:
    """Run it to its end. Without an implementation named, one is made up that needs no torch."""
    variables.setdefault("MINI_SUITE_FLAGS", "zero3 no_sync")
    env = suite.environment(acts, **variables)
    if "--implementation" not in more:
        env = with_quick_survey(env, directory)
    return said(*typed(suite, directory, *more), cwd=directory, env=env)


def test_a_run_in_which_all_holds_is_certified(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """Status 0, the verdict, and as last line where the run file is; `verify` derives the same from it."""
    result = run(suite, tmp_path)

    assert result.status == 0, result.out + result.err
    assert "\nCERTIFIED base + accumulation (1 of 2 extensions)  mini" in result.out
    assert f"run file: {tmp_path / 'report' / 'run.jsonl'}" == result.last_line
    assert {"run.jsonl", "pytest.log", "junit.xml", "summary.md", "report.html"} == {
        path.name for path in (tmp_path / "report").iterdir()
    }
    assert f"report: {tmp_path / 'report' / 'report.html'}" in result.out
    copy = tmp_path / "pages" / "copy.html"
    profile = ("--profile", str(suite.profile_path))
    verified = said("verify", str(tmp_path / "report"), "--html", str(copy), *profile, env=suite.environment())
    assert (tmp_path / "report" / "report.html").read_text() == copy.read_text()
    assert verified.status == 0
    assert "verified" in verified.last_line
    elsewhere = said("verify", str(tmp_path / "report"), *profile)
    assert (elsewhere.status, "\nPRIVATE RUN  mini" in elsewhere.out) == (1, True)


def test_a_failure_is_not_certified_and_says_why(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """Status 1; the finding names requirement, case and a line that shows it again; `explain` finds it."""
    result = run(suite, tmp_path, acts={"R001/probe-ws2": "FAIL"})

    assert result.status == 1
    assert "FAIL  R001/probe-ws2" in result.out
    assert "NOT CERTIFIED  mini" in result.out
    assert "repro " in result.out
    profile = ("--profile", str(suite.profile_path))
    explained = said("explain", "R001/probe-ws2", "--report", str(tmp_path / "report"), *profile)
    assert (explained.status, "✗ FAIL" in explained.out) == (0, True)


@pytest.mark.nightly
def test_workers_come_to_the_same_verdicts(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """Every case has the same verdict with -n 2 as without."""
    pytest.importorskip("xdist")
    acts = {"R001/probe-ws2": "FAIL", "R070/order-ws2": "HANG"}
    verdicts = []
    for name, more in (("one", ()), ("two", ("-n", "2"))):
        (tmp_path / name).mkdir()
        result = run(suite, tmp_path / name, *more, acts=acts)
        records = runfile.read(tmp_path / name / "report").records
        verdicts.append((result.status, {record.case: record.verdict for record in records}))

    assert verdicts[0] == verdicts[1]
    assert verdicts[0][0] == 1
    assert len(verdicts[0][1]) == 7


@pytest.mark.nightly
def test_a_partial_profile_cannot_certify(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """--case runs what it names; all that ran may pass, and the status is 1."""
    result = run(suite, tmp_path, "--case", "R188", "--world-size", "2")

    assert result.status == 1
    assert "1/1" in result.out
    assert "No failures, but a partial profile cannot certify." in result.out


@pytest.mark.nightly
def test_the_selection_and_its_duration_are_announced(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """First from typical durations, then from what the last run took."""
    env = with_quick_survey(suite.environment(MINI_SUITE_FLAGS="zero3 no_sync"), tmp_path)
    typed_without_report = typed(suite, tmp_path, "--case", "R001/*,R017", "-n", "0", "--report", "x")[:-2]
    first, second = (said(*typed_without_report, cwd=tmp_path, env=env) for _ in range(2))

    assert "mini · 4 of 7 cases selected" in first.out
    assert (
        "1 case cannot run here; for the reasons:\n  fsdp-conformance list --not-run --implementation mine.py"
        in first.out
    )
    # How long depends on the machine, and on what runs beside the tests.
    assert re.search(r"running 3 cases: about \d+ .*\(estimated from typical durations\)", first.out)
    assert re.search(r"running 3 cases: about \d+ .*\(measured in the last run\)", second.out)


@pytest.mark.nightly
def test_a_command_that_is_suggested_can_be_read(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """A script that names every case is not told each of them again."""
    env = with_quick_survey(suite.environment(MINI_SUITE_FLAGS="zero3 no_sync"), tmp_path)
    names = ",".join(["R001", "R017"] * 40)
    said_of_all = said(*typed(suite, tmp_path, "--case", names, "-n", "0"), cwd=tmp_path, env=env).out

    assert "fsdp-conformance list --not-run --implementation mine.py" in said_of_all
    assert "R017,R001" not in said_of_all


@pytest.mark.nightly
def test_fail_fast_and_last_failed(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """The first stops at the first failure and says what is left; the other runs the failures of the last run."""
    words_of_run = typed(suite, tmp_path, "--report", "x")[:-2]
    acts = {"R001/probe-ws4": "FAIL"}
    env = with_quick_survey(suite.environment(acts, MINI_SUITE_FLAGS="zero3 no_sync"), tmp_path)
    stopped = said(*words_of_run, "--fail-fast", cwd=tmp_path, env=env)
    again = said(*words_of_run, "--last-failed", cwd=tmp_path, env=env)
    other = said(*words_of_run, "--last-failed", "--implementation", "other.py", cwd=tmp_path, env=env)

    assert stopped.status == 1
    assert "note: stopped by --fail-fast after R001/probe-ws4: 6 of 7 cases were not run" in stopped.out
    assert "incomplete: 6 of 7 cases were not run" in stopped.out
    assert again.status == 1
    assert "1 of 7 cases selected" in again.out
    assert "incomplete: --last-failed left cases out" in again.out
    assert other.status == 2
    assert "--last-failed needs a run of other.py, but the last one was of mine.py" in other.err


@pytest.mark.nightly
def test_an_error_of_the_suite_is_status_4(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """A case that stumbles over itself says nothing about the implementation."""
    result = run(suite, tmp_path, acts={"R001/probe-ws2": "raise"})

    assert result.status == 4
    assert "ERROR_SUITE" in result.out


def test_a_pytest_that_dies_is_told_with_the_end_of_its_log(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """Status 4; what was judged before stays readable."""
    result = run(suite, tmp_path, acts={"R188/it-shards-ws2": "exit"})

    assert result.status == 4
    assert "pytest ended with status 3 before the run was complete" in result.err
    assert "pytest.log" in result.err
    left = runfile.read(tmp_path / "report")
    assert left.aborted
    assert left.problems == []


@pytest.mark.nightly
def test_the_users_own_pytest_settings_have_no_part_in_it(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """A pytest.ini, a conftest.py and variables that would stop any pytest are not read."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n", encoding="utf-8")
    (tmp_path / "conftest.py").write_text("raise RuntimeError('read')\n", encoding="utf-8")

    result = run(suite, tmp_path, "--case", "R188", PYTEST_ADDOPTS="--no-such-option", PYTEST_PLUGINS="no_such_plugin")

    assert result.status == 1
    assert "1 PASS" in result.out


@pytest.mark.nightly
def test_the_package_need_not_be_installed(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """Where entry points are unknown the plugin is loaded all the same, and once."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import importlib.metadata as metadata\n"
        "metadata.Distribution.entry_points = property(lambda self: metadata.EntryPoints())\n",
        encoding="utf-8",
    )
    path = os.pathsep.join([str(hidden), suite.environment()["PYTHONPATH"]])

    result = run(suite, tmp_path, "--case", "R188", "--implementation", with_adapter(tmp_path), PYTHONPATH=path)

    assert "1 PASS" in result.out, result.err


@pytest.mark.nightly
def test_the_default_directory_is_named_by_implementation_and_time(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """Below .fsdp-conformance, which git ignores; `last` points to it, and `explain` looks there by itself."""
    words_of_run = typed(suite, tmp_path, "--case", "R188", "--report", "x")
    env = with_quick_survey(suite.environment(), tmp_path)

    result = said(*words_of_run[:-2], cwd=tmp_path, env=env)

    assert result.last_line.startswith("run file: .fsdp-conformance/")
    assert (tmp_path / ".fsdp-conformance" / "last" / "run.jsonl").is_file()
    assert (tmp_path / ".fsdp-conformance" / ".gitignore").read_text(encoding="utf-8") == "*\n"
    explained = said("explain", "R188", "--profile", str(suite.profile_path), cwd=tmp_path)
    assert "✓ PASS" in explained.out


def test_an_earlier_run_is_kept_and_not_taken_for_this_one(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """A run that ends before it has its own file does not report the certificate of the last one."""
    report = tmp_path / "report"
    report.mkdir()
    (report / "run.jsonl").write_text("the last one\n", encoding="utf-8")
    (suite.package / "conftest.py").rename(suite.package / "conftest.kept")
    try:
        (suite.package / "conftest.py").write_text("import os\nos._exit(9)\n", encoding="utf-8")
        result = run(suite, tmp_path)
    finally:
        (suite.package / "conftest.kept").replace(suite.package / "conftest.py")

    assert result.status == 4
    assert (report / "run.previous.jsonl").read_text(encoding="utf-8") == "the last one\n"
    assert "run file:" not in result.out


@pytest.mark.nightly
@pytest.mark.parametrize("no_color", ["", "1"], ids=["colours", "NO_COLOR"])
def test_on_a_terminal_progress_is_drawn_in_place(no_color: str, suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """A line per chapter with its counts, and the verdict below; in colour, unless NO_COLOR is set."""
    ours, theirs = pty.openpty()
    variables = {"MINI_SUITE_FLAGS": "zero3 no_sync", "TERM": "xterm", "COLUMNS": "120", "NO_COLOR": no_color}
    env = with_quick_survey(suite.environment({"R001/probe-ws2": "FAIL"}, **variables), tmp_path)
    with subprocess.Popen(
        words(*typed(suite, tmp_path)), cwd=tmp_path, env=env, stdout=theirs, stderr=theirs, stdin=theirs
    ) as child:
        os.close(theirs)
        drawn = b""
        while True:
            try:
                drawn += os.read(ours, 65536)
            except OSError:  # the other side is closed
                break
        status = child.wait(60)
    os.close(ours)
    text = drawn.decode()

    assert status == 1, text
    assert "\x1b[" in text
    assert (re.search(r"\x1b\[[0-9;]*[349][0-7]m", text) is None) == bool(no_color)
    assert "Numerical parity with DDP" in text
    assert "1 FAIL" in text
    assert "NOT CERTIFIED" in text
    assert "Traceback" not in text


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("broken.py", "def wrap(:\n", "SyntaxError: invalid syntax"),
        ("deadly.py", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", "was ended by SIGKILL"),
        pytest.param("leaves.py", "import sys\nprint('bye')\nsys.exit(0)\n", "bye", marks=pytest.mark.nightly),
        (
            "partly.py:Partly",
            "from fsdp_conformance.adapters.base import Adapter\nclass Partly(Adapter):\n    pass\n",
            "does not implement setup(), which the protocol requires",
        ),
    ],
    ids=["syntax error", "kills the process", "ends the process", "writes nothing"],
)
def test_an_adapter_that_cannot_be_used_is_wrong_usage(
    name: str, text: str, expected: str, suite: mini_suite.MiniSuite, tmp_path: Path
) -> None:
    """Status 2, the reason in the user's own file, and nothing written."""
    file, colon, attribute = name.partition(":")
    spec = with_adapter(tmp_path, text, file) + colon + attribute

    result = run(suite, tmp_path, "--implementation", spec)

    assert result.status == 2
    assert expected in result.err
    assert not (tmp_path / "report").exists()


def _smoke_result(**changes: list[str]) -> str:
    result = {"check": "ADAPTER-03", "title": "", "problems": [], "breaches": [], "not_run": "", **changes}
    return json.dumps({"results": [result]})


def test_a_run_does_not_start_with_an_adapter_that_is_wrong(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """Its verdicts would blame the engine. The first problems are told, nothing is written; --no-smoke runs."""
    wrong = [f"full_params()['w{number}'] must have the full shape (2,), got (1,)" for number in range(7)]
    smoke = _smoke_result(problems=wrong, breaches=wrong)

    result = run(suite, tmp_path, MINI_SUITE_SMOKE=smoke)

    assert result.status == 2
    assert result.err.count("ERROR_ADAPTER: ADAPTER-03 full_params()['w") == 5
    assert "2 more such problems: fsdp-conformance smoke mine.py" in result.err
    assert not (tmp_path / "report").exists()
    assert run(suite, tmp_path, "--no-smoke", MINI_SUITE_SMOKE=smoke).status == 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (
            _smoke_result(problems=["step() must drop the gradients"]),
            "smoke: ADAPTER-03 step() must drop the gradients",
        ),
        (json.dumps({"problem": "two ranks could not be started"}), "before the run: two ranks could not be started"),
    ],
    ids=["a problem of either", "no answer"],
)
def test_a_run_starts_with_problems_that_may_be_the_engines(
    answer: str, line: str, suite: mini_suite.MiniSuite, tmp_path: Path
) -> None:
    """They are printed, and the cases judge."""
    result = run(suite, tmp_path, MINI_SUITE_SMOKE=answer)

    assert result.status == 0, result.out + result.err
    assert line in result.out


@pytest.mark.nightly
def test_real_ranks_try_a_real_adapter_before_a_run(tmp_path: Path) -> None:
    """One that returns shards is stopped in its own terms, before any case."""
    spec = "fsdp_conformance.tests.adapters.wrong_adapters:ShardsForFull"

    result = said("run", "--implementation", spec, "--case", "R001/exact-probe-ws2", cwd=tmp_path)

    assert result.status == 2, result.out
    assert "must have the full shape (7, 5), got (4, 5); these are rows 0 to 3: this rank's shard?" in result.err
    assert [path.name for path in tmp_path.iterdir()] == []


def test_an_implementation_that_nobody_has_is_wrong_usage(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """Status 2, with the names that are near."""
    result = run(suite, tmp_path, "--implementation", "torch-fspd2")

    assert result.status == 2
    assert "Did you mean 'torch-fsdp2'" in result.err


def test_a_device_that_is_absent_is_the_environment(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """The command ends with status 3."""
    result = run(suite, tmp_path, "--device", "mtia", "--implementation", with_adapter(tmp_path))

    assert result.status == 3
    assert "no device of type 'mtia' was found" in result.err


def test_a_world_size_without_devices_is_the_environment(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """Each rank needs its own accelerator; there are only two, so nothing is started."""
    result = run(suite, tmp_path, "--device", "mtia", "--world-size", "4")

    assert result.status == 3
    assert "--world-size 4 needs 4 devices, one for each rank, but found 2 devices of type 'mtia'" in result.err
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("place", [pytest.param("file/report", marks=pytest.mark.nightly), "file"])
def test_a_directory_that_cannot_be_written_is_the_environment(
    place: str, suite: mini_suite.MiniSuite, tmp_path: Path
) -> None:
    """Status 3, with what to do."""
    (tmp_path / "file").write_text("", encoding="utf-8")

    result = run(suite, tmp_path, "--report", str(tmp_path / place))

    assert result.status == 3
    assert f"the report directory {tmp_path / place} cannot be written" in result.err
    assert "--report" in result.err


def test_missing_workers_are_the_environment(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """-n without pytest-xdist is status 3."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['xdist'] = None\n", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), suite.environment()["PYTHONPATH"]])

    result = run(suite, tmp_path, "-n", "2", "--implementation", "mine.py", PYTHONPATH=path)

    assert result.status == 3
    assert "-n 2 needs pytest-xdist" in result.err


#: A case whose record is larger than the room that is left.
_LARGE = '''
import unittest

from fsdp_conformance.cases.declaration import DeclaresCases, conformance_case
from fsdp_conformance.contract.case import case_of
from fsdp_conformance.tests.report.evidence import a_record
from fsdp_conformance.verdict import Verdict


class Large(DeclaresCases, unittest.TestCase):
    record = None

    @conformance_case("R001", chapter="A", axes={"k": (1, 2)}, world_size=2)
    def test_large(self, k):
        """It has much to say."""
        case = case_of(getattr(type(self), self._testMethodName))
        self.record = a_record(case.id, Verdict.PASS, requirements=["R001"], chapter="A")
        self.record.schedule = ["all_gather " * 20] * (1 if k == 1 else 4000)
'''


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("limit", "judged"),
    [(1000, None), pytest.param(400_000, 1, marks=pytest.mark.nightly)],
    ids=["at once", "during the run"],
)
def test_a_full_disk_is_the_environment_and_leaves_the_run_file_intact(
    limit: int, judged: int | None, tmp_path: Path
) -> None:
    """Status 3, and every line that is there can be read. A limit on the size of files stands for the disk."""
    suite = mini_suite.write(tmp_path)
    (suite.package / "test_cases.py").write_text(_LARGE, encoding="utf-8")
    made = subprocess.run(
        [
            *words()[:2],
            "fsdp_conformance.contract.profile",
            *("--write", "large", "--suites", mini_suite.PACKAGE, "--output", str(suite.profile_path)),
        ],
        env=suite.environment(),
        timeout=240,
        check=False,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    done = subprocess.run(
        words(*typed(suite, tmp_path)),
        cwd=tmp_path,
        # Python 3.11 leaves bytecode that a limit has cut off, and cannot import the module from then on.
        env=with_quick_survey(suite.environment(), tmp_path) | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )

    assert done.returncode == 3, done.stdout + done.stderr
    assert "cannot be written: File too large" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    if judged is not None:
        left = runfile.read(tmp_path / "report")
        assert (judged, []) == (len(left.records), left.problems)
        for line in (tmp_path / "report" / "run.jsonl").read_text(encoding="utf-8").splitlines():
            json.loads(line)


@pytest.mark.nightly
def test_known_failures_make_a_run_as_expected(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """Without a certificate, but with status 0; what is new, or gone, is named and makes it 1."""
    acts = {"R001/probe-ws2": "FAIL"}
    assert run(suite, tmp_path, acts=acts).status == 1
    profile = ("--profile", str(suite.profile_path))
    written = said("update-expectations", "report", *profile, cwd=tmp_path, env=suite.environment())
    assert (written.status, written.last_line) == (0, "conformance.toml: 1 added, 0 removed")

    result = run(suite, tmp_path, acts=acts)
    assert (result.status, "NOT CERTIFIED" in result.out) == (0, True)
    assert "as expected: 1 known, nothing new (conformance.toml)" in result.out
    counts = run(suite, tmp_path, "--no-expectations", "--fail-on", "state,silent", acts=acts)
    assert (counts.status, "--fail-on silent,state: 1 of the failures count: R001/probe-ws2" in counts.out) == (1, True)
    for options, status in (
        (("--fail-on", "waste,promise"), 0),
        (("--fail-on", "silent", "--expectations", "conformance.toml"), 0),
        (("--fail-on", "all"), 2),
    ):
        assert said("verify", "report", *options, *profile, cwd=tmp_path, env=suite.environment()).status == status

    fixed = run(suite, tmp_path)
    assert (fixed.status, "CHANGED   R001/probe-ws2: expected FAIL, got PASS" in fixed.out) == (1, True)
    assert said("verify", "report", *profile, cwd=tmp_path, env=suite.environment()).status == 0
    options = ("--expectations", "conformance.toml", *profile)
    assert said("verify", "report", *options, cwd=tmp_path, env=suite.environment()).status == 1


@pytest.mark.nightly
def test_a_run_next_to_its_baseline(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """Failures that the baseline has do not count; new ones do. A wrong file is refused before anything runs."""
    assert run(suite, tmp_path, acts={"R001/probe-ws2": "FAIL"}).status == 1
    (tmp_path / "report").rename(tmp_path / "before")

    same = run(suite, tmp_path, "--baseline", "before", acts={"R001/probe-ws2": "FAIL"})
    assert (same.status, "  0 new, 0 fixed, 1 unchanged, 0 missing" in same.out) == (0, True)
    worse = run(suite, tmp_path, "--baseline", "before", acts={"R070/order-ws2": "FAIL"})
    assert (worse.status, "  1 new, 1 fixed, 0 unchanged, 0 missing" in worse.out) == (1, True)
    assert "New: 1" in (tmp_path / "report" / "report.html").read_text()
    (tmp_path / "conformance.toml").write_text("[[expect]]\n")
    wrong = run(suite, tmp_path)
    assert (wrong.status, "entry 1 (no case): case is missing" in wrong.err, wrong.out) == (2, True, "")


@pytest.mark.nightly
def test_an_interrupted_run_goes_on(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """In the same file, with the same options; verdicts stay, what was running begins again, and the file verifies."""
    acts = {"R001/probe-ws2": "FAIL"}
    assert run(suite, tmp_path, "--no-smoke", acts=acts).status == 1
    file = tmp_path / "report" / "run.jsonl"
    whole = file.read_text(encoding="utf-8").splitlines(keepends=True)
    starts = [number for number, line in enumerate(whole) if '"type":"start"' in line]
    before = [json.loads(line) for line in whole[: starts[3]] if '"type":"case"' in line]
    begun = json.loads(whole[starts[3]])["case"]
    file.write_text("".join(whole[: starts[3] + 1]) + whole[starts[3] + 1][:40], encoding="utf-8")
    env = with_quick_survey(suite.environment(acts, MINI_SUITE_FLAGS="zero3 no_sync"), tmp_path)
    profile = ("--profile", str(suite.profile_path))

    def resumed(*more: str) -> Said:
        return said("run", "--resume", "report", "--suites", mini_suite.PACKAGE, *more, cwd=tmp_path, env=env)

    assert f"and {begun} had begun. `run --resume` continues it" in said("verify", "report", *profile, cwd=tmp_path).err
    for more, message in (
        ((), "add --implementation mine.py"),
        (("--implementation", "mine.py"), f"add --profile {suite.profile_path}"),
        (("--implementation", "other.py", *profile), "it cannot be continued with other.py"),
        (("--implementation", "mine.py", *profile, "--stress"), "leave out --stress"),
    ):
        refused = resumed(*more)
        assert (refused.status, message in refused.err) == (2, True), refused.output

    engine = tmp_path / "my_engine.py"
    engine.write_text("", encoding="utf-8")
    refused = resumed("--implementation", "mine.py", *profile)
    assert "because this has changed since: my_engine.py beside the adapter" in refused.err, refused.output
    os.utime(engine, (0, 0))

    result = resumed("--implementation", "mine.py", *profile)
    left = runfile.read(file)
    assert (result.status, left.problems + left.misplaced) == (1, []), result.output
    assert f"the run was stopped once and continued (--resume); started again: {begun}" in result.out.replace(
        "\n    ", " "
    )
    cases = [line for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()) if line["type"] == "case"]
    assert cases[: len(before)] == before
    assert len({case["case"] for case in cases}) == len(cases) == 7
    assert "verified" in said("verify", "report", *profile, cwd=tmp_path, env=env).last_line
    assert "finished, so there is nothing to continue" in resumed("--implementation", "mine.py", *profile).err
