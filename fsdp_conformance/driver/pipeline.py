"""
Pipelines: each stage of a model has its own group of ranks.

The orders of passes, the sends and the receives are those of torch.distributed.pipelining, see `pipeline_stage`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_conformance.adapters.names import is_below
from fsdp_conformance.adapters.torch_like import parallel_shape
from fsdp_conformance.errors import ConfigError, EnvironmentUnavailable, SuiteError
from fsdp_conformance.plan import Plan
from fsdp_conformance.workload.definition import Batch, BatchKey, Regime, Workload

if TYPE_CHECKING:
    from fsdp_conformance.driver.pipeline_stage import Passes, Stage

T = TypeVar("T")


class Pipeline:
    """One rank's place in a pipeline."""

    def __init__(
        self, plan: Plan, workload: Workload, regime: Regime, *, rank: int, world_size: int, device: torch.device
    ) -> None:
        """
        Collective. Raises ConfigError if the stages do not divide the world, if units or parameters lie outside them,
        or if the regime asks for what no schedule does, and EnvironmentUnavailable if torch is too old.
        """
        _refuse(plan, regime)
        # Not at the top: it takes half a second, and few runs have a pipeline.
        from fsdp_conformance.driver.pipeline_stage import too_old

        if reason := too_old():
            raise EnvironmentUnavailable(reason)
        stage_size = world_size // parallel_shape(plan, world_size)["stage"]
        self.names = plan.stages
        self.own = rank // stage_size
        self._regime = regime
        self._device = device
        self._stage: Stage | None = None
        self._shapes = _example(plan, workload, rank, world_size)
        for place in range(stage_size):
            ranks = range(place, world_size, stage_size)
            group = dist.new_group(list(ranks))
            if rank in ranks:
                self._group = group
        if device.type != "cpu":
            # NCCL makes a communicator at the first use, in which all ranks of the group must take part.
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)

    def cut(self, model: nn.Module) -> None:
        """Remove the other stages from a model; names stay what they were."""
        for index, name in enumerate(self.names):
            if index != self.own:
                parent, _, key = name.rpartition(".")
                del model.get_submodule(parent)._modules[key]

    def plan_of_stage(self, plan: Plan) -> Plan:
        """The plan with the submodules of this rank's stage alone."""
        own_stage = self.names[self.own]

        def of_stage(fqns: Sequence[str]) -> tuple[str, ...]:
            return tuple(fqn for fqn in fqns if not fqn or is_below(fqn.split("+")[0], own_stage))

        return replace(
            plan,
            units=of_stage(plan.units),
            ignored=of_stage(plan.ignored),
            deferred_units=of_stage(plan.deferred_units),
            unit_dtypes=tuple(entry for entry in plan.unit_dtypes if is_below(entry[0], own_stage)),
            tensor_styles=tuple(entry for entry in plan.tensor_styles if is_below(entry[0], own_stage)),
        )

    def joined(self, own: Mapping[str, T]) -> dict[str, T]:
        """The entries of all stages, in order; a name that an earlier stage has, too, is marked. Collective."""
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
        Carry out one step's micro-batches. Collective. Exceptions of a pass are raised unchanged.

        `module`: what torch drives itself, see `Adapter.pipeline_module`; it is asked for at the first step. Raises
        SuiteError for micro-batches of different shapes.
        """
        if self._stage is None:
            from fsdp_conformance.driver.pipeline_stage import Stage

            self._stage = Stage(module, self.own, self._shapes, self._regime, device=self._device, group=self._group)
        if len({batch.args[0].shape for batch in batches}) > 1:
            # The schedule would divide them in other places.
            raise SuiteError("micro-batches of a pipeline must have equal shapes, got others")
        first, last = self.own == 0, self.own == len(self.names) - 1
        x = torch.cat([batch.args[0] for batch in batches]) if first else None
        target = torch.cat([batch.target for batch in batches]) if last else None
        self._stage.step(passes, x, target)


def _example(plan: Plan, workload: Workload, rank: int, world_size: int) -> list[Tensor]:
    """The input of each stage and the output of the last one, for a micro-batch of the whole model on the CPU."""
    model = workload.build(rank)
    names = {name for name, _ in model.named_modules()}
    outside = [name for name in plan.stages if name not in names]
    for unit in plan.units:
        parts = unit.split("+")
        if not any(all(is_below(part, stage) for part in parts) for stage in plan.stages):
            outside.append(unit)
    outside += [name for name, _ in model.named_parameters() if not any(is_below(name, stage) for stage in plan.stages)]
    if outside:
        raise ConfigError(
            [f"stages must be submodules that contain every unit and every parameter, got {outside[0]!r} outside them"],
            where="pipeline parallelism",
        )
    batch = workload.batch(BatchKey(step=0, rank=rank, world_size=world_size))
    if len(batch.args) != 1 or batch.kwargs or not isinstance(batch.args[0], Tensor):
        raise SuiteError(f"batches of a pipeline must have one tensor as argument, got others [{workload.name}]")
    outputs = [batch.args[0]]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for name in plan.stages:
            outputs.append(model.get_submodule(name)(outputs[-1]))
    return [value.detach().requires_grad_(value.requires_grad) for value in outputs]


def _refuse(plan: Plan, regime: Regime) -> None:
    """Raise ConfigError for a regime that the schedules cannot follow."""
    problems = []
    if not regime.pipeline:
        problems.append("pipeline must be an order of passes for a plan with stages, got ''")
    if regime.pipeline == "1f1b" and regime.micro_batches < len(plan.stages):
        problems.append(
            f"micro_batches must be at least the number of stages {len(plan.stages)} under 1f1b, "
            f"got {regime.micro_batches}"
        )
    demands = {
        "two backwards per forward": regime.backwards_per_forward > 1,
        "gradients that the user clears": regime.clearing != "optimizer",
        "loss scaling": regime.init_scale is not None,
        "the optimizer in backward": regime.optimizer_in_backward,
        "backwards from outputs": regime.backward_from != "loss",
        "outputs and gradients of inputs": regime.keep_outputs or regime.keep_input_gradients,
        "evaluations or forwards alone": bool(regime.eval_before or regime.eval_between or regime.idle_forwards),
        "events": bool(regime.events or regime.frozen_at or regime.gradient_to_none),
    }
    problems += [f"a regime for a plan with stages must be without {what}" for what, there in demands.items() if there]
    if problems:
        raise ConfigError(problems, where="pipeline parallelism")
