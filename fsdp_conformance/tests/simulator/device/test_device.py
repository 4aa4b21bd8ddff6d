"""The device `sim` in torch: activation, devices, hooks, random numbers, and forks."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_conformance.errors import ConfigError, EnvironmentUnavailable
from fsdp_conformance.simulator import activation, checker
from fsdp_conformance.simulator.activation import activate
from fsdp_conformance.simulator.device import build
from fsdp_conformance.simulator.device import devices as device
from fsdp_conformance.simulator.device import torch_sim as sim
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own, run_in_child
from fsdp_conformance.tests.torch_versions import not_on_old

pytestmark = compiled


class TestActivation:
    """Once per process, and only if torch's slot for it is free."""

    @in_process_of_its_own
    def test_the_device_is_torchs_accelerator(self) -> None:
        """torch knows it by name, by module, and with its index; a second activation changes nothing."""
        activate()

        assert "sim" == torch._C._get_privateuse1_backend_name()
        assert sim is torch.get_device_module("sim")
        assert torch.device("sim") == torch.accelerator.current_accelerator()
        moved: Any = torch.ones(2)
        assert (moved.sim().is_sim, moved.is_sim, torch.ones(2, device="sim:3").get_device()) == (True, False, 3)
        module: Any = nn.Linear(2, 2)
        assert "sim:0" == str(module.sim().weight.device)
        assert checker.Mode.RECORD.value == build.load().Checker.get().mode

    @in_process_of_its_own
    def test_there_are_as_many_devices_as_asked_for(self) -> None:
        """8 by default, more for ranks that are threads; other indices raise."""
        assert 8 == sim.device_count() == torch.accelerator.device_count()

        activate(64)

        assert "sim:63" == str(torch.ones(1, device="sim:63").device)
        for index in (64, 126):
            with pytest.raises(ValueError, match=rf"device index must be in \[0, 64\), .*, got {index}"):
                torch.ones(1, device=f"sim:{index}")
        with pytest.raises(ValueError, match=r"num_devices must be in \[1, 127\], got 128"):
            activate(128)

    def test_the_environment_says_how_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its value is checked."""
        monkeypatch.setenv(activation.NUM_DEVICES, "3")
        assert 3 == activation._num_devices()

        for text in ("0", "many", "128"):
            monkeypatch.setenv(activation.NUM_DEVICES, text)
            with pytest.raises(ConfigError, match=f"{activation.NUM_DEVICES} must be .*, got '{text}'"):
                activation._num_devices()

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_another_backend_is_not_driven_out(self) -> None:
        """torch has one slot for such a device; the error names the backend that has taken it."""
        program = """
import torch
torch.utils.rename_privateuse1_backend("npu")
from fsdp_conformance.simulator.activation import activate
activate()
"""
        ended = run_python(program)

        assert 1 == ended.returncode
        assert "EnvironmentUnavailable: torch has one slot (PrivateUse1) for an external device" in ended.stderr
        assert "'npu' has taken" in ended.stderr

    @in_process_of_its_own
    def test_devices_are_current_per_context(self) -> None:
        """`device`, `device_of`, and indices in all their forms."""
        with sim.device("sim:2"):
            assert 2 == sim.current_device() == torch.accelerator.current_device_index()
            assert "sim:2" == str(torch.ones(1, device="sim").device)
            with sim.device_of(torch.ones(1, device="sim:1")), sim.device_of(torch.ones(1)):
                assert 1 == sim.current_device()
            with sim.device(None):
                assert 2 == sim.current_device()
        assert 0 == sim.current_device()
        with pytest.raises(ValueError, match=r"device must be of type 'sim', got 'cpu'"):
            sim.set_device("cpu")


class TestFork:
    """Ranks are forked from a process in which the device is active."""

    @in_process_of_its_own
    def test_a_child_of_an_active_process_works(self) -> None:
        """The child computes with its parent's tensors, including backward, and the parent continues."""
        weight = torch.full((3, 3), 2.0, device="sim", requires_grad=True)
        side = sim.Stream()
        side.wait_stream(sim.current_stream())

        def compute() -> None:
            with sim.stream(side):
                loss = (weight @ weight).sum()
            sim.current_stream().wait_stream(side)
            loss.backward()
            assert weight.grad is not None
            assert 12.0 == weight.grad[1, 1].item()

        assert "" == run_in_child(compute)
        assert "" == run_in_child(compute)
        compute()

    @in_process_of_its_own
    def test_activation_starts_no_thread(self) -> None:
        """Computing without backward starts no thread either, so the process can be forked."""
        assert torch.ones(3, device="sim").sum().item() == 3

        assert 1 == len(os.listdir("/proc/self/task"))


class TestGenerators:
    """Random numbers are the CPU's."""

    @in_process_of_its_own
    def test_a_seed_gives_the_cpus_numbers(self) -> None:
        """There is one sequence, whichever tensors are on the device."""

        def draw(places: list[str]) -> list[float]:
            torch.manual_seed(5)
            return [torch.rand(1, device=place).item() for place in places]

        assert draw(["cpu"] * 4) == draw(["sim", "cpu", "sim:3", "sim"])

    @in_process_of_its_own
    def test_a_generator_of_the_device_gives_the_cpus_numbers(self) -> None:
        """Its device is the device's; its state can be taken and set."""
        on_cpu, on_sim = torch.Generator().manual_seed(3), torch.Generator("sim:1").manual_seed(3)
        expected = torch.rand(7, generator=on_cpu)

        state = on_sim.get_state()
        samples = torch.rand(7, generator=on_sim, device="sim:1")

        assert torch.equal(expected, samples.cpu())
        on_sim.set_state(state)
        assert torch.equal(samples, torch.rand(7, generator=on_sim, device="sim:1"))
        assert ("sim:1", 3) == (str(on_sim.device), on_sim.initial_seed())

    @in_process_of_its_own
    def test_states_are_taken_and_set(self) -> None:
        """`torch.sim` does it, and so does `fork_rng` for any devices."""
        torch.manual_seed(2)
        state = sim.get_rng_state()
        first = torch.rand(3, device="sim")
        sim.set_rng_state(state)
        assert torch.equal(first, torch.rand(3, device="sim"))
        assert 2 == sim.initial_seed()

        sim.set_rng_state_all(sim.get_rng_state_all())
        with torch.random.fork_rng(devices=[0, 1], device_type="sim"):
            inside = torch.rand(3, device="sim:1")
        assert torch.equal(inside, torch.rand(3, device="sim:1"))

    @in_process_of_its_own
    def test_separate_generators_do_not_take_each_others_numbers(self) -> None:
        """Ranks that are threads each seed their own device and get the CPU's sequence for that seed."""
        sim.separate_generators()
        for index in (0, 1):
            with sim.device(index):
                torch.manual_seed(5)
        a, b = nn.Dropout(0.5), nn.Dropout(0.5)

        samples = [a(torch.ones(16, device="sim:0")), b(torch.ones(16, device="sim:1"))]
        torch.manual_seed(5)
        sim.separate_generators(False)
        expected = a(torch.ones(16))

        assert torch.equal(expected, samples[0].cpu())
        assert torch.equal(expected, samples[1].cpu())

    @pytest.mark.parametrize("use_reentrant", [False, True])
    @in_process_of_its_own
    def test_checkpointing_drops_out_the_same_twice(self, use_reentrant: bool) -> None:
        """The second forward draws what the first one drew: the gradient is of the loss that was computed."""
        weight = torch.ones(64, device="sim", requires_grad=True)

        result = checkpoint(nn.functional.dropout, weight, use_reentrant=use_reentrant)
        result.sum().backward()

        assert weight.grad is not None
        assert torch.equal(result, weight.grad)
        assert 0 < int((result == 0).sum()) < 64

    @in_process_of_its_own
    def test_dtensor_draws_as_on_the_cpu(self) -> None:
        """DTensor must not try to set CUDA's offsets."""
        from torch.distributed.tensor import _random

        assert hasattr(sim, "set_rng_state")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mesh = type("Mesh", (), {"device_type": "sim"})()
            assert not _random.is_rng_supported_mesh(mesh)


@in_process_of_its_own
def test_properties_are_told() -> None:
    """A device has the properties that scripts read."""
    properties = sim.get_device_properties()

    assert sim.get_device_name() == properties.name
    assert properties.total_memory == sim.mem_get_info()[1]
    assert sim.is_available()
    assert sim.is_initialized()
    assert sim.is_bf16_supported()
    assert torch.bfloat16 in sim.get_amp_supported_dtype()
    assert (0, 0) == sim.get_device_capability()


@pytest.mark.nightly
@pytest.mark.slow
@not_on_old
def test_every_method_overrides_one_of_torchs() -> None:
    """
    `override` is left out in the sources, as versions of torch differ; with it they compile against the installed one.
    """
    include = Path(torch.__file__).parent / "include"
    flags = [
        "-std=c++20" if torch.__version__ >= "2.10" else "-std=c++17", "-fsyntax-only", "-DSIM_FORCE_OVERRIDE",
        "-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include"),
        "-isystem", sysconfig.get_paths()["include"],
    ]  # fmt: skip
    for name in ("device.cpp", "allocator.cpp"):
        (source,) = [path for path in build.sources() if path.name == name]
        ended = subprocess.run(
            [build._compiler(), *flags, str(source)], capture_output=True, text=True, check=False, timeout=600
        )

        assert 0 == ended.returncode, ended.stderr[-3000:]


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as directory:
        return subprocess.run(
            [sys.executable, "-c", program],
            cwd=directory, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip


def test_without_an_active_device_the_way_to_it_is_told() -> None:
    """Asking for the current device loads nothing."""
    calls: list[Callable[[], object]] = [device.current_device, lambda: device.set_device(1)]
    if build.loaded() is not None:
        pytest.skip("another test of this process has loaded the extension")
    for ask in calls:
        with pytest.raises(EnvironmentUnavailable, match=r"activation\.activate\(\)"):
            ask()
