"""
The alerts of `sanitize` as code-scanning results (SARIF 2.1.0) and as annotations of a GitHub workflow.

Files outside the working directory have no place in the repository, so their alerts have none either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fsdp_conformance import __version__
from fsdp_conformance.report.formats import sarif as formats
from fsdp_conformance.report.formats.places import relative
from fsdp_conformance.simulator.sanitize.alerts import RULES, Alert
from fsdp_conformance.simulator.sanitize.report import ScriptReport


def sarif(alerts: Sequence[Alert], report: ScriptReport) -> str:
    """The SARIF file."""
    rules = sorted({alert.rule for alert in alerts})
    return formats.document(
        version=__version__,
        rules=[{"id": rule, "shortDescription": {"text": RULES[rule]}} for rule in rules],
        results=[_result(alert) for alert in alerts],
        properties={"verdict": report.verdict(), "script": report.order.target},
    )


def workflow_commands(alerts: Sequence[Alert]) -> Iterator[str]:
    """Workflow commands that make GitHub show each finding at its line."""
    for alert in alerts:
        place = next(iter(_places(alert)), None)
        where = f" file={_escaped(place[1], is_property=True)},line={place[2]}," if place is not None else " "
        yield f"::error{where}title={_escaped(alert.rule, is_property=True)}::{_escaped(alert.text)}"


def _result(alert: Alert) -> dict[str, Any]:
    places = _places(alert)
    result: dict[str, Any] = {
        "ruleId": alert.rule,
        "level": "error",
        "message": {"text": alert.text},
        "partialFingerprints": formats.fingerprint(
            # Without line numbers and sizes: an alert stays the same when lines are added above it.
            [alert.rule, *(f"{file} {what.partition('(')[0]}" for what, file, _ in places)]
            if places
            else [alert.rule, alert.sentence]
        ),
    }
    if places:
        result["locations"] = [formats.location(places[0][1], places[0][2])]
    if len(places) > 1:
        result["relatedLocations"] = [formats.location(file, line, what) for what, file, line in places[1:]]
    return result


def _places(alert: Alert) -> list[tuple[str, str, int]]:
    """The operation, file and line, for the lines in the working directory."""
    lines = ((what, relative(line.file), line.line) for what, line in alert.lines)
    return [(what, file, line) for what, file, line in lines if file is not None]


def _escaped(text: str, *, is_property: bool = False) -> str:
    """Text in a workflow command."""
    for character, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        text = text.replace(character, code)
    return text.replace(":", "%3A").replace(",", "%2C") if is_property else text
