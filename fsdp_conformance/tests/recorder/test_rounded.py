"""Gradients in float32 that have only numbers of bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_conformance.recorder.fingerprints import whole_part
from fsdp_conformance.recorder.rounded import Rounded


def _rounded(**tensors: Tensor) -> tuple[str, ...]:
    return Rounded({name: [whole_part(tensor)] for name, tensor in tensors.items()}).names()


def test_rounded_tensors_are_named() -> None:
    drawn = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    coarse = drawn.bfloat16()

    assert _rounded(full=drawn, coarse=coarse.float(), half=drawn.half().float(), other=coarse) == ("coarse",)


def test_too_few_samples_show_nothing() -> None:
    few = torch.ones(8)
    mostly_zero = torch.zeros(64)
    mostly_zero[:4] = 1

    assert _rounded(few=few, mostly_zero=mostly_zero, nothing=torch.zeros(100)) == ()


def test_a_sum_of_rounded_tensors_is_not_rounded() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(50, 40, generator=generator).bfloat16().float() for _ in range(2))

    assert _rounded(total=one + other) == ()
