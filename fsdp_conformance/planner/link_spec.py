"""
What links between ranks cost, and the collectives on them (the alpha-beta model).

    LinkSpec    a start-up, a latency per hop and a bandwidth; `LinkSpec.measure` fits them to timed collectives
    LINKS       named links, each with the source of its numbers
    LinkedAxis  a ring of ranks on one link: the cost of its collectives
    Cluster     hosts, with one link inside them and one between them: the ring of any regularly spaced ranks
    fit_link    the link that explains a set of timings

Units: microseconds; GB is 10**9 bytes, as vendors and NCCL count. The bandwidth of a named link is nominal, an upper
bound.

Costs are those of the ring algorithms. With n ranks a ring all-gather or reduce-scatter makes n - 1 hops and sends
(n - 1) / n of the whole tensor. An all-reduce is one after the other in a single collective: twice the hops and bytes,
one start-up. An axis of one rank communicates nothing. The padding of uneven shards is not counted.

Source: Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH (2005). torch's
`tensor/_collective_utils.py` has the same formulas with other constants.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from fsdp_conformance.errors import ConfigError

if TYPE_CHECKING:  # `fsdp-conformance plan` reads LINKS before torch is imported; measuring and fitting import it
    from torch.distributed import ProcessGroup, Work
    from torch.distributed.device_mesh import DeviceMesh

#: Bytes per microsecond at 1 GB/s.
BYTES_PER_US_AT_1_GB_PER_S = 10**9 / 10**6

#: The messages that are timed: from a few packets to well beyond every cache of a core.
SIZES_BYTES = tuple(4**power for power in range(5, 13))

_NUM_WARM_UPS = 2
_NUM_REPETITIONS = 9

#: The shortest time to which a link may be fitted: below it a clock was measured, not a link.
_LEAST_US_PER_BYTE = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSpec:
    """One kind of link."""

    latency_us: float
    """Microseconds from one rank to the next, whatever the size, for each hop of a collective."""
    bandwidth_gb_per_s: float
    """GB (10**9 bytes) that a rank sends per second while it receives as many, as do all ranks of its host."""
    launch_us: float = 0.0
    """Microseconds that a collective takes to start, however many hops follow."""

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be a finite {'positive' if must_be_positive else 'non-negative'} number, got {value!r}"
            for name, value, must_be_positive in (
                ("latency_us", self.latency_us, False),
                ("bandwidth_gb_per_s", self.bandwidth_gb_per_s, True),
                ("launch_us", self.launch_us, False),
            )
            if not (math.isfinite(value) and value >= 0 and (value > 0 or not must_be_positive))
        ]
        if problems:
            raise ConfigError(problems, where="LinkSpec")

    def wire_us(self, nbytes: float) -> float:
        """Microseconds on the wire, without start-up and latency."""
        return nbytes / (self.bandwidth_gb_per_s * BYTES_PER_US_AT_1_GB_PER_S)

    def message_us(self, nbytes: float) -> float:
        """Microseconds of one message from one end to the other."""
        return self.launch_us + self.latency_us + self.wire_us(nbytes) if nbytes else 0.0

    @classmethod
    def measure(cls, mesh: DeviceMesh, axis: int | str = 0) -> LinkFit:
        """
        Time collectives along a mesh axis and fit its link. Collective over the axis; the result is the same on all.

        Times all-gathers and all-reduces of several sizes: an all-reduce makes twice the hops of an all-gather, which
        separates latency from start-up. A timing is a median, of the slowest rank. Raises ConfigError for an axis of
        one rank.
        """
        group = mesh.get_group(axis)
        if group.size() < 2:
            problem = f"axis {axis!r} must have at least 2 ranks, got {group.size()}"
            raise ConfigError([problem], where="LinkSpec.measure")
        return fit_link(_timings(group, mesh.device_type))


#: Named links. Start-up and latencies are those of NCCL's ring with its Simple protocol, the one that reaches the
#: bandwidth of a link (NCCL, src/graph/tuning.cc: baseLat, and hwLat for NVLINK, PCI and NET).
LINKS: Mapping[str, LinkSpec] = {
    # NVLink 4 of an H100: 900 GB/s both ways together (NVIDIA H100 data sheet).
    "nvlink": LinkSpec(launch_us=8.4, latency_us=3.4, bandwidth_gb_per_s=450.0),
    # PCIe 5.0 x16: 32 GT/s on 16 lanes, 128 of 130 bits of payload.
    "pcie": LinkSpec(launch_us=8.4, latency_us=5.7, bandwidth_gb_per_s=63.0),
    # InfiniBand NDR: 400 Gb/s, one adapter per rank, as in a DGX H100.
    "ib": LinkSpec(launch_us=8.4, latency_us=14.0, bandwidth_gb_per_s=50.0),
    # 100 Gb/s Ethernet for each rank. If ranks share an adapter, each has its share.
    "ethernet": LinkSpec(launch_us=8.4, latency_us=14.0, bandwidth_gb_per_s=12.5),
    # Two ranks of gloo on a host of two cores, fitted by `ci/bench/run plan`; timings scatter by 38 % around it.
    "gloo-loopback": LinkSpec(launch_us=160.0, latency_us=260.0, bandwidth_gb_per_s=0.8),
}


@dataclass(frozen=True, slots=True)
class LinkedAxis:
    """The ranks along one axis of a mesh, as a ring on one link."""

    num_ranks: int
    link: LinkSpec

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ConfigError([f"num_ranks must be at least 1, got {self.num_ranks}"], where="LinkedAxis")

    def all_gather_us(self, nbytes: float) -> float:
        """Microseconds. `nbytes`: of the gathered tensor, all shards together."""
        return self._ring_us(nbytes, num_passes=1)

    def reduce_scatter_us(self, nbytes: float) -> float:
        """Microseconds. `nbytes`: of the tensor on each rank, of which it keeps one shard."""
        return self._ring_us(nbytes, num_passes=1)

    def all_reduce_us(self, nbytes: float) -> float:
        """Microseconds. `nbytes`: of the tensor on each rank."""
        return self._ring_us(nbytes, num_passes=2)

    def all_to_all_us(self, nbytes: float) -> float:
        """
        Microseconds. `nbytes`: of the tensor on each rank, an n-th of which goes to each rank.

        By pairwise exchange: n - 1 messages, and each rank keeps its own part.
        """
        return self._ring_us(nbytes, num_passes=1)

    def _ring_us(self, nbytes: float, *, num_passes: int) -> float:
        hops = num_passes * (self.num_ranks - 1)
        if not hops:
            return 0.0
        link = self.link
        return link.launch_us + hops * link.latency_us + link.wire_us(nbytes * hops / self.num_ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Hosts of `ranks_per_host` consecutive ranks."""

    world_size: int
    ranks_per_host: int
    inner: LinkSpec
    """Between two ranks of one host."""
    outer: LinkSpec
    """Between two ranks of different hosts."""

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be at least 1, got {value}"
            for name, value in (("world_size", self.world_size), ("ranks_per_host", self.ranks_per_host))
            if value < 1
        ]
        if not problems and self.num_hosts > 1 and self.world_size % self.ranks_per_host:
            problems.append(
                f"ranks_per_host must be a factor of world_size={self.world_size}, got {self.ranks_per_host}"
            )
        if problems:
            raise ConfigError(problems, where="Cluster")

    @property
    def num_hosts(self) -> int:
        """The number of hosts. The last one may not be full."""
        return -(-self.world_size // self.ranks_per_host)

    def axis(self, num_ranks: int, *, stride: int = 1) -> LinkedAxis:
        """
        The ring of `num_ranks` ranks that are `stride` apart.

        If it spans hosts, each host has several consecutive ranks of the ring: only one hop in that many crosses to
        another host, but all bytes do. Parallel rings start at the other ranks of the host and share its adapters, so a
        ring has the adapters of all its ranks on a host. If the number of ranks differs between hosts, the smallest
        counts.
        """
        together = max(1, math.gcd(num_ranks * stride, self.ranks_per_host) // stride)
        if together == num_ranks or self.num_hosts == 1:
            return LinkedAxis(num_ranks, self.inner)
        if together == 1:
            return LinkedAxis(num_ranks, self.outer)
        return LinkedAxis(
            num_ranks,
            LinkSpec(
                launch_us=max(self.inner.launch_us, self.outer.launch_us),
                latency_us=((together - 1) * self.inner.latency_us + self.outer.latency_us) / together,
                bandwidth_gb_per_s=min(self.inner.bandwidth_gb_per_s, together * self.outer.bandwidth_gb_per_s),
            ),
        )


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
    import torch

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
        kept = [*chosen, 2]
        part = relative[:, kept]
        scale = part.abs().amax(0)  # there are a million times as many bytes as collectives
        found = torch.zeros(3, dtype=torch.float64)
        found[kept] = torch.linalg.lstsq(part / scale, ones, driver="gelsd").solution[:, 0] / scale
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


def _timings(group: ProcessGroup, device_type: str) -> list[Timing]:
    """Collectives of several sizes, timed on the slowest rank. Collective."""
    import torch

    from fsdp_conformance.engine.flat_collectives import all_gather, all_reduce_max

    device = torch.device(device_type)
    num_ranks = group.size()
    timings = []
    for nbytes in SIZES_BYTES:
        shard = torch.ones(-(-nbytes // num_ranks), dtype=torch.uint8, device=device)
        whole = torch.ones(shard.numel() * num_ranks, dtype=torch.uint8, device=device)
        collectives = (partial(all_gather, whole, shard, group), partial(all_reduce_max, whole, group))
        for passes, collective in enumerate(collectives, start=1):
            hops = passes * (num_ranks - 1)
            timings.append(Timing(hops, float(hops * shard.nbytes), _median_us(collective, group)))
    slowest = torch.tensor([timing.us for timing in timings], dtype=torch.float64).to(device)
    all_reduce_max(slowest, group).wait()
    return [timing._replace(us=us) for timing, us in zip(timings, slowest.tolist(), strict=True)]


def _median_us(collective: Callable[[], Work], group: ProcessGroup) -> float:
    import torch
    import torch.distributed as dist

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
