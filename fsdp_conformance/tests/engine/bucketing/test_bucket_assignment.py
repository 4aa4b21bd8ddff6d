"""Buckets are filled by size, per dtype and device, in an order that is the same on every rank."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

from fsdp_conformance.engine.bucketing.bucket_assignment import DEFAULT_LIMITS, MIB, bucket_assignment
from fsdp_conformance.errors import ConfigError

FLOAT, DOUBLE, HALF = torch.float32, torch.float64, torch.float16


def sized(*numels: int, dtype: torch.dtype = FLOAT) -> list[Tensor]:
    """Empty tensors of these sizes."""
    return [torch.empty(numel, dtype=dtype) for numel in numels]


def alternating(numels: list[int]) -> list[Tensor]:
    """float32 and float64 in turn."""
    return [torch.empty(numel, dtype=(FLOAT, DOUBLE)[index % 2]) for index, numel in enumerate(numels)]


def test_a_tensor_that_reaches_the_limit_closes_its_bucket() -> None:
    """400 bytes: 100, 200 and 100 floats each reach the limit at once, 50 are left over."""
    assignment = bucket_assignment(sized(100, 200, 100, 50), [400])

    assert assignment.buckets == ((0,), (1,), (2,), (3,))
    assert assignment.limits == (400, 400, 400, 400)


def test_dtypes_do_not_share_a_bucket() -> None:
    """Two 200-byte floats make 400, two 400-byte doubles close at once; 25 and 50 elements are left over."""
    tensors = [
        torch.empty(numel, dtype=dtype)
        for numel, dtype in ((50, FLOAT), (25, DOUBLE), (50, FLOAT), (25, DOUBLE), (50, FLOAT), (25, DOUBLE))
    ]

    assert bucket_assignment(tensors, [400]).buckets == ((0, 2), (1, 3), (4,), (5,))


def test_each_closing_advances_the_limit_and_the_last_repeats() -> None:
    """Limits of 40 and 80 bytes, tensors of 40: one, then two, then a leftover."""
    assignment = bucket_assignment(sized(10, 10, 10, 10), [40, 80])

    assert assignment.buckets == ((0,), (1, 2), (3,))
    assert assignment.limits == (40, 80, 80)


def test_limits_advance_for_each_dtype_by_itself() -> None:
    """Both dtypes begin with a limit of 200 bytes and continue with 400."""
    tensors = alternating([50, 25, 50, 25, 50, 25])
    assignment = bucket_assignment(tensors, [200, 400])

    assert assignment.buckets == ((0,), (1,), (2, 4), (3, 5))
    assert assignment.limits == (200, 200, 400, 400)


def test_devices_do_not_share_a_bucket() -> None:
    """The meta device stands for another one."""
    tensors = [torch.empty(10), torch.empty(10, device="meta"), torch.empty(10)]

    assert bucket_assignment(tensors, [1000]).buckets == ((0, 2), (1,))


def test_a_large_tensor_joins_the_open_bucket() -> None:
    """It is added before the bucket is closed: 40 bytes and 4000 in one bucket of 100."""
    assignment = bucket_assignment(sized(10, 1000, 10), [100])

    assert assignment.buckets == ((0, 1), (2,))


def test_the_result_is_sorted_by_lowest_index() -> None:
    """The double closes first, but the float that is left over has the lower index."""
    tensors = [torch.empty(1), torch.empty(100, dtype=DOUBLE), torch.empty(1)]

    assert bucket_assignment(tensors, [400]).buckets == ((0, 2), (1,))


def test_an_order_is_kept() -> None:
    """Buckets are in the order in which they close, with the indices that the order gives."""
    assignment = bucket_assignment(sized(10, 10, 10, 10, 10), [40, 80], order=[4, 2, 0, 3, 1])

    assert assignment.buckets == ((4,), (2, 0), (3, 1))
    assert assignment.limits == (40, 80, 80)


def test_leftovers_of_an_order_stand_as_they_were_opened() -> None:
    """
    Unlike the reference's, the order does not depend on a hash of dtype and device, which may differ between ranks.

    The float's bucket is closed and opened again after the double's, so it comes last.
    """
    dtypes = [FLOAT, HALF, DOUBLE, FLOAT, FLOAT]
    tensors = [torch.empty(10, dtype=dtype) for dtype in dtypes]
    assignment = bucket_assignment(tensors, [80], order=[0, 1, 2, 3, 4])

    assert assignment.buckets == ((2,), (0, 3), (1,), (4,))


def test_a_sparse_flag_makes_a_bucket_of_its_own() -> None:
    """Its limit is 0. Flags are by index, even if an order is given."""
    flags = [False, True, False]

    assert bucket_assignment(sized(10, 10, 10), [1000], flags).buckets == ((0, 2), (1,))
    assert bucket_assignment(sized(10, 10, 10), [1000], flags).limits == (1000, 0)
    assert bucket_assignment(sized(10, 10, 10), [1000], flags, [2, 1, 0]).buckets == ((1,), (2, 0))


def test_the_first_bucket_is_small_by_default() -> None:
    """1 MiB, then 25 MiB, exceeded by at most one tensor."""
    numel = MIB // 4 // 2  # half a MiB
    assignment = bucket_assignment(sized(*[numel] * 60))

    assert (1 * MIB, 25 * MIB) == DEFAULT_LIMITS
    assert [len(bucket) for bucket in assignment.buckets] == [2, 50, 8]


def test_no_element_at_all() -> None:
    """Tensors without elements are assigned like others; a limit of 0 closes a bucket at once."""
    assert bucket_assignment(sized(0, 0), [0]).buckets == ((0,), (1,))
    assert bucket_assignment(sized(0, 1, 0), [4]).buckets == ((0, 1), (2,))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (([], [400]), "tensors must not be empty [bucket_assignment]"),
        ((sized(1), []), "limits must be one or more non-negative numbers of bytes, got []"),
        ((sized(1), [4, -1]), "numbers of bytes, got [4, -1]"),
        ((sized(1, 2), [4], [True]), "sparse_flags must have one entry for each of 2 tensors, got 1"),
        ((sized(1, 2), [4], [], [1, 1]), "order must name each index below 2 once, got [1, 1]"),
        (([torch.eye(3).to_sparse()], [4]), "tensors must be dense, got sparse ones at [0]"),
    ],
)
def test_what_cannot_be_assigned_is_refused(arguments: tuple[object, ...], expected: str) -> None:
    """The message shows the requirement and the value."""
    with pytest.raises(ConfigError) as caught:
        bucket_assignment(*arguments)  # type: ignore[arg-type]

    assert expected in str(caught.value)


def test_every_problem_is_named() -> None:
    """The error names every problem, not only the first."""
    with pytest.raises(ConfigError) as caught:
        bucket_assignment([], [], [True])

    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("seed", range(20))
def test_as_the_reference_does(seed: int) -> None:
    """For random tensors, limits and flags, torch's C++ gives the same buckets and limits (one dtype with an order)."""
    draw = random.Random(seed)
    numels = [draw.randrange(0, 60) for _ in range(draw.randrange(1, 30))]
    limits = [draw.randrange(0, 500) for _ in range(draw.randrange(1, 4))]
    flags = [draw.random() < 0.2 for _ in numels]
    order = draw.sample(range(len(numels)), len(numels))
    mixed = [torch.empty(numel, dtype=draw.choice([FLOAT, DOUBLE, HALF])) for numel in numels]

    for tensors, ordering in ((mixed, []), (sized(*numels), order)):
        assignment = bucket_assignment(tensors, limits, flags, ordering)
        buckets, found_limits = _compute_bucket_assignment_by_size(tensors, limits, flags, ordering)
        assert [list(bucket) for bucket in assignment.buckets] == buckets
        assert list(assignment.limits) == found_limits
