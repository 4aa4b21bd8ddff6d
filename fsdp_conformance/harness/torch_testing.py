"""
Torch's own test modules, imported without starting the CUDA driver.

Importing torch.testing._internal.common_utils calls `torch.cuda.is_available()`, which starts the driver: in a
controller that only collects, and in the warm process, whose forked ranks could then not use a GPU. With the variable
below torch asks NVML instead, and where NVML knows nothing a child asks. Import these modules from here.
"""

from __future__ import annotations

from fsdp_conformance.harness.devices import asked_without_starting_cuda

with asked_without_starting_cuda():
    from torch.testing._internal import common_distributed, common_fsdp, common_utils
    from torch.testing._internal.common_distributed import TEST_SKIPS, MultiProcessTestCase
    from torch.testing._internal.distributed import multi_threaded_pg

__all__ = [
    "TEST_SKIPS",
    "MultiProcessTestCase",
    "common_distributed",
    "common_fsdp",
    "common_utils",
    "multi_threaded_pg",
]
