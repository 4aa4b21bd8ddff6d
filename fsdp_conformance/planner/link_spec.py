"""
What a link between ranks costs, as data: a start-up, a latency for each hop, and a bandwidth (the alpha-beta model).

    LINKS       named links, each with the source of its numbers
    LinkedAxis    so many ranks in a ring on one link
    Cluster     hosts with a link inside and one between them; gives the axis of every group of regularly spaced ranks

Units: microseconds; GB is 10**9 bytes, as vendors and NCCL count. The bandwidth of a named link is nominal, an upper
bound; `LinkSpec.measure` fits a link to the machine at hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_conformance.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fsdp_conformance.planner.link_fit import LinkFit

#: Bytes per microsecond at 1 GB/s.
BYTES_PER_US_AT_1_GB_PER_S = 10**9 / 10**6


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSpec:
    """One kind of link."""

    latency_us: float
    """Microseconds from one rank to the next, whatever the size: once for each hop of a collective."""
    bandwidth_gb_per_s: float
    """GB (10**9 bytes) that one rank sends in a second, while it receives as many and all ranks of its host do so."""
    launch_us: float = 0.0
    """Microseconds that a collective takes to start, once, however many hops follow."""

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value!r}, but should be a finite number, {'positive' if must_be_positive else 'at least 0'}"
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
        """Microseconds that so many bytes take, start-up and latency aside."""
        return nbytes / (self.bandwidth_gb_per_s * BYTES_PER_US_AT_1_GB_PER_S)

    def message_us(self, nbytes: float) -> float:
        """One message from one end to the other."""
        return self.launch_us + self.latency_us + self.wire_us(nbytes) if nbytes else 0.0

    @classmethod
    def measure(cls, mesh: DeviceMesh, axis: int | str = 0) -> LinkFit:
        """Fit the link of a mesh axis to timed collectives, see `link_fit.measure_link`. Collective over the axis."""
        from fsdp_conformance.planner.link_fit import measure_link

        return measure_link(mesh, axis)


#: Named links. Start-up and latencies are those of NCCL's ring with its Simple protocol, the one that reaches the
#: bandwidth of a link (NCCL, src/graph/tuning.cc: baseLat, and hwLat for NVLINK, PCI and NET).
LINKS: Mapping[str, LinkSpec] = {
    # NVLink 4 of an H100: 900 GB/s both ways together (NVIDIA H100 data sheet).
    "nvlink": LinkSpec(launch_us=8.4, latency_us=3.4, bandwidth_gb_per_s=450.0),
    # PCIe 5.0 x16: 32 GT/s on 16 lanes, 128 of 130 bits of payload.
    "pcie": LinkSpec(launch_us=8.4, latency_us=5.7, bandwidth_gb_per_s=63.0),
    # InfiniBand NDR: 400 Gb/s, an adapter for each rank, as in a DGX H100.
    "ib": LinkSpec(launch_us=8.4, latency_us=14.0, bandwidth_gb_per_s=50.0),
    # 100 Gb/s Ethernet for each rank; hosts whose ranks share an adapter give each its part.
    "ethernet": LinkSpec(launch_us=8.4, latency_us=14.0, bandwidth_gb_per_s=12.5),
    # Two ranks of gloo on a host of two cores, fitted by `ci/bench/run plan`; timings scatter by 38 % around it.
    "gloo-loopback": LinkSpec(launch_us=160.0, latency_us=260.0, bandwidth_gb_per_s=0.8),
}


@dataclass(frozen=True, slots=True)
class LinkedAxis:
    """The ranks along one axis of a mesh: a ring."""

    num_ranks: int
    link: LinkSpec

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ConfigError([f"num_ranks={self.num_ranks}, but should be at least 1"], where="LinkedAxis")


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
            f"{name}={value}, but should be at least 1"
            for name, value in (("world_size", self.world_size), ("ranks_per_host", self.ranks_per_host))
            if value < 1
        ]
        if not problems and self.num_hosts > 1 and self.world_size % self.ranks_per_host:
            problems.append(
                f"ranks_per_host={self.ranks_per_host}, but should be a factor of world_size={self.world_size}"
            )
        if problems:
            raise ConfigError(problems, where="Cluster")

    @property
    def num_hosts(self) -> int:
        """Hosts, the last of which may not be full."""
        return -(-self.world_size // self.ranks_per_host)

    def axis(self, num_ranks: int, *, stride: int = 1) -> LinkedAxis:
        """
        The ring of `num_ranks` ranks, of which each is `stride` behind the one before.

        Where it spans hosts, every host has some of them in a row: only one hop of so many crosses to another host, but
        all bytes do. Rings that run beside it start at the other ranks of the host, and each has its part of the
        adapters; so many ranks in a row have the adapters of all of them. Where rows differ the shortest counts.
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
