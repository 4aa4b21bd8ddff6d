"""The elements of a part of a tensor as an event: bytes with their place in the whole tensor."""

from __future__ import annotations

import base64

import torch

from fsdp_conformance.recorder.fingerprints import Part
from fsdp_conformance.recordings.events import Kept


def elements_of(part: Part, *, step: int, kind: str, name: str, number: int) -> Kept:
    """The elements of a part. Waits for the device."""
    # A copy: an engine could not release storage that NumPy has seen.
    values = part.values.detach().clone(memory_format=torch.contiguous_format).cpu()
    is_range = isinstance(part.offsets, int)
    return Kept(
        step=step,
        kind=kind,
        name=name,
        number=number,
        shape=part.shape,
        dtype=str(values.dtype).removeprefix("torch."),
        offsets=(part.offsets,) if isinstance(part.offsets, int) else part.offsets,
        sizes=None if is_range else tuple(values.shape),
        data=base64.b64encode(values.reshape(-1).view(torch.uint8).numpy().tobytes()).decode(),
    )
