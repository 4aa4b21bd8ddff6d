"""The last run of a working directory: where it is, and what failed in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_conformance.contract.profile import profile_of
from fsdp_conformance.errors import UsageError
from fsdp_conformance.report.last_run import last_run, last_run_of, remember, with_last_failed
from fsdp_conformance.report.recorder import Recorder
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.tests.report.evidence import a_case, a_record
from fsdp_conformance.verdict import Verdict

SETTINGS = RunSettings(implementation="mine")


@pytest.fixture(autouse=True)
def _working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ran(verdicts: dict[str, Verdict], *, started: str = "", settings: RunSettings = SETTINGS) -> None:
    """Leave a run as the last one."""
    directory = Path(".fsdp-conformance", "some")
    recorder = Recorder(settings, profile_of("some", [a_case()]), {"name": "mine"}, directory)
    for case, verdict in verdicts.items():
        recorder.start(case, world_size=2)
        recorder.case(a_record(case, verdict))
    if started:
        recorder.start(started, world_size=2)
    recorder.abort()
    remember(directory)


def test_what_failed_or_did_not_finish_is_selected() -> None:
    """Verdicts that need no attention are left out."""
    fine = (Verdict.PASS, Verdict.XFAIL, Verdict.UNSUPPORTED, Verdict.DISABLED, Verdict.NOT_RUN_ENV)
    verdicts = {f"R001/{verdict.lower().replace('_', '-')}-ws2": verdict for verdict in Verdict}
    ran(verdicts, started="R001/cut-ws2")

    expected = [case for case, verdict in verdicts.items() if verdict not in fine]
    assert with_last_failed(SETTINGS).last_failed == (*expected, "R001/cut-ws2")


def test_without_an_earlier_run_there_is_a_message() -> None:
    """It names the file that is missing."""
    assert last_run() is None
    with pytest.raises(UsageError, match=r"needs an earlier run, but \S+last/run\.jsonl does not exist"):
        with_last_failed(SETTINGS)


def test_the_last_run_of_another_implementation_does_not_count() -> None:
    """It counts neither for failures nor for durations."""
    ran({"R001/probe-ws2": Verdict.FAIL})

    with pytest.raises(UsageError, match="needs a run of other, but the last one was of mine"):
        with_last_failed(RunSettings(implementation="other"))
    assert last_run_of(RunSettings(implementation="other")) is None
    assert last_run_of(RunSettings(implementation="mine", device="cuda")) is None
    assert last_run_of(SETTINGS) is not None


def test_a_run_without_failures_leaves_nothing_to_run() -> None:
    """That is not a run of everything."""
    ran({"R001/probe-ws2": Verdict.PASS})

    with pytest.raises(UsageError, match="nothing to run: no case failed in the last run"):
        with_last_failed(SETTINGS)


def test_a_broken_file_gives_no_durations() -> None:
    """An estimate does without; a run must not fail for it."""
    ran({})
    Path(".fsdp-conformance", "last", "run.jsonl").write_text("broken\n", encoding="utf-8")

    assert last_run_of(SETTINGS) is None
