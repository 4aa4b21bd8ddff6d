"""
The script that the ranks run, and how: what the user asked for.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_conformance.simulator.checker.options import CheckerOptions
from fsdp_conformance.simulator.suppressions import NO_SUPPRESSIONS, Suppressions


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptOrder:
    """The script to run, and how."""

    target: str
    """The path of a script, or the name of a module."""
    is_module: bool
    arguments: tuple[str, ...]
    world_size: int
    mode: str
    """The checker's mode: record, raise or poison."""
    as_cuda: bool
    """Let "cuda" in the script mean the simulated accelerator."""
    on_gpus: bool = False
    """Run it on the GPUs of this machine, and trace it, instead of on the simulated accelerator."""
    timeout_s: float
    """Seconds from the start of the ranks until the script has ended on all of them."""
    reuse: str = "exact"
    """Which memory the checker lets new tensors share: `checker.Reuse`."""
    waits: str = "all"
    """Which waits of the host order streams: `checker.Waits`."""
    ordering_only: bool = False
    """Leave out kernels that only compute numbers: `ordering`."""
    memory: int | None = None
    """The memory of each device in bytes; None for no limit."""
    devices: int | None = None
    """How many devices there are; None for one for each rank."""
    foreground: int | None = None
    """The rank that has the terminal, for a debugger; None for none."""
    suppressions: Suppressions = NO_SUPPRESSIONS
    """The findings that are not reported."""
    strict_suppressions: bool = False
    """A suppression that matches nothing makes the run fail."""

    @property
    def num_devices(self) -> int:
        """How many devices there are."""
        return self.world_size if self.devices is None else self.devices

    @property
    def options(self) -> CheckerOptions:
        """The options of the ranks and of the processes that they start."""
        return CheckerOptions(
            mode=self.mode,
            reuse=self.reuse,
            waits=self.waits,
            ordering_only=self.ordering_only,
            memory=self.memory,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildrenOfRank:
    """The setup of the processes that a rank starts."""

    directory: str
    """The directory in which they save their observations."""
    variables: Mapping[str, str]
    """With these in their environment, they see the devices."""
    inherited: Mapping[str, str]
    """The variables of the rank that do not make them ranks: `outbox.process_name`."""


def torchrun_variables(rank: int, world_size: int, *, port: int, run_id: str) -> dict[str, str]:
    """The variables that torchrun sets for a worker on one machine (torch/distributed/elastic/agent/server)."""
    return {
        **rank_variables(rank, run_id),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # Rank 0 serves the store, so a script that sets MASTER_PORT itself also finds one.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def rank_variables(rank: int, run_id: str) -> dict[str, str]:
    """Those of them that say which rank of which run a process is."""
    return {"RANK": str(rank), "TORCHELASTIC_RUN_ID": run_id}
