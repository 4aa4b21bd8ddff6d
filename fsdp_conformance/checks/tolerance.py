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

FLOOR_ULPS = 4. If references happen to agree, noise tells nothing. The error of a float32 sum of n terms in random
order grows as sqrt(n) * eps / 2; a backward pass is a chain of a few such sums. `terms` is the number of ranks and
micro-batches times the largest dim of any parameter. For 4 ranks and a dim of 45: 4 * 1.2e-7 * 13 = 6.4e-6.

`rounding` is that of the parameter itself, because every update ends with one: half an ulp of the parameter per step
is subtracted from the noise, and a whole ulp is allowed. It matters if updates are small, as under clipping.

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
from dataclasses import dataclass

import torch
from torch import Tensor

NOISE_FACTOR = 16.0
FLOOR_ULPS = 4.0
CEILING = 5e-4
VANISHING_ULPS = 64.0
#: Smallest relative difference of a gradient that a seeded fault has been measured to cause.
WEAKEST_FAULT = 1.5e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """How far a value may differ from the expected one. `limit` None: not at all."""

    limit: Tensor | None = None
    """Absolute, one value per element or 0-dim; float64."""
    relative: float = 0.0
    """In units of the scale."""
    scale: float = 0.0
    noise: float = 0.0
    floor: float = 0.0
    vanishing: bool = False
    indeterminate: int = 0
    """Number of elements judged by their own noise."""
    inconclusive: bool = False
    """True if a fault as weak as WEAKEST_FAULT could hide in the bound."""
    rounding: float = 0.0
    """In units of the scale: the rounding of the parameter itself."""

    @property
    def bitwise(self) -> bool:
        """Whether the values must be equal."""
        return self.limit is None

    def text(self) -> str:
        """The bound with its derivation, in one phrase."""
        if self.bitwise:
            return "bitwise"
        if self.vanishing:
            return f"{self.relative * self.scale:.2g} absolute: the tensor is zero but for rounding"
        source = "16 x noise of the references" if self.relative > self.floor else "4 eps sqrt(terms)"
        rounding = f" + {self.rounding:.2g} for rounding" if self.rounding else ""
        return f"{self.relative:.2g}{rounding} of the scale {self.scale:.3g} ({source}, noise {self.noise:.2g})"


BITWISE = Bound()


def floor_of(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """The smallest relative bound for values that are sums of `terms` terms."""
    return FLOOR_ULPS * torch.finfo(dtype).eps * math.sqrt(max(terms, 1))


def calibrate(
    expected: Tensor,
    samples: Sequence[Tensor],
    *,
    base: Tensor | None = None,
    roundings: int = 0,
    scale: float | None = None,
    model_scale: float = 0.0,
    floor: float,
) -> Bound:
    """
    The bound for a tensor whose float64 value is `expected` and whose float32 references are `samples`.

    Changes are measured from `base`; `roundings` is how often the value was rounded since. `scale` replaces the
    tensor's own, and `model_scale` is the largest scale of any tensor of the kind at the step.
    """
    eps = torch.finfo(torch.float32).eps
    expected = expected.double()
    base_E = torch.zeros_like(expected) if base is None else base.double()  # E: the tensor's elements
    scale = magnitude(expected - base_E) if scale is None else scale
    rounding_E = roundings * eps * torch.maximum(expected.abs(), base_E.abs())
    distances = [(sample.double() - expected).abs() for sample in samples]
    noise_E = torch.stack(distances).amax(0) if distances else torch.zeros_like(expected)
    noise_E = (noise_E - rounding_E / 2).clamp_min(0)
    loud_E = NOISE_FACTOR * noise_E + rounding_E > CEILING * scale
    if bool(loud_E.any()) and scale <= VANISHING_ULPS * eps * model_scale:
        limit = NOISE_FACTOR * max(magnitude(noise_E), eps * model_scale)
        return Bound(limit=limit + rounding_E, relative=limit, scale=1.0, noise=magnitude(noise_E), vanishing=True)
    if scale == 0.0:
        # No change is expected. Any noise would have made the tensor vanishing, unless no tensor changes.
        return Bound(limit=NOISE_FACTOR * noise_E, noise=magnitude(noise_E))
    loud_E = NOISE_FACTOR * noise_E > CEILING * scale
    indeterminate = int(loud_E.sum())
    if indeterminate * 2 > noise_E.numel():
        indeterminate, loud_E = 0, torch.zeros_like(loud_E)
    quiet = magnitude(noise_E[~loud_E]) / scale
    relative, rounding = max(NOISE_FACTOR * quiet, floor), magnitude(rounding_E) / scale
    return Bound(
        limit=torch.maximum(torch.full_like(noise_E, relative * scale), NOISE_FACTOR * noise_E) + rounding_E,
        relative=relative,
        scale=scale,
        noise=quiet,
        floor=floor,
        indeterminate=indeterminate,
        inconclusive=relative + rounding > CEILING,
        rounding=rounding,
    )


def magnitude(tensor: Tensor) -> float:
    """The largest absolute value; 0 for an empty tensor."""
    return tensor.abs().max().item() if tensor.numel() else 0.0
