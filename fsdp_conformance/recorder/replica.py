"""
Modules that are replicated in place of being sharded: plain data parallelism, written to be read.

Every rank has all parameters. After a backward, the gradients of modules that synchronise are averaged over the ranks.
Where the script has turned that off, they are kept and averaged later, together with what is added to them. Averaged
gradients are never averaged again: they are set aside before a backward and added to its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_conformance.recorder.rounding import Rounding


@dataclass(eq=False, kw_only=True, slots=True)
class Replica:
    """Parameters that one call of a sharding function would have sharded."""

    places: list[tuple[nn.Module, str]]
    """Modules and names: a model that was built on the meta device gets other parameters before it trains."""
    group: Any
    """The process group over which it is replicated; None for all ranks."""
    reduce_dtype: torch.dtype | None
    starts_with_rank0: bool
    """True if rank 0's values are everyone's at the start; else each rank's shard of its own values are."""
    is_flat: bool
    """True if a shard is a range of all elements in a row; else it is a range of each parameter's first dim."""
    rounding: Rounding | None = None
    synchronises: bool = True
    factor: float | None = None
    """The divisor of a sum; None for the number of ranks."""
    averaged: dict[int, Tensor] = field(default_factory=dict)
    """Gradients that have been averaged and set aside, by the index of the parameter."""
    waiting: dict[int, Tensor] = field(default_factory=dict)
    """Gradients that have not been averaged yet, likewise. As in FSDP2, the script does not see them. Unlike there,
    they are cleared with those that it sees."""
    grad_dtype: torch.dtype | None = None
    """In which gradients are kept between backwards; None for the parameters'."""
    is_averaged: set[int] = field(default_factory=set)
    """The parameters whose `grad` has been averaged."""
    has_started: bool = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that the modules have now."""
        now = [module._parameters[name] for module, name in self.places]
        return [parameter for parameter in now if parameter is not None]


class Replicas:
    """All replicas of this process."""

    def __init__(self, contributed: Callable[[dict[int, Tensor]], object]) -> None:
        """`contributed` gets what this rank adds to gradients before they are averaged: id of the parameter to it."""
        self._all: list[Replica] = []
        self._contributed = contributed

    def add(self, modules: Sequence[nn.Module], ignored: Iterable[Tensor] = (), **options: Any) -> Replica:
        """Replicate the parameters of these modules that no inner module has been given for."""
        left_out = {id(tensor) for tensor in ignored}
        left_out |= {id(parameter) for replica in self._all for parameter in replica.parameters}
        places: dict[int, tuple[nn.Module, str]] = {}
        for module in modules:
            for owner in module.modules():
                for name, parameter in owner._parameters.items():
                    if parameter is not None and id(parameter) not in left_out:
                        places.setdefault(id(parameter), (owner, name))
        replica = Replica(places=list(places.values()), **options)
        self._all.append(replica)
        return replica

    def start(self) -> None:
        """Before the first forward: give all ranks the values that sharding would have given them."""
        for replica in self._all:
            if not replica.has_started:
                replica.has_started = True
                _start(replica)

    def clear(self, parameters: Iterable[Tensor]) -> None:
        """The script clears the gradients of these parameters. Those that it does not see are its own as well."""
        cleared = {id(parameter) for parameter in parameters}
        for replica in self._all:
            for index, parameter in enumerate(replica.parameters):
                if id(parameter) in cleared:
                    replica.waiting.pop(index, None)

    def before_backward(self) -> None:
        """Set gradients aside that have been averaged. Nothing is added to those of frozen parameters: they stay."""
        for replica in self._all:
            for index, parameter in _trained(replica):
                if index in replica.is_averaged:
                    if parameter.grad is not None:
                        replica.averaged[index] = parameter.grad
                    parameter.grad = None
                    replica.is_averaged.remove(index)
                if index in replica.waiting:
                    parameter.grad = replica.waiting.pop(index)

    def after_backward(self) -> None:
        """Average the gradients of replicas that synchronise, and put back what was set aside."""
        self._contributed(
            {
                id(parameter): parameter.grad
                for replica in self._all
                for parameter in replica.parameters
                if parameter.grad is not None
            }
        )
        for replica in self._all:
            if replica.synchronises:
                average(replica)
            elif not replica.is_flat:
                _put_off(replica)


def _trained(replica: Replica) -> Iterator[tuple[int, nn.Parameter]]:
    """The parameters that are not frozen now, with their indices."""
    return (item for item in enumerate(replica.parameters) if item[1].requires_grad)


@torch.no_grad()
def average(replica: Replica) -> None:
    """Average the gradients over the ranks. A parameter that only some ranks have used counts as zero on the others."""
    trained = list(_trained(replica))
    if not trained:
        return
    indices, parameters = zip(*trained, strict=True)
    size = dist.get_world_size(replica.group)
    used = torch.tensor([parameter.grad is not None for parameter in parameters], device=parameters[0].device)
    counts = used.to(torch.int32)
    dist.all_reduce(counts, group=replica.group)
    for index, parameter, count in zip(indices, parameters, counts.tolist(), strict=True):
        aside = replica.averaged.pop(index, None)
        if count:
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            total = gradient.to(replica.reduce_dtype or gradient.dtype)
            total = total.clone() if total is gradient else total
            dist.all_reduce(total, group=replica.group)
            parameter.grad = _kept(total.div_(replica.factor or size), replica).to(parameter.dtype)
        if aside is not None:
            parameter.grad = aside if parameter.grad is None else _kept(aside.add_(parameter.grad), replica)
        if parameter.grad is not None:
            replica.is_averaged.add(index)


def _kept(gradient: Tensor, replica: Replica) -> Tensor:
    """A gradient, rounded to the dtype in which it is kept."""
    return gradient if replica.grad_dtype is None else gradient.to(replica.grad_dtype).to(gradient.dtype)


def _put_off(replica: Replica) -> None:
    """Keep the gradients for a later backward, and show those that were averaged before."""
    for index, parameter in _trained(replica):
        if parameter.grad is not None:
            replica.waiting[index] = parameter.grad
        parameter.grad = replica.averaged.pop(index, None)
        if parameter.grad is not None:
            replica.is_averaged.add(index)


@torch.no_grad()
def _start(replica: Replica) -> None:
    parameters = [parameter for parameter in replica.parameters if not parameter.is_meta]
    size = dist.get_world_size(replica.group)
    if replica.starts_with_rank0:
        for parameter in parameters:
            dist.broadcast(parameter.data, group=replica.group, group_src=0)
    elif replica.is_flat:
        _start_flat(replica, parameters, size)
    else:
        for parameter in parameters:
            rows = parameter.data if parameter.dim() else parameter.data.view(1)
            for rank, chunk in enumerate(rows.chunk(size)):
                _broadcast(chunk, replica.group, rank)


def _start_flat(replica: Replica, parameters: Sequence[nn.Parameter], size: int) -> None:
    total = sum(parameter.numel() for parameter in parameters)
    shard = -(-total // size)
    place = 0
    for parameter in parameters:
        flat = parameter.data.view(-1)
        for rank in range(size):
            begin, end = max(rank * shard - place, 0), min((rank + 1) * shard - place, flat.numel())
            if begin < end:
                _broadcast(flat[begin:end], replica.group, rank)
        place += flat.numel()


def _broadcast(values: Tensor, group: Any, rank: int) -> None:
    """In place, from a rank of the group. Collectives need contiguous memory, which a view of rows is."""
    if values.numel():
        dist.broadcast(values, group=group, group_src=rank)


def owned_modules(roots: Sequence[nn.Module], is_unit: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    """The modules of a unit: those below `roots`, without inner units."""
    seen: set[int] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        if id(module) in seen:
            return
        seen.add(id(module))
        yield module
        for child in module.children():
            if not is_unit(child):
                yield from walk(child)

    for root in roots:
        yield from walk(root)
