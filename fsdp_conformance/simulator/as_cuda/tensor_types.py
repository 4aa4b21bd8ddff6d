"""
The types of CUDA's tensors and storages: `torch.cuda.FloatTensor`, `torch.cuda.sparse.FloatTensor`, `is_cuda`.

In a build for the CPU torch has these classes, but makes no instances, and recognises none. A tensor on the device has
the type that its dtype has on CUDA.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.cuda.sparse
from torch import storage as storages
from torch.nn.utils.rnn import PackedSequence

from fsdp_conformance.simulator.as_cuda.names import CUDA, NotSimulated, script_asks, translated
from fsdp_conformance.simulator.device import SIMULATED
from fsdp_conformance.simulator.replacements import Replacements

__all__ = ["install"]

_DTYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


def install(replaced: Replacements) -> None:
    """Replace the classes, and what tensors and storages say of their type."""
    for name, dtype in _DTYPES.items():
        for module in (torch.cuda, torch.cuda.sparse):
            if hasattr(module, name):  # there are no sparse booleans
                replaced.set(module, **{name: _tensor_type(module, name, dtype)})
    replaced.set(torch.Tensor, is_cuda=property(_is_cuda), type=_type_method(torch.Tensor.type))
    replaced.set(torch.Tensor, __cuda_array_interface__=_array_interface(torch.Tensor.__cuda_array_interface__))
    replaced.set(PackedSequence, is_cuda=property(lambda self: self.data.device.type == SIMULATED and script_asks()))
    replaced.set(torch, set_default_tensor_type=_set_default_tensor_type)
    _install_storages(replaced)


def _is_cuda(self: Any) -> bool:
    return self.device.type == SIMULATED and script_asks()


def _array_interface(original: Any) -> property:
    """An AttributeError, as libraries look whether there is one."""

    def interface(self: torch.Tensor) -> Any:
        if self.device.type == SIMULATED:
            why = "other libraries for CUDA cannot read its memory. Use DLPack, or tensor.cpu()"
            raise AttributeError(str(NotSimulated("torch.Tensor.__cuda_array_interface__", why)))
        return original.__get__(self)

    return property(interface)


class _TensorType(type):
    """The metaclass of the types. They have no instances: their constructors make tensors, as torch's do."""

    dtype: torch.dtype
    is_sparse: bool
    layout: torch.layout

    def __instancecheck__(cls, instance: object) -> bool:
        return (
            isinstance(instance, torch.Tensor)
            and instance.device.type == SIMULATED
            and instance.dtype == cls.dtype
            and instance.layout == cls.layout
        )

    def __call__(cls, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        where = torch.device(SIMULATED if device is None else device)
        if where.type != SIMULATED:
            raise RuntimeError(
                f"legacy constructor expects device type: {CUDA} but device type: {where.type} was passed"
            )
        if cls.is_sparse:
            return torch.sparse_coo_tensor(*args, dtype=cls.dtype, device=where, **kwargs)
        size = kwargs.pop("size", args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args)
        if all(isinstance(length, int) for length in size):
            return torch.empty(tuple(size) if args or size else (0,), dtype=cls.dtype, device=where, **kwargs)
        (source,) = args
        if isinstance(source, torch.Tensor):
            if not cls.__instancecheck__(source):
                raise TypeError(f"expected {cls.__name__} (got {source.type()})")
            return source.detach()
        if isinstance(source, torch.UntypedStorage | torch.TypedStorage):
            return torch.empty(0, dtype=cls.dtype, device=where).set_(source)
        # From a list or an array: its numbers are converted, as those of `torch.FloatTensor([1, 2])`.
        return torch.as_tensor(source, device="cpu").to(dtype=cls.dtype).to(where)


def _tensor_type(module: Any, name: str, dtype: torch.dtype) -> type:
    is_sparse = module is torch.cuda.sparse
    layout = torch.sparse_coo if is_sparse else torch.strided
    return _TensorType(
        name,
        (),
        {"__module__": module.__name__, "dtype": dtype, "layout": layout, "is_sparse": is_sparse, "is_cuda": True},
    )


def _dtype_of(kind: Any) -> torch.dtype | None:
    """The dtype of `torch.cuda.FloatTensor` and the like, given as a class or by name."""
    name = kind if isinstance(kind, str) else f"{getattr(kind, '__module__', '')}.{getattr(kind, '__name__', '')}"
    match = re.fullmatch(r"torch\.cuda\.(\w+)", name)
    return _DTYPES.get(match[1]) if match else None


def _type_method(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def typed(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return original(self).replace(f"torch.{SIMULATED}.", f"torch.{CUDA}.")
        target_dtype = _dtype_of(dtype)
        if target_dtype is not None:
            return self.to(device=SIMULATED, dtype=target_dtype, non_blocking=non_blocking)
        return original(self, dtype, non_blocking, **kwargs)

    return typed


def _set_default_tensor_type(kind: Any, _original: Callable[..., Any] = torch.set_default_tensor_type) -> None:
    dtype = _dtype_of(kind)
    if dtype is None:
        _original(kind)
        return
    torch.set_default_dtype(dtype)
    torch.set_default_device(SIMULATED)


def _install_storages(replaced: Replacements) -> None:
    replaced.set(torch.UntypedStorage, is_cuda=property(_is_cuda), __new__=translated(torch.UntypedStorage.__new__))
    replaced.set(torch.TypedStorage, is_cuda=property(_is_cuda))
    kind: Any = type(storages._LegacyStorage)
    recognises = kind.__instancecheck__

    def is_instance(cls: Any, instance: Any) -> bool:
        if cls.__module__ == torch.cuda.__name__ and type(instance) is torch.TypedStorage:
            is_same: bool = instance.device.type == SIMULATED and cls._dtype == instance.dtype
            return is_same
        return bool(recognises(cls, instance))

    replaced.set(kind, __instancecheck__=is_instance)
    storage_names: Any = storages._dtype_to_storage_type_map
    legacy_class: Callable[[Any], Any] = torch.TypedStorage._get_legacy_storage_class

    def class_on_cuda(self: Any) -> Any:
        if self.device.type != SIMULATED:
            return legacy_class(self)
        return getattr(torch.cuda, storage_names().get(self.dtype, ""), None)

    replaced.set(torch.TypedStorage, _get_legacy_storage_class=class_on_cuda)
