"""
The pytest plugin: options, order, verdicts as outcomes, the run file.

It is loaded by every pytest run of the environment that the package is installed in, so it imports nothing of the
package at load, and does nothing to items that are no conformance cases. One process writes the run file: the
controller. Items run there, or in the workers of pytest-xdist, whose reports carry the records over.

A case's outcome is its record's verdict, whatever the test method did: PASS passes; UNSUPPORTED, NOT_RUN_ENV and
DISABLED skip; all others fail. A test that ends without a record is ERROR_SUITE. The exit status is not 0 if a run of
a whole profile earns no certificate.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fsdp_conformance.case import Case
    from fsdp_conformance.config import RunSettings
    from fsdp_conformance.contract.profile import Profile
    from fsdp_conformance.errors import ConformanceError
    from fsdp_conformance.outcome import CaseRecord
    from fsdp_conformance.report.certificate import Certificate
    from fsdp_conformance.report.recorder import Recorder

#: The package whose items make a run.
SUITES = "fsdp_conformance.suites"

#: Names a file that an error of the run as a whole is written to, for whoever started pytest as a subprocess.
ERROR_FILE = "FSDP_CONFORMANCE_ERROR_FILE"

#: Names a file with the adapter's description as JSON, where whoever started pytest has asked for it already.
DESCRIPTION_FILE = "FSDP_CONFORMANCE_DESCRIPTION_FILE"

#: Exit statuses of a run that could not go on; pytest's own end at 5.
EXIT_ENVIRONMENT = 6
EXIT_SUITE = 7

#: Option of RunSettings to our option's name in pytest.
_OPTIONS = {
    "implementation": "implementation",
    "profile": "conformance_profile",
    "device": "conformance_device",
    "no_simulator": "no_simulator",
    "world_sizes": "conformance_world_size",
    "cases": "conformance_case",
    "report_dir": "conformance_report",
    "ranks": "ranks",
    "reuse_ranks": "reuse_ranks",
    "deadline_scale": "conformance_deadline_scale",
}

#: Key of what the controller hands to the workers of pytest-xdist.
_INPUT = "fsdp_conformance"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of a conformance run."""
    add = parser.getgroup("fsdp-conformance", "conformance of sharded data-parallel training").addoption

    def option(name: str, text: str, **how: Any) -> None:
        add(name, help=text, **how)

    option("--implementation", "an entry point's name, package.module:Class, or path/to/file.py:Class", metavar="SPEC")
    option("--conformance-profile", "the cases that make the certificate", metavar="NAME")
    option("--conformance-device", "cpu, sim, cuda, or any accelerator that torch knows", metavar="TYPE")
    option("--no-simulator", "on the CPU, run no case on the simulated accelerator", action="store_true")
    option("--conformance-world-size", "only cases of this many ranks; may be repeated", metavar="N", action="append")
    option("--conformance-case", "only this case or requirement; may be repeated", metavar="ID", action="append")
    option("--conformance-report", "where the run file goes", metavar="DIR")
    option("--conformance-deadline-scale", "multiply every deadline", metavar="X")
    option("--ranks", "processes, or simulated: threads of one process, quick in large worlds", metavar="KIND")
    option("--reuse-ranks", "keep ranks alive across cases; earns no certificate", action="store_true")
    option("--conformance-suites", "another package of cases", metavar="PACKAGE", default=SUITES)


def pytest_configure(config: pytest.Config) -> None:
    """Check the options that were given, and let the controller write the run file."""
    config.pluginmanager.register(Cases(config), "fsdp-conformance-cases")
    if not hasattr(config, "workerinput"):
        if _given(config):
            _settings(config)
        config.pluginmanager.register(Controller(config), "fsdp-conformance-controller")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """`-n auto` is as many workers as there are disjoint device slots; nothing is said of other tests."""
    if not _targets(config):
        return None
    from fsdp_conformance.harness import devices

    settings = _settings(config)
    with _usage_errors():
        entries = _profile(config).selected(settings.cases, settings.world_sizes)
        # More workers than fit for the largest world wait for a lease; fewer would leave devices idle.
        smallest = min((entry.world_size for entry in entries if entry.world_size > 1), default=1)
        return devices.slots(settings.device, smallest)


class Cases:
    """What is done to items that are conformance cases, in the process that runs them."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave the profile's cases, the largest world first, in an order that is the same in every worker."""
        found = [(index, item, case) for index, item in enumerate(items) if (case := _case_of(item)) is not None]
        if not found:
            return
        from fsdp_conformance import settings as run_settings

        handed = getattr(config, "workerinput", {}).get(_INPUT)
        if handed is None:
            settings = _settings(config)
            run_settings.use(settings, run_settings.description())
        else:
            content = json.loads(handed)
            settings = run_settings.from_json(content["settings"])
            run_settings.use(settings, content["description"])
        with _usage_errors():
            profile = _profile(config)
            chosen = {entry.id for entry in profile.selected(settings.cases, ())}
        kept = sorted(
            ((item, case) for _, item, case in found if case.id in chosen),
            key=lambda pair: (-pair[1].world_size, pair[1].id),
        )
        dropped = [item for _, item, case in found if case.id not in chosen]
        ours = {index for index, _, _ in found}
        items[:] = [item for item, _ in kept] + [item for index, item in enumerate(items) if index not in ours]
        if dropped:
            config.hook.pytest_deselected(items=dropped)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Give a case's report its record, and its record's outcome."""
        report = yield
        case = _case_of(item)
        if case is not None:
            _attach(report, item, case, call)
        return report


class Controller:
    """Writes the run file and says at the end what the run has shown."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.recorder: Recorder | None = None
        self.certificate: Certificate | None = None
        self.error: ConformanceError | None = None
        self._description: Mapping[str, Any] | None = None
        self._running: dict[str, dict[str, Any]] = {}
        self._session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Describe the adapter and open the run file, if the suites are what is being run."""
        self._session = session
        if _targets(self.config) and not self.config.getoption("collectonly"):
            try:
                self._start()
            except _errors().ConformanceError as error:
                _tell(error)
                status = status_of(error)
                if status == 2:
                    raise pytest.UsageError(str(error)) from None
                pytest.exit(str(error), returncode=EXIT_ENVIRONMENT if status == 3 else EXIT_SUITE)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Hand settings and the adapter's description to a worker."""
        content = {"settings": asdict(_settings(self.config)), "description": self._description}
        node.workerinput[_INPUT] = json.dumps(content)

    @pytest.hookimpl(trylast=True)
    def pytest_report_header(self) -> list[str]:
        """What is being judged, by which cases."""
        if self.recorder is None:
            return []
        told = self._description or {}
        profile = self.recorder.profile
        what = f"{told.get('name')} {told.get('version')} · {_settings(self.config).device}"
        return [
            f"conformance: {what} · {profile.name} {profile.sha256[:12]} · {len(profile.entries)} cases",
            f"capabilities: {' '.join(told.get('capabilities', ())) or 'none'}",
        ]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write what a report says of a case."""
        case: dict[str, Any] | None = getattr(report, "conformance_case", None)
        if case is None:
            return
        with self._writing() as recorder:
            if report.when == "setup":
                self._running[report.nodeid] = case
                recorder.start(case["id"], world_size=case["world_size"], worker=getattr(report, "worker_id", ""))
            if case.get("rerun") or str(report.outcome) == "rerun":
                recorder.note("not comparable: a plugin reruns failed cases, but a case runs once", refuses=True)
            record = getattr(report, "conformance", None)
            if record is not None:
                self._running.pop(report.nodeid, None)
                recorder.case(_record_from(record))
            elif report.when == "teardown" and report.failed:
                recorder.note(f"{case['id']}: its teardown failed, so what it left behind is unknown", refuses=True)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        """A worker of pytest-xdist died during a case: ranks are its children, so it was not the implementation."""
        from fsdp_conformance.report import unjudged

        case = self._running.pop(crashitem, None)
        with self._writing() as recorder:
            if case is None:
                recorder.note(f"{crashitem}: the pytest worker died before the case began", refuses=True)
            else:
                reason = "the pytest worker died during this case; ranks are its children"
                recorder.case(unjudged.unjudged(case, reason))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the footer, unless the run was interrupted, and see to the exit status."""
        if self.recorder is None:
            return
        if self.error is None and exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR):
            self.recorder.abort()
        elif self.error is None:
            with self._writing() as recorder:
                self.certificate = recorder.finish()
        if self.error is not None:
            _tell(self.error)
            session.exitstatus = EXIT_ENVIRONMENT
        elif self.certificate is not None and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            expected = self.recorder.profile.certifies and (_whole(self.config) or not self.certificate.only_incomplete)
            if expected and not self.certificate.certified:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Findings, the certificate, and where the run file is."""
        if self.recorder is None:
            return
        from fsdp_conformance.report.runfile import read
        from fsdp_conformance.report.terminal import grouped, headline, reasons_text, summary_line

        write = terminalreporter.write_line
        terminalreporter.section("conformance")
        for group in grouped(read(self.recorder.path).records):
            count = 1 + len(group.others)
            write(f"{headline(group.first)}   {group.first.case}" + (f" and {count - 1} more" if count > 1 else ""))
        if self.error is not None:
            write(f"ABORTED: {self.error}", red=True)
        elif self.certificate is None:
            write("ABORTED: the run was interrupted, and its file has no footer", red=True)
        else:
            text = reasons_text(self.certificate)
            if text:
                write(text)
            good = self.certificate.certified
            write(summary_line(self.certificate, seconds=self.recorder.seconds), green=good, red=not good)
        write(f"run file: {self.recorder.path}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Compile the simulated accelerator before the first case that needs it, and say so: it takes a while."""
        if self.recorder is None or self._description is None:
            return
        from fsdp_conformance.adapters import registry
        from fsdp_conformance.simulator import place

        settings = _settings(self.config)
        cases = [entry.case() for entry in self.recorder.profile.selected(settings.cases, settings.world_sizes)]
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        say = reporter.write_line if reporter is not None else print
        place.prepare(cases, settings, registry.description_from_json(self._description).declared, say=say)

    def _start(self) -> Recorder:
        """Open the run file."""
        from fsdp_conformance import settings as run_settings
        from fsdp_conformance.adapters import registry
        from fsdp_conformance.report.recorder import Recorder, report_directory

        settings = _settings(self.config)
        profile = _profile(self.config)
        profile.selected(settings.cases, settings.world_sizes)
        _check_devices(settings)
        self._description = _described(settings.implementation) or registry.describe(settings.implementation).to_json()
        run_settings.use(settings, self._description)
        self.recorder = Recorder(settings, profile, self._description, report_directory(settings))
        if self.config.getoption("reruns", default=0) or self.config.getoption("force_flaky", default=False):
            self.recorder.note("not comparable: a plugin reruns failed cases, but a case runs once", refuses=True)
        return self.recorder

    @contextmanager
    def _writing(self) -> Generator[Recorder]:
        """The recorder, opened if need be. What cannot be written ends the session, with the file intact."""
        errors = _errors().ConformanceError
        try:
            yield self.recorder or self._start()
        except errors as error:
            self.error = self.error or error
            if self._session is not None:
                self._session.shouldstop = str(error)


def _described(implementation: str) -> Mapping[str, Any] | None:
    """The description that was handed over, if it is of this implementation."""
    place = os.environ.get(DESCRIPTION_FILE)
    if not place:
        return None
    content: Mapping[str, Any] = json.loads(Path(place).read_text(encoding="utf-8"))
    return content if content.get("spec") == implementation else None


def _check_devices(settings: RunSettings) -> None:
    """Raise EnvironmentUnavailable if this machine cannot run what was asked for by name."""
    from fsdp_conformance.errors import EnvironmentUnavailable
    from fsdp_conformance.harness import devices
    from fsdp_conformance.simulator.place import place_of

    here = place_of(settings.device)
    if here.problem:
        raise EnvironmentUnavailable(f"{here.problem} Use another --device.")
    devices.backend_for(settings.device)
    count, asked = here.num_ranks, max(settings.world_sizes, default=1)
    if count is not None and count < asked:
        raise EnvironmentUnavailable(
            f"{count} devices of type {settings.device!r} are present, but should be {asked} at least. "
            "Choose another --device, or a smaller world size."
        )


def _attach(report: pytest.TestReport, item: pytest.Item, case: Case, call: pytest.CallInfo[None]) -> None:
    """Carry the case's record on the report, and make its verdict the outcome."""
    about = {"id": case.id, "requirements": list(case.requirements), "chapter": case.chapter}
    report.conformance_case = {  # type: ignore[attr-defined]
        **about,
        "world_size": case.world_size,
        "rerun": item.get_closest_marker("flaky") is not None,
    }
    if report.when == "teardown" or (report.when == "setup" and report.passed):
        return
    from fsdp_conformance.report.runfile import encode

    record = _record_of(report, item, call)
    report.conformance = encode(record.to_json())  # type: ignore[attr-defined]
    report.user_properties += [
        ("conformance_case", case.id),
        ("conformance_requirements", " ".join(case.requirements)),
        ("conformance_verdict", record.verdict.value),
    ]
    _set_outcome(report, item, record)


def _record_of(report: pytest.TestReport, item: pytest.Item, call: pytest.CallInfo[None]) -> CaseRecord:
    """The verdict that the test left; without one it is our own mistake, unless the exception says whose."""
    from fsdp_conformance.report import unjudged
    from fsdp_conformance.verdict import Verdict

    about: dict[str, Any] = vars(report)["conformance_case"]
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
    """PASS passes, what was not judged skips with its reason, all others fail with the whole argument."""
    from fsdp_conformance.report.terminal import QUIET, render_record
    from fsdp_conformance.verdict import Verdict

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
        parts = [render_record(record), record.traceback.rstrip()]
        report.longrepr = "\n\n".join(part for part in parts if part)


def _record_from(text: str) -> CaseRecord:
    from fsdp_conformance.outcome import case_record_from_json
    from fsdp_conformance.report.runfile import restored

    return case_record_from_json(restored(json.loads(text)))


def _case_of(item: pytest.Item) -> Case | None:
    """The case that an item is bound to. Where nobody has imported the module of cases, there is none."""
    cases = sys.modules.get("fsdp_conformance.case")
    function = getattr(item, "function", None) or getattr(item, "obj", None)
    case: Case | None = cases.case_of(function) if cases is not None else None
    return case


def _given(config: pytest.Config) -> dict[str, Any]:
    """Those of our options that were given."""
    return {
        name: value for name, option in _OPTIONS.items() if (value := config.getoption(option)) not in (None, False)
    }


def _settings(config: pytest.Config) -> RunSettings:
    from fsdp_conformance import settings as run_settings

    with _usage_errors():
        return run_settings.from_words(**_given(config))


def _profile(config: pytest.Config) -> Profile:
    from fsdp_conformance.contract.profile import load_profile

    return load_profile(_settings(config).profile)


@contextmanager
def _usage_errors() -> Generator[None]:
    """A mistake of the user as pytest says it: one message, no traceback."""
    try:
        yield
    except _errors().UsageError as error:
        _tell(error)
        raise pytest.UsageError(str(error)) from None


def _errors() -> Any:
    from fsdp_conformance import errors

    return errors


def _tell(error: ConformanceError) -> None:
    """Leave the error where the process that started pytest looks for it."""
    place = os.environ.get(ERROR_FILE)
    if place:
        Path(place).write_text(json.dumps({"status": int(status_of(error)), "message": str(error)}), encoding="utf-8")


def status_of(error: ConformanceError) -> int:
    """The exit status of a run that an error has ended: an adapter that is none is a mistake in what was named."""
    from fsdp_conformance.errors import AdapterError

    return 2 if isinstance(error, AdapterError) else error.exit_status


def _targets(config: pytest.Config) -> bool:
    """Whether the suites, or some of them, are what pytest was told to run."""
    return any(_is_of_suites(config, argument) is not None for argument in config.args)


def _whole(config: pytest.Config) -> bool:
    """Whether all of the suites were to be run."""
    narrowed = any(
        config.getoption(name, default=None) for name in ("keyword", "markexpr", "deselect", "lf", "maxfail")
    )
    filtered = any(name in _given(config) for name in ("cases", "world_sizes"))
    everything = any(_is_of_suites(config, argument) for argument in config.args)
    return everything and not narrowed and not filtered


def _is_of_suites(config: pytest.Config, argument: str) -> bool | None:
    """True for the whole package, False for a part of it, None for something else."""
    package = str(config.getoption("conformance_suites"))
    name = argument.split("::", 1)[0]
    if name == package or name.startswith(package + "."):
        return argument == package
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None
    path = (config.invocation_params.dir / name).resolve()
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        root = Path(location).resolve()
        if path == root or root in path.parents:
            return path == root and "::" not in argument
    return None
