"""Defects of implementations that decline to show what is wrong: gradients, buffers, the state of their units."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.gradients import SumInsteadOfMean
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.mutants.values import BufferNotUpdated


@known_wrong("R003")
class HidesSummedGradients(SumInsteadOfMean):
    """Gradients are summed instead of averaged, and cannot be read."""

    declines: ClassVar[frozenset[str]] = frozenset({"full_grads"})


@known_wrong("R130")
class HidesLostBuffers(BufferNotUpdated):
    """Buffers that forward writes are reset after backward, and the adapter does not read them."""

    declines: ClassVar[frozenset[str]] = frozenset({"full_buffers"})


@known_wrong("R111")
class LeavesFrozenGathered(SeamFSDP2):
    """Frozen units hold full parameters after backward."""

    def after_backward(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule) and self._is_frozen(module):
                module.unshard()

    def _is_frozen(self, module: nn.Module) -> bool:
        parameters = list(module.parameters())
        return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


@known_wrong("R111")
class HidesFrozenGathered(LeavesFrozenGathered):
    """Frozen units hold full parameters after backward, and the adapter does not tell."""

    declines: ClassVar[frozenset[str]] = frozenset({"sharded_state"})


@known_wrong("R035", "R111", "R115", "R117", "R118")
class ReshardsWhenRead(SeamFSDP2):
    """After backward, units hold full parameters until the gradients are read or the optimizer steps."""

    def after_backward(self) -> None:
        self._each_unit("unshard")

    def full_grads(self) -> dict[str, Tensor | None]:
        self._each_unit("reshard")
        return super().full_grads()

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        self._each_unit("reshard")
        return super().step(max_norm, norm_type=norm_type)

    def _each_unit(self, what: str) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                getattr(module, what)()
