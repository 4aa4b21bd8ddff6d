"""
Simulated GPUs under CUDA's names, for tests, notebooks and functions on a machine without a GPU.

    pytest --simulate-cuda=4                # every test sees four GPUs

    with simulated_cuda(4):                 # or a block of code does
        model = nn.Linear(8, 8).to("cuda:3")

torch, in this process and in those that it starts, is made to find the GPUs (`simulator.as_cuda`), and the race
checker watches. A hazard fails the test that has it. Importing this package does not import torch.

    plugin        the pytest plugin
    context       simulated_cuda(), for a block of code
    session       what both have in common: this process, its children, and their findings
    simulation    simulated GPUs in this process; imports torch
    settings      what child processes are told, and how
    child         a process that is told so
    startup       what Python runs at the start of a child process
    findings      what processes have observed, merged
    of_ranks      processes that a script starts from its ranks, for `sanitize`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_conformance.simulated_cuda.context import simulated_cuda

__all__ = ["simulated_cuda"]


def __getattr__(name: str) -> Any:
    """`simulated_cuda`, once somebody asks for it: pytest imports this package in every run, for the plugin's sake."""
    if name == "simulated_cuda":
        from fsdp_conformance.simulated_cuda.context import simulated_cuda

        return simulated_cuda
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
