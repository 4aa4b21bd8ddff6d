"""
Simulated GPUs for a block of code: `with simulated_cuda(4): ...`, in notebooks, scripts and single functions.
"""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fsdp_conformance.errors import HazardsFound
from fsdp_conformance.simulator.simulated_cuda.findings import hazards_in_words
from fsdp_conformance.simulator.simulated_cuda.settings import CudaSettings

if TYPE_CHECKING:
    from fsdp_conformance.simulator.simulated_cuda.session import CudaSession, SimulatedCuda

__all__ = ["simulated_cuda"]

_WHERE = "simulated_cuda"


@contextmanager
def simulated_cuda(num_devices: int = 1, *, hazards: str = "fail") -> Iterator[SimulatedCuda]:
    """
    A context with `num_devices` simulated GPUs (1 to 127), under CUDA's names; also a decorator for functions.

        with simulated_cuda(4) as cuda:
            model = nn.Linear(8, 8).to("cuda:3")

    Processes that the block starts see the GPUs too. `hazards` says what happens at the end of the block if the race
    checker has found something, here or in a child process that has ended: "fail" raises HazardsFound (unless the
    block raises), "report" prints it to stderr, and "off" turns the checker off. If the program ends inside the block,
    it is printed. `cuda.take_hazards()` gives the hazards earlier, and forgets them.

    It is not for threads: while the block runs, every thread of the process sees the GPUs.

    At the end torch's functions, `torch.device` and the environment are restored. Some things stay:

    - torch knows the device by its own name, "sim": tensors that outlive the block are on sim:0 afterwards. Another
      backend in torch's slot for external devices (PrivateUse1) cannot be loaded.
    - Functions that were imported by name inside the block (`from torch import zeros`) still translate "cuda".
    - What a module computed when it was imported inside the block (`HAS_GPU = torch.cuda.is_available()`), or before
      it, keeps its value.
    - A later block can have fewer GPUs, but not more.

    Raises ConfigError for a wrong argument, or if the process has other simulated GPUs already (in a block with the
    same number, an inner one may be opened), and EnvironmentUnavailable if the accelerator cannot be compiled.
    """
    CudaSettings.checked_count(num_devices, where=_WHERE)
    CudaSettings.checked_hazards(hazards, where=_WHERE)
    from fsdp_conformance.simulator.simulated_cuda import session

    with session.opened(num_devices, checks=hazards != "off") as opened:
        cuda = session.SimulatedCuda(opened)
        left_open = functools.partial(_end_at_exit, opened)
        atexit.register(left_open)
        try:
            yield cuda
        finally:
            atexit.unregister(left_open)
        texts = opened.take().texts()
    if texts and hazards == "fail":
        raise HazardsFound(texts)
    if texts:
        print(hazards_in_words(texts), file=sys.stderr)


def _end_at_exit(opened: CudaSession) -> None:
    """Report the findings of a program that ends inside the block, while Python can still print."""
    texts = opened.take().texts()
    opened.close()
    if texts:
        print(hazards_in_words(texts), file=sys.stderr)
