"""
Wrong with hooks: a user's hooks that fire too often or never, the engine's that pile up, and communication hooks.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_conformance.adapters.base import CommunicationHook, ModelFn, OptimFn
from fsdp_conformance.adapters.vendors.torch_ddp import TorchDDP
from fsdp_conformance.engine.fully_sharded.gradient_reduction import ReductionHook
from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.engines import SeamFSDP1, SeamReference
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import Plan


@known_wrong("R158")
class CallsHooksTwice(SeamFSDP2):
    """Forward pre-hooks on layers inside units are called by the engine, and then by the layer itself."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        for module in self.model.modules():
            if isinstance(module, nn.Linear):
                self._call_hooks(module)

    def _call_hooks(self, module: nn.Module) -> None:
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            for hook in list(module._forward_pre_hooks.values()):
                hook(module, args)
            return own(*args, **kwargs)

        module.forward = forward


@known_wrong("R158")
class DropsEarlierHooks(SeamFSDP2):
    """Wrapping removes the backward hooks that were registered before it."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        for module in model.modules():
            module._backward_hooks.clear()
        return plan


@known_wrong("R158")
class HooksPileUp(SeamFSDP2):
    """Each forward registers its hook again, and none is removed: a user's hooks are called through it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for module in self.model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(_call_user_hooks)
        return super().forward(*args, **kwargs)


def _call_user_hooks(module: nn.Module, args: Any) -> None:
    for hook in list(module._forward_pre_hooks.values()):
        if hook is not _call_user_hooks:
            hook(module, args)


class _Bypassed:
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)  # type: ignore[attr-defined]


@known_wrong("R158", name="ddp-bypasses-hooks")
class DDPBypassesHooks(TorchDDP):
    """Layers are run by calling their forward, so that no hook on them fires."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.__class__ = type("Linear", (_Bypassed, nn.Linear), {})
        return super().wrap(model, plan)


@known_wrong("R159", name="fsdp1-hook-misses-a-unit")
class FSDP1HookMissesAUnit(SeamFSDP1):
    """A communication hook does not reach the innermost unit, which averages by itself."""

    def register_comm_hook(self, hook: CommunicationHook) -> None:
        super().register_comm_hook(hook)
        innermost = FullyShardedDataParallel.fsdp_modules(self.model)[-1]
        innermost._comm_hook = None


@known_wrong("R159", name="fsdp1-divides-what-the-hook-averaged")
class FSDP1DividesWhatTheHookAveraged(SeamFSDP1):
    """A gradient that a communication hook has averaged is divided by the number of ranks again."""

    def register_comm_hook(self, hook: CommunicationHook) -> None:
        def divided(gradient: Tensor, shard: Tensor) -> None:
            hook(gradient, shard)
            shard /= dist.get_world_size()

        super().register_comm_hook(divided)


@known_wrong("R159")
class ReferenceHooksInPieces(SeamReference):
    """A communication hook is called for each half of a unit's gradients."""

    def register_comm_hook(self, hook: CommunicationHook) -> None:
        def halves(gradient: Tensor, shard: Tensor) -> None:
            middle = shard.numel() // 2
            rows = gradient.view(-1, shard.numel())
            hook(rows[:, :middle].flatten(), shard[:middle])
            hook(rows[:, middle:].flatten(), shard[middle:])

        super().register_comm_hook(halves)


@known_wrong("R159")
class ReferenceIgnoresTheHook(SeamReference):
    """A communication hook is accepted, and never called."""

    def register_comm_hook(self, hook: CommunicationHook) -> None:
        """Forget the hook."""


@known_wrong("R159", shows=("refusal",))
class ReferenceHooksHybrid(SeamReference):
    """Under hybrid sharding a communication hook is accepted, although it reaches only one of the reductions."""

    def register_comm_hook(self, hook: CommunicationHook) -> None:
        for unit in self._root.units:
            unit.communication_hook = ReductionHook(None, lambda _, gradient, shard: hook(gradient, shard))
