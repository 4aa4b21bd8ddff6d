"""Whose a difference from another script is, from the same script without its sharding."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_conformance.parity import arbitration
from fsdp_conformance.parity.arbitration import is_open, settled
from fsdp_conformance.parity.changed import OF_A_SHARD
from fsdp_conformance.parity.comparison import compare
from fsdp_conformance.parity.finding import Finding, Whose
from fsdp_conformance.tests.parity.trainings import Script, record, taken_out


@torch.no_grad()
def clamped(model: nn.Module, step: int) -> None:
    """Gradients that no known mistake makes."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.clamp_(-1e-3, 1e-3)


@torch.no_grad()
def negated(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.neg_()


RIGHT = Script()
OTHER = Script(gradients=clamped)


def verdict(run: Script, reference: Script, unsharded: Script, directory: Path) -> tuple[Finding, Finding]:
    """The finding before and after the script has run without its sharding."""
    scripts = {"run": run, "reference": reference, "unsharded": unsharded}
    recordings = {name: record(script, directory / name) for name, script in scripts.items()}
    finding = compare(recordings["run"], recordings["reference"]).findings[0]
    return finding, settled(finding, recordings["run"], recordings["reference"], taken_out(recordings["unsharded"]))


@pytest.mark.parametrize(
    ("run", "reference", "unsharded", "whose", "evidence"),
    [
        (OTHER, RIGHT, RIGHT, Whose.ENGINE, "without its sharding, the script agrees with the reference there"),
        (OTHER, RIGHT, OTHER, Whose.SCRIPT, "without its sharding, the script computes the same as with it"),
        (RIGHT, OTHER, RIGHT, Whose.SCRIPT, "without its sharding, the script computes the same as with it"),
    ],
    ids=["the engine", "the script", "the reference"],
)
def test_what_is_open_is_settled(
    run: Script, reference: Script, unsharded: Script, whose: Whose, evidence: str, tmp_path: Path
) -> None:
    before, after = verdict(run, reference, unsharded, tmp_path)

    assert before.whose is Whose.EITHER
    assert is_open(before)
    assert (after.whose, after.evidence[-1]) == (whose, evidence)


def test_a_difference_of_buffers_is_the_scripts(tmp_path: Path) -> None:
    """DDP sends those of rank 0 to all ranks before each forward."""

    def with_statistic(*, sends: bool) -> Script:
        def note(model: nn.Module, step: int) -> None:
            rank = 0 if sends else int(os.environ["RANK"])
            model.register_buffer("statistic", torch.tensor(float(rank * (step + 1))))
            vars(model.drop)["forward"] = lambda x: x + statistic_of(model)

        return Script(changed=note)

    def statistic_of(model: nn.Module) -> Tensor:
        return next(model.buffers())

    finding = compare(
        record(with_statistic(sends=False), tmp_path / "run"),
        record(with_statistic(sends=True), tmp_path / "reference"),
    ).findings[0]

    assert (finding.title, finding.whose, finding.step) == ("The forward computes something else", Whose.SCRIPT, 1)
    assert finding.likely.startswith("the ranks differ in the buffer 'statistic', ")


def test_statistics_of_one_rank_are_not_those_of_all(tmp_path: Path) -> None:
    """Batch norm takes them from the batch of its rank, and SyncBatchNorm from those of all ranks."""

    def normalising(*, together: bool) -> Script:
        def normalise(model: nn.Module, step: int) -> None:
            def statistic(x: Tensor) -> Tensor:
                mean = torch.tensor(float(step)) if together else x.detach().mean()
                model.register_buffer("statistic", mean)
                return x - mean

            model.register_buffer("statistic", torch.tensor(-1.0))
            vars(model.drop)["forward"] = statistic

        return Script(before_forward=normalise)

    finding = compare(
        record(normalising(together=False), tmp_path / "run"),
        record(normalising(together=True), tmp_path / "reference"),
    ).findings[0]

    assert (finding.title, finding.whose, finding.step) == ("The forward computes something else", Whose.SCRIPT, 0)
    assert finding.likely.startswith("each rank has updated 'statistic' from its own batch alone, and in the reference")


@pytest.mark.parametrize(
    ("cause", "whose", "likely"),
    [
        ("backward 0 of the step is not", Whose.ENGINE, "it is the reference whose engine is wrong: backward 0 of the"),
        ("not cleared: they are", Whose.SCRIPT, "the two scripts compute different things"),
    ],
)
def test_only_a_wrong_sum_is_the_fault_of_the_references_engine(
    cause: str, whose: Whose, likely: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other differences of the reference may be its script's."""
    finding = Finding(title="The gradients differ", whose=Whose.ENGINE, step=0, likely="")
    of_reference = [replace(finding, likely=cause)]
    found: Any = {"run": [], "reference": of_reference}
    monkeypatch.setattr(
        arbitration, "compare", lambda run, other: SimpleNamespace(is_vacuous=False, findings=found[run])
    )
    recordings: Any = ("run", "reference", "unsharded")

    after = settled(finding, *recordings)

    assert after.whose is whose
    assert after.likely.startswith(likely)


def test_what_a_script_does_to_shards_is_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same script without its sharding does it to whole tensors."""
    finding = Finding(title="The gradients differ", whose=Whose.EITHER, step=0, likely="the reduction, or a hook")
    of_engine = replace(finding, whose=Whose.SCRIPT, likely="it is clipped per shard")
    found: Any = {"run": [of_engine], "reference": []}
    monkeypatch.setattr(
        arbitration, "compare", lambda run, other: SimpleNamespace(is_vacuous=False, findings=found[run])
    )
    recordings: Any = ("run", "reference", "unsharded")

    after = settled(finding, *recordings)

    assert (after.whose, after.likely) == (Whose.SCRIPT, "it is clipped per shard")


def test_what_differs_from_both_stays_open(tmp_path: Path) -> None:
    before, after = verdict(OTHER, RIGHT, Script(gradients=negated), tmp_path)

    assert after == before


def test_other_values_of_the_script_are_not_those_of_a_shard(tmp_path: Path) -> None:
    """Both scripts write to the weights. Without its sharding, the run's does it in the same way."""

    @torch.no_grad()
    def scale(model: nn.Module, step: int, *, by: float) -> None:
        for parameter in model.parameters() if step else ():
            parameter.mul_(by)

    wrong, right = (Script(before_forward=functools.partial(scale, by=by)) for by in (0.5, 0.9))
    before, after = verdict(wrong, right, wrong, tmp_path)
    of_shards = verdict(wrong, right, right, tmp_path / "of shards")[1]

    assert is_open(before)
    assert before.likely.endswith(f"; or {OF_A_SHARD}")
    assert after.likely.endswith("as where weights that were exchanged are not put back")
    assert of_shards.likely.endswith(f": {OF_A_SHARD}")
    assert "other values than the reference" not in of_shards.likely
    assert {before.whose, after.whose, of_shards.whose} == {Whose.SCRIPT}


def test_a_script_whose_settings_differ_is_not_open(tmp_path: Path) -> None:
    finding = compare(record(Script(lr=0.2), tmp_path / "run"), record(Script(), tmp_path / "reference")).findings[0]

    assert not is_open(finding)
