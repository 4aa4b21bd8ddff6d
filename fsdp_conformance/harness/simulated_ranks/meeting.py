"""
A collective of simulated ranks: each rank brings its inputs and outputs, and the last to arrive computes the results.

Results are those of a backend that adds in rank order. Inputs are not copied unless their owner may continue at once
(the root of a broadcast): as with any asynchronous backend, a rank that writes into an input before it has waited sends
something else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_conformance.harness.simulated_ranks.arguments import ROOTED
from fsdp_conformance.history.collective import Op

T = TypeVar("T")


@dataclass(slots=True)
class Contribution:
    """One rank's contribution to a collective."""

    op: Op
    call: str
    """The call in messages: "all_reduce(SUM, 12 float32) at model.py:7 in step"."""
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    reduce_op: str = ""
    root: int = 0
    """Rank in the group."""
    sizes: tuple[int, ...] | None = None
    """The rows of the input for each rank, in an all-to-all of single tensors; empty for equal parts."""
    together: bool = False
    """True for an all-reduce in which the tensors of each rank are reduced together, to one result."""
    refused: str = ""
    """The reason why the rank cannot have its result, although the others can have theirs; empty if it can."""
    is_there: bool = False
    """True if the outputs hold the result."""

    @property
    def agreed(self) -> tuple[object, ...]:
        """The properties that must be equal on all ranks."""
        moved = self.inputs or self.outputs
        dtypes = sorted(map(str, {tensor.dtype for tensor in moved}))
        if self.op is Op.ALL_TO_ALL:
            return (self.op, dtypes)
        return (self.op, self.reduce_op, self.root, dtypes, self._agreed_numel())

    def _agreed_numel(self) -> object:
        if self.op is Op.SCATTER:
            return [tensor.numel() for tensor in self.outputs]
        if self.op is Op.REDUCE_SCATTER:
            return sum(tensor.numel() for tensor in self.inputs)
        return [tensor.numel() for tensor in self.inputs]


class Brought(list["Contribution | None"]):
    """The contributions by rank, None for a rank that has not arrived, and what several results are made of."""

    def __init__(self, size: int) -> None:
        super().__init__([None] * size)
        self._made: dict[str, Any] = {}

    def once(self, name: str, make: Callable[[], T]) -> T:
        """The result of `make`, called once per name: work that is the same for all ranks."""
        if name not in self._made:
            self._made[name] = make()
        made: T = self._made[name]
        return made

    def forget(self) -> None:
        """Drop what was made, because the Work of each rank keeps the meeting alive."""
        self._made.clear()


class Meeting:
    """
    One collective of a group of `size` ranks, from the first arrival to the last.

    The work of an arrival does not depend on the number of ranks, except where it completes the results of others.
    """

    def __init__(self, size: int) -> None:
        self.brought = Brought(size)
        self.number_of_arrived = 0
        self._first: tuple[int, Contribution, tuple[object, ...]] | None = None
        """The rank that came first, its contribution, and what the others must agree on."""
        self._waiting: dict[int, Contribution] = {}
        """The contributions whose result cannot be computed yet, by rank."""

    def join(self, rank: int, contribution: Contribution, names: Sequence[int]) -> str:
        """
        Rank `rank` of the group has arrived. Returns how its call differs from the others' calls, or "".

        `names` are the global ranks of the group, for the message.
        """
        # All others were compared with the first.
        agreed = contribution.agreed
        other, first, expected = self._first = self._first or (rank, contribution, agreed)
        if expected != agreed:
            mine, theirs = f"rank {names[rank]} called {contribution.call}", f"rank {names[other]} called {first.call}"
            return f"{mine}, but {theirs}: {_difference(expected, agreed)} differ"
        if contribution.op in ROOTED and _sends(contribution, rank):
            contribution.inputs = tuple(tensor.detach().clone() for tensor in contribution.inputs)
        self.brought[rank] = contribution
        self.number_of_arrived += 1
        self._waiting[rank] = contribution
        # An arrival that does not suffice for its own result does not for another's either.
        if self._suffices(rank, contribution):
            with _plainly():
                self._carry_out()
        return ""

    def missing(self) -> list[int]:
        """The ranks of the group that have not arrived."""
        return [rank for rank, contribution in enumerate(self.brought) if contribution is None]

    @property
    def is_complete(self) -> bool:
        """True if every rank has arrived."""
        return self.number_of_arrived == len(self.brought)

    def _carry_out(self) -> None:
        """Write the result of every rank whose result can be computed now."""
        computable = [(rank, self._waiting[rank]) for rank in sorted(self._waiting)]
        computable = [(rank, contribution) for rank, contribution in computable if self._suffices(rank, contribution)]
        # Compute all results before writing any: an output may overlap an input. A common result is computed once.
        common: dict[int, list[Tensor]] = {}
        results = []
        for rank, contribution in computable:
            form = len(contribution.outputs) if contribution.op in _COMMON else -1 - rank
            if form not in common:
                common[form] = RESULTS[contribution.op](self.brought, rank)
            results.append(common[form])
        for (rank, contribution), values in zip(computable, results, strict=True):
            for output, value in zip(contribution.outputs, values, strict=True):
                _write(output, value)
            contribution.is_there = True
            del self._waiting[rank]
        self.brought.forget()

    def _suffices(self, rank: int, contribution: Contribution) -> bool:
        if contribution.op in (Op.BROADCAST, Op.SCATTER):
            return self.brought[contribution.root] is not None
        if contribution.op in (Op.GATHER, Op.REDUCE):
            return self.is_complete or rank != contribution.root
        return self.is_complete


def _write(output: Tensor, value: Tensor) -> None:
    # Through `data`: a backend writes below autograd, and does not change the version. The `data` of a sparse tensor
    # has its own indices, so what is written there stays there.
    if output.layout is not torch.strided:
        output.copy_(value)
    elif output.data_ptr() != value.data_ptr():
        output.data.copy_(value.reshape(output.shape))


#: Collectives with the same result on every rank, in one tensor or in one for each rank.
_COMMON: Final = frozenset({Op.ALL_REDUCE, Op.ALL_GATHER})


def _sends(contribution: Contribution, rank: int) -> bool:
    """True if a rank of a collective with a root need not wait for the others, and so may overwrite its inputs."""
    return (rank == contribution.root) == (contribution.op in (Op.BROADCAST, Op.SCATTER))


def _difference(one: Sequence[object], other: Sequence[object]) -> str:
    names = ("the operations", "the reductions", "the roots", "the dtypes", "the sizes")
    for name, mine, theirs in zip(names, one, other, strict=False):
        if mine != theirs:
            return name
    return "the operations"


@contextmanager
def _plainly() -> Iterator[None]:
    """No gradients, and none of the caller's modes: they do not see what a backend does in C++ either."""
    with torch.no_grad(), _disable_current_modes():
        yield


# --- results: from a `Brought`, with all contributions that it takes, for one rank, in the order of its outputs ---


def _all_reduced(brought: Any, rank: int) -> list[Tensor]:
    count = len(brought[rank].inputs)
    if brought[rank].together and count > 1:
        return [_reduced([tensor for one in brought for tensor in one.inputs], brought[rank].reduce_op)] * count
    return [_reduced([one.inputs[index] for one in brought], brought[rank].reduce_op) for index in range(count)]


def _reduced_at_root(brought: Any, rank: int) -> list[Tensor]:
    # Other ranks keep what they have: torch leaves it undefined.
    return _all_reduced(brought, rank) if rank == brought[rank].root else list(brought[rank].outputs)


def _all_gathered(brought: Any, rank: int) -> list[Tensor]:
    own = brought[rank]
    if len(own.outputs) == len(own.inputs):
        return [torch.cat([one.inputs[index].reshape(-1) for one in brought]) for index in range(len(own.inputs))]
    return [tensor for one in brought for tensor in one.inputs]


def reduce_scattered(brought: Any, rank: int) -> list[Tensor]:
    own = brought[rank]
    if len(own.inputs) > len(own.outputs):
        return [_reduced([one.inputs[rank] for one in brought], own.reduce_op)]
    # The whole is reduced once, and each rank takes its part: reducing the parts apart adds up to as many calls per
    # rank as there are ranks.
    wholes = brought.once("reduced", lambda: _all_reduced(brought, rank))
    parts = []
    for whole, output in zip(wholes, own.outputs, strict=True):
        begin = rank * output.numel()
        parts.append(whole.reshape(-1)[begin : begin + output.numel()])
    return parts


def _broadcast(brought: Any, rank: int) -> list[Tensor]:
    return list(brought[brought[rank].root].inputs)


def _scattered(brought: Any, rank: int) -> list[Tensor]:
    own = brought[rank]
    return [brought[own.root].inputs[rank]]


def _gathered(brought: Any, rank: int) -> list[Tensor]:
    if rank != brought[rank].root:
        return []
    return [one.inputs[0] for one in brought]


def _exchanged(brought: Any, rank: int) -> list[Tensor]:
    own = brought[rank]
    if own.sizes is None:
        return [one.inputs[rank] for one in brought]
    columns = brought.once(
        "columns", lambda: list(zip(*(_rows_sent(one, len(brought)) for one in brought), strict=True))
    )
    return [torch.cat(columns[rank])]


def _rows_sent(one: Contribution, size: int) -> tuple[Tensor, ...]:
    """The rows that a rank sends to each of the `size` ranks."""
    (whole,) = one.inputs
    return torch.split(whole, list(one.sizes or ()) or [whole.shape[0] // size] * size)


RESULTS: Final[dict[Op, Callable[[Any, int], list[Tensor]]]] = {
    Op.ALL_REDUCE: _all_reduced,
    Op.REDUCE: _reduced_at_root,
    Op.REDUCE_SCATTER: reduce_scattered,
    Op.ALL_GATHER: _all_gathered,
    Op.BROADCAST: _broadcast,
    Op.SCATTER: _scattered,
    Op.GATHER: _gathered,
    Op.ALL_TO_ALL: _exchanged,
    Op.BARRIER: lambda brought, rank: [],
}


_PAIRWISE: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def _reduced(tensors: Sequence[Tensor], reduce_op: str) -> Tensor:
    """((r0 + r1) + r2) + ..., rounded to the dtype after each. Sparse sums are coalesced, as gloo's are."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = _PAIRWISE[reduce_op](total, tensor)
    if total.layout is torch.sparse_coo:
        return total.coalesce()
    return total.div_(len(tensors)) if reduce_op == "AVG" else total


@dataclass(slots=True)
class Channel:
    """The messages from one rank to another under one tag, first in, first out."""

    sent: deque[Tensor] = field(default_factory=deque)
    expected: deque[Contribution] = field(default_factory=deque)

    def deliver(self) -> str:
        """Deliver the messages that a receiver expects. Returns why one does not fit, or ""."""
        while self.sent and self.expected:
            sent, expected = self.sent.popleft(), self.expected.popleft()
            output = expected.outputs[0]
            if (output.numel(), output.dtype) != (sent.numel(), sent.dtype):
                return f"{expected.call} was sent {sent.numel()} {sent.dtype}: the sizes or dtypes differ"
            with _plainly():
                output.data.copy_(sent.reshape(output.shape))
            expected.is_there = True
        return ""
