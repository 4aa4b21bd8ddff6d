"""Run files that were made to break a reader: every command answers with a sentence, and none with a traceback."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.codec import encode
from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.report.recorder import Recorder
from fsdp_conformance.report.runfile import NAME, chained
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.status import Status
from fsdp_conformance.tests.cli.cli_runs import Said, answered
from fsdp_conformance.tests.report.evidence import DESCRIBED, a_finding, a_record
from fsdp_conformance.verdict import Verdict

CASE = "R001/exact-probe-ws2"

#: Every command that reads a run file, given its path.
COMMANDS: dict[str, Callable[[str], list[str]]] = {
    "verify": lambda path: ["verify", path],
    "verify --json": lambda path: ["verify", path, "--json"],
    "verify --markdown": lambda path: ["verify", path, "--markdown"],
    "compare": lambda path: ["compare", path, path],
    "explain": lambda path: ["explain", CASE, "--report", path],
    "scoreboard": lambda path: ["scoreboard", path],
    "export sarif": lambda path: ["export", path, "--format", "sarif"],
    "export ctrf": lambda path: ["export", path, "--format", "ctrf"],
    "export badge": lambda path: ["export", path, "--format", "badge"],
    "update-expectations": lambda path: ["update-expectations", path, "--file", f"{path}.toml"],
    "trend": lambda path: ["trend", str(Path(path).parent)],
    "replay": lambda path: ["replay", path, CASE],
    "run --baseline": lambda path: ["verify", path, "--baseline", path],
}


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.mkdir()


def _closed(path: Path) -> None:
    path.write_text("{}\n", encoding="utf-8")
    path.chmod(0)


def _of(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


FILES: dict[str, Callable[[Path], object]] = {
    "empty": _of(b""),
    "one line end": _of(b"\n"),
    "binary": _of(bytes(range(256)) * 16),
    "nested": _of(b'{"type":"header","format":2,"chain":"","suite":' + b"[" * 200_000 + b"]" * 200_000 + b"}\n"),
    "nested and torn": _of(b"[" * 200_000),
    "a lone surrogate": _of(b'{"type":"header","format":2,"chain":"","suite":"\\udc80"}\n'),
    "NaN": _of(b'{"type":"header","format":NaN,"chain":""}\n'),
    "a number of 5000 digits": _of(b'{"type":"header","format":' + b"9" * 5000 + b',"chain":""}\n'),
    "an infinite number": _of(b'{"type":"header","format":2,"chain":"","interpretation":1e999}\n'),
    "a list": _of(b"[]\n"),
    "another format": _of(b'{"type":"header","format":"2","chain":""}\n'),
    "a format that is a list": _of(b'{"type":"header","format":[2],"chain":""}\n'),
    "settings that are a list": _of(b'{"type":"header","format":2,"chain":"","settings":[]}\n'),
    "a directory": _directory,
    "a pipe": _pipe,
    "unreadable": _closed,
}


def _is_a_sentence(said: Said) -> bool:
    return "Traceback" not in said.err + said.out and bool(said.err.strip())


@pytest.mark.daily(70)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("file", FILES)
def test_what_is_no_run_file_is_a_usage_error(tmp_path: Path, file: str, command: str) -> None:
    """Exit status 2 and a sentence on stderr; a pipe keeps nothing waiting."""
    if file == "unreadable" and os.geteuid() == 0:
        pytest.skip("root reads any file")
    path = tmp_path / "one" / NAME
    path.parent.mkdir()
    FILES[file](path)
    said = answered(*COMMANDS[command](str(path)))

    assert (said.status, _is_a_sentence(said)) == (Status.USAGE, True)


# Files with hashes that are right.


def a_run(directory: Path, change: Callable[[list[dict[str, Any]]], object]) -> str:
    """A run of one case that failed, with changed lines and right hashes."""
    settings = RunSettings(implementation=DESCRIBED["spec"], profile="sample", report_dir=str(directory))
    run = Recorder(settings, load_profile("sample"), DESCRIBED, directory)
    run.start(CASE, world_size=2)
    run.case(a_record(CASE, Verdict.FAIL, a_finding("R001")))
    run.note("a note")
    run.finish()
    lines = [json.loads(text) for text in run.path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        del line["chain"]
    change(lines)
    chain, texts = "fsdp-conformance run file", []
    for line in lines:
        body = encode(line)
        chain = chained(chain, body)
        texts.append(f'{body[:-1]},"chain":"{chain}"}}\n')
    run.path.write_text("".join(texts), encoding="utf-8")
    return str(run.path)


def _measured(**measurements: Any) -> Callable[[list[dict[str, Any]]], object]:
    return lambda lines: lines[2].update(measurements=measurements)


EDITS: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "measurements of other types": _measured(undeclared=3, absent={"a": 1}, inapplicable="x"),
    "references of other types": _measured(**{"reference histories": {"computed": "many", "rank 0": 3}}),
    "strikes of other types": _measured(**{"stress": {"late completion": "x"}, "stress failure": [1]}),
    "figures of other types": _measured(**{"bytes of shards": {"held": "x", "shard": [], "full": None}, "y": [[1]]}),
    "a huge interpretation": lambda lines: lines[0].update(interpretation=10**400),
    "huge numbers": lambda lines: lines[2].update(seconds=10**400, comparisons=10**400),
    "huge figures": _measured(**{"bytes of shards": {"held": 10**400, "shard": 10**400}}),
    "an environment of other types": lambda lines: lines[2].update(environment={"adapter": [1], "torch": {}}),
    "a verdict without a case": lambda lines: lines[2].update(case=""),
    "a case without requirements": lambda lines: lines[2].update(requirements=[]),
    "unknown requirements": lambda lines: lines[2].update(requirements=["nothing"]),
    "a finding of nothing": lambda lines: lines[2]["findings"][0].update(requirement="", message="", check=""),
    "a world of 0 ranks": lambda lines: lines[2].update(world_size=0),
    "an unknown chapter": lambda lines: lines[2].update(chapter="?"),
    "an unknown profile": lambda lines: lines[0]["profile"].update(name="none"),
    "a profile that is a path": lambda lines: lines[0]["profile"].update(name="/etc/passwd.json"),
    "no profile": lambda lines: lines[0].pop("profile"),
    "no settings": lambda lines: lines[0].pop("settings"),
    "no implementation": lambda lines: lines[0].pop("implementation"),
    "no environment": lambda lines: lines[0].pop("environment"),
    "an engine without a name": lambda lines: lines[0]["implementation"].pop("name"),
    "a footer without a certificate": lambda lines: lines[-1].pop("certificate"),
    "a footer without seconds": lambda lines: lines[-1].pop("seconds"),
    "a header alone": lambda lines: lines.__delitem__(slice(1, None)),
    "a stress failure without a seed": lambda lines: lines[0]["settings"].update(stress_failure="kill"),
    "capabilities that do not exist": lambda lines: lines[0]["implementation"].update(capabilities=["\x1b[2J"]),
    "a case that is a number": lambda lines: lines[0]["settings"].update(cases=[5]),
    "cases that are a number": lambda lines: lines[0]["settings"].update(cases=5),
    "world sizes that are a text": lambda lines: lines[0]["settings"].update(world_sizes="two"),
    "a negative factor": lambda lines: lines[0]["settings"].update(deadline_scale=-1.0),
}


@pytest.mark.daily(120)
@pytest.mark.nightly_params("no settings-replay")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_run_file_never_ends_in_a_traceback(tmp_path: Path, edit: str, command: str) -> None:
    """Whatever its lines say: an answer, or a sentence that says what is wrong."""
    path = a_run(tmp_path / "one", EDITS[edit])
    said = answered(*COMMANDS[command](path))

    assert "Traceback" not in said.err + said.out
    assert said.status in (Status.CERTIFIED, Status.NOT_CERTIFIED, Status.USAGE)


def test_nothing_is_imported_because_a_run_file_names_it(tmp_path: Path) -> None:
    """Its path is code; who replays it says so."""
    trap, sprung = tmp_path / "trap.py", tmp_path / "sprung"
    trap.write_text(f"open({str(sprung)!r}, 'w').close()\n", encoding="utf-8")
    path = a_run(tmp_path / "one", lambda lines: lines[0]["settings"].update(implementation=f"{trap}:Trap"))
    said = answered("replay", path, CASE)

    assert (said.status, sprung.exists()) == (Status.USAGE, False)
    assert f"add --implementation {trap}:Trap" in said.err


# What would steer a terminal or deceive a reader.

#: Clears the screen, turns the direction of the text, sets a title, starts a line, and is markup.
HOSTILE = 'evil\x1b[2J\u202e\x07\r\n# <script>alert(1)</script> | **bold** [a](http://b) `c` "\x9b\u2066'


@pytest.mark.parametrize("command", [*COMMANDS, "verify --html"])
def test_text_of_others_is_shown_as_text(tmp_path: Path, command: str) -> None:
    """The name of an engine, its messages, notes and reasons, in every output."""

    def change(lines: list[dict[str, Any]]) -> None:
        lines[0]["implementation"].update(name=HOSTILE, version=HOSTILE, shims=[HOSTILE])
        lines[2].update(reason=HOSTILE, notes=[HOSTILE], traceback=HOSTILE, repro=HOSTILE)
        lines[2]["findings"][0].update(message=HOSTILE, fqn=HOSTILE, likely=HOSTILE, check=HOSTILE, detail=HOSTILE)
        lines[3]["text"] = HOSTILE

    path = a_run(tmp_path / "one", change)
    page = tmp_path / "page.html"
    words = ["verify", path, "--html", str(page)] if command == "verify --html" else COMMANDS[command](path)
    said = answered(*words)
    shown = page.read_text(encoding="utf-8") if command == "verify --html" else said.out + said.err

    assert [character for character in shown if not character.isprintable() and character not in "\n\t"] == []
    if command == "verify --html":
        assert "<script>alert" not in shown
    if command in ("verify --html", "verify --markdown"):
        assert r"evil\x1b[2J\u202e" in shown.replace("\\\\", "\\").replace(r"\[", "[")
    if command == "verify --markdown":
        outside = "".join(shown.split("```")[::2])
        assert "<script>" not in outside
        assert "**bold**" not in outside
        assert "[a](" not in outside
        assert "\n# " not in outside
