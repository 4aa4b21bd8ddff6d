"""
Which tensors are reduced together: assignment of tensors to buckets by size.

A bucket holds tensors of one dtype and one device. Sizes are bytes of the tensors as they are; nothing is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_conformance.errors import ConfigError

MIB = 1024 * 1024
#: The first bucket is small, so that communication begins early in backward; the last limit holds for all that follow.
DEFAULT_LIMITS = (1 * MIB, 25 * MIB)
#: The limit that is reported for a bucket of one tensor with sparse gradients: it is alone, whatever its size.
NO_LIMIT = 0


class BucketAssignment(NamedTuple):
    """Buckets in the order in which they are reduced."""

    buckets: tuple[tuple[int, ...], ...]
    """Indices of the tensors in each bucket."""
    limits: tuple[int, ...]
    """The limit in bytes that each bucket was filled under; NO_LIMIT for sparse ones."""


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
        """Its indices; it is empty afterwards, and the next limit holds."""
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
    Put tensors into buckets: a tensor is added first, and the bucket is closed when its bytes reach the limit.

    So a bucket may exceed its limit by nearly one tensor, and a tensor above the limit joins the bucket that is open.
    There is one open bucket per (dtype, device); each closing advances the limit of that pair, and the last limit
    repeats. With limits of 40 and 80 bytes four tensors of 40 bytes become [0], [1, 2], [3].

    `sparse_flags[i]` is true for a tensor i whose gradient will be sparse: it is a bucket of its own. `order[k]` is the
    index that tensors[k] is known by (the order of readiness, say); empty: k. Without an order the result is sorted by
    the lowest index of each bucket; with one, buckets stand in the order in which they closed, then what was left open
    in the order in which it was opened: the same on every rank, whatever its device is called.

    Raises ConfigError for no tensors, sparse tensors, no limits, or flags and orders of the wrong length: all at once.

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
            opened[key] = opened.pop(key)  # what is left open is appended in the order of opening
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
        problems.append("tensors=[], but should be at least one tensor")
    sparse = [index for index, tensor in enumerate(tensors) if tensor.layout != torch.strided]
    if sparse:
        problems.append(f"tensors {sparse} are sparse, but should be dense: sparse_flags announces sparse gradients")
    if not limits or min(limits) < 0:
        problems.append(f"limits={list(limits)}, but should be at least one number of bytes, none of them negative")
    if sparse_flags and len(sparse_flags) != count:
        problems.append(f"sparse_flags has {len(sparse_flags)} entries, but should have {count}")
    if order and sorted(order) != list(range(count)):
        problems.append(f"order={list(order)}, but should name each index below {count} once")
    if problems:
        raise ConfigError(problems, where="bucket_assignment")
