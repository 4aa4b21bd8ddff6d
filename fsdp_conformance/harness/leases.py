"""
Leases on devices: how many cases use a GPU at the same time, whatever process runs them.

A case takes a slot on each of as many devices as it has ranks, so no two of its ranks share one. By default a device
has one slot. With more, ranks of different cases share a device: each has its own context and allocator, and
NCCL asks for distinct devices only within a case.

A slot is a file lock, so it ends with its holder, however the holder ends. Locks are named after the device (its UUID
if NVML tells it), not after its number in CUDA_VISIBLE_DEVICES: "device 0" of two callers may be two GPUs or one. A
case gets devices from the caller's own list. A case that needs a whole device shares it with no slot of another
run. The CPU and the simulated accelerator need no leases, because ranks share cores.

Callers take their locks one at a time, so that small cases do not starve one that needs all devices, and so that two
callers never each hold half of what they need.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.harness import device_memory, devices
from fsdp_conformance.harness.deadlines import remaining
from fsdp_conformance.harness.device_memory import RANK_MIB, DeviceMemory

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

#: The most slots that `--slots-per-device auto` makes. More ranks on a device would mostly wait for each other.
MOST_AUTO = 4

_RETRY_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """Devices on which a case holds a slot each, while the lease is held."""

    devices: tuple[str, ...] = ()
    """The devices as the caller's own list names them; empty for the CPU."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that make a rank see only these devices."""


@contextmanager
def lease(
    device_type: str, count: int, *, slots: int = 1, among: Sequence[str] = (), timeout_s: float = WAIT_S
) -> Iterator[Lease]:
    """
    Hold a slot on `count` devices of that type; 0 for ranks that share all of them.

    A device has `slots` of them (0: see `slots_of`). With `among`, only these devices are taken. If the devices of a
    type cannot be hidden, all of them are leased together. Raises EnvironmentUnavailable if fewer than `count` devices
    are visible, or if others hold them for longer than `timeout_s`.
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
    directory = lease_directory()
    if variable is None:
        with hold([f"{device_type}-all"], 1, directory=directory, timeout_s=timeout_s):
            yield Lease(devices=tuple(names))
        return
    candidates = [name for name in names if not among or name in among]
    slots = slots_of(device_type, slots)

    def shortage(index: int) -> str:
        return _shortage(candidates[index], memory_of(device_type, candidates[index])) if slots > 1 else ""

    locks = lock_names(device_type, candidates)
    with hold(locks, count, slots=slots, shortage=shortage, directory=directory, timeout_s=timeout_s) as held:
        chosen = tuple(candidates[index] for index in held)
        yield Lease(devices=chosen, variables={variable: ",".join(chosen)})


def again(device_type: str, before: Lease, *, slots: int = 1) -> ExitStack | None:
    """A new lease on the same devices, to be closed; None if another process has one of them."""
    with ExitStack() as held:
        count = len(before.devices)
        try:
            held.enter_context(lease(device_type, count, slots=slots, among=before.devices, timeout_s=0.0))
        except EnvironmentUnavailable:
            return None
        return held.pop_all()


@contextmanager
def hold(
    names: Sequence[str],
    count: int,
    *,
    slots: int = 1,
    shortage: Callable[[int], str] = lambda index: "",
    directory: Path,
    timeout_s: float,
) -> Iterator[tuple[int, ...]]:
    """
    Hold a slot of any `count` of the devices `names`, those with the fewest ranks; yields their indices, ascending.

    `shortage` says why a device of that index cannot take another rank now, or "". Raises EnvironmentUnavailable after
    `timeout_s`, holding nothing.
    """
    deadline = time.monotonic() + timeout_s
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with ExitStack() as locks:
        held: list[int] = []
        short: dict[int, str] = {}
        try:
            with FileLock(directory / "turn.lock", timeout=timeout_s):
                while len(held) < count:
                    short = {index: text for index in range(len(names)) if (text := shortage(index))}
                    free = []
                    for index in set(range(len(names))) - {*held, *short}:
                        taken = _free_slot(directory / names[index], slots)
                        if taken is not None:
                            free.append((taken.neighbours, index, taken))
                    for _, index, taken in sorted(free, key=lambda item: item[:2]):
                        if len(held) < count:
                            locks.enter_context(taken.resources)
                            held.append(index)
                        else:
                            taken.resources.close()
                    if len(held) < count:
                        if remaining(deadline) == 0:
                            raise Timeout(str(directory))
                        time.sleep(_RETRY_S)
        except Timeout as error:
            lacking = "; ".join(short.values())
            raise EnvironmentUnavailable(
                f"only {len(held)} of {count} devices became free within {timeout_s:.0f} s; other cases hold the rest "
                f"[locks in {directory}]. "
                + (f"{lacking}. End what uses it, or choose fewer --slots-per-device. " if lacking else "")
                + "Run fewer workers, or end the processes that hold them."
            ) from error
        yield tuple(sorted(held))


@dataclass(frozen=True, slots=True)
class _Slot:
    """A slot of a device."""

    resources: ExitStack
    neighbours: int
    """The number of other slots of the device that are taken."""


def _free_slot(device: Path, slots: int) -> _Slot | None:
    """A free slot of the device whose locks begin with that path; None if there is none."""
    with ExitStack() as resources:
        # The holder of a device's only slot must be alone on it, even if another run has several slots for each device.
        if not _locked(resources, device.with_name(f"{device.name}.lock"), shared=slots > 1):
            return None
        if slots == 1:
            return _Slot(resources.pop_all(), 0)
        free: list[ExitStack] = []
        for number in range(slots):
            slot = resources.enter_context(ExitStack())
            if _locked(slot, device.with_name(f"{device.name}.slot{number}.lock"), shared=False):
                free.append(slot)
        if not free:
            return None
        for other in free[1:]:
            other.close()
        return _Slot(resources.pop_all(), slots - len(free))


def _locked(resources: ExitStack, path: Path, *, shared: bool) -> bool:
    """Lock the file until `resources` end, unless another process has locked it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    resources.callback(os.close, descriptor)
    return True


def lease_directory() -> Path:
    """The directory of the locks."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    return Path(directory) if directory else Path(tempfile.gettempdir()) / f"fsdp-conformance-leases-{os.getuid()}"


def can_hide(device_type: str) -> bool:
    """True if a rank can be shown some devices of that type and not others."""
    return device_type in _VISIBLE


def slots_of(device_type: str, slots: int) -> int:
    """
    The number of slots of a device: `slots`, or if that is 0, what the memory of the smallest device holds.
        Raises EnvironmentUnavailable if the memory of a device is too small for `slots`.
    """
    if slots == 1 or not devices.is_scarce(device_type):
        return 1
    if not can_hide(device_type):
        if slots > 1:
            raise EnvironmentUnavailable(
                f"--slots-per-device must be 1 on devices of type {device_type!r}, got {slots}: they cannot be hidden "
                "from ranks one by one, so one case at a time has all of them."
            )
        return 1
    memories = {name: memory_of(device_type, name) for name in visible_devices(device_type)}
    total_mib = {name: memory.total_mib for name, memory in memories.items() if memory is not None}
    if slots == 0:
        # A device of unknown memory has one.
        most = [total // RANK_MIB for total in total_mib.values()] if memories.keys() == total_mib.keys() else [1]
        return max(1, min([MOST_AUTO, *most]))
    for name, total in total_mib.items():
        if slots > max(1, total // RANK_MIB):
            raise EnvironmentUnavailable(
                f"--slots-per-device must be at most {max(1, total // RANK_MIB)} here, got {slots}: device {name} has "
                f"{total} MiB of memory, and a rank may take {RANK_MIB} MiB. Choose fewer, or auto."
            )
    return slots


def memory_of(device_type: str, name: str) -> DeviceMemory | None:
    """The memory of a device, as the caller's own list names it; None if it is not known."""
    return device_memory.memory_of(_identity(name, _uuids())) if device_type == "cuda" else None


def _shortage(name: str, memory: DeviceMemory | None) -> str:
    """The reason why the device cannot take another rank, or ""."""
    if memory is None or memory.free_mib >= RANK_MIB:
        return ""
    return f"device {name} has {memory.free_mib} MiB of free memory, and a rank may take {RANK_MIB} MiB"


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
    return [f"{device_type}-{_identity(name, uuids)}".replace(os.sep, "_") for name in names]


def _identity(name: str, uuids: Sequence[str]) -> str:
    """The UUID of the device that a caller's list names by number, UUID, or the beginning of one; or that name."""
    if name.isdigit():
        return uuids[int(name)] if int(name) < len(uuids) else name
    # CUDA_VISIBLE_DEVICES may contain abbreviated UUIDs.
    full = [item for item in uuids if item.startswith(name)]
    return full[0] if len(full) == 1 else name


def _uuids() -> list[str]:
    """The UUIDs of all GPUs in the driver's order, without starting CUDA; empty if torch cannot tell."""
    ask = getattr(torch.cuda, "_raw_device_uuid_nvml", None)
    try:
        return [str(uuid) for uuid in ask() or []] if ask is not None else []
    except OSError:
        return []  # no driver: a program's GPUs may be simulated
