"""
Process groups, meshes and DDP under CUDA's names: what a script asks of `torch.distributed`.

There is a class for each module or class of torch's that is patched, and in it a method for each patch. A patch is for
every version of torch, unless its method says otherwise.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from fsdp_conformance.simulator.as_cuda import process_groups as made_groups
from fsdp_conformance.simulator.as_cuda.names import (
    COLLECTIVES,
    CUDA,
    CUDA_VERSION,
    asks_for_gloo,
    script_asks,
    simulated_backend,
    translated,
)
from fsdp_conformance.simulator.device import SIMULATED, process_group
from fsdp_conformance.simulator.replacements import Replacements

__all__ = ["install"]


def install(replaced: Replacements) -> None:
    """Patch everything."""
    _Functions(replaced).install()
    _Groups(replaced).install()
    _Backends(replaced).install()
    _Ddp(replaced).install()
    _Meshes(replaced).install()


class _Functions:
    """`torch.distributed`, whose functions and classes are those of `distributed_c10d`: each is replaced in both."""

    #: Before torch 2.7, a group is bound only to a device of the type "cuda", as torch sees it.
    binds_only_cuda = torch.__version__ < "2.7"

    def __init__(self, replaced: Replacements) -> None:
        self._replaced = replaced

    def install(self) -> None:
        self.init_process_group_and_new_group()
        self.is_nccl_available()
        self.is_backend_available()
        self.get_backend()
        self.get_backend_config()
        self.get_default_backend_for_device()
        self.process_group_nccl()
        self.process_group_gloo()
        self.set_pg_timeout()

    def init_process_group_and_new_group(self) -> None:
        """`backend` is translated: the first argument of init_process_group, a keyword of the others."""
        for name in ("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration"):
            self._set(**{name: self._with_backend(getattr(distributed_c10d, name))})

    def _with_backend(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def translating(*args: Any, **kwargs: Any) -> Any:
            backend = kwargs.get("backend")
            if args and isinstance(args[0], str):
                backend = args[0]
                args = (simulated_backend(args[0]), *args[1:])
            if "backend" in kwargs:
                kwargs["backend"] = simulated_backend(kwargs["backend"])
            bound = kwargs.pop("device_id", None) if self.binds_only_cuda else None
            with process_group.as_gloo(asks_for_gloo(backend)):
                made = function(*args, **kwargs)
            group = distributed_c10d._get_default_group() if made is None else made
            if bound is not None and isinstance(group, dist.ProcessGroup):
                group.bound_device_id = bound
            return made

        return translating

    def is_nccl_available(self) -> None:
        """The script has NCCL."""
        original = distributed_c10d.is_nccl_available

        def is_nccl_available() -> bool:
            return True if script_asks() else original()

        self._set(is_nccl_available=is_nccl_available)

    def is_backend_available(self) -> None:
        """The script has NCCL, asked by its name."""
        original = distributed_c10d.is_backend_available

        def is_backend_available(backend: str) -> bool:
            return True if backend.lower() == "nccl" and script_asks() else original(backend)

        self._set(is_backend_available=is_backend_available)

    def get_backend(self) -> None:
        """The script's groups have the backend that it asked for."""
        original = distributed_c10d.get_backend

        @functools.wraps(original)
        def get_backend(group: Any = None) -> Any:
            backend = original(group)
            # This function of torch's refuses all but gloo's groups.
            asks = script_asks() or sys._getframe(1).f_code.co_name == "monitored_barrier"
            if COLLECTIVES not in str(backend) or not asks:
                return backend
            target = distributed_c10d._get_default_group() if group is None else group
            return "gloo" if process_group.is_gloo(target) else "nccl"

        self._set(get_backend=get_backend)

    def get_backend_config(self) -> None:
        """For the script, with the names that it asked for."""
        original = distributed_c10d.get_backend_config

        @functools.wraps(original)
        def get_backend_config(group: Any = None) -> str:
            description = original(group)
            return _as_script_named(description) if script_asks() else description

        self._set(get_backend_config=get_backend_config)

    def get_default_backend_for_device(self) -> None:
        """GPUs have NCCL by default. Only in versions that can be asked for it."""
        original = getattr(distributed_c10d, "get_default_backend_for_device", None)
        if original is None:
            return

        def get_default_backend_for_device(device: Any) -> Any:
            backend = original(device)
            return "nccl" if backend == COLLECTIVES and script_asks() else backend

        self._set(get_default_backend_for_device=get_default_backend_for_device)

    def process_group_nccl(self) -> None:
        """Programs make NCCL's groups themselves. Only in builds for the CPU, which lack the class."""
        for module in (distributed_c10d, dist):
            if not hasattr(module, "ProcessGroupNCCL"):
                self._replaced.set(module, ProcessGroupNCCL=made_groups.process_group_nccl())

    def process_group_gloo(self) -> None:
        """Gloo's groups that programs make themselves take tensors on GPUs."""
        self._set(ProcessGroupGloo=made_groups.process_group_gloo())

    def set_pg_timeout(self) -> None:
        """
        The timeout of simulated groups is set, too: torch knows NCCL's and gloo's groups by class, and warns of others.

        Before torch 2.14, which has `set_timeout` and asks every backend.
        """
        if hasattr(dist, "set_timeout"):
            return
        original = distributed_c10d._set_pg_timeout

        @functools.wraps(original)
        def set_timeout(timeout: timedelta, group: Any = None) -> None:
            target = distributed_c10d._get_default_group() if group is None else group
            if not isinstance(target, dist.ProcessGroup):  # torch raises the error
                original(timeout, group)
                return
            devices = [device for device in target._device_types if device.type == SIMULATED]
            if len(devices) < len(target._device_types):
                original(timeout, target)
            for device in devices:
                target._get_backend(device)._set_default_timeout(timeout)

        self._replaced.set(distributed_c10d, _set_pg_timeout=set_timeout)

    def _set(self, **values: Any) -> None:
        self._replaced.set_in_all((dist.__name__,), **values)


class _Groups:
    """`ProcessGroup`."""

    def __init__(self, replaced: Replacements) -> None:
        self._replaced = replaced

    def install(self) -> None:
        self.name()
        self.barrier()
        self.sequence_numbers()

    def name(self) -> None:
        """For the script, the backend that it asked for."""
        original = dist.ProcessGroup.name

        def name(group: Any) -> str:
            backend_name: str = original(group)
            # torch's word for any backend that is not its own, and before 2.7 for a group with several.
            if backend_name not in ("custom", "undefined") or not any(
                device.type == SIMULATED for device in group._device_types
            ):
                return backend_name
            return ("gloo" if process_group.is_gloo(group) else "nccl") if script_asks() else backend_name

        self._replaced.set(dist.ProcessGroup, name=name)

    def barrier(self) -> None:
        """A group with GPUs alone meets there. In C++, only NCCL's group is asked for a GPU, others for the CPU."""
        original = dist.ProcessGroup.barrier

        @functools.wraps(original)
        def barrier(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not args and not kwargs and [device.type for device in group._device_types] == [SIMULATED]:
                options = dist.BarrierOptions()
                options.device = torch.device(SIMULATED, torch.accelerator.current_device_index())
                return original(group, options)
            return original(group, *args, **kwargs)

        self._replaced.set(dist.ProcessGroup, barrier=barrier)

    def sequence_numbers(self) -> None:
        """Simulated groups count, too; in C++ only torch's own backends do. Torch 2.14 no longer sets the count."""
        for name in ("_get_sequence_number_for_group", "_set_sequence_number_for_group"):
            if hasattr(dist.ProcessGroup, name):
                self._replaced.set(dist.ProcessGroup, **{name: self._of_backend(name)})

    @staticmethod
    def _of_backend(name: str) -> Callable[..., Any]:
        original = getattr(dist.ProcessGroup, name)

        @functools.wraps(original)
        def asking_the_backend(group: Any) -> Any:
            for device in group._device_types:
                if device.type == SIMULATED:
                    return getattr(group._get_backend(device), name)()
            return original(group)

        return asking_the_backend


class _Backends:
    """`Backend` and `BackendConfig`."""

    def __init__(self, replaced: Replacements) -> None:
        self._replaced = replaced
        self._backends: Any = distributed_c10d.Backend

    def install(self) -> None:
        self.register_backend()
        self.config_repr()

    def register_backend(self) -> None:
        """A program's own backends for CUDA, such as torch.testing's between threads, serve simulated GPUs."""
        register = vars(self._backends)["register_backend"].__func__

        @functools.wraps(register)
        def register_and_serve(cls: Any, name: str, *args: Any, **kwargs: Any) -> None:
            register(cls, name, *args, **kwargs)
            self._serve(name.lower())

        for name in self._backends._plugins:
            self._serve(name.lower())
        self._replaced.set(self._backends, register_backend=classmethod(register_and_serve))

    def _serve(self, name: str) -> None:
        capability = self._backends.backend_capability
        devices = capability.get(name, ())
        if CUDA in devices and SIMULATED not in devices:
            self._replaced.on_undo(functools.partial(capability.__setitem__, name, devices))
            capability[name] = [*devices, SIMULATED]

    def config_repr(self) -> None:
        """For the script, the configuration has the names that it asked for."""
        config: Any = distributed_c10d.BackendConfig
        original = config.__repr__

        def repr_for_caller(config: Any) -> str:
            description: str = original(config)
            return _as_script_named(description) if script_asks() else description

        self._replaced.set(config, __repr__=repr_for_caller)


def _as_script_named(description: str) -> str:
    """ "cpu:gloo,cuda:nccl" for "cpu:gloo,sim:simccl"."""
    backends = {}
    for pair in description.split(","):
        device, _, backend = pair.partition(":")
        backends[CUDA if device == SIMULATED else device] = "nccl" if backend == COLLECTIVES else backend
    return ",".join(f"{device}:{backend}" for device, backend in backends.items())


class _Ddp:
    """`DistributedDataParallel`."""

    def __init__(self, replaced: Replacements) -> None:
        self._replaced = replaced

    def install(self) -> None:
        self.check_comm_hook()

    def check_comm_hook(self) -> None:
        """`bf16_compress_hook` is accepted only where torch has CUDA and NCCL, which a build for the CPU has not."""
        check: Any = DistributedDataParallel._check_comm_hook

        def checked(ddp: Any, hook: Any) -> None:
            meanwhile = Replacements()
            meanwhile.set(torch.version, cuda=torch.version.cuda or CUDA_VERSION)
            meanwhile.set(dist, is_nccl_available=lambda: True)
            try:
                check(ddp, hook)
            finally:
                meanwhile.undo()

        self._replaced.set(DistributedDataParallel, _check_comm_hook=checked)


class _Meshes:
    """`DeviceMesh`, and the function that makes one."""

    def __init__(self, replaced: Replacements) -> None:
        self._replaced = replaced

    def install(self) -> None:
        self.init_device_mesh()
        self.names()
        self.device_type()

    def init_device_mesh(self) -> None:
        """The type of its devices is translated."""
        self._replaced.set_in_all((dist.__name__,), init_device_mesh=translated(device_mesh.init_device_mesh))

    def names(self) -> None:
        """A mesh is made from CUDA's names, and printed with them."""
        mesh = device_mesh.DeviceMesh
        original = mesh.__repr__

        def repr_for_caller(mesh: device_mesh.DeviceMesh) -> str:
            return original(mesh).replace(f"'{SIMULATED}'", f"'{CUDA}'")

        self._replaced.set(mesh, __init__=translated(mesh.__init__), __repr__=repr_for_caller)

    def device_type(self) -> None:
        """For the script, it is "cuda". In older versions a mesh stores it; in newer ones it is a property."""
        original = vars(device_mesh.DeviceMesh).get("device_type")

        def stored(mesh: device_mesh.DeviceMesh) -> str:
            device_type: str = vars(mesh)["device_type"]
            return device_type

        def store(mesh: device_mesh.DeviceMesh, value: str) -> None:
            vars(mesh)["device_type"] = value

        get: Callable[[Any], str] = original.__get__ if isinstance(original, property) else stored

        def type_for_caller(mesh: device_mesh.DeviceMesh) -> str:
            device_type = get(mesh)
            return CUDA if device_type == SIMULATED and script_asks() else device_type

        put = None if isinstance(original, property) else store
        self._replaced.set(device_mesh.DeviceMesh, device_type=property(type_for_caller, put))
