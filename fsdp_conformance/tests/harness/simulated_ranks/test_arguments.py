"""Calls that make no collective, sparse tensors and messages from anybody; `test_as_gloo` compares all with gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.harness.simulated_ranks.arguments import require_call
from fsdp_conformance.harness.simulated_ranks.ranks import run_ranks
from fsdp_conformance.history.collective import Op

SIZE = 3

#: Generous: everything below takes seconds on a free machine.
TIMEOUT_S = 600.0

def _sparse(rank: int, *, twice: bool = False) -> Tensor:
    """Two of six rows, one of them every rank's; with `twice`, one row in two parts."""
    rows = torch.tensor([[rank, 4, 4] if twice else [rank, 4]])
    values = torch.arange(3.0 * rows.numel()).reshape(-1, 3) + rank
    return torch.sparse_coo_tensor(rows, values, (6, 3), check_invariants=True)


def _from_anybody(rank: int, group: Any = None, receiver: int = 0) -> list[Tensor]:
    """What a rank gets from all others, in the order of their ranks, and who says to have sent it."""
    members = dist.get_process_group_ranks(group) if group is not None else list(range(SIZE))
    if rank not in members:
        return []
    if rank != receiver:
        dist.send(torch.full((2,), 10.0 + rank), receiver, group=group)
        return []
    found = {}
    for _ in members[1:]:
        mine = torch.zeros(2)
        source = dist.recv(mine, group=group)
        found[source] = mine
    return [torch.tensor(sorted(found)), *(found[source] for source in sorted(found))]


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
        found: list[list[float]] = dense.tolist()
        return found

    sums = run_ranks(SIZE, body, timeout_s=TIMEOUT_S)

    expected = torch.stack([_sparse(rank).to_dense() for rank in range(SIZE)]).sum(0)
    assert [expected.tolist()] * SIZE == sums


def test_messages_from_anybody_say_who_sent_them() -> None:
    """As ranks of the world, also in a group in which they have other numbers."""

    def body(rank: int) -> list[list[float]]:
        return [tensor.tolist() for tensor in [*_from_anybody(rank), *_among_two(rank)]]

    first, second, third = run_ranks(SIZE, body, timeout_s=TIMEOUT_S)

    assert [[1, 2], [11.0, 11.0], [12.0, 12.0]] == first
    assert [] == second
    assert [[1], [11.0, 11.0]] == third


def _dense(*numels: int) -> list[Tensor]:
    return [torch.zeros(numel) for numel in numels]


@pytest.mark.parametrize(
    ("op", "inputs", "outputs", "options", "message"),
    [
        (Op.BROADCAST, _dense(2), _dense(2), {"root": -1}, "the root must be a rank of the group, from 0 to 2, got -1"),
        (Op.SCATTER, [], _dense(2), {"root": 3}, "the root must be a rank of the group, from 0 to 2, got 3"),
        (Op.GATHER, _dense(2), _dense(2, 2), {}, "the output must be a list of 3 tensors, got 2"),
        (Op.GATHER, _dense(2), _dense(2, 1, 2), {}, "tensors of 2 elements, like the input, got 1 at 1"),
        (Op.SCATTER, _dense(2, 2), _dense(2), {}, "the input must be a list of 3 tensors, got 2"),
        (Op.REDUCE_SCATTER, _dense(7), _dense(2), {}, "3 times the elements of the output, 6, got 7"),
        (Op.REDUCE_SCATTER, _dense(2, 2, 3), _dense(2), {}, "tensors of 2 elements, like the output, got 3 at 2"),
        (Op.ALL_GATHER, _dense(2), _dense(5), {}, "3 times the elements of the input, 6, got 5"),
        (Op.ALL_GATHER, _dense(1, 2), _dense(1, 2, 1, 2, 2, 2), {}, "1 elements, like the input, got 2 at 4"),
        (Op.BROADCAST, [_sparse(0)], [_sparse(0)], {}, "tensors must be dense"),
        (Op.ALL_REDUCE, [_sparse(0)], [_sparse(0)], {"reduce_op": "MAX"}, "reduce_op must be SUM for sparse tensors"),
        (Op.ALL_REDUCE, _dense(2), _dense(2), {"reduce_op": "PREMUL_SUM"}, "reduce_op must be one of SUM"),
    ],
)  # fmt: skip
def test_what_makes_no_collective_is_refused(
    op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor], options: dict[str, Any], message: str
) -> None:
    """Each rank is told from its own arguments."""
    with pytest.raises(ConfigError, match=message):
        require_call(op, inputs, outputs, **{"reduce_op": "", "root": 0, "rank": 0, "size": SIZE, **options})


@pytest.mark.parametrize(
    ("op", "inputs", "outputs"),
    [
        (Op.REDUCE_SCATTER, _dense(6, 3), _dense(2, 1)),
        (Op.REDUCE_SCATTER, _dense(2, 2, 2), _dense(2)),
        (Op.ALL_GATHER, _dense(1, 2), _dense(1, 2, 1, 2, 1, 2)),
        (Op.ALL_GATHER, _dense(1, 2), _dense(3, 6)),
        (Op.GATHER, _dense(2), _dense(2, 2, 2)),
        (Op.SCATTER, _dense(2, 2, 2), _dense(2)),
    ],
)
def test_what_makes_one_is_not(op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Whole tensors and lists of parts, one or several at a time."""
    require_call(op, inputs, outputs, reduce_op="", root=0, rank=0, size=SIZE)


def test_an_error_is_every_ranks_own() -> None:
    """No rank waits for another to hear of it, and the group can be used afterwards."""

    def body(rank: int) -> float:
        with pytest.raises(ConfigError, match="got -1"):
            dist.broadcast(torch.ones(1), -1)
        mine = torch.ones(1)
        dist.all_reduce(mine)
        return float(mine)

    assert [3.0] * SIZE == run_ranks(SIZE, body, timeout_s=TIMEOUT_S)
