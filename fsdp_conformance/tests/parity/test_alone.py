"""Signs of mistakes in one recording, from trainings in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from fsdp_conformance.parity.alone import different_models, suspicions
from fsdp_conformance.parity.finding import Finding
from fsdp_conformance.parity.runs import Run
from fsdp_conformance.recorder.hooks import DIVIDES
from fsdp_conformance.recorder.process import recording
from fsdp_conformance.recordings import files
from fsdp_conformance.recordings.events import Initial, Step
from fsdp_conformance.recordings.fingerprint import Fingerprint
from fsdp_conformance.tests.parity.trainings import as_rank

UNEVEN = "The loss is averaged over each batch by itself, and the batches have different numbers of tokens"
CLIPPED = "The gradients are clipped before they are unscaled"

#: The loss of a rank from its mean cross-entropy, its number of targets and that of all ranks.
Loss = Callable[[Tensor, int, int], Tensor]


def as_is(mean: Tensor, own: int, total: int) -> Tensor:
    return mean


def weighted(mean: Tensor, own: int, total: int) -> Tensor:
    return mean * own * 2 / total


def found(directory: Path, *, ignored: int = 0, loss: Loss = as_is, unscales: str = "never") -> list[Finding]:
    """The suspicions about a training of two ranks, the first of which ignores some of its six targets."""
    for rank in range(2):
        with as_rank(rank, 2), recording(directory):
            torch.manual_seed(0)
            model = nn.Linear(3, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=unscales != "never")
            for step in range(2):
                torch.manual_seed(10 * rank + step)
                target = torch.randint(0, 4, (6,))
                if not rank:
                    target[:ignored] = -100
                mean = functional.cross_entropy(model(torch.randn(6, 3)), target)
                scaler.scale(loss(mean, int((target >= 0).sum()), 12 - ignored)).backward()
                if unscales == "first":
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1e6)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    run = Run(files.read(directory))
    assert len(run.steps) == 2
    return [finding for finding in suspicions(run) if finding.title in (UNEVEN, CLIPPED)]


def test_means_over_uneven_batches_are_suspicious(tmp_path: Path) -> None:
    finding = found(tmp_path, ignored=4)[0]

    assert (finding.title, finding.step) == (UNEVEN, 0)
    assert finding.first == "targets that are not ignored · rank 0 micro-batch 0: 2, rank 1 micro-batch 0: 6"


@pytest.mark.parametrize(
    ("ignored", "loss"), [(0, as_is), (4, weighted)], ids=["even batches", "weighted by the number of targets"]
)
def test_means_that_weigh_each_token_equally_are_not(ignored: int, loss: Loss, tmp_path: Path) -> None:
    assert found(tmp_path, ignored=ignored, loss=loss) == []


def set_divide_factor(factor: float) -> None:
    """As a script does on a unit of FSDP2."""
    unit = SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(_fsdp_param_groups=(), _fsdp_param_group=None))
    next(getattr(FSDPModule, name) for name in DIVIDES if hasattr(FSDPModule, name))(unit, factor)


@pytest.mark.parametrize("factor", [1, 1.0, 2])
def test_sums_over_ranks_are_suspicious(factor: float, tmp_path: Path) -> None:
    """A divide factor of 1 is set before training; a reference made of the same script sums as well."""
    for rank in range(2):
        with as_rank(rank, 2), recording(tmp_path):
            model = nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            set_divide_factor(factor)
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()

    findings = [each for each in suspicions(Run(files.read(tmp_path))) if "summed" in each.title]

    assert [Path(each.line.partition(":")[0]).name for each in findings] == (["test_alone.py"] if factor == 1 else [])


@pytest.mark.parametrize("divisor", [12, 24, 6])
def test_sums_over_ranks_of_what_is_divided_by_all_tokens_are_right(divisor: int, tmp_path: Path) -> None:
    """As in torchtitan. One rank has 6 tokens in a micro-batch; there are two of each."""
    for rank in range(2):
        with as_rank(rank, 2), recording(tmp_path):
            torch.manual_seed(rank)
            model = nn.Linear(3, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            set_divide_factor(1.0)
            for _ in range(2):
                target = torch.randint(0, 4, (6,))
                (functional.cross_entropy(model(torch.randn(6, 3)), target, reduction="sum") / divisor).backward()
            optimizer.step()

    findings = [each for each in suspicions(Run(files.read(tmp_path))) if "summed" in each.title]

    assert len(findings) == (1 if divisor == 6 else 0)


def test_clipping_what_is_still_scaled_is_suspicious(tmp_path: Path) -> None:
    assert [finding.title for finding in found(tmp_path / "late", unscales="late")] == [CLIPPED]
    assert found(tmp_path / "first", unscales="first") == []


def test_settings_that_depend_on_the_rank_are_suspicious(tmp_path: Path) -> None:
    """The parameters of the ranks are then no longer those of one training, whatever the reference does."""
    for rank in range(2):
        with as_rank(rank, 2), recording(tmp_path):
            model = nn.Linear(3, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(2):
                optimizer.param_groups[0]["lr"] = 0.2 if rank and step else 0.1
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()

    findings = [each for each in suspicions(Run(files.read(tmp_path))) if "different settings" in each.title]

    assert [(each.step, each.first) for each in findings] == [
        (1, "rank 1 · 'weight' · lr is 0.2 instead of 0.1, which rank 0 has")
    ]


@pytest.mark.parametrize(
    ("loading", "why"),
    [
        ((), "each rank has drawn its own initial values"),
        ((0,), "only rank 0 loads a state (train.py:3)"),
        ((0, 1), "each rank has drawn its own initial values"),
    ],
)
def test_models_that_differ_between_ranks_when_they_are_sharded(loading: Sequence[int], why: str) -> None:
    """A state that some ranks alone load is the reason."""

    def rank(number: int) -> Any:
        loaded = "train.py:3" if number in loading else ""
        return SimpleNamespace(events=[Initial(values={}, wrapped=f"model {number}", loaded=loaded)])

    run: Any = SimpleNamespace(recording=SimpleNamespace(ranks=[rank(0), rank(1)]), world_size=2, steps=[])
    (finding,) = different_models(run)
    assert finding.likely.startswith(why)


@pytest.mark.parametrize(
    ("starts_apart", "one_rate", "is_sharded", "why"),
    [
        (True, True, False, "the ranks began with different values"),
        (False, True, False, "their gradients are not reduced"),
        (False, False, False, "the ranks step with equal gradients, but not in the same way"),
        (False, True, True, "they are in no sharded module"),
    ],
)
def test_replicas_that_differ_have_a_reason(
    starts_apart: bool, one_rate: bool, is_sharded: bool, why: str, tmp_path: Path
) -> None:
    for rank in range(2):
        with as_rank(rank, 2), recording(tmp_path):
            torch.manual_seed(rank if starts_apart else 0)
            model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if one_rate else 0.1 * (rank + 1))
            inputs = torch.ones(2, 3) * (rank + 1 if one_rate and not starts_apart else 1)
            model(inputs).square().sum().backward()
            optimizer.step()
    read = files.read(tmp_path)
    if is_sharded:
        read = replace(read, ranks=tuple(map(_with_shards, range(2), read.ranks)))

    (finding,) = [each for each in suspicions(Run(read)) if each.title.startswith("Parameters differ between")]

    assert finding.step == 0
    assert why in finding.likely


def _with_shards(number: int, rank: files.RankRecording) -> files.RankRecording:
    """As if the rank held its half of the second layer."""

    def half(values: dict[str, Fingerprint]) -> dict[str, Fingerprint]:
        return {
            name: replace(value, elements=value.elements // 2, region=f"half {number}")
            if name.startswith("1.")
            else value
            for name, value in values.items()
        }

    events = (
        replace(event, parameters=half(event.parameters), gradients=half(event.gradients))
        if isinstance(event, Step)
        else event
        for event in rank.events
    )
    return replace(rank, events=tuple(events))
