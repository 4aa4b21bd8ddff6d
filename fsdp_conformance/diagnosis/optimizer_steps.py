"""
One optimizer step of a whole model, right or with one mistake in the optimizer's state, its settings or its gradients.

`explain` compares wrong parameters with these. The step starts from the right values, so that a mistake shows alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_conformance.diagnosis.causes import LATER, OF_SETTINGS, STALE
from fsdp_conformance.diagnosis.headline import PROVEN
from fsdp_conformance.history.training import Tensors, TrainingHistory
from fsdp_conformance.references.plain_training import PlainState, named_optimizer_state
from fsdp_conformance.references.reference_set import Kind, References, values
from fsdp_conformance.references.tolerance import magnitude
from fsdp_conformance.workload.definition import Regime, Workload
from fsdp_conformance.workload.events import Action
from fsdp_conformance.workload.events import Moment as Point

#: A mistake in one phrase, and all parameters after the step with it.
SupposedStep = tuple[str, Tensors]

#: Models with more elements are not stepped again.
_MAX_NUMEL = 200_000
#: How far a step may be off that is made again, relative to the largest element.
_ROUNDING = 1e-5
#: The same in float64.
_EXACT = 1e-12
#: How much closer a supposed parameter must be to the one that was seen than to the right one.
_CLOSER = 0.05
#: After more right steps than this, a wrong one is a fault of the training and not of its reconstruction.
_TRUSTED_STEPS = 2

_Change = Callable[["_Stepper", dict[str, nn.Parameter]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """The right training at a moment, with the other moments that a wrong save or load may confuse it with."""

    workload: Workload
    optimizer: str
    states: Sequence[PlainState]
    """Before the first step and after each one."""
    index: int
    """Which of the states is the right one."""
    world_size: int
    built: PlainState | None = None
    """A training that loads: its state before the load."""

    @property
    def right(self) -> PlainState:
        """The state that should be there."""
        return self.states[self.index]


class _Stepper:
    """The optimizer of a model, or the several that a workload has made for it, as one."""

    def __init__(self, workload: Workload, name: str, model: nn.Module) -> None:
        self._model = model
        build = workload.optimizer_sets.get(name)
        self._members: list[Optimizer] = (
            build(dict(model.named_parameters()))
            if build is not None
            else [workload.optimizers[name](list(model.parameters()))]
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all."""
        return [group for member in self._members for group in member.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The state of all."""
        return {parameter: dict(entries) for member in self._members for parameter, entries in member.state.items()}

    def set_state(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Each has this state for its own parameters, and no other."""
        for member in self._members:
            member.state.clear()
            for parameter in (parameter for group in member.param_groups for parameter in group["params"]):
                if parameter in state:
                    member.state[parameter] = state[parameter]

    def named_state(self) -> dict[str, Any]:
        """The state dict of all, by the names of parameters; cloned."""
        parts = [named_optimizer_state(self._model, member) for member in self._members]
        return {
            "state": {name: entries for part in parts for name, entries in part["state"].items()},
            "param_groups": [group for part in parts for group in part["param_groups"]],
        }

    def step(self) -> None:
        """All step."""
        for member in self._members:
            member.step()


def when(index: int) -> str:
    """The moment of a state, in words."""
    return f"after step {index - 1}" if index else "before the first step"


def built_state(workload: Workload, optimizer: str) -> PlainState:
    """A new model and its optimizer, as a training that loads has them before the load."""
    model = workload.build(0)
    stepper = _Stepper(workload, optimizer, model)
    state = {name: value.detach().clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    return PlainState(state, stepper.named_state())


def states_of(history: TrainingHistory, workload: Workload, optimizer: str) -> list[PlainState]:
    """
    The states of a training, made again with its gradients; empty if that does not lead to its parameters.

    Gradients must be exposed, and nothing but the optimizer may change parameters. If a later step goes wrong, such as
    the one after a save that harms the optimizer, the right state after it is the last one.
    """
    if any(record.grads is None for record in history.steps):
        return []
    model = workload.build(history.rank)
    _fill(model, history.initial_params)
    stepper = _Stepper(workload, optimizer, model)
    states = [PlainState(dict(history.initial_params), stepper.named_state())]
    for record in history.steps:
        gradients = {name: grad for name, grad in (record.grads or {}).items() if grad is not None}
        _give(model, gradients)
        stepper.step()
        after = {name: p.detach().clone() for name, p in model.named_parameters() if name in record.params}
        if not all(is_alike(value, record.params[name]) for name, value in after.items()):
            trusted = len(states) > _TRUSTED_STEPS
            return [*states, PlainState(after, stepper.named_state(), gradients)] if trusted else []
        states.append(PlainState(after, stepper.named_state(), gradients))
    return states


def moment_of_save(
    history: TrainingHistory, workload: Workload, optimizer: str, index: int, *, built: Workload
) -> Moment:
    """
    The moment after so many steps of a training that saves; `built` is the training that loads.

    Where its states cannot be made again, the moment knows nothing but the parameters.
    """
    states = states_of(history, workload, optimizer)
    if not states:
        alone = PlainState(dict(history.steps[index - 1].params), {"state": {}, "param_groups": []})
        states, index = [alone], 0
    return Moment(
        workload=workload, optimizer=optimizer, states=states, index=index, world_size=history.world_size,
        built=built_state(built, optimizer),
    )  # fmt: skip


def resumed_steps(moment: Moment) -> list[SupposedStep]:
    """The parameters after the next step, with each mistake that a load can leave in the optimizer."""
    step = NextStep.of(moment)
    if step is None:
        return []
    state = moment.right.optimizer["state"]
    suppositions: list[tuple[str, _Change]] = [
        ("the optimizer's state was lost: the step was made with a new one", _clear)
    ]
    for index, other in enumerate(moment.states):
        if index != moment.index and other.optimizer["state"]:
            cause = f"{STALE}: from an earlier save" if index < moment.index else f"{LATER}: a save that reads too late"
            phrase = f"{cause}, the optimizer's state is that {when(index)}, and the model's values are right"
            suppositions.append((phrase, with_state(state | other.optimizer["state"])))
    suppositions += [(phrase, with_state(changed)) for phrase, changed in _wrong_states(state, moment.world_size)]
    suppositions += _wrong_settings(moment.right.optimizer["param_groups"])
    if moment.built is not None:
        phrase = "settings not loaded: the groups have those that the optimizer was built with"
        suppositions.append((phrase, with_settings(moment.built.optimizer["param_groups"])))
    return [(phrase, step.with_mistake(change)) for phrase, change in suppositions]


def supposed_steps(references: References, step: int) -> list[SupposedStep]:
    """The parameters after a step whose optimizer has wrong settings, given the right gradients."""
    replay = _step_in(references, step) if not references.regime.optimizer_in_backward else None
    if replay is None:
        return []
    groups = replay.moment.right.optimizer["param_groups"]
    if len(groups) < 2:
        # Each parameter is stepped again by itself: `mistakes.supposed_parameters`.
        return []
    suppositions = [
        *_wrong_settings(groups),
        ("the optimizer's state was lost: the step was made with a new one", _clear),
    ]
    steps = [(phrase, replay.with_mistake(change)) for phrase, change in suppositions]
    return [*steps, ("the optimizer stepped twice", replay.with_mistake(_nothing, times=2))]


def implied_gradients(references: References, step: int, got: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """
    By name, the gradient with which the optimizer would have stepped to the parameter in `got`, and the right one.

    Only for parameters whose step is linear in their own gradient, as that of SGD: at zeros and at ones it tells the
    rest. Nothing is known where a norm has scaled all gradients.
    """
    replay = _step_in(references, step) if references.regime.max_norm is None else None
    if replay is None:
        return {}
    right = replay.moment.states[step + 1].model
    at_zero, at_one = (replay.with_mistake(_with_gradients_of(like)) for like in (torch.zeros_like, torch.ones_like))
    implied = {}
    for name, grad in replay.gradients.items():
        value, slope = got.get(name), at_one[name] - at_zero[name]
        apart = magnitude(at_zero[name] + slope * grad.double() - right[name])
        is_linear = apart <= _EXACT * magnitude(right[name]) and bool((slope != 0).all())
        if is_linear and isinstance(value, Tensor) and value.shape == grad.shape:
            implied[name] = (value.double() - at_zero[name]) / slope, grad.double()
    return implied


def possible(steps: Sequence[SupposedStep], got: Mapping[str, Any], right: Mapping[str, Any]) -> list[SupposedStep]:
    """
    Without mistakes in settings that do not lead to every parameter that was seen: settings are those of whole groups.

    A state may be wrong for one parameter alone.
    """
    return [
        (phrase, after)
        for phrase, after in steps
        if not phrase.startswith(OF_SETTINGS)
        or all(_fits(after[name], got[name], value) for name, value in right.items() if name in got and name in after)
    ]


def _fits(after: Tensor, got: Any, right: Tensor) -> bool:
    """True if a supposed parameter is the one that was seen, apart from roundings."""
    if not isinstance(got, Tensor) or got.shape != after.shape:
        return False
    distance, apart = magnitude(after.double() - got.double()), magnitude(after.double() - right.double())
    return distance <= _CLOSER * apart or distance <= _ROUNDING * magnitude(right.double())


def rate_factors(references: References, step: int) -> dict[str, float]:
    """
    By how much the update of a step is scaled with the learning rate of another step or group, where these differ.

    The update of every optimizer of torch is proportional to it.
    """
    built = built_state(references.workload, references.regime.optimizer).optimizer["param_groups"]
    of_groups = {group["lr"] for group in built}
    first = next(iter(of_groups)) if len(of_groups) == 1 else None
    rates = _rates(references.regime, first)
    if rates[step] is None:
        return {
            f"the learning rate is that of another group: {other:g} in place of {own:g}": other / own
            for own, other in itertools.permutations(sorted(of_groups), 2)
            if own
        }
    others = {"the previous step": rates[step - 1] if step else first}
    if step + 1 < len(rates):
        others["the next step"] = rates[step + 1]
    if first not in others.values():
        others["setup"] = first
    right = rates[step]
    return {
        f"the learning rate is that of {which}: {rate:g} in place of {right:g}": rate / right
        for which, rate in others.items()
        if rate is not None and right and rate != right
    }


def _rates(regime: Regime, rate: float | None = None) -> list[float | None]:
    """By step: the learning rate that an event has set for it, and before the first event `rate`."""
    rates: list[float | None] = []
    for step in range(regime.steps):
        events = [event for event in regime.in_step(step) if event.action is Action.LEARNING_RATE]
        for event in events:
            if event.moment is not Point.END:
                rate = event.value
        rates.append(rate)
        for event in events:
            if event.moment is Point.END:
                rate = event.value
    return rates


def _step_in(references: References, step: int) -> NextStep | None:
    """A step of the references, to be made again; None if it cannot be."""
    moment = _moment_in(references, step)
    return None if moment is None else NextStep.of(moment)


def _moment_in(references: References, step: int) -> Moment | None:
    """The references before a step, if plain steps with their gradients lead to their parameters."""
    history, workload, regime = references.expected, references.workload, references.regime
    # Other events may have no effect on the parameters. Whether that is so, the parameters tell.
    rates = _rates(regime)
    kind = Kind.GRADIENT if regime.max_norm is None else Kind.CLIPPED
    model = workload.build(references.rank).double()
    _fill(model, history.initial_params)
    stepper = _Stepper(workload, regime.optimizer, model)
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    states = [PlainState(initial, stepper.named_state())]
    for earlier in range(step + 1):
        dropped = regime.dropped(earlier)
        gradients = {
            name: grad if kind is Kind.CLIPPED else grad * regime.gradient_written(earlier, name)
            for name, grad in values(history, kind, earlier).items()
            if isinstance(grad, Tensor) and name not in dropped
        }
        # The state before the step has what the user has written since the last one.
        states[-1] = replace(states[-1], model=_written(model, regime, earlier))
        _give(model, gradients)
        if rates[earlier] is not None:
            _with_rate(rates[earlier])(stepper, {})
            # The state before the step has the rate that the step is made with.
            states[-1] = replace(states[-1], optimizer=stepper.named_state())
        stepper.step()
        after = {name: p.detach().clone() for name, p in model.named_parameters()}
        states.append(PlainState(after, stepper.named_state(), gradients))
    right = {
        name: value if (factor := regime.written(step, Point.END, name)) in (0, 1) else value / factor
        for name, value in history.steps[step].params.items()
    }
    if not all(
        torch.allclose(states[-1].model[n].double(), v.double(), rtol=1e-6, atol=1e-9) for n, v in right.items()
    ):
        return None
    return Moment(
        workload=workload, optimizer=regime.optimizer, states=states, index=step, world_size=references.world_size
    )


def _written(model: nn.Module, regime: Regime, step: int) -> Tensors:
    """Write what the user writes between the optimizer's last step and the forward of this one. Returns clones."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            since = 1.0 if step == 0 else regime.written(step - 1, Point.END, name)
            if (factor := since * regime.written(step, Point.STEP, name)) != 1:
                parameter.mul_(factor)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def is_alike(one: Tensor, other: Tensor) -> bool:
    """Equal but for roundings, which kernels make differently in a shard and in a whole tensor."""
    return magnitude(one.double() - other.double()) <= _ROUNDING * magnitude(other.double())


class NextStep:
    """The step that follows a moment."""

    def __init__(self, moment: Moment) -> None:
        self.moment = moment
        self.gradients = moment.states[moment.index + 1].gradients

    @staticmethod
    def of(moment: Moment) -> NextStep | None:
        """None if the model is too large, or if the right step does not lead to the next state."""
        if moment.index + 1 >= len(moment.states):
            return None
        if sum(value.numel() for value in moment.right.model.values() if isinstance(value, Tensor)) > _MAX_NUMEL:
            return None
        step, after = NextStep(moment), moment.states[moment.index + 1].model
        made = step.with_mistake(_nothing)
        right = all(is_alike(value, after[name]) for name, value in made.items() if name in after)
        return step if right else None

    def with_mistake(self, change: _Change, *, times: int = 1) -> Tensors:
        """All parameters after the step, which is made after `change`."""
        before = self.moment.right
        model = self.moment.workload.build(0)
        model.to(next((v.dtype for v in before.model.values() if v.is_floating_point()), torch.float32))
        _fill(model, before.model)
        parameters = dict(model.named_parameters())
        optimizer = _Stepper(self.moment.workload, self.moment.optimizer, model)
        with_settings(before.optimizer["param_groups"])(optimizer, parameters)
        with_state(before.optimizer["state"])(optimizer, parameters)
        _give(model, self.gradients)
        change(optimizer, parameters)
        for _ in range(times):
            optimizer.step()
        return {name: parameter.detach() for name, parameter in parameters.items()}


# --- mistakes ---------------------------------------------------------------------------------------------------------


def _wrong_states(state: Mapping[str, Any], world_size: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """States of the optimizer with one mistake in them."""
    tensors = {key for entries in state.values() for key, value in entries.items() if _is_moment(value)}
    counters = {key for entries in state.values() for key in entries if key == "step"}
    if counters:
        for phrase, changed in (
            ("the optimizer's step counter was lost: it starts again from zero", lambda value: value * 0),
            ("the optimizer's step counter did not advance: it is one step behind", lambda value: value - 1),
            ("the optimizer's step counter advanced twice: it is one step ahead", lambda value: value + 1),
        ):
            yield phrase, _mapped(state, changed, lambda key, value: key == "step")
        # Without a counter, a state of zeros is a new one.
        yield "zeros: the optimizer's state was loaded as zeros", _mapped(state, torch.zeros_like, _is_tensor_of_state)
    for one, other in itertools.combinations(sorted(tensors), 2):
        exchanged = {one: other, other: one}
        yield (
            f"states exchanged: {one} and {other} of the optimizer have each other's values",
            {n: {exchanged.get(k, k): v for k, v in entries.items()} for n, entries in state.items()},
        )
    for turn, whose in ((1, "next"), (-1, "previous")):
        taken = _taken_from(state, turn)
        if taken:
            yield f"state of another parameter: each has that of the {whose} one of its shape", {**state, **taken}
    if world_size > 1:
        for whose, placed in _ORDERS.items():
            yield (
                f"shards in the wrong place: each rank's rows have the optimizer's state {whose}",
                _mapped(state, partial(placed, world_size=world_size), _is_tensor_of_state),
            )
        for rank in range(world_size):
            yield (
                f"rows of a shard lost: the optimizer's state of rank {rank}'s rows is zero",
                _mapped(state, partial(_without_rows, rank=rank, world_size=world_size), _is_tensor_of_state),
            )
    for offset, sign in ((1, "-"), (-1, "+")):
        yield (
            f"flat offset off by one: element i has the optimizer's state of element i {sign} 1",
            _mapped(state, partial(torch.roll, shifts=offset), _is_tensor_of_state),
        )


def _wrong_settings(groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, _Change]]:
    """Settings of the groups, given to the wrong ones."""
    if len(groups) < 2 or len({frozenset(group) for group in groups}) > 1:
        return []
    changes: list[tuple[str, _Change]] = [
        (
            f"every group has the settings of group {index}: {PROVEN}",
            with_settings([group] * len(groups)),
        )
        for index, group in enumerate(groups)
    ]
    for turn, whose in ((1, "next"), (-1, "previous")):
        turned = [groups[(index + turn) % len(groups)] for index in range(len(groups))]
        phrase = f"each group has the settings of the {whose} one: {PROVEN}"
        changes.append((phrase, with_settings(turned)))
        phrase = f"each parameter has the group of the {whose} one: they were matched by position, off by one"
        changes.append((phrase, _with_members(turn)))
    return changes


def _with_gradients_of(like: Callable[[Tensor], Tensor]) -> _Change:
    def change(optimizer: _Stepper, parameters: dict[str, nn.Parameter]) -> None:
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad = like(parameter.grad)

    return change


def _nothing(optimizer: _Stepper, parameters: dict[str, nn.Parameter]) -> None:
    """The right step."""


def _clear(optimizer: _Stepper, parameters: dict[str, nn.Parameter]) -> None:
    optimizer.set_state({})


def with_state(state: Mapping[str, Mapping[str, Any]]) -> _Change:
    """The optimizer has this state, by the names of parameters, and no other."""

    def change(optimizer: _Stepper, parameters: dict[str, nn.Parameter]) -> None:
        optimizer.set_state(
            {
                parameters[name]: {key: v.clone() if isinstance(v, Tensor) else v for key, v in entries.items()}
                for name, entries in state.items()
                if name in parameters
            }
        )

    return change


def with_settings(groups: Sequence[Mapping[str, Any]]) -> _Change:
    """The groups have these settings, in their order."""

    def change(optimizer: _Stepper, parameters: dict[str, nn.Parameter]) -> None:
        for group, settings in zip(optimizer.param_groups, groups, strict=False):
            group.update({key: value for key, value in settings.items() if key != "params"})

    return change


def _with_rate(rate: float | None) -> _Change:
    def change(optimizer: _Stepper, parameters: dict[str, nn.Parameter]) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate

    return change


def _with_members(turn: int) -> _Change:
    def change(optimizer: _Stepper, parameters: dict[str, nn.Parameter]) -> None:
        state = optimizer.state
        member_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        listed = [parameter for parameter in parameters.values() if id(parameter) in member_of]
        new = [member_of[id(listed[(index + turn) % len(listed)])] for index in range(len(listed))]
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = [parameter for parameter, place in zip(listed, new, strict=True) if place == index]
        # With several optimizers, each has the state of its own parameters.
        optimizer.set_state(state)

    return change


def _mapped(
    state: Mapping[str, Any], changed: Callable[[Tensor], Tensor], concerns: Callable[[str, Any], bool]
) -> dict[str, Any]:
    """The state with some of its tensors changed."""
    return {
        name: {key: changed(value) if concerns(key, value) else value for key, value in entries.items()}
        for name, entries in state.items()
    }


def _is_moment(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 1


def _is_tensor_of_state(key: str, value: Any) -> bool:
    return key != "step" and isinstance(value, Tensor)


def _taken_from(state: Mapping[str, Any], turn: int) -> dict[str, Any]:
    """The states of parameters of one shape and the same kinds of state, each given to another one."""
    alike: dict[object, list[str]] = {}
    for name, entries in state.items():
        key = tuple((k, tuple(v.shape)) for k, v in entries.items() if isinstance(v, Tensor))
        alike.setdefault(key, []).append(name)
    return {
        name: state[names[(index + turn) % len(names)]]
        for names in alike.values()
        if len(names) > 1
        for index, name in enumerate(names)
    }


def _turned(value: Tensor, world_size: int, turn: int) -> Tensor:
    """Rows turned by those of one shard."""
    return value.roll(turn * -(-len(value) // world_size), 0) if value.dim() else value


#: Wrong orders of shards.
_ORDERS: Mapping[str, Callable[..., Tensor]] = {
    "of the next rank": lambda value, world_size: _turned(value, world_size, -1),
    "of the previous rank": lambda value, world_size: _turned(value, world_size, 1),
    "of the ranks in reverse": lambda value, world_size: (
        torch.cat(torch.chunk(value, world_size)[::-1]) if value.dim() else value
    ),
}


def _without_rows(value: Tensor, rank: int, world_size: int) -> Tensor:
    """A copy with the rows of one rank's shard zero."""
    if not value.dim():
        return value
    shards = [shard.clone() for shard in torch.chunk(value, world_size)]
    if rank < len(shards):
        shards[rank].zero_()
    return torch.cat(shards)


@torch.no_grad()
def _fill(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give a model the values of a state that it has names for."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if isinstance(state.get(name), Tensor):
            tensor.copy_(state[name])


def _give(model: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """Give a model these gradients and no others."""
    for name, parameter in model.named_parameters():
        grad = gradients.get(name)
        parameter.grad = None if grad is None else grad.to(parameter.dtype).clone()
