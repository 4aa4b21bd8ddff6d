"""
Everything that a reference's history depends on, as text: workload, regime, world, and the state of the process.

    scenario_sha256     the workload and the regime, by content: two workloads with one name may differ
    surroundings        settings of torch and variables that can change a result, as they are in this process
    machine             the versions of Python and torch, and the processor

A workload is functions and data. A function is known by its name and its code, and by everything that it holds: its
defaults and its closure. Its module must be one that the suite's hash covers, or torch's. Whatever else is found,
such as an object with a state, raises NotShared: then the references are trained, as without a store.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import os
import platform
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_conformance.history.transfer import tensor_bytes
from fsdp_conformance.workload.definition import Regime, Workload

#: Prefixes of the variables that libraries of numerics and of communication read.
_VARIABLES = (
    "ATEN_", "BLIS_", "CUBLAS", "DNNL_", "GLOO_", "GOMP_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_",
    "TORCH_", "TP_",
)  # fmt: skip

#: Packages whose functions are known by their name: the suite's hash covers the first, the machine's text the second.
_OURS = "fsdp_conformance"
_KNOWN = frozenset({"torch", "builtins", "functools", "math", "operator", "_operator", "collections"})
#: Parts of ours that the hash leaves out.
_NOT_HASHED = ("fsdp_conformance.tests", "fsdp_conformance.docs")

#: The files of torch that a training may use, relative to its package.
_TORCH_FILES = ("*.py", "lib/*.so*", "nn/**/*.py", "optim/**/*.py", "amp/*.py", "autograd/*.py", "utils/data/*.py",
                "distributed/*.py")  # fmt: skip


class NotShared(Exception):
    """Something that cannot be described, or written down, so that the references are not shared."""


def scenario_sha256(workload: Workload, regime: Regime) -> str:
    """A hash of both by content. Raises NotShared if the workload holds anything that has no known content."""
    digest = _Digest()
    digest.feed(workload)
    digest.feed(regime)
    return digest.hexdigest()


def surroundings() -> dict[str, str]:
    """The settings and variables of this process that can change a result."""
    deterministic: Any = torch.utils.deterministic
    mkldnn: Any = torch.backends.mkldnn
    settings = {
        "threads": torch.get_num_threads(),
        "seed": torch.initial_seed(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            deterministic.fill_uninitialized_memory,
        ),
        "matmul": torch.get_float32_matmul_precision(),
        "mkldnn": (mkldnn.is_available(), mkldnn.enabled),
        "modes": (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_anomaly_enabled(),
        ),
        # torch cannot be asked if it flushes denormals, so make one.
        "denormals": float(torch.tensor(1e-310, dtype=torch.float64) / 2.0) > 0,
    }
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    return {**{name: str(value) for name, value in settings.items()}, "variables": str(variables)}


@functools.cache
def machine() -> dict[str, str]:
    """The machine: versions, torch's files by size and time, and the processor. It never changes during a process."""
    return {
        "python": sys.version,
        "platform": f"{sys.platform} {platform.machine()} {' '.join(platform.libc_ver())}",
        "processor": _processor(),
        "torch": f"{torch.__version__} {torch.version.git_version} {torch.backends.cpu.get_cpu_capability()}",
        "torch_files": _files(Path(torch.__file__).parent, _TORCH_FILES),
    }


def _processor() -> str:
    """The processor's model and its instructions: libraries choose their kernels by them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    fields = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part")
    relevant_lines = sorted({line for line in lines if line.partition(":")[0].strip() in fields})
    return hashlib.sha256("\n".join(relevant_lines).encode()).hexdigest()


def _files(root: Path, patterns: Iterable[str]) -> str:
    """A hash of the names, sizes and times of the files under `root`: cheap, and changed by every edit in place."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in root.glob(pattern)}):
        status = path.stat()
        digest.update(f"{path.relative_to(root)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


class _Digest:
    """A hash that values of known kinds are fed into, each with its kind and its length, so that no two collide."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._inside: list[int] = []

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def feed(self, value: Any) -> None:
        """Add a value. Raises NotShared for one whose content is unknown."""
        if id(value) in self._inside:  # a function that calls itself
            self._note("again", str(self._inside.index(id(value))))
            return
        self._inside.append(id(value))
        self._feed(value)
        self._inside.pop()

    def _feed(self, value: Any) -> None:
        kind = type(value)
        if value is None or kind in (bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size):
            self._note(kind.__name__, value.hex() if kind is float else repr(value))
        elif isinstance(value, enum.Enum):
            self._named(kind)
            self._note("member", value.name)
        elif kind in (list, tuple):
            self._all(kind.__name__, value)
        elif kind in (set, frozenset):
            self._all("set", sorted(value, key=repr))
        elif isinstance(value, Mapping) and kind in (dict, types.MappingProxyType):
            self._all("dict", [part for pair in value.items() for part in pair])
        elif kind is Tensor:
            self._tensor(value)
        elif isinstance(value, functools.partial):
            self._all("partial", [value.func, value.args, dict(value.keywords)])
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._all("method", [value.__func__, value.__self__])
        elif isinstance(value, type):
            self._named(value)
        elif kind in (torch.no_grad, torch.enable_grad):  # its attributes belong to the call that is running
            self._named(kind)
        elif isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType) or hasattr(value, "cache_info"):
            self._wrapped(value)
        elif dataclasses.is_dataclass(value):
            self._named(kind)
            self._all("fields", [getattr(value, field.name) for field in dataclasses.fields(value)])
        else:
            raise NotShared(f"the workload holds a {kind.__module__}.{kind.__qualname__}, whose content is not known")

    def _wrapped(self, value: Any) -> None:
        """A function written in C, or one that caches its results."""
        if hasattr(value, "cache_info"):
            self._all("cached", [value.__wrapped__])
            return
        owner = getattr(value, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType | type):
            self._all("method", [value.__name__, owner])
            return
        self._named(value)

    def _function(self, value: types.FunctionType) -> None:
        self._named(value)
        self._code(value.__code__)
        try:
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
        except ValueError as error:
            raise NotShared(f"{value.__qualname__} has an empty closure") from error
        self._all("held", [value.__defaults__, value.__kwdefaults__, cells])

    def _code(self, code: types.CodeType) -> None:
        """Add the code, too: lambdas of one line share a name."""
        self._note("code", f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_firstlineno}")
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            else:
                is_set = isinstance(constant, frozenset)
                self._note("constant", repr(sorted(constant, key=repr) if is_set else constant))

    def _named(self, value: Any) -> None:
        """A function or a class, known by its name because its source is hashed elsewhere."""
        module = str(getattr(value, "__module__", None) or "builtins")
        name = getattr(value, "__qualname__", "")
        part = module.partition(".")[0]
        if (part == _OURS and module.startswith(_NOT_HASHED)) or part not in (_OURS, *_KNOWN):
            raise NotShared(f"the workload holds {module}.{name}, which no hash covers")
        self._note("name", f"{module}.{name}")

    def _tensor(self, value: Tensor) -> None:
        if value.layout is not torch.strided or value.device.type != "cpu":
            raise NotShared(f"the workload holds a tensor on {value.device} in the layout {value.layout}")
        self._note("tensor", f"{value.dtype} {tuple(value.shape)} {value.requires_grad}")
        self._hash.update(tensor_bytes(value))

    def _all(self, kind: str, parts: Iterable[Any]) -> None:
        listed = list(parts)
        self._note(kind, str(len(listed)))
        for part in listed:
            self.feed(part)

    def _note(self, kind: str, text: str) -> None:
        self._hash.update(f"{kind} {len(text)} {text}\n".encode())
