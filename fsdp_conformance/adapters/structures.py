"""Tensors inside models' inputs and outputs: nested containers, named tuples, dataclasses, packed sequences."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `change` applied to every tensor; structure and types are unchanged."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        # `batch_sizes` is unchanged: torch requires it on the CPU.
        moved = [map_tensors(part, change) for part in (value.data, value.sorted_indices, value.unsorted_indices)]
        return PackedSequence(moved[0], value.batch_sizes, moved[1], moved[2])
    if isinstance(value, dict):
        mapped = copy.copy(value)
        # Some subclasses, such as the outputs of Hugging Face's models, have no `update`.
        for key, item in value.items():
            mapped[key] = map_tensors(item, change)
        return mapped
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for field in dataclasses.fields(value):
            # A frozen dataclass rejects assignment, and its constructor might recompute fields.
            object.__setattr__(twin, field.name, map_tensors(getattr(value, field.name), change))
        return twin
    return value


def moved(value: Any, device: torch.device) -> Any:
    """`value` with every tensor on that device."""
    return map_tensors(value, lambda tensor: tensor.to(device))
