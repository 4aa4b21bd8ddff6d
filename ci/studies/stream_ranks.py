"""Runs a function on freshly forked ranks that have a process group."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed

from fsdp_conformance import errors
from fsdp_conformance.harness import context, devices
from fsdp_conformance.harness.probe import call_in_ranks
from fsdp_conformance.harness.rank import describe_error, destroy_process_group
from fsdp_conformance.outcome.endings import attribute

#: Modules that every rank imports.
_PRELOAD = ("torch.distributed.fsdp", "torch._dynamo", "studies.stream_runs")


def run_on_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int,
    device_type: str,
    timeout_s: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """
    Call `function(rank, device, *args)` on each rank, in a process group of all ranks; returns the JSON-ready results.

    The function must be at the top level of a module. Raises RankRaised with the traceback of the first rank that
    failed, RankDied or RankTimedOut.
    """
    reports, exits = call_in_ranks(
        Asked,
        function,
        args,
        world_size=world_size,
        device_type=device_type,
        timeout_s=timeout_s,
        environment=environment,
        preload=(*devices.preload(device_type), *_PRELOAD),
        preload_environment=devices.preload_environment(device_type),
    )
    failure = attribute(reports, exits)
    if failure.first is not None:
        report, end = reports[failure.first.rank], exits[failure.first.rank]
        if report is not None and report.error is not None:
            raise errors.RankRaised(f"{failure.headline}\n{report.error.traceback}", rank=failure.first.rank)
        kind = errors.RankTimedOut if failure.is_hang else errors.RankDied
        raise kind(f"{failure.headline}\n{end.stack}\n{end.output}".rstrip(), rank=failure.first.rank)
    return [report.measurements["answer"] for report in reports if report is not None]


class Asked:
    """The body of a rank."""

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, pipe: Connection, **kwargs: Any) -> None:
        run = context.running()
        case = run.order.case
        function, args = run.payload
        try:
            device = devices.device_of(case.device_type, rank)
            devices.use_device(device)
            distributed.init_process_group(
                devices.backend_for(case.device_type),
                init_method=f"file://{file_name}",
                rank=rank,
                world_size=case.world_size,
                timeout=timedelta(seconds=case.deadlines.collective_s),
            )
            answer = function(rank, device, *args)
            json.dumps(answer)
            run.report.measurements["answer"] = answer
        except Exception as error:  # noqa: BLE001 - whatever it raised is the answer
            run.note(error, describe_error(error))
        run.speak()
        run.wait_for_goodbye()
        destroy_process_group()


def synchronized(device: torch.device) -> None:
    """Make the host wait for everything on the device."""
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)
