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

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fsdp_conformance.checks.loop import Replica
from fsdp_conformance.checks.reference_single import SingleProcess
from fsdp_conformance.checks.references import Kind, values
from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.checks.structures import convert
from fsdp_conformance.checks.units import ROOT, owner
from fsdp_conformance.config import Plan
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.workload import Regime, Workload

_PHASES = {Kind.LOSS: "forward", Kind.GRADIENT: "reduce", Kind.EVAL: "eval"}

#: Values whose dtype the optimizer or the user relies on; the dtype of outputs is the engine's choice.
_IN_THEIR_DTYPE = frozenset({Kind.GRADIENT, Kind.PARAMETER, Kind.BUFFER})


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


def rounds_alike(
    history: TrainingHistory, expected: TrainingHistory, *, requirement: str, kinds: Sequence[Kind]
) -> CheckResult:
    """
    Values of these kinds equal the rounding reference's, bit for bit.

    Gradients that the implementation does not expose are judged by the parameters that they lead to.
    """
    tally = Tally("rounding parity", requirement, rank=history.rank)
    notes = []
    if Kind.GRADIENT in kinds and all(record.grads is None for record in history.steps):
        kinds = list(dict.fromkeys(Kind.PARAMETER if kind is Kind.GRADIENT else kind for kind in kinds))
        notes.append("gradients are not exposed: the parameters they lead to were compared")
    for kind in kinds:
        for record in expected.steps[: 1 if kind is Kind.EVAL else None]:
            got = values(history, kind, record.step)
            for name, want in values(expected, kind, record.step).items():
                difference = _difference(got.get(name), want, demands_dtype=kind in _IN_THEIR_DTYPE)
                wanted, seen = difference or ("", "")
                tally.compare(
                    difference is None, kind, expected=wanted, got=seen,
                    details="the reference rounds where the plan says",
                    elements=want.numel() if isinstance(want, Tensor) else 1,
                    step=None if kind is Kind.EVAL else record.step, phase=_PHASES.get(kind, "step"), fqn=name,
                )  # fmt: skip
    return tally.result(notes=notes).demand_comparisons(f"rank {history.rank}")


def _difference(got: Any, want: Any, *, demands_dtype: bool) -> tuple[str, str] | None:
    """What was expected and what was seen of a value that differs, or None."""
    if not isinstance(got, Tensor) or not isinstance(want, Tensor):
        return None if type(got) is type(want) else (type(want).__name__, type(got).__name__)
    if got.shape != want.shape or (demands_dtype and got.dtype is not want.dtype):
        return f"{want.dtype} {tuple(want.shape)}", f"{got.dtype} {tuple(got.shape)}"
    if torch.equal(got.double(), want.double()):
        return None
    return "bitwise equality", f"a difference of up to {(got.double() - want.double()).abs().max().item():.3g}"


def _cast_buffers(module: nn.Module, dtype: torch.dtype | None) -> None:
    for below in module.modules():
        for key, buffer in below._buffers.items():
            if dtype is not None and buffer is not None and buffer.is_floating_point():
                below._buffers[key] = buffer.to(dtype)


def _dtype(name: str | None) -> torch.dtype | None:
    found: torch.dtype | None = None if name is None else getattr(torch, name)
    return found
