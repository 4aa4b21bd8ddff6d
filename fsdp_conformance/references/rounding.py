"""
The oracle for mixed precision: all ranks in one process, rounding where a sharded engine rounds.

    parameters    cast to their unit's compute dtype in every forward; the optimizer steps the original ones
    inputs        floating-point ones cast by the root, and by units with their own dtype
    gradients     in the compute dtype, cast to the reduce dtype, averaged in it, cast to the parameter's dtype
    buffers       floating-point ones cast once

Deferred micro-batches are accumulated in float32, so the reduce dtype must be float32 then. With two ranks the order of
a sum does not matter, and halving it is exact, so every correct engine produces the same bits. With more ranks that
depends on the values: each training is repeated with the ranks added in the opposite order, and must be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial, reduce
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fsdp_conformance.errors import NotExact, SuiteError
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.plan import Plan
from fsdp_conformance.references.exactness import values
from fsdp_conformance.references.loop import Replica
from fsdp_conformance.references.single_process import Order, SingleProcess
from fsdp_conformance.references.structures import convert
from fsdp_conformance.workload.definition import Regime, Workload
from fsdp_conformance.workload.events import Action
from fsdp_conformance.workload.units import ROOT, owner

#: Up to this number of ranks, the order in which they are added does not matter.
_ONE_SUM = 2


class Rounding(SingleProcess):
    """Replicas that compute in the dtypes of a plan."""

    name = "rounding"

    def __init__(
        self, workload: Workload, regime: Regime, plan: Plan, *, accumulates_low: bool = False, **rest: Any
    ) -> None:
        """`accumulates_low`: deferred micro-batches are accumulated in the compute dtype, which is a mistake."""
        super().__init__(workload, regime, dtype=torch.float32, **rest)
        self._accumulates_low = accumulates_low
        if _defers(regime) and plan.reduce_dtype != "float32" and not accumulates_low:
            raise SuiteError(
                "reduce_dtype must be float32 with deferred micro-batches, which are accumulated in it, got "
                f"{plan.reduce_dtype} [rounding reference]"
            )
        self.plan = plan
        self._places: dict[int, dict[str, tuple[nn.Module, str]]] = {}
        """Every place of a parameter by rank, as module and key; a tied parameter has several."""
        self._originals: dict[int, dict[str, nn.Parameter]] = {}
        for replica in self.replicas:
            self._places[replica.rank] = places = dict(_places_of(replica.module))
            self._originals[replica.rank] = {
                place: holder.get_parameter(key) for place, (holder, key) in places.items()
            }
            for unit in (ROOT, *(unit for unit, _ in plan.unit_dtypes)):
                for name in unit.split("+"):
                    module = replica.module.get_submodule(name)
                    module.register_forward_pre_hook(partial(self._cast_inputs, unit), with_kwargs=True)
            _cast_buffers(replica.module, _dtype(plan.buffer_dtype))

    def call(self, replica: Replica) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            # They stay until the backward has ended: what is recomputed in it uses them, too.
            self._swap(replica, self._rounded(replica))
            return replica.module(*args, **kwargs)

        return called

    def call_alone(self, replica: Replica) -> Callable[..., Any]:
        return self.call(replica)

    def call_in_eval(self, replica: Replica) -> Callable[..., Any]:
        return partial(self._evaluated, replica)

    def reduce(self, micro: int, reduced: bool) -> None:
        for replica in self.replicas:
            self._swap(replica, replica.params)
            for name, param in replica.params.items() if self._accumulates_low else ():
                if param.grad is not None:
                    param.grad = param.grad.to(self._compute_dtype(name, replica.module)).to(param.dtype)
        super().reduce(micro, reduced)

    def _save(self, replica: Replica, loading: Action) -> None:
        self._swap(replica, replica.params)
        super()._save(replica, loading)

    def _load(self, replica: Replica, action: Action) -> None:
        self._swap(replica, replica.params)
        super()._load(replica, action)

    def _evaluated(self, replica: Replica, *args: Any, **kwargs: Any) -> Any:
        """A forward that no backward follows, perhaps between another forward and its backward."""
        module = replica.module
        parameters_before = {
            place: holder._parameters[key] for place, (holder, key) in self._places[replica.rank].items()
        }
        buffers = {name: b.float() for name, b in module.named_buffers() if b.is_floating_point()}
        self._swap(replica, self._rounded(replica))
        try:
            return functional_call(module, buffers if self._is_full(module) else {}, args, kwargs)
        finally:
            for place, (holder, key) in self._places[replica.rank].items():
                holder._parameters[key] = parameters_before[place]

    def _rounded(self, replica: Replica) -> dict[str, Tensor]:
        """The parameters cast to their compute dtypes; gradients flow back to the originals."""
        module = replica.module
        return {
            name: param.to(self._compute_dtype(name, module)) if param.is_floating_point() else param
            for name, param in replica.params.items()
        }

    def _swap(self, replica: Replica, tensors: Mapping[str, Tensor]) -> None:
        """Let the module compute with these tensors, wherever a parameter is used."""
        of_parameter = {id(param): tensors[name] for name, param in replica.params.items()}
        for place, (holder, key) in self._places[replica.rank].items():
            holder._parameters[key] = cast(Any, of_parameter[id(self._originals[replica.rank][place])])

    def _compute_dtype(self, parameter: str, module: nn.Module) -> torch.dtype:
        unit = owner(parameter, self.plan.units)
        own = self._dtype_of_parameter(parameter)
        return (None if self._is_full(module) else _dtype(self.plan.dtype_of(unit))) or own

    def _dtype_of_parameter(self, name: str) -> torch.dtype:
        return self.replicas[0].params[name].dtype

    def _is_full(self, module: nn.Module) -> bool:
        return self.plan.full_precision_in_eval and not module.training

    def _cast_inputs(self, unit: str, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = None if self._is_full(module) else _dtype(self.plan.dtype_of(unit))

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

        return convert(args, cast), convert(kwargs, cast)

    def mean(self, name: str, grads: list[Tensor], before: Tensor | None) -> Tensor:
        plan = self.plan
        own = self._dtype_of_parameter(name)
        dtype = _dtype(plan.reduce_dtype or plan.dtype_of(owner(name, plan.units))) or own
        in_order = grads[::-1] if self.order is Order.REVERSED else grads
        divisor = 1 if self.regime.sums else self.world_size
        mean = (reduce(torch.add, [grad.to(dtype) for grad in in_order]) / divisor).to(own)
        return mean if before is None else before + mean


def rounding_reference(
    workload: Workload, regime: Regime, plan: Plan, *, rank: int, world_size: int, device: torch.device | str = "cpu"
) -> TrainingHistory:
    """The expected history of one rank. Not collective. Raises NotExact if the rounding is not determined."""
    return rounding_histories(workload, regime, plan, world_size=world_size, device=device)[rank]


def rounding_histories(
    workload: Workload, regime: Regime, plan: Plan, *, world_size: int, device: torch.device | str = "cpu"
) -> list[TrainingHistory]:
    """The expected histories of all ranks. Not collective. Raises NotExact if they depend on the order of ranks."""
    orders = (Order.SUM,) if world_size <= _ONE_SUM else (Order.SUM, Order.REVERSED)
    expected, *others = (
        Rounding(
            workload, regime, plan, order=order, ranks=range(world_size), world_size=world_size, device=device
        ).train()
        for order in orders
    )
    for other in others:
        for history, twin in zip(other, expected, strict=True):
            for (label, got), (_, want) in zip(values(history), values(twin), strict=True):
                if not torch.equal(got, want):
                    raise NotExact(
                        f"{label} in low precision depends on the order in which ranks are added "
                        f"[{workload.name}, rank {history.rank}]"
                    )
    return expected


def rounding_mistakes(
    workload: Workload, regime: Regime, plan: Plan, *, rank: int, world_size: int, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, TrainingHistory]]:
    """The histories of one rank of engines that round elsewhere than the plan says, each with the cause."""
    low, defers = plan.param_dtype, _defers(regime)
    if low is None:
        return
    plans: dict[str, Plan] = {}
    if defers:
        plans[f"accumulated in {low}: gradients of deferred micro-batches were added in the compute dtype"] = plan
    if plan.reduce_dtype not in (None, low):
        plans[f"reduced in {low}: the reduce dtype was not used"] = replace(plan, reduce_dtype=None)
    plans["computed in float32: the compute dtype was not used"] = replace(plan, param_dtype=None, unit_dtypes=())
    for cause, other in plans.items():
        run = Rounding(
            workload, regime, other, accumulates_low=defers, ranks=range(world_size), world_size=world_size,
            device=device,
        )  # fmt: skip
        yield cause, run.train()[rank]


def _defers(regime: Regime) -> bool:
    return not all(regime.is_reduced(micro) for micro in range(regime.micro_batches))


def _places_of(module: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    for prefix, submodule in module.named_modules():
        for key, parameter in submodule._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{key}", (submodule, key)


def _cast_buffers(module: nn.Module, dtype: torch.dtype | None) -> None:
    for submodule in module.modules():
        for key, buffer in submodule._buffers.items():
            if dtype is not None and buffer is not None and buffer.is_floating_point():
                submodule._buffers[key] = buffer.to(dtype)


def _dtype(name: str | None) -> torch.dtype | None:
    dtype: torch.dtype | None = None if name is None else getattr(torch, name)
    return dtype
