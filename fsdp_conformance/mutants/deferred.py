"""Deferred initialisation: values that are set twice, in parts, too coarsely or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_conformance.adapters import deferred
from fsdp_conformance.adapters.base import LoadedKeys
from fsdp_conformance.adapters.sharded import local_part
from fsdp_conformance.adapters.vendors.torch_fsdp1 import TorchFSDP1
from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.engines import SeamReference
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import Plan, Sharding


@known_wrong("R025")
class InitialisedTwice(SeamFSDP2):
    """Every module is initialised a second time."""

    def materialise(self, model: nn.Module, plan: Plan) -> None:
        super().materialise(model, plan)
        with torch.no_grad():
            for module in model.modules():
                if hasattr(module, "reset_parameters"):
                    deferred.initialise(module, None)


@known_wrong("R026", "R025")
class InitialisedWithTheShard(SeamFSDP2):
    """Initialisers see this rank's shard in place of the whole parameter, so each rank gets the first values."""

    def materialise(self, model: nn.Module, plan: Plan) -> None:
        with torch.no_grad():
            for module in model.modules():
                if module._parameters and hasattr(module, "reset_parameters"):
                    module.to_empty(device=self.device, recurse=False)
                    with _showing_shards(module):
                        deferred.initialise(module, None)


@known_wrong("R025", "R026")
class BuffersWithoutValues(SeamFSDP2):
    """Buffers get memory, but no values."""

    def materialise(self, model: nn.Module, plan: Plan) -> None:
        super().materialise(model, plan)
        for buffer in model.buffers():
            buffer.zero_()


@known_wrong("R025")
class InnerUnitsWithoutValues(SeamFSDP2):
    """Modules of units inside other units get memory, but no values."""

    def materialise(self, model: nn.Module, plan: Plan) -> None:
        super().materialise(model, plan)
        for fqn in plan.units:
            if any(fqn.startswith(f"{outer}.") for outer in plan.units):
                for parameter in model.get_submodule(fqn).parameters():
                    local_part(parameter).zero_()


@known_wrong("R026")
class ReplicasInitialisedApart(SeamFSDP2):
    """Under hybrid sharding, every replica but the first doubles its initial values."""

    def materialise(self, model: nn.Module, plan: Plan) -> None:
        super().materialise(model, plan)
        if plan.sharding is Sharding.HYBRID and self.rank >= self.world_size // plan.replicas:
            for parameter in model.parameters():
                local_part(parameter).mul_(2)


@known_wrong("R025")
class DrawsOfAnotherRank(TorchFSDP1):
    """Random initial values come from a state that differs between ranks."""

    def setup(self, model_fn: Any, optim_fn: Any, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, replace(plan, init_fn=_draw_on_this_rank) if plan.meta_init else plan)


@known_wrong("R025")
class ReferenceDrawsShards(SeamReference):
    """Random initial values of all rows but the first half repeat those of the first half."""

    def setup(self, model_fn: Any, optim_fn: Any, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, replace(plan, init_fn=_draw_halves) if plan.meta_init else plan)


@known_wrong("R027")
class MetaErrorWithoutTheName(SeamFSDP2):
    """A forward with a parameter on meta raises an error that does not say which one."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if any(parameter.is_meta for parameter in self.model.parameters()):
            raise RuntimeError("the model has not been materialised")
        return super().forward(*args, **kwargs)


@known_wrong("R027")
class LeavesGarbage(SeamFSDP2):
    """A parameter that nothing initialises gets memory, and trains from what was there."""

    def materialise(self, model: nn.Module, plan: Plan) -> None:
        super().materialise(model, plan)
        for module in model.modules():
            if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
                module.to_empty(device=self.device, recurse=False)


@known_wrong("R030")
class LoadZeroesOtherBuffers(SeamFSDP2):
    """A load into a model that was built on meta leaves zeros in the buffers that the state dict lacks."""

    def load_full_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> LoadedKeys:
        keys = super().load_full_state_dict(state, strict=strict)
        if self.plan.meta_init:
            for name, buffer in self.names.buffers_of(self.model).items():
                if name not in state:
                    buffer.zero_()
        return keys


@known_wrong("R030")
class InitialisedAfterTheLoad(SeamReference):
    """A model that was built on meta gets its initial values in its first forward, even if a state dict was loaded."""

    _initialised = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.plan.meta_init and not self._initialised:
            self._initialised = True
            self.apply(lambda module: deferred.initialise(module, None) if _initialisable(module) else None)
        return super().forward(*args, **kwargs)


@known_wrong("R029", name="initialised-in-bf16")
class InitialisedInBF16(SeamFSDP2):
    """Initial values are rounded to the dtype that the unit computes in."""

    def materialise(self, model: nn.Module, plan: Plan) -> None:
        super().materialise(model, plan)
        if plan.param_dtype is not None:
            for parameter in model.parameters():
                local_part(parameter).copy_(local_part(parameter).to(getattr(torch, plan.param_dtype)))


@known_wrong("R029", name="fsdp1-initialises-in-bf16")
class FSDP1InitialisesInBF16(TorchFSDP1):
    """Initialisers see tensors in the dtype that the unit computes in."""

    def setup(self, model_fn: Any, optim_fn: Any, plan: Plan) -> None:
        low = plan.meta_init and plan.param_dtype is not None
        super().setup(model_fn, optim_fn, replace(plan, init_fn=_initialise_in_bf16) if low else plan)


@known_wrong("R031")
class MaterialisationBreaksTies(SeamFSDP2):
    """Each module gets a parameter of its own, even where it shared one."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        _untie(model)
        return plan


@known_wrong("R031")
class ReferenceBreaksTies(SeamReference):
    """Each module gets a parameter of its own, even where it shared one."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        _untie(model)
        return super().wrap(model, plan)


@known_wrong("R032")
class IgnoredModulesMaterialised(SeamFSDP2):
    """Ignored modules on meta get memory and values like all others."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        wrapped = super().wrap(model, plan)
        deferred.materialise(wrapped, device=self.device)
        return wrapped


@known_wrong("R032")
class FSDP1MaterialisesIgnored(TorchFSDP1):
    """Ignored modules on meta get memory and values like all others."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        for fqn in plan.ignored:
            deferred.materialise(model.get_submodule(fqn), device=self.device)
        return super().wrap(model, plan)


@known_wrong("R028", shows=("refusal",))
class AcceptsAnyInitFunction(TorchFSDP1):
    """An init function that cannot be called is replaced by the default."""

    def setup(self, model_fn: Any, optim_fn: Any, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan if callable(plan.init_fn) else replace(plan, init_fn=None))


@known_wrong("R028")
class CallsTheInitFunctionTwice(TorchFSDP1):
    """The user's function is called a second time with each module."""

    def _param_init_fn(self, init_fn: Any) -> Any:
        once = super()._param_init_fn(init_fn)

        def twice(module: nn.Module) -> None:
            once(module)
            once(module)

        return twice if callable(init_fn) else once


@known_wrong("R028")
class InnerModulesFirst(SeamFSDP2):
    """The user's function is called with inner modules before the ones around them."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"meta_init_fn"})

    def materialise(self, model: nn.Module, plan: Plan) -> None:
        holding = [module for module in model.modules() if module._parameters or module._buffers]
        with torch.no_grad():
            for module in holding:
                module.to_empty(device=self.device, recurse=False)
            for module in reversed(holding):
                deferred.initialise(module, plan.init_fn)


@known_wrong("R028")
class IgnoresTheInitFunction(TorchFSDP1):
    """The user's function is accepted and never called: modules initialise themselves."""

    def setup(self, model_fn: Any, optim_fn: Any, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, replace(plan, init_fn=None))


@contextmanager
def _showing_shards(module: nn.Module) -> Iterator[None]:
    """Inside, the module has this rank's shards in place of its parameters."""
    shown: Mapping[str, Any] = dict(module._parameters)
    try:
        for key, parameter in shown.items():
            if isinstance(parameter, DTensor):
                module._parameters[key] = nn.Parameter(local_part(parameter))
        yield
    finally:
        module._parameters.update(shown)


def _initialisable(module: nn.Module) -> bool:
    return hasattr(module, "reset_parameters")


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """The tensors of one module."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor


def _draw_on_this_rank(module: nn.Module) -> None:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(dist.get_rank())
        for tensor in _tensors(module):
            tensor.uniform_(-1.5, 1.5).round_().mul_(0.5)


def _draw_halves(module: nn.Module) -> None:
    deferred.initialise(module, None)
    with torch.no_grad():
        for tensor in _tensors(module):
            half = -(-tensor.shape[0] // 2)
            tensor[half:] = tensor[: tensor.shape[0] - half].clone()


@torch.no_grad()
def _initialise_in_bf16(module: nn.Module) -> None:
    for tensor in _tensors(module):
        tensor.data = tensor.data.bfloat16()
    deferred.initialise(module, None)
    for tensor in _tensors(module):
        tensor.data = tensor.data.float()


def _untie(model: nn.Module) -> None:
    """Give each module a parameter of its own where it shares one."""
    seen: set[int] = set()
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in seen:
                module._parameters[key] = nn.Parameter(parameter.detach().clone())
            seen.add(id(parameter))
