"""
Costs of links between ranks and of the collectives on them (the alpha-beta model).

    LinkSpec         a start-up, a latency per hop and a bandwidth
    CollectiveLinks  one of these for each collective, as `link_fit` measures them
    LINKS            named links, each with the source of its numbers
    LinkedAxis       a ring of ranks on one link: the cost of its collectives
    Cluster          hosts, with one link inside them and one between them: the ring of any regularly spaced ranks

Units: microseconds; GB is 10**9 bytes, as vendors and NCCL count. The bandwidth of a named link is nominal, an upper
bound.

Costs are those of the ring algorithms. With n ranks a ring all-gather or reduce-scatter makes n - 1 hops and sends
(n - 1) / n of the whole tensor. An all-reduce is one after the other in a single collective: twice the hops and bytes,
one start-up. An axis of one rank communicates nothing. The padding of uneven shards is not counted.

Source: Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH (2005). torch's
`tensor/_collective_utils.py` has the same formulas with other constants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from fsdp_conformance.errors import ConfigError

#: Bytes per microsecond at 1 GB/s.
BYTES_PER_US_AT_1_GB_PER_S = 10**9 / 10**6


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

    def ring_us(self, hops: int, sent_bytes: float) -> float:
        """Microseconds of a collective in which each rank sends so many bytes in so many hops."""
        return self.launch_us + hops * self.latency_us + self.wire_us(sent_bytes)

    def message_us(self, nbytes: float) -> float:
        """Microseconds of one message from one end to the other."""
        return self.launch_us + self.latency_us + self.wire_us(nbytes) if nbytes else 0.0

    @property
    def all_gather(self) -> LinkSpec:
        """This link: its numbers describe every collective."""
        return self

    @property
    def reduce_scatter(self) -> LinkSpec:
        """This link."""
        return self

    @property
    def all_reduce(self) -> LinkSpec:
        """This link."""
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveLinks:
    """
    One kind of link, with numbers for each collective.

    A backend need not implement all of them alike: on gloo, a reduce-scatter takes as long as an all-reduce.
    """

    all_gather: LinkSpec
    reduce_scatter: LinkSpec
    all_reduce: LinkSpec


Link: TypeAlias = LinkSpec | CollectiveLinks

#: How far off the times on named links are taken to be, as a fraction.
NOMINAL_ERROR = 0.1

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
    link: Link

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ConfigError([f"num_ranks must be at least 1, got {self.num_ranks}"], where="LinkedAxis")

    def all_gather_us(self, nbytes: float) -> float:
        """Microseconds. `nbytes`: of the gathered tensor, all shards together."""
        return self._ring_us(self.link.all_gather, nbytes, num_passes=1)

    def reduce_scatter_us(self, nbytes: float) -> float:
        """Microseconds. `nbytes`: of the tensor on each rank, of which it keeps one shard."""
        return self._ring_us(self.link.reduce_scatter, nbytes, num_passes=1)

    def all_reduce_us(self, nbytes: float) -> float:
        """Microseconds. `nbytes`: of the tensor on each rank."""
        return self._ring_us(self.link.all_reduce, nbytes, num_passes=2)

    def all_to_all_us(self, nbytes: float) -> float:
        """
        Microseconds. `nbytes`: of the tensor on each rank, an n-th of which goes to each rank.

        By pairwise exchange: n - 1 messages, and each rank keeps its own part. Its links are those of an all-gather,
        which sends and receives as much.
        """
        return self._ring_us(self.link.all_gather, nbytes, num_passes=1)

    def _ring_us(self, link: LinkSpec, nbytes: float, *, num_passes: int) -> float:
        hops = num_passes * (self.num_ranks - 1)
        return link.ring_us(hops, nbytes * hops / self.num_ranks) if hops else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Hosts of `ranks_per_host` consecutive ranks."""

    world_size: int
    ranks_per_host: int
    inner: Link
    """Between two ranks of one host."""
    outer: Link
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
        return LinkedAxis(num_ranks, _joined(self.inner, self.outer, together))


def _joined(inner: Link, outer: Link, together: int) -> Link:
    """The links of a ring in which `together` consecutive ranks are on a host."""
    if isinstance(inner, CollectiveLinks) or isinstance(outer, CollectiveLinks):
        return CollectiveLinks(
            all_gather=_joined_spec(inner.all_gather, outer.all_gather, together),
            reduce_scatter=_joined_spec(inner.reduce_scatter, outer.reduce_scatter, together),
            all_reduce=_joined_spec(inner.all_reduce, outer.all_reduce, together),
        )
    return _joined_spec(inner, outer, together)


def _joined_spec(inner: LinkSpec, outer: LinkSpec, together: int) -> LinkSpec:
    return LinkSpec(
        launch_us=max(inner.launch_us, outer.launch_us),
        latency_us=((together - 1) * inner.latency_us + outer.latency_us) / together,
        bandwidth_gb_per_s=min(inner.bandwidth_gb_per_s, together * outer.bandwidth_gb_per_s),
    )
