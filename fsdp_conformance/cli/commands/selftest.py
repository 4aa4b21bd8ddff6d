"""
`fsdp-conformance selftest`: can the suite be trusted on this machine?

Known-wrong engines must be killed, each by a finding that shows its defect, and correct engines must not be. The table
also shows how many of the same engines a plain comparison of losses catches.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fsdp_conformance.cli import messages
from fsdp_conformance.cli.child import answers
from fsdp_conformance.report.recorder import usable_cores
from fsdp_conformance.report.terminal import duration
from fsdp_conformance.status import Status

_MAX_WORKERS = 8
_ROW = "  {:<16} {:>11} {:>14} {:>13}  {}"


@dataclass
class Tally:
    """The results of the trials of one class of defects, or of one correct engine."""

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
        """True once all of its trials have ended."""
        return self.kinds.total() == self.expected

    def to_json(self) -> dict[str, Any]:
        """The numbers of the line, and the names of those that survived."""
        return {
            "engines": len(self.mutants),
            "survivors": sorted(self.survivors),
            "seen_by_losses_1e-2": self.good["loss"],
            "seen_by_losses_1e-5": self.strict,
        }

    def row(self, name: str, about: str) -> str:
        """A line of the table."""
        number = len(self.mutants)
        killed = f"{number - len(self.survivors)} of {number}"
        return _ROW.format(name, killed, f"{self.good['loss']} of {number}", f"{self.strict} of {number}", about)


def main(arguments: argparse.Namespace) -> int:
    """Print a line for each class of defects, and each survivor. Returns 0 if there is none, otherwise 1, 3 or 4."""
    began = time.monotonic()
    workers = arguments.workers if arguments.workers not in (None, "auto") else str(min(usable_cores(), _MAX_WORKERS))
    with answers("selftest", workers=int(workers), suites=arguments.suites, quick=arguments.quick) as replies:
        outcome = _follow(replies, int(workers), printed=not arguments.json)
    status = outcome.status
    if arguments.json:
        messages.say_json(outcome.to_json())
    else:
        _sum_up(outcome)
        print(f"selftest: {'ok' if status is Status.CERTIFIED else 'FAILED'}, {duration(time.monotonic() - began)}")
    return status


@dataclass
class Outcome:
    """The results of all trials."""

    plan: dict[str, Any] = field(default_factory=lambda: {"trials": [], "groups": {}, "not_here": {}})
    tallies: dict[str, Tally] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    """Why trials could not be run, and how the child died."""

    @property
    def whole(self) -> Tally:
        """All classes of defects together."""
        whole = Tally()
        for group in self.plan["groups"]:
            whole.mutants |= self.tallies[group].mutants
            whole.survivors |= self.tallies[group].survivors
            whole.good += self.tallies[group].good
            whole.strict += self.tallies[group].strict
        return whole

    @property
    def right(self) -> dict[str, Tally]:
        """The correct engines."""
        return {group: tally for group, tally in self.tallies.items() if tally.kinds["right"]}

    @property
    def wronged(self) -> list[str]:
        """The correct engines that were killed."""
        return [group for group, tally in self.right.items() if tally.good["right"] < tally.kinds["right"]]

    @property
    def failed(self) -> list[str]:
        """Why the suite itself failed; a trial without a result has shown nothing."""
        missing = len(self.plan["trials"]) - sum(tally.kinds.total() for tally in self.tallies.values())
        if missing and not self.broken:
            return [f"{missing} of {len(self.plan['trials'])} trials have no result"]
        return self.broken

    @property
    def status(self) -> Status:
        """The exit status."""
        if self.failed:
            return Status.SUITE
        if not self.whole.mutants:
            return Status.ENVIRONMENT
        return Status.NOT_CERTIFIED if self.whole.survivors or self.wronged else Status.CERTIFIED

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        classes = {
            group: {"about": about, **self.tallies[group].to_json()} for group, about in self.plan["groups"].items()
        }
        return {
            "status": int(self.status),
            "classes": classes,
            "all": self.whole.to_json(),
            "correct_engines": {group: tally.kinds["right"] for group, tally in self.right.items()},
            "wrongly_killed": self.wronged,
            "not_run": self.plan["not_here"],
            "failed": self.failed,
        }


def _follow(replies: Iterable[dict[str, Any]], workers: int, *, printed: bool) -> Outcome:
    """Gather results, and print them as they come."""
    outcome = Outcome()
    for answer in replies:
        match answer.pop("what"):
            case "plan":
                outcome.plan = answer
                for trial in answer["trials"]:
                    outcome.tallies.setdefault(trial["group"], Tally()).expected += 1
                if printed:
                    _begin(answer, workers)
            case "result":
                if answer["failed"]:
                    outcome.broken.append(answer["text"])
                tally = outcome.tallies[answer["trial"]["group"]]
                tally.add(answer)
                if printed:
                    _note(answer, tally, outcome.plan["groups"])
            case "died":
                print(answer["output"].rstrip(), file=sys.stdout if printed else sys.stderr)
                outcome.broken.append(f"the child process {answer['how']}")
    return outcome


def _begin(plan: dict[str, Any], workers: int) -> None:
    print(f"{messages.plural(len(plan['trials']), 'trial')}, {messages.plural(workers, 'worker')}")
    print(_ROW.format("", "killed", "losses, 1e-2", "losses, 1e-5", "").rstrip())


def _note(result: dict[str, Any], tally: Tally, groups: dict[str, str]) -> None:
    trial = result["trial"]
    if trial["kind"] != "loss" and not result["good"]:
        word = "SURVIVED" if trial["kind"] == "kill" else "WRONGLY KILLED"
        print(f"{word} {result['text']}", flush=True)
    if tally.is_complete and trial["group"] in groups:
        print(tally.row(trial["group"], groups[trial["group"]]), flush=True)


def _sum_up(outcome: Outcome) -> None:
    print(outcome.whole.row("all", "").rstrip())
    right = outcome.right
    cases = sum(tally.kinds["right"] for tally in right.values())
    killed = f"{', '.join(outcome.wronged)} wrongly killed" if outcome.wronged else "none is killed"
    print(f"correct engines ({', '.join(right) or 'none'}), {messages.plural(cases, 'trial')}: {killed}")
    for reason, names in _by_reason(outcome.plan["not_here"]).items():
        print(f"not run: {messages.plural(len(names), 'known-wrong engine')} ({reason})")
    for text in outcome.failed:
        print(f"the suite itself failed: {text}")


def _by_reason(not_here: dict[str, str]) -> dict[str, list[str]]:
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in not_here.items():
        names_by_reason.setdefault(reason, []).append(name)
    return names_by_reason
