"""
CUDA graphs under CUDA's names: a capture records operations and waits, and a replay issues them again.

As on a GPU, a capture computes nothing: memory that it would have written gets its values back when it ends, and what
it allocates holds NaN until the first replay. Each replay runs the operations on the memory of the capture, on the
current stream, so the checker sees their reads and writes like those of other work. `torch.cuda.graph` and
`torch.cuda.make_graphed_callables` are torch's own; they call the class and the functions below.

Other than on a GPU, memory of a pool is not used again within a graph or by a later one, waits for collectives are
replayed at the collective, and inputs that the program has dropped stay alive.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.as_cuda.names import NotSimulated, translated
from fsdp_conformance.simulator.device import SIMULATED
from fsdp_conformance.simulator.device import torch_sim as sim
from fsdp_conformance.simulator.frames import calling_frame
from fsdp_conformance.simulator.replacements import Replacements

__all__ = ["install"]

#: With a function that torch's stubs leave out.
_C10D: Any = torch._C._distributed_c10d

_NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"

#: Whose waits for work that is not captured are errors: those of all threads, of the capturing one, of none. Waits for
#: captured work and for the whole device always are ("Prohibited and Unhandled Operations" in the CUDA C++ guide).
_ERROR_MODES = ("global", "thread_local", "relaxed")

#: Operations after which the host knows something about values on the device, so it has waited for them.
_HOST_WAITS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

#: Arguments of batch norm, which it writes although its schemas do not say so.
_WRITTEN_UNANNOUNCED = ("running_mean", "running_var")

#: How much of the work of each stream, by its id, comes before a point.
Clock = dict[int, int]


@dataclass(frozen=True, slots=True)
class _Operation:
    """One call of an operator."""

    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    outputs: tuple[Tensor, ...]
    """The memory that the capture has allocated for the results; without those that are memory of the arguments."""
    stream: int


@dataclass(frozen=True, slots=True)
class _Record:
    """An event that was recorded on a stream."""

    event: int
    stream: int


@dataclass(frozen=True, slots=True)
class _Wait:
    """A stream that waits for an event."""

    event: int
    stream: int


@dataclass
class _Capture:
    """The work of one capture: on the stream that it began on, and on those that wait for it."""

    origin: Any
    place: str
    """The line that began it."""
    error_mode: str
    """One of `_ERROR_MODES`."""
    thread: int = field(default_factory=threading.get_ident)
    steps: list[_Operation | _Record | _Wait] = field(default_factory=list)
    clocks: dict[int, Clock] = field(default_factory=dict)
    """Stream to what its next operation comes after. A stream without one is not captured."""
    events: dict[int, Clock] = field(default_factory=dict)
    before: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """Address to a storage that captured operations write, and a copy of it."""
    made: dict[int, Tensor] = field(default_factory=dict)
    """Address to memory that the capture has allocated."""
    kept: list[Any] = field(default_factory=list)
    """Events, which would otherwise have the ids of others once they are gone."""
    problem: str = ""

    def __post_init__(self) -> None:
        self.clocks[self.origin.stream_id] = {}
        self.mode = _Recorder(self)

    def fail(self, problem: str) -> RuntimeError:
        """The error to raise; the capture cannot be used any more."""
        self.problem = self.problem or problem
        return RuntimeError(f"{_NOT_PERMITTED} [{problem}; the capture began at {self.place}]")

    @property
    def lets_this_thread_wait(self) -> bool:
        """True if the current thread may wait for work that is not captured."""
        others = self.error_mode == "thread_local" and threading.get_ident() != self.thread
        return others or self.error_mode == "relaxed"

    def add(self, operation: _Operation) -> None:
        """An operation was issued on a captured stream."""
        self.steps.append(operation)
        clock = self.clocks[operation.stream]
        clock[operation.stream] = clock.get(operation.stream, 0) + 1

    def record(self, event: Any, stream: int) -> None:
        """An event was recorded on a captured stream."""
        self.kept.append(event)
        self.events[id(event)] = dict(self.clocks[stream])
        self.steps.append(_Record(id(event), stream))

    def wait(self, event: Any, stream: int) -> None:
        """A stream waits for an event of this capture, and belongs to it from here on."""
        clock = self.clocks.setdefault(stream, {})
        for other, count in self.events[id(event)].items():
            clock[other] = max(clock.get(other, 0), count)
        self.steps.append(_Wait(id(event), stream))

    def unjoined(self) -> list[int]:
        """The streams with work that the first one has not waited for."""
        joined = self.clocks[self.origin.stream_id]
        return [stream for stream, clock in self.clocks.items() if clock.get(stream, 0) > joined.get(stream, 0)]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations of a capture. All but collectives run, since their results have shapes and memory."""

    def __init__(self, capture: _Capture) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capture = capture

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, Tensor) and kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # A subclass is made of tensors, which come here by themselves.
        given = _tensors((args, kwargs))
        stream = sim.current_stream().stream_id
        if stream not in self.capture.clocks:
            return func(*args, **kwargs)
        if func.namespace == "c10d" and _on_device(given):
            self.capture.add(_Operation(func, *_detached(args, kwargs), (), stream))
            return _uncomputed(func, args)
        self._refuse_waits(func, given, args, kwargs)
        written = _written(func, args, kwargs)
        self._keep_values(written)
        with checker.suspended():
            result = func(*args, **kwargs)
        returned = _tensors(result)
        if not _on_device([*given, *returned]):
            return result
        inputs = {_address(tensor) for tensor in given}
        outputs = tuple(tensor.detach() for tensor in returned if _address(tensor) not in inputs)
        self.capture.made |= {_address(tensor): tensor for tensor in outputs}
        if outputs or written:
            self.capture.add(_Operation(func, *_detached(args, kwargs), outputs, stream))
        return result

    def _refuse_waits(self, func: Any, given: list[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise RuntimeError for an operation for which the host waits until the device has computed."""
        if not _on_device(given):
            return
        copies = func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._to_copy)
        target = kwargs.get("device") if func.overloadpacket is torch.ops.aten._to_copy else None
        hosts = [tensor for tensor in given if tensor.device.type == "cpu" and tensor.dim() > 0]
        leaves = target is not None and torch.device(target).type == "cpu"
        crosses = copies and (leaves or any(not tensor.is_pinned() for tensor in hosts))
        if crosses or any(tag in func.tags for tag in _HOST_WAITS):
            raise self.capture.fail(f"the host waits for the device in {func._schema.name}")

    def _keep_values(self, written: Sequence[Tensor]) -> None:
        """Copy memory from before the capture that an operation is about to write."""
        for tensor in written:
            address = _address(tensor)
            if (
                tensor.device.type == SIMULATED
                and address not in self.capture.made
                and address not in self.capture.before
            ):
                with checker.suspended():
                    storage: Any = tensor.untyped_storage()
                    self.capture.before[address] = (storage, storage.clone())


class CUDAGraph:
    """Operations that were captured, to be issued again."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._capture: _Capture | None = None
        self._pool = graph_pool_handle()
        self._streams: dict[int, Any] = {}

    def capture_begin(
        self, pool: Any = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        """Begin to record the work of the current stream, and of streams that wait for it."""
        global _running
        if check_input_liveness:
            raise NotSimulated("check_input_liveness", "inputs that the program drops stay alive, so it sees none")
        if capture_error_mode not in _ERROR_MODES:
            raise RuntimeError(
                f"Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got {capture_error_mode}"
            )
        stream = sim.current_stream()
        if stream == sim.default_stream():
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. "
                "(However, after capture, it's ok to replay them on the default stream.)"
            )
        if _running is not None:
            raise RuntimeError(f"{_NOT_PERMITTED} [another capture, which began at {_running.place}, has not ended]")
        if pool is not None:
            self._pool = pool
        frame = calling_frame()
        self._random = sim.get_rng_state()
        self._capture = _running = _Capture(
            stream, place=str(frame or "an unknown line"), error_mode=capture_error_mode
        )
        _running.mode.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        """End the capture. Memory from before it gets its values back; what it has allocated holds NaN."""
        global _running
        capture = self._capture
        if capture is None or capture is not _running:
            raise RuntimeError("capture_end was called without capture_begin")
        _running = None
        capture.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        with checker.suspended(), torch.no_grad():
            for storage, values in capture.before.values():
                storage.copy_(values)
            capture.before.clear()
            for tensor in capture.made.values():
                if tensor.is_floating_point():
                    _whole(tensor).fill_(torch.nan)
            sim.set_rng_state(self._random)
        problem = ""
        if capture.problem:
            problem = f"operation failed due to a previous error during capture [{capture.problem}]"
        elif unjoined := capture.unjoined():
            problem = (
                f"capturing stream has unjoined work [{len(unjoined)} streams, which the capture's stream has to wait "
                f"for; it began at {capture.place}]"
            )
        if problem:
            self._capture = None
            raise RuntimeError(f"CUDA error: {problem}")

    def instantiate(self) -> None:
        """Nothing has to be made for a replay."""

    def replay(self) -> None:
        """Issue the captured work on the current stream, and on streams of its own beside it."""
        capture = self._capture
        if capture is None or capture is _running:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        if _running is not None:
            raise _running.fail("a graph is replayed")
        streams = {capture.origin.stream_id: sim.current_stream()}
        events: dict[int, Any] = {}
        with (
            torch.no_grad(),
            torch._C._AutoDispatchBelowAutograd(),
            checker.label(f"graph captured at {capture.place}"),
        ):
            for step in capture.steps:
                stream = streams.get(step.stream) or self._stream_beside(step.stream)
                if isinstance(step, _Record):
                    events[step.event] = stream.record_event()
                elif isinstance(step, _Wait):
                    stream.wait_event(events[step.event])
                else:
                    name = f"{step.function._schema.name} of the graph captured at {capture.place}"
                    with sim.stream(stream), checker.label(name):
                        _issue(step)

    def reset(self) -> None:
        """Forget the captured work and its memory."""
        self._capture = None

    def pool(self) -> Any:
        """The handle of its memory pool."""
        return self._pool

    def enable_debug_mode(self) -> None:
        """Nothing: there is no graph of CUDA to print."""

    def __getattr__(self, name: str) -> Any:
        if name in ("debug_dump", "raw_cuda_graph", "raw_cuda_graph_exec", "get_graph_data"):
            raise NotSimulated(f"torch.cuda.CUDAGraph.{name}", "a capture is a list of operations, not a graph of CUDA")
        raise AttributeError(f"'CUDAGraph' object has no attribute {name!r}")

    def _stream_beside(self, stream: int) -> Any:
        """The stream of replays that stands for a stream of the capture."""
        return self._streams.setdefault(stream, sim.Stream())


_handles = itertools.count(1)

#: The capture that has begun and not ended. CUDA allows one at a time in a process.
_running: _Capture | None = None


def graph_pool_handle() -> tuple[int, int]:
    """A new handle of a memory pool."""
    return (0, next(_handles))


def install(replaced: Replacements) -> dict[str, Any]:
    """Follow events and waits. Return the names of torch.cuda that are answered here."""
    event, stream = sim.Event, sim.Stream
    replaced.set(
        event,
        record=_unless_captured(event.record, _record),
        wait=_unless_captured(event.wait, lambda capture, self, stream=None: _wait(capture, stream, self)),
        synchronize=_unless_captured(event.synchronize, _wait_for_event),
        query=_unless_captured(event.query, _wait_for_event),
    )
    replaced.set(
        stream,
        wait_event=_unless_captured(stream.wait_event, _wait),
        wait_stream=_unless_captured(stream.wait_stream, _wait_stream),
        synchronize=_unless_captured(stream.synchronize, _wait_for_stream),
        query=_unless_captured(stream.query, _wait_for_stream),
    )
    replaced.on_undo(_forget)
    replaced.set(torch._C, _host_emptyCache=lambda: None)
    return {
        "CUDAGraph": CUDAGraph,
        "graph_pool_handle": graph_pool_handle,
        "is_current_stream_capturing": is_current_stream_capturing,
        "synchronize": translated(_synchronize),
    }


def _synchronize(device: Any = None) -> None:
    """The host waits for a device, which it may not do during a capture."""
    if _running is not None:
        raise _running.fail("the host waits for the device")
    sim.synchronize(device)


def is_current_stream_capturing() -> bool:
    """True if the work of the current stream is captured."""
    return _running is not None and sim.current_stream().stream_id in _running.clocks


def _unless_captured(real: Callable[..., Any], captured: Callable[..., bool | None]) -> Callable[..., Any]:
    """A method that, during a capture, asks `captured` first; it returns True if the call was recorded."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _running is not None and captured(_running, self, *args, **kwargs):
            return None
        return real(self, *args, **kwargs)

    return method


def _record(capture: _Capture, event: Any, stream: Any = None) -> bool:
    recorded_on = stream or sim.current_stream()
    if recorded_on.stream_id not in capture.clocks:
        return False
    capture.record(event, recorded_on.stream_id)
    return True


def _wait(capture: _Capture, stream: Any, event: Any) -> bool:
    waiting = stream or sim.current_stream()
    if id(event) not in capture.events:
        if waiting.stream_id in capture.clocks:
            raise capture.fail("a captured stream waits for an event from before the capture")
        return False
    capture.wait(event, waiting.stream_id)
    return True


def _wait_stream(capture: _Capture, waiting: Any, other: Any) -> bool:
    if other.stream_id not in capture.clocks:
        if waiting.stream_id in capture.clocks:
            raise capture.fail("a captured stream waits for a stream that is not captured")
        return False
    event = sim.Event()
    capture.record(event, other.stream_id)
    capture.wait(event, waiting.stream_id)
    return True


def _wait_for_event(capture: _Capture, event: Any) -> None:
    if id(event) in capture.events or not capture.lets_this_thread_wait:
        raise capture.fail("the host waits for the device")


def _wait_for_stream(capture: _Capture, stream: Any) -> None:
    if stream.stream_id in capture.clocks or not capture.lets_this_thread_wait:
        raise capture.fail("the host waits for the device")


def _issue(step: _Operation) -> None:
    """Run an operation, and put the results where the capture has allocated memory for them."""
    result = step.function(*step.args, **step.kwargs)
    given = {_address(tensor) for tensor in _tensors((step.args, step.kwargs))}
    fresh = [tensor for tensor in _tensors(result) if _address(tensor) not in given]
    for place, values in zip(step.outputs, fresh, strict=True):
        place.copy_(values)
    for value in pytree.tree_leaves(result):
        # A synchronous collective runs on the current stream, and gives no work to wait for.
        if isinstance(value, torch.ScriptObject) and (work := Work.unbox(value)) is not None:
            work.wait()


def _uncomputed(func: Any, args: Sequence[Any]) -> Any:
    """The result of a collective: its first argument, if that is where values go, and a Work that has ended."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result(_tensors(args[:1]))  # DDP takes its gradients from there.
    work = _C10D._create_work_from_future(future).boxed()
    return work if len(func._schema.returns) == 1 else (args[0], work)


def _detached(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Arguments to keep: the memory of the tensors without their part in autograd."""
    kept: tuple[Sequence[Any], Mapping[str, Any]] = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
    return kept


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes, by its schema."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    writes = [
        each.name
        for each in func._schema.arguments
        if (each.alias_info is not None and each.alias_info.is_write) or each.name in _WRITTEN_UNANNOUNCED
    ]
    return _tensors([named.get(name) for name in writes])


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]


def _on_device(tensors: Sequence[Tensor]) -> bool:
    return any(tensor.device.type == SIMULATED for tensor in tensors)


def _address(tensor: Tensor) -> int:
    """Where its storage begins; one of zero bytes is its own."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() or -storage._cdata


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor's storage, in its dtype."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((size,), (1,), 0)


def _forget() -> None:
    """Streams of this simulation are gone; torch keeps one for captures."""
    global _running
    _running = None
    torch.cuda.graph.default_capture_stream = None
