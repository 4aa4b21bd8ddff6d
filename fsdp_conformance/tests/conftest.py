"""Setup and teardown of the package's tests."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
from collections.abc import Generator, Iterator

import pytest
import torch
import torch.distributed as dist

from fsdp_conformance.report.folding import WIDTH
from fsdp_conformance.run_settings import REFERENCES_STORE, use_secret
from fsdp_conformance.simulator.device.devices import is_active
from fsdp_conformance.tests import temporary_files
from fsdp_conformance.tests.simulator import simulator_process
from fsdp_conformance.tests.torch_versions import limit_of

#: The private store of references that ci/test makes for one run, if there is one.
PRIVATE_STORE = "FSDP_CONFORMANCE_TEST_REFERENCES"

#: What `nightly_params` names and no collected test has, by function.
_UNSEEN = pytest.StashKey[dict[str, set[str]]]()


def pytest_configure(config: pytest.Config) -> None:
    """
    Share no references with the user's store, and with other tests only in ci/test, except where a test asks for it.

    And restore SIGINT, which background jobs of a shell ignore together with their children: some tests send it.
    """
    if not hasattr(config, "workerinput"):  # workers of xdist have that of their controller
        temporary_files.keep_apart()
    os.environ[REFERENCES_STORE] = os.environ.get(PRIVATE_STORE, "off")
    if PRIVATE_STORE in os.environ:
        # The processes of one ci/test are one run: the referees of each take what those of the others have trained.
        use_secret(hashlib.sha256(os.environ[PRIVATE_STORE].encode()).hexdigest())
    # Until everything has been collected: nearly all that is imported and collected stays.
    gc.disable()
    # Texts are as wide as in files, whatever the terminal; xdist sets 80 for its workers.
    os.environ["COLUMNS"] = str(WIDTH)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_itemcollected(item: pytest.Item) -> None:
    """The sets of parameters that `nightly_params(*ids)` names are nightly."""
    marker, callspec = item.get_closest_marker("nightly_params"), getattr(item, "callspec", None)
    if marker is not None and callspec is not None:
        function = item.nodeid.partition("[")[0]
        unseen = item.config.stash.setdefault(_UNSEEN, {}).setdefault(function, set(marker.args))
        if callspec.id in marker.args:
            unseen.discard(callspec.id)
            item.add_marker(pytest.mark.nightly)


@pytest.hookimpl(tryfirst=True)  # before pytest takes away what `-m` leaves out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """
    Of a test marked `daily(count)`, all sets of parameters but that many are nightly.

    And tests that take long come first, so that no worker is left alone with one at the end.
    """
    sets: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("daily") is not None and item.get_closest_marker("nightly") is None:
            sets.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in sets.values():
        marker = same[0].get_closest_marker("daily")
        assert marker is not None
        (count,) = marker.args
        # Spread over the whole: neighbours resemble one another.
        by_day = {index * len(same) // count for index in range(count)}
        for index, item in enumerate(same):
            if index not in by_day:
                item.add_marker(pytest.mark.nightly)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None and item.path.name != "test_kill_matrix.py")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that fails only because an older torch lacks something, and say what."""
    report = yield
    limit = limit_of(str(report.longrepr)) if report.failed else None
    if limit is not None:
        report.outcome = "skipped"
        report.longrepr = str(item.path), item.reportinfo()[1] or 0, f"torch {torch.__version__}: {limit.reason}"
    return report


@pytest.fixture(autouse=True)
def _no_device_is_left() -> Iterator[None]:
    """No test makes the simulated accelerator active for those that run after it in this process."""
    was_active = is_active()
    yield
    if is_active() and not was_active:
        pytest.fail(
            "the simulated accelerator is active now in the process that runs the tests, and cannot be removed. "
            "Run the test with in_process_of_its_own."
        )


@pytest.fixture(autouse=True)
def _no_rank_is_left() -> Iterator[None]:
    """No test leaves the process that runs the tests as a rank, for those that run after it."""

    def left() -> list[str]:
        variables = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
        return variables + ["a process group"] * dist.is_initialized()

    before = left()
    yield
    more = [what for what in left() if what not in before]
    if more:
        for name in {"RANK", "WORLD_SIZE"}.intersection(more):
            del os.environ[name]
        pytest.fail(f"the test has left {' and '.join(more)} in the process that runs the tests")


def pytest_collection_finish(session: pytest.Session) -> None:
    """
    Raise UsageError for a name in `nightly_params` that no set of parameters has.

    And start the server before any test has run, so that its forks begin from a clean state.

    The garbage collector passes over what has been collected and imported, a million objects: many tests call it.
    """
    unseen = session.config.stash.get(_UNSEEN, {})
    if any(unseen.values()) and not any("[" in argument for argument in session.config.args):
        names = "; ".join(f"{function}: {', '.join(sorted(ids))}" for function, ids in unseen.items() if ids)
        raise pytest.UsageError(f"nightly_params names sets of parameters that do not exist: {names}")
    gc.freeze()
    gc.enable()
    if not session.config.option.collectonly:
        simulator_process.start_server(session.items)


def pytest_sessionfinish() -> None:
    simulator_process.stop_server()
