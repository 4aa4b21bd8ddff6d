"""
`fsdp-conformance run` as a worker of torchrun, one of many on one host or several.

The first worker does what the command always does. The others run the same cases in the same order, print nothing, and
send what they find to the first.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fsdp_conformance import codec
from fsdp_conformance.cli.pytest_process import PytestProcess, command
from fsdp_conformance.cli.signals import caught
from fsdp_conformance.errors import ConfigError, ConformanceError
from fsdp_conformance.run_settings import RunOrder, RunSettings, TorchrunWorker
from fsdp_conformance.status import Status

#: Names the file in which torchrun looks for the first failure of a worker.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

_LOOK_S = 0.1


def main(arguments: argparse.Namespace, settings: RunSettings, run: Callable[..., int]) -> int:
    """
    Run the cases with the other workers; `run` is what the first one does.

    Returns the exit status, which is 0 for all workers but the first.
    """
    worker = TorchrunWorker.from_environment(os.environ)
    problems = []
    if arguments.workers is not None:
        problems.append(f"-n {arguments.workers} must be omitted: all workers of torchrun run each case together")
    if arguments.last_failed:
        problems.append("--last-failed must be omitted: workers on other hosts do not have the last run; use --case")
    if problems:
        raise ConfigError(problems, where="--ranks torchrun")
    try:
        if worker.rank:
            return _follow(arguments, settings)
        return run(arguments, settings, tell=_tell_torchrun)
    except ConformanceError as error:
        _tell_torchrun(str(error))
        raise


def _follow(arguments: argparse.Namespace, settings: RunSettings) -> int:
    """Run the cases and print nothing."""
    with tempfile.TemporaryDirectory(prefix="fsdp-conformance-") as directory:
        report = Path(directory)
        with caught() as signals, PytestProcess() as pytest:
            survey = pytest.survey(settings.device, settings.implementation, signals)
            words = command(suites=arguments.suites)
            order = RunOrder(
                settings=replace(settings, report_dir=directory), description=codec.plain(survey.description)
            )
            pytest.begin(words, log=report / "pytest.log", order=order)
            while pytest.running():
                if signals:
                    pytest.interrupt()
                time.sleep(_LOOK_S)
        if signals:
            return 128 + signals[0]
        if pytest.error is not None:
            raise ConformanceError(pytest.error.message)
    return Status.CERTIFIED


def _tell_torchrun(message: str) -> None:
    """
    Leave a failure where torchrun looks for it, as `torch.distributed.elastic.multiprocessing.errors` writes it.

    An earlier failure stays.
    """
    place = os.environ.get(ERROR_FILE)
    if not place or Path(place).exists():
        return
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    Path(place).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
