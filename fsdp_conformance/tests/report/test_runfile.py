"""The run file: written line by line, read whatever ended the run, closed by a chain of hashes."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import json
import math
import os
from collections.abc import Callable
from importlib import metadata, resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from fsdp_conformance.adapters.registry import AdapterDescription
from fsdp_conformance.codec import encode, plain
from fsdp_conformance.contract.profile import Profile, profile_of
from fsdp_conformance.errors import EnvironmentUnavailable, RunFileError
from fsdp_conformance.outcome.records import CaseRecord, Finding, RankExit
from fsdp_conformance.report import last_run
from fsdp_conformance.report.last_run import remember, report_directory
from fsdp_conformance.report.recorder import Recorder, version_of
from fsdp_conformance.report.runfile import NAME, PREVIOUS, RunFileWriter, chained, read
from fsdp_conformance.report.schema import text as schema_text
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.tests.report.evidence import a_case, a_finding, a_record, a_report, stuck
from fsdp_conformance.verdict import Verdict

DESCRIPTION: dict[str, Any] = json.loads(
    encode(plain(AdapterDescription(spec="my.py:Mine", name="mine", version="1", capabilities=("zero3",))))
)


@pytest.fixture
def profile() -> Profile:
    """Two cases."""
    return profile_of("core-test", [a_case(), a_case(world_size=3)])


def a_run(directory: Path, profile: Profile, *records: CaseRecord, **settings: Any) -> Recorder:
    """A run in which these cases came to an end."""
    run = Recorder(RunSettings(report_dir=str(directory), **settings), profile, DESCRIPTION, directory)
    for record in records:
        run.start(record.case, world_size=record.world_size, worker="gw0")
        run.case(record)
    return run


def lines(path: Path) -> list[dict[str, Any]]:
    """The file's lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Writing and reading.


def test_a_run_comes_back_as_it_was(tmp_path: Path, profile: Profile) -> None:
    """Header, cases, notes, footer; without a problem."""
    records = [
        a_record(requirements=["R001", "R003"]),
        a_record("R001/probe-ws3", Verdict.HANG, a_finding(), exits=[stuck(0), stuck(1), stuck(2)], notes=["a note"]),
    ]
    written = a_run(tmp_path, profile, *records)
    written.note("deadlines are long")
    certificate = written.finish()
    run = read(tmp_path)

    assert run.problems == []
    assert run.records == records
    assert run.started == ["R001/probe-ws2", "R001/probe-ws3"]
    assert run.notes == [{"text": "deadlines are long", "refuses": False}]
    assert run.header["implementation"] == DESCRIPTION
    assert run.header["profile"] == {"name": "core-test", "sha256": profile.sha256, "cases": 2}
    assert run.footer is not None
    assert run.footer["certificate"] == certificate.to_json()
    assert not run.aborted


def test_each_line_is_on_disk_before_the_next_case_begins(tmp_path: Path, profile: Profile) -> None:
    """A run that is ended at that point keeps every verdict."""
    run = a_run(tmp_path, profile, a_record())

    assert [record.case for record in read(run.path).records] == ["R001/probe-ws2"]


def test_a_run_that_is_aborted_has_no_footer(tmp_path: Path, profile: Profile) -> None:
    """The file can be read, and names the case that was running."""
    run = a_run(tmp_path, profile, a_record())
    run.start("R001/probe-ws3", world_size=3)
    run.abort()
    aborted = read(tmp_path)

    assert aborted.aborted
    assert (aborted.unfinished(), aborted.problems) == (["R001/probe-ws3"], [])


def test_nothing_is_written_after_the_end(tmp_path: Path, profile: Profile) -> None:
    """The end is a footer or an abort."""
    run = a_run(tmp_path, profile)
    run.finish()
    before = run.path.read_bytes()
    run.case(a_record())
    run.abort()

    assert run.path.read_bytes() == before


def test_a_note_is_said_once(tmp_path: Path, profile: Profile) -> None:
    """However often it is found."""
    run = a_run(tmp_path, profile)
    run.note("again")
    run.note("again")

    assert len(read(run.path).notes) == 1


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_figures_that_are_no_numbers_survive(tmp_path: Path, profile: Profile, value: float) -> None:
    """JSON has no word for them; the file stays valid, and the figure comes back."""
    a_run(tmp_path, profile, a_record("R001/probe-ws2", Verdict.FAIL, a_finding(ratio=value, ulps=value))).finish()
    (finding,) = read(tmp_path).records[0].findings

    assert "NaN" not in (tmp_path / NAME).read_text(encoding="utf-8")
    assert [repr(finding.ratio), repr(finding.ulps)] == [repr(value)] * 2


def test_a_line_is_not_lost_for_a_figure_that_is_no_json(tmp_path: Path) -> None:
    """It becomes a string."""
    assert json.loads(encode({"measured": {Path("a"): {3}}, "path": Path("x")})) == {
        "measured": {"a": "{3}"},
        "path": "x",
    }


# The directory.


def test_an_earlier_run_of_the_directory_is_kept(tmp_path: Path, profile: Profile) -> None:
    """The last one, under another name."""
    a_run(tmp_path, profile, a_record()).finish()
    a_run(tmp_path, profile).abort()

    assert [len(read(tmp_path / name).records) for name in (NAME, PREVIOUS)] == [0, 1]


def test_the_default_directory_names_implementation_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The specification of the implementation may contain any character."""
    monkeypatch.setattr(last_run, "datetime", _FixedTime)
    monkeypatch.setattr(os, "getpid", lambda: 17)
    directory = report_directory(RunSettings(implementation="a/b.py:C"))

    assert directory == Path(".fsdp-conformance/a_b.py_C-20261121T030000Z-17")
    assert report_directory(RunSettings(report_dir="x")) == Path("x")


class _FixedTime:
    @staticmethod
    def now(_zone: object) -> _FixedTime:
        return _FixedTime()

    def strftime(self, _format: str) -> str:
        return "20261121T030000Z"


def test_last_points_to_the_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that is replaced, to wherever the run has left its files."""
    monkeypatch.chdir(tmp_path)
    for directory in (Path(".fsdp-conformance/first"), Path("results/second"), tmp_path / "third"):
        directory.mkdir(parents=True)
        remember(directory)
        assert Path(".fsdp-conformance/last").resolve() == directory.resolve()

    assert sorted(path.name for path in Path(".fsdp-conformance").iterdir()) == [".gitignore", "first", "last"]


def test_last_is_left_alone_where_it_is_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's directory of that name is not ours to replace."""
    monkeypatch.chdir(tmp_path)
    Path(".fsdp-conformance/last/mine").mkdir(parents=True)
    remember(Path(".fsdp-conformance/run"))

    assert Path(".fsdp-conformance/last/mine").is_dir()
    assert sorted(path.name for path in Path(".fsdp-conformance").iterdir()) == [".gitignore", "last"]


def test_a_directory_that_cannot_be_made_is_the_environments_fault(tmp_path: Path) -> None:
    """A message with the path and with what to do."""
    (tmp_path / "file").write_text("", encoding="utf-8")

    with pytest.raises(EnvironmentUnavailable, match=r"file/run.jsonl cannot be created: .* --report"):
        RunFileWriter(tmp_path / "file")


# A full disk.


def test_a_full_disk_leaves_an_intact_prefix(tmp_path: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line that did not fit is taken back, and nothing more is tried."""
    run = a_run(tmp_path, profile, a_record())
    before = run.path.read_bytes()
    monkeypatch.setattr(os, "write", _full_after(10))
    with pytest.raises(EnvironmentUnavailable, match=r"No space left on device.*What was written before is intact"):
        run.start("R001/probe-ws3", world_size=3)
    monkeypatch.undo()
    run.case(a_record("R001/probe-ws3"))

    assert run.path.read_bytes() == before
    assert read(run.path).problems == []


def _full_after(room: int) -> Callable[[int, bytes], int]:
    """A disk with so many bytes left: a first write takes them, the next one fails."""
    real, calls = os.write, []

    def write(fd: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[:room])

    return write


# Damage.


def whole(tmp_path: Path, profile: Profile) -> Path:
    """A run file with two cases and a footer."""
    run = a_run(tmp_path, profile, a_record(requirements=["R001", "R003"]), a_record("R001/probe-ws3"))
    run.finish()
    return run.path


def edited(path: Path, number: int, **changes: Any) -> None:
    """Change fields of one line, from 0, without fixing the hashes."""
    content = lines(path)
    content[number].update(changes)
    path.write_text("".join(encode(line) + "\n" for line in content), encoding="utf-8")


def test_an_edited_line_is_found(tmp_path: Path, profile: Profile) -> None:
    """That line, and no other: the ones after it have the hashes that they state."""
    path = whole(tmp_path, profile)
    edited(path, 2, verdict="FAIL")

    assert read(path).problems == ["line 3 (case) does not match its hash: the file was edited"]


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 5])
def test_an_edit_of_any_line_is_found(tmp_path: Path, profile: Profile, number: int) -> None:
    """Header, starts, cases and footer alike."""
    path = whole(tmp_path, profile)
    edited(path, number, extra=1)

    assert any(problem.startswith(f"line {number + 1} ") for problem in read(path).problems)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_removed_line_is_found(tmp_path: Path, profile: Profile, number: int) -> None:
    """The next one does not follow from what is left."""
    path = whole(tmp_path, profile)
    text = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(text[:number] + text[number + 1 :]), encoding="utf-8")

    assert read(path).problems != []


def test_lines_that_changed_places_are_found(tmp_path: Path, profile: Profile) -> None:
    """Order is part of the hash."""
    path = whole(tmp_path, profile)
    text = path.read_text(encoding="utf-8").splitlines(keepends=True)
    text[2], text[4] = text[4], text[2]
    path.write_text("".join(text), encoding="utf-8")

    assert read(path).problems != []


def test_a_line_after_the_footer_is_found(tmp_path: Path, profile: Profile) -> None:
    """It is found even if it is a copy."""
    path = whole(tmp_path, profile)
    text = path.read_text(encoding="utf-8")
    path.write_text(text + text.splitlines(keepends=True)[1], encoding="utf-8")

    assert "line 7 (start) comes after the footer" in read(path).problems


def test_a_torn_line_is_said_and_the_rest_is_read(tmp_path: Path, profile: Profile) -> None:
    """The machine lost power while it was written."""
    path = whole(tmp_path, profile)
    path.write_bytes(path.read_bytes()[:-40])
    run = read(path)

    assert run.problems == ["line 6 is incomplete: the run ended while writing it"]
    assert (len(run.records), run.aborted) == (2, True)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"type": "case", "chain": "x"}', "line 2 cannot be read"),
        ('{"type":"poem","chain":"x"}', "line 2 is of type 'poem', which is unknown"),
        ('{"type":"header","format":1,"chain":"x"}', "line 2 is a second header"),
        ("not json", "line 2 cannot be read: Expecting value"),
        ("[1]", "line 2 cannot be read"),
    ],
)
def test_a_strange_line_is_a_problem(tmp_path: Path, profile: Profile, line: str, problem: str) -> None:
    """It never raises an exception."""
    run = a_run(tmp_path, profile)
    run.abort()
    with run.path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")

    assert any(text.startswith(problem) for text in read(run.path).problems)


@pytest.mark.parametrize(
    "content", ["", "\n", "{}\n", '{"type": "header"}\n', '{"type": "header", "format": 99}\n', "x"]
)
def test_what_is_no_run_file_is_refused(tmp_path: Path, content: str) -> None:
    """The first line decides."""
    (tmp_path / NAME).write_text(content, encoding="utf-8")

    with pytest.raises(RunFileError, match="is not a run file of this version"):
        read(tmp_path)


def rewritten(path: Path, number: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change one line, from 0, and compute all hashes again, as a forger would."""
    chain, text = "fsdp-conformance run file", ""
    for place, line in enumerate(lines(path)):
        line.pop("chain")
        if place == number:
            change(line)
        body = encode(line)
        chain = chained(chain, body)
        text += f'{body[:-1]},"chain":"{chain}"}}\n'
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("number", "change", "problem"),
    [
        (1, lambda line: line.update(host="here"), "line 2 cannot be read: unknown key `$.host`"),
        (1, lambda line: line.pop("case"), "line 2 cannot be read: Object missing required field `case`"),
        (2, lambda line: line.update(luck=1), "line 3 cannot be read: unknown key `$.luck`"),
        (2, lambda line: line.update(seconds="long"), "line 3 cannot be read: Expected `float`, got `str` - at `$.sec"),
        (2, lambda line: line.update(findings=3), "line 3 cannot be read: Expected `array`, got `int` - at `$.findin"),
        (2, lambda line: line["evidence"][1].update(luck=1), "line 3 cannot be read: unknown key `$.evidence[1].luck`"),
        (2, lambda line: line["exits"][0].pop("pid"), "line 3 cannot be read: Object missing required field `pid`"),
        (2, lambda line: line.update(verdict="MAYBE"), "line 3 cannot be read: Invalid enum value 'MAYBE'"),
        (5, lambda line: line.update(luck=1), "line 6 (footer) has unknown keys: `$.luck`"),
        (5, lambda line: line.update(certificate=[]), "line 6 cannot be read: Expected `object`, got `array`"),
        (5, lambda line: line["certificate"].update(scopes=3), "line 6 cannot be read: Expected `array`, got `int`"),
        (0, lambda line: line.update(luck=1), "line 1 (header) has unknown keys: `$.luck`"),
    ],
)
def test_a_line_of_another_form_is_a_problem(
    tmp_path: Path, profile: Profile, number: int, change: Callable[[dict[str, Any]], object], problem: str
) -> None:
    """Unknown and missing keys and wrong types are named with line and key, even if all hashes are right."""
    path = whole(tmp_path, profile)
    rewritten(path, number, change)
    problems = read(path).problems

    assert [text[: len(problem)] for text in problems] == [problem]


def test_a_header_of_another_form_is_refused(tmp_path: Path, profile: Profile) -> None:
    """Everything else is read by what the header says."""
    path = whole(tmp_path, profile)
    rewritten(path, 0, lambda line: line.update(settings={"deadline_scale": "long"}))

    with pytest.raises(RunFileError, match=r"run\.jsonl .*: its first line: Expected `float`, .*deadline_scale"):
        read(path)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('{"type":"note","text":"a","text":"b"', "duplicate key 'text'"),
        ('{"type":"note","text":NaN', "JSON is malformed"),
        ('{"type":"note","text":"\\udc80"', "JSON is malformed"),
        ('{"type":"note","text":' + "[" * 100 + "]" * 100, "it is nested more than 64 levels deep"),
        ('{"type":"note","text":' + "[" * 200_000 + "]" * 200_000, "it is nested too deeply"),
        ('{"type":3', "`$.type` must be a string, got 3"),
        ('{"text":"a"', "`$.type` must be a string, got None"),
    ],
)
def test_ambiguous_json_is_a_problem(tmp_path: Path, profile: Profile, body: str, problem: str) -> None:
    """Other readers could take it for something else, or fail."""
    run = a_run(tmp_path, profile)
    run.abort()
    with run.path.open("a", encoding="utf-8") as file:
        file.write(f'{body},"chain":"{chained(read(run.path).chain, body + "}")}"}}\n')
    (text,) = read(run.path).problems

    assert text.startswith(f"line 2 cannot be read: {problem}")


def test_a_lone_surrogate_is_written_as_its_escape(tmp_path: Path, profile: Profile) -> None:
    """Whatever is in an exception's message, the line is written and can be read."""
    a_run(tmp_path, profile, a_record(reason="not \udc80")).finish()
    run = read(tmp_path)

    assert (run.problems, run.records[0].reason) == ([], r"not \udc80")


def test_figures_of_the_evidence_survive_as_well(tmp_path: Path, profile: Profile) -> None:
    """An infinite ratio comes back as a number wherever a finding stands."""
    record = a_record(evidence=[a_report(0, a_finding(ratio=math.inf)), a_report(1)])
    a_run(tmp_path, profile, record).finish()

    assert read(tmp_path).records == [record]


def test_a_run_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """The error has its path."""
    with pytest.raises(RunFileError, match=r"none\.jsonl cannot be read: No such file"):
        read(tmp_path / "none.jsonl")


# The schema.


def schema() -> dict[str, Any]:
    """The schema that is shipped."""
    text = resources.files("fsdp_conformance.report").joinpath("schema.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def test_the_schema_is_one() -> None:
    """It is valid by its own meta-schema."""
    jsonschema.Draft202012Validator.check_schema(schema())


def test_every_line_of_a_run_obeys_the_schema(tmp_path: Path, profile: Profile) -> None:
    """The lines include findings, exits, infinities and notes."""
    validator = jsonschema.Draft202012Validator(schema())
    run = a_run(
        tmp_path,
        profile,
        a_record("R001/probe-ws2", Verdict.FAIL, a_finding(ratio=math.inf), exits=[stuck(0), stuck(1)]),
        a_record("R001/probe-ws3", measurements={"floor": math.nan}),
    )
    run.note("remark", refuses=True)
    run.finish()

    assert [error.message for line in lines(run.path) for error in validator.iter_errors(line)] == []


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "MAYBE"},
        {"case": "probe"},
        {"requirements": []},
        {"surprise": 1},
        {"chain": "short"},
        {"findings": [{}]},
    ],
)
def test_the_schema_refuses_what_no_run_writes(tmp_path: Path, profile: Profile, change: dict[str, Any]) -> None:
    """It can say no."""
    run = a_run(tmp_path, profile, a_record())
    line = {**lines(run.path)[2], **change}

    assert not jsonschema.Draft202012Validator(schema()).is_valid(line)


@pytest.mark.parametrize(("name", "words"), [("case", CaseRecord), ("Finding", Finding), ("RankExit", RankExit)])
def test_the_schema_knows_every_field(name: str, words: Any) -> None:
    """A new field of the type is in the schema, too."""
    properties = set(schema()["$defs"][name]["properties"])

    assert properties - {"type", "chain"} == {field.name for field in dataclasses.fields(words)}


def test_the_schema_knows_every_verdict() -> None:
    """The enumeration in the schema has exactly the members of the enum."""
    assert schema()["$defs"]["Verdict"]["enum"] == sorted(verdict.value for verdict in Verdict)


def test_the_schema_file_is_up_to_date() -> None:
    """The shipped file is what the types yield: python -m fsdp_conformance.report.schema > .../report/schema.json."""
    assert schema_text() == resources.files("fsdp_conformance.report").joinpath("schema.json").read_text("utf-8")


def test_the_version_of_torch_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks report `torch.__version__`. A wheel from PyPI says less about itself in its metadata."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/version.py").write_text("__version__ = '2.13.0+cu130'\ndebug = False\n", encoding="utf-8")
    spec = SimpleNamespace(origin=str(tmp_path / "torch/__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "torch" else None)

    assert version_of("torch") == "2.13.0+cu130"
    (tmp_path / "torch/version.py").unlink()
    assert version_of("torch") == metadata.version("torch")
    assert version_of("no-such-package") == "absent"


def test_the_header_and_ranks_agree_on_torch() -> None:
    """Otherwise no run of that build could be certified."""
    torch = importlib.import_module("torch")

    assert version_of("torch") == torch.__version__
