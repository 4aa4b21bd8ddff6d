"""
Tensors inside nested values: moves batches and records outputs of the references.

The adapters have separate code for this, so that a mistake here cannot occur on both sides of a comparison.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fsdp_conformance.workload.definition import Batch


def convert(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of `value` with `change` applied to every tensor; containers keep their types."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        # batch_sizes holds lengths, not data, and torch requires it on the CPU.
        return value._replace(data=change(value.data))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[convert(item, change) for item in value])
    if isinstance(value, list | tuple):
        return type(value)([convert(item, change) for item in value])
    if isinstance(value, dict):
        converted = copy.copy(value)
        for key, item in value.items():
            converted[key] = convert(item, change)
        return converted
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: convert(getattr(value, field.name), change) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path and every container with its type: two walks differ exactly if the structures do."""
    if isinstance(value, Tensor) or value is None:
        yield path, value
    elif isinstance(value, PackedSequence):
        yield path, type(value).__name__
        yield f"{path}.data", value.data
        yield f"{path}.batch_sizes", value.batch_sizes
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield path, type(value).__name__
        for name, item in zip(value._fields, value, strict=True):
            yield from walk(item, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        yield path, f"{type(value).__name__} of {len(value)}"
        for index, item in enumerate(value):
            yield from walk(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        yield path, f"{type(value).__name__} with {sorted(map(str, value))}"
        for key in sorted(value, key=str):
            yield from walk(value[key], f"{path}[{key!r}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield path, type(value).__name__
        for field in dataclasses.fields(value):
            yield from walk(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, value


def placed(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """The batch on the device, its floating tensors in `dtype`; leaves that require a gradient stay leaves."""

    def move(tensor: Tensor) -> Tensor:
        target = dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(device, target).requires_grad_(tensor.requires_grad)

    return Batch(args=convert(batch.args, move), kwargs=convert(batch.kwargs, move), target=convert(batch.target, move))


def noted(value: Any) -> Any:
    """The value with its tensors detached and copied to the CPU."""
    return convert(value, note)


def note(tensor: Tensor) -> Tensor:
    """A detached copy on the CPU with its own storage."""
    return tensor.detach().to("cpu", copy=True)
