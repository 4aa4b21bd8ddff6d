"""The inputs of a unit's forward, moved to where it computes and cast to its dtype."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fsdp_conformance.engine.structures import tensors_in, with_tensors

Arguments = tuple[tuple[object, ...], dict[str, object]]


def placed_inputs(arguments: Arguments, device: torch.device, dtype: torch.dtype | None) -> Arguments:
    """
    Positional and keyword inputs with every tensor on `device`, and floating-point ones in `dtype` (None: unchanged).

    Returns the very same containers if there is nothing to do.
    """

    def is_placed(tensor: Tensor) -> bool:
        return tensor.device == device and (
            dtype is None or tensor.dtype is dtype or not tensor.dtype.is_floating_point
        )

    if all(is_placed(tensor) for tensor in tensors_in(arguments)):
        return arguments
    return with_tensors(arguments, partial(_placed, device=device, dtype=dtype))  # type: ignore[no-any-return]


def _placed(tensor: Tensor, *, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    # A stream orders its work after a copy to the device. Nothing orders the host after a copy to the CPU.
    overlaps = device.type != "cpu"
    if dtype is not None and tensor.dtype.is_floating_point:
        return tensor.to(device, dtype, non_blocking=overlaps)
    return tensor.to(device, non_blocking=overlaps)
