"""Two ranks that exchange messages: whoever sends while the other one sends, too, may wait forever."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fsdp_conformance.simulator.collectives.agreement import Agreement
from fsdp_conformance.simulator.collectives.calls import Call, Channel
from fsdp_conformance.simulator.collectives.disagreement import DisagreementKind
from fsdp_conformance.simulator.frames import Frame


@pytest.fixture(name="ranks")
def _ranks(tmp_path: Path) -> Iterator[list[Agreement]]:
    made = [Agreement(tmp_path, rank, 2) for rank in range(2)]
    yield made
    for one in made:
        one.close()


def _message(op: str, rank: int, *, batched: bool = False, group: str = "0", device: str = "sim") -> Call:
    pair = (rank, 1 - rank) if op == "send" else (1 - rank, rank)
    return Call(
        channel=Channel(group=group, ranks=(0, 1), device=device, pair=pair),
        title="the default group",
        op=op,
        dtypes=("float32",),
        numels=(4,),
        words=f"{op}(4 float32) from rank {pair[0]} to rank {pair[1]}",
        place=Frame(file="/src/train.py", line=10 + rank, function="step"),
        is_batched=batched,
    )


def _exchange(ranks: Sequence[Agreement], words: Sequence[str], *, ahead: bool = False) -> list[DisagreementKind]:
    """
    The kinds of findings when the ranks call these messages: "s" sends, "r" receives, in capitals within a batch.
    `ahead`: rank 0 makes all of its calls first.
    """
    calls = [
        [_message({"s": "send", "r": "recv"}[word.lower()], rank, batched=word.isupper()) for word in words[rank]]
        for rank in (0, 1)
    ]
    turns = [0] * len(calls[0]) + [1] * len(calls[1]) if ahead else [0, 1] * len(calls[0])
    for rank in turns:
        ranks[rank].check(calls[rank].pop(0))
    return [one.kind for rank in ranks for one in rank.disagreements]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "words",
    [("sr", "rs"), ("srsr", "rsrs"), ("SR", "SR"), ("SR", "RS"), ("SSRR", "RRSS"), ("srSR", "rsSR"), ("SR", "rs")],
    ids="-".join,
)
def test_an_exchange_in_turn_or_in_a_batch_is_right(ranks: list[Agreement], words: list[str], *, ahead: bool) -> None:
    assert not _exchange(ranks, words, ahead=ahead)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("words", [("sr", "sr"), ("srsr", "srsr"), ("srsr", "rssr"), ("SRsr", "SRsr")], ids="-".join)
def test_both_that_send_first_are_reported_once(ranks: list[Agreement], words: list[str], *, ahead: bool) -> None:
    kinds = _exchange(ranks, words, ahead=ahead)

    # By whichever rank sees it, which may be both.
    assert set(kinds) == {DisagreementKind.BOTH_SEND}
    assert len({one.sentence() for rank in ranks for one in rank.disagreements}) == 1
    (sentence,) = {one.sentence() for rank in ranks for one in rank.disagreements}
    assert sentence == (
        "ranks 0 and 1 both send before they receive: rank 0 calls send(4 float32) from rank 0 to rank 1 on the "
        "default group at /src/train.py:10 in step, rank 1 calls send(4 float32) from rank 1 to rank 0 on the "
        "default group at /src/train.py:11 in step"
    )


def test_messages_of_two_groups_and_of_the_cpu_do_not_wait_for_each_other(ranks: list[Agreement]) -> None:
    for group, device, first in (("0", "cpu", "send"), ("1", "sim", "send"), ("2", "sim", "recv")):
        for rank in (0, 1):
            if first == "send" and device == "sim":
                # Rank 0 sends in the one group while rank 1 sends in the other.
                ranks[rank].check(_message("send" if rank == 0 else "recv", rank, group=group))
            elif device == "sim":
                ranks[rank].check(_message("recv" if rank == 0 else "send", rank, group=group))
            else:
                ranks[rank].check(_message("send", rank, group=group, device=device))
                ranks[rank].check(_message("recv", rank, group=group, device=device))

    assert not [one for rank in ranks for one in rank.disagreements]
