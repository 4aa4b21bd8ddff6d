"""
Workloads: a model, its batches and its loss, as functions that every rank and every reference calls for itself.

Only the types are here; the models are in `fsdp_conformance.fixtures`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.workload.events import (
    GRADIENT_WRITES,
    LEGAL,
    PARAMETER_WRITES,
    PER_MICRO_BATCH,
    WITHOUT_EFFECT,
    Action,
    Event,
    Moment,
    without_a_save,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


#: A trait: hooks of the user change the sign of what a module takes, returns or sends back.
NEGATING = "negating hooks"


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of one rank: the arguments of the model, and what else the loss needs."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchKey:
    """Identifies a micro-batch. Batches are pure functions of it, so any process can compute any rank's."""

    step: int
    micro: int = 0
    rank: int = 0
    world_size: int = 1


class Fuse(Protocol):
    """Makes a model's own code raise."""

    place: str
    """Where it is to raise; empty once it has."""

    def arm(self, place: str, code: int) -> None:
        """Let the next forward and backward raise at `place` ("forward" or "backward"), once; empty: nowhere."""

    def reach(self, place: str) -> None:
        """Raise, if that is the place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """
    A training problem. Everything is a pure function of its arguments and the same in every process.

    Models and batches are in `dtype`, for the implementation and for the references but one: the twin is in float64.
    """

    name: str
    build: Callable[[int], nn.Module]
    """build(rank): a new model on the CPU, in `dtype`. Equal on every rank except for `local_params`."""
    batch: Callable[[BatchKey], Batch]
    """A rank-dependent micro-batch on the CPU; floating tensors are in `dtype`."""
    loss: Callable[[Any, Batch], Tensor]
    """loss(output, batch): a scalar. The data-parallel gradient is the mean over ranks of its gradient."""
    optimizers: dict[str, Callable[[Any], Optimizer]]
    """By name ("sgd", "adam"): builds a stock torch optimizer from params (tensors or groups)."""
    optimizer_sets: dict[str, Callable[[Mapping[str, Any]], list[Optimizer]]] = field(default_factory=dict)
    """By name: builds optimizers, with groups, from parameters by name. They need the flag `orig_params`."""
    units: tuple[str, ...] = ()
    """FQNs of submodules that are one unit each, innermost first, as `Plan.units`."""
    local_units: tuple[str, ...] = ()
    local_params: tuple[str, ...] = ()
    """FQNs of parameters that are never averaged over ranks (experts); all under `local_units`."""
    ignored: tuple[str, ...] = ()
    exact: bool = False
    """True: every correct run in `dtype` is bitwise equal to the float64 one, in any reduction order."""
    exact_steps: int = 3
    """How many steps stay exact; more run out of mantissa."""
    micro_batch_size: int = 1
    dtype: str = "float32"
    """Of the whole model; a plan's dtypes are those that its units compute in."""
    capabilities: frozenset[str] = frozenset()
    """Flags that the *model* needs (frozen_mixed, unused_divergent, ...). Undeclared ones are probed (R000)."""
    build_on_meta: Callable[[int], nn.Module] | None = None
    """
    The model on the meta device, without values, for plans with `meta_init`. Initialising each of its modules by
    `reset_parameters`, in any order, gives the values of `build`.
    """
    fuse: Callable[[nn.Module], Fuse] | None = None
    """The fuse of a model, before it is wrapped, for events that raise; None: the model has none."""
    traits: frozenset[str] = frozenset()
    """
    Facts for references and explanations: "batch_norm" (per-rank buffers), "unused" (find_unused_parameters for DDP),
    NEGATING.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Regime:
    """
    How a workload is trained, by the implementation and by every reference alike.

    A step is `micro_batches` forwards and backwards, then clipping, then the optimizer. `reduced[i]` is whether the
    gradients of micro-batch i are reduced immediately or deferred; the last one is always reduced. What else happens is
    in `events`, and in the fields that are short for events: `at` gives both.
    """

    optimizer: str = "sgd"
    """Key of `Workload.optimizers` or `Workload.optimizer_sets`."""
    steps: int = 3
    micro_batches: int = 1
    reduced: tuple[bool, ...] = ()
    """Empty: all reduced. Otherwise one per micro-batch, the last True."""
    pipeline: str = ""
    """
    The order of forwards and backwards: "" for one after the other, "forwards-first" for all forwards and then all
    backwards, "1f1b" for one forward ahead. Micro-batches keep their order. References ignore it.
    """
    max_norm: float | None = None
    norm_type: float = 2.0
    init_scale: float | None = None
    """The first scale of dynamic loss scaling: halved by an overflow, which skips the step; None: no scaling."""
    growth_interval: int = 2
    """After this many steps in a row without an overflow, the scale doubles."""
    eval_before: tuple[int, ...] = ()
    """Steps before which an eval-mode forward under no_grad runs, on the step's first micro-batch."""
    eval_between: tuple[int, ...] = ()
    """Steps in which such a forward runs between backward and the optimizer step."""
    idle_forwards: int = 0
    """Training-mode forwards without backward before each step's micro-batches."""
    backward_from: str = "loss"
    """Where a backward begins: at the "loss", or at the model's "output", with the loss's gradient for it."""
    backwards_per_forward: int = 1
    """2: the loss is split in halves, each with its own backward (retain_graph)."""
    gradient_to_none: tuple[str, ...] = ()
    """FQNs whose gradient is set to None before the optimizer step: freezing without the flag."""
    frozen_at: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """(step, FQNs): from that step on exactly these parameters have requires_grad=False."""
    sums: bool = False
    """Gradients are added up over the ranks, and not divided by their number."""
    optimizer_in_backward: bool = False
    """Each parameter has its own optimizer, which steps in a hook as soon as the gradient is there."""
    events: tuple[Event, ...] = ()
    """The other events, at any point of a step; events at one point happen in this order."""
    clearing: str = "optimizer"
    """
    How gradients are cleared after a step: by the "optimizer"; by "hand", which sets each to None; or "late": by hand,
    but not after the first step, so that the gradients of the second one are added to its own.
    """
    keep_outputs: bool = False
    """Record the model's outputs in the history."""
    keep_input_gradients: bool = False
    """Record the gradients of the inputs that require one, after the last backward of each micro-batch."""
    unused_parameters: bool = False
    """Some parameters take no part in the loss: DDP needs find_unused_parameters."""

    def __post_init__(self) -> None:
        problems = []
        if self.steps < 1:
            problems.append(f"steps must be at least 1, got {self.steps}")
        if self.reduced and (len(self.reduced) != self.micro_batches or not self.reduced[-1]):
            problems.append(f"reduced must have {self.micro_batches} entries, the last one True, got {self.reduced}")
        if self.pipeline not in ("", "forwards-first", "1f1b"):
            problems.append(f"pipeline must be '', 'forwards-first' or '1f1b', got {self.pipeline!r}")
        if self.backward_from not in ("loss", "output"):
            problems.append(f"backward_from must be 'loss' or 'output', got {self.backward_from!r}")
        if self.backward_from == "output" and (self.init_scale is not None or self.backwards_per_forward > 1):
            problems.append("backward_from must be 'loss' if losses are scaled or split, got 'output'")
        if self.clearing not in ("optimizer", "hand", "late"):
            problems.append(f"clearing must be 'optimizer', 'hand' or 'late', got {self.clearing!r}")
        if self.backwards_per_forward not in (1, 2):
            problems.append(f"backwards_per_forward must be 1 or 2, got {self.backwards_per_forward}")
        problems += [
            f"events must lie within {self.steps} steps of {self.micro_batches} micro-batches, got {event.describe()}"
            for event in self.events
            if event.step >= self.steps or event.micro >= self.micro_batches
        ]
        problems += [
            f"events must save a checkpoint before one is loaded, got {event.describe()} and no save before it"
            for event in without_a_save(self.events)
        ]
        if any(event.action is Action.RAISE for event in self.events):
            if self.pipeline:
                problems.append("events must not raise in a pipeline: an attempt makes one micro-batch after the other")
            if self.optimizer_in_backward:
                problems.append("events must not raise with the optimizer in backward: it has stepped by then")
        if self.pipeline and any(event.moment in PER_MICRO_BATCH for event in self.events):
            problems.append("events must not lie within a micro-batch: in a pipeline its passes are not adjacent")
        if problems:
            raise ConfigError(problems, where="Regime")

    def passes(self) -> Iterator[tuple[str, int]]:
        """The passes of a step in order: ("forward" or "backward", micro-batch)."""
        ahead = {"": 1, "1f1b": 2, "forwards-first": self.micro_batches}[self.pipeline]
        begun = 0
        for micro in range(self.micro_batches):
            while begun < min(micro + ahead, self.micro_batches):
                yield "forward", begun
                begun += 1
            yield "backward", micro

    def is_reduced(self, micro: int) -> bool:
        """True if the gradients of micro-batch `micro` are reduced when its backward ends."""
        return not self.reduced or self.reduced[micro]

    def at(self, moment: Moment, step: int, micro: int = 0) -> list[Event]:
        """The events at a point of the run, in order."""
        number = micro if moment in PER_MICRO_BATCH else 0
        return [
            *self._shorthand(moment, step),
            *(e for e in self.events if e.moment is moment and e.step == step and e.micro == number),
        ]

    def in_step(self, step: int) -> Iterator[Event]:
        """Every event of a step, in order."""
        for moment in Moment:
            for micro in range(self.micro_batches) if moment in PER_MICRO_BATCH else (0,):
                yield from self.at(moment, step, micro)

    def frozen(self, step: int) -> tuple[str, ...] | None:
        """The parameters that are frozen in the forwards of a step; None if no event has set them yet."""
        frozen = [
            event
            for earlier in range(step + 1)
            for event in self.in_step(earlier)
            if event.action is Action.FREEZE and (event.moment is Moment.STEP or earlier < step)
        ]
        return frozen[-1].names if frozen else None

    def dropped(self, step: int) -> frozenset[str]:
        """The parameters whose gradients of a step are set to None before the optimizer."""
        return frozenset(name for event in self.in_step(step) if event.action is Action.DROP for name in event.names)

    def written(self, step: int, moment: Moment, name: str) -> float:
        """The factor by which the user's writes at a moment of a step multiply a parameter; 1.0 without any."""
        writes = [event for event in self.in_step(step) if event.moment is moment and name in event.names]
        return math.prod(event.number for event in writes if event.action in PARAMETER_WRITES)

    def gradient_written(self, step: int, name: str) -> float:
        """The same for its gradient, before the optimizer."""
        writes = [event for event in self.in_step(step) if name in event.names]
        return math.prod(event.number for event in writes if event.action in GRADIENT_WRITES)

    def clears(self, step: int) -> bool:
        """True if the gradients of a step are cleared after it."""
        return self.clearing != "late" or step > 0

    def is_in_eval_mode(self, step: int) -> bool:
        """True if a step is trained in eval mode."""
        return any(event.action is Action.EVAL_MODE for earlier in range(step) for event in self.in_step(earlier))

    def skips(self, step: int) -> bool:
        """True if the optimizer does not step."""
        return any(event.action is Action.SKIP for event in self.in_step(step))

    def attempts(self, step: int) -> list[tuple[Event, int]]:
        """The events that interrupt an attempt at the step, each with how many micro-batches are begun."""
        return [
            (event, event.micro + 1 if event.moment in PER_MICRO_BATCH else self.micro_batches)
            for event in self.in_step(step)
            if event.action is Action.RAISE
        ]

    def happens(self, *actions: Action) -> bool:
        """True if any of the actions happens in the run."""
        return any(event.action in actions for step in range(self.steps) for event in self.in_step(step))

    def clipping(self) -> dict[str, float]:
        """The arguments for clipping of `Adapter.step`; none if gradients are not clipped."""
        if self.max_norm is None:
            return {}
        return {"max_norm": self.max_norm, **({} if self.norm_type == 2.0 else {"norm_type": self.norm_type})}

    def for_references(self) -> Regime:
        """The regime without the events that change nothing for a reference, so that such regimes share references."""
        return replace(self, events=tuple(event for event in self.events if event.action not in WITHOUT_EFFECT))

    def up_to(self, steps: int) -> Regime:
        """The first steps of it."""
        return replace(self, steps=steps, events=tuple(event for event in self.events if event.step < steps))

    def undisturbed(self, steps: int) -> Regime:
        """As many steps of it, without evaluations, changes of flags, or `events`."""
        return replace(self, steps=steps, events=(), eval_before=(), eval_between=(), frozen_at=())

    def _shorthand(self, moment: Moment, step: int) -> list[Event]:
        """The events that the other fields stand for."""
        actions: list[tuple[Action, tuple[str, ...]]] = []
        if moment is Moment.STEP:
            actions += [(Action.FREEZE, names) for first, names in self.frozen_at if first == step]
            actions += [(Action.EVALUATE, ())] * (step in self.eval_before)
            actions += [(Action.FORWARD, ())] * self.idle_forwards
        elif moment is Moment.OPTIMIZER:
            actions += [(Action.DROP, self.gradient_to_none)] if self.gradient_to_none else []
            actions += [(Action.EVALUATE, ())] * (step in self.eval_between)
        return [Event(action=action, moment=moment, step=step, names=names) for action, names in actions]


def every_point(
    regime: Regime, action: Action, *, runs: int | None = None, pending: bool | None = None, **fields: Any
) -> Iterator[tuple[str, Regime]]:
    """
    Regimes that together have the action at each legal point of a step, each with a description of its points.

    The points of a step are its moments, with each micro-batch where a moment has one. A regime has the action at its
    points in every step, so that a trace that reaches the next step is seen there. Without `runs`, each point has a
    separate regime; with it, the points are dealt to that many regimes in turn, so that neighbours are apart.

    `pending`: only the points at which a step's gradients are complete and wait for the optimizer, or all but these.
    `fields` are further fields of the events.
    """
    last = regime.micro_batches - 1
    points = [
        (moment, micro)
        for moment in Moment
        for micro in (range(regime.micro_batches) if moment in PER_MICRO_BATCH else (0,))
        if moment in LEGAL[action]
        and pending in (None, moment is Moment.OPTIMIZER or (moment is Moment.BACKWARD and micro == last))
    ]
    for dealt in (points[start :: runs or len(points)] for start in range(min(runs or len(points), len(points)))):
        events = tuple(
            Event(action=action, moment=moment, step=step, micro=micro, **fields)
            for step in range(regime.steps)
            for moment, micro in dealt
        )
        where = (f"{moment} of micro-batch {micro}" if moment in PER_MICRO_BATCH else moment for moment, micro in dealt)
        yield f"{action} {', '.join(where)}", replace(regime, events=(*regime.events, *events))
