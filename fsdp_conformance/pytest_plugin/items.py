"""Hooks for conformance cases in the process that runs them: selection, order, and the verdict as the outcome."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any

import pytest

from fsdp_conformance.pytest_plugin import options

if TYPE_CHECKING:
    from fsdp_conformance.contract.case import Case
    from fsdp_conformance.explore.shrinking import RowShrinker
    from fsdp_conformance.outcome.records import CaseRecord
    from fsdp_conformance.run_settings import RunOrder


class Cases:
    """The hooks that see items."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self._shrinker: RowShrinker | None = None
        self._kept: tuple[RunOrder, set[str]] | None = None

    def pytest_sessionstart(self) -> None:
        """Start the server from which ranks are forked: it imports torch while this process collects the cases."""
        runs_here = hasattr(self.config, "workerinput") or self.config.getoption("dist", default="no") == "no"
        if runs_here and options.targets_suites(self.config) and not self.config.getoption("collectonly"):
            from fsdp_conformance.harness.processes.forkserver import server_for

            server_for().ensure_running()

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, obj: object) -> list[pytest.Item] | None:
        """
        Pass over classes of this suite without a selected case: pytest takes 10 ms to look for fixtures in each.

        With node ids on the command line, no class is passed over: they may name a case that is not selected.
        """
        base = sys.modules.get("fsdp_conformance.cases.base")
        if base is None or not (isinstance(obj, type) and issubclass(obj, base.ConformanceTestCase)):
            return None
        from fsdp_conformance.contract.case import case_of
        from fsdp_conformance.references.sharing import is_of_suites

        if any("::" in word for word in self.config.args) or not is_of_suites(obj.__module__):
            return None
        try:
            kept = self._kept_ids()
        except pytest.UsageError:
            return None  # raised again for the whole collection, as one message
        ids = {case.id for method in vars(obj).values() if (case := case_of(method)) is not None}
        return [] if ids.isdisjoint(kept) else None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """
        Keep the selected cases: the largest world first, and within one size those that start early.

        The order is the same in every worker.
        """
        pairs = [(item, case) for item in items if (case := _case_of(item)) is not None]
        if not pairs:
            return
        from fsdp_conformance import run_settings

        order = options.order_of(config)
        run_settings.use(order.settings, order.description)
        saved = {case.id for _, case in pairs if case.is_saved}
        chosen = saved | (self._kept_ids() if len(saved) < len(pairs) else set())
        selected = sorted(
            ((item, case) for item, case in pairs if case.id in chosen),
            key=lambda pair: (-pair[1].world_size, not pair[1].starts_early, pair[1].id),
        )
        cases = {item for item, _ in pairs}
        items[:] = [item for item, _ in selected] + [item for item in items if item not in cases]
        dropped = [item for item, case in pairs if case.id not in chosen]
        if dropped:
            config.hook.pytest_deselected(items=dropped)
        _expect_modules(item for item, _ in selected)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Let the ranks of the next case get ready while this one runs, on devices where that takes long."""
        module = sys.modules.get("fsdp_conformance.harness.processes.prepared")
        if module is not None and _case_of(item) is not None:
            following = _case_of(nextitem) if nextitem is not None else None
            module.prepared.expect(following.world_size if following is not None else 0)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Give a case's report its record, and its record's outcome."""
        report = yield
        case = _case_of(item)
        if case is not None:
            self._attach(report, item, case, call)
        return report

    def pytest_unconfigure(self) -> None:
        """End the process in which failing rows were shrunk."""
        if self._shrinker is not None:
            self._shrinker.close()

    def _kept_ids(self) -> set[str]:
        """
        The selected cases that have no verdict yet; also those of other world sizes, which stay in the run file as
        DISABLED.
        """
        from fsdp_conformance.contract.selection import left_out_by

        order = options.order_of(self.config)
        if self._kept is None or self._kept[0] is not order:
            with options.usage_errors():
                options.selected_entries(self.config)
                ids = {
                    entry.id
                    for entry in options.profile_of(self.config).entries
                    if left_out_by(entry.case(), order.settings) in ("", "--world-size")
                }
            self._kept = order, ids - {*(order.judged or ())}
        return self._kept[1]

    def _attach(self, report: pytest.TestReport, item: pytest.Item, case: Case, call: pytest.CallInfo[None]) -> None:
        """Carry the case's record on the report, and make its verdict the outcome."""
        about: dict[str, Any] = {
            "id": case.id,
            "requirements": list(case.requirements),
            "chapter": case.chapter,
            "world_size": case.world_size,
            "rerun": item.get_closest_marker("flaky") is not None,
        }
        if not case.is_saved:
            report.conformance_case = about  # type: ignore[attr-defined]
        if report.when == "teardown" or (report.when == "setup" and report.passed):
            return
        from fsdp_conformance.codec import encode

        record = _record_of(report, about, item, call)
        self._shrink(record, item)
        if not case.is_saved:
            # A saved case is part of the user's tests: it goes into no run file.
            report.conformance = encode(record.to_json())  # type: ignore[attr-defined]
        report.user_properties += [
            ("conformance_case", case.id),
            ("conformance_requirements", " ".join(case.requirements)),
            ("conformance_verdict", record.verdict.value),
        ]
        _set_outcome(report, item, record)

    def _shrink(self, record: CaseRecord, item: pytest.Item) -> None:
        """Note which of its values a failing scenario takes to fail."""
        from fsdp_conformance.verdict import ACCUSING

        if record.verdict not in ACCUSING:
            return
        trains = getattr(getattr(item, "instance", None), "trains", None)
        if trains is None:
            return
        from fsdp_conformance.explore.shrinking import RowShrinker

        scenario, order = trains
        self._shrinker = self._shrinker or RowShrinker()
        record.takes = self._shrinker.takes(record, scenario, order)


def _record_of(
    report: pytest.TestReport, about: dict[str, Any], item: pytest.Item, call: pytest.CallInfo[None]
) -> CaseRecord:
    """The verdict that the test left. If it left none, that is our mistake, unless the exception says otherwise."""
    from fsdp_conformance.report import unjudged
    from fsdp_conformance.verdict import Verdict

    text = report.longreprtext
    if report.when == "setup":
        if report.skipped:
            return unjudged.unjudged(about, f"skipped by pytest: {unjudged.last_line(text)}", Verdict.DISABLED)
        return unjudged.unjudged(about, f"its setup failed: {unjudged.last_line(text)}", text=text)
    record: CaseRecord | None = getattr(getattr(item, "instance", None), "record", None)
    if record is None:
        return unjudged.of_exception(about, call.excinfo.value if call.excinfo is not None else None, text=text)
    if record.verdict is Verdict.PASS and report.outcome != "passed":
        return unjudged.contradicted(record, report.outcome, text)
    return record


def _set_outcome(report: pytest.TestReport, item: pytest.Item, record: CaseRecord) -> None:
    """PASS passes, a case that was not judged skips with its reason, all others fail with the whole report."""
    from fsdp_conformance.report.terminal import render_failure
    from fsdp_conformance.verdict import QUIET, Verdict

    if hasattr(report, "wasxfail"):
        del report.wasxfail
    if record.verdict is Verdict.PASS:
        report.outcome = "passed"
    elif record.verdict in QUIET:
        path, line, _ = item.location
        report.outcome = "skipped"
        report.longrepr = (path, line or 0, f"{record.verdict}: {record.reason}")
    else:
        report.outcome = "failed"
        report.longrepr = render_failure(record)


def record_from(text: str) -> CaseRecord:
    """The record that a report carries."""
    from fsdp_conformance.outcome.records import case_record_from_json

    return case_record_from_json(json.loads(text))


def _expect_modules(items: Iterable[pytest.Item]) -> None:
    """Have the next warm server import the modules of all selected cases at once."""
    from fsdp_conformance.harness.processes import forkserver
    from fsdp_conformance.references.sharing import is_of_suites

    modules = dict.fromkeys(item.obj.__module__ for item in items if isinstance(item, pytest.Function))
    forkserver.expect(filter(is_of_suites, modules))


def _case_of(item: pytest.Item) -> Case | None:
    """The case that an item is bound to. None if the module of cases has not been imported."""
    cases = sys.modules.get("fsdp_conformance.contract.case")
    function = getattr(item, "function", None) or getattr(item, "obj", None)
    case: Case | None = cases.case_of(function) if cases is not None else None
    return case
