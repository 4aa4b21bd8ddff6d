"""The process that writes the run file, and reports at the end what the run has shown."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from fsdp_conformance import run_settings
from fsdp_conformance.pytest_plugin import items, options

if TYPE_CHECKING:
    from fsdp_conformance.errors import ConformanceError
    from fsdp_conformance.report.certificate import Certificate
    from fsdp_conformance.report.recorder import Recorder
    from fsdp_conformance.run_settings import RunSettings

#: Exit statuses of a run that could not go on; pytest's own end at 5.
EXIT_ENVIRONMENT = 6
EXIT_SUITE = 7


class Controller:
    """The hooks that see the session and its reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.recorder: Recorder | None = None
        self.certificate: Certificate | None = None
        self.error: ConformanceError | None = None
        self._judged: set[str] = set()
        self._stopped_by = ""
        """With --fail-fast: the case that failed."""
        self._running: dict[str, dict[str, Any]] = {}
        self._session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Describe the adapter and open the run file, if pytest runs the suites."""
        self._session = session
        if not options.targets_suites(self.config) or self.config.getoption("collectonly"):
            return
        from fsdp_conformance.errors import ConformanceError
        from fsdp_conformance.status import Status

        try:
            self._start()
        except ConformanceError as error:
            options.report_error(error)
            status = options.status_of(error)
            if status == Status.USAGE:
                raise pytest.UsageError(str(error)) from None
            pytest.exit(str(error), returncode=EXIT_ENVIRONMENT if status == Status.ENVIRONMENT else EXIT_SUITE)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Hand the order to a worker."""
        node.workerinput[options.WORKER_INPUT] = options.order_of(self.config).to_json()
        node.workerinput[options.SECRET_INPUT] = run_settings.secret()

    @pytest.hookimpl(trylast=True)
    def pytest_report_header(self) -> list[str]:
        """The implementation that is judged, and the cases that judge it."""
        if self.recorder is None:
            return []
        order, profile = options.order_of(self.config), self.recorder.profile
        description = order.description or {}
        what = f"{description.get('name')} {description.get('version')} · {order.settings.device}"
        return [
            f"conformance: {what} · {profile.name} {profile.sha256[:12]} · {len(profile.entries)} cases",
            f"capabilities: {' '.join(description.get('capabilities', ())) or 'none'}",
        ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Compile the simulated accelerator before the first case that needs it, with a message: it takes a while."""
        order = options.order_of(self.config) if self.recorder is not None else None
        if order is None or order.description is None:
            return
        from fsdp_conformance import codec
        from fsdp_conformance.adapters import registry
        from fsdp_conformance.cases import places

        cases = [entry.case() for entry in options.selected_entries(self.config)]
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        say = reporter.write_line if reporter is not None else print
        declared = codec.typed(registry.AdapterDescription, order.description).declared
        places.prepare(cases, order.settings, declared, say=say)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write down what a report says about a case."""
        case: dict[str, Any] | None = getattr(report, "conformance_case", None)
        if case is None:
            return
        with self._writing() as recorder:
            if report.when == "setup":
                self._running[report.nodeid] = case
                recorder.start(case["id"], world_size=case["world_size"], worker=getattr(report, "worker_id", ""))
            if case.get("rerun") or str(report.outcome) == "rerun":
                recorder.note(_RERUN, refuses=True)
            record = getattr(report, "conformance", None)
            if record is not None:
                self._running.pop(report.nodeid, None)
                self._judged.add(case["id"])
                if report.failed:
                    self._stopped_by = self._stopped_by or case["id"]
                recorder.case(items.record_from(record))
            elif report.when == "teardown" and report.failed:
                recorder.note(
                    f"{case['id']}: its teardown failed, so processes or files may be left over", refuses=True
                )

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        """A worker of pytest-xdist died during a case. Ranks are its children, so the implementation did not do it."""
        from fsdp_conformance.report import unjudged

        case = self._running.pop(crashitem, None)
        with self._writing() as recorder:
            if case is None:
                recorder.note(f"{crashitem}: the pytest worker died before the case began", refuses=True)
            else:
                reason = "the pytest worker itself died during this case, not one of its ranks"
                recorder.case(unjudged.unjudged(case, reason))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the footer, unless the run was interrupted, and set the exit status."""
        if self.recorder is None:
            return
        # pytest-xdist calls it an interrupt when it stops after a failure.
        failed_fast = options.settings_of(self.config).fail_fast and self._stopped_by
        interrupted = exitstatus == pytest.ExitCode.INTERRUPTED and not failed_fast
        if self.error is None and (interrupted or exitstatus == pytest.ExitCode.INTERNAL_ERROR):
            self.recorder.abort()
        elif self.error is None:
            with self._writing() as recorder:
                if failed_fast:
                    self._note_what_is_left(recorder)
                    session.exitstatus = pytest.ExitCode.TESTS_FAILED
                self.certificate = recorder.finish()
        if self.error is not None:
            options.report_error(self.error)
            session.exitstatus = EXIT_ENVIRONMENT
        elif self.certificate is not None and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            whole = options.runs_everything(self.config) or not self.certificate.only_incomplete
            if self.recorder.profile.certifies and whole and not self.certificate.certified:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Findings, the certificate, and the path of the run file."""
        if self.recorder is None:
            return
        from fsdp_conformance.diagnosis.grouping import grouped
        from fsdp_conformance.report.folding import screen_width
        from fsdp_conformance.report.runfile import read
        from fsdp_conformance.report.terminal import certificate_text, explain_command, headline, summary_line

        write = terminalreporter.write_line
        terminalreporter.section("conformance")
        groups = grouped(read(self.recorder.path).records)
        for group in groups:
            count = 1 + len(group.others)
            write(f"{headline(group.first)}   {group.first.case}" + (f" and {count - 1} more" if count > 1 else ""))
        if groups:
            write(f"everything about a case: {explain_command(groups[0].first, str(self.recorder.path))}")
        if self.error is not None:
            write(f"ABORTED: {self.error}", red=True)
        elif self.certificate is None:
            write("ABORTED: the run was interrupted, and its file has no footer", red=True)
        else:
            text = certificate_text(self.certificate, width=screen_width())
            if text:
                write(text)
            good = self.certificate.certified
            write(summary_line(self.certificate, seconds=self.recorder.seconds), green=good, red=not good)
        write(f"run file: {self.recorder.path}")

    def _start(self) -> Recorder:
        """Open the run file."""
        from fsdp_conformance import codec, run_settings
        from fsdp_conformance.adapters import registry
        from fsdp_conformance.contract.profile import names
        from fsdp_conformance.report.last_run import remember, report_directory
        from fsdp_conformance.report.recorder import Recorder

        order = options.order_of(self.config)
        profile = options.profile_of(self.config)
        options.selected_entries(self.config)
        _check_devices(order.settings)
        if order.settings.workload:
            # It imports torch.
            from fsdp_conformance.cases import own_model

            order = replace(order, settings=own_model.with_properties(order.settings))
        description = order.description or codec.plain(registry.describe(order.settings.implementation))
        options.use_order(self.config, replace(order, description=description))
        run_settings.use(order.settings, description)
        directory = report_directory(order.settings)
        resumed = order.judged is not None
        self.recorder = Recorder(order.settings, profile, description, directory, resumed=resumed)
        self._judged |= {*(order.judged or ())}
        if not self.config.getoption("conformance_order"):
            # Otherwise the process that gave the order has done so, or is a follower of torchrun, which must not.
            remember(directory)
        if self.config.getoption("reruns", default=0) or self.config.getoption("force_flaky", default=False):
            self.recorder.note(_RERUN, refuses=True)
        suites = str(self.config.getoption("conformance_suites"))
        if suites != options.SUITES and profile.name in names():
            self.recorder.note(f"private: the cases are those of {suites}, not of this suite", refuses=True)
        return self.recorder

    def _note_what_is_left(self, recorder: Recorder) -> None:
        selected = options.selected_entries(self.config)
        left = sum(entry.id not in self._judged for entry in selected)
        if left:
            text = f"stopped by --fail-fast after {self._stopped_by}: {left} of {len(selected)} cases were not run"
            recorder.note(text)

    @contextmanager
    def _writing(self) -> Generator[Recorder]:
        """The recorder, opened if need be. An error while writing ends the session and leaves the file intact."""
        from fsdp_conformance.errors import ConformanceError

        try:
            yield self.recorder or self._start()
        except ConformanceError as error:
            self.error = self.error or error
            if self._session is not None:
                self._session.shouldstop = str(error)


_RERUN = "not comparable: a plugin reran failed cases, and a case must run only once"


def _check_devices(settings: RunSettings) -> None:
    """Raise EnvironmentUnavailable if this machine cannot run what was asked for by name."""
    from fsdp_conformance.cases.places import place_of
    from fsdp_conformance.errors import EnvironmentUnavailable
    from fsdp_conformance.harness import devices

    here = place_of(settings.device)
    if here.problem:
        raise EnvironmentUnavailable(f"{here.problem} Use another --device.")
    if not settings.share_devices:
        devices.backend_for(settings.device)
    needed = 1 if settings.share_devices else max(settings.world_sizes, default=1)
    count = here.num_ranks
    if count is not None and count < needed:
        raise EnvironmentUnavailable(
            f"expected at least {needed} devices of type {settings.device!r}, found {count}. "
            "Choose another --device, or a smaller world size."
        )
    if settings.slots_per_device != 1:
        from fsdp_conformance.harness import leases

        leases.slots_of(settings.device, settings.slots_per_device)
