"""FairScale's FullyShardedDataParallel: flat parameters, and a bucket for reduce-scatters. Requires `fairscale`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn

from fsdp_conformance.adapters.base import CPU_ONLY, LoadedKeys
from fsdp_conformance.adapters.torch_like import TorchAdapter, wrap_units
from fsdp_conformance.adapters.vendors import stub_cuda
from fsdp_conformance.plan import SIMULATED, Plan, Sharding


class FairScaleFSDP(TorchAdapter):
    """
    Each unit wrapped, innermost first, then the root, with FairScale's defaults but one.

    Buckets have 1 KiB (`bucket_cap_mb`): gradients are views of a bucket, which at 25 MiB would hold more memory than
    any model of a test has. Smaller ones share a bucket, larger ones are reduced alone, as with any size.
    """

    name: ClassVar[str] = "fairscale-fsdp"
    package: ClassVar[str] = "fairscale"
    capabilities: ClassVar[frozenset[str]] = frozenset({
        "zero3", "zero2", "reshard_after_forward", "init_never", "shared_params", "zero_size_shard", "clip_norm_type",
        "full_params_writeback",
    })  # fmt: skip
    #: Flat parameters: the user's own ones are visible only while they are gathered, and without gradients.
    declines: ClassVar[frozenset[str]] = frozenset({"orig_params", "full_grads", "full_optim_state", "wrap_again"})
    shims: ClassVar[tuple[str, ...]] = (
        stub_cuda.SHIM,
        "FullyShardedDataParallel._setup_streams uses such streams, which it otherwise makes only where CUDA is",
        "ENABLE_NCCL_BASE_COLLECTIVES=0, FairScale's own option: gloo refuses the shapes of its base collectives",
    )
    #: On an accelerator the user moves the model.
    declines_on: ClassVar[Mapping[str, frozenset[str]]] = {**CPU_ONLY, SIMULATED: frozenset({"init_never"})}
    cuda_names: ClassVar[bool] = True
    environment: ClassVar[Mapping[str, str]] = {"ENABLE_NCCL_BASE_COLLECTIVES": "0"}

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        stub_cuda.install(plan, "FairScale")
        from fairscale.nn.data_parallel import FullyShardedDataParallel

        stub_cuda.seems_available_in(FullyShardedDataParallel, "_setup_streams")
        stays_gathered = plan.sharding is Sharding.GRAD_OPTIM or plan.reshard_after_forward is False
        options = {"compute_device": self.device, "reshard_after_forward": not stays_gathered, "bucket_cap_mb": 2**-10}
        self.wrappers = wrap_units(model, plan, lambda module: FullyShardedDataParallel(module, **options))
        root: nn.Module = self.wrappers[""]
        return root

    def gathered(self, *, writeback: bool = False) -> AbstractContextManager[Any]:
        return self.full_params_context(writeback=writeback)

    def full_params_context(
        self, unit: str = "", *, recurse: bool = True, writeback: bool = False, **undeclared: bool
    ) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.wrappers[unit].summon_full_params(
            recurse=recurse, volatile=not writeback
        )
        return context

    def no_sync(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.wrappers[""].no_sync()
        return context

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        norm: Tensor = self.wrappers[""].clip_grad_norm_(max_norm, norm_type)
        return norm

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        state = dict(self.model.state_dict())
        return {} if rank0_only and dist.get_rank() else state

    def load_full_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> LoadedKeys:
        keys = self.model.load_state_dict(state, strict=strict)
        return LoadedKeys(list(keys.missing_keys), list(keys.unexpected_keys))
