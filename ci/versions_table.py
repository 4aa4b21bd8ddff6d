"""
The results of ci/versions, as a Markdown table with a row for each version of torch.

    python ci/versions_table.py DIR
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

from fsdp_conformance.errors import RunFileError
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report import runfile
from fsdp_conformance.report.expectations import UNREMARKABLE, what_happened
from fsdp_conformance.verdict import Verdict

#: The parts of ci/versions that are tests, in the order of the columns.
TESTS = ("tests", "simulator")


@dataclass(frozen=True, slots=True)
class Tests:
    """The outcome of a pytest run."""

    passed: int
    failed: int
    skipped: int

    def words(self) -> str:
        """ "12 passed, 1 failed"."""
        counts = {"passed": self.passed, "failed": self.failed, "skipped": self.skipped}
        return ", ".join(f"{count} {word}" for word, count in counts.items() if count or word == "passed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The results of one version of torch."""

    version: str
    """As it was asked for: "2.6"."""
    torch: str = "not installed"
    """As it was found."""
    tests: Mapping[str, Tests] = field(default_factory=dict)
    """Part to outcome; parts that did not end are missing."""
    verdicts: Mapping[str, Mapping[str, CaseRecord]] = field(default_factory=dict)
    """Engine to case to record; runs that did not end are missing."""


def found_in(directory: Path) -> Found:
    """The results in the directory of one version."""
    verdicts, torch = {}, "not installed"
    for path in sorted(directory.glob(f"*/{runfile.NAME}")):
        run = runfile.read(path)
        if run.problems:
            raise RunFileError(f"{path}: {run.problems[0]}")
        torch = str((run.header.get("environment") or {}).get("torch", torch))
        if not run.aborted:
            verdicts[path.parent.name] = {record.case: record for record in run.records}
    tests = {part: _tests(directory / f"{part}.xml") for part in TESTS if (directory / f"{part}.xml").exists()}
    return Found(version=directory.name, torch=torch, tests=tests, verdicts=verdicts)


def _tests(path: Path) -> Tests:
    suites = list(ET.parse(path).getroot().iter("testsuite"))  # noqa: S314 - written by our own pytest

    def total(*names: str) -> int:
        return sum(int(suite.get(name, 0)) for suite in suites for name in names)

    failed, skipped = total("failures", "errors"), total("skipped")
    return Tests(passed=total("tests") - failed - skipped, failed=failed, skipped=skipped)


def table(versions: list[Found]) -> Iterator[str]:
    """The lines of the page."""
    engines = sorted({engine for version in versions for engine in version.verdicts})
    yield "| torch | " + " | ".join((*TESTS, *(f"{engine}, base" for engine in engines))) + " |"
    yield "|---" * (1 + len(TESTS) + len(engines)) + "|"
    for version in versions:
        cells = [version.tests[part].words() if part in version.tests else "not run" for part in TESTS]
        cells += [_counts(version.verdicts[engine]) if engine in version.verdicts else "not run" for engine in engines]
        yield f"| {version.torch if version.verdicts else version.version} | " + " | ".join(cells) + " |"
    if len(versions) > 1:
        yield ""
        differing = [line for engine in engines for line in _differences(engine, versions)]
        yield f"{len(differing)} verdicts differ from those on the newest version" + (":" if differing else ".")
        yield from differing


def _counts(records: Mapping[str, CaseRecord]) -> str:
    passed = sum(record.verdict is Verdict.PASS for record in records.values())
    failed = sum(record.verdict not in UNREMARKABLE for record in records.values())
    return f"{passed} of {len(records)} PASS" + (f", {failed} failed" if failed else "")


def _differences(engine: str, versions: list[Found]) -> Iterator[str]:
    """Every verdict that is another one on the newest version."""
    last = versions[-1]
    newest = last.verdicts.get(engine, {})
    for version in versions[:-1]:
        for case, record in version.verdicts.get(engine, {}).items():
            if case in newest and newest[case].verdict is not record.verdict:
                happened = what_happened(record) or what_happened(newest[case])
                other = newest[case].verdict
                yield f"- {engine}, {case}: {record.verdict} on {version.torch}, {other} on {last.torch}: {happened}"


def _number(directory: Path) -> tuple[int, ...]:
    return tuple(map(int, directory.name.split(".")))


def main(directory: Path) -> int:
    """Print the page."""
    # The lowest versions of everything have tests of their own, whose result is an exit status.
    versions = (place for place in directory.iterdir() if place.is_dir() and place.name != "lowest")
    places = sorted(versions, key=_number)
    print("\n".join(table([found_in(place) for place in places])))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
