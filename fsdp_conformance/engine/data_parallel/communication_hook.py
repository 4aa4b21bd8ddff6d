"""
Communication hooks: user-defined reductions that replace the averaging all-reduce.

A hook is `hook(state, bucket) -> Future`. It gets this rank's gradients of one bucket, undivided, and its result
replaces the average: nothing is divided afterwards. Hooks written for torch's DistributedDataParallel work unchanged,
because `GradientBucket` has the methods of `torch.distributed.GradBucket`.
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
"""Takes (state, bucket) and returns a torch.futures.Future of a tensor, or of a list of one tensor."""

_TorchsBucket: type = dist.GradBucket  # type: ignore[attr-defined]
_REGISTER = "register_comm_hook"


class CommunicationHook(NamedTuple):
    """A hook that `checked_hook` accepted, with its state."""

    state: object
    function: Hook

    def start(self, bucket: GradientBucket) -> torch._C.Future[Any]:
        """Run the hook. Raises HookMisuse if it returns no future."""
        future = self.function(self.state, bucket)
        if not isinstance(future, torch._C.Future):  # the base class, which Work.get_future() returns
            raise HookMisuse(
                f"{_name(self.function)} must return a torch.futures.Future, got {type(future).__name__}",
                where=f"communication hook, bucket {bucket.index()}",
            )
        return future


class GradientBucket:
    """A hook's view of one bucket, with the methods of `torch.distributed.GradBucket`."""

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
        """The bucket's place among those of this backward; 0 is reduced first."""
        return self._index

    def buffer(self) -> Tensor:
        """The gradients: 1D and contiguous, or one sparse tensor."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace what `buffer()` returns. The hook's result is used all the same."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Views into the buffer, each in the shape of its parameter."""
        return self._gradients

    def parameters(self) -> list[nn.Parameter]:
        """The parameters, in the order of `gradients()`."""
        return self._parameters

    def is_last(self) -> bool:
        """True if this is the last bucket of this backward."""
        return self._last


def checked_hook(state: object, hook: Hook) -> CommunicationHook:
    """
    The hook, if it can be called with a state and a bucket and its annotations, if it has any, are right.

    Annotations may be strings. Raises HookMisuse with every problem.
    """
    if not callable(hook):
        raise HookMisuse(f"hook must be callable, got {hook!r}", where=_REGISTER)
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
            problems.append(f"{_name(hook)} must take (state, bucket), got {signature}: {error}")
        parameters = list(signature.parameters.values())
    hints = _hints(hook)
    bucket = hints.get(parameters[1].name) if len(parameters) > 1 else None
    if isinstance(bucket, type) and not issubclass(bucket, (GradientBucket, _TorchsBucket)):
        problems.append(f"{_name(hook)} must annotate its bucket as GradientBucket, got {bucket.__name__}")
    result = hints.get("return")
    if result is not None and typing.get_origin(result) is not Future and result is not Future:
        problems.append(f"{_name(hook)} must be annotated to return torch.futures.Future[Tensor], got {result}")
    if problems:
        raise HookMisuse(problems, where=_REGISTER)
    return CommunicationHook(state, hook)


def hook_result(value: object, like: Tensor, *, bucket: int) -> Tensor:
    """
    The tensor in a hook's future, which holds it directly or in a list.

    Raises HookMisuse unless its number of elements, dtype, device and layout are those of `like`.
    """
    where = f"result of the communication hook, bucket {bucket}"
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if not isinstance(value, Tensor):
        raise HookMisuse(f"the result must be a tensor or a list of one, got {type(value).__name__}", where=where)
    problems = [
        f"{what}: expected {expected}, got {got}"
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


def _hints(hook: Hook) -> dict[str, object]:
    """The annotations of a hook, or none if they cannot be resolved."""
    function = hook if inspect.isroutine(hook) else getattr(hook, "__call__", hook)  # noqa: B004  its own annotations
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):
        return {}


def _name(hook: Hook) -> str:
    return getattr(hook, "__name__", type(hook).__name__)
