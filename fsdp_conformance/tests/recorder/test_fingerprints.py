"""Fingerprints: they add up over any shards, see every bit, and estimate differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fsdp_conformance.recorder.fingerprints import WIDTH, Part, Pending, sample_hashes, whole_part
from fsdp_conformance.recordings.fingerprint import Fingerprint, Incomplete, Whole, inner_product, norm_of, whole

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
SHAPES = ((257, 513), (129, 7), (7,), (), (3, 5, 700), (40, WIDTH), (0, 3), (1, 20_000), (2, 3, 400_000))


def fingerprint(*parts: Part) -> Fingerprint:
    return Pending([parts]).fingerprints()[0]


def whole_of(tensor: Tensor) -> Whole:
    return whole([fingerprint(whole_part(tensor))])[0]


def values(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(shape, generator=generator) * 50).to(dtype)


@pytest.mark.daily(18)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_boxes_along_every_dim_add_up(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = values(shape, dtype)
    expected = whole_of(tensor)
    for dim in range(tensor.dim()):
        parts, begin = [], 0
        for chunk in tensor.chunk(3, dim):
            offsets = [0] * tensor.dim()
            offsets[dim] = begin
            begin += chunk.shape[dim]
            parts.append(fingerprint(Part(tuple(shape), chunk, tuple(offsets))))

        together, differing = whole(parts)

        assert together.equals(expected)
        assert differing == []
        assert together.square == pytest.approx(expected.square)
        assert together.distance(expected) <= 1e-9 * expected.norm


@pytest.mark.parametrize("cut", [1, 1000, WIDTH, 5 * WIDTH + 3])
def test_ranges_add_up_wherever_they_are_cut(cut: int) -> None:
    tensor = values((100, 177), torch.float32)
    flat = tensor.reshape(-1)

    parts = [fingerprint(Part((100, 177), flat[:cut], 0)), fingerprint(Part((100, 177), flat[cut:], cut))]

    assert whole(parts)[0].equals(whole_of(tensor))
    assert fingerprint(Part((100, 177), flat[:cut], 0), Part((100, 177), flat[cut:], cut)).hash == parts_hash(tensor)


def parts_hash(tensor: Tensor) -> str:
    return fingerprint(whole_part(tensor)).hash


def test_layout_in_memory_does_not_matter() -> None:
    tensor = values((300, 200), torch.float32)

    assert parts_hash(tensor.T.contiguous().T) == parts_hash(tensor)
    assert parts_hash(torch.cat([tensor, tensor])[:300]) == parts_hash(tensor)


def test_every_change_changes_the_hash() -> None:
    tensor = values((40, 60), torch.float32)
    hashes = {parts_hash(tensor)}
    for index in range(200):
        changed = tensor.clone()
        changed.view(-1)[index * 12] = torch.nextafter(changed.view(-1)[index * 12], torch.tensor(1e9))
        hashes.add(parts_hash(changed))
    swapped = tensor.clone()
    swapped[[0, 1]] = tensor[[1, 0]]
    moved = tensor.roll(1, dims=1)

    hashes |= {parts_hash(swapped), parts_hash(moved), parts_hash(-tensor), parts_hash(tensor.to(torch.float64))}

    assert len(hashes) == 205


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [4, 40_000])
def test_changes_of_the_highest_bits_do_not_cancel(size: int, dtype: torch.dtype) -> None:
    tensor = values((size,), dtype)
    negated, doubled = tensor.clone(), tensor * 2
    negated[:2] *= -1

    assert len({parts_hash(tensor), parts_hash(negated), parts_hash(-tensor), parts_hash(doubled)}) == 4
    hashes = [sample_hashes(each[None], 1) for each in (tensor, negated, -tensor, doubled)]
    assert len({int(value) for value in hashes if value is not None}) == 4


def test_the_sign_of_zero_is_seen_by_the_hash_alone() -> None:
    zero, negative = torch.zeros(10), -torch.zeros(10)

    assert not whole_of(zero).equals(whole_of(negative))
    assert whole_of(zero).distance(whole_of(negative)) == 0


def test_infinite_and_nan_are_counted_and_leave_the_rest_readable() -> None:
    tensor = torch.arange(10.0)
    tensor[2], tensor[3], tensor[4] = math.inf, -math.inf, math.nan
    other = tensor.clone()
    # Another pattern of bits for the same NaN.
    other[4] = torch.tensor(-0x400001, dtype=torch.int32).view(torch.float32)

    assert whole_of(tensor).nonfinite == 3
    assert whole_of(tensor).square == pytest.approx(1 + 25 + 36 + 49 + 64 + 81)
    assert whole_of(tensor).equals(whole_of(other))


@pytest.mark.parametrize("kind", ["dense", "one row", "one column", "outer product"])
def test_the_distance_is_estimated_whatever_its_pattern(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ratios = []
    for _ in range(60):
        difference = torch.zeros(300, 400)
        if kind == "dense":
            difference = torch.randn(300, 400, generator=generator)
        elif kind == "one row":
            difference[int(torch.randint(300, (), generator=generator))] = torch.randn(400, generator=generator)
        elif kind == "one column":
            difference[:, int(torch.randint(400, (), generator=generator))] = torch.randn(300, generator=generator)
        else:
            difference = torch.randn(300, 1, generator=generator) * torch.randn(1, 400, generator=generator)
        whole_ = whole_of(difference)
        ratios.append(norm_of(whole_.numbers) / whole_.norm)

    assert statistics.mean(ratios) == pytest.approx(1, abs=0.06)
    assert 0.5 < min(ratios) <= max(ratios) < 1.6


def test_what_waits_for_the_end_of_a_step_is_small() -> None:
    pending = Pending([[whole_part(torch.ones(400_000))]])

    held = [value.numel() for value in vars(pending).values() if isinstance(value, Tensor)]
    others = [value for value in vars(pending).values() if not isinstance(value, Tensor | list)]
    assert held
    assert max(held) < 1000
    assert others == []


def test_sketches_are_linear() -> None:
    a, b = values((100, 300), torch.float32), values((300, 100), torch.float32).T.contiguous()

    total = whole_of(a.double() + 3 * b.double())

    combined = [x + 3 * y for x, y in zip(whole_of(a).numbers, whole_of(b).numbers, strict=True)]
    assert total.numbers == pytest.approx(combined)
    assert inner_product(whole_of(a).numbers, whole_of(a).numbers) == pytest.approx(whole_of(a).square, rel=0.5)


def test_replicas_count_once_and_must_be_equal() -> None:
    tensor = values((10, 10), torch.float32)
    other = tensor.clone()
    other[0, 0] += 1

    same, differing = whole([fingerprint(whole_part(tensor)), fingerprint(whole_part(tensor))])
    assert same.equals(whole_of(tensor))
    assert differing == []
    assert whole([fingerprint(whole_part(tensor)), fingerprint(whole_part(other))])[1] == [1]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([(0, 4)], "its 9 elements must be in the ranks' parts exactly once, got 4"),
        ([(0, 6), (3, 9)], "its 9 elements must be in the ranks' parts exactly once, got 12"),
        ([], "no rank has recorded it"),
    ],
)
def test_parts_that_are_no_whole_are_refused(parts: list[tuple[int, int]], message: str) -> None:
    tensor = torch.arange(9.0)

    with pytest.raises(Incomplete, match=message):
        whole([fingerprint(Part((9,), tensor[begin:end], begin)) for begin, end in parts])


def test_parts_of_other_tensors_are_refused() -> None:
    with pytest.raises(Incomplete, match=r"one shape and dtype on all ranks, got \[3\] float32, \[3\] float64"):
        whole([fingerprint(whole_part(torch.ones(3))), fingerprint(whole_part(torch.ones(3, dtype=torch.float64)))])


def test_samples_have_hashes_of_their_own() -> None:
    samples = torch.arange(12).view(4, 3)

    hashes = sample_hashes(samples, 4)
    assert hashes is not None
    again = sample_hashes(samples[[2, 0]], 4)
    assert again is not None
    assert again.tolist() == [hashes[2].item(), hashes[0].item()]
    assert len(set(hashes.tolist())) == 4
    assert sample_hashes(samples, 3) is None
    assert sample_hashes(torch.tensor(1), 3) is None


def test_nothing_is_drawn_and_no_gradient_flows() -> None:
    tensor = torch.ones(2000, requires_grad=True)
    state = torch.get_rng_state()

    with torch.autocast("cpu", torch.bfloat16):
        recorded = fingerprint(whole_part(tensor * 2))

    assert torch.equal(torch.get_rng_state(), state)
    assert recorded.square == 8000
