"""
Process groups that record every collective, in place of torch's own, and change nothing else.

`register_recording_backend()` makes torch create `RecordingProcessGroup`s, and makes "conformance" a name for the
backends of the device (gloo for the CPU; gloo and NCCL for CUDA). From then on every group of the process is recorded:
the default group, `new_group`, the dimensions of a device mesh, splits, and groups for which the implementation names a
backend itself. The backends underneath are torch's: `dist.get_backend()` returns "gloo", not "conformance", because
implementations choose collectives by it (all-to-all on gloo, averaging on NCCL, a new group for gloo next to CUDA).

Recorded: whatever Python calls on a group, and what C++ calls through it (DDP's reducer, functional collectives,
DTensor). Not recorded: C++ that calls a backend directly, or calls a method that torch does not let Python override
(`all_gather_into_tensor_out`, an inductor op), and one-sided windows (torch 2.14). Compiled code is not covered either:
dynamo does not accept a Python subclass as a process group.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup, Work, distributed_c10d
from torch.torch_version import TorchVersion

from fsdp_conformance.errors import ConfigError, SuiteError
from fsdp_conformance.harness.context import log
from fsdp_conformance.harness.devices import SHARED_BACKEND
from fsdp_conformance.harness.recording.collective_calls import METHODS, traffic_of
from fsdp_conformance.harness.recording.collective_log import CollectiveLog, CollectiveObserver
from fsdp_conformance.harness.recording.gloo_on_devices import method_for
from fsdp_conformance.plan import SIMULATED

__all__ = [
    "BACKEND",
    "CollectiveLog",
    "CollectiveObserver",
    "RecordingProcessGroup",
    "is_recording",
    "log",
    "records_new_groups",
    "register_recording_backend",
    "require_recording",
    "unregister_recording_backend",
]

#: Before torch 2.7, C++ keeps its half of a work that is written in Python and drops the Python half, whose methods are
#: then not called: whoever waits in C++ would wait forever.
DROPS_PYTHON_WORKS = torch.__version__ < TorchVersion("2.7")

#: The backend to pass to `init_process_group`; it resolves to the backends of the device.
BACKEND = "conformance"

#: Makes the twin of a recorded group from its store, rank, size and the group itself; None: torch's process groups.
_make_twin: Callable[[Store, int, int, ProcessGroup], ProcessGroup] | None = None

#: True if ranks share devices, so that gloo carries tensors on an accelerator.
_shares_devices = False


def make_twins_with(make: Callable[[Store, int, int, ProcessGroup], ProcessGroup] | None) -> None:
    """Let `make` create the twins of recorded groups from now on; None restores torch's process groups."""
    global _make_twin
    _make_twin = make


class _AnyProcessGroup(type(ProcessGroup)):  # type: ignore[misc]
    """
    The metaclass that makes `isinstance(group, RecordingProcessGroup)` true for every process group.

    torch's own module checks `isinstance(group, ProcessGroup)` through the name that is replaced here, and groups made
    elsewhere (by C++, by a simulation) must still pass. `is_recording` tells which groups really record.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, ProcessGroup)


class TwinnedProcessGroup(ProcessGroup):
    """
    A process group with a plain twin on the same backends.

    The original of a method that is overridden in Python cannot be called on the group itself, because C++ would find
    the override; it is called on the twin. Both groups are complete, so torch's own code handles everything except
    collectives: backends by device, names, bound device, timeouts, coalescing, abort, shutdown.
    """

    def __init__(self, store: Store, rank: int, size: int, twin: ProcessGroup | None = None) -> None:
        # The constructor with a store makes a C++ object that Python cannot override (torch 2.13: "construction failed:
        # returned holder-wrapped instance is not an alias instance"), so only the twin has the store.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._twin = twin or ProcessGroup(store, rank, size)

    def get_group_store(self) -> Store:
        """The store that this group was made with."""
        return self._twin.get_group_store()

    def _register_backend(self, device: torch.device, backend_type: Any, backend: Any) -> None:
        super()._register_backend(device, backend_type, backend)
        # A group that registers a backend makes it forget any other device than its own (`new_group(device_id=)`).
        self._twin.bound_device_id = self.bound_device_id
        self._twin._register_backend(device, backend_type, backend)

    def _set_default_backend(self, backend_type: Any) -> None:
        super()._set_default_backend(backend_type)
        self._twin._set_default_backend(backend_type)

    def _set_group_name(self, name: Any) -> None:
        super()._set_group_name(name)
        self._twin._set_group_name(name)

    def _set_group_desc(self, desc: str) -> None:
        super()._set_group_desc(desc)
        self._twin._set_group_desc(desc)


class RecordingProcessGroup(TwinnedProcessGroup, metaclass=_AnyProcessGroup):
    """
    A process group that records each collective in `log()` and passes it on to its twin.

    C++ that bypasses Python reaches the same backends.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        super().__init__(store, rank, size, _make_twin(store, rank, size, self) if _make_twin is not None else None)
        self._ranks: tuple[int, ...] | None = None

    def split_group(self, *args: Any, **kwargs: Any) -> ProcessGroup | None:
        """A part of this group, recorded too."""
        part = self._twin.split_group(*args, **kwargs)
        return _recorded_group(part) if part is not None else None

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> ProcessGroup:
        """This group merged with a remote one, recorded too."""
        return _recorded_group(self._twin.merge_remote_group(*args, **kwargs))

    def global_ranks(self) -> tuple[int, ...]:
        """The group's members as global ranks."""
        if self._ranks is None:
            if self not in distributed_c10d._world.pg_group_ranks:
                return tuple(range(self.size()))  # torch is still making the group
            self._ranks = tuple(map(int, dist.get_process_group_ranks(self)))
        return self._ranks


def _recorded(name: str) -> Callable[..., Work | None]:
    """The method `name`, recorded."""

    def method(self: RecordingProcessGroup, *args: Any, **kwargs: Any) -> Work | None:
        traffic = traffic_of(name, args, kwargs, self.size())
        issue = method_for(self._twin, name, traffic.device if _shares_devices else "cpu")
        return log().carry_out(name, self, self.global_ranks(), traffic, issue, args, kwargs)

    method.__name__ = name
    method.__qualname__ = f"RecordingProcessGroup.{name}"
    return method


for _name in METHODS:
    # C++ looks a method up under its newer and then its older name, so define exactly the names that this torch has.
    if hasattr(ProcessGroup, _name):
        setattr(RecordingProcessGroup, _name, _recorded(_name))


def _recorded_group(group: ProcessGroup) -> RecordingProcessGroup:
    """A recording group on the backends of a group that C++ has made."""
    recording = RecordingProcessGroup(group.get_group_store(), group.rank(), group.size())
    recording.bound_device_id = group.bound_device_id
    for device in group._device_types:
        backend = group._get_backend(device)
        backend_type = distributed_c10d.Backend.backend_type_map.get(backend.name(), ProcessGroup.BackendType.CUSTOM)
        recording._register_backend(device, backend_type, backend)
        recording._set_default_backend(backend_type)
    recording._set_group_name(group.group_name)
    recording._set_group_desc(group.group_desc)
    return recording


def register_recording_backend(device_type: str = "cpu", *, shared: bool = False, only: str = "") -> None:
    """
    Record every process group that this process makes from now on, and make BACKEND mean the backends of `device_type`.

    On an accelerator BACKEND serves CPU tensors too. With `shared`, it is one for ranks that share devices; with
    `only`, it is that one backend. It may be called again, also for another device. Raises ConfigError if torch has no
    backend for the device type, and SuiteError if there already is a default process group that is not recorded.
    """
    if dist.is_initialized():
        require_recording()
    global _shares_devices
    _shares_devices = shared
    setattr(distributed_c10d.Backend, BACKEND.upper(), only or backends_of(device_type, shared=shared))
    if BACKEND not in distributed_c10d.Backend.backend_list:
        distributed_c10d.Backend.backend_list.append(BACKEND)
    distributed_c10d.ProcessGroup = RecordingProcessGroup  # type: ignore[misc]


def unregister_recording_backend() -> None:
    """Restore torch. Groups that are recorded stay recorded."""
    distributed_c10d.ProcessGroup = ProcessGroup  # type: ignore[misc]
    if BACKEND in distributed_c10d.Backend.backend_list:
        distributed_c10d.Backend.backend_list.remove(BACKEND)
        delattr(distributed_c10d.Backend, BACKEND.upper())


def records_new_groups() -> bool:
    """True if the process groups that this process makes from now on are recorded."""
    return distributed_c10d.ProcessGroup is RecordingProcessGroup


def is_recording(group: ProcessGroup | None = None) -> bool:
    """True if the collectives of a group (default: the default group) are recorded."""
    return type(group or dist.group.WORLD) is RecordingProcessGroup


def ensure_cpu_backend(timeout: timedelta) -> None:
    """
    Let the default group take tensors on the CPU, with gloo, if it does not. Collective.

    For the suite's own references and meetings in a run with one backend alone. The group's name, by which
    implementations choose, stays, and groups that they make themselves have that backend only.
    """
    group, cpu = dist.group.WORLD, torch.device("cpu")
    if group is None or cpu in group._device_types:
        return
    store = PrefixStore("cpu tensors", distributed_c10d._get_default_store())
    gloo = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)
    name, description = group.group_name, group.group_desc
    group._register_backend(cpu, ProcessGroup.BackendType.GLOO, gloo)
    # A group reads its name and its description from its backends, so set them in the new one, too.
    group._set_group_name(name)
    group._set_group_desc(description)


def require_recording(group: ProcessGroup | None = None) -> None:
    """
    Raise SuiteError unless the group (default: the default group) is recorded.

    Call it after `init_process_group`: if torch ever creates its groups in another way, nothing would be recorded and
    faults would never strike.
    """
    if not is_recording(group):
        raise SuiteError(
            f"collectives are not recorded: the process group is a {type(group or dist.group.WORLD).__name__}, not a "
            "RecordingProcessGroup [require_recording]. Call register_recording_backend() before init_process_group()."
        )


def backends_of(device_type: str, *, shared: bool = False) -> str:
    """
    The backends that BACKEND stands for: "gloo", or "cpu:gloo,cuda:nccl".

    Ranks that share GPUs have "gloo", as `init_process_group("gloo")` makes it, which takes CUDA tensors, too. Raises
    ConfigError if torch has no backend for the device type.
    """
    defaults = distributed_c10d.Backend.default_device_backend_map
    if device_type not in defaults:
        raise ConfigError(
            [f"device_type must have a backend in torch ({', '.join(sorted(defaults))}), got {device_type!r}"],
            where="register_recording_backend",
        )
    if shared and device_type != SIMULATED:
        return SHARED_BACKEND
    return defaults["cpu"] if device_type == "cpu" else f"cpu:{defaults['cpu']},{device_type}:{defaults[device_type]}"
