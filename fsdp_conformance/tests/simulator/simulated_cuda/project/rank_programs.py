"""
Programs of two and four ranks on NCCL as people write them: those named "right" are, those named "wrong" race, or call
collectives that differ.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

Body = Callable[[int], None]


def run(rank: int, body: Body, path: str, world_size: int) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world_size)
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


def right_again_of_four(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    for n in range(2):
        x = torch.ones(2 + n, device="cuda")
        dist.all_reduce(x)
        torch.cuda.synchronize()
        dist.destroy_process_group()
        dist.init_process_group("nccl", store=PrefixStore(f"again{n}", store), rank=rank, world_size=4)
    x = torch.ones(7, device="cuda")
    dist.all_reduce(x)
    assert x.sum().item() == 28


def right_mesh_of_four(rank: int) -> None:
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.full((4,), float(rank), device="cuda")
    dist.all_reduce(x, group=mesh.get_group("tp"))
    dist.all_reduce(x, group=mesh.get_group("dp"))
    # only the first row
    if mesh.get_local_rank("dp") == 0:
        dist.all_gather_into_tensor(torch.empty(8, device="cuda"), x, group=mesh.get_group("tp"))
    assert x.sum().item() == 24


def right_uneven_lists_of_four(rank: int) -> None:
    x = torch.full((rank + 1,), 1.0, device="cuda")
    out = [torch.empty(r + 1, device="cuda") for r in range(4)]
    dist.all_gather(out, x)
    y = torch.empty(rank + 1, device="cuda")
    dist.reduce_scatter(y, [torch.ones(r + 1, device="cuda") for r in range(4)])
    assert y.sum().item() == 4 * (rank + 1)


def right_alltoall_of_four(rank: int) -> None:
    sends = [(rank + to) % 3 for to in range(4)]
    takes = [(frm + rank) % 3 for frm in range(4)]
    out = torch.empty(sum(takes), device="cuda")
    dist.all_to_all_single(out, torch.ones(sum(sends), device="cuda"), takes, sends)
    dist.all_to_all([torch.empty(t, device="cuda") for t in takes], [torch.ones(s, device="cuda") for s in sends])
    assert out.sum().item() == sum(takes)


def right_gather_scatter_of_four(rank: int) -> None:
    x = torch.full((3,), float(rank), device="cuda")
    dist.gather(x, [torch.empty(3, device="cuda") for _ in range(4)] if rank == 2 else None, dst=2)
    dist.scatter(x, [torch.full((3,), float(r), device="cuda") for r in range(4)] if rank == 1 else None, src=1)
    dist.reduce(x, dst=3)
    dist.barrier()


def right_coalesced_of_four(rank: int) -> None:
    xs = [torch.ones(2 + i, device="cuda") for i in range(3)]
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cuda", rank), async_ops=True) as batch:
        for x in xs:
            dist.all_reduce(x)
    batch.wait()
    assert sum(x.sum().item() for x in xs) == 4 * 9


def right_lists_and_tensors_of_four(rank: int) -> None:
    """NCCL does the same for both."""
    if rank % 2:
        dist.all_gather([torch.empty(2, device="cuda") for _ in range(4)], torch.ones(2, device="cuda"))
    else:
        dist.all_gather_into_tensor(torch.empty(8, device="cuda"), torch.ones(2, device="cuda"))


def right_long_wait_of_four(rank: int) -> None:
    """A slow rank is not a missing one."""
    if rank == 0:
        threading.Event().wait(6)
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x)
    assert x.sum().item() == 16


def wrong_mesh_of_four(rank: int) -> None:
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.full((4,), float(rank), device="cuda")
    dist.all_reduce(x, group=mesh.get_group("tp"), op=dist.ReduceOp.MAX if rank == 3 else dist.ReduceOp.SUM)


def wrong_pair_order_of_four(rank: int) -> None:
    """Groups of pairs, each rank waits in another one."""
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x, group=mesh.get_group("tp" if rank in (0, 3) else "dp"))
    x.sum().item()
    dist.all_reduce(x, group=mesh.get_group("dp" if rank in (0, 3) else "tp"))
    x.sum().item()


def wrong_alltoall_of_four(rank: int) -> None:
    sends = [1, 1, 1, 2 if rank == 0 else 1]
    out = torch.empty(4, device="cuda")
    dist.all_to_all_single(out, torch.ones(sum(sends), device="cuda"), [1] * 4, sends)


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

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations
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

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations
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


def right_halos(rank: int) -> None:
    """In one batch, and in turn."""
    mine, theirs = torch.full((4,), float(rank), device="cuda"), torch.empty(4, device="cuda")
    messages = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    if rank == 0:
        dist.send(theirs, 1)
        dist.recv(theirs, 1)
    else:
        dist.recv(mine, 0)
        dist.send(mine, 0)
    assert theirs.tolist() == [1.0 - rank if rank else 1.0] * 4


def wrong_both_send_first(rank: int) -> None:
    mine, theirs = torch.ones(4, device="cuda"), torch.empty(4, device="cuda")
    dist.send(mine, 1 - rank)
    dist.recv(theirs, 1 - rank)


def wrong_ring_of_sends_of_four(rank: int) -> None:
    """Each rank sends to the next one, and then receives from the one before."""
    mine, theirs = torch.ones(4, device="cuda"), torch.empty(4, device="cuda")
    dist.send(mine, (rank + 1) % 4)
    dist.recv(theirs, (rank + 3) % 4)


def right_ring_of_messages_of_four(rank: int) -> None:
    """None of the streams waits for the message that it sends."""
    mine, theirs = torch.ones(4, device="cuda"), torch.empty(4, device="cuda")
    for work in (dist.isend(mine, (rank + 1) % 4), dist.irecv(theirs, (rank + 3) % 4)):
        assert work is not None
        work.wait()
    assert theirs.sum().item() == 4


def wrong_message_against_reduce(rank: int) -> None:
    total, message = torch.ones(4, device="cuda"), torch.full((4,), float(rank), device="cuda")
    if rank == 0:
        dist.all_reduce(total)
        total.sum().mul_(2)
        dist.send(message, 1)
    else:
        dist.recv(message, 0)
        dist.all_reduce(total)


def right_message_beside_reduce(rank: int) -> None:
    """Rank 1 posts its receive ahead, and no stream waits for it before the reduction."""
    total, message = torch.ones(4, device="cuda"), torch.full((4,), float(rank), device="cuda")
    if rank == 0:
        dist.all_reduce(total)
        dist.send(message, 1)
    else:
        work = dist.irecv(message, 0)
        assert work is not None
        dist.all_reduce(total)
        work.wait()
    assert total.sum().item() == 8


def wrong_batch_against_reduce(rank: int) -> None:
    """A batch runs on the communicator of the group, like the reduction: in the order of the calls."""
    total, message = torch.ones(4, device="cuda"), torch.full((4,), float(rank), device="cuda")
    messages = [dist.P2POp(dist.irecv if rank else dist.isend, message, 1 - rank)]
    reduction = None if rank else dist.all_reduce(total, async_op=True)
    works = dist.batch_isend_irecv(messages)
    if reduction is None:
        reduction = dist.all_reduce(total, async_op=True)
    for work in (*works, reduction):
        work.wait()


def batch_meets_message(rank: int, group: Any = None) -> None:
    message = torch.full((4,), float(rank), device="cuda")
    if rank == 0:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, message, 1, group=group)]):
            work.wait()
    else:
        dist.recv(message, 0, group=group)
        assert message.sum().item() == 0


def wrong_batch_meets_message(rank: int) -> None:
    """The batch is on the communicator of the group, the other on that of the two ranks."""
    batch_meets_message(rank)


def right_batch_meets_message(rank: int) -> None:
    """A group that is bound to its device has one communicator."""
    batch_meets_message(rank, dist.new_group(device_id=torch.device("cuda", rank)))


def wrong_tags(rank: int) -> None:
    first, second = (torch.full((4,), value, device="cuda") for value in (1.0, 2.0))
    for tensor, tag in ((first, 1), (second, 2)) if rank == 0 else ((second, 2), (first, 1)):
        if rank == 0:
            dist.send(tensor, 1, tag=tag)
        else:
            dist.recv(tensor, 0, tag=tag)


def wrong_order_of_groups(rank: int) -> None:
    """On a GPU it depends on the moment whether the ranks wait for each other."""
    groups = [dist.new_group(), dist.new_group()]
    works = [
        dist.all_reduce(torch.ones(4, device="cuda"), group=group, async_op=True)
        for group in (reversed(groups) if rank else groups)
    ]
    for work in works:
        work.wait()


def wrong_groups_of_members_of_four(rank: int) -> None:
    """Each rank makes the group that it is in."""
    group = dist.new_group([0, 1] if rank < 2 else [2, 3])
    dist.all_reduce(torch.ones(4, device="cuda"), group=group)


def right_objects(rank: int) -> None:
    box = [{"a": rank}]
    dist.broadcast_object_list(box, src=0, device=torch.device("cuda", rank))
    out: list[Any] = [None, None]
    dist.all_gather_object(out, rank)
    assert box[0]["a"] == 0
    assert out == [0, 1]


@pytest.mark.parametrize("body", cases("right_") + cases("wrong_"), ids=lambda body: body.__name__)
def test_program(body: Body, tmp_path: Path) -> None:
    world_size = 4 if body.__name__.endswith("_of_four") else 2
    start_processes(run, (body, str(tmp_path / "store"), world_size), nprocs=world_size, start_method="spawn")
