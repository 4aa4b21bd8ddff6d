"""`completion` prints scripts that complete commands, options, names, choices and files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_conformance import contract
from fsdp_conformance.cli.arguments import SHELLS, parser
from fsdp_conformance.cli.command import main
from fsdp_conformance.contract.profile import load_profile

_TYPED = """
source ./completion.bash
typed() {
    COMP_WORDS=(fsdp-conformance "$@"); COMP_CWORD=$#; COMPREPLY=()
    _shtab_fsdp_conformance
    echo "${COMPREPLY[*]}"
}
"""

Completions = Callable[..., list[list[str]]]


@pytest.fixture(name="completions")
def _completions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Completions:
    """The suggestions of bash for the last word of each line."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    assert main(["completion", "bash"]) == 0
    (tmp_path / "completion.bash").write_text(capsys.readouterr().out, encoding="utf-8")

    def completions(*lines: str) -> list[list[str]]:
        typed = "".join(f"typed {line}\n" for line in lines)
        done = subprocess.run(
            ["bash", "-c", _TYPED + typed], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stderr == ""
        return [sorted(line.split()) for line in done.stdout.splitlines()]

    return completions


def test_bash_completes(tmp_path: Path, completions: Completions) -> None:
    """Commands, options, profiles, choices, files, directories; an implementation may be a file."""
    (tmp_path / "my_adapter.py").touch()
    (tmp_path / "results").mkdir()
    (tmp_path / "resume.txt").touch()
    wanted = {
        "expo": ["export"],
        "run --deadline": ["--deadline-scale"],
        "run --profile qu": ["quick-2026.11"],
        "completion z": ["zsh"],
        "verify resu": ["results", "resume.txt"],
        "run --report resu": ["results"],
        "smoke --implementation my_a": ["my_adapter.py"],
        "replay resume": ["resume.txt"],
    }

    assert dict(zip(wanted, completions(*wanted), strict=True)) == wanted


def test_bash_completes_names(completions: Completions) -> None:
    """Cases, requirements, scopes, capabilities and more, for each command that takes them; the last one of a list."""
    probes = [f"R001/exact-probe-ws{size}" for size in (2, 3, 4)]
    wanted = {
        **{f"{command} R001/exact-probe": probes for command in ("debug", "repro", "replay", "explain")},
        **{f"{command} --case R001/exact-probe": probes for command in ("run", "list", "export")},
        "run --case R003/exact,R001/exact-probe-ws2": ["R003/exact,R001/exact-probe-ws2"],
        "run --requirement R001,R003": ["R001,R003"],
        "list --binding R054": ["R054"],
        "run --scope base,offl": ["base,offload"],
        "list --chapter AE": ["AE"],
        "list --capability hsdp_": ["hsdp_defer_allreduce"],
        "run torch-z": ["torch-zero1"],
        "run --implementation torch-z": ["torch-zero1"],
        "explore --implementation torch-z": ["torch-zero1"],
    }
    wanted["explain R18"] = [name for name in contract.load().requirements if name.startswith("R18")]
    wanted["explain R18"] += [case for case in _cases() if case.startswith("R18")]

    got = dict(zip(wanted, completions(*wanted), strict=True))
    assert got == {line: sorted(names) for line, names in wanted.items()}


def test_every_name_is_completed(completions: Completions) -> None:
    """The names are those of the profiles and the contract; `run` takes each requirement that it completes."""
    cases, requirements, bound = completions("debug ''", "run --requirement ''", "run --binding ''")
    full = load_profile("full")

    assert cases == sorted(_cases())
    assert full.by_id.keys() <= set(cases)
    assert requirements == sorted({entry.primary for entry in full.entries})
    assert bound == sorted({name for entry in full.entries for name in entry.requirements})


def _cases() -> set[str]:
    return {case for name in ("full", "own-model", "quick") for case in load_profile(name).by_id}


@pytest.mark.parametrize(
    ("shell", "begins"), [("bash", "# AUTOMATICALLY GENERATED"), ("zsh", "#compdef fsdp-conformance"), ("tcsh", "#")]
)
def test_each_shell_has_a_script(shell: str, begins: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each script has every command."""
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    commands = parser()._words()

    assert script.startswith(begins)
    assert [word for word in commands if not word.startswith("-") and word not in script] == []
    assert shell in SHELLS


def test_without_shtab_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 3, and nothing that a shell would evaluate."""
    monkeypatch.setitem(sys.modules, "shtab", None)

    assert main(["completion", "bash"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "pip install shtab" in captured.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "absent"), [(["list", "--capabilities"], "shtab"), (["completion", "bash"], "torch")]
)
def test_what_would_make_a_command_slow_is_not_imported(command: list[str], absent: str) -> None:
    """shtab by other commands; torch by this one, which begins each session of a shell."""
    script = f"import sys; from fsdp_conformance.cli import main; main({command}); print({absent!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.endswith("False\n")
