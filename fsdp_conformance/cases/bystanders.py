"""Watches, after each step of a case's training, what an engine must not change: see `checks.bystanders`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.checks import bystanders
from fsdp_conformance.checks.result import CheckResult
from fsdp_conformance.harness.order import Role

if TYPE_CHECKING:
    from fsdp_conformance.cases.base import ConformanceTestCase

#: Training leaves everything else alone.
REQUIREMENT = "R189"


class BystanderWatch:
    """
    Compares the surroundings and the user's parameters after each step with those from after wrapping.

    Make it before the engine is loaded, so that functions which the engine replaces are noted, and global settings
    that it changes while it wraps the model.
    """

    def __init__(self, case: ConformanceTestCase) -> None:
        self._case = case
        self._functions = bystanders.torch_functions()
        self._surroundings: dict[str, str] = {}
        self._attached: bystanders.Attached | None = None
        self.before_wrapping()

    def before_wrapping(self) -> None:
        """Record the settings before a model is wrapped. `begin` compares them."""
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
        if self._case.order.settings.ranks != "simulated" and self._case.role is not Role.REFEREE:
            # The suite has switched them on, so an engine that switches them on, too, would not be noticed. Not in
            # simulated ranks, which share the settings of one process.
            torch.use_deterministic_algorithms(False)
        self._settings = self._case.observe("settings", bystanders.settings)

    def begin(self, adapter: Adapter) -> None:
        """Compare the settings, and take the state from before training; call it when the model is wrapped."""
        where: dict[str, Any] = {"rank": self._case.rank, "step": None, "requirement": REQUIREMENT}
        current = self._case.observe("settings", bystanders.settings)
        self._case.check(bystanders.left_alone(self._settings, current, **where))
        torch.use_deterministic_algorithms(self._deterministic, warn_only=self._only_warns)
        self._case.observe("parameters of the user", lambda: self._attach(adapter))
        self._surroundings = self._case.observe("surroundings", bystanders.surroundings)

    def _attach(self, adapter: Adapter) -> None:
        """Note the user's parameters, if the engine leaves them in place."""
        if self._case.declares("orig_params"):
            self._attached = bystanders.Attached(dict(adapter.parameters()))

    def look(self, adapter: Adapter, step: int, *, draws: bool = False, is_gathered: bool = False) -> None:
        """
        Compare after a step. `draws`: the model itself draws random numbers of torch; `is_gathered`: a forward that no
        backward follows may have left units gathered, with other parameters in their place.
        """
        current = self._case.observe("surroundings", bystanders.surroundings)
        if draws:
            current.pop("torch's random numbers")
        where: dict[str, Any] = {"rank": self._case.rank, "step": step, "requirement": REQUIREMENT}
        self._case.check(bystanders.left_alone(self._surroundings, current, **where))
        if is_gathered:
            return
        result = self._case.observe("parameters of the user", lambda: self._judged(adapter, where))
        if result is not None:
            self._case.check(result)

    def _judged(self, adapter: Adapter, where: Mapping[str, Any]) -> CheckResult | None:
        return None if self._attached is None else self._attached.judged(adapter.parameters(), **where)

    def note_replaced(self) -> None:
        """Note in the report which functions of torch the engine has replaced."""
        names = self._case.observe("functions of torch", lambda: bystanders.replaced(self._functions))
        if names:
            self._case.report.notes.append(f"functions that the engine has replaced: {', '.join(names[:8])}")
