"""Several optimizers of a user, passed to an engine as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer


class Several(Optimizer):
    """
    The optimizers that a user steps one after the other.

    It has their groups and their state, and does nothing of its own.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        super().__init__([{"params": list(group["params"])} for each in optimizers for group in each.param_groups], {})
        self.optimizers = list(optimizers)
        # The users' own groups, so that a new learning rate reaches them.
        self.param_groups = [group for each in optimizers for group in each.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each of them."""
        for each in self.optimizers:
            each.step()
            self.state.update(each.state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of each of them."""
        for each in self.optimizers:
            each.zero_grad(set_to_none=set_to_none)
