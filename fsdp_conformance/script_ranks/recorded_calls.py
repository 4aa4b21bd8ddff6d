"""
The collectives that the harness records in a rank, in the form in which ranks compare them.

A collective is compared with those of the other ranks (`simulator.collectives.agreement`), then issued.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed import Work, distributed_c10d

from fsdp_conformance.harness.recording.collective_calls import input_splits_of, is_integer, output_splits_of, root_of
from fsdp_conformance.harness.recording.collective_log import Collective
from fsdp_conformance.history.collective import Op
from fsdp_conformance.simulator.checker.labels import caller_of_backward
from fsdp_conformance.simulator.collectives.agreement import (
    Agreement,
    device_order,
    is_paired,
    place_of,
    title_of,
    visible_index,
    words_of,
)
from fsdp_conformance.simulator.collectives.calls import Call, Channel
from fsdp_conformance.simulator.device import build

#: Collectives with a root that all ranks must agree on.
_ROOTED = frozenset({Op.BROADCAST, Op.SCATTER, Op.GATHER, Op.REDUCE})


def issue(agreement: Agreement, rank: int, collective: Collective, *, on_gpus: bool = False) -> Work | None:
    """
    Compare a collective with those of the other ranks, then issue it. Raises CollectiveMismatch.

    On GPUs the order of collectives on the device is not compared: it is known for simulated streams only.
    """
    if collective.group in distributed_c10d._world.pg_group_ranks:  # else torch is still making the group
        agreement.watch(collective.group)
        call = described(collective, rank, on_gpus=on_gpus)
        is_simulated = call.channel.device != "cpu" and not on_gpus
        agreement.check(call, *(device_order(_index(collective)) if is_simulated else ()))
    if not on_gpus:
        _note_pinned(collective)
    return collective.issue()


def described(collective: Collective, rank: int, *, on_gpus: bool = False) -> Call:
    """A collective in the form in which ranks compare them."""
    record, traffic = collective.record, collective.traffic
    args, kwargs = collective.args, collective.kwargs
    op = traffic.op
    counted = traffic.inputs or traffic.outputs
    dtypes = tuple(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in counted}))
    channel = Channel(
        group=str(collective.group.group_name),
        ranks=record.group,
        device=traffic.device or _device_of_options([*args, *kwargs.values()]),
        pair=_pair(op, record.group, rank, args),
    )
    numels = () if op is Op.ALL_TO_ALL else _numels(op, traffic.inputs, traffic.outputs)
    root = root_of(args, kwargs) if op in _ROOTED else None
    sends, takes = _exchanged(record.name, traffic.inputs, traffic.outputs, args, kwargs, len(record.group), op)
    tag = args[2] if channel.pair is not None and len(args) > 2 and is_integer(args[2]) else 0
    size = f"{sum(tensor.numel() for tensor in counted)} {'/'.join(dtypes)}" if counted else ""
    return Call(
        channel=channel,
        title=title_of(
            str(collective.group.group_name), str(getattr(collective.group, "group_desc", "")), record.group
        ),
        op=op.value,
        reduce_op=traffic.reduce_op,
        root=root,
        dtypes=dtypes,
        numels=numels,
        sends=sends,
        takes=takes,
        words=words_of(op.value, traffic.reduce_op, size, root, channel.pair, tag=tag, sends=sends, takes=takes),
        place=place_of(caller_of_backward),
        device_index=visible_index(_index(collective)) if channel.device != "cpu" else None,
        tag=tag,
        is_paired=channel.pair is not None and channel.device != "cpu" and is_paired(collective.group, on_gpus=on_gpus),
    )


def _note_pinned(collective: Collective) -> None:
    """Tell the checker about a collective of the CPU that uses pinned memory: its transport bypasses torch."""
    extension = build.active()
    if collective.traffic.device != "cpu" or not extension.pinned_copies_in_flight():
        return
    traffic = collective.traffic
    in_place = traffic.outputs is traffic.inputs  # reading is the earlier mistake
    for tensors, writes in ((traffic.inputs, False), (() if in_place else traffic.outputs, True)):
        for tensor in tensors:
            if tensor.device.type == "cpu" and tensor.is_pinned():
                extension.note_host_access(tensor, writes, collective.traffic.op.value)


def _pair(op: Op, ranks: Sequence[int], rank: int, args: Sequence[Any]) -> tuple[int, int] | None:
    if op not in (Op.SEND, Op.RECV) or len(args) < 2 or not is_integer(args[1]) or args[1] >= len(ranks):
        return None
    peer = ranks[args[1]]
    return (rank, peer) if op is Op.SEND else (peer, rank)


def _numels(op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[int, ...]:
    """The numbers of elements that must be equal on all ranks."""
    if op is Op.ALL_GATHER:
        return _part_or_list(inputs, outputs)
    if op is Op.REDUCE_SCATTER:
        return _part_or_list(outputs, inputs)
    if op is Op.SCATTER:
        return tuple(tensor.numel() for tensor in outputs)
    return tuple(tensor.numel() for tensor in inputs or outputs)


def _part_or_list(parts: Sequence[Tensor], whole: Sequence[Tensor]) -> tuple[int, ...]:
    """One rank's part; if the parts of the ranks have different sizes, those of all ranks."""
    sizes = [tensor.numel() for tensor in whole]
    if len(parts) == 1 and len(sizes) > 1 and len(set(sizes)) > 1:
        return tuple(sizes)
    return tuple(tensor.numel() for tensor in parts)


def _exchanged(
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    args: Sequence[Any],
    kwargs: Any,
    size: int,
    op: Op,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """For an all-to-all, the elements to and from each rank."""
    if op is not Op.ALL_TO_ALL:
        return (), ()
    into, out = input_splits_of(name, args, kwargs), output_splits_of(name, args, kwargs)
    if into is None or out is None:
        return tuple(tensor.numel() for tensor in inputs), tuple(tensor.numel() for tensor in outputs)
    return _split(inputs[0], into, size), _split(outputs[0], out, size)


def _split(tensor: Tensor, rows: Sequence[int], size: int) -> tuple[int, ...]:
    if not rows:
        return (tensor.numel() // size,) * size
    row = tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 0
    return tuple(count * row for count in rows)


def _device_of_options(options: Sequence[Any]) -> str:
    """The device type of a barrier."""
    devices = (getattr(option, "device", None) for option in options)
    return next((device.type for device in devices if device is not None), "cpu")


def _index(collective: Collective) -> int | None:
    """The device of the tensors, counted in this process."""
    tensors = collective.traffic.inputs or collective.traffic.outputs
    return tensors[0].device.index if tensors else None
