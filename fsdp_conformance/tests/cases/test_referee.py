"""No engine can change its verdict in its own process: it is judged by one that it cannot reach."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_conformance import run_settings
from fsdp_conformance.cases import controller
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.contract.profile import COMPONENT_CHAPTERS
from fsdp_conformance.explore import case as explore_case
from fsdp_conformance.harness.order import Role
from fsdp_conformance.harness.processes import forkserver
from fsdp_conformance.outcome.records import REFERENCES
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.scenarios.scenario import Scenario
from fsdp_conformance.selftest import bound_case, bound_cases, run_case
from fsdp_conformance.tests.cases import cheating_engines, undecided
from fsdp_conformance.verdict import Verdict

pytestmark = pytest.mark.slow

BASE = RunSettings(device="cpu")
FILE = Path(cheating_engines.__file__)

#: Engine, with the requirement and the words of the first finding, or of the reason.
CHEATS = {
    "Doubles": (Verdict.FAIL, "gradient"),
    "PatchesComparisons": (Verdict.FAIL, "gradient"),
    "DropsFindings": (Verdict.FAIL, "gradient"),
    "ForgesReport": (Verdict.FAIL, "has not shown all of it"),
    "ForgesTheEnd": (Verdict.FAIL, "must show 3 steps of rank"),
    "SendsGarbage": (Verdict.FAIL, "cannot be read"),
    "SendsCode": (Verdict.FAIL, "gradient"),
    "SendsNonsense": (Verdict.FAIL, "the rank sent a message that cannot be read"),
    "SpeaksOfTheMachine": (Verdict.FAIL, "no"),
    "RaisesFromC": (Verdict.FAIL, "no such device"),
    "ShowsWords": (Verdict.FAIL, "as Tensor, got str"),
    "ShowsLittle": (Verdict.FAIL, "must show 3 steps of rank"),
    "SwallowsItsErrors": (Verdict.FAIL, "no such device"),
    "NoSuchDevice": (Verdict.FAIL, "no such device"),
    "NotToday": (Verdict.FAIL, "not today"),
    "LeavesByASkip": (Verdict.FAIL, "74"),
    "BlamesTheReferences": (Verdict.FAIL, "they do"),
    "BlamesTheSuite": (Verdict.FAIL, "not me"),
    "RefusesLate": (Verdict.FAIL, "on second thought"),
    "RefusesOnOneRank": (Verdict.FAIL, "not on this rank"),
    "RaisesSurrogates": (Verdict.FAIL, "a lone surrogate"),
    "ExitsQuietly": (Verdict.CRASH, "exited with code 0"),
    "KillsTheReferee": (Verdict.FAIL, "gradient"),
    "StopsTheReferee": (Verdict.FAIL, "gradient"),
    "LimitsTheReferee": (Verdict.FAIL, "gradient"),
    "ShowsAWordForSeconds": (Verdict.FAIL, "seconds as float, got str"),
    "ShowsNumbersForFaults": (Verdict.FAIL, "as str, got int"),
    "ReportsForAnotherRank": (Verdict.FAIL, "has sent the report of rank 99"),
}


#: Each is like another one in the way that its verdict comes about.
_NIGHTLY = {
    "Doubles", "ReportsForAnotherRank", "ShowsLittle", "LeavesByASkip", "BlamesTheReferences", "BlamesTheSuite",
    "RefusesLate", "ExitsQuietly",
}  # fmt: skip


@pytest.mark.daily(5)
@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=[pytest.mark.nightly] if name in _NIGHTLY else []) for name in CHEATS]
)
def test_no_cheat_changes_the_verdict(engine: str) -> None:
    """Each fails, and the reason is what it did."""
    record = run_case(bound_case("R001/exact-probe-ws2"), f"{FILE}:{engine}", base=BASE)

    verdict, words = CHEATS[engine]
    assert (record.verdict, words in record.reason) == (verdict, True), record.reason


@pytest.mark.parametrize("engine", ["SendsNonsense", "ReportsForAnotherRank"])
def test_what_simulated_ranks_send_is_read_as_warily(engine: str) -> None:
    """They share a process and its pipe, so any of them may have sent it: none of them has a good report."""
    record = run_case(bound_case("R001/exact-probe-ws2"), f"{FILE}:{engine}", base=replace(BASE, ranks="simulated"))

    assert record.verdict is Verdict.FAIL
    assert "the rank sent a message that cannot be read" in record.reason


@pytest.mark.parametrize(
    ("case", "engine", "words"),
    [
        ("R157/gradients-of-inputs-ws2", "DetachesInputs", "gradient of the input"),
        ("R060/behaves-like-the-original-ws2", "LosesAttributes", "module.id: expected mine"),
        pytest.param(
            "R160/exception-reaches-the-caller-forward-ws2",
            "ReplacesExceptions",
            "must be of the user's class",
            # FSDP2's other rank notices only when gloo's timeout has passed.
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_live_objects_are_judged_elsewhere(case: str, engine: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Gradients of a user's tensors, attributes of a wrapped module and exceptions are compared where no engine is: one
    that makes every comparison hold would pass if its ranks judged themselves.
    """
    refereed = run_case(bound_case(case), f"{FILE}:{engine}", base=BASE)
    monkeypatch.setattr(controller, "referee_of", lambda case, order: None)
    alone = run_case(bound_case(case), f"{FILE}:{engine}", base=BASE)

    assert (refereed.verdict, words in refereed.reason) == (Verdict.FAIL, True), refereed.reason
    assert alone.verdict is Verdict.PASS, alone.reason


def test_only_components_have_none() -> None:
    """Every other case is judged where no engine is."""
    live = [
        bound.case.id for bound in bound_cases() if bound.case.live and bound.case.chapter not in COMPONENT_CHAPTERS
    ]

    assert live == []


@pytest.mark.parametrize("references", [pytest.param("off", marks=pytest.mark.nightly), "empty"])
def test_another_adam(references: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """References train with torch's Adam, also where nothing was kept from before."""
    monkeypatch.setenv("FSDP_CONFORMANCE_REFERENCES", "off" if references == "off" else str(tmp_path))

    record = run_case(bound_case("R004/adam-norm-mlp-ws2"), f"{FILE}:PatchesAdam", base=BASE)

    assert record.verdict is Verdict.FAIL, record.reason


@pytest.mark.nightly
def test_two_declarations() -> None:
    """An adapter is judged by the flags that it has declared to the controller."""
    record = run_case(bound_case("R130/written-in-forward-ws2"), f"{FILE}:TwoFaced", base=BASE)

    assert (record.verdict, record.findings[0].check) == (Verdict.FAIL, "initial parity"), record.reason


@pytest.mark.nightly
def test_replicas_behind_shards() -> None:
    """An engine that shows slices of whole copies holds more in its process than it shows."""
    record = run_case(bound_case("R188/it-shards-ws4"), f"{FILE}:HidesReplicas", base=BASE)

    assert (record.verdict, record.findings[0].check) == (Verdict.FAIL, "tensors in the process"), record.reason


@pytest.mark.parametrize("case", ["R001/exact-probe-ws2", "R117/unused-unit-is-resharded-ws2"])
def test_answers_of_unusual_classes(case: str) -> None:
    """They count as what they stand for."""
    record = run_case(bound_case(case), f"{FILE}:AnswersInNumPy", base=BASE)

    assert record.verdict is Verdict.PASS, record.reason


def test_a_correct_engine_that_warns() -> None:
    """FSDP1 does where others refuse. The warning is in its ranks; the referee, which decides, has to see it."""
    record = run_case(bound_case("R055/container-ws2"), "torch-fsdp1", base=BASE)

    assert record.verdict is Verdict.PASS, record.reason


def test_a_correct_engine_that_replaces_functions() -> None:
    """It is not accused."""
    record = run_case(bound_case("R001/exact-probe-ws2"), f"{FILE}:KeepsStockAdam", base=BASE)

    assert record.verdict is Verdict.PASS, record.reason


def test_the_class_of_an_exception() -> None:
    """An `except` of the user's would not catch another class, whatever it is called."""
    case = bound_case("R160/exception-reaches-the-caller-backward-ws2")
    record = run_case(case, f"{FILE}:ReplacesClassesOfExceptions", base=BASE)

    assert record.verdict is Verdict.FAIL
    assert "must be of the user's class" in record.reason


@pytest.mark.nightly
def test_references_that_code_under_test_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of a whole profile takes no reference that another run has left, whatever its hash is."""
    monkeypatch.setenv("FSDP_CONFORMANCE_REFERENCES", str(tmp_path))
    # Referees of a server that has imported modules of other tests would write nothing.
    forkserver.stop_servers()
    case = bound_case("R001/exact-probe-ws2")
    part, whole = replace(BASE, cases=("R001/exact-probe-ws2",)), BASE

    def taken(base: RunSettings) -> int:
        record = run_case(case, "torch-fsdp2", base=base)
        assert record.verdict is Verdict.PASS, record.reason
        counts = record.measurements[REFERENCES]
        return int(counts["shared"] + counts["checked"])

    assert [taken(part), taken(part)] == [0, 1]
    assert [taken(whole), taken(whole)] == [0, 1]
    monkeypatch.setattr(run_settings, "_secret", "that of another run")
    assert [taken(whole), taken(part)] == [0, 1]


@pytest.mark.parametrize(("role", "sees"), [(Role.ALONE, True), (Role.OBSERVED, True), (Role.REFEREE, False)])
def test_a_referee_cannot_touch_the_files_of_ranks(role: Role, *, sees: bool, tmp_path: Path) -> None:
    """It runs a body later than the ranks: what it wrote, they might be reading."""

    class Case:
        _new_directory = None

        def observe(self, name: str, look: object) -> Path:
            return tmp_path

    case = Case()
    vars(case)["role"] = role

    directory = ConformanceTestCase.shared_directory(case)  # type: ignore[arg-type]

    assert directory.is_dir() == sees


def test_ranks_do_not_wait_for_a_referee_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is the suite's at once. The ranks of this case would wait for two hours."""
    monkeypatch.setattr(explore_case, "DrawnCase", undecided.Undecided)

    record = explore_case.run_on(Scenario.of({}), "reference", base=replace(BASE, ranks="simulated"))

    assert (Verdict.ERROR_SUITE, True) == (record.verdict, "the mantissa is used up" in record.reason), record.reason
