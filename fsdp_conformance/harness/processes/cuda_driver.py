"""
Find out if this process has started the CUDA driver, and count the GPUs without starting it.

A child forked from a process that has started the driver cannot use a GPU, so the controller and the warm process never
start it. With PYTORCH_NVML_BASED_CUDA_CHECK=1 torch counts GPUs through NVML. Where NVML is missing, or devices are
named as parts of a GPU (MIG), torch asks the driver all the same, and so marks the process: then a child asks.

This module must not import torch at load, because the controller imports it before it wants torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fsdp_conformance.errors import EnvironmentUnavailable

#: Deadline for the driver's count. Without persistence mode it takes seconds per GPU.
COUNT_TIMEOUT_S = 120.0

_DRIVER = "libcuda.so.1"

#: What every call of the driver answers before `cuInit`, as its documentation says: CUDA_ERROR_NOT_INITIALIZED.
_NOT_INITIALISED = 3

#: Torch's function that starts the driver; only builds for GPUs have it.
_COUNT = "_cuda_getDeviceCount"


def cuda_is_initialised() -> bool:
    """True if this process has started the CUDA driver, through torch or otherwise. The driver itself is asked."""
    torch_cuda = sys.modules.get("torch.cuda")
    if torch_cuda is not None and torch_cuda.is_initialized():
        return True
    try:
        # RTLD_NOLOAD: fails unless the driver is loaded already.
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        count = driver.cuDeviceGetCount
    except (OSError, AttributeError):
        return False
    return bool(count(ctypes.byref(ctypes.c_int())) != _NOT_INITIALISED)


@contextmanager
def counted_in_a_child() -> Iterator[None]:
    """
    A context in which torch lets a child process ask the driver for the number of GPUs.

    The count raises EnvironmentUnavailable if the driver does not answer in time.
    """
    try:
        native = importlib.import_module("torch")._C
    except ImportError:  # code that needs torch will report it
        yield
        return
    count = getattr(native, _COUNT, None)
    if count is None or isinstance(count, functools.partial) or cuda_is_initialised():
        yield
        return
    setattr(native, _COUNT, functools.partial(_in_a_child, count))
    try:
        yield
    finally:
        setattr(native, _COUNT, count)


def _in_a_child(count: Callable[[], int]) -> int:
    """The result of `count` in a child process; 0 if the child ends without an answer, as without a driver."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        # Python warns that other threads may hold locks; the child takes none of them.
        warnings.simplefilter("ignore")
        pid = os.fork()
        if pid == 0:
            try:
                os.write(write, str(count()).encode())
            finally:
                os._exit(0)
    os.close(write)
    with contextlib.closing(os.fdopen(read, "rb", buffering=0)) as answers:
        try:
            if not select.select([answers], [], [], COUNT_TIMEOUT_S)[0]:
                os.kill(pid, signal.SIGKILL)
                raise EnvironmentUnavailable(
                    f"the CUDA driver did not say within {COUNT_TIMEOUT_S:.0f} s how many GPUs there are. See whether "
                    "nvidia-smi answers, or hide the GPUs from this run (CUDA_VISIBLE_DEVICES=)."
                )
            return int(answers.read(32) or 0)
        finally:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
