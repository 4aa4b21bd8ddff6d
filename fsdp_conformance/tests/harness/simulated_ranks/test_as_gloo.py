"""Every call of the sweep on simulated ranks gives what gloo gives, or raises where gloo raises."""

from __future__ import annotations

import unittest
from collections import Counter
from pathlib import Path

import pytest
import torch

from fsdp_conformance.tests.harness.simulated_ranks.sweep import (
    SIZE,
    Call,
    Outcome,
    calls,
    difference,
    make_groups,
    outcome,
)
from fsdp_conformance.tests.harness.simulated_ranks.sweep_of_mistakes import UNUSUAL, WRONG
from fsdp_conformance.tests.harness.started_ranks import StartedRanks


def everything() -> dict[str, Call]:
    """By name."""
    return {**calls(), **UNUSUAL, **WRONG}


class Sweep(StartedRanks):
    """Every call on three ranks, whose outcomes go into files. Not collected."""

    __test__ = False
    world_size = SIZE
    case_timeout_s = 300.0

    def make_calls(self) -> None:
        me = make_groups(self.rank)
        outcomes = {name: outcome(call, me) for name, call in everything().items()}
        torch.save(outcomes, Path(self.launch_payload) / f"{self.rank}.pt")


def outcomes_in(directory: Path, *, simulated: bool) -> list[dict[str, Outcome]]:
    """By rank."""
    directory.mkdir()
    case = Sweep("make_calls")
    case.simulated_ranks = simulated
    case.launch_payload = str(directory)
    result = unittest.TestResult()
    case.run(result)
    assert result.wasSuccessful(), [*result.errors, *result.failures]
    return [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(SIZE)]


@pytest.mark.nightly
@pytest.mark.slow
def test_every_call_does_what_it_does_on_gloo(tmp_path: Path) -> None:
    """The same values to the last bit, or an exception that the same `except` catches, on every rank."""
    on_gloo = outcomes_in(tmp_path / "gloo", simulated=False)
    between_threads = outcomes_in(tmp_path / "simulated", simulated=True)

    unlike = [
        f"{name}, rank {rank}: {text}"
        for rank, (expected, got) in enumerate(zip(on_gloo, between_threads, strict=True))
        for name in everything()
        if (text := difference(expected[name], got[name]))
    ]
    assert [] == unlike, "\n".join(unlike)
    # Nothing is compared where everything raises, or nothing has a value.
    raised = Counter("raised" in each for one in on_gloo for each in one.values())
    assert min(raised[True], raised[False]) > 500
