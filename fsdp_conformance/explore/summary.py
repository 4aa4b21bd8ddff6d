"""Failures as text, and the script that shows a failure outside an exploration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_conformance.explore.example import Example, features
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.folding import WIDTH, folded
from fsdp_conformance.report.terminal import render_record

_SCRIPT = '''\
"""{signature}. Run it with: python {name}"""

from fsdp_conformance.explore.case import run_on
from fsdp_conformance.explore.example import example_from_json
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.report.terminal import render_record

EXAMPLE = """\\
{json}
"""

if __name__ == "__main__":
    record = run_on(example_from_json(EXAMPLE), {implementation!r}, base=RunSettings())
    print(render_record(record), record.traceback, sep="\\n\\n")
'''


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """A failure as it is reported: the smallest example, and its record on processes."""

    example: Example
    signature: str
    record: CaseRecord
    confirmed: bool
    """True if it also fails with a process for each rank."""
    shrinks: int
    drawn_features: int
    """How many axes of the example that was drawn were not plain."""


def failure_text(failure: Told, *, width: int = WIDTH) -> str:
    """The block of a failure, folded at `width` columns: the report of its case, what it takes, what is trained."""
    example = failure.example
    lines = [render_record(failure.record, width=width)]
    plain = "nothing special: the plainest example fails"
    lines += _field(width, "takes", "; ".join(sorted(features(example))) or plain)
    lines += _field(
        width,
        "shrunk",
        f"from {failure.drawn_features} unusual axes to {len(features(example))}, in {failure.shrinks} runs",
    )
    lines += _field(width, "trains", "; ".join(schedule_in_words(example)))
    if not failure.confirmed:
        lines += _field(
            width,
            "beware",
            "not confirmed: on ranks that are processes the same example does not fail. The engine depends on what "
            "simulated ranks share, or the suite is wrong",
        )
    return "\n".join(lines)


def schedule_in_words(example: Example) -> Iterator[str]:
    """The steps of an example, for readers who do not want to read JSON."""
    model, plan, regime = example.model, example.plan, example.regime
    yield f"{example.world_size} ranks"
    yield f"units {', '.join(plan.units) or plan.auto_wrap or 'the root alone'}"
    shapes = [f"{name} {list(shape)}" for name, shape in model.shapes().items()]
    yield "parameters " + ", ".join(shapes)
    yield f"{regime.steps} steps of {regime.micro_batches} micro-batches under {regime.optimizer}"


def script(example: Example, *, implementation: str, signature: str) -> str:
    """A script that runs the example through the adapter, and prints the report."""
    return _SCRIPT.format(
        signature=signature.replace('"""', "'''").replace("\\", "/"),
        name=f"explored_{example.digest}.py",
        implementation=implementation,
        json=example.to_json().replace("\\", "\\\\"),
    )


def _field(width: int, label: str, text: str) -> list[str]:
    lead = " " * 4 + label.ljust(10)
    return folded(text, width, lead=lead, indent=" " * len(lead))
