"""
`pytest --simulate-cuda=N`: tests see N GPUs, and a race on them fails the test that has it.

The GPUs are there before conftest files and tests are imported, so that constants such as TEST_MULTIGPU come out right.
With pytest-xdist each worker has its own; the controller needs none.

pytest loads this in every environment that has the package, so loading it imports neither torch nor the rest of the
package.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fsdp_conformance.simulator.simulated_cuda.findings import Observations
    from fsdp_conformance.simulator.simulated_cuda.session import CudaSession, SimulatedCuda
    from fsdp_conformance.simulator.suppressions import Suppressed, Suppressions

#: torch's test harness computes constants (TEST_CUDA, ...) when it is imported.
_CONSTANTS = "torch.testing._internal.common_utils"

_PLUGIN = "fsdp-conformance-simulated-cuda"

#: The attribute of a report that carries what was observed during that phase of a test; the workers of pytest-xdist
#: send it to the controller.
_REPORTED = "simulated_cuda"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("simulated CUDA")
    group.addoption(
        "--simulate-cuda",
        type=int,
        metavar="N",
        help="run the tests as if this machine had N GPUs: torch.cuda and NCCL on the simulated accelerator",
    )
    group.addoption(
        "--hazards",
        choices=("fail", "report", "off"),
        default="fail",
        help="with --simulate-cuda: what a race on a GPU does to the test that has it (default: fail); "
        "off turns the race checker off",
    )
    group.addoption(
        "--hazard-suppressions",
        metavar="FILE",
        help="with --simulate-cuda: findings that are known, one KIND:PATTERN a line; they fail no test and are listed "
        "at the end (default: the ini value hazard_suppressions)",
    )
    group.addoption(
        "--strict-hazard-suppressions",
        action="store_true",
        help="fail the run if a line of --hazard-suppressions matches nothing: for runs of all tests",
    )
    parser.addini("hazard_suppressions", "the file of --hazard-suppressions, relative to the ini file's directory")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Begin before anything of the user's is imported."""
    _begin(early_config, early_config.known_args_namespace)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Explain the marker."""
    config.addinivalue_line(
        "markers",
        "simulated_cuda(devices=1, hazards=None): the test needs that many GPUs of --simulate-cuda, else it is "
        "skipped; hazards ('fail', 'report' or 'off') overrides --hazards for it",
    )


@pytest.fixture(name="simulated_cuda")
def _simulated_cuda(pytestconfig: pytest.Config) -> SimulatedCuda:
    """The simulated GPUs: `device_count`, `hazards()` and `take_hazards()`. Skips without --simulate-cuda."""
    running = pytestconfig.pluginmanager.get_plugin(_PLUGIN)
    if running is None or running.session is None:
        pytest.skip("needs --simulate-cuda")
    from fsdp_conformance.simulator.simulated_cuda.session import SimulatedCuda

    return SimulatedCuda(running.session)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that need GPUs that are not there. Raises UsageError for a marker that makes no sense."""
    count = config.option.simulate_cuda or 0
    for item in items:
        marker = item.get_closest_marker("simulated_cuda")
        if marker is None:
            continue
        devices, _ = _marked(item, marker)
        if not count:
            item.add_marker(pytest.mark.skip(reason="needs --simulate-cuda"))
        elif devices > count:
            reason = f"needs {devices} simulated GPUs, --simulate-cuda={count} gives {count}"
            item.add_marker(pytest.mark.skip(reason=reason))


def _marked(item: pytest.Item, marker: pytest.Mark) -> tuple[int, str | None]:
    """The request of a marker: the number of GPUs, and how hazards are treated."""
    from fsdp_conformance.errors import ConfigError
    from fsdp_conformance.simulator.simulated_cuda.settings import CudaSettings

    unknown = sorted(marker.kwargs.keys() - {"devices", "hazards"})
    if len(marker.args) > 1 or unknown or (marker.args and "devices" in marker.kwargs):
        raise pytest.UsageError(
            f"{item.nodeid}: the marker simulated_cuda takes devices and hazards, "
            f"got {', '.join(unknown) or f'{len(marker.args)} positional arguments'}"
        )
    devices = marker.args[0] if marker.args else marker.kwargs.get("devices", 1)
    hazards = marker.kwargs.get("hazards")
    where = f"marker simulated_cuda of {item.nodeid}"
    try:
        if hazards is not None:
            CudaSettings.checked_hazards(hazards, where=where)
        return CudaSettings.checked_count(devices, where=where), hazards
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from error


def _begin(config: pytest.Config, options: Any) -> None:
    """Start the simulation; in the controller of pytest-xdist, only announce it."""
    if options.simulate_cuda is None:
        return
    from fsdp_conformance.errors import ConfigError, EnvironmentUnavailable
    from fsdp_conformance.simulator.simulated_cuda.settings import CudaSettings

    in_worker = "PYTEST_XDIST_WORKER" in os.environ
    has_workers = not in_worker and bool(getattr(options, "numprocesses", None) or getattr(options, "tx", None))
    try:
        count = CudaSettings.checked_count(options.simulate_cuda, where="--simulate-cuda")
        suppressions = _suppressions(config, options)
        session, late = None, False
        if has_workers:
            # Compile once, where the user sees it.
            from fsdp_conformance.simulator.device import build

            build.require()
        else:
            from fsdp_conformance.simulator.simulated_cuda.session import CudaSession

            late = _CONSTANTS in sys.modules
            session = CudaSession(count, checks=options.hazards != "off", suppressions=suppressions)
    except (ConfigError, EnvironmentUnavailable) as error:
        raise pytest.UsageError(f"--simulate-cuda: {error}") from error
    is_strict = options.strict_hazard_suppressions
    running = Running(count, options.hazards, session, suppressions, is_strict=is_strict, in_worker=in_worker)
    if late:
        running.notes[f"{_CONSTANTS} was imported too early: its constants say that there are no GPUs"] = None
    config.pluginmanager.register(running, _PLUGIN)
    config.add_cleanup(_closing(session))


def _suppressions(config: pytest.Config, options: Any) -> Suppressions:
    """The findings that are not reported. Raises ConfigError for a file with mistakes."""
    from fsdp_conformance.simulator.suppressions import NO_SUPPRESSIONS, Suppressions

    if options.hazard_suppressions:
        return Suppressions.read(options.hazard_suppressions)
    name = str(config.getini("hazard_suppressions"))
    root = config.inipath.parent if config.inipath is not None else config.rootpath
    return Suppressions.read(os.path.relpath(root / name)) if name else NO_SUPPRESSIONS


def _closing(session: CudaSession | None) -> Any:
    return session.close if session is not None else lambda: None


class Running:
    """A run of tests with simulated GPUs."""

    def __init__(
        self,
        count: int,
        hazards: str,
        session: CudaSession | None,
        suppressions: Suppressions,
        *,
        is_strict: bool,
        in_worker: bool,
    ) -> None:
        self.count = count
        self.session = session
        """None in the controller of pytest-xdist."""
        self._hazards = hazards
        self._suppressions = suppressions
        self._is_strict = is_strict
        """A suppression that matches nothing fails the run."""
        self._in_worker = in_worker
        self._observed: Observations | None = None
        """The observations in the current phase of a test."""
        self._accesses = 0
        self.notes: dict[str, None] = {}
        """Sentences for the summary."""
        self._reported: dict[str, list[str]] = {}
        """Hazards that failed no test: by test, and those outside of tests."""
        self._suppressed: dict[Suppressed, None] = {}
        self._num_failed = 0

    def pytest_report_header(self) -> str:
        """One line at the top."""
        return f"simulated CUDA: {self._gpus}, hazards: {self._hazards}"

    @property
    def _gpus(self) -> str:
        return "1 GPU" if self.count == 1 else f"{self.count} GPUs"

    # --- the process that runs the tests -----------------------------------------------------------------------------

    def pytest_collection_finish(self) -> None:
        """Discard the observations of imports, which belong to no test."""
        self._outside("while tests were collected")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Check each test on its own."""
        if self.session is None:
            return (yield)
        self._outside(f"before {item.nodeid}")
        self.session.set_checks(self._policy(item) != "off")
        try:
            return (yield)
        finally:
            self.session.forget_unfinished()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """A hazard in a fixture."""
        return (yield from self._judged(item, "setup"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """A hazard in the test."""
        return (yield from self._judged(item, "call"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """A hazard in the end of a fixture."""
        return (yield from self._judged(item, "teardown"))

    def _judged(self, item: pytest.Item, when: str) -> Generator[None, Any, Any]:
        """Run one phase of a test; a hazard fails it, unless it fails anyway."""
        failed = True
        try:
            result = yield
            # unittest's failures are kept aside until the report is made.
            failed = bool(getattr(item, "_excinfo", None))
        finally:
            texts = self._look(item)
            if texts and failed:
                item.add_report_section(when, "hazards", "\n\n".join(texts))
        if texts and not failed and self._policy(item) == "fail":
            from fsdp_conformance.simulator.simulated_cuda.findings import hazards_in_words

            pytest.fail(hazards_in_words(texts), pytrace=False)
        return result

    def _look(self, item: pytest.Item) -> list[str]:
        self._observed = self.session.take() if self.session is not None else None
        return self._observed.texts() if self._observed is not None else []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the observations to the report, so that the controller can count them."""
        report = yield
        observed, self._observed = self._observed, None
        if observed is not None:
            summary = {
                "accesses": observed.accesses,
                "notes": observed.notes,
                "hazards": observed.texts(),
                "suppressed": [(one.sentence, list(one.lines)) for one in observed.suppressed],
            }
            setattr(report, _REPORTED, summary)
        return report

    def _policy(self, item: pytest.Item) -> str:
        marker = item.get_closest_marker("simulated_cuda")
        return (_marked(item, marker)[1] if marker is not None else None) or self._hazards

    def _outside(self, when: str) -> None:
        """Hazards that no test has."""
        if self.session is None:
            return
        observed = self.session.take()
        if texts := observed.texts():
            self._reported.setdefault(when, []).extend(texts)
        self._suppressed.update(dict.fromkeys(observed.suppressed))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """The hazards of processes that outlived the tests, and of imports, fail the run."""
        self._outside("after the last test")
        if self._in_worker:
            output: dict[str, Any] = getattr(session.config, "workeroutput", {})
            suppressed = [(one.sentence, list(one.lines)) for one in self._suppressed]
            output[_REPORTED] = {"hazards": self._reported, "suppressed": suppressed}
            return
        fails = (self._reported and self._hazards == "fail") or (self._is_strict and self._unmatched)
        if fails and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    # --- the process that reports ------------------------------------------------------------------------------------

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the observations of one phase of a test."""
        summary = getattr(report, _REPORTED, None)
        if summary is None or self._in_worker:
            return
        self._accesses += summary["accesses"]
        self.notes.update(dict.fromkeys(summary["notes"]))
        self._add_suppressed(summary["suppressed"])
        if summary["hazards"] and report.failed:
            self._num_failed += 1
        elif summary["hazards"]:
            self._reported.setdefault(f"in {report.nodeid}", []).extend(summary["hazards"])

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker of pytest-xdist has ended: the hazards that it had outside of tests."""
        output = getattr(node, "workeroutput", {}).get(_REPORTED, {"hazards": {}, "suppressed": ()})
        for when, texts in output["hazards"].items():
            self._reported.setdefault(when, []).extend(texts)
        self._add_suppressed(output["suppressed"])

    def _add_suppressed(self, described: Iterable[tuple[str, Sequence[int]]]) -> None:
        from fsdp_conformance.simulator.suppressions import Suppressed

        self._suppressed.update({Suppressed(sentence, tuple(lines)): None for sentence, lines in described})

    @property
    def _unmatched(self) -> list[str]:
        """The suppressions that match nothing in this run."""
        return self._suppressions.unmatched(self._suppressed) if self._hazards != "off" else []

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The hazards that failed no test, and how much was checked: a run that checks little proves little."""
        for when, texts in self._reported.items():
            terminalreporter.section(f"hazards {when}", sep="_")
            terminalreporter.write_line("\n\n".join(texts))
        terminalreporter.section("simulated CUDA", sep="-")
        for note in self.notes:
            terminalreporter.write_line(note)
        for one in self._suppressed:
            terminalreporter.write_line(f"suppressed: {self._suppressions.words(one)}")
        if self._unmatched:
            terminalreporter.write_line(f"matched nothing: {', '.join(self._unmatched)}", yellow=True)
        terminalreporter.write_line(self._summary())

    def _summary(self) -> str:
        if self._hazards == "off":
            return f"{self._gpus}, the race checker was off"
        tests = "1 test" if self._num_failed == 1 else f"{self._num_failed} tests"
        reported = sum(map(len, self._reported.values()))
        more = f", {reported} reported" if reported else ""
        return f"{self._gpus}, {self._accesses:,} accesses checked, {tests} failed with hazards{more}"
