"""
CUDA's names on the simulated accelerator, for engines that know no other (`Adapter.cuda_names`).

The engine, and an adapter that is not of this package, find the device as "cuda"; the suite goes on seeing "sim".
"""

from __future__ import annotations

import functools
import importlib.util

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.adapters.vendors.real_ranks import refuse_simulated_ranks
from fsdp_conformance.plan import SIMULATED

#: What a certificate says of it.
SHIM = 'on the simulated accelerator the engine finds the device as "cuda": its calls to torch are translated'

#: The packages whose code is the suite's: where they are depends on how the project is installed.
_SUITE = ("fsdp_conformance", "fsdp_conformance.suites", "fsdp_conformance.fixtures")


def provide(adapter: type[Adapter], device_type: str) -> None:
    """
    Let the adapter's engine find the simulated accelerator as "cuda" in this process, if it needs that.

    Call it in a rank before the engine is imported. Does nothing on other devices. Raises EnvironmentUnavailable on
    simulated ranks, which share one process and so one current device in the eyes of torch.cuda.
    """
    if not adapter.cuda_names or device_type != SIMULATED:
        return
    refuse_simulated_ranks(adapter.display_name(), because="CUDA's names are given to a whole process")
    _install()


@functools.cache
def _install() -> None:
    from fsdp_conformance.simulator.as_cuda import names as cuda_names
    from fsdp_conformance.simulator.as_cuda import translation as as_cuda
    from fsdp_conformance.simulator.checker import labels

    specs = [importlib.util.find_spec(name) for name in _SUITE]
    cuda_names.keep_own_names(place for spec in specs if spec for place in spec.submodule_search_locations or ())
    as_cuda.install(labels.install())
