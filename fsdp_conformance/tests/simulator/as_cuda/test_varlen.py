"""Attention over packed sequences: numbers, windows, groups of heads, races, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fsdp_conformance.simulated_cuda import simulated_cuda
from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.as_cuda.names import NotSimulated
from fsdp_conformance.simulator.checker.hazard import HazardKind
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own

varlen: Any = pytest.importorskip("torch.nn.attention.varlen", reason="torch has it since 2.10")

pytestmark = [compiled, pytest.mark.slow]

LENGTHS = (4, 1, 6)
HEADS, WIDTH = 4, 16


def packed(heads: int = HEADS) -> Tensor:
    """Values that are the same on each call with the same seed, with gradients."""
    return torch.randn(sum(LENGTHS), heads, WIDTH, dtype=torch.bfloat16).cuda().requires_grad_()


def starts() -> Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32).cuda()


def one_by_one(query: Tensor, key: Tensor, value: Tensor, left: int, right: int) -> Tensor:
    """Each sequence on its own, in float32."""
    outputs = []
    group = query.shape[1] // key.shape[1]
    for parts in zip(*(tensor.split(LENGTHS) for tensor in (query, key, value)), strict=True):
        q, k, v = (part.float().transpose(0, 1) for part in parts)
        place = torch.arange(q.shape[1], device="cuda")
        distance = place - place.unsqueeze(1)
        mask = (distance <= (right if right >= 0 else 99)) & (distance >= -(left if left >= 0 else 99))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        outputs.append(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1))
    return torch.cat(outputs)


def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    lengths = starts()
    result: Tensor = varlen.varlen_attn(query, key, value, lengths, lengths, max(LENGTHS), max(LENGTHS), **options)
    return result


@in_process_of_its_own
def test_numbers() -> None:
    """Output and gradients are those of the sequences one by one, to the precision of the inputs."""
    with simulated_cuda(1):
        for window, heads in (((-1, -1), HEADS), ((-1, 0), HEADS), ((2, 0), HEADS), ((1, 1), HEADS), ((-1, 0), 2)):
            query, key, value = packed(), packed(heads), packed(heads)
            out = attention(query, key, value, window_size=window, enable_gqa=heads != HEADS)
            expected = one_by_one(query, key, value, *window)
            grads = torch.autograd.grad(out.float().square().sum(), (query, key, value))
            expected_grads = torch.autograd.grad(expected.square().sum(), (query, key, value))
            torch.testing.assert_close(out.float(), expected, atol=0.02, rtol=0.02)
            for got, right in zip(grads, expected_grads, strict=True):
                torch.testing.assert_close(got, right, atol=0.1, rtol=0.05)


@in_process_of_its_own
def test_the_host_does_not_wait() -> None:
    """Neither forward nor backward, as the lengths are read on the device."""
    with simulated_cuda(1):
        query = packed()
        lengths = starts()
        torch.cuda.set_sync_debug_mode("error")
        varlen.varlen_attn(query, query, query, lengths, lengths, 6, 6).sum().backward()
        torch.cuda.set_sync_debug_mode("default")


@in_process_of_its_own
def test_races() -> None:
    """Values that another stream writes, unless it is waited for."""
    with simulated_cuda(1, hazards="report"):
        for waits in (False, True):
            qkv = packed().detach()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                qkv.mul_(2)
            if waits:
                torch.cuda.current_stream().wait_stream(side)
            attention(qkv, qkv, qkv)
            assert (HazardKind.READ_AFTER_WRITE in {hazard.kind for hazard in checker.hazards()}) == (not waits)
            checker.clear()


@in_process_of_its_own
def test_refusals() -> None:
    """float32 has no kernel on CUDA; pages of a cache have none here."""
    with simulated_cuda(1):
        query = packed()
        with pytest.raises(RuntimeError, match="only support fp16"):
            attention(query.float(), query.float(), query.float())
        with torch.no_grad(), pytest.raises(NotSimulated, match="varlen attention with seqused_k has no counterpart"):
            attention(query, query, query, seqused_k=torch.ones(3, dtype=torch.int32, device="cuda"))
