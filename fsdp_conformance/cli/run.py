"""
`fsdp-conformance run`: look, run, show, judge.

What can be said beforehand is said before a rank is started: an implementation that cannot be imported, a case that
nobody has, a device that is absent, a directory that cannot be written. Then pytest runs the cases in a process of its
own. The verdict is derived from the run file alone, by the function that `verify` uses.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fsdp_conformance import __version__
from fsdp_conformance.cli import building, messages, report_dir, selection, torchrun
from fsdp_conformance.cli.arguments import settings_of
from fsdp_conformance.cli.progress import Display, Progress, RunFileTail, display_for
from fsdp_conformance.cli.pytest_process import INTERRUPT_S, PytestProcess, command
from fsdp_conformance.cli.signals import caught
from fsdp_conformance.cli.status import Status
from fsdp_conformance.cli.survey import Survey, survey
from fsdp_conformance.config import SIMULATED, RunSettings
from fsdp_conformance.contract.profile import Profile, load_profile
from fsdp_conformance.errors import EnvironmentUnavailable, RunFileError
from fsdp_conformance.report import markdown, runfile, terminal
from fsdp_conformance.report.recorder import link_last, report_directory
from fsdp_conformance.report.verify import Verification, verify

#: The run in Markdown, beside the run file.
SUMMARY = "summary.md"

#: Seconds between two looks at the run file and at pytest.
_LOOK_S = 0.1

#: A run in which no line comes for so long, though each case has its deadline, has lost its pytest. Cases may wait an
#: hour for devices that another run holds.
_SILENCE_S = 2 * 3600.0


def main(arguments: argparse.Namespace) -> int:
    """Run the cases that were asked for. Returns the exit status."""
    settings = settings_of(arguments)
    if settings.ranks == "torchrun":
        return torchrun.main(arguments, settings, run)
    return run(arguments, settings)


def run(arguments: argparse.Namespace, settings: RunSettings, *, tell: Callable[[str], object] | None = None) -> int:
    """The same for settings that are known already. `tell` gets the first thing that speaks against a certificate."""
    profile = load_profile(settings.profile)
    cases = selection.selected(profile, settings)
    _check_workers(arguments.workers)
    found = survey(settings.device, settings.implementation)
    selection.check_machine(found.machine, cases, settings)
    report = report_directory(settings)
    report_dir.prepare(report)
    foreseen = selection.foreseen(cases, settings, found)
    will_run = [case for case, gated in zip(cases, foreseen, strict=True) if gated.record is None]
    simulated = sum(gated.record is None and gated.device == SIMULATED for gated in foreseen)
    _announce(settings, profile, found, num_cases=len(cases), num_run=len(will_run), num_simulated=simulated)
    if simulated and not found.machine.simulator_built:
        building.build_simulator()
    if settings.report_dir is None:
        link_last(report)
    progress = Progress(cases, will_run)
    words = command(settings, report=report, workers=arguments.workers, suites=arguments.suites)
    with (
        # First of all: a signal that a shell ignores for its background jobs would be ignored by pytest, too.
        caught() as signals,
        PytestProcess(words, log=report / "pytest.log", description=found.description.to_json()) as pytest,
        display_for(progress) as display,
    ):
        _follow(pytest, report / runfile.NAME, progress, display, signals)
    status, reason = _conclude(report, profile, pytest, signum=signals[0] if signals else 0)
    if tell is not None and status:
        tell(reason)
    return status


def _check_workers(workers: str | None) -> None:
    if workers is not None and importlib.util.find_spec("xdist") is None:
        raise EnvironmentUnavailable(
            f"-n {workers} needs pytest-xdist, which is not installed. "
            "Install fsdp-conformance[xdist], or leave -n out."
        )


def _announce(
    settings: RunSettings, profile: Profile, found: Survey, *, num_cases: int, num_run: int, num_simulated: int
) -> None:
    description, machine = found.description, found.machine
    gated = num_cases - num_run
    of_all = f"{messages.plural(num_cases, 'case')} of {len(profile.entries)}"
    print(f"{messages.PROGRAM} {__version__} · {profile.name} · {of_all}")
    print(f"implementation {description.name} {description.version} ({settings.implementation})")
    for shim in description.shims:
        print(f"  shim: {shim}")
    print(f"device {machine.device} · backend {machine.backend} · torch {machine.torch}")
    if num_simulated and settings.device != SIMULATED:
        print(f"{messages.plural(num_simulated, 'case')} that ask for an accelerator run on the simulated one (sim)")
    if gated:
        print(f"{gated} of the cases will not run here: fsdp-conformance list --not-run{_same_options(settings)}")
    print(flush=True)


def _same_options(settings: RunSettings) -> str:
    words = [f" --implementation {settings.implementation}"]
    words += [f" --device {settings.device}"] if settings.device != "cpu" else []
    words += [] if settings.simulator else [" --no-simulator"]
    return "".join(words)


def _follow(
    pytest: PytestProcess, run_file: Path, progress: Progress, display: Display, signals: Sequence[int]
) -> None:
    """Show the progress until pytest has ended; hand on the signals that come to the list."""
    tail = RunFileTail(run_file)
    last = time.monotonic()
    handled = 0
    running = True
    while running:
        running = pytest.running()
        for line in tail.lines():
            last = time.monotonic()
            display.took(line, progress.take(line))
        display.tick()
        if len(signals) > handled:
            handled += 1
            if handled == 1:
                display.say(
                    f"interrupted: the cases that run have {INTERRUPT_S:.0f} s to end; again to end them at once"
                )
            pytest.interrupt()
        if time.monotonic() - last > _SILENCE_S:
            display.say(f"no case has begun or ended for {terminal.duration(_SILENCE_S)}: ending the run")
            pytest.interrupt()
            last = time.monotonic()
        if running:
            time.sleep(_LOOK_S)
    tail.close()


def _conclude(report: Path, profile: Profile, pytest: PytestProcess, *, signum: int) -> tuple[int, str]:
    """
    The findings, the verdict, and where the run file is.

    Returns the exit status, and the first finding, or else why there is no certificate.
    """
    path = report / runfile.NAME
    try:
        verification: Verification | None = verify(path, profile)
    except RunFileError as error:
        if not signum:
            messages.complain(str(error))
        verification = None
    if verification is not None:
        _show(verification)
        with contextlib.suppress(OSError):  # a disk that is full is told of below
            text = markdown.summary(verification.run, verification.certificate)
            (report / SUMMARY).write_text(text, encoding="utf-8")
    status = _status(report, verification, pytest, signum=signum)
    if pytest.log_problem:
        messages.complain(f"the log is not whole: {pytest.log_problem}")
    if path.exists():
        print(f"run file: {path}", flush=True)
    return status, _first_reason(verification) or f"ended with status {status}"


def _first_reason(verification: Verification | None) -> str:
    if verification is None:
        return ""
    findings = (finding for record in verification.run.records for finding in record.findings)
    first = next(findings, None)
    return first.sentence() if first is not None else next(iter(verification.certificate.reasons), "")


def _show(verification: Verification) -> None:
    run, certificate = verification.run, verification.certificate
    print()
    findings = terminal.render_findings(run.records)
    if findings:
        print(findings, end="\n\n")
    if run.footer is None:
        return
    seconds = float(run.footer.get("seconds") or sum(record.seconds for record in run.records))
    print(terminal.summary_line(certificate, seconds=seconds))
    reasons = terminal.reasons_text(certificate)
    if reasons:
        print(reasons)
    if certificate.only_incomplete:
        print("  nothing that ran speaks against the implementation; a part of a profile certifies nobody")


def _status(report: Path, verification: Verification | None, pytest: PytestProcess, *, signum: int) -> int:
    """The exit status, with what must be said if pytest did not come to its end."""
    whole = verification is not None and verification.run.footer is not None
    if signum and not whole:
        num_judged = len(verification.run.records) if verification is not None else 0
        messages.complain(
            f"interrupted by {signal.Signals(signum).name}; {messages.plural(num_judged, 'case')} had been judged. "
            "What is in the run file is intact, and certifies nothing."
        )
        return 128 + signum
    if verification is not None and verification.run.footer is not None:
        for discrepancy in verification.discrepancies:
            messages.complain(discrepancy)
        return Status.SUITE if verification.discrepancies else verification.certificate.status
    if pytest.error is not None:
        messages.complain(pytest.error.message)
        return pytest.error.status
    disk = report_dir.room_problem(report)
    if disk is not None:
        messages.complain(
            f"the run ended early because {report} cannot be written: {disk.strerror or disk}. "
            "Free some space, or choose another directory with --report; what was judged before is intact."
        )
        return Status.ENVIRONMENT
    messages.complain(
        f"pytest ended with status {pytest.returncode} before the run was through, so nothing is certified. "
        f"This is not the implementation's doing. The end of {pytest.log}:\n{pytest.tail()}"
    )
    return Status.SUITE
