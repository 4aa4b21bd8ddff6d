"""
Converts shards to full tensors and back, for engines whose shards are DTensors (or plain tensors, which are full).

    full_copy           a full clone of a DTensor or plain tensor on the CPU; collective for a DTensor
    full_copies         full clones of many tensors, with few collectives; collective if any is a DTensor
    full_gradients      full clones of gradients, even if ranks disagree on which parameters have one; collective
    same_tensors        True if the tensors inside two values are equal
    anywhere            which flags are set on any rank; collective
    write_full          writes a full value into a parameter, in place; no communication
    materialise_norm    a lazily reduced total norm as a plain scalar on the CPU; collective for a DTensor
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fsdp_conformance.adapters.gathering import gathered
from fsdp_conformance.adapters.structures import map_tensors

Key = TypeVar("Key", bound=Hashable)


def full_copy(tensor: Tensor) -> Tensor:
    """A full, detached clone on the CPU. Collective for a DTensor."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = _on_mesh_device(tensor).full_tensor()
    return tensor.to("cpu", copy=True)


def full_copies(tensors: Mapping[Key, Tensor], full: Callable[[Tensor], Tensor] = full_copy) -> dict[Key, Tensor]:
    """
    A full clone of each. Collective if any is sharded; all ranks must pass the same ones, in the same order.

    `full` reads what is no regular DTensor.
    """
    copies = gathered(tensors)
    return {key: copies[key] if key in copies else full(tensor) for key, tensor in tensors.items()}


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank stores: live storage, not a copy."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def same_tensors(one: Any, other: Any) -> bool:
    """True if two values of the same structure have equal tensors; of a DTensor, this rank's part counts."""
    return all(torch.equal(mine, theirs) for mine, theirs in zip(_leaves(one), _leaves(other), strict=True))


def _leaves(value: Any) -> list[Tensor]:
    leaves: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        leaves.append(local_part(tensor))
        return tensor

    map_tensors(value, note)
    return leaves


def full_gradients(
    parameters: Mapping[str, nn.Parameter],
    device: torch.device,
    full: Callable[[Tensor], Tensor] = full_copy,
    *,
    of_any_rank: bool = False,
    groups: Sequence[dist.ProcessGroup | None] = (None,),
) -> dict[str, Tensor | None]:
    """
    Full gradients, None where this rank has none. Collective if any parameter is sharded.

    Ranks may disagree on which parameters have a gradient (some implementations get this wrong). Gathering a shard that
    other ranks do not provide would hang, so the ranks first exchange which gradients exist; a rank without one then
    provides zeros and still reports None.

    `of_any_rank`: it reports the gradient that others have, for engines in which a rank whose shard is empty has none.
    `groups`: those that together connect the ranks with this model; None is the default group.
    """
    here = [parameter.grad is not None for parameter in parameters.values()]
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters.values())
    somewhere = anywhere(here, device, groups) if sharded or of_any_rank else here
    given: dict[str, Tensor] = {}
    for (name, parameter), has_gradient in zip(parameters.items(), somewhere, strict=True):
        if parameter.grad is not None:
            given[name] = parameter.grad
        elif has_gradient and isinstance(parameter, DTensor):
            given[name] = torch.zeros_like(parameter)
    copies = full_copies(given, full)
    reported = somewhere if of_any_rank else here
    return {name: copies[name] if shown else None for name, shown in zip(parameters, reported, strict=True)}


def anywhere(
    flags: Sequence[bool], device: torch.device, groups: Sequence[dist.ProcessGroup | None] = (None,)
) -> list[bool]:
    """Which of the flags are set on any rank of the groups. Collective; all ranks must pass equally many."""
    if not flags:
        return []
    tensor = torch.tensor(flags, dtype=torch.int32, device=device)
    for group in groups:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in tensor.tolist()]


@torch.no_grad()
def write_full(parameter: nn.Parameter, value: Tensor) -> None:
    """Write a full value into a parameter in place; a sharded parameter takes its own part."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(value)
        return
    mesh = parameter.device_mesh
    replicated = DTensor.from_local(value.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False)
    part = replicated.redistribute(placements=parameter.placements).to_local()
    parameter.to_local().copy_(part)


def materialise_norm(norm: Tensor) -> Tensor:
    """A total norm as a plain scalar on the CPU. Collective for a DTensor."""
    norm = norm.detach()
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).to("cpu", copy=True)


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The optimizer state that this rank stores, without step counters."""
    for state in optimizer.state.values():
        for value in _tensors(state):
            if value.numel() > 1:
                yield local_part(value)


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)


def _on_mesh_device(tensor: DTensor) -> DTensor:
    """
    An offloaded DTensor, moved to its mesh's device, where its collectives run.

    Source: torch's CPUOffloadPolicy keeps the shard on the CPU and the mesh on the accelerator.
    """
    local = tensor.to_local()
    if local.device.type == tensor.device_mesh.device_type:
        return tensor
    return DTensor.from_local(
        local.to(tensor.device_mesh.device_type),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
