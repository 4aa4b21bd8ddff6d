"""Every collective of torch.distributed on tensors of one device, and what each rank has at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fsdp_conformance.tests.harness.recording.small_training import world
from fsdp_conformance.tests.torch_versions import GLOO_ALWAYS_SUMS, OLD

Outputs = dict[str, list[Tensor]]

#: Odd, so that no algorithm divides it; large enough that gloo cuts it into pieces.
NUMEL = 1037

REDUCTIONS = (
    dist.ReduceOp.SUM,
    *([] if OLD else [dist.ReduceOp.AVG]),
    dist.ReduceOp.MIN,
    dist.ReduceOp.MAX,
    dist.ReduceOp.PRODUCT,
)

# torch 2.13 renamed these.
_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
_all_gather_coalesced = (
    getattr(functional, "all_gather_single_coalesced", None) or functional.all_gather_into_tensor_coalesced
)
all_gather_into_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Values:
    """Tensors of one device and dtype, equal on every device, different on every rank."""

    def __init__(self, device: str, dtype: torch.dtype = torch.float32) -> None:
        self.device = device
        self.dtype = dtype
        self.size = dist.get_world_size()
        self.rank = dist.get_rank()

    def given(self, *shape: int, seed: int = 0) -> Tensor:
        """The rank's contribution; sums of it depend on their order."""
        generator = torch.Generator().manual_seed(1000 * seed + self.rank)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
        else:
            values = torch.randint(0, 2 if self.dtype is torch.bool else 5, shape, generator=generator)
        return values.to(self.dtype).to(self.device)

    def empty(self, *shape: int) -> Tensor:
        """An output tensor."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


def collectives(values: Values, reductions: tuple[Any, ...] = REDUCTIONS) -> Outputs:
    """Every function that takes tensors of one size, called one after another."""
    size, rank = values.size, values.rank
    results: Outputs = {}
    for op in reductions:
        mine = values.given(NUMEL)
        dist.all_reduce(mine, op=op)
        scattered = values.empty(NUMEL)
        _reduce_scatter_tensor(scattered, values.given(NUMEL * size), op)
        listed = values.empty(5, 3)
        _reduce_scatter_list(listed, [values.given(5, 3, seed=part) for part in range(size)], op)
        at_root = values.given(NUMEL)
        dist.reduce(at_root, 1, op=op)
        results[f"reductions {op}"] = [mine, scattered, listed, *([at_root] if rank == 1 else [])]
    mine = values.given(7, 3)
    dist.broadcast(mine, 1)
    results["broadcast"] = [mine]
    results["all_gather"] = parts = [values.empty(2, 3) for _ in range(size)]
    dist.all_gather(parts, values.given(2, 3))
    # A column of a matrix: not contiguous.
    results["all_gather into columns"] = columns = [values.empty(4, 2)[:, 1] for _ in range(size)]
    dist.all_gather(columns, values.given(4))
    results["all_gather_into_tensor"] = [whole] = [values.empty(3 * size)]
    all_gather_into_tensor(whole, values.given(3))
    results["gather"] = parts = [values.empty(3) for _ in range(size)] if rank == 0 else []
    dist.gather(values.given(3), parts or None, dst=0)
    results["scatter"] = [mine] = [values.empty(3)]
    dist.scatter(mine, [values.given(3, seed=part) for part in range(size)] if rank == 1 else None, src=1)
    results["all_to_all_single"] = [mine] = [values.empty(2 * size, 3)]
    dist.all_to_all_single(mine, values.given(2 * size, 3))
    # Rank r sends s + 1 rows to rank s, so that it gets r + 1 rows of each.
    results["all_to_all_single uneven"] = [mine] = [values.empty((rank + 1) * size, 3)]
    dist.all_to_all_single(
        mine,
        values.given(size * (size + 1) // 2, 3),
        output_split_sizes=[rank + 1] * size,
        input_split_sizes=[part + 1 for part in range(size)],
    )
    results["all_to_all"] = parts = [values.empty(3) for _ in range(size)]
    _all_to_all(parts, [values.given(3, seed=part) for part in range(size)])
    results["nothing"] = [mine] = [values.empty(0)]
    dist.all_reduce(mine)
    dist.barrier()
    return results


def _reduce_scatter_tensor(output: Tensor, whole: Tensor, op: Any) -> None:
    """reduce_scatter_tensor, or what stands for it on gloo."""
    if GLOO_ALWAYS_SUMS and output.device.type == "cpu":
        _part_of_all_reduce(output, whole, op)
    else:
        reduce_scatter_tensor(output, whole, op=op)


def _reduce_scatter_list(output: Tensor, parts: list[Tensor], op: Any) -> None:
    """reduce_scatter, or what stands for it on gloo."""
    if GLOO_ALWAYS_SUMS and output.device.type == "cpu":
        _part_of_all_reduce(output, torch.stack(parts), op)
    else:
        dist.reduce_scatter(output, parts, op=op)


def _part_of_all_reduce(output: Tensor, whole: Tensor, op: Any) -> None:
    averages = op == dist.ReduceOp.AVG
    dist.all_reduce(whole, op=dist.ReduceOp.SUM if averages else op)
    output.copy_(whole.chunk(dist.get_world_size())[dist.get_rank()].view_as(output))
    if averages:
        output.div_(dist.get_world_size())


def _all_to_all(outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """all_to_all of tensors of one shape; where gloo does not have it, as in torch 2.10, by that of a single tensor."""
    try:
        dist.all_to_all(outputs, inputs)
    except RuntimeError as error:
        if "Backend gloo does not support alltoall" not in str(error):
            raise
        joined = torch.stack(outputs)
        dist.all_to_all_single(joined, torch.stack(inputs))
        for output, value in zip(outputs, joined, strict=True):
            output.copy_(value)


def moves(values: Values) -> Outputs:
    """The functions that accept every dtype, because they move bytes and add nothing."""
    size = values.size
    mine, whole = values.given(9), values.empty(9 * size)
    dist.broadcast(mine, 0)
    all_gather_into_tensor(whole, values.given(9))
    exchanged = values.empty(size)
    dist.all_to_all_single(exchanged, values.given(size))
    return {"moved": [mine, whole, exchanged]}


def coalesced_collectives(values: Values) -> Outputs:
    """The coalescing manager, which issues several calls as one."""
    size, group = values.size, world()
    reduced = [values.given(3), values.given(NUMEL)]
    with dist.distributed_c10d._coalescing_manager(group):
        for tensor in reduced:
            dist.all_reduce(tensor)
    gathered = [values.empty(3 * size), values.empty(2 * size)]
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
        for tensor in gathered:
            all_gather_into_tensor(tensor, values.given(tensor.numel() // size))
    manager.wait()
    scattered = [values.empty(3), values.empty(2)]
    with dist.distributed_c10d._coalescing_manager(group):
        for tensor in scattered:
            reduce_scatter_tensor(tensor, values.given(tensor.numel() * size))
    return {"reduced": reduced, "gathered": gathered, "scattered": scattered}


def point_to_point(values: Values) -> Outputs:
    """Around the ring: blocking, asynchronous, batched, and two messages of one pair in order."""
    size, rank = values.size, values.rank
    after, ahead = (rank + 1) % size, (rank - 1) % size
    received = [values.empty(3) for _ in range(5)]
    if rank == 0:
        dist.send(values.given(3), 1)
    elif rank == 1:
        dist.recv(received[0], 0)
    mine = values.given(3)
    works: list[Any] = [dist.isend(mine, after), dist.irecv(received[1], ahead)]
    works += dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, received[2], ahead)])
    first, second = values.given(3, seed=1), values.given(3, seed=2)
    works += [dist.isend(first, after), dist.isend(second, after)]
    works += [dist.irecv(received[3], ahead), dist.irecv(received[4], ahead)]
    for work in works:
        work.wait()
    return {"received": received}


def functional_collectives(values: Values) -> Outputs:
    """The functional collectives in FSDP2's and DTensor's graphs."""
    size, group = values.size, world()
    wait = functional.wait_tensor
    sums = GLOO_ALWAYS_SUMS and values.device == "cpu"
    averaged = wait(_reduce_scatter(values.given(3 * size), "sum" if sums else "avg", 0, group)) / (size if sums else 1)
    return {
        "all_reduce": [wait(functional.all_reduce(values.given(NUMEL), "sum", group))],
        "all_reduce_coalesced": [
            wait(each) for each in functional.all_reduce_coalesced([values.given(3), values.given(2)], "max", group)
        ],
        "all_gather": [wait(_all_gather(values.given(3), 0, group))],
        "all_gather_coalesced": [
            wait(each) for each in _all_gather_coalesced([values.given(3), values.given(2)], group)
        ],
        "reduce_scatter": [averaged],
        "all_to_all": [wait(functional.all_to_all_single(values.given(size), None, None, group))],
        "broadcast": [wait(functional.broadcast(values.given(3), 0, group))],
    }


def dtensor_redistributions(values: Values) -> Outputs:
    """A DTensor is redistributed."""
    size = values.size
    mesh = init_device_mesh(values.device, (size,))
    whole = torch.arange(7.0, device=values.device)
    partial = DTensor.from_local(values.given(size), mesh, [Partial()])
    return {
        "full": [DTensor.from_local(values.given(3), mesh, [Shard(0)]).full_tensor()],
        "partial": [partial.redistribute(mesh, [Shard(0)]).to_local()],
        "uneven": [distribute_tensor(whole, mesh, [Shard(0)]).to_local()],
        "replicated": [distribute_tensor(whole, mesh, [Replicate()]).to_local()],
    }


#: By name; each takes `Values`.
PROGRAMS: dict[str, Callable[[Values], Outputs]] = {
    "collectives": collectives,
    "coalesced": coalesced_collectives,
    "point_to_point": point_to_point,
    "functional": functional_collectives,
    "dtensor": dtensor_redistributions,
}


def differences(expected: Outputs, got: Outputs) -> list[str]:
    """Where two runs of a program differ in a bit."""
    if expected.keys() != got.keys():
        return [f"outputs: expected {sorted(expected)}, got {sorted(got)}"]
    texts = []
    for name, tensors in expected.items():
        for index, (mine, other) in enumerate(zip(got[name], tensors, strict=True)):
            if not torch.equal(mine.cpu(), other.cpu()):
                texts.append(f"{name}[{index}]: expected {other.cpu()}, got {mine.cpu()}")
    return texts
