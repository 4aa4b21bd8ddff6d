"""Devices that wait for each other: whoever sends while the other one sends, too, and calls in crossed orders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_conformance.simulator.collectives.agreement import Agreement, CollectiveMismatch
from fsdp_conformance.simulator.collectives.calls import Call, Channel, IssuedCall
from fsdp_conformance.simulator.collectives.device_order import device_deadlocks
from fsdp_conformance.simulator.collectives.disagreement import DisagreementKind
from fsdp_conformance.simulator.frames import Frame

#: A call in one word: "s1" sends to rank 1, "r1" receives from it, "a" is a collective of all ranks, "b" one of another
#: group of all ranks, "c01" one of a group of ranks 0 and 1. "&": does not wait for what comes before it. Capital
#: letters: within a batch, which "." ends.
Program = str


@pytest.fixture(name="ranks")
def _ranks(tmp_path: Path) -> Iterator[list[Agreement]]:
    made = [Agreement(tmp_path, rank, 2) for rank in range(2)]
    yield made
    for one in made:
        one.close()


def _message(op: str, rank: int, peer: int, *, batched: bool = False, group: str = "0", tag: int = 0) -> Call:
    pair = (rank, peer) if op == "send" else (peer, rank)
    return Call(
        channel=Channel(group=group, ranks=(0, 1), device="sim", pair=pair),
        title="the default group",
        op=op,
        dtypes=("float32",),
        numels=(4,),
        words=f"{op}(4 float32) from rank {pair[0]} to rank {pair[1]}",
        place=Frame(file="/src/train.py", line=10 + rank, function="step"),
        tag=tag,
        is_paired=not batched,
    )


def _collective(group: str, ranks: tuple[int, ...], device: str = "sim") -> Call:
    return Call(
        channel=Channel(group=group, ranks=ranks, device=device), title=group, op="all_reduce", words="all_reduce()"
    )


def _log(program: Program, rank: int, world_size: int) -> list[IssuedCall]:
    log, number = [], 0
    for word in program.split():
        kind, waits_for = word.lstrip("&"), 0 if word.startswith("&") else number
        if kind[0].lower() in "sr":
            op = {"s": "send", "r": "recv"}[kind[0].lower()]
            call = _message(op, rank, int(kind[1]), batched=kind[0].isupper())
        elif kind[0] == "c":
            call = _collective(kind, tuple(map(int, kind[1:])))
        else:
            call = _collective({"a": "0"}.get(kind, kind), tuple(range(world_size)), "cpu" if kind == "h" else "sim")
        log.append(IssuedCall(call, number, waits_for))
        # The calls of a batch have one number; a dot ends it.
        number += not (kind[0].isupper() and not kind.endswith("."))
    return log


def _circles(*programs: Program) -> list[dict[int, str]]:
    logs = [_log(program, rank, len(programs)) for rank, program in enumerate(programs)]
    return [{rank: call.op for rank, call in circle.items()} for circle in device_deadlocks(logs)]


@pytest.mark.parametrize(
    "programs",
    [
        ("s1 r1", "r0 s0"),
        ("s1 r1 s1 r1", "r0 s0 r0 s0"),
        ("S1 R1.", "S0 R0."),
        ("S1 R1.", "R0 S0."),
        ("S1 S1 R1 R1.", "R0 R0 S0 S0."),
        ("s1 r1 S1 R1.", "r0 s0 S0 R0."),
        # The receive is posted ahead, on the communicator of its two ranks.
        ("a s1", "&r0 &a"),
        ("a b", "a b"),
        # Two groups, neither of which waits for the other on rank 1.
        ("a b", "&b &a"),
        # A ring of three: each sends to the next one and does not wait.
        ("&s1 &r2", "&s2 &r0", "&s0 &r1"),
        ("s1 r2", "r0 s2", "r1 s0"),
        ("S1 R2.", "S2 R0.", "S0 R1."),
        # A call that a rank has not made holds up no other one.
        ("a s1", "r0"),
        ("c01 a", "c01 a", "a"),
        # The host waits for gloo.
        ("h s1", "r0 h"),
        ("", ""),
    ],
    ids=" | ".join,
)
def test_calls_that_every_device_can_run(programs: tuple[Program, ...]) -> None:
    assert not _circles(*programs)


@pytest.mark.parametrize(
    ("programs", "circles"),
    [
        (("s1 r1", "s0 r0"), [{0: "send", 1: "send"}]),
        # On one communicator they come in order, whether or not a stream waits.
        (("&s1 &r1", "&s0 &r0"), [{0: "send", 1: "send"}]),
        (("s1 r1 s1 r1", "r0 s0 s0 r0"), [{0: "send", 1: "send"}]),
        (("a s1", "r0 a"), [{0: "all_reduce", 1: "recv"}]),
        (("&a &S1.", "&R0. &a"), [{0: "all_reduce", 1: "recv"}]),
        (("a b", "b a"), [{0: "all_reduce", 1: "all_reduce"}]),
        # No two ranks share two calls.
        (("s1 r2", "s2 r0", "s0 r1"), [{0: "send", 1: "send", 2: "send"}]),
        (("c01 c02", "c12 c01", "c02 c12"), [{0: "all_reduce", 1: "all_reduce", 2: "all_reduce"}]),
        # Only two of three; the third waits for them.
        (("a s1", "a s2", "r1 a"), [{1: "all_reduce", 2: "recv"}]),
        (("s1 r1 a s1 r1", "s0 r0 a s0 r0"), [{0: "send", 1: "send"}] * 2),
    ],
    ids=str,
)
def test_calls_that_wait_for_each_other(programs: tuple[Program, ...], circles: list[dict[int, str]]) -> None:
    assert _circles(*programs) == circles


def test_long_programs_end() -> None:
    programs = ["a s1 &b R1 S1. " * 500, "a r0 &b S0 R0. " * 500]

    assert not _circles(*programs)


def _run(ranks: Sequence[Agreement], programs: Sequence[Program]) -> list[DisagreementKind]:
    """The kinds of findings, when rank 1 is the last one to end."""
    for rank, program in enumerate(programs):
        for issued in _log(program, rank, len(programs)):
            ranks[rank].check(issued.call, issued.number, issued.waits_for)
    for one in ranks:
        one.end()
    return [one.kind for rank in ranks for one in rank.disagreements]


def test_two_that_send_first_are_reported_once(ranks: list[Agreement]) -> None:
    assert _run(ranks, ["s1 r1 s1 r1", "s0 r0 s0 r0"]) == [DisagreementKind.BOTH_SEND]
    (finding,) = ranks[1].disagreements
    assert finding.sentence() == (
        "ranks 0 and 1 both send before they receive: rank 0 calls send(4 float32) from rank 0 to rank 1 on the "
        "default group at /src/train.py:10 in step, rank 1 calls send(4 float32) from rank 1 to rank 0 on the "
        "default group at /src/train.py:11 in step"
    )


def test_a_message_against_a_collective(ranks: list[Agreement]) -> None:
    assert _run(ranks, ["a s1", "r0 a"]) == [DisagreementKind.DEVICE_DEADLOCK]
    (finding,) = ranks[1].disagreements
    assert finding.sentence() == (
        "the devices of ranks 0, 1 wait for each other, each in a call that others make later: rank 0 runs "
        "all_reduce() on 0; rank 1 runs recv(4 float32) from rank 0 to rank 1 on the default group at "
        "/src/train.py:11 in step"
    )
    assert "On a GPU they hang" in finding.explain()


def test_two_communicators_in_two_orders_are_one_finding(ranks: list[Agreement]) -> None:
    # By whichever rank sees it, which may be both.
    assert set(_run(ranks, ["a b", "b a"])) == {DisagreementKind.ORDER}


def test_a_script_that_fails_is_judged_as_far_as_it_came(ranks: list[Agreement]) -> None:
    for rank, program in enumerate(["s1 r1", "s0 r0"]):
        for issued in _log(program, rank, 2):
            ranks[rank].check(issued.call, issued.number, issued.waits_for)

    ranks[0].compare_devices()

    assert [one.kind for one in ranks[0].disagreements] == [DisagreementKind.BOTH_SEND]


def test_tags_are_compared(ranks: list[Agreement]) -> None:
    for first, second, tags in ((1, 1, []), (1, 2, [DisagreementKind.TAGS])):
        ranks[0].check(_message("send", 0, 1, tag=first))
        ranks[1].check(_message("recv", 1, 0, tag=second))
        assert [one.kind for one in ranks[1].disagreements] == tags
    assert "NCCL ignores tags" in ranks[1].disagreements[0].explain()


def test_sizes_of_a_message_differ(ranks: list[Agreement]) -> None:
    ranks[0].check(_message("send", 0, 1))
    with pytest.raises(CollectiveMismatch, match="the dtypes of a message differ: rank 0 calls send"):
        ranks[1].check(replace(_message("recv", 1, 0), dtypes=("int64",)))
