"""
Which parameters a step uses, and how often.

    reach_of     the parameters that the graph behind a forward's outputs leads to, on this rank
    UsedMap      which parameters got a gradient since the last reduction, on any rank
    StaticGraph  how many gradients each parameter gets per backward, for a graph that never changes
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed import ProcessGroup, Work

from fsdp_conformance.engine.communication import all_reduce
from fsdp_conformance.engine.errors import GraphChanged

#: Nodes that build and run another graph during backward. What lies behind them cannot be seen in advance.
_REENTRANT = frozenset({"CheckpointFunctionBackward"})


class Reach(NamedTuple):
    """The parameters that a graph leads to."""

    found: frozenset[int]
    """Indices of the parameters that were reached."""
    complete: bool
    """False if a node hides another graph (reentrant checkpointing): more parameters may get a gradient."""


def reach_of(outputs: Iterable[Tensor], indices: Mapping[int, int]) -> Reach:
    """
    Walk the autograd graph from `outputs` to parameters, given as id(parameter) to index.

    Stops as soon as every parameter was found. Costs about a microsecond per edge and touches nothing on the device.
    """
    reached: set[int] = set()
    complete = True
    visited: set[Node] = set()  # the nodes, not their ids: a new wrapper could get the id of a collected one
    pending: list[Node] = []
    for output in outputs:
        if output.grad_fn is not None:
            pending.append(output.grad_fn)
        elif id(output) in indices:  # a forward that returns a parameter itself
            reached.add(indices[id(output)])
    while pending and len(reached) < len(indices):
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        behind = node.next_functions
        if not behind:
            index = indices.get(id(getattr(node, "variable", None)))  # AccumulateGrad has one
            if index is not None:
                reached.add(index)
            continue
        complete = complete and node.name() not in _REENTRANT
        pending.extend([function for function, _ in behind if function is not None])
    return Reach(frozenset(reached), complete)


class UsedMap:
    """
    One flag per parameter, summed over the ranks once per reduction and awaited only on demand.

    A parameter counts as used if autograd gave it a gradient in any backward since the last reduction, on any rank. A
    rank only asks about parameters that it did not use itself, so if every parameter is used, no rank waits.
    """

    def __init__(self, num_parameters: int, *, group: ProcessGroup, device: torch.device) -> None:
        self._local = bytearray(num_parameters)
        self._group = group
        self._device = device
        self._work: Work | None = None
        self._summed: Tensor | None = None  # 1D, int32, num_parameters
        self._global: list[int] | None = None

    def mark(self, index: int) -> None:
        """Note that parameter `index` got a gradient on this rank."""
        self._local[index] = 1

    def used_here(self, index: int) -> bool:
        """True if parameter `index` got a gradient on this rank since the last reduction."""
        return bool(self._local[index])

    @property
    def asked(self) -> bool:
        """True if this rank had to wait for the sum."""
        return self._global is not None

    def start(self, *, empty: bool = False) -> None:
        """Start summing the flags over the ranks. Collective. With `empty` this rank contributes no flags."""
        self.wait()  # for the previous sum, if this rank never needed it
        flags = [0] * len(self._local) if empty else list(self._local)
        self._global = None
        self._summed = _to_device(flags, self._device)
        self._work = all_reduce(self._summed, self._group)

    def used_anywhere(self, index: int) -> bool:
        """True if any rank used parameter `index`. Call `start` first; waits for it if this rank did not use it."""
        if self._local[index] or self._group.size() == 1:
            return bool(self._local[index])
        if self._global is None:
            assert self._summed is not None, "start() must come before used_anywhere()"
            self.wait()
            self._global = self._summed.tolist()
        return self._global[index] != 0

    def wait(self) -> None:
        """Make the current stream (on the CPU, the caller) wait for the sum."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def forget_local(self) -> None:
        """A reduction has ended: clear this rank's flags for the next one. The last sum can still be read."""
        self._local = bytearray(len(self._local))


def _to_device(flags: list[int], device: torch.device) -> Tensor:
    """The flags on the device. The host does not wait: the copy reads pinned memory, which its allocator keeps."""
    if device.type == "cpu":
        return torch.tensor(flags, dtype=torch.int32)
    return torch.tensor(flags, dtype=torch.int32, pin_memory=True).to(device, non_blocking=True)


class StaticGraph:
    """
    How many gradients each parameter gets in one backward, counted in the first.

        begin    a backward has produced its first gradient
        is_last  a gradient has arrived: is it the last one for its parameter?
        learn    the first backward has ended
        restart  drop the counts of the current backward
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._counts: list[int] | None = None  # gradients per backward, for each parameter
        self._left = [0] * len(names)  # how many of them are still to come
        self._arrivals: list[int] = []  # the parameter of each gradient of the first backward, in order

    @property
    def is_learnt(self) -> bool:
        """True if the first backward has ended."""
        return self._counts is not None

    def begin(self) -> list[int]:
        """Start counting a backward. Returns the parameters that will get no gradient; in the first backward, none."""
        if self._counts is None:
            return []
        self._left = list(self._counts)
        return [index for index, count in enumerate(self._counts) if not count]

    def is_last(self, index: int) -> bool:
        """
        True if parameter `index` gets no further gradient in this backward. Always False in the first one.

        Raises GraphChanged if the parameter got more gradients than in the first backward.
        """
        if self._counts is None:
            self._left[index] -= 1  # counts down from 0: see learn()
            self._arrivals.append(index)
            return False
        if not self._left[index]:
            expected = self._counts[index]
            raise GraphChanged(
                f"gradients of parameter {self._names[index]} in this backward: expected {expected}, as in the first "
                f"backward, got {expected + 1}",
                where="backward",
                hint="static_graph=True requires a graph that never changes.",
            )
        self._left[index] -= 1
        return self._left[index] == 0

    def learn(self) -> list[int]:
        """The first backward has ended. Returns the parameters that got gradients, in the order of their last ones."""
        self._counts = [-left for left in self._left]
        last = {index: tick for tick, index in enumerate(self._arrivals)}
        self._arrivals = []
        return sorted(last, key=last.__getitem__)

    def restart(self) -> None:
        """Drop the counts of the current backward."""
        self._left = [0] * len(self._names)
        self._arrivals = []
