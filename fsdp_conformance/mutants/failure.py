"""Failure and recovery: exceptions that are lost or replaced, and what an interrupted step leaves behind."""

from __future__ import annotations

import time
from typing import Any, ClassVar
from unittest import mock

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_conformance.engine.fully_sharded import fully_shard
from fsdp_conformance.engine.fully_sharded.flat_parameter import FlatParameter
from fsdp_conformance.engine.fully_sharded.schedule import UnitSchedule
from fsdp_conformance.mutants.base import SeamDDP, SeamFSDP2
from fsdp_conformance.mutants.engines import SeamReference
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import Plan


@known_wrong("R160")
class SwallowsExceptions(SeamDDP):
    """A forward that raises is tried again, and a backward that raises counts as done."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*args, **kwargs)
        except Exception:  # noqa: BLE001 - the defect
            return super().forward(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        try:
            super().backward(loss, retain_graph=retain_graph)
        except Exception:  # noqa: BLE001 - the defect
            return


@known_wrong("R160")
class ReplacesExceptions(SeamFSDP2):
    """Exceptions of the user's code reach the caller as an error of the engine's own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*args, **kwargs)
        except Exception as error:
            raise RuntimeError("the forward failed") from error

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        try:
            super().backward(loss, retain_graph=retain_graph)
        except Exception as error:
            raise RuntimeError("the backward failed") from error


@known_wrong("R160")
class ReferenceLosesTheClass(SeamReference):
    """Exceptions of the user's code keep their text, but not their class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*args, **kwargs)
        except Exception as error:
            raise RuntimeError(str(error)) from error

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        try:
            super().backward(loss, retain_graph=retain_graph)
        except Exception as error:
            raise RuntimeError(str(error)) from error


@known_wrong("R160", shows=("hang",))
class WaitsForEver(SeamFSDP2):
    """A rank that has lost a peer waits for it to come back."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*args, **kwargs)
        except RuntimeError:
            while True:
                time.sleep(1)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        try:
            super().backward(loss, retain_graph=retain_graph)
        except RuntimeError:
            while True:
                time.sleep(1)


class _Recovering(SeamFSDP2):
    """FSDP2 with what torch's recovery lacks: gradients that were not reduced yet are dropped."""

    def recover(self) -> None:
        super().recover()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    for parameter in group.fsdp_params:
                        parameter.unsharded_accumulated_grad = None
                        if hasattr(parameter, "_unsharded_param"):
                            parameter._unsharded_param.grad = None


@known_wrong("R161", "R136")
class StaysUnsharded(_Recovering):
    """After a recovery, a unit holds full parameters."""

    def recover(self) -> None:
        super().recover()
        self.unshard(self.plan.units[-1])


@known_wrong("R161", "R136")
class LosesItsReduction(_Recovering):
    """After a recovery, a unit's gradients are not reduced any more."""

    def recover(self) -> None:
        super().recover()
        self._unit(self.plan.units[-1]).set_requires_gradient_sync(False, recurse=False)


@known_wrong("R161", "R136")
class KeepsGradients(SeamFSDP2):
    """Gradients of an interrupted step stay, and the next step adds to them."""

    def discard_gradients(self) -> None:
        """Drop none."""


class _Forgetful(UnitSchedule):
    def recover(self) -> None:
        """Only the order of collectives is forgotten."""
        self._stack.clear()
        self._reductions.clear()
        self._in_backward = False
        self.order.forget()


@known_wrong("R161", "R136")
class ReferenceForgetsToRecover(SeamReference):
    """A recovery leaves units as the exception found them."""

    schedule_class: ClassVar[type[UnitSchedule]] = _Forgetful


class _Collecting(FlatParameter):
    def reset(self) -> None:
        collected = self.reduction.leaf_gradients
        super().reset()
        for leaf, grad in zip(self.shown.leaves, collected, strict=True):
            leaf.grad = grad


@known_wrong("R161")
class ReferenceKeepsCollected(SeamReference):
    """Gradients that were collected before an exception are reduced with those of the next step."""

    flat_class: ClassVar[type[FlatParameter]] = _Collecting


@known_wrong("R162", shows=("refusal",))
class IgnoresStructure(SeamFSDP2):
    """Nothing compares the models of the ranks when they are wrapped."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"structure_check"})


@known_wrong("R162", shows=("refusal",))
class ReferenceIgnoresStructure(SeamReference):
    """Nothing compares the models of the ranks when they are wrapped."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        with mock.patch.object(fully_shard, "verify_unit"):
            return super().wrap(model, plan)
