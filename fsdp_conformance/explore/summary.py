"""Failures as text, and the script that shows a failure outside an exploration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_conformance.explore.building import example_of
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.folding import WIDTH, folded
from fsdp_conformance.report.terminal import render_record
from fsdp_conformance.scenarios.scenario import Scenario

_SCRIPT = '''\
"""{signature}. Run it with: python {name}"""

from fsdp_conformance.explore.case import run_on
from fsdp_conformance.report.terminal import render_record
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.scenarios.scenario import scenario_from_json

SCENARIO = """\\
{json}
"""

if __name__ == "__main__":
    record = run_on(scenario_from_json(SCENARIO), {implementation!r}, base=RunSettings())
    print(render_record(record), record.traceback, sep="\\n\\n")
'''


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """A failure as it is reported: the smallest scenario, and its record on processes."""

    scenario: Scenario
    signature: str
    record: CaseRecord
    confirmed: bool
    """True if it also fails with a process for each rank."""
    shrinks: int
    drawn_features: int
    """How many values of the scenario that was drawn were not plain."""


def failure_text(failure: Told, *, width: int = WIDTH) -> str:
    """The block of a failure, folded at `width` columns: the report of its case, what it takes, what is trained."""
    scenario = failure.scenario
    lines = [render_record(failure.record, width=width)]
    plain = "nothing special: the plainest scenario fails"
    lines += _field(width, "takes", "; ".join(f"{axis}: {value}" for axis, value in scenario.values) or plain)
    lines += _field(
        width,
        "shrunk",
        f"from {failure.drawn_features} unusual values to {len(scenario.values)}, in {failure.shrinks} runs",
    )
    lines += _field(width, "trains", "; ".join(schedule_in_words(scenario)))
    if not failure.confirmed:
        lines += _field(
            width,
            "beware",
            "not confirmed: on ranks that are processes the same scenario does not fail. The engine depends on what "
            "simulated ranks share, or the suite is wrong",
        )
    return "\n".join(lines)


def schedule_in_words(scenario: Scenario) -> Iterator[str]:
    """The steps of a scenario, for readers who do not want to read JSON."""
    example = example_of(scenario)
    model, plan, regime = example.model, example.plan, example.regime
    yield f"{example.world_size} ranks"
    yield f"units {', '.join(plan.units) or plan.auto_wrap or 'the root alone'}"
    if scenario.workload:
        yield f"the model of {scenario.workload}"
    else:
        yield "parameters " + ", ".join(f"{name} {list(shape)}" for name, shape in model.shapes().items())
    yield f"{regime.steps} steps of {regime.micro_batches} micro-batches under {regime.optimizer}"


def script(scenario: Scenario, *, implementation: str, signature: str) -> str:
    """A script that runs the scenario through the adapter, and prints the report."""
    return _SCRIPT.format(
        signature=signature.replace('"""', "'''").replace("\\", "/"),
        name=f"explored_{scenario.digest}.py",
        implementation=implementation,
        json=scenario.to_json().replace("\\", "\\\\"),
    )


def _field(width: int, label: str, text: str) -> list[str]:
    lead = " " * 4 + label.ljust(10)
    return folded(text, width, lead=lead, indent=" " * len(lead))
