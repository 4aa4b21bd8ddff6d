"""`--workload`: an engine is judged on a model of the user's, which is examined before a rank is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_conformance.tests.cli.cli_runs import answered, said

_MODULE = "fsdp_conformance.tests.references.unfit_workloads"
_CASE = "R001/own-model-ws2"

#: A file as a user would have it.
_MODEL = "from fsdp_conformance.fixtures.llama import llama\n\n\ndef mine():\n    return llama()\n"


def _records(report: Path) -> dict[str, dict[str, object]]:
    """The records of a run, by case."""
    lines = map(json.loads, (report / "run.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["case"]: line for line in lines if line["type"] == "case"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("implementation", "verdict", "requirement"),
    [
        ("torch-fsdp2", "PASS", ""),
        ("reference", "PASS", ""),
        ("mutant:sum-instead-of-mean", "FAIL", "R003"),
        ("mutant:no-reduction", "FAIL", "R003"),
        ("mutant:reference-sums-gradients", "FAIL", "R003"),
    ],
)
def test_an_engine_is_judged_on_it(implementation: str, verdict: str, requirement: str, tmp_path: Path) -> None:
    """
    Right engines pass, wrong ones fail for their defect; a case that asks for something else says what is missing.
    Nothing is certified.
    """
    (tmp_path / "model.py").write_text(_MODEL)

    done = said(
        "run", "--implementation", implementation, "--workload", "model.py:mine", "--case", _CASE, "--case", "R111/*",
        "--report", "report", "--no-smoke", cwd=tmp_path,
    )  # fmt: skip

    records = _records(tmp_path / "report")
    first, left_out = records[_CASE], records["R111/own-frozen-parameters-ws2"]
    findings = first["findings"]
    assert isinstance(findings, list)
    assert (first["verdict"], first["refereed"]) == (verdict, True), first["reason"]
    assert ([finding["requirement"] for finding in findings] or [""])[0] in (requirement, "R001"), findings
    assert (requirement in {finding["requirement"] for finding in findings}) is bool(requirement)
    assert left_out["verdict"] == "DISABLED"
    assert left_out["reason"] == "left out by --workload: it has no frozen parameter"
    assert "--workload model.py:mine" in str(first["repro"])
    assert done.status == 1
    assert "\nPRIVATE RUN  own-model-2026.11" in done.out
    verified = said("verify", "report", cwd=tmp_path)
    assert (verified.status, "PRIVATE RUN" in verified.out) == (1, True), verified.output


@pytest.mark.slow
def test_all_problems_come_at_once(tmp_path: Path) -> None:
    """Status 2, and no rank is started."""
    done = said("run", "--workload", f"{_MODULE}:several", "--report", "report", cwd=tmp_path)

    assert done.status == 2
    for problem in ("got 'there.is.none'", "build must be a pure function", "the batch must depend on the rank"):
        assert problem in done.err
    assert not (tmp_path / "report").exists()


@pytest.mark.slow
@pytest.mark.nightly_params("debug")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--workload", "none.py:mine"], "the file 'none.py' does not exist"),
        (["list", "--workload", f"{_MODULE}:batch_is_a_tuple"], "must return a Batch, got tuple"),
        (["debug", _CASE, "--workload", f"{_MODULE}:raises"], "raised KeyError: 'config.yaml'"),
    ],
    ids=["run", "list", "debug"],
)
def test_each_command_examines_it(words: list[str], message: str, tmp_path: Path) -> None:
    """Whatever the command, a problem is one line, and the status is 2."""
    done = said(*words, cwd=tmp_path)

    assert (done.status, message in done.err) == (2, True), done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--workload", "model.py:mine", "--profile", "core"], "profile must be omitted with workload"),
        (["run", "--profile", "own-model"], "workload must be FILE:FUNCTION with the profile own-model-2026.11"),
        (["run", "--workload", " "], "workload must not be blank"),
    ],
)
def test_options_that_contradict_each_other(words: list[str], message: str) -> None:
    """They are refused before anything is imported."""
    done = answered(*words)

    assert (done.status, message in done.err) == (2, True), done.output


@pytest.mark.nightly
def test_debug_runs_a_case_on_it(tmp_path: Path) -> None:
    """One rank has the terminal, and nothing is stored. Cases and models of other profiles are refused."""
    (tmp_path / "model.py").write_text(_MODEL)

    done = said("debug", _CASE, "--workload", "model.py:mine", cwd=tmp_path)
    without = said("debug", _CASE, cwd=tmp_path)
    other = said("debug", "R001/exact-probe-ws2", "--workload", "model.py:mine", cwd=tmp_path)

    assert (done.status, f"✓ {_CASE}  PASS" in done.out) == (0, True), done.output
    assert (without.status, "add --workload FILE:FUNCTION" in without.err) == (2, True)
    assert (other.status, "which has its own" in other.err) == (2, True)


@pytest.mark.slow
def test_list_says_what_the_model_lacks(tmp_path: Path) -> None:
    """And why a case would not run."""
    done = said("list", "--not-run", "--workload", f"{_MODULE}:right", cwd=tmp_path)

    assert done.status == 0
    assert "left out by --workload: it has no build_on_meta" in done.out
    assert "35 of 35 cases in own-model-2026.11" in " ".join(done.out.split())
