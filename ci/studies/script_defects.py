"""Scripts with one mistake each, as people make them. The line of the mistake, or of its effect, is marked."""

from __future__ import annotations

from fsdp_conformance.simulator.checker.hazard import HazardKind
from fsdp_conformance.simulator.collectives.disagreement import DisagreementKind
from studies.script_runs import Script

_DIFFERENT = DisagreementKind.DIFFERENT
_MISSING = DisagreementKind.MISSING
_UNINITIALIZED = HazardKind.UNINITIALIZED_READ

#: For scripts that choose their device themselves.
_WITHOUT_DEVICE = """\
import os

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("nccl")
"""

COLLECTIVES = (
    Script(
        name="reduction-differs",
        what="SUM on one rank, MAX on the other",
        kind=_DIFFERENT,
        text="""
norm = torch.ones(4, device=device)
dist.all_reduce(norm, op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)  # wrong
print(norm.sum().item())
""",
    ),
    Script(
        name="dtype-differs",
        what="float32 on one rank, int32 on the other",
        kind=_DIFFERENT,
        text="""
count = torch.ones(4, device=device, dtype=torch.int32 if rank else torch.float32)
dist.all_reduce(count)  # wrong
print(count.sum().item())
""",
    ),
    Script(
        name="shape-differs",
        what="the last batch is smaller on one rank",
        kind=_DIFFERENT,
        text="""
predictions = torch.ones(8 - rank, device=device)
dist.all_reduce(predictions)  # wrong
print(predictions.sum().item())
""",
    ),
    Script(
        name="operation-differs",
        what="one rank broadcasts what the other reduces",
        kind=_DIFFERENT,
        text="""
value = torch.ones(4, device=device)
if rank == 0:
    dist.broadcast(value, src=0)  # wrong
else:
    dist.all_reduce(value)  # wrong
print(value.sum().item())
""",
    ),
    Script(
        name="root-differs",
        what="every rank believes that it is the source of a broadcast",
        kind=_DIFFERENT,
        text="""
state = torch.full((4,), float(rank), device=device)
dist.broadcast(state, src=rank)  # wrong
print(state.sum().item())
""",
    ),
    Script(
        name="uneven-shards",
        what="all_gather_into_tensor of shards with different sizes",
        kind=_DIFFERENT,
        text="""
shard = torch.ones(3 + rank, device=device)
whole = torch.zeros(2 * shard.numel(), device=device)
dist.all_gather_into_tensor(whole, shard)  # wrong
print(whole.sum().item())
""",
    ),
    Script(
        name="all-to-all-splits",
        what="a rank expects other numbers of tokens than its peer sends",
        kind=_DIFFERENT,
        text="""
tokens = torch.ones(4, device=device)
received = torch.zeros(4, device=device)
sent = [1, 3] if rank == 0 else [2, 2]
dist.all_to_all_single(received, tokens, output_split_sizes=[2, 2], input_split_sizes=sent)  # wrong
print(received.sum().item())
""",
    ),
    Script(
        name="message-size",
        what="a receiver's buffer has another size than the message",
        kind=_DIFFERENT,
        text="""
if rank == 0:
    dist.send(torch.ones(8, device=device), dst=1)  # wrong
else:
    activation = torch.zeros(4, device=device)
    dist.recv(activation, src=0)  # wrong
    print(activation.sum().item())
""",
    ),
    Script(
        name="cpu-operation-differs",
        what="a group for the CPU: broadcast on one rank, all-reduce on the other",
        kind=_DIFFERENT,
        text="""
group = dist.new_group(backend="gloo")
print(torch.ones(2, device=device).sum().item())
if rank == 0:
    dist.broadcast(torch.ones(1), src=0, group=group)  # wrong
else:
    dist.all_reduce(torch.ones(1), group=group)  # wrong
""",
    ),
    Script(
        name="order-of-groups",
        what="two groups are used in different orders",
        kind=DisagreementKind.ORDER,
        text="""
gradients, metrics = dist.new_group([0, 1]), dist.new_group([0, 1])
values = [torch.ones(4, device=device), torch.ones(4, device=device)]
calls = [(values[0], gradients), (values[1], metrics)]
works = []
for value, group in reversed(calls) if rank else calls:
    works.append(dist.all_reduce(value, group=group, async_op=True))  # wrong
for work in works:
    work.wait()
print(values[0].sum().item())
""",
    ),
    Script(
        name="skipped-on-one-rank",
        what="a metric is reduced on rank 0 only",
        kind=_MISSING,
        text="""
loss = torch.ones(1, device=device)
dist.all_reduce(loss)
if rank == 0:
    accuracy = torch.ones(1, device=device)
    dist.all_reduce(accuracy)  # wrong
    print(accuracy.item())
""",
    ),
    Script(
        name="one-batch-more",
        what="a rank has one batch more than the other",
        kind=_MISSING,
        text="""
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4).to(device), device_ids=[rank])
for _ in range(2 + rank):
    model(torch.ones(2, 4, device=device)).sum().backward()  # wrong
    for parameter in model.parameters():
        parameter.grad = None
""",
    ),
    Script(
        name="group-differs",
        what="a rank uses the default group where the other uses another group",
        kind=DisagreementKind.DEADLOCK,
        text="""
group = dist.new_group([0, 1])
value = torch.ones(4, device=device)
dist.all_reduce(value, group=group if rank else None)  # wrong
print(value.sum().item())
""",
    ),
    Script(
        name="message-without-receiver",
        what="a message that is never received",
        kind=_MISSING,
        text="""
print(torch.ones(2, device=device).sum().item())
if rank == 0:
    dist.send(torch.ones(4, device=device), dst=1)  # wrong
""",
    ),
    Script(
        name="ranks-on-one-device",
        what="set_device is missing",
        kind=DisagreementKind.ONE_DEVICE,
        prelude=_WITHOUT_DEVICE,
        text="""
value = torch.ones(4, device="cuda")
dist.all_reduce(value)  # wrong
print(value.sum().item())
""",
    ),
)

UNINITIALIZED = (
    Script(
        name="reduced-empty",
        what="a buffer from torch.empty is all-reduced",
        kind=_UNINITIALIZED,
        text="""
gradients = torch.empty(16, device=device)
dist.all_reduce(gradients)  # wrong
""",
    ),
    Script(
        name="broadcast-empty",
        what="the source of a broadcast was never filled",
        kind=_UNINITIALIZED,
        text="""
weights = nn.Linear(4, 4, device="meta").to_empty(device=device)
for parameter in weights.parameters():
    dist.broadcast(parameter.data, src=0)  # wrong
""",
    ),
    Script(
        name="accumulated-from-empty",
        what="a sum that starts from torch.empty is logged",
        kind=_UNINITIALIZED,
        text="""
total = torch.empty(1, device=device)
for _ in range(3):
    total += torch.ones(1, device=device)
print(total.item())  # wrong
""",
    ),
    Script(
        name="branch-on-empty",
        what="a flag that was never set decides",
        kind=_UNINITIALIZED,
        text="""
overflow = torch.empty(1, device=device, dtype=torch.bool)
if overflow.any():  # wrong
    print("skipped")
""",
    ),
    Script(
        name="half-filled",
        what="half of a flat buffer is filled, all of it is summed",
        kind=_UNINITIALIZED,
        text="""
flat = torch.empty(8, device=device)
flat[:4].copy_(torch.ones(4, device=device))
print(flat.norm().item())  # wrong
""",
    ),
    Script(
        name="gathered-and-read",
        what="a shard is gathered that only rank 0 has filled, and everything is read",
        kind=_UNINITIALIZED,
        text="""
shard = torch.empty(4, device=device)
if rank == 0:
    shard.fill_(1.0)
whole = torch.empty(8, device=device)
dist.all_gather_into_tensor(whole, shard)
print((whole * 2).sum().item())  # wrong
""",
    ),
    Script(
        name="padding-in-norm",
        what="a flat buffer is reduced and scattered with its padding, which the norm adds up",
        kind=_UNINITIALIZED,
        text="""
flat = torch.empty(8, device=device)
flat[:5] = 1.0
shard = torch.empty(4, device=device)
dist.reduce_scatter_tensor(shard, flat)
norm = shard.square().sum()
dist.all_reduce(norm)  # wrong
print(norm.item())
""",
    ),
    Script(
        name="saved-empty",
        what="a tensor is saved that was never written",
        kind=_UNINITIALIZED,
        text="""
momentum = torch.empty(16, device=device)
saved = momentum.cpu()  # wrong
""",
    ),
)

RACES = (
    Script(
        name="prefetch-without-wait",
        what="a batch that is copied on a side stream is used at once",
        kind=HazardKind.READ_AFTER_WRITE,
        text="""
side = torch.cuda.Stream()
batch = torch.ones(64).pin_memory()
with torch.cuda.stream(side):
    inputs = batch.to(device, non_blocking=True)  # wrong
loss = (inputs * 2).sum()  # wrong
""",
    ),
    Script(
        name="record-stream-missing",
        what="a batch from a side stream is freed while it is in use",
        kind=HazardKind.REUSE_IN_FLIGHT,
        text="""
side = torch.cuda.Stream()
for _ in range(3):
    with torch.cuda.stream(side):
        inputs = torch.ones(64, device=device)
    torch.cuda.current_stream().wait_stream(side)
    loss = inputs * 2
    del inputs  # wrong
""",
    ),
    Script(
        name="freed-during-reduction",
        what="a gradient is freed while a side stream reduces it",
        kind=HazardKind.REUSE_IN_FLIGHT,
        text="""
side = torch.cuda.Stream()
for _ in range(2):
    gradient = torch.ones(64, device=device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dist.all_reduce(gradient)
    del gradient  # wrong
torch.cuda.current_stream().wait_stream(side)
""",
    ),
    Script(
        name="freed-early-worst-case",
        what="a tensor is freed too early; nothing of its size follows in this run",
        kind=HazardKind.REUSE_IN_FLIGHT,
        reuse="worst_case",
        text="""
side = torch.cuda.Stream()
gradient = torch.ones(64, device=device)
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    squared = gradient * gradient
del gradient  # wrong
other = torch.zeros(32, device=device)
""",
    ),
    Script(
        name="event-too-early",
        what="an event is recorded before the work that it stands for",
        kind=HazardKind.READ_AFTER_WRITE,
        text="""
side = torch.cuda.Stream()
value = torch.zeros(64, device=device)
side.wait_stream(torch.cuda.current_stream())
done = torch.cuda.Event()
with torch.cuda.stream(side):
    done.record()
    value.add_(1)
torch.cuda.current_stream().wait_event(done)
total = value.sum()  # wrong
""",
    ),
    Script(
        name="event-on-another-stream",
        what="an event is recorded on the current stream instead of the side stream",
        kind=HazardKind.READ_AFTER_WRITE,
        text="""
side = torch.cuda.Stream()
value = torch.zeros(64, device=device)
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    value.add_(1)
done = torch.cuda.Event()
done.record()
torch.cuda.current_stream().wait_event(done)
total = value.sum()  # wrong
""",
    ),
    Script(
        name="work-not-waited",
        what="a gradient is used before its all-reduce is done",
        kind=HazardKind.READ_AFTER_WRITE,
        text="""
gradient = torch.ones(64, device=device)
work = dist.all_reduce(gradient, async_op=True)
weight = torch.ones(64, device=device) - gradient  # wrong
work.wait()
""",
    ),
    Script(
        name="input-overwritten",
        what="a buffer is filled again while it is being reduced",
        kind=HazardKind.WRITE_AFTER_READ,
        text="""
bucket = torch.ones(64, device=device)
shard = torch.zeros(32, device=device)
work = dist.reduce_scatter_tensor(shard, bucket, async_op=True)
bucket.zero_()  # wrong
work.wait()
""",
    ),
    Script(
        name="two-writers",
        what="two streams write the same buffer",
        kind=HazardKind.WRITE_AFTER_WRITE,
        text="""
first, second = torch.cuda.Stream(), torch.cuda.Stream()
buffer = torch.zeros(64, device=device)
torch.cuda.synchronize()
with torch.cuda.stream(first):
    buffer.fill_(1.0)
with torch.cuda.stream(second):
    buffer.fill_(2.0)  # wrong
""",
    ),
    Script(
        name="numpy-too-early",
        what="NumPy reads a non-blocking copy",
        kind=HazardKind.HOST_READ_IN_FLIGHT,
        text="""
losses = torch.ones(64, device=device)
copied = losses.to("cpu", non_blocking=True)
print(copied.numpy().sum())  # wrong
""",
    ),
    Script(
        name="numpy-view-too-early",
        what="NumPy reads a staging buffer through a view that was made long before",
        kind=HazardKind.HOST_READ_IN_FLIGHT,
        text="""
staging = torch.zeros(64, pin_memory=True)
view = staging.numpy()
staging.copy_(torch.ones(64, device=device), non_blocking=True)
print(float(view[3]))  # wrong
torch.cuda.synchronize()
""",
    ),
    Script(
        name="tolist-too-early",
        what="tolist() of a non-blocking copy",
        kind=HazardKind.HOST_READ_IN_FLIGHT,
        text="""
losses = torch.ones(64, device=device)
copied = losses.to("cpu", non_blocking=True)
print(copied.tolist()[0])  # wrong
""",
    ),
    Script(
        name="host-reads-too-early",
        what="torch reads a non-blocking copy on the host",
        kind=HazardKind.HOST_READ_IN_FLIGHT,
        text="""
losses = torch.ones(64, device=device)
copied = losses.to("cpu", non_blocking=True)
print((copied * 2).sum())  # wrong
""",
    ),
    Script(
        name="staging-overwritten",
        what="a staging buffer is filled again before the copy from it is done",
        kind=HazardKind.HOST_WRITE_IN_FLIGHT,
        text="""
staging = torch.ones(64, pin_memory=True)
inputs = staging.to(device, non_blocking=True)
staging.fill_(2.0)  # wrong
torch.cuda.synchronize()
""",
    ),
    Script(
        name="cpu-group-too-early",
        what="gloo reduces a copy that has not arrived",
        kind=HazardKind.HOST_READ_IN_FLIGHT,
        text="""
group = dist.new_group(backend="gloo")
metric = torch.ones(4, device=device).to("cpu", non_blocking=True)
dist.all_reduce(metric, group=group)  # wrong
print(metric.sum())
""",
    ),
    Script(
        name="sparse-gradient-too-early",
        what="a sparse gradient is used before its all-reduce is done",
        kind=HazardKind.READ_AFTER_WRITE,
        text="""
group = dist.new_group(backend="gloo")
embedding = nn.Embedding(8, 4, sparse=True).to(device)
embedding(torch.tensor([rank, 3, 3], device=device)).sum().backward()
work = dist.all_reduce(embedding.weight.grad, group=group, async_op=True)
with torch.no_grad():
    embedding.weight.add_(embedding.weight.grad, alpha=-0.1)  # wrong
work.wait()
""",
    ),
    Script(
        name="dlpack-without-a-stream",
        what="another library's stream writes memory that it took without an order",
        kind=HazardKind.READ_AFTER_WRITE,
        text="""
from torch.utils.dlpack import from_dlpack

batch = torch.zeros(64, device=device)
theirs = torch.cuda.Stream()
taken = from_dlpack(batch.__dlpack__(stream=theirs.cuda_stream))
with torch.cuda.stream(theirs):
    taken.fill_(1.0)
print((batch * 2).sum().item())  # wrong
""",
    ),
)

DEFECTS = (*COLLECTIVES, *UNINITIALIZED, *RACES)
