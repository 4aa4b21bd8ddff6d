"""A link is recovered from timings: synthetic ones, and those of two gloo ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.planner.link_fit import SIZES_BYTES, Timing, fit_link, measure
from fsdp_conformance.planner.link_spec import LinkSpec
from fsdp_conformance.tests.adapters.adapter_ranks import RankTestCase


def timings_of(link: LinkSpec, *, num_ranks: int = 4, factors: tuple[float, ...] = (1.0,)) -> list[Timing]:
    """The times of all-gathers and all-reduces on a link, each multiplied by the next of `factors`."""
    timings = []
    for number, nbytes in enumerate(SIZES_BYTES):
        for passes in (1, 2):
            hops = passes * (num_ranks - 1)
            sent = nbytes * hops / num_ranks
            us = link.launch_us + hops * link.latency_us + link.wire_us(sent)
            timings.append(Timing(hops, sent, us * factors[(2 * number + passes) % len(factors)]))
    return timings


@pytest.mark.parametrize(
    "link",
    [
        LinkSpec(launch_us=8.4, latency_us=3.4, bandwidth_gb_per_s=450.0),
        LinkSpec(launch_us=30.0, latency_us=50.0, bandwidth_gb_per_s=1.25),
        LinkSpec(launch_us=0.0, latency_us=50.0, bandwidth_gb_per_s=1.25),
        LinkSpec(launch_us=30.0, latency_us=0.0, bandwidth_gb_per_s=1.25),
    ],
    ids=str,
)
def test_exact_timings_give_the_link_back(link: LinkSpec) -> None:
    """Without noise the fit is the link and its error is 0, even if a part of the link is 0."""
    fit = fit_link(timings_of(link))

    assert fit.link.launch_us == pytest.approx(link.launch_us, abs=1e-6)
    assert fit.link.latency_us == pytest.approx(link.latency_us, abs=1e-6)
    assert fit.link.bandwidth_gb_per_s == pytest.approx(link.bandwidth_gb_per_s)
    assert fit.relative_error == pytest.approx(0.0, abs=1e-6)


def test_noise_is_reported() -> None:
    """Timings that are off by a tenth, up and down, give an error of about a tenth, also in the bandwidth."""
    link = LinkSpec(launch_us=8.4, latency_us=3.4, bandwidth_gb_per_s=450.0)
    fit = fit_link(timings_of(link, factors=(0.9, 1.1, 1.1, 0.9)))

    assert 0.05 < fit.relative_error < 0.15
    assert fit.link.bandwidth_gb_per_s == pytest.approx(450.0, rel=0.15)


def test_nothing_is_negative() -> None:
    """Timings that decrease with the number of hops still give a link."""
    falling = [Timing(hops, 1000.0 * size, 100.0 / hops + size) for hops in (1, 2) for size in (1, 4, 16)]
    link = fit_link(falling).link

    assert link.latency_us == 0.0
    assert link.launch_us > 0
    assert link.bandwidth_gb_per_s > 0


def test_too_little_is_refused() -> None:
    """Two timings cannot determine three unknowns, and a timing must be positive."""
    with pytest.raises(
        ConfigError, match=r"timings must be positive, got 0\.0 us.*at least 3 timings are needed for 3 unknowns, got 2"
    ):
        fit_link([Timing(1, 10.0, 5.0), Timing(2, 20.0, 0.0)])


class Measurements(RankTestCase):
    """On two ranks of gloo."""

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_measure(self) -> None:
        """Both ranks get the same links, of positive bandwidth, each fitted to one timing of each size."""
        fit = measure((init_device_mesh("cpu", (2,)), 0))
        everyone: list[object] = [None, None]
        dist.all_gather_object(everyone, fit)

        self.assertEqual(everyone[0], everyone[1])
        for each, hops in ((fit.all_gather, 1), (fit.reduce_scatter, 1), (fit.all_reduce, 2)):
            self.assertEqual([hops] * len(SIZES_BYTES), [timing.hops for timing in each.timings])
            self.assertGreater(each.link.bandwidth_gb_per_s, 0)
            self.assertGreaterEqual(min(each.link.latency_us, each.link.launch_us, each.relative_error), 0)
        self.assertEqual(fit.links.reduce_scatter, fit.reduce_scatter.link)

    @pytest.mark.nightly
    def test_one_rank_has_no_link(self) -> None:
        """An axis of one rank is rejected by name, and so is a mesh without axes."""
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        with self.assertRaisesRegex(ConfigError, "axis 'shard' must have at least 2 ranks, got 1"):
            measure((mesh, "replicate"), (mesh, "shard"))
        with self.assertRaisesRegex(ConfigError, "at least one axis is needed"):
            measure()
        self.assertEqual(2, torch.distributed.get_world_size(mesh.get_group("replicate")))


class FourRanks(RankTestCase):
    """A mesh with two axes."""

    @property
    def world_size(self) -> int:
        return 4

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_all_ranks_agree(self) -> None:
        """Rows and columns have other timings; the slowest of all counts."""
        mesh = init_device_mesh("cpu", (2, 2))
        fit = measure((mesh, 0), (mesh, 1))
        everyone: list[object] = [None] * 4
        dist.all_gather_object(everyone, fit)

        self.assertEqual([fit] * 4, everyone)
        self.assertEqual(2 * len(SIZES_BYTES), len(fit.all_reduce.timings))
