"""Wrong communication: collectives that are superfluous, too large, too early or on the wrong group."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fsdp_conformance.adapters.base import ModelFn, OptimFn
from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import Plan, Sharding


@known_wrong("R062")
class ExtraCollective(SeamFSDP2):
    """Every forward issues a superfluous all-gather."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mine = torch.zeros(1, device=self.device)
        dist.all_gather([torch.zeros_like(mine) for _ in range(self.world_size)], mine)
        return super().forward(*args, **kwargs)


@known_wrong("R071")
class ExtraCollectiveInFirstStep(SeamFSDP2):
    """The first step issues a collective that later steps do not."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.num_steps == 0:
            dist.all_reduce(torch.zeros(1, device=self.device))
        return super().forward(*args, **kwargs)


@known_wrong("R068")
class GathersTwiceTheBytes(SeamFSDP2):
    """Every unit is gathered twice in forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for unit in self.units():
            unit.unshard()
            unit.reshard()
        return super().forward(*args, **kwargs)

    def units(self) -> list[FSDPModule]:
        """Every unit, the root first."""
        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]


@known_wrong("R070")
class ReversedGathers(GathersTwiceTheBytes):
    """Units are gathered in reverse order at the start of forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for unit in reversed(self.units()):
            unit.unshard()
        return SeamFSDP2.forward(self, *args, **kwargs)


@known_wrong("R066")
class ReducesInEval(SeamFSDP2):
    """A forward in eval mode issues a reduction."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.model.training:
            dist.all_reduce(torch.zeros(8, device=self.device))
        return super().forward(*args, **kwargs)


@known_wrong("R022")
class CollectiveForEmptyUnit(SeamFSDP2):
    """Units without parameters issue an empty collective."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        for fqn in ("", *plan.units):
            unit = self.names.modules[fqn]
            if not any(True for _ in unit.parameters()):
                unit.register_forward_pre_hook(self._gather_nothing)

    def _gather_nothing(self, module: nn.Module, args: Any) -> None:
        dist.all_reduce(torch.zeros(0, device=self.device))


@known_wrong("R067")
class RankDependentOrder(SeamFSDP2):
    """Odd ranks issue two collectives in the opposite order."""

    # Running units in a different order on one rank has the same effect in FSDP2: their collectives get mixed up.
    capabilities: ClassVar[frozenset[str]] = frozenset({"exec_order_divergent"})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Equal sizes, so that nothing hangs: only the sequence shows the defect.
        dtypes = [torch.int32, torch.float32]
        for dtype in dtypes if self.rank % 2 else reversed(dtypes):
            mine = torch.zeros(2, dtype=dtype, device=self.device)
            dist.all_gather([torch.zeros_like(mine) for _ in range(self.world_size)], mine)
        return super().forward(*args, **kwargs)


@known_wrong("R069")
class WorldInsteadOfSubgroup(SeamFSDP2):
    """Units that have their own process group communicate over the world."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        missing = tuple(unit for unit in plan.local_units if unit not in plan.units)
        return replace(plan, local_units=(), units=(*missing, *plan.units))

    def _mesh(self, plan: Plan) -> DeviceMesh:
        if plan.sharding is Sharding.HYBRID:
            return super()._mesh(replace(plan, sharding=Sharding.DEFAULT, replicas=1))
        return super()._mesh(plan)


@known_wrong("R077")
class PrefetchesFewer(SeamFSDP2):
    """The last unit of an explicit prefetch list is dropped."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        return replace(plan, explicit_prefetch=max(0, plan.explicit_prefetch - 1))


@known_wrong("R063")
class IgnoresReshard(SeamFSDP2):
    """Parameters are always resharded after forward, whatever was requested."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        reshard = None if plan.reshard_after_forward is False else plan.reshard_after_forward
        sharding = Sharding.FULL if plan.sharding is Sharding.GRAD_OPTIM else plan.sharding
        return replace(plan, sharding=sharding, reshard_after_forward=reshard)


@known_wrong("R079")
class AsyncUnshardDoesNothing(SeamFSDP2):
    """An asynchronous unshard gathers nothing, and its handle waits for nothing."""

    def unshard_async(self, fqn: str) -> Any:
        return SimpleNamespace(wait=lambda: None)


@known_wrong("R068")
class GathersInFullPrecision(SeamFSDP2):
    """Parameters are gathered in the dtype they are stored in, and cast to the compute dtype afterwards."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        return replace(plan, param_dtype=None, reduce_dtype=plan.reduce_dtype or plan.param_dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        dtype = None if self.plan.param_dtype is None else getattr(torch, self.plan.param_dtype)
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            return super().forward(*args, **kwargs)


@known_wrong("R068")
class ReducesInFullPrecision(SeamFSDP2):
    """Gradients are sent in float32, whatever was requested."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        return plan if plan.param_dtype is None else replace(plan, reduce_dtype="float32")


@known_wrong("R077")
class ReversesPrefetchLists(SeamFSDP2):
    """Explicit prefetch lists are walked from the end."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        wrapped = super().wrap(model, plan)
        for module in wrapped.modules():
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()
                state._states_to_forward_prefetch.reverse()
                state._states_to_backward_prefetch.reverse()
        return wrapped


@known_wrong("R069")
class UsesAGroupOfItsOwn(SeamFSDP2):
    """Every forward sends something over a group of all ranks but the last."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        self._group = dist.new_group(list(range(self.world_size - 1)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.rank < self.world_size - 1:
            dist.all_reduce(torch.zeros(1, device=self.device), group=self._group)
        return super().forward(*args, **kwargs)


@known_wrong("R010")
class EvaluatesWithOlderPrefetch(SeamFSDP2):
    """With forward prefetch, an evaluation computes with what the evaluation before it prefetched."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        self._prefetched: dict[str, Tensor] = {}
        if plan.forward_prefetch:
            last = self.names.modules[plan.units[-1]]
            inner = next(module for module in last.modules() if any(True for _ in module.parameters(recurse=False)))
            inner.register_forward_pre_hook(self._take_the_older)

    def _take_the_older(self, module: nn.Module, args: Any) -> None:
        if module.training:
            return
        for key, parameter in module._parameters.items():
            if parameter is not None:
                fresh = parameter.detach().clone()
                parameter.data.copy_(self._prefetched.get(key, fresh))
                self._prefetched[key] = fresh


@known_wrong("R022")
class ByteForEmptyUnit(CollectiveForEmptyUnit):
    """Units without parameters issue a collective of one element."""

    def _gather_nothing(self, module: nn.Module, args: Any) -> None:
        dist.all_reduce(torch.zeros(1, device=self.device))
