"""Four ranks with a reduce-scatter bucketer: inputs that code rank, target, input and element, and their sums."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fsdp_conformance.engine.bucketing.reduce_scatter_bucketer import ReduceScatterBucketer
from fsdp_conformance.tests.engine.chunks.chunk_ranks import ChunkTestCase

#: Four ranks, float32: a bucket of 16 elements for each rank is 256 bytes.
CAP_16 = 256 / 2**20


def inputs_of(rank: int, tag: int, shape: tuple[int, ...], *, num_ranks: int = 4) -> list[Tensor]:
    """
    The input of rank r for rank k: element j is 2**r * (100 tag + 10 k + j + 1).

    The sum over ranks is (2**num_ranks - 1) times the bracket, so it shows parts of other ranks or inputs, a wrong
    order of elements, and ranks that are missing or doubled.
    """
    elements = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    return [(elements + 100 * tag + 10 * other + 1) * 2**rank for other in range(num_ranks)]


def num_in_flight(bucketer: ReduceScatterBucketer) -> int:
    """Inputs whose collective was started and whose callback has not run."""
    return sum(len(launch.pending) for launch in bucketer._in_flight) + len(bucketer._reduced)


def buffer_nbytes(bucketer: ReduceScatterBucketer) -> int:
    """Bytes of the buffers that buckets hold now."""
    buffers = [bucket._buffer for bucket in bucketer._buckets.values()]
    return sum(buffer.untyped_storage().nbytes() for buffer in buffers if buffer is not None)


def sum_for(rank: int, tag: int, shape: tuple[int, ...], *, num_ranks: int = 4) -> Tensor:
    """The sum that rank `rank` must get for that input."""
    elements = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    return torch.mul(elements + 100 * tag + 10 * rank + 1, 2**num_ranks - 1)


class BucketerTestCase(ChunkTestCase):
    """Four ranks. Callbacks note the results, in the order in which they run."""

    def start(self, cap_mb: float = CAP_16) -> ReduceScatterBucketer:
        """A bucketer, and an empty list of results."""
        self.results: list[tuple[int, Tensor]] = []
        self.schedule()
        return ReduceScatterBucketer(cap_mb)

    def note(self, tag: int) -> Callable[[Tensor], None]:
        """A callback that notes its result."""
        return lambda result: self.results.append((tag, result))

    def give(self, bucketer: ReduceScatterBucketer, tag: int, *shape: int) -> None:
        """One list of inputs for each rank of the world."""
        bucketer.reduce_scatter(inputs_of(self.rank, tag, shape), callback=self.note(tag))

    def tags(self) -> list[int]:
        """The callbacks that have run, in order."""
        return [tag for tag, _ in self.results]

    def check_results(self, shapes: dict[int, tuple[int, ...]]) -> None:
        """Each callback ran once, with this rank's sum, in the shape of its input."""
        self.assertEqual(sorted(shapes), sorted(self.tags()))
        for tag, result in self.results:
            self.assert_equal(sum_for(self.rank, tag, shapes[tag]), result)
