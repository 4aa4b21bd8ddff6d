"""Wrong under activation checkpointing: what happens when a forward runs again in backward."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from fsdp_conformance.adapters.base import ModelFn, OptimFn
from fsdp_conformance.engine.fully_sharded.inputs import Arguments
from fsdp_conformance.engine.fully_sharded.schedule import UnitSchedule
from fsdp_conformance.engine.fully_sharded.unit import ShardedUnit
from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.engines import SeamFSDP1, SeamReference
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import Plan


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class Recomputing(SeamFSDP2):
    """FSDP2 that notices when a module with parameters runs again in backward; correct by itself."""

    def first(self, name: str, module: nn.Module) -> None:
        """A module runs in forward; its parameters are full."""

    def again(self, name: str, module: nn.Module) -> None:
        """A module runs again; its parameters are full."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        self.recomputed: set[str] = set()
        """Modules that ran again in this backward."""
        super().setup(model_fn, optim_fn, plan)
        for name, module in self.names.modules.items():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(partial(self._note, name))

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.recomputed.clear()
        super().backward(loss, retain_graph=retain_graph)

    def unit_of(self, module: nn.Module) -> FSDPModule:
        """The innermost unit around a module."""
        name = self.names.name_of(module)
        around = [unit for unit in self.plan.units if name == unit or name.startswith(f"{unit}.")]
        return self._unit(max(around, key=len, default=""))

    def _note(self, name: str, module: nn.Module, args: Any) -> None:
        if _in_backward():
            self.recomputed.add(name)
            self.again(name, module)
        else:
            self.first(name, module)


@known_wrong("R134", "R135", "R108")
class RecomputeReducesTwice(Recomputing):
    """The gradients of what was recomputed are reduced twice, and both results are added."""

    def after_backward(self) -> None:
        for name, grad in self.local_grads().items():
            if name.rpartition(".")[0] in self.recomputed and self._reduced:
                rows = self.rows_per_rank(self.full_shape(name))
                padded = rows * (grad[0].numel() if grad.numel() else 1)
                again = grad.new_empty(padded)
                dist.reduce_scatter_tensor(again, grad.new_zeros(padded * self.world_size))
                grad.mul_(2)

    def full_shape(self, name: str) -> Tensor:
        """An empty stand-in with the full shape of a parameter."""
        return torch.empty(self.parameters()[name].shape, device="meta")


@known_wrong("R134", "R135", "R108")
class RecomputesWithOldParameters(Recomputing):
    """Recomputation uses the parameters' values of the first iteration."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        self._old: dict[str, dict[str, Tensor]] = {}
        super().setup(model_fn, optim_fn, plan)

    def first(self, name: str, module: nn.Module) -> None:
        if name not in self._old:
            self._old[name] = {key: value.detach().clone() for key, value in module.named_parameters(recurse=False)}

    def again(self, name: str, module: nn.Module) -> None:
        for key, value in module.named_parameters(recurse=False):
            # Behind autograd's back, which would notice that saved tensors have changed.
            value.data.copy_(self._old[name][key])


@known_wrong("R135", "R134")
class StaysGatheredAfterRecompute(Recomputing):
    """A unit that was recomputed is not resharded after backward, and the next forward takes it for current."""

    def again(self, name: str, module: nn.Module) -> None:
        self.unit_of(module).set_reshard_after_backward(False, recurse=False)


@known_wrong("R135")
class GathersForRecompute(Recomputing):
    """A unit is freed and gathered again before it is recomputed, although its backward has gathered it already."""

    def after_backward(self) -> None:
        for unit in self.plan.units:
            if any(name == unit or name.startswith(f"{unit}.") for name in self.recomputed):
                self.unshard(unit)
                self.reshard(unit)


class _Counting(ShardedUnit):
    num_recomputed = 0


class _KeepingSecond(UnitSchedule):
    def before_forward(self, unit: ShardedUnit, arguments: Arguments, *, training: bool = True) -> Arguments:
        if isinstance(unit, _Counting) and _in_backward():
            unit.num_recomputed += 1
        return super().before_forward(unit, arguments, training=training)

    def _end_backward(self) -> None:
        super()._end_backward()
        for unit in self.units:
            if isinstance(unit, _Counting):
                if unit.num_recomputed > 1:
                    unit.start_unshard(None, self.order)
                unit.num_recomputed = 0


@known_wrong("R135")
class ReferenceKeepsSecondRecompute(SeamReference):
    """A unit that was recomputed twice is gathered at the end of backward."""

    unit_class: ClassVar[type[ShardedUnit]] = _Counting
    schedule_class: ClassVar[type[UnitSchedule]] = _KeepingSecond


@known_wrong("R134", "R135", name="fsdp1-doubles-recomputed")
class FSDP1DoublesRecomputed(SeamFSDP1):
    """The gradients of a unit that runs again in backward are not divided before they are summed."""

    def alter(self, unit: FullyShardedDataParallel) -> None:
        unit.register_forward_pre_hook(_undivided)


def _undivided(unit: nn.Module, args: Any) -> None:
    if isinstance(unit, FullyShardedDataParallel) and _in_backward():
        unit._gradient_predivide_factor = 1
