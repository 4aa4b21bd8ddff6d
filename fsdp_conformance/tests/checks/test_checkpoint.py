"""Each oracle for checkpoints accepts what is right and names what is wrong."""

from __future__ import annotations

import concurrent.futures
import copy
import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_conformance.checks import checkpoint
from fsdp_conformance.checks.result import CheckResult
from fsdp_conformance.errors import ConfigError, ReferencesDisagree
from fsdp_conformance.fixtures import buffers, probes
from fsdp_conformance.history.collective import Op
from fsdp_conformance.history.training import StepRecord, TrainingHistory
from fsdp_conformance.references.plain_training import PlainState, is_exact, plain_training
from fsdp_conformance.tests.checks import schedules


def _trained() -> list[PlainState]:
    """
    The states of a training, made in another process: tests of the simulated accelerator run in children of this one,
    in which autograd must not have run before they begin.
    """
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(plain_training, probes.rank_coded(), (2, 2, 2), optimizer="sgd").result()


STATES = _trained()
LAST = STATES[-1]
WEIGHT = "parts.2.weight"
WHOLE = next(name for name, value in LAST.model.items() if value.dim() == 4)


def _state() -> PlainState:
    return copy.deepcopy(LAST)


def _judged(state: dict[str, Any]) -> CheckResult:
    return checkpoint.same_state_dict(state, LAST.model, requirement="R146", rank=0)


def _renamed(state: dict[str, Any]) -> None:
    state[f"_fsdp_wrapped_module.{WHOLE}"] = state.pop(WHOLE)


def _replaced(change: Callable[[Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    def apply(state: dict[str, Any]) -> None:
        state[WHOLE] = change(state[WHOLE])

    return apply


def test_a_state_dict_in_any_order_is_right() -> None:
    """The order of names is free, and every value is compared."""
    result = _judged(dict(reversed(_state().model.items())))

    assert result.findings == []
    assert result.count.elements >= sum(value.numel() for value in LAST.model.values())


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_renamed, "with a wrapper in the name"),
        (lambda state: state.pop(WHOLE), "missing"),
        (lambda state: state.update(more=torch.zeros(1)), "unexpected more"),
        (_replaced(lambda value: value.flip(0)), "elements differ"),
        (_replaced(lambda value: torch.cat([value, value[:1]])), "expected shape"),
        (_replaced(lambda value: value.bfloat16()), "expected torch.float32"),
        (_replaced(lambda value: value.tolist()), "expected a whole tensor, got list"),
        (_replaced(lambda value: value + 1e-7), "elements differ"),
        (_replaced(lambda value: value * float("nan")), "elements differ"),
    ],
)
def test_a_damaged_state_dict_is_found(damage: Callable[[dict[str, Any]], object], words: str) -> None:
    """One wrong name, shape, dtype, kind or element is a finding that names it."""
    state = _state().model
    damage(state)
    messages = [finding.message for finding in _judged(state).findings]

    assert len(messages) == 1
    assert words in messages[0]


def test_rounding_is_allowed_only_where_it_is_asked_for() -> None:
    """`ulps` allows that many units of the largest element, and not one more."""
    state, largest = _state().model, float(LAST.model[WHOLE].abs().max())
    state[WHOLE] = state[WHOLE] + 3 * torch.finfo(torch.float32).eps * largest

    def judged(ulps: float) -> CheckResult:
        return checkpoint.same_state_dict(state, LAST.model, requirement="R146", rank=0, ulps=ulps)

    assert judged(8).findings == []
    assert [finding.fqn for finding in judged(1).findings] == [WHOLE]
    state[WHOLE] = state[WHOLE] * float("nan")
    assert [finding.fqn for finding in judged(8).findings] == [WHOLE]


def _move_state(optimizer: dict[str, Any]) -> None:
    names = [name for name, entries in optimizer["state"].items()]
    optimizer["state"][names[0]], optimizer["state"][names[1]] = (
        optimizer["state"][names[1]],
        optimizer["state"][names[0]],
    )


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_move_state, "momentum_buffer"),
        (lambda optimizer: optimizer["state"].pop(WHOLE), "parameters with optimizer state"),
        (lambda optimizer: optimizer["state"][WHOLE].clear(), "missing momentum_buffer"),
        (lambda optimizer: optimizer["state"][WHOLE]["momentum_buffer"].add_(1), "momentum_buffer"),
        (lambda optimizer: optimizer["param_groups"][0].update(lr=0.5), "lr of group 0"),
        (lambda optimizer: optimizer["param_groups"][0].pop("momentum"), "missing momentum"),
        (lambda optimizer: optimizer["param_groups"][0]["params"].remove(WHOLE), f"missing {WHOLE}"),
        (lambda optimizer: optimizer["param_groups"].append({"params": []}), "number of groups"),
    ],
)
def test_damaged_optimizer_state_is_found(damage: Callable[[dict[str, Any]], object], words: str) -> None:
    """State at another parameter, lost state and other settings are each found; the undamaged state is not."""
    right = checkpoint.same_optimizer_state(_state().optimizer, LAST.optimizer, requirement="R144", rank=0)
    state = _state().optimizer
    damage(state)
    wrong = checkpoint.same_optimizer_state(state, LAST.optimizer, requirement="R144", rank=0)

    assert right.findings == []
    assert right.count.comparisons > len(LAST.model)
    assert any(words in finding.message for finding in wrong.findings)


def _history(shift: float, steps: range) -> TrainingHistory:
    history = TrainingHistory(source="test", rank=0, world_size=1)
    for step in steps:
        params = {"weight": torch.full((2,), step + shift)}
        history.steps.append(StepRecord(step=step, losses=[torch.tensor(step + shift)], params=params))
    return history


def test_a_continuation_is_compared_step_by_step() -> None:
    """Only common steps count, each by its number; another loss or parameter is found at its step."""
    whole = _history(0.0, range(5))
    same = checkpoint.same_continuation(_history(0.0, range(2, 5)), whole, requirement="R149", rank=0)
    other = checkpoint.same_continuation(_history(0.5, range(2, 5)), whole, requirement="R149", rank=0)

    assert same.findings == []
    assert same.count.comparisons == 6
    assert [finding.step for finding in other.findings] == [2, 2, 3, 3, 4, 4]


def test_parameters_are_compared_with_a_state_dict() -> None:
    """A parameter that the state dict lacks, or has otherwise, is a finding."""
    params = {"a": torch.ones(2), "b": torch.ones(3)}

    def findings(expected: dict[str, Any]) -> list[str | None]:
        differences = checkpoint.same_parameters(params, expected, requirement="R149", rank=0).findings
        return [finding.fqn for finding in differences]

    assert findings({"a": torch.ones(2), "b": torch.ones(3), "buffer": torch.ones(1)}) == []
    assert findings({"a": torch.zeros(2)}) == ["a", "b"]


def test_a_copy_does_not_share_storage() -> None:
    """A view shares storage, a clone does not; an empty part has none."""
    live = torch.arange(6.0)
    state = {"view": live[2:4], "clone": live.clone(), "empty": torch.empty(0)}
    parts = {name: checkpoint.storages_of_parts(value) for name, value in state.items()}
    result = checkpoint.shares_storage(parts, checkpoint.storages([live]), state, requirement="R148", rank=0)

    assert [finding.fqn for finding in result.findings] == ["clone"]
    assert result.count.comparisons == 3


def test_a_load_that_moves_storage_is_found() -> None:
    """Addresses are compared by name, before and after."""
    unmoved, other = torch.ones(2), torch.ones(2)
    before = checkpoint.addresses({"a": unmoved, "b": unmoved, "number": 3})
    after = checkpoint.addresses({"a": unmoved, "b": other})
    result = checkpoint.unmoved(before, after, requirement="R148", rank=0)

    assert set(before) == {"a", "b"}
    assert [finding.fqn for finding in result.findings] == ["b"]


def test_hooks_and_bytes_that_stay_are_found() -> None:
    """A hook on a module or on a parameter, or more bytes: each is one finding."""
    module = nn.Linear(2, 3)
    held = {"params": [module.weight.detach()]}
    before = checkpoint.footprint(module, held)
    same = checkpoint.unchanged(before, checkpoint.footprint(module, held), requirement="R150", rank=0, reading="x")
    module.register_forward_hook(lambda *arguments: None)
    module.weight.register_hook(lambda grad: grad)
    more = checkpoint.footprint(module, {"params": [module.weight.detach(), torch.ones(7)]})
    changed = checkpoint.unchanged(before, more, requirement="R150", rank=0, reading="a state dict")

    assert same.findings == []
    assert len(changed.findings) == 3
    assert {finding.expected for finding in changed.findings} == {"0", "24"}


def test_a_collective_is_not_silence() -> None:
    """One record is one finding that quotes it."""
    record = schedules.collective(Op.ALL_GATHER, 16)
    quiet = checkpoint.silent([], requirement="R148", rank=0, during="a state dict")
    loud = checkpoint.silent([record], requirement="R148", rank=0, during="a state dict")

    assert quiet.findings == []
    assert quiet.count.comparisons == 1
    assert "all_gather" in loud.findings[0].message


def test_plain_training_changes_its_ranks() -> None:
    """A world that changes gives other values than one that does not, from the step on where it changes."""
    same, other = (plain_training(probes.exact_long(), worlds) for worlds in ((2, 2, 2), (2, 3, 2)))

    def differs(step: int) -> bool:
        return any(not torch.equal(same[step].model[name], value) for name, value in other[step].model.items())

    assert [differs(step) for step in range(4)] == [False, False, True, True]
    assert is_exact(probes.exact_long(), (2, 3, 2), "sgd")


def test_plain_training_refuses_what_it_cannot_know() -> None:
    """Ranks with running statistics differ; a probe beyond its exact steps is not exact."""
    with pytest.raises(ConfigError):
        plain_training(buffers.batch_norm(), (2,))
    assert not is_exact(probes.rank_coded(), (2,) * 4, "sgd")
    assert not is_exact(probes.rank_coded(), (7,), "sgd")
    assert not is_exact(probes.rank_coded(), (2,), "adam")


def test_a_probe_that_is_not_exact_does_not_judge() -> None:
    """If float32 and float64 differ, no engine is compared with either."""
    from dataclasses import replace
    from functools import partial

    rough = replace(probes.rank_coded(), optimizers={"sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9)})

    with pytest.raises(ReferencesDisagree):
        plain_training(rough, (2, 2, 2))
