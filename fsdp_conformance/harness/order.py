"""
The orders that the controller sends to the ranks of a case: one for the case, and a small one around it for each rank.

A `CaseOrder` is complete: whoever launches a case (a test case, a probe, `sanitize`) makes one, and nothing else
travels to the ranks. Each rank receives its `RankOrder` as the first message on its pipe. Orders name the test class
instead of holding it, and the payload stays packed until the rank's environment is set, so a rank can read its order
before it imports anything.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from fsdp_conformance.harness import devices
from fsdp_conformance.harness.accounting import Part
from fsdp_conformance.harness.deadlines import Deadlines
from fsdp_conformance.harness.environment import Determinism, rank_variables
from fsdp_conformance.run_settings import TorchrunWorker

#: How much longer than the case a rank waits for the controller's goodbye, which is missing only if the controller
#: hangs.
_GOODBYE_SLACK_S = 60.0


#: For ranks that use no GPU. Otherwise each would start the driver, and a device mesh would make a group for NCCL,
#: which takes about a second.
_NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}

#: Longer than any case.
_NEVER_S = 24 * 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Debugged:
    """The rank that has the terminal while it is debugged. The others run past breakpoints."""

    rank: int = 0
    post_mortem: bool = False
    """Open pdb at the exception that ends the body, or that a case has caught and found wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstGroup:
    """The default group of every rank of a conformance case, which records collectives (`harness.rank_startup`)."""

    only: str = ""
    """Its only backend; empty for the backends of the device."""


class Role(StrEnum):
    """The part of a process in the judgement of a case."""

    ALONE = "alone"
    """It drives the engine and judges it."""
    OBSERVED = "observed"
    """It drives the engine, and sends what it observes to the referee."""
    REFEREE = "referee"
    """It judges what the ranks observe. No engine code ever enters it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refereed:
    """How the ranks of a case and its referee belong together."""

    role: Role
    directory: str
    """The directory that the ranks write their observations to."""
    nonce: str
    """A random text that belongs to this case alone."""
    secret: str = ""
    """For the referee alone: the run's secret, if it takes no references of other runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseOrder:
    """The code to run, the number of ranks, and how to start them."""

    module: str
    qualname: str
    """The class whose `_run` is the entry of a rank."""
    test_name: str
    file_name: str
    """The file of the ranks' store."""
    directory: Path
    """The case's directory, for the files of its ranks."""
    world_size: int
    device_type: str
    deadlines: Deadlines
    determinism: Determinism
    payload: bytes = b""
    """Anything picklable for the ranks, as `packed` returns it."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `_run`."""
    variables: dict[str, str] = field(default_factory=dict)
    """Set in every rank, on top of the controller's environment."""
    preload: tuple[str, ...] = ()
    """The modules that the warm process imports, besides those that every rank needs."""
    engine: tuple[str, ...] = ()
    """The modules of the code under test that it imports as well."""
    preload_environment: dict[str, str] = field(default_factory=dict)
    """Set when the warm process imports."""
    imports_main: bool = False
    """True if the class, or the function to call, is defined in the controller's `__main__`."""
    reuse: bool = False
    """Accept ranks that have run other cases. Only for ranks that are processes of one host."""
    simulated: bool = False
    """Run the ranks as threads of one process."""
    hides_gpus: bool = True
    """Show no GPU to ranks that compute on the CPU, or on the simulated accelerator."""
    share_devices: bool = False
    """Hold no devices: all ranks see all of them, and share them."""
    slots_per_device: int = 1
    """The number of cases that may use a device at the same time (`leases.slots_of`)."""
    group: FirstGroup | None = None
    """The default group that the ranks begin with; None if the test makes its own, or none."""
    ahead: bool = False
    """Only get ready, and wait for another order (`processes.prepared`)."""
    debugged: Debugged | None = None
    """The rank that has the terminal, if one is debugged: then no deadline is short."""
    first_part: Part = Part.ENGINE
    """Whose code a rank runs until it says otherwise (`harness.accounting`)."""
    name: str = ""
    """Under torchrun: a name that no other case of the run has."""
    refereed: Refereed | None = None
    """Set if the case has a referee; None if each rank judges alone."""
    worker: TorchrunWorker | None = None
    """The torchrun worker that starts one of the ranks; its peers may be on other hosts."""

    @property
    def role(self) -> Role:
        """The part of these processes in the judgement."""
        return Role.ALONE if self.refereed is None else self.refereed.role

    def is_debugged(self, rank: int) -> bool:
        """True if it is the rank that has the terminal."""
        return self.debugged is not None and self.debugged.rank == rank

    @property
    def collective_timeout_s(self) -> float:
        """
        The timeout of process groups.

        NCCL's timeout would end the ranks that wait, not the one that they wait for, and while the host does something
        else. So it is longer than any case there, and only the deadlines of the rank and of the case apply.
        """
        if devices.is_scarce(self.device_type) and not self.share_devices:
            return _NEVER_S
        return self.deadlines.collective_s

    @property
    def goodbye_timeout_s(self) -> float:
        """How long a rank waits for the controller's goodbye."""
        return self.deadlines.case_s + self.deadlines.suite_s + _GOODBYE_SLACK_S

    def for_ranks(
        self, device_variables: Mapping[str, str], hosts: Sequence[Mapping[str, str]] | None = None
    ) -> list[RankOrder]:
        """
        The order of each rank, in rank order, with its files made.

        `device_variables` select the leased devices. `hosts` has the variables that place each rank on its host, if not
        all are on this one.
        """
        return [
            RankOrder(case=self, rank=rank, files=RankFiles.under(self.directory, rank), environment=variables)
            for rank, variables in enumerate(self.rank_environments(device_variables, hosts))
        ]

    def rank_environments(
        self, device_variables: Mapping[str, str], hosts: Sequence[Mapping[str, str]] | None = None
    ) -> list[dict[str, str]]:
        """The whole environment of each rank, in rank order."""
        return [
            {
                **rank_variables(rank, self.world_size, determinism=self.determinism, device_type=self.device_type),
                **({"LOCAL_RANK": str(rank % self._shared_devices)} if self.share_devices else {}),
                **(hosts[rank] if hosts is not None else {}),
                **(device_variables if devices.is_scarce(self.device_type) or not self.hides_gpus else _NO_GPUS),
                **self.variables,
            }
            for rank in range(self.world_size)
        ]

    @property
    def _shared_devices(self) -> int:
        """The number of devices that ranks share. LOCAL_RANK is less: engines call `set_device(LOCAL_RANK)`."""
        return max(1, devices.device_count(self.device_type))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFiles:
    """The files of one rank in the case's directory."""

    output: str
    """The file with the rank's stdout and stderr."""
    stack: str
    """Python stacks, on STACK_SIGNAL and on a fatal signal."""
    collectives: str
    """The trace of its last collectives."""

    @classmethod
    def under(cls, directory: Path, rank: int) -> RankFiles:
        """The files of `rank`, created empty."""
        paths = [directory / f"rank{rank}.{suffix}" for suffix in ("output", "stack", "collectives")]
        for path in paths:
            path.touch()
        return cls(output=str(paths[0]), stack=str(paths[1]), collectives=str(paths[2]))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOrder:
    """The order for one rank."""

    case: CaseOrder
    rank: int
    files: RankFiles
    environment: dict[str, str]
    """The whole environment of the rank."""


def packed(payload: Any) -> bytes:
    """A payload for `CaseOrder`; the rank unpickles it once its environment is set."""
    return pickle.dumps(payload)


def encode(orders: Sequence[RankOrder]) -> bytes:
    """The message for a process: the orders of the ranks that it runs."""
    return pickle.dumps(tuple(orders))


def decode(message: bytes) -> tuple[RankOrder, ...]:
    """The inverse of `encode`, in the process of the ranks."""
    orders: tuple[RankOrder, ...] = pickle.loads(message)  # noqa: S301 - our own controller sent it
    return orders
