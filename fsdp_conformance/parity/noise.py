"""
How far apart rounding alone may take two trainings: measured, not guessed.

The reference is trained once more with every parameter changed by a rounding error of the least precise dtype that it
computes in, or in which it adds up the gradients of more than two ranks. What that changes in a tensor, relative to its
norm, is the *noise* of the tensor at that step. It grows over the steps, as rounding errors do in any two trainings, so
the thousandth step of a correct run is judged by the noise of that step, and a bfloat16 script by that of bfloat16.

    bound = max(FACTOR * noise, FLOOR * eps of float32)          relative to the norm of the reference's tensor

A single tensor's noise may be small by chance: it counts as at least the median over all tensors of that kind and step.
Without a nudged run, the floor is UNMEASURED * eps of float32, or NUDGED * eps of that dtype if it is more, which is
enough for a few steps. If the run adds up gradients in a dtype that is less precise than all of the reference's, the
reference cannot show what that does: from the first gradients on, the floor is FACTOR * eps of that dtype.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from fsdp_conformance.parity.runs import Run, Tensors, TrainingStep
from fsdp_conformance.recordings.events import Backward
from fsdp_conformance.recordings.files import Recording
from fsdp_conformance.recordings.fingerprint import Whole, inner_product, norm_of, relative

#: Factors between tensors that differ by less, relative to themselves, are equal.
SAME = 1e-2
#: What factors leave unexplained of a tensor may be this much of its norm.
EXPLAINED = 2e-3
FACTOR = 8.0
FLOOR = 8.0
#: Rounding to nearest changes a number by up to half of the eps, and by a quarter on average.
NUDGE = 0.25
#: The floor without a nudged run: this many eps of float32, or eps of the least precise dtype.
UNMEASURED = 64.0
NUDGED = 4.0
#: Where the noise alone is this large, a difference shows nothing.
CEILING = 0.05

_PAIR = 2

#: Distances from 1 to the next number.
EPS = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3,
    "float8_e5m2": 2.0**-2,
}

Select = Callable[[TrainingStep], Tensors]

#: The tensors of a step by kind, in the order in which it computes them; "reduced" is after the backward, and
#: "gradient" before clipping.
TENSORS: dict[str, Select] = {
    "reduced": attrgetter("reduced"),
    "gradient": attrgetter("unclipped"),
    "clipped": attrgetter("gradients"),
    "parameter": attrgetter("parameters"),
    "optimizer state": attrgetter("state"),
    "buffer": attrgetter("buffers"),
    "begin": attrgetter("begin"),
    "loaded state": attrgetter("loaded"),
}


@dataclass
class Noise:
    """The noise of a reference."""

    reference: Run
    nudged: Run | None
    """The reference with nudged parameters; None if there is none: then the floor decides."""
    eps: float
    sums: float = 0.0
    """The eps of the dtype in which the run adds up gradients, if it is more; 0 otherwise."""
    _cache: dict[tuple[str, int], Mapping[str, float]] = field(default_factory=dict)

    @property
    def floor(self) -> float:
        """The smallest bound."""
        if self.nudged is not None:
            return FLOOR * EPS["float32"]
        return max(UNMEASURED * EPS["float32"], NUDGED * self.eps)

    @property
    def allowance(self) -> str:
        """In words, how much rounding is allowed."""
        return f"{NUDGED:g} times its eps" if self.nudged is None else f"{FACTOR:g} times its measured noise"

    def bound(self, kind: str, select: Select, step: int, name: str) -> float | None:
        """The bound of a tensor at a step, relative to its norm. None if rounding alone is too large to judge."""
        noise = self._of_step(kind, select, step)
        typical = statistics.median(noise.values()) if noise else 0.0
        level = max(noise.get(name, typical), typical)
        # Forwards are before the sums of their step.
        is_summed = step > 0 or kind in TENSORS
        return None if level > CEILING else max(FACTOR * level, self.floor, FACTOR * self.sums * is_summed)

    def of_loss(self, step: int, rank: int, backward: Backward) -> float:
        """The noise of a loss of the reference, relative to it. Without a nudged run, a few of the eps."""
        if self.nudged is None or step >= len(self.nudged.steps):
            return NUDGED * self.eps
        others = [each for each in self.nudged.steps[step].backwards[rank] if each.number == backward.number]
        losses = [each.loss for each in others if each.loss is not None]
        if not backward.loss or len(losses) != 1:
            return 0.0
        return abs(losses[0] - backward.loss) / abs(backward.loss)

    def _of_step(self, kind: str, select: Select, step: int) -> Mapping[str, float]:
        if self.nudged is None or step >= len(self.nudged.steps):
            return {}
        key = (kind, step)
        if key not in self._cache:
            values, others = select(self.reference.steps[step]).values, select(self.nudged.steps[step]).values
            self._cache[key] = {name: relative(others[name], value) for name, value in values.items() if name in others}
        return self._cache[key]


def noise_of(reference: Run, nudged: Run | None, run: Run | None = None) -> Noise:
    """The noise of a reference, for a run if it is given."""
    eps, sums = _eps(reference), _eps_of_sums(run) if run is not None else 0.0
    return Noise(reference=reference, nudged=nudged, eps=eps, sums=sums if sums > eps else 0.0)


def nudge_of(reference: Recording) -> float:
    """By how much to change the parameters of a reference, relative to themselves."""
    return NUDGE * _eps(Run(reference))


def eps_of(dtype: str) -> float:
    """The distance from 1 to the next number of a dtype; 0 for integers."""
    return EPS.get(dtype, 0.0)


def _eps(run: Run) -> float:
    return max(map(eps_of, _dtypes(run)), default=0.0) or EPS["float32"]


def _eps_of_sums(run: Run) -> float:
    """The eps of the dtype in which sharded gradients are added up; 0 if none are."""
    collectives = [each for step in run.steps[:1] for each in step.steps[0].collectives]
    return max((eps_of(each.dtype) for each in collectives if each.op.startswith("reduce_scatter")), default=0.0)


def _dtypes(run: Run) -> set[str]:
    dtypes = set()
    for step in run.steps[:1]:
        for forwards in step.forwards:
            for forward in forwards:
                values = (*forward.outputs.values(), *forward.units.values())
                dtypes |= {forward.dtype, *(value.dtype for value in values)}
        dtypes |= {value.dtype for value in step.parameters.values.values()}
        # The sum of two numbers is the same in either order. That of more depends on the order, which engines choose.
        sums = [each for each in step.steps[0].collectives if each.reduce_op and len(each.group) > _PAIR]
        dtypes |= {each.dtype for each in sums}
    return dtypes


def factor_of(value: Whole, expected: Whole) -> float | None:
    """The factor that makes `value` of `expected`; None if it is not a multiple of it."""
    square = inner_product(expected.numbers, expected.numbers)
    if not square:
        return None
    factor = inner_product(value.numbers, expected.numbers) / square
    rest = norm_of([a - factor * b for a, b in zip(value.numbers, expected.numbers, strict=True)])
    return factor if rest <= EXPLAINED * max(value.norm, abs(factor) * expected.norm) else None


def is_loss_scale(factor: float) -> bool:
    """True for a power of two from 16 on, by which only gradient scalers multiply."""
    exponent = math.log2(factor) if factor > 0 else 0.0
    return exponent >= 4 and is_near(exponent, round(exponent))


def is_near(value: float, other: float) -> bool:
    """True if two factors between tensors are equal, but for rounding."""
    return abs(value - other) <= SAME * abs(other)
