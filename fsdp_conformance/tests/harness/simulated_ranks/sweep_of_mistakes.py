"""
The second half of the sweep (`sweep`): calls with wrong arguments, and unusual ones that are right.

A call is wrong in the same way on every rank, or is made by one rank alone, so that on gloo no rank waits for another.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from fsdp_conformance.tests.harness.simulated_ranks.sweep import (
    SIZE,
    Call,
    Member,
    all_gather_into_tensor,
    reduce_scatter_tensor,
)

#: Only NCCL has it, since torch 2.14.
_gather_single: Callable[..., object] | None = getattr(dist, "gather_single", None)


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def _many(count: int, numel: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.zeros(numel, dtype=dtype) for _ in range(count)]


def _sparse(rank: int, *, twice: bool = False) -> Tensor:
    """Two of six rows, one of them every rank's; with `twice`, one row in two parts."""
    rows = torch.tensor([[rank, 4, 4] if twice else [rank, 4]])
    values = torch.arange(3.0 * rows.numel()).reshape(-1, 3) + rank
    return torch.sparse_coo_tensor(rows, values, (6, 3), check_invariants=True)


def _world() -> Any:
    return dist.group.WORLD


def _of(call: Callable[..., object], *arguments: Any, **options: Any) -> Call:
    """A call whose arguments are equal on every rank, and created separately for each where they are functions."""

    def made(me: Member) -> list[Tensor]:
        values = [argument() if callable(argument) else argument for argument in arguments]
        call(*values, **options)
        return [value for value in values if isinstance(value, Tensor)]

    return made


def _alone(rank: int, call: Call) -> Call:
    """A call that one rank makes. It must raise before it communicates."""

    def made(me: Member) -> list[Tensor]:
        return call(me) if me.rank == rank else []

    return made


def _in(group: str, call: Callable[[Any], object]) -> Call:
    """A call in a group, by its members."""

    def made(me: Member) -> list[Tensor]:
        member = me.of(group)
        if me.rank in member.ranks:
            call(member.group)
        return []

    return made


def _coalesced(*tensors: Tensor) -> None:
    with distributed_c10d._coalescing_manager(_world()):
        for tensor in tensors:
            dist.all_reduce(tensor)


_Splits = list[int] | None


def _exchange(rows_out: int, rows_in: int, splits_out: _Splits, splits_in: _Splits) -> Call:
    return _of(
        dist.all_to_all_single, lambda: torch.zeros(rows_out, 2), lambda: _ones(rows_in, 2), splits_out, splits_in
    )


#: Roots, sizes, dtypes, splits, tags: what no rank can take part with.
WRONG: Final[dict[str, Call]] = {
    # roots
    **{
        f"{name} with the root {root}": _of(call, lambda: _ones(2), *rest, root)
        for root in (-1, SIZE, 100)
        for name, call, rest in (
            ("broadcast", dist.broadcast, ()),
            ("reduce", dist.reduce, ()),
            ("gather", dist.gather, (None,)),
            ("scatter", dist.scatter, (None,)),
        )
    },
    "broadcast without a root": _of(dist.broadcast, lambda: _ones(2)),
    "broadcast with two roots": _of(dist.broadcast, lambda: _ones(2), 0, group_src=0),
    "broadcast from outside the group": _in("two", lambda group: dist.broadcast(_ones(2), 1, group=group)),
    "reduce to outside the group": _in("two", lambda group: dist.reduce(_ones(2), 1, group=group)),
    "broadcast from a number outside the group": _in(
        "two", lambda group: dist.broadcast(_ones(2), group_src=2, group=group)
    ),
    # lists
    "all_gather of too few": _of(lambda: dist.all_gather(_many(SIZE - 1), _ones(2))),
    "all_gather of too many": _of(lambda: dist.all_gather(_many(SIZE + 1), _ones(2))),
    "all_gather of nothing": _of(lambda: dist.all_gather([], _ones(2))),
    "all_gather of other sizes": _of(lambda: dist.all_gather(_many(SIZE, 3), _ones(2))),
    "all_gather of one other size": _of(lambda: dist.all_gather([*_many(SIZE - 1), *_many(1, 3)], _ones(2))),
    "all_gather of other shapes": _of(lambda: dist.all_gather(_many(SIZE, 4), _ones(2, 2))),
    "all_gather of another dtype": _of(lambda: dist.all_gather(_many(SIZE, 2, torch.float64), _ones(2))),
    "reduce_scatter of too few": _of(lambda: dist.reduce_scatter(_ones(2), _many(SIZE - 1))),
    "reduce_scatter of too many": _of(lambda: dist.reduce_scatter(_ones(2), _many(SIZE + 1))),
    "reduce_scatter of other sizes": _of(lambda: dist.reduce_scatter(_ones(2), _many(SIZE, 3))),
    "reduce_scatter of another dtype": _of(lambda: dist.reduce_scatter(_ones(2), _many(SIZE, 2, torch.float64))),
    "all_to_all of too few": _of(lambda: dist.all_to_all(_many(SIZE - 1), _many(SIZE))),
    "all_to_all from too few": _of(lambda: dist.all_to_all(_many(SIZE), _many(SIZE - 1))),
    "all_to_all of another dtype": _of(lambda: dist.all_to_all(_many(SIZE, 2, torch.float64), _many(SIZE))),
    "gather without a list": _alone(0, _of(dist.gather, lambda: _ones(2), None, 0)),
    "gather with a list elsewhere": _alone(1, _of(lambda: dist.gather(_ones(2), _many(SIZE), 0))),
    "gather of too few": _alone(0, _of(lambda: dist.gather(_ones(2), _many(SIZE - 1), 0))),
    "gather of other sizes": _alone(0, _of(lambda: dist.gather(_ones(2), _many(SIZE, 3), 0))),
    "gather of another dtype": _alone(0, _of(lambda: dist.gather(_ones(2), _many(SIZE, 2, torch.float64), 0))),
    **({"gather_single": _of(_gather_single, lambda: _ones(2), lambda: _ones(2 * SIZE))} if _gather_single else {}),
    "scatter without a list": _alone(0, _of(dist.scatter, lambda: _ones(2), None, 0)),
    "scatter with a list elsewhere": _alone(1, _of(lambda: dist.scatter(_ones(2), _many(SIZE), 0))),
    "scatter of too few": _alone(0, _of(lambda: dist.scatter(_ones(2), _many(SIZE - 1), 0))),
    "scatter of other sizes": _alone(0, _of(lambda: dist.scatter(_ones(2), _many(SIZE, 3), 0))),
    "scatter of another dtype": _alone(0, _of(lambda: dist.scatter(_ones(2), _many(SIZE, 2, torch.float64), 0))),
    # wholes
    "all_gather_into_tensor, too small": _of(all_gather_into_tensor, lambda: _ones(2 * SIZE - 1), lambda: _ones(2)),
    "all_gather_into_tensor, too large": _of(all_gather_into_tensor, lambda: _ones(2 * SIZE + 1), lambda: _ones(2)),
    "all_gather_into_tensor, twice as large": _of(all_gather_into_tensor, lambda: _ones(4 * SIZE), lambda: _ones(2)),
    "all_gather_into_tensor of another dtype": _of(
        all_gather_into_tensor, lambda: _ones(2 * SIZE, dtype=torch.float64), lambda: _ones(2)
    ),
    "reduce_scatter_tensor, too small": _of(reduce_scatter_tensor, lambda: _ones(2), lambda: _ones(2 * SIZE - 1)),
    "reduce_scatter_tensor, too large": _of(reduce_scatter_tensor, lambda: _ones(2), lambda: _ones(2 * SIZE + 1)),
    "reduce_scatter_tensor of another dtype": _of(
        reduce_scatter_tensor, lambda: _ones(2), lambda: _ones(2 * SIZE, dtype=torch.float64)
    ),
    # splits
    "all_to_all_single of a scalar": _of(dist.all_to_all_single, lambda: torch.ones(()), lambda: torch.ones(())),
    "all_to_all_single of uneven rows": _exchange(SIZE + 1, SIZE + 1, None, None),
    "all_to_all_single of uneven outputs": _exchange(SIZE + 1, SIZE, None, None),
    "all_to_all_single, splits that are too few": _exchange(SIZE, SIZE, [1] * (SIZE - 1), [1] * SIZE),
    "all_to_all_single, input splits that are too few": _exchange(SIZE, SIZE, [1] * SIZE, [1] * (SIZE - 1)),
    "all_to_all_single, splits that are too many": _exchange(SIZE, SIZE, [1] * (SIZE + 1), [1] * SIZE),
    "all_to_all_single, splits that add up to less": _exchange(SIZE + 1, SIZE, [1] * SIZE, [1] * SIZE),
    "all_to_all_single, input splits that add up to less": _exchange(SIZE, SIZE + 1, [1] * SIZE, [1] * SIZE),
    "all_to_all_single, splits that add up to more": _exchange(SIZE, SIZE, [2] * SIZE, [1] * SIZE),
    "all_to_all_single of another dtype": _of(
        dist.all_to_all_single, lambda: _ones(SIZE, dtype=torch.float64), lambda: _ones(SIZE)
    ),
    # messages
    "send to itself": lambda me: _of(dist.send, lambda: _ones(2), me.rank)(me),
    "irecv from itself": _alone(1, _of(lambda: dist.recv(_ones(2), 1))),
    "send with a negative tag": _alone(0, _of(dist.send, lambda: _ones(2), 1, tag=-1)),
    "recv with a negative tag": _alone(1, _of(dist.recv, lambda: _ones(2), 0, tag=-1)),
    "send a sparse tensor": _alone(0, _of(dist.send, lambda: _sparse(0), 1)),
    "batch_isend_irecv of nothing": _of(dist.batch_isend_irecv, []),
    # kinds of tensors
    "all_reduce of the maximum of sparse tensors": _of(
        lambda: dist.all_reduce(_sparse(0), op=dist.ReduceOp.MAX),
    ),
    "broadcast of a sparse tensor": _of(lambda: dist.broadcast(_sparse(0), 0)),
    "reduce of a sparse tensor": _of(lambda: dist.reduce(_sparse(0), 0)),
    "all_gather of a sparse tensor": _of(lambda: dist.all_gather([_sparse(0) for _ in range(SIZE)], _sparse(0))),
    "all_reduce of a CSR tensor": _of(lambda: dist.all_reduce(torch.eye(3).to_sparse_csr())),
    "all_reduce on meta": _of(lambda: dist.all_reduce(torch.ones(2, device="meta"))),
    "all_reduce of a list": _of(lambda: dist.all_reduce([_ones(2)])),
    "all_reduce with a name for an op": _of(lambda: dist.all_reduce(_ones(2), op="sum")),
    "all_gather of None": _of(lambda: dist.all_gather(None, _ones(2))),
    "all_reduce of the maximum of complex numbers": _of(
        lambda: dist.all_reduce(_ones(2, dtype=torch.complex64), op=dist.ReduceOp.MAX)
    ),
    # the group's own methods
    "allreduce of no tensor": _of(lambda: _world().allreduce([])),
    "allreduce of two dtypes": _of(lambda: _world().allreduce([_ones(2), _ones(2, dtype=torch.float64)]).wait()),
    "allreduce of two sizes": _of(lambda: _world().allreduce([_ones(2), _ones(3)]).wait()),
    "broadcast of no tensor": _of(lambda: _world().broadcast([], c10d.BroadcastOptions())),
    "broadcast of two tensors": _of(lambda: _world().broadcast([_ones(2), _ones(2)], c10d.BroadcastOptions()).wait()),
    "reduce of two tensors": _of(lambda: _world().reduce([_ones(2), _ones(2)], c10d.ReduceOptions()).wait()),
    "allgather of no tensor": _of(lambda: _world().allgather([], [])),
    "allgather of two lists for one tensor": _of(
        lambda: _world().allgather([_many(SIZE), _many(SIZE)], [_ones(2)]).wait()
    ),
    "reduce_scatter of two outputs": _of(
        lambda: _world().reduce_scatter(_many(2), [_many(SIZE)], c10d.ReduceScatterOptions()).wait()
    ),
    "allreduce_coalesced of two dtypes": _of(
        lambda: dist.all_reduce_coalesced([_ones(2), _ones(2, dtype=torch.float64)])
    ),
    "coalesced all_reduce of two dtypes": _of(lambda: _coalesced(_ones(2), _ones(2, dtype=torch.float64))),
    "new_group with a rank twice": _of(lambda: dist.new_group([0, 0])),
    "new_group with a rank beyond": _of(lambda: dist.new_group([0, SIZE])),
    "a second init_process_group": _of(lambda: dist.init_process_group("gloo", rank=0, world_size=1)),
    "barrier with device_ids that are not a list": _of(lambda: dist.barrier(device_ids=0)),
}


# --- unusual, and right -----------------------------------------------------------------------------------------------


def _sparse_sum(me: Member, **options: Any) -> list[Tensor]:
    mine = _sparse(me.rank, **options)
    dist.all_reduce(mine)
    return [mine, torch.tensor(mine.is_coalesced()), mine.coalesce().indices()]


def _sparse_sum_of_a_gradient(me: Member) -> list[Tensor]:
    """As DDP's reducer does."""
    layer = torch.nn.Embedding(6, 3, sparse=True)
    torch.nn.init.constant_(layer.weight, 1.0)
    (layer(torch.tensor([me.rank, 4])).sum() * (me.rank + 1)).backward()
    assert layer.weight.grad is not None
    dist.all_reduce(layer.weight.grad)
    return [layer.weight.grad]


def _from_anybody(me: Member) -> list[Tensor]:
    """
    The tensors that the first member receives from the others, in rank order, and the sender that each receive reports.
    """
    receiver, *others = me.ranks
    if me.rank in others:
        dist.send(torch.full((2,), 10.0 + me.rank), receiver, group=me.group)
    if me.rank != receiver:
        return []
    by_source = {}
    for _ in others:
        mine = torch.zeros(2)
        by_source[dist.recv(mine, group=me.group)] = mine
    return [torch.tensor(sorted(by_source)), *(by_source[source] for source in sorted(by_source))]


def _at_work(me: Member) -> list[Tensor]:
    """Two collectives under way at once, the second finished first."""
    one, other = torch.full((3,), float(me.rank)), torch.full((2,), 2.0**me.rank)
    works = [dist.all_reduce(one, async_op=True), dist.all_reduce(other, async_op=True)]
    for work in reversed(works):
        assert work is not None
        work.wait(timedelta(seconds=60))
        work.wait()
    return [one, other]


def _objects(me: Member) -> list[Tensor]:
    mine = {"rank": me.rank, "values": [1.5] * me.rank}
    everybody: list[Any] = [None] * SIZE
    dist.all_gather_object(everybody, mine)
    at_root: list[Any] = [None] * SIZE
    dist.gather_object(mine, at_root if me.rank == 1 else None, dst=1)
    objects: list[Any] = [mine, me.rank]
    dist.broadcast_object_list(objects, src=2)
    dealt: list[Any] = [None]
    dist.scatter_object_list(dealt, [{"rank": rank} for rank in range(SIZE)] if me.rank == 0 else None, src=0)
    groups = [everybody, at_root if me.rank == 1 else [], objects[:1], dealt]
    return [torch.tensor([each["rank"] for each in group]) for group in groups]


def _group_methods(me: Member) -> list[Tensor]:
    """Calls with several tensors at a time, as torch's own tests make them."""
    rank = float(me.rank)
    reduced = [torch.full((2,), rank + 1)]
    _world().allreduce(reduced).wait()
    coalesced = [torch.full((2,), rank), torch.full((3,), rank)]
    _world().allreduce_coalesced(coalesced, c10d.AllreduceCoalescedOptions()).wait()
    parts = [torch.zeros(2) for _ in range(SIZE)]
    _world().allgather([parts], [torch.full((2,), rank)]).wait()
    lists = [[torch.zeros(2), torch.zeros(1)] for _ in range(SIZE)]
    _world().allgather_coalesced(lists, [torch.full((2,), rank), torch.full((1,), rank)]).wait()
    together = [torch.full((2,), rank + 1), torch.full((2,), rank + 2)]
    _world().allreduce(together).wait()
    largest = [torch.full((2,), rank + 1), torch.full((2,), rank + 2)]
    options = c10d.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    _world().allreduce(largest, options).wait()
    return [*reduced, *together, *largest, *coalesced, *parts, *(each for one in lists for each in one)]


def _tied_parameter(me: Member) -> list[Tensor]:
    """Writes below autograd: no new version, and a leaf stays one."""
    leaf = torch.full((3,), float(me.rank), requires_grad=True)
    version = leaf._version
    dist.all_reduce(leaf)
    return [leaf, torch.tensor([leaf._version - version, int(leaf.is_leaf), int(leaf.requires_grad)])]


def _result_of_backward(me: Member) -> list[Tensor]:
    """A tensor with a history."""
    leaf = torch.full((3,), float(me.rank + 1), requires_grad=True)
    product = leaf * 2
    dist.all_reduce(product)
    product.sum().backward()
    assert leaf.grad is not None
    return [product, leaf.grad]


def _in_inference(me: Member) -> list[Tensor]:
    with torch.inference_mode():
        mine = torch.full((3,), float(me.rank))
        dist.all_reduce(mine)
        return [mine.clone()]


def _stacked(me: Member) -> list[Tensor]:
    """One row for each rank, instead of one after the other."""
    rows = torch.zeros(SIZE, 2)
    all_gather_into_tensor(rows, torch.full((2,), float(me.rank)))
    mine = torch.zeros(2)
    reduce_scatter_tensor(mine, torch.full((SIZE, 2), float(me.rank)))
    return [rows, mine]


def _other_shapes(me: Member) -> list[Tensor]:
    """As many elements in another shape."""
    whole, mine = torch.zeros(SIZE * 6), torch.zeros(6)
    all_gather_into_tensor(whole, torch.full((2, 3), float(me.rank)))
    reduce_scatter_tensor(mine, torch.full((SIZE * 2, 3), float(me.rank)))
    return [whole, mine]


def _own_sizes(me: Member) -> list[Tensor]:
    """Lists in which the part of each rank has its own size."""
    mine = torch.zeros(me.rank + 1)
    dist.reduce_scatter(mine, [torch.full((part + 1,), float(me.rank)) for part in range(SIZE)])
    return [mine]


def _gathered_sizes(me: Member) -> list[Tensor]:
    parts = [torch.zeros(rank + 1) for rank in range(SIZE)]
    dist.all_gather(parts, torch.full((me.rank + 1,), float(me.rank)))
    return parts


def _exchanged_sizes(me: Member) -> list[Tensor]:
    parts = [torch.zeros(me.rank + 1) for _ in range(SIZE)]
    dist.all_to_all(parts, [torch.full((part + 1,), float(me.rank)) for part in range(SIZE)])
    return parts


def _nothing_for_some(me: Member) -> list[Tensor]:
    """Rank 0 gets everything."""
    out = torch.zeros(SIZE if me.rank == 0 else 0, 2)
    splits = [1 if me.rank == 0 else 0] * SIZE, [1, 0, 0]
    dist.all_to_all_single(out, torch.full((1, 2), float(me.rank)), *splits)
    return [out]


def _overwritten(me: Member) -> list[Tensor]:
    """A sender may overwrite what it has sent."""
    mine = torch.full((4,), float(me.rank))
    if me.rank == 0:
        dist.send(mine, 1)
        mine.fill_(9)
    if me.rank == 1:
        dist.recv(mine, 0)
    dist.broadcast(mine, 1)
    if me.rank == 1:
        mine.fill_(7)
    dist.barrier()
    return [mine]


UNUSUAL: Final[dict[str, Call]] = {
    "all_reduce of sparse tensors": _sparse_sum,
    "all_reduce of sparse tensors that are not coalesced": lambda me: _sparse_sum(me, twice=True),
    "all_reduce of a sparse gradient": _sparse_sum_of_a_gradient,
    "recv from anybody": _from_anybody,
    "recv from anybody of a group": lambda me: _from_anybody(me.of("two")),
    "two at once": _at_work,
    "objects": _objects,
    "the group's own methods": _group_methods,
    "all_reduce of a leaf": _tied_parameter,
    "all_reduce of a result": _result_of_backward,
    "all_reduce in inference mode": _in_inference,
    "rows for ranks": _stacked,
    "other shapes": _other_shapes,
    "reduce_scatter of own sizes": _own_sizes,
    "all_gather of own sizes": _gathered_sizes,
    "all_to_all of own sizes": _exchanged_sizes,
    "all_to_all_single of nothing for some": _nothing_for_some,
    "what was sent is overwritten": _overwritten,
    "barrier": _of(dist.barrier),
    "barrier with device_ids": _of(lambda: dist.barrier(device_ids=[0])),
    "barrier of a group": _in("two", lambda group: dist.barrier(group=group)),
    "monitored_barrier": _of(dist.monitored_barrier),
    "monitored_barrier that waits for all": _of(lambda: dist.monitored_barrier(wait_all_ranks=True)),
    "coalesced all_reduce": _of(lambda: _coalesced(_ones(2), _ones(3))),
    "coalesced all_reduce of nothing": _of(_coalesced),
}
