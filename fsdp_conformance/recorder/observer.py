"""
The record of a training run: its parts, and when each is taken.

The hooks of `hooks` call this. It reads tensors where they are, on their stream, and draws no random numbers, so the
training computes what it would have computed. Tensors are turned into numbers at the end of a step: until then the
device has no reason to be waited for.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fsdp_conformance.recorder.changes import Changes, Contents
from fsdp_conformance.recorder.fingerprints import sample_hashes, whole_part
from fsdp_conformance.recorder.gradient_hooks import gradient_hooks
from fsdp_conformance.recorder.guard import Guard
from fsdp_conformance.recorder.kept_elements import KeptElements
from fsdp_conformance.recorder.layouts import Layout, layouts_of, part_of
from fsdp_conformance.recorder.lines import makes_state, place_of, script_line, script_lines
from fsdp_conformance.recorder.named import Gradients, Named, Parts, named_parts
from fsdp_conformance.recorder.names import Roots, unwrapped
from fsdp_conformance.recorder.originals import Originals
from fsdp_conformance.recorder.plain import finite, settings_of
from fsdp_conformance.recorder.random_state import random_states
from fsdp_conformance.recorder.shards import Shards
from fsdp_conformance.recorder.steps import RunningSteps
from fsdp_conformance.recorder.traffic import TrafficCount
from fsdp_conformance.recorder.whole_batch import OwnSamples, whole_batch
from fsdp_conformance.recorder.writer import Writer
from fsdp_conformance.recordings.events import (
    FORMAT,
    Backward,
    Begin,
    Clip,
    End,
    Event,
    Forward,
    Group,
    Initial,
    Input,
    Keep,
    Mark,
    Mean,
    Sharding,
    Step,
)
from fsdp_conformance.recordings.fingerprint import MODULUS, Fingerprint

#: An input with more samples than this is recorded as a whole only.
MAX_SAMPLES = 4096

#: Means of one backward that are recorded.
_MOST_MEANS = 64


@dataclass(frozen=True, slots=True)
class Stepped:
    """An optimizer after its step."""

    optimizer: str
    groups: tuple[Group, ...]
    parameters: Parts
    states: Parts
    counters: Mapping[str, Tensor | float]
    defined: str = ""
    """Where its class is defined, if it is neither torch's nor an engine's."""
    is_loaded: bool = False
    """A state has been loaded into it."""


@dataclass(frozen=True, slots=True)
class Load:
    """A state that is loaded into an optimizer."""

    line: str = ""
    is_by_torch: bool = False
    states: Named | None = None
    """Those of the optimizer when it steps."""


#: Marks that matter before a step has begun.
_BEFORE_TRAINING = ("divide factor", "reshard", "step of the engine", "rounded input")


@dataclass(frozen=True, slots=True)
class Given:
    """The tensors that a function was given to clip, as in `Clip`."""

    tensors: int | None = None
    strangers: int = 0
    gathered: int = 0


class Observer:
    """Records this process."""

    _state_line = ""
    """The line that has last loaded a state into a module."""

    def __init__(self, directory: Path, *, sharding: Sharding, nudge: float, keep: Keep | None = None) -> None:
        self._writer = Writer(directory, self._begin)
        self.sharding: Sharding = sharding
        self._nudge = nudge
        # The sum of the hashes of what this rank has sharded; None if some of that is not what it trains with.
        self._wrapped: int | None = 0
        self._nudged: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.replaced = 0
        """With the sharding taken out: how many calls of sharding functions were replaced."""
        self._roots = Roots()
        self.shards = Shards()
        self.originals = Originals()
        self._layouts: dict[int, Layout] = {}
        self._has_layouts = False
        self._optimizers: dict[int, str] = {}
        # Those into which a state has been loaded.
        self._loaded: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # How, for those that have not stepped since.
        self._loads: weakref.WeakKeyDictionary[Optimizer, Load] = weakref.WeakKeyDictionary()
        self._load = Load()
        self._trained: set[str] = set()
        self._step = 0
        self._pass = -1
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._kept = 0
        # Events of this step whose tensors are still on the device.
        self._waiting: list[Callable[[], Event]] = []
        # Means of cross-entropies since the last backward: value and number of targets.
        self._means: list[tuple[Tensor, Tensor, bool]] = []
        # Marks since the last forward of what scripts do in loops.
        self._repeated: set[Mark] = set()
        self.scale: Tensor | None = None
        """By which a gradient scaler has multiplied losses since the last backward."""
        self._units: dict[str, Named] = {}
        # With one batch for all ranks: which samples of the current forward are this rank's.
        self._samples: OwnSamples | None = None
        self._in_forward = False
        self._in_backward = False
        self._in_clipping = False
        # Optimizers that step, and engines (None), the outermost first, with the gradients that they use.
        self._running = RunningSteps()
        # The gradients after the last backward that reduces them, and as they were clipped first.
        self._reduced: Gradients | None = None
        self._unclipped: Named | None = None
        self.guard = Guard(self._fail, lets_pass=sharding != "kept")
        """Runs everything that records inside calls of the script."""
        self._elements = KeptElements(keep, self._writer, self.guard)
        self._changes = Changes(self.guard)
        # The line that has changed the gradients before they were clipped.
        self._changed = ""
        # The parameters at the end of a step; those that were written to since, and then the values of all.
        self._contents: Contents | None = None
        self._written: tuple[str, ...] = ()
        self._begun: Named | None = None
        self.traffic = TrafficCount(self.guard, lambda op: self.mark("gather", op))
        self.before_forward: Callable[[], object] = lambda: None
        """Called before each outermost forward, before anything is recorded of it."""
        self.is_reduced = True
        """False while the script has turned the reduction of gradients off."""
        self.contributions: Named | None = None
        """With the sharding taken out: what this rank has added to the gradients in this backward."""
        self._has_ended = False

    # --- forward -----------------------------------------------------------------------------------------------------

    def watches(self, module: nn.Module) -> bool:
        """True if a call of this module is an outermost one that belongs to the training."""
        return (
            not self._in_forward
            and not self._in_backward
            and not torch.compiler.is_compiling()
            and next(module.parameters(), None) is not None
        )

    def forward(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call an outermost module, and record the call."""
        self._in_forward = True
        try:
            # A parameter of several modules is found under its name in the largest of them.
            if self._roots.add(module):
                self._layouts, self._has_layouts = {}, False
            self.before_forward()
            before = self._before_forward(module, args, kwargs)
            if self.sharding == "whole batch" and torch.is_grad_enabled() and dist.is_initialized():
                (args, kwargs), self._samples = whole_batch((args, kwargs))
            with self._using():
                output = call(module, *args, **kwargs)
            outputs = Named(dict(named_parts(output, self._samples)))
            if self._samples is not None:
                output = self._samples.of(output)
            states = random_states()
            units, self._units = self._units, {}

            def event() -> Event:
                forward, inputs = before()
                unit_outputs = {name: value for unit in units.values() for name, value in unit.values().items()}
                draws = tuple(name for name, state in states.items() if forward.random.get(name, state) != state)
                return replace(forward, draws=draws, inputs=inputs, outputs=outputs.values(), units=unit_outputs)

            self._later(event)
            return output
        finally:
            self._in_forward, self._samples = False, None

    def _using(self) -> contextlib.AbstractContextManager[None]:
        if not torch.is_grad_enabled():
            return contextlib.nullcontext()
        return self._elements.noting_used(self._roots.named_modules(), step=self._step, number=self._pass)

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], tuple[Forward, dict[str, Input]]]:
        self._begin_pass()
        self._mark_forward()
        self._repeated.clear()
        if torch.is_grad_enabled() and module.training:
            self._before_training(module)
        tensors = dict(named_parts((args, kwargs)))
        if self._step == self._pass == 0 and self.sharding == "kept" and dist.is_available():
            self._mark_rounded(module, tensors)
        values = Named(tensors)
        samples = {name: sample_hashes(parts[0].values, MAX_SAMPLES) for name, parts in tensors.items()}
        device = next(module.parameters()).device.type
        autocast = torch.is_autocast_enabled(device)
        forward = Forward(
            step=self._step,
            number=self._pass,
            line=script_line(),
            module=type(unwrapped(module)).__name__.removeprefix("FSDP"),
            training=module.training,
            with_gradients=torch.is_grad_enabled(),
            dtype=str(torch.get_autocast_dtype(device)).removeprefix("torch.") if autocast else "",
            random=random_states(),
            draws=(),
            inputs={},
            outputs={},
        )

        def inputs() -> tuple[Forward, dict[str, Input]]:
            return forward, {
                name: Input(value=value, samples=_hexadecimal(samples[name])) for name, value in values.values().items()
            }

        return inputs

    def _mark_rounded(self, module: nn.Module, inputs: Parts) -> None:
        from fsdp_conformance.recorder.rounded_inputs import rounded_inputs

        for words in rounded_inputs(module, inputs):
            self.mark("rounded input", words)

    def _mark_forward(self) -> None:
        kind = "training" if torch.is_grad_enabled() else "evaluation"
        lines = ", called from ".join(script_lines())
        event = Mark(step=self._step, kind="forward", line=script_line(), detail=f"{kind} at {lines}")
        if self._writer.has_begun or (dist.is_available() and dist.is_initialized()):
            # At once: what waits is lost where the rank is killed.
            self._writer.write(event)
        else:
            self._later(lambda: event)

    def _begin_pass(self) -> None:
        self._changes.stop()
        self._pass += 1
        if self._pass == 0:
            self._kept = sum(parameter.grad is not None for parameter in self._parameters())

    def _before_training(self, module: nn.Module) -> None:
        """Before a forward that trains a module: what was written since the last step, and its initial values."""
        contents, self._contents = self._contents, None
        if contents is not None:
            self._written = contents.changed_in(self._readable_parameters())
            if self._written or self._elements.are_of("begin"):
                parts = self._parts_of(self._parameters())
                self._elements.note("begin", parts, step=self._step)
                self._begun = Named(parts)
        if module in self._seen:
            return
        self._seen.add(module)
        self.nudge(module)
        parameters = [parameter for each in module.modules() for _, parameter in self.shards.parameters_of(each)]
        parts = {**self._parts_of({id(each): each for each in parameters}.values()), **self._buffers()}
        values = Named(parts)
        for kind in ("parameter", "buffer"):
            self._elements.note(kind, parts, step=-1)
        if not self._step:
            self._elements.note("begin", parts, step=self._step)
        wrapped = "" if self._wrapped is None else f"{self._wrapped % MODULUS:016x}"
        tied, frozen, loaded = self._tied(), tuple(self._frozen()), self._state_line

        def initial() -> Initial:
            return Initial(
                values=values.values(),
                wrapped=wrapped,
                tied=tied,
                frozen=frozen,
                loaded=loaded,
                replaced=self.replaced,
            )

        self._later(initial)

    def _frozen(self) -> Iterator[str]:
        for parameter in self._parameters():
            layout = self._layout(parameter)
            if layout is not None and not parameter.requires_grad:
                yield from filter(None, layout.names)

    def _tied(self) -> dict[str, tuple[str, ...]]:
        names: dict[int, list[str]] = defaultdict(list)
        for name, module in self._roots.named_modules():
            for key, parameter in self.shards.parameters_of(module):
                names[id(parameter)].append(f"{name}.{key}".removeprefix("."))
        return {first: tuple(others) for first, *others in names.values() if others}

    def wrapping(self, modules: Iterable[nn.Module], *, starts_with_rank0: bool = False) -> None:
        """A sharding function is about to shard what these modules have, which nothing has sharded yet."""
        tensors = [tensor for module in modules for tensor in module.parameters() if not isinstance(tensor, DTensor)]
        if starts_with_rank0 or any(tensor.is_meta for tensor in tensors):
            self._wrapped = None
        elif self._wrapped is not None:
            parts = {str(index): [whole_part(tensor.detach())] for index, tensor in enumerate(tensors)}
            self._wrapped += sum(int(value.hash, 16) for value in Named(parts).values().values())

    def nudge(self, module: nn.Module) -> None:
        """Change a model that has not trained yet by a rounding error, if this run is for that."""
        if self._nudge and module not in self._nudged:
            self._nudged.add(module)
            nudge(module, self._nudge)

    def unit_output(self, module: nn.Module, output: object) -> None:
        """A unit has run as part of an outermost forward."""
        if not self._in_forward or torch.compiler.is_compiling():
            return
        name = next((name for name, other in self._roots.named_modules() if other is module), "")
        if name:
            key = name if name not in self._units else f"{name}, call {len(self._units)}"
            self._units[key] = Named({f"{key}{place}": parts for place, parts in named_parts(output, self._samples)})

    # --- backward ----------------------------------------------------------------------------------------------------

    def backward(self, tensors: object, call: Callable[[], Any]) -> Any:
        """Run a backward, and record it."""
        if self._in_backward:
            return call()
        self._in_backward = True
        try:
            return self._backward(tensors, call)
        finally:
            self._in_backward = False

    def mean(self, value: Tensor, targets: Tensor, *, is_sum: bool) -> None:
        """A cross-entropy has become a mean over this number of targets, or a sum."""
        if torch.is_grad_enabled() and len(self._means) < _MOST_MEANS:
            self._means.append((value.detach().clone(), targets, is_sum))

    def _backward(self, tensors: object, call: Callable[[], Any]) -> Any:
        losses = [tensors] if isinstance(tensors, Tensor) else list(pytree.tree_leaves(tensors))
        loss = losses[0].detach().clone() if len(losses) == 1 and losses[0].numel() == 1 else None
        step, number, line = self._step, max(self._pass, 0), script_line()
        means, self._means = self._means, []
        scale, self.scale = self.scale, None
        result = call()
        contributions = self._take_contributions()
        is_reduced = self.is_reduced and not any(_defers(root) for root in self._roots.modules())

        def event() -> Event:
            return Backward(
                step=step,
                number=number,
                line=line,
                loss=finite(loss),
                is_reduced=is_reduced,
                scale=finite(scale) or 1.0,
                means=tuple(
                    Mean(value=finite(value), targets=int(targets), is_sum=is_sum) for value, targets, is_sum in means
                ),
                contributions=contributions.values() if contributions is not None else {},
            )

        self._later(event)
        if is_reduced:
            self._reduced = Gradients(self._gradients())
            self._changes.watch(self._parameters())
        return result

    def _take_contributions(self) -> Named | None:
        contributions, self.contributions = self.contributions, None
        return contributions

    def clip(self, call: Callable[[], Any], limit: float, kind: float, tensors: Sequence[Tensor] | None = None) -> Any:
        """Clip gradients, and record it. `tensors`: those whose gradients are clipped, if it is told which."""
        if self._in_clipping:
            return call()
        self._in_clipping = True
        try:
            return self._clip(call, limit, kind, tensors)
        finally:
            self._in_clipping = False

    def _clip(self, call: Callable[[], Any], limit: float, kind: float, tensors: Sequence[Tensor] | None) -> Any:
        self._changes.stop()
        step, line = self._step, script_line()
        parts = self._gradients()
        if self._unclipped is None:
            self._elements.note("gradient", parts, step=self._step)
            self._changed = self._changes.line
        gradients = Named(parts, self._reduced)
        given = self._given(tensors) if tensors is not None else Given()
        norm = call()
        self._clipped(step, line, gradients, norm, limit, kind, given)
        self._changes.watch(self._parameters())
        return norm

    def clip_by_engine(self, step: Callable[[], Any], gradients: Parts, limit: float, norm: Callable[[], Any]) -> Any:
        """Let an engine step, which clips the gradients if the limit is not 0. `norm` gives what their norm was."""
        number, line, before = self._step, script_line(), Named(gradients)
        result = step()
        if limit:
            self._clipped(number, line, before, norm(), limit, 2.0, Given())
        return result

    def _given(self, tensors: Sequence[Tensor]) -> Given:
        count = sum(tensor.grad is not None for tensor in tensors)
        unknown = {id(tensor) for tensor in tensors if self._layout(tensor) is None}
        if not unknown:
            return Given(count)
        held = {id(each) for _, module in self._roots.named_modules() for each in module._parameters.values()}
        return Given(count, strangers=len(unknown - held), gathered=len(unknown & held))

    def _clipped(
        self,
        step: int,
        line: str,
        gradients: Named,
        norm: Any,
        limit: float,
        kind: float,
        given: Given,
    ) -> None:
        local = norm.to_local() if hasattr(norm, "to_local") and hasattr(norm, "placements") else norm
        local = local.detach().clone() if isinstance(local, Tensor) else local
        self._unclipped = self._unclipped or gradients
        is_partial = any(placement.is_partial() for placement in getattr(norm, "placements", ()))

        def event() -> Event:
            return Clip(
                step=step,
                line=line,
                norm=finite(local),
                is_partial=is_partial,
                limit=float(limit),
                kind=float(kind) if math.isfinite(kind) else -1.0,
                gradients=gradients.values(),
                tensors=given.tensors,
                strangers=given.strangers,
                gathered=given.gathered,
            )

        self._later(event)

    # --- the optimizer -----------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, *, frame: FrameType, has_closure: bool) -> None:
        """
        An optimizer is about to step, in this frame. A closure makes the gradients that it uses (`after_closure`).
        """
        self._changes.stop()
        if self._running.begin(optimizer, frame) and not has_closure:
            self._use(optimizer)

    def after_closure(self, optimizer: Optimizer) -> None:
        """The closure of a step has made the gradients, perhaps for another time."""
        self._changes.stop()
        # The step may be a part of another one, which has its closure from it.
        if self._running.is_outermost(optimizer):
            self._use(optimizer)

    def _use(self, optimizer: Optimizer) -> None:
        """Note the gradients of a step."""
        parts = self._gradients(optimizer)
        self._elements.note("clipped", parts, step=self._step)
        if self._unclipped is None:
            self._elements.note("gradient", parts, step=self._step)
        self._running.use(Named(parts, self._reduced))
        load = self._loads.pop(optimizer, None)
        if load is not None:
            states = self._state_of(optimizer).states
            self._elements.note("loaded state", states, step=self._step)
            self._load = replace(load, states=Named(states))

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped: the step is over, and what it was is written."""
        gradients = self._running.end(optimizer)
        # One inside another optimizer's step, or an engine's, is a part of that. Before any module has run, as where a
        # script resumes, steps only make the state that a checkpoint is loaded into; so do those of torch's functions.
        if gradients is not None and self._roots.modules() and not makes_state():
            self.stepped(self._state_of(optimizer), gradients)

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """An engine steps, which is none of torch's optimizers but may call them."""
        self._running.begin(None, None)
        try:
            yield
        finally:
            self._running.end(None)

    def stepped(self, after: Stepped, gradients: Named) -> None:
        """A step is over: write what it was. `gradients` are those that the optimizer got."""
        for group in after.groups:
            self._trained.update(group.parameters)
        held = {"parameter": after.parameters, "optimizer state": after.states, "buffer": self._buffers()}
        parameters, state, buffers = map(Named, held.values())
        for kind, parts in held.items():
            self._elements.note(kind, parts, step=self._step)
        line, is_clipped = script_line(), self._unclipped is not None
        self._flush()
        numbers = {name: finite(value) for name, value in after.counters.items()}
        rounded = self._reduced.rounding.names() if self._reduced is not None else ()
        changed, rewritten = (self._changed, self._changes.line) if is_clipped else (self._changes.line, "")
        reduced = self._changed_since_backward(gradients)
        hooks, silent_hooks = gradient_hooks(self._roots)
        self._writer.write(
            Step(
                step=self._step,
                optimizer=after.optimizer,
                line=line,
                groups=after.groups,
                gradients=gradients.values(),
                reduced=reduced,
                frozen=tuple(self._frozen()),
                rounded=rounded,
                changed=changed,
                in_autocast=any(map(torch.is_autocast_enabled, ("cpu", "cuda"))),
                rewritten=rewritten,
                written=self._written,
                begin=self._begun.values() if self._begun is not None else {},
                defined=after.defined,
                is_loaded=after.is_loaded,
                loaded=self._load.states.values() if self._load.states is not None else {},
                loaded_line=self._load.line,
                is_loaded_by_torch=self._load.is_by_torch,
                parameters=parameters.values(),
                state=state.values(),
                counters={name: number for name, number in numbers.items() if number is not None},
                buffers=buffers.values(),
                untrained=tuple(self._untrained()),
                kept=self._kept,
                hooks=hooks,
                silent_hooks=silent_hooks,
                originals=tuple(dict.fromkeys(self.originals.with_gradients(self._roots))),
                collectives=self.traffic.take(),
            )
        )
        if self._elements.are_complete(self._step):
            self.end()
        self._step += 1
        self._pass = -1
        self._has_layouts = False
        self._written, self._begun, self._changed, self._load = (), None, "", Load()
        self._contents = Contents(self._readable_parameters())

    def _changed_since_backward(self, gradients: Named) -> dict[str, Fingerprint]:
        """The gradients as they were after the backward, if they were others when they were clipped or stepped with."""
        reduced, unclipped = self._reduced, self._unclipped or gradients
        self._reduced = self._unclipped = None
        before, after = reduced.values() if reduced is not None else {}, unclipped.values()
        # The step may be of an optimizer that has a part of the parameters.
        return {} if all(before.get(name, value) == value for name, value in after.items()) else before

    def _state_of(self, optimizer: Optimizer) -> Stepped:
        parameters: Parts = defaultdict(list)
        states: Parts = defaultdict(list)
        counters: dict[str, Tensor | float] = {}
        groups = []
        self._roots.note_optimized(optimizer)
        for group in optimizer.param_groups:
            names: list[str] = []
            unknown = 0
            for parameter in group["params"]:
                layout = self._layout(parameter)
                if layout is None:
                    unknown += 1
                    continue
                names += layout.names
                for name, part in layout.parts(parameter):
                    parameters[name].append(part)
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                        for name, part in layout.parts(value):
                            states[f"{name}/{key}"].append(part)
                    elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
                        counters[f"{layout.names[0]}/{key}"] = value
            groups.append(Group(settings=settings_of(group), parameters=tuple(names), unknown=unknown))
        # Classes have hashes, which mypy does not see.
        name, defined = self._optimizer_name(optimizer), place_of(type(optimizer))  # type: ignore[arg-type]
        return Stepped(name, tuple(groups), parameters, states, counters, defined, optimizer in self._loaded)

    def loads(self, optimizer: Optimizer) -> None:
        """A state is loaded into an optimizer."""
        self._loaded.add(optimizer)
        self._loads[optimizer] = Load(script_line(), makes_state())

    def _untrained(self) -> Iterator[str]:
        for parameter in self._parameters():
            layout = self._layout(parameter)
            if parameter.requires_grad and layout is not None:
                yield from (name for name in layout.names if name and name not in self._trained)

    def _optimizer_name(self, optimizer: Optimizer) -> str:
        kind = type(optimizer).__name__
        if id(optimizer) not in self._optimizers:
            same = sum(name.startswith(kind) for name in self._optimizers.values())
            self._optimizers[id(optimizer)] = f"{kind} {same + 1}" if same else kind
        return self._optimizers[id(optimizer)]

    # --- other -------------------------------------------------------------------------------------------------------

    def mark(self, kind: Any, detail: str = "") -> None:
        """Something else has happened that matters for the comparison."""
        event = Mark(step=self._step, kind=kind, line=script_line(), detail=detail)
        if kind in ("data", "resharded", "unsharded", "gather"):
            # One for a loop over all parameters, or all units.
            if event in self._repeated:
                return
            self._repeated.add(event)
        # An engine is set up before it trains; a load before training is part of the initial values.
        if self._writer.has_begun or self._waiting or kind in _BEFORE_TRAINING:
            self._later(lambda: event)
        if kind == "load state":
            self._state_line = event.line

    def leave(self) -> None:
        """The rank destroys its process group."""
        self.mark("left")
        if self._writer.has_begun:
            # What waits is lost where the rank is killed.
            self._flush()

    def end(self, error: str = "") -> None:
        """Write what is left. Later calls do nothing."""
        if self._has_ended:
            return
        self._has_ended = True
        self._changes.stop()
        if self._writer.has_begun or self._waiting:
            self.guard.run(self._flush)
            if not self.guard.has_failed:
                self._writer.write(End(error=error))
                self._writer.close()
        if self._writer.error is not None:
            print(f"fsdp-conformance: the recording is incomplete: {self._writer.error}", file=sys.stderr)

    def _fail(self, error: Exception) -> None:
        """The recorder itself has failed: end the recording, and say so. The training goes on."""
        why, at = f"{type(error).__name__}: {error} ({_place_in_recorder(error)})", script_line()
        print(
            f"fsdp-conformance: the recording ends in step {self._step}{f', at {at}' if at else ''}, because the "
            f"recorder failed: {why}. The training goes on. Please report this as a bug in fsdp-conformance",
            file=sys.stderr,
        )
        self._has_ended = True
        self._waiting.clear()
        self._changes.stop()
        with contextlib.suppress(Exception):  # also what fails again
            self._writer.write(End(recorder=why))
        self._writer.close()

    def named_gradients(self, gradients: Mapping[int, Tensor]) -> Named:
        """Gradients by the ids of their parameters, to be recorded under the parameters' names."""
        parts: Parts = defaultdict(list)
        for parameter in self._parameters():
            layout = self._layout(parameter)
            if layout is not None and id(parameter) in gradients:
                for name, part in layout.parts(gradients[id(parameter)]):
                    parts[name].append(part)
        self._elements.note("contribution", parts, step=self._step, number=max(self._pass, 0))
        return Named(parts)

    def _later(self, event: Callable[[], Event]) -> None:
        self._waiting.append(event)
        # Evaluation has no step at its end; do not keep its tensors for ever.
        if len(self._waiting) >= 64:
            self._flush()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            self._writer.write(event())

    def _begin(self) -> Begin:
        grouped = dist.is_available() and dist.is_initialized()
        return Begin(
            format=FORMAT,
            rank=dist.get_rank() if grouped else int(os.environ.get("RANK", "0")),
            world_size=dist.get_world_size() if grouped else int(os.environ.get("WORLD_SIZE", "1")),
            pid=os.getpid(),
            torch=str(torch.__version__),
            command=tuple(sys.orig_argv),
            sharding=self.sharding,
            nudge=self._nudge,
        )

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of the modules that have trained, once."""
        seen: set[int] = set()
        for name, module in self._roots.named_modules():
            for key, parameter in self.shards.parameters_of(module):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{name}.{key}".removeprefix("."), parameter

    def _readable_parameters(self) -> dict[str, Tensor]:
        named = ((name, parameter, self._layout(parameter)) for name, parameter in self.named_parameters())
        return {name: parameter for name, parameter, layout in named if layout is not None and not layout.is_hidden}

    def _parameters(self) -> list[Tensor]:
        return [parameter for _, parameter in self.named_parameters()]

    def _layout(self, parameter: Tensor) -> Layout | None:
        if id(parameter) not in self._layouts and not self._has_layouts:
            # Wrapping and moving may have made other parameters; looking once a step is enough.
            self._layouts, self._has_layouts = layouts_of(self._roots, self.shards), True
        return self._layouts.get(id(parameter))

    def _parts_of(self, tensors: Iterable[Tensor], *, gradients: bool = False) -> Parts:
        parts: Parts = defaultdict(list)
        for tensor in tensors:
            layout = self._layout(tensor)
            value = tensor.grad if gradients else tensor
            if layout is not None and value is not None:
                for name, part in layout.parts(value.coalesce().to_dense() if value.is_sparse else value):
                    parts[name].append(part)
        return parts

    def _gradients(self, optimizer: Optimizer | None = None) -> Parts:
        if optimizer is None:
            return self._parts_of(self._parameters(), gradients=True)
        tensors = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return self._parts_of(tensors, gradients=True)

    def _buffers(self) -> Parts:
        parts: Parts = {}
        for name, buffer in self._roots.named_buffers():
            part = part_of(buffer)
            if part is not None:
                parts[name] = [part]
        return parts


def _place_in_recorder(error: Exception) -> str:
    """The innermost line of the recorder from which an exception came: "observer.py:30"."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if os.path.dirname(frame.filename) == os.path.dirname(__file__)]
    last = (own or frames)[-1]
    return f"{os.path.basename(last.filename)}:{last.lineno}"


@torch.no_grad()
def nudge(module: nn.Module, size: float) -> None:
    """Change every parameter by this much of itself, at least a rounding error, up or down at random."""
    for index, (_, parameter) in enumerate(module.named_parameters()):
        if not parameter.is_floating_point() or parameter.is_meta:
            continue
        part = part_of(parameter)
        values = (part.values if part is not None else parameter).detach()
        generator = torch.Generator().manual_seed(index)
        signs = torch.randint(0, 2, values.shape, generator=generator).to(values.device, values.dtype) * 2 - 1
        values.mul_(1 + max(size, torch.finfo(values.dtype).eps) * signs)


def _defers(root: nn.Module) -> bool:
    """True inside `no_sync` of DDP or FSDP1, which may have a wrapper around it, such as Lightning Fabric's."""
    attributes = "require_backward_grad_sync", "_sync_gradients"
    return any(vars(module).get(name, True) is False for module in root.modules() for name in attributes)


def _hexadecimal(hashes: Tensor | None) -> tuple[str, ...]:
    return () if hashes is None else tuple(f"{value % (1 << 64):016x}" for value in hashes.tolist())
