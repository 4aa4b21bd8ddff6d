"""
A tensor as a hash and a sketch, both of which add up over its shards.

Every rank computes them of the elements that it holds, at their places in the whole tensor, so a sharded and an
unsharded training can be compared although nothing was gathered:

- Equal sums of hashes mean equal bits, however the tensors were sharded.
- The sketch is linear. The difference of two sketches is the sketch of the difference of the tensors, so it gives the
  size of the difference, and the factor between two tensors.

How they are computed is in `recorder.fingerprints`.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: A sketch has this many independent estimates of a tensor's norm ...
ESTIMATES = 8
#: ... and each adds up the tensor in this many groups of elements.
GROUPS = 8
#: Numbers in a sketch.
SKETCH = ESTIMATES * GROUPS

#: Hashes are sums modulo this.
MODULUS = 1 << 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """The elements of a tensor that one rank holds."""

    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    dtype: str
    region: str
    """Which part of the whole tensor this is. Ranks with the same region hold replicas of each other."""
    elements: int
    """How many elements it has."""
    hash: str
    """64 bits, in hexadecimal."""
    square: float
    """The sum of the squares of the elements, in float64. JSON has no infinity: see `nonfinite`."""
    nonfinite: int
    """How many elements are infinite or NaN. They count as zero in `square` and `sketch`."""
    sketch: str
    """SKETCH numbers in float64, little-endian, in base64."""

    def numbers(self) -> tuple[float, ...]:
        """
        The sketch.

        Raises ValueError if it has another length, or a number that is not finite.
        """
        data = base64.b64decode(self.sketch, validate=True)
        if len(data) != 8 * SKETCH:
            raise ValueError(f"a sketch must have {SKETCH} numbers of 8 bytes, got {len(data)} bytes")
        numbers = struct.unpack(f"<{SKETCH}d", data)
        if not all(map(math.isfinite, numbers)):
            raise ValueError("a sketch must have finite numbers")
        return numbers


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole tensor, added up from the ranks' parts; or a linear combination of tensors, which has no hash."""

    shape: tuple[int, ...]
    dtype: str
    hash: int | None
    square: float
    nonfinite: int
    numbers: tuple[float, ...]

    @property
    def norm(self) -> float:
        """The 2-norm."""
        return math.sqrt(self.square)

    def equals(self, other: Whole) -> bool:
        """True if all bits are equal."""
        return self.hash is not None and self.hash == other.hash and self.shape == other.shape

    def distance(self, other: Whole) -> float:
        """An estimate of the norm of the difference; its relative error is about 1 / sqrt(SKETCH)."""
        return norm_of([a - b for a, b in zip(self.numbers, other.numbers, strict=True)])


def encoded(numbers: Sequence[float]) -> str:
    """A sketch as text: the inverse of `Fingerprint.numbers`."""
    return base64.b64encode(struct.pack(f"<{SKETCH}d", *numbers)).decode()


def norm_of(numbers: Iterable[float]) -> float:
    """The norm of the tensor with this sketch."""
    return math.sqrt(sum(number * number for number in numbers) / ESTIMATES)


def inner_product(a: Sequence[float], b: Sequence[float]) -> float:
    """The inner product of two tensors with these sketches."""
    return sum(x * y for x, y in zip(a, b, strict=True)) / ESTIMATES


class Incomplete(ValueError):
    """The parts of a tensor do not make up the whole."""


def relative(value: Whole, expected: Whole) -> float:
    """The distance of two tensors, relative to the norm of the expected one. Infinite if only one has that shape."""
    if value.shape != expected.shape or value.nonfinite != expected.nonfinite:
        return float("inf")
    if value.equals(expected):
        return 0.0
    distance = value.distance(expected)
    if not distance:
        return 0.0
    return distance / expected.norm if expected.norm else float("inf")


def whole(parts: Sequence[Fingerprint]) -> tuple[Whole, list[int]]:
    """
    A tensor from the ranks' parts of it, and the indices of parts that differ from an earlier replica of them.

    Raises Incomplete if the parts belong to different tensors, or do not make up one; ValueError for a part that no
    recording writes.
    """
    if not parts:
        raise Incomplete("no rank has recorded it")
    first = parts[0]
    if len({(part.shape, part.dtype) for part in parts}) > 1:
        kinds = sorted({f"{list(part.shape)} {part.dtype}" for part in parts})
        raise Incomplete(f"it must have one shape and dtype on all ranks, got {', '.join(kinds)}")
    regions: dict[str, Fingerprint] = {}
    differing = []
    for index, part in enumerate(parts):
        if regions.setdefault(part.region, part).hash != part.hash:
            differing.append(index)
    numel, held = math.prod(first.shape), sum(part.elements for part in regions.values())
    if held != numel:
        raise Incomplete(f"its {numel} elements must be in the ranks' parts exactly once, got {held}")
    sketches = [part.numbers() for part in regions.values()]
    return (
        Whole(
            shape=first.shape,
            dtype=first.dtype,
            hash=sum(int(part.hash, 16) for part in regions.values()) % MODULUS,
            square=math.fsum(part.square for part in regions.values()),
            nonfinite=sum(part.nonfinite for part in regions.values()),
            numbers=tuple(map(math.fsum, zip(*sketches, strict=True))),
        ),
        differing,
    )
