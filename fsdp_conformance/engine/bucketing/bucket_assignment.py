"""
Assigns tensors to buckets by size: which ones are reduced together.

A bucket holds tensors of one dtype and one device. Sizes are the tensors' bytes, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_conformance.errors import ConfigError

MIB = 1024 * 1024
#: The first bucket is small, so communication begins early in backward. The last limit applies to all later buckets.
DEFAULT_LIMITS = (1 * MIB, 25 * MIB)
#: The reported limit of a tensor with sparse gradients, which has a bucket to itself whatever its size.
NO_LIMIT = 0


class BucketAssignment(NamedTuple):
    """Buckets in the order in which they are reduced."""

    buckets: tuple[tuple[int, ...], ...]
    """Indices of the tensors in each bucket."""
    limits: tuple[int, ...]
    """The limit in bytes under which each bucket was filled; NO_LIMIT for sparse ones."""


class _OpenBucket:
    """The bucket of one (dtype, device) that is being filled."""

    def __init__(self) -> None:
        self.indices: list[int] = []
        self.nbytes = 0
        self.stage = 0  # index into the limits

    def add(self, index: int, nbytes: int) -> None:
        self.indices.append(index)
        self.nbytes += nbytes

    def close(self, num_limits: int) -> tuple[int, ...]:
        """Empty the bucket, move on to its next limit, and return its indices."""
        indices = tuple(self.indices)
        self.indices, self.nbytes = [], 0
        self.stage = min(self.stage + 1, num_limits - 1)
        return indices


def bucket_assignment(
    tensors: Sequence[Tensor],
    limits: Sequence[int] = DEFAULT_LIMITS,
    sparse_flags: Sequence[bool] = (),
    order: Sequence[int] = (),
) -> BucketAssignment:
    """
    Put tensors into buckets. A tensor is added first; then the bucket is closed if its bytes have reached the limit.

    So a bucket may exceed its limit by nearly one tensor, and a tensor above the limit joins the bucket that is open.
    There is one open bucket per (dtype, device). Closing it advances the limit of that pair, and the last limit
    repeats. With limits of 40 and 80 bytes four tensors of 40 bytes become [0], [1, 2], [3].

    `sparse_flags[i]` is true if the gradient of tensor i will be sparse; it then has a bucket to itself. `order[k]` is
    the index of tensors[k], for example in the order of readiness; empty means k. Without an order, buckets are sorted
    by their lowest index. With one, they are in the order in which they were closed, followed by those left open in the
    order in which they were opened, so the result is the same on every rank, whatever its device is called.

    Raises ConfigError, with every problem, for missing or sparse tensors, missing limits, and flags or orders of the
    wrong length.

    Source: torch's `compute_bucket_assignment_by_size` (torch/csrc/distributed/c10d/reducer.cpp).
    """
    _check(tensors, limits, sparse_flags, order)
    result: list[tuple[tuple[int, ...], int]] = []
    opened: dict[tuple[torch.dtype, torch.device], _OpenBucket] = {}
    for position, tensor in enumerate(tensors):
        index = order[position] if order else position
        if sparse_flags and sparse_flags[index]:
            result.append(((index,), NO_LIMIT))
            continue
        key = (tensor.dtype, tensor.device)
        bucket = opened.setdefault(key, _OpenBucket())
        if order and not bucket.indices:
            opened[key] = opened.pop(key)  # buckets left open are appended in the order of opening
        bucket.add(index, tensor.numel() * tensor.element_size())
        limit = limits[bucket.stage]
        if bucket.nbytes >= limit:
            result.append((bucket.close(len(limits)), limit))
    for bucket in opened.values():
        if bucket.indices:
            limit = limits[bucket.stage]
            result.append((bucket.close(len(limits)), limit))
    if not order:
        result.sort(key=lambda entry: min(entry[0]))
    return BucketAssignment(tuple(indices for indices, _ in result), tuple(limit for _, limit in result))


def _check(
    tensors: Sequence[Tensor], limits: Sequence[int], sparse_flags: Sequence[bool], order: Sequence[int]
) -> None:
    count = len(tensors)
    problems = []
    if not count:
        problems.append("tensors must not be empty")
    sparse = [index for index, tensor in enumerate(tensors) if tensor.layout != torch.strided]
    if sparse:
        problems.append(f"tensors must be dense, got sparse ones at {sparse}; sparse_flags is for sparse gradients")
    if not limits or min(limits) < 0:
        problems.append(f"limits must be one or more non-negative numbers of bytes, got {list(limits)}")
    if sparse_flags and len(sparse_flags) != count:
        problems.append(f"sparse_flags must have one entry for each of {count} tensors, got {len(sparse_flags)}")
    if order and sorted(order) != list(range(count)):
        problems.append(f"order must name each index below {count} once, got {list(order)}")
    if problems:
        raise ConfigError(problems, where="bucket_assignment")
