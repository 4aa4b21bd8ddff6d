"""Devices and leases: what is counted, what is held, and that a lease ends with its holder."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.harness import device_memory, devices, leases
from fsdp_conformance.harness.device_memory import RANK_MIB, DeviceMemory

PATIENCE_S = 240.0
GPUS = ["0", "1", "2", "3"]


def test_cpu_counts_cores_and_speaks_gloo() -> None:
    """The cores are those that this process may use."""
    assert len(os.sched_getaffinity(0)) == devices.device_count("cpu")
    assert devices.backend_for("cpu") == "gloo"
    assert torch.device("cpu") == devices.device_of("cpu", 3)


def test_absent_device_types() -> None:
    """An absent type has no devices, and its name is accepted until a device is requested."""
    assert devices.device_count("nosuchdevice") == 0
    with pytest.raises(EnvironmentUnavailable, match="no device of type 'nosuchdevice' is present"):
        devices.device_of("nosuchdevice", 0)


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="torch was built with NCCL")
def test_backend_that_torch_was_built_without() -> None:
    """NCCL on a CPU build is a missing environment, with what to do."""
    with pytest.raises(EnvironmentUnavailable, match=r"device type 'cuda' \(backend='nccl'\)"):
        devices.backend_for("cuda")


def test_environments_that_are_present() -> None:
    """The CPU holds any number of ranks; a type without devices holds none."""
    assert ("gloo" in devices.present_environments("cpu")[0], devices.present_environments("cpu")[1]) == (True, None)
    assert devices.present_environments("nosuchdevice")[1] == 0


def test_slots_divide_an_accelerators_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight GPUs hold two cases of three ranks; too few hold one, which then says what it lacks."""
    monkeypatch.setattr(devices, "device_count", lambda device_type: 8)

    assert [devices.slots("cuda", size) for size in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]
    # ranks share cores
    assert devices.slots("cpu", 4) == 8
    # several cases may use a device, as long as there are cores
    assert [devices.slots("cuda", size, per_device=2) for size in (1, 2, 3, 8, 16)] == [8, 8, 4, 2, 1]
    # and GPUs if they are told to: a case for each
    assert [devices.slots("cuda", size, shared=True) for size in (2, 16)] == [8, 8]


def test_ranks_that_share_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold none, see all, speak gloo, and are dealt to what there is; on the simulated one there is one device."""
    monkeypatch.setenv(leases.DIRECTORY_VARIABLE, str(tmp_path / "leases"))
    monkeypatch.setattr(devices, "device_count", lambda device_type: 2)
    with leases.lease("cuda", 0) as held:
        assert (held.variables, held.devices) == ({}, ())

    assert not (tmp_path / "leases").exists()
    assert devices.backend_for("cuda", shared=True) == "gloo"
    assert [devices.device_of("cuda", rank).index for rank in range(4)] == [0, 1, 0, 1]
    alone, shared = devices.preload_environment("sim"), devices.preload_environment("sim", shared=True)
    assert {**alone, "FSDP_CONFORMANCE_SIM_DEVICES": "1"} == shared
    assert devices.preload_environment("cuda", shared=True) == {}


def test_what_marks_the_work_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded event where a wait is one of the stream; nothing where the host itself waits."""
    recorded: list[str] = []
    event = types.SimpleNamespace(record=lambda: recorded.append("here"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    mark = devices.marker("cuda")

    assert mark is not None
    assert (mark(), recorded) == (event, ["here"])
    assert [devices.marker(name) for name in ("cpu", "sim", "nosuchdevice")] == [None] * 3


def test_cpu_needs_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No lock is taken, and no file is made."""
    monkeypatch.setenv(leases.DIRECTORY_VARIABLE, str(tmp_path / "leases"))
    with leases.lease("cpu", 4) as held:
        assert (held.variables, held.devices) == ({}, ())

    assert not (tmp_path / "leases").exists()


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four GPUs, as far as leases can tell."""
    monkeypatch.setenv(leases.DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(devices, "device_count", lambda device_type: 4)
    monkeypatch.setattr(leases, "_uuids", list)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("gpus")
def test_two_leases_share_no_device() -> None:
    """Each case gets its own devices and sees no others."""
    with leases.lease("cuda", 2) as first, leases.lease("cuda", 2) as second:
        assert not set(first.devices) & set(second.devices)
        assert {"CUDA_VISIBLE_DEVICES": ",".join(second.devices)} == second.variables
        with (
            pytest.raises(EnvironmentUnavailable, match="only 0 of 1 devices became free"),
            leases.lease("cuda", 1, timeout_s=0.0),
        ):
            raise AssertionError("a fifth device was leased")
    with leases.lease("cuda", 4) as everything:
        assert tuple(GPUS) == everything.devices


@pytest.mark.usefixtures("gpus")
def test_lease_is_indexed_into_the_callers_own_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES=7,5 has the devices 7 and 5, and no others."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7, 5")
    monkeypatch.setattr(devices, "device_count", lambda device_type: 2)
    with leases.lease("cuda", 2) as held:
        assert held.variables == {"CUDA_VISIBLE_DEVICES": "7,5"}
    with (
        pytest.raises(EnvironmentUnavailable, match="expected 3 visible devices of type 'cuda', got 2"),
        leases.lease("cuda", 3),
    ):
        raise AssertionError("a third device was leased")


@pytest.mark.usefixtures("gpus")
def test_type_that_cannot_be_hidden_is_leased_as_a_whole() -> None:
    """Without a variable that hides devices, one case at a time has them all."""
    with leases.lease("mps", 1) as held:
        assert held.variables == {}
        with pytest.raises(EnvironmentUnavailable), leases.lease("mps", 1, timeout_s=0.0):
            raise AssertionError("the type was leased twice")


def test_locks_are_named_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number, a UUID and its beginning name the same GPU."""
    monkeypatch.setattr(leases, "_uuids", lambda: ["GPU-aaaa-1", "GPU-bbbb-2"])

    assert leases.lock_names("cuda", ["1", "GPU-bbbb-2", "GPU-bbbb"]) == ["cuda-GPU-bbbb-2"] * 3
    assert leases.lock_names("cuda", ["0", "7"]) == ["cuda-GPU-aaaa-1", "cuda-7"]


def test_large_lease_is_not_starved(tmp_path: Path) -> None:
    """A caller that waits for all devices gets what is given back before callers that came later."""
    order: list[str] = []
    started = threading.Event()

    def large() -> None:
        started.set()
        with leases.hold(GPUS, 4, directory=tmp_path, timeout_s=PATIENCE_S):
            order.append("large")

    with leases.hold(GPUS, 1, directory=tmp_path, timeout_s=PATIENCE_S):
        thread = threading.Thread(target=large)
        thread.start()
        started.wait(PATIENCE_S)
        # the large one has the turn as soon as this cannot be had at once
        while True:
            try:
                with leases.hold(GPUS, 1, directory=tmp_path, timeout_s=0.0):
                    continue
            except EnvironmentUnavailable:
                break
        order.append("small given back")
    thread.join(PATIENCE_S)

    assert order == ["small given back", "large"]


@pytest.mark.usefixtures("gpus")
def test_several_slots_on_a_device() -> None:
    """Two cases of four ranks share four devices; no case has two slots of one, and a fifth rank finds none."""
    with leases.lease("cuda", 4, slots=2) as first, leases.lease("cuda", 3, slots=2) as second:
        assert (first.devices, second.devices) == (tuple(GPUS), tuple(GPUS[:3]))
        with (
            pytest.raises(EnvironmentUnavailable, match="only 1 of 2 devices became free"),
            leases.lease("cuda", 2, slots=2, timeout_s=0.0),
        ):
            raise AssertionError("two ranks of a case share a device, or three cases do")
        with leases.lease("cuda", 1, slots=2) as third:
            assert third.devices == ("3",)


@pytest.mark.usefixtures("gpus")
def test_the_emptiest_devices_are_leased_first() -> None:
    """Cases spread before they share."""
    with leases.lease("cuda", 3, slots=3), leases.lease("cuda", 2, slots=3) as second:
        assert second.devices == ("0", "3")


@pytest.mark.usefixtures("gpus")
def test_whoever_needs_a_device_alone_has_it_alone() -> None:
    """This also excludes a run that counts several slots; two such runs share the devices."""
    with (
        leases.lease("cuda", 4),
        pytest.raises(EnvironmentUnavailable, match="only 0 of 1"),
        leases.lease("cuda", 1, slots=4, timeout_s=0.0),
    ):
        raise AssertionError("a device was shared with a case that needs it alone")
    with leases.lease("cuda", 4, slots=2):
        with (
            pytest.raises(EnvironmentUnavailable, match="only 0 of 1"),
            leases.lease("cuda", 1, timeout_s=0.0),
        ):
            raise AssertionError("a case got a device alone that another one uses")
        with leases.lease("cuda", 4, slots=3) as other:
            assert other.devices == tuple(GPUS)


@pytest.mark.usefixtures("gpus")
def test_a_lease_on_named_devices() -> None:
    """These or none."""
    with leases.lease("cuda", 2, among=("1", "3")) as held:
        assert held.devices == ("1", "3")
        with (
            pytest.raises(EnvironmentUnavailable, match="only 1 of 2"),
            leases.lease("cuda", 2, among=("0", "3"), timeout_s=0.0),
        ):
            raise AssertionError("a device was leased twice")
    with leases.lease("cuda", 4) as everything:
        assert everything.devices == tuple(GPUS)


def with_memory(monkeypatch: pytest.MonkeyPatch, *free_mib: int, total_mib: int = 16384) -> None:
    """As NVML says of the GPUs, in order; a negative number: it knows nothing."""

    def memory_of(device_type: str, name: str) -> DeviceMemory | None:
        free = free_mib[int(name)]
        return DeviceMemory(total_mib=total_mib, free_mib=free) if free >= 0 else None

    monkeypatch.setattr(leases, "memory_of", memory_of)


@pytest.mark.usefixtures("gpus")
def test_slots_that_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Automatic ones fit the memory, up to a limit; too many are refused with what would fit."""
    with_memory(monkeypatch, 0, 0, 0, 0, total_mib=3 * RANK_MIB)
    assert [leases.slots_of("cuda", count) for count in (0, 1, 2, 3)] == [3, 1, 2, 3]
    with pytest.raises(EnvironmentUnavailable, match=r"at most 3 here, got 4: device 0 has 12288 MiB .* Choose fewer"):
        leases.slots_of("cuda", 4)
    with_memory(monkeypatch, 0, 0, 0, 0, total_mib=100 * RANK_MIB)
    assert leases.slots_of("cuda", 0) == leases.MOST_AUTO
    # without NVML nothing is known: one by itself, and what the user says
    with_memory(monkeypatch, 0, -1, 0, 0, total_mib=100 * RANK_MIB)
    assert [leases.slots_of("cuda", count) for count in (0, 7)] == [1, 7]
    with_memory(monkeypatch, 0, 0, 0, 0, total_mib=RANK_MIB // 2)
    assert leases.slots_of("cuda", 0) == 1
    assert [leases.slots_of(name, 0) for name in ("cpu", "sim", "mps")] == [1, 1, 1]
    with pytest.raises(EnvironmentUnavailable, match="must be 1 on devices of type 'mps', got 2"):
        leases.slots_of("mps", 2)


@pytest.mark.usefixtures("gpus")
def test_a_device_that_somebody_else_has_filled_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """If several cases share devices; the error names it, and what to do."""
    with_memory(monkeypatch, 9000, 100, 9000, 9000)
    with leases.lease("cuda", 3, slots=2) as held:
        assert held.devices == ("0", "2", "3")
    with (
        pytest.raises(
            EnvironmentUnavailable, match=r"only 3 of 4 .* device 1 has 100 MiB of free memory.*End what uses"
        ),
        leases.lease("cuda", 4, slots=2, timeout_s=0.0),
    ):
        raise AssertionError("a full device was leased")
    # alone on a device, a case finds out by itself
    with leases.lease("cuda", 4) as everything:
        assert everything.devices == tuple(GPUS)


class Nvml:
    """The library, with one GPU."""

    def __init__(self, *, works: bool = True) -> None:
        self.works = works

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        return 0 if uuid == b"GPU-aaaa" else 6

    def nvmlDeviceGetMemoryInfo(self, handle: Any, numbers: Any) -> int:
        if not self.works:
            return 999
        numbers._obj.total, numbers._obj.free = 80 << 30, 3 << 20
        return 0


def test_memory_as_nvml_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs are identified by UUID, whatever the caller's list calls them; an absent GPU or library gives None."""
    monkeypatch.setattr(device_memory, "_nvml", Nvml)
    monkeypatch.setattr(leases, "_uuids", lambda: ["GPU-aaaa", "GPU-bbbb"])

    assert leases.memory_of("cuda", "0") == DeviceMemory(total_mib=80 << 10, free_mib=3)
    assert leases.memory_of("cuda", "GPU-aa") == leases.memory_of("cuda", "0")
    assert (leases.memory_of("cuda", "1"), leases.memory_of("xpu", "0")) == (None, None)
    monkeypatch.setattr(device_memory, "_nvml", lambda: Nvml(works=False))
    assert device_memory.memory_of("GPU-aaaa") is None
    monkeypatch.setattr(device_memory, "_nvml", lambda: None)
    assert device_memory.memory_of("GPU-aaaa") is None


@pytest.mark.nightly
@pytest.mark.slow
def test_lease_ends_with_its_holder(tmp_path: Path) -> None:
    """A holder that is killed holds nothing."""
    code = (
        "import sys, pathlib\n"
        "from fsdp_conformance.harness import leases\n"
        "with leases.hold(['0', '1'], 2, directory=pathlib.Path(sys.argv[1]), timeout_s=5):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(EnvironmentUnavailable), leases.hold(["0", "1"], 1, directory=tmp_path, timeout_s=0.0):
            raise AssertionError("a device was leased twice")
        holder.kill()
        holder.wait(PATIENCE_S)
        with leases.hold(["0", "1"], 2, directory=tmp_path, timeout_s=PATIENCE_S) as held:
            assert held == (0, 1)
    finally:
        holder.kill()
        holder.communicate(timeout=PATIENCE_S)


@pytest.mark.nightly
@pytest.mark.slow
def test_importing_the_harness_touches_no_device() -> None:
    """Collecting cases imports the harness: no device is counted, and whether CUDA is there NVML is asked alone."""
    code = (
        "import os, torch\n"
        "asked = []\n"
        "torch.cuda.device_count = lambda: asked.append('count') or 0\n"
        "torch.cuda.is_available = lambda: asked.append(os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK')) or False\n"
        "from fsdp_conformance.harness import testcase\nfrom fsdp_conformance.harness.processes import cuda_driver\n"
        "print(sorted(set(asked)), torch.cuda.is_initialized(), cuda_driver.cuda_is_initialised())\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )

    assert answer.stdout.strip() == "['1'] False False"
