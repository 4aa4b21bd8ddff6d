"""
The user's own model (--workload) in an example, and what of the scenario space it leaves out.

Its shapes, inputs and outputs are the user's. What else an example asks of it is measured once, on one batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_conformance.references.fitness import first_optimizer
from fsdp_conformance.scenarios.axes import SPACE
from fsdp_conformance.workload.definition import BatchKey, Workload
from fsdp_conformance.workload.loading import load_workload
from fsdp_conformance.workload.units import local_names

#: A reason for which values are left out.
_MODELS = "the model, its shapes, inputs and outputs are yours"
_BATCHES = "batches and losses are yours"
_UNITS = "the workload names too few units, or none that lie one after the other"

#: The area of the axes that a model of the user's decides.
_OF_MODEL = "model"

#: Units of which some can be wrapped and others not.
_FEWEST = 2

#: Names that users give to the optimizers of an axis, the best first.
_OPTIMIZERS = {"adam, foreach": ("adam-foreach", "adam"), "adamw, fused": ("adamw-fused", "adamw")}


@dataclass(frozen=True, slots=True)
class OwnModel:
    """The model of the workload that a user names."""

    spec: str
    salt: int = 0
    """Its numbers are the user's, so this is always 0."""
    dropout: bool = False
    """It draws no random numbers: otherwise it would be unfit."""
    calls: tuple[tuple[int, ...], ...] = ()
    """Its units run in the same order in every step, as far as is known."""

    @property
    def workload(self) -> Workload:
        """The workload, loaded once in each process."""
        return _loaded(self.spec)

    @property
    def training(self) -> Workload:
        """The workload with two sets made of its first optimizer: one with a group for biases, and two by turns."""
        first = first_optimizer(self.workload)
        build = self.workload.optimizers[first]
        sets = {
            f"{first}-groups": partial(_in_groups, build, rate=self.measured.rate / 2),
            f"{first}-two": partial(_by_turns, build),
        }
        return replace(self.workload, optimizer_sets={**self.workload.optimizer_sets, **sets})

    @property
    def measured(self) -> Measured:
        """The quantities that one batch shows."""
        return _measured(self.spec)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter by its name; of tied ones under the first name only."""
        return self.measured.shapes

    def is_frozen(self, parameter: str) -> bool:
        """True if a parameter does not train."""
        return parameter not in self.measured.trained

    def ignored(self) -> tuple[str, ...]:
        """The modules that the engine is told to ignore."""
        return self.workload.ignored

    def local_params(self) -> tuple[str, ...]:
        """The parameters that each rank trains by itself."""
        return tuple(sorted(local_names(self.workload, self.shapes())))

    @property
    def ties(self) -> tuple[tuple[str, str], ...]:
        """(name, other): the parameter `name` is the parameter `other`."""
        return self.measured.ties

    @property
    def uses_all(self) -> bool:
        """True if every parameter is used in every step."""
        return "unused" not in self.workload.traits

    def neighbours(self) -> tuple[str, str] | None:
        """Two units of equal parents that follow one another, such as `layers.0` and `layers.1`; None without any."""
        for first in self.workload.units:
            parent, _, number = first.rpartition(".")
            following = f"{parent}.{int(number) + 1}".lstrip(".") if number.isdecimal() else ""
            if following in self.workload.units:
                return first, following
        return None

    def optimizer(self, value: str) -> str | None:
        """The user's name of the optimizer that a value of the axis stands for; None if there is none."""
        if value in _OPTIMIZERS:
            return next((name for name in _OPTIMIZERS[value] if name in self.workload.optimizers), None)
        first = first_optimizer(self.workload)
        return {"sgd, in groups": f"{first}-groups", "sgd, two of them": f"{first}-two"}.get(value, first)


def _in_groups(
    build: Callable[[Any], Optimizer], parameters: Mapping[str, nn.Parameter], *, rate: float
) -> list[Optimizer]:
    biases = [parameter for name, parameter in parameters.items() if name.endswith("bias")]
    others = [parameter for name, parameter in parameters.items() if not name.endswith("bias")]
    return [build([{"params": biases, "lr": rate}, {"params": others}])]


def _by_turns(build: Callable[[Any], Optimizer], parameters: Mapping[str, nn.Parameter]) -> list[Optimizer]:
    # By name: the order in which an engine lists parameters is its own.
    ordered = [parameters[name] for name in sorted(parameters)]
    return [build(ordered[turn::2]) for turn in range(2) if ordered[turn::2]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The quantities of a model that one step of one rank shows."""

    shapes: dict[str, tuple[int, ...]]
    trained: tuple[str, ...]
    ties: tuple[tuple[str, str], ...]
    norms: dict[float, float]
    """The norm of all gradients, by its kind."""
    written: tuple[str, str]
    """Two parameters that a user writes: of a unit if there is one, and the last."""
    norm_of_written: float
    most_calls: int
    """How often a unit runs in a forward and its backward: more than once if it is recomputed, or called again."""
    rate: float
    """The learning rate of the first optimizer."""
    unit_class: str
    """The class of all units; empty if they have several."""
    has_tensor_output: bool
    has_floating_input: bool
    """The first argument is a floating-point tensor."""
    is_float32: bool


@lru_cache(maxsize=4)
def _loaded(spec: str) -> Workload:
    return load_workload(spec)


@lru_cache(maxsize=4)
def _measured(spec: str) -> Measured:
    workload = _loaded(spec)
    model = workload.build(0)
    parameters = dict(model.named_parameters())
    trained = tuple(name for name, each in parameters.items() if each.requires_grad)
    ties = tuple(_ties(model, parameters))
    units = [model.get_submodule(part) for unit in workload.units for part in unit.split("+")]
    calls: Counter[nn.Module] = Counter()
    for unit in units:
        unit.register_forward_pre_hook(lambda module, _: calls.update([module]))
    batch = workload.batch(BatchKey(step=0))
    output = model(*batch.args, **batch.kwargs)
    torch.autograd.backward(workload.loss(output, batch))
    gradients = {name: parameters[name].grad for name in trained}
    written = _written(workload, trained, ties)
    optimizer = workload.optimizers[first_optimizer(workload)]([parameters[name] for name in trained])
    classes = {type(unit).__name__ for unit in units}
    return Measured(
        shapes={name: tuple(each.shape) for name, each in parameters.items()},
        trained=trained,
        ties=ties,
        norms={kind: _norm(gradients.values(), kind) for kind in (1.0, 2.0, math.inf)},
        written=written,
        norm_of_written=_norm([gradients[name] for name in set(written)], 2.0),
        most_calls=max(calls.values(), default=1),
        rate=float(optimizer.param_groups[0].get("lr", 1.0)),
        unit_class=classes.pop() if len(classes) == 1 else "",
        has_tensor_output=isinstance(output, Tensor) and output.is_floating_point(),
        has_floating_input=bool(batch.args) and isinstance(batch.args[0], Tensor) and batch.args[0].is_floating_point(),
        is_float32={each.dtype for each in parameters.values() if each.is_floating_point()} == {torch.float32},
    )


def _written(workload: Workload, trained: tuple[str, ...], ties: tuple[tuple[str, str], ...]) -> tuple[str, str]:
    others = {*local_names(workload, trained), *(name for pair in ties for name in pair)}
    names = [name for name in trained if name not in others] or list(trained)
    of_units = tuple(f"{part}." for unit in workload.units for part in unit.split("+"))
    return next((name for name in names if name.startswith(of_units)), names[0]), names[-1]


def _ties(model: nn.Module, parameters: dict[str, nn.Parameter]) -> Iterator[tuple[str, str]]:
    names = {id(parameter): name for name, parameter in parameters.items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in parameters:
            yield name, names[id(parameter)]


def _norm(gradients: Iterable[Tensor | None], kind: float) -> float:
    norms = [torch.linalg.vector_norm(each.double(), kind) for each in gradients if each is not None]
    return float(torch.linalg.vector_norm(torch.stack(norms), kind)) if norms else 1.0


def left_out(own: OwnModel, world_sizes: Iterable[int]) -> dict[tuple[str, str], str]:
    """The values of the scenario space that are not drawn for the model, as axis and name, each with the reason."""
    reasons: dict[tuple[str, str], str] = {}

    def leave_out(reason: str, axis: str, *names: str) -> None:
        for name in names or [value.name for value in SPACE.by_name[axis].values[1:]]:
            reasons.setdefault((axis, name), reason)

    for axis in SPACE.axes:
        if axis.area == _OF_MODEL:
            leave_out(_MODELS, axis.name)
    leave_out(_MODELS, "units", "nested", "each block and both ends")
    leave_out(_MODELS, "ignored")
    leave_out(_BATCHES, "batches")
    leave_out(_BATCHES, "overflow")
    _leave_out_units(own, leave_out)
    _leave_out_values(own, leave_out)
    if not all(size % ranks == 0 for ranks in world_sizes for size in _second_sizes(own)):
        leave_out("the second dim of a parameter cannot be divided by each number of ranks", "shard dim")
    return reasons


def _leave_out_units(own: OwnModel, leave_out: Callable[..., None]) -> None:
    units = own.workload.units
    if not units:
        leave_out(_UNITS, "units", "only the root")
        leave_out(_UNITS, "gathered by hand")
        leave_out(_UNITS, "accumulation", "deferred in one unit")
    if len(units) < _FEWEST:
        leave_out(_UNITS, "units", "some blocks")
        leave_out(_UNITS, "resumed", "in other units")
    if own.neighbours() is None or own.measured.most_calls > 1:
        leave_out(_UNITS, "units", "two blocks as one")
    if not own.measured.unit_class:
        leave_out("the units have no class, or several", "units", "chosen by class")
    if own.workload.local_units:
        leave_out("some units are not sharded over all ranks", "units", "chosen by class", "chosen by size")


def _leave_out_values(own: OwnModel, leave_out: Callable[..., None]) -> None:
    workload, measured = own.workload, own.measured
    for name in _OPTIMIZERS:
        if own.optimizer(name) is None:
            leave_out("the workload has no such optimizer", "optimizer", name)
    leave_out("a unit with its own dtype needs a model that casts", "precision", "bfloat16, one unit in float32")
    if not measured.is_float32:
        leave_out("the model is not in float32", "precision")
    if workload.build_on_meta is None:
        leave_out("the workload has no build_on_meta", "built")
    if workload.fuse is None:
        leave_out("the workload has no fuse, which would make its model raise", "exception")
    if not measured.has_tensor_output:
        leave_out("the output is not a tensor", "derivatives", "of outputs")
    if not measured.has_floating_input:
        leave_out(
            "the first input is not a floating-point tensor",
            "derivatives", "of inputs before a step", "of inputs after a backward",
        )  # fmt: skip
    if own.local_params():
        reason = "some parameters differ between ranks"
        for axis in ("checkpoints", "state dicts", "resumed", "clipping", "communication hook", "gradients divided by"):
            leave_out(reason, axis)
        leave_out(reason, "initial values", "from the first rank")


def _second_sizes(own: OwnModel) -> set[int]:
    return {shape[1] for shape in own.shapes().values() if len(shape) > 1}
