"""
`fsdp-conformance doctor`: try out what this machine can do.

A failure here would make every case fail and is not the implementation's fault. A child process launches ranks, which
communicate as in a case (`cli.jobs.doctor`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fsdp_conformance import __version__, docs
from fsdp_conformance.adapters import registry
from fsdp_conformance.cli import chosen_cases, leftovers, messages
from fsdp_conformance.cli.arguments import settings_of
from fsdp_conformance.cli.child import answers
from fsdp_conformance.cli.survey import Machine
from fsdp_conformance.contract.profile import INTERPRETATION, load_profile
from fsdp_conformance.errors import UsageError
from fsdp_conformance.outcome.records import ABSENT
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.report.folding import folded
from fsdp_conformance.report.terminal import duration
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.status import Status
from fsdp_conformance.verdict import Verdict

#: A machine that takes longer to launch four ranks is too slow for cases with a deadline of a minute.
TIMEOUT_S = 120.0

#: What compiling the simulated accelerator may add, where it is not there yet: half a minute if nothing else runs.
_COMPILING_S = 600.0

#: With less room for temporary files, stores, logs and stacks may not fit.
_LITTLE_ROOM = 100 << 20

#: The effect of --share-devices, on real devices and on the simulated one.
_SHARING = (
    "several ranks of a case use each device; gloo copies through host memory, because NCCL wants a device for each "
    "rank; streams, kernels and the allocator are real; nothing is certified"
)
_SIMULATED_SHARING = (
    "every rank simulates the same single device, which exposes engines that use their rank as the index of their "
    "device; nothing is certified"
)

#: With it a line has 80 columns, unless a path is longer.
_TEXT_WIDTH = 53


class Findings:
    """Collects the findings, prints them unless JSON was requested, and notes whether one of them failed."""

    def __init__(self, *, printed: bool) -> None:
        self.failed = False
        self.entries: list[dict[str, str]] = []
        self._printed = printed

    def line(self, what: str, text: str, state: str = "ok", *, path: Path | str = "") -> None:
        """
        Print one finding. `path`: one in the text that may have spaces.

        `state` is ok; failed (no case can run); absent (not every run needs it); or stale (of a run that was killed).
        """
        self.failed = self.failed or state == "failed"
        self.entries.append({"what": what, "text": text, "state": state})
        first, *rest = folded(text, _TEXT_WIDTH, whole=[path] if path else ()) or [""]
        self.say("\n".join([f"  {what:<16} {first:<{_TEXT_WIDTH}}  {state}", *(f"{'':19}{line}" for line in rest)]))

    def quote(self, output: str) -> None:
        """Add the output of a child process to the last finding."""
        self.entries[-1]["output"] = output
        self.say(output.rstrip())

    def say(self, text: str) -> None:
        """Print a line that is not a finding."""
        if self._printed:
            print(text, flush=True)


def main(arguments: argparse.Namespace) -> int:
    """Print a line for each check. Returns 0, or 3 if no case can run here."""
    settings = settings_of(arguments)
    findings = Findings(printed=not arguments.json)
    began = time.monotonic()
    findings.say(
        f"{messages.PROGRAM} {__version__} · interpretation {INTERPRETATION} · python {platform.python_version()} · "
        f"{platform.system()} {platform.machine()}"
    )
    limit_s = TIMEOUT_S + (_COMPILING_S if settings.device == SIMULATED else 0.0)
    with answers("doctor", timeout_s=limit_s, device=settings.device, shared=settings.share_devices) as launches:
        # While the child imports torch, check what does not need it.
        _packages(findings)
        _compiler(findings)
        _temporary_files(findings)
        _earlier_runs(findings)
        machine = _launches(findings, launches, settings)
    if machine is not None:
        _cases(findings, machine, settings)
    _implementations(findings)
    seconds = duration(time.monotonic() - began)
    status = Status.ENVIRONMENT if findings.failed else Status.CERTIFIED
    if arguments.json:
        about = {"version": __version__, "interpretation": INTERPRETATION, "python": platform.python_version()}
        messages.say_json({**about, "device": settings.device, "status": int(status), "findings": findings.entries})
    elif findings.failed:
        print(f"this machine cannot run the cases: see the lines marked failed ({seconds})")
        print(docs.see(docs.ENVIRONMENT))
    else:
        options = f" --device {settings.device} --share-devices" if settings.share_devices else ""
        print(f"ready ({seconds}): fsdp-conformance init, smoke, and then run{options}")
    return status


def _implementations(findings: Findings) -> None:
    """The adapters that are registered, also those whose engine is not installed."""
    missing = {name: registry.missing_package(name) for name in registry.names()}
    ready = [name for name, package in missing.items() if not package]
    findings.line(
        "implementations", ", ".join(ready) or "none registered by an entry point", "ok" if ready else "absent"
    )
    if packages := sorted({package for package in missing.values() if package}):
        findings.line("other engines", f"adapters for {', '.join(packages)}, which are not installed", "absent")


def _packages(findings: Findings) -> None:
    versions, missing = [], []
    for name in ("torch", "pytest", "pytest-xdist"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    state = "failed" if {"torch", "pytest"} & set(missing) else "absent" if missing else "ok"
    without = f"; missing: {', '.join(missing)}" if missing else ""
    without += ", so no -n" if "pytest-xdist" in missing else ""
    findings.line("packages", ", ".join(versions) + without, state)


def _compiler(findings: Findings) -> None:
    """The simulated accelerator needs one, and so do engines that compile extensions."""
    names = [name for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name]
    compiler = next((path for name in names if (path := shutil.which(name))), None)
    if compiler:
        findings.line("C++ compiler", compiler, path=compiler)
    else:
        findings.line(
            "C++ compiler",
            f"none of {', '.join(names)}: no simulated accelerator, and no engines that compile extensions",
            "absent",
        )


def _temporary_files(findings: Findings) -> None:
    try:
        with tempfile.NamedTemporaryFile(prefix="fsdp-conformance-") as file:
            file.write(b"\0" * 4096)
            file.flush()
        place = tempfile.gettempdir()
        room = shutil.disk_usage(place).free
    except OSError as error:
        findings.line("temporary files", f"cannot be written: {error.strerror or error}; set TMPDIR", "failed")
        return
    little = room < _LITTLE_ROOM
    text = f"{place}, {room / 1e9:.1f} GB free" + ("; set TMPDIR" if little else "")
    findings.line("temporary files", text, "failed" if little else "ok", path=place)


def _earlier_runs(findings: Findings) -> None:
    pids, paths = leftovers.processes(), leftovers.directories()
    if not pids and not paths:
        findings.line("earlier runs", "no leftover processes or files")
    if pids:
        ranks = messages.plural(len(pids), "rank")
        text = f"{ranks} of a killed run still running: kill {' '.join(map(str, pids[:8]))}"
        findings.line("earlier runs", text, "stale")
    if paths:
        text = f"{len(paths)} files or directories of killed runs in {paths[0].parent}: delete {paths[0].name} ..."
        findings.line("earlier runs", text, "stale", path=paths[0].parent)


def _launches(findings: Findings, launches: Iterable[dict[str, Any]], settings: RunSettings) -> Machine | None:
    """Devices, backend, launch, rendezvous and collectives, as the child reports them."""
    machine, warm_s = None, 0.0
    checked: list[dict[str, Any]] = []
    for answer in launches:
        match answer.pop("what"):
            case "machine":
                machine = Machine.from_json(answer)
                _device(findings, machine, settings)
            case "warm":
                warm_s = answer["seconds"]
            case "collectives":
                checked.append(answer)
            case "unlaunched":
                findings.line("launch", answer["problem"], "failed")
            case "died":
                findings.line("launch", f"the child process {answer['how']}", "failed")
                findings.quote(answer["output"])
    if checked:
        first = checked[0]
        ranks = messages.plural(first["world_size"], "rank")
        findings.line("launch", f"warm process in {warm_s:.1f} s, then {ranks} in {first['seconds']:.2f} s")
        _collectives(findings, checked)
    return machine


def _device(findings: Findings, machine: Machine, settings: RunSettings) -> None:
    if machine.num_ranks == 0:
        findings.line("devices", f"none of type {machine.device!r}", "failed")
        return
    noun = "core" if machine.device == "cpu" else "device"
    findings.line("devices", f"{machine.device}, {messages.plural(machine.num_devices, noun)}")
    backend = machine.backend_of(settings) if settings.share_devices and machine.backend else machine.backend
    findings.line("backend", backend or machine.problem, "ok" if machine.backend else "failed")
    if settings.share_devices:
        findings.line("sharing", _SIMULATED_SHARING if machine.device == SIMULATED else _SHARING)
    _simulator(findings, machine)


def _simulator(findings: Findings, machine: Machine) -> None:
    """The accelerator for cases that cannot be exercised on a CPU."""
    what = "init modes, offload, memory and stream races without a GPU"
    if machine.simulated.problem:
        needed = machine.device == SIMULATED
        text = f"cannot be compiled: {machine.simulated.problem}; it provides {what}"
        findings.line("simulator", text, "failed" if needed else "absent")
    elif machine.simulator_built:
        findings.line("simulator", f"compiled: {what}")
    else:
        findings.line("simulator", f"will be compiled on first use (half a minute): {what}")


def _collectives(findings: Findings, checked: list[dict[str, Any]]) -> None:
    unmet = [answer for answer in checked if answer["rendezvous"]]
    text = f"file store: {unmet[0]['rendezvous']}" if unmet else "file store"
    findings.line("rendezvous", text, "failed" if unmet else "ok")
    wrong = [
        f"{name} on {messages.plural(answer['world_size'], 'rank')}: {text}"
        for answer in checked
        for name, text in answer["wrong"].items()
    ]
    for text in wrong:
        findings.line("collectives", text, "failed")
    if not wrong and not unmet:
        sizes = " and ".join(str(answer["world_size"]) for answer in checked)
        findings.line("collectives", f"{' · '.join(checked[0]['operations'])} exact on {sizes} ranks")


def _cases(findings: Findings, machine: Machine, settings: RunSettings) -> None:
    """How many cases this machine can run, whatever the implementation."""
    try:
        profile = load_profile(settings.profile)
    except UsageError as error:
        findings.line("cases", str(error), "failed")
        return
    cases = chosen_cases.cases_of(profile)
    records = [gated.record for gated in chosen_cases.foreseen_here(cases, machine, shared=settings.share_devices)]
    num_runnable = sum(record is None for record in records)
    text = f"{num_runnable} of {len(records)} in {profile.name} can run here"
    if settings.share_devices:
        alone = sum(gated.record is None for gated in chosen_cases.foreseen_here(cases, machine))
        text += f" with --share-devices, and {alone} without"
    findings.line("cases", text, "ok" if num_runnable else "failed")
    absent = Counter(
        name
        for record in records
        if record is not None and record.verdict is Verdict.NOT_RUN_ENV
        for name in record.measurements.get(ABSENT, ())
    )
    if absent:
        needs = ", ".join(f"{count} need {name}" for name, count in absent.most_common())
        findings.line("not here", f"{needs}: fsdp-conformance list --not-run", "absent")
