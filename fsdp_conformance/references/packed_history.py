"""
A history as two objects that are cheap to send: its structure, and the bytes of its tensors in one flat tensor.

torch pickles each tensor as a file of its own, so sending a history that way took as long as the training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_conformance.errors import SuiteError
from fsdp_conformance.references.structures import convert

#: Offsets are multiples of it, so that bytes can be read as elements of any dtype.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Packed:
    """A value whose tensors were taken out."""

    structure: Any
    """The value, with tensors on the meta device in place of those on the CPU."""
    content: Tensor
    """Their elements, as bytes."""


def packed(value: Any) -> Packed:
    """The value, packed. Tensors without plain storage on the CPU (sparse ones) stay in the structure."""
    pieces: list[Tensor] = []

    def take(tensor: Tensor) -> Tensor:
        if not _is_plain(tensor):
            return tensor
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        pieces.append(torch.nn.functional.pad(flat, (0, -flat.numel() % _ALIGNMENT)))
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    structure = convert(value, take)
    return Packed(structure, torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8))


def unpacked(packed: Packed) -> Any:
    """
    The value again: equal to the one that was packed, with storage of its own for each tensor.

    Raises SuiteError if the bytes are not as many as the structure needs.
    """
    begin = 0

    def put(tensor: Tensor) -> Tensor:
        nonlocal begin
        if tensor.device.type != "meta":
            return tensor
        size = tensor.numel() * tensor.element_size()
        if begin + size > packed.content.numel():
            raise SuiteError(f"packed value: expected at least {begin + size} bytes, got {packed.content.numel()}")
        flat = packed.content[begin : begin + size].clone()
        begin += size + -size % _ALIGNMENT
        return flat.view(tensor.dtype).view(tensor.shape)

    value = convert(packed.structure, put)
    if begin != packed.content.numel():
        raise SuiteError(f"packed value: expected {begin} bytes, got {packed.content.numel()}")
    return value


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
