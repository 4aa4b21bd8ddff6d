"""
Fingerprints of tensors: `recordings.fingerprint` has what they mean.

The element at place i of the whole tensor, counted in row-major order, stands in row i // WIDTH and column i % WIDTH of
a matrix. With random numbers A for rows and B for columns, fixed for ever:

    hash   = sum over i of A[row] * B[column] * bits(element)                   modulo 2^64, A and B odd
    sketch = for each of 8 estimates m, the sum over a group of columns of S[m, row] * T[m, column] * element

with signs S and T. An element of 8 bytes counts as two of 4 bytes for the hash: the highest bit of a 64-bit word would
cancel in a sum modulo 2^64. Two tensors that differ have equal hashes with a chance of about 2^-40 at most unless they
were made for that. They are computed on the tensor's device, in its stream, and nothing waits for them until a step's
are written.

The signs of rows are S[m, row] = H[m, row % 8] * s[row], with a Hadamard matrix H and random signs s. So the elements
are added up in 8 classes of rows, with one multiplication for each element instead of 8, and H is applied to the 8 sums
of each column.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_conformance.recordings.fingerprint import ESTIMATES, GROUPS, MODULUS, SKETCH, Fingerprint, encoded

#: Columns. A power of two, so that common sizes of layers begin at the start of a row.
WIDTH = 1024
#: Elements in one row of each class.
_ROW_OF_EACH = ESTIMATES * WIDTH
#: Elements that are worked on at once: few enough for the cache of one core, as bits and as numbers of 8 bytes each.
_CHUNK = 32 * _ROW_OF_EACH
#: A range of at most this many elements is small.
SMALL = 16 * WIDTH
#: How many small ranges are worked on together.
_AT_ONCE = 256
#: Rows for which random numbers are made at once.
_BLOCK = 4096

_GOLDEN = 0x9E3779B97F4A7C15
#: Seeds of the four kinds of random numbers.
_ROWS, _COLUMNS, _ROW_SIGNS, _COLUMN_SIGNS, _GROUPS = range(1, 6)

#: Integer dtypes whose values are the bits, by the size of an element. One of 8 bytes becomes two.
_BITS = {8: torch.int32, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class Part:
    """Elements that this rank holds of a tensor: a box of it, or a range of its elements in row-major order."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    values: Tensor
    offsets: tuple[int, ...] | int
    """Where the box begins along each dim, or the place of the range's first element."""

    @property
    def region(self) -> str:
        """Equal for equal parts."""
        if isinstance(self.offsets, int):
            return f"{self.offsets}+{self.values.numel()}"
        return ",".join(f"{begin}+{size}" for begin, size in zip(self.offsets, self.values.shape, strict=True))


def whole_part(tensor: Tensor) -> Part:
    """A tensor that this rank holds as a whole."""
    return Part(tuple(tensor.shape), tensor, 0)


class Pending:
    """
    Fingerprints of tensors whose numbers are still on the device. Nothing of the tensors is kept.

    The work is done on the current stream, and no gradient flows through it.
    """

    def __init__(self, tensors: Sequence[Sequence[Part]]) -> None:
        """`tensors`: the parts of each, at least one. All of them are on one device."""
        self._labels = [
            (
                parts[0].shape,
                str(parts[0].values.dtype).removeprefix("torch."),
                ";".join(part.region for part in parts),
                sum(part.values.numel() for part in parts),
            )
            for parts in tensors
        ]
        if not tensors:
            return
        device = tensors[0][0].values.device
        self._hashes = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        self._sketches = torch.zeros(len(tensors), SKETCH, dtype=torch.float64, device=device)
        # The square, and how many are not finite.
        self._figures = torch.zeros(len(tensors), 2, dtype=torch.float64, device=device)
        # Not kept: many of these may wait for the end of a step.
        scratch = _Scratch(device)
        # A large range is worked on in pieces that fit a processor's cache; small ones together, by their dtype.
        small: dict[torch.dtype, list[_Rows]] = {}
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            for index, parts in enumerate(tensors):
                for place, values in (item for part in parts for item in _ranges(part)):
                    if values.numel() > SMALL:
                        self._add_large(index, place, values, scratch)
                    elif values.numel():
                        small.setdefault(values.dtype, []).append(_Rows(index, place, values))
            for ranges in small.values():
                for begin in range(0, len(ranges), _AT_ONCE):
                    self._add_small(ranges[begin : begin + _AT_ONCE], scratch)

    def fingerprints(self) -> list[Fingerprint]:
        """The fingerprints, in the order of the tensors. Waits for the device."""
        if not self._labels:
            return []
        hashes = self._hashes.tolist()
        numbers = torch.cat([self._sketches, self._figures], dim=1).tolist()
        return [
            _fingerprint(label, hash_, row) for label, hash_, row in zip(self._labels, hashes, numbers, strict=True)
        ]

    def _add_large(self, index: int, place: int, values: Tensor, scratch: _Scratch) -> None:
        """Add elements of a tensor: 1D, the first one at `place`."""
        device = values.device
        classes = torch.zeros(ESTIMATES, 1, WIDTH, dtype=torch.float64, device=device)
        begin = 0
        while begin < values.numel():
            end = min(begin + _CHUNK - (place + begin) % _ROW_OF_EACH, values.numel())
            first, chunk = _in_rows(place + begin, values[begin:end], _ROW_OF_EACH)
            bits, numbers, square, nonfinite = scratch.bits_and_numbers(chunk)
            multipliers, signs = _row_numbers(first, chunk.shape[0], device)
            self._hashes[index] += _hash(bits, multipliers, _multipliers(device, bits.shape[1]))
            classes.baddbmm_(signs, numbers.view(-1, ESTIMATES, WIDTH).transpose(0, 1))
            figures = self._figures[index]
            figures[0] += square
            if nonfinite is not None:
                figures[1] += nonfinite.sum()
            begin = end
        signs, groups = _columns(device)
        rows_sketch = _hadamard(device) @ classes.view(ESTIMATES, WIDTH)
        self._sketches[index].view(ESTIMATES, GROUPS).scatter_add_(1, groups, rows_sketch * signs)

    def _add_small(self, ranges: Sequence[_Rows], scratch: _Scratch) -> None:
        """Add elements of several tensors of one dtype."""
        device = ranges[0].values.device
        first_rows, blocks = zip(*(_in_rows(item.place, item.values) for item in ranges), strict=True)
        counts = [block.shape[0] for block in blocks]
        rows = torch.cat([torch.arange(first, first + count) for first, count in zip(first_rows, counts, strict=True)])
        owners = torch.repeat_interleave(torch.tensor([item.owner for item in ranges]), torch.tensor(counts)).to(device)
        bits, numbers, _, nonfinite = scratch.bits_and_numbers(torch.cat(blocks))
        hashes = (bits * _multipliers(device, bits.shape[1])).sum(1) * _multipliers_of(rows, _ROWS).to(device)
        self._hashes.index_add_(0, owners, hashes)
        signs = (_hadamard(rows.device)[:, rows % ESTIMATES] * _signs_of_rows(rows)).to(device)
        self._sketches.index_add_(0, owners, (numbers @ _column_matrix(device)) * signs.repeat_interleave(GROUPS, 0).T)
        self._figures[:, 0].index_add_(0, owners, numbers.square().sum(1))
        if nonfinite is not None:
            self._figures[:, 1].index_add_(0, owners, nonfinite.sum(1, dtype=torch.float64))


class _Rows(NamedTuple):
    """A range of the elements of the tensor with this number."""

    owner: int
    place: int
    values: Tensor


class _Scratch:
    """
    Memory for the bits and numbers of one chunk.

    Allocating it for each chunk would take longer than filling it. What is returned is valid until the next call.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[torch.dtype, Tensor] = {}

    def bits_and_numbers(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """
        The bits as int64, of shape (rows, WIDTH), or (rows, 2 * WIDTH) for elements of 8 bytes; finite values as
        float64, with zeros for the others; the sum of their squares; and where the others are, None if there are none.
        """
        bits = self._copy(values.view(_BITS[values.element_size()]), torch.int64)
        numbers = self._copy(values, torch.float64)
        square = _square(numbers)
        if not values.is_floating_point() or (values.device.type == "cpu" and math.isfinite(float(square))):
            # On other devices, finding that out would make the host wait.
            return bits, numbers, square, None
        # One pattern of bits for every NaN: which of them an operation gives depends on the machine.
        halves = bits.shape[1] // WIDTH
        bits = torch.where(torch.isnan(numbers).repeat_interleave(halves, dim=1), -1, bits)
        finite = torch.isfinite(numbers)
        numbers = torch.where(finite, numbers, 0.0)
        return bits, numbers, _square(numbers), ~finite

    def _copy(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """The values as another dtype, 2D; in this memory if they are small enough for it, as a chunk is."""
        if values.numel() > 2 * _CHUNK:
            return values.to(dtype)
        memory = self._memory.get(dtype)
        if memory is None or memory.numel() < values.numel():
            memory = self._memory[dtype] = torch.empty(values.numel(), dtype=dtype, device=self._device)
        return memory[: values.numel()].view(values.shape).copy_(values)


def _in_rows(place: int, values: Tensor, block: int = WIDTH) -> tuple[int, Tensor]:
    """A range of elements, 1D, as rows of whole blocks with zeros around it; and the number of the first row."""
    first, start = divmod(place, block)
    blocks = -(-(start + values.numel()) // block)
    if start or values.numel() != blocks * block:
        padded = values.new_zeros(blocks * block)
        padded[start : start + values.numel()] = values
        values = padded
    return first * block // WIDTH, values.view(-1, WIDTH)


def _hash(bits: Tensor, of_rows: Tensor, of_columns: Tensor) -> Tensor:
    """The sum over all elements of row multiplier * column multiplier * bits; integers overflow as they should."""
    if bits.device.type != "cpu":
        # Other devices have no product of a matrix of integers and a vector. Here it takes half of the time.
        return ((bits * of_columns).sum(1) * of_rows).sum()
    return torch.mv(bits.t(), of_rows).dot(of_columns)


def _square(numbers: Tensor) -> Tensor:
    flat = numbers.view(-1)
    return torch.dot(flat, flat)


def _fingerprint(label: tuple[tuple[int, ...], str, str, int], hash_: int, numbers: Sequence[float]) -> Fingerprint:
    shape, dtype, region, elements = label
    *sketch, square, nonfinite = numbers
    # Only values of float64 tensors can be too large for this.
    fits = math.isfinite(square) and all(map(math.isfinite, sketch))
    return Fingerprint(
        shape=shape,
        dtype=dtype,
        region=region,
        elements=elements,
        hash=f"{hash_ % MODULUS:016x}",
        square=square if fits else sys.float_info.max,
        nonfinite=int(nonfinite),
        sketch=encoded(sketch if fits else [0.0] * SKETCH),
    )


def sample_hashes(tensor: Tensor, at_most: int) -> Tensor | None:
    """A hash of each element of the first dim, int64 of shape (samples,); None without one, or for more samples."""
    if not tensor.dim() or not tensor.numel() or tensor.shape[0] > at_most:
        return None
    samples = tensor.detach().reshape(tensor.shape[0], -1).contiguous()
    if samples.is_complex():
        samples = torch.view_as_real(samples).flatten(1)
    bits = samples.view(_BITS[samples.element_size()]).to(torch.int64)
    rows = torch.arange(-(-bits.shape[1] // WIDTH))
    of_rows = _multipliers_of(rows, _ROWS).to(bits.device)
    multipliers = (of_rows[:, None] * _multipliers(bits.device, WIDTH)).flatten()
    return (bits * multipliers[: bits.shape[1]]).sum(1)


def _ranges(part: Part) -> Iterator[tuple[int, Tensor]]:
    """The part as ranges of elements in row-major order: the place of the first, and the values."""
    values = part.values.detach()
    shape = part.shape
    if values.is_complex():
        values = torch.view_as_real(values)
        shape = (*shape, 2)
    if isinstance(part.offsets, int):
        yield part.offsets * (2 if part.values.is_complex() else 1), values.reshape(-1)
        return
    offsets = part.offsets + (0,) * (len(shape) - len(part.offsets))
    yield from _box_ranges(shape, offsets, values)


def _box_ranges(shape: Sequence[int], offsets: Sequence[int], values: Tensor) -> Iterator[tuple[int, Tensor]]:
    if not values.numel():
        return
    inner = math.prod(shape[1:])
    if len(shape) <= 1 or list(values.shape[1:]) == list(shape[1:]):
        yield (offsets[0] if offsets else 0) * inner, values.reshape(-1)
        return
    if inner > _CHUNK:
        for index, slice_ in enumerate(values):
            for place, run in _box_ranges(shape[1:], offsets[1:], slice_):
                yield (offsets[0] + index) * inner + place, run
        return
    # Whole rows, with zeros where other ranks hold elements: zeros add nothing to a hash or a sketch.
    at_once = max(1, _CHUNK // inner)
    for begin in range(0, values.shape[0], at_once):
        rows = values[begin : begin + at_once]
        full = values.new_zeros(rows.shape[0], *shape[1:])
        full[(slice(None), *(slice(o, o + n) for o, n in zip(offsets[1:], values.shape[1:], strict=True)))] = rows
        yield (offsets[0] + begin) * inner, full.reshape(-1)


def _mixed(numbers: Tensor, seed: int) -> Tensor:
    """Random 64-bit numbers, a function of `numbers` alone: the finaliser of splitmix64. int64, on the CPU."""
    value = numbers * _signed(_GOLDEN) + _signed(seed * 0xD1B54A32D192ED03)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ _shifted(value, shift)) * _signed(factor)
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, by: int) -> Tensor:
    """A shift to the right that fills with zeros."""
    return (value >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    number %= MODULUS
    return number - MODULUS if number >= MODULUS // 2 else number


def _multipliers_of(numbers: Tensor, seed: int) -> Tensor:
    """Odd random numbers, so that a change of one element always shows: int64, on the CPU."""
    return _mixed(numbers, seed) | 1


def _signs_of_rows(rows: Tensor) -> Tensor:
    """Signs that all estimates share: float64 of shape (rows,). On the CPU, as `rows`."""
    return ((_mixed(rows, _ROW_SIGNS) & 1) * 2 - 1).to(torch.float64)


@functools.cache
def _hadamard(device: torch.device) -> Tensor:
    """The signs that an estimate gives to a class of rows: float64 of shape (ESTIMATES, ESTIMATES)."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < ESTIMATES:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix.to(device)


@functools.cache
def _block(index: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """
    Of _BLOCK rows: the multipliers, int64 of shape (rows,), and the signs by class, float64 of shape
    (ESTIMATES, 1, rows / ESTIMATES).
    """
    rows = torch.arange(index * _BLOCK, (index + 1) * _BLOCK)
    signs = _signs_of_rows(rows).view(-1, ESTIMATES).T[:, None].contiguous()
    return _multipliers_of(rows, _ROWS).to(device), signs.to(device)


def _row_numbers(first: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The multipliers and signs of rows, as `_block` has them: `first` and `count` are multiples of ESTIMATES."""
    index, begin = divmod(first, _BLOCK)
    blocks = [_block(number, device) for number in range(index, (first + count - 1) // _BLOCK + 1)]
    multipliers, signs = blocks[0]
    if len(blocks) > 1:
        multipliers = torch.cat([multipliers for multipliers, _ in blocks])
        signs = torch.cat([signs for _, signs in blocks], dim=2)
    classes = slice(begin // ESTIMATES, (begin + count) // ESTIMATES)
    return multipliers[begin : begin + count], signs[..., classes]


@functools.cache
def _multipliers(device: torch.device, columns: int) -> Tensor:
    """The multipliers of the columns, int64 of shape (columns,)."""
    return _multipliers_of(torch.arange(columns), _COLUMNS).to(device)


@functools.cache
def _columns(device: torch.device) -> tuple[Tensor, Tensor]:
    """The signs of the columns, float64, and their groups, int64; both of shape (ESTIMATES, WIDTH)."""
    columns = torch.arange(WIDTH)
    signs = torch.stack([(_mixed(columns, _COLUMN_SIGNS + 16 * (m + 1)) & 1) * 2.0 - 1.0 for m in range(ESTIMATES)])
    groups = torch.stack([_shifted(_mixed(columns, _GROUPS + 16 * (m + 1)), 40) % GROUPS for m in range(ESTIMATES)])
    return signs.to(torch.float64).to(device), groups.to(device)


@functools.cache
def _column_matrix(device: torch.device) -> Tensor:
    """Signs at the groups of the columns, zeros elsewhere: float64 of shape (WIDTH, SKETCH)."""
    signs, groups = _columns(device)
    matrix = torch.zeros(ESTIMATES, GROUPS, WIDTH, dtype=torch.float64, device=device)
    matrix.scatter_(1, groups[:, None], signs[:, None])
    return matrix.view(SKETCH, WIDTH).T.contiguous()
