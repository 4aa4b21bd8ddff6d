"""
Communication hooks: a user's own reduction in place of the averaging all-reduce.

A hook is `hook(state, bucket) -> Future`; it gets the gradients of one bucket as they are on this rank, undivided, and
its result replaces the average: nothing is divided afterwards. Hooks written for torch's DistributedDataParallel work
unchanged: `GradientBucket` has the methods of `torch.distributed.GradBucket`.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from fsdp_conformance.engine.errors import HookMisuse

Hook = Callable[[Any, Any], Any]
"""(state, bucket) to a torch.futures.Future of a tensor, or of a list that holds one."""

_TorchsBucket: type = dist.GradBucket  # type: ignore[attr-defined]
_REGISTER = "register_comm_hook"


class CommunicationHook(NamedTuple):
    """A hook that passed `checked_hook`, with its state."""

    state: Any
    function: Hook

    def start(self, bucket: GradientBucket) -> torch._C.Future[Any]:
        """Run the hook. Raises HookMisuse if it returns no future."""
        future = self.function(self.state, bucket)
        if not isinstance(future, torch._C.Future):  # the base class, which Work.get_future() is an object of
            raise HookMisuse(
                f"{_name(self.function)} returned {type(future).__name__}, but should return a torch.futures.Future",
                where=f"communication hook, bucket {bucket.index()}",
            )
        return future


class GradientBucket:
    """What a hook sees of one bucket. Its methods are those of `torch.distributed.GradBucket`."""

    def __init__(
        self,
        index: int,
        buffer: Tensor,
        *,
        gradients: Sequence[Tensor],
        parameters: Sequence[nn.Parameter],
        last: bool,
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._gradients = list(gradients)
        self._parameters = list(parameters)
        self._last = last

    def index(self) -> int:
        """Its place among the buckets of this backward; 0 is reduced first."""
        return self._index

    def buffer(self) -> Tensor:
        """The gradients: 1D and contiguous, or one sparse tensor."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace what `buffer()` returns; what is reduced is the hook's result all the same."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Views into the buffer, each in the shape of its parameter."""
        return self._gradients

    def parameters(self) -> list[nn.Parameter]:
        """The parameters, in the order of `gradients()`."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether it is the last bucket of this backward."""
        return self._last


def checked_hook(state: Any, hook: Hook) -> CommunicationHook:
    """
    The hook, if it can be called with a state and a bucket and its annotations, where it has any, fit.

    Annotations may be strings. Raises HookMisuse naming everything that does not fit.
    """
    if not callable(hook):
        raise HookMisuse(f"hook={hook!r}, but should be callable", where=_REGISTER)
    problems = []
    parameters: list[inspect.Parameter] = []
    try:
        signature = inspect.signature(hook)
    except ValueError:  # some builtins have none
        signature = None
    if signature is not None:
        try:
            signature.bind(state, None)
        except TypeError as error:
            problems.append(f"{_name(hook)}{signature}, but should take (state, bucket): {error}")
        parameters = list(signature.parameters.values())
    hints = _hints(hook)
    bucket = hints.get(parameters[1].name) if len(parameters) > 1 else None
    if isinstance(bucket, type) and not issubclass(bucket, (GradientBucket, _TorchsBucket)):
        problems.append(
            f"{_name(hook)} annotates its bucket as {bucket.__name__}, but should annotate it as GradientBucket"
        )
    result = hints.get("return")
    if result is not None and typing.get_origin(result) is not Future and result is not Future:
        problems.append(
            f"{_name(hook)} is annotated to return {result}, but should return torch.futures.Future[Tensor]"
        )
    if problems:
        raise HookMisuse(problems, where=_REGISTER)
    return CommunicationHook(state, hook)


def hook_result(value: object, like: Tensor, *, bucket: int) -> Tensor:
    """
    The tensor that a hook's future holds: itself, or the only element of a list.

    Raises HookMisuse unless it has the number of elements, the dtype, the device and the layout of `like`.
    """
    where = f"result of the communication hook, bucket {bucket}"
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if not isinstance(value, Tensor):
        raise HookMisuse(f"value={type(value).__name__}, but should be a tensor or a list of one", where=where)
    problems = [
        f"{what}={got}, but should be {expected}"
        for what, got, expected in (
            ("layout", value.layout, like.layout),
            ("dtype", value.dtype, like.dtype),
            ("device", value.device, like.device),
            *((("numel", value.numel(), like.numel()),) if like.layout == torch.strided else ()),
        )
        if got != expected
    ]
    if problems:
        raise HookMisuse(problems, where=where)
    return value


def _hints(hook: Hook) -> dict[str, Any]:
    """The annotations of a hook, resolved where they can be; those that cannot are left out."""
    function = hook if inspect.isroutine(hook) else getattr(hook, "__call__", hook)  # noqa: B004  its own annotations
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):
        return {}


def _name(hook: Hook) -> str:
    return getattr(hook, "__name__", type(hook).__name__)
