"""The HTML page of a run: one file, nothing from a network, nothing of a run that is taken for markup."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance import contract
from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.baseline import Changes
from fsdp_conformance.report.html.page import page
from fsdp_conformance.tests.report.evidence import a_finding, a_record, an_exit
from fsdp_conformance.tests.report.test_texts import a_certificate, a_run, failed, hung
from fsdp_conformance.verdict import Verdict

#: Elements without an end tag.
_VOID = {"meta", "input", "link", "br", "hr", "img"}


class Outline(HTMLParser):
    """Checks that elements nest, and collects their text and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        """Everything that a reader sees, with single spaces."""
        return " ".join(" ".join(self.words).split())


def outline(records: list[CaseRecord], **changes: Any) -> Outline:
    """The page of a run with these records."""
    return Outline(page(a_run(records), a_certificate(**changes)))


def test_a_failing_run() -> None:
    """The verdict and its reasons, each problem with its fields and its reproduction, what was not judged and why."""
    declined = a_record("R017/x-ws2", Verdict.UNSUPPORTED, chapter="B", reason="offload is not declared")
    shown = outline([a_record(), declined, failed(), failed("R003/rank-coded-ws3"), hung()])

    assert shown.open == []
    assert "acme-fsdp 0.4.1 NOT CERTIFIED" in shown.text
    assert "✗ R003 The gradient is the mean over the data-parallel ranks" in shown.text
    assert "2 cases fail in this way R003/rank-coded-ws2 R003/rank-coded-ws3" in shown.text
    assert "likely ranks issue different collectives" in shown.text
    assert 'File "/src/acme_fsdp/unit.py", line 212 in unshard' in shown.text
    assert "UNSUPPORTED offload is not declared 1 R017/x-ws2" in shown.text
    assert ("header", "class", "bad") in shown.attributes


def test_a_certified_run() -> None:
    """It says what the certificate rests on, and that nothing failed."""
    shown = outline([a_record()], certified=True, reasons=(), status=0, counts={Verdict.PASS: 1})

    assert "CERTIFIED base + offload" in shown.text
    assert "Nothing that ran has failed." in shown.text
    assert ("header", "class", "good") in shown.attributes


def test_an_empty_run() -> None:
    """The page states that no case has a verdict."""
    shown = outline([], counts={}, executed=0)

    assert "No case has a verdict." in shown.text
    assert "Every case that was asked for was judged." in shown.text
    assert ("header", "class", "open") in shown.attributes


def test_a_run_that_was_ended() -> None:
    """There is no footer."""
    run = a_run([a_record()])
    run.footer = None

    assert "ended early, after" in Outline(page(run, a_certificate())).text


def test_nothing_is_loaded() -> None:
    """The file works without a network, and sends nothing when it is opened."""
    text = page(a_run([failed(), hung()]), a_certificate())
    shown = Outline(text)

    assert re.findall(r"https?://", text) == []
    assert "@import" not in text
    assert "url(" not in text
    assert [
        (tag, name) for tag, name, value in shown.attributes
        if name in ("src", "srcset", "href", "action", "data") and not value.startswith("#")
    ] == []  # fmt: skip


def test_what_an_engine_says_is_not_markup() -> None:
    """Messages, names of tensors, ids, stacks and reasons come from outside."""
    evil = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
    plain = len(Outline(page(a_run([failed()]), a_certificate())).attributes)
    record = failed(message=evil, fqn=evil, likely=evil, detail=evil, call=evil)
    record.repro = record.reason = record.traceback = evil
    record.schedule, record.consequences = [evil], [evil]
    record.exits = [an_exit(0, stack=evil, last_collectives=[evil])]
    odd = a_record("R017/x-ws2", Verdict.UNSUPPORTED, reason=evil)
    text = page(a_run([record, odd]), a_certificate(reasons=(evil,), remarks=(evil,)), baseline=evil)

    assert "<img" not in text
    assert text.count("<script") == 1
    shown = Outline(text)
    assert shown.open == []
    assert [name for _, name, _ in shown.attributes if name.startswith("on")] == []
    assert len(shown.attributes) > plain


def test_differences_are_drawn_by_tensor_and_step() -> None:
    """The largest share of a tensor's elements that differ on a rank; a dot where nothing was reported."""
    record = failed(step=0, differing=4, elements=16)
    record.findings += [
        a_finding(step=0, differing=8, elements=16, rank=1),
        a_finding(step=1, differing=16, elements=16, fqn="2.bias"),
    ]
    shown = outline([record])

    assert "step 0 step 1 0.weight · gradient parity 50 % · 2.bias · gradient parity · 100 %" in shown.text


def test_only_steps_that_differ_have_a_column() -> None:
    """However long the training was."""
    shown = outline([failed(step=10**12, differing=4, elements=16)])

    assert f"step {10**12} 0.weight" in shown.text


def test_many_tensors_are_counted() -> None:
    """The picture has forty rows; the run file has the rest."""
    record = failed()
    record.findings = [a_finding(fqn=f"{number}.weight") for number in range(45)]

    assert "and 5 more tensors" in outline([record]).text


def test_collectives_of_each_rank() -> None:
    """Each rank has a lane, collectives that had not ended are hollow, and unparsed lines are shown as they are."""
    closed = "#1 closed all_gather 1024B float32 [0,1] at unit.py:3 in unshard (forward, step 0)"
    record = hung()
    record.exits = [
        an_exit(0, last_collectives=[closed, closed.replace("closed", "issued").replace("#1", "#2")]),
        an_exit(1, last_collectives=["something else"]),
    ]
    shown = outline([record])
    classes = [value for tag, name, value in shown.attributes if tag == "span" and name == "class"]

    assert {"op all_gather", "op all_gather open", "op "} <= set(classes)
    assert ("span", "title", closed) in shown.attributes
    assert ("span", "title", "something else") in shown.attributes


def test_memory_against_its_bound() -> None:
    """Figures that exceed a bound come first and look different; figures without a bound are not drawn."""
    fine, over = a_record("R038/fine-ws2"), a_record("R038/over-ws2", Verdict.FAIL)
    fine.measurements = {"peak bytes": {"forward": 512, "forward, bound": 1024, "held": 3}}
    over.measurements = {
        "peak bytes": {
            "rank 0": {"forward": 2048, "forward, bound": 1024},
            "rank 1": {"forward": 1, "forward, bound": 2},
        }
    }
    shown = outline([fine, over])

    assert "R038/over-ws2 rank 0: peak bytes forward 2.0 KiB of 1.0 KiB" in shown.text
    assert "R038/fine-ws2 every rank: peak bytes forward 512 Bytes of 1.0 KiB" in shown.text
    assert shown.text.index("R038/over-ws2 rank 0:") < shown.text.index("R038/fine-ws2 every rank:")
    assert ("span", "class", "held over") in shown.attributes


@pytest.mark.parametrize(
    "measured",
    [None, 3, "x", [], {}, {"a, bound": 1}, {"a": "x", "a, bound": 1}, {"rank 0": 1}, {"a": 1, "a, bound": None}],
)
def test_odd_measurements_are_left_out(measured: Any) -> None:
    """A run file of another version, or an edited one, may hold anything."""
    record = a_record()
    record.measurements = {"peak bytes": measured}

    assert "Memory against its bound" not in outline([record]).text


def test_changes_since_the_baseline() -> None:
    """New failures are open, unchanged ones are folded."""
    changes = Changes(new=("R003/x-ws2: FAIL: boom",), fixed=(), unchanged=("R004/y-ws2: FAIL",), missing=())
    shown = Outline(page(a_run([failed()]), a_certificate(), changes=changes, baseline="results/before"))

    assert "Since the baseline results/before New: 1 R003/x-ws2: FAIL: boom" in shown.text
    assert "Unchanged: 1 R004/y-ws2: FAIL" in shown.text


@pytest.mark.slow
def test_a_full_run_stays_small() -> None:
    """Every case of the profile, a hundred of them with different failures, takes less than a megabyte."""
    line = "#89 closed all_gather 576B float32 [0,1] at checkpointing.py:35 in recomputed (forward, step 1)"
    records = [a_record(entry.id) for entry in load_profile("core-2026.11").entries]
    for number, record in enumerate(records[:100]):
        wrong = failed(record.case, likely=f"cause {number}")
        wrong.findings *= 30
        wrong.schedule = ["backward reduce_scatter 576B float32 AVG [0,1]"] * 120
        wrong.exits = [an_exit(rank, last_collectives=[line] * 12) for rank in range(4)]
        records[number] = wrong
    text = page(a_run(records), a_certificate())

    assert text.count("<article ") == 100
    assert len(text.encode()) < 1_000_000


_CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.nightly
@pytest.mark.skipif(_CHROMIUM is None, reason="NOT_RUN_ENV: no Chromium here")
def test_a_browser_shows_it(tmp_path: Path) -> None:
    """The script runs: the filter is there, requirements without a case are hidden in a partial run."""
    file = tmp_path / "report.html"
    partial = a_certificate(executed=2, expected=756)
    file.write_text(page(a_run([failed(), a_record("R001/x-ws2")]), partial), encoding="utf-8")
    done = subprocess.run(
        [str(_CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip

    assert f"2 of {len(contract.load().requirements)} requirements" in done.stdout
    assert '<form class="filter">' in done.stdout
