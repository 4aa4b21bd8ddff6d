"""
Correct implementations that are unusual: whatever differs in them, the contract allows, so no case may accuse them.

They are FSDP2 and the reference engine with one legal difference each, of the kinds that real engines have: which
modules are units, when parameters are freed, how gradients are reduced, and where they are stored. `ci/soak --variants`
runs the base cases on them.

A variant declines the capabilities that promise an exact schedule, where its difference is in the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor

from fsdp_conformance.adapters.vendors.reference import Reference
from fsdp_conformance.adapters.vendors.torch_fsdp2 import TorchFSDP2
from fsdp_conformance.mutants.mutant import legal_variant
from fsdp_conformance.plan import BackwardPrefetch, Plan, Sharding

#: What an engine promises about its schedule as the plan has it.
_SCHEDULE = frozenset({"coll_counts", "coll_volume", "mem_bounds"})


def _fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


@legal_variant("torch-fsdp2")
class WrapsFiner(TorchFSDP2):
    """Every module with parameters of its own below a unit is a unit, too."""

    declines: ClassVar[frozenset[str]] = _SCHEDULE

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        if plan.local_units or plan.ignored or plan.explicit_prefetch or plan.unit_dtypes:
            return super().wrap(model, plan)
        units = {part for unit in plan.units for part in unit.split("+")}
        finer = [
            name
            for name, module in model.named_modules()
            if name not in units
            and any(name.startswith(f"{unit}.") for unit in units)
            and any(True for _ in module.parameters(recurse=False))
            # A child that is not called, because its parent reads its parameters, would not be gathered.
            and not _is_shared(model, module)
            and type(module) in _CALLED
        ]
        innermost_first = sorted(finer, key=lambda name: -name.count("."))
        return super().wrap(model, replace(plan, units=(*innermost_first, *plan.units)))


#: Modules that their parents call, as they do nothing else. Attention reads the parameters of a subclass of Linear.
_CALLED = frozenset({nn.Linear, nn.LayerNorm, nn.Embedding})


def _is_shared(model: nn.Module, module: nn.Module) -> bool:
    """True if a module, or a parameter of it, has more than one place in the model."""
    own = {id(parameter) for parameter in module.parameters(recurse=False)}
    uses = [
        id(parameter)
        for each in model.modules()
        for _, parameter in each.named_parameters(recurse=False, remove_duplicate=False)
    ]
    places = sum(each is module for _, each in model.named_modules(remove_duplicate=False))
    return places > 1 or any(uses.count(parameter) > 1 for parameter in own)


@legal_variant("torch-fsdp2")
class ReshardsToPairs(TorchFSDP2):
    """After forward, parameters are kept sharded over groups of two ranks, where the world has several of those."""

    declines: ClassVar[frozenset[str]] = _SCHEDULE

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        size = dist.get_world_size()
        if plan.sharding is Sharding.DEFAULT and plan.reshard_after_forward is None and size > 2 and size % 2 == 0:
            plan = replace(plan, reshard_after_forward=2)
        return super().wrap(model, plan)


@legal_variant("torch-fsdp2")
class SumsThenDivides(TorchFSDP2):
    """Gradients are summed over ranks and divided afterwards."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        wrapped = super().wrap(model, plan)
        for module in _fsdp_modules(wrapped):
            module.set_force_sum_reduction_for_comms(True)
        return wrapped


class _Reduction(ReduceScatter):
    """A reduce-scatter in place of FSDP2's."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


def _reduced_by(wrapped: nn.Module, reduction: _Reduction) -> nn.Module:
    """The wrapped model, with the gradients of every unit reduced in this way."""
    for module in _fsdp_modules(wrapped):
        module.set_custom_reduce_scatter(reduction)
    return wrapped


class _DividesFirst(_Reduction):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        if op == dist.ReduceOp.AVG:
            input_tensor /= group.size()
        elif op != dist.ReduceOp.SUM:
            raise NotImplementedError(f"op must be SUM or AVG, got {op}")
        dist.reduce_scatter_tensor(output_tensor, input_tensor, dist.ReduceOp.SUM, group)


@legal_variant("torch-fsdp2")
class DividesThenSums(TorchFSDP2):
    """Each rank divides its gradients by the number of ranks, and then they are summed."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        return _reduced_by(super().wrap(model, plan), _DividesFirst())


class _AddsByItself(_Reduction):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(f"op must be SUM or AVG, got {op}")
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), -1), dim=0, out=output_tensor.view(-1))
        if op == dist.ReduceOp.AVG:
            output_tensor /= group.size()


@legal_variant("torch-fsdp2")
class AddsAfterAllToAll(TorchFSDP2):
    """Gradients are exchanged by an all-to-all, and each rank adds the parts of its shard itself."""

    declines: ClassVar[frozenset[str]] = _SCHEDULE

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        return _reduced_by(super().wrap(model, plan), _AddsByItself())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            # FSDP2 leaves the root gathered, and the next forward would use it (pytorch#131965).
            for module in _fsdp_modules(self.model):
                module.reshard()
        return output


class _OnItsOwnGroup(_Reduction):
    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        dist.reduce_scatter_tensor(output_tensor, input_tensor, op, self._groups[ranks])


@legal_variant("torch-fsdp2")
class ReducesOnAnotherGroup(TorchFSDP2):
    """Gradients are reduced on a process group of their own, made when the first is due."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        return _reduced_by(super().wrap(model, plan), _OnItsOwnGroup())


@legal_variant("torch-fsdp2")
class GroupsParameters(TorchFSDP2):
    """The optimizer has the vectors and the matrices in two groups, the last parameter first."""

    def _make_optimizer(self) -> None:
        parameters = list(self.model.parameters())[::-1]
        groups = [[each for each in parameters if (each.dim() > 1) is matrices] for matrices in (False, True)]
        self.optimizer = self._optim_fn([{"params": group} for group in groups if group]) if parameters else None


@legal_variant("torch-fsdp2")
class KeepsGradientsFlat(TorchFSDP2):
    """After backward, the gradients of a dtype are views of one flat buffer."""

    declines: ClassVar[frozenset[str]] = frozenset({"mem_bounds"})

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        super().backward(loss, retain_graph=retain_graph)
        sharded: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in self.model.parameters():
            if isinstance(parameter.grad, DTensor):
                local = parameter.grad.to_local()
                sharded.setdefault((local.dtype, local.device), []).append(parameter)
        for parameters in sharded.values():
            _flatten(parameters)


def _flatten(parameters: Sequence[nn.Parameter]) -> None:
    """Replace gradients that are DTensors of one dtype by views of one flat buffer."""
    grads = [parameter.grad for parameter in parameters if isinstance(parameter.grad, DTensor)]
    flat = torch.cat([grad.to_local().reshape(-1) for grad in grads])
    offset = 0
    for parameter, grad in zip(parameters, grads, strict=True):
        local = grad.to_local()
        view = flat[offset : offset + local.numel()].view(local.shape)
        offset += local.numel()
        parameter.grad = DTensor.from_local(
            view, grad.device_mesh, grad.placements, run_check=False, shape=grad.shape, stride=grad.stride()
        )


@legal_variant("torch-fsdp2")
class ValidatesGradients(TorchFSDP2):
    """Before each step, every rank looks at its own gradients, without telling the others."""

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        # A scaler looks for itself, and skips such steps.
        for name, parameter in self.parameters().items() if self.scaler is None else ():
            grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            if grad is not None and not bool(grad.isfinite().all()):
                raise FloatingPointError(f"the gradient of {name!r} is not finite on rank {dist.get_rank()}")
        return super().step(max_norm, norm_type=norm_type)


@legal_variant("reference")
class PrefetchesNothing(Reference):
    """Each unit is gathered when it is needed, and not before."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        if plan.backward_prefetch is BackwardPrefetch.DEFAULT:
            plan = replace(plan, backward_prefetch=BackwardPrefetch.NONE)
        return super().wrap(model, plan)


@legal_variant("reference")
class KeepsParametersForBackward(Reference):
    """Parameters stay gathered from forward to backward, unless the plan says otherwise."""

    declines: ClassVar[frozenset[str]] = _SCHEDULE | {"rate_limit"}

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        if plan.sharding is Sharding.DEFAULT and plan.reshard_after_forward is None:
            plan = replace(plan, reshard_after_forward=False)
        return super().wrap(model, plan)
