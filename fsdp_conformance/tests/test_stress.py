"""The strikes of a run are added up over its ranks and cases."""

from __future__ import annotations

from typing import Any

from fsdp_conformance import stress
from fsdp_conformance.outcome.records import CaseRecord, RankExit
from fsdp_conformance.stress import MEASUREMENT, Provocation
from fsdp_conformance.verdict import Verdict


def _record(counts: Any, *, ranks: int = 2, reported: int | None = None) -> CaseRecord:
    reported = ranks if reported is None else reported
    return CaseRecord(
        case="R001/exact-probe-ws2",
        requirements=["R001"],
        chapter="A",
        verdict=Verdict.PASS,
        measurements={} if counts is None else {MEASUREMENT: counts},
        exits=[RankExit(rank=rank, pid=1, exitcode=0, time=0.0, reported=rank < reported) for rank in range(ranks)],
    )


def test_ranks_that_agree_and_ranks_that_differ() -> None:
    """A single set of counts stands for every rank that reported."""
    records = [
        _record({"late completion": 3, "slow rank": 0}),
        _record({"rank 0": {"late completion": 1}, "rank 1": {"slow rank": 2}}),
        _record({"late completion": 10}, ranks=3, reported=1),
        _record(None),
        _record("edited"),
    ]

    strikes = stress.strikes_of(records)

    assert strikes == {name: {Provocation.LATE: 17, Provocation.SLOW: 2}.get(name, 0) for name in Provocation}
    assert stress.in_words(strikes) == (
        "late completion 17 times, slow rank 2 times; never struck: completion out of order, poisoned output, "
        "input read late, freed memory poisoned, new memory poisoned"
    )


def test_nothing_struck() -> None:
    """The result states that the cases never reached an engine."""
    assert stress.in_words(stress.strikes_of([])).startswith("nothing struck; never struck: late completion, ")


def test_everything_struck() -> None:
    """No provocation is named as silent."""
    assert "never" not in stress.in_words(dict.fromkeys(Provocation, 1))
