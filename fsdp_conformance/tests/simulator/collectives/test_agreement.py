"""Collectives of several ranks compared: whichever rank comes last notices, and both say the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.simulator.collectives.agreement import Agreement, CollectiveMismatch
from fsdp_conformance.simulator.collectives.calls import (
    Call,
    CallLog,
    CallReader,
    Channel,
    IssuedCall,
    call_from_json,
    deadlocked,
    group_of,
    logs_of,
    unanswered,
)
from fsdp_conformance.simulator.collectives.disagreement import DisagreementKind, disagreement_from_json
from fsdp_conformance.simulator.frames import Frame

WORLD = Channel(group="0", ranks=(0, 1), device="sim")


def call(line: int = 7, **fields: Any) -> Call:
    """An all-reduce of four elements on the default group."""
    usual: dict[str, Any] = {
        "channel": WORLD, "title": "the default group", "op": "all_reduce", "reduce_op": "SUM",
        "dtypes": ("float32",), "numels": (4,), "words": "all_reduce(SUM, 4 float32)",
        "place": Frame(file="/src/train.py", line=line, function="step"),
    }  # fmt: skip
    return Call(**{**usual, **fields})


@pytest.fixture(name="ranks")
def _ranks(tmp_path: Path) -> Iterator[list[Agreement]]:
    """Three ranks; most tests use the first two."""
    made = [Agreement(tmp_path, rank, 3) for rank in range(3)]
    yield made
    for one in made:
        one.close()


def message(act: Callable[[], object]) -> str:
    """The message of the exception that an act raises."""
    with pytest.raises(CollectiveMismatch) as raised:
        act()
    return str(raised.value)


def test_equal_calls_agree(ranks: list[Agreement]) -> None:
    """However many, and whoever is ahead."""
    for _ in range(3):
        ranks[0].check(call())
    for _ in range(4):
        ranks[1].check(call(line=9))
    ranks[0].check(call())
    ranks[0].end()
    ranks[1].end()

    assert [] == ranks[0].disagreements == ranks[1].disagreements
    assert ranks[0].checked == 4


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"reduce_op": "MAX"}, "reductions"),
        ({"op": "broadcast", "reduce_op": ""}, "operations"),
        ({"dtypes": ("int32",)}, "dtypes"),
        ({"numels": (5,)}, "sizes"),
        ({"root": 1}, "roots"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_difference_is_raised_by_the_last_to_come(other: dict[str, Any], what: str, ranks: list[Agreement]) -> None:
    """The error has both calls and their lines; the first rank has already gone on."""
    ranks[1].check(call(line=12, words="other()", **other))
    text = message(lambda: ranks[0].check(call(line=10)))

    assert text == (
        f"the {what} of a collective differ: rank 0 calls all_reduce(SUM, 4 float32) on the default group at "
        "/src/train.py:10 in step, rank 1 calls other() on the default group at /src/train.py:12 in step"
    )
    assert [DisagreementKind.DIFFERENT] == [one.kind for one in ranks[0].disagreements]


def test_both_ranks_word_it_in_the_same_way(ranks: list[Agreement]) -> None:
    """The first to come finds it later, with its next call, and does not raise: its peer does."""
    ranks[0].check(call(line=10))
    message(lambda: ranks[1].check(call(line=12, reduce_op="MAX")))
    ranks[0].check(call(channel=replace(WORLD, ranks=(0, 1), device="cpu")))

    assert [one.explain() for one in ranks[0].disagreements] == [one.explain() for one in ranks[1].disagreements] != []
    assert ranks[0].disagreements == [
        disagreement_from_json(json.loads(json.dumps(asdict(one)))) for one in ranks[1].disagreements
    ]


def test_a_rank_that_waits_is_released(ranks: list[Agreement]) -> None:
    """Its peer may have caught the error and gone on; a rank that runs is left alone."""
    ranks[0].check(call(10))
    message(lambda: ranks[1].check(call(12, reduce_op="MAX")))
    ranks[0].look(None)
    assert ranks[0].stopped_by is None
    ranks[0].look(1)
    ranks[0].look(1)

    assert ranks[0].stopped_by == ranks[1].disagreements[0]


def test_what_may_differ(ranks: list[Agreement]) -> None:
    """Lines and words; and calls on channels that the other rank has no part in."""
    alone = Channel(group="2", ranks=(0,), device="sim")
    ranks[0].check(call(channel=alone))
    ranks[0].check(call(line=1))
    ranks[1].check(call(line=2, words="all_reduce_coalesced(SUM, 4 float32)"))

    assert [] == ranks[0].disagreements == ranks[1].disagreements


def test_a_group_has_a_communicator_for_each_device(ranks: list[Agreement]) -> None:
    """The host's collectives and the device's are ordered separately."""
    host = replace(WORLD, device="cpu")
    for rank, channels in ((0, (WORLD, host)), (1, (host, WORLD))):
        for channel in channels:
            ranks[rank].check(call(channel=channel, op="barrier" if channel is host else "all_reduce"))

    assert [] == ranks[0].disagreements == ranks[1].disagreements


def test_an_all_to_all_agrees_pair_by_pair(ranks: list[Agreement]) -> None:
    """Each rank must expect what the other sends; what a rank sends to itself is not compared."""

    def exchange(sends: tuple[int, ...], takes: tuple[int, ...]) -> Call:
        return call(op="all_to_all", reduce_op="", numels=(), sends=sends, takes=takes)

    ranks[0].check(exchange((1, 3), (1, 5)))
    ranks[1].check(exchange((5, 2), (3, 2)))
    ranks[0].check(exchange((1, 3), (1, 5)))

    assert "the split sizes of a collective differ" in message(lambda: ranks[1].check(exchange((5, 2), (4, 2))))


def test_groups_of_one_rank_each(ranks: list[Agreement]) -> None:
    """Each rank may make a group of itself, which exchanges nothing; other groups are the same on all ranks."""

    def making(*members: int) -> Call:
        channel = Channel(group="new_group", ranks=(0, 1, 2), device="cpu")
        return call(channel=channel, op=group_of(members), words=group_of(members), reduce_op="", dtypes=(), numels=())

    for rank in range(3):
        ranks[rank].check(making(rank))
    for member in range(3):
        for rank in range(3):
            ranks[rank].check(making(member))
    ranks[0].check(making(0, 1))
    assert "the operations of a collective differ" in message(lambda: ranks[2].check(making(2)))


def test_messages_are_matched_by_pair(ranks: list[Agreement]) -> None:
    """A send meets a receive of the same size, whatever else the two call."""
    pair = replace(WORLD, pair=(0, 1))
    ranks[1].check(call())
    ranks[1].check(call(channel=pair, op="recv", reduce_op=""))
    ranks[0].check(call(channel=pair, op="send", reduce_op=""))
    ranks[0].check(call())
    assert [] == ranks[0].disagreements == ranks[1].disagreements

    ranks[0].check(call(channel=pair, op="send", reduce_op=""))
    text = message(lambda: ranks[1].check(call(channel=pair, op="recv", reduce_op="", numels=(8,))))
    assert text.startswith("the sizes of a collective differ")


class TestOrder:
    """Two communicators of the same ranks."""

    first = WORLD
    second = Channel(group="1", ranks=(0, 1), device="sim")

    def test_one_order_is_right(self, ranks: list[Agreement]) -> None:
        """The same order is correct even if one rank is far ahead."""
        for rank in (0, 1):
            for _ in range(3):
                ranks[rank].check(call(channel=self.first))
                ranks[rank].check(call(channel=self.second))

        assert [] == ranks[0].disagreements == ranks[1].disagreements

    def test_two_orders_are_reported_and_nothing_is_raised(self, ranks: list[Agreement]) -> None:
        """They are reported once, although they occur in every step, with the line where each rank's order begins."""
        for _ in range(3):
            ranks[0].check(call(10, channel=self.first, words="a()"))
            ranks[0].check(call(11, channel=self.second, words="b()"))
            ranks[1].check(call(20, channel=self.second, words="b()"))
            ranks[1].check(call(21, channel=self.first, words="a()"))

        (disagreement,) = ranks[1].disagreements
        assert disagreement.kind is DisagreementKind.ORDER
        assert disagreement.sentence() == (
            "two communicators are used in different orders: rank 0 calls a() on the default group at "
            "/src/train.py:10 in step before what rank 1 calls first, b() on the default group at "
            "/src/train.py:20 in step"
        )

    def test_a_missing_call_is_no_other_order(self, ranks: list[Agreement]) -> None:
        """A rank that leaves one out is told so at the end."""
        ranks[0].check(call(10, channel=self.first))
        ranks[0].check(call(11, channel=self.second))
        ranks[1].check(call(20, channel=self.second))

        text = message(ranks[1].end)
        assert [DisagreementKind.MISSING] == [one.kind for one in ranks[1].disagreements]
        assert text.endswith("at /src/train.py:10 in step, but rank 1 has ended without calling it")

    @pytest.mark.parametrize("other", [{"device": "cpu"}, {"pair": (0, 1)}], ids=["host", "message"])
    def test_the_host_and_messages_have_any_order(self, other: dict[str, Any], ranks: list[Agreement]) -> None:
        """Only an accelerator's collectives can get stuck behind each other on its queue."""
        free = replace(self.second, **other)
        for rank, channels in ((0, (self.first, free)), (1, (free, self.first))):
            for channel in channels:
                ranks[rank].check(call(channel=channel))

        assert [] == ranks[0].disagreements == ranks[1].disagreements


class TestEnd:
    """A rank that ends while another needs it."""

    def test_whoever_calls_afterwards_is_told_at_once(self, ranks: list[Agreement]) -> None:
        """The call fails instead of waiting forever."""
        ranks[1].end()

        text = message(lambda: ranks[0].check(call()))
        assert text == (
            "rank 0 calls all_reduce(SUM, 4 float32) on the default group at /src/train.py:7 in step, but rank 1 has "
            "ended without calling it"
        )

    def test_whoever_ends_later_is_told_at_its_end(self, ranks: list[Agreement]) -> None:
        """Both ranks report it in the same words."""
        ranks[0].check(call())
        ranks[0].end()

        assert "rank 1 has ended without calling it" in message(ranks[1].end)

    def test_a_third_rank_is_left_alone(self, ranks: list[Agreement]) -> None:
        """It has no part in the group."""
        ranks[0].check(call())
        ranks[2].end()
        ranks[1].check(call())

        assert [[]] * 3 == [rank.disagreements for rank in ranks]


class TestDeadlock:
    """Ranks that wait for each other."""

    def test_two_ranks_each_in_its_own_collective(self) -> None:
        """Neither rank has made the other's call; the error shows both calls."""
        mine, theirs = call(1), call(2, channel=TestOrder.second)

        assert deadlocked([[mine], [theirs]], {0: 1, 1: 1}) == {0: mine, 1: theirs}

    def test_a_rank_that_runs_may_still_come(self) -> None:
        """Ranks wait for a rank that still runs, needed directly or by another waiting rank."""
        three = Channel(group="2", ranks=(1, 2), device="sim")
        mine, theirs = call(1), call(2, channel=three)

        assert deadlocked([[mine], [theirs], []], {0: 1, 1: 1}) == {}
        assert deadlocked([[mine], [call(2, channel=TestOrder.second)]], {0: 1}) == {}

    def test_a_rank_that_has_gone_on_since(self) -> None:
        """It said that it waits, and then made another call."""
        mine, theirs = call(1), call(2, channel=TestOrder.second)

        assert deadlocked([[mine], [theirs, call(3)]], {0: 1, 1: 1}) == {}

    def test_answered_calls_take_their_time(self) -> None:
        """All have come: the bytes are on their way."""
        assert deadlocked([[call(1)], [call(2)]], {0: 1, 1: 1}) == {}

    def test_a_ring_of_three(self) -> None:
        """Each waits for the next."""
        pairs = [Channel(group=str(rank), ranks=(rank, (rank + 1) % 3), device="sim") for rank in range(3)]
        calls = [call(rank, channel=pair) for rank, pair in enumerate(pairs)]

        assert deadlocked([[one] for one in calls], {0: 1, 1: 1, 2: 1}) == dict(enumerate(calls))

    def test_ranks_tell_each_other(self, ranks: list[Agreement]) -> None:
        """It is reported after several looks at the same wait, with both calls. A wait that ends resets the count."""
        ranks[0].check(call(10))
        ranks[1].check(call(20, channel=TestOrder.second))
        for _ in range(4):
            ranks[0].look(7)
        ranks[0].look(8)
        for _ in range(4):
            ranks[0].look(8)
            ranks[1].look(3)
        assert [] == ranks[0].disagreements == ranks[1].disagreements
        ranks[1].look(3)
        ranks[0].look(8)

        (disagreement,) = ranks[0].disagreements
        assert disagreement == ranks[0].stopped_by
        assert disagreement.kind is DisagreementKind.DEADLOCK
        assert disagreement.sentence().startswith("ranks 0, 1 wait for each other: rank 0 has called all_reduce")
        assert "train.py:20 in step" in disagreement.explain()
        ranks[2].look(None)


def test_ranks_on_one_device(ranks: list[Agreement]) -> None:
    """Reported once, and the collective goes on; other devices are fine."""
    for rank in (0, 1):
        ranks[rank].check(call(device_index=rank))
    for _ in range(2):
        for rank in (0, 1):
            ranks[rank].check(call(device_index=3))

    assert [] == [one for one in ranks[0].disagreements if one.kind is not DisagreementKind.ONE_DEVICE]
    (disagreement,) = ranks[1].disagreements
    assert disagreement.sentence().startswith("ranks 0 and 1 use the same device, 3: ")
    assert "set_device" in disagreement.advice()


class TestFiles:
    """Files that a rank leaves for others to read."""

    def test_a_call_is_described_once(self, tmp_path: Path) -> None:
        """Twelve bytes for each call."""
        log = CallLog(tmp_path, 0)
        for _ in range(1000):
            log.append(call())
        log.close()

        assert (tmp_path / "calls0.bin").stat().st_size == 12_000
        assert len((tmp_path / "calls0.jsonl").read_text().splitlines()) == 1
        assert logs_of(tmp_path, 1) == [[call()] * 1000]

    def test_round_trip(self) -> None:
        """Every field, with and without its optional parts."""
        whole = call(root=2, sends=(1,), takes=(2,), device_index=1, channel=replace(WORLD, pair=(1, 0)))
        for one in (call(place=None), whole):
            assert one == call_from_json(json.loads(json.dumps(asdict(one))))

    def test_a_reader_follows(self, tmp_path: Path) -> None:
        """It reads before the file exists, in pieces, and to the end."""
        reader = CallReader(tmp_path, 0)
        assert reader.read() == []
        log = CallLog(tmp_path, 0)
        log.append(call(1))
        assert reader.read() == [IssuedCall(call(1))]
        log.append(call(2))
        log.append(call(1), 7, 5)
        log.end()
        assert reader.read() == [IssuedCall(call(2)), IssuedCall(call(1), 7, 5)]
        assert reader.has_ended
        assert reader.read() == []
        reader.close()
        log.close()

    def test_a_rank_that_was_killed_while_it_wrote(self, tmp_path: Path) -> None:
        """Half an entry, or an entry without its description, is left out."""
        log = CallLog(tmp_path, 0)
        log.append(call())
        log.close()
        with (tmp_path / "calls0.bin").open("ab") as file:
            file.write((1).to_bytes(4, "little") + b"\x00")

        assert logs_of(tmp_path, 2) == [[call()], []]

    def test_unanswered_calls(self) -> None:
        """The first of each rank, with who is missing; later ones follow from it."""
        both, mine = call(1), call(2)
        pending = unanswered([[both, mine, call(3)], [both]])

        assert [(one.call, one.callers, one.missing) for one in pending] == [(mine, [0], [1])]
        assert unanswered([[both], [both]]) == []


def _message(op: str, **fields: Any) -> Call:
    pair = replace(WORLD, pair=(0, 1))
    words = f"{op}(4 float32) from rank 0 to rank 1"
    return call(channel=pair, op=op, reduce_op="", words=words, **fields)


def test_a_batched_message_does_not_meet_one_that_is_in_no_batch(ranks: list[Agreement]) -> None:
    """They use two communicators, unless the group is bound to a device."""
    ranks[0].check(_message("send", line=10))
    text = message(lambda: ranks[1].check(_message("recv", line=12, is_paired=True)))

    assert text == (
        "the communicators of a message differ: rank 0 calls send(4 float32) from rank 0 to rank 1 on the communicator "
        "of the group, the default group at /src/train.py:10 in step, rank 1 calls recv(4 float32) from rank 0 to rank "
        "1 on the communicator of its two ranks, the default group at /src/train.py:12 in step"
    )
    assert "or neither, or bind the group" in " ".join(ranks[1].disagreements[0].explain().split())


@pytest.mark.parametrize("is_paired", [True, False])
def test_messages_on_one_communicator_meet(is_paired: bool, ranks: list[Agreement]) -> None:
    """Both in batches, or neither."""
    ranks[0].check(_message("send", is_paired=is_paired))
    ranks[1].check(_message("recv", is_paired=is_paired))

    assert ranks[1].disagreements == []
