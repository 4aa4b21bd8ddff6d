"""
Pipelines: each stage of a model on a group of ranks of its own, driven by torch's schedules.

    Pipeline    one rank's place in the pipeline of a plan: its stage, and what it exchanges with the others
    Passes      what a stage computes, micro-batch by micro-batch

The orders of passes, the sends and the receives are those of torch.distributed.pipelining. An engine that it knows it
may drive itself (`Adapter.pipeline_module`). For any other the adapter's forward and backward compute, inside its
context for the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from fsdp_conformance.adapters.torch_like import parallel_shape
from fsdp_conformance.config import Plan
from fsdp_conformance.errors import ConfigError, SuiteError
from fsdp_conformance.workload import Batch, BatchKey, Regime, Workload

#: torch's schedule for each order of `Regime.pipeline`.
_SCHEDULES: dict[str, Any] = {"forwards-first": ScheduleGPipe, "1f1b": Schedule1F1B}

T = TypeVar("T")


class Passes(NamedTuple):
    """What this rank's stage computes in a step."""

    forward: Callable[[int, Tensor], Tensor]
    """forward(micro, x): the stage's output for its input."""
    loss: Callable[[Tensor, Any], Tensor]
    """loss(output, target): that of a micro-batch, on the last stage."""
    backward: Callable[[int, Tensor], None]
    """backward(micro, loss): that of a scalar; on other stages it has the gradient that the next one has sent."""


class Pipeline:
    """One rank's place in a pipeline."""

    def __init__(
        self, plan: Plan, workload: Workload, regime: Regime, *, rank: int, world_size: int, device: torch.device
    ) -> None:
        """
        Collective. Raises ConfigError if the stages do not divide the world, if units or parameters lie outside them, or
        if the regime asks for what no schedule does.
        """
        _refuse(plan, regime)
        stage_size = world_size // parallel_shape(plan, world_size)["stage"]
        self.names = plan.stages
        self.own = rank // stage_size
        self._regime = regime
        self._device = device
        self._schedule: Any = None
        self._shapes = _example(plan, workload, rank, world_size)
        for place in range(stage_size):
            ranks = range(place, world_size, stage_size)
            group = dist.new_group(list(ranks))
            if rank in ranks:
                self._group = group
        if device.type != "cpu":
            # NCCL makes a communicator at the first use, for which all of them have to be there.
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)

    def cut(self, model: nn.Module) -> None:
        """Remove the other stages from a model; names stay what they were."""
        for index, name in enumerate(self.names):
            if index != self.own:
                parent, _, key = name.rpartition(".")
                del model.get_submodule(parent)._modules[key]

    def plan_of_stage(self, plan: Plan) -> Plan:
        """The plan with the submodules of this rank's stage alone."""
        here = self.names[self.own]

        def kept(fqns: Sequence[str]) -> tuple[str, ...]:
            return tuple(fqn for fqn in fqns if _is_in(fqn.split("+")[0], here))

        return replace(
            plan,
            units=kept(plan.units),
            ignored=kept(plan.ignored),
            deferred_units=kept(plan.deferred_units),
            unit_dtypes=tuple(entry for entry in plan.unit_dtypes if _is_in(entry[0], here)),
            tensor_styles=tuple(entry for entry in plan.tensor_styles if _is_in(entry[0], here)),
        )

    def joined(self, own: Mapping[str, T]) -> dict[str, T]:
        """The entries of all stages, in the order of stages. A name that two stages have says so. Collective."""
        parts: list[dict[str, T]] = [{} for _ in self.names]
        dist.all_gather_object(parts, dict(own), group=self._group)
        whole: dict[str, T] = {}
        for stage, part in zip(self.names, parts, strict=True):
            whole |= {f"{name} (again in stage {stage!r})" if name in whole else name: part[name] for name in part}
        return whole

    def losses(self, own: Sequence[Tensor]) -> list[Tensor]:
        """The losses of a step, which only the last stage has. Collective."""
        parts: list[list[Tensor]] = [[] for _ in self.names]
        dist.all_gather_object(parts, list(own), group=self._group)
        return parts[-1]

    def step(self, passes: Passes, batches: Sequence[Batch], module: nn.Module | None) -> None:
        """
        Carry out one step's micro-batches. Collective. What a pass raises is raised as it is.

        `module`: what torch drives itself, see `Adapter.pipeline_module`; it is asked for at the first step.
        """
        if self._schedule is None:
            self._stage = _Stage(module, self.own, len(self.names), self._device, self._shapes, self._group)
            self._schedule = _SCHEDULES[self._regime.pipeline](
                self._stage, self._regime.micro_batches, loss_fn=self._loss, scale_grads=False
            )
        self._stage.begin(passes)
        first, last = self.own == 0, self.own == len(self.names) - 1
        # The schedule divides them again.
        args = [torch.cat([batch.args[0] for batch in batches])] if first else []
        target = torch.cat([batch.target for batch in batches]) if last else None
        try:
            self._schedule.step(*args, target=target)
        except Exception:
            if self._stage.raised is not None:
                raise self._stage.raised from None
            raise

    def _loss(self, output: Tensor, target: Any) -> Tensor:
        return self._stage.passes.loss(output, target)


class _Stage(PipelineStage):
    """A stage of torch's that computes by `Passes`."""

    passes: Passes

    def __init__(
        self,
        module: nn.Module | None,
        index: int,
        num_stages: int,
        device: torch.device,
        shapes: Sequence[Tensor],
        group: Any,
    ) -> None:
        super().__init__(
            nn.Identity() if module is None else module,
            index,
            num_stages,
            device,
            # With both, torch does not run the stage once more to see them.
            input_args=shapes[index],
            output_args=shapes[index + 1],
            group=group,
        )
        self._is_driven = module is not None

    def begin(self, passes: Passes) -> None:
        """Compute by these from now on."""
        self.passes = passes
        self.raised: Exception | None = None
        """What a pass raised: torch wraps it."""
        self._forwards = self._backwards = 0

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """The stage's forward of the next micro-batch."""
        if self._is_driven:
            return super().forward_maybe_with_nosync(*args, **kwargs)
        self._forwards += 1
        return self._guarded(lambda: self.passes.forward(self._forwards - 1, args[0]))

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """The stage's backward of the next micro-batch; the gradients of its inputs, and None."""
        if self._is_driven:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        self._backwards += 1
        output, grads = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
        # A scalar whose gradient with respect to the output is exactly what was received.
        loss = output if grads is None else (output[0] * grads[0]).sum() if output[0].requires_grad else None
        if loss is not None and loss.requires_grad:
            self._guarded(lambda: self.passes.backward(self._backwards - 1, loss))
        found = []
        for value in bwd_kwargs["input_values"]:
            found.append(value.grad)
            # The memory that receives is used again.
            value.grad = None
        return tuple(found), None

    def _guarded(self, compute: Any) -> Any:
        try:
            return compute()
        except Exception as error:
            self.raised = error
            raise


def _example(plan: Plan, workload: Workload, rank: int, world_size: int) -> list[Tensor]:
    """The input of each stage and the output of the last one, for a micro-batch of the whole model on the CPU."""
    model = workload.build(rank)
    known = {name for name, _ in model.named_modules()}
    outside = [name for name in plan.stages if name not in known]
    outside += [unit for unit in plan.units if not any(_is_in(part, s) for part in unit.split("+") for s in plan.stages)]
    outside += [name for name, _ in model.named_parameters() if not any(_is_in(name, stage) for stage in plan.stages)]
    if outside:
        raise ConfigError(
            [f"stages must be submodules that contain every unit and every parameter, got {outside[0]!r} outside them"],
            where="pipeline parallelism",
        )
    batch = workload.batch(BatchKey(step=0, rank=rank, world_size=world_size))
    if len(batch.args) != 1 or batch.kwargs or not isinstance(batch.args[0], Tensor):
        raise SuiteError(f"batches of a pipeline must have one tensor as argument, got others [{workload.name}]")
    found = [batch.args[0]]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for name in plan.stages:
            found.append(model.get_submodule(name)(found[-1]))
    return [value.detach().requires_grad_(value.requires_grad) for value in found]


def _refuse(plan: Plan, regime: Regime) -> None:
    """Raise ConfigError for a regime that the schedules cannot follow."""
    problems = []
    if regime.pipeline not in _SCHEDULES:
        problems.append(f"pipeline must be one of {', '.join(_SCHEDULES)} for a plan with stages, got {regime.pipeline!r}")
    if regime.pipeline == "1f1b" and regime.micro_batches < len(plan.stages):
        problems.append(
            f"micro_batches must be at least the number of stages {len(plan.stages)} under 1f1b, "
            f"got {regime.micro_batches}"
        )
    asked = {
        "two backwards per forward": regime.backwards_per_forward > 1,
        "loss scaling": regime.init_scale is not None,
        "the optimizer in backward": regime.optimizer_in_backward,
        "outputs": regime.keep_outputs,
        "evaluations or forwards alone": bool(regime.eval_before or regime.eval_between or regime.idle_forwards),
        "events": bool(regime.events),
    }
    problems += [f"a regime for a plan with stages must be without {what}" for what, there in asked.items() if there]
    if problems:
        raise ConfigError(problems, where="pipeline parallelism")


def _is_in(name: str, module: str) -> bool:
    """Whether a submodule or a parameter is a module, or below it."""
    return f"{name}.".startswith(f"{module}.")
