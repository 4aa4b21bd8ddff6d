"""
Imports of the warm process, before the first rank is forked from it.

`multiprocessing`'s preload list names this module, so the forkserver imports it. What else to import comes from an
environment variable, because `set_forkserver_preload` swallows ImportError and does not take files. A failed import is
kept in `failures`, which every forked rank inherits: the rank's own import then raises, and the case reports it.

This module must not import torch at load, because the controller imports it too.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from fsdp_conformance.harness.processes.cuda_driver import counted_in_a_child, cuda_is_initialised

#: JSON with "modules", "sys_path" and "log"; set only for the warm process.
ORDERS_VARIABLE = "FSDP_CONFORMANCE_PRELOAD"

#: What every rank needs. Otherwise FSDP imports dynamo and inductor's config late (0.9 s in every rank), the case
#: modules import the test frameworks, and each rank imports what runs it (25 ms of the 150 ms that a short case takes).
BASE = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.device_mesh",
    "torch.nn.parallel",
    "torch._dynamo",
    "torch.testing._internal.common_distributed",
    "torch.testing._internal.common_fsdp",
    "torch.testing._internal.distributed.fake_pg",
    "fsdp_conformance.harness.testcase",
    "fsdp_conformance.harness.processes.rank_process",
    "fsdp_conformance.harness.simulated_ranks.host",
    "fsdp_conformance.adapters.registry",
    "fsdp_conformance.adapters.cuda_names",
    "torch._subclasses.schema_check_mode",
    "unittest.mock",
    "numpy.random",
    "parameterized",
    "expecttest",
    "pytest",
)

#: Imported too, if this version of torch has them.
OPTIONAL = ("torch._inductor.config", "torch.profiler._cupti_monitor")

#: Module name or file path to the exception that its import raised.
failures: dict[str, str] = {}

#: Everything that `load` was asked for, in this process and in those that it was forked from.
loaded: list[str] = []

#: The first module whose import initialised CUDA: after that no rank can use a GPU.
cuda_initialised_by: str | None = None


def import_target(name: str) -> ModuleType:
    """The module with that dotted name, or of that file if `name` is a path."""
    return import_file(Path(name)) if is_file(name) else importlib.import_module(name)


def is_file(name: str) -> bool:
    """True if a preload entry names a file rather than a module."""
    return name.endswith(".py") or os.sep in name


def module_name_of_file(path: Path) -> str:
    """The name under which `import_file` keeps a file's module, the same in every process."""
    full = path.resolve()
    return f"fsdp_conformance_file_{full.stem}_{zlib.crc32(os.fsencode(full)):08x}"


def import_file(path: Path) -> ModuleType:
    """
    The module of a file outside any package, executed once per process.

    Raises FileNotFoundError for a missing file, and any exception of the file itself. Raises ImportError for one that
    is not Python.
    """
    name = module_name_of_file(path)
    if name in sys.modules:
        return sys.modules[name]
    full = path.resolve()
    if not full.is_file():
        raise FileNotFoundError(f"no such file: {full}")
    spec = importlib.util.spec_from_file_location(name, full)
    if spec is None or spec.loader is None:
        raise ImportError(f"{full} is not a Python source file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load(names: Iterable[str]) -> None:
    """Import each, record failures, and freeze the heap for the forks."""
    global cuda_initialised_by
    with counted_in_a_child():
        for name in names:
            if name in OPTIONAL and not _exists(name):
                continue
            loaded.append(name)
            try:
                import_target(name)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - kept for the ranks; pytest's Skipped is not an Exception
                failures[name] = f"{type(error).__qualname__}: {error}"
            if cuda_initialised_by is None and cuda_is_initialised():
                cuda_initialised_by = name
    # A rank's garbage collector neither visits nor copies frozen objects: gc.collect() takes 1 ms instead of 150.
    gc.collect()
    gc.freeze()


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # its parent package is absent
        return False


def redirect_output(path: str) -> None:
    """Write stdout and stderr of this process to a file that another process has open, and remove its name."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.unlink(path)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


def _preload() -> None:
    """In the warm process: send output to the log, set sys.path, import the list."""
    orders = json.loads(os.environ.pop(ORDERS_VARIABLE))
    redirect_output(orders["log"])
    sys.path[:] = orders["sys_path"]
    load(orders["modules"])


if ORDERS_VARIABLE in os.environ:
    _preload()
