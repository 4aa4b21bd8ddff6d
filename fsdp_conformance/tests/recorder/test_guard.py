"""An error of the recorder never reaches the training that it records."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_conformance.parity.assertion import assert_same_training
from fsdp_conformance.parity.comparison import compare
from fsdp_conformance.parity.finding import Whose
from fsdp_conformance.parity.text import lines_of
from fsdp_conformance.recorder import gradient_hooks
from fsdp_conformance.recorder.changes import Changes
from fsdp_conformance.recorder.guard import Guard
from fsdp_conformance.recorder.named import Named
from fsdp_conformance.recorder.observer import Observer
from fsdp_conformance.recorder.process import recording
from fsdp_conformance.recorder.traffic import TrafficCount
from fsdp_conformance.recordings import files

#: Functions of the recorder, each of which runs inside another call of the script.
PLACES: dict[str, tuple[Any, str]] = {
    "the question whether a module is watched": (Observer, "watches"),
    "before a forward": (Observer, "_before_forward"),
    "inputs and outputs": (Named, "__init__"),
    "after a backward": (Observer, "_take_contributions"),
    "before clipping": (Observer, "_clip"),
    "after clipping": (Observer, "_clipped"),
    "before a step": (Observer, "before_step"),
    "after a step": (Observer, "_state_of"),
    "what waits for the end of a step": (Named, "values"),
    "a mark": (Observer, "mark"),
    "a mean": (Observer, "mean"),
    "a change of a gradient": (Changes, "_has_changed"),
    "a collective": (TrafficCount, "_add"),
    "hooks of the script": (gradient_hooks, "_place"),
}


class Broken(Exception):
    pass


def trained(steps: int = 3) -> list[Tensor]:
    """The parameters and losses of a training that calls everything that is watched."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3))
    model[2].register_full_backward_hook(lambda *_: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(torch.randn(6, 4)), torch.tensor([0, 1, 2, 0, 1, 2]))
        loss.backward()
        scale(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        dist.all_reduce(loss.detach())
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*model.parameters(), *losses]


def scale(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


pytestmark = pytest.mark.usefixtures("group")


def breaking(monkeypatch: pytest.MonkeyPatch, place: str, after: int) -> list[int]:
    """Let a function of the recorder raise, from its call number `after` on. Returns a list of its calls."""
    owner, name = PLACES[place]
    original = getattr(owner, name)
    calls: list[int] = []

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        if len(calls) > after:
            raise Broken(place)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)
    return calls


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("after", [0, 2])
def test_training_goes_on_bit_for_bit(
    place: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = trained()
    calls = breaking(monkeypatch, place, after)

    with warnings.catch_warnings(), recording(tmp_path / "run"):
        warnings.simplefilter("error")
        result = trained()

    assert all(map(torch.equal, result, expected))
    assert len(calls) == after + 1, "it is called once more after it has failed"
    end = files.read(tmp_path / "run").ranks[0].end
    assert end is not None
    assert re.fullmatch(rf"Broken: {place} \(\w+\.py:\d+\)", end.recorder)
    message = capfd.readouterr().err
    assert "fsdp-conformance: the recording ends in step" in message
    assert message.count("\n") == 1


def test_what_the_script_raises_is_not_the_recorders(tmp_path: Path) -> None:
    class Raising(nn.Linear):
        def forward(self, *args: Any) -> Any:
            raise Broken("of the script")

    with recording(tmp_path / "run"):
        with pytest.raises(Broken, match="of the script"):
            Raising(2, 2)(torch.ones(1, 2))
        trained(1)

    end = files.read(tmp_path / "run").ranks[0].end
    assert end is not None
    assert not end.recorder


def test_an_error_of_the_script_passes_even_where_the_recorder_fails_after_it() -> None:
    failures: list[Exception] = []
    guard = Guard(failures.append)

    def call() -> None:
        raise KeyError("script")

    def record(call: Callable[[], None]) -> None:
        try:
            call()
        finally:
            raise Broken("recorder")

    with pytest.raises(KeyError, match="script"):
        guard.around(record, call)
    assert [str(error) for error in failures] == ["recorder"]


def test_a_run_for_the_comparison_fails_with_its_recorder() -> None:
    guard = Guard(lambda error: pytest.fail(f"it was kept: {error}"), lets_pass=True)

    def record() -> None:
        raise Broken("recorder")

    with pytest.raises(Broken, match="recorder"):
        guard.run(record)


@pytest.mark.parametrize("is_reference", [False, True])
def test_a_recording_that_ends_early_is_not_equal(
    is_reference: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recording(tmp_path / "whole"):
        trained()
    breaking(monkeypatch, "before a step", 2)
    with recording(tmp_path / "part"):
        trained()
    names = ["whole", "part"] if is_reference else ["part", "whole"]

    comparison = compare(*(files.read(tmp_path / name) for name in names))

    (finding,) = comparison.findings
    assert (finding.whose, finding.step, comparison.steps) == (Whose.SUITE, 2, 2)
    *_, (verdict, _) = lines_of(comparison)
    assert verdict == "ERROR_SUITE after 2 steps of 1 rank: the recorder failed, and nothing later was compared"
    with pytest.raises(AssertionError, match="the recorder failed"):
        assert_same_training(*(tmp_path / name for name in names))
