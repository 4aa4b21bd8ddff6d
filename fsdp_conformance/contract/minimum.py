"""
The least that a passing case has compared: the checks that it makes whatever the engine, and on how many ranks.

    python -m fsdp_conformance.contract.minimum RUN... > fsdp_conformance/contract/minimum.json

The figures come from run files of engines that pass. A check counts if every one of these runs that passes the case
has made it, and on as many ranks as the fewest of them; how many values it compares depends on the engine. A passing
record that shows less was edited, or comes from other cases: see `judge.evidence`. Cases are judged by these figures
only on the type of device that those runs used: an accelerator adds and leaves out checks.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_conformance import codec
from fsdp_conformance.contract.case import FRESH, Case
from fsdp_conformance.contract.profile import FULL, load_profile
from fsdp_conformance.outcome.records import CaseRecord, case_record_from_json
from fsdp_conformance.verdict import Verdict

#: Checks that depend on what an engine declares or shows besides what the case needs: gradients and buffers that it
#: hides, units whose state it cannot tell, calls that it need not make.
_OF_SOME_ENGINES = frozenset(
    {
        "attributes of parameters",
        "buffer parity",
        "collective counts",
        "flags",
        "gradient parity",
        "optimizer state",
        "parameters of the user",
        "resharded",
        "resharded again",
    }
)

#: The scenarios of these cases depend on the engine and the run, but they are always compared with the references.
_DRAWN = ("R000/pairs-row", f"R000/{FRESH}", f"R001/{FRESH}")
_OF_DRAWN = frozenset({"loss parity", "parameter parity", "negative control"})

FILE = Path(__file__).with_name("minimum.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Minimum:
    """The checks that a record of one case must show if it passes."""

    device: str
    """The type of device that the ranks used."""
    checks: Mapping[str, int]
    """The name of a check to the number of ranks that make it."""


def minimum_of(case: Case) -> Minimum | None:
    """The figures of a case; None if it is not one of the suite's own, even if it has the id of one."""
    entry = load_profile(FULL).by_id.get(case.id)
    return _minimums().get(case.id) if entry is not None and entry.case() == case else None


@functools.cache
def _minimums() -> dict[str, Minimum]:
    content = json.loads(FILE.read_text(encoding="utf-8"))
    groups: list[dict[str, Any]] = content["groups"]
    found: dict[str, Minimum] = {}
    for group in groups:
        checks = {content["names"][index]: ranks for index, ranks in group["checks"]}
        found |= dict.fromkeys(group["cases"], Minimum(device=group["device"], checks=checks))
    return found


def least(runs: Iterable[Iterable[CaseRecord]]) -> dict[str, Minimum]:
    """The figures that follow from runs. Raises ValueError for a case that ran on different types of devices."""
    found: dict[str, Minimum] = {}
    for record in (record for run in runs for record in run if record.verdict is Verdict.PASS):
        made = _made(record)
        before = found.get(record.case)
        if before is not None:
            if before.device != record.device:
                both = f"{before.device} and {record.device}"
                raise ValueError(f"{record.case} must have run on one type of device, got {both}")
            made = {name: min(made[name], ranks) for name, ranks in before.checks.items() if name in made}
        found[record.case] = Minimum(device=record.device, checks=made)
    return found


def _made(record: CaseRecord) -> dict[str, int]:
    """The checks of a record that compared elements, each with the number of ranks that made it."""
    ranks: dict[str, int] = {}
    elements: dict[str, int] = {}
    for report in record.evidence:
        for name, count in report.checks.items():
            ranks[name] = ranks.get(name, 0) + (count.comparisons > 0)
            elements[name] = elements.get(name, 0) + count.elements
    of_every_engine = ranks.keys() - _OF_SOME_ENGINES
    if record.case.startswith(_DRAWN):
        of_every_engine &= _OF_DRAWN
    return {name: number for name, number in ranks.items() if name in of_every_engine and number and elements[name]}


def text_of(minimums: Mapping[str, Minimum]) -> str:
    """The text of the file: each set of checks once, with the cases that have it, a line each."""
    names = sorted({name for each in minimums.values() for name in each.checks})
    index = {name: number for number, name in enumerate(names)}
    groups: dict[str, list[str]] = {}
    for case, each in sorted(minimums.items()):
        checks = sorted([index[name], ranks] for name, ranks in each.checks.items())
        groups.setdefault(json.dumps({"device": each.device, "checks": checks}), []).append(case)
    rows = [json.dumps({**json.loads(key), "cases": cases}) for key, cases in groups.items()]
    return '{"names": ' + json.dumps(names) + ', "groups": [\n' + ",\n".join(rows) + "\n]}\n"


def main(arguments: Sequence[str]) -> int:
    """Print the figures of the run files."""
    print(text_of(least(map(_records, map(Path, arguments)))), end="")
    return 0


def _records(path: Path) -> list[CaseRecord]:
    lines = (codec.parsed(line) for line in path.read_text(encoding="utf-8").splitlines())
    records = []
    for line in lines:
        if line.pop("type") == "case":
            del line["chain"]
            records.append(case_record_from_json(line))
    return records


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
