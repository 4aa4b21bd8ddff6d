"""
The devices of this machine, their backends, and how many cases fit on them at the same time.

Nothing happens at import: collecting cases touches no device.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.harness.processes.cuda_driver import counted_in_a_child
from fsdp_conformance.harness.processes.forkserver import environment
from fsdp_conformance.plan import SIMULATED

#: Backends of accelerators, for torch versions without `get_default_backend_for_device`.
_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl", "hpu": "hccl", "mps": "gloo"}

#: The backend of the simulated accelerator, which torch knows only where the device is active.
SIMULATED_BACKEND = "cpu:gloo,sim:simccl"

#: The backend of ranks that share devices: NCCL wants one device for each rank, gloo copies through host memory.
SHARED_BACKEND = "gloo"

#: How many devices simulated by each rank there are (`simulator.activation.NUM_DEVICES`).
_SIMULATED_DEVICES = "FSDP_CONFORMANCE_SIM_DEVICES"

#: What a warm process imports first, so that the ranks forked from it know the device type. Given by name, because the
#: simulator imports this package. CPU ranks have a warm process without it: a device type cannot be unloaded.
_PRELOAD = {SIMULATED: ("fsdp_conformance.simulator.activate_on_import",)}


def device_count(device_type: str) -> int:
    """
    The number of devices of that type that this process sees; for the CPU, the cores that it may run on.

    CUDA is not started here: torch asks NVML for the number of GPUs, or a child does. The simulated accelerator has
    devices only in processes in which it is active.
    """
    if device_type == "cpu":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        module = torch.get_device_module(device_type)
    except RuntimeError:
        return 0
    with asked_without_starting_cuda():
        return int(module.device_count()) if module.is_available() else 0


@contextmanager
def asked_without_starting_cuda() -> Iterator[None]:
    """A context in which torch says how many GPUs there are without starting CUDA in this process."""
    with environment({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}), counted_in_a_child():
        yield


def present_accelerator() -> torch.device | None:
    """
    The accelerator's type, as a device without an index, or None if this process sees no device of one.

    `torch.accelerator.current_accelerator` alone does not say that: without an accelerator, torch 2.6 raises, and later
    versions name the one that torch was built for. The engine, which stands alone, has the same function.
    """
    with asked_without_starting_cuda():
        # Before torch 2.7, `torch.accelerator` asks the driver by itself.
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def is_accelerator(device_type: str) -> bool:
    """True if devices of that type are numbered and a rank computes on one of them. The CPU is not."""
    return device_type != "cpu"


def is_scarce(device_type: str) -> bool:
    """True if ranks own devices of that type one by one. Cores are shared, and each rank simulates its own devices."""
    return device_type not in ("cpu", SIMULATED)


def begins_slowly(device_type: str) -> bool:
    """
    True if a rank takes so long to get a device ready that it does so ahead, while the case before runs.

    Real accelerators have a driver, contexts and communicators to start.
    """
    return is_scarce(device_type)


def backend_for(device_type: str, *, shared: bool = False) -> str:
    """
    The communication backend of that device type, as torch names it; with `shared`, for ranks that share devices.

    Raises EnvironmentUnavailable if torch knows none or was built without it.
    """
    if device_type == SIMULATED:
        return SIMULATED_BACKEND
    if shared:
        return SHARED_BACKEND
    ask = getattr(distributed, "get_default_backend_for_device", None)
    backend = str(ask(device_type)) if ask is not None else _BACKENDS.get(device_type, "")
    if not backend or not distributed.is_backend_available(backend):
        raise EnvironmentUnavailable(
            f"this torch ({torch.__version__}) was built without a backend for device type {device_type!r} "
            f"(backend={backend or None!r}). Use another --device, or a torch with distributed support for it."
        )
    return backend


def device_of(device_type: str, rank: int) -> torch.device:
    """
    The device that a rank computes on. Ranks share devices if there are fewer devices than ranks.

    Raises EnvironmentUnavailable if there is no device.
    """
    if not is_accelerator(device_type):
        return torch.device(device_type)
    count = device_count(device_type)
    if count == 0:
        raise EnvironmentUnavailable(f"no device of type {device_type!r} is present [rank {rank}]")
    return torch.device(device_type, rank % count)


def preload(device_type: str) -> tuple[str, ...]:
    """Modules that the warm process of ranks on that device type imports first."""
    return _PRELOAD.get(device_type, ())


def preload_environment(device_type: str, *, shared: bool = False) -> Mapping[str, str]:
    """
    Variables that select a separate warm process for ranks on that device type; empty if they need none.

    With `shared`, each rank simulates a machine with one device, as all of them share it.
    """
    if device_type not in _PRELOAD:
        return {}
    return {"FSDP_CONFORMANCE_WARM_DEVICE": device_type, **({_SIMULATED_DEVICES: "1"} if shared else {})}


def activate(device_type: str) -> None:
    """
    Make the device type known to torch in this process. Does nothing for torch's own types.

    Raises EnvironmentUnavailable if the simulated accelerator cannot be built.
    """
    for name in preload(device_type):
        importlib.import_module(name)


def marker(device_type: str) -> Callable[[], Any] | None:
    """
    Return a function that records an event in the calling thread's current stream.

    None on devices where waiting for a collective does not go through a stream.
    """
    make = getattr(getattr(torch, device_type, None), "Event", None) if is_scarce(device_type) else None
    if make is None:
        return None

    def mark() -> Any:
        event = make()
        event.record()
        return event

    return mark


def use_device(device: torch.device) -> None:
    """Make an accelerator's device the current one of this process."""
    if is_accelerator(device.type):
        torch.get_device_module(device.type).set_device(device)


def present_environments(device_type: str) -> tuple[frozenset[str], int | None]:
    """
    The members of `case.ENVIRONMENTS` that are present, and how many ranks the devices can hold (None: any number).

    Call it when a case is about to run, never at collection.
    """
    present = {name for name in ("gloo", "nccl") if distributed.is_backend_available(name)}
    if not is_accelerator(device_type):
        return frozenset(present), None
    if device_type == SIMULATED:
        # Nothing is built here: the simulator itself finds out if it can be built.
        return frozenset({"gloo", "accelerator", "pinned_memory", "stream_order"}), None
    count = device_count(device_type)
    if count == 0:
        return frozenset(present - {"nccl"}), 0
    present.add("accelerator")
    if device_type == "cuda":
        present |= {"cuda", "pinned_memory"}
    return frozenset(present), count


def slots(device_type: str, world_size: int, *, shared: bool = False, per_device: int = 1) -> int:
    """
    The number of cases of that world size that fit at the same time, at least 1; `per_device` may use one device.

    Cases divide an accelerator's devices; where ranks share them, there is one case for each device. On the CPU and the
    simulated accelerator ranks share the cores, and spend most of a case waiting for each other: one case per core
    keeps the cores busy.
    """
    cores = max(1, device_count("cpu"))
    if not is_scarce(device_type):
        return cores
    count = device_count(device_type)
    if shared:
        return max(1, count)
    num_disjoint = count // max(1, world_size)
    # Beyond that, cases on one device would wait for cores.
    return max(1, num_disjoint, min(num_disjoint * per_device, cores))
