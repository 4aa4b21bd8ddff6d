"""
The values of a step with one mistake in it: stale parameters, another batch, a lost momentum.

`explain` compares a wrong value with these. Each is computed in this process and in float64, from the state that the
reference had before the step: up to there the implementation was right. Every result is a phrase and a value.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_conformance.diagnosis.causes import IN_LOW_PRECISION
from fsdp_conformance.history.training import Tensors
from fsdp_conformance.references.loop import CLIP_EPSILON
from fsdp_conformance.references.reference_set import Kind, References, values
from fsdp_conformance.references.structures import placed, walk
from fsdp_conformance.workload.definition import Batch, BatchKey
from fsdp_conformance.workload.events import Moment
from fsdp_conformance.workload.units import ROOT, owner

#: A mistake in one phrase, and the value that it leads to.
Supposition = tuple[str, Tensor]

#: Models with more elements, or trainings with more backwards in a step, are not run again.
_MAX_NUMEL = 200_000
_MAX_BACKWARDS = 24
_MAX_GROUPS = 16
_MAX_CALLS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mistake:
    """A forward and backward with something wrong in it."""

    phrase: str
    params: Tensors
    key: Callable[[BatchKey], BatchKey] | None = None
    """Whose inputs are used; None: the right ones."""
    dtype: torch.dtype = torch.float64
    alone: frozenset[str] = frozenset()
    """Names at which a tied parameter is replaced by a copy. The gradient is then that of the copy."""
    call: tuple[str, int] | None = None
    """A module, and the only one of its calls in a forward that gives its parameters a gradient."""
    call_in: frozenset[int] = frozenset()
    """The micro-batches of which that is so."""


def supposed_losses(references: References, step: int, micro: int) -> Iterator[Supposition]:
    """This rank's loss of a micro-batch under each mistake."""
    if not _is_small(references):
        return
    rank = references.rank
    for mistake in (*_mistakes(references, step, micro), *_others_batches(references, step)):
        if _is_possible(references, step, mistake, rank, micro):
            yield mistake.phrase, _Replay(references, step, mistake, rank).loss(micro)


def supposed_gradients(references: References, step: int, losses: Sequence[Tensor]) -> Iterator[tuple[str, Tensors]]:
    """
    The mean gradients of a step under each mistake, by parameter name.

    Mistakes that do not give this rank's `losses`, as they were seen in that step, are left out.
    """
    backwards = references.world_size * references.regime.micro_batches
    if not _is_small(references) or references.local or backwards > _MAX_BACKWARDS or _has_own_buffers(references):
        return
    mistakes = [
        *_mistakes(references, step, references.regime.micro_batches - 1),
        *_one_batch(references, step),
        *_come_apart(references, step),
        *_one_call(references, step),
    ]
    for mistake in mistakes:
        places = itertools.product(range(references.world_size), range(references.regime.micro_batches))
        if not all(_is_possible(references, step, mistake, rank, micro) for rank, micro in places):
            continue
        own = _Replay(references, step, mistake, references.rank)
        if not own.has(losses):
            continue
        others = (rank for rank in range(references.world_size) if rank != references.rank)
        runs = [own, *(_Replay(references, step, mistake, rank) for rank in others)]
        by_run = [run.gradients() for run in runs]
        names = {name for grads in by_run for name in grads}
        yield mistake.phrase, {name: _total(name, by_run) / _divisor(references) for name in names}


def supposed_norms(references: References, step: int) -> Iterator[Supposition]:
    """The total norm of a step's gradients under each mistake in how it is formed."""
    grads = _before_clipping(references, step)
    order, world_size = references.regime.norm_type, references.world_size
    norm = partial(_norm, order=order)
    right = norm(grads.values())
    if order == 2.0:
        yield "the norm is not a square root", right**2
        if world_size > 1:
            yield "the squared norms of replicated gradients are added over ranks", right * world_size**0.5
    if world_size > 1:
        for rank, steps in enumerate(references.contributions()):
            own = [_sum([micro.get(name) for micro in steps[step]]) for name in grads]
            whose = "this rank's" if rank == references.rank else f"rank {rank}'s"
            yield f"the norm of {whose} gradients before they were reduced", norm(g for g in own if g is not None)
    for other in (1.0, 2.0, float("inf")):
        if other != order:
            yield f"the {other:g}-norm is taken instead of the {order:g}-norm", _norm(grads.values(), order=other)
    if world_size > 1:
        for by_rank in _shards(references, grads):
            yield from _norms_of_ranks(references, by_rank)
    yield from _norms_of_copies(references, grads)
    yield from _norms_of_scaled(references, step, grads)
    units: dict[str, list[Tensor]] = {}
    for name, grad in grads.items():
        units.setdefault(owner(name, references.workload.units), []).append(grad)
    for unit, parts in units.items() if len(units) > 1 else ():
        if len(parts) > 1:
            yield f"the norm of unit {unit!r} alone" if unit != ROOT else "the norm of the root alone", norm(parts)
    for name in grads if len(grads) > 1 else ():
        yield f"{name!r} is left out of the norm", norm(value for key, value in grads.items() if key != name)
        yield f"the norm of {name!r} alone", norm([grads[name]])


def _before_clipping(references: References, step: int) -> Tensors:
    """The gradients of a step; where only clipped ones are known, those divided by the factor."""
    history, most = references.expected, references.regime.max_norm
    seen, norm = values(history, Kind.GRADIENT, step), history.steps[step].grad_norm
    factor = 1.0
    if not seen and most is not None and norm is not None:
        seen = values(history, Kind.CLIPPED, step)
        factor = min(1.0, most / (float(norm) + CLIP_EPSILON))
    return {name: value.double() / factor for name, value in seen.items() if isinstance(value, Tensor)}


def _norms_of_ranks(references: References, by_rank: Sequence[list[Tensor]]) -> Iterator[Supposition]:
    """Norms that miss a rank's shards, have one rank's alone, or are put together from norms in a wrong way."""
    order, norms = references.regime.norm_type, [_norm(shard, order=references.regime.norm_type) for shard in by_rank]
    for rank in range(len(norms)):
        whose = "this rank's" if rank == references.rank else f"rank {rank}'s"
        # Of two ranks, one alone is the other left out; whether each has its own norm shows on both together.
        if rank == references.rank or len(norms) > 2:
            yield f"the norm of {whose} shards alone", norms[rank]
        rest = [value for other, value in enumerate(norms) if other != rank]
        yield f"rank {rank}'s shards are left out of the norm", _norm(rest, order=order)
    total = torch.stack(norms)
    if order != 1.0:
        how = "the largest elements" if order == float("inf") else "the norms"
        yield f"{how} of the ranks are added: they should be put together as a norm is", total.sum()
    yield "the norms of the ranks are averaged", total.mean()


def _norms_of_copies(references: References, grads: Tensors) -> Iterator[Supposition]:
    """Norms in which some gradients count several times."""
    order, world_size = references.regime.norm_type, references.world_size
    if order == float("inf"):
        return
    for copies in range(2, world_size):
        if world_size % copies == 0:
            value = _norm(grads.values(), order=order) * copies ** (1 / order)
            yield f"each gradient counts {copies} times in the norm: once in each of so many replicas", value

    def counted(names: frozenset[str], times: int) -> Tensor:
        several = [grad for name in names for grad in [grads[name]] * (times - 1)]
        return _norm([*grads.values(), *several], order=order)

    tied = {names[0] for names in _uses(references.workload.build(references.rank)).values() if len(names) > 1}
    for name in sorted(tied & grads.keys()):
        yield (
            f"the tied parameter {name!r} counts twice in the norm: once for each of its names",
            counted(frozenset({name}), 2),
        )
    if world_size < 2:
        return
    ignored = frozenset(
        name for name in grads if any(name.startswith(f"{module}.") for module in references.workload.ignored)
    )
    if ignored:
        phrase = "ignored parameters count once for each rank in the norm: every rank has them whole"
        yield phrase, counted(ignored, world_size)
    for numel in sorted({grad.numel() for grad in grads.values()})[:-1]:
        small = frozenset(name for name, grad in grads.items() if grad.numel() <= numel)
        if small != ignored:
            phrase = f"small parameters count once for each rank in the norm: those of at most {numel} elements"
            yield phrase, counted(small, world_size)


def _norms_of_scaled(references: References, step: int, grads: Tensors) -> Iterator[Supposition]:
    """Norms before gradients were divided by the loss scale."""
    scale = _loss_scale(references, step)
    if scale is None or scale == 1:
        return
    order = references.regime.norm_type
    yield "before unscaling: the norm is that of the scaled gradients", _norm(grads.values(), order=order) * scale
    for name in grads if len(grads) > 1 else ():
        one = [grad * scale if key == name else grad for key, grad in grads.items()]
        yield f"the gradient of {name!r} is not unscaled: the norm has it with the loss scale", _norm(one, order=order)


def _loss_scale(references: References, step: int) -> float | None:
    """The scale of a step's losses."""
    if step:
        scale = references.expected.steps[step - 1].loss_scale
        return None if scale is None else float(scale)
    return references.regime.init_scale


def supposed_loss_scales(references: References, step: int) -> Iterator[Supposition]:
    """The scale after a step, if the scaler saw an overflow or counted steps wrongly."""
    before, right = _loss_scale(references, step), references.expected.steps[step].loss_scale
    if before is None or right is None:
        return
    if right < before:
        yield "the overflow was not noticed: the loss scale stays", torch.tensor(before)
        yield "the overflow was not noticed: the loss scale grows", torch.tensor(2 * before)
        return
    yield "the loss scale was reduced: no gradient overflowed", torch.tensor(before / 2)
    interval = references.regime.growth_interval
    if right > before:
        yield f"the loss scale did not grow: {interval} steps in a row had no overflow", torch.tensor(before)
    else:
        several = " (or micro-batches were counted)" if references.regime.micro_batches > 1 else ""
        fact = f"fewer than {interval} steps in a row had no overflow{several}"
        yield f"the loss scale grew too early: {fact}", torch.tensor(2 * before)


def supposed_clipped(references: References, step: int, name: str) -> Iterator[Supposition]:
    """A gradient after clipping under each mistake in it, given the right one before."""
    norm, most = references.expected.steps[step].grad_norm, references.regime.max_norm
    grad = _before_clipping(references, step).get(name)
    if grad is None or norm is None or most is None:
        return
    ratio = most / (norm.double() + CLIP_EPSILON)
    factor = ratio.clamp(max=1.0)
    if ratio < 1:
        yield "the gradient was not clipped", grad
        yield "the gradient was clipped twice", grad * factor**2
    else:
        yield "the gradient was scaled to the maximum: its norm is below it", grad * ratio
    scale = _loss_scale(references, step)
    if scale is not None and scale != 1:
        yield (
            "the gradient was clipped before unscaling",
            grad * (most / (norm.double() * scale + CLIP_EPSILON)).clamp(max=1.0),
        )
        yield "the gradient was not unscaled", grad * factor * scale


def _shards(references: References, grads: Tensors) -> Iterator[list[list[Tensor]]]:
    """By rank: its part of the gradients, as the rows of each parameter, and as a part of each flat unit."""
    world_size = references.world_size
    units: dict[str, list[Tensor]] = {}
    for name, grad in grads.items():
        units.setdefault(owner(name, references.workload.units), []).append(grad.flatten())
    whole = [*(grad.reshape(-1) if grad.dim() < 1 else grad for grad in grads.values())]
    for parts in (whole, [torch.cat(unit) for unit in units.values()]):
        yield [
            [torch.split(part, max(1, -(-len(part) // world_size)))[rank] for part in parts
             if rank * -(-len(part) // world_size) < len(part)]
            for rank in range(world_size)
        ]  # fmt: skip


def supposed_parameters(references: References, step: int, name: str) -> Iterator[Supposition]:
    """A parameter after the optimizer step under each mistake in that step, given the right gradients."""
    history = references.expected
    initial, regime = history.initial_params.get(name), references.regime
    if initial is None or not initial.is_floating_point():
        return
    grads = [_stepped_with(references, earlier, name) for earlier in range(step + 1)]
    grad, before = grads[step], grads[step - 1] if step else None
    if grad is None or regime.optimizer not in references.workload.optimizers:
        return
    replay = partial(_after_steps, references, name, grads)
    if not torch.allclose(replay(_plain(grad)), history.steps[step].params[name].double(), rtol=1e-6, atol=1e-9):
        # The optimizer does more than this replay can know, such as treating parameters differently.
        return
    for phrase, lost in (
        ("a write of the user was lost: the optimizer stepped from the value before it", {Moment.STEP}),
        ("a write of the user was lost: the value is that before it", {Moment.END}),
        ("writes of the user were lost: those before and after the step", {Moment.STEP, Moment.END}),
    ):
        if all(regime.written(step, moment, name) != 1 for moment in lost):
            yield phrase, replay(_plain(grad), lost=lost)
    if (written := regime.gradient_written(step, name)) not in (0, 1):
        yield "what the user did to the gradient was lost", replay(_plain(grad / written))
    yield "the optimizer's state was lost: the step was made with a new one", replay(_without_state(grad))
    yield "the optimizer stepped twice", replay(_plain(grad), _plain(grad))
    if not step:
        phrase = "the optimizer's step counter advanced twice: a step with zeros came before the first one"
        yield phrase, replay(_plain(torch.zeros_like(grad)), _plain(grad))
    yield "the gradient was lost: the step was made with zeros", replay(_plain(torch.zeros_like(grad)))
    if before is not None:
        yield "the step was made with the previous step's gradient", replay(_plain(before))
        yield "the previous step's gradient was not cleared", replay(_plain(grad + before))
    for phrase, wrong in supposed_clipped(references, step, name):
        yield phrase, replay(_plain(wrong))
    scale = _loss_scale(references, step)
    if scale is not None and scale != 1 and regime.max_norm is None:
        yield "stepped with scaled gradients: they were not divided by the loss scale", replay(_plain(grad * scale))
    yield "weight decay was left out", replay(_with_decay(grad, 0.0))
    yield "weight decay was applied twice", replay(_with_decay(grad, 2.0))
    yield "the optimizer's step counter did not advance", replay(_with_counter(grad, -1))
    yield "the optimizer's step counter advanced twice", replay(_with_counter(grad, 1))
    micro_batches = regime.micro_batches
    if micro_batches > 2:
        phrase = f"the optimizer's step counter advanced {micro_batches} times: once for each micro-batch"
        yield phrase, replay(_with_counter(grad, micro_batches - 1))


def _is_possible(references: References, step: int, mistake: _Mistake, rank: int, micro: int) -> bool:
    """True if the inputs that a mistake takes have the shapes of the right ones: the target would not fit others."""
    if mistake.key is None:
        return True
    batch = references.workload.batch
    key = BatchKey(step=step, micro=micro, rank=rank, world_size=references.world_size)
    return _shapes(batch(mistake.key(key))) == _shapes(batch(key))


def _shapes(batch: Batch) -> list[tuple[str, object]]:
    """Of all tensors that a model is called with, by their paths."""
    return [
        (path, item.shape if isinstance(item, Tensor) else type(item))
        for path, item in walk((batch.args, batch.kwargs))
    ]


# --- one forward and backward -----------------------------------------------------------------------------------------


class _Replay:
    """One rank's forward and backward in a step, with a mistake."""

    def __init__(self, references: References, step: int, mistake: _Mistake, rank: int) -> None:
        self.references = references
        self.step = step
        self.mistake = mistake
        self.rank = rank
        self.model = references.workload.build(rank).to(mistake.dtype)
        self._load()
        self.model.train()
        self._alone = _given_own_parameters(self.model, mistake.alone)

    def loss(self, micro: int) -> Tensor:
        """Of one micro-batch, in float64."""
        with torch.no_grad():
            return self._loss(micro).double()

    def has(self, losses: Sequence[Tensor]) -> bool:
        """True if these are its losses."""
        low = self.mistake.phrase.startswith(IN_LOW_PRECISION)
        rtol, atol = (0.05, 1e-3) if low else (1e-4, 1e-6)
        return all(
            torch.allclose(self.loss(micro), seen.double(), rtol=rtol, atol=atol) for micro, seen in enumerate(losses)
        )

    def gradients(self) -> Tensors:
        """Summed over the step's micro-batches, in float64."""
        for micro in range(self.references.regime.micro_batches):
            torch.autograd.backward(self._loss(micro))
        if self._alone:
            return {name: p.grad.double() for name, p in self._alone.items() if p.grad is not None}
        return {name: p.grad.double() for name, p in self.model.named_parameters() if p.grad is not None}

    def _loss(self, micro: int) -> Tensor:
        workload = self.references.workload
        key = BatchKey(step=self.step, micro=micro, rank=self.rank, world_size=self.references.world_size)
        # An engine sees what the model is called with; the loss and its target are the user's.
        right = self._placed(workload.batch(key))
        seen = right if self.mistake.key is None else self._placed(workload.batch(self.mistake.key(key)))
        call = self.mistake.call
        with nullcontext() if call is None or micro not in self.mistake.call_in else _only_call(self.model, *call):
            return workload.loss(self.model(*seen.args, **seen.kwargs), right)

    def _placed(self, batch: Batch) -> Batch:
        return placed(batch, torch.device("cpu"), self.mistake.dtype)

    def _load(self) -> None:
        history = self.references.expected
        buffers = history.steps[self.step - 1].buffers if self.step else history.initial_buffers
        frozen = self.references.regime.frozen(self.step)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.mistake.params[name])
            for name, buffer in self.model.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
        if frozen is not None:
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(name not in frozen)


def _mistakes(references: References, step: int, micro: int) -> Iterator[_Mistake]:
    """Those that concern a single rank's forward."""
    now, left = _params_before(references, step), _params_left(references, step)
    if any(not torch.equal(now[name], value) for name, value in left.items()):
        yield _Mistake(phrase="a write of the user was lost: forward saw the values before it", params=left)
    if step:
        before = _params_before(references, step - 1)
        yield _Mistake(phrase="stale parameters: forward saw those of the previous step", params=before)
        for where, names in _groups(references, now).items():
            mixed = {name: before[name] if name in names else value for name, value in now.items()}
            yield _Mistake(phrase=f"stale parameters: {where} computed with those of the previous step", params=mixed)
    if micro == 1 and references.regime.optimizer in references.workload.optimizers:
        yield _Mistake(
            phrase="the optimizer stepped after the first micro-batch: forward of the second saw the new parameters",
            params=_after_first_micro_batch(references, step, now),
        )  # fmt: skip
    if step or micro:
        yield _Mistake(phrase="stale inputs: forward saw the previous micro-batch", params=now, key=partial(
            _previous_batch, references.regime.micro_batches
        ))  # fmt: skip
    for order, placed_by in _ORDERS.items() if references.world_size > 1 else ():
        for layout, moved in (("each unit is one", _by_unit), ("each parameter is its own", _by_parameter)):
            yield _Mistake(
                phrase=f"parameters in the wrong place: gathered {order}, if {layout} flat tensor",
                params=moved(references, now, placed_by),
            )  # fmt: skip
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        rounded = {n: value.to(dtype).to(value.dtype) for n, value in now.items()}
        yield _Mistake(phrase=f"{IN_LOW_PRECISION}{name}: with parameters that were rounded to it", params=rounded)
        yield _Mistake(phrase=f"{IN_LOW_PRECISION}{name}", params=now, dtype=dtype)


def _groups(references: References, params: Tensors) -> dict[str, set[str]]:
    """Parameters that may be stale on their own: those of a unit, and those of a module. Few enough, or none."""
    groups: dict[str, set[str]] = {}
    for name in params:
        unit, module = owner(name, references.workload.units), name.rpartition(".")[0]
        for where in ("the root" if unit == ROOT else f"unit {unit!r}", f"module {module!r}" if module else ""):
            if where:
                groups.setdefault(where, set()).add(name)
    distinct = {frozenset(names): where for where, names in reversed(groups.items()) if len(names) < len(params)}
    return {where: set(names) for names, where in distinct.items()} if len(distinct) <= _MAX_GROUPS else {}


def _after_first_micro_batch(references: References, step: int, now: Tensors) -> Tensors:
    """The parameters if the optimizer stepped with the gradients of micro-batch 0 alone."""
    stepped: Tensors = {}
    for name, value in now.items():
        parts = [rank[step][0].get(name) for rank in references.contributions()]
        grad = _sum(parts)
        grads = [_stepped_with(references, earlier, name) for earlier in range(step)]
        last = () if grad is None else (_plain(grad / _divisor(references)),)
        # What the user writes after the step is not there yet.
        stepped[name] = _after_steps(references, name, [*grads, None], *last, lost={Moment.END}) if last else value
    return stepped


#: Wrong orders of gathered shards.
_ORDERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "in reverse": lambda shards: shards.flip(0),
    "from the next rank on": lambda shards: shards.roll(-1, 0),
    "from the previous rank on": lambda shards: shards.roll(1, 0),
}


def _by_unit(references: References, params: Tensors, placed_by: Callable[[Tensor], Tensor]) -> Tensors:
    """All parameters, where the flat shards of each unit are in another order."""
    units: dict[str, list[str]] = {}
    for name in params:
        units.setdefault(owner(name, references.workload.units), []).append(name)
    exchanged: Tensors = {}
    for names in units.values():
        flat = _in_order(torch.cat([params[name].flatten() for name in names]), references.world_size, placed_by)
        parts = torch.split(flat, [params[name].numel() for name in names])
        exchanged |= {name: part.view(params[name].shape) for name, part in zip(names, parts, strict=True)}
    return {name: exchanged[name] for name in params}


def _by_parameter(references: References, params: Tensors, placed_by: Callable[[Tensor], Tensor]) -> Tensors:
    """The same for the rows of each parameter."""
    world_size = references.world_size
    return {name: _in_order(value, world_size, placed_by) if value.dim() else value for name, value in params.items()}


def _in_order(value: Tensor, world_size: int, placed_by: Callable[[Tensor], Tensor]) -> Tensor:
    """Rows padded to equal shards, the shards in another order, and the padding cut off at the end."""
    rows = -(-len(value) // world_size)
    padded = torch.cat([value, value.new_zeros(rows * world_size - len(value), *value.shape[1:])])
    return placed_by(padded.view(world_size, rows, *value.shape[1:])).flatten(0, 1)[: len(value)]


def _others_batches(references: References, step: int) -> Iterator[_Mistake]:
    """Another rank's data on this rank."""
    now = _params_before(references, step)
    for other in range(references.world_size):
        if other != references.rank:
            yield _Mistake(
                phrase=f"another rank's data: forward saw rank {other}'s micro-batch", params=now,
                key=partial(_of_rank, other),
            )  # fmt: skip


def _one_batch(references: References, step: int) -> Iterator[_Mistake]:
    """One rank's data on all ranks."""
    for rank in range(references.world_size if references.world_size > 1 else 0):
        yield _Mistake(
            phrase=f"another rank's data: every rank saw rank {rank}'s micro-batch",
            params=_params_before(references, step), key=partial(_of_rank, rank),
        )  # fmt: skip


def _come_apart(references: References, step: int) -> Iterator[_Mistake]:
    """A tied parameter was copied for each of its uses, and the gradient is that of one copy."""
    uses = _uses(references.workload.build(references.rank))
    for place in range(max((len(names) for names in uses.values()), default=1)):
        alone = [names[place] for names in uses.values() if 1 < len(names) > place]
        if alone:
            yield _Mistake(
                phrase=f"a tied parameter became several: this is the gradient of {alone[0]!r} alone",
                params=_params_before(references, step), alone=frozenset(alone),
            )  # fmt: skip


def _one_call(references: References, step: int) -> Iterator[_Mistake]:
    """A module is called several times in a forward, and the gradient is that of one call."""
    params = _params_before(references, step)
    plain = _Replay(references, step, _Mistake(phrase="", params=params), references.rank)
    calls: Counter[str] = Counter()
    with ExitStack() as hooks:
        for name, module in plain.model.named_modules():
            hook = module.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
            hooks.callback(hook.remove)
        plain.loss(0)
    number = references.regime.micro_batches
    moments = {"": frozenset(range(number))}
    if number > 1:
        moments["of the last micro-batch "] = frozenset({number - 1})
    for name, count in calls.items():
        # The modules inside a block that is called twice are called twice as well.
        if 1 < count <= _MAX_CALLS and calls[name.rpartition(".")[0]] < count:
            for index, (when, call_in) in itertools.product(range(count), moments.items()):
                phrase = f"of {count} calls of {name!r} in a forward {when}only number {index + 1} gave a gradient"
                yield _Mistake(phrase=phrase, params=params, call=(name, index), call_in=call_in)


@contextmanager
def _only_call(model: nn.Module, name: str, index: int) -> Iterator[None]:
    """For a forward: the parameters below the module take no part in the gradients of its other calls."""
    module, calls = model.get_submodule(name), itertools.count()
    own = [(part, dict(part._parameters)) for part in module.modules()]

    def before(*_: object) -> None:
        if next(calls) != index:
            for part, parameters in own:
                detached: dict[str, Any] = {key: p if p is None else p.detach() for key, p in parameters.items()}
                part._parameters.update(detached)

    def after(*_: object) -> None:
        for part, parameters in own:
            part._parameters.update(parameters)

    with ExitStack() as hooks:
        hooks.callback(module.register_forward_pre_hook(before, prepend=True).remove)
        hooks.callback(module.register_forward_hook(after, always_call=True).remove)
        yield


def _uses(model: nn.Module) -> dict[str, list[str]]:
    """The names of each parameter, in the order of its modules: several for one that modules share."""
    by_identity: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                by_identity.setdefault(id(parameter), []).append(f"{path}.{key}" if path else key)
    return {names[0]: names for names in by_identity.values()}


def _given_own_parameters(model: nn.Module, alone: frozenset[str]) -> dict[str, nn.Parameter]:
    """Replace the parameter at each of these names by a copy. Returns the copies by the parameter's first name."""
    parameters: dict[str, nn.Parameter] = {}
    for first, names in _uses(model).items() if alone else ():
        for name in alone.intersection(names):
            path, _, key = name.rpartition(".")
            parameter = model.get_parameter(name)
            parameters[first] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            model.get_submodule(path)._parameters[key] = parameters[first]
    return parameters


def _previous_batch(micro_batches: int, key: BatchKey) -> BatchKey:
    step, micro = (key.step, key.micro - 1) if key.micro else (key.step - 1, micro_batches - 1)
    return key if step < 0 else BatchKey(step=step, micro=micro, rank=key.rank, world_size=key.world_size)


def _of_rank(rank: int, key: BatchKey) -> BatchKey:
    return BatchKey(step=key.step, micro=key.micro, rank=rank, world_size=key.world_size)


def _params_before(references: References, step: int) -> Tensors:
    """The parameters that the forward of a step sees, with what the user has written since the last one."""
    # Without a product where nothing was written: integers stay integers.
    return {
        name: value if (factor := references.regime.written(step, Moment.STEP, name)) == 1 else value * factor
        for name, value in _params_left(references, step).items()
    }


def _params_left(references: References, step: int) -> Tensors:
    """The parameters that the step before has left."""
    history = references.expected
    return history.steps[step - 1].params if step else history.initial_params


def _is_small(references: References) -> bool:
    return sum(value.numel() for value in references.expected.initial_params.values()) <= _MAX_NUMEL


def _has_own_buffers(references: References) -> bool:
    """True if buffers change in training: those of other ranks are not known here."""
    history = references.expected
    return any(
        not torch.equal(history.steps[-1].buffers[name], value) for name, value in history.initial_buffers.items()
    )


def _divisor(references: References) -> int:
    """By how much the sum of the ranks' gradients is divided."""
    return 1 if references.regime.sums else references.world_size


def _total(name: str, by_run: Sequence[Tensors]) -> Tensor:
    return torch.stack([grads[name] for grads in by_run if name in grads]).sum(0)


def _sum(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [tensor.double() for tensor in tensors if tensor is not None]
    return torch.stack(present).sum(0) if present else None


def _norm(tensors: object, *, order: float) -> Tensor:
    norms = [torch.linalg.vector_norm(tensor, order) for tensor in tensors]  # type: ignore[attr-defined]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms or [torch.zeros((), dtype=torch.float64)]), order)
    return total


# --- one optimizer step -----------------------------------------------------------------------------------------------

_Step = Callable[[Optimizer, nn.Parameter], None]


def _stepped_with(references: References, step: int, name: str) -> Tensor | None:
    """The gradient that the optimizer sees."""
    if references.regime.skips(step) or name in references.regime.dropped(step):
        return None
    kind = Kind.GRADIENT if references.regime.max_norm is None else Kind.CLIPPED
    value: Tensor | None = values(references.expected, kind, step).get(name)
    if value is None:
        return None
    # Clipping comes after what the user writes.
    written = references.regime.gradient_written(step, name) if kind is Kind.GRADIENT else 1.0
    return value.double() * written


def _after_steps(
    references: References,
    name: str,
    grads: Sequence[Tensor | None],
    *last: _Step,
    lost: Container[Moment] = (),
) -> Tensor:
    """A parameter after all steps but the last as they should be, and `last`, without what the user wrote at `lost`."""
    parameter = nn.Parameter(references.expected.initial_params[name].double().clone())
    optimizer = references.workload.optimizers[references.regime.optimizer]([parameter])

    def write(step: int, moment: Moment) -> None:
        with torch.no_grad():
            parameter.mul_(references.regime.written(step, moment, name))

    for earlier, grad in enumerate(grads):
        is_last = earlier == len(grads) - 1
        if not is_last or Moment.STEP not in lost:
            write(earlier, Moment.STEP)
        for step in last if is_last else () if grad is None else (_plain(grad),):
            step(optimizer, parameter)
        if not is_last or Moment.END not in lost:
            write(earlier, Moment.END)
    return parameter.detach()


def _plain(grad: Tensor) -> _Step:
    def step(optimizer: Optimizer, parameter: nn.Parameter) -> None:
        parameter.grad = grad.clone()
        optimizer.step()

    return step


def _without_state(grad: Tensor) -> _Step:
    def step(optimizer: Optimizer, parameter: nn.Parameter) -> None:
        optimizer.state.clear()
        _plain(grad)(optimizer, parameter)

    return step


def _with_decay(grad: Tensor, factor: float) -> _Step:
    def step(optimizer: Optimizer, parameter: nn.Parameter) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = group.get("weight_decay", 0.0) * factor
        _plain(grad)(optimizer, parameter)

    return step


def _with_counter(grad: Tensor, change: int) -> _Step:
    def step(optimizer: Optimizer, parameter: nn.Parameter) -> None:
        state: Mapping[str, object] = optimizer.state[parameter]
        counter = state.get("step")
        if isinstance(counter, Tensor) and float(counter) + change >= 0:
            counter += change
        _plain(grad)(optimizer, parameter)

    return step
