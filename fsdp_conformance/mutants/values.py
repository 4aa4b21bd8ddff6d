"""Wrong values of parameters and buffers: at wrap time, in forward, or after the step."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from fsdp_conformance.adapters.base import ModelFn, OptimFn
from fsdp_conformance.mutants.base import SeamDDP, SeamFSDP2
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import Plan


@known_wrong("R073")
class ReadsBeforeWait(SeamFSDP2):
    """
    The first unit computes with the previous contents of its gather buffer.

    It sees the values of the previous step, as if the gather had not arrived yet, independent of timing.
    """

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        self._before: dict[str, Tensor] = {}
        first = next(module for module in self.model.modules() if any(True for _ in module.parameters(recurse=False)))
        first.register_forward_pre_hook(self._take_the_old)

    def _take_the_old(self, module: nn.Module, args: Any) -> None:
        for key, parameter in module._parameters.items():
            if parameter is not None:
                arrived = parameter.detach().clone()
                parameter.data.copy_(self._before.get(key, arrived))
                self._before[key] = arrived


@known_wrong("R007")
class ShardsDifferBetweenRanks(SeamFSDP2):
    """Ranks drift apart: each one steps its own copy."""

    def _mesh(self, plan: Plan) -> DeviceMesh:
        return self._own_mesh()

    def after_backward(self) -> None:
        for grad in self.local_grads().values():
            dist.all_reduce(grad)
            grad.div_(self.world_size).mul_(1 + self.rank * 2.0**-12)


@known_wrong("R009")
class ExtraDecay(SeamFSDP2):
    """Every step shrinks the parameters slightly."""

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        norm = super().step(max_norm, norm_type=norm_type)
        for local in self.local_tensors()["params"]:
            local.mul_(1 - 1e-4)
        return norm


@known_wrong("R011")
class RandomNoise(SeamFSDP2):
    """Every step adds noise that no seed controls."""

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        norm = super().step(max_norm, norm_type=norm_type)
        generator = torch.Generator().manual_seed(secrets.randbits(32))
        for local in self.local_tensors()["params"]:
            local.add_(torch.randn(local.shape, generator=generator).to(local.device) * 1e-4)
        return norm


@known_wrong("R002")
class RoundedParameters(SeamFSDP2):
    """Parameters are rounded to bfloat16 after each step."""

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        norm = super().step(max_norm, norm_type=norm_type)
        for local in self.local_tensors()["params"]:
            local.copy_(local.bfloat16())
        return norm


@known_wrong("R188")
class SilentDDP(SeamFSDP2):
    """DistributedDataParallel under another name: nothing is sharded."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        return DistributedDataParallel(model, find_unused_parameters=True)

    def no_sync(self) -> Any:
        ddp: Any = self.model
        return ddp.no_sync()


@known_wrong("R019", "R002")
class WritesAfterWrapLost(SeamFSDP2):
    """The first forward restores the parameters from wrap time."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        self._wrapped_with: list[Tensor] = [local.clone() for local in self.local_tensors()["params"]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for local, value in zip(self.local_tensors()["params"], self._wrapped_with, strict=False):
            local.copy_(value)
        self._wrapped_with = []
        return super().forward(*args, **kwargs)


@known_wrong("R019", "R002")
class UpdatesTheValuesFromWrap(SeamFSDP2):
    """The first optimizer step updates a copy of the parameters that was taken at wrap time."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        self._masters = [local.clone() for local in self.local_tensors()["params"]]

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        if not self.num_steps:
            for local, master in zip(self.local_tensors()["params"], self._masters, strict=True):
                local.copy_(master)
        return super().step(max_norm, norm_type=norm_type)


@known_wrong("R020", "R002")
class SyncForgetsBuffers(SeamFSDP2):
    """Sync at init broadcasts parameters but not buffers."""

    def synchronise(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), 0)


@known_wrong("R021")
class IgnoresSync(SeamFSDP2):
    """Sync at init is accepted but does nothing."""

    def synchronise(self, model: nn.Module) -> None:
        return


@known_wrong("R128")
class RewrapResets(SeamDDP):
    """Wrapping a trained unit again reinitializes it."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        for trained in _wrapped_parts(model):
            for module in trained.modules():
                reset = getattr(module, "reset_parameters", None)
                if reset is not None:
                    with torch.random.fork_rng(devices=[]):
                        torch.manual_seed(0)
                        reset()
        return super().wrap(model, plan)


@known_wrong("R002")
class RenamedParameter(SeamFSDP2):
    """A parameter comes back under a different name."""

    def full_params(self) -> dict[str, Tensor]:
        values = super().full_params()
        last = next(reversed(values), None)
        return {f"flat.{name}" if name == last else name: value for name, value in values.items()}


@known_wrong("R130")
class BufferNotUpdated(SeamFSDP2):
    """Buffers that forward writes are reset after backward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._before: Mapping[str, Tensor] = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        return super().forward(*args, **kwargs)

    def after_backward(self) -> None:
        # Not before: autograd notices if a buffer that backward needs has changed.
        for name, buffer in self.model.named_buffers():
            buffer.copy_(self._before[name])


def _wrapped_parts(model: nn.Module) -> Iterator[nn.Module]:
    yield from (module for module in model.modules() if isinstance(module, DistributedDataParallel))
