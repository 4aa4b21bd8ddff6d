"""
`fsdp-conformance parity`: where sharded training first differs from unsharded training, and whose fault that is.

The script runs as it is, then the reference, each recorded. Only if they are not equal bit for bit does the reference
run twice more: once to see whether it is deterministic, and once with its parameters nudged, to see how far rounding
takes it. If the reference is another script, and the engine may be the reason of a difference, the script also runs
without its sharding.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fsdp_conformance import codec
from fsdp_conformance.cli import messages
from fsdp_conformance.cli.child import answers
from fsdp_conformance.cli.commands.record import timeout_of
from fsdp_conformance.cli.commands.sanitize import Terminal
from fsdp_conformance.cli.killed_rank import KilledRank
from fsdp_conformance.cli.recorded_run import (
    LINGER_S,
    Lingering,
    elapsed,
    fresh_directory,
    run_recorded,
    simulated_gpus,
    torchrun,
)
from fsdp_conformance.errors import ConfigError, UsageError
from fsdp_conformance.parity.arbitration import is_open, settled
from fsdp_conformance.parity.comparison import compare
from fsdp_conformance.parity.finding import Finding, Whose
from fsdp_conformance.parity.kept import keep_of, renamed, too_large, with_element
from fsdp_conformance.parity.noise import nudge_of
from fsdp_conformance.parity.result import Comparison
from fsdp_conformance.parity.text import lines_of
from fsdp_conformance.recorder.settings import RecordSettings
from fsdp_conformance.recordings import files
from fsdp_conformance.recordings.events import USED, Keep, Sharding
from fsdp_conformance.recordings.files import Recording
from fsdp_conformance.report.html.training import NAME, training_page
from fsdp_conformance.status import Status

#: In an argument of the script, stands for the name of the run: its own directory for what it writes.
RUN = "{run}"

#: As --reference: the script with its sharding taken out, where each rank computes the samples of all of them.
ONE_PROCESS = "one-process"

#: The last line of a traceback, perhaps with the rank that torchrun puts before it.
_ERROR = re.compile(
    r"^(?:\[rank\d+\]: )?((?!.*ChildFailedError)[\w.]+(?:Error|Exception|TakeOut|Concatenate): .{1,300})"
)

_MAX_RANKS = 127


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The scripts to run."""

    script: tuple[str, ...]
    """The script or `-m` and a module, with its arguments."""
    reference: tuple[str, ...]
    reference_sharding: Sharding
    world_size: int
    reference_ranks: int
    timeout_s: float
    keeps_values: bool
    """If tensors differ, both sides run again up to that step, and keep them."""


class ScriptFailed(Exception):
    """A run ended badly before it had anything to compare."""


def main(arguments: argparse.Namespace) -> int:
    """Compare two recordings, or run a script and its reference and compare those. Returns the exit status."""
    terminal = Terminal()
    words = _words(arguments)
    if arguments.module_words is None and len(words) == 2 and all(Path(word).is_dir() for word in words):
        nudged = files.read(Path(arguments.nudged)) if arguments.nudged else None
        comparison = compare(files.read(Path(words[0])), files.read(Path(words[1])), nudged)
        return _report(comparison, terminal, arguments, arguments.html)
    order, reference = _order(arguments, words)
    with tempfile.TemporaryDirectory(prefix="fsdp-conformance-parity-") as temporary:
        directory = fresh_directory(arguments.output) if arguments.output else Path(temporary)
        try:
            with contextlib.ExitStack() as resources:
                gpus = order.world_size if arguments.as_cuda else 0
                variables = resources.enter_context(simulated_gpus(gpus)) if gpus else {}
                runs = _Runs(order, reference, directory, terminal, variables)
                comparison = runs.comparison()
        except ScriptFailed as error:
            messages.complain(str(error))
            return Status.SCRIPT_FAILED
        except KeyboardInterrupt:
            if arguments.output:
                messages.complain(f"what was recorded is in {directory}")
            raise
        page = arguments.html or (str(directory / NAME) if arguments.output else "")
        status = _report(comparison, terminal, arguments, page)
        if arguments.output:
            terminal.say(f"recordings: {directory}")
        if runs.failure:
            messages.complain(runs.failure)
            # A difference before the failure is what counts.
            is_compared = comparison.findings and comparison.findings[0].whose is not Whose.RUN
            return status if is_compared else Status.SCRIPT_FAILED
        return status


class _Runs:
    """The runs of a script and its reference."""

    def __init__(
        self,
        order: Order,
        reference: Recording | None,
        directory: Path,
        terminal: Terminal,
        variables: dict[str, str],
    ) -> None:
        """`variables`: of all processes."""
        self._order = order
        self._given = reference
        self._directory = directory
        self._terminal = terminal
        self._variables = variables
        self.failure = ""
        """How a run of the reference failed that had trained before."""

    def comparison(self) -> Comparison:
        """Run what is needed, and compare. Raises ScriptFailed."""
        run = self._run("run", self._order.script, ranks=self._order.world_size)
        if self._given is not None:
            return compare(run, self._given)
        comparison = self._compared(run)
        if not comparison.findings:
            return comparison
        finding = comparison.findings[0]
        if is_open(finding) and self._order.reference_sharding == "kept":
            finding = self._settled(finding, run, comparison.reference.recording)
        if self._order.keeps_values and finding.tensors and comparison.is_renamed:
            finding = renamed(finding)
        elif self._order.keeps_values and finding.tensors:
            keep = keep_of(finding, comparison.reference)
            finding = too_large(finding) if keep is None else self._with_values(finding, keep)
        return replace(comparison, findings=[finding, *comparison.findings[1:]])

    def _settled(self, finding: Finding, run: Recording, reference: Recording) -> Finding:
        """Run the script without its sharding, where that is possible, and see whose the difference is."""
        failure = self.failure
        try:
            unsharded = self._run("unsharded", self._order.script, ranks=self._order.world_size, sharding="taken out")
        except (ScriptFailed, UsageError):
            # It needs its sharding.
            return finding
        finally:
            self.failure = failure
        return settled(finding, run, reference, unsharded)

    def _compared(self, run: Recording) -> Comparison:
        """The run against the reference, which is run as often as that takes."""
        reference = self._reference("reference")
        first = compare(run, reference)
        if first.is_bitwise or (first.differs and first.findings[0].is_exact):
            return first
        again = compare(self._reference("again"), reference)
        if not again.is_bitwise:
            return replace(again, findings=[_not_deterministic(again)], suspicions=[])
        return compare(run, reference, self._reference("nudged", nudge_of(reference)))

    def _with_values(self, finding: Finding, keep: Keep) -> Finding:
        """Run both sides once more up to the step, and let the elements say more of the finding."""
        try:
            self._run("run-values", self._order.script, ranks=self._order.world_size, keep=keep)
            self._reference("reference-values", keep=keep)
        except (ScriptFailed, UsageError) as error:
            return replace(finding, evidence=(*finding.evidence, f"its elements were not compared: {error}"))
        run, reference = (str(self._directory / name) for name in ("run-values", "reference-values"))
        with answers("values", run=run, reference=reference, keep=codec.plain(keep)) as replies:
            last = list(replies)[-1:]
        if not last or last[0].get("what") != "values":
            how = last[0].get("how", "ended") if last else "ended"
            return replace(finding, evidence=(*finding.evidence, f"its elements were not compared: the process {how}"))
        element = last[0]["element"]
        if element is None:
            none = _NONE_USED if finding.kind == USED else _NO_ELEMENT
            return replace(finding, evidence=(*finding.evidence, none))
        return with_element(finding, element)

    def _reference(self, name: str, nudge: float = 0.0, keep: Keep | None = None) -> Recording:
        order = self._order
        return self._run(
            name,
            order.reference,
            ranks=order.reference_ranks,
            sharding=order.reference_sharding,
            nudge=nudge,
            keep=keep,
        )

    def _run(
        self,
        name: str,
        words: Sequence[str],
        *,
        ranks: int,
        sharding: Sharding = "kept",
        nudge: float = 0.0,
        keep: Keep | None = None,
    ) -> Recording:
        directory = self._directory / name
        settings = RecordSettings(
            directory=str(directory.absolute()), prefix=sys.prefix, sharding=sharding, nudge=nudge, keep=keep
        )
        words = [word.replace(RUN, name) for word in words]
        until = "" if keep is None else f", up to step {keep.step}"
        treated = f"{_TREATED[sharding]}{_on_ranks(ranks, self._order.world_size)}{until}"
        self._terminal.say(f"{name}: {' '.join(words)}{treated}")
        began = time.monotonic()
        errors: list[str] = []
        killed = KilledRank()

        def say(line: str) -> None:
            killed.read(line)
            self._terminal.say(f"[{name}] {line}", "dim")
            errors.extend(_ERROR.findall(line))

        # A run for the values goes on after the step that it is for.
        lingering = Lingering(directory, ranks, LINGER_S if keep is None else 0.0)
        status = run_recorded(
            torchrun(ranks, words),
            settings,
            say=say,
            timeout_s=self._order.timeout_s,
            variables=self._variables,
            is_enough=lingering.is_over,
        )
        if lingering.is_over() and keep is None:
            self._terminal.say(
                f"{name}: the script ended on all ranks, but their processes were still running {LINGER_S:g} s later"
            )
        ended = f"it was ended after {self._order.timeout_s:g} s (--timeout)" if status is None else f"status {status}"
        if status and (killed.words or errors):
            # The other ranks fail because they lose the one that was killed.
            ended += f", {killed.words or errors[0]}"
        try:
            recording = files.read(directory)
        except ConfigError as error:
            if status != 0:
                hint = ""
                if sharding != "kept":
                    hint = ". If the script needs sharded parameters, name an unsharded script with --reference"
                raise ScriptFailed(
                    f"{name} failed before it trained a step: {ended}; its output is above{hint}"
                ) from None
            raise UsageError(f"{name}: {error.problems[0]}") from None
        # Destructors of torch's may abort a process that has nothing left to do.
        has_trained = status is not None and not any(rank.error for rank in recording.ranks)
        if status != 0 and not has_trained and name != "run":
            self.failure = self.failure or f"{name} failed: {ended}; its output is above"
        how = "after all ranks had ended their training" if has_trained else "only the steps before that are compared"
        short = f"; {ended}: {how}" if status != 0 else ""
        self._terminal.say(f"{name}: {elapsed(began)}{short}")
        return recording


_TREATED: dict[Sharding, str] = {
    "kept": "",
    "taken out": " without its sharding",
    "whole batch": " without its sharding, the whole batch on each rank",
}


#: Evidence of a finding whose tensors are incomplete, or equal, when the script runs again.
_NONE_USED = (
    "no module was seen to compute with other values of its parameters: what it computes with them differs, or they "
    "were not seen, as in a compiled model"
)
_NO_ELEMENT = (
    "when both ran again, the elements of its tensors were equal, or not all of them could be read: the script may not "
    "be deterministic"
)


def _on_ranks(ranks: int, others: int) -> str:
    return f", {messages.plural(ranks, 'rank')}" if ranks != others else ""


def _not_deterministic(again: Comparison) -> Finding:
    """The reference was run twice, and the runs differ."""
    seen = again.findings[0] if again.findings else None
    largest = again.largest
    first = seen.first if seen is not None else ""
    if not first and largest is not None:
        first = f"{largest.kind} '{largest.name}' at step {largest.step}"
    return Finding(
        title="The reference is not deterministic",
        whose=Whose.SCRIPT,
        step=seen.step if seen is not None else (largest.step if largest is not None else None),
        first=first,
        likely="the generators are not seeded, or an operation adds up in any order: seed them in every process, and "
        "call torch.use_deterministic_algorithms(True)",
        evidence=("two runs of the same command differ, so a difference in a third run would prove nothing",),
        line=seen.line if seen is not None else "",
    )


def _report(comparison: Comparison, terminal: Terminal, arguments: argparse.Namespace, page: str) -> int:
    """Say it, and write the page, if there is a path for it. Returns the exit status."""
    terminal.say("")
    for text, style in lines_of(comparison, collectives=arguments.collectives):
        terminal.say(text, style)
    if page:
        try:
            Path(page).write_text(training_page(comparison), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--html must name a file that can be written, got {page!r}: {error.strerror}") from None
        terminal.say(f"report: {page}")
    if comparison.has_suite_failed:
        return Status.SUITE
    if comparison.is_vacuous or not (comparison.steps or comparison.differs):
        return Status.USAGE
    fails = comparison.differs or (arguments.strict_suspicions and comparison.suspicions)
    return Status.NOT_CERTIFIED if fails else Status.CERTIFIED


def _words(arguments: argparse.Namespace) -> list[str]:
    if arguments.module_words is not None:
        return ["-m", *arguments.module_words]
    words = list(arguments.script_words)
    return words[1:] if words[:1] == ["--"] else words


def _order(arguments: argparse.Namespace, words: list[str]) -> tuple[Order, Recording | None]:
    """The scripts to run, and a reference that was recorded before. Raises ConfigError with every problem."""
    problems: list[str] = []
    script = words[0] if words else ""
    if not words or words == ["-m"]:
        problems.append("give the path of a script, or -m and the name of a module, or two recordings")
    elif len(words) > 2 and all(Path(word).is_dir() for word in words[:2]):
        problems.append(f"options go before the two recordings, got {' '.join(words[2:])} after them")
    elif Path(script).is_dir():
        problems.append(f"give two recordings to compare, or a script to run: {script!r} is a directory")
    elif script != "-m" and not Path(script).is_file():
        problems.append(messages.no_script(script))
    world_size = _ranks(arguments.world_size, "--world-size", problems)
    reference_ranks = _ranks(arguments.reference_world_size or world_size, "--reference-world-size", problems)
    timeout_s = 1.0
    try:
        timeout_s = timeout_of(arguments.timeout)
    except UsageError as error:
        problems.append(str(error))
    recording: Recording | None = None
    reference: tuple[str, ...] = tuple(words)
    sharding: Sharding = "taken out"
    if arguments.reference == ONE_PROCESS:
        sharding = "whole batch"
    elif arguments.reference:
        # A command may be longer than any path.
        if os.path.isdir(arguments.reference):
            recording = files.read(Path(arguments.reference))
        else:
            reference, sharding = tuple(shlex.split(arguments.reference)), "kept"
            if not reference or (reference[0] != "-m" and not Path(reference[0]).is_file()):
                problems.append(
                    "--reference must be a script with its arguments, a recording, or one-process, got "
                    f"{arguments.reference!r}"
                )
    if arguments.nudged:
        problems.append(
            "--nudged is only for comparing two recordings: with a script, parity makes the nudged run itself"
        )
    if problems:
        raise ConfigError(problems, where="parity")
    order = Order(
        script=tuple(words),
        reference=reference,
        reference_sharding=sharding,
        world_size=world_size,
        reference_ranks=reference_ranks,
        timeout_s=timeout_s,
        keeps_values=not arguments.no_values,
    )
    return order, recording


def _ranks(word: str | int, option: str, problems: list[str]) -> int:
    """The number of ranks in an option. A wrong one becomes a problem."""
    try:
        ranks = int(word)
    except ValueError:
        ranks = 0
    if not 1 <= ranks <= _MAX_RANKS:
        problems.append(f"{option} must be from 1 to {_MAX_RANKS}, got {word}")
    return ranks
