"""Tallies: the results of runs, in a small file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_conformance.contract.profile import Profile, profile_of
from fsdp_conformance.errors import RunFileError, UsageError
from fsdp_conformance.report.recorder import Recorder
from fsdp_conformance.report.tally import added, digest_of, tally, tally_from_json
from fsdp_conformance.report.verify import Verification, verify
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.tests.report.evidence import a_case, a_finding, a_record
from fsdp_conformance.verdict import Verdict

PROFILE = profile_of("some", [a_case(), a_case(requirements=("R070",)), a_case(requirements=("R117", "R003"))])

#: What an adapter offers less and more of, by device.
BY_DEVICE = {"declines_on": {"cpu": ["hsdp"]}, "adds_on": {"sim": ["tp"]}}


def ran(
    directory: Path,
    *,
    cases: Sequence[str] = tuple(PROFILE.by_id),
    name: str = "one",
    profile: Profile = PROFILE,
    **verdicts: Verdict,
) -> Verification:
    """A run in which cases have the verdict of their requirement, PASS if nothing is said."""
    described = {"name": name, "version": "1", "capabilities": ["hsdp", "zero3"], **BY_DEVICE}
    run = Recorder(RunSettings(report_dir=str(directory)), profile, described, directory)
    for case in cases:
        entry = profile.by_id[case]
        verdict = verdicts.get(entry.primary, Verdict.PASS)
        findings = [a_finding("R003")] if verdict is Verdict.FAIL else []
        run.start(case, world_size=entry.world_size)
        run.case(a_record(case, verdict, *findings, requirements=list(entry.requirements)))
    run.finish()
    return verify(run.path, profile)


def test_each_case_keeps_its_verdict_and_what_failed(tmp_path: Path) -> None:
    """With what the case asked for, the flags that were declared, and the run."""
    result = tally([ran(tmp_path, R070=Verdict.CRASH, R117=Verdict.FAIL)], PROFILE)

    digests = {case: digest_of(entry) for case, entry in PROFILE.by_id.items()}
    assert {case: shown.words() for case, shown in result.cases.items()} == {
        "R001/probe-ws2": f"PASS {digests['R001/probe-ws2']}",
        "R070/probe-ws2": f"CRASH {digests['R070/probe-ws2']} raises",
        "R117/probe-ws2": f"FAIL {digests['R117/probe-ws2']} silent R003",
    }
    assert len(set(digests.values())) == 3
    assert (result.name, result.version, [run.profile for run in result.runs]) == ("one", "1", ["some"])
    assert (result.declares("cpu"), result.declares("cuda")) == (frozenset({"zero3"}), frozenset({"hsdp", "zero3"}))
    assert result.declares("sim") == frozenset({"hsdp", "zero3", "tp"})


def test_it_comes_back_from_its_file(tmp_path: Path) -> None:
    """All of it; without cases that are gone, if asked."""
    result = tally([ran(tmp_path, R117=Verdict.FAIL)], PROFILE)

    assert tally_from_json(result.to_text(), where="one.json") == result
    assert list(result.without(["R001/probe-ws2", "R999/other-ws2"]).cases) == ["R070/probe-ws2", "R117/probe-ws2"]


def test_its_file_has_one_requirement_a_line(tmp_path: Path) -> None:
    """Hundreds of cases fit on a few screens, and a diff shows the requirements whose verdicts differ."""
    result = tally([ran(tmp_path, R117=Verdict.FAIL)], PROFILE)
    lines = result.to_text().splitlines()
    begin = lines.index('"cases": {') + 1

    rows = [json.loads("{" + line.rstrip(",") + "}") for line in lines[begin:-2]]
    assert [{case.partition("/")[0] for case in row} for row in rows] == [{"R001"}, {"R070"}, {"R117"}]
    assert {case: words for row in rows for case, words in row.items()} == result.to_json()["cases"]


def test_several_runs_make_one_tally(tmp_path: Path) -> None:
    """Parts of a profile, for example; a case in both has to have one verdict."""
    first, second, third = PROFILE.by_id
    parts = [ran(tmp_path / "a", cases=(first, second)), ran(tmp_path / "b", cases=(second, third))]

    assert list(tally(parts, PROFILE).cases) == [first, second, third]
    with pytest.raises(UsageError, match=r"two runs must agree on R070/probe-ws2, got PASS \w+ and HANG \w+ hang \["):
        tally([*parts, ran(tmp_path / "c", cases=(second,), R070=Verdict.HANG)], PROFILE)


@pytest.mark.parametrize(("key", "runs"), [("name", ("one", "two")), ("name", ())])
def test_runs_of_several_engines_are_no_tally(key: str, runs: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"must have the same {key}, got {', '.join(runs) or 'no run'}"):
        tally([ran(tmp_path / name, name=name) for name in runs], PROFILE)


def test_a_later_run_is_added(tmp_path: Path) -> None:
    """For cases that are new; where both show a case, the later one counts. The suite may have grown."""
    first, second, third = PROFILE.by_id
    former = tally([ran(tmp_path / "a", cases=(first, second), R070=Verdict.HANG)], PROFILE)
    later = replace(tally([ran(tmp_path / "b", cases=(second, third))], PROFILE), suite="grown")
    result = added(former, later)

    assert [first, second, third] == list(result.cases)
    assert result.cases[second].verdict is Verdict.PASS
    assert ("grown", 2) == (result.suite, len(result.runs))
    assert tally_from_json(result.to_text(), where="one.json") == result


@pytest.mark.parametrize("key", ["name", "version", "adapter", "torch", "device"])
def test_a_run_of_something_else_is_not_added(key: str, tmp_path: Path) -> None:
    """Its results would be taken for the former engine's."""
    former = tally([ran(tmp_path)], PROFILE)

    with pytest.raises(UsageError, match=rf"{key} must be .*, as in the runs of .* so far, got other"):
        added(former, replace(former, **{key: "other"}))  # type: ignore[arg-type]


def test_an_edited_run_is_refused(tmp_path: Path) -> None:
    """Before anything is kept of it."""
    path = Path(ran(tmp_path, R117=Verdict.FAIL).run.path)
    path.write_text(path.read_text().replace('"FAIL"', '"PASS"'), encoding="utf-8")

    with pytest.raises(RunFileError, match=r"needs runs that verify: .*does not match its hash"):
        tally([verify(path, PROFILE)], PROFILE)


def test_a_run_of_other_cases_is_refused(tmp_path: Path) -> None:
    """The cases of a private profile, or of one that has changed since, may ask for something else now."""
    file = tmp_path / "some.json"
    file.write_text(json.dumps(profile_of("quick-2026.11", [a_case()], only=["R001/probe-ws2"]).to_json()))
    run = Recorder(RunSettings(), profile_of("quick-2026.11", [a_case()]), {"name": "one"}, tmp_path)
    run.finish()
    verification = verify(run.path, profile_of("quick-2026.11", [a_case()]))

    with pytest.raises(RunFileError, match=r"the run must be of quick-2026.11 as it is shipped now \(\w+\), got \w+"):
        tally([verification])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text.replace("FAIL", "PASS"), r"sha256 of the content: expected \w+, got \w+ \[one.json\]"),
        (lambda text: text.replace('"hsdp", ', ""), "sha256 of the content"),
        (lambda text: text.replace("FAIL", "GOOD"), "one.json is not a tally of runs: ValueError: 'GOOD'"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "format must be 1, got 2"),
        (lambda text: text[: len(text) // 2], "one.json is not a tally of runs: JSONDecodeError"),
        (lambda text: "[]", "one.json is not a tally of runs: TypeError"),
        (lambda text: '{"sha256": "0", "format": 1}', "one.json is not a tally of runs: KeyError"),
    ],
)
def test_an_edited_tally_is_refused(edit: object, message: str, tmp_path: Path) -> None:
    text = tally([ran(tmp_path, R117=Verdict.FAIL)], PROFILE).to_text()

    with pytest.raises(UsageError, match=message):
        tally_from_json(edit(text), where="one.json")  # type: ignore[operator]


def test_a_digest_is_of_what_a_case_asks_for() -> None:
    """The title does not count."""
    (plain,) = profile_of("some", [a_case()]).entries
    changed = [
        profile_of("some", [a_case(**change)]).entries[0]
        for change in ({"title": "Other."}, {"needs": ("hsdp",)}, {"requirements": ("R001",)}, {"world_size": 4})
    ]

    assert [digest_of(entry) == digest_of(plain) for entry in changed] == [True, False, False, False]
