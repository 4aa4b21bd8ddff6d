"""The negative control of a run: values that are wrong on purpose are noticed, or the run says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from fsdp_conformance.cases import checks as case_checks
from fsdp_conformance.cases import control
from fsdp_conformance.cases.checks import CaseChecks
from fsdp_conformance.cases.rank import CaseRank
from fsdp_conformance.contract.case import Case
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.training import StepRecord, TrainingHistory
from fsdp_conformance.outcome.records import RankReport
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.selftest import bound_case, run_case
from fsdp_conformance.tests.cases import cheating_engines
from fsdp_conformance.verdict import Verdict
from fsdp_conformance.workload.definition import Regime

pytestmark = pytest.mark.slow

CASE = "R001/fresh-number1-ws2"


def _run(grads: bool = True) -> TrainingHistory:
    values = {"weight": torch.zeros(2, 2), "empty": torch.zeros(0)}
    steps = [
        StepRecord(step=step, losses=[torch.tensor(1.0)] * 2, grads=dict(values) if grads else None, params=values)
        for step in range(2)
    ]
    return TrainingHistory(source="test", rank=0, world_size=1, steps=steps)


@pytest.mark.parametrize("kind", control.KINDS)
def test_one_value_is_wrong(kind: str) -> None:
    """In the last step, and the run itself stays as it is."""
    run = _run()
    wrong = control.wrong_on_purpose(run, kind)

    assert wrong is not None
    assert wrong.steps[0] is run.steps[0]
    before, after = run.steps[1], wrong.steps[1]
    changed = {
        "loss": not torch.equal(after.losses[-1], before.losses[-1]),
        "gradient": not torch.equal(after.grads["weight"], before.grads["weight"]),  # type: ignore[index, arg-type]
        "parameter": not torch.equal(after.params["weight"], before.params["weight"]),
    }
    assert changed == {name: name == kind for name in changed}
    assert not before.params["weight"].any()


def test_gradients_that_are_not_shown_cannot_be_wrong() -> None:
    """An engine need not show them."""
    assert control.wrong_on_purpose(_run(grads=False), "gradient") is None


def test_comparisons_that_see_nothing_are_the_suites_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that such a run says of an engine can be believed."""
    monkeypatch.setattr(case_checks, "parity", lambda run, references: [])
    case = Case(id=CASE, requirements=("R001",), chapter="A", world_size=1, title="It trains.")
    here = CaseRank(
        case=case, rank=0, world_size=1, device_type="cpu", local_rank=0, declared=frozenset(),
        report=RankReport(rank=0),
    )  # fmt: skip
    checks = CaseChecks(
        here,
        references=lambda workload, regime: cast(Any, None),
        examine=lambda error: None,
        observe=lambda name, look: look(),
    )

    with pytest.raises(SuiteError, match=r"negative control: a wrong loss in the last step was not noticed"):
        checks.check_control(_run(), cast(Any, None), Regime())


@pytest.mark.nightly
def test_every_run_has_one() -> None:
    """In a case of the base, with a loss, a gradient and a parameter on each rank."""
    record = run_case(bound_case(CASE), "torch-fsdp2", base=RunSettings(drawn_seed=3))

    assert record.verdict is Verdict.PASS, record.reason
    assert [report.checks[control.CHECK].comparisons for report in record.evidence] == [3, 3]


@pytest.mark.nightly
def test_a_rank_that_does_not_send_it() -> None:
    """It changes what is sent, and so could change anything."""
    engine = f"{Path(cheating_engines.__file__)}:HidesTheControl"
    record = run_case(bound_case(CASE), engine, base=RunSettings(drawn_seed=3))

    assert record.verdict is Verdict.FAIL
    assert "loss that the rank must send: expected a wrong one, got the right one" in record.reason
