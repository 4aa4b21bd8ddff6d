"""
Single cases in this process, against any implementation: for tests of the suite itself and for the kill matrix.

A run of the suite goes through pytest, which writes the run file. Here unittest runs a single case and its record is
returned; all cases get their ranks from the same warm process, whatever the implementation.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
import unittest
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fsdp_conformance import codec, run_settings
from fsdp_conformance.adapters import registry
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.contract.case import Case, case_of
from fsdp_conformance.errors import ConfigError, SuiteError
from fsdp_conformance.harness.processes import forkserver
from fsdp_conformance.mutants import MUTANTS
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.run_settings import RunSettings


@dataclass(frozen=True, slots=True)
class BoundCase:
    """A case and the test method that is its body."""

    case: Case
    owner: type[ConformanceTestCase]
    method: str

    @property
    def family(self) -> str:
        """The method as it was written, before its axes expanded it."""
        axes = dict(self.case.axes)
        stem = self.case.id.rsplit("-ws", 1)[0] if "world_size" in axes or not axes else self.case.id
        return f"{self.owner.__module__}.{self.owner.__qualname__}.{stem}"


def bound_cases(package: str = "fsdp_conformance.suites") -> Iterator[BoundCase]:
    """Every case of the suites, in the order of modules, classes and methods."""
    suites = importlib.import_module(package)
    for info in sorted(pkgutil.iter_modules(suites.__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{package}.{info.name}")
        for owner in vars(module).values():
            if not (
                isinstance(owner, type)
                and issubclass(owner, ConformanceTestCase)
                and owner.__module__ == module.__name__
            ):
                continue
            for name, method in vars(owner).items():
                case = case_of(method)
                if case is not None:
                    yield BoundCase(case, owner, name)


def bound_case(case_id: str) -> BoundCase:
    """The case of that id. Raises ConfigError if there is none."""
    for bound in bound_cases():
        if bound.case.id == case_id:
            return bound
    raise ConfigError([f"case must be the id of a case, got {case_id!r}"], where="bound_case")


def run_case(bound: BoundCase, implementation: str, *, base: RunSettings | None = None) -> CaseRecord:
    """
    The record of one case on one implementation.

    Raises SuiteError, with unittest's output, if the case ends without a record.
    """
    # Other cases will follow, of the modules that `bound_cases` has imported.
    forkserver.expect(name for name in tuple(sys.modules) if name.startswith("fsdp_conformance.suites."))
    settings = replace(base or run_settings.current(), implementation=implementation)
    if bound.case.is_own and not settings.workload:
        settings = replace(settings, workload=stand_in(bound.case))
    return record_of(bound.owner(bound.method), settings)


#: Models of the suite in place of a user's, by what a case asks of it. The last one has all that is left.
_STAND_INS = {
    "own_meta": "deferred:deferred_nested",
    "own_frozen": "frozen:frozen_units",
    "own_tied": "transformer:transformer",
    "own_exact": "probes:exact_nested",
    "own_workload": "llama:llama",
}


def stand_in(case: Case) -> str:
    """The model on which a case that trains the user's own is shown to see anything."""
    place = next(place for name, place in _STAND_INS.items() if name in case.environment)
    return f"fsdp_conformance.fixtures.{place}"


def record_of(test: ConformanceTestCase, chosen: RunSettings) -> CaseRecord:
    """The record of a test, which is run with these settings. Raises SuiteError if it ends without one."""
    before = run_settings.current()
    run_settings.use(chosen, _description(chosen.implementation))
    try:
        result = unittest.TestResult()
        test.run(result)  # type: ignore[no-untyped-call]
    finally:
        run_settings.use(before)
    if test.record is None:
        messages = [text for _, text in [*result.errors, *result.failures]] + [reason for _, reason in result.skipped]
        raise SuiteError(f"{test.case.id} on {chosen.implementation} ended without a record:\n" + "\n".join(messages))
    return test.record


def _description(spec: str) -> dict[str, Any] | None:
    """
    The description of a mutant, whose module may be imported here. None for other engines: the controller asks a child
    process for theirs.

    All mutants share a warm server, which no other engine does: importing their modules changes nothing outside of
    them, and a run of many would start a server for each module.
    """
    modules = _modules_of_mutants()
    if spec.partition(":")[0] not in ("mutant", *modules) or registry.load(spec).environment:
        return None
    return {**codec.plain(registry.describe_here(spec)), "preload": list(modules)}


@functools.cache
def _modules_of_mutants() -> tuple[str, ...]:
    return tuple(sorted({mutant.spec.partition(":")[0] for mutant in MUTANTS.values()}))
