"""torch's ZeroRedundancyOptimizer on top of DistributedDataParallel: ZeRO-1."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from fsdp_conformance.adapters.base import OptimFn
from fsdp_conformance.adapters.sharded import state_tensors
from fsdp_conformance.adapters.vendors.torch_ddp import TorchDDP


class TorchZeRO1(TorchDDP):
    """Each rank steps a part of the parameters with the user's optimizer, and broadcasts them."""

    name: ClassVar[str] = "torch-zero1"
    capabilities: ClassVar[frozenset[str]] = frozenset({"zero1"})
    #: Each rank has only the state of its own parameters; torch gives the whole state to one rank.
    declines: ClassVar[frozenset[str]] = frozenset({
        "no_shard", "full_optim_state", "optim_state_dict", "checkpoint", "async_checkpoint", "reshard_load", "reducer",
        "copyable",
    })  # fmt: skip

    def make_optimizer(self, optim_fn: OptimFn) -> Optimizer:
        # Only called with parameters, as a class would be.
        make: Any = optim_fn
        return ZeroRedundancyOptimizer(self.model.parameters(), optimizer_class=make)

    def local_tensors(self) -> dict[str, list[Tensor]]:
        held = super().local_tensors()
        if self.optimizer is not None:
            held["optim"] = list(state_tensors(cast(ZeroRedundancyOptimizer, self.optimizer).optim))
        return held
