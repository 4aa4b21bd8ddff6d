"""Calls a trace for each event that torch's tracing hooks report, and for each operator that is dispatched."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.cuda import _gpu_trace
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_conformance.simulator.traced.operators import Uses, tensors_in, uses_of
from fsdp_conformance.simulator.traced.trace import Trace

__all__ = ["tracing"]


@contextmanager
def tracing(trace: Trace, handle_of: Callable[[Any], int]) -> Iterator[None]:
    """
    A context in which the hooks, and operators of this thread and of its backward passes, are told to `trace`.

    `handle_of` returns the number by which the hooks know a stream.
    """
    errors: list[Exception] = []
    calls: dict[Any, Callable[..., None]] = {
        _gpu_trace.EventDeletionCallbacks: trace.event_deleted,
        _gpu_trace.EventRecordCallbacks: trace.event_recorded,
        _gpu_trace.EventWaitCallbacks: trace.event_waited,
        _gpu_trace.EventSynchronizationCallbacks: trace.event_synchronized,
        _gpu_trace.StreamSynchronizationCallbacks: trace.stream_synchronized,
        _gpu_trace.DeviceSynchronizationCallbacks: trace.device_synchronized,
        _gpu_trace.MemoryAllocationCallbacks: trace.allocated,
        _gpu_trace.MemoryDeallocationCallbacks: trace.freed,
    }
    callbacks = {registry: _keeping_errors(call, errors) for registry, call in calls.items()}
    torch._C._activate_gpu_trace()
    for registry, callback in callbacks.items():
        registry.add_callback(callback)
    try:
        with _Operators(trace, handle_of, errors):
            yield
    finally:
        for registry, callback in callbacks.items():
            registry.callback_list.remove(callback)


def _keeping_errors(call: Callable[..., None], errors: list[Exception]) -> Callable[..., None]:
    """torch logs what a callback raises, and goes on: then findings would be wrong. The next operator raises it."""

    @functools.wraps(call)
    def keeping(*numbers: int) -> None:
        try:
            call(*numbers)
        except Exception as error:  # noqa: BLE001 - raised later
            errors.append(error)

    return keeping


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells a trace what operators read and write."""

    supports_higher_order_operators = True

    def __init__(self, trace: Trace, handle_of: Callable[[Any], int], errors: list[Exception]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace
        self._handle_of = handle_of
        self._errors = errors

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._errors:
            raise self._errors.pop()
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor calls operators on its own part, and these are seen
        if func is torch.ops.aten.record_stream.default:
            if self._has_memory(args[0]):
                self._trace.record_stream(args[0], self._handle_of(args[1]))
            return func(*args, **kwargs)
        return self._run(func, uses_of(func), args, kwargs)

    def _run(self, func: OpOverload, uses: Uses, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        used = [one for one in uses.of(args, kwargs) if self._has_memory(one[0])]
        index = self._index(uses, used, kwargs)
        with self._trace.operation(_title(uses.op, args, kwargs), index, is_collective=uses.is_collective) as operation:
            results = func(*args, **kwargs)
            if uses.touches_memory:
                known = {tensor.untyped_storage().data_ptr() for tensor, _, _ in used}
                fresh = [one for one in tensors_in(results) if self._has_memory(one)]
                used += [(one, False, True) for one in fresh if one.untyped_storage().data_ptr() not in known]
                self._trace.accesses(operation, (one for one in used if one[1] or one[2]))
        return results

    def _index(self, uses: Uses, used: Sequence[tuple[Tensor, bool, bool]], kwargs: Mapping[str, Any]) -> int | None:
        """The device on which an operator will run; None if its arguments do not tell, or if it touches no memory."""
        if not uses.touches_memory:
            return None
        if used:
            # A copy runs on the device of its source, which comes last.
            tensor = used[-1 if uses.op == "aten::copy_" else 0][0]
            return tensor.device.index
        asked = kwargs.get("device")
        if asked is None or torch.device(asked).type != self._trace.device.type:
            return None
        index: int | None = torch.device(asked).index
        return self._trace.device.current() if index is None else index

    def _has_memory(self, tensor: Any) -> bool:
        return (
            isinstance(tensor, Tensor)
            and not isinstance(tensor, FakeTensor)
            and tensor.device.type == self._trace.device.type
            and tensor.layout is torch.strided
            and tensor.numel() > 0
            and tensor.untyped_storage().data_ptr() != 0
        )


def _title(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The operator, or the direction of a copy, as the checker's other findings have it."""
    if op == "aten::copy_":
        target, source = args[0].device, args[1].device
    elif op == "aten::_to_copy" and kwargs.get("device") is not None:
        target, source = torch.device(kwargs["device"]), args[0].device
    else:
        return op
    if target.type == source.type:
        return op
    return "copy to the host" if target.type == "cpu" else "copy to the device"
