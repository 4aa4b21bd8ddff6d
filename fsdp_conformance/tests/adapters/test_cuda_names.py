"""Engines that know only "cuda" are judged on the simulated accelerator, where they find it under that name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from fsdp_conformance import codec
from fsdp_conformance.adapters import cuda_names, registry
from fsdp_conformance.adapters.vendors.torch_fsdp2 import TorchFSDP2
from fsdp_conformance.errors import RankRaised, Unsupported
from fsdp_conformance.harness.simulated_ranks.ranks import run_ranks
from fsdp_conformance.plan import Plan, flags_of_names
from fsdp_conformance.simulator.as_cuda import names
from fsdp_conformance.tests.cli.cli_runs import said, with_adapter
from fsdp_conformance.tests.simulator.simulator_ranks import compiled

#: An engine with a side stream for its optimizer. The second one does not wait for it.
ADAPTER = """
import torch
from fsdp_conformance.adapters.vendors.torch_fsdp2 import TorchFSDP2


class OnlyCuda(TorchFSDP2):
    name = "only-cuda"
    cuda_names = True
    declines = frozenset({"any_accelerator"})
    waits = True

    def wrap(self, model, plan):
        places = {parameter.device.type for parameter in model.parameters()}
        if not torch.cuda.is_available() or places != {"cuda"}:
            raise RuntimeError(f"this engine needs CUDA, got {places}")
        self.side = torch.cuda.Stream()
        return super().wrap(model, plan)

    def step(self, max_norm=None, *, norm_type=2.0):
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            norm = super().step(max_norm, norm_type=norm_type)
        if self.waits:
            torch.cuda.current_stream().wait_stream(self.side)
        return norm


class Hasty(OnlyCuda):
    name = "hasty"
    waits = False
"""

#: The case of R012 compares devices, which travel to the referee.
CASES = ("R001/exact-probe-ws2", "R075/stream-safety-uneven-ws2", "R012/before-ws2")


class Named(TorchFSDP2):
    """An engine that knows only CUDA."""

    cuda_names: ClassVar[bool] = True
    declines: ClassVar[frozenset[str]] = TorchFSDP2.declines | {"any_accelerator"}


class Unnamed(TorchFSDP2):
    """One that knows neither."""

    declines: ClassVar[frozenset[str]] = TorchFSDP2.declines | {"any_accelerator"}


@pytest.mark.parametrize(("device", "expected"), [("sim", {"any_accelerator"}), ("cpu", set()), ("xpu", set())])
def test_only_the_simulated_accelerator_has_these_names(device: str, expected: set[str]) -> None:
    """Such an engine does not see other accelerators, and without the attribute nothing changes."""
    assert flags_of_names(device, cuda_names=True) == expected
    assert not flags_of_names(device, cuda_names=False)


def test_a_plan_for_it_is_not_refused() -> None:
    """An engine without this declaration refuses it, and so does this one on an accelerator without CUDA's names."""
    Named.refuse_undeclared(Plan(device="sim"))
    for engine, device in ((Unnamed, "sim"), (Named, "xpu")):
        with pytest.raises(Unsupported, match="any_accelerator"):
            engine.refuse_undeclared(Plan(device=device))


def test_a_controller_and_a_certificate_know_it() -> None:
    """Cases on the simulated accelerator would run, and the certificate says how."""
    described = registry.describe_here(f"{__name__}:Named")

    assert "any_accelerator" in described.declared("sim") - described.declared("cuda")
    assert cuda_names.SHIM in described.shims
    assert codec.typed(registry.AdapterDescription, codec.plain(described)) == described
    assert cuda_names.SHIM not in registry.describe_here(f"{__name__}:Unnamed").shims


def test_others_see_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is replaced for an engine that does not ask for it, nor on the CPU."""
    monkeypatch.setattr(cuda_names, "_install", lambda: pytest.fail("it must not be called"))
    cuda_names.provide(Unnamed, "sim")
    cuda_names.provide(Named, "cpu")


def test_simulated_ranks_are_refused() -> None:
    """They share a process, and the names are given to a whole process."""
    with pytest.raises(RankRaised, match=r"cannot be judged on simulated ranks.*Use --ranks processes"):
        run_ranks(1, lambda rank: cuda_names.provide(Named, "sim"), timeout_s=30)


@pytest.fixture
def own_names() -> Iterator[set[str]]:
    """The directories that keep the device's own name; what a test adds is taken out again."""
    before = set(names._own_names)
    yield names._own_names
    names._own_names.clear()
    names._own_names.update(before)
    names._asks_for_script.cache_clear()


def test_the_suite_keeps_the_devices_own_name(own_names: set[str], tmp_path: Path) -> None:
    """Code below a directory that was named, and not that of a directory whose name begins like it."""
    inside, outside = str(tmp_path / "suite" / "case.py"), str(tmp_path / "suites" / "case.py")
    assert names._asks_for_script(inside)
    names.keep_own_names([str(tmp_path / "suite")])

    assert names._asks_for_script(inside) is False
    assert names._asks_for_script(outside)


@pytest.mark.nightly
@pytest.mark.slow
@compiled
def test_its_streams_are_judged(tmp_path: Path) -> None:
    """One that waits passes, where the control sees races; one that does not wait has them."""
    file = with_adapter(tmp_path, ADAPTER)
    chosen = [word for case in CASES for word in ("--case", case)]
    passes = said("run", "--implementation", f"{file}:OnlyCuda", "--device", "sim", *chosen, cwd=tmp_path)
    races = said("run", "--implementation", f"{file}:Hasty", "--device", "sim", *chosen, cwd=tmp_path)

    assert "3 PASS" in passes.out, passes.out
    assert 'finds the device as "cuda"' in passes.out
    assert "FAIL" not in passes.out
    assert "contradicts" not in passes.out
    assert "FAIL  R075/stream-safety-uneven-ws2" in races.out, races.out
    assert "without waiting for it" in " ".join(races.out.split())
    assert "my_adapter.py:22 in step" in races.out
