"""Wrong sharding degrees: shards that free nothing, and requests that are replaced by another degree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import Plan, Sharding


@known_wrong("R188")
class ViewsOfFullStorage(SeamFSDP2):
    """Shards are views of full tensors, so that nothing is freed."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        wrapped = super().wrap(model, plan)
        for module in wrapped.modules():
            if isinstance(module, FSDPModule):
                self._keep_storage(module)
        return wrapped

    def _keep_storage(self, module: FSDPModule) -> None:
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for sharded in group.fsdp_params:
                mine = sharded._sharded_param_data
                whole = mine.new_zeros(self.world_size, mine.numel())
                whole[self.rank] = mine
                sharded._sharded_param_data = whole[self.rank]
                parameter: Any = sharded.sharded_param
                local = parameter._local_tensor
                parameter._local_tensor = whole[self.rank].as_strided(
                    local.size(), local.stride(), whole[self.rank].storage_offset()
                )


@known_wrong("R005")
class OneDegreeForAll(SeamFSDP2):
    """Parameters stay gathered from forward to backward, whatever sharding degree is requested."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        return replace(plan, sharding=Sharding.GRAD_OPTIM, reshard_after_forward=None, replicas=1)


@known_wrong("R005")
class ShardsNoOptimizerState(SeamFSDP2):
    """Sharding of the optimizer state is accepted, and every rank keeps all of it."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"zero1"})

    def _mesh(self, plan: Plan) -> DeviceMesh:
        return super()._mesh(replace(plan, sharding=Sharding.NONE))


@known_wrong("R005")
class IgnoresReshardGroup(SeamFSDP2):
    """Parameters are resharded over all ranks instead of over the requested smaller group."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        reshard = plan.reshard_after_forward
        return replace(plan, reshard_after_forward=None if reshard is None else bool(reshard))
