"""
Values as bytes and back: how what a rank has observed travels to another process, and how references are kept.

    to_bytes      a value as one line of JSON, in which tensors are places in the bytes that follow
    from_bytes    the value again

Plain data, tensors, and the records that were named to `carry` can travel. Nothing that is read is ever executed, so
code under test may have written it.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.history.hazard import HazardKind, HazardRecord
from fsdp_conformance.history.memory import MemoryMark, Point
from fsdp_conformance.history.overlap import Communicated, Computed, DeviceWork
from fsdp_conformance.history.training import StepRecord, TrainingHistory
from fsdp_conformance.outcome.records import CheckCount, Finding, RankError

T = TypeVar("T")

#: Classes whose instances travel, by name: dataclasses, enumerations, named tuples and kinds of dict.
_CARRIED: dict[str, Any] = {}

_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "Size": torch.Size}


class NotData(TypeError):
    """A value that cannot travel: a live object, such as a module or an open file."""


class Unreadable(ValueError):
    """Bytes that `to_bytes` has not written, with the reason."""


class Elsewhere(SuiteError, AttributeError):
    """The suite's own code asked for an attribute of an object that has not travelled."""


@dataclasses.dataclass(frozen=True, slots=True)
class Opaque:
    """A live object that did not travel: nothing but its class is known. Two of one class are equal."""

    kind: str
    """The qualified name of its class."""

    def __getattr__(self, name: str) -> Any:
        raise Elsewhere(
            f"{name} of a {self.kind} is not known here, because the object is in another process. A case must read it "
            "through `observe`, or be declared with `live`"
        )


def carry(kind: type[T]) -> type[T]:
    """Let instances of a dataclass, an enumeration, a named tuple or a kind of dict travel."""
    _CARRIED[kind.__name__] = kind
    return kind


_OURS: tuple[type, ...] = (
    TrainingHistory, StepRecord, CollectiveRecord, MemoryMark, HazardRecord, Finding, CheckCount, RankError, Opaque, Op,
    Point, HazardKind, Communicated, Computed, DeviceWork,
)  # fmt: skip
for _kind in _OURS:
    carry(_kind)


def to_bytes(value: Any, *, opaque: bool = False) -> bytes:
    """The value as bytes: equal for equal values. A live object becomes `Opaque`, or raises NotData."""
    pieces: list[bytes] = []
    structure = _written(value, pieces, opaque)
    return json.dumps(structure, separators=(",", ":")).encode() + b"\n" + b"".join(pieces)


def from_bytes(data: bytes) -> Any:
    """The value that was written, each tensor with a storage of its own, on its device. Raises Unreadable."""
    line, _, rest = data.partition(b"\n")
    try:
        reader = _Reader(rest)
        value = reader.value(json.loads(line))
    except Exception as error:
        # Whatever a class or torch raises for values that it does not accept.
        raise Unreadable(f"its structure cannot be read: {type(error).__name__}: {error}") from error
    if reader.position != len(rest):
        raise Unreadable(f"expected {reader.position} bytes of tensors, got {len(rest)}")
    return value


def tensor_bytes(value: Tensor) -> bytes:
    """The elements of a dense tensor, in order."""
    # A copy, because `numpy` makes a storage one that can never be resized, and engines free theirs in that way.
    flat = value.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    content: bytes = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return content


def _written(value: Any, pieces: list[bytes], opaque: bool) -> Any:
    """The value in terms of JSON: what JSON has as it is, the rest as a list that begins with its kind."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return ["float", value.hex()]
    if _SEQUENCES.get(kind.__name__) is kind:
        # Sets have no order of their own, and the same set must give the same bytes.
        items = sorted(value, key=repr) if kind in (set, frozenset) else value
        return [kind.__name__, *(_written(item, pieces, opaque) for item in items)]
    if kind is dict or kind is OrderedDict or (isinstance(value, dict) and _CARRIED.get(kind.__name__) is kind):
        return [kind.__name__, *([_written(part, pieces, opaque) for part in item] for item in value.items())]
    if _is_dense(value):
        pieces.append(tensor_bytes(value))
        return ["tensor", _name_of(value.dtype), list(value.shape), value.requires_grad, _device_name(value.device)]
    if kind is torch.dtype:
        return ["dtype", _name_of(value)]
    if kind is torch.device:
        return ["device", _device_name(value)]
    if isinstance(value, Path):
        return ["path", str(value)]
    if _CARRIED.get(kind.__name__) is kind:
        return [*_of_class(value), _written(_fields(value), pieces, opaque)]
    if (simple := _simplified(value)) is not value:
        return _written(simple, pieces, opaque)
    if opaque:
        return ["record", "Opaque", _written({"kind": f"{kind.__module__}.{kind.__qualname__}"}, pieces, opaque)]
    raise NotData(f"a {kind.__module__}.{kind.__qualname__} is a live object, which is not written down")


def _simplified(value: Any) -> Any:
    """Return a NumPy scalar, or an instance of a subclass of a plain class, as a plain value, and others unchanged."""
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return value.item()
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float | int) and not isinstance(value, enum.Enum):
        return float(value) if isinstance(value, float) else int(value)
    if isinstance(value, Mapping):
        return dict(value.items())
    is_subclass = isinstance(value, Tensor) and type(value) is not Tensor and value.layout is torch.strided
    # One that dispatches by itself, such as a DTensor, has no values of its own.
    if is_subclass and type(value).__torch_dispatch__ == Tensor.__torch_dispatch__:
        return value.detach().as_subclass(Tensor).requires_grad_(value.requires_grad)
    return value


def _is_dense(value: Any) -> bool:
    if type(value) not in (Tensor, torch.nn.Parameter):
        return False
    return value.layout is torch.strided and value.device.type != "meta"


def _device_name(device: torch.device) -> str:
    # Not its text, which says "cuda:0" of the simulated device while a script sees that as CUDA.
    index: int | None = device.index
    return device.type if index is None else f"{device.type}:{index}"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _of_class(value: Any) -> tuple[str, str]:
    return ("enum" if isinstance(value, enum.Enum) else "record"), type(value).__name__


def _fields(value: Any) -> Any:
    """The value, or the values by name, that an instance of such a class is made from."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return dict(zip(type(value)._fields, value, strict=True))  # type: ignore[attr-defined]
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


class _Reader:
    """Reads a structure, and takes the tensors from the bytes in the order in which they were written."""

    def __init__(self, data: bytes) -> None:
        self.bytes = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        self.position = 0

    def value(self, written: Any) -> Any:
        if not isinstance(written, list):
            return written
        kind, *rest = written
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](self.value(item) for item in rest)
        if kind in ("dict", "OrderedDict") or issubclass(_CARRIED.get(kind, object), dict):
            make = _CARRIED.get(kind, OrderedDict if kind == "OrderedDict" else dict)
            return make((self.value(name), self.value(item)) for name, item in rest)
        if kind == "tensor":
            return self._tensor(*rest)
        if kind in ("record", "enum"):
            fields = self.value(rest[1])
            return _CARRIED[rest[0]](fields) if kind == "enum" else _CARRIED[rest[0]](**fields)
        simple = {"float": float.fromhex, "dtype": _dtype, "device": torch.device, "path": Path}
        return simple[kind](rest[0])

    def _tensor(self, dtype_name: str, shape: list[int], requires_grad: bool, device: str) -> Tensor:
        dtype = _dtype(dtype_name)
        size = math.prod(shape) * dtype.itemsize
        # A copy, because the bytes of a tensor need not begin where its dtype may.
        data = self.bytes[self.position : self.position + size].clone()
        if len(data) != size or min(shape, default=0) < 0:
            raise ValueError(f"expected {size} bytes of a tensor of shape {shape}, got {len(data)}")
        self.position += size
        tensor = data.view(dtype).view(shape).to(device)
        return tensor.requires_grad_() if requires_grad else tensor


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype
