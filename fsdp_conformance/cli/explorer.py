"""
The child process of `explore`: `python -m fsdp_conformance.cli.explorer ORDER` explores, and prints what it finds as
lines of JSON. ORDER is the JSON of the options.

    begin     the implementation, and the flags that are drawn for
    progress  after every example: how many ran
    failure   a shrunk failure, with its text, and where it was saved
    done      the counts
    error     why it could not go on, with the exit status
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_conformance import codec
from fsdp_conformance.errors import AdapterError, ConformanceError, EnvironmentUnavailable
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.status import Status

if TYPE_CHECKING:
    from fsdp_conformance.explore.exploration import Exploration, Failure


def main(words: list[str]) -> None:
    """Explore as ordered."""
    try:
        _explore(json.loads(words[0]))
    except ConformanceError as error:
        status = Status.USAGE if isinstance(error, AdapterError) else error.exit_status
        say("error", status=int(status), message=str(error))


def _explore(order: dict[str, Any]) -> None:
    if importlib.util.find_spec("hypothesis") is None:
        raise EnvironmentUnavailable(
            "explore needs Hypothesis, which is not installed: pip install 'fsdp-conformance[explore]'"
        )
    from fsdp_conformance.adapters import registry
    from fsdp_conformance.cases import places
    from fsdp_conformance.explore.exploration import Budget, Explorer
    from fsdp_conformance.explore.pool import WarmWorker
    from fsdp_conformance.run_settings import RunOrder, settings_from_json

    settings = replace(settings_from_json(order["settings"]), ranks="simulated")
    if settings.device == SIMULATED and (problem := places.build_problem()):
        raise EnvironmentUnavailable(f"the simulated accelerator cannot be built: {problem}")
    description = registry.describe(settings.implementation)
    declared = description.declared(settings.device)
    say("begin", name=description.name, version=description.version, declared=sorted(declared))
    run_order = RunOrder(settings=settings, description=codec.plain(description), device=settings.device)
    with WarmWorker(run_order) as worker:
        confirming = _Confirming(order, worker, settings)

        def tell(what: str, about: Any) -> None:
            if what == "shrunk":
                confirming.tell(about)
            elif what == "failure":
                say("shrinking", signature=str(about))
            else:
                say("progress", ran=explorer.found.ran)

        explorer = Explorer(
            worker,
            declared,
            Budget(seconds=order["seconds"], max_examples=order["max_examples"]),
            first_seed=order["seed"],
            world_sizes=settings.world_sizes or (2, 3, 1, 4, 5),
            tell=tell,
        )
        found = explorer.explore()
    say("done", **counts(found))


def counts(found: Exploration) -> dict[str, Any]:
    """The counts of an exploration as JSON has them."""
    return {
        "ran": found.ran,
        "passed": found.passed,
        "rejected": dict(found.rejected),
        "declined": dict(found.declined),
        "left_out": found.left_out,
        "covered": {axis: dict(values) for axis, values in found.covered.items()},
        "shrinks": found.shrinks,
        "seconds": found.seconds,
        "fails_always": found.fails_always,
        "failures": [{"signature": str(failure.signature), "seen": failure.seen} for failure in found.failures],
    }


class _Confirming:
    """Tries a shrunk failure on processes, saves it, and tells of it."""

    def __init__(self, order: dict[str, Any], worker: Any, settings: Any) -> None:
        self._order = order
        self._worker = worker
        self._settings = settings

    def tell(self, failure: Failure) -> None:
        """Confirm, save, print."""
        from fsdp_conformance.diagnosis.headline import most_telling
        from fsdp_conformance.explore import saved
        from fsdp_conformance.explore.case import run_on
        from fsdp_conformance.explore.example import features
        from fsdp_conformance.explore.summary import Told, failure_text, script
        from fsdp_conformance.verdict import FINE

        implementation, signature = self._settings.implementation, str(failure.signature)
        simulated = failure.outcome.record
        assert simulated is not None, "what failed has a record"
        record = run_on(failure.example, implementation, base=replace(self._settings, ranks="processes"))
        confirmed = record.verdict not in FINE
        told = Told(
            example=failure.example,
            signature=signature,
            record=record if confirmed else simulated,
            confirmed=confirmed,
            shrinks=failure.shrinks,
            drawn_features=len(features(failure.drawn)),
        )
        where = None
        if self._order["save"] and confirmed:
            where = saved.save(
                Path(self._order["save"]), failure.example, implementation=implementation, signature=signature
            )
        # One finding is told; there is no run file in which the others could be looked up.
        told.record.findings = [finding for finding in (most_telling(told.record.findings),) if finding is not None]
        told.record.repro = f"python -m pytest {where}" if where is not None else ""
        say(
            "failure",
            signature=signature,
            confirmed=confirmed,
            text=failure_text(told, width=self._order["width"]),
            example=failure.example.to_json(),
            script=script(failure.example, implementation=implementation, signature=signature),
            saved=None if where is None else str(where),
        )


def say(what: str, **content: Any) -> None:
    """Print one answer immediately."""
    print(json.dumps({"what": what, **content}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
