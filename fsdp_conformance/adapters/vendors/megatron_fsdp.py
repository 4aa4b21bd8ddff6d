"""
Megatron-FSDP's `fully_shard_model` with ZeRO-1, 2 and 3: units by class, uneven DTensors. Requires `megatron-fsdp`.

The user's loop is the documented one: the model is synchronised with the last micro-batch of a step
(`set_model_auto_sync`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_conformance.adapters.base import CPU_ONLY, OptimFn
from fsdp_conformance.adapters.sharded import full_copy, full_gradients
from fsdp_conformance.adapters.torch_like import TorchAdapter, unit_classes
from fsdp_conformance.adapters.vendors import stub_cuda
from fsdp_conformance.plan import Plan


class MegatronFSDP(TorchAdapter):
    """Base of the three strategies; each one is a subclass."""

    package: ClassVar[str] = "megatron-fsdp"
    capabilities: ClassVar[frozenset[str]] = frozenset({"init_never", "zero_size_shard"})
    #: The package has no clipping, and ranks have gradients of different parameters.
    declines: ClassVar[frozenset[str]] = frozenset({
        "clip_grad_norm", "write_params", "wrap_again", "zero_grads", "own_clearing",
    })  # fmt: skip
    shims: ClassVar[tuple[str, ...]] = (
        stub_cuda.SHIM,
        "ddp_config.gradient_reduce_div_fusion is off: it needs ReduceOp.PREMUL_SUM, which gloo lacks",
    )
    declines_on: ClassVar[Mapping[str, frozenset[str]]] = CPU_ONLY
    cuda_names: ClassVar[bool] = True
    strategy: ClassVar[int]

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        stub_cuda.install(plan, "Megatron-FSDP")
        from megatron_fsdp import fully_shard_model

        mesh = init_device_mesh(self.device.type, (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
        wrapped: Any = fully_shard_model(
            module=model,
            device_mesh=mesh,
            dp_shard_dim="dp",
            tp_dim="tp",
            fsdp_unit_modules=unit_classes(model, plan),
            zero_dp_strategy=self.strategy,
            device=self.device,
        )
        wrapped.ddp_config.gradient_reduce_div_fusion = False
        root: nn.Module = wrapped
        return root

    def make_optimizer(self, optim_fn: OptimFn) -> Optimizer:
        from megatron_fsdp import fully_shard_optimizer

        optimizer: Optimizer = fully_shard_optimizer(super().make_optimizer(optim_fn))
        return optimizer

    @contextmanager
    def microbatch(self, last: bool, *, reduced: bool = True) -> Iterator[None]:
        model: Any = self.model
        model.set_model_auto_sync(last)
        yield

    def discard_gradients(self) -> None:
        super().discard_gradients()
        if self.optimizer is not None:
            # What was reduced is in the engine's buffers, which its optimizer sets to zero.
            self.optimizer.zero_grad()

    def full(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor) or not any(placement.is_shard() for placement in tensor.placements):
            return full_copy(tensor)
        # Not the package's own function: its all-gather is uneven, which gloo refuses. One rank may have all of it.
        parts: list[Tensor] = [torch.empty(0)] * dist.get_world_size()
        dist.all_gather_object(parts, tensor.to_local().detach().cpu())
        return torch.cat([part.flatten() for part in parts]).reshape(tensor.shape)

    def full_grads(self) -> dict[str, Tensor | None]:
        # A rank whose part is empty has no gradient.
        return full_gradients(self.parameters(), self.device, self.full, of_any_rank=True)

    def parameters(self) -> dict[str, nn.Parameter]:
        # From a forward on, the module has other ones, whose storage may be freed; a state dict puts these back.
        model: Any = self.model
        return dict(model.param_and_grad_buffer.optimizer_named_parameters)

    def local_tensors(self) -> dict[str, list[Tensor]]:
        model: Any = self.model
        held = super().local_tensors()
        # Between steps the module has the optimizer's copies. Those that it computes with are in buffers.
        buffers = [group.model_weight_buffer.data for group in model.param_and_grad_buffer.parameter_groups]
        return {**held, "params": buffers, "master": held["params"]}


class MegatronFSDPZeRO1(MegatronFSDP):
    """The optimizer state is sharded. Gradients are summed on each rank until the last micro-batch."""

    name: ClassVar[str] = "megatron-fsdp-zero1"
    capabilities: ClassVar[frozenset[str]] = frozenset({"zero1"})
    strategy: ClassVar[int] = 1

    def local_tensors(self) -> dict[str, list[Tensor]]:
        model: Any = self.model
        # What the optimizer is given are views of whole gradients.
        buffers = [group.main_grad_buffer for group in model.param_and_grad_buffer.parameter_groups]
        return {**super().local_tensors(), "grads": [buffer.data for buffer in buffers if buffer is not None]}


class MegatronFSDPZeRO2(MegatronFSDP):
    """Gradients and optimizer state are sharded."""

    name: ClassVar[str] = "megatron-fsdp-zero2"
    capabilities: ClassVar[frozenset[str]] = frozenset({"zero2"})
    grad_reduction_of_accumulation: ClassVar[str] = "reduced"
    strategy: ClassVar[int] = 2


class MegatronFSDPZeRO3(MegatronFSDP):
    """Parameters, gradients and optimizer state are sharded."""

    name: ClassVar[str] = "megatron-fsdp-zero3"
    capabilities: ClassVar[frozenset[str]] = frozenset({"zero3"})
    grad_reduction_of_accumulation: ClassVar[str] = "reduced"
    strategy: ClassVar[int] = 3
