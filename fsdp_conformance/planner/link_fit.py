"""
Links, measured: collectives of several sizes are timed, and the numbers of each collective fitted to them.

    measure    times the collectives along axes of meshes, and fits each
    fit_link   the link that explains a set of timings of one collective

Each collective gets its own numbers. Where one implementation of a collective really is another one, as gloo's
reduce-scatter is an all-reduce, one set of numbers for all of them would be wrong for some.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh

from fsdp_conformance.engine.communication import all_gather, all_reduce, all_reduce_max, reduce_scatter
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.planner.link_spec import BYTES_PER_US_AT_1_GB_PER_S, CollectiveLinks, LinkSpec

#: The messages that are timed: from a few packets to well beyond every cache of a core.
SIZES_BYTES = tuple(4**power for power in range(5, 13))

_NUM_WARM_UPS = 2
_NUM_REPETITIONS = 9

#: The shortest time to which a link may be fitted: below it a clock was measured, not a link.
_LEAST_US_PER_BYTE = 1e-9

#: The collectives that are timed, each with its passes around the ring.
_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


class Timing(NamedTuple):
    """One timed collective."""

    hops: int
    wire_bytes: float
    """The bytes that one rank sends."""
    us: float


@dataclass(frozen=True, slots=True)
class LinkFit:
    """A fitted link."""

    link: LinkSpec
    relative_error: float
    """Root mean square of (fitted - timed) / timed."""
    timings: tuple[Timing, ...]


def fit_link(timings: Sequence[Timing]) -> LinkFit:
    """
    The link that is closest to the timings: us = launch + hops x latency + bytes / bandwidth, all non-negative.

    Minimises the relative error, so small messages count as much as large ones. Raises ConfigError for fewer than three
    timings and for one that took no time.
    """
    problems = [f"timings must be positive, got {timing.us} us" for timing in timings if not timing.us > 0]
    if len(timings) < 3:
        problems.append(f"at least 3 timings are needed for 3 unknowns, got {len(timings)}")
    if problems:
        raise ConfigError(problems, where="fit_link")
    measured = torch.tensor([timing.us for timing in timings], dtype=torch.float64)
    terms = torch.tensor([(1.0, timing.hops, timing.wire_bytes) for timing in timings], dtype=torch.float64)
    relative = terms / measured[:, None]
    ones = torch.ones(len(timings), 1, dtype=torch.float64)
    best, error = torch.zeros(3, dtype=torch.float64), float("inf")
    # The best non-negative solution has launch, latency, both or neither set to 0: solve least squares for each choice.
    for chosen in itertools.chain.from_iterable(itertools.combinations((0, 1), count) for count in range(3)):
        columns = [*chosen, 2]
        part = relative[:, columns]
        scale = part.abs().amax(0)  # there are a million times as many bytes as collectives
        coefficients = torch.zeros(3, dtype=torch.float64)
        coefficients[columns] = torch.linalg.lstsq(part / scale, ones, driver="gelsd").solution[:, 0] / scale
        rms = float((relative @ coefficients - 1).square().mean().sqrt())
        if rms < error and bool((coefficients >= 0).all()):
            best, error = coefficients, rms
    launch_us, latency_us, us_per_byte = best.tolist()
    link = LinkSpec(
        launch_us=launch_us,
        latency_us=latency_us,
        bandwidth_gb_per_s=1 / max(us_per_byte, _LEAST_US_PER_BYTE) / BYTES_PER_US_AT_1_GB_PER_S,
    )
    return LinkFit(link, error, tuple(timings))


@dataclass(frozen=True, slots=True)
class CollectiveFit:
    """The fits of all collectives."""

    all_gather: LinkFit
    reduce_scatter: LinkFit
    all_reduce: LinkFit

    @property
    def links(self) -> CollectiveLinks:
        """The links, in the form that the planner takes."""
        return CollectiveLinks(
            all_gather=self.all_gather.link, reduce_scatter=self.reduce_scatter.link, all_reduce=self.all_reduce.link
        )

    @property
    def relative_error(self) -> float:
        """Root mean square over all timings."""
        fits = (self.all_gather, self.reduce_scatter, self.all_reduce)
        total = sum(fit.relative_error**2 * len(fit.timings) for fit in fits)
        return math.sqrt(total / sum(len(fit.timings) for fit in fits))


def measure(*axes: tuple[DeviceMesh, int | str]) -> CollectiveFit:
    """
    Time collectives along axes of meshes and fit the links. Collective over the axes; the result is the same on all.

    Axes of different lengths separate the latency of a hop from the start-up of a collective; with axes of one length
    only, costs of other lengths are extrapolated. Parallel rings of an axis are timed at the same time, as they run in
    training. A timing is a median, of the slowest rank. Raises ConfigError for an axis of one rank, and for none.
    """
    groups = [(mesh.get_group(axis), mesh.device_type) for mesh, axis in axes]
    problems = [
        f"axis {axis!r} must have at least 2 ranks, got {group.size()}"
        for (_, axis), (group, _) in zip(axes, groups, strict=True)
        if group.size() < 2
    ]
    if problems or not axes:
        raise ConfigError(problems or ["at least one axis is needed, got none"], where="link_fit.measure")
    timings = [timing for group, device_type in groups for timing in _timings(group, device_type)]
    times = torch.tensor([timing.us for _, timing in timings], dtype=torch.float64)
    # The maximum along every axis of a mesh is that of the whole mesh.
    for group, device_type in groups:
        times = times.to(device_type)
        all_reduce_max(times, group).wait()
    by_name: dict[str, list[Timing]] = {name: [] for name in _PASSES}
    for (name, timing), us in zip(timings, times.tolist(), strict=True):
        by_name[name].append(timing._replace(us=us))
    return CollectiveFit(**{name: fit_link(samples) for name, samples in by_name.items()})


def _timings(group: ProcessGroup, device_type: str) -> Iterator[tuple[str, Timing]]:
    """Each collective in several sizes, timed by this rank. Collective."""
    device = torch.device(device_type)
    num_ranks = group.size()
    for nbytes in SIZES_BYTES:
        # float32, which every backend reduces at full speed
        shard = torch.ones(-(-nbytes // num_ranks // 4), device=device)
        whole = torch.ones(shard.numel() * num_ranks, device=device)
        collectives: dict[str, Callable[[], Work]] = {
            "all_gather": partial(all_gather, whole, shard, group),
            "reduce_scatter": partial(reduce_scatter, shard, whole, group),
            "all_reduce": partial(all_reduce, whole, group),
        }
        for name, passes in _PASSES.items():
            hops = passes * (num_ranks - 1)
            yield name, Timing(hops, float(hops * shard.nbytes), _median_us(collectives[name], group))


def _median_us(collective: Callable[[], Work], group: ProcessGroup) -> float:
    def finish() -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    times = []
    for number in range(_NUM_WARM_UPS + _NUM_REPETITIONS):
        dist.barrier(group)
        finish()
        began = time.perf_counter()
        collective().wait()
        finish()
        if number >= _NUM_WARM_UPS:
            times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times)
