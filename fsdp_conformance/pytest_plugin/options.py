"""
What can be typed after `pytest`, and the order that it makes.

`fsdp-conformance run` hands its order over in a file, named by a single option. The options for people build the same
order once, from words; workers of pytest-xdist get it from the controller.
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

if TYPE_CHECKING:
    from fsdp_conformance.contract.profile import Entry, Profile
    from fsdp_conformance.errors import ConformanceError
    from fsdp_conformance.run_settings import RunOrder, RunSettings

#: The package with the cases.
SUITES = "fsdp_conformance.suites"

#: Names a file for an error that ends the whole run; set by the process that started pytest.
ERROR_FILE = "FSDP_CONFORMANCE_ERROR_FILE"

#: The option that names the file with the order.
ORDER_OPTION = "--conformance-order"

#: What the controller hands to a worker of pytest-xdist.
WORKER_INPUT = "fsdp_conformance"

#: Parameter of `settings.from_words` to the name of our option.
_OPTIONS = {
    "implementation": "implementation",
    "profile": "conformance_profile",
    "device": "conformance_device",
    "no_simulator": "no_simulator",
    "world_sizes": "conformance_world_size",
    "cases": "conformance_case",
    "requirements": "conformance_requirement",
    "bindings": "conformance_binding",
    "chapters": "conformance_chapter",
    "scopes": "conformance_scope",
    "fail_fast": "conformance_fail_fast",
    "report_dir": "conformance_report",
    "ranks": "ranks",
    "reuse_ranks": "reuse_ranks",
    "backend": "conformance_backend",
    "share_devices": "share_devices",
    "slots_per_device": "conformance_slots_per_device",
    "deadline_scale": "conformance_deadline_scale",
    "stress": "conformance_stress",
    "stress_seed": "conformance_stress_seed",
    "stress_failure": "conformance_stress_failure",
}

_ORDER = pytest.StashKey["RunOrder"]()


def add(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("fsdp-conformance", "conformance of sharded data-parallel training")

    def option(name: str, text: str, **how: Any) -> None:
        group.addoption(name, help=text, **how)

    def selection(name: str, metavar: str, text: str) -> None:
        option(f"--conformance-{name}", f"{text}; repeatable", metavar=metavar, action="append")

    option("--implementation", "entry point name, package.module:Class, or path/to/file.py:Class", metavar="SPEC")
    option("--conformance-profile", "the cases that the certificate covers", metavar="NAME")
    option("--conformance-device", "cpu, sim, cuda, or any accelerator that torch knows", metavar="TYPE")
    option("--no-simulator", "on the CPU, do not run cases on the simulated accelerator", action="store_true")
    selection("case", "ID", "only cases with this id or of this requirement; globs work")
    selection("requirement", "R003", "only cases named after this requirement")
    selection("binding", "R003", "only cases that cover this requirement")
    selection("chapter", "A", "only cases of this chapter")
    selection("scope", "NAME", "only cases of the base, or of an extension")
    selection("world-size", "N", "only cases with this many ranks")
    option("--conformance-last-failed", "only the cases that failed in the last run", action="store_true")
    option("--conformance-fail-fast", "stop after the first failure", action="store_true")
    option("--conformance-report", "directory for the run file", metavar="DIR")
    option("--conformance-deadline-scale", "multiply every deadline by X", metavar="X")
    option("--ranks", "processes, or simulated: threads of one process, fast for large worlds", metavar="KIND")
    option("--reuse-ranks", "keep ranks alive from case to case; such a run cannot certify", action="store_true")
    option("--conformance-backend", "make process groups with nccl alone, without gloo for the CPU", metavar="NAME")
    option("--share-devices", "let ranks share GPUs, over gloo; such a run cannot certify", action="store_true")
    option("--conformance-slots-per-device", "how many cases may use a GPU at a time, or auto", metavar="N")
    option("--conformance-stress", "provoke races in every case; such a run cannot certify", action="store_true")
    option("--conformance-stress-seed", "draw the provocations from this seed", metavar="N")
    option("--conformance-stress-failure", "make one rank of each case fail", metavar="HOW")
    option("--conformance-suites", "use another package of cases", metavar="PACKAGE", default=SUITES)
    option(ORDER_OPTION, argparse.SUPPRESS, metavar="FILE")


def given(config: pytest.Config) -> bool:
    """Whether any of the options was given."""
    return bool(_words(config) or config.getoption("conformance_order") or config.getoption("conformance_last_failed"))


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
    """The selected cases of the profile."""
    from fsdp_conformance.contract.selection import selected

    return selected(profile_of(config), settings_of(config))


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
    """Whether pytest was told to run the suites, or a part of them."""
    return any(_is_of_suites(config, argument) is not None for argument in config.args)


def runs_everything(config: pytest.Config) -> bool:
    """Whether nothing on the command line leaves cases of the suites out."""
    from fsdp_conformance.contract.selection import selection_options

    narrowed = any(
        config.getoption(name, default=None) for name in ("keyword", "markexpr", "deselect", "lf", "maxfail")
    )
    everything = any(_is_of_suites(config, argument) for argument in config.args)
    return everything and not narrowed and not selection_options(settings_of(config))


def _words(config: pytest.Config) -> dict[str, Any]:
    """The options that were given, as `settings.from_words` takes them."""
    return {
        name: value for name, option in _OPTIONS.items() if (value := config.getoption(option)) not in (None, False)
    }


def _make_order(config: pytest.Config) -> RunOrder:
    from fsdp_conformance import run_settings

    handed_over: str | None = getattr(config, "workerinput", {}).get(WORKER_INPUT)
    if handed_over is None and (file := config.getoption("conformance_order")):
        handed_over = Path(file).read_text(encoding="utf-8")
    if handed_over is not None:
        return run_settings.order_from_json(handed_over)
    made = run_settings.from_words(**_words(config))
    if config.getoption("conformance_last_failed"):
        from fsdp_conformance.report.last_run import with_last_failed

        made = with_last_failed(made)
    return run_settings.RunOrder(settings=made)


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
