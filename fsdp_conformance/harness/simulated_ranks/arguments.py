"""
Arguments that gloo refuses before it communicates: invalid roots, reductions, dtypes, layouts and sizes.

Ranks on gloo get an error from their own call. So do simulated ranks, each from its own arguments: otherwise elements
would be dropped, or another rank would be taken for the root, without a word, and a program would fail only once it
runs on real ranks. Also refused are arguments that gloo accepts and gets wrong: tensors with gaps, whose elements it
takes for adjacent, and scalars in a reduce-scatter of tensors, with which it ends the process (torch 2.13). What ranks
must agree on is compared when they meet (`meeting`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fsdp_conformance.errors import InvalidCollective, ScalarCollective
from fsdp_conformance.history.collective import Op

#: The reductions that simulated ranks can do.
REDUCTIONS: Final = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")

#: The dtypes that gloo's collectives take; messages between two ranks are bytes. torch passes complex tensors as real.
DTYPES: Final = frozenset(
    {
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
        torch.bool,
    }
)  # fmt: skip

#: Collectives that have a root.
ROOTED: Final = frozenset({Op.BROADCAST, Op.SCATTER, Op.GATHER, Op.REDUCE})

_MESSAGES: Final = frozenset({Op.SEND, Op.RECV})

#: Where gloo takes the elements of a tensor for adjacent.
_ADJACENT: Final = frozenset({Op.ALL_REDUCE, Op.REDUCE, Op.BROADCAST, Op.SCATTER, Op.REDUCE_SCATTER})


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The arguments of a collective, or of a message, on one rank."""

    op: Op
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()
    reduce_op: str = ""
    root: int = 0
    rank: int
    """The caller's rank in the group."""
    size: int
    """The size of the group."""
    coalesced: bool = False
    """True if several collectives are issued as one."""
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Rows of the output and of the input by rank, empty for equal parts; only of an all-to-all of single tensors."""

    @property
    def tensors(self) -> list[Tensor]:
        """Inputs, then outputs."""
        return [*self.inputs, *self.outputs]


def require_call(call: Call) -> None:
    """Raise InvalidCollective unless the rank can take part with these arguments."""
    problems = [*_of_reduction(call), *_of_root(call), *_of_layout(call), *_of_dtypes(call)]
    problems = problems or [*_of_outputs(call), *_of_sizes(call)]
    if problems:
        scalar = call.op is Op.ALL_TO_ALL and any(not tensor.dim() for tensor in call.tensors)
        kind = ScalarCollective if scalar else InvalidCollective
        raise kind(problems, where=f"{call.op.value} of simulated ranks")


def require_message(op: Op, peer: int, tag: int, *, rank: int, size: int) -> None:
    """Raise InvalidCollective unless rank `rank` of a group of `size` ranks can exchange a message with that peer."""
    problems = []
    if not 0 <= peer < size:
        problems.append(f"the peer must be a rank of the group, from 0 to {size - 1}, got {peer}")
    elif peer == rank:
        problems.append(f"the peer must be another rank, got {peer}, which is this one")
    if tag < 0:
        problems.append(f"tag must be at least 0, got {tag}")
    if problems:
        raise InvalidCollective(problems, where=f"{op.value} of simulated ranks")


def _of_reduction(call: Call) -> Iterator[str]:
    if not call.reduce_op:
        return
    if call.reduce_op not in REDUCTIONS:
        yield f"reduce_op must be one of {', '.join(REDUCTIONS)}, got {call.reduce_op}"
    floating = any(tensor.is_floating_point() or tensor.is_complex() for tensor in call.tensors)
    if floating and call.reduce_op in ("BAND", "BOR", "BXOR"):
        yield f"reduce_op={call.reduce_op} requires integer tensors, got floating-point ones"
    if not floating and call.reduce_op == "AVG":
        yield "reduce_op=AVG requires floating-point tensors, got integer ones"


def _of_root(call: Call) -> Iterator[str]:
    if call.op in ROOTED and not 0 <= call.root < call.size:
        yield f"the root must be a rank of the group, from 0 to {call.size - 1}, got {call.root}"


def _of_layout(call: Call) -> Iterator[str]:
    if call.op is not Op.BARRIER and not call.tensors:
        yield "there must be at least one tensor, got none"
    if all(tensor.layout is torch.strided for tensor in call.tensors):
        yield from _of_gaps(call)
    elif call.op is not Op.ALL_REDUCE:
        yield "tensors must be dense, got a sparse one. Only all_reduce takes sparse tensors"
    elif call.reduce_op != "SUM":
        yield f"reduce_op must be SUM for sparse tensors, got {call.reduce_op}"
    elif any(tensor.layout is not torch.sparse_coo for tensor in call.tensors):
        layouts = ", ".join(sorted({str(tensor.layout) for tensor in call.tensors}))
        yield f"sparse tensors must have the layout torch.sparse_coo, got {layouts}"


def _of_gaps(call: Call) -> Iterator[str]:
    if call.op in _MESSAGES:
        gapped = [tensor for tensor in call.tensors if not tensor.is_contiguous()]
    elif call.splits is not None:
        gapped = [tensor for tensor in call.tensors if not _is_contiguous_somehow(tensor)]
    elif call.op in _ADJACENT and not _is_of_wholes(call):
        gapped = [tensor for tensor in call.tensors if not torch.ops.aten.is_non_overlapping_and_dense(tensor)]
    else:
        gapped = []
    if gapped:
        yield (
            f"tensors must be contiguous, got shape {tuple(gapped[0].shape)} with strides {gapped[0].stride()}: call "
            "contiguous() on it, and copy the result back"
        )


def _is_of_wholes(call: Call) -> bool:
    """True if it reduces whole tensors and scatters them, instead of a list of parts."""
    return call.op is Op.REDUCE_SCATTER and (call.coalesced or len(call.inputs) == len(call.outputs))


def _is_contiguous_somehow(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def _of_dtypes(call: Call) -> Iterator[str]:
    if call.op in _MESSAGES:
        return
    supported_dtypes = DTYPES
    if call.op in (Op.REDUCE, Op.REDUCE_SCATTER) and call.reduce_op in ("SUM", "AVG"):
        supported_dtypes = DTYPES | {torch.complex64, torch.complex128}
    unknown = sorted({str(tensor.dtype) for tensor in call.tensors if tensor.dtype not in supported_dtypes})
    if unknown:
        supported = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in DTYPES))
        yield f"dtype must be one of {supported}, got {', '.join(unknown)}: gloo has no other"
    # The pairs of a coalesced gather may differ from each other.
    pairs = [call.tensors]
    if call.op in (Op.ALL_GATHER, Op.REDUCE_SCATTER) and len(call.inputs) == len(call.outputs):
        pairs = [list(pair) for pair in zip(call.inputs, call.outputs, strict=True)]
    for pair in pairs:
        dtypes = sorted({str(tensor.dtype) for tensor in pair})
        if len(dtypes) > 1:
            yield f"tensors must have one dtype, got {', '.join(dtypes)}"


def _of_outputs(call: Call) -> Iterator[str]:
    lists = call.op is Op.ALL_TO_ALL and call.splits is None
    if (lists or call.op in (Op.ALL_GATHER, Op.REDUCE_SCATTER)) and any(map(is_parameter, call.outputs)):
        yield PARAMETER_AS_OUTPUT


#: gloo writes into some outputs by operations that autograd sees.
PARAMETER_AS_OUTPUT: Final = (
    "the output must not be a parameter that requires gradients, nor a view of one: pass its data"
)


def is_parameter(tensor: Tensor) -> bool:
    """True if autograd refuses to write into it, here and now."""
    return torch.is_grad_enabled() and tensor.requires_grad and (tensor.is_leaf or tensor._is_view())


def _of_sizes(call: Call) -> Iterator[str]:
    """Problems if the inputs of a rank do not fit its outputs."""
    inputs, outputs, size = call.inputs, call.outputs, call.size
    if call.op is Op.ALL_GATHER:
        yield from _gathered("input", inputs, "output", outputs, size)
    elif call.op is Op.REDUCE_SCATTER and len(inputs) == size and len(outputs) == 1 and not call.coalesced:
        if inputs[call.rank].shape != outputs[0].shape:
            yield _unlike("input", inputs[call.rank], "output", outputs[0], f" at {call.rank}")
    elif call.op is Op.REDUCE_SCATTER:
        yield from _gathered("output", outputs, "input", inputs, size)
    elif call.op is Op.GATHER and call.rank == call.root:
        yield from _listed("input", inputs, "output", outputs, size)
    elif call.op is Op.SCATTER and call.rank == call.root:
        yield from _listed("output", outputs, "input", inputs, size)
    elif call.op is Op.ALL_TO_ALL:
        yield from _exchanged(call)
    elif call.op is Op.REDUCE and len(inputs) > 1:
        yield f"there must be one tensor, got {len(inputs)}"
    elif call.op is Op.ALL_REDUCE and not call.coalesced:
        for index, tensor in enumerate(inputs):
            if tensor.shape != inputs[0].shape:
                yield _unlike("input", tensor, "first input", inputs[0], f" at {index}")
                return


def _gathered(one: str, parts: Sequence[Tensor], other: str, wholes: Sequence[Tensor], size: int) -> Iterator[str]:
    """Problems if one rank's parts do not fit what has the parts of all: a whole tensor for each part, or a list."""
    if len(parts) != len(wholes):
        yield from _listed(one, parts, other, wholes, size)
        return
    for part, whole in zip(parts, wholes, strict=True):
        if not part.dim():
            yield f"the {one} must have at least one dimension, got a scalar"
        elif whole.shape != (size * part.shape[0], *part.shape[1:]):
            shape = (size * part.shape[0], *part.shape[1:])
            yield f"the {other} must have shape {shape}, {size} times the {one}, got {tuple(whole.shape)}"


def _listed(one: str, parts: Sequence[Tensor], other: str, listed: Sequence[Tensor], size: int) -> Iterator[str]:
    """Problems if one rank's parts do not fit a list of the parts of all."""
    if len(listed) != size * len(parts):
        yield f"the {other} must be a list of {size * len(parts)} tensors, got {len(listed)}"
        return
    for index, tensor in enumerate(listed):
        if tensor.shape != parts[index % len(parts)].shape:
            yield _unlike(other, tensor, one, parts[index % len(parts)], f" at {index}")
            return


def _unlike(one: str, got: Tensor, other: str, like: Tensor, where: str) -> str:
    return f"the {one} must have shape {tuple(like.shape)}, like the {other}, got {tuple(got.shape)}{where}"


def _exchanged(call: Call) -> Iterator[str]:
    """Problems of an all-to-all: of lists, all of one shape, or of the rows of single tensors."""
    if call.splits is None:
        for name, listed in (("output", call.outputs), ("input", call.inputs)):
            if len(listed) != call.size:
                yield f"the {name} must be a list of {call.size} tensors, got {len(listed)}"
            for index, tensor in enumerate(listed):
                if call.outputs and tensor.shape != call.outputs[0].shape:
                    yield _unlike(name, tensor, "first output", call.outputs[0], f" at {index}")
                    return
        return
    if not (call.outputs[0].dim() and call.inputs[0].dim()):
        yield "tensors must have at least one dimension, got a scalar"
        return
    for name, rows, splits in zip(
        ("output", "input"), (call.outputs[0].shape[0], call.inputs[0].shape[0]), call.splits, strict=True
    ):
        if not splits and rows % call.size:
            yield f"the rows of the {name} must be a multiple of {call.size}, got {rows}"
        elif splits and (len(splits) != call.size or min(splits) < 0 or sum(splits) != rows):
            yield (
                f"{name}_split_sizes must be {call.size} numbers that add up to {rows}, the rows of the {name}, "
                f"got {list(splits)}"
            )
    if not any(call.splits) and call.inputs[0].numel() != call.outputs[0].numel():
        yield f"the output must have the elements of the input, {call.inputs[0].numel()}, got {call.outputs[0].numel()}"
