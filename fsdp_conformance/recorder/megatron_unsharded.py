"""
Takes Megatron-FSDP out of a script: modules are replicated, and the optimizer has their own parameters.

The parameters have the optimizer's dtype, and modules compute with copies that are rounded to their own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_conformance.recorder.megatron import replace_in_package
from fsdp_conformance.recorder.replica import owned_modules
from fsdp_conformance.recorder.rounding import Rounding
from fsdp_conformance.recorder.unsharded import CannotTakeOut, Replacement


def take_out(replacement: Replacement) -> None:
    """Replace the functions of Megatron-FSDP, which has been imported, for the rest of the process."""

    def fully_shard_model(original: Any) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def replicate(*args: Any, **kwargs: Any) -> ReplicatedInPlaceOfMegatron:
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            return _replicated(replacement, call.arguments)

        return replicate

    def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        setattr(owner, name, make(getattr(owner, name)))

    replace_in_package(
        replace,
        fully_shard_model=fully_shard_model,
        fully_shard_optimizer=_optimizer_function,
        MegatronFSDP=lambda original: ReplicatedInPlaceOfMegatron,
    )


def _replicated(replacement: Replacement, options: dict[str, Any]) -> ReplicatedInPlaceOfMegatron:
    module, mesh = options["module"], options["device_mesh"]
    # Without a mesh, it makes one whose dim for tensor parallelism has the size 1.
    if mesh is not None and options["tp_dim"] is not None and mesh[options["tp_dim"]].size() > 1:
        raise CannotTakeOut("tensor parallelism of Megatron-FSDP")
    if options.get("expt_device_mesh") is not None:
        raise CannotTakeOut("expert parallelism of Megatron-FSDP")
    if options.get("init_model_with_meta_device"):
        raise CannotTakeOut("init_model_with_meta_device of Megatron-FSDP")
    policy = options["mixed_precision_policy"]
    dtypes = {each.dtype for each in module.parameters() if each.is_floating_point()}
    if policy.main_params_dtype is not None and dtypes != {policy.main_params_dtype}:
        if len(dtypes) != 1:
            raise CannotTakeOut("Megatron-FSDP around parameters of several dtypes")
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.data = parameter.to(policy.main_params_dtype)
        Rounding(param_dtype=next(iter(dtypes)), casts_inputs=False).install(
            module, owned_modules([module], lambda child: False)
        )
    grad_dtype = policy.main_grads_dtype or next(iter(dtypes))
    replica = replacement.replicate(
        [module],
        group=None,
        device=options["device"] or torch.device("cuda", torch.cuda.current_device()),
        reduce_dtype=policy.grad_comm_dtype or grad_dtype,
        grad_dtype=grad_dtype,
        starts_with_rank0=True,
        is_flat=True,
    )
    if options.get("calculate_per_token_loss"):
        replica.factor = 1.0
    return ReplicatedInPlaceOfMegatron(module, replacement=replacement)


def _optimizer_function(original: Any) -> Any:
    """In place of `fully_shard_optimizer`, which makes an optimizer's state by a step with gradients of zero."""

    @functools.wraps(original)
    def fully_shard_optimizer(optimizer: Optimizer, *args: object, **kwargs: object) -> Optimizer:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    return fully_shard_optimizer


class ReplicatedInPlaceOfMegatron(nn.Module):
    """Has the interface of Megatron-FSDP's wrapper. Each backward averages the gradients."""

    def __init__(self, module: nn.Module, *args: object, replacement: Replacement | None = None, **options: object):
        super().__init__()
        if replacement is None:
            raise CannotTakeOut("MegatronFSDP, unless `fully_shard` or `fully_shard_model` makes it,")
        self.module = module
        self.model_auto_sync = self.is_last_microbatch = True
        self._clear = replacement.replicas.clear

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients are averaged all the same: only when they are communicated would be another."""
        yield

    sync = no_sync

    def zero_grad_buffer(self) -> None:
        """Clear all gradients."""
        for parameter in self.parameters():
            parameter.grad = None
        self._clear(self.parameters())

    @torch.no_grad()
    def scale_gradients(self, scaling_factor: float) -> None:
        """Scale all gradients."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scaling_factor)


def _nothing(self: object, *args: object, **kwargs: object) -> None:
    """Only changes when something is communicated, or in which tensor it is."""


for _name in (
    "set_model_auto_sync", "start_param_sync", "start_grad_sync", "synchronize_param_gather", "finish_grad_sync",
    "synchronize_gradient_reduce", "attach_grad_to_optimizer_state", "install_optimized_model_weights",
    "broadcast_params", "_replace_param_with_distributed_if_needed", "_replace_param_with_raw_if_needed",
):  # fmt: skip
    setattr(ReplicatedInPlaceOfMegatron, _name, _nothing)
