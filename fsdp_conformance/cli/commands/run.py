"""
`fsdp-conformance run`: look, run, show, judge.

Everything that can be known beforehand is reported before a rank is started: an implementation that cannot be imported,
a case that does not exist, a missing device, a directory that cannot be written. Then pytest runs the cases in its own
process. The verdict is derived from the run file alone, by the function that `verify` uses.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import shlex
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_conformance import __version__, codec, docs
from fsdp_conformance.cli import building, chosen_cases, estimate, messages, pace, report_dir, torchrun
from fsdp_conformance.cli.arguments import named_implementation, selection_words, settings_of
from fsdp_conformance.cli.expected import Expected, expected_by
from fsdp_conformance.cli.progress import Display, Progress, RunFileTail, display_for
from fsdp_conformance.cli.pytest_process import INTERRUPT_S, PytestProcess, command
from fsdp_conformance.cli.resumed import Resumed, resume_command, resumed_run
from fsdp_conformance.cli.signals import Stopped, caught
from fsdp_conformance.cli.survey import Machine, Survey
from fsdp_conformance.contract.case import Case
from fsdp_conformance.contract.profile import Profile, load_profile
from fsdp_conformance.diagnosis.headline import headline_of
from fsdp_conformance.errors import AdapterError, EnvironmentUnavailable, RunFileError, UsageError
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.pytest_plugin.dispatch import Slots
from fsdp_conformance.report import markdown, runfile, terminal
from fsdp_conformance.report.folding import screen_width
from fsdp_conformance.report.formats import junit
from fsdp_conformance.report.html.page import NAME as PAGE
from fsdp_conformance.report.last_run import last_run_of, remember, report_directory
from fsdp_conformance.report.recorder import usable_cores
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.report.signature import signature, signature_file, signing_key
from fsdp_conformance.report.verify import Verification, verify
from fsdp_conformance.run_settings import RunOrder, RunSettings
from fsdp_conformance.status import Status
from fsdp_conformance.verdict import Verdict

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

#: The run in Markdown, next to the run file.
SUMMARY = "summary.md"

#: The run as tests for a CI system.
TESTS = "junit.xml"

#: Seconds between two looks at the run file and at pytest.
_LOOK_S = 0.1

#: Every case has a deadline, so if no line comes for this long, pytest is stuck. Cases may wait an hour for devices
#: that another run holds.
_SILENCE_S = 2 * 3600.0

#: The number of ranks that the adapter check starts.
_SMOKE_RANKS = 2

#: Problems of an adapter that a run prints; `smoke` prints all.
_SHOWN = 5

#: Characters of options that a command which is printed may have. Scripts name hundreds of cases; the list of the whole
#: profile has them, too.
_READABLE = 300


def main(arguments: argparse.Namespace) -> int:
    """Run the selected cases. Returns the exit status."""
    arguments.implementation = named_implementation(arguments)
    resumed = resumed_run(arguments) if arguments.resume is not None else None
    settings = resumed.settings if resumed is not None else settings_of(arguments)
    if settings.ranks == "torchrun":
        if resumed is not None:
            raise UsageError(f"{resumed.run.path} is a run of torchrun's workers, which cannot be continued")
        return torchrun.main(arguments, settings, run)
    return run(arguments, settings, resumed=resumed)


def run(
    arguments: argparse.Namespace,
    settings: RunSettings,
    *,
    tell: Callable[[str], object] | None = None,
    resumed: Resumed | None = None,
) -> int:
    """Run with these settings. `tell` receives the first reason against a certificate."""
    with (
        # First of all: a signal that a shell ignores for its background jobs would be ignored by pytest, too.
        caught() as signals,
        PytestProcess() as pytest,
    ):
        profile = load_profile(settings.profile)
        key = signing_key(Path(arguments.sign)) if arguments.sign else None
        selected = chosen_cases.selected(profile, settings, arguments.suites)
        cases = [case for case in selected if resumed is None or case.id not in resumed.judged]
        _check_workers(arguments.workers)
        expected = expected_by(arguments)
        # At once: what follows waits for torch to be imported.
        messages.say(
            f"{messages.PROGRAM} {__version__} · {profile.name} · {len(cases)} of {len(profile.entries)} cases selected"
        )
        settings = pytest.with_workload(settings, signals)
        survey = pytest.survey(settings.device, settings.implementation, signals)
        if resumed is not None:
            resumed.check(survey)
        chosen_cases.check_machine(survey.machine, selected, settings)
        foreseen = chosen_cases.foreseen(cases, settings, survey)
        will_run = [(case, gated.device) for case, gated in zip(cases, foreseen, strict=True) if gated.record is None]
        if arguments.smoke:
            _check_adapter(pytest, settings, survey, will_run, signals)
        report = report_directory(settings) if resumed is None else resumed.directory
        if resumed is None:
            report_dir.prepare(report)
        else:
            messages.say(
                f"{len(selected) - len(cases)} of {len(selected)} cases have a verdict in {resumed.run.path}",
                resumed.run.path,
            )
        last, learned = last_run_of(settings), pace.known()
        num_workers = _num_workers(arguments.workers, will_run, survey.machine, settings)
        slots = _slots(survey.machine, settings)
        _announce(settings, survey, num_cases=len(cases), will_run=will_run, slots=slots)
        duration = estimate.estimate(will_run, workers=num_workers, last=last, pace=learned, slots=slots)
        _announce_duration(will_run, survey.machine, *duration)
        if any(device == SIMULATED for _, device in will_run) and not survey.machine.simulator_built:
            building.build_simulator(signals)
        remember(report)
        if signals:
            raise Stopped(signals[0])
        progress = Progress(cases, estimate.seconds_of(will_run, last=last, pace=learned))
        words = command(workers=arguments.workers, suites=arguments.suites)
        order = RunOrder(
            # A run that goes on has its seeds, and its other settings as well.
            settings=replace(settings.with_drawn_seed(), report_dir=str(report), smoke=arguments.smoke)
            if resumed is None
            else settings,
            description=codec.plain(survey.description),
            judged=None if resumed is None else resumed.judged,
        )
        pytest.begin(words, log=report / "pytest.log", order=order)
        with display_for(progress) as display:
            _follow(pytest, report / runfile.NAME, progress, display, signals)
        if arguments.suites is None:
            pace.learn(
                (device, estimate.typical_s(case, device), progress.seconds[case.id])
                for case, device in will_run
                if case.id in progress.seconds
            )
    compared = partial(expected.status, profile=profile, selected={case.id for case in selected})
    pages = partial(_write_pages, report, arguments.html, expected, profile, {case.id for case in selected})
    status, reason = _conclude(report, profile, pytest, compared, pages, signum=signals[0] if signals else 0)
    if key is not None:
        _sign(report / runfile.NAME, key)
    if tell is not None and status:
        tell(reason)
    return status


def _check_workers(workers: str | None) -> None:
    if workers not in (None, "0") and importlib.util.find_spec("xdist") is None:
        raise EnvironmentUnavailable(
            f"-n {workers} needs pytest-xdist, which is not installed. Run pip install pytest-xdist, or omit -n."
        )


def _check_adapter(
    pytest: PytestProcess,
    settings: RunSettings,
    survey: Survey,
    will_run: Collection[tuple[Case, str]],
    signals: Sequence[int],
) -> None:
    """
    Raise AdapterError if the adapter breaks its protocol: the cases would blame the engine.

    Only where two ranks can run as fresh processes; elsewhere the cases themselves show it.
    """
    device = settings.device
    fits = survey.machine.num_ranks is None or survey.machine.num_ranks >= _SMOKE_RANKS
    computes = device != "cpu" or "cpu_compute" in survey.description.declared(device)
    usual = settings.ranks == "processes" and not settings.share_devices
    if not usual or device == SIMULATED or not (fits and computes and will_run):
        return
    smoke = pytest.smoke(device, settings.implementation, signals)
    if "problem" in smoke:
        messages.say(f"the adapter could not be checked before the run: {smoke['problem']}")
    command = f"fsdp-conformance smoke {shlex.quote(settings.implementation)}"
    problems, breaches = (
        [f"{result['check']} {text}" for result in smoke.get("results", ()) for text in result[kind]]
        for kind in ("problems", "breaches")
    )
    if breaches:
        shown = [f"{Verdict.ERROR_ADAPTER}: {text}" for text in breaches[:_SHOWN]]
        if len(breaches) > _SHOWN:
            shown.append(f"{len(breaches) - _SHOWN} more such problems: {command}")
        shown.append(
            f"The adapter must be right before its engine can be judged. Check it with: {command}; "
            f"{docs.see(docs.ADAPTER_PROBLEMS)}. To run the cases anyway: --no-smoke"
        )
        raise AdapterError(shown)
    for text in problems[:_SHOWN]:
        messages.say(f"smoke: {text}")
    if problems:
        messages.say("  the cause may be in the adapter or in the engine; to run this check alone:")
        print(f"    {command}", flush=True)


def _announce(
    settings: RunSettings,
    survey: Survey,
    *,
    num_cases: int,
    will_run: Sequence[tuple[Case, str]],
    slots: Slots | None,
) -> None:
    description, machine = survey.description, survey.machine
    name = f"{description.name} {description.version}".rstrip()
    messages.say(f"implementation {name} ({settings.implementation})", settings.implementation)
    for shim in description.shims:
        messages.say(f"  shim: {shim}")
    if settings.workload:
        messages.say(f"model, batches and loss of {settings.workload}: nothing is certified", settings.workload)
    backend = machine.backend_of(settings)
    messages.say(f"device {machine.device} · backend {backend} · torch {machine.torch}")
    if settings.share_devices:
        # Each rank simulates the device that all share.
        count = 1 if machine.device == SIMULATED else machine.num_devices
        messages.say(f"ranks share {messages.plural(count, 'device')}, and nothing is certified")
    if settings.stress_seed is not None:
        messages.say(f"stress run with seed {settings.stress_seed}: every case is provoked, and nothing is certified")
    if settings.stress_failure:
        messages.say(f"one rank of each case is made to fail ({settings.stress_failure}), and what follows is judged")
    if num_cases > len(will_run):
        words = selection_words(settings)
        if sum(map(len, words)) > _READABLE:
            words = selection_words(replace(settings, cases=()))
        options = " ".join(["--implementation", shlex.quote(settings.implementation), *words])
        not_run = messages.plural(num_cases - len(will_run), "case")
        messages.say(f"{not_run} cannot run here; for the reasons:")
        print(f"  fsdp-conformance list --not-run {options}")
    if slots is not None and slots.slots_per_device > 1:
        print(f"up to {slots.slots_per_device} cases use a device at the same time")


def _announce_duration(will_run: Sequence[tuple[Case, str]], machine: Machine, seconds: float, source: str) -> None:
    """Print how many cases will run, and how long they will take, with the source of that figure."""
    simulated = sum(device == SIMULATED for _, device in will_run)
    where = f", {simulated} of them on the simulated accelerator" if simulated and machine.device != SIMULATED else ""
    to_run = messages.plural(len(will_run), "case")
    messages.say(
        f"running {to_run}{where}: {estimate.in_words(seconds)} ({source})" if will_run else "no case can run here"
    )
    print(flush=True)


def _slots(machine: Machine, settings: RunSettings) -> Slots | None:
    """The slots of devices that ranks own; None if they share them."""
    if not machine.num_ranks or settings.share_devices or settings.ranks == "torchrun":
        return None
    return Slots(machine.num_ranks, settings.slots_per_device or machine.auto_slots)


def _num_workers(
    workers: str | None, cases: Sequence[tuple[Case, str]], machine: Machine, settings: RunSettings
) -> int:
    """As many as `-n` makes."""
    if workers != "auto":
        return int(workers or 1)
    slots = _slots(machine, settings)
    if slots is None:
        return machine.num_devices
    smallest = min((case.world_size for case, _ in cases if case.world_size > 1), default=1)
    alone = max(1, slots.num_devices // smallest)
    return max(alone, min(alone * slots.slots_per_device, usable_cores()))


def _follow(
    pytest: PytestProcess, run_file: Path, progress: Progress, display: Display, signals: Sequence[int]
) -> None:
    """Show the progress until pytest has ended, and pass on the signals that come to the list."""
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
                    f"interrupted: running cases have {INTERRUPT_S:.0f} s to finish; interrupt again to kill them"
                )
            pytest.interrupt()
        if time.monotonic() - last > _SILENCE_S:
            display.say(f"no case has started or finished for {terminal.duration(_SILENCE_S)}: ending the run")
            pytest.interrupt()
            last = time.monotonic()
        if running:
            time.sleep(_LOOK_S)
    tail.close()


def _conclude(
    report: Path,
    profile: Profile,
    pytest: PytestProcess,
    compared: Callable[[Verification], int],
    pages: Callable[[Verification], object],
    *,
    signum: int,
) -> tuple[int, str]:
    """
    Print the findings, the verdict, and the path of the run file. `compared` prints how a finished run differs from
    expectations, and returns its exit status; `pages` writes the run for people.

    Returns the exit status, and the first headline, or else why there is no certificate.
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
        pages(verification)
    status = _status(report, verification, pytest, compared, signum=signum)
    if pytest.log_problem:
        messages.complain(f"the log is incomplete: {pytest.log_problem}")
    if path.exists():
        print(f"run file: {path}", flush=True)
    return status, _first_reason(verification) or f"ended with status {status}"


def _sign(path: Path, key: Ed25519PrivateKey) -> None:
    """Write the signature of a run file next to it; only a run that finished has one."""
    try:
        run: RunFile | None = runfile.read(path)
    except RunFileError:
        run = None
    if run is None or run.footer is None or run.problems:
        messages.complain("the run file is not signed, because the run did not finish")
        return
    file = signature_file(path)
    report_dir.write_text(file, signature(run.chain, key), option="--report")
    print(f"signature: {file}", flush=True)


def _write_pages(
    report: Path,
    wanted_at: str | None,
    expected: Expected,
    profile: Profile,
    selected: Collection[str],
    verification: Verification,
) -> None:
    """Write the run as Markdown, JUnit XML and HTML into its directory, the latter also to where it was asked for."""
    run, certificate, judged = verification.run, verification.certificate, expected.judged(verification, profile)
    texts = {
        report / SUMMARY: markdown.summary(run, certificate, judged),
        report / TESTS: junit.text(run, certificate, judged),
        report / PAGE: expected.page(verification, judged, selected),
    }
    with contextlib.suppress(OSError):  # a full disk is reported with the run file
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        print(f"report: {report / PAGE}")
    if wanted_at is not None:
        report_dir.write_text(Path(wanted_at), texts[report / PAGE], option="--html")


def _show_resume_command(verification: Verification | None) -> None:
    """Print the command that continues the run."""
    if verification is not None:
        print(f"  {resume_command(verification.run)}", flush=True)


def _first_reason(verification: Verification | None) -> str:
    if verification is None:
        return ""
    headlines = map(headline_of, verification.run.records)
    first = next((finding for finding in headlines if finding is not None), None)
    return first.sentence() if first is not None else next(iter(verification.certificate.reasons), "")


def _show(verification: Verification) -> None:
    run, certificate = verification.run, verification.certificate
    print()
    findings = terminal.render_findings(run.records, width=screen_width(), run=run.path)
    if findings:
        print(findings, end="\n\n")
    if run.footer is None:
        return
    messages.say(terminal.summary_line(certificate, seconds=run.seconds))
    harm = terminal.harm_line(run.records)
    if harm:
        print(f"  {harm}")
    text = terminal.certificate_text(certificate, width=screen_width())
    if text:
        print(text)
    if Verdict.ERROR_ADAPTER in certificate.counts:
        print(f"  {docs.see(docs.ADAPTER_PROBLEMS)}")
    elif certificate.reasons and not certificate.only_incomplete:
        print(f"  {docs.see(docs.NOT_CERTIFIED)}")
    if certificate.only_incomplete:
        print("  No failures, but a partial profile cannot certify.")


def _status(
    report: Path,
    verification: Verification | None,
    pytest: PytestProcess,
    compared: Callable[[Verification], int],
    *,
    signum: int,
) -> int:
    """The exit status. If pytest did not finish, also print why."""
    whole = verification is not None and verification.run.footer is not None
    if signum and not whole:
        num_judged = len(verification.run.records) if verification is not None else 0
        messages.complain(
            f"interrupted by {signal.Signals(signum).name} after {messages.plural(num_judged, 'case')}. "
            "The run file is intact, but an incomplete run cannot certify. To go on:"
        )
        _show_resume_command(verification)
        return 128 + signum
    if verification is not None and verification.run.footer is not None:
        for discrepancy in verification.discrepancies:
            messages.complain(discrepancy)
        return Status.SUITE if verification.discrepancies else compared(verification)
    if pytest.error is not None:
        messages.complain(pytest.error.message)
        return pytest.error.status
    disk = report_dir.room_problem(report)
    if disk is not None:
        messages.complain(
            f"the run ended early because {report} cannot be written: {disk.strerror or disk}. "
            "Free some space, or choose another directory with --report. Finished cases are in the run file; to go on:"
        )
        _show_resume_command(verification)
        return Status.ENVIRONMENT
    messages.complain(
        f"pytest ended with status {pytest.returncode} before the run was complete. "
        f"This is not the implementation's fault. The end of {pytest.log}:\n{pytest.tail()}"
    )
    return Status.SUITE
