"""
Lightning Fabric's FSDPStrategy, which is FSDP1, and its ModelParallelStrategy with FSDP2. Requires `lightning-fabric`.

FSDPStrategy refuses the CPU; on the simulated accelerator it trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim import Optimizer

from fsdp_conformance.adapters.base import CPU_ONLY, OptimFn
from fsdp_conformance.adapters.torch_like import TorchAdapter, unit_classes, units_to_shard
from fsdp_conformance.adapters.vendors.torch_fsdp1 import TorchFSDP1
from fsdp_conformance.adapters.vendors.torch_fsdp2 import reshard_option
from fsdp_conformance.plan import Plan


class Lightning(TorchAdapter):
    """Base of both strategies: Fabric wraps the model and the optimizer, runs the backward, defers and clips."""

    package: ClassVar[str] = "lightning-fabric"
    declines_on: ClassVar[Mapping[str, frozenset[str]]] = CPU_ONLY
    cuda_names: ClassVar[bool] = True

    def set_up(self, model: nn.Module, strategy: Any) -> nn.Module:
        """Start Fabric with the strategy in this rank, and let it wrap the model."""
        from lightning_fabric import Fabric
        from lightning_fabric.plugins.environments import TorchElasticEnvironment

        # Not an argument: ModelParallelStrategy takes none.
        strategy.cluster_environment = TorchElasticEnvironment()
        accelerator = "cpu" if self.device.type == "cpu" else "cuda"
        self.fabric: Any = Fabric(accelerator=accelerator, devices=dist.get_world_size(), strategy=strategy)
        self.fabric.launch()
        wrapped: nn.Module = self.fabric.setup_module(model)
        return wrapped

    def make_optimizer(self, optim_fn: OptimFn) -> Optimizer:
        optimizer: Optimizer = self.fabric.setup_optimizers(super().make_optimizer(optim_fn))
        return optimizer

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.fabric.backward(loss, retain_graph=retain_graph)

    def no_sync(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.fabric.no_backward_sync(self.model)
        return context

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        norm: Tensor = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=max_norm, norm_type=norm_type)
        return norm

    def save_checkpoint(self, directory: Path) -> None:
        self.fabric.save(directory, self._state_to_save())

    def load_checkpoint(self, directory: Path) -> None:
        self.fabric.load(directory, self._state_to_save())

    def _state_to_save(self) -> dict[str, Any]:
        """The objects whose state Fabric saves: an empty model has no optimizer."""
        return {"model": self.model} | ({"optimizer": self.optimizer} if self.optimizer is not None else {})


class LightningFSDP1(Lightning, TorchFSDP1):
    """`FSDPStrategy` with `use_orig_params=True`, which is its default, and the units by class."""

    name: ClassVar[str] = "lightning-fsdp1"
    #: What the strategy has no option for, or Fabric does itself.
    declines: ClassVar[frozenset[str]] = frozenset({
        "cpu_compute", "hsdp", "subgroups", "auto_wrap", "move_inputs", "init_after", "device_id", "tp",
        "mixed_precision", "mp_per_unit", "mp_reduce", "mp_buffers", "mp_eval_full", "fp16", "grad_scaler",
        "multi_module_unit", "wrap_again", "meta_init", "meta_init_fn", "full_state_dict", "sharded_state_dict",
        "optim_state_dict", "async_checkpoint",
    })  # fmt: skip

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        from lightning_fabric.strategies import FSDPStrategy

        options = self._options(model, plan)
        for given_by_fabric in ("device_id", "mixed_precision"):
            options.pop(given_by_fabric, None)
        return self.set_up(model, FSDPStrategy(auto_wrap_policy=set(unit_classes(model, plan)), **options))

    @property
    def _root(self) -> FullyShardedDataParallel:
        (root,) = FullyShardedDataParallel.fsdp_modules(self.model, root_only=True)
        return root


class LightningFSDP2(Lightning):
    """The user's `parallelize_fn` calls `fully_shard` on each unit, innermost first, then on the root."""

    name: ClassVar[str] = "lightning-fsdp2"
    capabilities: ClassVar[frozenset[str]] = frozenset({
        "zero3", "zero2", "reshard_after_forward", "reshard_int", "multi_module_unit", "init_never", "shared_params",
        "zero_size_shard", "reshard_load",
    })  # fmt: skip
    declines: ClassVar[frozenset[str]] = frozenset({"wrap_again"})

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        from lightning_fabric.strategies import ModelParallelStrategy

        def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
            options: dict[str, Any] = {"mesh": mesh["data_parallel"], **reshard_option(plan)}
            for unit in units_to_shard(model, plan):
                fully_shard(unit, **options)
            return model

        sizes = {"data_parallel_size": dist.get_world_size(), "tensor_parallel_size": 1}
        return self.set_up(model, ModelParallelStrategy(parallelize, **sizes))
