"""Adapters that average gradients in the ways of `async_engines`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fsdp_conformance.adapters.vendors.torch_ddp import TorchDDP
from fsdp_conformance.plan import Plan
from fsdp_conformance.tests.faults import async_engines


class InReverse(TorchDDP):
    """Right."""

    name = "in-reverse"
    exchange: Any = staticmethod(async_engines.in_reverse)

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        return model

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        super().backward(loss, retain_graph=retain_graph)
        trained = {parameter: parameter.grad for parameter in self.model.parameters() if parameter.grad is not None}
        means = self.exchange([grad.view(-1) for grad in trained.values()])
        for parameter, mean in zip(trained, means, strict=True):
            parameter.grad = mean.view_as(parameter)


class WaitsForTheLast(InReverse):
    """Wrong: believes that the others have completed when the last one has."""

    name = "waits-for-the-last"
    exchange = staticmethod(async_engines.waits_for_the_last)


class GoesOnAlone(InReverse):
    """Wrong: takes its own gradients when a collective fails."""

    name = "goes-on-alone"

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        try:
            super().backward(loss, retain_graph=retain_graph)
        except Exception:  # noqa: BLE001 - the defect
            return
