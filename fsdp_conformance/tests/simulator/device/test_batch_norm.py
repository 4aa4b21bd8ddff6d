"""The parts of synchronized batch normalisation, put together for two ranks, next to one that sees the whole batch."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fsdp_conformance.simulator import checker
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own

pytestmark = compiled

EPS, MOMENTUM = 1e-3, 0.25


def whole(batch: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    """Output, gradients of input, weight and bias, running mean and variance: torch's own, on the CPU."""
    mean, variance = torch.zeros_like(weight), torch.ones_like(weight)
    leaves = [value.clone().requires_grad_() for value in (batch, weight, bias)]
    output = F.batch_norm(leaves[0], mean, variance, leaves[1], leaves[2], True, MOMENTUM, EPS)
    output.backward(gradient)
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None), mean, variance]


def in_parts(batches: list[Tensor], gradients: list[Tensor], weight: Tensor, bias: Tensor) -> list[Tensor]:
    """The same, as two ranks with a part of the batch each compute it."""
    own = [torch.batch_norm_stats(batch, EPS) for batch in batches]
    dtype = own[0][0].dtype
    counts = torch.tensor([float(batch.numel() // batch.shape[1]) for batch in batches], device="sim", dtype=dtype)
    running = [torch.zeros_like(own[0][0]), torch.ones_like(own[0][0])]
    stacked = [torch.stack(values) for values in zip(*own, strict=True)]
    mean, invstd = torch.batch_norm_gather_stats_with_counts(
        batches[0], stacked[0], stacked[1], running[0], running[1], MOMENTUM, EPS, counts
    )
    outputs = [torch.batch_norm_elemt(batch, weight, bias, mean, invstd, EPS) for batch in batches]
    sums = [
        torch.batch_norm_backward_reduce(gradient, batch, mean, invstd, weight, True, True, True)
        for batch, gradient in zip(batches, gradients, strict=True)
    ]
    total, product = (sum(values) for values in list(zip(*sums, strict=True))[:2])
    of_input = [
        torch.batch_norm_backward_elemt(gradient, batch, mean, invstd, weight, total, product, counts.to(torch.int32))
        for batch, gradient in zip(batches, gradients, strict=True)
    ]
    of_parameters = [sum(values) for values in list(zip(*sums, strict=True))[2:]]
    return [torch.cat(outputs), torch.cat(of_input), *of_parameters, *running]


@pytest.mark.parametrize(("shape", "dtype"), [
    ((6, 3), torch.float32), ((6, 3, 4), torch.float64), ((6, 3, 2, 2), torch.float32), ((6, 3, 2, 2), torch.bfloat16),
])  # fmt: skip
@in_process_of_its_own
def test_two_parts_are_as_good_as_the_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Uneven parts; statistics of half precision are float32."""
    draw = torch.Generator().manual_seed(3)
    batch, gradient = (torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for _ in range(2))
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    weight, bias = (torch.randn(3, generator=draw, dtype=torch.float64).to(exact) for _ in range(2))
    sizes = [2, 4]
    actual = in_parts(
        [part.to("sim") for part in batch.split(sizes)],
        [part.to("sim") for part in gradient.split(sizes)],
        weight.to("sim"),
        bias.to("sim"),
    )
    expected = whole(batch.to(exact), gradient.to(exact), weight, bias)

    assert [value.dtype for value in actual] == [dtype, dtype, *[exact] * 4]
    rounding: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.cpu().to(exact), other, **rounding)
    assert checker.num_hazards() == 0
    assert checker.accesses() > 0


@in_process_of_its_own
def test_without_weights_and_running_statistics() -> None:
    """As for affine=False and track_running_stats=False; gradients that are not needed are not computed."""
    batch, gradient = torch.randn(6, 3), torch.randn(6, 3)
    given, upstream = batch.to("sim"), gradient.to("sim")
    mean, invstd = torch.batch_norm_stats(given, EPS)
    common, scale = torch.batch_norm_gather_stats(
        given, mean.unsqueeze(0), invstd.unsqueeze(0), None, None, MOMENTUM, EPS, 6
    )
    sums = torch.batch_norm_backward_reduce(upstream, given, common, scale, None, True, False, False)
    output = torch.batch_norm_elemt(given, None, None, common, scale, EPS)
    actual = torch.batch_norm_backward_elemt(
        upstream, given, common, scale, None, sums[0], sums[1], torch.tensor([6], dtype=torch.int32, device="sim")
    )
    leaf = batch.clone().requires_grad_()
    expected = F.batch_norm(leaf, None, None, None, None, True, MOMENTUM, EPS)
    expected.backward(gradient)

    torch.testing.assert_close(output.cpu(), expected.detach())
    assert leaf.grad is not None
    torch.testing.assert_close(actual.cpu(), leaf.grad)
    assert not any(value is not None and value.numel() for value in cast("list[Tensor | None]", sums[2:]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [True, False])
@in_process_of_its_own
def test_half_precision_with_exact_statistics(dtype: torch.dtype, training: bool) -> None:
    """Mixed precision casts weights but not buffers, a combination that the CPU's kernels refuse."""
    draw = torch.Generator().manual_seed(3)
    batch, gradient = (torch.randn(6, 3, generator=draw).to("sim", dtype) for _ in range(2))
    layer = torch.nn.BatchNorm1d(3, device="sim").train(training)
    exact = torch.nn.BatchNorm1d(3, device="sim").train(training)
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(dtype)
    results = []
    for module in (layer, exact):
        leaf = batch.clone().requires_grad_()
        output = module(leaf)
        output.backward(gradient)
        assert output.dtype == leaf.dtype == dtype
        results.append([output, leaf.grad, *module.buffers(), *(weight.grad for weight in module.parameters())])
    assert [weight.grad.dtype for weight in layer.parameters() if weight.grad is not None] == [dtype, dtype]
    for actual, expected in zip(*results, strict=True):
        assert actual is not None
        assert expected is not None
        torch.testing.assert_close(actual.cpu(), expected.to(actual.dtype).cpu(), rtol=0, atol=0)
    images = torch.randn(6, 3, 4, device="sim", dtype=dtype, requires_grad=True)
    output = layer(images)
    with pytest.raises(RuntimeError, match=r"Expected running_mean to have type .* but got Float"):
        output.sum().backward()
    assert not checker.hazards()
