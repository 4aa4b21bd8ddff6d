"""Mistyped commands are reported in one message, with status 2, before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_conformance import status
from fsdp_conformance.cli import arguments
from fsdp_conformance.tests.cli.cli_runs import answered, words
from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.pytest_plugin import mini_suite


@pytest.fixture(name="suite", scope="module")
def _suite(tmp_path_factory: pytest.TempPathFactory) -> mini_suite.MiniSuite:
    return mini_suite.write(tmp_path_factory.mktemp("suite"))


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["runn"], "Did you mean 'run'?"),
        ([], "COMMAND"),
        (["run", "--devise", "cpu"], "Did you mean '--device' or"),
        (["run", "--as-cuda"], "--as-cuda is an option of sanitize and record and parity, not of run."),
        (["sanitize", "--profile", "quick"], "--profile is an option of run and other commands, not of sanitize."),
        (["run", "--case", "R003", "r188"], "separate several by commas, such as --case R003,R188"),
        (["run", "torch-ddp", "--case", "R003", "R188"], "of --case by commas: --case R003,R188."),
        (["run", "--world-size", "two"], "world_size must be a positive integer, got 'two'\n"),
        (["run", "--world-size", "0"], "world_size must be a positive integer, got '0'"),
        (
            ["run", "--device", "cuda:0"],
            "device must be a type such as cpu, sim or cuda, without an index",
        ),
        (["run", "--stress-seed", "3"], "stress_seed is for a stress run: add --stress, got stress_seed=3"),
        (["run", "--deadline-scale", "-1"], "deadline_scale must be a positive number, got '-1'"),
        (["run", "--implementation", " "], "implementation must not be blank, got ' '"),
        (["run", "-n", "few"], "-n: must be a number of workers or 'auto', got 'few'"),
        (["run", "--profile", "core-2026.12"], "got 'core-2026.12'. Did you mean 'core-2026.11'?"),
        (["list", "--profile", "nothing.json"], "got 'nothing.json'"),
        (["explain", "R1000"], "ID must be a requirement (R000 to"),
        (["verify", "nowhere.jsonl"], "got 'nowhere.jsonl'"),
        (["smoke"], "smoke needs an implementation, got none"),
        (["smoke", "torch-ddp", "--implementation", "torch-fsdp2"], "got torch-ddp and --implementation torch-fsdp2"),
    ],
    ids=" ".join,
)
def test_what_is_mistyped_is_said_with_status_2(typed: list[str], expected: str, tmp_path: Path) -> None:
    """The message names what was wrong and what it should be."""
    result = answered(*typed, cwd=tmp_path)

    assert (result.status, result.out) == (2, "")
    assert expected in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["--case", "R001/prob-ws2"], "Did you mean R001/probe-ws"),
        (["--case", "R999"], "got 'R999'"),
        (
            ["--case", "R150"],
            "case 'R150' is in the suites, but not in profile mini. Use --profile core-2026.11 or full-",
        ),
        (["--case", "R001/pobe*"], "case must match at least one case, got 'R001/pobe*'. Did you mean R001/probe-ws"),
        (["--requirement", "R003"], "got 'R003'. --binding R003 selects the cases that cover it"),
        (["--binding", "R150"], "binding must be a requirement that has cases, got 'R150'"),
        (["--chapter", "Q"], "chapter must be one of A, B, G, J, got 'Q'"),
        (["--chapter", "J", "--requirement", "R001"], "no case of mini satisfies all of --requirement, --chapter"),
        (["--last-failed"], "--last-failed needs an earlier run, but .fsdp-conformance/last/run.jsonl does not exist"),
        (["--world-size", "7"], "world_size must be one of 1, 2, 4, got 7"),
        (["--case", "R188", "--world-size", "4"], "no selected case uses world size 4: the selected cases use 2"),
    ],
    ids=" ".join,
)
def test_a_selection_that_chooses_nothing_is_wrong_usage(
    typed: list[str], expected: str, suite: mini_suite.MiniSuite, tmp_path: Path
) -> None:
    """A case or world size that the profile does not have is said, with those that it has."""
    result = answered("run", "--profile", str(suite.profile_path), *typed, cwd=tmp_path)

    assert result.status == 2
    assert expected in result.err
    assert list(tmp_path.iterdir()) == []


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    """Two options out of range make two lines."""
    result = answered("run", "--world-size", "0", "--deadline-scale", "nan", cwd=tmp_path)

    assert [line.split()[1] for line in result.err.splitlines()] == ["world_size", "deadline_scale"]


@pytest.mark.parametrize("typed", [["--help"], ["--version"], ["run", "--help"], ["list", "--help"]], ids=" ".join)
def test_help_and_version_go_to_stdout(typed: list[str]) -> None:
    """They are what was asked for: status 0."""
    result = answered(*typed)

    assert (result.status, result.err) == (0, "")
    assert result.out.strip() != ""


def test_the_help_documents_every_exit_status() -> None:
    """Statuses are an interface: scripts read them."""
    result = answered("run", "--help")

    assert all(f"\n  {status} " in result.out for status in (0, 1, 2, 3, 4, 130))


@pytest.mark.parametrize("command", ["run", "compare", "plan", "sanitize", "verify"])
def test_the_help_has_the_statuses_of_the_command(command: str) -> None:
    """The statuses come from a single table."""
    assert answered(command, "--help").out.endswith(status.table(command))


def test_world_sizes_come_by_commas_and_by_repetition() -> None:
    """Each once, in the order in which they were named."""
    parsed = arguments.parse(["run", "--world-size", "2,3", "--world-size", "2", "--world-size", "4"])

    assert arguments.settings_of(parsed).world_sizes == (2, 3, 4)


@pytest.mark.daily(3)
@pytest.mark.parametrize(
    "typed",
    [
        ["list", "--capabilities"],
        ["list", "--requirements"],
        ["explain", "R003"],
        ["verify", "nowhere"],
        ["run", "--x"],
        ["init", "--adapter", "acme.adapter:Acme"],
        ["completion", "bash"],
    ],
    ids=" ".join,
)
def test_commands_that_start_nothing_leave_torch_alone(typed: list[str], tmp_path: Path) -> None:
    """Where torch cannot be imported, they still answer."""
    script = (
        "import sys\n"
        "from fsdp_conformance.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print('HEAVY', sorted({'torch', 'numpy', 'pytest'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *typed], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=True
    )

    assert done.stdout.rstrip().endswith("HEAVY []")


@checkout.required
@pytest.mark.parametrize("has_requirements", [False, True])
def test_a_checkout_that_is_not_installed_says_what_to_do(has_requirements: bool) -> None:
    """Packages at the top of the checkout cannot be found there, whether its requirements are installed or not."""
    requirements = {"PYTHONPATH": str(Path(pytest.__file__).parents[1])} if has_requirements else {}
    done = subprocess.run(
        [sys.executable, "-S", "-m", "fsdp_conformance", "doctor"],
        cwd=checkout.ROOT, env=requirements, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"fsdp-conformance: the checkout {checkout.ROOT} must be installed before it can run")
    assert f"or run pip install -e {checkout.ROOT} in an environment of your own." in line


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """`fsdp-conformance list --requirements | head -1` ends quietly, with the status of a closed pipe."""
    with subprocess.Popen(
        words("list", "--requirements"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pipesize=4096
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.readline()
        child.stdout.close()
        err = child.stderr.read()
        status = child.wait(60)

    assert (status, err) == (141, "")


def test_a_closed_pipe_is_no_verdict() -> None:
    """A command that was to judge, and whose output is not read to the end, says that it has stopped."""
    code = (
        "import sys\n"
        "from fsdp_conformance.cli import command\n"
        "from fsdp_conformance.cli.commands import verify\n"
        "def closed(_): raise BrokenPipeError\n"
        "verify.main = closed\n"
        "sys.exit(command.main(['verify', 'results']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)

    assert done.returncode == 141
    assert "stopped early, because the program that reads the output has exited" in done.stderr


def test_a_file_that_is_no_run_file_is_refused(tmp_path: Path) -> None:
    """`verify` and `explain` report it, with status 2."""
    file = tmp_path / "run.jsonl"
    file.write_text(json.dumps({"type": "something else"}) + "\n", encoding="utf-8")

    verified, explained = answered("verify", str(tmp_path)), answered("explain", "R003", "--report", str(file))

    assert (verified.status, explained.status) == (2, 2)
    assert "is not a run file of this version" in verified.err
    assert "is not a run file of this version" in explained.err
