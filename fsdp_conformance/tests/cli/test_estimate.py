"""How long a run will take."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_conformance.cli import pace
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
    assert source == "estimated from typical durations"


def test_what_the_last_run_measured_counts_first() -> None:
    """The source says which figures are of which kind."""
    seconds, source = estimate(CASES[:2], last=a_run("R001/probe-ws2", "R001/other-ws2"))

    assert seconds == pytest.approx(START_S + 30 + 4 * SECONDS_PER_RANK["sim"])
    assert source == "1 measured in the last run, 1 estimated from typical durations"
    assert estimate(CASES[:1], last=a_run("R001/probe-ws2")) == (START_S + 30, "measured in the last run")


def test_typical_durations_follow_the_pace_of_the_machine() -> None:
    """By device; what was measured with the same implementation stays."""
    learned = {"cpu": 2.5, "sim": 3.0}

    assert estimate(CASES[:1], pace=learned)[0] == pytest.approx(START_S + 2.5 * 2 * SECONDS_PER_RANK["cpu"])
    assert estimate(CASES, pace=learned)[0] == pytest.approx(
        START_S + 2.5 * 2 * SECONDS_PER_RANK["cpu"] + (3 * 4 + 8) * SECONDS_PER_RANK["sim"]
    )
    assert estimate(CASES[:1], pace=learned, last=a_run("R001/probe-ws2"))[0] == START_S + 30


def test_a_machine_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run decides, a short one changes little, later runs count more, and each device has its own pace."""
    monkeypatch.setenv("FSDP_CONFORMANCE_CACHE", str(tmp_path / "cache"))
    assert pace.known() == {}

    pace.learn([("cpu", 0.5, 5.0), ("sim", 0.5, 0.5)])
    assert 1.0 < pace.known()["cpu"] < 1.5
    pace.learn([("cpu", 1.0, 2.0)] * 200)
    assert pace.known()["cpu"] == pytest.approx(2.0, rel=0.1)
    for _ in range(6):
        pace.learn([("cpu", 1.0, 1.0)] * 200)
    assert pace.known() == {"cpu": pytest.approx(1.0, rel=0.05), "sim": pytest.approx(1.0)}


@pytest.mark.parametrize("text", ["", "[]", '{"cpu": [1]}', '{"cpu": [NaN, 1.0]}', '{"cpu": [-1.0, 1.0]}'])
def test_a_damaged_file_is_as_none(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run writes it again."""
    monkeypatch.setenv("FSDP_CONFORMANCE_CACHE", str(tmp_path))
    (tmp_path / "pace.json").write_text(text, encoding="utf-8")
    assert pace.known() == {}

    pace.learn([("cpu", 100.0, 300.0)])
    assert pace.known()["cpu"] == pytest.approx(2.8, rel=0.1)


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is where the directory should be."""
    (tmp_path / "cache").touch()
    monkeypatch.setenv("FSDP_CONFORMANCE_CACHE", str(tmp_path / "cache"))

    pace.learn([("cpu", 1.0, 1.0)])
    assert pace.known() == {}


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
