"""
A package of cases that start no rank, for the tests of plugin, command line and report.

What each case does is said in the variable MINI_SUITE: {"R001/probe-ws2": "FAIL"}; it passes if nothing is said.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fsdp_conformance.adapters import registry
from fsdp_conformance.contract.profile import Profile, collect_cases, load_profile, profile_of

_CASES = '''
import json, os, threading, time, unittest
from pathlib import Path

from fsdp_conformance import run_settings
from fsdp_conformance.cases.declaration import DeclaresCases, conformance_case
from fsdp_conformance.contract.case import case_of
from fsdp_conformance.contract.gate import Place, gate
from fsdp_conformance.report.recorder import version_of
from fsdp_conformance.tests.report.evidence import LOADED, a_finding, a_record
from fsdp_conformance.verdict import Verdict

ACTS = json.loads(os.environ.get("MINI_SUITE", "{}"))

class Mini(DeclaresCases, unittest.TestCase):
    record = None

    @classmethod
    def setUpClass(cls):
        if "setup-error" in ACTS.values() and cls.__name__ == "Parity":
            raise RuntimeError("no setup")

    def act(self):
        case = case_of(getattr(type(self), self._testMethodName))
        act = ACTS.get(case.id, "PASS")
        if act == "no-record":
            return
        if act == "raise":
            raise RuntimeError("the oracle stumbled")
        if act == "exit":
            os._exit(3)
        if act == "wait":
            Path(os.environ["MINI_SUITE_REACHED"]).write_text("reached")
            threading.Event().wait(60)
        if act == "after-failure":  # wait until the controller has written a failure
            deadline = time.monotonic() + 60
            while '"FAIL"' not in Path(run_settings.current().report_dir, "run.jsonl").read_text():
                if time.monotonic() > deadline:
                    raise RuntimeError("no case has failed")
                threading.Event().wait(0.05)
        if act == "interrupt":
            raise KeyboardInterrupt
        declared = frozenset((run_settings.description() or {}).get("capabilities", ()))
        run = run_settings.current()
        here = {device: Place(device=device, present=frozenset({"gloo"})) for device in {run.device, "sim"}}
        self.record = gate(case, declared=lambda device: declared, settings=run, places=here).record
        if self.record is not None:
            self.record.adapter = LOADED["adapter"]
            self.skipTest(self.record.reason)
        verdict = Verdict(act) if act in Verdict.__members__ else Verdict.PASS
        if act == "mark-xfail":
            verdict = Verdict.FAIL
        findings = [a_finding()] if verdict is Verdict.FAIL else []
        self.record = a_record(
            case.id,
            verdict,
            *findings,
            requirements=list(case.requirements),
            chapter=case.chapter,
            environment={**LOADED, "torch": version_of("torch")},
        )
        if act == "pass-and-raise":
            raise RuntimeError("after the verdict")
        if verdict in (Verdict.UNSUPPORTED, Verdict.NOT_RUN_ENV):
            self.skipTest("as told")
        if verdict is not Verdict.PASS:
            self.fail("as told")


class Parity(Mini):
    @conformance_case("R001", "R003", chapter="A", axes={"world_size": (1, 2, 4)})
    def test_probe(self, world_size):
        """Losses equal DDP's."""
        self.act()

    @conformance_case("R188", chapter="A", world_size=2, timeout_s=30, starts_early=True)
    def test_it_shards(self):
        """Each rank holds its share."""
        self.act()


class Others(Mini):
    @conformance_case("R093", chapter="J", world_size=2, needs=("no_sync",))
    def test_deferred(self):
        """Deferred reduction equals one batch."""
        self.act()

    @conformance_case("R017", chapter="B", world_size=2, environment=("cuda",))
    def test_elsewhere(self):
        """Needs a device."""
        self.act()

    @conformance_case("R070", chapter="G", world_size=2)
    def test_order(self):
        """Gathers follow execution order."""
        self.act()


def test_that_is_no_case():
    """A plain test in the same module."""
'''

_DEVICES = "fsdp_conformance.harness.devices"

#: Replaces the description of the adapter, and of the devices, which would import torch.
_CONFTEST = """
import json
import os
import resource
import sys
import types

import pytest

from fsdp_conformance import codec
from fsdp_conformance.adapters import registry
from fsdp_conformance.errors import AdapterError, AdapterNotFound, EnvironmentUnavailable, RankDied
from fsdp_conformance.pytest_plugin import dealing
from fsdp_conformance.tests.report.evidence import DESCRIBED

# The real module imports torch.
devices = types.ModuleType("fsdp_conformance.harness.devices")
devices.backend_for = lambda device: "gloo"
devices.present_environments = lambda device: (frozenset({"gloo"}), None if device == "cpu" else 2)
devices.slots = lambda device, world_size, shared=False, per_device=1: 2
# By node id, the world sizes of cases whose ranks own one of eight devices each.
OWNED = json.loads(os.environ.get("MINI_SUITE_OWNED", "{}"))
devices.is_scarce = lambda device: bool(OWNED)
devices.device_count = lambda device: 8
sys.modules[devices.__name__] = devices


def describe(spec, **_):
    errors = {
        "missing": AdapterNotFound("implementation='missing' cannot be imported"),
        "broken": AdapterError(["broken has no wrap()", "broken has no step()"]),
        "elsewhere": EnvironmentUnavailable("backend 'nccl' is absent"),
        "deadly": RankDied("rank 0 died of SIGSEGV while the adapter was imported", rank=0),
    }
    if spec in errors:
        raise errors[spec]
    flags = os.environ.get("MINI_SUITE_FLAGS", "zero3").split()
    return codec.typed(registry.AdapterDescription, {**DESCRIBED, "spec": spec, "capabilities": flags})


registry.describe = describe
dealing.sizes_by_node_id = lambda package: OWNED

if "MINI_SUITE_FILE_SIZE" in os.environ:
    size = int(os.environ["MINI_SUITE_FILE_SIZE"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def pytest_configure(config):
    config.addinivalue_line("markers", "flaky: the mark of plugins that rerun")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    acts = json.loads(os.environ.get("MINI_SUITE", "{}"))
    for item in items:
        case = getattr(item.function, "conformance_case", None)
        mark = acts.get(case.id, "") if case is not None else ""
        if mark.startswith("mark-"):
            item.add_marker(getattr(pytest.mark, mark.removeprefix("mark-")))
"""

#: Python runs it when it starts, in the command line, in pytest and in its workers: only shipped profiles can certify,
#: and this one counts as shipped there. Its cases start no rank, so nothing imports torch for them.
_SITE = """
import json, os

from fsdp_conformance.contract import profile
from fsdp_conformance.harness.processes import forkserver

forkserver.import_and_fork = lambda: None
forkserver.WarmServer.ensure_running = lambda self: None
shipped, mini = profile.shipped, profile.load_profile({path!r})
profile.shipped = lambda name: mini.sha256 if name == mini.name else shipped(name)

from fsdp_conformance.cli.pytest_process import PytestProcess  # not before: it imports what asks for shipped profiles

PytestProcess.smoke = lambda self, *words: json.loads(os.environ.get("MINI_SUITE_SMOKE", '{{"results": []}}'))
"""

#: Stands for pytest-rerunfailures.
_RERUNNER = """
def pytest_addoption(parser):
    parser.addoption("--reruns", type=int, default=0)
"""

PACKAGE = "mini_suite_cases"


@dataclass(frozen=True, slots=True)
class MiniSuite:
    """The package on disk, with its profile."""

    root: Path

    @property
    def package(self) -> Path:
        """The directory of the cases."""
        return self.root / PACKAGE

    @property
    def profile_path(self) -> Path:
        """The profile that has all cases."""
        return self.root / "mini.json"

    @property
    def profile(self) -> Profile:
        """The profile that has all cases."""
        return load_profile(str(self.profile_path))

    def environment(self, acts: Mapping[str, str] | None = None, **variables: str) -> dict[str, str]:
        """The variables that a process needs to find the package and to act as `acts` orders."""
        paths = [str(self.root), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COLUMNS"))},
            "PYTHONPATH": os.pathsep.join(paths),
            "MINI_SUITE": json.dumps(acts or {}),
            **variables,
        }

    def pytest_command(self, *arguments: str) -> list[str]:
        """pytest on all cases."""
        return [
            sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(self.root), "-c", os.devnull,
            str(self.package), "--conformance-suites", PACKAGE, "--conformance-profile", str(self.profile_path),
            *arguments,
        ]  # fmt: skip


def write(root: Path) -> MiniSuite:
    """Write the package, and its profile, below `root`."""
    package = root / PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "test_cases.py").write_text(_CASES, encoding="utf-8")
    (package / "conftest.py").write_text(_CONFTEST, encoding="utf-8")
    (root / "rerunner.py").write_text(_RERUNNER, encoding="utf-8")
    suite = MiniSuite(root)
    suite.profile_path.write_text(json.dumps(_profile(root).to_json()), encoding="utf-8")
    (root / "sitecustomize.py").write_text(_SITE.format(path=str(suite.profile_path)), encoding="utf-8")
    return suite


@contextmanager
def importable(root: Path) -> Iterator[None]:
    """The package can be imported here, and is forgotten afterwards, with what its conftest.py replaces."""
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    describe, devices = registry.describe, sys.modules.get(_DEVICES)
    try:
        yield
    finally:
        registry.describe = describe
        sys.modules.pop(_DEVICES, None)
        if devices is not None:
            sys.modules[_DEVICES] = devices
        sys.path.remove(str(root))
        for name in [name for name in sys.modules if name.split(".", 1)[0] == PACKAGE]:
            del sys.modules[name]


def _profile(root: Path) -> Profile:
    """The profile of the package as it was written."""
    with importable(root):
        return profile_of("mini", collect_cases(PACKAGE))
