"""Wrong precision: policies that are partly ignored, and inputs that lose their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import Plan


@known_wrong("R084")
class IgnoresParamDtype(SeamFSDP2):
    """Units compute in the dtype the parameters are stored in, whatever was requested."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        return replace(plan, param_dtype=None)


@known_wrong("R083")
class IgnoresReduceDtype(SeamFSDP2):
    """Gradients are accumulated and reduced in the compute dtype."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        return replace(plan, reduce_dtype=None)


@known_wrong("R083")
class AlwaysReducesInFloat32(SeamFSDP2):
    """Gradients are reduced in float32, whatever was requested."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        return replace(plan, reduce_dtype="float32") if plan.param_dtype is not None else plan


@known_wrong("R090")
class SumsFloat16First(SeamFSDP2):
    """Gradients are summed over ranks and divided afterwards, also in float16."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        wrapped = super().wrap(model, plan)
        for module in wrapped.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(_Scaled(before=2.0))
        return wrapped


@known_wrong("R090")
class DividesFloat16ByTooMuch(SeamFSDP2):
    """Gradients are divided by 2**10 before they are summed, and multiplied afterwards."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        wrapped = super().wrap(model, plan)
        for module in wrapped.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(_Scaled(before=2.0**-10))
        return wrapped


@known_wrong("R091")
class TrainsInFloat32Anyway(SeamFSDP2):
    """A model in float16 becomes one in float32 when it is wrapped; inputs are cast."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        if any(parameter.dtype is torch.float16 for parameter in model.parameters()):
            model.float().register_forward_pre_hook(lambda _, args: tuple(arg.float() for arg in args))
        return super().wrap(model, plan)


@known_wrong("R091")
class AveragesFloat32Alone(SeamFSDP2):
    """Parameters that are in float16 have gradients of their own on each rank."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        wrapped = super().wrap(model, plan)
        for module in wrapped.modules():
            if isinstance(module, FSDPModule) and all(each.dtype is torch.float16 for each in module.parameters()):
                module.set_custom_reduce_scatter(_OwnRows())
        return wrapped


class _OwnRows(ReduceScatter):
    """No reduce-scatter: a rank keeps its part of its own gradients."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


class _Scaled(ReduceScatter):
    """A reduce-scatter that in float16 multiplies by `before` first, and corrects for it afterwards."""

    def __init__(self, *, before: float) -> None:
        self._before = before

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        # FSDP2 has divided float16 by a part of the world size already: 2 for two to four ranks.
        factor = self._before if input_tensor.dtype is torch.float16 else 1.0
        input_tensor *= factor
        dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group)
        output_tensor /= factor


@known_wrong("R087")
class OnePolicyForAllUnits(SeamFSDP2):
    """All units, including the root, compute in the dtype of one of them."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        dtypes = [dtype for _, dtype in plan.unit_dtypes]
        return replace(plan, unit_dtypes=(), param_dtype="bfloat16" if "bfloat16" in dtypes else plan.param_dtype)


@known_wrong("R132")
class BuffersNotCast(SeamFSDP2):
    """A precision policy for buffers is accepted but does nothing."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"mp_buffers"})


@known_wrong("R089")
class LowPrecisionInEval(SeamFSDP2):
    """Full precision in evaluation is accepted but does nothing."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"mp_eval_full"})


@known_wrong("R088")
class RoundsInputsOutsideOfAutograd(SeamFSDP2):
    """Inputs are cast where autograd does not see it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        dtype = None if self.plan.param_dtype is None else getattr(torch, self.plan.param_dtype)
        return super().forward(*(_rounded(arg, dtype) for arg in args), **kwargs)


@known_wrong("R081")
class RoundsIntegerInputs(SeamFSDP2):
    """All inputs are cast to the compute dtype, integers as well."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.plan.param_dtype is None:
            return super().forward(*args, **kwargs)
        dtype = getattr(torch, self.plan.param_dtype)
        # Back to integers of another width, which an embedding accepts.
        rounded = (arg.to(dtype).int() if not arg.is_floating_point() else arg for arg in args)
        return super().forward(*rounded, **kwargs)


@known_wrong("R082")
class KeepsGradientsInLowPrecision(SeamFSDP2):
    """The reduced gradients stay in the compute dtype, and the optimizer converts them."""

    def after_backward(self) -> None:
        if self.plan.param_dtype is None:
            return
        dtype = getattr(torch, self.plan.param_dtype)
        for parameter in self.sharded().values():
            if parameter.grad is not None:
                parameter.grad_dtype = None
                parameter.grad = parameter.grad.to(dtype)

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        for parameter in self.sharded().values():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(parameter.dtype)
        return super().step(max_norm, norm_type=norm_type)


@known_wrong("R082")
class KeepsStateInLowPrecision(SeamFSDP2):
    """The optimizer's state is stored in the compute dtype."""

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        self._convert_state(torch.float32)
        norm = super().step(max_norm, norm_type=norm_type)
        if self.plan.param_dtype is not None:
            self._convert_state(getattr(torch, self.plan.param_dtype))
        return norm

    def _convert_state(self, dtype: torch.dtype) -> None:
        for state in self.optimizer.state.values() if self.optimizer is not None else ():
            state.update({key: value.to(dtype) for key, value in state.items() if _is_large(value)})


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _rounded(value: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None or not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().to(dtype)
