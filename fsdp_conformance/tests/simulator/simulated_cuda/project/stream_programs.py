"""
Programs on streams as people write them: those named "right" have no race, those named "wrong" have one.

They were written without a look at the checker. In CUDA's terms; what a name says holds on a GPU.
"""

import queue
import threading
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

D = "cuda"

Batches = queue.Queue[tuple[torch.Tensor, torch.cuda.Event] | None]


def gradient(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)).to(D)


# --- autograd and streams --------------------------------------------------------------------------------------------
def test_right_forward_on_side_backward_on_default() -> None:
    """Autograd runs the backward of each op on the stream of its forward, and syncs at the end with the caller's."""
    model, side = net(), torch.cuda.Stream()
    x = torch.randn(4, 16, device=D)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = model(x).sum()
    torch.cuda.current_stream().wait_stream(side)
    x.record_stream(side)
    loss.backward()
    for p in model.parameters():
        gradient(p).sum().item()


def test_wrong_training_on_side_grads_read_on_default() -> None:
    model, side = net(), torch.cuda.Stream()
    x = torch.randn(4, 16, device=D)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(x).sum().backward()
    # nothing waits for the side stream
    for p in model.parameters():
        p.data.add_(gradient(p), alpha=-0.1)
    torch.cuda.synchronize()


def test_right_backward_on_side_of_a_forward_on_default() -> None:
    """Autograd runs on the forward's stream, whatever stream is current."""
    model, side = net(), torch.cuda.Stream()
    loss = model(torch.randn(4, 16, device=D)).sum()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss.backward()
    for p in model.parameters():
        p.data.add_(gradient(p), alpha=-0.1)
    torch.cuda.synchronize()


def test_right_backward_on_side_then_wait() -> None:
    model, side = net(), torch.cuda.Stream()
    x = torch.randn(4, 16, device=D)
    loss = model(x).sum()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss.backward()
    torch.cuda.current_stream().wait_stream(side)
    for p in model.parameters():
        p.data.add_(gradient(p), alpha=-0.1)
    torch.cuda.synchronize()


def test_right_checkpoint_on_side() -> None:
    model, side = net(), torch.cuda.Stream()
    x = torch.randn(4, 16, device=D, requires_grad=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = checkpoint(model, x, use_reentrant=False).sum()
        loss.backward()
    torch.cuda.current_stream().wait_stream(side)
    gradient(x).sum().item()


def test_wrong_hook_launches_on_side() -> None:
    """A hook starts work on a side stream that does not wait for the gradient."""
    p, side = nn.Parameter(torch.ones(64, device=D)), torch.cuda.Stream()
    norms = torch.zeros(1, device=D)
    torch.cuda.synchronize()

    def hook(param: torch.Tensor) -> None:
        with torch.cuda.stream(side):
            norms.add_(gradient(param).norm())

    p.register_post_accumulate_grad_hook(hook)
    (p * 2).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    norms.item()


def test_right_hook_launches_on_side() -> None:
    p, side = nn.Parameter(torch.ones(64, device=D)), torch.cuda.Stream()
    norms = torch.zeros(1, device=D)
    torch.cuda.synchronize()

    def hook(param: torch.Tensor) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            norms.add_(gradient(param).norm())
        gradient(param).record_stream(side)

    p.register_post_accumulate_grad_hook(hook)
    (p * 2).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    norms.item()


class OnSide(torch.autograd.Function):
    side: torch.cuda.Stream

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wait: bool) -> torch.Tensor:
        ctx.wait = wait
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        OnSide.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(OnSide.side):
            out = g * 2
        g.record_stream(OnSide.side)
        if ctx.wait:
            torch.cuda.current_stream().wait_stream(OnSide.side)
            out.record_stream(torch.cuda.current_stream())
        return out, None


def test_wrong_custom_backward_on_side() -> None:
    OnSide.side = torch.cuda.Stream()
    x = torch.ones(8, device=D, requires_grad=True)
    (OnSide.apply(x * 3, False)).sum().backward()
    gradient(x).sum().item()


def test_right_custom_backward_on_side() -> None:
    OnSide.side = torch.cuda.Stream()
    x = torch.ones(8, device=D, requires_grad=True)
    (OnSide.apply(x * 3, True)).sum().backward()
    gradient(x).sum().item()


# --- views and bytes --------------------------------------------------------------------------------------------------
def test_right_disjoint_halves() -> None:
    t, a, b = torch.zeros(8, device=D), torch.cuda.Stream(), torch.cuda.Stream()
    for s in (a, b):
        s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(a):
        t[:4].add_(1)
    with torch.cuda.stream(b):
        t[4:].add_(2)
    for s in (a, b):
        torch.cuda.current_stream().wait_stream(s)
    assert t.sum().item() == 12


def test_right_interleaved_columns() -> None:
    t, a, b = torch.zeros(6, 4, device=D), torch.cuda.Stream(), torch.cuda.Stream()
    for s in (a, b):
        s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(a):
        t[:, ::2].fill_(1)
    with torch.cuda.stream(b):
        t[:, 1::2].fill_(2)
    torch.cuda.synchronize()
    assert t.sum().item() == 36


def test_wrong_overlapping_halves() -> None:
    t, a, b = torch.zeros(8, device=D), torch.cuda.Stream(), torch.cuda.Stream()
    for s in (a, b):
        s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(a):
        t[:5].add_(1)
    with torch.cuda.stream(b):
        t[4:].add_(2)
    torch.cuda.synchronize()


def test_right_two_readers() -> None:
    t, a, b = torch.ones(8, device=D), torch.cuda.Stream(), torch.cuda.Stream()
    out = []
    for s in (a, b):
        s.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s):
            out.append(t.sum())
    torch.cuda.synchronize()
    assert out[0].item() == out[1].item() == 8


def test_wrong_transposed_view() -> None:
    t, side = torch.zeros(4, 6, device=D), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        t.t()[2].fill_(1)  # column 2
    t[:, 2:3].mul_(2)
    torch.cuda.synchronize()


# --- hosts ------------------------------------------------------------------------------------------------------------
def test_right_ring_of_staging_buffers() -> None:
    ring = [torch.empty(16, pin_memory=True) for _ in range(2)]
    events: list[torch.cuda.Event | None] = [None, None]
    total = torch.zeros((), device=D)
    for step in range(6):
        slot = step % 2
        if (event := events[slot]) is not None:
            event.synchronize()
        ring[slot].fill_(step)
        total += ring[slot].to(D, non_blocking=True).sum()
        events[slot] = torch.cuda.current_stream().record_event()
    assert total.item() == 16 * 15


def test_wrong_ring_of_staging_buffers() -> None:
    """The event is recorded before the copy."""
    ring = [torch.empty(16, pin_memory=True) for _ in range(2)]
    events: list[torch.cuda.Event | None] = [None, None]
    total = torch.zeros((), device=D)
    for step in range(6):
        slot = step % 2
        if (event := events[slot]) is not None:
            event.synchronize()
        ring[slot].fill_(step)
        events[slot] = torch.cuda.current_stream().record_event()
        total += ring[slot].to(D, non_blocking=True).sum()
    torch.cuda.synchronize()


def test_right_query_loop() -> None:
    host = torch.empty(16, pin_memory=True)
    host.copy_(torch.arange(16.0, device=D), non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    while not done.query():
        pass
    assert host.numpy().sum() == 120


def test_wrong_numpy_assignment() -> None:
    """NumPy writes into pinned memory that is being copied."""
    host = torch.zeros(16, pin_memory=True)
    view = host.numpy()
    dev = host.to(D, non_blocking=True)
    view[:] = 7
    torch.cuda.synchronize()
    dev.sum().item()


def test_right_pinned_temporary() -> None:
    """The caching host allocator keeps the memory until the copy is done."""
    total = torch.zeros(16, device=D)
    for step in range(4):
        total += torch.full((16,), float(step)).pin_memory().to(D, non_blocking=True)
    assert total.sum().item() == 96


def test_wrong_item_of_pinned_scalar() -> None:
    """A loss is copied out without blocking, and the host looks at it at once."""
    loss = torch.ones((), device=D) * 3
    host = torch.empty((), pin_memory=True)
    host.copy_(loss, non_blocking=True)
    if host > 2:
        pass
    torch.cuda.synchronize()


def test_right_unpinned_non_blocking() -> None:
    """A copy to pageable memory is finished when it returns."""
    loss = torch.ones(4, device=D) * 3
    host = torch.empty(4)
    host.copy_(loss, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert host.sum().item() == 12


# --- threads ----------------------------------------------------------------------------------------------------------
def _producer(out: Batches, record: bool) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for step in range(3):
            batch = torch.full((16,), float(step)).pin_memory().to(D, non_blocking=True)
            event = torch.cuda.Event()
            if record:
                event.record(side)
            out.put((batch, event))
    out.put(None)


def _consume(record: bool) -> None:
    out: Batches = queue.Queue(2)
    thread = threading.Thread(target=_producer, args=(out, record))
    thread.start()
    total = torch.zeros(16, device=D)
    while (item := out.get()) is not None:
        batch, event = item
        torch.cuda.current_stream().wait_event(event)
        batch.record_stream(torch.cuda.current_stream())
        total += batch
    thread.join()
    torch.cuda.synchronize()


def test_right_thread_with_events() -> None:
    _consume(True)


def test_wrong_thread_with_events_never_recorded() -> None:
    _consume(False)


# --- several devices --------------------------------------------------------------------------------------------------
def test_right_copy_between_devices() -> None:
    a = torch.ones(8, device="cuda:0")
    b = a.to("cuda:1", non_blocking=True)
    a.zero_()
    assert (b * 2).sum().item() == 16


def test_wrong_copy_between_devices_on_side() -> None:
    a = torch.ones(8, device="cuda:0")
    b = torch.empty(8, device="cuda:1")
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    side = torch.cuda.Stream("cuda:0")
    with torch.cuda.stream(side):
        b.copy_(a, non_blocking=True)
    a.zero_()
    torch.cuda.synchronize(0)


def test_right_pipeline_of_two_devices() -> None:
    first, second = nn.Linear(8, 8).to("cuda:0"), nn.Linear(8, 1).to("cuda:1")
    opt = torch.optim.Adam([*first.parameters(), *second.parameters()])
    for _ in range(2):
        x = torch.randn(4, 8).pin_memory().to("cuda:0", non_blocking=True)
        loss = second(first(x).to("cuda:1", non_blocking=True)).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
    loss.item()


# --- optimizers, averages, memory -------------------------------------------------------------------------------------
def test_wrong_optimizer_on_side() -> None:
    model, side = net(), torch.cuda.Stream()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 16, device=D)).sum().backward()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            opt.step()
        opt.zero_grad()
    torch.cuda.synchronize()


def test_right_ema_on_side() -> None:
    model, side = net(), torch.cuda.Stream()
    average = [p.detach().clone() for p in model.parameters()]
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(4, 16, device=D)).sum().backward()
        torch.cuda.current_stream().wait_stream(side)
        opt.step()
        opt.zero_grad()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for a, p in zip(average, model.parameters(), strict=True):
                a.lerp_(p.detach(), 0.1)
    torch.cuda.synchronize()


def test_wrong_ema_on_side() -> None:
    """The next step overwrites the parameters that the average is still reading."""
    model, side = net(), torch.cuda.Stream()
    average = [p.detach().clone() for p in model.parameters()]
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(4, 16, device=D)).sum().backward()
        opt.step()
        opt.zero_grad()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for a, p in zip(average, model.parameters(), strict=True):
                a.lerp_(p.detach(), 0.1)
    torch.cuda.synchronize()


def test_wrong_activation_offload() -> None:
    """Saved tensors are copied to pinned memory on a side stream; the unpack does not wait for the copy back."""
    side = torch.cuda.Stream()

    def pack(t: torch.Tensor) -> torch.Tensor:
        host = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            host.copy_(t, non_blocking=True)
        t.record_stream(side)
        return host

    def unpack(host: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(side):
            return host.to(D, non_blocking=True)

    x = torch.randn(4, 16, device=D, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = (x.exp() * x).sum()
    loss.backward()
    torch.cuda.synchronize()


def test_right_activation_offload() -> None:
    side = torch.cuda.Stream()

    def pack(t: torch.Tensor) -> torch.Tensor:
        host = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            host.copy_(t, non_blocking=True)
        t.record_stream(side)
        return host

    def unpack(host: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(side):
            back = host.to(D, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        back.record_stream(torch.cuda.current_stream())
        return back

    x = torch.randn(4, 16, device=D, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = (x.exp() * x).sum()
    loss.backward()
    torch.cuda.synchronize()


def test_right_built_in_offload() -> None:
    x = torch.randn(4, 16, device=D, requires_grad=True)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        loss = (x.exp() * x).sum()
    loss.backward()
    gradient(x).sum().item()


def test_wrong_cached_mask() -> None:
    """A mask is built once on whatever stream is current, and used on another later."""
    side = torch.cuda.Stream()
    cache: dict[int, torch.Tensor] = {}

    def mask(n: int) -> torch.Tensor:
        if n not in cache:
            cache[n] = torch.ones(n, n, device=D).tril()
        return cache[n]

    q = torch.randn(4, 8, device=D)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        mask(8)
    scores = q @ q.t()
    scores @ mask(8)[:4, :4]
    torch.cuda.synchronize()


def test_right_amp_and_clipping() -> None:
    model = net()
    opt = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(2):
        with torch.autocast("cuda", torch.float16):
            loss = F.mse_loss(model(torch.randn(4, 16, device=D)), torch.zeros(4, 1, device=D))
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()


def test_wrong_scatter_to_index_on_side() -> None:
    t, side = torch.zeros(32, device=D), torch.cuda.Stream()
    index = torch.tensor([3, 5, 9], device=D)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        t.index_add_(0, index, torch.ones(3, device=D))
    t.sum()
    torch.cuda.synchronize()


def test_right_moments_after_event_in_another_thread() -> None:
    """An event that one thread records is waited for in another, on the device."""
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    t = torch.zeros(8, device=D)
    side.wait_stream(torch.cuda.current_stream())

    def work() -> None:
        with torch.cuda.stream(side):
            t.add_(1)
            event.record()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    event.wait()
    assert np.allclose(t.cpu().numpy(), 1)
