"""Engines for tests of `explore`: wrong only where two axes meet, lying about what they do, crashing, hanging."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_conformance.adapters.vendors.reference import Reference
from fsdp_conformance.adapters.vendors.torch_ddp import TorchDDP
from fsdp_conformance.adapters.vendors.torch_fsdp2 import TorchFSDP2
from fsdp_conformance.errors import Unsupported
from fsdp_conformance.mutants.scenarios import LosesARowOfTheSecondMicroBatch


class OddAndSecond(LosesARowOfTheSecondMicroBatch):
    """Wrong where an odd number of rows meets a second micro-batch."""

    name: ClassVar[str] = "odd-and-second"


class SaysItShards(TorchDDP):
    """Replicated training that claims to shard everything."""

    name: ClassVar[str] = "says-it-shards"
    capabilities: ClassVar[frozenset[str]] = frozenset({"zero3", "reshard_after_forward"})


class DiesWhenAccumulating(TorchFSDP2):
    """The process ends in the third step, if there are several micro-batches."""

    name: ClassVar[str] = "dies-when-accumulating"
    _steps = 0

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        self._steps += 1
        if self._steps == 3 and self.plan.micro_batches > 1:
            os._exit(7)
        return super().step(max_norm, norm_type=norm_type)


class WaitsAlone(TorchFSDP2):
    """Rank 0 issues a collective that no other rank issues, if there are several micro-batches."""

    name: ClassVar[str] = "waits-alone"

    def setup(self, model_fn: Any, optim_fn: Any, plan: Any) -> None:
        super().setup(model_fn, optim_fn, plan)
        if plan.micro_batches > 1 and dist.get_rank() == 0 and dist.get_world_size() > 1:
            dist.barrier()


class RefusesNesting(TorchFSDP2):
    """Refuses units inside of others: a combination, in clear words."""

    name: ClassVar[str] = "refuses-nesting"

    def wrap(self, model: Any, plan: Any) -> Any:
        if any(".inner." in unit for unit in plan.units):
            raise Unsupported("zero3", "units inside of units are not offered")
        return super().wrap(model, plan)


class KeepsTheRateWhenAccumulating(Reference):
    """Wrong where a new learning rate meets several micro-batches: the first rate stays."""

    name: ClassVar[str] = "keeps-the-rate-when-accumulating"

    def set_learning_rate(self, value: float) -> None:
        if self.plan.micro_batches == 1:
            super().set_learning_rate(value)


class SavingHalvesMomentum(Reference):
    """Wrong only after a checkpoint was saved: the optimizer goes on with half of its momentum."""

    name: ClassVar[str] = "saving-halves-momentum"

    def save_checkpoint(self, directory: Path) -> None:
        super().save_checkpoint(directory)
        for state in self.optimizer.state.values() if self.optimizer is not None else ():
            if state.get("momentum_buffer") is not None:
                state["momentum_buffer"].mul_(0.5)


class RollbackKeepsMomentum(Reference):
    """Wrong only where a checkpoint is loaded after a step: the optimizer keeps the state that it has by then."""

    name: ClassVar[str] = "rollback-keeps-momentum"

    def load_checkpoint(self, directory: Path) -> None:
        states = self.optimizer.state if self.optimizer is not None else {}
        copies = {parameter: copy.deepcopy(state) for parameter, state in states.items()}
        super().load_checkpoint(directory)
        if self.optimizer is not None and copies:
            self.optimizer.state.update(copies)


class RecoversLate(Reference):
    """Wrong only after an exception that follows a backward: gradients that were reduced before it remain."""

    name: ClassVar[str] = "recovers-late"

    def discard_gradients(self) -> None:
        """Drop none."""


class AnotherClass(Reference):
    """Wrong only where user code raises in a forward: the caller gets an exception of another class."""

    name: ClassVar[str] = "another-class"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*args, **kwargs)
        except Exception as error:
            raise ValueError(str(error)) from error


class GoesOnWithoutException(Reference):
    """Wrong only where user code raises in a backward: the exception does not reach the caller."""

    name: ClassVar[str] = "goes-on-without-exception"

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        try:
            super().backward(loss, retain_graph=retain_graph)
        except Exception:  # noqa: BLE001 - the defect
            return


class StaysGathered(Reference):
    """Wrong only after a recovery: the root holds full parameters until the next forward."""

    name: ClassVar[str] = "stays-gathered"

    def recover(self) -> None:
        super().recover()
        self.unshard("")


class EvaluationLeavesAUnitGathered(Reference):
    """Holds more than it should only after an evaluation: the first unit stays gathered, until it is used again."""

    name: ClassVar[str] = "evaluation-leaves-a-unit-gathered"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            self.unshard(self.plan.units[0])
        return output


class NeverRecovers(Reference):
    """Recovering raises."""

    name: ClassVar[str] = "never-recovers"

    def recover(self) -> None:
        raise RuntimeError("no way back")
