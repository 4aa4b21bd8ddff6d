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
        self._take_groups()
        self._take_state()

    def _take_groups(self) -> None:
        """Have the users' own groups, so that a new learning rate reaches them."""
        self.param_groups = [group for each in self.optimizers for group in each.param_groups]

    def _take_state(self) -> None:
        """Have the state that the optimizers have now."""
        self.state.clear()
        for each in self.optimizers:
            self.state.update(each.state)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each of them. The groups stay as they are: an engine may have removed some, as DeepSpeed does."""
        for each in self.optimizers:
            each.step()
        self._take_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load its part into each of them. Raises ValueError, before anything is loaded, for other groups."""
        sizes = [len(group["params"]) for group in self.param_groups]
        saved = [len(group["params"]) for group in state_dict["param_groups"]]
        if saved != sizes:
            raise ValueError(f"the groups of a state dict must have {sizes} parameters, got {saved}")
        groups = iter(state_dict["param_groups"])
        present = {id(group) for group in self.param_groups}
        for each in self.optimizers:
            each.param_groups = [group for group in each.param_groups if id(group) in present]
            own = [next(groups) for _ in each.param_groups]
            keys = {key for group in own for key in group["params"]}
            state = {key: value for key, value in state_dict["state"].items() if key in keys}
            each.load_state_dict({"state": state, "param_groups": own})
        self._take_groups()
        self._take_state()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of each of them."""
        for each in self.optimizers:
            each.zero_grad(set_to_none=set_to_none)
