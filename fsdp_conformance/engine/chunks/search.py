"""
The chunk size that wastes least, within a memory budget.

Tensors are laid into chunks of one size in their order, those of one dtype together: a chunk is closed when the next
tensor does not fit. What is left over in it is waste: memory on every rank, and bytes on the wire of every collective.

Only sizes at which the number of chunks changes are tried: for each number that can come about the smallest size with
it, and with that number no other size wastes less.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from fsdp_conformance.engine.chunks.layout import pad_to_multiple
from fsdp_conformance.engine.errors import NoChunkSize
from fsdp_conformance.errors import ConfigError

_WHERE = "search_chunk_size"


class TensorSize(NamedTuple):
    """A tensor, as far as chunks are concerned."""

    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A chunk size, and what comes of it."""

    nbytes: int
    """Bytes of a chunk, unsharded."""
    num_chunks: int
    waste_bytes: int
    """Bytes of all chunks together in which there is no tensor."""
    num_blocks: int
    """Chunks that have to be unsharded at once."""
    memory_bytes: int
    """Blocks, and this rank's shards of all chunks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkSize:
    """The size chosen, the chunks that come of it, and why."""

    best: Candidate
    chunks: tuple[tuple[int, ...], ...]
    """For each chunk the indices of its tensors, in order; chunks in the order of their first tensors."""
    dtypes: tuple[torch.dtype, ...]
    """For each chunk its dtype."""
    considered: tuple[Candidate, ...]
    """Every size that was tried, smallest first."""
    budget_bytes: int | None

    def numel(self, dtype: torch.dtype) -> int:
        """Elements of a chunk of that dtype."""
        return self.best.nbytes // dtype.itemsize

    def explain(self) -> str:
        """The choice, what it costs, the runner-up, and how many sizes were over the budget: a few lines of text."""
        best = self.best
        used = best.num_chunks * best.nbytes - best.waste_bytes
        budget = "no budget" if self.budget_bytes is None else f"a budget of {self.budget_bytes}"
        lines = [
            (
                f"chunk size {best.nbytes} bytes: {best.num_chunks} chunks for {used} bytes of tensors, "
                f"{best.waste_bytes} bytes wasted ({_percent(best.waste_bytes, used)})"
            ),
            f"  memory: {best.num_blocks} blocks of {best.nbytes} and the shards, {best.memory_bytes} bytes, {budget}",
        ]
        others = sorted((one for one in self._within() if one != best), key=_preference)
        if others:
            second = others[0]
            lines.append(
                f"  next best: {second.nbytes} bytes, {second.num_chunks} chunks, {second.waste_bytes} wasted, "
                f"memory {second.memory_bytes}"
            )
        num_over = len(self.considered) - len(self._within())
        lines.append(f"  sizes tried: {len(self.considered)}, of which {num_over} over the budget")
        return "\n".join(lines)

    def _within(self) -> list[Candidate]:
        return [one for one in self.considered if self.budget_bytes is None or one.memory_bytes <= self.budget_bytes]


def search_chunk_size(
    tensors: Sequence[TensorSize | torch.Tensor],
    *,
    world_size: int,
    budget_bytes: int | None = None,
    uses: Sequence[Sequence[int]] | None = None,
    num_prefetched: int = 0,
) -> ChunkSize:
    """
    The size with the least waste whose memory fits the budget; of several the one with the least memory, then with the
    fewest chunks.

    `uses`: indices of tensors that are used at once, operation by operation (see `module_uses`); None: one at a time.
    `num_prefetched` chunks are unsharded beside those. Depends on nothing but its arguments, so all ranks find the
    same. Raises ConfigError for arguments out of range, NoChunkSize if nothing fits the budget.
    """
    sizes = [
        TensorSize(tensor.numel(), tensor.dtype) if isinstance(tensor, torch.Tensor) else TensorSize(*tensor)
        for tensor in tensors
    ]
    uses = [[index] for index in range(len(sizes))] if uses is None else uses
    _check(sizes, world_size, budget_bytes, uses, num_prefetched)
    runs = _Runs(sizes, unit=world_size * max(size.dtype.itemsize for size in sizes))
    considered = tuple(
        _candidate(runs, nbytes, world_size=world_size, uses=uses, num_prefetched=num_prefetched)
        for nbytes in runs.sizes()
    )
    fitting = [one for one in considered if budget_bytes is None or one.memory_bytes <= budget_bytes]
    if not fitting:
        least = min(considered, key=lambda one: (one.memory_bytes, one.nbytes))
        raise NoChunkSize(
            f"budget_bytes={budget_bytes}, but should be at least {least.memory_bytes}",
            where=_WHERE,
            hint=f"That is for chunks of {least.nbytes} bytes, of which {least.num_blocks} are unsharded at once",
        )
    best = min(fitting, key=_preference)
    chunks = sorted(runs.partition(best.nbytes))
    return ChunkSize(
        best=best,
        chunks=tuple(chunks),
        dtypes=tuple(sizes[chunk[0]].dtype for chunk in chunks),
        considered=considered,
        budget_bytes=budget_bytes,
    )


def module_uses(module: nn.Module) -> tuple[list[nn.Parameter], list[list[int]]]:
    """
    The parameters of a module, each once, and for each submodule with parameters of its own the indices of those.

    What a submodule owns is used at once when it is called.
    """
    parameters = list(module.parameters())
    indices = {id(parameter): index for index, parameter in enumerate(parameters)}
    owned = ([indices[id(one)] for one in child.parameters(recurse=False)] for child in module.modules())
    return parameters, [use for use in owned if use]


class _Runs:
    """The tensors of each dtype in their order, with the sums of their bytes."""

    def __init__(self, sizes: Sequence[TensorSize], *, unit: int) -> None:
        self._unit = unit
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, size in enumerate(sizes):
            by_dtype.setdefault(size.dtype, []).append(index)
        self._indices = list(by_dtype.values())
        self._sums = [
            list(itertools.accumulate((sizes[index].nbytes for index in indices), initial=0))
            for indices in self._indices
        ]
        self._largest = max(size.nbytes for size in sizes)
        self.total_bytes = sum(sums[-1] for sums in self._sums)

    def sizes(self) -> Iterator[int]:
        """For each number of chunks that a size brings about, the smallest such size; smallest first."""
        nbytes = max(pad_to_multiple(self._largest, self._unit), self._unit)
        yield nbytes
        while (num_chunks := self.count(nbytes)) > len(self._sums):
            nbytes = self._smallest_size(num_chunks - 1, above=nbytes)
            yield nbytes

    def count(self, nbytes: int) -> int:
        """How many chunks of that size there would be."""
        return sum(1 for _ in self._ranges(nbytes))

    def partition(self, nbytes: int) -> list[tuple[int, ...]]:
        """The tensors of each chunk of that size, dtype after dtype."""
        return [tuple(self._indices[run][begin:end]) for run, begin, end in self._ranges(nbytes)]

    def _ranges(self, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Which run a chunk is from, and the interval [begin, end) of the run that is in it."""
        for run, sums in enumerate(self._sums):
            begin = 0
            while begin < len(sums) - 1:
                end = bisect.bisect_right(sums, sums[begin] + nbytes) - 1
                yield run, begin, end
                begin = end

    def _smallest_size(self, num_chunks: int, *, above: int) -> int:
        """The smallest size above `above` with at most `num_chunks` chunks. The number never grows with the size."""
        low, high = above // self._unit, -(-max(sums[-1] for sums in self._sums) // self._unit)
        while high - low > 1:
            middle = (low + high) // 2
            if self.count(middle * self._unit) <= num_chunks:
                high = middle
            else:
                low = middle
        return high * self._unit


def _candidate(
    runs: _Runs, nbytes: int, *, world_size: int, uses: Sequence[Sequence[int]], num_prefetched: int
) -> Candidate:
    chunks = runs.partition(nbytes)
    chunk_of = {index: number for number, chunk in enumerate(chunks) for index in chunk}
    at_once = max((len({chunk_of[index] for index in use}) for use in uses), default=0)
    num_blocks = min(at_once + num_prefetched, len(chunks))
    return Candidate(
        nbytes=nbytes,
        num_chunks=len(chunks),
        waste_bytes=len(chunks) * nbytes - runs.total_bytes,
        num_blocks=num_blocks,
        memory_bytes=num_blocks * nbytes + len(chunks) * nbytes // world_size,
    )


def _preference(one: Candidate) -> tuple[int, int, int]:
    return one.waste_bytes, one.memory_bytes, one.num_chunks


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "all of it"


def _check(
    sizes: Sequence[TensorSize],
    world_size: int,
    budget_bytes: int | None,
    uses: Sequence[Sequence[int]],
    num_prefetched: int,
) -> None:
    problems = []
    if not sizes:
        problems.append("tensors=[], but should be at least one")
    if any(size.numel < 0 for size in sizes):
        problems.append("a tensor has less than 0 elements")
    if world_size < 1:
        problems.append(f"world_size={world_size}, but should be at least 1")
    if budget_bytes is not None and budget_bytes < 0:
        problems.append(f"budget_bytes={budget_bytes}, but should be at least 0, or None")
    if num_prefetched < 0:
        problems.append(f"num_prefetched={num_prefetched}, but should be at least 0")
    beyond = sorted({index for use in uses for index in use if not 0 <= index < len(sizes)})
    if beyond:
        problems.append(f"uses name tensors {beyond}, but should be from 0 to {len(sizes) - 1}")
    if problems:
        raise ConfigError(problems, where=_WHERE)
