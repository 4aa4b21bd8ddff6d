"""
The oracle for mixed precision: all ranks in one process, rounding where a sharded engine rounds.

    parameters    cast to their unit's compute dtype in every forward; the optimizer steps the float32 ones
    inputs        floating-point ones cast by the root, and by units with their own dtype
    gradients     in the compute dtype, cast to the reduce dtype, averaged in it, cast to float32
    buffers       floating-point ones cast once

Deferred micro-batches are accumulated in float32, so the reduce dtype must be float32 then. At most two ranks: their
sum is the same in either order and halving it is exact, so every correct engine produces the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.plan import Plan
from fsdp_conformance.references.loop import Replica
from fsdp_conformance.references.single_process import SingleProcess
from fsdp_conformance.references.structures import convert
from fsdp_conformance.workload.definition import Regime, Workload
from fsdp_conformance.workload.units import ROOT, owner


class Rounding(SingleProcess):
    """Replicas that compute in the dtypes of a plan."""

    name = "rounding"

    def __init__(self, workload: Workload, regime: Regime, plan: Plan, **rest: Any) -> None:
        super().__init__(workload, regime, dtype=torch.float32, **rest)
        deferred = not all(regime.is_reduced(micro) for micro in range(regime.micro_batches))
        if self.world_size > 2 or (deferred and plan.reduce_dtype != "float32"):
            raise SuiteError(
                "rounding is only determined for at most 2 ranks, and for deferred micro-batches only with "
                f"reduce_dtype=float32: got world_size={self.world_size}, reduce_dtype={plan.reduce_dtype} "
                "[rounding reference]"
            )
        self.plan = plan
        for replica in self.replicas:
            for unit in (ROOT, *(unit for unit, _ in plan.unit_dtypes)):
                module = replica.module.get_submodule(unit)
                module.register_forward_pre_hook(partial(self._cast_inputs, unit), with_kwargs=True)
            _cast_buffers(replica.module, _dtype(plan.buffer_dtype))

    def call(self, replica: Replica) -> Callable[..., Any]:
        return partial(self._called, replica)

    def call_in_eval(self, replica: Replica) -> Callable[..., Any]:
        return partial(self._called, replica)

    def _called(self, replica: Replica, *args: Any, **kwargs: Any) -> Any:
        module = replica.module
        tensors: dict[str, Tensor] = {
            name: param.to(self._compute_dtype(name, module)) for name, param in replica.params.items()
        }
        if self._is_full(module):
            tensors |= {name: b.float() for name, b in module.named_buffers() if b.is_floating_point()}
        return functional_call(module, tensors, args, kwargs)

    def _compute_dtype(self, parameter: str, module: nn.Module) -> torch.dtype:
        unit = owner(parameter, self.plan.units)
        return (None if self._is_full(module) else _dtype(self.plan.dtype_of(unit))) or torch.float32

    def _is_full(self, module: nn.Module) -> bool:
        return self.plan.full_precision_in_eval and not module.training

    def _cast_inputs(self, unit: str, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = None if self._is_full(module) else _dtype(self.plan.dtype_of(unit))

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

        return convert(args, cast), convert(kwargs, cast)

    def mean(self, name: str, grads: list[Tensor], before: Tensor | None) -> Tensor:
        plan = self.plan
        dtype = _dtype(plan.reduce_dtype or plan.dtype_of(owner(name, plan.units))) or torch.float32
        mean = (reduce(torch.add, [grad.to(dtype) for grad in grads]) / self.world_size).float()
        return mean if before is None else before + mean


def rounding_reference(
    workload: Workload, regime: Regime, plan: Plan, *, rank: int, world_size: int, device: torch.device | str = "cpu"
) -> TrainingHistory:
    """The expected history of one rank. Not collective. Raises SuiteError if the rounding is not determined."""
    run = Rounding(workload, regime, plan, ranks=range(world_size), world_size=world_size, device=device)
    return run.train()[rank]


def _cast_buffers(module: nn.Module, dtype: torch.dtype | None) -> None:
    for below in module.modules():
        for key, buffer in below._buffers.items():
            if dtype is not None and buffer is not None and buffer.is_floating_point():
                below._buffers[key] = buffer.to(dtype)


def _dtype(name: str | None) -> torch.dtype | None:
    dtype: torch.dtype | None = None if name is None else getattr(torch, name)
    return dtype
