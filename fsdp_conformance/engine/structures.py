"""The tensors inside nested inputs and outputs: lists, tuples, dicts, dataclasses and registered pytree nodes."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import NoneType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

#: Types that cannot hold a tensor.
_WITHOUT_TENSORS = (NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)

#: Types that are searched, and may be empty.
_CONTAINERS = (Mapping, list, tuple, set, frozenset, deque, SimpleNamespace)


def tensors_in(structure: object) -> Iterator[Tensor]:
    """
    Every tensor inside `structure`, in order and with repetitions.

    Does not search objects of unknown types.
    """
    if isinstance(structure, Tensor):  # the usual output, and the fastest path
        yield structure
        return
    for leaf in _leaves(structure):
        if isinstance(leaf, Tensor):
            yield leaf


def has_unknown(structure: object) -> bool:
    """True if `structure` holds an object of unknown type, which may hold tensors that `tensors_in` does not find."""
    known_types = (Tensor, *_WITHOUT_TENSORS, *_CONTAINERS)
    return any(not isinstance(leaf, known_types) for leaf in _leaves(structure))


def _leaves(structure: object) -> Iterator[object]:
    """Everything inside `structure` that holds nothing further, in order."""
    visited: set[int] = set()  # for containers that hold themselves
    pending = [structure]
    while pending:
        item = pending.pop()
        if isinstance(item, (Tensor, *_WITHOUT_TENSORS)):
            yield item
        elif id(item) not in visited:
            inner = _inside(item)
            if inner:
                visited.add(id(item))
                pending.extend(reversed(inner))
            else:
                yield item


def _inside(item: object) -> list[object]:
    """The objects that `item` holds directly."""
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, (list, tuple, set, frozenset, deque)):
        return list(item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name, None) for field in dataclasses.fields(item)]
    if isinstance(item, SimpleNamespace):
        return list(vars(item).values())
    if type(item) in pytree.SUPPORTED_NODES:
        return list(pytree.tree_leaves(item))
    return []


def with_tensors(structure: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """
    A copy of `structure` with every tensor in it changed. Types and other objects stay the same.

    Containers are copied, not modified. Objects of unknown types are passed on unchanged.
    """
    if isinstance(structure, Tensor):
        return change(structure)
    if isinstance(structure, PackedSequence):
        # Its batch sizes belong on the CPU, whatever the device of the data.
        indices = (structure.sorted_indices, structure.unsorted_indices)
        changed = [None if index is None else change(index) for index in indices]
        return PackedSequence(change(structure.data), structure.batch_sizes, *changed)
    twin: Any
    if isinstance(structure, dict):
        twin = copy.copy(structure)  # an OrderedDict, a defaultdict, or a user's own
        for key, item in structure.items():
            twin[key] = with_tensors(item, change)
        return twin
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(with_tensors(item, change) for item in structure))
    if isinstance(structure, (list, tuple, set, frozenset, deque)):
        return type(structure)(with_tensors(item, change) for item in structure)
    if dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        twin = copy.copy(structure)
        for field in dataclasses.fields(structure):
            # Works for frozen dataclasses, and bypasses a constructor that would recompute fields.
            object.__setattr__(twin, field.name, with_tensors(getattr(structure, field.name), change))
        return twin
    if type(structure) in pytree.SUPPORTED_NODES:
        return pytree.tree_map_only(Tensor, change, structure)
    return structure
