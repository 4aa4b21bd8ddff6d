"""
Collectives that gloo lacks for tensors on an accelerator, made of those that it has.

Ranks that share a device communicate over gloo, which copies tensors through host memory. Observed with torch 2.11 on
CUDA: the coalesced all-gathers, to which functional collectives and DTensor turn every all-gather, read device memory
from the host and end the process with SIGSEGV (pytorch#152645); a coalesced all-reduce, send and receive raise. With
NCCL the same calls work, so without this, engines would be blamed for the transport.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, ProcessGroup, Work

__all__ = ["SUBSTITUTES", "method_for"]


def method_for(group: ProcessGroup, name: str, device_type: str) -> Callable[..., Work]:
    """The method `name` of a group for tensors on devices of that type: a substitute where gloo has none."""
    if name in SUBSTITUTES and device_type != "cpu" and _backend_name(group, device_type) == "gloo":
        return partial(SUBSTITUTES[name], group)
    method: Callable[..., Work] = getattr(group, name)
    return method


def _backend_name(group: ProcessGroup, device_type: str) -> str:
    """
    The name of a group's backend for a type of device.

    Empty for a device without a backend, and for tensors on several: torch then says what is wrong with the call.
    """
    try:
        return str(group._get_backend(torch.device(device_type)).name())
    except RuntimeError:
        return ""


def _last(works: Sequence[Work]) -> Work:
    """Wait for all works but the last, and return that: gloo's threads may finish them in any order."""
    for work in works[:-1]:
        work.wait()
    return works[-1]


def _all_gather_single_coalesced(
    group: ProcessGroup, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *options: Any, **named: Any
) -> Work:
    gather = getattr(group, "all_gather_single" if hasattr(group, "all_gather_single") else "_allgather_base")
    return _last([gather(out, part, *options, **named) for out, part in zip(outputs, inputs, strict=True)])


def _all_gather_coalesced(
    group: ProcessGroup, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *options: Any, **named: Any
) -> Work:
    """`outputs` has a list for each rank, with a tensor for each input."""
    works = [
        group.allgather([list(parts)], [part], *options, **named)
        for parts, part in zip(zip(*outputs, strict=True), inputs, strict=True)
    ]
    return _last(works)


def _all_reduce_coalesced(group: ProcessGroup, tensors: Sequence[Tensor], opts: Any = None) -> Work:
    single = AllreduceOptions()
    if opts is not None:
        single.reduceOp, single.timeout = opts.reduceOp, opts.timeout
    return _last([group.allreduce([tensor], single) for tensor in tensors])


def _send(group: ProcessGroup, tensors: Sequence[Tensor], *peer_and_tag: int) -> Work:
    return group.send([tensor.cpu() for tensor in tensors], *peer_and_tag)


def _receive(group: ProcessGroup, tensors: Sequence[Tensor], *peer_and_tag: int) -> Work:
    return _Receipt(tensors, group.recv, *peer_and_tag)


def _receive_from_any(group: ProcessGroup, tensors: Sequence[Tensor], *tag: int) -> Work:
    return _Receipt(tensors, group.recv_anysource, *tag)


class _Receipt(Work):
    """A receive into host memory, whose tensors reach the device when it is waited for."""

    def __init__(self, tensors: Sequence[Tensor], receive: Callable[..., Work], *peer_and_tag: int) -> None:
        super().__init__()
        self._tensors = tensors
        self._host = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
        self._work = receive(self._host, *peer_and_tag)
        self._is_delivered = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the message, and copy it to the device once."""
        self._work.wait(timeout)
        if not self._is_delivered:
            self._is_delivered = True
            with torch.no_grad():  # as gloo writes: the buffers of a pipeline's stage require gradients
                for tensor, host in zip(self._tensors, self._host, strict=True):
                    tensor.copy_(host)
        return True

    def is_completed(self) -> bool:
        """True if gloo says so: for a receive, once it has been waited for."""
        return self._work.is_completed()

    def _source_rank(self) -> int:
        """The rank in the group that the message is from."""
        return self._work._source_rank()


#: By the names of a process group's methods. The group comes first, then the method's own arguments.
SUBSTITUTES: Mapping[str, Callable[..., Work]] = {
    "allgather_coalesced": _all_gather_coalesced,
    "allgather_into_tensor_coalesced": _all_gather_single_coalesced,
    "all_gather_single_coalesced": _all_gather_single_coalesced,
    "allreduce_coalesced": _all_reduce_coalesced,
    "send": _send,
    "recv": _receive,
    "recv_anysource": _receive_from_any,
}
