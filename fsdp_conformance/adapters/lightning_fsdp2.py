"""Lightning Fabric's ModelParallelStrategy with FSDP2. Requires `lightning-fabric`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from fsdp_conformance.adapters.base import CPU_ONLY, OptimFn
from fsdp_conformance.adapters.torch_fsdp2 import reshard_option
from fsdp_conformance.adapters.torch_like import TorchAdapter, units_to_shard
from fsdp_conformance.config import Plan


class LightningFSDP2(TorchAdapter):
    """The user's `parallelize_fn` calls `fully_shard` on each unit, innermost first, then on the root."""

    name: ClassVar[str] = "lightning-fsdp2"
    package: ClassVar[str] = "lightning-fabric"
    capabilities: ClassVar[frozenset[str]] = frozenset({
        "zero3", "zero2", "reshard_after_forward", "reshard_int", "multi_module_unit", "init_never", "shared_params",
        "zero_size_shard",
    })  # fmt: skip
    declines: ClassVar[frozenset[str]] = frozenset({"wrap_again"})
    declines_on: ClassVar[Mapping[str, frozenset[str]]] = CPU_ONLY
    cuda_names: ClassVar[bool] = True

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        from lightning_fabric import Fabric
        from lightning_fabric.plugins.environments import TorchElasticEnvironment
        from lightning_fabric.strategies import ModelParallelStrategy

        def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
            options: dict[str, Any] = {"mesh": mesh["data_parallel"], **reshard_option(plan)}
            for unit in units_to_shard(model, plan):
                fully_shard(unit, **options)
            return model

        size, on_cpu = dist.get_world_size(), plan.device == "cpu"
        strategy = ModelParallelStrategy(
            parallelize_fn=parallelize,
            data_parallel_size=size,
            tensor_parallel_size=1,
            process_group_backend="gloo" if on_cpu else "nccl",
        )
        strategy.cluster_environment = TorchElasticEnvironment()
        self.fabric: Any = Fabric(accelerator="cpu" if on_cpu else "cuda", devices=size, strategy=strategy)
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
