"""
The job of `explore`: draw examples, shrink failures, and confirm them on processes. Its answers:

    begin     the implementation, and the flags that are drawn for
    progress  after every scenario: the number that ran, and the counts so far
    failure   a shrunk failure, with its text, and where it was saved
    done      the counts
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_conformance import codec
from fsdp_conformance.cli.child import Answer
from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.plan import SIMULATED

if TYPE_CHECKING:
    from fsdp_conformance.explore.exploration import Exploration, Failure
    from fsdp_conformance.run_settings import RunSettings


def run(answer: Answer, order: dict[str, Any]) -> None:
    """Explore as ordered. Raises EnvironmentUnavailable without the device."""
    from fsdp_conformance.adapters import registry
    from fsdp_conformance.cases import places
    from fsdp_conformance.explore.exploration import Budget, Explorer
    from fsdp_conformance.explore.pool import WarmWorker
    from fsdp_conformance.run_settings import RunOrder, settings_from_json
    from fsdp_conformance.scenarios.axes import SPACE

    settings = replace(settings_from_json(order["settings"]), ranks="simulated")
    if settings.device == SIMULATED and (problem := places.build_problem()):
        raise EnvironmentUnavailable(f"the simulated accelerator cannot be built: {problem}")
    description = registry.describe(settings.implementation)
    declared = description.declared(settings.device)
    sizes = settings.world_sizes or (2, 3, 1, 4)
    gone = _left_out(settings, sizes)
    answer(
        "begin",
        name=description.name,
        version=description.version,
        declared=sorted(declared),
        workload=settings.workload,
    )
    run_order = RunOrder(settings=settings, description=codec.plain(description), device=settings.device)
    with WarmWorker(run_order) as worker:

        def tell(what: str, about: Any) -> None:
            if what == "shrunk":
                answer("failure", **_confirmed(about, order, settings))
            elif what == "failure":
                answer("shrinking", signature=str(about))
            else:
                answer("progress", ran=explorer.result.ran, counts=_counts(explorer.result, gone))

        explorer = Explorer(
            worker,
            declared,
            Budget(seconds=order["seconds"], max_examples=order["max_examples"]),
            space=SPACE.without(gone) if gone else SPACE,
            workload=settings.workload,
            first_seed=order["seed"],
            world_sizes=sizes,
            # What the adapter avoids is known to fail, and would hide the rest.
            known=[frozenset(f"{axis}: {value}" for axis, value in each.items()) for each in description.avoids],
            tell=tell,
        )
        exploration = explorer.explore()
    answer("done", **_counts(exploration, gone))


def _left_out(settings: RunSettings, world_sizes: tuple[int, ...]) -> dict[tuple[str, str], str]:
    """
    The values that are not drawn for the user's own model, each with the reason; none without one.

    Raises ConfigError with every problem of the workload.
    """
    if not settings.workload:
        return {}
    from fsdp_conformance.cases.own_model import with_properties
    from fsdp_conformance.explore.own_model import OwnModel, left_out

    with_properties(settings)
    return left_out(OwnModel(settings.workload), world_sizes)


def _counts(exploration: Exploration, gone: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    """The counts of an exploration as JSON has them."""
    return {
        "ran": exploration.ran,
        "passed": exploration.passed,
        "rejected": dict(exploration.rejected),
        "declined": dict(exploration.declined),
        "left_out": exploration.left_out,
        "not_drawn": dict(Counter(gone.values())),
        "covered": {axis: dict(values) for axis, values in exploration.covered.items()},
        "pairs": exploration.pairs,
        "triples": exploration.triples,
        "shrinks": exploration.shrinks,
        "seconds": exploration.seconds,
        "fails_always": exploration.fails_always,
        "failures": [{"signature": str(failure.signature), "seen": failure.seen} for failure in exploration.failures],
    }


def _confirmed(failure: Failure, order: dict[str, Any], settings: RunSettings) -> dict[str, Any]:
    """Try a shrunk failure on processes, and save it if it fails there, too. Returns the answer about it."""
    from fsdp_conformance.diagnosis.headline import headline_of
    from fsdp_conformance.explore import saved
    from fsdp_conformance.explore.case import run_on
    from fsdp_conformance.explore.summary import Told, failure_text, script
    from fsdp_conformance.verdict import FINE

    implementation, signature = settings.implementation, str(failure.signature)
    simulated = failure.outcome.record
    assert simulated is not None, "what failed has a record"
    record = run_on(failure.scenario, implementation, base=replace(settings, ranks="processes"))
    confirmed = record.verdict not in FINE
    summary = Told(
        scenario=failure.scenario,
        signature=signature,
        record=record if confirmed else simulated,
        confirmed=confirmed,
        shrinks=failure.shrinks,
        drawn_features=len(failure.drawn.values),
    )
    path = None
    if order["save"] and confirmed:
        path = saved.save(Path(order["save"]), failure.scenario, implementation=implementation, signature=signature)
    # One finding is printed; there is no run file in which the others could be looked up.
    summary.record.findings = [finding for finding in (headline_of(summary.record),) if finding is not None]
    summary.record.repro = f"python -m pytest {path}" if path is not None else ""
    return {
        "signature": signature,
        "confirmed": confirmed,
        "text": failure_text(summary, width=order["width"]),
        "scenario": failure.scenario.to_json(),
        "script": script(failure.scenario, implementation=implementation, signature=signature),
        "saved": None if path is None else str(path),
    }
