"""Growth between steps: everything that grows is reported, and nothing else."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_conformance.checks import growth
from fsdp_conformance.checks.growth import Held
from fsdp_conformance.history.training import StepRecord

_REQUIREMENTS = {"bytes": "R039", "hooks": "R189", "groups": "R189", "threads": "R189"}
_HELD = {"bytes": 100, "hooks": 4, "groups": 1, "threads": 2}


@pytest.fixture(autouse=True)
def _young_heap() -> Iterator[None]:
    """As in a rank, whose collector never visits what was imported: a collection takes 1 ms instead of 300."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("grows", [None, "bytes", "hooks", "groups", "threads"])
def test_what_grows_is_reported_under_its_requirement(grows: str | None) -> None:
    """And what becomes less is not."""
    later = {name: number + (1 if name == grows else -1) for name, number in _HELD.items()}

    result = growth.no_more(Held(**_HELD), Held(**later), rank=0, step=4, requirements=_REQUIREMENTS)

    expected = [] if grows is None else [(_REQUIREMENTS[grows], f"each step leaves {grows} behind")]
    assert [(finding.requirement, finding.likely) for finding in result.findings] == expected
    assert result.count.comparisons == len(_HELD)


def test_what_a_call_leaves_is_named() -> None:
    later = Held(**{**_HELD, "groups": 2})

    result = growth.no_more(Held(**_HELD), later, rank=0, step=4, requirements=_REQUIREMENTS, by="full state dict")

    assert [finding.likely for finding in result.findings] == ["each full state dict leaves groups behind"]


@pytest.mark.parametrize(("held", "is_reported"), [(400, False), (401, True)])
def test_activations_that_stay_are_reported(held: int, is_reported: bool) -> None:
    """Four copies of the model may stay gathered or buffered; more than that are what a step has computed."""
    earlier, later = Held(**_HELD), Held(**{**_HELD, "bytes": _HELD["bytes"] + held})

    result = growth.no_activations(earlier, later, model_bytes=100, rank=0, step=4, requirement="R039")

    assert [finding.requirement for finding in result.findings] == ["R039"] * is_reported
    assert result.count.comparisons == 1


def test_tensors_count_once_with_all_their_bytes() -> None:
    """However many views there are; an empty storage and one on meta count nothing."""
    before = Held.now(None).bytes
    tensor = torch.zeros(10)
    views: list[Any] = [tensor[:5], tensor.view(2, 5), torch.zeros(0), torch.zeros(1000, device="meta")]
    assert Held.now(None).bytes == before + 40
    views[0].untyped_storage().resize_(0)
    assert Held.now(None).bytes == before


def test_gradients_count() -> None:
    """Also those that only their parameter refers to."""
    parameter = nn.Parameter(torch.zeros(10))
    before = Held.now(None).bytes
    parameter.sum().backward()
    assert Held.now(None).bytes == before + 40


def test_what_the_suite_holds_is_left_out() -> None:
    """That includes containers inside the suite's objects, but not a module that one of them refers to."""
    before = Held.now(None).bytes
    record = StepRecord(step=0, losses=[torch.zeros(10)], params={"weight": torch.zeros(20)})
    assert Held.now(None).bytes == before
    record.outputs.append(nn.Linear(10, 10, bias=False))
    assert Held.now(None).bytes == before + 400


def _num_hooks(module: nn.Module) -> int:
    return Held.now(module).hooks


class _Strange(torch.Tensor):
    """A class of tensors that has no storage to show."""

    def untyped_storage(self) -> torch.UntypedStorage:
        raise AttributeError("no storage")


def test_tensors_that_show_no_storage() -> None:
    """An engine may define its own tensor class; the tensor inside it is counted once."""
    before = Held.now(None).bytes
    strange = torch.zeros(10).as_subclass(_Strange)
    assert Held.now(None).bytes == before + 40
    assert strange.numel() == 10


def test_hooks_of_modules_and_parameters_count() -> None:
    """Of each kind."""
    layer = nn.Linear(2, 2)
    module = nn.Sequential(layer)
    before = _num_hooks(module)
    module.register_forward_hook(lambda *args: None)
    layer.register_full_backward_hook(lambda *args: None)
    layer.weight.register_hook(lambda gradient: None)
    layer.bias.register_post_accumulate_grad_hook(lambda parameter: None)

    assert _num_hooks(module) == before + 4
