"""
The link of the machine at hand, fitted to timed collectives.

All-gathers and all-reduces of several sizes are timed; an all-reduce makes twice the hops of an all-gather, which tells
latency and start-up apart. The fit minimises the relative error, so that small messages count as much as large ones.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh

from fsdp_conformance.engine.flat_collectives import all_gather, all_reduce_max
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.planner.link_spec import BYTES_PER_US_AT_1_GB_PER_S, LinkSpec

#: From a few packets to well beyond every cache of a core.
SIZES_BYTES = tuple(4**power for power in range(5, 13))

NUM_REPETITIONS = 9
_NUM_WARM_UPS = 2

#: The shortest time that a link may be fitted to: below it a clock, not a link, was measured.
_LEAST_US_PER_BYTE = 1e-9


class Timing(NamedTuple):
    """One collective, timed."""

    hops: int
    wire_bytes: float
    """What one rank sends."""
    us: float


@dataclass(frozen=True, slots=True)
class LinkFit:
    """A fitted link."""

    link: LinkSpec
    relative_error: float
    """Root of the mean square of (fitted - timed) / timed."""
    timings: tuple[Timing, ...]


def measure_link(
    mesh: DeviceMesh,
    axis: int | str = 0,
    *,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    num_repetitions: int = NUM_REPETITIONS,
) -> LinkFit:
    """
    Time collectives along a mesh axis and fit its link. Collective over the axis; every rank has the same result.

    A timing is the median of `num_repetitions`, of the rank that took longest. Raises ConfigError for an axis of one
    rank.
    """
    group = mesh.get_group(axis)
    num_ranks = group.size()
    if num_ranks < 2:
        raise ConfigError([f"axis {axis!r} has {num_ranks} rank, but should have at least 2"], where="LinkSpec.measure")
    device = torch.device(mesh.device_type)
    timings = []
    for nbytes in sizes_bytes:
        shard = torch.ones(-(-nbytes // num_ranks), dtype=torch.uint8, device=device)
        whole = torch.ones(shard.numel() * num_ranks, dtype=torch.uint8, device=device)
        wire_bytes = float(shard.nbytes * (num_ranks - 1))
        gather = partial(all_gather, whole, shard, group)
        reduce = partial(all_reduce_max, whole, group)
        gather_us = _median_us(gather, group, num_repetitions)
        timings.append(Timing(num_ranks - 1, wire_bytes, gather_us))
        reduce_us = _median_us(reduce, group, num_repetitions)
        timings.append(Timing(2 * (num_ranks - 1), 2 * wire_bytes, reduce_us))
    slowest = torch.tensor([timing.us for timing in timings], dtype=torch.float64).to(device)
    all_reduce_max(slowest, group).wait()
    return fit_link([timing._replace(us=us) for timing, us in zip(timings, slowest.tolist(), strict=True)])


def fit_link(timings: Sequence[Timing]) -> LinkFit:
    """
    The link whose costs are nearest to the timings: us = launch + hops x latency + bytes / bandwidth, none below 0.

    Raises ConfigError if there are fewer than three timings, or one that took no time.
    """
    problems = [f"us={timing.us}, but should be positive" for timing in timings if not timing.us > 0]
    if len(timings) < 3:
        problems.append(f"{len(timings)} timings, but should be at least 3, for three unknowns")
    if problems:
        raise ConfigError(problems, where="fit_link")
    measured = torch.tensor([timing.us for timing in timings], dtype=torch.float64)
    terms = torch.tensor([(1.0, timing.hops, timing.wire_bytes) for timing in timings], dtype=torch.float64)
    relative = terms / measured[:, None]
    best, error = torch.zeros(3, dtype=torch.float64), float("inf")
    # With three unknowns the best that is nowhere negative is found by leaving out each choice of the first two.
    for kept in itertools.chain.from_iterable(itertools.combinations((0, 1), count) for count in range(3)):
        found = _solution(relative, [*kept, 2])
        rms = float((relative @ found - 1).square().mean().sqrt())
        if rms < error and bool((found >= 0).all()):
            best, error = found, rms
    launch_us, latency_us, us_per_byte = best.tolist()
    link = LinkSpec(
        launch_us=launch_us,
        latency_us=latency_us,
        bandwidth_gb_per_s=1 / max(us_per_byte, _LEAST_US_PER_BYTE) / BYTES_PER_US_AT_1_GB_PER_S,
    )
    return LinkFit(link, error, tuple(timings))


def _solution(relative: Tensor, kept: Sequence[int]) -> Tensor:
    """Least squares of the terms that are kept; the others are 0."""
    part = relative[:, list(kept)]
    # Columns of one size: bytes are a million times as many as collectives.
    scale = part.abs().amax(0)
    ones = torch.ones(len(part), 1, dtype=torch.float64)
    found = torch.zeros(3, dtype=torch.float64)
    found[list(kept)] = torch.linalg.lstsq(part / scale, ones, driver="gelsd").solution[:, 0] / scale
    return found


def _median_us(collective: Callable[[], Work], group: ProcessGroup, num_repetitions: int) -> float:
    times = []
    for number in range(_NUM_WARM_UPS + num_repetitions):
        dist.barrier(group)
        _finish()
        began = time.perf_counter()
        collective().wait()
        _finish()
        if number >= _NUM_WARM_UPS:
            times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times)


def _finish() -> None:
    """Wait for an accelerator, where there is one in use."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
