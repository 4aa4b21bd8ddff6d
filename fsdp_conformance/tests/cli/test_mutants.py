"""A known-wrong engine on the command line: it is chosen by its name, and everything that is written names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_conformance.tests.cli.cli_runs import answered, said

pytestmark = pytest.mark.slow

_MUTANT = "mutant:averaged-twice"
_CASE = "R003/every-rank-contributes-once-ws2"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the mutant has failed a case that kills it."""
    place = tmp_path_factory.mktemp("run")
    result = said("run", "--implementation", _MUTANT, "--case", _CASE, "--report", "report", cwd=place)

    assert result.status == 1, result.out + result.err
    assert f"repro     fsdp-conformance run --implementation {_MUTANT} --case {_CASE}" in result.out
    return place


@pytest.mark.nightly
def test_a_certificate_names_the_mutant(directory: Path) -> None:
    """It never has the name of the engine that the mutant is made of."""
    result = answered("verify", "report", "--json", cwd=directory)

    assert json.loads(result.out)["certificate"]["subject"]["implementation"] == _MUTANT


@pytest.mark.nightly
def test_a_run_of_a_mutant_is_replayed(directory: Path) -> None:
    """The run file holds the name, which is enough to find the mutant again."""
    result = said("replay", "report", _CASE, cwd=directory)

    assert result.status == 0, result.out + result.err
    assert f"{_CASE} on {_MUTANT}, as in" in result.out


@pytest.mark.daily(1)
@pytest.mark.nightly_params("explore")
@pytest.mark.parametrize(
    "command",
    [
        ("run", "--case", _CASE, "--implementation"),
        ("list", "--implementation"),
        ("smoke",),
        ("explore", "--max-examples", "1", "--implementation"),
        ("debug", _CASE, "--implementation"),
        ("repro", _CASE, "--implementation"),
    ],
    ids=lambda command: command[0],
)
def test_a_name_that_no_mutant_has_is_wrong_usage(command: tuple[str, ...], tmp_path: Path) -> None:
    """Every command says so, with the names that are near."""
    result = said(*command, "mutant:averagd-twice", cwd=tmp_path)

    assert result.status == 2, result.out + result.err
    assert "there is no mutant 'averagd-twice' [implementation 'mutant:averagd-twice']. Did you mean " in result.err
    assert "'mutant:averaged-twice'" in result.err
