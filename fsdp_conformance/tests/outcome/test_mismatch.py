"""Ranks that wait in different collectives are named, with both calls."""

from __future__ import annotations

from fsdp_conformance.outcome.mismatch import differing_calls
from fsdp_conformance.outcome.records import RankExit


def _exit(rank: int, *lines: str) -> RankExit:
    return RankExit(rank=rank, pid=1, exitcode=None, time=0.0, reported=False, last_collectives=list(lines))


def test_two_calls_in_one_group() -> None:
    """Calls that have returned are not evidence; the first one that has not is."""
    text = differing_calls(
        [
            _exit(
                0,
                "#3 closed barrier [0,1] at engine.py:7 in setup",
                "#4 issued all_gather 96B float32 [0,1] at engine.py:21 in unshard (forward, step 0)",
            ),
            _exit(1, "#4 issued all_reduce 96B float32 SUM [0,1] at engine.py:33 in reduce (backward, step 0)"),
        ]
    )

    assert text == (
        "call 4 of group [0,1] differs between ranks: "
        "rank 0 called all_gather 96B float32 at engine.py:21 in unshard, "
        "rank 1 called all_reduce 96B float32 SUM at engine.py:33 in reduce"
    )


def test_calls_that_ended_with_their_deadline() -> None:
    """The last of each rank, if it has the same number; a rank that has left one out called nothing else."""
    gather, reduce, barrier = "all_gather 96B float32 [0,1]", "all_reduce 96B float32 SUM [0,1]", "barrier [0,1]"

    assert differing_calls([_exit(0, f"#4 closed {gather}"), _exit(1, f"#4 closed {reduce}")])
    assert differing_calls([_exit(0, f"#4 issued {gather}"), _exit(1, f"#4 closed {reduce}")])
    assert not differing_calls(
        [_exit(0, f"#3 closed {barrier}", f"#4 closed {gather}"), _exit(1, f"#3 closed {barrier}")]
    )


def test_calls_that_the_backend_has_paired() -> None:
    """Of equal size and another type: both return, and the ranks hang in the next one. The first difference counts."""
    engine = "#28 closed all_reduce 12B float32 SUM [0,1] at engine.py:15 in step (step, step 1)"
    suite = "#28 closed all_reduce 12B int32 MAX [0,1] at gathering.py:103 in _agree (observe, step 1)"
    later = "#29 issued all_gather 280B float32 [0,1] at sharded.py:33 in full_copy"

    text = differing_calls([_exit(0, engine, suite.replace("#28", "#29")), _exit(1, suite, later)])

    assert text == (
        "call 28 of group [0,1] differs between ranks: "
        "rank 0 called all_reduce 12B float32 SUM at engine.py:15 in step, "
        "rank 1 called all_reduce 12B int32 MAX at gathering.py:103 in _agree"
    )


def test_sizes_that_differ() -> None:
    """They must be equal in a reduction, and need not be in a gather; sends meet receives."""
    large, small = (
        "#3 issued all_reduce 20000B float32 SUM [0,1] at a.py:1 in f",
        "#3 issued all_reduce 12B float32 SUM [0,1]",
    )

    assert "20000B" in differing_calls([_exit(0, large), _exit(1, small)])
    assert not differing_calls(
        [_exit(0, "#3 closed all_gather 8B float32 [0,1]"), _exit(1, "#3 closed all_gather 4B float32 [0,1]")]
    )
    assert not differing_calls(
        [_exit(0, "#3 closed send 8B float32 [0,1]"), _exit(1, "#3 closed recv 8B float32 [0,1]")]
    )


def test_same_calls_and_other_groups() -> None:
    """Equal calls, calls in different groups, and a rank that has issued nothing are not a mismatch."""
    same = "#4 issued all_gather 96B float32 [0,1] at engine.py:21 in unshard (forward, step 0)"

    assert differing_calls([_exit(0, same), _exit(1, same)]) == ""
    assert differing_calls([_exit(0, same), _exit(1, "#2 issued barrier [1] at engine.py:9 in own")]) == ""
    assert differing_calls([_exit(0, same), _exit(1)]) == ""
