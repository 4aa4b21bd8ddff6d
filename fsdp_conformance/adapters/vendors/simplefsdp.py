"""torchtitan's SimpleFSDP: every parameter is a parametrization that gathers it. Requires `torchtitan`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_conformance.adapters.torch_like import TorchAdapter
from fsdp_conformance.plan import Plan


class SimpleFSDP(TorchAdapter):
    """
    `data_parallel` with "fully_shard". It has no units.

    Without torch.compile a parameter is not gathered again in backward, so the degree is ZeRO-2.
    """

    name: ClassVar[str] = "simplefsdp"
    package: ClassVar[str] = "torchtitan"
    capabilities: ClassVar[frozenset[str]] = frozenset({
        "zero2", "init_never", "zero_size_shard", "clip_norm_type", "any_accelerator",
    })  # fmt: skip
    declines: ClassVar[frozenset[str]] = frozenset({"wrap_again"})
    grad_reduction_of_accumulation: ClassVar[str] = "reduced"

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        wrapped: nn.Module = data_parallel(model, mesh, mode="fully_shard")
        return wrapped

    @contextmanager
    def microbatch(self, last: bool, *, reduced: bool = True) -> Iterator[None]:
        yield
        # SimpleFSDP sums over the ranks: torchtitan divides its loss by the tokens of all of them. Here the gradients
        # are divided, once they are complete: a model whose backward rounds must get gradients of the loss itself.
        for parameter in self.model.parameters() if last else ():
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()
