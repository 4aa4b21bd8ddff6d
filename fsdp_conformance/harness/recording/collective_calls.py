"""
Interprets calls of a process group's methods: which collective, which tensors, how many bytes.

Bytes are those of the *unsharded* side, because that side is comparable between engines: an all-gather's output, a
reduce-scatter's input, an all-to-all's input, everything that a root gathers or scatters, and the buffer of in-place
collectives. torch has several methods for one collective, and renames them (2.13: `_allgather_base` became
`all_gather_single`). All names are listed here, and each maps to an `Op`.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from fsdp_conformance.harness.recording.collective_log import Traffic
from fsdp_conformance.history.collective import Op


class _Call(NamedTuple):
    """Where a method has its tensors. Arguments are found by position, or by a prefix of their keyword."""

    op: Op
    outputs: int | None = None
    inputs: int | None = None
    in_place: bool = False
    """Argument 0, a list of tensors, is both input and output."""
    unsharded: str = "outputs"
    """The side whose bytes are counted."""
    per_rank: bool = False
    """True: that side is one rank's part, to be multiplied by the size of the group."""


_ALL_GATHER = _Call(Op.ALL_GATHER, outputs=0, inputs=1)
_REDUCE_SCATTER = _Call(Op.REDUCE_SCATTER, outputs=0, inputs=1, unsharded="inputs")
# Only the root has the whole, but all ranks must count the same bytes: those of one part, times the ranks.
_GATHER = _Call(Op.GATHER, outputs=0, inputs=1, unsharded="inputs", per_rank=True)
_ALL_TO_ALL = _Call(Op.ALL_TO_ALL, outputs=0, inputs=1, unsharded="inputs")
_BARRIER = _Call(Op.BARRIER)

#: Every method of `ProcessGroup` that communicates, under all names it has had since torch 2.6.
METHODS = {
    "allgather": _ALL_GATHER,
    "_allgather_base": _ALL_GATHER,
    "all_gather_single": _ALL_GATHER,
    "allgather_coalesced": _ALL_GATHER,
    "allgather_into_tensor_coalesced": _ALL_GATHER,
    "all_gather_single_coalesced": _ALL_GATHER,
    "reduce_scatter": _REDUCE_SCATTER,
    "_reduce_scatter_base": _REDUCE_SCATTER,
    "reduce_scatter_single": _REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": _REDUCE_SCATTER,
    "reduce_scatter_single_coalesced": _REDUCE_SCATTER,
    "allreduce": _Call(Op.ALL_REDUCE, in_place=True),
    "allreduce_coalesced": _Call(Op.ALL_REDUCE, in_place=True),
    "broadcast": _Call(Op.BROADCAST, in_place=True),
    "reduce": _Call(Op.REDUCE, in_place=True),
    "gather": _GATHER,
    "gather_into_tensor": _GATHER,
    "gather_single": _GATHER,
    "scatter": _Call(Op.SCATTER, outputs=0, inputs=1, per_rank=True),
    "alltoall": _ALL_TO_ALL,
    "alltoall_base": _ALL_TO_ALL,
    "all_to_all_single": _ALL_TO_ALL,
    "barrier": _BARRIER,
    "monitored_barrier": _BARRIER,
    "send": _Call(Op.SEND, inputs=0, unsharded="inputs"),
    "recv": _Call(Op.RECV, outputs=0),
    "recv_anysource": _Call(Op.RECV, outputs=0),
}

_REDUCING = frozenset({Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER})


def traffic_of(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], group_size: int) -> Traffic:
    """The traffic of one call of the method `name` of a process group of `group_size` ranks."""
    call = METHODS[name]
    if call.in_place:
        outputs = inputs = _argument(0, "tensor", args, kwargs)
    else:
        outputs = _argument(call.outputs, "output", args, kwargs)
        inputs = _argument(call.inputs, "input", args, kwargs)
    counted = inputs if call.unsharded == "inputs" else outputs
    return Traffic(
        op=call.op,
        inputs=inputs,
        outputs=outputs,
        nbytes=sum(map(nbytes, counted)) * (group_size if call.per_rank else 1),
        dtype=joined(str(dtype).removeprefix("torch.") for dtype in {tensor.dtype for tensor in counted}),
        device=joined(device.type for device in {tensor.device for tensor in counted}),
        reduce_op=_reduce_op(args, kwargs) if call.op in _REDUCING else "",
        num_tensors=len(counted) or 1,
    )


def nbytes(tensor: Tensor) -> int:
    """The bytes of a tensor on the wire; for a sparse tensor, those of its indices and values."""
    if tensor.layout == torch.sparse_coo:
        return nbytes(tensor._indices()) + nbytes(tensor._values())
    return tensor.numel() * tensor.element_size()


def joined(words: Iterator[str]) -> str:
    """The distinct words, sorted, "/" between them."""
    return "/".join(sorted(set(words)))


def reduce_op_name(value: Any) -> str:
    """ "SUM" for `ReduceOp.SUM`, for the object in an options struct, and for a functional collective's "sum"."""
    if isinstance(value, str):
        return value.upper()
    name: str = getattr(value, "op", value).name
    return name


def root_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The root, as a rank of the group, from an options struct or a separate argument; 0 if there is none."""
    options = [*args, *kwargs.values()]
    for option in options:
        if hasattr(option, "rootRank"):
            return int(option.rootRank)
    roots = [option for option in options if is_integer(option)]
    return operator.index(kwargs.get("root", roots[0] if roots else 0))


def is_integer(value: Any) -> bool:
    """True for Python's and NumPy's integers, which torch takes for a rank; not for flags."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def input_splits_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The sizes that an all-to-all of single tensors splits its input into; () if equal, None for other calls."""
    return _splits_of(name, args, kwargs, position=3, keyword="input_split_sizes")


def output_splits_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The sizes that an all-to-all of single tensors splits its output into; () if equal, None for other calls."""
    return _splits_of(name, args, kwargs, position=2, keyword="output_split_sizes")


def _splits_of(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, position: int, keyword: str
) -> tuple[int, ...] | None:
    if name not in ("alltoall_base", "all_to_all_single"):
        return None
    return tuple(map(operator.index, args[position] if len(args) > position else kwargs.get(keyword, ())))


def _argument(
    position: int | None, keyword: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor, ...]:
    """The tensors of one argument, flat: a tensor, a list of tensors, or a list of lists."""
    if position is None:
        return ()
    if position < len(args):
        return tuple(_tensors(args[position]))
    return tuple(tensor for key, value in kwargs.items() if key.startswith(keyword) for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _reduce_op(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The reduce op in the arguments, bare or in an options struct; SUM is the default of every method."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, (ReduceOp, ReduceOp.RedOpType)):
            return reduce_op_name(value)
        if hasattr(value, "reduceOp"):
            return reduce_op_name(value.reduceOp)
    return "SUM"
