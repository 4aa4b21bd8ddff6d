"""
`fsdp-conformance replay`: run a case again as it was run, and compare the verdicts.

Settings are those of the run file, and so is an implementation that is installed; another one is given. Changes since
then, such as in the adapter's source or in torch, are listed: they may be the reason for the verdict. Nothing is
written.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_conformance.adapters import registry
from fsdp_conformance.cli import messages, report_dir, single
from fsdp_conformance.cli.named_code import check_named
from fsdp_conformance.contract import selection
from fsdp_conformance.contract.fingerprint import suite_sha256
from fsdp_conformance.errors import ConfigError, RunFileError, UsageError
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report import repeated, runfile
from fsdp_conformance.report.last_run import DEFAULT_ROOT, LAST, last_run
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.run_settings import RunSettings, settings_from_json
from fsdp_conformance.status import Status


def main(arguments: argparse.Namespace) -> int:
    """Run the case N times. Returns 0 if the verdict was the same every time, else 1."""
    *runs, case = arguments.words
    if len(runs) > 1:
        raise UsageError(f"replay takes a run and a case, or a case of the last run, got {' '.join(arguments.words)}")
    if not arguments.times.isdecimal() or int(arguments.times) < 1:
        raise ConfigError([f"--times must be a positive number, got {arguments.times!r}"], where="replay")
    run = _read(runs[0] if runs else None)
    then = _record(run, case)
    settings = _settings(run, implementation=arguments.implementation, workload=arguments.workload)
    single.prepare(settings.device, settings.implementation)
    bound = single.bound(case)
    from fsdp_conformance.selftest.cases import record_of

    print(f"{case} on {settings.implementation}, as in {run.path}")
    for change in _changes(run.header, settings):
        print(f"  changed since: {change}")
    if then.ranks == "reused":
        print("  that run reused ranks, so the cases before may have had a part in it")
    print(flush=True)
    again = [record_of(bound.owner(bound.method), settings) for _ in range(int(arguments.times))]
    print(repeated.text(then, again))
    return Status.CERTIFIED if all(each.verdict is then.verdict for each in again) else Status.NOT_CERTIFIED


def _read(path: str | None) -> RunFile:
    """The run at a path, or the last one. Raises UsageError if there is none, RunFileError if it is damaged."""
    file: Path | None = report_dir.named_run(path) if path is not None else last_run()
    if file is None:
        raise UsageError(
            f"replay without RUN needs an earlier run, but {DEFAULT_ROOT / LAST / runfile.NAME} does not exist. "
            "Name one: fsdp-conformance replay RUN CASE"
        )
    run = runfile.read(file)
    if run.problems:
        raise RunFileError(f"{run.path} cannot be replayed: {'; '.join(run.problems)}")
    return run


def _record(run: RunFile, case: str) -> CaseRecord:
    for record in run.records:
        if record.case == case:
            return record
    hint = messages.did_you_mean(case, [record.case for record in run.records])
    raise UsageError(f"CASE must be a case that {run.path} has a verdict on, got {case!r}{hint or '.'}")


def _settings(run: RunFile, **named: str | None) -> RunSettings:
    """
    Those of the run, without its selection, and with the options that the user has `named`.

    Raises UsageError for ranks that only torchrun can start, and for an implementation or a workload that only the run
    file names by a path or a module: it would be imported.
    """
    settings = settings_from_json(run.header.get("settings") or {})
    check_named(settings, named, path=run.path)
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    settings = replace(settings, **given)
    if settings.ranks == "torchrun":
        raise UsageError(
            f"{run.path} is a run of torchrun's workers, which replay cannot start. Run the case again with "
            "torchrun ... -m fsdp_conformance run --ranks torchrun --case CASE, and use `compare`."
        )
    return replace(selection.unselected(settings), fail_fast=False, report_dir=None)


def _changes(header: Mapping[str, Any], settings: RunSettings) -> Iterator[str]:
    """The changes since the run that a verdict can depend on."""
    before, now = header.get("implementation") or {}, registry.describe_once(settings.implementation)
    if before.get("source_sha256") not in (None, now.source_sha256):
        yield "the adapter's source"
    if before.get("version") not in (None, now.version):
        yield f"the implementation's version, {before['version']} to {now.version}"
    if header.get("suite_sha256") not in (None, suite_sha256()):
        yield "the suite's source"
