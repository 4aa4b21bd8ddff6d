"""
`ShardedTrainingTestCase`: torch's `MultiProcessTestCase` on warm ranks, with deadlines, where every rank counts.

A test method runs in every rank; in the controller the same method starts the ranks, waits and concludes. The interface
of torch's harness is kept: `rank`, `world_size`, `file_name`, `init_method`, skip codes, `skip_return_code_checks`,
`special_return_code_checks`, `destroy_pg_upon_exit`, `processes`, `pid_to_pipe`, and `_run` as the entry of a rank.

The differences: a failure counts on any rank; the ranks shut down together; the controller does not poll; a failure's
text includes the output and stacks of the ranks; nothing is left behind. A limitation of forked ranks: they share the
seed of Python's hashes, so the suite cannot catch an implementation that depends on the order of a set of strings.
"""

from __future__ import annotations

import sys
import tempfile
import time
import unittest
from collections.abc import Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.harness import context, devices
from fsdp_conformance.harness.accounting import Part
from fsdp_conformance.harness.deadlines import Deadlines
from fsdp_conformance.harness.environment import Determinism
from fsdp_conformance.harness.order import CaseOrder, Debugged, FirstGroup, packed
from fsdp_conformance.harness.rank import describe_error, destroy_process_group
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.harness.torch_testing import MultiProcessTestCase
from fsdp_conformance.outcome.records import RankError, RankExit, RankReport
from fsdp_conformance.run_settings import TorchrunWorker

if TYPE_CHECKING:
    from fsdp_conformance.harness.processes.launcher import Launch


class ShardedTrainingTestCase(MultiProcessTestCase):
    """
    A test case whose methods run in `world_size` fresh ranks.

    Start the ranks in `setUp` with `self._spawn_processes()`, as with torch's class. In a rank `init_rank` runs before
    the test method and `shutdown_rank` after the goodbye. Override these two as needed, and `conclude` to judge
    differently from torch.
    """

    device_type: str = "cpu"
    """The type of device that ranks compute on. Accelerators are leased, and numbered by rank."""
    case_timeout_s: float = 60.0
    rank_timeout_s: float | None = None
    """The deadline of a rank; None for 85 % of the case's."""
    collective_timeout_s: float | None = None
    """The timeout of a collective, also in a test's own calls of init_process_group; None for 60 % of the case's."""
    deadline_scale: float = 1.0
    first_part: Part = Part.ENGINE
    """Whose code a rank runs at first. A body that is the suite's own says when it enters the code under test."""
    determinism: Determinism = Determinism()
    rank_environment: Mapping[str, str] = MappingProxyType({})
    """Variables that are set first thing in every rank."""
    preload: tuple[str, ...] = ()
    """Modules, or paths of files, that the warm process imports in addition to the test's own module."""
    preload_environment: Mapping[str, str] = MappingProxyType({})
    """Variables that must be set when the modules of `preload` are imported. Each set gets its own server."""
    reuse_ranks: bool = False
    """Reuse the ranks of the last case of this world size, if it ended well, instead of starting fresh ones."""
    record_collectives: bool = False
    """Record the collectives of every process group that a rank makes, in `context.log()`. Faults can strike there."""
    share_devices: bool = False
    """Let ranks share the devices that there are, without a lease, and communicate through gloo."""
    slots_per_device: int = 1
    """The number of cases that may use a device at the same time; 0 for as many as its memory holds."""
    first_group: FirstGroup | None = None
    """The default group that the ranks begin with, so that it can be made ahead; None if a test makes its own."""
    simulated_ranks: bool = False
    """Run the ranks as threads of one process, which take turns (`harness.simulated_ranks`)."""
    debugged: Debugged | None = None
    """Set if one rank has the terminal of this process, for a debugger."""
    torchrun_worker: TorchrunWorker | None = None
    """Set if this process is a torchrun worker, which starts one of the ranks (`harness.torchrun`)."""
    launch_payload: Any = None
    """Anything picklable, for `self.launch_payload` in the ranks. They see nothing else that `setUp` sets."""

    launch_options: dict[str, Any]
    """In a rank: the keyword arguments of `_run`."""

    report: RankReport
    """In a rank: the report that it will send."""

    def __init__(self, method_name: str = "runTest", methodName: str = "runTest") -> None:
        super().__init__(method_name, methodName)
        run = context.current().run
        if run is not None:
            self.report = run.report
            self.launch_payload = run.payload
            self.launch_options = run.order.case.options
            self.device_type = run.order.case.device_type
            self.share_devices = run.order.case.share_devices

    # --- the controller ----------------------------------------------------------------------------------------------

    @property
    def deadlines(self) -> Deadlines:
        """The nested deadlines of this case. Raises ConfigError if they do not nest."""
        usual = Deadlines.nested(
            self.case_timeout_s,
            rank_s=self.rank_timeout_s,
            collective_s=self.collective_timeout_s,
            scale=self.deadline_scale,
        )
        return usual if self.debugged is None else usual.without_hurry()

    def setUp(self) -> None:
        self._launch: Launch | None = None
        self._directory = tempfile.TemporaryDirectory(prefix="fsdp-conformance-", ignore_cleanup_errors=True)
        self.addCleanup(self._directory.cleanup)
        self.addCleanup(self._end_ranks)
        super().setUp()  # classes of torch start the ranks in there
        self._move_store()

    def _move_store(self) -> None:
        """Move the file store into the case's directory: torch's class puts it elsewhere, and leaves it behind."""
        path = Path(self._directory.name) / "store"
        if Path(self.file_name) != path:
            Path(self.file_name).unlink(missing_ok=True)
            self.file_name = str(path)

    def _spawn_processes(self) -> None:
        """
        Start the ranks.

        Raises ConfigError for deadlines that do not nest and for a world without ranks, and EnvironmentUnavailable if
        there are too few devices.
        """
        from fsdp_conformance.harness import controller

        if int(self.world_size) < 1:
            raise ConfigError(
                [f"world_size must be a positive integer, got {self.world_size}"], where=type(self).__qualname__
            )
        self._move_store()
        self._launch = controller.start(self._case_order(), self.id())
        if self._launch is not None:
            self.processes = self._launch.processes
            self.pid_to_pipe = self._launch.pipes

    def _case_order(self) -> CaseOrder:
        """The order for the ranks. Raises ConfigError for deadlines that do not nest."""
        owner = type(self)
        return CaseOrder(
            module=owner.__module__,
            qualname=owner.__qualname__,
            test_name=self._current_test_name(),
            file_name=self.file_name,
            directory=Path(self._directory.name),
            world_size=int(self.world_size),
            device_type=self.device_type,
            deadlines=self.deadlines,
            determinism=self.determinism,
            variables={**self.preload_environment, **self.rank_environment},
            preload=(*devices.preload(self.device_type), owner.__module__),
            engine=self.preload,
            preload_environment={
                **self.preload_environment,
                **devices.preload_environment(self.device_type, shared=self.share_devices),
            },
            payload=packed(self.launch_payload),
            options={"fake_pg": getattr(self, "fake_pg", False)},
            imports_main=owner.__module__ == "__main__",
            reuse=self.reuse_ranks and not self.simulated_ranks and self.torchrun_worker is None,
            simulated=self.simulated_ranks,
            share_devices=self.share_devices,
            slots_per_device=self.slots_per_device,
            group=self.first_group,
            worker=self.torchrun_worker,
            debugged=self.debugged,
            first_part=self.first_part,
        )

    def _join_processes(self, fn: Any) -> None:
        """Wait for the ranks, and conclude from their reports and exits."""
        if self._launch is None:  # in torch's classes, too, a test that started no ranks is skipped
            starts = f"self._spawn_processes() in {type(self).__name__}.setUp"
            raise unittest.SkipTest(f"no ranks were started, so nothing was tested: call {starts}")
        self._test_function = fn
        began = time.monotonic()
        try:
            reports, exits = self._launch.wait()
        finally:
            self._end_ranks()
        self._elapsed_s = time.monotonic() - began
        self.conclude(reports, exits)

    def conclude(self, reports: Sequence[RankReport | None], exits: Sequence[RankExit]) -> None:
        """
        Judge the case, in the controller, after every rank has ended. Both lists are in rank order.

        By default as torch's harness does: a skip code raises SkipTest, and anything but a report from every rank
        raises RuntimeError with the first rank to fail as headline.
        """
        from fsdp_conformance.harness import controller

        function = self._test_function
        special = getattr(self, "special_return_code_checks", {})  # since torch 2.7
        if not any(report is not None and report.error is not None for report in reports):
            if function in self.skip_return_code_checks:
                return
            if function in special:
                expected, got = special[function], exits[0].exitcode
                self.assertEqual(expected, got, msg=f"Expected exit code {expected} but got {got} on rank 0")
                return
        controller.conclude(self.id(), reports, exits, elapsed_s=self._elapsed_s)

    def _end_ranks(self) -> None:
        if self._launch is not None:
            self._launch.close()
            self._launch = None
        # A process object keeps file descriptors open.
        self.processes = []

    # --- a rank ------------------------------------------------------------------------------------------------------

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, parent_pipe: Connection, **kwargs: Any) -> None:
        """The entry of a rank."""
        self = cls(test_name)
        self.rank = rank
        self.file_name = file_name
        self.run_test(test_name, parent_pipe)

    def run_test(self, test_name: str, parent_pipe: Connection) -> None:
        """
        Run the test method, report, wait for the goodbye, shut down.

        Raises SystemExit with the exit code of torch's harness if the method raised or skipped. In that case nothing is
        shut down, because a process group cannot be once its ranks have diverged.
        """
        code = context.running().body(self, test_name)
        if code:
            sys.exit(code)
        self.shutdown_rank()

    def init_rank(self) -> None:
        """Runs in a rank before the test method: selects the rank's device. The process group is left to the test."""
        devices.activate(self.device_type)
        devices.use_device(self.device)
        self.record_if_asked()

    def record_if_asked(self) -> None:
        """Record the process groups that are made from now on, if the class asks for it."""
        if self.record_collectives:
            process_group.register_recording_backend(self.device_type, shared=self.share_devices)

    def finish_body(self) -> None:
        """Runs in a rank after a test method that has returned."""

    def leave_body(self) -> None:
        """Runs in a rank when its test method has ended, in whatever way, before it reports."""

    def shutdown_rank(self) -> None:
        """Runs in a rank after the goodbye, when no peer communicates any more."""
        if self.destroy_pg_upon_exit:
            destroy_process_group(context.running().collect_garbage)

    def describe_error(self, error: BaseException) -> RankError:
        """An exception of the test method as data. Override it to decide who is to blame."""
        return describe_error(error)

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on: the one with its number on this host."""
        return devices.device_of(self.device_type, self.local_rank)

    @property
    def local_rank(self) -> int:
        """The number of this rank among those of its host."""
        run = context.current().run
        return int(run.order.environment["LOCAL_RANK"]) if run is not None and run.order.case.worker else self.rank

    @property
    def init_method(self) -> str:
        """The argument for init_process_group: a file, so that no port is opened."""
        return f"file://{self.file_name}"

    def start_process_group(self, backend: str | None = None) -> None:
        """Make the default process group with the collective deadline; the default backend is the device's."""
        distributed.init_process_group(
            backend or devices.backend_for(self.device_type, shared=self.share_devices),
            init_method=self.init_method,
            rank=self.rank,
            world_size=int(self.world_size),
            timeout=timedelta(seconds=context.running().order.case.collective_timeout_s),
        )
