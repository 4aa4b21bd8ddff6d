"""
Which parameters took no part: found in the graph before backward, agreed on between ranks after it.

`Reach` answers for one forward on this rank, from the graph behind its outputs. `UsedMap` answers for a whole step on
all ranks: a parameter counts as used if autograd gave it a gradient in any backward since the last reduction, on any
rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from fsdp_conformance.engine.flat_collectives import all_reduce

#: Nodes that run a backward of their own over a graph that does not exist yet: what is behind them cannot be seen.
_REENTRANT = frozenset({"CheckpointFunctionBackward"})


class Reach(NamedTuple):
    """What the graph behind some outputs leads to."""

    found: frozenset[int]
    """Indices of the parameters that were reached."""
    complete: bool
    """False if a node hides a graph of its own (reentrant checkpointing): more may get a gradient than was found."""


def reach_of(outputs: Iterable[Tensor], indices: Mapping[int, int]) -> Reach:
    """
    Walk the autograd graph from `outputs` to parameters, given as id(parameter) to index.

    Stops as soon as every parameter was found. Costs about a microsecond an edge; nothing on the device is touched.
    """
    found: set[int] = set()
    complete = True
    seen: set[Any] = set()  # the nodes themselves: a wrapper that is dropped could be made anew under the same id
    pending: list[Any] = []
    for output in outputs:
        if output.grad_fn is not None:
            pending.append(output.grad_fn)
        elif id(output) in indices:  # a parameter that is returned as it is
            found.add(indices[id(output)])
    while pending and len(found) < len(indices):
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        behind = node.next_functions
        if not behind:
            index = indices.get(id(getattr(node, "variable", None)))  # AccumulateGrad has one
            if index is not None:
                found.add(index)
            continue
        complete = complete and node.name() not in _REENTRANT
        pending.extend([function for function, _ in behind if function is not None])
    return Reach(frozenset(found), complete)


class UsedMap:
    """
    One flag for each parameter, summed over ranks once a reduction, and waited for only when somebody asks.

    A rank asks only about a parameter that it did not use itself, so where every parameter is used nobody ever waits.
    """

    def __init__(self, num_parameters: int, *, group: ProcessGroup, device: torch.device) -> None:
        self._local = bytearray(num_parameters)
        self._group = group
        self._device = device
        self._work: Work | None = None
        self._summed: Tensor | None = None  # 1D, int32, num_parameters
        self._global: list[int] | None = None

    def mark(self, index: int) -> None:
        """Parameter `index` got a gradient on this rank."""
        self._local[index] = 1

    def used_here(self, index: int) -> bool:
        """Whether it got one on this rank since the last reduction."""
        return bool(self._local[index])

    @property
    def asked(self) -> bool:
        """Whether somebody had to wait for the sum."""
        return self._global is not None

    def start(self, *, empty: bool = False) -> None:
        """Sum the flags over ranks, asynchronously. Collective. `empty`: this rank took no part at all."""
        self.wait()  # of the last reduction, where nobody asked
        flags = [0] * len(self._local) if empty else list(self._local)
        self._global = None
        self._summed = _to_device(flags, self._device)
        self._work = all_reduce(self._summed, self._group)

    def used_anywhere(self, index: int) -> bool:
        """Whether any rank used it. Waits for the sum if this rank did not. Call `start` before."""
        if self._local[index] or self._group.size() == 1:
            return bool(self._local[index])
        if self._global is None:
            assert self._summed is not None, "the flags were not summed: start() comes before used_anywhere()"
            self.wait()
            self._global = self._summed.tolist()
        return self._global[index] != 0

    def wait(self) -> None:
        """Let the current stream (on the CPU: the caller) wait for the sum."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def forget_local(self) -> None:
        """A reduction has ended: from now on flags are those of the next one. What was summed stays known."""
        self._local = bytearray(len(self._local))


def _to_device(flags: list[int], device: torch.device) -> Tensor:
    """The flags on the device, without making the host wait: from pinned memory, kept by its allocator till then."""
    if device.type == "cpu":
        return torch.tensor(flags, dtype=torch.int32)
    return torch.tensor(flags, dtype=torch.int32, pin_memory=True).to(device, non_blocking=True)
