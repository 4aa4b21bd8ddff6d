"""
Events between training steps or inside one, besides training: an evaluation, a new learning rate, an exception.

An event is frozen data: an action at a point. A point is a step, a moment in it, and for moments that a step has once
for each micro-batch, its number. `Regime.events` holds the events of a run. `driver.events` makes them happen to an
implementation, `references.loop` applies their effect to the references, and each does so on its own. Standard library
only. `workload.every_point` makes regimes with an action at every point where it is legal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from fsdp_conformance.errors import ConfigError


class Moment(StrEnum):
    """Where in a step, in the order of a step."""

    STEP = "before the step"
    FORWARD = "before the forward"
    LOSS = "between forward and backward"
    BACKWARD = "after the backward"
    OPTIMIZER = "before the optimizer"
    """After all backwards, and before clipping."""
    END = "after the optimizer"


#: Moments that a step has once for each micro-batch.
PER_MICRO_BATCH = frozenset({Moment.FORWARD, Moment.LOSS, Moment.BACKWARD})

_BETWEEN = frozenset({Moment.STEP, Moment.END})
_ANY = frozenset(Moment)


class Action(StrEnum):
    """The kinds of events."""

    EVALUATE = "evaluate"
    """A forward in eval mode under no_grad; its output is compared."""
    INFER = "infer"
    """The same under inference_mode."""
    FORWARD = "forward"
    """A forward in training mode that no backward follows."""
    DIFFERENTIATE = "differentiate"
    """
    A forward in training mode, and torch.autograd.grad of its loss for the inputs alone. Their gradient is compared;
    parameters get none.
    """
    READ = "read"
    """All parameters are read in full; the values are compared."""
    TOGGLE = "toggle"
    """eval() and train(), without a forward."""
    EVAL_MODE = "eval mode"
    """From now on the model is in eval mode while it trains, as in fine-tuning with fixed statistics."""
    UNSHARD = "unshard"
    """The units in `names` are gathered and freed by hand."""
    LEARNING_RATE = "learning rate"
    """All parameter groups have the learning rate `value` from now on."""
    FREEZE = "freeze"
    """Exactly the parameters in `names` have requires_grad=False from now on; without names, none."""
    DROP = "drop"
    """The gradients of the parameters in `names` are set to None."""
    SKIP = "skip"
    """The optimizer does not step; the gradients of this step are dropped."""
    ZEROS = "zeros"
    """From now on, gradients are set to zero after a step, and not to None."""
    WRITE = "write"
    """The parameters in `names` are multiplied by `value`, in place, through `.data`."""
    ASSIGN = "assign"
    """The same, by assigning a new tensor to `.data`."""
    WRITE_GRADIENT = "write gradient"
    """The gradients of the parameters in `names` are multiplied by `value`, in place."""
    ASSIGN_GRADIENT = "assign gradient"
    """The same, by assigning a new tensor to `.grad`."""
    SHOW = "show"
    """The engine's context shows all parameters in full; the values are compared."""
    WRITE_SHOWN = "write shown"
    """In that context, which keeps what is written, the parameters in `names` are multiplied by `value`."""
    WRITE_SHOWN_GRADIENT = "write shown gradient"
    """The same for their full gradients."""
    CLIP_VALUES = "clip values"
    """The elements of all gradients are clipped to at most `value`, by torch.nn.utils.clip_grad_value_."""
    CLIP_SOME = "clip some"
    """The gradients of the parameters in `names` are clipped to the norm `value`, by torch.nn.utils.clip_grad_norm_."""
    SAVE = "save"
    """A checkpoint of the model and the optimizer is saved."""
    SAVE_MEANWHILE = "save meanwhile"
    """A checkpoint begins to be saved; training goes on. It is complete before the next load, or at the end."""
    LOAD = "load"
    """The last checkpoint that was saved is loaded: model and optimizer are what they were then."""
    TAKE_MODEL = "take model"
    """The full state dict of the model is taken."""
    LOAD_MODEL = "load model"
    """The model becomes what it was when its full state dict was last taken; the optimizer stays as it is."""
    TAKE_SHARDS = "take shards"
    """The sharded state dict of the model is taken, and saved."""
    LOAD_SHARDS = "load shards"
    """The model becomes what it was when its sharded state dict was last taken."""
    TAKE_OPTIMIZER = "take optimizer"
    """The state dict of the optimizer is taken."""
    LOAD_OPTIMIZER = "load optimizer"
    """The optimizer becomes what it was when its state dict was last taken; the model stays as it is."""
    MOVE = "move"
    """The wrapped model is moved to the device that it is on."""
    CAST = "cast"
    """The wrapped model is cast to float32, which it is in."""
    CAST_BACK = "cast and back"
    """The wrapped model is cast to float64, and back to float32."""
    RAISE = "raise"
    """
    The step is attempted first, without its other events, up to this moment: there an exception of the user's code ends
    the attempt on every rank. It is caught, the engine recovers, and the step is made as if nothing had been.

    Before the forward: the forward that follows raises. Between forward and backward: the backward that follows does.
    """


#: At which moments an action is legal, because the contract says what it leads to.
LEGAL: dict[Action, frozenset[Moment]] = {
    Action.EVALUATE: _ANY,
    Action.INFER: _ANY,
    # Two forwards before the first one's backward are a pipelined order: R099.
    Action.FORWARD: _ANY - {Moment.LOSS},
    Action.DIFFERENTIATE: _ANY - {Moment.LOSS},
    # Full parameters can be read where no forward waits for its backward (R047, R052).
    Action.READ: _ANY - {Moment.LOSS},
    Action.TOGGLE: _ANY,
    Action.EVAL_MODE: _BETWEEN,
    Action.UNSHARD: _ANY,
    Action.LEARNING_RATE: _ANY,
    Action.FREEZE: _BETWEEN,
    Action.DROP: frozenset({Moment.OPTIMIZER}),
    Action.SKIP: frozenset({Moment.OPTIMIZER}),
    Action.ZEROS: frozenset({Moment.STEP}),
    # Between forward and backward only for parameters whose value no gradient depends on, such as biases.
    Action.WRITE: frozenset({*_BETWEEN, Moment.OPTIMIZER, Moment.LOSS}),
    Action.ASSIGN: frozenset({*_BETWEEN, Moment.OPTIMIZER, Moment.LOSS}),
    Action.WRITE_GRADIENT: frozenset({Moment.OPTIMIZER}),
    Action.ASSIGN_GRADIENT: frozenset({Moment.OPTIMIZER}),
    Action.SHOW: _ANY - {Moment.LOSS},
    Action.WRITE_SHOWN: frozenset({*_BETWEEN, Moment.OPTIMIZER}),
    Action.WRITE_SHOWN_GRADIENT: frozenset({Moment.OPTIMIZER}),
    Action.CLIP_VALUES: frozenset({Moment.OPTIMIZER}),
    Action.CLIP_SOME: frozenset({Moment.OPTIMIZER}),
    Action.SAVE: _BETWEEN,
    Action.SAVE_MEANWHILE: _BETWEEN,
    # Inside a step it would be open whether the gradients remain.
    Action.LOAD: _BETWEEN,
    Action.TAKE_MODEL: _BETWEEN,
    Action.LOAD_MODEL: _BETWEEN,
    Action.TAKE_SHARDS: _BETWEEN,
    Action.LOAD_SHARDS: _BETWEEN,
    Action.TAKE_OPTIMIZER: _BETWEEN,
    Action.LOAD_OPTIMIZER: _BETWEEN,
    Action.MOVE: _BETWEEN,
    Action.CAST: _BETWEEN,
    Action.CAST_BACK: _BETWEEN,
    Action.RAISE: frozenset({*PER_MICRO_BATCH, Moment.OPTIMIZER}),
}

#: Actions that a rank can do alone: all others communicate, or leave ranks with different parameters.
LOCAL = frozenset({Action.TOGGLE})

#: Actions that neither change what a reference computes nor are compared with it.
WITHOUT_EFFECT = frozenset({Action.TOGGLE, Action.UNSHARD, Action.MOVE, Action.CAST, Action.CAST_BACK})

#: Actions that save something, each with the one that loads it.
LOADED_BY = {
    Action.SAVE: Action.LOAD,
    Action.SAVE_MEANWHILE: Action.LOAD,
    Action.TAKE_MODEL: Action.LOAD_MODEL,
    Action.TAKE_SHARDS: Action.LOAD_SHARDS,
    Action.TAKE_OPTIMIZER: Action.LOAD_OPTIMIZER,
}

#: Forwards in evaluation mode.
EVALUATIONS = frozenset({Action.EVALUATE, Action.INFER})

#: Forwards that no backward follows.
FORWARDS = EVALUATIONS | {Action.FORWARD}

#: Actions that run a forward besides those of the micro-batches.
RUNS_A_FORWARD = FORWARDS | {Action.DIFFERENTIATE}

#: Actions that multiply the named parameters, and those that multiply their gradients, by the event's value.
PARAMETER_WRITES = frozenset({Action.WRITE, Action.ASSIGN, Action.WRITE_SHOWN})
GRADIENT_WRITES = frozenset({Action.WRITE_GRADIENT, Action.ASSIGN_GRADIENT, Action.WRITE_SHOWN_GRADIENT})

#: Actions after which a change of a parameter no longer shows its gradient: see `checks.derived`.
HIDES_GRADIENTS = frozenset({
    *PARAMETER_WRITES, *GRADIENT_WRITES, Action.LEARNING_RATE, Action.SKIP, Action.CLIP_VALUES, Action.CLIP_SOME,
    Action.LOAD, Action.LOAD_MODEL, Action.LOAD_SHARDS, Action.LOAD_OPTIMIZER,
})  # fmt: skip

#: Actions that need `Event.names`, and those that need `Event.value`.
_NAMED = PARAMETER_WRITES | GRADIENT_WRITES | {Action.UNSHARD, Action.DROP, Action.CLIP_SOME}
_VALUED = PARAMETER_WRITES | GRADIENT_WRITES | {Action.LEARNING_RATE, Action.CLIP_VALUES, Action.CLIP_SOME}


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """An action at a point of the run. Raises ConfigError at a point where it is not legal."""

    action: Action
    moment: Moment
    step: int
    micro: int = 0
    names: tuple[str, ...] = ()
    """FQNs of parameters or units, as the action says."""
    value: float | None = None
    ranks: tuple[int, ...] = ()
    """The ranks on which it happens; empty: all of them."""

    def __post_init__(self) -> None:
        problems = []
        if self.moment not in LEGAL[self.action]:
            legal = ", ".join(moment for moment in Moment if moment in LEGAL[self.action])
            problems.append(f"moment must be one of {legal}, got {self.moment}")
        if self.ranks and self.action not in LOCAL:
            problems.append(f"ranks must be empty: all ranks take part in it, got {self.ranks}")
        if self.step < 0 or self.micro < 0:
            problems.append(f"step and micro must not be negative, got {self.step} and {self.micro}")
        if self.micro and self.moment not in PER_MICRO_BATCH:
            problems.append(f"micro must be 0: a step has this moment once, got {self.micro}")
        if self.action in _NAMED and not self.names:
            problems.append("names must not be empty, got none")
        if self.names and self.action not in _NAMED | {Action.FREEZE}:
            problems.append(f"names must be empty, got {', '.join(self.names)}")
        if (self.value is None) == (self.action in _VALUED):
            problems.append(f"value must be {'a number' if self.action in _VALUED else 'None'}, got {self.value}")
        if problems:
            raise ConfigError(problems, where=f"Event {self.action!r} {self.moment}")

    @property
    def number(self) -> float:
        """`value`, of an action that has one."""
        if self.value is None:
            raise ConfigError(["value must be a number, got None"], where=self.describe())
        return self.value

    def happens_on(self, rank: int) -> bool:
        """True if it happens on this rank."""
        return not self.ranks or rank in self.ranks

    def describe(self) -> str:
        """`evaluate between forward and backward of micro-batch 1 in step 0`, for reports."""
        of = f" of micro-batch {self.micro}" if self.moment in PER_MICRO_BATCH else ""
        return f"{self.action} {self.moment}{of} in step {self.step}"


def in_order(events: Iterable[Event]) -> tuple[Event, ...]:
    """The events in the order of a run; those at one point keep theirs."""
    moments = list(Moment)
    return tuple(sorted(events, key=lambda event: (event.step, moments.index(event.moment), event.micro)))


def without_a_save(events: Iterable[Event]) -> tuple[Event, ...]:
    """The events that load a checkpoint or a state dict before one has been saved or taken."""
    remaining: list[Event] = []
    loadable: set[Action] = set()
    for event in in_order(events):
        if event.action in LOADED_BY:
            loadable.add(LOADED_BY[event.action])
        elif event.action in LOADED_BY.values() and event.action not in loadable:
            remaining.append(event)
    return tuple(remaining)
