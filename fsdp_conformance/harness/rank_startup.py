"""
The part of a rank's start-up that does not depend on its case: the device, its libraries, the first group.

Every rank of a conformance case begins like this. A rank that gets ready while another case runs
(`processes.prepared`) does it ahead, and the case then finds it done.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from fsdp_conformance.errors import SuiteError
from fsdp_conformance.harness import devices
from fsdp_conformance.harness.backend_trial import try_backend
from fsdp_conformance.harness.order import RankOrder
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.harness.warm_up import warm_up


def get_ready(order: RankOrder) -> None:
    """Start the device and its libraries, and make the first group. Collective."""
    case = order.case
    case.determinism.apply()
    devices.activate(case.device_type)
    device = devices.device_of(case.device_type, order.rank)
    devices.use_device(device)
    warm_up(device)
    make_first_group(order, device)


def make_first_group(order: RankOrder, device: torch.device) -> None:
    """
    Make the default group, which records every collective, and try it. Collective.

    One collective before anything is judged: if ranks cannot communicate, the environment is to blame. Raises
    EnvironmentUnavailable if the device's backend does not work. Raises SuiteError if the order names no group.
    """
    case = order.case
    if case.group is None:
        raise SuiteError(f"the order of {case.module}.{case.qualname} names no first group")
    process_group.register_recording_backend(case.device_type, shared=case.share_devices, only=case.group.only)
    dist.init_process_group(
        process_group.BACKEND,
        init_method=f"file://{case.file_name}",
        rank=order.rank,
        world_size=case.world_size,
        timeout=timedelta(seconds=case.collective_timeout_s),
    )
    process_group.require_recording()
    process_group.ensure_cpu_backend(timedelta(seconds=case.deadlines.collective_s))
    dist.barrier()
    if case.device_type != "cpu":
        # A barrier may take the backend of the CPU.
        try_backend(device, timeout_s=case.deadlines.collective_s)
