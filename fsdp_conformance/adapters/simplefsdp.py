"""torchtitan's SimpleFSDP: every parameter is a parametrization that gathers it. Requires `torchtitan`."""

from __future__ import annotations

from typing import ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_conformance.adapters.torch_like import TorchAdapter
from fsdp_conformance.config import Plan


class SimpleFSDP(TorchAdapter):
    """
    `data_parallel` with "fully_shard". It has no units.

    Without torch.compile a parameter is not gathered again in backward, so the degree is ZeRO-2.
    """

    name: ClassVar[str] = "simplefsdp"
    package: ClassVar[str] = "torchtitan"
    capabilities: ClassVar[frozenset[str]] = frozenset({"zero2", "init_never", "zero_size_shard", "clip_norm_type"})
    declines: ClassVar[frozenset[str]] = frozenset({"wrap_again"})
    grad_reduction_of_accumulation: ClassVar[str] = "reduced"

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        wrapped: nn.Module = data_parallel(model, mesh, mode="fully_shard")
        return wrapped

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        # SimpleFSDP sums: torchtitan's loss is already divided by the number of tokens of all ranks.
        super().backward(loss / dist.get_world_size(), retain_graph=retain_graph)
