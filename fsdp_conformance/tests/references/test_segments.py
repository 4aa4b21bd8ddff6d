"""Many tensors as one vector: the same figures as one by one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fsdp_conformance.references.segments import Segments
from fsdp_conformance.references.tolerance import Bound, calibrate, magnitude
from fsdp_conformance.tests.checks.one_tensor import calibrate_one

_SHAPES = [(), (3,), (0,), (4, 5), (1,), (2, 0)]


def _tensors(seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, dtype=torch.float64, generator=generator) for shape in _SHAPES]


def test_joined_and_split() -> None:
    """Every tensor comes back, with its shape."""
    tensors = _tensors(0)
    segments = Segments.of(tensors)
    for got, expected in zip(segments.split(segments.join(tensors)), tensors, strict=True):
        assert got.shape == expected.shape
        assert torch.equal(got, expected)


def test_no_tensors() -> None:
    """Nothing has no figures."""
    nothing = Segments.of([])
    vector = nothing.join([])
    assert vector.shape == (0,)
    assert nothing.split(vector) == []
    assert nothing.largest(vector) == []
    assert nothing.counts(vector > 0) == []


def test_figures() -> None:
    """Magnitudes and counts are those of each tensor alone; 0 for an empty one."""
    tensors = _tensors(1)
    segments = Segments.of(tensors)
    vector = segments.join(tensors)
    assert segments.largest(vector) == [magnitude(tensor) for tensor in tensors]
    assert segments.counts(vector > 0) == [int((tensor > 0).sum()) for tensor in tensors]
    spread = segments.split(segments.spread([float(index) for index in range(len(tensors))]))
    assert all(bool((part == index).all()) for index, part in enumerate(spread))


def test_nan_stays_in_its_tensor() -> None:
    """A NaN is the magnitude of its tensor, and of no other."""
    tensors = _tensors(2)
    tensors[3][1, 2] = math.nan
    segments = Segments.of(tensors)
    got = segments.largest(segments.join(tensors))
    assert [math.isnan(value) for value in got] == [index == 3 for index in range(len(tensors))]


def _same(got: Bound, expected: Bound) -> bool:
    assert got.limit is not None
    assert expected.limit is not None
    figures = ("relative", "scale", "noise", "floor", "vanishing", "indeterminate", "inconclusive", "rounding")
    return torch.equal(got.limit, expected.limit) and all(
        getattr(got, name) == getattr(expected, name) for name in figures
    )


@pytest.mark.parametrize("noise", [0.0, 1e-7, 1e-3, 1.0])
@pytest.mark.parametrize("with_bases", [False, True])
def test_a_bound_depends_on_its_own_tensor_alone(noise: float, with_bases: bool) -> None:
    """Calibrated together or one by one, bounds are equal bit for bit: quiet, loud, vanishing and still ones."""
    expected = [size * tensor for size, tensor in zip((1.0, 1.0, 1.0, 1e-9, 0.0, 1.0), _tensors(3), strict=True)]
    noisy = [_tensors(seed, noise) for seed in (4, 5)]
    noisy[0][1].zero_()
    noisy[1][3][1:].zero_()
    samples = [[value + off for value, off in zip(expected, sample, strict=True)] for sample in noisy]
    bases = [value - off for value, off in zip(expected, _tensors(6, 1e-3), strict=True)] if with_bases else None
    together = calibrate(expected, samples, bases=bases, roundings=2, model_scale=1.0, floors=[1e-6] * 6)
    for index, bound in enumerate(together):
        alone = calibrate_one(
            expected[index],
            [sample[index] for sample in samples],
            base=None if bases is None else bases[index],
            roundings=2,
            model_scale=1.0,
            floor=1e-6,
        )
        assert _same(bound, alone), index
