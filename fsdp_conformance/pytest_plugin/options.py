"""
The command-line options for pytest, from the table in `run_settings`, and the run order that they define.

`fsdp-conformance run` passes its order in a file, which one hidden option names. The other options make the same order
from words; workers of pytest-xdist get it from the controller.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fsdp_conformance.run_settings import OPTIONS, RunOrder, from_words, order_from_json, use_secret

if TYPE_CHECKING:
    from fsdp_conformance.contract.profile import Entry, Profile
    from fsdp_conformance.errors import ConformanceError
    from fsdp_conformance.run_settings import RunSettings

#: The package with the cases.
SUITES = "fsdp_conformance.suites"

#: Names a file for an error that ends the whole run; set by the process that started pytest.
ERROR_FILE = "FSDP_CONFORMANCE_ERROR_FILE"

#: The option that names the file with the order.
ORDER_OPTION = "--conformance-order"

#: What the controller hands to a worker of pytest-xdist.
WORKER_INPUT = "fsdp_conformance"
SECRET_INPUT = "fsdp_conformance_secret"

_ORDER = pytest.StashKey[RunOrder]()
_SELECTED = pytest.StashKey["tuple[RunSettings, tuple[Entry, ...]]"]()


def add(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("fsdp-conformance", "conformance of sharded data-parallel training")
    for option in OPTIONS.values():
        text = option.help + ("; repeatable" if option.is_list else "")
        if option.metavar:
            action = "append" if option.is_list else "store"
            group.addoption(option.pytest_flag, help=text, metavar=option.metavar, action=action)
        else:
            group.addoption(option.pytest_flag, help=text, action="store_true")
    group.addoption("--conformance-suites", help="use another package of cases", metavar="PACKAGE", default=SUITES)
    group.addoption(ORDER_OPTION, help=argparse.SUPPRESS, metavar="FILE")


def given(config: pytest.Config) -> bool:
    """True if any of the options was given."""
    return bool(_words(config) or config.getoption("conformance_order"))


def order_of(config: pytest.Config) -> RunOrder:
    """The order of the run; made once in each process. Raises pytest.UsageError for options that make none."""
    if _ORDER not in config.stash:
        with usage_errors():
            use_order(config, _make_order(config))
    return config.stash[_ORDER]


def use_order(config: pytest.Config, order: RunOrder) -> None:
    """Make it the order of this process."""
    config.stash[_ORDER] = order


def settings_of(config: pytest.Config) -> RunSettings:
    """The settings of the run."""
    return order_of(config).settings


def profile_of(config: pytest.Config) -> Profile:
    """The profile of the run."""
    from fsdp_conformance.contract.profile import load_profile

    return load_profile(settings_of(config).profile)


def selected_entries(config: pytest.Config) -> tuple[Entry, ...]:
    """The selected cases of the profile; selected once for the same settings."""
    from fsdp_conformance.contract.selection import selected

    settings = settings_of(config)
    of, entries = config.stash.get(_SELECTED, (None, ()))
    if of is not settings:
        entries = selected(profile_of(config), settings, suites=str(config.getoption("conformance_suites")))
        config.stash[_SELECTED] = settings, entries
    return entries


@contextmanager
def usage_errors() -> Generator[None]:
    """Turn a user's mistake into pytest's own kind of error: one message, no traceback."""
    from fsdp_conformance.errors import UsageError

    try:
        yield
    except UsageError as error:
        report_error(error)
        raise pytest.UsageError(str(error)) from None


def report_error(error: ConformanceError) -> None:
    """Leave the error for the process that started pytest, if it looks for one."""
    place = os.environ.get(ERROR_FILE)
    if place:
        Path(place).write_text(json.dumps({"status": int(status_of(error)), "message": str(error)}), encoding="utf-8")


def status_of(error: ConformanceError) -> int:
    """The exit status for an error that ends the run. Before any case has run, a broken adapter is a usage error."""
    from fsdp_conformance.errors import AdapterError
    from fsdp_conformance.status import Status

    return Status.USAGE if isinstance(error, AdapterError) else error.exit_status


def targets_suites(config: pytest.Config) -> bool:
    """True if pytest was asked to run the suites, or a part of them."""
    return any(_is_of_suites(config, argument) is not None for argument in config.args)


def runs_everything(config: pytest.Config) -> bool:
    """True if nothing on the command line leaves out cases of the suites."""
    from fsdp_conformance.contract.selection import selection_options

    narrowed = any(
        config.getoption(name, default=None) for name in ("keyword", "markexpr", "deselect", "lf", "maxfail")
    )
    everything = any(_is_of_suites(config, argument) for argument in config.args)
    return everything and not narrowed and not selection_options(settings_of(config))


def _words(config: pytest.Config) -> dict[str, Any]:
    """The options that were given, as `run_settings.from_words` takes them."""
    words = {name: config.getoption(option.pytest_flag) for name, option in OPTIONS.items()}
    return {name: word for name, word in words.items() if word not in (None, False)}


def _make_order(config: pytest.Config) -> RunOrder:
    worker_input = getattr(config, "workerinput", {})
    if SECRET_INPUT in worker_input:
        use_secret(worker_input[SECRET_INPUT])
    handed_over: str | None = worker_input.get(WORKER_INPUT)
    if handed_over is None and (file := config.getoption("conformance_order")):
        handed_over = Path(file).read_text(encoding="utf-8")
    if handed_over is not None:
        return order_from_json(handed_over)
    words = _words(config)
    settings = from_words(**words)
    if "last_failed" in words:
        from fsdp_conformance.report.last_run import with_last_failed

        settings = with_last_failed(settings)
    return RunOrder(settings=settings.with_drawn_seed())


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
