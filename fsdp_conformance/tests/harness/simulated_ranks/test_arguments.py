"""Calls that make no collective, sparse tensors and messages from anybody; `test_as_gloo` compares all with gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_conformance.errors import ConfigError, InvalidCollective
from fsdp_conformance.harness.simulated_ranks.arguments import Call, require_call, require_message
from fsdp_conformance.harness.simulated_ranks.ranks import run_ranks
from fsdp_conformance.history.collective import Op

SIZE = 3

#: Generous: everything below takes seconds on a free machine.
TIMEOUT_S = 600.0


def _sparse(rank: int, *, twice: bool = False) -> Tensor:
    """Two of six rows, one of them every rank's; with `twice`, one row in two parts."""
    rows = torch.tensor([[rank, 4, 4] if twice else [rank, 4]])
    values = torch.arange(3.0 * rows.numel()).reshape(-1, 3) + rank
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.sparse_coo_tensor(rows, values, (6, 3))


def _from_anybody(rank: int, group: Any = None, receiver: int = 0) -> list[Tensor]:
    """The tensors that a rank receives from all others, in rank order, and the sender that each receive reports."""
    members = dist.get_process_group_ranks(group) if group is not None else list(range(SIZE))
    if rank not in members:
        return []
    if rank != receiver:
        dist.send(torch.full((2,), 10.0 + rank), receiver, group=group)
        return []
    by_source = {}
    for _ in members[1:]:
        mine = torch.zeros(2)
        source = dist.recv(mine, group=group)
        by_source[source] = mine
    return [torch.tensor(sorted(by_source)), *(by_source[source] for source in sorted(by_source))]


def _among_two(rank: int) -> list[Tensor]:
    group = dist.new_group([1, 2])
    return _from_anybody(rank, group, receiver=2)


def test_sparse_tensors_are_added() -> None:
    """The caller's tensor has the sum, coalesced, as a dense one has."""

    def body(rank: int) -> list[list[float]]:
        mine, dense = _sparse(rank), _sparse(rank).to_dense()
        dist.all_reduce(mine)
        dist.all_reduce(dense)
        assert mine.is_coalesced()
        assert torch.equal(dense, mine.to_dense())
        rows: list[list[float]] = dense.tolist()
        return rows

    sums = run_ranks(SIZE, body, timeout_s=TIMEOUT_S)

    expected = torch.stack([_sparse(rank).to_dense() for rank in range(SIZE)]).sum(0)
    assert [expected.tolist()] * SIZE == sums


def test_messages_from_anybody_say_who_sent_them() -> None:
    """The sender is a rank of the world, even in a group in which it has another number."""

    def body(rank: int) -> list[list[float]]:
        return [tensor.tolist() for tensor in [*_from_anybody(rank), *_among_two(rank)]]

    first, second, third = run_ranks(SIZE, body, timeout_s=TIMEOUT_S)

    assert [[1, 2], [11.0, 11.0], [12.0, 12.0]] == first
    assert [] == second
    assert [[1], [11.0, 11.0]] == third


def _dense(*numels: int) -> list[Tensor]:
    return [torch.zeros(numel) for numel in numels]


def _call(op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor], options: dict[str, Any]) -> Call:
    return Call(op=op, inputs=inputs, outputs=outputs, **{"rank": 0, "size": SIZE, **options})


_SPLIT: dict[str, Any] = {"splits": ((), ())}
_LEAF = torch.zeros(2, requires_grad=True)


@pytest.mark.parametrize(
    ("op", "inputs", "outputs", "options", "message"),
    [
        (Op.BROADCAST, _dense(2), _dense(2), {"root": -1}, "the root must be a rank of the group, from 0 to 2, got -1"),
        (Op.SCATTER, [], _dense(2), {"root": 3}, "the root must be a rank of the group, from 0 to 2, got 3"),
        (Op.GATHER, _dense(2), _dense(2, 2), {}, "the output must be a list of 3 tensors, got 2"),
        (Op.GATHER, _dense(2), _dense(2, 1, 2), {}, r"must have shape \(2,\), like the input, got \(1,\) at 1"),
        (Op.SCATTER, _dense(2, 2), _dense(2), {}, "the input must be a list of 3 tensors, got 2"),
        (Op.REDUCE_SCATTER, _dense(7), _dense(2), {}, r"shape \(6,\), 3 times the output, got \(7,\)"),
        (Op.REDUCE_SCATTER, _dense(3, 2, 2), _dense(2), {}, r"shape \(2,\), like the output, got \(3,\) at 0"),
        (Op.REDUCE_SCATTER, [torch.zeros(3)], [torch.zeros(())], {}, "the output must have at least one dimension"),
        (Op.ALL_GATHER, _dense(2), _dense(5), {}, r"shape \(6,\), 3 times the input, got \(5,\)"),
        (Op.ALL_GATHER, _dense(2), [torch.zeros(3, 2)], {}, r"shape \(6,\), 3 times the input, got \(3, 2\)"),
        (Op.ALL_GATHER, _dense(1, 2), _dense(1, 2, 1, 2, 2, 2), {}, r"like the input, got \(2,\) at 4"),
        (Op.ALL_GATHER, _dense(2), [_LEAF, *_dense(2, 2)], {}, "must not be a parameter"),
        (Op.ALL_GATHER, _dense(2), [torch.zeros(6).double()], {}, "one dtype, got torch.float32, torch.float64"),
        (Op.BROADCAST, [torch.zeros(2, dtype=torch.int16)], [], {}, "dtype must be one of .*, got torch.int16"),
        (Op.BROADCAST, [_sparse(0)], [_sparse(0)], {}, "tensors must be dense"),
        (Op.BROADCAST, [torch.zeros(3, 2)[:, 0]], [], {}, r"must be contiguous, got shape \(3,\) with strides \(2,\)"),
        (Op.SEND, [torch.zeros(3, 2).t()], [], {}, "must be contiguous"),
        (Op.ALL_REDUCE, [], [], {}, "at least one tensor"),
        (Op.ALL_REDUCE, _dense(2, 3), _dense(2, 3), {}, "like the first input"),
        (Op.REDUCE, _dense(2, 2), _dense(2, 2), {}, "one tensor, got 2"),
        (Op.ALL_REDUCE, [_sparse(0)], [_sparse(0)], {"reduce_op": "MAX"}, "reduce_op must be SUM for sparse tensors"),
        (Op.ALL_REDUCE, _dense(2), _dense(2), {"reduce_op": "PREMUL_SUM"}, "reduce_op must be one of SUM"),
        (Op.ALL_TO_ALL, _dense(2, 2, 2), _dense(2, 2), {}, "the output must be a list of 3 tensors, got 2"),
        (Op.ALL_TO_ALL, _dense(2, 2, 3), _dense(2, 2, 2), {}, r"like the first output, got \(3,\) at 2"),
        (Op.ALL_TO_ALL, _dense(4), _dense(4), _SPLIT, "the rows of the output must be a multiple of 3, got 4"),
        (Op.ALL_TO_ALL, _dense(3), _dense(6), _SPLIT, "the output must have the elements of the input, 3, got 6"),
        (Op.ALL_TO_ALL, _dense(3), _dense(3), {"splits": ((1, 1), (1, 1, 1))}, "output_split_sizes must be 3 numbers"),
        (Op.ALL_TO_ALL, _dense(3), _dense(3), {"splits": ((), (-1, 2, 2))}, r"add up to 3.*got \[-1, 2, 2\]"),
    ],
)  # fmt: skip
def test_what_makes_no_collective_is_refused(
    op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor], options: dict[str, Any], message: str
) -> None:
    """Each rank is told from its own arguments, by an exception of the kind that torch's backends raise."""
    with pytest.raises(InvalidCollective, match=message) as raised:
        require_call(_call(op, inputs, outputs, options))
    assert isinstance(raised.value, RuntimeError)


@pytest.mark.parametrize(
    ("op", "inputs", "outputs", "options"),
    [
        (Op.REDUCE_SCATTER, _dense(6, 3), _dense(2, 1), {"coalesced": True}),
        (Op.REDUCE_SCATTER, _dense(2, 2, 2), _dense(2), {}),
        (Op.REDUCE_SCATTER, _dense(1, 2, 3), _dense(2), {"rank": 1}),
        (Op.ALL_GATHER, _dense(1, 2), _dense(1, 2, 1, 2, 1, 2), {}),
        (Op.ALL_GATHER, _dense(1, 2), _dense(3, 6), {"coalesced": True}),
        (Op.ALL_REDUCE, _dense(1, 2), _dense(1, 2), {"coalesced": True}),
        (Op.GATHER, _dense(2), _dense(2, 2, 2), {}),
        (Op.SCATTER, _dense(2, 2, 2), _dense(2), {}),
        (Op.ALL_TO_ALL, _dense(6), _dense(3), {"splits": ((1, 1, 1), (6, 0, 0))}),
        (Op.SEND, [torch.zeros(2, dtype=torch.int16)], [], {}),
        (Op.BARRIER, [], [], {}),
    ],
)
def test_what_makes_one_is_not(
    op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor], options: dict[str, Any]
) -> None:
    """Whole tensors and lists of parts, one or several at a time."""
    require_call(_call(op, inputs, outputs, options))


@pytest.mark.parametrize(
    ("peer", "tag", "message"),
    [
        (-1, 0, "the peer must be a rank of the group, from 0 to 2, got -1"),
        (SIZE, 0, "from 0 to 2, got 3"),
        (1, 0, "the peer must be another rank, got 1"),
        (0, -1, "tag must be at least 0, got -1"),
    ],
)
def test_messages_that_nobody_can_get(peer: int, tag: int, message: str) -> None:
    """gloo waits for some of these until its timeout, and others end the process."""
    with pytest.raises(InvalidCollective, match=message):
        require_message(Op.RECV, peer, tag, rank=1, size=SIZE)
    require_message(Op.RECV, 2, 3, rank=1, size=SIZE)


def test_a_message_from_beyond_the_group_is_every_ranks_own_error() -> None:
    """The rank that asks is told at once; the others go on."""

    def body(rank: int) -> float:
        if rank == 0:
            with pytest.raises(InvalidCollective, match="from 0 to 2, got 3"):
                dist.recv(torch.ones(1), SIZE)
        mine = torch.ones(1)
        dist.all_reduce(mine)
        return float(mine)

    assert [3.0] * SIZE == run_ranks(SIZE, body, timeout_s=TIMEOUT_S)


def test_an_error_is_every_ranks_own() -> None:
    """No rank waits for another to hear of it, and the group can be used afterwards."""

    def body(rank: int) -> float:
        with pytest.raises(ConfigError, match="got -1"):
            dist.broadcast(torch.ones(1), -1)
        mine = torch.ones(1)
        dist.all_reduce(mine)
        return float(mine)

    assert [3.0] * SIZE == run_ranks(SIZE, body, timeout_s=TIMEOUT_S)
