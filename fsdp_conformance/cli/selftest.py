"""
`fsdp-conformance selftest`: is the suite to be believed on this machine?

Known-wrong engines must be killed, each by a finding that shows its defect, and correct engines must not be. Beside the
kills stands what a plain comparison of losses sees on the same engines.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fsdp_conformance.cli import messages
from fsdp_conformance.cli.answers import answers
from fsdp_conformance.report.recorder import usable_cores
from fsdp_conformance.report.terminal import duration
from fsdp_conformance.status import Status

_MAX_WORKERS = 8
_ROW = "  {:<16} {:>11} {:>14} {:>13}  {}"


@dataclass
class Tally:
    """What came of the trials of one class of defects, or of one correct engine."""

    expected: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    good: Counter[str] = field(default_factory=Counter)
    mutants: set[str] = field(default_factory=set)
    survivors: set[str] = field(default_factory=set)
    strict: int = 0
    """How many a strict comparison of losses sees."""

    def add(self, result: dict[str, Any]) -> None:
        """Count one result."""
        kind, engine = result["trial"]["kind"], result["trial"]["engine"]
        self.kinds[kind] += 1
        self.good[kind] += result["good"]
        self.strict += kind == "loss" and result["strict"]
        if kind == "kill":
            self.mutants.add(engine)
            if not result["good"]:
                self.survivors.add(engine)

    @property
    def is_complete(self) -> bool:
        """Whether all of its trials have ended."""
        return self.kinds.total() == self.expected

    def row(self, name: str, about: str) -> str:
        """A line of the table."""
        number = len(self.mutants)
        killed = f"{number - len(self.survivors)} of {number}"
        return _ROW.format(name, killed, f"{self.good['loss']} of {number}", f"{self.strict} of {number}", about)


def main(arguments: argparse.Namespace) -> int:
    """Print a line for each class of defects, and each survivor. Returns 0 if there is none, otherwise 1, 3 or 4."""
    began = time.monotonic()
    workers = arguments.workers if arguments.workers not in (None, "auto") else str(min(usable_cores(), _MAX_WORKERS))
    words = [workers, arguments.suites, *["--quick"] * arguments.quick]
    with answers("fsdp_conformance.cli.tryout", words) as found:
        status = _follow(found, int(workers))
    print(f"selftest: {'ok' if status is Status.CERTIFIED else 'FAILED'}, {duration(time.monotonic() - began)}")
    return status


def _follow(found: Iterable[dict[str, Any]], workers: int) -> Status:
    """Print results as they come, and sum them up."""
    plan: dict[str, Any] = {"trials": [], "groups": {}, "not_here": {}}
    tallies: dict[str, Tally] = {}
    failed: list[str] = []
    for answer in found:
        match answer.pop("what"):
            case "plan":
                plan = answer
                tallies = _begin(plan, workers)
            case "result":
                if answer["failed"]:
                    failed.append(answer["text"])
                _note(answer, tallies, plan["groups"])
            case "died":
                print(answer["output"].rstrip())
                failed.append(f"the child process {answer['how']}")
    return _conclude(plan, tallies, failed)


def _begin(plan: dict[str, Any], workers: int) -> dict[str, Tally]:
    trials = plan["trials"]
    print(f"{messages.plural(len(trials), 'trial')}, {messages.plural(workers, 'worker')}")
    print(_ROW.format("", "killed", "losses, 1e-2", "losses, 1e-5", "").rstrip())
    tallies: dict[str, Tally] = {}
    for trial in trials:
        tallies.setdefault(trial["group"], Tally()).expected += 1
    return tallies


def _note(result: dict[str, Any], tallies: dict[str, Tally], groups: dict[str, str]) -> None:
    trial = result["trial"]
    tally = tallies[trial["group"]]
    tally.add(result)
    if trial["kind"] != "loss" and not result["good"]:
        word = "SURVIVED" if trial["kind"] == "kill" else "WRONGLY KILLED"
        print(f"{word} {result['text']}", flush=True)
    if tally.is_complete and trial["group"] in groups:
        print(tally.row(trial["group"], groups[trial["group"]]), flush=True)


def _conclude(plan: dict[str, Any], tallies: dict[str, Tally], failed: list[str]) -> Status:
    """The sums, and the exit status."""
    whole = Tally()
    for group in plan["groups"]:
        whole.mutants |= tallies[group].mutants
        whole.survivors |= tallies[group].survivors
        whole.good += tallies[group].good
        whole.strict += tallies[group].strict
    print(whole.row("all", "").rstrip())
    right = {group: tally for group, tally in tallies.items() if tally.kinds["right"]}
    cases = sum(tally.kinds["right"] for tally in right.values())
    wronged = [group for group, tally in right.items() if tally.good["right"] < tally.kinds["right"]]
    killed = f"{', '.join(wronged)} wrongly killed" if wronged else "none is killed"
    print(f"correct engines ({', '.join(right) or 'none'}), {messages.plural(cases, 'trial')}: {killed}")
    for reason, names in _by_reason(plan["not_here"]).items():
        print(f"not run: {messages.plural(len(names), 'known-wrong engine')} ({reason})")
    missing = len(plan["trials"]) - sum(tally.kinds.total() for tally in tallies.values())
    if missing and not failed:
        failed = [f"{missing} of {len(plan['trials'])} trials have no result"]
    for text in failed:
        print(f"the suite itself failed: {text}")
    if failed:
        return Status.SUITE
    if not whole.mutants:
        return Status.ENVIRONMENT
    return Status.NOT_CERTIFIED if whole.survivors or wronged else Status.CERTIFIED


def _by_reason(not_here: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, reason in not_here.items():
        found.setdefault(reason, []).append(name)
    return found
