"""Scripts that clip shards, each rank its own, from what each rank held before and afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fsdp_conformance.parity.changed import why_changed
from fsdp_conformance.parity.runs import TrainingStep
from fsdp_conformance.recorder.fingerprints import Part, Pending
from fsdp_conformance.recordings.events import Step
from fsdp_conformance.recordings.fingerprint import Fingerprint

NAMES = ("weight", "bias")
#: A limit that the whole norm exceeds, and the norms of both shards.
LIMIT = 0.1


def gradients() -> list[Tensor]:
    """Of both tensors; the second half of each is larger."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(8, 5, generator=generator), torch.randn(6, 1, generator=generator)]
    return [torch.cat([half, 3 * other]) for half, other in (tensor.chunk(2) for tensor in whole)]


def halves(rank: int) -> list[Tensor]:
    return [tensor.chunk(2)[rank] for tensor in gradients()]


def norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors]).norm())


def prints(tensors: Sequence[Tensor], rank: int, ranks: int) -> dict[str, Fingerprint]:
    parts = [
        [Part((tensor.shape[0] * ranks, tensor.shape[1]), tensor, (rank * tensor.shape[0], 0))] for tensor in tensors
    ]
    return dict(zip(NAMES, Pending(parts).fingerprints(), strict=True))


def step(before: Sequence[Sequence[Tensor]], after: Sequence[Sequence[Tensor]]) -> TrainingStep:
    """A step whose ranks hold these gradients after the backward, and those when the optimizer gets them."""
    events = tuple(
        Step(
            step=0,
            optimizer="SGD",
            line="train.py:9",
            groups=(),
            gradients=prints(new, rank, len(before)),
            parameters={},
            state={},
            counters={},
            buffers={},
            untrained=(),
            kept=0,
            reduced=prints(old, rank, len(before)),
        )
        for rank, (old, new) in enumerate(zip(before, after, strict=True))
    )
    return TrainingStep(number=0, steps=events, forwards=((),), backwards=((),), clips=((),), initial=())


@pytest.mark.parametrize(
    ("factors", "likely"),
    [
        ([min(1.0, LIMIT / norm(halves(rank))) for rank in range(2)], "a norm of this rank's shard alone"),
        ([0.3, 0.5], "each rank has scaled its own shard, rank 0: 0.3, rank 1: 0.5, instead of all by 0.00"),
        ([0.5, 0.5], "they are scaled by 0.5 instead of 0.00"),
    ],
)
def test_factors_of_ranks_tell_what_they_were_made_of(factors: list[float], likely: str) -> None:
    shards = [halves(rank) for rank in range(2)]
    clipped = step(shards, [[factor * each for each in shard] for factor, shard in zip(factors, shards, strict=True)])
    whole = gradients()
    expected = step([whole], [[LIMIT / norm(whole) * each for each in whole]])

    assert likely in why_changed(clipped, expected)


def test_no_factor_is_no_clipping_by_a_norm() -> None:
    shards = [halves(rank) for rank in range(2)]
    clamped = step(shards, [[each.clamp(-0.1, 0.1) for each in shard] for shard in shards])

    assert "must be combined over the ranks" in why_changed(clamped, step([gradients()], [gradients()]))
