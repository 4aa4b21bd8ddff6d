"""
Checks that this machine can launch ranks and communicate exactly, independent of any implementation.

Inputs are small integers that encode their rank and position, so every result is known in advance, whatever the order
in which a backend adds. A wrong element shows which rank is missing or misplaced.
"""

from __future__ import annotations

import time
import unittest
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import distributed

from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.harness.testcase import ShardedTrainingTestCase
from fsdp_conformance.outcome.endings import attribute
from fsdp_conformance.outcome.records import RankExit, RankReport

#: Elements per rank: odd, so that nothing is aligned by chance.
NUMEL = 13

#: The collectives that sharded training is made of.
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectivesChecked:
    """The results of one launch."""

    world_size: int
    seconds: float
    """The time from the start of the ranks to their end."""
    rendezvous: str = ""
    """The reason why the ranks did not find each other; empty if they did."""
    wrong: dict[str, str] = field(default_factory=dict)
    """Operation to its first wrong element; empty if all were exact."""


class ExactCollectives(ShardedTrainingTestCase):
    """One launch; device type, world size and sharing come from the payload, which every rank gets."""

    case_timeout_s = 30.0
    reports: Sequence[RankReport | None] = ()
    failure: str = ""

    @property
    def world_size(self) -> int:
        world_size: int = self.launch_payload[1]
        return world_size

    def setUp(self) -> None:
        super().setUp()
        self.device_type, _, self.share_devices = self.launch_payload
        self._spawn_processes()

    def init_rank(self) -> None:
        self.device_type = self.launch_payload[0]
        super().init_rank()
        self.start_process_group()
        self.report.measurements["met"] = True

    def conclude(self, reports: Sequence[RankReport | None], exits: Sequence[RankExit]) -> None:
        """Keep the reports: the caller judges."""
        self.reports = reports
        attribution = attribute(reports, exits)
        self.failure = attribution.headline if attribution.first is not None else ""

    def collectives(self) -> None:
        """Run each operation, and report wrong elements."""
        self.report.measurements["wrong"] = wrong_collectives(self.rank, self.world_size, self.device)


def wrong_collectives(rank: int, world_size: int, device: torch.device) -> dict[str, str]:
    """Operation to its first wrong element, on this rank; empty if all are exact. Collective."""
    ranks = range(world_size)
    gathered = torch.empty(world_size * NUMEL, device=device)
    distributed.all_gather_into_tensor(gathered, _coded(rank, NUMEL, device))
    scattered = torch.empty(NUMEL, device=device)
    distributed.reduce_scatter_tensor(scattered, _coded(rank, world_size * NUMEL, device))
    reduced = _coded(rank, NUMEL, device)
    distributed.all_reduce(reduced)
    summed = torch.stack([_coded(peer, world_size * NUMEL, device) for peer in ranks]).sum(0)
    expected = {
        "all_gather": torch.cat([_coded(peer, NUMEL, device) for peer in ranks]),
        "reduce_scatter": summed[rank * NUMEL : (rank + 1) * NUMEL],
        "all_reduce": summed[:NUMEL],
    }
    got = {"all_gather": gathered, "reduce_scatter": scattered, "all_reduce": reduced}
    return {
        name: first_wrong(got[name], expected[name])
        for name in OPERATIONS
        if not torch.equal(got[name], expected[name])
    }


def first_wrong(got: torch.Tensor, expected: torch.Tensor) -> str:
    """The first element that differs, as text."""
    index = int((got != expected).nonzero()[0])
    return f"element {index}: expected {expected[index].item():g}, got {got[index].item():g}"


def check_collectives(
    device_type: str, world_size: int, *, shared: bool = False, kind: type[ExactCollectives] = ExactCollectives
) -> CollectivesChecked:
    """
    Launch that many ranks, which share devices with `shared`, let them communicate, and return the results.

    Raises EnvironmentUnavailable if they could not be launched.
    """
    case = kind("collectives")
    case.launch_payload = (device_type, world_size, shared)
    result = unittest.TestResult()
    began = time.monotonic()
    case.run(result)  # type: ignore[no-untyped-call]
    seconds = time.monotonic() - began
    error_texts = [text for _, text in [*result.errors, *result.failures]]
    if error_texts:
        raise EnvironmentUnavailable(
            f"{world_size} ranks cannot be launched: {error_texts[0].strip().splitlines()[-1]}"
        )
    reports = [report for report in case.reports if report is not None]
    if case.failure and not any(report.measurements.get("met") for report in reports):
        return CollectivesChecked(world_size=world_size, seconds=seconds, rendezvous=case.failure)
    wrong: dict[str, str] = {}
    for report in reports:
        for name, text in report.measurements.get("wrong", {}).items():
            wrong.setdefault(name, f"on rank {report.rank} {text}")
    if case.failure and not wrong:
        wrong["all"] = case.failure
    return CollectivesChecked(world_size=world_size, seconds=seconds, wrong=wrong)


def _coded(rank: int, numel: int, device: torch.device) -> torch.Tensor:
    """Integers that encode their rank and position. Sums of a thousand of them are exact in float32."""
    return torch.arange(numel, dtype=torch.float32, device=device) + 1024 * (rank + 1)
