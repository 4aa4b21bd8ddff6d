"""Digests are equal exactly where dtype, shape and bytes are."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from torch import Tensor

from fsdp_conformance.checks.equality import digest, parameter_digests
from fsdp_conformance.history.training import StepRecord, TrainingHistory

ONE = torch.tensor([1.0, 2.0, 3.0, 4.0])


def history(value: Tensor) -> TrainingHistory:
    """One step that leaves `value` as a parameter and as a buffer."""
    step = StepRecord(step=0, losses=[], params={"0.weight": value}, buffers={"0.mean": value})
    return TrainingHistory(
        source="by hand", rank=0, world_size=2, initial_params={"0.weight": ONE}, initial_buffers={"0.mean": ONE},
        steps=[step],
    )  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(torch.tensor([1.0, 2.0, 3.0, math.nextafter(4.0, 5.0)], dtype=torch.float64).double(), id="dtype"),
        pytest.param(ONE.view(2, 2), id="shape"),
        pytest.param(ONE.nextafter(torch.full((4,), 9.0)), id="one ulp"),
        pytest.param(ONE.flip(0), id="order"),
    ],
)
def test_another_tensor_has_another_digest(other: Tensor) -> None:
    """Nothing is rounded away."""
    assert digest(ONE) != digest(other)
    assert parameter_digests(history(ONE)) != parameter_digests(history(other))


def test_bits_count_and_layout_does_not() -> None:
    """0.0 is not -0.0, NaNs are equal by their bits, and a transposed view is its copy."""
    quiet, payload = (torch.tensor(struct.unpack("f", struct.pack("I", bits))[0]) for bits in (0x7FC00000, 0x7FC00000))
    view = torch.arange(6.0).view(2, 3).t()

    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))
    assert digest(quiet) == digest(payload)
    assert digest(view) == digest(view.contiguous())


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3), torch.tensor([True, False]), torch.zeros(0, 3), torch.ones(2, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]), torch.nn.Parameter(ONE),
    ],
    ids=lambda value: f"{value.dtype} {tuple(value.shape)}",
)  # fmt: skip
def test_any_tensor_has_a_digest(value: Tensor) -> None:
    """Scalars, booleans, empty tensors, bfloat16, complex numbers and parameters have one."""
    assert len(digest(value)) == 64


def test_labels_name_step_and_tensor() -> None:
    """The controller compares them over ranks by their labels."""
    assert list(parameter_digests(history(ONE))) == ["params init 0.weight", "params step 0 0.weight"]


def test_what_differs_by_design_is_left_out() -> None:
    """Experts have their own values on every rank."""
    assert parameter_digests(history(ONE), exclude=["0.weight"]) == {}
