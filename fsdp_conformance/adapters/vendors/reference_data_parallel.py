"""
The reference engine's data-parallel mode under test: replicated parameters, averaged gradients.

It trains correctly but does not shard, like torch's DistributedDataParallel, so it has a separate profile. It is also a
second reference besides DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from torch import Tensor, nn

import fsdp_conformance
from fsdp_conformance.adapters.components import Assignment, GradientReducer, ReducerOptions
from fsdp_conformance.adapters.torch_like import TorchAdapter, submodules
from fsdp_conformance.engine.bucketing.bucket_assignment import MIB, bucket_assignment
from fsdp_conformance.engine.data_parallel.data_parallel import DataParallel
from fsdp_conformance.plan import InitMode, Plan


class ReferenceDataParallel(TorchAdapter):
    """The engine's `DataParallel`, which searches for unused parameters and does not broadcast buffers."""

    name: ClassVar[str] = "reference-data-parallel"
    capabilities: ClassVar[frozenset[str]] = frozenset(
        {
            "no_shard",
            "init_after",
            "any_accelerator",
            "device_id",
            "cast_after_init",
            "sync_module_states",
            "structure_check",
            "copyable",
            "move_inputs",
            "ignored_modules",
            "subgroups",
            "shared_params",
            "shared_across_units",
            "shared_module",
            "frozen_mixed",
            "frozen_dynamic",
            "unused_divergent",
            "unused_untouched",
            "scalar_params",
            "noncontiguous_params",
            "ws1_fast",
        }
    )

    @classmethod
    def version(cls) -> str:
        return fsdp_conformance.__version__

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        # With InitMode.AFTER the caller moves the model after the wrap.
        moves = plan.device_id is not None or (self.device.type != "cpu" and plan.init_mode is not InitMode.AFTER)
        return DataParallel(
            model,
            device_id=self.device if moves else None,
            find_unused_parameters=True,
            broadcast_buffers=False,
            ignored_names=_names_under(model, [*plan.ignored, *plan.local_units]),
            **plan.extra,
        )

    def no_sync(self) -> AbstractContextManager[Any]:
        assert isinstance(self.model, DataParallel), "wrap() returns one"
        return self.model.no_sync()

    def recover(self) -> None:
        assert isinstance(self.model, DataParallel), "wrap() returns one"
        self.model.reset()
        self.discard_gradients()

    def reducer(self, module: nn.Module, options: ReducerOptions) -> GradientReducer:
        return DataParallel(module, **reducer_options(options))

    def bucket_assignment(
        self,
        tensors: Sequence[Tensor],
        limits: Sequence[int],
        sparse_flags: Sequence[bool] = (),
        order: Sequence[int] = (),
    ) -> Assignment:
        assignment = bucket_assignment(tensors, limits, sparse_flags, order)
        return Assignment([list(bucket) for bucket in assignment.buckets], list(assignment.limits))


def reducer_options(options: ReducerOptions) -> dict[str, Any]:
    """The arguments of `DataParallel`."""
    return {
        "bucket_cap_mb": None if options.bucket_cap_bytes is None else options.bucket_cap_bytes / MIB,
        "find_unused_parameters": options.find_unused,
        "gradient_as_bucket_view": options.gradient_as_bucket_view,
    }


def _names_under(model: nn.Module, fqns: list[str]) -> list[str]:
    """The parameters and buffers of some submodules."""
    names = []
    for fqn, module in zip(fqns, submodules(model, fqns), strict=True):
        names += [f"{fqn}.{name}" for name, _ in module.named_parameters(remove_duplicate=False)]
        names += [f"{fqn}.{name}" for name, _ in module.named_buffers(remove_duplicate=False)]
    return names
