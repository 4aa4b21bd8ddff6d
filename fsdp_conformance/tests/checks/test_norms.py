"""The checks of the total norm find a wrong one, one that differs between ranks, and one that costs too much."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from fsdp_conformance.checks.norms import ROUNDINGS, norm_by_hand, norm_digests, reductions_of_the_norm
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.history.training import StepRecord, TrainingHistory


def _history(norms: Sequence[torch.Tensor | None], sent: Sequence[tuple[Op, int]] = ()) -> TrainingHistory:
    """Steps with these norms, each of which sends these collectives."""
    return TrainingHistory(
        source="engine",
        rank=1,
        world_size=2,
        steps=[StepRecord(step=step, losses=[], grad_norm=norm) for step, norm in enumerate(norms)],
        collectives=[
            CollectiveRecord(
                seq=step, op=op, name=op, group=(0, 1), nbytes=nbytes, dtype="float32", step=step, phase="step"
            )
            for step in range(len(norms))
            for op, nbytes in sent
        ],
    )


def test_the_right_norm_passes() -> None:
    """Exactly, or within the rounding of the norms' dtype; the number of steps is the number of comparisons."""
    exact = norm_by_hand(_history([torch.tensor(5.0), torch.tensor(10.0)]), [5, 10], requirement="R101", exact=True)
    rounded = torch.tensor(math.sqrt(2), dtype=torch.bfloat16)
    near = norm_by_hand(_history([rounded]), [math.sqrt(2)], requirement="R103", exact=False, dtype=torch.bfloat16)

    assert (exact.findings, exact.count.comparisons, exact.requirement) == ([], 2, "R101")
    assert (near.findings, near.measurements["bound"]) == ([], ROUNDINGS * torch.finfo(torch.bfloat16).eps / 2)


@pytest.mark.parametrize(
    ("got", "exact"),
    [
        (torch.tensor(5.0000005), True),
        (torch.tensor(5.0).mul(1 + 4e-6), False),
        (torch.tensor(5.0) / math.sqrt(2), False),
        (torch.tensor(math.nan), False),
        (torch.tensor(math.inf), True),
        (None, False),
    ],
)
def test_a_wrong_norm_is_found(got: torch.Tensor | None, exact: bool) -> None:
    """A bit too many, a rounding too many, the norm of half the elements, NaN, infinity, none: each is a finding."""
    findings = norm_by_hand(_history([torch.tensor(5.0), got]), [5, 5], requirement="R101", exact=exact).findings

    assert [(finding.step, finding.requirement, finding.phase) for finding in findings] == [(1, "R101", "step")]
    assert findings[0].message.startswith("total norm: expected 5, got ")


def test_digests_tell_ranks_apart() -> None:
    """Equal norms have equal digests in any dtype; others do not; a step without a norm has none."""
    mine = norm_digests(_history([torch.tensor(5.0), None]))

    assert list(mine) == ["norm step 0"]
    assert mine == norm_digests(_history([torch.tensor(5.0, dtype=torch.float64)]))
    assert mine != norm_digests(_history([torch.tensor(5.0000005)]))


@pytest.mark.parametrize(
    ("sent", "dims", "count"),
    [
        ([(Op.ALL_REDUCE, 4)], 1, 0),
        ([(Op.ALL_REDUCE, 4)] * 2, 2, 0),
        ([], 1, 1),
        ([(Op.ALL_REDUCE, 4)] * 2, 1, 1),
        ([(Op.ALL_REDUCE, 4), (Op.ALL_REDUCE, 4096)], 1, 1),
        ([(Op.ALL_REDUCE, 4), (Op.ALL_GATHER, 4)], 1, 1),
    ],
)
def test_the_price_of_a_norm(sent: list[tuple[Op, int]], dims: int, count: int) -> None:
    """One scalar for each dim of the mesh, and nothing else; the first step is not judged."""
    result = reductions_of_the_norm(_history([torch.tensor(1.0)] * 2, sent), dims=dims, requirement="R102")

    assert len(result.findings) == count
    assert all(finding.step == 1 for finding in result.findings)
