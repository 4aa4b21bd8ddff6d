"""
Everything that a script may ask of CUDA in one process, with the answer that it must get.

    python cuda_surface.py
"""

import copy
import os
import pickle
import tempfile
import threading
import zipfile
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Mark a function that asserts something."""
    CHECKS.append(function)
    return function


def on_cuda(tensor: torch.Tensor) -> bool:
    """As scripts ask."""
    return tensor.is_cuda and tensor.device.type == "cuda"


def refusal(action: Callable[[], object]) -> str:
    """The message of the error that an action raises; empty if it raises none."""
    try:
        action()
    except RuntimeError as error:  # also for out of memory, and what is not implemented
        return str(error)
    return ""


@check
def devices() -> None:
    """A device by word, by number, by type and number; compared, pickled, copied, in a context."""
    device = torch.device("cuda", 0)
    assert device == torch.device("cuda:0") == torch.zeros(1, device=0).device
    assert (device.type, device.index) == ("cuda", 0)
    assert torch.device("cuda").index is None
    assert isinstance(device, torch.device)
    assert not isinstance("cuda", torch.device)
    assert pickle.loads(pickle.dumps(device)) == copy.deepcopy(device) == device
    assert hash(device) == hash(torch.device(0))
    assert torch.device("cpu").type == "cpu"
    with torch.device("cuda"):
        assert on_cuda(torch.ones(2))
    torch.set_default_device("cuda")
    assert on_cuda(torch.arange(3))
    torch.set_default_device(None)
    assert torch.accelerator.current_accelerator().type == "cuda"  # type: ignore[union-attr]


@check
def factories() -> None:
    """Each with the word, the word with a number, the device, and by position where that is allowed."""
    like = torch.ones(2, 2)
    for device in ("cuda", "cuda:0", torch.device("cuda")):
        made = [
            torch.tensor([1.0], device=device),
            torch.as_tensor([1.0], device=device),
            torch.full((2,), 1.0, device=device),
            torch.randn(2, device=device),
            torch.randint(3, (2,), device=device),
            torch.randperm(4, device=device),
            torch.arange(3, device=device),
            torch.eye(2, device=device),
            torch.empty(2, device=device),
            torch.normal(0.0, 1.0, (2,), device=device),
            torch.zeros_like(like, device=device),
            torch.rand_like(like, device=device),
            torch.fft.fftfreq(4, device=device),
            like.new_zeros(2, device=device),
            like.to(device),
            like.to(device, torch.float16, non_blocking=True),
            like.to(device=device, copy=True),
        ]
        assert all(map(on_cuda, made))


@check
def moving() -> None:
    """Tensors, modules and storages, to the device and back."""
    tensor = torch.arange(4.0)
    for moved in (
        tensor.cuda(),
        tensor.cuda(0),
        tensor.cuda("cuda:0"),
        tensor.cuda(torch.device("cuda")),
        tensor.to(0),
    ):
        assert on_cuda(moved)
        assert moved.get_device() == 0
        assert moved.type() == "torch.cuda.FloatTensor"
        assert moved.cpu().tolist() == [0, 1, 2, 3]
    assert on_cuda(tensor.type("torch.cuda.HalfTensor"))
    assert on_cuda(tensor.cuda().to(torch.float64))
    assert torch.tensor([1]).untyped_storage().cuda().device == torch.device("cuda", 0)
    module = nn.Linear(2, 2)
    for moved_module in (
        copy.deepcopy(module).cuda(),
        copy.deepcopy(module).to("cuda"),
        nn.Linear(2, 2, device="cuda"),
    ):
        assert all(map(on_cuda, moved_module.parameters()))
        assert isinstance(moved_module.weight, nn.Parameter)
        assert not any(map(on_cuda, moved_module.cpu().parameters()))
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    assert on_cuda(empty.to_empty(device="cuda").weight)


@check
def the_module() -> None:
    """Check the answers of the torch.cuda module."""
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device("cuda:0")
    assert torch.cuda.current_device() == 0
    assert torch.cuda.get_device_capability() >= (8, 0)
    assert torch.cuda.get_device_properties(0).total_memory > 0
    assert isinstance(torch.cuda.get_device_name(0), str)
    assert torch.cuda.is_bf16_supported()
    assert not torch.cuda.is_current_stream_capturing()
    before = torch.cuda.memory_allocated()
    block = torch.empty(1 << 18, device="cuda")
    assert torch.cuda.memory_allocated("cuda:0") - before == block.nbytes
    assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated() > 0
    assert "allocated" in torch.cuda.memory_summary()
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    with torch.cuda.device(0), torch.cuda.device_of(block):
        pass


@check
def streams_and_events() -> None:
    """Streams, events, contexts, and waits in both directions."""
    side = torch.cuda.Stream(device="cuda:0", priority=-1)
    assert isinstance(side, torch.cuda.Stream)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert isinstance(torch.cuda.current_stream("cuda"), torch.cuda.Stream)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    assert isinstance(start, torch.cuda.Event)
    tensor = torch.ones(8, device="cuda")
    start.record()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        tensor.mul_(2)
        end.record()
    torch.cuda.current_stream().wait_event(end)
    tensor.record_stream(side)
    assert tensor.sum().item() == 16
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0


@check
def random_numbers() -> None:
    """Seeds and states."""
    torch.cuda.manual_seed_all(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(4, device="cuda"))
    with torch.random.fork_rng(devices=[0]):
        torch.rand(4, device="cuda")
    generator = torch.Generator(device="cuda").manual_seed(5)
    assert isinstance(generator, torch.Generator)
    assert on_cuda(torch.rand(2, device="cuda", generator=generator))


@check
def mixed_precision() -> None:
    """Autocast under each of its names, custom functions, the scaler."""
    weight = torch.randn(4, 4, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == torch.bfloat16
        assert (weight @ weight).dtype == torch.bfloat16
        assert torch.nn.functional.softmax(weight, 0).dtype == torch.float32
    with torch.autocast(device_type=weight.device.type):
        assert (weight @ weight).dtype == torch.float16
    with torch.autocast("cuda", enabled=False):
        assert (weight @ weight).dtype == torch.float32

    class Square(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            """A square in full precision."""
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
            """Its derivative."""
            (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
            return torch.as_tensor(2 * x * grad)

    with torch.autocast("cuda"):
        squared = Square.apply(weight @ weight)
    assert squared.dtype == torch.float32
    squared.sum().backward()
    scaler = torch.amp.GradScaler("cuda")
    assert scaler.is_enabled()
    assert scaler.scale(weight.sum()).item() != 0


@check
def checkpoints() -> None:
    """A file says cuda, and is read to where it is asked for."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "state.pt")
        torch.save({"weight": torch.arange(3.0, device="cuda:0")}, path)
        with zipfile.ZipFile(path) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
            assert b"cuda:0" in archive.read(name)
        for location in ("cuda", "cuda:0", torch.device("cuda", 0), {"cuda:0": "cuda:0"}, None):
            loaded = torch.load(path, map_location=location, weights_only=True)["weight"]
            assert on_cuda(loaded)
            assert loaded.tolist() == [0, 1, 2]
        moved = torch.load(path, lambda storage, place: storage.cuda(), weights_only=True)  # type: ignore[attr-defined]
        assert on_cuda(moved["weight"])
        for place in ("cpu", {"cuda:0": "cpu"}):
            assert not torch.load(path, map_location=place, weights_only=True)["weight"].is_cuda


@check
def pinned_memory() -> None:
    """Pinned by hand, by a factory, by a data loader; copied without blocking."""
    pinned = torch.ones(4).pin_memory()
    assert pinned.is_pinned()
    assert torch.empty(4, pin_memory=True).is_pinned()
    assert not torch.ones(4).is_pinned()
    assert on_cuda(pinned.cuda(non_blocking=True))
    for (batch,) in DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2, pin_memory=True):
        assert batch.is_pinned()
        assert batch.to("cuda", non_blocking=True).sum().item() == 4


@check
def other_threads() -> None:
    """A thread of the script's own, and a hook in autograd's."""
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(on_cuda(torch.zeros(2, device="cuda"))))
    thread.start()
    thread.join()
    tensor = torch.ones(2, device="cuda", requires_grad=True)
    tensor.register_hook(lambda grad: seen.append(on_cuda(grad + torch.ones(2, device="cuda"))))
    (tensor * 2).sum().backward()
    assert seen == [True, True]


@check
def modules() -> None:
    """Dropout, recurrent nets, attention, recomputation: what training scripts are made of."""
    x = torch.randn(2, 3, 8, device="cuda", requires_grad=True)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).cuda()
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    assert on_cuda(x.grad)
    outputs, _ = nn.LSTM(8, 4, batch_first=True).cuda()(x)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True).cuda()
    assert on_cuda(outputs)
    assert on_cuda(packed.data)


def main() -> None:
    """Make every check; say what each was."""
    for function in CHECKS:
        function()
        print(f"ok {function.__name__}")


@check
def tools() -> None:
    """Profilers, the history and a snapshot of the memory, its limit, CUDA's runtime, the number of a stream."""
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaProfilerStart())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        torch.ones(2, device="cuda").add_(1)
    assert any(event.name == "aten::add_" for event in profiled.events())
    with torch.cuda.profiler.profile(), torch.autograd.profiler.emit_nvtx():
        torch.ones(2, device="cuda").sum()
    assert "cudaHostRegister" in refusal(lambda: runtime.cudaHostRegister(0, 1, 0))
    torch.cuda.memory._record_memory_history(max_entries=100)
    held = torch.ones(1024, device="cuda")
    with tempfile.TemporaryDirectory() as directory:
        torch.cuda.memory._dump_snapshot(f"{directory}/snapshot.pickle")
        with open(f"{directory}/snapshot.pickle", "rb") as file:
            (segment, *_) = pickle.load(file)["segments"]
    torch.cuda.memory._record_memory_history(None)
    assert segment["allocated_size"] == torch.cuda.memory_allocated() >= held.nbytes
    assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"] == torch.cuda.memory_reserved()
    assert torch.cuda.current_stream().cuda_stream == 0 != torch.cuda.Stream().cuda_stream
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.25)
    assert torch.cuda.get_per_process_memory_fraction() == 0.25
    too_large = refusal(lambda: torch.empty(total // 4 + 1, dtype=torch.uint8, device="cuda"))
    assert "CUDA out of memory." in too_large
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.empty(total // 4 + 1, dtype=torch.uint8, device="cuda")


if __name__ == "__main__":
    main()
