"""A user's workload is found by file or by module; whatever is wrong with either is said in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.fixtures import models
from fsdp_conformance.tests.references import unfit_workloads
from fsdp_conformance.workload.loading import load_workload

_MODULE = unfit_workloads.__name__


def test_a_function_of_a_module() -> None:
    """By its dotted name."""
    assert load_workload(f"{_MODULE}:right").name == models.norm_mlp().name


def test_a_function_of_a_file(tmp_path: Path) -> None:
    """By path; the file may import what is beside it."""
    (tmp_path / "beside_my_model.py").write_text("from fsdp_conformance.fixtures.models import nested as made\n")
    file = tmp_path / "my_model.py"
    file.write_text("from beside_my_model import made\n\ndef mine():\n    return made()\n")

    assert load_workload(f"{file}:mine").name == "nested"


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("def mine():\n    pass\n", "mein", r"has no function 'mein'. Did you mean mine\?"),
        ("VALUE = 1\n", "mine", r"It defines no function"),
        ("def mine(:\n", "mine", r"cannot be imported: SyntaxError"),
        ("import there_is_no_such_package\n", "mine", r"cannot be imported: ModuleNotFoundError.*broken.py:1\]"),
        ("def mine(size):\n    pass\n", "mine", r"raised TypeError: mine\(\) missing 1 required positional argument"),
        ("def mine():\n    return 3\n", "mine", r"must return a Workload .*, got int"),
    ],
)
def test_a_wrong_file(tmp_path: Path, text: str, name: str, message: str) -> None:
    """The message has the place in the user's file where there is one."""
    file = tmp_path / "broken.py"
    file.write_text(text)

    with pytest.raises(ConfigError, match=message):
        load_workload(f"{file}:{name}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"raises\(\) in .* raised KeyError: 'config.yaml'"),
        ("returns_a_model", r"must return a Workload .*, got Linear"),
        ("NUMBER", r"must be a function, got int"),
        ("WORKLOAD", r"must be a function that returns the workload, got the workload itself"),
    ],
)
def test_a_wrong_function(name: str, message: str) -> None:
    """It raises, or is none, or returns something else."""
    with pytest.raises(ConfigError, match=message):
        load_workload(f"{_MODULE}:{name}")


@pytest.mark.parametrize("spec", ["model.py", "model.py:", ":mine", "model.py:two words", ""])
def test_a_word_of_another_form(spec: str) -> None:
    """The forms are named."""
    with pytest.raises(ConfigError, match=r"must be path/to/file.py:FUNCTION or package.module:FUNCTION"):
        load_workload(spec)


def test_a_file_that_does_not_exist(tmp_path: Path) -> None:
    """Files with similar names are suggested."""
    (tmp_path / "my_model.py").write_text("")

    with pytest.raises(ConfigError, match=r"my_modle.py' does not exist .* Python files there: my_model.py"):
        load_workload(f"{tmp_path}/my_modle.py:mine")
    with pytest.raises(ConfigError, match=r"module 'there.is.none' cannot be imported: ModuleNotFoundError"):
        load_workload("there.is.none:mine")
