"""
Which tensors have not changed between two points in time, without a copy of them.

A tensor is the same if its memory and its version number are, and if it has the same checksum. The checksum is for
writes through `.data` or to a DTensor, which the version number of the shard does not count. It takes a tenth of the
time of a fingerprint.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_conformance.recorder.fingerprints import SMALL, WIDTH, Part


class Unchanged:
    """Tensors by name as they are now."""

    def __init__(self, parts: Mapping[str, Sequence[Part]]) -> None:
        self._states = {
            name: [_state(part) for part in held] for name, held in parts.items() if all(map(_is_worth_it, held))
        }

    def among(self, parts: Mapping[str, Sequence[Part]]) -> set[str]:
        """The names of tensors that have not changed since. Leaves out those that are not worth a look."""
        return {name for name, held in parts.items() if held and self._is_same(name, held)}

    def _is_same(self, name: str, held: Sequence[Part]) -> bool:
        states = self._states.get(name, ())
        return len(states) == len(held) and all(map(_equals, states, held))


class _State(NamedTuple):
    """One part, with a checksum of each row."""

    where: tuple[object, ...]
    sums: Tensor


def _is_worth_it(part: Part) -> bool:
    """
    False where a checksum saves nothing, or cannot be trusted.

    On other devices, the comparison would make the host wait. Sums of 16-bit numbers are too coarse.
    """
    values = part.values
    return (
        values.device.type == "cpu"
        and values.dtype in (torch.float32, torch.float64)
        and values.numel() > SMALL
        and values.is_contiguous()
    )


def _state(part: Part) -> _State:
    return _State(_where(part), _sums(part.values))


def _equals(state: _State, part: Part) -> bool:
    # A NaN is not equal to itself: such a tensor gets another fingerprint.
    return state.where == _where(part) and torch.equal(state.sums, _sums(part.values))


def _where(part: Part) -> tuple[object, ...]:
    values = part.values
    version = 0 if values.is_inference() else values._version
    return values.data_ptr(), version, values.dtype, tuple(values.shape), part.shape, part.offsets


@torch.no_grad()
def _sums(values: Tensor) -> Tensor:
    """A checksum for each row of WIDTH elements, and one for the rest: 1D, of the dtype of `values`."""
    flat, factors = values.detach().view(-1), _factors(values.dtype)
    whole = flat.numel() // WIDTH * WIDTH
    rest = flat[whole:]
    return torch.cat([torch.mv(flat[:whole].view(-1, WIDTH), factors), torch.dot(rest, factors[: len(rest)])[None]])


@functools.cache
def _factors(dtype: torch.dtype) -> Tensor:
    """Different numbers between 1 and 2, so that the order of elements counts: 1D, WIDTH of them."""
    return torch.rand(WIDTH, generator=torch.Generator().manual_seed(0), dtype=dtype) + 1
