"""
`fsdp-conformance explore`: what do the lists of cases not think of?

Prints each failure once it is shrunk, confirmed on processes, and explained; at the end, what was tried.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from fsdp_conformance.cli import messages
from fsdp_conformance.cli.arguments import settings_of
from fsdp_conformance.cli.child import answers
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.report.folding import screen_width
from fsdp_conformance.status import Status

_DEFAULT_SECONDS = 600.0

#: How often progress is shown on a terminal.
_PROGRESS_S = 2.0


def main(arguments: argparse.Namespace) -> int:
    """Explore, and return 0 if nothing fails, 1 if something does, otherwise 2, 3 or 4."""
    with answers("explore", order=order_of(arguments)) as child_answers:
        return follow(child_answers, scripts=arguments.script, as_json=arguments.json)


def order_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options as the child takes them. Raises ConfigError with every problem found."""
    settings = settings_of(arguments)
    problems: list[str] = []
    seconds = _number("--seconds", arguments.seconds, float, problems)
    examples = _number("--max-examples", arguments.max_examples, int, problems)
    seed = _number("--seed", arguments.seed, int, problems, least=0)
    if settings.device not in ("cpu", SIMULATED):
        problems.append(f"--device must be cpu or sim: examples run on simulated ranks, got {settings.device!r}")
    if problems:
        raise ConfigError(problems, where="explore")
    if seed is None:
        seed = 0 if arguments.derandomize else time.time_ns() % 1_000_000
    return {
        "settings": asdict(settings),
        "seconds": _DEFAULT_SECONDS if seconds is None and examples is None else seconds,
        "max_examples": examples,
        "seed": seed,
        "save": arguments.save,
        "width": screen_width(),
    }


def follow(answers: Iterable[dict[str, Any]], *, scripts: bool = False, as_json: bool = False) -> Status:
    """Print what comes, and sum it up, also if it is stopped; as JSON, print it at the end."""
    failures: list[dict[str, Any]] = []
    progress: dict[str, Any] = {}
    try:
        return _followed(answers, failures, progress, scripts=scripts, as_json=as_json)
    except KeyboardInterrupt:
        if progress:
            if as_json:
                messages.say_json({"status": None, "counts": progress, "failures": failures})
            else:
                print("\nstopped; until then:")
                _sum_up(progress, failures)
        raise


def _followed(
    answers: Iterable[dict[str, Any]],
    failures: list[dict[str, Any]],
    progress: dict[str, Any],
    *,
    scripts: bool,
    as_json: bool,
) -> Status:
    """Follow to the end, with the failures and the last counts in the two arguments."""
    shown = time.monotonic()
    counts: dict[str, Any] | None = None
    for answer in answers:
        match answer.pop("what"):
            case "begin" if not as_json:
                on = f" on {answer['workload']}" * bool(answer["workload"])
                print(f"exploring {answer['name']} {answer['version']}{on}", flush=True)
            case "progress":
                progress |= answer["counts"]
                if sys.stderr.isatty() and time.monotonic() - shown > _PROGRESS_S:
                    shown = time.monotonic()
                    print(f"\r{messages.plural(answer['ran'], 'example')} ", end="", file=sys.stderr, flush=True)
            case "failure":
                failures.append(answer)
                if not as_json:
                    _print_failure(answer, scripts=scripts)
            case "died":
                print(answer["output"].rstrip(), file=sys.stderr if as_json else sys.stdout)
                messages.complain(f"the child process {answer['how']}")
                return Status.SUITE
            case "done":
                counts = answer
    if counts is None:
        messages.complain("the child process ended without a result")
        return Status.SUITE
    status = _status(counts, failures)
    if as_json:
        messages.say_json({"status": int(status), "counts": counts, "failures": failures})
    else:
        _sum_up(counts, failures)
    return status


def _status(counts: dict[str, Any], failures: list[dict[str, Any]]) -> Status:
    """An exploration that judged nothing has shown nothing; a failure counts once it is confirmed."""
    if not _judged(counts):
        return Status.SUITE
    return Status.NOT_CERTIFIED if any(failure["confirmed"] for failure in failures) else Status.CERTIFIED


def _judged(counts: dict[str, Any]) -> int:
    left_out = sum(counts["rejected"].values()) + sum(counts["declined"].values())
    return int(counts["ran"]) - int(left_out)


def _print_failure(answer: dict[str, Any], *, scripts: bool) -> None:
    print(f"\n{answer['text']}", flush=True)
    if answer["saved"]:
        print(f"    saved     {answer['saved']}")
    else:
        print(f"    scenario  {answer['scenario']}")
    if scripts:
        print(f"\n{answer['script']}", flush=True)


def _sum_up(counts: dict[str, Any], failures: list[dict[str, Any]]) -> None:
    from fsdp_conformance.explore.counting import summary

    confirmed = sum(failure["confirmed"] for failure in failures)
    unconfirmed = len(failures) - confirmed
    print(f"\n{summary(counts, width=screen_width())}")
    if counts["fails_always"]:
        print("stopped early: even the plainest example fails, so the other examples would show nothing new")
    if unconfirmed:
        print(f"{messages.plural(unconfirmed, 'failure')} on simulated ranks only, not confirmed on processes")
    if not _judged(counts):
        print("explore: nothing was judged")
    elif confirmed:
        print(f"explore: {messages.plural(confirmed, 'different failure')}")
    else:
        judged, possible = counts["triples"]
        triples = f", {judged} of {possible} triples of values" if judged else ""
        print(f"explore: no failure in {messages.plural(_judged(counts), 'example')}{triples}")


def _number(option: str, word: str | None, kind: type, problems: list[str], *, least: int = 1) -> Any:
    if word is None:
        return None
    try:
        value = kind(word)
    except ValueError:
        value = least - 1
    if not least <= value < 1e9:
        problems.append(f"{option} must be a number of at least {least}, got {word!r}")
    return value
