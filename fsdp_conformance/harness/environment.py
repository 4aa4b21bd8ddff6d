"""
Settings that a rank applies before anything else runs: variables, seeds, threads, determinism. The report
records all of it.

A rank is forked from a server that may be minutes old, so it gets the controller's whole environment as of the start of
the case, as a spawned process would.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed.constants

from fsdp_conformance.errors import ConfigError

#: cuBLAS is deterministic only with a fixed workspace size (docs of torch.use_deterministic_algorithms).
CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"

#: The smallest workspace with which cuBLAS is deterministic, in its own notation, and the same for cuBLASLt in KiB.
#: They come from torch's caching allocator, one for each handle and stream, and count as the engine's memory.
_CUBLAS = {CUBLAS_VARIABLE: ":16:8", "CUBLASLT_WORKSPACE_SIZE": "128"}

#: Keeps NCCL's watchdog from judging a hang. It would abort the ranks that wait, and leave the one that they wait for.
#: The deadlines of the case end all of them, with their stacks and their last collectives.
NCCL_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}

#: NCCL for a few ranks that live for seconds: without NVLink SHARP's multicast, and with few channels, a communicator
#: is made sooner and takes less memory.
_NCCL_SMALL = {"NCCL_NVLS_ENABLE": "0", "NCCL_MAX_NCHANNELS": "2"}

#: A user who sets one of these has chosen the number of channels.
_CHANNELS = ("NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS")

#: Prefixes of the variables that a report records.
_QUOTED = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_", "MKL_", "CUDA", "CUBLAS", "NCCL_", "GLOO_", "TORCH", "PYTORCH", "FSDP_"
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Determinism:
    """Seeds, threads and the switches that make two runs equal."""

    seed: int = 20261121
    """The seed of torch, numpy and random on every rank; data that must differ between ranks depends on the rank."""
    num_threads: int = 1
    """Intra-op threads."""
    algorithms: str = "warn"
    """The mode of torch.use_deterministic_algorithms: "off", "warn" or "error"."""
    tf32: bool = False
    """True if float32 matrix products on the GPU may be rounded to TF32."""
    fill_uninitialized: bool = False
    """Fill torch.empty with NaN. Off by default, because uninitialized padding that is never read is legal."""

    def __post_init__(self) -> None:
        problems = []
        if self.num_threads < 1:
            problems.append(f"num_threads must be at least 1, got {self.num_threads}")
        if self.algorithms not in ("off", "warn", "error"):
            problems.append(f"algorithms must be 'off', 'warn' or 'error', got {self.algorithms!r}")
        if problems:
            raise ConfigError(problems, where="Determinism")

    def variables(self) -> dict[str, str]:
        """Environment variables for these settings."""
        variables = {"OMP_NUM_THREADS": str(self.num_threads)}
        if self.algorithms != "off":
            variables |= {name: value for name, value in _CUBLAS.items() if name not in os.environ}
        return variables

    def apply(self) -> dict[str, Any]:
        """Set everything in this process, and return what was set."""
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)
        torch.manual_seed(self.seed)
        torch.set_num_threads(self.num_threads)
        torch.use_deterministic_algorithms(self.algorithms != "off", warn_only=self.algorithms == "warn")
        torch.utils.deterministic.fill_uninitialized_memory = self.fill_uninitialized  # type: ignore[attr-defined]
        # torch.testing forbids setting these flags; an implementation under test may do what a user may do.
        torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        torch.backends.cudnn.allow_tf32 = self.tf32
        if self.algorithms != "off":
            torch.backends.cudnn.benchmark = False
            # The backward of this attention, which only CUDA has, adds in no fixed order, whatever the other settings.
            torch.backends.cuda.enable_mem_efficient_sdp(False)
        return {
            "seed": self.seed,
            "num_threads": torch.get_num_threads(),
            "deterministic_algorithms": self.algorithms,
            "tf32": self.tf32,
            "fill_uninitialized_memory": self.fill_uninitialized,
        }


def rank_variables(rank: int, world_size: int, *, determinism: Determinism, device_type: str = "cpu") -> dict[str, str]:
    """
    The environment of a rank: the controller's, and what launchers set. The user's own settings of NCCL stay.

    Some engines read MASTER_ADDR and MASTER_PORT, but nothing listens there: the rendezvous is a file.
    """
    return {
        **(nccl_variables() if device_type == "cuda" else {}),
        **os.environ,
        **determinism.variables(),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def nccl_variables() -> dict[str, str]:
    """Variables that ranks on GPUs set for NCCL, unless the user already has."""
    small = dict(_NCCL_SMALL)
    if any(name in os.environ for name in _CHANNELS):
        del small["NCCL_MAX_NCHANNELS"]
    return {**NCCL_VARIABLES, **small}


def apply_variables(variables: Mapping[str, str]) -> None:
    """Make os.environ equal to `variables`, and update torch, which read some of them at import."""
    for name in set(os.environ) - set(variables):
        del os.environ[name]
    logs = os.environ.get("TORCH_LOGS")
    os.environ.update(variables)
    torch._C._distributed_c10d.set_debug_level_from_env()
    if os.environ.get("TORCH_LOGS") != logs:
        torch._logging._internal._init_logs()


def apply_collective_timeout(timeout_s: float) -> None:
    """
    Make `timeout_s` the default timeout of process groups.

    Engines make their own groups, and torch's default of 10 or 30 minutes exceeds the rank's deadline: a hang would not
    show where it is.
    """
    timeout = timedelta(seconds=timeout_s)
    for module in (torch.distributed.distributed_c10d, torch.distributed.constants):
        for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
            if getattr(module, name, None) is not None:
                setattr(module, name, timeout)


def quoted_variables() -> dict[str, str]:
    """The variables of this process that a report records."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_QUOTED)}
