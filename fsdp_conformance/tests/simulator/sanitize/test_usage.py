"""An invalid `sanitize` command line is rejected with one message, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_conformance.cli import arguments
from fsdp_conformance.cli.commands.sanitize import order_of
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.harness import devices
from fsdp_conformance.tests.cli.cli_runs import answered, said


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ([], "give the path of a script, or -m"),
        (["-m"], "give the path of a script"),
        (["train.py"], "there is no script 'train.py'"),
        (["-m", "nowhere.train"], "Python finds no module 'nowhere.train' from this directory"),
        (["--world-size", "two", "train.py"], "--world-size must be an integer, got 'two'"),
        (["--world-size", "0", "train.py"], "--world-size must be from 1 to 127, got 0"),
        (["--devices", "many", "train.py"], "--devices must be an integer, got 'many'"),
        (["--devices", "1", "train.py"], "--devices must be from 2, one for each rank, to 127, got 1"),
        (["--devices", "128", "train.py"], "to 127, got 128"),
        (["--timeout", "-1", "train.py"], "--timeout must be a positive number of seconds, got -1"),
        (["--memory", "much", "train.py"], "--memory must be a positive size such as 80GiB, got 'much'"),
        (["--memory", "0GiB", "train.py"], "--memory must be a positive size such as 80GiB, got '0GiB'"),
        (["--memory", "-1", "train.py"], "--memory"),
        (["--reuse", "never", "train.py"], "invalid choice: 'never'"),
        (["--timeout", "nan", "train.py"], "--timeout must be a positive number of seconds, got nan"),
        (["--mode", "shout", "train.py"], "invalid choice: 'shout'"),
        (["--rank", "first", "train.py"], "--rank must be an integer, got 'first'"),
        (["--rank", "2", "train.py"], "--rank must be a rank, from 0 to 1, got 2"),
        (["--rank", "-1", "train.py"], "--rank"),
        (["--suppressions", "known.supp", "train.py"], "cannot be read: No such file or directory [known.supp]"),
        (["--suppressions", "x", "--mode", "raise", "train.py"], "either --suppressions or --mode raise"),
        (["--suppressions", "x", "--mode", "poison", "train.py"], "either --suppressions or --mode poison"),
        (["--strict-suppressions", "train.py"], "--strict-suppressions needs --suppressions FILE"),
        (["--worldsize", "2", "train.py"], "Did you mean '--world-size'?"),
    ],
    ids=" ".join,
)
def test_what_is_mistyped_is_said_with_status_2(typed: list[str], expected: str, tmp_path: Path) -> None:
    """The message names what was wrong and what it should be."""
    result = answered("sanitize", *typed, cwd=tmp_path)

    assert (result.status, result.out) == (2, "")
    assert expected in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--json", "--sarif"])
def test_a_file_for_the_findings_needs_a_directory(option: str, tmp_path: Path) -> None:
    """Said before the script runs, not after."""
    (tmp_path / "train.py").touch()
    result = answered("sanitize", option, "nowhere/out.json", "train.py", cwd=tmp_path)

    assert (result.status, result.out) == (2, "")
    assert f"{option} must be a file in an existing directory, got 'nowhere/out.json'" in result.err


@pytest.mark.parametrize(
    ("word", "nbytes"),
    [("80GiB", 80 << 30), ("80GB", 80 * 10**9), ("1.5 gib", 3 << 29), ("512MiB", 512 << 20), ("24g", 24 * 10**9),
     ("1000", 1000), ("2TiB", 2 << 40), ("7b", 7)],
)  # fmt: skip
def test_sizes_of_memory(word: str, nbytes: int) -> None:
    """Sizes may have binary or decimal units."""
    assert nbytes == order_of(arguments.parse(["sanitize", "--memory", word, "train.py"])).memory


def test_devices() -> None:
    """There is at least one device for each rank."""
    assert order_of(arguments.parse(["sanitize", "--world-size", "3", "train.py"])).num_devices == 3
    assert order_of(arguments.parse(["sanitize", "--world-size", "1", "--devices", "4", "train.py"])).num_devices == 4


def test_reuse_of_memory() -> None:
    """The checker's name for what is asked."""
    assert order_of(arguments.parse(["sanitize", "--reuse", "worst-case", "train.py"])).reuse == "worst_case"


def test_implicit_waits() -> None:
    """They order streams unless the option is given."""
    assert order_of(arguments.parse(["sanitize", "train.py"])).waits == "all"
    assert order_of(arguments.parse(["sanitize", "--ignore-implicit-syncs", "train.py"])).waits == "explicit"


def test_numbers_may_be_left_out() -> None:
    """This excludes the mode that shows the effect of a hazard as NaN."""
    assert not order_of(arguments.parse(["sanitize", "train.py"])).ordering_only
    assert order_of(arguments.parse(["sanitize", "--ordering-only", "train.py"])).ordering_only
    with pytest.raises(ConfigError, match="either --ordering-only or --mode poison"):
        order_of(arguments.parse(["sanitize", "--ordering-only", "--mode", "poison", "train.py"]))


def test_bad_lines_of_a_file_of_suppressions(tmp_path: Path) -> None:
    """All of them, before anything is started."""
    (tmp_path / "known.supp").write_text("race:main\nmain\n\nrace:\n", encoding="utf-8")
    result = answered("sanitize", "--suppressions", "known.supp", "train.py", cwd=tmp_path)

    assert (result.status, result.out) == (2, "")
    assert "line 2 must be KIND:PATTERN, such as race:load_batch, got 'main'" in result.err
    assert "line 4 must be KIND:PATTERN" in result.err


def test_what_follows_the_script_is_its_own() -> None:
    """Options of the script are not taken for ours, even where they are called alike."""
    order = order_of(arguments.parse(["sanitize", "--world-size", "3", "train.py", "--mode", "fast", "--", "-m"]))

    assert (order.target, order.is_module, order.world_size, order.mode) == ("train.py", False, 3, "record")
    assert order.arguments == ("--mode", "fast", "--", "-m")


def test_a_module_is_named_as_for_python() -> None:
    """`-m package.train` and its arguments."""
    order = order_of(arguments.parse(["sanitize", "--as-cuda", "-m", "package.train", "--steps", "3"]))

    assert (order.target, order.is_module, order.as_cuda) == ("package.train", True, True)
    assert order.arguments == ("--steps", "3")


def test_the_help_documents_the_exit_statuses_of_this_command() -> None:
    """They mean something else here than in a run."""
    result = answered("sanitize", "--help")

    assert all(f"\n  {status} " in result.out for status in (0, 1, 2, 3, 4, 5, 130))
    assert "clean" in result.out
    assert "certified" not in result.out.partition("exit status:")[2]


@pytest.mark.parametrize(
    "typed",
    ["--as-cuda", "--devices 2", "--mode poison", "--memory 8GiB", "--reuse worst-case", "--ordering-only"],
)
def test_what_only_simulated_devices_have(typed: str) -> None:
    """Said with a reason, not ignored."""
    words = ["sanitize", "--device", "cuda", *typed.split(), "train.py"]
    with pytest.raises(ConfigError, match=rf"give either --device cuda or {typed.partition(' ')[0]}"):
        order_of(arguments.parse(words))


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        (0, "--device cuda needs a GPU, and torch sees none on this machine. To simulate one, leave out --device"),
        (1, "--world-size 2 needs 2 GPUs, one for each rank, but torch sees 1. Choose a smaller --world-size"),
    ],
)
def test_without_gpus_it_cannot_be_run(
    present: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 3, with what to do; the script is not started."""
    monkeypatch.setattr(devices, "device_count", lambda device_type: present)
    (tmp_path / "train.py").write_text("raise SystemExit('started')\n", encoding="utf-8")
    result = answered("sanitize", "--device", "cuda", "train.py", cwd=tmp_path)

    assert result.status == 3
    assert expected in result.err
    assert "started" not in result.out + result.err


@pytest.mark.nightly
def test_without_a_compiler_it_cannot_be_run(tmp_path: Path) -> None:
    """Status 3, with what to install; the script is not started."""
    (tmp_path / "train.py").write_text("raise SystemExit('started')\n", encoding="utf-8")
    result = said("sanitize", "train.py", cwd=tmp_path, env={"PATH": str(tmp_path), "HOME": str(tmp_path)})

    assert result.status == 3
    assert "no C++ compiler" in result.err
    assert "started" not in result.out + result.err
