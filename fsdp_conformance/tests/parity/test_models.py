"""Models that two runs train: initial values, frozen parameters, ties, and a model that is built again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from fsdp_conformance.parity.changed import whose_backward
from fsdp_conformance.parity.comparison import compare
from fsdp_conformance.parity.finding import Finding, Whose
from fsdp_conformance.parity.models import divided_tie
from fsdp_conformance.recorder.hooks import watch_unit
from fsdp_conformance.recorder.process import recording
from fsdp_conformance.recordings import files
from fsdp_conformance.recordings.events import Step
from fsdp_conformance.recordings.files import Recording
from fsdp_conformance.tests.parity.trainings import Net, as_rank

Make = Callable[[int], nn.Module]


class Biased(nn.Module):
    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 2)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x)) + self.bias


def make(rank: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Biased(torch.zeros(2))


def with_its_own_buffer(rank: int) -> nn.Module:
    model = make(rank)
    model.bias = torch.full((2,), float(rank))
    return model


def with_another_buffer(*values: float) -> Make:
    def make_with(rank: int) -> nn.Module:
        model = make(rank)
        model.bias = torch.tensor(values)
        return model

    return make_with


def frozen(rank: int) -> nn.Module:
    model = make(rank)
    model.get_submodule("first").requires_grad_(False)
    return model


@torch.no_grad()
def with_rows_exchanged(rank: int) -> nn.Module:
    model = make(rank)
    weight = model.get_parameter("first.weight")
    weight.copy_(weight.roll(3, dims=0))
    return model


def with_other_weights(change: Callable[[Tensor], Tensor]) -> Make:
    """A layer whose parameters are changed, with enough elements for its norm to tell distributions apart."""

    def make_with(rank: int) -> nn.Module:
        torch.manual_seed(0)
        model = Biased(torch.zeros(2))
        model.first, model.second = nn.Linear(4, 100), nn.Linear(100, 2)
        with torch.no_grad():
            for parameter in model.first.parameters():
                parameter.copy_(change(parameter))
        return model

    return make_with


as_drawn, zeroed = with_other_weights(torch.clone), with_other_weights(torch.zeros_like)
scaled, normal = with_other_weights(lambda tensor: tensor * 0.25), with_other_weights(torch.randn_like)
again = with_other_weights(lambda tensor: torch.empty_like(tensor).uniform_(-0.5, 0.5))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(12.0).reshape(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def record(make: Make, directory: Path, ranks: int = 2) -> None:
    for rank in range(ranks):
        with as_rank(rank, ranks), recording(directory):
            model = make(rank)
            step(model, torch.optim.Adam([each for each in model.parameters() if each.requires_grad]))


def first_finding(mine: Make, theirs: Make, directory: Path) -> Finding:
    record(mine, directory / "run")
    record(theirs, directory / "reference")
    return compare(files.read(directory / "run"), files.read(directory / "reference")).findings[0]


@pytest.mark.parametrize(
    ("mine", "theirs", "whose", "title", "first", "likely"),
    [
        (
            with_its_own_buffer, make, Whose.SCRIPT, "The initial values differ between ranks",
            "'bias' · rank 1 differs from rank 0", "FSDP2 does not",
        ),
        (
            lambda rank: make(rank, seed=rank), make, Whose.EITHER, "The initial values differ between ranks",
            "'first.weight' · rank 1 differs from rank 0", "nothing has given all of them those of rank 0",
        ),
        (
            make, frozen, Whose.SCRIPT, "Different parameters are frozen",
            "'first.weight' is trained here, and not in the reference", "from before the model was sharded",
        ),
        (
            frozen, make, Whose.SCRIPT, "Different parameters are frozen",
            "'first.weight' is frozen here, and not in the reference", "",
        ),
        (
            with_rows_exchanged, make, Whose.EITHER, "The initial values differ", "'first.weight'",
            "the same numbers are in other places",
        ),
        (
            scaled, as_drawn, Whose.SCRIPT, "The initial values differ", "'first.weight'",
            "the same numbers, times 0.25: a function that initialises them is not called",
        ),
        (
            normal, as_drawn, Whose.SCRIPT, "The initial values differ", "'first.weight'",
            "they are drawn from another distribution (norms 3.",
        ),
        (
            again, as_drawn, Whose.SCRIPT, "The initial values differ", "'first.weight'",
            "the generators are seeded differently",
        ),
        (
            zeroed, as_drawn, Whose.SCRIPT, "The initial values differ", "'first.weight'",
            "they are zero here: nothing has initialised them",
        ),
        (
            as_drawn, zeroed, Whose.SCRIPT, "The initial values differ", "'first.weight'",
            "they are zero in the reference alone",
        ),
        (
            with_another_buffer(0.6, 0.8), with_another_buffer(0.8, 0.6), Whose.SCRIPT, "The initial values differ",
            "'bias'", "only buffers differ: the script computes them in another way, or again",
        ),
    ],
)  # fmt: skip
def test_models_that_begin_differently(
    mine: Make, theirs: Make, whose: Whose, title: str, first: str, likely: str, tmp_path: Path
) -> None:
    finding = first_finding(mine, theirs, tmp_path)

    assert (finding.title, finding.whose, finding.step) == (title, whose, 0)
    assert first in finding.first
    assert likely in finding.likely


@pytest.mark.parametrize("thaws", [False, True])
@pytest.mark.parametrize("is_evaluated", [True, False])
def test_a_freeze_that_is_lost(is_evaluated: bool, thaws: bool, tmp_path: Path) -> None:
    """Gathered parameters take it, and are gone when the model is sharded again."""
    for name, freezes in (("run", thaws), ("reference", not thaws)):
        with as_rank(0, 1), recording(tmp_path / name):
            model = make(0)
            optimizer = torch.optim.Adam(model.parameters())
            step(model, optimizer)
            if is_evaluated:
                with torch.no_grad():
                    model(torch.ones(1, 4))
            model.get_submodule("first").requires_grad_(not freezes)
            step(model, optimizer)

    finding = compare(files.read(tmp_path / "run"), files.read(tmp_path / "reference")).findings[0]

    assert (finding.title, finding.step) == ("Different parameters are frozen", 1)
    # Nothing is gathered unless an evaluation has run.
    assert finding.whose is (Whose.SCRIPT if is_evaluated else Whose.EITHER)
    is_named = "`requires_grad_` was called on gathered parameters" in finding.likely
    assert is_named is (is_evaluated or not thaws)


def test_a_reference_whose_ranks_begin_differently_too_shows_nothing(tmp_path: Path) -> None:
    record(with_its_own_buffer, tmp_path)
    recorded = files.read(tmp_path)

    comparison = compare(recorded, recorded)

    assert comparison.findings == []
    assert [each.title for each in comparison.suspicions] == [
        "Every rank trains the same samples", "Parameters differ between ranks that should hold the same",
    ]  # fmt: skip


def names_by_step(directory: Path) -> list[set[str]]:
    events = files.read(directory).ranks[0].events
    return [set(event.parameters) for event in events if isinstance(event, Step)]


NAMES = {"first.weight", "first.bias", "second.weight", "second.bias"}


def test_a_model_that_is_built_again_keeps_its_names(tmp_path: Path) -> None:
    """Its optimizer has gone. The first model is still there, as in the graph of the last loss."""
    with recording(tmp_path):
        model = first = make(0)
        optimizer = torch.optim.Adam(model.parameters())
        step(model, optimizer)
        model = make(0)
        optimizer = torch.optim.Adam(model.parameters())
        step(model, optimizer)

    assert names_by_step(tmp_path) == [NAMES, NAMES]
    assert first is not model


@pytest.mark.parametrize("is_loaded", [True, False])
def test_an_optimizer_that_is_made_again_needs_its_state(is_loaded: bool, tmp_path: Path) -> None:
    for directory, begins_again in ((tmp_path / "run", True), (tmp_path / "reference", False)):
        with recording(directory):
            model = make(0)
            optimizer = torch.optim.Adam(model.parameters())
            step(model, optimizer)
            if begins_again:
                state = optimizer.state_dict()
                optimizer = torch.optim.Adam(model.parameters())
                if is_loaded:
                    optimizer.load_state_dict(state)
            step(model, optimizer)

    comparison = compare(files.read(tmp_path / "run"), files.read(tmp_path / "reference"))

    assert comparison.is_bitwise is is_loaded
    for finding in comparison.findings:
        assert (finding.whose, finding.step) == (Whose.SCRIPT, 1)
        assert finding.first == "'first.weight/step' · 1 instead of 2"
        assert "no state of the steps before was loaded" in finding.likely


def test_a_second_model_has_other_names(tmp_path: Path) -> None:
    """Both are trained, or the first one never was, as a teacher."""
    with recording(tmp_path / "both"):
        models = [make(0), make(0)]
        optimizers = [torch.optim.Adam(model.parameters()) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer)
    with recording(tmp_path / "teacher"):
        with torch.no_grad():
            models[0](torch.zeros(3, 4))
        step(models[1], optimizers[1])

    others = {f"Biased(2).{name}" for name in NAMES}
    assert names_by_step(tmp_path / "both") == [NAMES, others]
    assert names_by_step(tmp_path / "teacher") == [others]


def test_steps_that_only_make_the_state_of_an_optimizer_are_none(tmp_path: Path) -> None:
    """Torch's functions for checkpoints step once, before a script has trained or in the middle; so do scripts."""
    with recording(tmp_path):
        model = make(0)
        optimizer = torch.optim.Adam(model.parameters())
        get_state_dict(model, optimizer)
        optimizer.step()
        step(model, optimizer)
        another = torch.optim.SGD(model.parameters(), momentum=0.9)
        get_state_dict(model, another)
        step(model, optimizer)

    assert names_by_step(tmp_path) == [NAMES, NAMES]


def hooks(*places: str) -> Any:
    return SimpleNamespace(steps=[SimpleNamespace(hooks=places, silent_hooks=())])


@pytest.mark.parametrize(
    ("mine", "theirs", "same_script", "whose", "likely"),
    [
        ((), (), True, Whose.ENGINE, ""),
        ((), (), False, Whose.EITHER, "what one of the two scripts does"),
        (
            (),
            ("train.py:3",),
            True,
            Whose.SCRIPT,
            "the hook of train.py:3 is on a parameter or module of the reference",
        ),
        (("train.py:3",), (), False, Whose.SCRIPT, "the reference has none"),
        (
            ("train.py:3",),
            ("train.py:3",),
            True,
            Whose.EITHER,
            "or the hook of train.py:3, which sees this rank's shard",
        ),
    ],
)
def test_hooks_change_gradients(
    mine: Sequence[str], theirs: Sequence[str], same_script: bool, whose: Whose, likely: str
) -> None:
    found = whose_backward(hooks(*mine), hooks(*theirs), same_script=same_script)

    assert found[0] is whose
    assert likely in found[1]


@pytest.mark.parametrize(
    ("units", "is_divided"), [((), False), (("tokens",), True), (("tokens", "output[0]"), True), (("layers.0",), False)]
)
def test_a_parameter_of_two_units(units: Sequence[str], is_divided: bool) -> None:
    """Those of no other unit are the root's."""
    forward: Any = SimpleNamespace(units=dict.fromkeys(units))

    assert ("fully_shard([a, b])" in divided_tie({"tokens.weight": ("output.weight",)}, forward)) is is_divided


class Tied(Net):
    def __init__(self, shares: bool) -> None:
        super().__init__(0.0)
        self.third = nn.Linear(33, 9)
        if shares:
            self.third.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.second(hidden) + self.third(hidden)  # type: ignore[no-any-return]


def recorded_tied(directory: Path, shares: bool, unit: str = "") -> Recording:
    torch.manual_seed(0)
    with as_rank(0, 1), recording(directory):
        model = Tied(shares)
        if unit:
            watch_unit(model.get_submodule(unit))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 17)).square().mean().backward()
        optimizer.step()
    return files.read(directory)


def test_a_tied_parameter_is_named_with_both_names(tmp_path: Path) -> None:
    comparison = compare(recorded_tied(tmp_path / "run", False), recorded_tied(tmp_path / "reference", True))

    finding = comparison.findings[0]
    assert finding.first == "'third.weight' should not be there"
    assert "in the reference, 'third.weight' is tied to 'second.weight'" in finding.likely


@pytest.mark.parametrize(("unit", "is_one"), [("first", True), ("second", False)])
def test_a_tie_within_a_unit_is_not_broken_by_sharding(unit: str, is_one: bool, tmp_path: Path) -> None:
    run = recorded_tied(tmp_path / "run", False, unit)
    likely = compare(run, recorded_tied(tmp_path / "reference", True)).findings[0].likely
    assert ("`load_state_dict(assign=True)`, `to_empty()` or an assignment" in likely) is is_one
    assert ("fully_shard([a, b])" in likely) is not is_one
