"""
`run --resume`: go on with a run that Ctrl-C, a time limit or a crash of the machine has ended, in the same run file.

Everything is as it was: the options, the seeds, the suite, the adapter, torch. Only then do the cases of both parts
belong to one run. Cases with a verdict keep it; those that were running begin again, and the certificate names them.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from fsdp_conformance import codec
from fsdp_conformance.cli import report_dir
from fsdp_conformance.cli.named_code import NAMES_CODE, check_named
from fsdp_conformance.cli.survey import Survey
from fsdp_conformance.contract.fingerprint import suite_sha256
from fsdp_conformance.errors import ConfigError, RunFileError, UsageError
from fsdp_conformance.report import runfile
from fsdp_conformance.report.last_run import DEFAULT_ROOT, LAST, last_run
from fsdp_conformance.report.recorder import environment
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.run_settings import OPTIONS, RunSettings, settings_from_json

#: Of the environment, what a verdict can depend on.
_VERSIONS = ("torch", "python")

#: A line that the end of the run has cut off is no damage.
_TORN = "is incomplete"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """A run that goes on."""

    run: RunFile
    settings: RunSettings

    @property
    def directory(self) -> Path:
        """Of the run file."""
        return Path(self.run.path).parent

    @property
    def judged(self) -> tuple[str, ...]:
        """The cases that have a verdict."""
        return tuple(record.case for record in self.run.records)

    def check(self, survey: Survey) -> None:
        """Raise UsageError if the adapter, the versions or the suite have changed since the run began."""
        changes = list(_changes(self.run.header, survey, self.settings))
        if changes:
            raise UsageError(
                f"{self.run.path} cannot be continued, because this has changed since: {'; '.join(changes)}. "
                "Run all cases again."
            )


def resumed_run(arguments: argparse.Namespace) -> Resumed:
    """
    The run that --resume names, or the last one.

    Raises UsageError if there is none, if it has finished or is damaged, or if nothing but its file names its adapter;
    ConfigError for options that belong to the run.
    """
    given = {
        name: value
        for name, option in OPTIONS.items()
        if (value := getattr(arguments, name, None))
        not in (None, False, option.default if name != "implementation" else None)
    }
    others = [OPTIONS[name].flag for name in given if name not in NAMES_CODE]
    if others:
        problem = f"--resume takes its options from the run: leave out {', '.join(others)}"
        raise ConfigError([problem], where="run")
    path = report_dir.named_run(arguments.resume) if arguments.resume else last_run()
    if path is None:
        raise UsageError(f"--resume needs a run, but {DEFAULT_ROOT / LAST / runfile.NAME} does not exist: name one")
    run = runfile.read(path)
    problems = [problem for problem in run.problems if _TORN not in problem] + run.misplaced
    if not _is_time(run.header.get("started")):
        problems.append(f"it must say when it started, got {run.header.get('started')!r}")
    if problems:
        raise RunFileError(f"{path} cannot be continued: {'; '.join(problems)}")
    if run.footer is not None:
        raise UsageError(f"{path} is the file of a run that has finished, so there is nothing to continue")
    settings = settings_from_json(run.header.get("settings") or {})
    check_named(settings, {name: given.get(name) for name in NAMES_CODE}, path=path)
    for name in NAMES_CODE:
        flag, recorded, named = OPTIONS[name].flag, getattr(settings, name), given.get(name)
        if named not in (None, recorded):
            raise UsageError(f"{path} is a run with {flag} {recorded}, so it cannot be continued with {named}")
    return Resumed(run=run, settings=replace(settings, report_dir=str(path.parent)))


def resume_command(run: RunFile) -> str:
    """The command that continues a run, complete as it is."""
    settings = settings_from_json(run.header.get("settings") or {})
    recorded = ((name, getattr(settings, name)) for name in NAMES_CODE)
    options = [word for name, value in recorded if not NAMES_CODE[name](value) for word in (OPTIONS[name].flag, value)]
    return shlex.join(["fsdp-conformance", "run", "--resume", str(Path(run.path).parent), *options])


def _changes(header: Mapping[str, Any], survey: Survey, settings: RunSettings) -> Iterator[str]:
    if header.get("suite_sha256") != suite_sha256():
        yield "the suite"
    now, before = environment(settings.device), header.get("environment") or {}
    for name in _VERSIONS:
        if before.get(name) != now[name]:
            yield f"{name}, {before.get(name)} to {now[name]}"
    if (header.get("implementation") or {}) != codec.parsed(codec.encode(codec.plain(survey.description))):
        yield "the adapter or its engine"
    beside = _changed_beside(settings.implementation, str(header.get("started")))
    if beside:
        yield f"{', '.join(beside)} beside the adapter"


def _changed_beside(implementation: str, started: str) -> list[str]:
    """
    The Python files next to an adapter's file that were written after the time `started`.

    An engine that the adapter imports late, as in `wrap`, is not part of its description; it is often one of them.
    """
    path, separator, _ = implementation.rpartition(":")
    file = Path(path if separator and path.endswith(".py") else implementation)
    if file.suffix != ".py":
        return []
    begin = datetime.fromisoformat(started).timestamp()
    others = sorted(other for other in file.resolve().parent.glob("*.py") if other.name != file.name)
    return [other.name for other in others if other.stat().st_mtime > begin]


def _is_time(text: object) -> bool:
    try:
        return datetime.fromisoformat(str(text)).tzinfo is not None
    except ValueError:
        return False
