"""How long a run will take."""

from __future__ import annotations

import pytest

from fsdp_conformance.cli.estimate import SECONDS_PER_RANK, START_S, estimate, in_words
from fsdp_conformance.pytest_plugin.dispatch import Slots
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.tests.report.evidence import a_case, a_record

CASES = [(a_case(), "cpu"), (a_case(world_size=4), "sim"), (a_case(world_size=8), "cuda")]


def a_run(*cases: str) -> RunFile:
    """A run in which each case took 30 s."""
    return RunFile(path="run.jsonl", header={}, records=[a_record(case, seconds=30.0) for case in cases])


def test_without_an_earlier_run_typical_durations_count() -> None:
    """They depend on world size and device; an accelerator that was never measured counts as a simulated one."""
    seconds, source = estimate(CASES)

    assert seconds == pytest.approx(START_S + 2 * SECONDS_PER_RANK["cpu"] + 12 * SECONDS_PER_RANK["sim"])
    assert source == "estimated from typical durations on 2 cores"


def test_what_the_last_run_measured_counts_first() -> None:
    """The source says which figures are of which kind."""
    seconds, source = estimate(CASES[:2], last=a_run("R001/probe-ws2", "R001/other-ws2"))

    assert seconds == pytest.approx(START_S + 30 + 4 * SECONDS_PER_RANK["sim"])
    assert source == "1 measured in the last run, 1 estimated from typical durations"
    assert estimate(CASES[:1], last=a_run("R001/probe-ws2")) == (START_S + 30, "measured in the last run")


def test_workers_share_the_cases() -> None:
    """As many as there are cases, at most."""
    last = a_run("R001/probe-ws2", "R001/probe-ws4")

    assert estimate(CASES[:2], workers=2, last=last)[0] == START_S + 30
    assert estimate(CASES[:2], workers=64, last=last)[0] == START_S + 30


def test_devices_that_ranks_own_are_divided() -> None:
    """Two cases of eight ranks follow one another on eight devices, whatever the workers; not with two slots."""
    cases = [(a_case(id=f"R001/{name}-ws8", world_size=8), "cuda") for name in ("probe", "other")]
    last = a_run("R001/probe-ws8", "R001/other-ws8")
    seconds = [estimate(cases, workers=4, last=last, slots=Slots(8, slots))[0] for slots in (1, 2)]

    assert seconds == [START_S + 60, START_S + 30]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.1, "about 5 s"), (5.2, "about 5 s"), (33, "about 35 s"), (89, "about 1 min 30 s"), (170, "about 3 min")],
)
def test_an_estimate_is_rounded(seconds: float, text: str) -> None:
    """More digits would promise too much."""
    assert in_words(seconds) == text
