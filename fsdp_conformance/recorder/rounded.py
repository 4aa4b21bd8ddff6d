"""
Tensors in float32 that have only numbers of bfloat16, as after a reduction in it.

Where a script trains in bfloat16, the size of a difference cannot show that: its rounding is as large. Numbers of
float16 show nothing: sums of a few numbers of bfloat16 may be some.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fsdp_conformance.recorder.changes import sample_of
from fsdp_conformance.recorder.fingerprints import Part

#: A sum of two such numbers is one by chance about every other time: as many samples must be.
_LEAST = 16


class Rounded:
    """Tensors by name. A few elements of each are looked at, on its device; nothing waits for it until `names`."""

    @torch.no_grad()
    def __init__(self, parts: Mapping[str, Sequence[Part]]) -> None:
        samples: dict[torch.device, dict[str, Tensor]] = defaultdict(dict)
        for name, held in parts.items():
            values = held[0].values if held else None
            if values is not None and values.dtype is torch.float32 and values.numel() >= _LEAST:
                samples[values.device][name] = sample_of(values)
        self._counts = {tuple(each): _counts(list(each.values())) for each in samples.values()}

    def names(self) -> tuple[str, ...]:
        """Those that are rounded."""
        return tuple(
            name
            for names, counts in self._counts.items()
            for name, (present, others) in zip(names, counts.tolist(), strict=True)
            if present >= _LEAST and not others
        )


def _counts(samples: Sequence[Tensor]) -> Tensor:
    """Of each tensor, how many elements are not zero, and how many are no number of bfloat16: (tensors, 2)."""
    together = torch.cat(list(samples))
    sizes = torch.tensor([sample.numel() for sample in samples])
    owners = torch.repeat_interleave(torch.arange(len(samples)), sizes).to(together.device)
    flags = [together != 0, together.bfloat16().float() != together]
    counts = torch.zeros(len(samples), len(flags), dtype=torch.int64, device=together.device)
    return counts.index_add_(0, owners, torch.stack(flags, dim=1).to(torch.int64))
