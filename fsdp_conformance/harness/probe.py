"""
Calls one function in fresh warm processes, such as one that tells what an adapter declares or what a machine can do.

The controller stays clean: whatever the function imports, sets or breaks ends with its process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fsdp_conformance import errors
from fsdp_conformance.harness import context
from fsdp_conformance.harness.deadlines import Deadlines
from fsdp_conformance.harness.environment import Determinism
from fsdp_conformance.harness.order import CaseOrder, packed
from fsdp_conformance.harness.processes.launcher import launch
from fsdp_conformance.harness.rank import describe_error
from fsdp_conformance.outcome.endings import attribute
from fsdp_conformance.outcome.records import RankError, RankExit, RankReport

#: Errors that are raised again in the controller; their constructors take only the message.
_PLAIN_ERRORS = (errors.AdapterNotFound, errors.RunFileError, errors.UsageError, errors.SuiteError)


def run_in_child(
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    environment: Mapping[str, str] | None = None,
    preload: tuple[str, ...] = (),
) -> Any:
    """
    Return the result of `function(*args)`, called in a fresh process.

    It must be a module's top-level function and return a value that JSON can hold.

    `environment` is set before the function's module is imported. No process group is made. One of our own errors is
    raised again; otherwise raises RankRaised with the traceback, RankDied with the exit, or RankTimedOut with the
    stack.
    """
    reports, exits = call_in_ranks(
        Probe,
        function,
        args,
        world_size=1,
        timeout_s=timeout_s,
        environment=environment,
        preload=preload,
        # Engines are imported here that may look for a GPU.
        hides_gpus=False,
    )
    what = f"{function.__module__}.{function.__qualname__} in a separate process"
    report, end = reports[0], exits[0]
    if report is None:
        attribution = attribute(reports, exits)
        kind = errors.RankTimedOut if attribution.is_hang else errors.RankDied
        evidence = end.stack if attribution.is_hang and end.stack else end.output
        raise kind(f"{what}: {attribution.headline}\n{evidence}".rstrip(), rank=0)
    if report.not_run is not None:
        raise errors.EnvironmentUnavailable(report.not_run)
    if report.error is not None:
        raise _raised(report.error, what)
    return report.measurements["answer"]


def call_in_ranks(
    entry: type,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    world_size: int,
    device_type: str = "cpu",
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    preload: tuple[str, ...] = (),
    preload_environment: Mapping[str, str] | None = None,
    hides_gpus: bool = True,
) -> tuple[list[RankReport | None], list[RankExit]]:
    """
    Start fresh ranks whose entry point is `entry._run` and whose payload is `(function, args)`, and wait for their end.

    Returns the report (None if it sent none) and the exit of each rank.
    """
    with tempfile.TemporaryDirectory(prefix="fsdp-conformance-", ignore_cleanup_errors=True) as directory:
        order = CaseOrder(
            module=entry.__module__,
            qualname=entry.__qualname__,
            test_name=function.__qualname__,
            file_name=str(Path(directory) / "store"),
            directory=Path(directory),
            world_size=world_size,
            device_type=device_type,
            deadlines=Deadlines.nested(timeout_s),
            determinism=Determinism(algorithms="off"),
            variables=dict(environment or {}),
            preload=preload,
            preload_environment=dict(preload_environment or {}),
            payload=packed((function, args)),
            imports_main=function.__module__ == "__main__",
            hides_gpus=hides_gpus,
        )
        launched = launch(order)
        try:
            return launched.wait()
        finally:
            launched.close()


class Probe:
    """The rank's side."""

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, pipe: Connection, **kwargs: Any) -> None:
        run = context.running()
        function, args = run.payload
        try:
            run.report.measurements["answer"] = function(*args)
        except Exception as error:  # noqa: BLE001 - the exception is the answer
            run.note(error, describe_error(error))
        run.speak()


def _raised(error: RankError, what: str) -> errors.ConformanceError:
    """The exception to raise in the controller for one in the child."""
    module, _, name = error.kind.rpartition(".")
    kind = getattr(errors, name, None) if module == errors.__name__ else None
    if kind is errors.AdapterError:
        return errors.AdapterError(error.problems or error.message)
    if kind in _PLAIN_ERRORS:
        raised: errors.ConformanceError = kind(error.message)
        return raised
    return errors.RankRaised(f"{what} raised\n{error.traceback.rstrip()}", rank=0)
