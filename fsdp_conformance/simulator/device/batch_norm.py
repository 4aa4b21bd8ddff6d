"""
The parts of synchronized batch normalisation, which the CPU has no kernels for.

`nn.SyncBatchNorm` is made of them: each rank computes its own statistics, all ranks gather them, and each normalises
with those of all. The definitions are CUDA's (aten/src/ATen/native/cuda/Normalization.cuh in torch): the variance is
biased, except in the running variance, and half precision has statistics in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Kept for as long as the process runs: its kernels go with it.
_library: torch.library.Library | None = None


def register() -> None:
    """Give the device these operations. Call it once, after the device has its name."""
    global _library
    if _library is None:
        _library = torch.library.Library("aten", "IMPL", "PrivateUse1")  # type: ignore[no-untyped-call]
        for operation in (
            batch_norm_stats, batch_norm_gather_stats, batch_norm_gather_stats_with_counts, batch_norm_elemt,
            batch_norm_backward_reduce, batch_norm_backward_elemt,
        ):  # fmt: skip
            _library.impl(operation.__name__, operation)  # type: ignore[no-untyped-call]


def batch_norm_stats(values: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The mean of each channel, and 1 / sqrt(variance + eps): 1D, float32 for half precision."""
    variance, mean = torch.var_mean(_exact(values), _but_channels(values), correction=0)
    return mean, (variance + eps).rsqrt()


def batch_norm_gather_stats(
    values: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    count: int,
) -> tuple[Tensor, Tensor]:
    """As with counts, which are all the same."""
    counts = torch.full((mean.shape[0],), count, dtype=mean.dtype, device=mean.device)
    return batch_norm_gather_stats_with_counts(values, mean, invstd, running_mean, running_var, momentum, eps, counts)


def batch_norm_gather_stats_with_counts(
    values: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """
    The statistics of all ranks together, from `mean` and `invstd` (ranks, channels) and `counts` (ranks).

    Also moves the running statistics.
    """
    mean, invstd = _exact(mean), _exact(invstd)
    weights = counts.view(-1, 1).to(mean.dtype)
    total = weights.sum()
    common = (mean * weights).sum(0) / total
    variance = ((invstd.square().reciprocal() - eps + (mean - common).square()) * weights).sum(0) / total
    if running_mean is not None:
        running_mean.lerp_(common.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((variance * (total / (total - 1))).to(running_var.dtype), momentum)
    return common, (variance + eps).rsqrt()


def batch_norm_elemt(
    values: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    """The normalized input, in its dtype."""
    result = (_exact(values) - _along(mean, values)) * _along(invstd, values)
    if weight is not None:
        result = result * _along(weight, values)
    if bias is not None:
        result = result + _along(bias, values)
    return result.to(values.dtype)


def batch_norm_backward_reduce(
    grad_out: Tensor,
    values: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """
    Two sums for each channel, of the gradient, and of its product with input - mean; then the gradients of weight and
    bias. Each of them only if it is asked for.
    """
    gradient, dims = _exact(grad_out), _but_channels(values)
    total = gradient.sum(dims)
    product = (gradient * (_exact(values) - _along(mean, values))).sum(dims)
    dtype = mean.dtype if weight is None else weight.dtype
    return (
        total if input_g else None,
        product if input_g else None,
        (product * invstd).to(dtype) if weight_g else None,
        total.to(dtype) if bias_g else None,
    )


def batch_norm_backward_elemt(
    grad_out: Tensor,
    values: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """The gradient of the input, from sums over all ranks."""
    total = count.sum()
    centred = _exact(values) - _along(mean, values)
    slope = _along(sum_dy_xmu / total * invstd.square(), values)
    result = (_exact(grad_out) - _along(sum_dy / total, values) - centred * slope) * _along(invstd, values)
    if weight is not None:
        result = result * _along(weight, values)
    return result.to(values.dtype)


def _exact(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def _but_channels(value: Tensor) -> list[int]:
    return [dim for dim in range(value.dim()) if dim != 1]


def _along(statistic: Tensor, value: Tensor) -> Tensor:
    """A value for each channel, to be computed with the whole."""
    return _exact(statistic).view(1, -1, *[1] * (value.dim() - 2))
