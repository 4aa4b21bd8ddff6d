"""
Programs of two ranks on NCCL as people write them: those named "right" are, those named "wrong" race, or call
collectives that differ.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

Body = Callable[[int], None]


def run(rank: int, body: Body, path: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=2)
    body(rank)
    torch.cuda.synchronize()
    dist.destroy_process_group()


def cases(prefix: str) -> list[Body]:
    return [f for name, f in sorted(globals().items()) if name.startswith(prefix)]


def right_async_gather(rank: int) -> None:
    x = torch.full((4,), float(rank), device="cuda")
    out = torch.empty(8, device="cuda")
    work = dist.all_gather_into_tensor(out, x, async_op=True)
    y = x * 2
    work.wait()
    x.zero_()
    assert out.sum().item() == 4, y


def wrong_gather_read_early(rank: int) -> None:
    x = torch.full((4,), float(rank), device="cuda")
    out = [torch.zeros(4, device="cuda") for _ in range(2)]
    work = dist.all_gather(out, x, async_op=True)
    total = out[0] + out[1]
    work.wait()
    total.sum().item()


def right_ring(rank: int) -> None:
    send, recv = torch.full((4,), float(rank), device="cuda"), torch.empty(4, device="cuda")
    ops = [dist.P2POp(dist.isend, send, 1 - rank), dist.P2POp(dist.irecv, recv, 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    send.zero_()
    assert recv.sum().item() == 4 * (1 - rank)


def wrong_ring_overwrites(rank: int) -> None:
    send, recv = torch.full((4,), float(rank), device="cuda"), torch.empty(4, device="cuda")
    ops = [dist.P2POp(dist.isend, send, 1 - rank), dist.P2POp(dist.irecv, recv, 1 - rank)]
    works = dist.batch_isend_irecv(ops)
    send.zero_()
    for work in works:
        work.wait()


def wrong_wait_on_another_stream(rank: int) -> None:
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    work = dist.all_reduce(x, async_op=True)
    with torch.cuda.stream(side):
        work.wait()
    x.mul_(2)


def right_wait_on_another_stream(rank: int) -> None:
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    work = dist.all_reduce(x, async_op=True)
    with torch.cuda.stream(side):
        work.wait()
        x.mul_(2)
    torch.cuda.current_stream().wait_stream(side)
    assert x.sum().item() == 16


def wrong_scatter_input_changes(rank: int) -> None:
    x, out = torch.ones(8, device="cuda"), torch.empty(4, device="cuda")
    work = dist.reduce_scatter_tensor(out, x, async_op=True)
    x.add_(1)
    work.wait()


def wrong_barrier_against_reduce(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(4, device="cuda"))
    else:
        dist.barrier(device_ids=[rank])


def wrong_reduces_if_it_likes(rank: int) -> None:
    for step in range(3):
        loss = torch.tensor(float(step + rank), device="cuda")
        if loss > 0.5:
            dist.all_reduce(loss)


def right_functional(rank: int) -> None:
    x = torch.ones(4, device="cuda")
    assert dist.group.WORLD is not None
    y = funcol.all_reduce(x, "sum", dist.group.WORLD)
    x.zero_()
    assert (y + 1).sum().item() == 12


def wrong_functional_without_wait(rank: int) -> None:
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    x = torch.ones(4, device="cuda")
    y = torch.ops._c10d_functional.all_reduce(x, "sum", name)
    z = y + 1
    torch.ops._c10d_functional.wait_tensor(y)
    z.sum().item()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


def right_ddp_with_hook(rank: int) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Model().cuda(), device_ids=[rank], bucket_cap_mb=0.0001)
    side = torch.cuda.Stream()

    def hook(state: object, bucket: Any) -> Any:
        buffer = bucket.buffer()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            buffer.div_(2)
            future = dist.all_reduce(buffer, async_op=True).get_future()
        return future.then(lambda f: f.value()[0])

    model.register_comm_hook(None, hook)
    opt = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(4, 8, device="cuda")).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()


def wrong_ddp_hook_on_side(rank: int) -> None:
    """The hook scales on a side stream that waits for nothing."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Model().cuda(), device_ids=[rank], bucket_cap_mb=0.0001)
    side = torch.cuda.Stream()

    def hook(state: object, bucket: Any) -> Any:
        buffer = bucket.buffer()
        with torch.cuda.stream(side):
            buffer.div_(2)
            future = dist.all_reduce(buffer, async_op=True).get_future()
        return future.then(lambda f: f.value()[0])

    model.register_comm_hook(None, hook)
    model(torch.randn(4, 8, device="cuda")).sum().backward()


def right_fsdp2_eval_and_clip(rank: int) -> None:
    torch.manual_seed(0)
    model = Model().cuda()
    for part in (model.a, model.b, model.c):
        fully_shard(part)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), foreach=True)
    for step in range(3):
        model(torch.randn(4, 8, device="cuda")).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=step % 2 == 0)
        with torch.no_grad():
            model(torch.randn(2, 8, device="cuda")).sum().item()


def wrong_fsdp2_reads_local_on_side(rank: int) -> None:
    """A logger reads sharded gradients on a side stream that does not wait."""
    torch.manual_seed(0)
    model = Model().cuda()
    fully_shard(model)
    side = torch.cuda.Stream()
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    with torch.cuda.stream(side):
        norms = [p.grad.to_local().norm() for p in model.parameters() if isinstance(p.grad, DTensor)]
    torch.cuda.synchronize()
    assert norms


def wrong_uneven_gather(rank: int) -> None:
    x = torch.ones(4 + rank, device="cuda")
    out = torch.empty(2 * (4 + rank), device="cuda")
    dist.all_gather_into_tensor(out, x)


def right_reduce_half_while_computing(rank: int) -> None:
    flat = torch.ones(8, device="cuda")
    work = dist.all_reduce(flat[:4], async_op=True)
    flat[4:].mul_(3)
    work.wait()
    assert flat.sum().item() == 8 + 12


def wrong_reduce_overlapping_half(rank: int) -> None:
    flat = torch.ones(8, device="cuda")
    work = dist.all_reduce(flat[:4], async_op=True)
    flat[3:].mul_(3)
    work.wait()


def wrong_roots(rank: int) -> None:
    dist.broadcast(torch.ones(4, device="cuda"), src=rank)


def right_objects(rank: int) -> None:
    box = [{"a": rank}]
    dist.broadcast_object_list(box, src=0, device=torch.device("cuda", rank))
    out: list[Any] = [None, None]
    dist.all_gather_object(out, rank)
    assert box[0]["a"] == 0
    assert out == [0, 1]


@pytest.mark.parametrize("body", cases("right_") + cases("wrong_"), ids=lambda body: body.__name__)
def test_program(body: Body, tmp_path: Path) -> None:
    start_processes(run, (body, str(tmp_path / "store")), nprocs=2, start_method="spawn")
