"""
Attention over packed sequences of different lengths (`torch.nn.attention.varlen`), which has a kernel only for CUDA.

Here it is computed in float32 with all scores in memory, forward and backward, without a wait of the host. The lengths
are read on the device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fsdp_conformance.simulator.as_cuda.names import NotSimulated
from fsdp_conformance.simulator.replacements import Replacements

__all__ = ["install"]

_KEY = "PrivateUse1"


def install(replaced: Replacements) -> None:
    """Give the device kernels for torch's operations behind it."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    kernels = {
        "_flash_attention_forward": _forward,
        "_flash_attention_forward_no_dropout_inplace": _forward_into,
        "_flash_attention_backward": _backward,
    }
    for name, kernel in kernels.items():
        if hasattr(torch.ops.aten, name):  # not in every version
            library.impl(name, kernel, _KEY)
    replaced.on_undo(library._destroy)


def _forward(query: Tensor, key: Tensor, value: Tensor, *packing: Any, **options: Any) -> tuple[Tensor, ...]:
    """The output, the logarithms of the sums, the state of the random numbers, and two that are unused."""
    out, logsumexp = _attention(query, key, value, *packing, **options)
    unused = [query.new_empty(0) for _ in range(2)]
    return out, logsumexp, torch.zeros(2, dtype=torch.uint64, device=query.device), *unused


def _forward_into(out: Tensor, query: Tensor, key: Tensor, value: Tensor, *packing: Any, **options: Any) -> Tensor:
    result, logsumexp = _attention(query, key, value, *packing, **options)
    out.copy_(result)
    return logsumexp


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *_: Any,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    group = query.shape[1] // key.shape[1]
    wide = [
        tensor.float()
        for tensor in (grad_out, query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1))
    ]
    grad, queries, keys, values = wide
    allowed = _allowed(query, key, starts_q, starts_k, is_causal, **_windows(options))
    scale = _scale(query, options)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
    weights = (scores - logsumexp.unsqueeze(-1)).exp().masked_fill(~allowed, 0)
    inner = (grad * out.float()).sum(-1).t().unsqueeze(-1)
    grad_scores = weights * (torch.einsum("qhd,khd->hqk", grad, values) - inner) * scale
    of_heads = (
        torch.einsum("hqk,khd->qhd", grad_scores, keys),
        _summed(torch.einsum("hqk,qhd->khd", grad_scores, queries), group),
        _summed(torch.einsum("hqk,qhd->khd", weights, grad), group),
    )
    grad_query, grad_key, grad_value = (gradient.to(query.dtype) for gradient in of_heads)
    return grad_query, grad_key, grad_value


def _summed(gradient: Tensor, group: int) -> Tensor:
    """Over the heads of queries that share a head of keys."""
    return gradient.view(gradient.shape[0], -1, group, gradient.shape[-1]).sum(2)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor | None,
    starts_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The output, and the logarithm of the sum for each head and query."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16, bf16 and fp8_e4m3fn data type")
    refused = [name for name in ("seqused_k", "block_table", "alibi_slopes") if options.get(name) is not None]
    if starts_q is None or starts_k is None or dropout_p or return_debug_mask or refused:
        raise NotSimulated(
            f"varlen attention with {', '.join(refused) or 'these options'}",
            "it has it for packed queries, keys and values alone",
        )
    group = query.shape[1] // key.shape[1]
    queries, keys, values = (
        query.float(), key.float().repeat_interleave(group, 1), value.float().repeat_interleave(group, 1),
    )  # fmt: skip
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * _scale(query, options)
    allowed = _allowed(query, key, starts_q, starts_k, is_causal, **_windows(options))
    logsumexp = scores.masked_fill(~allowed, -math.inf).logsumexp(-1)
    weights = (scores - logsumexp.unsqueeze(-1)).exp().masked_fill(~allowed, 0)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype), logsumexp


def _scale(query: Tensor, options: dict[str, Any]) -> float:
    scale = options.get("scale")
    return 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)


def _windows(options: dict[str, Any]) -> dict[str, int]:
    """How many keys a query sees to its left and right; -1 for all."""
    return {side: -1 if (size := options.get(f"window_size_{side}")) is None else size for side in ("left", "right")}


def _allowed(
    query: Tensor, key: Tensor, starts_q: Tensor, starts_k: Tensor, is_causal: bool, *, left: int, right: int
) -> Tensor:
    """(query, key): True where they are in one sequence, and the key in the window. The last ones are aligned."""
    in_q, from_end_q = _places(query, starts_q)
    in_k, from_end_k = _places(key, starts_k)
    allowed = in_q.unsqueeze(1) == in_k
    # How far the key is to the right of the query.
    distance = from_end_q.unsqueeze(1) - from_end_k
    if is_causal:
        right = 0
    if right >= 0:
        allowed = allowed & (distance <= right)
    if left >= 0:
        allowed = allowed & (distance >= -left)
    return allowed


def _places(packed: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the number of its sequence, and how many rows follow it there."""
    rows = torch.arange(packed.shape[0], device=packed.device, dtype=starts.dtype)
    number = torch.searchsorted(starts, rows, right=True)
    end = starts[number.clamp(max=starts.shape[0] - 1)]
    return number, end - rows
