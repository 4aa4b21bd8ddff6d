"""
Poison: values that no correct implementation reads, in outputs that have not arrived and in memory that is not in use.

    poison(tensor)      NaN, and the largest value of an integer dtype
    is_poisoned         whether a tensor looks like new memory that torch has filled
    PoisonedMemory      a fault: bytes that are freed, and bytes by which a storage grows, are overwritten

Memory is overwritten when a storage is resized, which is how torch's sharded engines free parameters and bring them
back. New tensors are filled by torch itself, but only while deterministic algorithms are on, as in most ranks. Where
they are off, the fault turns them on with `warn_only` while it is installed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import deterministic
from torch.utils._mode_utils import no_dispatch

from fsdp_conformance.faults.fault import Fault
from fsdp_conformance.harness import context
from fsdp_conformance.harness.accounting import Part
from fsdp_conformance.stress import Provocation

#: NaN in every floating point dtype.
_BYTE = 0xFF


def uncounted(_: Provocation) -> None:
    """Count nothing: for a fault outside a stress run, whose strikes are not counted by their kind."""


def in_engine() -> bool:
    """True if the code under test is running, and not the suite's own: only the former is stressed."""
    run = context.current().run
    return run is None or run.part is Part.ENGINE


@contextmanager
def unnoticed(tensor: Tensor | None = None) -> Iterator[None]:
    """Hide the operations inside (on `tensor`, if given) from autograd, dispatch modes and version counters."""
    with no_dispatch(), torch.inference_mode(tensor is not None and tensor.is_inference()), torch.no_grad():
        yield


def is_there(tensor: Tensor) -> bool:
    """True if the memory of a tensor on the CPU has not been freed behind its back, by a resize of its storage."""
    if not tensor.numel():
        return True
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= needed


def poison(tensor: Tensor) -> None:
    """Overwrite a tensor on the CPU."""
    if not tensor.numel() or not is_there(tensor):
        return
    with unnoticed(tensor):
        if tensor.dtype.is_floating_point and tensor.element_size() == 1:
            tensor.data.view(torch.uint8).fill_(_BYTE)
        elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.data.fill_(float("nan"))
        else:
            tensor.data.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)


def is_poisoned(tensor: Tensor) -> bool:
    """True if the ends of a contiguous floating point tensor are NaN, as in new memory."""
    if not (tensor.dtype.is_floating_point and tensor.numel() and tensor.is_contiguous() and is_there(tensor)):
        return False
    with unnoticed(tensor):
        flat = tensor.data.view(-1)
        return bool(flat[0].isnan()) and bool(flat[-1].isnan())


class PoisonedMemory(Fault):
    """Memory of the CPU holds poison when a storage lets go of it, and when a storage grows."""

    need = "the engine must resize storages of the CPU while it is installed, as FSDP does to free parameters"

    def __init__(self, strike: Callable[[Provocation], None] = uncounted) -> None:
        super().__init__()
        self._count = strike

    def describe(self) -> str:
        """E.g. "freed and new memory poisoned on every rank"."""
        return f"freed and new memory poisoned on {self._ranks_phrase()}"

    def _attach(self) -> None:
        super()._attach()
        self._deterministic_before = torch.are_deterministic_algorithms_enabled()
        if not self._deterministic_before:
            torch.use_deterministic_algorithms(True, warn_only=True)
        resize = torch.UntypedStorage.resize_
        self._filled_before = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]

        def resize_(storage: torch.UntypedStorage, size: Any) -> Any:
            """Call torch's method, and overwrite the bytes that it frees or adds."""
            before, after = storage.nbytes(), int(size)
            # Memory that is shared or mapped belongs to others, too.
            is_private = storage.device.type == "cpu" and storage.resizable() and not storage.is_shared()
            if not (is_private and self._strikes_here() and in_engine()):
                return resize(storage, size)
            if after < before:
                ctypes.memset(storage.data_ptr() + after, _BYTE, before - after)
                self._strike(Provocation.FREED)
            resized = resize(storage, size)
            if after > before:
                ctypes.memset(storage.data_ptr() + before, _BYTE, after - before)
                self._strike(Provocation.NEW)
            return resized

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]

    def _detach(self) -> None:
        # torch's method is inherited from a base class, so it is back when this attribute is gone.
        del torch.UntypedStorage.resize_
        deterministic.fill_uninitialized_memory = self._filled_before  # type: ignore[attr-defined]
        if not self._deterministic_before:
            torch.use_deterministic_algorithms(False)
        super()._detach()

    def _strike(self, provocation: Provocation) -> None:
        self._fired += 1
        self._count(provocation)
