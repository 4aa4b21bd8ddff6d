"""`completion` prints scripts that complete commands, options, choices and files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_conformance.cli.arguments import SHELLS, parser
from fsdp_conformance.cli.command import main

_TYPED = """
source {script}
typed() {{
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
    _shtab_fsdp_conformance
    echo "${{COMPREPLY[*]}}"
}}
typed fsdp-conformance expo
typed fsdp-conformance run --deadline
typed fsdp-conformance run --profile qu
typed fsdp-conformance completion z
typed fsdp-conformance verify resu
typed fsdp-conformance run --report resu
typed fsdp-conformance smoke --implementation my_a
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands, options, profiles, choices, files, directories; an implementation may be a file."""
    (tmp_path / "my_adapter.py").touch()
    (tmp_path / "results").mkdir()
    (tmp_path / "resume.txt").touch()
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out, encoding="utf-8")
    done = subprocess.run(
        ["bash", "-c", _TYPED.format(script=script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert done.stderr == ""
    assert [sorted(line.split()) for line in done.stdout.splitlines()] == [
        ["export"],
        ["--deadline-scale"],
        ["quick-2026.11"],
        ["zsh"],
        ["results", "resume.txt"],
        ["results"],
        ["my_adapter.py"],
    ]


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


def test_no_other_command_imports_shtab() -> None:
    """It would make each of them slower."""
    script = "import sys; from fsdp_conformance.cli import main; main(['list', '--capabilities']); "
    script += "print('shtab' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.endswith("False\n")
