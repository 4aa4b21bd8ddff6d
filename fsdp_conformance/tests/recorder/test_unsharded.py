"""The wrapper that takes FSDP1's place in the reference has its names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fsdp_conformance.recorder.unsharded import ReplicatedInPlaceOfFSDP


@pytest.fixture(name="model")
def _model(monkeypatch: pytest.MonkeyPatch) -> ReplicatedInPlaceOfFSDP:
    """A unit within the root."""
    taken_out = SimpleNamespace(replicate=lambda modules, **options: SimpleNamespace(synchronises=True))
    monkeypatch.setattr(ReplicatedInPlaceOfFSDP, "replacement", taken_out, raising=False)
    return ReplicatedInPlaceOfFSDP(nn.Sequential(ReplicatedInPlaceOfFSDP(nn.Linear(3, 2)), nn.Linear(2, 1)))


def test_parameters_are_named_as_in_fsdp1(model: ReplicatedInPlaceOfFSDP) -> None:
    """With the wrappers in them, so that they fit those of modules; as in the model while parameters are summoned."""
    wrapped = "_fsdp_wrapped_module"
    joined = {
        f"{name}.{own}" if name else own
        for name, module in model.named_modules()
        for own, _ in module.named_parameters()
    }

    assert [name for name, _ in model.named_parameters()] == [
        f"{wrapped}.0.{wrapped}.weight", f"{wrapped}.0.{wrapped}.bias", f"{wrapped}.1.weight", f"{wrapped}.1.bias",
    ]  # fmt: skip
    assert joined >= dict(model.named_parameters()).keys()
    with ReplicatedInPlaceOfFSDP.summon_full_params(model):
        assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_states_are_named_as_in_the_model(model: ReplicatedInPlaceOfFSDP) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()

    state = ReplicatedInPlaceOfFSDP.optim_state_dict(model, optimizer)
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(ReplicatedInPlaceOfFSDP.optim_state_dict_to_load(model, optimizer, state))

    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(model.state_dict()) == names
    assert list(state["state"]) == state["param_groups"][0]["params"] == names
