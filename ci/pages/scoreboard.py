"""
`ci/scoreboard`: keep what runs show in ci/verdicts/, and write the page made of it.

Run files are too large to keep, so a tally of each engine is kept: see `report.tally`. What the page says of cases,
known-wrong engines and adapters is today's; what engines show of a case that has changed since is left out.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path

from known_findings import known_findings

from fsdp_conformance.adapters import registry
from fsdp_conformance.contract.profile import FULL, load_profile
from fsdp_conformance.errors import ConformanceError
from fsdp_conformance.report import coverage
from fsdp_conformance.report.coverage import Coverage, Declared, Row
from fsdp_conformance.report.marked import Markdown, row
from fsdp_conformance.report.tally import Tally, added, tallies_of, tally_from_json
from fsdp_conformance.report.terminal import duration
from fsdp_conformance.report.verify import verify
from pages import failures
from pages.blocks import ROOT
from pages.failures import Failures

#: One file for each engine.
KEPT = ROOT / "ci/verdicts"
PAGE = ROOT / "docs/scoreboard.md"

_PAGE = """\
<!-- Written by `ci/docs --write` from ci/verdicts/, which `ci/scoreboard RUN...` writes from run files. -->

# Scoreboard

This page shows how the bundled engines did in their last runs, and why cases failed. [`ci/site`](extending.md#the-site)
builds a site with all results: every engine by every requirement, with filters, and a page for each engine and each
requirement.

A row is one adapter, which is one mode of an engine: DeepSpeed's three stages are three rows. A row is not a
certificate: [reading a verdict](reading-a-verdict.md) says what that needs. *Stale* counts cases that were added to the
run's profiles or changed since the run; their verdicts are left out below. To write the page from new runs, which
replace the old ones of those engines:

<!-- parsed: a run of the whole profile takes many minutes -->
```console
$ ci/certify --with deepspeed --report results
$ ci/scoreboard results/*/run.jsonl
```

Runs of components are added to those of the same adapter with `ci/scoreboard --add`.

## What ran

| engine | version | torch | date | profiles | verdict | time | stale |
|---|---|---|---|---|---|--:|--:|
{ran}

## What fails, and why

`ci/known-findings.toml` has an entry for every failed case. The script that an entry names shows the defect without
this package; `ci/findings/run` runs all scripts. A failure without a script is by design, or not settled yet.
*Upstream* is the closest issue or pull request that a search found.

{failures}
## Who fails which requirement

A case counts for every requirement that it binds, and a failure for the requirements that its findings name. No engine
here fails the other {rest} requirements.

| requirement | cases | failed by |
|---|--:|---|
{requirements}
"""


def kept() -> list[Tally]:
    """The tallies, in the order of the page."""
    order = {name: place for place, name in enumerate(_ORDER)}
    tallies = [
        tally_from_json(path.read_text(encoding="utf-8"), where=path.name) for path in sorted(KEPT.glob("*.json"))
    ]
    return sorted(tallies, key=lambda each: (order.get(each.name, len(order)), each.name))


#: Ours first, then torch's, then the others.
_ORDER = (
    *("reference", "reference-data-parallel", "reference-components"),
    *("torch-fsdp2", "torch-fsdp1", "torch-ddp", "torch-dtensor"),
)


def bundled() -> dict[str, Declared]:
    """The adapters of the package itself, with what they declare. Imports them, not their engines."""
    points = importlib.metadata.entry_points(group=registry.ENTRY_POINTS)
    names = sorted(point.name for point in points if point.module.startswith("fsdp_conformance."))
    return {name: functools.partial(_declared, name) for name in names}


@functools.cache
def _declared(name: str, device: str) -> frozenset[str]:
    adapter = registry.load(name)
    return adapter.declared() - adapter.declines_on.get(device, frozenset())


@functools.cache
def table() -> Coverage:
    """The current register and suites, and the stored results of runs."""
    return coverage.coverage(kept(), load_profile(FULL).entries, bundled())


def page() -> str:
    """The page's text."""
    accused = [each for each in table().rows if any(seen.failed for seen in each.cells)]
    return _PAGE.format(
        ran="\n".join(_ran(engine, stale) for engine, (stale, _) in zip(table().engines, table().stale, strict=True)),
        failures=failures.markdown(failed()),
        rest=len(table().rows) - len(accused),
        requirements="\n".join(map(_accused, accused)),
    )


def _ran(engine: Tally, stale: int) -> str:
    profiles = ", ".join(dict.fromkeys(run.profile for run in engine.runs))
    words = "; ".join(dict.fromkeys(run.words for run in engine.runs))
    seconds = duration(sum(run.seconds for run in engine.runs))
    return row([engine.name, engine.version, engine.torch, engine.date, profiles, words, seconds, str(stale)])


def _accused(one: Row) -> str:
    names = [
        f"{engine.name} ({seen.failed})" for engine, seen in zip(table().engines, one.cells, strict=True) if seen.failed
    ]
    # The contract's texts are Markdown.
    link = Markdown(f"[{one.requirement.id}](requirements.md#{one.requirement.id.lower()}) {one.requirement.name}")
    return row([link, str(one.cases), ", ".join(names)])


@functools.cache
def failed() -> list[Failures]:
    """The failures in each engine's runs."""
    entries = load_profile(FULL).entries
    return [failures.failures(each, entries, known_findings()) for each in kept()]


def keep(tallies: Sequence[Tally]) -> None:
    """Write each engine's tally in the place of its former one, and drop cases that no suite has any longer."""
    KEPT.mkdir(exist_ok=True)
    ids = {entry.id for entry in load_profile(FULL).entries}
    for each in {**{old.name: old for old in kept()}, **{new.name: new for new in tallies}}.values():
        text = each.without(set(each.cases) - ids).to_text()
        (KEPT / f"{each.name}.json").write_text(text, encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0, 1 for rows that are empty without a reason or failures that are not known, or the error's."""
    parser = argparse.ArgumentParser(prog="ci/scoreboard", description="Write docs/scoreboard.md from run files.")
    parser.add_argument("--add", action="store_true", help="add the runs to those engines' former ones")
    parser.add_argument("run_files", nargs="*", type=Path, metavar="RUN", help="a run file, or its directory")
    parsed = parser.parse_args(arguments)
    try:
        tallies = tallies_of([verify(path) for path in parsed.run_files])
        former = {each.name: each for each in kept()} if parsed.add else {}
        keep([added(former[each.name], each) if each.name in former else each for each in tallies])
        PAGE.write_text(page(), encoding="utf-8")
        unknown = [
            f"{each.engine}: {case} fails, and ci/known-findings.toml has no entry for it that names a script"
            for each in failed()
            for case in each.unknown
        ]
        for problem in (*table().problems, *unknown):
            print(f"scoreboard: {problem}", file=sys.stderr)
        print(f"{PAGE.relative_to(ROOT)}: {len(table().rows)} requirements, {len(table().engines)} engines")
        return 1 if table().problems or unknown else 0
    except ConformanceError as error:
        print(f"scoreboard: {error}", file=sys.stderr)
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
