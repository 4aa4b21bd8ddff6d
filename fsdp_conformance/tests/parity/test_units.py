"""Gradients that are exactly those of some units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from fsdp_conformance.parity.comparison import compare
from fsdp_conformance.parity.finding import Whose
from fsdp_conformance.parity.units import exactly_units
from fsdp_conformance.recorder.hooks import watch_unit
from fsdp_conformance.tests.parity.trainings import Script, compared, record, taken_out

PARAMETERS = ("embed.weight", "h.0.weight", "h.0.bias", "h.1.weight", "h.1.bias", "h.10.weight")
UNITS = ("h.0", "h.1[0]", "h.1, call 2", "h.10")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("h.1.weight", "h.1.bias"), "the unit 'h.1'"),
        (("h.1.bias",), ""),
        (("h.1.weight", "h.1.bias", "h.0.bias"), ""),
        (("embed.weight",), "the root unit"),
        (("embed.weight", "h.10.weight"), "the unit 'h.10' and the root unit"),
        (("h.10.weight", "h.0.weight", "h.0.bias"), "the units 'h.0', 'h.10'"),
        (PARAMETERS, ""),
        (("not.a.parameter",), ""),
    ],
)
def test_units_that_are_whole(names: Sequence[str], expected: str) -> None:
    """All parameters of some units, and none of another: part of a unit, or all units, show nothing."""
    forward: Any = SimpleNamespace(units=dict.fromkeys(UNITS))
    assert exactly_units(names, PARAMETERS, [forward]) == expected
    forward.units = {}
    assert not exactly_units(names, PARAMETERS, [forward])


def _watch(model: nn.Module, step: int) -> None:
    if not step:
        watch_unit(model.get_submodule("first"))


def _drop(name: str) -> Callable[[nn.Module, int], None]:
    def drop(model: nn.Module, step: int) -> None:
        for parameter in model.get_submodule(name).parameters():
            parameter.grad = None

    return drop


def _double(model: nn.Module, step: int) -> None:
    for index, parameter in enumerate(model.get_submodule("first").parameters()):
        assert parameter.grad is not None
        parameter.grad.mul_(2 + index)


@pytest.mark.parametrize(("name", "unit"), [("first", "the unit 'first'"), ("second", "the root unit")])
def test_gradients_of_one_unit_are_missing(tmp_path: Path, name: str, unit: str) -> None:
    """With the same script as the reference, that is the cause: the engine has not reduced its gradients."""
    run = record(Script(before_forward=_watch, gradients=_drop(name)), tmp_path / "run")
    reference = record(Script(), tmp_path / "reference")
    finding = compare(run, taken_out(reference)).findings[0]
    assert finding.title == "Different parameters have gradients"
    assert finding.whose is Whose.ENGINE
    assert finding.likely == f"the engine did not reduce the gradients of {unit}"
    assert f"they are all those of {unit}, and none of another unit" in finding.evidence


def test_gradients_of_one_unit_differ(tmp_path: Path) -> None:
    """If the gradients have another cause, the unit is shown as evidence."""
    finding = compared(Script(before_forward=_watch, gradients=_double), tmp_path).findings[0]
    assert finding.title == "The gradients differ"
    assert "they are all those of the unit 'first', and none of another unit" in finding.evidence
