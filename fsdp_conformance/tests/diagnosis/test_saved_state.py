"""The cause of a wrong state: named if the values show it, and not for values that only look alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_conformance.checks import checkpoint
from fsdp_conformance.checks.result import CheckResult
from fsdp_conformance.diagnosis.headline import causes_in, most_telling
from fsdp_conformance.diagnosis.optimizer_steps import Moment, NextStep, built_state, with_settings, with_state
from fsdp_conformance.diagnosis.saved_state import MODEL, SavedState
from fsdp_conformance.fixtures import probes, recipes, resumable
from fsdp_conformance.history.training import StepRecord, Tensors, TrainingHistory
from fsdp_conformance.references.plain_training import PlainState, plain_training

WORLD_SIZE = 2
#: Steps before the save.
SAVED = 3


@cache
def _moment(optimizer: str) -> Moment:
    workload = resumable.grouped() if optimizer == "groups" else probes.rank_coded()
    states = plain_training(workload, (WORLD_SIZE,) * (SAVED + 2), optimizer=optimizer)
    other = recipes.with_values(workload, lambda value: value + 1)
    if optimizer == "groups":
        other = replace(other, optimizers=resumable.grouped_with_other_settings().optimizers)
    return Moment(
        workload=workload, optimizer=optimizer, states=states, index=SAVED, world_size=WORLD_SIZE,
        built=built_state(other, optimizer),
    )  # fmt: skip


def _sgd() -> Moment:
    return _moment("sgd")


def _adam() -> Moment:
    return _moment("adam")


def _groups() -> Moment:
    return _moment("groups")


#: 7 rows over two ranks: shards of 4 and 3.
NAME = "parts.2.weight"


def _named(moment: Moment, key: str, got: Tensor, name: str = NAME) -> str | None:
    right = moment.right.optimizer["state"][name][key] if key else moment.right.model[name]
    return SavedState(moment).value(name, key, got, right)


def _momentum(index: int, name: str = NAME) -> Tensor:
    value: Tensor = _sgd().states[index].optimizer["state"][name]["momentum_buffer"]
    return value.clone()


def test_values_of_another_save() -> None:
    """As it was earlier, or later; as a whole, or one rank's rows."""
    mixed = _momentum(SAVED)
    rows = -(-len(mixed) // WORLD_SIZE)
    mixed[rows:] = _momentum(1)[rows:]

    assert _named(_sgd(), "momentum_buffer", _momentum(1)) == ("stale: from an earlier save, as it was after step 0")
    assert _named(_sgd(), "momentum_buffer", _momentum(SAVED + 1)) == (
        "of a later step than the save: as it was after step 3"
    )
    assert str(_named(_sgd(), "momentum_buffer", mixed)).startswith(
        "stale: from an earlier save, as it was after step 0; "
    )
    assert str(_named(_sgd(), "momentum_buffer", mixed)).endswith("which is rank 1's shard")
    assert str(_named(_sgd(), MODEL, _sgd().states[0].model[NAME])).startswith("stale: ")


def test_values_that_were_not_loaded() -> None:
    """Zeros, and the values that the model was built with."""
    built = _sgd().built
    assert built is not None
    assert str(_named(_sgd(), "momentum_buffer", torch.zeros_like(_momentum(SAVED)))).startswith("zeros: ")
    assert str(_named(_sgd(), MODEL, built.model[NAME])).startswith("not loaded: ")


def test_values_of_something_else() -> None:
    """Another state of the parameter, another parameter, another place."""
    exchanged = _adam().right.optimizer["state"][NAME]["exp_avg_sq"]
    value = _momentum(SAVED)
    shards = torch.chunk(value, WORLD_SIZE)

    assert str(_named(_adam(), "exp_avg", exchanged)) == "states exchanged: it has the value of exp_avg_sq"
    assert str(_named(_sgd(), "momentum_buffer", torch.cat(shards[::-1]))).startswith(
        ("shards in the wrong place", "elements permuted")
    )
    assert str(_named(_sgd(), "momentum_buffer", value.flatten().roll(1).view_as(value))).startswith(
        "flat offset off by"
    )
    assert str(_named(_sgd(), "momentum_buffer", value.bfloat16().float())).startswith("rounded to bfloat16")


@pytest.mark.parametrize(
    "damage",
    [
        lambda value: value + 1,
        lambda value: value * 0.75,
        lambda value: value + 0.01 * torch.arange(value.numel()).view_as(value),
        # Half way between two saves is none of them.
        lambda value: (value + _momentum(1)) / 2,
        lambda value: torch.where(torch.arange(value.numel()).view_as(value) % 2 == 0, value, _momentum(1)),
        lambda value: _momentum(1) * 1.01,
    ],
)
def test_values_that_fit_nothing_have_no_cause(damage: Callable[[Tensor], Tensor]) -> None:
    """Another number, and mixtures."""
    likely = _named(_sgd(), "momentum_buffer", damage(_momentum(SAVED)))

    assert likely is None or not likely.startswith(("stale", "of a later", "zeros", "not loaded", "mixed", "padding"))


def test_equal_moments_have_no_cause() -> None:
    """Where an earlier and a later moment have the same value, nothing tells them apart."""
    states = list(_sgd().states)
    states[SAVED + 1] = states[1]

    assert _named(replace(_sgd(), states=states), "momentum_buffer", _momentum(1)) is None


def test_padding_is_named_only_where_it_is_there() -> None:
    """Zeros that fill up the shards, and not other rows behind the right ones."""
    right = torch.arange(1.0, 22.0).view(7, 3)
    saved = SavedState(_sgd())

    padded = torch.cat([right, torch.zeros(1, 3)])
    assert str(saved.value(NAME, MODEL, padded, right)).startswith("padding was saved as data: the last 1 of 8 rows")
    for other in (
        torch.cat([right, torch.ones(1, 3)]),
        torch.cat([right, torch.zeros(3, 3)]),
        torch.cat([right + 1, torch.zeros(1, 3)]),
        torch.cat([torch.zeros(1, 3), right]),
    ):
        assert saved.value(NAME, MODEL, other, right) is None


def _resumed(moment: Moment, params: Tensors) -> CheckResult:
    return checkpoint.same_parameters(
        params, moment.states[moment.index + 1].model, requirement="R149", rank=0, step=moment.index, known=moment
    )


def _headline(moment: Moment, change: Any) -> str:
    step = NextStep.of(moment)
    assert step is not None
    finding = most_telling(_resumed(moment, step.with_mistake(change)).findings)
    likely = finding.likely if finding is not None else None
    return str(likely) if causes_in(likely) else "None"


def _changed(moment: Moment, change: Callable[[dict[str, Any]], object]) -> Any:
    state = copy.deepcopy(moment.right.optimizer["state"])
    for entries in state.values():
        change(entries)
    return with_state(state)


@pytest.mark.slow
def test_a_step_with_a_wrong_state() -> None:
    """The next step shows which state the optimizer had."""
    of_the_first = with_state(_adam().states[1].optimizer["state"])

    assert _headline(_adam(), of_the_first).startswith(
        "stale: from an earlier save, the optimizer's state is that after "
    )
    assert _headline(_adam(), with_state(_adam().states[SAVED + 1].optimizer["state"])).startswith(
        "of a later step than"
    )
    assert _headline(_adam(), with_state({})).startswith("the optimizer's state was lost")
    assert _headline(_adam(), _changed(_adam(), lambda entries: entries["step"].zero_())).startswith(
        "the optimizer's step counter was lost"
    )
    assert _headline(_adam(), _changed(_adam(), lambda entries: entries["step"].add_(1))).startswith(
        "the optimizer's step counter advanced twice"
    )
    assert _headline(_adam(), _changed(_adam(), lambda entries: entries["exp_avg"].mul_(0.7))) == "None"
    assert _headline(_adam(), _changed(_adam(), lambda entries: entries["step"].add_(5))) == "None"


def test_a_step_with_wrong_settings() -> None:
    """Those of another group, or those from before the load."""
    groups = _groups().right.optimizer["param_groups"]
    built = _groups().built
    assert built is not None

    assert _headline(_groups(), with_settings([groups[0]] * len(groups))).startswith(
        "every group has the settings of group 0: "
    )
    # Parameters are dealt out to the groups one by one, so that the next parameter is in the next group.
    assert _headline(_groups(), with_settings([*groups[1:], groups[0]])).startswith(
        "each group has the settings of the next one, or each parameter has the group of the next one: "
    )
    assert _headline(_groups(), with_settings(built.optimizer["param_groups"])).startswith("settings not loaded")
    assert _headline(_groups(), with_settings([group | {"lr": group["lr"] * 1.5} for group in groups])) == "None"


def _history(states: list[PlainState], first: int) -> TrainingHistory:
    """A run that shows the states from one on."""
    steps = [
        StepRecord(step=index, losses=[torch.tensor(0.0)], grads=dict(state.gradients), params=dict(state.model))
        for index, state in enumerate(states[1:])
    ]
    return TrainingHistory(
        source="test", rank=0, world_size=WORLD_SIZE, initial_params=dict(states[first].model), steps=steps[first:]
    )


def test_a_continuation_with_stale_state() -> None:
    """Either the loaded values are those of an earlier save, or the step shows that the optimizer's are."""
    step = NextStep.of(_adam())
    assert step is not None
    how = checkpoint.Resumption(workload=_adam().workload, optimizer="adam")
    whole, resumed = _history(list(_adam().states), 0), _history(list(_adam().states), SAVED)
    where: dict[str, Any] = {"requirement": "R149", "rank": 0, "resumption": how}

    assert checkpoint.same_continuation(resumed, whole, **where).findings == []
    resumed.steps[0].params = step.with_mistake(with_state(_adam().states[1].optimizer["state"]))
    finding = most_telling(checkpoint.same_continuation(resumed, whole, **where).findings)
    assert finding is not None
    assert str(finding.likely).startswith("stale: from an earlier save, the optimizer's state is that after step 0")
    resumed.initial_params = dict(_adam().states[1].model)
    finding = most_telling(checkpoint.same_continuation(resumed, whole, **where).findings)
    assert finding is not None
    assert finding.check == "loaded parameters"
    assert finding.likely == "stale: from an earlier save, as it was after step 0"
