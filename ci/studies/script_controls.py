"""Correct scripts, many of them unusual: nothing may be found in them."""

from __future__ import annotations

from studies.script_runs import Script

_FSDP1 = """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy

model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)).to(device)
model = FSDP(model, device_id=rank, use_orig_params={use_orig}, sharding_strategy=ShardingStrategy.{strategy})
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(4, 7, device=device)).square().mean()
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""

_FSDP2 = """
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)){to}
options = {options}
for layer in model:
    fully_shard(layer, **options)
fully_shard(model, **options)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(4, 7, device=device)).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""

ENGINES = (
    Script(
        name="ddp-accumulation",
        what="DDP with no_sync, unused parameters and clipping",
        text="""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


model = nn.parallel.DistributedDataParallel(Model().to(device), device_ids=[rank], find_unused_parameters=True)
optimizer = torch.optim.Adam(model.parameters())
for step in range(3):
    with model.no_sync():
        model(torch.randn(2, 4, device=device)).sum().backward()
    model(torch.randn(2, 4, device=device)).sum().backward()
    print(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    Script(
        name="fsdp1-flat-padding",
        what="FSDP1 with flat parameters that are padded",
        text=_FSDP1.format(use_orig=False, strategy="FULL_SHARD"),
    ),
    Script(
        name="fsdp1-original-parameters",
        what="FSDP1 with the original parameters, sharded gradients only",
        text=_FSDP1.format(use_orig=True, strategy="SHARD_GRAD_OP"),
    ),
    Script(
        name="fsdp2-uneven",
        what="FSDP2 with sizes that the ranks do not divide",
        text=_FSDP2.format(to=".to(device)", options="{}"),
    ),
    Script(
        name="fsdp2-offload-mixed",
        what="FSDP2 with offload to pinned memory and bfloat16",
        text=_FSDP2.format(
            to="",
            options="dict(offload_policy=CPUOffloadPolicy(), mp_policy=MixedPrecisionPolicy(torch.bfloat16))",
        ).replace("nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", "pass\n"),
    ),
    Script(
        name="grad-scaler",
        what="autocast with a gradient scaler, and checkpointed activations",
        text="""
from torch.utils.checkpoint import checkpoint

model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4).to(device), device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
for step in range(2):
    with torch.autocast("cuda", torch.float16):
        loss = checkpoint(model, torch.randn(2, 4, device=device), use_reentrant=False).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(loss.item())
""",
    ),
)

COLLECTIVES = (
    Script(
        name="groups-of-one",
        what="each rank reduces in its own group",
        text="""
groups = [dist.new_group([0]), dist.new_group([1])]
value = torch.full((4,), float(rank), device=device)
for _ in range(rank + 1):
    dist.all_reduce(value, group=groups[rank])
dist.all_reduce(value)
print(value.sum().item())
""",
    ),
    Script(
        name="two-groups-in-order",
        what="two groups at once, in one order",
        text="""
groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
values = [torch.ones(4, device=device) for _ in groups]
for _ in range(2):
    works = [dist.all_reduce(value, group=group, async_op=True) for value, group in zip(values, groups)]
    for work in reversed(works):
        work.wait()
print(values[0].sum().item())
""",
    ),
    Script(
        name="uneven-lists",
        what="lists of tensors with different sizes, gathered and scattered",
        text="""
sizes = [3, 5]
gathered = [torch.zeros(size, device=device) for size in sizes]
dist.all_gather(gathered, torch.ones(sizes[rank], device=device))
own = torch.zeros(sizes[rank], device=device)
dist.reduce_scatter(own, gathered)
print(own.sum().item())
""",
    ),
    Script(
        name="uneven-all-to-all",
        what="tokens are exchanged with agreed, uneven sizes",
        text="""
sent = torch.tensor([1, 2] if rank == 0 else [4, 1], device=device)
expected = torch.zeros_like(sent)
dist.all_to_all_single(expected, sent)
splits = [sent.tolist(), expected.tolist()]
received = torch.zeros(sum(splits[1]), device=device)
dist.all_to_all_single(
    received, torch.ones(sum(splits[0]), device=device), output_split_sizes=splits[1], input_split_sizes=splits[0]
)
print(received.sum().item())
""",
    ),
    Script(
        name="messages-in-a-ring",
        what="batched sends and receives, and a plain pair",
        text="""
peer = 1 - rank
got = torch.zeros(4, device=device)
operations = [
    dist.P2POp(dist.isend, torch.ones(4, device=device), peer),
    dist.P2POp(dist.irecv, got, peer),
]
for work in dist.batch_isend_irecv(operations if rank else operations[::-1]):
    work.wait()
if rank == 0:
    dist.send(got, dst=1)
else:
    dist.recv(got, src=0)
print(got.sum().item())
""",
    ),
    Script(
        name="roots-and-objects",
        what="broadcast, reduce, gather, scatter, barrier and objects of different sizes",
        text="""
value = torch.ones(4, device=device)
dist.broadcast(value, src=1)
dist.reduce(value, dst=0)
parts = [torch.zeros(4, device=device) for _ in range(2)]
dist.gather(value, parts if rank == 0 else None, dst=0)
dist.scatter(value, parts if rank == 0 else None, src=0)
dist.barrier()
names = [None, None]
dist.all_gather_object(names, "x" * (10 * rank + 1))
found = [{"step": 1} if rank == 0 else None]
dist.broadcast_object_list(found, src=0)
print(value.sum().item(), [len(name) for name in names], found)
""",
    ),
    Script(
        name="visible-devices",
        what="every process sees one device, its own",
        prelude="""\
import os

os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
import torch
import torch.distributed as dist
""",
        text="""
torch.cuda.set_device(0)
dist.init_process_group("nccl")
value = torch.ones(4, device="cuda:0")
dist.all_reduce(value)
print(value.sum().item())
""",
    ),
    Script(
        name="bare-exit",
        what="the script leaves by sys.exit(0), one rank earlier",
        text="""
import sys

value = torch.ones(4, device=device)
dist.all_reduce(value)
if rank == 1:
    sys.exit(0)
print(value.sum().item())
""",
    ),
)

UNINITIALIZED = (
    Script(
        name="padding-gathered",
        what="a flat buffer is gathered with its padding, which is never read",
        text="""
flat = torch.empty(8, device=device)
flat[: 8 - 3 * rank] = 1.0
whole = torch.empty(16, device=device)
dist.all_gather_into_tensor(whole, flat)
print(whole[:13].sum().item())
reduced = torch.empty(8, device=device)
dist.reduce_scatter_tensor(reduced, whole)
print(reduced[: 8 - 3 * rank].sum().item())
""",
    ),
    Script(
        name="padding-reduced",
        what="a flat buffer is reduced and scattered with its padding, which is left out of the norm",
        text="""
flat = torch.empty(8, device=device)
flat[:5] = 1.0
shard = torch.empty(4, device=device)
dist.reduce_scatter_tensor(shard, flat)
own = shard[: 1 if rank else 4]
norm = own.square().sum()
dist.all_reduce(norm)
print(norm.item())
""",
    ),
    Script(
        name="shard-of-padding",
        what="the last rank's shard is padding only",
        text="""
shard = torch.empty(4, device=device)
if rank == 0:
    shard.fill_(2.0)
whole = torch.empty(8, device=device)
dist.all_gather_into_tensor(whole, shard)
print(whole[:4].sum().item())
""",
    ),
    Script(
        name="empty-and-filled",
        what="buffers from torch.empty that are written before they are used",
        text="""
out = torch.empty(4, 4, device=device)
torch.mm(torch.ones(4, 4, device=device), torch.ones(4, 4, device=device), out=out)
scores = torch.baddbmm(
    torch.empty(1, 2, 2, device=device), torch.ones(1, 2, 3, device=device), torch.ones(1, 3, 2, device=device), beta=0
)
permuted = torch.empty(4, device=device)
permuted[torch.tensor([2, 0, 3, 1], device=device)] = torch.arange(4.0, device=device)
cache = torch.empty(8, 4, device=device)
for position in range(3):
    cache[position] = position
    total = cache[: position + 1].sum().item()
joined = torch.cat([torch.ones(3, device=device), torch.empty(1, device=device)])
noise = torch.empty(4, device=device).normal_()
like = torch.empty_like(out).copy_(out)
print(out.sum().item(), scores.sum().item(), permuted.sum().item(), total, joined[:3].sum().item(), like.mean().item())
print(bool((noise == noise).all()))
""",
    ),
    Script(
        name="masked-empty",
        what="values that were never written are masked out",
        text="""
values = torch.empty(8, device=device)
values[:4] = 1.0
mask = torch.arange(8, device=device) < 4
print(torch.where(mask, values, torch.zeros((), device=device)).sum().item())
print(values[mask].sum().item(), values.masked_fill(~mask, 0.0).sum().item())
scaled = values * 2
print(scaled[:4].sum().item())
""",
    ),
    Script(
        name="flat-optimizer-state",
        what="an optimizer over a padded flat parameter",
        text="""
flat = torch.empty(16, device=device)
flat[:13] = 0.5
weight = nn.Parameter(flat)
optimizer = torch.optim.Adam([weight], lr=0.1, foreach=True)
for _ in range(3):
    (weight[:13] ** 2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(weight.detach()[:13].sum().item())
""",
    ),
)

STREAMS = (
    Script(
        name="prefetch-waited",
        what="a batch from a side stream, waited for and recorded",
        text="""
side = torch.cuda.Stream()
batches = [torch.full((64,), float(i)).pin_memory() for i in range(4)]
for batch in batches:
    with torch.cuda.stream(side):
        inputs = batch.to(device, non_blocking=True)
    torch.cuda.current_stream().wait_stream(side)
    inputs.record_stream(torch.cuda.current_stream())
    print((inputs * 2).sum().item())
""",
    ),
    Script(
        name="copies-waited",
        what="copies to the host that NumPy reads after waiting",
        text="""
values = torch.ones(64, device=device)
copied = values.to("cpu", non_blocking=True)
view = copied.numpy()
torch.cuda.current_stream().synchronize()
print(view.sum(), copied.tolist()[0])
staging = torch.zeros(8192, pin_memory=True)
first, second = staging[:4096], staging[4096:]
first.copy_(torch.ones(4096, device=device), non_blocking=True)
torch.cuda.synchronize()
second.copy_(torch.ones(4096, device=device), non_blocking=True)
print(first.numpy().sum())
group = dist.new_group(backend="gloo")
dist.all_reduce(first, group=group)
torch.cuda.synchronize()
print(second.numpy().sum())
""",
    ),
    Script(
        name="staging-with-events",
        what="two staging buffers in turn, each waited for by its event",
        text="""
staging = [torch.zeros(64, pin_memory=True) for _ in range(2)]
done = [None, None]
for step in range(6):
    if done[step % 2] is not None:
        done[step % 2].synchronize()
    staging[step % 2].numpy()[:] = step
    inputs = staging[step % 2].to(device, non_blocking=True)
    done[step % 2] = torch.cuda.current_stream().record_event()
    print(inputs.mean().item())
""",
    ),
    Script(
        name="overlapped-reduction",
        what="gradients are reduced on another stream and waited for by an event",
        text="""
side = torch.cuda.Stream()
for step in range(3):
    gradient = torch.ones(64, device=device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dist.all_reduce(gradient)
        done = side.record_event()
    gradient.record_stream(side)
    other = torch.ones(64, device=device) * 3
    torch.cuda.current_stream().wait_event(done)
    weight = other - gradient
work = dist.all_reduce(weight, async_op=True)
work.wait()
print(weight.sum().item())
""",
    ),
    Script(
        name="worst-case-recorded",
        what="tensors that are freed after record_stream, with worst-case reuse of memory",
        reuse="worst_case",
        text="""
side = torch.cuda.Stream()
for _ in range(3):
    gradient = torch.ones(64, device=device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        squared = gradient * gradient
    gradient.record_stream(side)
    del gradient
    other = torch.zeros(32, device=device)
torch.cuda.current_stream().wait_stream(side)
print(other.sum().item())
""",
    ),
    Script(
        name="sparse-gradients",
        what="DDP over gloo with an embedding's sparse gradients, and one that is reduced by hand",
        text="""
import copy

group = dist.new_group(backend="gloo")
torch.manual_seed(1)
module = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1)).to(device)
model = nn.parallel.DistributedDataParallel(copy.deepcopy(module), process_group=group)
optimizers = [
    torch.optim.SparseAdam([model.module[0].weight], lr=0.1),
    torch.optim.SGD(model.module[1].parameters(), lr=0.1),
]
for step in range(3):
    model(torch.tensor([rank, 3, step], device=device)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
module(torch.tensor([rank, 3, 3], device=device)).sum().backward()
gradient = module[0].weight.grad
work = dist.all_reduce(gradient, group=group, async_op=True)
work.wait()
with torch.no_grad():
    module[0].weight.add_(gradient, alpha=-0.1)
print(module[0].weight.sum().item(), model.module[0].weight.sum().item())
""",
    ),
    Script(
        name="dlpack-with-a-stream",
        what="another library's stream writes memory that it took in order, and is waited for",
        text="""
from torch.utils.dlpack import from_dlpack

batch = torch.zeros(64, device=device)
theirs = torch.cuda.Stream()
taken = from_dlpack(batch.__dlpack__(stream=theirs.cuda_stream))
with torch.cuda.stream(theirs):
    taken.fill_(1.0)
torch.cuda.current_stream().wait_stream(theirs)
print((batch * 2).sum().item())
""",
    ),
    Script(
        name="out-of-memory-caught",
        what="a batch that does not fit is halved",
        memory=1 << 30,
        text="""
size = 2**30
while True:
    try:
        batch = torch.empty(size, dtype=torch.uint8, device=device)
        batch2 = torch.empty(size // 4, dtype=torch.uint8, device=device)
        break
    except torch.cuda.OutOfMemoryError as error:
        assert "CUDA out of memory." in str(error)
        batch = None
        size //= 2
print(size, torch.cuda.mem_get_info()[1], batch2[:4].zero_().sum().item())
""",
    ),
)

CONTROLS = (*ENGINES, *COLLECTIVES, *UNINITIALIZED, *STREAMS)
