"""
Races: streams without a wait, memory freed in flight, copies read too early. And a wait too many.

Their results are correct whenever the timing happens to work out, and always on a device that runs one operation at a
time. Only the ordering shows the defect: one wait is missing or is on the wrong stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import Plan

#: Elements of a scratch buffer, a size that nothing else in these models has.
_SCRATCH = 8209


class SideStream(SeamFSDP2):
    """FSDP2 with an idle side stream; correct by itself."""

    _side: Any = None

    @contextmanager
    def beside(self, *, after_current: bool) -> Iterator[None]:
        """Run what is issued inside on the side stream, ordered after the current stream or unordered."""
        device = torch.get_device_module(self.device.type)
        if self._side is None:
            self._side = device.Stream()
        if after_current:
            self._side.wait_stream(device.current_stream())
        with device.stream(self._side):
            yield


@known_wrong("R074", shows=("hazard",), environment=("accelerator",))
class StepsOnASideStream(SideStream):
    """The optimizer runs on a stream that the next forward does not wait for."""

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        with self.beside(after_current=True):
            return super().step(max_norm, norm_type=norm_type)


@known_wrong("R074", shows=("hazard",), environment=("accelerator",))
class PrefetchesBeforeTheStep(SideStream):
    """The first all-gather of a forward runs on a stream that did not wait for the optimizer."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        handle = None
        if self.num_steps and torch.is_grad_enabled():
            with self.beside(after_current=False):
                handle = self._first_unit().unshard(async_op=True)
        if handle is not None:
            handle.wait()
        return super().forward(*args, **kwargs)

    def _first_unit(self) -> FSDPModule:
        """The first unit that owns parameters."""
        units = [self.names.modules[fqn] for fqn in (*self.plan.units, "")]
        return next(unit for unit in units if isinstance(unit, FSDPModule) and any(True for _ in unit.parameters()))


@known_wrong("R075", shows=("hazard",), environment=("accelerator",))
class ScalesWithoutWaiting(SideStream):
    """Gradients are read and written on a stream that did not wait for their reduction."""

    def after_backward(self) -> None:
        with self.beside(after_current=False):
            for grad in self.local_grads().values():
                if grad.numel() and grad.device.type == self.device.type:
                    grad.mul_(1.0)


@known_wrong("R075", shows=("hazard",), environment=("accelerator",))
class FreesInFlight(SideStream):
    """A buffer is freed, and its memory reused, while another stream still uses it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for _ in range(2):
            scratch = torch.zeros(_SCRATCH, device=self.device)
            with self.beside(after_current=True):
                scratch.add_(1.0)
            # No record_stream, and no wait before the memory is returned.
            del scratch
        return super().forward(*args, **kwargs)


@known_wrong(
    "R138",
    environment=(
        "accelerator",
        "pinned_memory",
    ),
)
class ReadsOffloadedGradientsEarly(SideStream):
    """The host reads gradients before their copy to host memory has finished."""

    def after_backward(self) -> None:
        for grad in self.local_grads().values():
            if grad.device.type == "cpu" and self.device.type != "cpu" and grad.is_pinned():
                grad.copy_(grad.to(self.device), non_blocking=True)


@known_wrong("R138", shows=("hazard",), environment=("accelerator", "pinned_memory"))
class OverwritesParametersInFlight(SideStream):
    """The host overwrites offloaded parameters while their copy to the device is still running."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for parameter in self.sharded().values():
            local = parameter.detach().to_local()  # type: ignore[attr-defined]
            if local.device.type == "cpu" and self.device.type != "cpu" and local.is_pinned():
                local.to(self.device, non_blocking=True)
                local.mul_(1.0)
        return super().forward(*args, **kwargs)


@known_wrong("R080", environment=("stream_order",))
class WaitsForTheDevice(SeamFSDP2):
    """The host waits for the device before each unit's forward, so that nothing is issued ahead."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        wrapped = super().wrap(model, plan)

        def wait(*_: Any) -> None:
            torch.get_device_module(self.device.type).synchronize()

        for module in wrapped.modules():
            if isinstance(module, FSDPModule):
                # Before the engine's own, which issues the gather.
                module.register_forward_pre_hook(wait, prepend=True)
        return wrapped
