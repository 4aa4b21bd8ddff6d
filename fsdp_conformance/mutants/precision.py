"""Wrong precision: policies that are partly ignored, and inputs that lose their gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fsdp_conformance.config import Plan
from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.mutant import known_wrong


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


def _rounded(value: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None or not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().to(dtype)
