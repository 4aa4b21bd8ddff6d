"""The commands that ci/certify runs, and its exit status. The engines are not trained here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import ROOT

pytestmark = checkout.required

#: Stands for fsdp-conformance: notes its arguments, and ends with the status that the variables name for the round.
_COMMAND = """#!/bin/sh
echo "$@" >>"{calls}"
case "$*" in
    *"--profile quick"*) exit {quick} ;;
    *) exit {whole} ;;
esac
"""


def certify(tmp_path: Path, *arguments: str, quick: int = 0, whole: int = 0) -> tuple[int, list[str], str]:
    """Run it. Returns the exit status, the commands that it ran, and its output."""
    binaries, calls = tmp_path / "env/bin", tmp_path / "calls"
    binaries.mkdir(parents=True)
    (tmp_path / "ci").mkdir()
    for name in ("certify", "driver.py", "components.py", "constraints-deepspeed.txt"):
        shutil.copy(ROOT / "ci" / name, tmp_path / "ci")
    scripts = {
        tmp_path / "ci/setup": f'#!/bin/sh\necho "$@" >>"{tmp_path}/setups"\necho {tmp_path / "env"}\n',
        binaries / "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
        binaries / "fsdp-conformance": _COMMAND.format(calls=calls, quick=quick, whole=whole),
    }
    for path, text in scripts.items():
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    done = subprocess.run(
        [tmp_path / "ci/certify", "--report", "r", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    output = done.stdout + done.stderr
    return done.returncode, calls.read_text(encoding="utf-8").splitlines() if calls.exists() else [], output


def _components_call(directory: Path) -> str:
    """The call that judges the components of the reference."""
    options = f"--report {directory}/r/reference-components -n auto --profile components-2026.11"
    return f"run --implementation reference-components {options}"


def test_every_engine_has_a_quick_round_before_the_first_one_is_judged_in_full(tmp_path: Path) -> None:
    """The first results arrive within minutes."""
    status, calls, output = certify(tmp_path)

    engines = ["torch-fsdp2", "torch-fsdp1", "reference"]
    assert status == 0
    assert calls == [
        *(f"run --implementation {e} --report {tmp_path}/r/quick/{e} -n auto --profile quick" for e in engines),
        *(f"run --implementation {e} --report {tmp_path}/r/{e} -n auto" for e in engines),
        _components_call(tmp_path),
    ]
    assert output.splitlines()[-1] == f"run files: {tmp_path}/r"


def test_what_is_asked_for_by_name_comes_first(tmp_path: Path) -> None:
    """Its first verdicts do not wait for three other engines; each engine is judged in its own environment."""
    _, calls, _ = certify(tmp_path, "--with", "deepspeed")

    stages = ["deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3"]
    engines = [*stages, "torch-fsdp2", "torch-fsdp1", "reference"]
    environments = ["deepspeed"] * 3 + ["main"] * 3
    assert [call.split()[2] for call in calls] == [*engines, *engines, "reference-components"]
    assert (tmp_path / "setups").read_text(encoding="utf-8").split() == [*environments, *environments, "main"]


def test_an_extra_that_is_none_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    """The message comes before anything runs."""
    status, calls, output = certify(tmp_path, "--with", "deepsped")

    assert (status, calls) == (2, [])
    assert output == "certify: --with must name an extra that has adapters: deepspeed; got deepsped\n"


@pytest.mark.parametrize("workers", [["-n", "1"], ["-n1"]])
def test_workers_alone_change_nothing_else(workers: list[str], tmp_path: Path) -> None:
    """The number may be a separate word or part of the option."""
    _, calls, _ = certify(tmp_path, "--implementation", "x", *workers)

    assert calls == [
        f"run --implementation x --report {tmp_path}/r/quick/x -n 1 --profile quick",
        f"run --implementation x --report {tmp_path}/r/x -n 1",
    ]


def test_another_version_of_torch_has_an_environment_of_its_own(tmp_path: Path) -> None:
    """The option is not passed on, and there is a quick round."""
    _, calls, _ = certify(tmp_path, "--implementation", "reference", "--torch", "2.6")

    assert calls == [
        f"run --implementation reference --report {tmp_path}/r/quick/reference -n auto --profile quick",
        f"run --implementation reference --report {tmp_path}/r/reference -n auto",
        _components_call(tmp_path),
    ]
    assert set((tmp_path / "setups").read_text(encoding="utf-8").split()) == {"torch-2.6"}


@pytest.mark.parametrize(("options", "passed_on"), [(["--case", "R001"], ["--case", "R001"]), (["--whole"], [])])
def test_who_says_what_to_run_gets_that(options: list[str], passed_on: list[str], tmp_path: Path) -> None:
    """With these options there is no quick round."""
    _, calls, _ = certify(tmp_path, "--implementation", "x", *options)

    assert calls == [" ".join([f"run --implementation x --report {tmp_path}/r/x -n auto", *passed_on])]


@pytest.mark.parametrize(("quick", "whole", "expected"), [(1, 0, 0), (0, 1, 1), (1, 4, 4)])
def test_the_status_is_that_of_the_whole_round(quick: int, whole: int, expected: int, tmp_path: Path) -> None:
    """The quick profile cannot certify, so its status is 1 for every engine."""
    status, _, _ = certify(tmp_path, "--implementation", "x", quick=quick, whole=whole)

    assert status == expected


def test_an_adapter_that_cannot_be_used_is_told_once(tmp_path: Path) -> None:
    """The second round would say the same."""
    status, calls, _ = certify(tmp_path, "--implementation", "x", "--implementation", "y", quick=2)

    assert status == 2
    assert [call.split()[2] for call in calls] == ["x", "y"]
