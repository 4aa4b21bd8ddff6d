"""ci/upstream: where tests come from, what their reports say, and tests of our own that stand in for PyTorch's."""

from __future__ import annotations

import fnmatch
import json
import os
import runpy
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from torch.testing._internal import common_fsdp

from fsdp_conformance.cli.child import family
from fsdp_conformance.errors import EnvironmentUnavailable, UsageError
from fsdp_conformance.tests.ci.test_signals import DEADLINE_S, alive, wait_until
from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import ROOT

pytestmark = [
    checkout.required,
    pytest.mark.nightly,
    pytest.mark.skipif(
        not hasattr(common_fsdp, "FSDPTestMixin"), reason="ci/upstream needs the classes of a newer torch"
    ),
]

#: A file as PyTorch's are, with a test that passes on any implementation, one that cannot, and one for one of them.
SHARDING_TESTS = '''"""Tests."""
from __future__ import annotations

import sys

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch.testing._internal.common_fsdp import FSDPTest


class TestSharding(FSDPTest):
    @skip_if_lt_x_gpu(2)
    def test_trains(self):
        device = torch.device("cuda", torch.cuda.current_device())
        model = FSDP(nn.Linear(4, 2).cuda(), use_orig_params=True, device_id=self.rank)
        model(torch.ones(1, 4, device=device)).sum().backward()
        self.assertEqual(2, self.world_size)
        self.assertTrue(torch.zeros(1, device="cuda:0").to(self.rank).is_cpu)

    def test_fails(self):
        if self.rank == 0:
            raise ValueError("not on the first rank")

    def test_internals(self):
        self.assertFalse(FSDP(nn.Linear(4, 2))._handle.flat_param._numels == ())

    def test_flat_parameter(self):
        model = FSDP(nn.Linear(4, 2).cuda(), device_id=self.rank)
        model(torch.ones(1, 4, device="cuda:0")).sum().backward()
        handle = model._handle
        self.assertTrue(handle.uses_sharded_strategy)
        self.assertEqual(handle.flat_param.data_ptr(), handle.flat_param._local_shard.data_ptr())
        self.assertIsNotNone(handle.flat_param.grad)


class TestPerDevice(FSDPTest):
    def test_device(self, device):
        self.assertEqual("cpu", torch.device(device).type)


instantiate_device_type_tests(TestPerDevice, globals(), only_for=("cuda", "hpu"))
'''


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """The names that the script defines."""
    return runpy.run_path(str(ROOT / "ci/upstream"))


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    """A directory like test/distributed."""
    for name in (
        "fsdp/test_a.py",
        "fsdp/common.py",
        "_composable/fsdp/test_b.py",
        "test_c10d_gloo.py",
        "fsdp/data.bin",
    ):
        path = tmp_path / "pytorch/test/distributed" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import os\n", encoding="utf-8")
    return tmp_path / "pytorch/test/distributed"


def test_sources(script: dict[str, Any], tests: Path, tmp_path: Path) -> None:
    """A checkout and an archive of it give the same Python files; anything else is an error that says what it is."""
    archive = tmp_path / "pytorch.tar.xz"
    with tarfile.open(archive, "w:xz") as packed:
        packed.add(tests.parents[1], "pytorch-9.9")
    script["copy_tests"](tests, tmp_path / "copied")
    script["unpack_tests"](archive, tmp_path / "unpacked")
    for name in ("copied", "unpacked"):
        files = sorted(path.relative_to(tmp_path / name).as_posix() for path in (tmp_path / name).rglob("*.*"))
        assert ["_composable/fsdp/test_b.py", "fsdp/common.py", "fsdp/test_a.py", "test_c10d_gloo.py"] == files
    with pytest.raises(UsageError, match="must be the directory test/distributed"):
        script["copy_tests"](tests / "fsdp", tmp_path / "wrong")
    with pytest.raises(UsageError, match="must be a source archive"):
        script["unpack_tests"](tests / "fsdp/test_a.py", tmp_path / "wrong")
    with tarfile.open(archive, "w:xz") as packed:
        packed.add(tests / "fsdp", "pytorch-9.9/fsdp")
    with pytest.raises(UsageError, match="which has none"):
        script["unpack_tests"](archive, tmp_path / "wrong")


APT = """#!/bin/sh
case $* in
    "showsrc --only-source pytorch") printf 'Version: %s\\n' 2.6.0+dfsg-7 2.14.1+dfsg-1 2.60.0-1 ;;
    *pytorch=2.6.0+dfsg-7) cp {archive} pytorch_2.6.0.orig.tar.xz ;;
    *) echo "E: 404 of $*" >&2; exit 100 ;;
esac
"""


def test_debian(script: dict[str, Any], tests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest version of the release that can be downloaded; else the message says what there is."""
    archive = tmp_path / "packed"
    with tarfile.open(archive, "w:xz") as packed:
        packed.add(tests.parents[1], "pytorch-2.6.0")
    for name in ("apt-cache", "apt-get"):
        (tmp_path / name).write_text(APT.format(archive=archive), encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for release in ("2.6", ""):
        script["download_tests"](tmp_path / f"from{release}", release)
        assert (tmp_path / f"from{release}/test_c10d_gloo.py").is_file()
    for release, problem in {
        "2.9": r"pytorch 2.9 \(it has 2.60.0-1, 2.14.1\+dfsg-1, 2.6.0\+dfsg-7\)",
        "2.14": r"pytorch 2.14 \(2.14.1\+dfsg-1: E: 404 of source --download-only pytorch=2.14.1\+dfsg-1\)",
    }.items():
        with pytest.raises(EnvironmentUnavailable, match=problem):
            script["download_tests"](tmp_path / "nothing", release)
    monkeypatch.setenv("PATH", str(tests))
    with pytest.raises(EnvironmentUnavailable, match="apt-cache showsrc --only-source pytorch did not work"):
        script["download_tests"](tmp_path / "nothing", "")


def test_selection(script: dict[str, Any], tests: Path) -> None:
    """A file belongs to one group; patterns select within it."""
    groups = list(script["GROUPS"])
    files = script["files_of"](tests, groups, [])
    assert {"fsdp1": ["fsdp/test_a.py"], "fsdp2": ["_composable/fsdp/test_b.py"]} == dict(list(files.items())[:2])
    assert ["test_c10d_gloo.py"] == files["c10d"]
    assert [[]] == list(script["files_of"](tests, ["fsdp1"], ["fsdp/test_z*"]).values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tests", "x", "--group", "fsdp3"], "--group must be some of"),
        (["--tests", "x", "--subject", "reference", "--group", "c10d"], "is for the group fsdp1"),
        (["--tests", "x", "--jobs", "0"], "--jobs must be a positive number, got 0"),
        (["--tests", "x", "--resume"], "--resume needs --report DIR"),
    ],
)
def test_wrong_usage(script: dict[str, Any], options: list[str], message: str) -> None:
    """Combinations of options that make no sense are refused."""
    with pytest.raises(UsageError, match=message):
        script["parse"](options)


def test_preface(script: dict[str, Any]) -> None:
    """Our import comes before all others, but after those from the future, which Python wants first."""
    lines = script["prefaced"](SHARDING_TESTS).splitlines()
    assert lines.index("from __future__ import annotations") < lines.index("import sys")
    assert lines[lines.index("import sys") - 1].startswith("import upstream_world")
    assert "x = 1\n" == script["prefaced"]("x = 1\n")


@pytest.mark.parametrize(
    ("text", "reason", "kind"),
    [
        (
            "RuntimeError: rank 1 raised Unsupported: comm_hook is not supported: why\nProcess 0 exited\nValueError: x",
            "Unsupported: comm_hook is not supported: why",
            "refused by name",
        ),
        (
            "AttributeError: 'Engine' object has no attribute '_handle'",
            "AttributeError: 'Engine' object has no attribute '_handle'",
            "internals of torch's class",
        ),
        (
            'File "test_a.py", line 3, in test_b\nE   AssertionError',
            "AssertionError at line 3 of test_b",
            "other",
        ),
        ("E   AssertionError: Tensors are not close!", "AssertionError: Tensors are not close!", "other numbers"),
        ("nothing\nthat looks like one\n", "that looks like one", "other"),
    ],
)
def test_reasons(script: dict[str, Any], text: str, reason: str, kind: str) -> None:
    """A failure is described by what a rank raised, and sorted by what lies behind it."""
    assert reason == script["reason_of"](text)
    assert kind == script["kind_of"](reason)


def test_grouped(script: dict[str, Any]) -> None:
    """Reasons that differ in a number are one."""
    reasons = script["grouped"](["ValueError: got 3", "ValueError: got 4.5", "TypeError: no"])
    assert [(2, "other", "ValueError: got 3"), (1, "other", "TypeError: no")] == reasons


ENTRY = """
[[known]]
file = "test_a.py"
tests = ["Test.test_moved", "Test.test_times"]
kind = "renamed"
why = "it has another name"
"""
KNOWN = f'files = ["test_a.py"]{ENTRY}'
LEFT_OUT = """
[[left_out]]
file = "test_a.py"
tests = ["Test.test_endless"]
why = "it takes very long"
"""


def test_known_failures(script: dict[str, Any], tmp_path: Path) -> None:
    """The list gives a failure its kind; what it does not say, and what it says wrongly, is news."""
    upstream_known = script["upstream_known"]
    path = tmp_path / "known.toml"
    path.write_text(KNOWN, encoding="utf-8")
    listed = upstream_known.load(path).tests
    outcome = script["Outcome"]("test_a.py", passed=["Test.test_works", "Test.test_times"])
    outcome.failed = {"Test.test_moved": "ValueError: no", "Test.test_new": "ValueError: no"}

    lines = script["table"]({"ddp": [outcome]}, listed)

    assert "| test_a.py | 2 | 2 | 0 | 0 | 1 names that changed; 1 other |" in lines
    assert "ddp: 2 of 4 passed, 50.0 %; 66.7 % without 1 for names that changed" in lines
    assert {"- 1, names that changed: it has another name", "- 1, other: ValueError: no"} < set(lines)
    assert [
        "test_a.py: Test.test_new failed, and is not in the list",
        "test_a.py: Test.test_times passed, and is in the list",
    ] == upstream_known.news(listed, "test_a.py", set(outcome.passed), set(outcome.failed))
    assert [] == upstream_known.news(listed, "test_b.py", {"Test.test_moved"}, set())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (KNOWN.replace("why", "because"), "entry 1 of known.toml must have the fields file, kind, tests, why"),
        (KNOWN.replace("renamed", "odd"), "the kind in entry 1 of known.toml must be one of"),
        (KNOWN + ENTRY, "entry 2 of known.toml has Test.test_moved of test_a.py again"),
        ("[[known]", "must be a list of known failures in TOML"),
        (KNOWN.replace('["test_a.py"]', "[]"), "entry 1 of known.toml is about test_a.py, which `files` has not"),
        (f"release = 2.6\n{KNOWN}", 'release in .*known.toml must be a release of PyTorch such as "2.6", got 2.6'),
        ("files = 3", "files in .*known.toml must be a list of names, got 3"),
        ("known = 3", "must be a list of known failures in TOML"),
        (KNOWN + LEFT_OUT.replace("why", "kind"), "left_out 1 of known.toml must have the fields file, tests, why"),
        (
            KNOWN + LEFT_OUT.replace("endless", "times"),
            "left_out 1 of known.toml has Test.test_times of test_a.py again",
        ),
    ],
)
def test_wrong_lists(script: dict[str, Any], tmp_path: Path, text: str, message: str) -> None:
    """The error names the mistake and its place."""
    path = tmp_path / "known.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        script["upstream_known"].load(path)


@pytest.mark.parametrize("subject", ["torch", "reference"])
def test_the_lists_themselves(script: dict[str, Any], subject: str) -> None:
    """They can be read, and name only files that belong to a group of their subject."""
    failures = script["upstream_known"].load(script["upstream_known"].LISTS[subject])
    chosen = list(script["GROUPS"]) if subject == "torch" else ["fsdp1"]
    groups = [pattern for group in chosen for pattern in script["GROUPS"][group]]
    assert failures.files
    strays = {file for file in failures.files if not any(fnmatch.fnmatch(file, pattern) for pattern in groups)}
    assert set() == strays


@pytest.mark.slow
@pytest.mark.parametrize("subject", ["torch", "reference"])
def test_run(script: dict[str, Any], tests: Path, tmp_path: Path, subject: str) -> None:
    """Tests for two GPUs run on the CPU, on torch's class or on the engine; the table says what failed and why."""
    for path in tests.rglob("test_*.py"):
        path.unlink()
    (tests / "fsdp/test_sharding.py").write_text(SHARDING_TESTS, encoding="utf-8")
    options = ["--tests", str(tests), "--group", "fsdp1", "--subject", subject, "--ranks", "cpu"]

    assert 0 == script["main"]([*options, "--report", str(tmp_path / "report"), "--limit", "120"])

    (outcome,) = json.loads((tmp_path / "report/tests.json").read_text(encoding="utf-8"))["groups"]["fsdp1"]
    of_subject = {"TestSharding.test_internals"} if subject == "reference" else set()
    assert {"TestSharding.test_fails", *of_subject} == set(outcome["failed"]), outcome
    assert "ValueError: not on the first rank" == outcome["failed"]["TestSharding.test_fails"]
    assert 5 - len(outcome["failed"]) == len(outcome["passed"])
    table = (tmp_path / "report/table.md").read_text(encoding="utf-8")
    assert f"Subject: {subject}. Ranks: cpu." in table
    assert ("internals of torch's class" in table) == (subject == "reference")


ENDLESS = """
import time, unittest

class Test(unittest.TestCase):
    def test_a(self):
        pass

    def test_endless(self):
        time.sleep(600)
"""


def test_time_limit(script: dict[str, Any], tests: Path) -> None:
    """A file that does not end is ended, and the table reports it."""
    path = tests / "test_endless.py"
    path.write_text(ENDLESS, encoding="utf-8")
    outcome = script["run_file"](tests, path.name, subject="torch", ranks="cpu", limit_s=0.5, options=[])
    assert outcome.broken.startswith("did not end within 0.5 s")


#: A test that waits, and its child in a separate session, as ranks have.
WAITING = """
import os, pathlib, subprocess, sys, threading, unittest

WAIT = "import sys, threading; open(sys.argv[1], 'w').close(); threading.Event().wait(600)"

class Test(unittest.TestCase):
    def test_waits(self):
        reached = os.environ["REACHED"] + pathlib.Path(__file__).stem
        subprocess.Popen([sys.executable, "-c", WAIT, reached], start_new_session=True)
        threading.Event().wait(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_everything(tests: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Two files at a time: both end, with the children that they have started, and no file is left."""
    for name in ("one", "two", "three"):
        (tests / f"fsdp/test_{name}.py").write_text(WAITING, encoding="utf-8")
    (tests / "fsdp/test_a.py").unlink()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    reached = tmp_path / "reached-"
    options = ["--tests", str(tests), "--group", "fsdp1", "--ranks", "cpu", "--jobs", "2"]
    process = subprocess.Popen(
        [sys.executable, ROOT / "ci/upstream", *options],
        env={**os.environ, "TMPDIR": str(scratch), "REACHED": str(reached)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip

    def both_wait() -> bool:
        return all(Path(f"{reached}test_{name}").is_file() for name in ("one", "three"))

    wait_until(lambda: both_wait() or process.poll() is not None, "both files")
    assert process.poll() is None, process.communicate()[0]
    before = family(process.pid)
    process.send_signal(number)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert (128 + number, set(), []) == (process.returncode, alive(before), list(scratch.glob("fsdp-*"))), output
    assert len(before) >= 5
    assert not Path(f"{reached}test_two").exists()


WAITS_FOR_ANOTHER = """
import pathlib, threading

def test_it():
    while not pathlib.Path(__file__).with_name("done").exists():
        threading.Event().wait(0.05)
"""
ANOTHER = """
import pathlib

def test_it():
    pathlib.Path(__file__).with_name("done").touch()
"""


def test_files_at_a_time(script: dict[str, Any], tests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are run side by side, and listed in their order: the first waits for the second."""
    (tests / "fsdp/test_a.py").write_text(WAITS_FOR_ANOTHER, encoding="utf-8")
    (tests / "fsdp/test_b.py").write_text(ANOTHER, encoding="utf-8")
    options = ["--tests", str(tests), "--group", "fsdp1", "--ranks", "cpu", "--limit", str(DEADLINE_S)]
    assert 0 == script["main"]([*options, "--jobs", "2"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| fsdp/")]
    assert ["| fsdp/test_a.py | 1 |", "| fsdp/test_b.py | 1 |"] == [row[:22] for row in rows[:2]]


LEAVES_A_TRACE = """
import pathlib, pytest

def test_it():
    with pathlib.Path(r"{trace}").open("a") as trace:
        trace.write(pathlib.Path(__file__).stem + "\\n")
{last}
"""


def test_resume(script: dict[str, Any], tests: Path, tmp_path: Path) -> None:
    """A run goes on where it was: what has ended does not run again, what has not does, and failures are kept."""
    trace, report = tmp_path / "trace", tmp_path / "report"
    lasts = {"a": "    assert False, 'as before'", "b": "    import os; os.kill(os.getpid(), 9)", "c": ""}
    for name, last in lasts.items():
        text = LEAVES_A_TRACE.format(trace=trace, last=last)
        (tests / f"fsdp/test_{name}.py").write_text(text, encoding="utf-8")
    options = ["--tests", str(tests), "--group", "fsdp1", "--ranks", "cpu", "--report", str(report)]
    assert 1 == script["main"]([*options, "--file", "fsdp/test_[ab].py"])
    (tests / "fsdp/test_b.py").write_text(LEAVES_A_TRACE.format(trace=trace, last=""), encoding="utf-8")

    assert 0 == script["main"]([*options, "--resume"])

    assert ["test_a", "test_b", "test_b", "test_c"] == trace.read_text(encoding="utf-8").split()
    content = json.loads((report / "tests.json").read_text(encoding="utf-8"))
    assert [1, 0, 0] == [len(each["failed"]) for each in content["groups"]["fsdp1"]]
    assert "as before" in (report / "table.md").read_text(encoding="utf-8")


def test_resume_refuses_what_it_cannot_continue(script: dict[str, Any], tmp_path: Path) -> None:
    """A run under other conditions, and files that no run has written."""
    script["keep"](tmp_path, {"torch": "2.6.0", "ranks": "cpu"}, {})
    with pytest.raises(UsageError, match=r"is from a run with torch '2\.6\.0' \(now '2\.13\.0'\); start over"):
        script["resumed"](tmp_path, {"torch": "2.13.0", "ranks": "cpu"})
    for text in ("{", "[]", '{"conditions": {}}', '{"conditions": {}, "groups": {"ddp": [{"name": 1}]}}', "null"):
        (tmp_path / "tests.json").write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match="must be what an interrupted run kept"):
            script["resumed"](tmp_path, {})
    with pytest.raises(UsageError, match="must be what an interrupted run kept"):
        script["resumed"](tmp_path / "nowhere", {})


def test_left_out(script: dict[str, Any], tests: Path, tmp_path: Path) -> None:
    """Tests that the list leaves out are not run."""
    (tests / "test_a.py").write_text(ENDLESS, encoding="utf-8")
    (tmp_path / "known.toml").write_text(KNOWN + LEFT_OUT, encoding="utf-8")
    listed = script["upstream_known"].load(tmp_path / "known.toml")
    options = list(script["left_out"](listed, "test_a.py"))
    outcome = script["run_file"](tests, "test_a.py", subject="torch", ranks="cpu", limit_s=60, options=options)
    assert (["Test.test_a"], {}, "") == (outcome.passed, outcome.failed, outcome.broken)
    assert [] == list(script["left_out"](listed, "test_b.py"))


@pytest.mark.parametrize(("code", "skipped"), [(0, True), (1, False), (10, False)])
def test_a_file_that_leaves(script: dict[str, Any], tmp_path: Path, code: int, skipped: bool) -> None:
    """With success, as a file for another backend does: it is skipped. Else it has failed."""
    (tmp_path / "report.xml").write_text(
        '<testsuites><testsuite><testcase classname="pytest" name="internal"><error message="internal error">'
        f"Traceback\n    sys.exit({code})\nSystemExit: {code}</error></testcase></testsuite></testsuites>",
        encoding="utf-8",
    )
    outcome = script["read_report"](tmp_path / "report.xml", "test_a.py")
    assert (list(outcome.skipped), list(outcome.failed)) == (
        (["pytest.internal"], []) if skipped else ([], ["pytest.internal"])
    )


def test_progress(script: dict[str, Any]) -> None:
    """The output of `pytest -v` is read line by line."""
    output = """collecting ... collected 5 items

test_a.py::Test::test_one PASSED        [ 20%]
test_a.py::Test::test_two[x y] FAILED [ 40%]
test_a.py::test_three SKIPPED (no GPU)  [ 60%]
test_a.py::Test::test_four noise of the test
"""
    outcome = script["read_progress"](output, "test_a.py")
    assert (["Test.test_one"], ["Test.test_two[x y]"]) == (outcome.passed, list(outcome.failed))
    assert (["test_three"], "it was in Test.test_four") == (list(outcome.skipped), outcome.broken)
