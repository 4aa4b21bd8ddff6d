"""
torch's DistributedDataParallel as a subject.

It trains correctly but does not shard: a suite that certified it would be comparing numbers only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_conformance.adapters.components import Assignment, GradientReducer, ReducerOptions
from fsdp_conformance.adapters.vendors.torch_checkpoints import TorchCheckpoints
from fsdp_conformance.plan import Plan


class TorchDDP(TorchCheckpoints):
    """DistributedDataParallel, configured to find unused parameters and not to broadcast buffers in forward."""

    name: ClassVar[str] = "torch-ddp"
    capabilities: ClassVar[frozenset[str]] = frozenset({
        "no_shard", "any_accelerator", "move_inputs", "device_id", "sync_module_states", "structure_check", "copyable",
        "shared_params", "shared_across_units", "shared_module", "frozen_mixed", "frozen_dynamic", "unused_divergent",
        "unused_untouched", "scalar_params", "noncontiguous_params", "clip_norm_type",
        "unit_dtypes", "mixed_dtypes", "writeback_in_place", "writeback_direct", "explicit_gradient", "autograd_grad",
        "move_again", "param_attributes",
        "clip_grad_value", "clip_some",
    })  # fmt: skip
    #: Every rank has all of it.
    declines: ClassVar[frozenset[str]] = frozenset({"sharded_state_dict"})

    @classmethod
    def version(cls) -> str:
        return torch.__version__

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            # DistributedDataParallel rejects a module without trainable parameters: "is not needed".
            return model
        # Renamed in torch 2.13. Either way, buffers are broadcast at init but not in each forward.
        parameters = inspect.signature(DistributedDataParallel).parameters
        option = "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"
        options: dict[str, Any] = {option: False}
        return DistributedDataParallel(
            model,
            device_ids=None if self.device.type == "cpu" else [self.device],
            find_unused_parameters=True,
            **options,
        )

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else nullcontext()

    def make_scaler(self, **options: Any) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self.device.type, **options)

    def apply(self, fn: Callable[[nn.Module], None]) -> None:
        self.model.apply(fn)

    def reducer(self, module: nn.Module, options: ReducerOptions) -> GradientReducer:
        wrapped: Any = DistributedDataParallel(
            module,
            bucket_cap_mb=None if options.bucket_cap_bytes is None else options.bucket_cap_bytes / 2**20,
            find_unused_parameters=options.find_unused,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
        )
        reducer: GradientReducer = wrapped
        return reducer

    def bucket_assignment(
        self,
        tensors: Sequence[Tensor],
        limits: Sequence[int],
        sparse_flags: Sequence[bool] = (),
        order: Sequence[int] = (),
    ) -> Assignment:
        distributed: Any = torch.distributed  # The type stubs lack the function.
        buckets, filled_under = distributed._compute_bucket_assignment_by_size(
            list(tensors), list(limits), list(sparse_flags), list(order)
        )
        return Assignment(buckets, filled_under)
