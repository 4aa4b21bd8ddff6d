"""Texts fit the terminal, keep ids and commands whole, and are the same in every file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest

from fsdp_conformance import contract
from fsdp_conformance.cli import messages
from fsdp_conformance.report.certificate import Scope, State
from fsdp_conformance.report.explanation import explain
from fsdp_conformance.report.folding import WIDTH, folded, screen_width, terminal_width
from fsdp_conformance.report.terminal import basis, certificate_text, render_findings, render_record
from fsdp_conformance.tests.report.test_texts import a_certificate, a_profile, a_run, failed, hung

#: Columns of a terminal.
NARROW = 80
#: How lines begin that are copied as a whole.
COMMANDS = ("repro", "closer", "raised at", "called at")

Columns = Callable[[str | None], None]


@pytest.fixture(name="columns")
def _columns(monkeypatch: pytest.MonkeyPatch) -> Columns:
    """Sets what COLUMNS says; None for neither it nor a terminal."""

    def set_to(value: str | None) -> None:
        monkeypatch.setenv("COLUMNS", value or "0")
        if value is None:
            monkeypatch.setattr(shutil, "get_terminal_size", os.terminal_size)

    return set_to


def too_long(text: str) -> list[str]:
    """Lines of more than NARROW columns, other than commands."""
    return [
        line
        for line in text.splitlines()
        if len(line) > NARROW and not line.strip().startswith(COMMANDS) and " " in line.strip()
    ]


@pytest.mark.parametrize(
    ("value", "width"), [("80", 80), ("20", 60), ("200", WIDTH), (None, None)], ids=["80", "tiny", "wide", "a pipe"]
)
def test_the_width_is_the_terminals(columns: Columns, value: str | None, width: int | None) -> None:
    """Between 60 and 120 columns; without a terminal, paragraphs have 120."""
    columns(value)

    assert terminal_width() == width
    assert screen_width() == (width or WIDTH)


def test_words_and_inner_spaces_stay() -> None:
    """An id is never broken, and columns stay aligned."""
    long = "R073/matrix-" + "x" * 80 + "-ws2"

    assert folded(f"  {long}   2 ranks  runs", 60, indent="    ") == [f"  {long}", "    2 ranks  runs"]
    assert folded("  R001  two   words", 60) == ["  R001  two   words"]


def test_paths_stay_on_one_line() -> None:
    """A path that is named, and one in quotation marks, keep their spaces; other quoted words are folded."""
    path = "/data/my own runs/of today/" + "x" * 40 + "/run.jsonl"
    text = f"3 of 4 cases have a verdict in {path}, after several words"

    assert path in folded(text, 60, whole=[path])[1]
    assert not any(path in line for line in folded(text, 60))
    (quoted,) = [line for line in folded(f"FileNotFoundError: [Errno 2] No such file: '{path}'", 60) if "data" in line]
    assert quoted == f"'{path}'"
    words = "the ranks' and the engine's words 'that are quoted, but are no path' are folded here"
    assert max(map(len, folded(words, 60))) <= 60


def test_a_path_is_printed_whole(columns: Columns, capsys: pytest.CaptureFixture[str]) -> None:
    """On a narrow terminal, too."""
    columns("60")
    path = "/tmp/my own recordings of today/first"
    messages.say(f"recorded 3 steps of 2 ranks in {path}, 0.4 s", path)

    assert f"{path}," in capsys.readouterr().out


def test_reports_fit_a_narrow_terminal() -> None:
    """Failures, the certificate and explanations; the same words as in a wide one."""
    records = [failed(), hung(), failed("R004/adam-a-model-with-a-long-name-and-several-regimes-ws4", fqn="x" * 20)]
    scopes = [
        Scope(names=(f"extension-number-{number}",), state=State.DECLINED, cases=1, passed=0) for number in range(9)
    ]
    given = a_certificate(scopes=tuple(scopes), reasons=("incomplete: " + "many words " * 20,))
    narrow, wide = (
        [
            render_findings(records, width=width),
            certificate_text(given, width=width),
            explain("R067", contract.load(), a_profile(), a_run(records), width=width),
            explain("R067/uneven-ws2", contract.load(), a_profile(), a_run(records), width=width),
        ]
        for width in (NARROW, WIDTH)
    )

    assert [line for text in narrow[:3] for line in too_long(text)] == []
    assert any(too_long(text) for text in wide)
    assert [text.split() for text in narrow] == [text.split() for text in wide]


def test_files_do_not_depend_on_the_terminal(columns: Columns) -> None:
    """Text that is not printed is folded at 120 columns."""
    columns("60")
    on_a_narrow_one = render_record(hung())
    columns("120")

    assert render_record(hung()) == on_a_narrow_one


def test_a_long_list_of_scopes_is_one_line_of_a_page() -> None:
    """In Markdown, a folded list would become several entries."""
    names = [f"extension-number-{number}" for number in range(20)]
    scopes = tuple(Scope(names=(name,), state=State.DECLINED, cases=1, passed=0) for name in names)

    (line,) = basis(a_certificate(scopes=scopes))[:1]
    assert line == f"declined: {', '.join(names)}"
    assert "\n" not in line


def test_only_a_terminal_gets_folded_lines(columns: Columns, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe gets each line whole, so that grep finds what belongs together."""
    line = "  R001/exact-probe-ws2   2 ranks  runs   " + " ".join(f"R{number:03}" for number in range(20))
    columns("80")
    messages.say(line)
    parts = capsys.readouterr().out
    columns(None)
    messages.say(line)
    whole = capsys.readouterr().out

    assert whole == f"{line}\n"
    assert all(len(part) <= NARROW for part in parts.splitlines())
    assert parts.split() == line.split()
    assert [part[:4] for part in parts.splitlines()] == ["  R0", "    "]
