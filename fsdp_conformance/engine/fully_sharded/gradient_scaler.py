"""A gradient scaler for sharded gradients: an overflow on one rank skips the step on all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from fsdp_conformance.engine.communication import all_reduce_max, resolve_group

#: True on optimizers that unscale gradients themselves.
_SCALES = "_step_supports_amp_scaling"


class ShardedGradScaler(torch.amp.GradScaler):
    """
    torch's GradScaler, with overflow flags that are combined over a group before each step.

    `process_group`: all ranks that must step or skip together; None: the default group. The other options are
    GradScaler's.
    """

    def __init__(self, device: str = "cuda", *, process_group: ProcessGroup | None = None, **options: Any) -> None:
        super().__init__(device, **options)
        self.process_group = resolve_group(process_group)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """
        Call torch's method; for gradients on the CPU, with copies of the scale and the flag that have arrived.

        torch copies the scale and the flag to where gradients are, and does not wait. On the CPU they would be read too
        early, and a flag that is set there would be overwritten when its copy arrives (pytorch#176429).
        """
        if _steps_on_host(optimizer):
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide gradients by the scale, and agree on whether any of them is infinite or NaN. Collective."""
        if not self._enabled:
            return
        super().unscale_(optimizer)
        flags_by_device: dict[torch.device, Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        device = torch.device(self._device)
        # A rank without elements, or with gradients on the CPU, takes part as well.
        flags = [flag.to(device) for flag in flags_by_device.values()]
        overflow = torch.stack(flags).amax() if flags else torch.zeros((), device=device)
        if self.process_group.size() > 1:
            all_reduce_max(overflow, self.process_group).wait()
        if flags_by_device:
            for place, flag in flags_by_device.items():
                flag.copy_(overflow.to(place))
        else:
            flags_by_device[device] = overflow

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """
        Step unless a gradient is infinite or NaN on any rank. Collective, unless gradients are unscaled already.

        A fused optimizer gets flag and scale as tensors, and looks at them itself: at the flag of this rank alone if
        gradients are not unscaled, and on the CPU at copies that it does not wait for. So gradients are unscaled first,
        and one on the CPU is asked to step, or not.
        """
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self.unscale_(optimizer)
        alone = torch.device(self._device).type != "cpu" and _steps_on_host(optimizer)
        if not alone or not getattr(optimizer, _SCALES, False):
            return super().step(optimizer, *args, **kwargs)
        setattr(optimizer, _SCALES, False)
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            setattr(optimizer, _SCALES, True)


def _steps_on_host(optimizer: Optimizer) -> bool:
    """True if it has gradients on the CPU."""
    gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return any(gradient is not None and gradient.device.type == "cpu" for gradient in gradients)
