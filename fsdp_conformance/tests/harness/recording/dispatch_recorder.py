"""
A second recorder of collectives, independent of the first: a dispatch mode that watches the operators themselves.

It needs no special process group, so it works on stock groups, and two recorders that agree are evidence that neither
missed anything. It sees what this thread issues inside the `with` block, and backward passes started from there.

    with DispatchRecorder() as recorder:
        train()
    recorder.records

It has its own table on purpose, and shares no arithmetic with `harness.recording.collective_calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_conformance.harness.context import log
from fsdp_conformance.harness.recording.collective_log import CollectiveLog, Traffic
from fsdp_conformance.history.collective import CollectiveRecord, Op

#: Namespaces of operators that communicate: c10d's own, and the functional collectives above it.
NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor"})

Arguments = dict[str, Any]


class _Operator(NamedTuple):
    op: Op
    counted: str
    """The schema's argument that holds the unsharded side, or one rank's part of it."""
    times: Callable[[Arguments], int] = lambda arguments: 1
    """The factor for its bytes."""


def _group_size(arguments: Arguments) -> int:
    return _group(arguments).size()


def _declared_size(arguments: Arguments) -> int:
    size: int = arguments["group_size"]
    return size


#: c10d operators, which write to the caller's tensors.
_C10D = {
    "allgather_": _Operator(Op.ALL_GATHER, "output_tensors"),
    "_allgather_base_": _Operator(Op.ALL_GATHER, "output_tensor"),
    "allgather_coalesced_": _Operator(Op.ALL_GATHER, "output_lists"),
    "allgather_into_tensor_coalesced_": _Operator(Op.ALL_GATHER, "outputs"),
    "reduce_scatter_": _Operator(Op.REDUCE_SCATTER, "input_tensors"),
    "_reduce_scatter_base_": _Operator(Op.REDUCE_SCATTER, "input_tensor"),
    "reduce_scatter_tensor_coalesced_": _Operator(Op.REDUCE_SCATTER, "inputs"),
    "allreduce_": _Operator(Op.ALL_REDUCE, "tensors"),
    "allreduce_coalesced_": _Operator(Op.ALL_REDUCE, "tensors"),
    "broadcast_": _Operator(Op.BROADCAST, "tensors"),
    "reduce_": _Operator(Op.REDUCE, "tensors"),
    "gather_": _Operator(Op.GATHER, "input_tensors", _group_size),
    "scatter_": _Operator(Op.SCATTER, "output_tensors", _group_size),
    "alltoall_": _Operator(Op.ALL_TO_ALL, "input_tensors"),
    "alltoall_base_": _Operator(Op.ALL_TO_ALL, "input"),
    "barrier": _Operator(Op.BARRIER, ""),
    "monitored_barrier_": _Operator(Op.BARRIER, ""),
    "send": _Operator(Op.SEND, "tensors"),
    "recv_": _Operator(Op.RECV, "tensors"),
    "recv_any_source_": _Operator(Op.RECV, "tensors"),
}

#: Functional operators: they get only the input, and the size of the group if the output is larger.
_FUNCTIONAL = {
    "all_gather_into_tensor": _Operator(Op.ALL_GATHER, "input", _declared_size),
    "all_gather_into_tensor_out": _Operator(Op.ALL_GATHER, "input", _declared_size),
    "all_gather_into_tensor_coalesced": _Operator(Op.ALL_GATHER, "inputs", _declared_size),
    "reduce_scatter_tensor": _Operator(Op.REDUCE_SCATTER, "input"),
    "reduce_scatter_tensor_out": _Operator(Op.REDUCE_SCATTER, "input"),
    "reduce_scatter_tensor_coalesced": _Operator(Op.REDUCE_SCATTER, "inputs"),
    "all_reduce": _Operator(Op.ALL_REDUCE, "input"),
    "all_reduce_": _Operator(Op.ALL_REDUCE, "input"),
    "all_reduce_coalesced": _Operator(Op.ALL_REDUCE, "inputs"),
    "all_reduce_coalesced_": _Operator(Op.ALL_REDUCE, "inputs"),
    "broadcast": _Operator(Op.BROADCAST, "input"),
    "broadcast_": _Operator(Op.BROADCAST, "input"),
    "all_to_all_single": _Operator(Op.ALL_TO_ALL, "input"),
    "shard_dim_alltoall": _Operator(Op.ALL_TO_ALL, "input"),
    "isend": _Operator(Op.SEND, "tensor"),
    "irecv": _Operator(Op.RECV, "tensor"),
}

#: Operators of these namespaces that move nothing between ranks.
_SILENT = frozenset({"wait_tensor", "_wrap_tensor_autograd", "check_for_nan", "mesh_get_process_group"})


class DispatchRecorder(TorchDispatchMode):
    """Records every collective operator that is dispatched while it is entered."""

    def __init__(self, labels: CollectiveLog | None = None) -> None:
        super().__init__()
        self.log = CollectiveLog()
        self.unknown: list[str] = []
        """Operators of these namespaces that the tables lack. If there are any, the counts are too low."""
        self._labels = labels or log()

    @property
    def records(self) -> list[CollectiveRecord]:
        """The recorded collectives in order, labelled with the phases of the rank's log."""
        return self.log.records

    def schedule(self) -> list[str]:
        """One line per collective, as `CollectiveLog.schedule`."""
        return self.log.schedule()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in NAMESPACES:
            self._note(func, args, kwargs or {})
        elif DTensor in types:
            # A DTensor redistributes inside its own dispatch, and a mode does not see what runs below its own call, so
            # the DTensor goes first, with this mode still on.
            return NotImplemented
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = func._schema.name.split("::")[1]
        by_name = zip((argument.name for argument in func._schema.arguments), args, strict=False)
        arguments: Arguments = {**dict(by_name), **kwargs}
        if name == "batch_p2p_ops":
            for direction, tensor in zip(arguments["op_list"], arguments["tensors"], strict=True):
                operator = _FUNCTIONAL["isend" if "send" in direction else "irecv"]
                self._add(func, operator, arguments | {"tensor": tensor})
            return
        collective = (_C10D if func.namespace == "c10d" else _FUNCTIONAL).get(name)
        if collective is not None:
            self._add(func, collective, arguments)
        elif name not in _SILENT:
            self.unknown.append(func._schema.name)

    def _add(self, func: Any, operator: _Operator, arguments: Arguments) -> None:
        counted = [leaf for leaf in tree_leaves(arguments.get(operator.counted)) if isinstance(leaf, Tensor)]
        traffic = Traffic(
            op=operator.op,
            inputs=(),
            outputs=(),
            nbytes=sum(map(_bytes_of, counted)) * operator.times(arguments),
            dtype=_words(str(tensor.dtype).split(".")[-1] for tensor in counted),
            device=_words(tensor.device.type for tensor in counted),
            reduce_op=_reduce_op(arguments.get("reduce_op")),
            num_tensors=max(1, len(counted)),
        )
        ranks = tuple(dist.get_process_group_ranks(_group(arguments)))
        self.log.note(func._schema.name, ranks, traffic, label=self._labels.label)


def _bytes_of(tensor: Tensor) -> int:
    if tensor.is_sparse:
        return _bytes_of(tensor._indices()) + _bytes_of(tensor._values())
    return tensor.numel() * tensor.itemsize


def _words(words: Iterable[str]) -> str:
    return "/".join(sorted({*words}))


def _reduce_op(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value.upper()
    # An operator gets the boxed C++ object, whose method `op` gives the number of the enum's member.
    number = value.op()
    return next(name for name, member in dist.ReduceOp.RedOpType.__members__.items() if member.value == number)


def _group(arguments: Arguments) -> ProcessGroup:
    """The group that an operator runs on. A recording group's operators run on its twin, which has the same name."""
    value = arguments.get("process_group", arguments.get("group_name"))
    if isinstance(value, torch.ScriptObject):
        value = ProcessGroup.unbox(value)
    name: Any = value.group_name if isinstance(value, ProcessGroup) else value
    return _resolve_process_group(name)
