"""Elements that two recordings have kept, put together from shards, name the first wrong one and its cause."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fsdp_conformance.checks.recorded_values import first_wrong
from fsdp_conformance.recorder.elements import elements_of
from fsdp_conformance.recorder.fingerprints import Part, whole_part
from fsdp_conformance.recordings.events import USED, Backward, Begin, Event, Keep
from fsdp_conformance.recordings.files import RankRecording, Recording

KEEP = Keep(step=1, kind="gradient", names=("w",))

RIGHT = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))


def _begin(rank: int, world_size: int) -> Begin:
    return Begin(
        format=1, rank=rank, world_size=world_size, pid=1, torch="2", command=("train.py",), sharding="kept", nudge=0.0
    )


def _recording(of_ranks: Sequence[Sequence[Event]]) -> Recording:
    backward = Backward(step=1, number=0, line="train.py:1", loss=1.0, is_reduced=True)
    ranks = [
        RankRecording(begin=_begin(rank, len(of_ranks)), events=(*events, backward), end=None)
        for rank, events in enumerate(of_ranks)
    ]
    return Recording(name="run", ranks=tuple(ranks))


def _kept(part: Part, *, kind: str = "gradient", step: int = 1) -> Event:
    return elements_of(part, step=step, kind=kind, name="w", number=0)


def _sharded(value: Tensor) -> Recording:
    """Rows on two ranks."""
    return _recording([[_kept(Part((6, 5), value[rows : rows + 3], (rows, 0)))] for rows in (0, 3)])


def _flat(value: Tensor) -> Recording:
    """Ranges on two ranks, the second of which begins inside a row."""
    flat = value.flatten()
    return _recording([[_kept(Part((6, 5), flat[:13], 0))], [_kept(Part((6, 5), flat[13:], 13))]])


def _whole(value: Tensor, *, contributions: Sequence[Tensor] = (), before: Tensor | None = None) -> Recording:
    """The whole tensor on both ranks."""
    earlier = [] if before is None else [_kept(whole_part(before), step=0)]
    parts = [[_kept(whole_part(each), kind="contribution")] for each in contributions] or [[], []]
    return _recording([[*earlier, _kept(whole_part(value)), *part] for part in parts])


@pytest.mark.parametrize(("factor", "how"), [(0.5, "averages"), (1.0, "adds up")])
def test_shards_that_the_script_reduces_again(factor: float, how: str) -> None:
    total = (RIGHT[:3] + RIGHT[3:]) * factor

    element = first_wrong(_sharded(torch.cat([total, total])), _whole(RIGHT), KEEP)

    assert element is not None
    assert element.likely.startswith(f"every rank has the same: the script {how} the shards of the ranks")


def _shards(values: Sequence[tuple[str, Tensor]]) -> Recording:
    """Rows of several tensors on two ranks."""
    return _recording([
        [
            elements_of(
                Part(tuple(value.shape), value.chunk(2)[rank], (rank * len(value) // 2, *[0] * (value.dim() - 1))),
                step=1, kind="gradient", name=name, number=0,
            )
            for name, value in values
        ]
        for rank in range(2)
    ])  # fmt: skip


@pytest.mark.parametrize("is_wrong_everywhere", [True, False])
def test_elements_that_were_read_at_another_tensors_place(is_wrong_everywhere: bool) -> None:
    """A unit's gradients are one buffer, and each tensor is read from its place in it."""
    large, small = torch.randn(8, 3), torch.randn(8)
    taken = torch.cat([rows.flatten()[5:9] for rows in large.chunk(2)])
    if not is_wrong_everywhere:
        taken[4:] = torch.randn(4)
    keep = Keep(step=1, kind="gradient", names=("small", "large"))

    element = first_wrong(
        _shards([("small", taken), ("large", large)]), _shards([("small", small), ("large", large)]), keep
    )

    assert element is not None
    assert (element.name, element.wrong) == ("small", 8)
    shown = "mixed up with another parameter: rank 0's elements are those of rank 0's part of 'large' from element 5 on"
    assert element.likely.startswith(shown) is is_wrong_everywhere


USES = Keep(step=1, kind=USED, names=("v", "w"))


def _used(*of_ranks: Tensor, before: Tensor | None = None) -> Recording:
    """The whole tensor as each rank has computed with it."""
    earlier = [] if before is None else [_kept(whole_part(before), kind=USED, step=0)]
    return _recording([[*earlier, _kept(whole_part(value), kind=USED)] for value in of_ranks])


def test_each_rank_computes_with_a_copy() -> None:
    lost = RIGHT.clone()
    lost[5] = 0

    element = first_wrong(_used(RIGHT, lost), _used(RIGHT, RIGHT), USES)

    assert element is not None
    assert (element.name, element.index, element.rank, element.wrong) == ("w", (5, 0), 1, 5)
    assert "rows" in element.likely
    assert first_wrong(_used(RIGHT, RIGHT), _used(RIGHT, RIGHT), USES) is None


def test_a_copy_of_the_step_before_is_stale() -> None:
    now = RIGHT + 1
    partly = torch.cat([now[:3], RIGHT[3:]])
    reference = _used(now, now, before=RIGHT)

    whole, part = (first_wrong(_used(now, value), reference, USES) for value in (RIGHT, partly))

    assert whole is not None
    assert whole.likely.startswith("stale: all elements have the values of the step before")
    assert part is not None
    assert part.likely.startswith("stale: the 15 wrong elements have the values of the step before")


def test_a_copy_may_be_cast() -> None:
    assert first_wrong(_used(RIGHT.bfloat16(), RIGHT.bfloat16()), _used(RIGHT, RIGHT), USES) is None


def test_equal_elements_have_no_wrong_one() -> None:
    assert first_wrong(_sharded(RIGHT), _whole(RIGHT), KEEP) is None
    assert first_wrong(_flat(RIGHT), _whole(RIGHT), KEEP) is None


@pytest.mark.parametrize("layout", [_sharded, _flat])
def test_the_first_wrong_element_and_its_rank(layout: object) -> None:
    wrong = RIGHT.clone()
    wrong[4, 2] += 1.0
    element = first_wrong(layout(wrong), _whole(RIGHT), KEEP)  # type: ignore[operator]

    assert element is not None
    assert (element.name, element.index, element.rank) == ("w", (4, 2), 1)
    assert (element.wrong, element.elements) == (1, 30)
    assert element.got == pytest.approx(element.expected + 1.0)


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (RIGHT[[3, 4, 5, 0, 1, 2]], "shards in the wrong place"),
        (RIGHT.flatten()[torch.randperm(30, generator=torch.Generator().manual_seed(1))].view(6, 5), "permuted"),
        (torch.cat([RIGHT[:3], torch.zeros(3, 5)]), "rank 1's shard"),
        (RIGHT.to(torch.bfloat16).float(), "rounded to bfloat16"),
    ],
)
def test_the_cause_that_elements_show(value: Tensor, cause: str) -> None:
    element = first_wrong(_sharded(value), _whole(RIGHT), KEEP)

    assert element is not None
    assert cause in element.likely


def test_a_missing_rank_and_a_stale_gradient() -> None:
    """Causes also come from the parts of the ranks, and from the gradient of the step before, which were kept too."""
    parts = [RIGHT * 2 - 1, torch.ones(6, 5)]
    lost = first_wrong(_sharded(parts[0] / 2), _whole(RIGHT, contributions=parts), KEEP)
    stale = first_wrong(_sharded(parts[0]), _whole(RIGHT, before=parts[0]), KEEP)

    assert lost is not None
    assert "rank 1 missing" in lost.likely
    assert stale is not None
    assert "stale by one step" in stale.likely


def test_a_tensor_that_is_not_complete_says_nothing() -> None:
    half = _recording([[_kept(Part((6, 5), RIGHT[:3], (0, 0)))], []])

    assert first_wrong(half, _whole(RIGHT + 1), KEEP) is None
