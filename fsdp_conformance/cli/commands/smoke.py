"""
`fsdp-conformance smoke`: check the adapter before judging the engine behind it.

An adapter that breaks the protocol makes every verdict on the implementation meaningless, so all of its problems are
reported at once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdp_conformance import codec, docs
from fsdp_conformance.cli import messages, single
from fsdp_conformance.cli.arguments import named_implementation, settings_of
from fsdp_conformance.errors import UsageError
from fsdp_conformance.report.terminal import duration
from fsdp_conformance.run_settings import DEFAULTS
from fsdp_conformance.status import Status

if TYPE_CHECKING:
    from fsdp_conformance.driver.smoke import SmokeResult

_WIDTH = 64


def main(arguments: argparse.Namespace) -> int:
    """Print each check and its problems. Returns 0, or 1 if the adapter has any."""
    # Importing torch is most of what a user waits for.
    began = time.monotonic()
    spec = named_implementation(arguments)
    if spec is None:
        raise UsageError(
            "smoke needs an implementation, got none. For example: fsdp-conformance smoke "
            f"my_adapter.py:MyAdapter, or an installed one, such as {DEFAULTS.implementation}"
        )
    device = settings_of(arguments).device
    single.prepare(device, spec)
    from fsdp_conformance.driver.smoke import smoke

    results = smoke(spec, device=device)
    status = _status(results)
    if arguments.json:
        messages.say_json({"implementation": spec, "status": int(status), "checks": codec.plain(results)})
    else:
        _tell(spec, results, status, seconds=time.monotonic() - began)
    return status


def _status(results: Sequence[SmokeResult]) -> Status:
    """A check that did not run does not count as passed."""
    if any(result.problems for result in results):
        return Status.NOT_CERTIFIED
    return Status.CERTIFIED if any(not result.not_run for result in results) else Status.ENVIRONMENT


def _tell(spec: str, results: Sequence[SmokeResult], status: Status, *, seconds: float) -> None:
    for result in results:
        word = "✗" if result.problems else "not run" if result.not_run else "ok"
        print(f"{result.check} {result.title} ".ljust(_WIDTH, ".") + f" {word}")
        for line in (line for problem in result.problems for line in problem.splitlines()):
            print(f"    {line}")
    for reason in dict.fromkeys(result.not_run for result in results if result.not_run):
        print(f"not run: {reason}")
    passed = sum(not result.problems and not result.not_run for result in results)
    print(f"{spec}: {passed} of {messages.plural(len(results), 'check')} ok, {duration(seconds)}")
    if status is Status.NOT_CERTIFIED:
        print("the adapter is not ready: failures of a run could be the adapter's fault")
        print(docs.see(docs.ADAPTER_PROBLEMS))
    elif status is Status.ENVIRONMENT:
        print("no check could run on this machine")
