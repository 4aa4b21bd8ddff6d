"""
Run files, profiles and declarations that were made to look better than the run was.

Every forgery below hashes the whole file again and rewrites the footer to match, as a forger would who knows how the
file is made. It must not verify as CERTIFIED.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance import adapters
from fsdp_conformance.adapters.registry import identity
from fsdp_conformance.codec import encode
from fsdp_conformance.contract.minimum import minimum_of
from fsdp_conformance.contract.profile import Profile, load_profile, profile_of, shipped
from fsdp_conformance.judge import Observed, judge, keep_evidence
from fsdp_conformance.outcome.records import REFERENCES, CaseRecord, CheckCount
from fsdp_conformance.report import certificate
from fsdp_conformance.report.certificate import Certificate, certify
from fsdp_conformance.report.recorder import Recorder, version_of
from fsdp_conformance.report.runfile import chained, read
from fsdp_conformance.report.verify import Verification, verify
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.tests.report.certificates import CASES as USUAL
from fsdp_conformance.tests.report.certificates import PARITY, SHARDS, a_profile, certified
from fsdp_conformance.tests.report.evidence import (
    DESCRIBED,
    LOADED,
    a_case,
    a_finding,
    a_record,
    a_report,
    exits,
)
from fsdp_conformance.verdict import Verdict

DEFERRED = "R093/probe-ws2"
CASES = USUAL[:3]
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
        (_other_adapter, f"(its ranks loaded adapter 000000000000, but the header says {LOADED['adapter'][:12]})"),
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


def test_the_counts_of_the_footer(tmp_path: Path, profile: Profile) -> None:
    """They stand in it twice, and both are compared with the lines."""
    path = rewritten(written(tmp_path, profile), lambda lines: lines[-1].update(counts={"PASS": 770}))

    assert verify(path, profile).discrepancies == (
        "counts: the footer says {'PASS': 770} in all, but the lines yield {'PASS': 3}",
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda line: line["exits"][1].update(reported=False), "no report of rank 1 had arrived"),
        (lambda line: line["environment"].update(seed=7), "its seed was 7, but that of the run 20261121"),
        (lambda line: line["environment"].update(num_threads=7), "its num_threads was 7, but that of the run 1"),
        (lambda line: line["environment"].update(start="reused"), "but those of the run are fresh"),
    ],
    ids=["not reported", "seed", "threads", "reused"],
)
def test_ranks_that_this_run_cannot_have_had(
    tmp_path: Path, profile: Profile, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    """The ranks of each record fit the settings of the run."""
    verification = forged(written(tmp_path, profile), profile, lambda lines: change(case_line(lines)))

    assert words in only_reason(verification)


@pytest.mark.parametrize("declared", [{"padding": 99.0}, {"kept_buffers": 1000}, {"alignment": 4096}])
def test_declarations_with_which_no_adapter_is_loaded(
    tmp_path: Path, profile: Profile, declared: dict[str, Any]
) -> None:
    """They loosen what an engine is held to."""
    verification = forged(
        written(tmp_path, profile), profile, lambda lines: lines[0]["implementation"].update(declared)
    )

    assert f"no adapter is loaded that declares this: {next(iter(declared))} must be" in only_reason(verification)


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
    """The sample profile with its flag turned."""
    return replace(load_profile("sample"), certifies=True)


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


# Files that contradict what every run writes.


def rewritten(path: Path, change: Callable[[Lines], None]) -> Path:
    """Change the lines and hash everything again, but leave the footer as it is."""
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        del line["chain"]
    change(lines)
    _write(path, lines)
    return path


def _edited_settings(**changes: Any) -> Callable[[Lines], None]:
    return lambda lines: lines[0]["settings"].update(changes)


def _failure_without_stress(lines: Lines) -> None:
    """Under a stress failure, ranks have no reports, so nothing can be derived from them."""
    lines[0]["settings"]["stress_failure"] = "kill"
    for line in lines:
        if line["type"] == "case":
            line["evidence"] = []


def _all_pids(pid: int | None) -> Callable[[Lines], None]:
    def change(lines: Lines) -> None:
        for line in lines:
            for end in line.get("exits", ()):
                end["pid"] = pid

    return change


def _one_pid(lines: Lines) -> None:
    for end in case_line(lines)["exits"]:
        end["pid"] = 4711


def _starts_last(lines: Lines) -> None:
    starts = [line for line in lines if line["type"] == "start"]
    lines[:] = [line for line in lines[:-1] if line["type"] != "start"] + starts + lines[-1:]


def _starts_first(lines: Lines) -> None:
    starts = [line for line in lines if line["type"] == "start"]
    lines[:] = [lines[0], *starts, *(line for line in lines[1:] if line["type"] != "start")]


def _never_started(lines: Lines) -> None:
    lines[:] = [line for line in lines if line["type"] != "start"]


def _started_twice(lines: Lines) -> None:
    lines.insert(2, dict(lines[1]))


def _started_with_other_ranks(lines: Lines) -> None:
    lines[1]["world_size"] = 8


def _times_backwards(lines: Lines) -> None:
    for end in case_line(lines, DEFERRED)["exits"]:
        end["time"] = 1.0


def _finished_before_it_started(lines: Lines) -> None:
    lines[-1]["finished"] = "1999-01-01T00:00:00+00:00"


def _not_refereed(lines: Lines) -> None:
    case_line(lines)["refereed"] = False


def _no_elements(lines: Lines) -> None:
    line = case_line(lines)
    for report in line["evidence"]:
        report["checks"] = {"gradient parity": {"comparisons": 1, "elements": 0}}
    line |= {"comparisons": 2, "elements": 0}


def _reused(lines: Lines) -> None:
    case_line(lines)["ranks"] = "reused"


def _record_of_another_class(lines: Lines) -> None:
    case_line(lines)["adapter"] = "0" * 64


def _record_of_nothing(lines: Lines) -> None:
    case_line(lines)["adapter"] = ""


def _other_suite(lines: Lines) -> None:
    lines[0]["suite_sha256"] = "5" * 64


def _described(change: Callable[[dict[str, Any]], object]) -> Callable[[Lines], None]:
    """The adapter's description changed everywhere, so that header and records agree."""

    def edit(lines: Lines) -> None:
        described = lines[0]["implementation"]
        change(described)
        described["identity"] = identity(described)
        for line in lines:
            if line["type"] == "case":
                line["adapter"] = described["identity"]
                line["environment"]["adapter"] = described["identity"]

    return edit


def _bundled_code(described: dict[str, Any]) -> None:
    file = Path(adapters.__file__).parent / "vendors/torch_fsdp2.py"
    described |= {"class_name": "TorchFSDP2", "file_sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


def _bundled_version(described: dict[str, Any]) -> None:
    _bundled_code(described)
    described |= {"name": "torch-fsdp2", "version": "99.0"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_failure_without_stress, "no run has such settings: stress_failure is for a stress run: add --stress"),
        (_edited_settings(ranks="ghosts"), "no run has such settings: ranks must be one of processes, simulated"),
        (_edited_settings(num_threads=0), "no run has such settings: num_threads must be at least 1, got 0"),
        (_edited_settings(device="sim"), "the header names two devices: cpu in its environment, sim in its settings"),
        (_edited_settings(implementation="theirs.py"), "the header names two implementations: mine.py in its desc"),
        (_all_pids(1), "its ranks had the process ids 1, 1, which no ranks have"),
        (_all_pids(None), "its ranks had the process ids None, None, which no ranks have"),
        (_one_pid, "its ranks had the process ids 4711, 4711, but each is a process of its own"),
        (_starts_last, "line 2: the verdict on R001/probe-ws2 comes while the case does not run"),
        (_starts_first, "line 3: R093/probe-ws2 starts while its worker still runs R001/probe-ws2"),
        (_never_started, "line 2: the verdict on R001/probe-ws2 comes while the case does not run"),
        (_started_twice, "line 3: R001/probe-ws2 starts a second time"),
        (_started_with_other_ranks, "line 3: R001/probe-ws2 started with 8 ranks and ended with 2"),
        (_times_backwards, "ranks of R093/probe-ws2 ended before those of the case before it"),
        (_finished_before_it_started, "the run finished at 1999-01-01T00:00:00+00:00, before it had started"),
        (_not_refereed, "it was judged by its own ranks, although it has a referee"),
        (_no_elements, "no rank compared an element of anything"),
        (_reused, "its ranks were reused, but those of the run processes"),
        (_record_of_another_class, "it was judged on the adapter 000000000000, but the header names"),
        (_record_of_nothing, "it was judged on the adapter of no name, but the header names"),
        (_other_suite, "another version: this run was made by 2026.11.0 555555555555 of the suite, and only that"),
        (_described(lambda one: one.update(name="reference")), "the adapter is called reference like a bundled one"),
        (_described(_bundled_code), "the adapter is the bundled torch-fsdp2, but is called mine"),
        (_described(_bundled_version), "the version of torch-fsdp2 must be"),
        (lambda lines: lines[0]["implementation"].update(version="2"), "the identity of the adapter does not follow"),
    ],
)
def test_what_no_run_writes_certifies_nothing(
    tmp_path: Path, profile: Profile, change: Callable[[Lines], None], words: str
) -> None:
    """The reasons name what is contradicted."""
    verification = forged(written(tmp_path, profile), profile, change)

    assert verification.certificate.word == "NOT CERTIFIED"
    assert verification.status != 0
    assert words in "\n".join(verification.certificate.reasons)


def test_a_run_of_another_version_can_be_read_and_is_not_verified(tmp_path: Path, profile: Profile) -> None:
    """An honest file of an earlier version does not contradict itself; only this version cannot confirm it."""
    path = rewritten(written(tmp_path, profile), _other_suite)
    path = rewritten(path, lambda lines: lines[0]["environment"].update(novelty="1"))
    verification = verify(path, profile)

    assert (verification.discrepancies, len(verification.run.records)) == ((), 3)
    assert verification.outcome.startswith("not verified: ")
    assert (verification.certificate.certified, verification.status) == (False, 1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda lines: lines[0]["settings"].update(luck=1), "line 1 (header) has unknown keys: `$.settings.luck`"),
        (
            lambda lines: lines[0]["environment"].update(luck=1),
            "line 1 (header) has unknown keys: `$.environment.luck`",
        ),
        (lambda lines: lines[-1]["references"].update(luck=1), "(footer) has unknown keys: `$.references.luck`"),
        (
            lambda lines: lines[-1]["certificate"]["scopes"][0].update(luck=1),
            "(footer) has unknown keys: `$.certificate.scopes[0].luck`",
        ),
        (lambda lines: lines[2]["exits"][0].update(luck=1), "line 3 cannot be read: unknown key `$.exits[0].luck`"),
        (lambda lines: lines[1].update(luck=1), "line 2 cannot be read: unknown key `$.luck`"),
        (lambda lines: lines[2].update(refereed=1), "line 3 cannot be read: Expected `bool`, got `int`"),
        (lambda lines: lines[2].update(seconds=1e308), "line 3 cannot be read: Expected `float` <= 1000000000.0"),
        (lambda lines: lines[2].update(seconds=-4.0), "line 3 cannot be read: Expected `float` >= 0.0"),
        (lambda lines: lines[2]["exits"][0].update(pid=10**30), "line 3 cannot be read: "),
        (lambda lines: lines[2].update(elements=-1), "line 3 cannot be read: Expected `int` >= 0"),
        (lambda lines: lines[2].update(measurements={"absent": 3}), "line 3 cannot be read: the measurement 'absent'"),
        (
            lambda lines: lines[2].update(measurements={"inapplicable": {"a": 1}}),
            "line 3 cannot be read: the measurement 'inapplicable'",
        ),
        (
            lambda lines: lines[2].update(measurements={REFERENCES: {"computed": "x"}}),
            f"line 3 cannot be read: the measurement {REFERENCES!r}",
        ),
    ],
)
def test_a_key_or_a_type_that_no_line_has_is_a_problem_at_any_depth(
    tmp_path: Path, profile: Profile, change: Callable[[Lines], None], problem: str
) -> None:
    """This version has written nothing that it does not know."""
    verification = verify(rewritten(written(tmp_path, profile), change), profile)

    assert problem in "\n".join(verification.discrepancies)
    assert verification.status == 1


def test_a_duplicate_key_is_a_problem_at_any_depth(tmp_path: Path, profile: Profile) -> None:
    """Another reader could take the other value."""
    path = written(tmp_path, profile)
    chain, texts = "fsdp-conformance run file", []
    for text in path.read_text(encoding="utf-8").splitlines():
        body = text[: text.rindex(',"chain"')] + "}"
        body = body.replace('"pid":1000', '"pid":1,"pid":1000')
        chain = chained(chain, body)
        texts.append(f'{body[:-1]},"chain":"{chain}"}}\n')
    path.write_text("".join(texts), encoding="utf-8")

    assert "line 3 cannot be read: duplicate key 'pid'" in verify(path, profile).discrepancies


# Failures that are called something else.


def failing(case: str, *requirements: str) -> CaseRecord:
    """A case that failed for what one of its findings names, with evidence for it if a run keeps any."""
    reports = [a_report(0, *(a_finding(name) for name in requirements)), a_report(1)]
    record = judge(a_case(requirements=[case[:4]]), Observed(reports=reports, exits=exits(2)), RunSettings())
    record.environment, record.adapter, record.refereed = {**LOADED}, LOADED["adapter"], True
    return keep_evidence(record, reports)


ADVICE = "R070/probe-ws2"


def with_advice() -> Profile:
    """The profile, with a case of a recommendation."""
    return a_profile(*CASES, a_case(requirements=["R070"]))


def test_failures_of_mandatory_cases_that_name_a_recommendation_count() -> None:
    """All of them were edited, findings and evidence alike."""
    profile = with_advice()
    edited = [replace_requirement(failing(case, case[:4]), "R070") for case in (PARITY, SHARDS)]
    certificate = certified(*edited, profile=profile)

    assert not certificate.certified
    assert any(reason.startswith("FAIL: R001/probe-ws2, R188/probe-ws2") for reason in certificate.reasons)


def replace_requirement(record: CaseRecord, requirement: str) -> CaseRecord:
    """The record with another requirement in each finding, of its own and of its ranks."""
    record.findings = [replace(finding, requirement=requirement) for finding in record.findings]
    for report in record.evidence:
        report.findings = [replace(finding, requirement=requirement) for finding in report.findings]
    return record


@pytest.mark.parametrize("named", ["R071", "R000", "R001", "R999"])
def test_a_recommendations_case_is_excused_for_what_it_binds_only(named: str) -> None:
    """Another recommendation, a mandatory requirement, or none that exists."""
    certificate = certified(replace_requirement(failing(ADVICE, "R070"), named), profile=with_advice())

    assert not certificate.certified


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda record: record.evidence.clear(), "FAIL without the reports of its ranks"),
        (lambda record: record.evidence[0].findings.clear(), "its evidence yields PASS"),
        (lambda record: setattr(record, "findings", [a_finding("R070", step=7)]), "its findings are not those of its"),
        (lambda record: setattr(record, "refereed", False), "it was judged by its own ranks, although it has a ref"),
    ],
)
def test_the_failure_of_a_recommendation_needs_evidence(change: Callable[[CaseRecord], object], words: str) -> None:
    """It does the implementation good, because a hang or wrong numbers would not be excused."""
    record = failing(ADVICE, "R070")
    assert certified(record, profile=with_advice()).certified
    change(record)

    assert words in only_reason_of(certified(record, profile=with_advice()))


def only_reason_of(certificate: Certificate) -> str:
    """The one reason against it."""
    assert not certificate.certified
    (reason,) = certificate.reasons
    return reason


def test_a_fault_that_the_case_does_not_have_excuses_nothing() -> None:
    """A case without faults always applies."""
    unmet = {"delay of 15 ms before every all_gather on ranks [1]": ["all_gather"]}
    reports = [a_report(rank, unmet=unmet, schedule=["step broadcast 8B int64 [0,1]"]) for rank in range(2)]
    record = judge(a_case(requirements=["R001"]), Observed(reports=reports, exits=exits(2)), RunSettings())
    record.environment, record.adapter, record.refereed = {**LOADED}, LOADED["adapter"], True
    record = keep_evidence(record, reports)

    assert record.verdict is Verdict.UNSUPPORTED
    assert "a fault never struck that the case does not have" in only_reason_of(certified(record))


# Fewer comparisons than the case makes.


def test_a_pass_that_made_fewer_checks_than_the_suites_own_runs_certifies_nothing() -> None:
    """Each missing check is named, and so is one that compared nothing."""
    case = "R001/exact-probe-ws2"
    entry = load_profile("core-2026.11").by_id[case]
    minimum = minimum_of(entry.case())
    assert minimum is not None
    made = {name: CheckCount(comparisons=1, elements=1) for name in minimum.checks}
    profile = Profile(name="core-test", interpretation=1, entries=(entry,))

    def reasons(checks: dict[str, CheckCount]) -> str:
        reports = [a_report(rank, checks=checks) for rank in range(2)]
        counts = {
            name: 2 * sum(getattr(each, name) for each in checks.values()) for name in ("comparisons", "elements")
        }
        record = a_record(case, requirements=list(entry.requirements), evidence=reports, **counts)
        return "\n".join(certified(record, profile=profile, flags=" ".join(entry.needs)).reasons)

    assert reasons(made) == ""
    assert "0 ranks made the check 'loss parity', which 2 ranks must make" in reasons(
        {name: count for name, count in made.items() if name != "loss parity"}
    )
    assert "the check 'loss parity' compared no element" in reasons(
        {**made, "loss parity": CheckCount(comparisons=1, elements=0)}
    )


# Settings.


def test_what_runs_under_unusual_settings_is_stated(tmp_path: Path, profile: Profile) -> None:
    """A reader of the certificate learns of each."""
    unusual = {"smoke": False, "seed": 7, "num_threads": 4, "deadline_scale": 3.0, "simulator": False}
    verification = forged(written(tmp_path, profile), profile, _edited_settings(**unusual))

    assert verification.certificate.remarks == (
        "the adapter was not checked before the run (--no-smoke)",
        "the seed of the ranks: 7, usually 20261121",
        "threads per rank: 4, usually 1",
        "a simulated accelerator for cases that need one (--no-simulator): False, usually True",
        "deadlines were multiplied by 3",
    )
