"""
Accelerate's plugins for FSDP1 and FSDP2. Requires `accelerate`.

On the simulated accelerator, under CUDA's names, Accelerate uses them by itself. On the CPU they are forced upon it:
without force it trains with DistributedDataParallel there, whatever the plugin asks for, as `AccelerateFSDP2Unforced`
shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_conformance.adapters.base import CPU_ONLY, OptimFn
from fsdp_conformance.adapters.torch_like import TorchAdapter, unit_classes
from fsdp_conformance.adapters.vendors.torch_fsdp1 import TorchFSDP1
from fsdp_conformance.plan import Plan, Sharding


class Accelerated(TorchAdapter):
    """Base of both plugins: `Accelerator` runs the backward, defers the reduction, and clips."""

    package: ClassVar[str] = "accelerate"
    declines_on: ClassVar[Mapping[str, frozenset[str]]] = CPU_ONLY
    cuda_names: ClassVar[bool] = True
    shims: ClassVar[tuple[str, ...]] = (
        "Accelerate's distributed type is set to FSDP: on the CPU it would use DistributedDataParallel, without a word",
    )
    forced: ClassVar[bool] = True

    def accelerate(self, model: nn.Module, plan: Plan, **options: Any) -> None:
        """Make the `Accelerator`, with a plugin that has these options and the plan's units, by class."""
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.state import AcceleratorState

        units = unit_classes(model, plan)
        plugin = FullyShardedDataParallelPlugin(
            auto_wrap_policy="transformer_based_wrap" if units else "no_wrap",
            transformer_cls_names_to_wrap=[unit.__name__ for unit in units],
            **options,
        )
        # Its state is that of the process, and keeps the first plugin.
        AcceleratorState._reset_state(reset_partial_state=True)
        on_cpu = plan.device == "cpu"
        self.accelerator: Any = Accelerator(cpu=on_cpu, fsdp_plugin=plugin)
        if on_cpu and self.forced:
            _force(self.accelerator.state, plugin)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.accelerator.backward(loss, retain_graph=retain_graph)

    def no_sync(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.accelerator.no_sync(self.model)
        return context

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        norm: Tensor = self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)
        return norm


class AccelerateFSDP1(Accelerated, TorchFSDP1):
    """`Accelerator.prepare` with `fsdp_version=1` and `use_orig_params=True`: the model first, then the optimizer."""

    name: ClassVar[str] = "accelerate-fsdp1"
    shims: ClassVar[tuple[str, ...]] = (
        *Accelerated.shims,
        'Accelerate\'s device is "cpu" in place of "cpu:0", which FSDP1 refuses',
    )
    #: What the plugin has no option for, or `Accelerator` does itself.
    declines: ClassVar[frozenset[str]] = frozenset({
        "hsdp", "subgroups", "auto_wrap", "any_accelerator", "move_inputs", "init_after", "device_id", "tp",
        "mixed_precision", "mp_per_unit", "mp_reduce", "mp_buffers", "mp_eval_full", "fp16", "grad_scaler",
        "multi_module_unit", "wrap_again", "meta_init", "meta_init_fn",
    })  # fmt: skip

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        options = self._options(model, plan)
        for given_by_accelerate in ("device_id", "mixed_precision"):
            options.pop(given_by_accelerate, None)
        self.accelerate(model, plan, fsdp_version=1, **options)
        if plan.device == "cpu":
            self.accelerator.state.device = self.device
        wrapped: nn.Module = self.accelerator.prepare_model(model)
        return wrapped

    def make_optimizer(self, optim_fn: OptimFn) -> Optimizer:
        optimizer: Optimizer = self.accelerator.prepare_optimizer(super().make_optimizer(optim_fn))
        return optimizer


class AccelerateFSDP2(Accelerated):
    """`Accelerator.prepare` with the model and the optimizer, as Accelerate requires for FSDP2."""

    name: ClassVar[str] = "accelerate-fsdp2"
    capabilities: ClassVar[frozenset[str]] = frozenset({
        "zero3", "zero2", "reshard_after_forward", "init_never", "zero_size_shard", "clip_norm_type",
    })  # fmt: skip
    declines: ClassVar[frozenset[str]] = frozenset({"wrap_again"})

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        stays_gathered = plan.sharding is Sharding.GRAD_OPTIM or plan.reshard_after_forward is False
        self.accelerate(model, plan, fsdp_version=2, reshard_after_forward=not stays_gathered)
        # Prepared together with the optimizer, as FSDP2 requires: see make_optimizer.
        return model

    def make_optimizer(self, optim_fn: OptimFn) -> Optimizer:
        self.model, optimizer = self.accelerator.prepare(self.model, super().make_optimizer(optim_fn))
        wrapped: Optimizer = optimizer
        return wrapped


class AccelerateFSDP2Unforced(AccelerateFSDP2):
    """Accelerate as it is on the CPU, where it trains with DistributedDataParallel whatever the plugin asks for."""

    name: ClassVar[str] = "accelerate-fsdp2-unforced"
    cuda_names: ClassVar[bool] = False
    shims: ClassVar[tuple[str, ...]] = ()
    forced: ClassVar[bool] = False


def _force(state: Any, plugin: Any) -> None:
    """Let Accelerate use the plugin on the CPU."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
    shared: Any = PartialState._shared_state
    shared["distributed_type"] = DistributedType.FSDP
