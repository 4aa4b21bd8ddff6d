"""
Run files, profiles and declarations that were made to look better than the run was.

Every forgery below hashes the whole file again and rewrites the footer to match, as a forger would who knows how the
file is made. It must not verify as CERTIFIED.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.adapters.registry import identity
from fsdp_conformance.codec import encode
from fsdp_conformance.contract.profile import Profile, load_profile, profile_of, shipped
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report import certificate
from fsdp_conformance.report.certificate import certify
from fsdp_conformance.report.recorder import Recorder, version_of
from fsdp_conformance.report.runfile import chained, read
from fsdp_conformance.report.verify import Verification, verify
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.tests.report.evidence import DESCRIBED, LOADED, a_case, a_record
from fsdp_conformance.verdict import Verdict

PARITY, SHARDS, DEFERRED = "R001/probe-ws2", "R188/probe-ws2", "R093/probe-ws2"
CASES = (
    a_case(requirements=["R001"]),
    a_case(requirements=["R188"]),
    a_case(requirements=["R093"], needs=("no_sync",)),
)
Lines = list[dict[str, Any]]


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> Profile:
    """A profile that counts as shipped."""
    made = profile_of("core-test", CASES)
    monkeypatch.setattr(certificate, "shipped", {made.name: made.sha256}.get)
    return made


def written(directory: Path, profile: Profile) -> Path:
    """An honest run in which everything passed."""
    settings = RunSettings(implementation=DESCRIBED["spec"], profile=profile.name, report_dir=str(directory))
    run = Recorder(settings, profile, DESCRIBED, directory)
    for entry in profile.entries:
        loaded = {**LOADED, "torch": version_of("torch")}
        run.start(entry.id, world_size=2)
        run.case(a_record(entry.id, requirements=list(entry.requirements), environment=loaded))
    run.finish()
    return run.path


def forged(path: Path, profile: Profile, change: Callable[[Lines], None]) -> Verification:
    """Change the lines, derive the footer from them, hash everything again, and verify the result."""
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        del line["chain"]
    change(lines)
    _write(path, lines)
    lines[-1]["certificate"] = certify(read(path), profile).to_json()
    lines[-1]["counts"] = lines[-1]["certificate"]["counts"]
    _write(path, lines)
    return verify(path, profile)


def _write(path: Path, lines: Lines) -> None:
    chain, texts = "fsdp-conformance run file", []
    for line in lines:
        body = encode(line)
        chain = chained(chain, body)
        texts.append(f'{body[:-1]},"chain":"{chain}"}}\n')
    path.write_text("".join(texts), encoding="utf-8")


def case_line(lines: Lines, case: str = PARITY) -> dict[str, Any]:
    """The line with the verdict on a case."""
    return next(line for line in lines if line["type"] == "case" and line["case"] == case)


def only_reason(verification: Verification) -> str:
    """Why the forged file certifies nothing. The file as such is intact."""
    assert verification.run.problems == []
    assert verification.certificate.word == "NOT CERTIFIED"
    assert verification.status != 0
    (reason,) = verification.certificate.reasons
    return reason


def test_the_honest_run_is_certified(tmp_path: Path, profile: Profile) -> None:
    """The control: hashing again changes nothing."""
    verification = forged(written(tmp_path, profile), profile, lambda lines: None)

    assert (verification.certificate.word, verification.discrepancies, verification.status) == ("CERTIFIED", (), 0)


def _findings(lines: Lines) -> None:
    case_line(lines)["findings"] = [
        {"requirement": "R003", "check": "gradient parity", "message": f"gradient {number}"} for number in range(40)
    ]


def _consequences(lines: Lines) -> None:
    case_line(lines)["consequences"] = ["rank 1 lost a peer"]


def _signal(lines: Lines) -> None:
    for end in case_line(lines)["exits"]:
        end["exitcode"] = -11


def _died_early(lines: Lines) -> None:
    line = case_line(lines)
    line["exits"][1] |= {"exitcode": -11, "reported": False}
    line["evidence"] = line["evidence"][:1]


def _terminated(lines: Lines) -> None:
    case_line(lines)["exits"][1] |= {"exitcode": -9, "ended_by_controller": True}


def _raised(lines: Lines) -> None:
    case_line(lines)["evidence"][1]["error"] = {
        "kind": "builtins.RuntimeError",
        "message": "boom",
        "traceback": "",
        "blame": "implementation",
        "time": 1.0,
    }


def _no_evidence(lines: Lines) -> None:
    case_line(lines)["evidence"] = []


def _one_rank(lines: Lines) -> None:
    del case_line(lines)["evidence"][1]


def _same_rank_twice(lines: Lines) -> None:
    case_line(lines)["evidence"].append(dict(case_line(lines)["evidence"][0]))


def _no_exits(lines: Lines) -> None:
    case_line(lines)["exits"] = []


def _compared_nothing(lines: Lines) -> None:
    line = case_line(lines)
    line["evidence"][1]["checks"]["gradient parity"] = {"comparisons": 0, "elements": 0}
    line |= {"comparisons": 4, "elements": 40}


def _inflated(lines: Lines) -> None:
    case_line(lines)["comparisons"] = 4000


def _digests(lines: Lines) -> None:
    for rank, report in enumerate(case_line(lines)["evidence"]):
        report["digests"] = {"params step 0 0.weight": f"{rank}" * 64}


def _not_run(lines: Lines) -> None:
    case_line(lines)["evidence"][0]["not_run"] = "no device"


def _inconclusive(lines: Lines) -> None:
    case_line(lines)["evidence"][0]["inconclusive"] = "the references disagree"


def _other_adapter(lines: Lines) -> None:
    case_line(lines)["environment"]["adapter"] = "0" * 64


def _other_torch(lines: Lines) -> None:
    lines[0]["environment"]["torch"] = "9.9.0"


def _elsewhere(lines: Lines) -> None:
    case_line(lines)["device"] = "sim"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_findings, "PASS with 40 findings"),
        (_consequences, "PASS with 1 finding"),
        (_signal, "rank 0 was killed by SIGSEGV at shutdown, after it had reported"),
        (_died_early, "its evidence yields CRASH"),
        (_terminated, "rank 1 did not shut down after it had reported and was terminated"),
        (_raised, "its evidence yields FAIL"),
        (_no_evidence, "(PASS without the reports of its ranks)"),
        (_one_rank, "its evidence yields CRASH"),
        (_same_rank_twice, "reports of ranks [0, 0, 1]"),
        (_no_exits, "its evidence yields ERROR_SUITE: expected 2 reports and 2 exits"),
        (_compared_nothing, "its evidence yields ERROR_SUITE: rank 1 made no comparison"),
        (_inflated, "stated 4000 comparisons, but its ranks made 8"),
        (_digests, "its evidence yields FAIL"),
        (_not_run, "its evidence yields ERROR_SUITE: ranks disagree on whether to run"),
        (_inconclusive, "its evidence yields INCONCLUSIVE"),
        (_other_adapter, f"(its ranks loaded adapter 000000000000, the header says {LOADED['adapter'][:12]})"),
        (_other_torch, "the header says 9.9.0"),
        (_elsewhere, "ran on sim, but the run sends the case to cpu"),
    ],
)
def test_a_record_that_contradicts_itself_certifies_nothing(
    tmp_path: Path, profile: Profile, change: Callable[[Lines], None], words: str
) -> None:
    """The verdict is derived from the evidence."""
    assert words in only_reason(forged(written(tmp_path, profile), profile, change))


def test_a_failure_cannot_become_a_decline(tmp_path: Path, profile: Profile) -> None:
    """The flag is declared, so the extension is not absent, and not granted either."""

    def change(lines: Lines) -> None:
        case_line(lines, DEFERRED).update(verdict="UNSUPPORTED", evidence=[], comparisons=0, elements=0)

    verification = forged(written(tmp_path, profile), profile, change)
    (extension,) = verification.certificate.extensions

    assert extension.state == "not judged"


def test_a_flag_that_is_taken_back_after_the_run_grants_nothing(tmp_path: Path, profile: Profile) -> None:
    """A PASS without the flags it needs."""
    verification = forged(
        written(tmp_path, profile), profile, lambda lines: lines[0]["implementation"].update(capabilities=[])
    )
    (extension,) = verification.certificate.extensions

    assert extension.state == "not judged"


@pytest.mark.parametrize("key", ["suite", "suite_sha256", "implementation", "environment"])
def test_a_header_that_names_nothing_certifies_nothing(tmp_path: Path, profile: Profile, key: str) -> None:
    """A header without versions."""
    verification = forged(written(tmp_path, profile), profile, lambda lines: lines[0].pop(key))

    assert verification.certificate.word == "NOT CERTIFIED"
    assert verification.status != 0


def test_a_footer_that_grants_nothing_is_answered(tmp_path: Path, profile: Profile) -> None:
    """Less than the lines show is as wrong as more."""
    path = written(tmp_path, profile)
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        del line["chain"]
    lines[-1]["certificate"]["scopes"] = []
    _write(path, lines)

    assert verify(path, profile).discrepancies == ("scopes: the footer grants none, but the lines accumulation, base",)


def test_another_engines_file_under_a_new_name(tmp_path: Path, profile: Profile) -> None:
    """The ranks of every case say which adapter they had loaded."""

    def change(lines: Lines) -> None:
        described = lines[0]["implementation"]
        described.update(name="theirs", source_sha256="1" * 64)
        described["identity"] = identity(described)

    assert "its ranks loaded adapter" in only_reason(forged(written(tmp_path, profile), profile, change))


def test_a_footer_cannot_grant_more_than_the_lines(tmp_path: Path, profile: Profile) -> None:
    """An extension is added to it."""
    path = written(tmp_path, profile)
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        del line["chain"]
    extra = {"names": ["offload"], "state": "passed", "cases": 1, "passed": 1, "example": ""}
    lines[-1]["certificate"]["scopes"].append(extra)
    _write(path, lines)

    assert verify(path, profile).discrepancies == (
        "scopes: the footer grants accumulation, base, offload, but the lines accumulation, base",
    )


# Profiles.


def _one_case() -> Profile:
    """The easiest case of the shipped profile, under its name."""
    whole = load_profile("core-2026.11")
    return replace(whole, entries=whole.entries[:1])


def _everything_is_an_extension() -> Profile:
    """The shipped profile with nothing in its base but one case."""
    whole = load_profile("core-2026.11")
    moved = [replace(entry, scope=("advice",)) for entry in whole.entries[1:]]
    return replace(whole, entries=(whole.entries[0], *moved))


def _selection_that_certifies() -> Profile:
    """The smoke profile with its flag turned."""
    return replace(load_profile("smoke"), certifies=True)


@pytest.mark.slow
@pytest.mark.parametrize("make", [_one_case, _everything_is_an_extension, _selection_that_certifies])
def test_a_profile_of_ones_own_certifies_nothing(tmp_path: Path, make: Callable[[], Profile]) -> None:
    """Whatever name it bears, in a run and in `verify`, from a file and from memory."""
    own = make()
    assert shipped(own.name) not in (None, own.sha256)
    file = tmp_path / "own.json"
    file.write_text(json.dumps(own.to_json()), encoding="utf-8")
    run = Recorder(RunSettings(profile=str(file)), load_profile(str(file)), DESCRIBED, tmp_path / "run")
    for entry in own.entries:
        run.start(entry.id, world_size=entry.world_size)
        run.case(_passed(entry.id, list(entry.requirements)))
    assert run.finish().word == "PRIVATE RUN"
    verification = verify(run.path, load_profile(str(file)))

    assert (verification.certificate.word, verification.certificate.certified) == ("PRIVATE RUN", False)
    assert verification.status != 0


def _passed(case: str, requirements: list[str]) -> CaseRecord:
    return a_record(case, Verdict.PASS, requirements=requirements)
