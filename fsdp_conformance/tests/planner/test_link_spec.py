"""Links as data, and the ring of every group of regularly spaced ranks of a cluster."""

from __future__ import annotations

import math

import pytest

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.planner.device_spec import DEVICES, DeviceSpec
from fsdp_conformance.planner.link_spec import LINKS, Cluster, CollectiveLinks, LinkedAxis, LinkSpec

LINK = LinkSpec(launch_us=5.0, latency_us=2.0, bandwidth_gb_per_s=10.0)
INNER = LinkSpec(launch_us=5.0, latency_us=1.0, bandwidth_gb_per_s=300.0)
OUTER = LinkSpec(launch_us=7.0, latency_us=9.0, bandwidth_gb_per_s=50.0)


def cluster(world_size: int = 32, ranks_per_host: int = 8) -> Cluster:
    return Cluster(world_size=world_size, ranks_per_host=ranks_per_host, inner=INNER, outer=OUTER)


def test_the_ring_formulas() -> None:
    """
    Four ranks, 40,000 bytes at 10,000 bytes per microsecond: three hops of 2 us, 30,000 bytes in 3 us, a start-up of 5;
    an all-reduce has six hops and 60,000 bytes.
    """
    axis = LinkedAxis(4, LINK)

    assert axis.all_gather_us(40_000) == 5 + 3 * 2 + 3
    assert axis.reduce_scatter_us(40_000) == axis.all_gather_us(40_000)
    assert axis.all_to_all_us(40_000) == axis.all_gather_us(40_000)
    assert axis.all_reduce_us(40_000) == 5 + 6 * 2 + 6


def test_each_collective_may_have_a_link_of_its_own() -> None:
    """This also holds on a ring that spans hosts, where only one of the two links has an override."""
    slow = LinkSpec(launch_us=100.0, latency_us=2.0, bandwidth_gb_per_s=5.0)
    links = CollectiveLinks(all_gather=LINK, reduce_scatter=slow, all_reduce=INNER)
    axis = LinkedAxis(4, links)
    spanning = Cluster(world_size=4, ranks_per_host=2, inner=links, outer=OUTER).axis(4)

    assert axis.all_gather_us(40_000) == axis.all_to_all_us(40_000) == LinkedAxis(4, LINK).all_gather_us(40_000)
    assert axis.reduce_scatter_us(40_000) == 100 + 3 * 2 + 6
    assert axis.all_reduce_us(40_000) == LinkedAxis(4, INNER).all_reduce_us(40_000)
    joined = LinkSpec(launch_us=100.0, latency_us=(2.0 + 9.0) / 2, bandwidth_gb_per_s=5.0)
    assert spanning.link.reduce_scatter == joined
    assert spanning.link.all_reduce.launch_us == 7.0


def test_one_rank_communicates_nothing() -> None:
    """An axis of one rank costs nothing, not even a start-up."""
    axis = LinkedAxis(1, LINK)

    costs = (axis.all_gather_us, axis.reduce_scatter_us, axis.all_reduce_us, axis.all_to_all_us)
    assert [cost(40_000) for cost in costs] == [0.0] * 4


def test_a_message() -> None:
    """A message costs a start-up, a latency and its bytes; without bytes there is no message."""
    assert LINK.message_us(20_000) == 5 + 2 + 2
    assert LINK.message_us(0) == 0.0


def test_a_group_within_a_host_is_on_the_inner_link() -> None:
    """Ranks 0 to 7, or 0, 2, 4 and 6, of a host of eight."""
    assert cluster().axis(8) == LinkedAxis(8, INNER)
    assert cluster().axis(4, stride=2) == LinkedAxis(4, INNER)


def test_a_group_with_one_rank_of_each_host_is_on_the_outer_link() -> None:
    """Ranks 0, 8, 16 and 24."""
    assert cluster().axis(4, stride=8) == LinkedAxis(4, OUTER)


def test_a_group_that_spans_hosts_crosses_once_for_each_host() -> None:
    """
    Seven of eight hops are inside a host. The adapters of all eight ranks carry one ring's bytes, 8 x 50 GB/s. Those
    of two consecutive ranks carry 2 x 50.
    """
    whole, pairs = cluster().axis(32).link, cluster().axis(8, stride=4).link

    assert whole == LinkSpec(launch_us=7.0, latency_us=(7 * 1.0 + 9.0) / 8, bandwidth_gb_per_s=300.0)
    assert pairs == LinkSpec(launch_us=7.0, latency_us=(1.0 + 9.0) / 2, bandwidth_gb_per_s=100.0)


def test_a_group_that_does_not_divide_a_host() -> None:
    """One group of three has ranks 6, 7 and 8; each group of twelve has four ranks on one of its hosts."""
    threes, twelves = cluster(24).axis(3), cluster(24).axis(12)

    assert threes == LinkedAxis(3, OUTER)
    assert twelves.link.all_gather.bandwidth_gb_per_s == 4 * 50.0
    assert cluster(6).axis(3) == LinkedAxis(3, INNER)


def test_what_is_out_of_range_is_said_at_once() -> None:
    """One error lists all wrong numbers."""
    with pytest.raises(ConfigError) as caught:
        LinkSpec(launch_us=-1.0, latency_us=math.nan, bandwidth_gb_per_s=0.0)

    assert [problem.partition(" must be ")[0] for problem in caught.value.problems] == [
        "latency_us",
        "bandwidth_gb_per_s",
        "launch_us",
    ]


def test_a_cluster_has_full_hosts() -> None:
    """Twelve ranks do not fill hosts of eight; six are one host that is partly full."""
    with pytest.raises(ConfigError, match="ranks_per_host must be a factor of world_size=12, got 8"):
        cluster(12)
    with pytest.raises(
        ConfigError, match=r"world_size must be at least 1, got 0.*ranks_per_host must be at least 1, got 0"
    ):
        cluster(0, 0)

    assert cluster(6).axis(6) == LinkedAxis(6, INNER)


def test_an_axis_has_ranks() -> None:
    """An axis without ranks is rejected."""
    with pytest.raises(ConfigError, match="num_ranks must be at least 1, got 0"):
        LinkedAxis(0, LINK)


def test_a_device_computes_something() -> None:
    """A device without operations, memory or bandwidth is rejected, with every problem."""
    with pytest.raises(ConfigError) as caught:
        DeviceSpec(
            tflops_16_bit=0.0, tflops_32_bit=1.0, memory_gib=-1.0, memory_gb_per_s=1.0, host_link=LINK,
            host_memory_gb_per_s=0.0,
        )  # fmt: skip

    assert len(caught.value.problems) == 3


def test_the_named_ones_are_in_order() -> None:
    """Nearer links are faster, and a device computes faster in 16 bits."""
    speeds = [LINKS[name].bandwidth_gb_per_s for name in ("ethernet", "ib", "pcie", "nvlink")]

    assert speeds == sorted(speeds)
    assert all(device.tflops(2) > device.tflops(4) for device in DEVICES.values())
