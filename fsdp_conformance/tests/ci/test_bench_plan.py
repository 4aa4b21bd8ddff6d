"""ci/bench/run plan: several runs and their table, from measurements made by hand."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import ROOT

pytestmark = [checkout.required, pytest.mark.nightly]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names that the script defines; nothing is measured."""
    monkeypatch.syspath_prepend(str(ROOT / "ci/bench"))
    functions = runpy.run_path(str(ROOT / "ci/bench/plan.py"))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.4, 0.0, 0.0))
    monkeypatch.setitem(functions["main"].__globals__, "measure", measure)
    yield functions
    sys.modules.pop("engine", None)


def measure(args: Any, size: str, ranks: int) -> dict[str, Any]:
    """Three ways: a and b are ordered as measured, c is not told from b although it is far slower."""
    return {
        "links": {"all_gather": {"launch_us": 1.0}},
        "memory_gb_per_s": 10.0,
        "measured": {"a": 10.0, "b": 20.0, "c": 40.0},
        "predicted": {"a": 10.0, "b": 12.0, "c": 11.0},
        "apart": [["a", "b"], ["a", "c"]],
    }


def printed(
    script: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str
) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["plan", *words])
    script["main"]()
    return capsys.readouterr().out.splitlines()


def test_four_runs_and_their_table(
    script: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row for each run; the figure counts the pairs of all."""
    lines = printed(script, capsys, monkeypatch, "--held-back", "--runs", "4", "--max-load", "1")

    assert [line for line in lines if line.startswith("run ")][-1] == "run 4 of 4, load 0.40"
    assert sum("16M, 4 ranks" in line for line in lines) == 4
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 6
    assert len({line.count("|") for line in table}) == 1
    assert table[-1] == "| 4 | 0.4 | 12 of 12 | 12 of 12 | 6, 6 |"
    assert lines[-1] == "plan: 1.00"


def test_one_run_has_no_table(
    script: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single run prints the same lines without a table."""
    lines = printed(script, capsys, monkeypatch, "--sizes", "1M", "--ranks", "2")

    assert lines[-3:] == [
        "told apart: 2 of 2 pairs as measured; of those that differ by over 10 %: 2 of 2",
        "within the noise: 1 pairs; 1 of them differ by over 10 %",
        "plan: 1.00",
    ]


@pytest.mark.parametrize(("words", "status"), [(("--max-load", "0.3"), 3), (("--runs", "0"), 2)])
def test_what_is_not_run(
    script: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    status: int,
) -> None:
    """A busy machine measures itself, and no runs measure nothing."""
    with pytest.raises(SystemExit) as ended:
        printed(script, capsys, monkeypatch, *words)

    assert ended.value.code == status
    assert capsys.readouterr().out == ""
