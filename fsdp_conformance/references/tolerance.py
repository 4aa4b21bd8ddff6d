"""
Bounds and their derivations. Exact workloads need none: their comparisons are bitwise.

Everything is relative to a tensor's *scale*: the largest magnitude of the expected change (of a parameter since the
start of training) or of the expected value (of gradients, losses, buffers, norms). The *noise* of a tensor is the
largest distance of any float32 reference from the float64 twin, in units of the scale, at that step. References
differ in the order of their sums as implementations do, so noise is what a correct implementation may show.

    bound = max(NOISE_FACTOR * noise, floor) * scale + rounding        floor = FLOOR_ULPS * eps * sqrt(terms)

NOISE_FACTOR = 16. The noise is a maximum over two or three samples; over 99 seeded runs of five configurations the
largest noise was 9.0e-8 for gradients and 3.1e-6 for parameters after ten steps, the weakest fault that a gradient
shows 1.5e-3 (bf16 reduction of one tensor). Sixteen times the noise keeps two decades to the weakest fault.

FLOOR_ULPS = 4. If references happen to agree, their noise says nothing. The error of a float32 sum of n terms in random
order grows as sqrt(n) * eps / 2; a backward pass is a chain of a few such sums. `terms` is the number of ranks and
micro-batches times the largest dim of any parameter. For 4 ranks and a dim of 45: 4 * 1.2e-7 * 13 = 6.4e-6. The
gradient of a parameter in float64 has the eps of float64: what float32 does before it is in the noise.

`rounding` is that of the parameter itself, because every update ends with one: half an ulp of the parameter per step
is subtracted from the noise, and a whole ulp is allowed. It matters if updates are small, as under clipping. Then most
noise of the update is lost in the subtraction, so a parameter's floor is at least the relative bound of the gradient
that the optimizer saw.

CEILING = 5e-4, a third of the weakest fault. A larger bound could hide a fault, so the comparison is INCONCLUSIVE.
For parameters the last step decides: an earlier fault is still visible in it, and the scale has grown.

Two kinds of values have noise as large as themselves, and are judged by it alone:
- a *vanishing* tensor, whose gradient is zero but for rounding: its scale is below VANISHING_ULPS * eps of the model's
  largest (a key bias of attention on its own);
- an *indeterminate* element, on which the references differ by more than the ceiling allows (the key third of a fused
  attention bias under Adam, whose update is rounding noise divided by its own magnitude).
At most half of a tensor's elements may be indeterminate; otherwise the tensor is inconclusive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fsdp_conformance.references.segments import Segments

NOISE_FACTOR = 16.0
FLOOR_ULPS = 4.0
CEILING = 5e-4
VANISHING_ULPS = 64.0
#: Smallest relative difference of a gradient that a seeded fault has been measured to cause.
WEAKEST_FAULT = 1.5e-3

_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """How far a value may differ from the expected one. If `limit` is None, they must be equal."""

    limit: Tensor | None = None
    """Absolute, one value per element or 0-dim; float64."""
    relative: float = 0.0
    """The limit in units of the scale, without rounding."""
    scale: float = 0.0
    noise: float = 0.0
    floor: float = 0.0
    vanishing: bool = False
    indeterminate: int = 0
    """Number of elements judged by their own noise."""
    inconclusive: bool = False
    """True if a fault as weak as WEAKEST_FAULT could hide in the bound."""
    rounding: float = 0.0
    """The rounding of the parameter itself, in units of the scale."""

    @property
    def bitwise(self) -> bool:
        """True if the values must be equal."""
        return self.limit is None

    def text(self) -> str:
        """The bound with its derivation, in one phrase."""
        if self.bitwise:
            return "bitwise"
        if self.vanishing:
            return f"{self.relative * self.scale:.2g} absolute: the tensor is zero but for rounding"
        source = "16 x noise of the references" if self.relative > self.floor else "that of sums, or of the gradient"
        rounding = f" + {self.rounding:.2g} for rounding" if self.rounding else ""
        return f"{self.relative:.2g}{rounding} of the scale {self.scale:.3g} ({source}, noise {self.noise:.2g})"


BITWISE = Bound()


def floor_of(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """The smallest relative bound for values that are sums of `terms` terms."""
    return FLOOR_ULPS * torch.finfo(dtype).eps * math.sqrt(max(terms, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """How far the references of one tensor are from its float64 values; absolute, largest over its elements."""

    scale: float
    largest: float
    """The noise, without half of the rounding."""
    quiet: float
    """The noise without that of indeterminate elements."""
    rounding: float
    """One ulp of the parameter for each time it was rounded."""
    loud: bool
    """True if some element's bound would be above the ceiling."""
    indeterminate: int
    """Number of elements that are judged by their own noise: 0 if they are more than half of the tensor."""


def calibrate(
    expected: Sequence[Tensor],
    samples: Sequence[Sequence[Tensor]],
    *,
    bases: Sequence[Tensor] | None = None,
    roundings: int = 0,
    scales: Sequence[float] | None = None,
    model_scale: float = 0.0,
    floors: Sequence[float],
) -> list[Bound]:
    """
    The bounds for tensors whose float64 values are `expected`. `samples` has the values of each float32 reference.

    For each element, with the figures of its tensor from `bound_of`:

        limit = max(relative * scale, NOISE_FACTOR * noise of the element) + rounding of the element

    A tensor that is expected not to change (scale 0) is allowed no rounding. Each bound depends on its own tensor
    alone; all are computed together because a few calls are faster than a dozen for each. Changes are measured from
    `bases`; `roundings` is how often a value was rounded since. `scales` replace the tensors' own, and `model_scale` is
    the largest scale of any tensor of the kind at the step. `floors` has the smallest relative bound of each.
    """
    segments = Segments.of(expected)
    expected_E = segments.join(expected)  # E: the elements of all tensors
    base_E = torch.zeros_like(expected_E) if bases is None else segments.join(bases)
    scales = segments.largest(expected_E - base_E) if scales is None else scales
    rounding_E = roundings * _EPS * torch.maximum(expected_E.abs(), base_E.abs())
    distances = [(segments.join(sample) - expected_E).abs() for sample in samples]
    noise_E = torch.stack(distances).amax(0) if distances else torch.zeros_like(expected_E)
    noise_E = (noise_E - rounding_E / 2).clamp_min(0)
    noises = _noises(segments, scales, noise_E, rounding_E)
    bounds = [
        bound_of(noise, model_scale=model_scale, floor=floor) for noise, floor in zip(noises, floors, strict=True)
    ]
    limit_E = torch.maximum(segments.spread([bound.relative * bound.scale for bound in bounds]), NOISE_FACTOR * noise_E)
    may_round_E = segments.spread([bound.scale for bound in bounds]) != 0
    limit_E = torch.where(may_round_E, limit_E + rounding_E, limit_E)
    return [replace(bound, limit=limit) for bound, limit in zip(bounds, segments.split(limit_E), strict=True)]


def _noises(segments: Segments, scales: Sequence[float], noise_E: Tensor, rounding_E: Tensor) -> list[Noise]:
    """The figures of each tensor."""
    scale_E = segments.spread(scales)
    loud_E = NOISE_FACTOR * noise_E > CEILING * scale_E
    indeterminate = [
        0 if count * 2 > shape.numel() else count
        for count, shape in zip(segments.counts(loud_E), segments.shapes, strict=True)
    ]
    quiet_E = torch.where(loud_E & (segments.spread(indeterminate) > 0), 0.0, noise_E)
    figures = zip(
        scales,
        segments.largest(noise_E),
        segments.largest(quiet_E),
        segments.largest(rounding_E),
        segments.counts(NOISE_FACTOR * noise_E + rounding_E > CEILING * scale_E),
        indeterminate,
        strict=True,
    )
    return [
        Noise(scale=scale, largest=largest, quiet=quiet, rounding=rounding, loud=bool(loud), indeterminate=count)
        for scale, largest, quiet, rounding, loud, count in figures
    ]


def bound_of(noise: Noise, *, model_scale: float, floor: float) -> Bound:
    """
    The bound of a tensor, without the limits of its elements:

        relative = max(NOISE_FACTOR * quiet / scale, floor)

    It is inconclusive if `relative + rounding / scale` is above the ceiling. A vanishing tensor has an absolute bound,
    NOISE_FACTOR * max(noise, eps * model_scale), stored as `relative` with scale 1.
    """
    if noise.loud and noise.scale <= VANISHING_ULPS * _EPS * model_scale:
        limit = NOISE_FACTOR * max(noise.largest, _EPS * model_scale)
        return Bound(relative=limit, scale=1.0, noise=noise.largest, vanishing=True)
    if noise.scale == 0.0:
        # No change is expected. Any noise would have made the tensor vanishing, unless no tensor changes.
        return Bound(noise=noise.largest)
    relative = max(NOISE_FACTOR * (noise.quiet / noise.scale), floor)
    rounding = noise.rounding / noise.scale
    return Bound(
        relative=relative,
        scale=noise.scale,
        noise=noise.quiet / noise.scale,
        floor=floor,
        indeterminate=noise.indeterminate,
        inconclusive=relative + rounding > CEILING,
        rounding=rounding,
    )


def magnitude(tensor: Tensor) -> float:
    """The largest absolute value; 0 for an empty tensor."""
    return tensor.abs().max().item() if tensor.numel() else 0.0
