"""
Leases on devices: no two cases use one GPU, whatever process runs them.

A lease is a file lock per device, so it ends with its holder, however the holder ends. Locks are named after the device
(its UUID if NVML tells it), not after its number in CUDA_VISIBLE_DEVICES: "device 0" of two callers may be two GPUs or
one. A case gets devices from the caller's own list. The CPU and the simulated accelerator need no leases, because ranks
share cores.

Callers take their locks one at a time, so that small cases do not starve one that needs all devices, and so that two
callers never each hold half of what they need.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.harness import devices
from fsdp_conformance.harness.deadlines import remaining

#: Names the directory of the locks; by default it is this user's, among the temporary files.
DIRECTORY_VARIABLE = "FSDP_CONFORMANCE_LEASE_DIR"

#: The variable that hides devices of a type from a process.
_VISIBLE = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "hpu": "HABANA_VISIBLE_MODULES",
}

#: How long a case waits for devices: longer than the cases of all other workers may take, one after another.
WAIT_S = 3600.0

_RETRY_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """Devices that no other case uses while the lease is held."""

    devices: tuple[str, ...] = ()
    """As the caller's own list names them; empty for the CPU."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that make a rank see only these devices."""


@contextmanager
def lease(device_type: str, count: int, *, timeout_s: float = WAIT_S) -> Iterator[Lease]:
    """
    Hold `count` devices of that type; 0 for ranks that share all of them.

    If the devices of a type cannot be hidden, all of them are leased together. Raises EnvironmentUnavailable if fewer
    than `count` devices are visible, or if others hold them for longer than `timeout_s`.
    """
    if count == 0 or not devices.is_scarce(device_type):
        yield Lease()
        return
    names = visible_devices(device_type)
    if len(names) < count:
        raise EnvironmentUnavailable(
            f"expected {count} visible devices of type {device_type!r}, got {len(names)}. Choose a smaller world size, "
            f"or make more devices visible ({_VISIBLE.get(device_type, 'the device variable')})."
        )
    variable = _VISIBLE.get(device_type)
    locks = lock_names(device_type, names) if variable is not None else [f"{device_type}-all"]
    with hold(locks, count if variable is not None else 1, directory=lease_directory(), timeout_s=timeout_s) as held:
        chosen = tuple(names[index] for index in held) if variable is not None else tuple(names)
        yield Lease(devices=chosen, variables={variable: ",".join(chosen)} if variable is not None else {})


@contextmanager
def hold(names: Sequence[str], count: int, *, directory: Path, timeout_s: float) -> Iterator[tuple[int, ...]]:
    """
    Hold any `count` of the locks `names`; yields their indices, ascending.

    Raises EnvironmentUnavailable after `timeout_s`, holding nothing.
    """
    deadline = time.monotonic() + timeout_s
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with ExitStack() as locks:
        held: list[int] = []
        try:
            with FileLock(directory / "turn.lock", timeout=timeout_s):
                while len(held) < count:
                    for index, name in enumerate(names):
                        if index in held or len(held) == count:
                            continue
                        lock = FileLock(directory / f"{name}.lock")
                        try:
                            locks.enter_context(lock.acquire(blocking=False))
                        except Timeout:
                            continue
                        held.append(index)
                    if len(held) < count:
                        if remaining(deadline) == 0:
                            raise Timeout(str(directory))
                        time.sleep(_RETRY_S)
        except Timeout as error:
            raise EnvironmentUnavailable(
                f"only {len(held)} of {count} devices became free within {timeout_s:.0f} s; other cases hold the rest "
                f"[locks in {directory}]. Run fewer workers, or end the processes that hold them."
            ) from error
        yield tuple(sorted(held))


def lease_directory() -> Path:
    """The directory of the locks."""
    named = os.environ.get(DIRECTORY_VARIABLE)
    return Path(named) if named else Path(tempfile.gettempdir()) / f"fsdp-conformance-leases-{os.getuid()}"


def visible_devices(device_type: str) -> list[str]:
    """The devices that this process may use, named as its own environment names them."""
    count = devices.device_count(device_type)
    listed = os.environ.get(_VISIBLE.get(device_type, ""))
    if listed is None:
        return [str(index) for index in range(count)]
    return [entry.strip() for entry in listed.split(",")][:count]


def lock_names(device_type: str, names: Sequence[str]) -> list[str]:
    """A name for each device, the same for every caller on this machine."""
    uuids = _uuids() if device_type == "cuda" else []
    locks = []
    for name in names:
        uuid = uuids[int(name)] if name.isdigit() and int(name) < len(uuids) else name
        # CUDA_VISIBLE_DEVICES may contain abbreviated UUIDs.
        full = [item for item in uuids if item.startswith(uuid)] if not uuid.isdigit() else []
        locks.append(f"{device_type}-{full[0] if len(full) == 1 else uuid}".replace(os.sep, "_"))
    return locks


def _uuids() -> list[str]:
    """The UUIDs of all GPUs in the driver's order, without starting CUDA; empty if torch cannot tell."""
    ask = getattr(torch.cuda, "_raw_device_uuid_nvml", None)
    try:
        return [str(uuid) for uuid in ask() or []] if ask is not None else []
    except OSError:
        return []  # no driver: a program's GPUs may be simulated
