"""Accelerate's plugin for FSDP2, forced to be used on the CPU. Requires `accelerate`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_conformance.adapters.base import CPU_ONLY, OptimFn
from fsdp_conformance.adapters.torch_like import TorchAdapter, unit_classes
from fsdp_conformance.config import Plan, Sharding


class AccelerateFSDP2(TorchAdapter):
    """`Accelerator.prepare` with the model and the optimizer, as Accelerate requires for FSDP2."""

    name: ClassVar[str] = "accelerate-fsdp2"
    package: ClassVar[str] = "accelerate"
    capabilities: ClassVar[frozenset[str]] = frozenset({
        "zero3", "zero2", "reshard_after_forward", "init_never", "zero_size_shard", "clip_norm_type",
    })  # fmt: skip
    declines: ClassVar[frozenset[str]] = frozenset({"wrap_again"})
    declines_on: ClassVar[Mapping[str, frozenset[str]]] = CPU_ONLY
    environment: ClassVar[Mapping[str, str]] = {"ACCELERATE_USE_CPU": "true"}
    shims: ClassVar[tuple[str, ...]] = (
        "Accelerate's distributed type is set to FSDP: on the CPU it would use DistributedDataParallel, without a word",
    )

    forced: ClassVar[bool] = True

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.state import AcceleratorState

        kept = plan.sharding is Sharding.GRAD_OPTIM or plan.reshard_after_forward is False
        units = unit_classes(model, plan)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=not kept,
            auto_wrap_policy="transformer_based_wrap" if units else "no_wrap",
            transformer_cls_names_to_wrap=[unit.__name__ for unit in units],
        )
        # Its state is that of the process, and keeps the first plugin.
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator: Any = Accelerator(cpu=True, fsdp_plugin=plugin)
        if self.forced:
            _force(self.accelerator.state, plugin)
        # Prepared together with the optimizer, as FSDP2 requires: see make_optimizer.
        return model

    def make_optimizer(self, optim_fn: OptimFn) -> Optimizer:
        self.model, optimizer = self.accelerator.prepare(self.model, super().make_optimizer(optim_fn))
        found: Optimizer = optimizer
        return found

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.accelerator.backward(loss, retain_graph=retain_graph)

    def no_sync(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.accelerator.no_sync(self.model)
        return context

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        norm: Tensor = self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)
        return norm


class AccelerateFSDP2Unforced(AccelerateFSDP2):
    """Accelerate as it is on the CPU, where it trains with DistributedDataParallel whatever the plugin asks for."""

    name: ClassVar[str] = "accelerate-fsdp2-unforced"
    shims: ClassVar[tuple[str, ...]] = ()
    forced: ClassVar[bool] = False


def _force(state: Any, plugin: Any) -> None:
    """Let Accelerate use the plugin on the CPU."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
    shared: Any = PartialState._shared_state
    shared["distributed_type"] = DistributedType.FSDP
