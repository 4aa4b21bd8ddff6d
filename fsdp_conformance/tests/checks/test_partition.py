"""The sharding witness: real figures of sharded engines pass, replicated training and its disguises do not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fsdp_conformance.checks.partition import degree_used, process_witness, shard_group_size, sharding_witness, share
from fsdp_conformance.checks.result import CheckResult
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.outcome.records import RankReport
from fsdp_conformance.plan import Plan, Sharding
from fsdp_conformance.tests.checks.schedules import (
    STAIRCASE,
    STAIRCASE_BYTES,
    collective,
    history,
    plan_of,
    replicated,
)

#: 1200 bytes: 30 rows of 10 floats, even over 2, 3 and 5 ranks.
FULL = 1200
GATHERED = [
    collective(op, FULL, step=step, phase=phase)
    for step in range(3)
    for op, phase in ((Op.ALL_GATHER, "forward"), (Op.REDUCE_SCATTER, "backward"))
]


def run(
    params: int, grads: int, optim: int, *, records: Sequence[CollectiveRecord] = GATHERED, world_size: int = 2
) -> TrainingHistory:
    """A run that holds so many of 1200 bytes of each kind."""
    held = history(records, world_size=world_size)
    held.initial_params = {"weight": torch.zeros(30, 10)}
    held.held_bytes = {"params": params, "grads": grads, "optim": optim}
    held.shown_bytes = dict(held.held_bytes)
    held.full_bytes = {"params": FULL, "grads": FULL, "optim": FULL}
    return held


def witness(
    held: TrainingHistory, sharding: Sharding = Sharding.DEFAULT, *, world_size: int = 2, replicas: int = 1
) -> CheckResult:
    """With 15 % padding."""
    plan = Plan(sharding=sharding, replicas=replicas)
    return sharding_witness(held, plan, world_size=world_size, padding=0.15)


def findings(result: CheckResult) -> list[tuple[str, str]]:
    """Requirement, and what was seen of what."""
    return [(finding.requirement, f"{finding.message.split(':')[0]}: {finding.got}") for finding in result.findings]


@pytest.mark.parametrize(
    ("params", "grads", "optim"),
    [
        pytest.param(600, 600, 600, id="everything sharded"),
        pytest.param(1200, 600, 600, id="parameters whole"),
        pytest.param(1200, 1200, 600, id="optimizer state alone"),
        pytest.param(1200, 1200, 636, id="whole parameters dealt out"),
        pytest.param(0, 0, 600, id="modules emptied"),
        pytest.param(0, 0, 720, id="chunks padded"),
    ],
)
def test_every_kind_of_sharding_passes_as_a_default(params: int, grads: int, optim: int) -> None:
    """Fractions measured on real engines at 2 ranks: 0.50 to 0.60 of the optimizer state."""
    assert findings(witness(run(params, grads, optim))) == []


def test_replicated_training_fails_by_bytes() -> None:
    """DDP holds everything; parity would never notice."""
    result = witness(run(FULL, FULL, FULL, records=replicated(FULL)))

    assert findings(result) == [("R188", "optimizer state held: 1200 B")]
    assert result.findings[0].message == (
        "optimizer state held: expected about 600 B, at most 900 B, got 1200 B; "
        "1.000 of 1200 B, which is sharded over 2 ranks"
    )
    assert result.findings[0].likely == "replicated training: every rank holds the whole"


def test_replicated_training_that_talks_fails_by_bytes() -> None:
    """Gathers for show do not make a shard."""
    assert findings(witness(run(FULL, FULL, FULL))) == [("R188", "optimizer state held: 1200 B")]


def test_an_adapter_that_shows_nothing_fails() -> None:
    """No optimizer state at all is not a shard of it."""
    assert findings(witness(run(600, 600, 0))) == [("R188", "optimizer state held: 0 B")]


@pytest.mark.parametrize("kind", ["params", "grads"])
def test_views_of_a_whole_are_no_shards(kind: str) -> None:
    """An engine that shows shards by default holds shards: bytes of storage count, not those of the views."""
    views = run(600, 600, 600)
    views.held_bytes[kind] = FULL
    result = witness(views)

    assert findings(result) == [("R188", {"params": "parameters", "grads": "gradients"}[kind] + " held: 1200 B")]
    assert result.findings[0].likely == "the shards, of 600 B, are views of whole tensors, so nothing is freed"


@pytest.mark.parametrize("optim", [0, 30, FULL])
def test_whole_tensors_may_be_dealt_out(optim: int) -> None:
    """However unevenly, if all ranks together hold the model once: one rank may have everything, or nothing."""
    held = run(optim, optim, optim)
    total = dict.fromkeys(held.held_bytes, FULL)

    result = sharding_witness(held, Plan(sharding=Sharding.FULL), world_size=2, padding=0.15, total=total)

    assert findings(result) == []
    assert result.notes[0] == "parameters of all ranks: 1200 B, at most 1380 B, however they are distributed"


def test_more_than_one_model_is_not_dealt_out() -> None:
    """A rank with everything beside ranks with shards holds what it should not."""
    held = run(FULL, FULL, FULL)
    total = dict.fromkeys(held.held_bytes, FULL + 600)

    result = sharding_witness(held, Plan(sharding=Sharding.FULL), world_size=2, padding=0.15, total=total)

    assert {requirement for requirement, _ in findings(result)} == {"R188", "R033"}


def test_replicas_of_a_hybrid_plan_are_dealt_out_once_each() -> None:
    """Two replicas hold the model twice."""
    held = run(FULL, FULL, FULL, world_size=4)
    plan = Plan(sharding=Sharding.HYBRID, replicas=2)

    for copies, right in ((2, True), (3, False)):
        total = dict.fromkeys(held.held_bytes, copies * FULL)
        result = sharding_witness(held, plan, world_size=4, padding=0.15, total=total)
        assert (findings(result) == []) is right


@pytest.mark.parametrize(("held", "fails"), [(2 * FULL + 900, False), (2 * FULL + 901, True)])
def test_tensors_in_the_process(held: int, fails: bool) -> None:
    """Two copies of the parameters may be kept for the next step, and little more than a shard of the state."""
    result = process_witness(held, run(600, 600, 600), Plan(), world_size=2)

    assert [finding.requirement for finding in result.findings] == ["R188"] * fails


def degree(sharding: Sharding, held: tuple[int, int, int], gathers: int, *, regathers: bool = True) -> CheckResult:
    """R005 on the staircase, whose parameters are gathered so many times in a step."""
    records = [
        collective(Op.ALL_GATHER, STAIRCASE_BYTES, step=step, phase=phase)
        for step in range(3)
        for phase in ("forward", "backward")[:gathers]
    ]
    history = run(*held, records=records)
    return degree_used(
        history, STAIRCASE, plan_of(STAIRCASE, sharding), world_size=2, regathers=regathers, requirement="R005"
    )


@pytest.mark.parametrize(
    ("sharding", "held", "gathers"),
    [
        (Sharding.FULL, (600, 600, 600), 2),
        (Sharding.GRAD_OPTIM, (1200, 600, 600), 1),
        (Sharding.OPTIM, (1200, 1200, 600), 1),
        (Sharding.NONE, (1200, 1200, 1200), 0),
    ],
)
def test_each_degree_is_told_from_the_others(sharding: Sharding, held: tuple[int, int, int], gathers: int) -> None:
    """Neither one gather more or less, nor what a lower degree holds, passes for the degree."""
    assert findings(degree(sharding, held, gathers)) == []
    for other in {0, 1, 2} - {gathers}:
        assert findings(degree(sharding, held, other)) == [
            ("R005", f"parameters gathered in the step: {other * STAIRCASE_BYTES} B")
        ]
    if sharding is not Sharding.NONE:
        assert ("R005", "optimizer state held: 1200 B") in findings(degree(sharding, (1200, 1200, 1200), gathers))
    else:
        assert findings(degree(sharding, (600, 1200, 1200), 0)) == [("R005", "parameters held: 600 B")]


def test_an_engine_that_promises_no_resharding_may_keep_parameters() -> None:
    """Under full sharding, too, one gather in a step is enough then."""
    assert findings(degree(Sharding.FULL, (600, 600, 600), 1, regathers=False)) == []


@pytest.mark.parametrize(
    ("sharding", "right", "wrong", "expected"),
    [
        (Sharding.FULL, (600, 600, 600), (1200, 600, 600), "parameters held: 1200 B"),
        (Sharding.GRAD_OPTIM, (1200, 600, 600), (1200, 1200, 600), "gradients held: 1200 B"),
        (Sharding.OPTIM, (1200, 1200, 600), (1200, 1200, 1200), "optimizer state held: 1200 B"),
    ],
)
def test_a_degree_must_show(
    sharding: Sharding, right: tuple[int, int, int], wrong: tuple[int, int, int], expected: str
) -> None:
    """Everything that the plan shards is sharded; one degree less fails."""
    assert findings(witness(run(*right), sharding)) == []
    assert findings(witness(run(*wrong), sharding))[0] == ("R188", expected)


def test_a_shard_with_too_much_padding_is_another_requirement() -> None:
    """Parameters of 0.6 are sharded, but above a shard with 15 % padding: 690 of 1200."""
    assert findings(witness(run(720, 600, 600), Sharding.FULL)) == [("R033", "parameters held: 720 B")]
    assert findings(witness(run(690, 600, 600), Sharding.FULL)) == []
    assert findings(witness(run(720, 600, 600))) == [("R033", "parameters held: 720 B")]


def test_uneven_rows_allow_for_themselves() -> None:
    """3 rows over 2 ranks are 2 and 1: two thirds is the largest shard, one third the smallest."""
    held = run(800, 800, 800)
    held.initial_params = {"weight": torch.zeros(3, 100)}
    shares = share(held, Plan(), 2)

    assert (shares.largest, shares.smallest) == (2 / 3, 1 / 3)
    assert findings(witness(held, Sharding.FULL)) == []


def test_local_units_are_whole() -> None:
    """An expert of half the bytes is held in full: three quarters of the model."""
    held = run(900, 900, 900)
    held.initial_params = {"shared": torch.zeros(10, 15), "expert.weight": torch.zeros(10, 15)}
    plan = Plan(sharding=Sharding.FULL, local_units=("expert",))

    assert findings(sharding_witness(held, plan, world_size=2, padding=0.0)) == []
    assert len(sharding_witness(held, Plan(sharding=Sharding.FULL), world_size=2, padding=0.0).findings) == 1


def test_hybrid_shards_over_its_group() -> None:
    """4 ranks in 2 replicas hold half; a quarter is less and passes, the whole does not."""
    records = [
        collective(op, FULL, step=2, phase=phase, group=(0, 1))
        for op, phase in ((Op.ALL_GATHER, "forward"), (Op.REDUCE_SCATTER, "backward"))
    ]
    half, whole = (run(n, n, n, records=records, world_size=4) for n in (600, 1200))

    assert findings(witness(half, Sharding.HYBRID, world_size=4, replicas=2)) == []
    assert len(witness(whole, Sharding.HYBRID, world_size=4, replicas=2).findings) == 4


def test_a_hybrid_default_is_known_by_its_gathers() -> None:
    """An engine whose default is hybrid gathers over smaller groups than the world."""
    records = [
        collective(op, FULL, step=2, phase=phase, group=(0, 1))
        for op, phase in ((Op.ALL_GATHER, "forward"), (Op.REDUCE_SCATTER, "backward"))
    ]
    held = run(600, 600, 600, records=records, world_size=4)

    assert shard_group_size(held, Plan(), world_size=4) == 2
    assert findings(witness(held, world_size=4)) == []


def test_no_sharding_is_whole() -> None:
    """Without sharding, each rank holds all parameters."""
    right, shard = (witness(run(params, FULL, FULL), Sharding.NONE) for params in (FULL, 600))

    assert (findings(right), right.notes) == ([], ["sharding=none: every rank holds the whole"])
    assert findings(shard) == [("R188", "parameters held: 600 B")]


def test_one_rank_has_nothing_to_show() -> None:
    """At world size 1 the whole is a shard; something is compared, so the result counts."""
    held = run(FULL, FULL, FULL, records=[], world_size=1)
    result = witness(held, world_size=1)
    report = RankReport(rank=0)
    result.into(report)

    assert findings(result) == []
    assert report.inconclusive is None
    assert report.notes == ["shard group of one rank (world size 1): the shard is the whole and shows nothing"]


def test_a_stateless_optimizer_shows_nothing() -> None:
    """Plain SGD without momentum has no state; a note is added."""
    held = run(600, 600, 0)
    held.full_bytes["optim"] = 0
    result = witness(held)

    assert findings(result) == []
    assert result.notes == ["an unsharded run holds no optimizer state, so they cannot show sharding"]


def test_a_history_without_bytes_is_the_suites_mistake() -> None:
    """Nothing was weighed."""
    with pytest.raises(SuiteError, match=r"held_bytes and full_bytes must be recorded"):
        witness(history(GATHERED))


def test_figures_are_reported() -> None:
    """Held and full bytes, and the last step's traffic by op."""
    measured = witness(run(600, 600, 600)).measurements

    assert measured["bytes held"]["optim"] == {"held": 600, "full": 1200}
    assert measured["bytes on the wire in the last step"] == {"all_gather": 1200, "reduce_scatter": 1200}
