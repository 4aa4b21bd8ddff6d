"""`verify`: the certificate derived again from the file, and what does not follow from it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.codec import encode
from fsdp_conformance.contract.profile import Profile, load_profile, profile_of
from fsdp_conformance.errors import RunFileError
from fsdp_conformance.outcome.records import REFERENCES
from fsdp_conformance.report import certificate
from fsdp_conformance.report.recorder import Recorder, version_of
from fsdp_conformance.report.runfile import NAME, chained
from fsdp_conformance.report.verify import verify
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.tests.report.evidence import DESCRIBED, LOADED, a_case, a_finding, a_record
from fsdp_conformance.verdict import Verdict


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> Profile:
    """Two mandatory cases, in a profile that counts as shipped."""
    made = profile_of("core-test", [a_case(requirements=["R001"]), a_case(requirements=["R188"])])
    monkeypatch.setattr(certificate, "shipped", {made.name: made.sha256}.get)
    return made


def settings(directory: Path) -> RunSettings:
    """Those of a run of the adapter."""
    return RunSettings(implementation=DESCRIBED["spec"], report_dir=str(directory))


def a_run(directory: Path, profile: Profile, verdict: Verdict = Verdict.PASS) -> Path:
    """A whole run; `verdict` is that of the first case."""
    run = Recorder(settings(directory), profile, DESCRIBED, directory)
    findings = [a_finding("R001")] if verdict is Verdict.FAIL else []
    loaded = {**LOADED, "torch": version_of("torch")}
    for case, outcome, seen in (("R001/probe-ws2", verdict, findings), ("R188/probe-ws2", Verdict.PASS, [])):
        record = a_record(case, outcome, *seen, environment=loaded)
        run.start(record.case, world_size=2)
        run.case(record)
    run.finish()
    return run.path


def forged(path: Path, **changes: Any) -> None:
    """Change the first case's line and hash the whole file again, as a forger would who knows the format."""
    chain, lines = "fsdp-conformance run file", []
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        del line["chain"]
        if line["type"] == "case" and line["case"] == "R001/probe-ws2":
            line.update(changes)
        body = encode(line)
        chain = chained(chain, body)
        lines.append(f'{body[:-1]},"chain":"{chain}"}}\n')
    path.write_text("".join(lines), encoding="utf-8")


@pytest.mark.parametrize(("verdict", "certified", "status"), [(Verdict.PASS, True, 0), (Verdict.FAIL, False, 1)])
def test_an_honest_run_verifies(
    tmp_path: Path, profile: Profile, verdict: Verdict, certified: bool, status: int
) -> None:
    """Certified or not: the file says what follows from its lines."""
    result = verify(a_run(tmp_path, profile, verdict), profile)

    assert result.discrepancies == ()
    assert (result.certificate.certified, result.status) == (certified, status)


@pytest.mark.parametrize(
    "counted", [{"computed": 2, "shared": 0, "checked": 0}, {"computed": 1, "shared": 3, "checked": 1}]
)
def test_computed_and_shared_references_verify(tmp_path: Path, profile: Profile, counted: dict[str, int]) -> None:
    """Both do; the footer adds them up, as the first rank of each case tells, and is held to it."""
    run = Recorder(settings(tmp_path), profile, DESCRIBED, tmp_path)
    loaded = {**LOADED, "torch": version_of("torch")}
    of_ranks = {"rank 0": counted, "rank 1": {"computed": 9, "shared": 9, "checked": 9}}
    for case, counts in (("R001/probe-ws2", counted), ("R188/probe-ws2", of_ranks)):
        record = a_record(case, environment=loaded, measurements={REFERENCES: counts})
        run.start(record.case, world_size=2)
        run.case(record)
    run.finish()

    result = verify(run.path, profile)
    assert (result.certificate.certified, result.discrepancies) == (True, ())
    assert result.run.footer is not None
    assert result.run.footer["references"] == {name: 2 * count for name, count in counted.items()}
    forged(run.path, measurements={})
    assert [text.split(":")[0] for text in verify(run.path, profile).discrepancies] == ["references"]


def test_a_verdict_that_was_edited_does_not_verify(tmp_path: Path, profile: Profile) -> None:
    """The line's hash is another, and the footer contradicts what is derived."""
    path = a_run(tmp_path, profile, Verdict.FAIL)
    path.write_text(path.read_text(encoding="utf-8").replace('"verdict":"FAIL"', '"verdict":"PASS"'), encoding="utf-8")
    result = verify(path, profile)

    assert result.discrepancies[0] == "line 3 (case) does not match its hash: the file was edited"
    assert result.status == 1


def test_a_verdict_that_was_edited_and_hashed_again_contradicts_the_footer(tmp_path: Path, profile: Profile) -> None:
    """The footer was derived from what the run had seen."""
    path = a_run(tmp_path, profile, Verdict.FAIL)
    forged(path, verdict="PASS", findings=[], reason="")
    result = verify(path, profile)

    assert result.run.problems == []
    assert any(text.startswith("counts: the footer says") for text in result.discrepancies)
    assert "PASS without the reports of its ranks" in result.certificate.reasons[0]
    assert result.status == 1


def test_a_footer_that_promises_more_does_not_verify(tmp_path: Path, profile: Profile) -> None:
    """The footer is compared with the derived certificate."""
    path = a_run(tmp_path, profile)
    forged(path, verdict="HANG")
    result = verify(path, profile)

    assert any("certified: the footer says True, but the lines yield False" in text for text in result.discrepancies)


def test_an_aborted_run_does_not_verify(tmp_path: Path, profile: Profile) -> None:
    """There is no footer to compare with; what was judged can be read."""
    path = a_run(tmp_path, profile)
    path.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]), encoding="utf-8")
    result = verify(path, profile)

    assert result.discrepancies == ("the run did not finish: 2 of 2 cases have a verdict. `run --resume` continues it",)
    assert (len(result.run.records), result.status) == (2, 1)


def test_another_profile_than_the_runs_does_not_verify(tmp_path: Path, profile: Profile) -> None:
    """A certificate holds for its own cases."""
    other = profile_of("core-test", [a_case(requirements=["R001"])])

    assert verify(a_run(tmp_path, profile), other).discrepancies != ()


def test_a_run_file_names_no_profile_that_is_opened(tmp_path: Path, profile: Profile) -> None:
    """A profile that is not shipped is given; what the run says of its path is not followed, even if it exists."""
    written = tmp_path / "mine.json"
    written.write_text(json.dumps(profile.to_json()), encoding="utf-8")
    named = replace(settings(tmp_path), profile=str(written))
    run = Recorder(named, profile, DESCRIBED, tmp_path / "a")
    run.finish()
    path = Recorder(named, replace(profile, name=str(written)), DESCRIBED, tmp_path / "b")
    path.finish()

    assert verify(run.path, load_profile(str(written))).profile == profile
    for each in (run.path, path.path):
        with pytest.raises(
            RunFileError, match=r"is not shipped with the suite: give its file with --profile FILE.json"
        ):
            verify(each)


def test_a_run_of_a_renamed_profile_says_how_to_read_it(tmp_path: Path, profile: Profile) -> None:
    """The error has the new name."""
    run = Recorder(settings(tmp_path), replace(profile, name="smoke"), DESCRIBED, tmp_path)
    run.finish()

    with pytest.raises(RunFileError, match="called sample now: to read it, add --profile sample"):
        verify(run.path)


def test_what_is_no_run_file_is_refused(tmp_path: Path) -> None:
    """The error has its path."""
    with pytest.raises(RunFileError, match=NAME):
        verify(tmp_path)


@pytest.mark.slow
def test_verifying_needs_no_torch(tmp_path: Path, profile: Profile) -> None:
    """It runs where torch cannot be imported."""
    (tmp_path / "core.json").write_text(json.dumps(profile.to_json()), encoding="utf-8")
    path = a_run(tmp_path / "run", profile)
    code = (
        "import sys; sys.modules['torch'] = None; from pathlib import Path; "
        "from fsdp_conformance.contract.profile import load_profile; "
        "from fsdp_conformance.report.verify import verify; "
        "print(verify(Path(sys.argv[1]), load_profile(sys.argv[2])).certificate.word)"
    )
    command = [sys.executable, "-c", code, str(path), str(tmp_path / "core.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)

    assert done.stdout.strip() == "PRIVATE RUN"
