"""
Faults that strike at collectives, for which the process groups must be recorded.

If there is no default group yet, the groups that are made while such a fault is installed are recorded. A group that
exists already cannot be replaced, since models and meshes refer to it, so the fault raises ConfigError.
"""

from __future__ import annotations

import torch.distributed as dist

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.faults.fault import Fault
from fsdp_conformance.faults.pause import device_in_use
from fsdp_conformance.harness import context
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.harness.recording.collective_log import CollectiveObserver
from fsdp_conformance.harness.simulated_ranks import scheduler as rank_scheduler


class RecordedFault(Fault):
    """Base of all faults that need recorded process groups."""

    _unregisters = False

    def _attach(self) -> None:
        super()._attach()
        if dist.is_initialized():
            if not process_group.is_recording():
                problem = (
                    f"{self.describe()} could never strike, because the default process group was made before and is "
                    "not recorded. Set record_collectives = True in the test's class, or install the fault before "
                    "init_process_group()"
                )
                raise ConfigError([problem], where=type(self).__name__)
        elif not process_group.records_new_groups():
            process_group.register_recording_backend(device_in_use())
            # Not undone in a rank, whose process ends with its test, nor in simulated ranks, which share the setting.
            self._unregisters = context.current().run is None and rank_scheduler.current() is None

    def _detach(self) -> None:
        super()._detach()
        if self._unregisters:
            process_group.unregister_recording_backend()
            self._unregisters = False


class CollectiveFault(RecordedFault, CollectiveObserver):
    """Base of faults that strike as observers of collectives."""

    need = "the engine must issue collectives while it is installed"

    def _attach(self) -> None:
        super()._attach()
        context.log().observers.append(self)

    def _detach(self) -> None:
        context.log().observers.remove(self)
        super()._detach()
