"""
The flat parameter of an FSDP1 wrapper, where the wrapper was replaced and the module has its own parameters.

Accelerate casts it to float32 if a model in low precision trains in mixed precision: it reads `dtype`, `device` and
`requires_grad`, and assigns `data`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class FlatParameterInPlace:
    """Parameters by name, seen as one."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """As in FSDP1, all are on one device and have one dtype."""
        self._fqns = tuple(name for name, _ in parameters)
        self._parameters = [parameter for _, parameter in parameters]
        self._assigned: torch.dtype | None = None

    def __len__(self) -> int:
        return len(self._parameters)

    @property
    def dtype(self) -> torch.dtype:
        """Of all of them."""
        return self._assigned or self._parameters[0].dtype

    @property
    def device(self) -> torch.device:
        """Of all of them."""
        return self._parameters[0].device

    @property
    def requires_grad(self) -> bool:
        """True if one of them does."""
        return any(parameter.requires_grad for parameter in self._parameters)

    @property
    def data(self) -> Tensor:
        """Without elements, but with the dtype and device."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    @data.setter
    def data(self, value: Tensor) -> None:
        self._assigned = value.dtype

    def cast_parameters(self) -> None:
        """Give the parameters the dtype that was assigned. FSDP1 does it when it gathers them first."""
        dtype, self._assigned = self._assigned, None
        for parameter in self._parameters if dtype is not None else ():
            parameter.data = parameter.data.to(dtype)
