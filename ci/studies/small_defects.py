"""
The small engine with one defect each. `truth` is the cause that a report should name: see `studies.causes`.

`cases` are the cases to run it on; the world sizes differ, because two ranks show less than three or four.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_conformance.adapters.base import ModelFn, OptimFn
from fsdp_conformance.plan import Plan
from studies.small_engine import SmallEngine, Unit

PROBE_2, PROBE_3 = "R001/exact-probe-ws2", "R001/exact-probe-ws3"
NESTED_2, NESTED_3, NESTED_4 = (f"R001/sgd-nested-ws{size}" for size in (2, 3, 4))
NORM_2 = "R001/sgd-norm-mlp-ws2"
CODED_2, CODED_3, CODED_4 = (f"R003/every-rank-contributes-once-ws{size}" for size in (2, 3, 4))
ADAM_2 = "R004/adam-norm-mlp-ws2"
THREE_MICRO, TWO_MICRO = "R092/synchronised-micro-batches3-ws2", "R092/synchronised-micro-batches2-ws2"
TWO_DEFERRED, THREE_DEFERRED = "R093/deferred-micro-batches2-ws2", "R093/deferred-micro-batches3-ws2"
CLIP_2 = "R123/padding-in-the-norm-ws2"


class Defect(SmallEngine):
    """The base class: correct."""

    truth: ClassVar[str] = ""
    cases: ClassVar[tuple[str, ...]] = (PROBE_2, NESTED_3)


# --- reduction --------------------------------------------------------------------------------------------------------


class Summed(Defect):
    truth = "summed"

    def reduce(self, unit: Unit, flat: Tensor) -> Tensor:
        return super().reduce(unit, flat) * self.world_size


class DividedTwice(Defect):
    truth = "averaged twice"
    cases = (CODED_2, NORM_2)

    def reduce(self, unit: Unit, flat: Tensor) -> Tensor:
        return super().reduce(unit, flat) / self.world_size


class OwnGradient(Defect):
    truth = "not reduced"
    cases = (PROBE_2, NORM_2)

    def reduce(self, unit: Unit, flat: Tensor) -> Tensor:
        return self.own(unit, flat)


class OwnGradientDivided(Defect):
    truth = "not reduced"
    cases = (NESTED_2, CODED_4)

    def reduce(self, unit: Unit, flat: Tensor) -> Tensor:
        return self.own(unit, flat) / self.world_size


class OneUnitNotReduced(Defect):
    truth = "not reduced"
    cases = (NESTED_2, NESTED_4)

    def reduce(self, unit: Unit, flat: Tensor) -> Tensor:
        return self.own(unit, flat) if unit is self.units[0] else super().reduce(unit, flat)


class NotReducedLater(Defect):
    truth = "not reduced"
    cases = (NORM_2, PROBE_3)

    def reduce(self, unit: Unit, flat: Tensor) -> Tensor:
        return self.own(unit, flat) if self.num_steps else super().reduce(unit, flat)


class LastRankMissing(Defect):
    truth = "missing rank"
    cases = (NESTED_2, PROBE_3)

    def local(self, unit: Unit, flat: Tensor) -> Tensor:
        return flat if self.rank < self.world_size - 1 else torch.zeros_like(flat)


class FirstRankTwice(Defect):
    truth = "rank counted twice"
    cases = (NESTED_2, CODED_3)

    def local(self, unit: Unit, flat: Tensor) -> Tensor:
        return flat * 2 if self.rank == 0 else flat


class OwnRankMissing(Defect):
    truth = "own rank missing"
    cases = (NORM_2, NESTED_3)

    def reduce(self, unit: Unit, flat: Tensor) -> Tensor:
        return super().reduce(unit, flat) - self.own(unit, flat) / self.world_size


class HalfTheWorld(Defect):
    truth = "smaller group"
    cases = (NESTED_4, CODED_4)

    def reduce(self, unit: Unit, flat: Tensor) -> Tensor:
        own = flat if self.rank < 2 else torch.zeros_like(flat)
        return super().reduce(unit, own) * self.world_size / 2


class OneTooMany(Defect):
    truth = "wrong divisor"
    cases = (NESTED_3, NORM_2)

    def reduce(self, unit: Unit, flat: Tensor) -> Tensor:
        return super().reduce(unit, flat) * self.world_size / (self.world_size + 1)


class WrongSign(Defect):
    truth = "wrong sign"
    cases = (NESTED_2,)

    def reduce(self, unit: Unit, flat: Tensor) -> Tensor:
        return -super().reduce(unit, flat)


class ReducedInBfloat16(Defect):
    truth = "low precision"
    cases = (NORM_2, NESTED_3)

    def reduce(self, unit: Unit, flat: Tensor) -> Tensor:
        return super().reduce(unit, flat.bfloat16().float())


class ReturnedInBfloat16(Defect):
    truth = "low precision"
    cases = (NESTED_2, NORM_2)

    def reduce(self, unit: Unit, flat: Tensor) -> Tensor:
        return super().reduce(unit, flat).bfloat16().float()


class LastUnitDropped(Defect):
    truth = "dropped"
    cases = (NESTED_2, PROBE_3)

    def reduce(self, unit: Unit, flat: Tensor) -> Tensor:
        return super().reduce(unit, flat) * (unit is not self.units[-1])


class LastShardLost(Defect):
    truth = "rows lost"
    cases = (NESTED_2, NORM_2)

    def reduce(self, unit: Unit, flat: Tensor) -> Tensor:
        return super().reduce(unit, flat) * (self.rank < self.world_size - 1)


class NextShard(Defect):
    truth = "wrong place"
    cases = (NESTED_2, NORM_2)

    def local(self, unit: Unit, flat: Tensor) -> Tensor:
        return flat.view(self.world_size, -1).roll(1, 0).flatten()


class OffByOne(Defect):
    truth = "wrong offset"
    cases = (NESTED_2, NORM_2)

    def local(self, unit: Unit, flat: Tensor) -> Tensor:
        return flat.roll(1)


class OffByThree(Defect):
    truth = "wrong offset"
    cases = (NORM_2, NESTED_3)

    def local(self, unit: Unit, flat: Tensor) -> Tensor:
        return torch.cat([flat[3:], flat.new_zeros(3)])


class OffsetInTheShard(Defect):
    truth = "wrong offset"
    cases = (NESTED_2, NESTED_4)

    def reduce(self, unit: Unit, flat: Tensor) -> Tensor:
        return super().reduce(unit, flat).roll(2)


class SameShapesSwapped(Defect):
    truth = "mixed up"
    cases = ("R001/sgd-transformer-ws2",)

    def local(self, unit: Unit, flat: Tensor) -> Tensor:
        parts = unit.split(flat)
        for first in unit.names:
            for second in unit.names:
                if first < second and parts[first].shape == parts[second].shape:
                    saved = parts[first].clone()
                    parts[first].copy_(parts[second])
                    parts[second].copy_(saved)
                    return flat
        return flat


class StepBefore(Defect):
    truth = "stale gradient"
    cases = (NESTED_2, NORM_2)

    def began(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def reduce(self, unit: Unit, flat: Tensor) -> Tensor:
        shard = super().reduce(unit, flat)
        before = self._kept.get(unit.fqn, shard)
        self._kept[unit.fqn] = shard
        return before.clone()


class NotCleared(Defect):
    truth = "not cleared"
    cases = (NESTED_2, NORM_2)

    def clear(self) -> None:
        pass


class GarbageInTheBuffer(Defect):
    truth = "uninitialised"
    cases = (PROBE_2, NESTED_3)

    def reduce(self, unit: Unit, flat: Tensor) -> Tensor:
        shard = super().reduce(unit, flat)
        shard[: max(1, shard.numel() // 3)] = float("nan")
        return shard


class GarbagePadding(Defect):
    truth = "uninitialised"
    cases = (NESTED_3,)

    def reduce(self, unit: Unit, flat: Tensor) -> Tensor:
        shard = super().reduce(unit, flat)
        if self.rank == self.world_size - 1:
            shard[-2:] = float("nan")
        return shard


# --- micro-batches ----------------------------------------------------------------------------------------------------


class Overwritten(Defect):
    truth = "lost accumulation"
    cases = (THREE_MICRO, TWO_MICRO)

    def accumulate(self, unit: Unit, before: Tensor | None, shard: Tensor) -> Tensor:
        return shard


class DividedByMicroBatches(Defect):
    truth = "divided by micro-batches"
    cases = (THREE_MICRO, THREE_DEFERRED)

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        self.num_micro_batches = plan.micro_batches

    def reduce(self, unit: Unit, flat: Tensor) -> Tensor:
        return super().reduce(unit, flat) / self.num_micro_batches


class LastMicroBatchLocal(Defect):
    truth = "micro-batch not reduced"
    cases = (THREE_MICRO, TWO_MICRO)

    def reduce(self, unit: Unit, flat: Tensor) -> Tensor:
        return self.own(unit, flat) if self.is_last else super().reduce(unit, flat)


class FirstMicroBatchLost(Defect):
    truth = "micro-batch missing"
    cases = (THREE_MICRO, TWO_MICRO)

    def local(self, unit: Unit, flat: Tensor) -> Tensor:
        return flat if self.num_micro else torch.zeros_like(flat)


class FirstMicroBatchTwice(Defect):
    truth = "micro-batch counted twice"
    cases = (THREE_MICRO, TWO_MICRO)

    def local(self, unit: Unit, flat: Tensor) -> Tensor:
        return flat if self.num_micro else 2 * flat


class DeferredLost(Defect):
    truth = "micro-batch missing"
    cases = (TWO_DEFERRED, THREE_DEFERRED)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        super().backward(loss, retain_graph=retain_graph)
        if not self.num_micro:
            for unit in self.units:
                for parameter in unit.params:
                    parameter.grad = None


# --- forward ----------------------------------------------------------------------------------------------------------


class StaleParameters(Defect):
    truth = "stale parameters"
    cases: ClassVar[tuple[str, ...]] = (NESTED_2, NORM_2, PROBE_3)

    def began(self) -> None:
        self._seen: dict[str, Tensor] = {}

    def is_stale(self, unit: Unit) -> bool:
        """True if the unit computes with the values of the last step."""
        return True

    def gathered(self, unit: Unit) -> Tensor:
        now = super().gathered(unit)
        before = self._seen.get(unit.fqn, now)
        self._seen[unit.fqn] = now
        return before if self.is_stale(unit) else now


class StaleUnit(StaleParameters):
    cases = (NESTED_2, NESTED_4)

    def is_stale(self, unit: Unit) -> bool:
        return unit is self.units[0]


class StaleInputs(Defect):
    truth = "stale inputs"
    cases = (NESTED_2, NORM_2)

    def began(self) -> None:
        self._before: Any = None

    def inputs(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        before, self._before = self._before, tuple(arg.clone() for arg in args)
        return before or args


class InputsOfRankZero(Defect):
    truth = "another rank's data"
    cases = (NESTED_2, NORM_2)

    def inputs(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        for arg in args:
            if isinstance(arg, Tensor):
                dist.broadcast(arg, 0)
        return args


class GatheredInBfloat16(Defect):
    truth = "low precision"
    cases = (NESTED_2, NORM_2)

    def gathered(self, unit: Unit) -> Tensor:
        return super().gathered(unit).bfloat16().float()


class GatheredInReverse(Defect):
    truth = "parameters in the wrong place"
    cases = (NESTED_2, NORM_2)

    def gathered(self, unit: Unit) -> Tensor:
        return super().gathered(unit).view(self.world_size, -1).flip(0).flatten()


class OneRankStepsAlone(Defect):
    truth = "no update"
    cases = (NESTED_2, NORM_2)

    def update(self) -> None:
        if self.rank == 0:
            super().update()


# --- optimizer --------------------------------------------------------------------------------------------------------


class StateLost(Defect):
    truth = "optimizer state lost"
    cases = (NESTED_2, ADAM_2)

    def update(self) -> None:
        self.optimizer.state.clear()
        super().update()


class StepsTwice(Defect):
    truth = "stepped twice"
    cases = (NESTED_2, ADAM_2)

    def update(self) -> None:
        super().update()
        super().update()


class UnitNotUpdated(Defect):
    truth = "no update"
    cases = (NESTED_2, ADAM_2)

    def update(self) -> None:
        for view in self.units[-1].views.values():
            view.grad = None
        super().update()


class DoubleRate(Defect):
    truth = "update scaled"
    cases = (NESTED_2, ADAM_2)

    def update(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 2
        super().update()
        for group in self.optimizer.param_groups:
            group["lr"] /= 2


class ExtraDecay(Defect):
    truth = "decay"
    cases = (NESTED_2, ADAM_2)

    def update(self) -> None:
        super().update()
        for unit in self.units:
            unit.shard.mul_(1 - 1e-3)


class RoundedParameters(Defect):
    truth = "low precision"
    cases = (NESTED_2, ADAM_2)

    def update(self) -> None:
        super().update()
        for unit in self.units:
            unit.shard.copy_(unit.shard.bfloat16())


class StepsStaleGradient(Defect):
    truth = "stale gradient"
    cases = (NORM_2, ADAM_2)

    def began(self) -> None:
        self._kept: list[Tensor | None] = []

    def update(self) -> None:
        views = list(self.views())
        grads = [None if view.grad is None else view.grad.clone() for view in views]
        for view, before in zip(views, self._kept, strict=False):
            view.grad = before
        self._kept = grads
        super().update()


class NotClipped(Defect):
    truth = "not clipped"
    cases = (CLIP_2,)

    def scale(self, factor: Tensor) -> None:
        pass


class NormOfOneRank(Defect):
    truth = "norm of one rank"
    cases = (CLIP_2,)

    def norm(self) -> Tensor:
        grads = [view.grad.square().sum() for view in self.views() if view.grad is not None]
        return torch.stack(grads).sum().sqrt()


class SquaredNorm(Defect):
    truth = "squared norm"
    cases = (CLIP_2,)

    def norm(self) -> Tensor:
        return super().norm().square()


class NormAddedOverRanks(Defect):
    truth = "norm added over ranks"
    cases = (CLIP_2,)

    def norm(self) -> Tensor:
        return super().norm() * math.sqrt(self.world_size)


# --- unused parameters ------------------------------------------------------------------------------------------------


class ZerosForUnused(Defect):
    truth = "zeros for unused"
    cases = ("R120/unused-keeps-its-gradient-ws2",)
    capabilities: ClassVar[frozenset[str]] = frozenset({"unused_untouched"})

    def agreed(self, used: Tensor) -> Tensor:
        return torch.ones_like(used)


class NoneWhereUnused(Defect):
    truth = "left out where unused"
    cases = ("R119/branches-of-one-unit-ws2",)

    def agreed(self, used: Tensor) -> Tensor:
        super().agreed(used.clone())
        return used


# --- ends -------------------------------------------------------------------------------------------------------------


class RaisesOnOneRank(Defect):
    truth = "raised on one rank"
    cases = (NESTED_2, NORM_2)

    def update(self) -> None:
        if self.num_steps == 1 and self.rank == 1:
            raise ValueError("shard must have 12 elements, got 13")
        super().update()


class RaisesEverywhere(Defect):
    truth = "raised on every rank"
    cases = (NESTED_2, NORM_2)

    def update(self) -> None:
        if self.num_steps == 1:
            raise ValueError("shard must have 12 elements, got 13")
        super().update()


class SkipsACollective(Defect):
    truth = "different collectives"
    cases = (NESTED_2, NORM_2)

    def reduce(self, unit: Unit, flat: Tensor) -> Tensor:
        if self.rank == 1 and unit is self.units[-1] and self.num_steps == 1:
            return self.own(unit, flat)
        return super().reduce(unit, flat)


class NoOneComes(Defect):
    truth = "different collectives"
    cases = (NESTED_2, NORM_2)

    def norm(self) -> Tensor:
        return super().norm()

    def update(self) -> None:
        super().update()
        if self.rank == 0 and self.num_steps == 1:
            dist.all_reduce(torch.zeros(7))
