"""The total norm that clipping returns: its value, the same on every rank, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_conformance.checks.comparison import numbers
from fsdp_conformance.checks.equality import digest
from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.checks.traffic import expect_count, in_step, of
from fsdp_conformance.history.collective import Op
from fsdp_conformance.history.training import TrainingHistory

#: Roundings between elements and 2-norm, of half a unit each: of the norm of each tensor's shard, of its square, of the
#: sums over tensors and ranks, and of the root. The tests' gradients have few tensors on few ranks: ten sums at most.
ROUNDINGS = 16

#: Bytes of a message that carries norms rather than gradients.
SCALAR_BYTES = 64


def norm_by_hand(
    history: TrainingHistory,
    expected: Sequence[float],
    *,
    requirement: str,
    exact: bool,
    dtype: torch.dtype = torch.float32,
) -> CheckResult:
    """
    The norm of every step equals the expected one: exactly, or within the rounding of norms in `dtype`.

    `exact`: every partial sum fits into the dtype, so nothing is rounded in any order.
    """
    tally = Tally("total norm", requirement, rank=history.rank)
    bound = 0.0 if exact else ROUNDINGS * torch.finfo(dtype).eps / 2
    for record, norm in zip(history.steps, expected, strict=True):
        got = None if record.grad_norm is None else record.grad_norm.double().item()
        holds = got is not None and abs(got - norm) <= bound * norm
        text_got, text_expected = ("none", f"{norm:.9g}") if got is None else numbers(got, norm)
        tally.compare(
            holds, "total norm", expected=text_expected, got=text_got,
            step=record.step, phase="step", bound="bitwise" if exact else f"{bound:.2g} of the norm",
            ratio=got / norm if got is not None and norm else None,
        )  # fmt: skip
    return tally.result(measurements={"bound": "bitwise" if exact else bound})


def norm_digests(history: TrainingHistory) -> dict[str, str]:
    """Label to hash of the norm of every step, "norm step 1", for a comparison between ranks."""
    return {
        f"norm step {record.step}": digest(record.grad_norm.double())
        for record in history.steps
        if record.grad_norm is not None
    }


def reductions_of_the_norm(history: TrainingHistory, *, dims: int, requirement: str) -> CheckResult:
    """From the second step on, the optimizer step reduces one scalar for each dim of the mesh at most."""
    tally = Tally("reductions of the norm", requirement, rank=history.rank)
    for record in history.steps[1:]:
        sent = in_step(history, record.step, "step")
        scalars = [each for each in of(sent, Op.ALL_REDUCE) if each.nbytes <= SCALAR_BYTES]
        expect_count(
            tally, "all-reduces of a norm", scalars, least=1, most=dims, step=record.step, phase="step",
        )  # fmt: skip
        others = [each for each in sent if each not in scalars]
        expect_count(tally, "other collectives of the optimizer step", others, step=record.step, phase="step")
    return tally.result()
