"""
Simulated GPUs under CUDA's names: the public import path of `simulated_cuda` (`simulator.simulated_cuda`).

    from fsdp_conformance.simulated_cuda import simulated_cuda
"""

from fsdp_conformance.simulator.simulated_cuda.context import simulated_cuda

__all__ = ["simulated_cuda"]
