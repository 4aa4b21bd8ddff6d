"""
Finds out if a user's workload is fit to judge an engine: all of its problems at once, or what cases can ask of it.

A comparison with an unfit workload would pass for a wrong engine, or accuse a right one: data that are equal on all
ranks hide a missing average, and a training that differs from itself differs from every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_conformance.errors import ConfigError, NotExact, ReferencesDisagree
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.listing import some
from fsdp_conformance.references.exactness import assert_exact
from fsdp_conformance.references.reference_set import Kind, from_histories
from fsdp_conformance.references.self_check import SelfCheck
from fsdp_conformance.references.single_process import Order, single_process_histories
from fsdp_conformance.references.tolerance import CEILING
from fsdp_conformance.workload.definition import Batch, BatchKey, Regime, Workload
from fsdp_conformance.workload.loading import described, load_workload

#: Ranks of the trainings that show whether a workload is exact.
_RANKS = 2

#: Steps of Adam that the cases make.
ADAM_STEPS = 5

#: Trait of a workload with parameters that get no gradient.
_UNUSED = "unused"

#: How problems of `SelfCheck` begin.
_EQUAL_BATCHES, _EQUAL_GRADIENTS = "the batch must depend on the rank", "gradients of "

#: Advice for a workload that rounds too much.
_NOISY = (
    "A fault could hide in so much rounding: build the model in float32, and give it larger initial values, a higher "
    "learning rate or, for Adam, a larger epsilon"
)

#: Numbers of ranks that are tried: parameters move least where most batches are averaged.
_WORLDS = (2, 4)

#: Cases that clip use the first optimizer. Parameters move less there, by up to this factor.
_MARGIN = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitness:
    """The result of an examination."""

    problems: tuple[str, ...]
    """The reasons why the workload cannot judge an engine; empty if it can."""
    has: tuple[str, ...] = ()
    """The things that cases can ask of it: names of `contract.case.OF_WORKLOAD`, sorted."""
    name: str = ""


def fitness_of(spec: str) -> Fitness:
    """The fitness of the workload that a user names. Its code runs in this process."""
    try:
        workload = load_workload(spec)
    except ConfigError as error:
        return Fitness(problems=tuple(error.problems))
    problems = tuple(dict.fromkeys(problems_of(workload)))
    has = () if problems else tuple(sorted(_properties(workload)))
    return Fitness(problems=problems, has=has, name=str(workload.name))


def problems_of(workload: Workload) -> Iterator[str]:
    """Every problem of a workload, except for those that only show once an earlier one is fixed."""
    wrong_fields = list(_wrong_fields(workload))
    yield from wrong_fields
    if wrong_fields:
        return
    model = yield from _attempt("build(0)", lambda: workload.build(0), nn.Module)
    batch = yield from _attempt("batch(BatchKey(step=0))", lambda: workload.batch(BatchKey(step=0)), Batch)
    if model is not None:
        yield from _wrong_optimizers(workload, model)
        if workload.build(0) is model:
            yield "build must return a new model each time, but returned the same object twice"
    if model is None or batch is None:
        return
    in_training = list(_wrong_training(workload, model, batch))
    yield from in_training
    if in_training:
        return
    problems = list(_differing(workload))
    for group in SelfCheck(workload).all():
        problems += _folded(_of_group(group))
    if any(problem.startswith(_EQUAL_BATCHES) for problem in problems):
        # Equal gradients follow from that.
        problems = [problem for problem in problems if not problem.startswith(_EQUAL_GRADIENTS)]
    yield from problems
    if not problems:
        yield from _noise(workload)


def _wrong_fields(workload: Workload) -> Iterator[str]:
    for name in ("build", "batch", "loss"):
        if not callable(getattr(workload, name)):
            yield f"{name} must be a function, got {type(getattr(workload, name)).__name__}"
    if not workload.optimizers:
        yield "optimizers must name at least one, such as {'sgd': partial(torch.optim.SGD, lr=0.1)}, got none"
    if not isinstance(getattr(torch, str(workload.dtype), None), torch.dtype):
        yield f"dtype must be the name of one of torch's, such as 'float32', got {workload.dtype!r}"


def _attempt(what: str, call: Callable[[], Any], kind: type) -> Any:
    """A generator of problems that returns what the call returned, or None."""
    try:
        value = call()
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        yield f"{what} raised {described(error)}"
        return None
    if not isinstance(value, kind):
        yield f"{what} must return a {kind.__name__}, got {type(value).__name__}"
        return None
    return value


def _wrong_optimizers(workload: Workload, model: nn.Module) -> Iterator[str]:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        yield "the model must have a parameter that trains, got none"
        return
    for name, build in workload.optimizers.items():
        yield from _attempt(f"the optimizer {name!r}", partial(build, trainable), torch.optim.Optimizer)


def _wrong_training(workload: Workload, model: nn.Module, batch: Batch) -> Iterator[str]:
    """Problems of one forward and backward."""
    try:
        output = model(*batch.args, **batch.kwargs)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        yield f"the forward of the model with batch.args and batch.kwargs raised {described(error)}"
        return
    loss = yield from _attempt("loss(output, batch)", lambda: workload.loss(output, batch), Tensor)
    if loss is None:
        return
    if loss.dim() or not loss.is_floating_point():
        yield f"loss(output, batch) must be a scalar in floating point, got {loss.dtype} of shape {tuple(loss.shape)}"
        return
    if not loss.requires_grad:
        yield "loss(output, batch) must depend on the parameters, got a tensor without a gradient: was it detached?"
        return
    try:
        torch.autograd.backward(loss)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        yield f"the backward of the loss raised {described(error)}"
        return
    if _UNUSED not in workload.traits:
        idle = [name for name, each in model.named_parameters() if each.requires_grad and each.grad is None]
        if idle:
            yield (
                f"every parameter that trains must get a gradient, but {some(idle, 3)} did not: use it, freeze it with "
                f"requires_grad_(False), or give the workload the trait {_UNUSED!r}"
            )


def _differing(workload: Workload) -> Iterator[str]:
    """Problems if torch's random numbers change a training."""
    with torch.random.fork_rng(devices=[]):
        first, second = (_gradients(workload, seed) for seed in (1, 2))
    differing = [name for name, value in first.items() if not _same(value, second.get(name))]
    if differing:
        yield (
            f"training must be the same every time, but {some(differing, 3)} differs with torch's random numbers: set "
            "dropout to 0, or draw its masks from a number in the batch"
        )


def _gradients(workload: Workload, seed: int) -> dict[str, Tensor | None]:
    """The loss, and the gradients by name."""
    model, batch = workload.build(0), workload.batch(BatchKey(step=0))
    torch.manual_seed(seed)
    loss = workload.loss(model(*batch.args, **batch.kwargs), batch)
    torch.autograd.backward(loss)
    gradients = {f"the gradient of {name!r}": each.grad for name, each in model.named_parameters()}
    return {"the loss": loss.detach(), **gradients}


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def _folded(problems: list[str]) -> list[str]:
    """The problems, with the first of those about gradients in place of all."""
    gradient_problems = [problem for problem in problems if problem.startswith(_EQUAL_GRADIENTS)]
    if len(gradient_problems) < 2:
        return problems
    others = [problem for problem in problems if problem not in gradient_problems]
    return [*others, f"{gradient_problems[0]}; the same is true of {len(gradient_problems) - 1} more"]


def _of_group(group: Iterator[str]) -> list[str]:
    """The problems of one group of checks of `SelfCheck`; an exception is one."""
    problems: list[str] = []
    try:
        for problem in group:
            problems.append(problem)  # noqa: PERF402 - what came before an exception counts
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        problems.append(f"for another rank, step or micro-batch, the workload raised {described(error)}")
    return problems


def _noise(workload: Workload) -> Iterator[str]:
    """Problems if the workload does not train in float64, or if float32 rounds too much."""
    for regime, world_size in ((regime, size) for regime in _regimes(workload) for size in _WORLDS):
        try:
            problem = _disagreement(workload, regime, world_size)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            yield f"the model must train in float64, too, but with {regime.optimizer!r} it raised {described(error)}"
            return
        if problem:
            yield f"with {regime.optimizer!r} on {world_size} ranks: {problem}. {_NOISY}"
            return


def _regimes(workload: Workload) -> list[Regime]:
    """The trainings that are tried: those of most cases, and Adam's."""
    first = first_optimizer(workload)
    others = [Regime(optimizer="adam", steps=ADAM_STEPS)] if "adam" in workload.optimizers else []
    return [Regime(optimizer=first), *(regime for regime in others if first != "adam")]


def first_optimizer(workload: Workload) -> str:
    """The optimizer of the cases that are about no other one: "sgd", or else the first."""
    return "sgd" if "sgd" in workload.optimizers else next(iter(workload.optimizers))


def _disagreement(workload: Workload, regime: Regime, world_size: int) -> str:
    """
    Say how far float64 and two orders of adding in the model's dtype disagree, or how little a parameter moves compared
    with its own rounding; empty if a comparison would see a weak fault.
    """

    def trained(dtype: torch.dtype, order: Order) -> TrainingHistory:
        return single_process_histories(workload, regime, world_size=world_size, dtype=dtype, order=order)[0]

    own_dtype = getattr(torch, workload.dtype)
    histories: dict[str, TrainingHistory] = {"float64": trained(torch.float64, Order.SUM)}
    for name, order in (("all-reduce", Order.SUM), ("torch-ddp", Order.RECIPROCAL)):
        histories[name] = replace(trained(own_dtype, order), source=name)
    references = from_histories(workload, regime, rank=0, world_size=world_size, histories=dict(histories), absent={})
    try:
        references.agree()
    except ReferencesDisagree as error:
        return str(error).partition(" [")[0]
    last = regime.steps - 1
    ceiling = CEILING if regime.optimizer != first_optimizer(workload) else CEILING / _MARGIN
    for name in references.expected.steps[last].params:
        bound = references.bound(Kind.PARAMETER, last, name)
        if not bound.vanishing and bound.relative + bound.rounding > ceiling:
            return (
                f"parameter {name!r} moves by {bound.scale:.2g} in {regime.steps} steps, and rounding is "
                f"{bound.relative + bound.rounding:.2g} of that, more than {ceiling:g}"
            )
    return ""


def _properties(workload: Workload) -> Iterator[str]:
    """The names of the things that cases can ask of the workload, and that it has."""
    model = workload.build(0)
    yield "own_workload"
    parameters = dict(model.named_parameters())
    floating = [each for each in parameters.values() if each.is_floating_point()]
    yield from (
        name
        for name, has in {
            "own_adam": "adam" in workload.optimizers,
            "own_meta": workload.build_on_meta is not None,
            "own_units": bool(workload.units),
            "own_frozen": not all(each.requires_grad for each in parameters.values()),
            "own_tied": len(list(model.named_parameters(remove_duplicate=False))) > len(parameters),
            "own_float32": {each.dtype for each in floating} == {torch.float32},
            "own_exact": is_exact(workload, Regime(optimizer=first_optimizer(workload)), _RANKS),
        }.items()
        if has
    )


def is_exact(workload: Workload, regime: Regime, world_size: int) -> bool:
    """True if the workload trains the same bits in every order of adding, and in float64."""
    try:
        assert_exact(replace(workload, exact=True), regime, world_size)
    except NotExact:
        return False
    return True
