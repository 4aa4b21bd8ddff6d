"""Eval, silence and frozen units: what must not be issued."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fsdp_conformance.checks import communication
from fsdp_conformance.checks.result import CheckResult
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.fixtures import frozen
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.tests.checks.schedules import (
    PLAN,
    STAIRCASE,
    collective,
    full_sharding,
    history,
    messages,
    plan_of,
    replicated,
)
from fsdp_conformance.tests.checks.schedules import (
    STAIRCASE_BYTES as BYTES,
)


def evaluated(records: Sequence[CollectiveRecord]) -> CheckResult:
    """R066 on a run that evaluates once."""
    run = history([*full_sharding(STAIRCASE, PLAN), *records])
    run.eval_outputs = [torch.tensor(0.0)]
    return communication.eval_collectives(run, STAIRCASE, requirement="R066")


def test_eval_gathers_once_and_reduces_nothing() -> None:
    """One pass of gathers, or none, is right."""
    gathers = [collective(Op.ALL_GATHER, BYTES, step=1, phase="eval")]

    assert evaluated(gathers).findings == []
    assert (evaluated([]).findings, evaluated([]).count.elements) == ([], 2)


def test_eval_that_gathers_twice_or_reduces_is_reported() -> None:
    """Both are named with the step."""
    gathers = [collective(Op.ALL_GATHER, BYTES, step=1, phase="eval")] * 2
    reduces = [collective(Op.ALL_REDUCE, 280, step=2, phase="eval")]

    assert messages(evaluated(gathers)) == [
        "parameters gathered by 1 evaluations: expected at most 9384 B, got 12512 B; each should be gathered once"
    ]
    assert messages(evaluated(reduces)) == ["reductions in eval: expected 0, got 1; eval all_reduce 280B float32 [0,1]"]
    assert evaluated(reduces).findings[0].step == 2


def test_a_run_without_eval_proves_nothing() -> None:
    """The suite forgot the regime."""
    with pytest.raises(SuiteError, match="eval outputs: expected at least 1, got 0"):
        communication.eval_collectives(history([]), STAIRCASE, requirement="R066")


def test_silence_is_silence_over_one_rank_too() -> None:
    """Set-up may communicate; a collective of training is reported even over a group of one."""
    setup = collective(Op.BARRIER, 0, step=None, phase="setup")
    alone = collective(Op.ALL_GATHER, 280, step=1, group=(0,))

    assert communication.no_collectives(history([setup], world_size=1), requirement="R009").findings == []
    assert messages(communication.no_collectives(history([alone], world_size=1), requirement="R009")) == [
        "collectives in forward: expected 0, got 1; forward all_gather 280B float32 [0]"
    ]


def frozen_run(records: Sequence[CollectiveRecord]) -> CheckResult:
    """R072: frozen units of 336 and 624 bytes with trainable ones of 624, 624 and 156."""
    workload = frozen.frozen_units()
    return communication.frozen_reductions(history(records), workload, plan_of(workload), requirement="R072")


def test_frozen_units_are_not_reduced() -> None:
    """The step has three scatters, or one bucket of 1404 bytes."""
    workload = frozen.frozen_units()

    assert frozen_run(full_sharding(workload, plan_of(workload))).findings == []
    assert frozen_run(replicated(1404)).findings == []


def test_a_frozen_unit_that_is_reduced_is_reported() -> None:
    """By its bytes, and by the count where the engine shows one collective per unit."""
    workload = frozen.frozen_units()
    extra = [collective(Op.REDUCE_SCATTER, 336, step=step, phase="backward") for step in range(3)]
    empty = [collective(Op.REDUCE_SCATTER, 0, step=step, phase="backward") for step in range(3)]
    right = full_sharding(workload, plan_of(workload))

    assert messages(frozen_run([*right, *extra])) == [
        "gradients reduced: expected at most 1624 B, got 1792 B; the trainable units are 2, 6, the root",
        "reduce_scatter: expected 3, got 4; one per trainable unit",
    ]
    assert messages(frozen_run([*right, *empty])) == ["reduce_scatter: expected 3, got 4; one per trainable unit"]
    assert len(frozen_run(replicated(1404 + 336)).findings) == 2


def test_a_workload_without_frozen_units_is_the_suites_mistake() -> None:
    """There is nothing to look for."""
    with pytest.raises(SuiteError, match="frozen units: expected at least 1, got 0"):
        communication.frozen_reductions(history([]), STAIRCASE, PLAN, requirement="R072")
