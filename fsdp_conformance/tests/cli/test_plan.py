"""`plan` as a user types it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from fsdp_conformance.cli import arguments
from fsdp_conformance.cli.plan_order import order_from_json, order_of
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.planner.device_spec import GIB
from fsdp_conformance.planner.link_spec import LINKS, LinkSpec
from fsdp_conformance.status import Status
from fsdp_conformance.tests.cli.cli_runs import said

MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def build():
    model = nn.Sequential(nn.Linear(32, 64), Block(), Block())
    return model, (torch.zeros(8, 32),)


def without_inputs():
    return nn.Linear(2, 2)
"""


@pytest.fixture(name="place")
def _place(tmp_path: Path) -> Path:
    (tmp_path / "my_model.py").write_text(MODEL, encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_a_plan(place: Path) -> None:
    """A model by module and by file: what was asked, that it is simulated, the table, the choice and the units."""
    words = ("--world-size", "16", "--link", "nvlink+8.4:14:50", "--memory", "1GiB", "--units", "Block")
    by_module = said("plan", "--model", "my_model:build", *words, cwd=place)
    by_file = said("plan", "--model", str(place / "my_model.py:build"), *words, cwd=place)

    assert (by_module.status, by_module.err) == (Status.CERTIFIED, "")
    first, second, *rest = by_module.out.splitlines()
    assert first == (
        "my_model:build: 10,432 elements in 3 units; 16 x h100 on 2 hosts, nvlink+8.4:14:50; bfloat16 at 40% of peak; "
        "1.0 GiB per rank"
    )
    assert second == "all times come from a cost model: no rank was started, and nothing was timed"
    assert rest == by_file.out.splitlines()[2:]
    assert "1 to 2 (2 units): 2 parameters, 4,160 elements each" in rest


@pytest.mark.nightly
def test_nothing_fits(place: Path) -> None:
    """Status 1, and what is needed; a model without lists is one unit, which is said."""
    result = said("plan", "--model", "my_model:build", "--world-size", "2", "--memory", "1KiB", cwd=place)

    assert result.status == Status.NOT_CERTIFIED
    assert "one unit: the model has no module lists" in result.out
    assert "needs the least, 44.2 KiB, but the device has 1.0 KiB" in result.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("my_model:bild", "but my_model has no function 'bild'"),
        pytest.param("no_model:build", "cannot be imported: ModuleNotFoundError", marks=pytest.mark.nightly),
        pytest.param("no_model.py:build", "cannot be imported: FileNotFoundError", marks=pytest.mark.nightly),
        ("my_model:without_inputs", "must return a module and a tuple of the inputs"),
    ],
)
def test_a_model_that_is_none(place: Path, model: str, expected: str) -> None:
    """The command ends with status 2 and one message."""
    result = said("plan", "--model", model, "--world-size", "2", cwd=place)

    assert (result.status, result.out) == (Status.USAGE, "")
    assert expected in result.err


def test_every_problem_is_said_at_once(tmp_path: Path) -> None:
    """All problems are reported before anything starts."""
    result = said(
        "plan", "--model", "model", "--world-size", "x", "--ranks-per-host", "0", "--link", "nvlin+ib",
        "--device", "h10", "--memory", "80", "--utilisation", "2", "--rows", "-1", cwd=tmp_path,
    )  # fmt: skip

    assert (result.status, result.out) == (Status.USAGE, "")
    for expected in (
        "world_size must be a positive integer, got 'x'",
        "ranks_per_host must be a positive integer, got '0'",
        "model must be package.module:function or path/to/file.py:function, got 'model'",
        "device must be one of a100, h100, h200, got 'h10'. Did you mean",
        "memory must be a positive size with a unit, such as 80GiB or 512MiB, got '80'",
        "link must be one of nvlink",
        "Did you mean 'nvlink'?",
        "utilisation must be above 0 and at most 1, got '2'",
        "rows must be a positive integer, got '-1'",
    ):
        assert expected in result.err


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [("80GiB", 80 * GIB), ("80 gb", 80e9), ("1.5MiB", 1.5 * 2**20), ("512KB", 512e3), ("7B", 7.0)],
)
def test_sizes(size: str, nbytes: float) -> None:
    """Units of 1000 and of 1024 are told apart."""
    parsed = arguments.parse(["plan", "--model", "a:b", "--world-size", "8", "--memory", size])

    assert order_of(parsed).memory_bytes == nbytes


def test_links_and_defaults() -> None:
    """One link is inside and between hosts, memory is the device's, and an order survives the way to the child."""
    order = order_of(arguments.parse(["plan", "--model", "a:b", "--world-size", "8", "--link", "pcie"]))
    custom = order_of(arguments.parse(["plan", "--model", "a:b", "--world-size", "8", "--link", "1:2:3+ib"]))

    assert order.links == (LINKS["pcie"], LINKS["pcie"])
    assert order.memory_bytes == 80 * GIB
    assert custom.links == (LinkSpec(launch_us=1.0, latency_us=2.0, bandwidth_gb_per_s=3.0), LINKS["ib"])
    assert order_from_json(json.loads(json.dumps(asdict(custom)))) == custom


@pytest.mark.parametrize("link", ["1:2", "1:2:0", "a:b:c", "ib+ib+ib", "", "1:2:inf"])
def test_links_that_are_none(link: str) -> None:
    """Another number of parts, of links, or a bandwidth of nothing."""
    with pytest.raises(ConfigError, match="link must be"):
        order_of(arguments.parse(["plan", "--model", "a:b", "--world-size", "8", "--link", link]))
