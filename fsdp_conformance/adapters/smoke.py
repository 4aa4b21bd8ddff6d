"""
An adapter at work on two ranks, before anybody judges the implementation behind it.

A small model of odd sizes is set up, read, trained for two steps, and read again. What goes wrong is said about the
adapter, and all of it at once: a name that is missing, a shard where the full tensor was asked, live storage where a
clone was asked, a step that steps nothing.

    smoke          the controller's side: ranks are started, their results merged
    smoke_rank     a rank's side: one dict for each of CHECKS
"""

from __future__ import annotations

import unittest
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fsdp_conformance.adapters import registry
from fsdp_conformance.adapters.smoke_checks import CHECKS, SmokeRun
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.harness.testcase import ShardedTrainingTestCase
from fsdp_conformance.judge.endings import attribute
from fsdp_conformance.outcome import RankExit, RankReport


@dataclass(frozen=True, kw_only=True, slots=True)
class SmokeResult:
    """What one check found, over all ranks."""

    check: str
    title: str
    problems: tuple[str, ...] = ()
    not_run: str = ""
    """Why it was not run; empty if it was."""

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return asdict(self) | {"problems": list(self.problems)}


def smoke(spec: str, *, world_size: int = 2, device: str = "cpu", timeout_s: float = 60.0) -> list[SmokeResult]:
    """
    The results of CHECKS for an adapter, from `world_size` fresh ranks.

    Raises AdapterNotFound or AdapterError where it cannot even be loaded.
    """
    description = registry.describe_once(spec)
    case = _SmokeCase("test_adapter")
    case.device_type = device
    case.case_timeout_s = timeout_s
    case.launch_payload = _Order(spec=spec, world_size=world_size, device=device)
    case.preload = description.preload
    case.rank_environment = case.preload_environment = dict(description.environment)
    outcome = unittest.TestResult()
    unittest.TestSuite([case]).run(outcome)
    said = [text for _, text in [*outcome.errors, *outcome.failures]]
    if case.reports is None or said:
        raise SuiteError("the smoke run could not be started:\n" + "\n".join(said))
    return merge(case.reports, case.exits)


def merge(reports: Sequence[RankReport | None], exits: Sequence[RankExit]) -> list[SmokeResult]:
    """
    One result for each check; a problem that not every rank has says whose it is.

    How the ranks ended, if not well, is a problem of the first check that no rank has finished.
    """
    said = {
        report.rank: {result["check"]: result for result in report.measurements.get("smoke", ())}
        for report in reports
        if report is not None
    }
    end = attribute(reports, exits)
    ended = False
    results = []
    for check, title in CHECKS.items():
        mine = {rank: checks[check] for rank, checks in said.items() if check in checks}
        problems = [
            problem if len(ranks) == len(reports) else f"{problem} [rank {', '.join(map(str, ranks))}]"
            for problem, ranks in _by_problem(mine).items()
        ]
        not_run = next((result["not_run"] for result in mine.values() if result["not_run"]), "")
        done = any(result["done"] for result in mine.values())
        if ended:
            not_run = "the ranks had ended"
        elif not done and end.first is not None:
            # First: what the others say of it ("connection closed by peer") follows from it.
            problems.insert(0, end.headline)
            ended = True
        results.append(SmokeResult(check=check, title=title, problems=tuple(problems), not_run=not_run))
    return results


def _by_problem(results: Mapping[int, Mapping[str, Any]]) -> dict[str, list[int]]:
    """Each problem with the ranks that have it."""
    found: dict[str, list[int]] = {}
    for rank, result in results.items():
        for problem in result["problems"]:
            found.setdefault(problem, []).append(rank)
    return found


def smoke_rank(
    spec: str, *, rank: int, world_size: int, device: str = "cpu", results: list[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """
    Run CHECKS in a rank whose default process group is up: a dict of check, title, problems, not_run
    and done for each.

    Exceptions of the adapter become problems. `results` is filled as checks end: they are known if the ranks part.
    """
    results = [] if results is None else results
    SmokeRun(adapter=registry.load(spec), rank=rank, world_size=world_size, device=device).run(results)
    return results


@dataclass(frozen=True, slots=True)
class _Order:
    spec: str
    world_size: int
    device: str


class _SmokeCase(ShardedTrainingTestCase):
    """The ranks of a smoke run; not collected by anybody."""

    reports: Sequence[RankReport | None] | None = None
    exits: Sequence[RankExit] = ()

    @property
    def world_size(self) -> int:
        return int(self.launch_payload.world_size)

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def conclude(self, reports: Sequence[RankReport | None], exits: Sequence[RankExit]) -> None:
        self.reports, self.exits = reports, exits

    def init_rank(self) -> None:
        super().init_rank()
        process_group.register_recording_backend(self.device_type)
        self.start_process_group(process_group.BACKEND)

    def test_adapter(self) -> None:
        """Runs in a rank."""
        order: _Order = self.launch_payload
        results: list[dict[str, Any]] = []
        self.report.measurements["smoke"] = results
        smoke_rank(order.spec, rank=self.rank, world_size=order.world_size, device=order.device, results=results)
