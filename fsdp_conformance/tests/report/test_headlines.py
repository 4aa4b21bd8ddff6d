"""Every report of a case shows the same finding first, with its cause and its advice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fsdp_conformance import contract
from fsdp_conformance.diagnosis.advice import look_at
from fsdp_conformance.diagnosis.headline import headline_of
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report import expectations, markdown, repeated
from fsdp_conformance.report.explanation import explain, explain_json
from fsdp_conformance.report.formats import ctrf, sarif
from fsdp_conformance.report.html.page import page
from fsdp_conformance.report.terminal import render_failure, render_findings
from fsdp_conformance.tests.report.certificates import a_profile
from fsdp_conformance.tests.report.evidence import a_finding, a_record
from fsdp_conformance.tests.report.test_texts import a_certificate, a_run
from fsdp_conformance.verdict import Verdict

CASE = "R003/rank-coded-ws2"
CAUSE = "stale: from an earlier save, as it was after step 0"
TELLING = "the telling difference"


def _record() -> CaseRecord:
    """The loss comes first, and the gradients of the same step say why."""
    loss = a_finding("R001", check="loss parity", phase="forward", message="the first difference", likely=None)
    gradients = [a_finding(check="gradient parity", message=TELLING, likely=CAUSE, fqn=f"{n}.weight") for n in range(2)]
    return a_record(CASE, Verdict.FAIL, loss, *gradients)


def _explained(record: CaseRecord) -> str:
    text = explain(CASE, contract.load(), a_profile(), a_run([record]))
    return text.split("\nfinding ")[0]


@pytest.mark.parametrize(
    "text",
    [
        lambda record: render_findings([record]),
        render_failure,
        _explained,
        lambda record: markdown.summary(a_run([record]), a_certificate()),
        lambda record: page(a_run([record]), a_certificate()),
        lambda record: ctrf.text(a_run([record]), a_certificate()),
        lambda record: sarif.text(a_run([record]), a_certificate()),
    ],
    ids=["run", "pytest", "explain", "markdown", "html", "ctrf", "sarif"],
)
def test_a_report_shows_the_most_telling_finding(text: Callable[[CaseRecord], str]) -> None:
    """With its cause, and with what to look at for that cause."""
    record = _record()
    finding = headline_of(record)
    assert finding is not None
    assert finding.message == TELLING

    # Texts are folded, and the page escapes quotes.
    shown = " ".join(text(record).split())
    assert TELLING in shown
    assert CAUSE in shown
    assert look_at(record, finding).split(":")[0] in shown


def test_replay_and_expectations_compare_that_finding() -> None:
    """The first difference may be another one by chance."""
    then, now = _record(), _record()
    now.findings[0] = a_finding("R001", check="loss parity", message="another first difference", likely=None)

    assert repeated.differences(then, now) == []
    assert TELLING in repeated.text(then, [now])
    assert TELLING in expectations.what_happened(then)


def test_explain_gives_it_as_data() -> None:
    """With the advice, which no finding holds."""
    (record,) = explain_json(CASE, contract.load(), a_profile(), a_run([_record()]))["records"]

    assert record["headline"]["message"] == TELLING
    assert record["headline"]["likely"] == CAUSE
    assert record["headline"]["look_at"]
