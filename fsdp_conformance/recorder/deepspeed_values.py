"""
Whole tensors of a model that DeepSpeed trains, read with DeepSpeed's own functions.

They communicate, so all ranks call them in the same order, and each gets the whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def is_hidden(parameter: Tensor) -> bool:
    """True for a parameter whose values only DeepSpeed can read."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


@torch.no_grad()
def whole_value(parameter: Tensor) -> Tensor | None:
    """A parameter as its optimizer has it. None if DeepSpeed does not have it."""
    if not is_hidden(parameter):
        return parameter.detach()
    from deepspeed.utils import safe_get_full_fp32_param

    return _shaped(safe_get_full_fp32_param(parameter), parameter)


@torch.no_grad()
def whole_gradient(parameter: Tensor) -> Tensor | None:
    """A copy of the gradient that has been reduced, before it is clipped. None if there is none."""
    from deepspeed.utils import safe_get_full_grad

    gradient = _shaped(safe_get_full_grad(parameter), parameter)
    return None if gradient is None else gradient.clone()


@torch.no_grad()
def whole_states(parameter: Tensor, optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """The states of the parameter's shape in torch's optimizer, which DeepSpeed's own one calls, by key."""
    if not is_hidden(parameter):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.numel() > 1:
                yield key, value.detach()
        return
    from deepspeed.utils import safe_get_full_optimizer_state

    keys = {
        key
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.numel() > 1
    }
    for key in sorted(keys):
        value = _shaped(safe_get_full_optimizer_state(parameter, key), parameter)
        if value is not None:
            yield key, value


def _shaped(value: Tensor | None, parameter: Tensor) -> Tensor | None:
    """ZeRO-3 leaves parameters without elements outside of their module's forward, and notes their shape."""
    if value is None:
        return None
    return value.detach().view(torch.Size(getattr(parameter, "ds_shape", parameter.shape)))
