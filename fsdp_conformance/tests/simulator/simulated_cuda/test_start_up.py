"""Tests for the settings that a process and its children receive, and for Python's own start. No torch."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.simulator.import_hook import when_imported
from fsdp_conformance.simulator.sanitize.order import ScriptOrder
from fsdp_conformance.simulator.sanitize.rank_children import RankChildren
from fsdp_conformance.simulator.simulated_cuda.outbox import process_name
from fsdp_conformance.simulator.simulated_cuda.settings import STARTUP, VARIABLE, Children, CudaSettings

_NAME = "module_of_this_test"


@pytest.fixture(name="children")
def _children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Children]:
    (tmp_path / "own").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "own"))
    children = Children(3, checks=True, variables={"OF_THIS_TEST": "set"})
    yield children
    children.close()


def started(code: str) -> str:
    """The output of a Python process that is started now."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout + done.stderr


def test_children_are_told_and_the_environment_is_restored(children: Children, tmp_path: Path) -> None:
    """The settings survive the environment; the directory is gone at the end."""
    assert CudaSettings.from_environment(os.environ) == children.settings
    assert children.settings.num_devices == 3
    assert os.environ["PYTHONPATH"] == f"{STARTUP}{os.pathsep}{tmp_path / 'own'}"
    children.set_checks(False)
    settings = CudaSettings.from_environment(os.environ)
    assert settings is not None
    assert not settings.checks
    assert children.directory.is_dir()

    children.close()

    assert os.environ["PYTHONPATH"] == str(tmp_path / "own")
    assert {VARIABLE, "OF_THIS_TEST"}.isdisjoint(os.environ)
    assert not children.directory.exists()


def test_another_python_is_told_nothing(children: Children) -> None:
    """Its torch is another, if it has one."""
    text = children.settings.to_text().replace(sys.prefix, "/another/python")

    assert CudaSettings.from_environment({VARIABLE: text}) is None


@pytest.mark.parametrize("text", ["4", "{}", '{"num_devices": 4', '{"gpus": 4}'])
def test_a_variable_set_by_hand_is_refused(text: str) -> None:
    """The error has the variable's name and its origin."""
    with pytest.raises(ConfigError, match=f"{VARIABLE} is set by pytest --simulate-cuda"):
        CudaSettings.from_environment({VARIABLE: text})


@pytest.mark.usefixtures("children")
def test_a_child_runs_its_own_sitecustomize_and_imports_nothing_heavy(tmp_path: Path) -> None:
    """The environment's own is run as if ours were not there; torch is only watched for."""
    code = "import sys; print(sys.modules['sitecustomize'].NAME, 'torch' in sys.modules, sys.path.count(NAME))"
    (tmp_path / "own" / "sitecustomize.py").write_text("NAME = 'own'\n", encoding="utf-8")

    assert started(code.replace("NAME)", f"{str(STARTUP)!r})")) == "own False 0\n"


@pytest.mark.usefixtures("children")
def test_an_error_in_the_own_sitecustomize_is_not_hidden(tmp_path: Path) -> None:
    """A module that it cannot import is named, as Python does."""
    (tmp_path / "own" / "sitecustomize.py").write_text("import no_such_module\n", encoding="utf-8")

    assert "No module named 'no_such_module'" in started("")


@pytest.fixture(name="module")
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that can be imported, and is forgotten at the end."""
    (tmp_path / f"{_NAME}.py").write_text("VALUE = 5\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield _NAME
    sys.modules.pop(_NAME, None)


def test_an_action_waits_for_the_import(module: str) -> None:
    """It comes once, after the module's code, and leaves no trace; looking for the module is not importing it."""
    seen: list[int] = []
    before = list(sys.meta_path)
    when_imported(module, lambda: seen.append(sys.modules[module].VALUE))

    assert importlib.util.find_spec(module) is not None
    assert seen == []
    imported = importlib.import_module(module)
    importlib.reload(imported)

    assert seen == [5]
    assert sys.meta_path == before
    assert imported.__spec__ is not None
    assert imported.__loader__ is imported.__spec__.loader
    assert "on_import" not in type(imported.__loader__).__module__


def test_an_action_comes_at_once_if_the_module_is_there(module: str) -> None:
    importlib.import_module(module)
    seen: list[int] = []

    when_imported(module, lambda: seen.append(1))()

    assert seen == [1]


def test_an_action_can_be_cancelled(module: str) -> None:
    seen: list[int] = []

    when_imported(module, lambda: seen.append(1))()
    importlib.import_module(module)

    assert seen == []


def test_whoever_imports_gets_the_exception(module: str) -> None:
    def fail() -> None:
        raise RuntimeError("no compiler")

    when_imported(module, fail)
    with pytest.raises(RuntimeError, match="no compiler"):
        importlib.import_module(module)
    assert module not in sys.modules


def test_children_of_ranks_are_told_and_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's apart, without a change to this process; those that used no device are not heard of."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before = dict(os.environ)
    order = ScriptOrder(
        target="train.py", is_module=False, arguments=(), world_size=2, mode="poison", as_cuda=False, timeout_s=1.0,
        devices=4, memory=7,
    )  # fmt: skip
    children = RankChildren(order, run_id="of this test", directory=tmp_path)
    child_settings = children.told({"EXTENSION": "there"})
    assert os.environ == before
    settings = [CudaSettings.from_environment(one.variables) for one in child_settings]
    for one, rank in zip(settings, ("0", "1"), strict=True):
        assert one is not None
        assert (one.num_devices, one.as_cuda, one.options) == (4, False, order.options)
        assert one.inherited == {"RANK": rank, "TORCHELASTIC_RUN_ID": "of this test"}
    assert {one.variables["EXTENSION"] for one in child_settings} == {"there"}
    assert {one.variables["PYTHONPATH"] for one in child_settings} == {f"{STARTUP}{os.pathsep}{tmp_path}"}
    children.look()
    assert children.observed == [[], []]

    content = {"process": "b", "ended": False, "hazards": [{}], "accesses": 3, "notes": ["odd"], "collectives": {}}
    for name, accesses in (("b", 3), ("a", 1), ("idle", 0)):
        text = json.dumps({**content, "process": name, "accesses": accesses})
        (Path(child_settings[1].directory) / f"{name}.json").write_text(text, encoding="utf-8")
    children.look()
    of_first, of_second = children.observed
    assert of_first == []
    assert [(one.name, one.accesses, one.notes, one.has_ended) for one in of_second] == [
        ("a", 1, ("odd",), False),
        ("b", 3, ("odd",), False),
    ]
    assert {Path(one.directory).parent for one in child_settings} == {tmp_path}


@pytest.mark.parametrize(
    ("rank", "run", "expected"),
    [("0", "outer", "program.py"), ("1", "outer", "rank 1"), ("0", "inner", "rank 0"), ("", "outer", "program.py")],
)
def test_a_child_is_named_by_a_rank_of_its_own(
    rank: str, run: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child's own rank names it, not the rank that it inherited."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/program.py"])
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)

    assert process_name({"RANK": "0", "TORCHELASTIC_RUN_ID": "outer"}) == expected
    assert process_name() == (f"rank {rank}" if rank else "program.py")
