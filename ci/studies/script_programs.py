"""
Small programs as they occur in training code: each technique once done right, and most of them once with one mistake.

They were written after the checker and run for the first time when all of them were finished, so that first run says
what the checker finds in code that it was not made for.
"""

from __future__ import annotations

from fsdp_conformance.simulator.checker.hazard import HazardKind
from fsdp_conformance.simulator.collectives.disagreement import DisagreementKind
from studies.script_runs import Script


def _pair(
    name: str,
    right: str,
    wrong: str,
    kind: str,
    text: str,
    mistake: tuple[str, str],
    *,
    waits: str = "all",
    beyond: str = "",
) -> tuple[Script, Script]:
    """
    A technique in a correct script, and in one with a mistake.

    The mistake replaces the first text of `mistake`, which must occur once, by the second. `waits`: which waits of the
    host count. `beyond`: why the checker cannot find the mistake, if it cannot.
    """
    before, after = mistake
    if text.count(before) != 1:
        raise ValueError(f"{name}: the text must have {before!r} once, got {text.count(before)}")
    return (
        Script(name=name, what=right, text=text.replace("  # wrong", ""), waits=waits),
        Script(
            name=f"{name}-wrong", what=wrong, kind=kind, beyond=beyond, text=text.replace(before, after), waits=waits
        ),
    )


_PAIRS = (
    _pair(
        "moving-average",
        "averaged weights are updated on a side stream, which the optimizer waits for",
        "the optimizer does not wait for the average of the weights",
        HazardKind.WRITE_AFTER_READ,
        """
side = torch.cuda.Stream()
model = nn.Linear(16, 16).to(device)
averages = [parameter.detach().clone() for parameter in model.parameters()]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(4, 16, device=device)).square().mean().backward()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for average, parameter in zip(averages, model.parameters()):
            average.lerp_(parameter.detach(), 0.1)
    torch.cuda.current_stream().wait_stream(side)
    optimizer.step()  # wrong
    optimizer.zero_grad(set_to_none=False)
torch.cuda.synchronize()
print(averages[0].sum().item())
""",
        ("    torch.cuda.current_stream().wait_stream(side)\n", ""),
    ),
    _pair(
        "checkpoint-in-a-thread",
        "weights are copied to pinned memory, and a thread saves them once the copies are done",
        "the thread saves before the copies are done",
        HazardKind.HOST_READ_IN_FLIGHT,
        """
import io
import threading

model = nn.Linear(64, 64).to(device)
copies = {name: value.to("cpu", non_blocking=True) for name, value in model.state_dict().items()}
done = torch.cuda.current_stream().record_event()
file = io.BytesIO()


def save():
    done.synchronize()
    torch.save(copies, file)  # wrong


thread = threading.Thread(target=save)
thread.start()
thread.join()
print(len(file.getvalue()) > 0)
""",
        ("    done.synchronize()\n", ""),
    ),
    _pair(
        "two-input-buffers",
        "two device buffers in turn; a copy waits until the buffer is no longer read",
        "a buffer is filled again without waiting for its reader",
        HazardKind.WRITE_AFTER_READ,
        """
side = torch.cuda.Stream()
buffers = [torch.zeros(64, device=device) for _ in range(2)]
read = [torch.cuda.current_stream().record_event() for _ in buffers]
side.wait_stream(torch.cuda.current_stream())
for step in range(6):
    batch = torch.full((64,), float(step)).pin_memory()
    with torch.cuda.stream(side):
        side.wait_event(read[step % 2])
        buffers[step % 2].copy_(batch, non_blocking=True)  # wrong
        filled = side.record_event()
    torch.cuda.current_stream().wait_event(filled)
    total = (buffers[step % 2] * 2).sum()
    read[step % 2] = torch.cuda.current_stream().record_event()
print(total.item())
""",
        ("        side.wait_event(read[step % 2])\n", ""),
    ),
    _pair(
        "hooks-that-reduce",
        "hooks reduce each gradient when it is there, and the step waits for all of them",
        "the optimizer steps before the reductions are done",
        HazardKind.READ_AFTER_WRITE,
        """
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
works = []
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(
        lambda reduced: works.append(dist.all_reduce(reduced.grad, op=dist.ReduceOp.AVG, async_op=True))
    )
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.ones(2, 8, device=device)).sum().backward()
    for work in works:
        work.wait()
    optimizer.step()  # wrong
    torch.cuda.synchronize()
    works.clear()
    optimizer.zero_grad(set_to_none=False)
""",
        ("    for work in works:\n        work.wait()\n", ""),
    ),
    _pair(
        "early-stopping",
        "all ranks agree when to stop",
        "a rank stops on its own",
        DisagreementKind.MISSING,
        """
for step in range(4):
    stop = torch.tensor(float(rank == 0 and step == 2), device=device)
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    if stop.item():
        break
    loss = torch.ones(8, device=device)
    dist.all_reduce(loss)  # wrong
    print(loss.sum().item())
""",
        ("    dist.all_reduce(stop, op=dist.ReduceOp.MAX)\n", ""),
    ),
    _pair(
        "skipped-step",
        "a step with an overflow is skipped after its gradients were reduced",
        "a rank with an overflow does not reduce",
        DisagreementKind.DIFFERENT,
        """
gradient = torch.full((16,), float("inf") if rank else 1.0, device=device)
overflow = not gradient.isfinite().all().item()
if not (overflow and SKIP):
    dist.all_reduce(gradient)  # wrong
metric = torch.ones(1, device=device)
dist.all_reduce(metric)  # wrong
print(metric.item())
""".replace("SKIP", "False"),
        ("and False", "and True"),
    ),
    _pair(
        "experts-by-name",
        "gradients are reduced in an order that all ranks share",
        "each rank reduces in the order in which it met its experts",
        DisagreementKind.DIFFERENT,
        """
experts = {}
for number in range(3) if rank == 0 else reversed(range(3)):
    experts[f"expert{number}"] = torch.ones(4 + number, device=device)
for name in sorted(experts):
    dist.all_reduce(experts[name])  # wrong
print(sum(value.sum().item() for value in experts.values()))
""",
        ("sorted(experts)", "experts"),
    ),
    _pair(
        "own-momentum",
        "an optimizer with momentum that starts at zero",
        "momentum starts as torch.empty_like",
        HazardKind.UNINITIALIZED_READ,
        """
model = nn.Linear(8, 1).to(device)
momenta = [torch.zeros_like(parameter) for parameter in model.parameters()]
for step in range(2):
    loss = model(torch.ones(4, 8, device=device)).square().mean()
    print(loss.item())  # wrong
    loss.backward()
    with torch.no_grad():
        for parameter, momentum in zip(model.parameters(), momenta):
            momentum.mul_(0.9).add_(parameter.grad)
            parameter.sub_(0.01 * momentum)
            parameter.grad = None
""",
        ("torch.zeros_like(parameter)", "torch.empty_like(parameter)"),
    ),
    _pair(
        "key-value-cache",
        "attention over a cache whose unused positions are cut off",
        "attention over all positions of the cache, also those that nothing was written to",
        HazardKind.UNINITIALIZED_READ,
        """
keys, values = torch.empty(2, 8, 4, device=device), torch.empty(2, 8, 4, device=device)
for position in range(4):
    keys[:, position] = torch.randn(2, 4, device=device)
    values[:, position] = torch.randn(2, 4, device=device)
    query = torch.randn(2, 1, 4, device=device)
    used = slice(0, position + 1)
    scores = torch.softmax(query @ keys[:, used].transpose(1, 2), dim=-1)
    print((scores @ values[:, used]).sum().item())  # wrong
""",
        ("used = slice(0, position + 1)", "used = slice(0, 8)"),
    ),
    _pair(
        "gathered-ahead",
        "a layer's weight is gathered on a side stream, and freed after record_stream",
        "the gathered weight is freed while the computation still reads it",
        HazardKind.REUSE_IN_FLIGHT,
        """
gather = torch.cuda.Stream()
shard = torch.ones(32, device=device)
inputs = torch.ones(8, 4, device=device)
gather.wait_stream(torch.cuda.current_stream())
for layer in range(3):
    with torch.cuda.stream(gather):
        weight = torch.empty(64, device=device)
        dist.all_gather_into_tensor(weight, shard)
        ready = gather.record_event()
    torch.cuda.current_stream().wait_event(ready)
    outputs = weight.view(8, 8) @ inputs
    weight.record_stream(torch.cuda.current_stream())
    del weight  # wrong
torch.cuda.synchronize()
print(outputs.sum().item())
""",
        ("    weight.record_stream(torch.cuda.current_stream())\n", ""),
    ),
    _pair(
        "halo-exchange",
        "the border of a field is sent, and changed after the message has left",
        "the field changes while its border is being sent",
        HazardKind.WRITE_AFTER_READ,
        """
peer = 1 - rank
field = torch.ones(16, device=device)
ghost = torch.zeros(4, device=device)
for step in range(2):
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, field[8:12], peer), dist.P2POp(dist.irecv, ghost, peer)]
    )
    for work in works:
        work.wait()
    field += 1  # wrong
    torch.cuda.synchronize()
print((field.sum() + ghost.sum()).item())
""",
        ("    for work in works:\n        work.wait()\n", ""),
    ),
    _pair(
        "ring-of-keys",
        "keys travel around a ring; the next block is used once it has arrived",
        "the next block is used while it arrives",
        HazardKind.READ_AFTER_WRITE,
        """
peer = 1 - rank
query, block = torch.ones(4, 8, device=device), torch.full((4, 8), float(rank), device=device)
total = torch.zeros(4, 4, device=device)
for step in range(2):
    arriving = torch.zeros_like(block)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, block, peer), dist.P2POp(dist.irecv, arriving, peer)]
    )
    total += query @ block.T
    for work in works:
        work.wait()
    total += query @ arriving.T  # wrong
    torch.cuda.synchronize()
    block = arriving
print(total.sum().item())
""",
        ("    for work in works:\n        work.wait()\n", ""),
    ),
    _pair(
        "overflow-flag",
        "a flag is copied without blocking and tested after waiting",
        "Python tests the flag while it is being copied",
        HazardKind.HOST_READ_IN_FLIGHT,
        """
gradient = torch.ones(64, device=device)
flag = torch.zeros((), dtype=torch.bool, pin_memory=True)
flag.copy_(gradient.isnan().any(), non_blocking=True)
torch.cuda.current_stream().synchronize()
if flag:  # wrong
    print("skipped")
""",
        ("torch.cuda.current_stream().synchronize()\n", ""),
    ),
    _pair(
        "norm-beside-backward",
        "the norm of the gradients is computed on a stream that waits for backward",
        "the stream that computes the norm does not wait for backward",
        HazardKind.READ_AFTER_WRITE,
        """
side = torch.cuda.Stream()
model = nn.Linear(8, 8).to(device)
side.wait_stream(torch.cuda.current_stream())
model(torch.ones(2, 8, device=device)).sum().backward()
side.wait_stream(torch.cuda.current_stream(device))
with torch.cuda.stream(side):
    norm = torch.linalg.vector_norm(model.weight.grad)  # wrong
side.synchronize()
print(norm.item())
""",
        ("side.wait_stream(torch.cuda.current_stream(device))\n", ""),
    ),
    _pair(
        "scattered-batch",
        "rank 0 scatters a batch",
        "each rank believes that it scatters",
        DisagreementKind.DIFFERENT,
        """
parts = [torch.full((4,), float(index), device=device) for index in range(2)]
own = torch.zeros(4, device=device)
source = 0
dist.scatter(own, parts if rank == source else None, src=source)  # wrong
print(own.sum().item())
""",
        ("source = 0", "source = rank"),
    ),
    _pair(
        "bucket-in-turn",
        "one flat bucket serves layer after layer, each after the one before is reduced",
        "the bucket is filled while the layer before it is being reduced",
        HazardKind.WRITE_AFTER_READ,
        """
layers = [torch.full((8,), float(layer), device=device) for layer in range(3)]
bucket, shards, work = torch.zeros(8, device=device), [], None
for layer in layers:
    if work is not None:
        work.wait()
    bucket.copy_(layer)  # wrong
    shards.append(torch.zeros(4, device=device))
    work = dist.reduce_scatter_tensor(shards[-1], bucket, async_op=True)
torch.cuda.synchronize()
print(sum(shard.sum().item() for shard in shards))
""",
        ("    if work is not None:\n        work.wait()\n", ""),
    ),
    _pair(
        "offloaded-gradients",
        "gradients are copied to pinned memory, and the CPU's optimizer waits for them",
        "the CPU's optimizer reads gradients that are still being copied",
        HazardKind.HOST_READ_IN_FLIGHT,
        """
weight = nn.Parameter(torch.ones(64))
staged = torch.zeros(64, pin_memory=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(2):
    gradient = (weight.detach().to(device) * 2).mul(3)
    staged.copy_(gradient, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    weight.grad = staged
    optimizer.step()  # wrong
    torch.cuda.synchronize()
print(weight.sum().item())
""",
        ("    torch.cuda.current_stream().synchronize()\n", ""),
    ),
    _pair(
        "pipeline-of-two-stages",
        "the second stage receives what the first one sends",
        "the second stage expects activations of another size",
        DisagreementKind.DIFFERENT,
        """
features = 16 if rank == 0 else EXPECTED
stage = nn.Linear(features, 16).to(device)
for micro_batch in range(2):
    if rank == 0:
        dist.send(stage(torch.ones(4, 16, device=device)).detach(), dst=1)  # wrong
    else:
        activations = torch.zeros(4, features, device=device)
        dist.recv(activations, src=0)  # wrong
        print(stage(activations).sum().item())
""".replace("EXPECTED", "16"),
        ("16 if rank == 0 else 16", "16 if rank == 0 else 8"),
    ),
    _pair(
        "validation-on-one-rank",
        "rank 0 validates a plain copy of the model",
        "rank 0 validates the DDP model, whose buffers are broadcast",
        DisagreementKind.DIFFERENT,
        """
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
model(torch.randn(4, 4, device=device)).sum().backward()
if rank == 0:
    with torch.no_grad():
        print(model.module(torch.randn(4, 4, device=device)).sum().item())  # wrong
total = torch.ones(3, device=device)
dist.all_reduce(total)  # wrong
print(total.sum().item())
""",
        ("model.module(torch", "model(torch"),
    ),
    _pair(
        "reduced-statistics",
        "a normalisation over ranks by hand, with sums and counts",
        "the count is never set on ranks other than the first",
        HazardKind.UNINITIALIZED_READ,
        """
values = torch.randn(4 + rank, 3, device=device)
statistics = torch.empty(7, device=device)
statistics[:3], statistics[3:6] = values.sum(0), values.square().sum(0)
statistics[6] = values.shape[0]
dist.all_reduce(statistics)
print(((values - statistics[:3] / statistics[6]).sum() * 0).item())  # wrong
""",
        ("statistics[6] = values.shape[0]", "if rank == 0:\n    statistics[6] = values.shape[0]"),
    ),
    _pair(
        "loss-read-in-between",
        "gradients are reduced on a side stream, which waits; the loss is read",
        "only reading the loss makes the side stream wait",
        HazardKind.READ_AFTER_WRITE,
        """
side = torch.cuda.Stream()
model = nn.Linear(8, 8).to(device)
side.wait_stream(torch.cuda.current_stream())
loss = model(torch.ones(2, 8, device=device)).sum()
loss.backward()
side.wait_stream(torch.cuda.current_stream(device))
print(loss.item())
with torch.cuda.stream(side):
    doubled = model.bias.grad * 2  # wrong
torch.cuda.current_stream().wait_stream(side)
""",
        ("side.wait_stream(torch.cuda.current_stream(device))\n", ""),
        waits="explicit",
    ),
)

_CORRECT = (
    Script(
        name="pinned-for-a-moment",
        what="pinned memory that is freed at once, which the allocator keeps until the copy is done",
        text="""
for step in range(4):
    inputs = torch.full((64,), float(step)).pin_memory().to(device, non_blocking=True)
    noise = torch.zeros(64).pin_memory()
    noise += 1
    print((inputs * 2).sum().item(), noise.sum().item())
""",
    ),
    Script(
        name="logging-thread",
        what="a thread reads the losses that the main thread computes",
        text="""
import queue
import threading

losses = queue.Queue()


def log():
    torch.cuda.set_device(rank)
    while (loss := losses.get()) is not None:
        print(loss.item())


thread = threading.Thread(target=log)
thread.start()
model = nn.Linear(8, 8).to(device)
for step in range(3):
    losses.put(model(torch.ones(2, 8, device=device)).sum().detach())
losses.put(None)
thread.join()
""",
    ),
    Script(
        name="zero-by-hand",
        what="gradients are scattered, each rank updates its shard, and weights are gathered",
        text="""
model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).to(device)
for parameter in model.parameters():
    dist.broadcast(parameter.data, src=0)
sizes = [parameter.numel() for parameter in model.parameters()]
padded = -(-sum(sizes) // 2) * 2
flat = torch.zeros(padded, device=device)
shard = flat.chunk(2)[rank]
state = torch.zeros_like(shard)
for step in range(3):
    model(torch.randn(4, 6, device=device)).square().mean().backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    gradients = nn.functional.pad(gradients, (0, padded - gradients.numel()))
    own = torch.empty(padded // 2, device=device)
    dist.reduce_scatter_tensor(own, gradients, op=dist.ReduceOp.AVG)
    state.mul_(0.9).add_(own)
    with torch.no_grad():
        flat[: sum(sizes)] = torch.cat([parameter.flatten() for parameter in model.parameters()])
        shard.sub_(0.1 * state)
        dist.all_gather_into_tensor(flat, shard.clone())
        for parameter, value in zip(model.parameters(), flat[: sum(sizes)].split(sizes)):
            parameter.copy_(value.view_as(parameter))
            parameter.grad = None
print(flat.isfinite().all().item())
""",
    ),
    Script(
        name="tensor-parallel-by-hand",
        what="a linear layer cut by columns and one by rows, with collectives inside autograd",
        text="""
class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


first, second = nn.Linear(8, 6).to(device), nn.Linear(6, 8, bias=False).to(device)
inputs = torch.randn(4, 8, device=device, requires_grad=True)
for step in range(2):
    Summed.apply(second(torch.relu(first(Copied.apply(inputs))))).square().mean().backward()
print(inputs.grad.isfinite().all().item())
""",
    ),
    Script(
        name="experts-with-autograd",
        what="tokens travel to their experts and back through differentiable collectives",
        text="""
from torch.distributed.nn.functional import all_to_all_single

expert = nn.Linear(4, 4).to(device)
tokens = torch.randn(8, 4, device=device, requires_grad=True)
arrived = all_to_all_single(torch.empty_like(tokens), tokens)
returned = all_to_all_single(torch.empty_like(tokens), expert(arrived))
returned.square().mean().backward()
print(tokens.grad.isfinite().all().item(), expert.weight.grad.isfinite().all().item())
""",
    ),
    Script(
        name="synchronised-batch-norm",
        what="SyncBatchNorm in DDP with a static graph",
        text="""
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)).to(device)
model(torch.randn(2, 3, 8, 8, device=device))
model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
model = nn.parallel.DistributedDataParallel(model, device_ids=[rank], static_graph=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
for step in range(3):
    logits = model(torch.randn(2, 3, 8, 8, device=device))
    loss = nn.functional.cross_entropy(logits, torch.zeros(2, dtype=torch.long, device=device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
""",
    ),
    Script(
        name="sharded-checkpoint",
        what="FSDP2 saves and loads through torch.distributed.checkpoint",
        text="""
import tempfile

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)).to(device)
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(2, 7, device=device)).sum().backward()
optimizer.step()
names = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(names, src=0)
model_state, optimizer_state = get_state_dict(model, optimizer)
dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=names[0])
dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=names[0])
set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
model(torch.ones(2, 7, device=device)).sum().backward()
optimizer.step()
dist.barrier()
if rank == 0:
    import shutil

    shutil.rmtree(names[0])
""",
    ),
    Script(
        name="tensors-on-a-mesh",
        what="DTensors are redistributed and multiplied",
        text="""
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

mesh = init_device_mesh("cuda", (2,))
torch.manual_seed(0)
left = distribute_tensor(torch.randn(6, 5, device=device), mesh, [Shard(0)])
right = distribute_tensor(torch.randn(5, 3, device=device), mesh, [Replicate()])
product = (left @ right).redistribute(mesh, [Shard(1)])
print(product.full_tensor().sum().item(), left.redistribute(mesh, [Replicate()]).to_local().shape)
""",
    ),
    Script(
        name="timed-and-profiled",
        what="events measure time, the profiler and the memory statistics are on",
        text="""
begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
torch.cuda.reset_peak_memory_stats()
with torch.profiler.profile() as profiler:
    begin.record()
    value = torch.randn(32, 32, device=device)
    for _ in range(3):
        value = value @ value / 32
    end.record()
torch.cuda.synchronize()
print(begin.elapsed_time(end) >= 0, torch.cuda.max_memory_allocated() >= 3 * value.nbytes, len(profiler.events()) > 0)
torch.cuda.empty_cache()
print(torch.cuda.memory_summary() != "", torch.cuda.memory_stats()["allocated_bytes.all.current"] > 0)
""",
    ),
    Script(
        name="workers-and-sampler",
        what="a data loader with workers and pinned memory, and a distributed sampler",
        text="""
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

data = TensorDataset(torch.arange(24.0).view(12, 2), torch.arange(12))
sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=True)
loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=1, pin_memory=True)
seen = torch.zeros(12, device=device)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, index in loader:
        inputs, index = inputs.to(device, non_blocking=True), index.to(device, non_blocking=True)
        seen[index] += inputs.sum() * 0 + 1
dist.all_reduce(seen)
print(seen.sum().item())
""",
    ),
)

#: Right and wrong, of each technique.
CORRECT = (*(right for right, _ in _PAIRS), *_CORRECT)
WRONG = tuple(wrong for _, wrong in _PAIRS)
