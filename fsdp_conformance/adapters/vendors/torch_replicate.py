"""torch's composable `replicate`, as torchtitan uses it: replicated units with FSDP2's interface."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh

from fsdp_conformance.adapters.torch_like import submodules
from fsdp_conformance.adapters.vendors.torch_fsdp2 import TorchFSDP2, precision
from fsdp_conformance.plan import Plan


class TorchReplicate(TorchFSDP2):
    """`replicate` on each unit, innermost first, then on the root. It does not shard."""

    name: ClassVar[str] = "torch-replicate"
    capabilities: ClassVar[frozenset[str]] = frozenset({"no_shard"})
    declines: ClassVar[frozenset[str]] = frozenset({
        "zero3", "zero2", "hsdp", "reshard_after_forward", "reshard_int", "subgroups", "ignored_modules", "shard_dim",
        "cpu_offload_params", "prefetch_explicit", "prefetch_forward", "zero_size_shard", "rate_limit", "ws1_fast",
        "sharded_state", "manual_unshard", "async_unshard", "hsdp_defer_allreduce", "reshard_after_backward",
        "coll_counts", "coll_volume", "mem_bounds", "meta_init", "tp", "pp",
    })  # fmt: skip

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),), mesh_dim_names=("replicate",))
        for unit in (*plan.units, ""):
            modules = submodules(model, unit.split("+"))
            target: Any = modules if len(modules) > 1 else modules[0]
            replicate(target, mesh=mesh, mp_policy=precision(plan, unit))
        return model
