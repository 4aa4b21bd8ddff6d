"""`list` and `explain`: what would run, and why not, from the profile and two questions to a child."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_conformance.adapters.registry import AdapterDescription
from fsdp_conformance.cli import chosen_cases, main
from fsdp_conformance.cli.survey import Machine, Survey
from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.tests.cli.cli_runs import Said, said, with_adapter, with_quick_survey
from fsdp_conformance.tests.pytest_plugin import mini_suite


@pytest.fixture(name="suite", scope="module")
def _suite(tmp_path_factory: pytest.TempPathFactory) -> mini_suite.MiniSuite:
    return mini_suite.write(tmp_path_factory.mktemp("suite"))


def listed(suite: mini_suite.MiniSuite, directory: Path, *more: str) -> Said:
    """`list` for an implementation that declares no_sync and zero3, on two devices of any type."""
    env = with_quick_survey(suite.environment(), directory)
    return said(
        "list", "--profile", str(suite.profile_path), "--implementation", "mine.py", *more, cwd=directory, env=env
    )


def machine(*, device: str = "cuda", num_ranks: int | None = 2, backend: str = "nccl") -> Machine:
    """A machine with two GPUs, unless said otherwise."""
    present = frozenset({"gloo", "nccl", "cuda", "accelerator"})
    return Machine(
        torch="2.13.0",
        device=device,
        backend=backend,
        problem="" if backend else "no backend is available",
        present=present,
        num_devices=num_ranks or 8,
        num_ranks=num_ranks,
    )


@pytest.mark.slow
def test_every_case_is_listed_once_with_what_it_would_do(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """Cases are listed by chapter, and the last line has their number."""
    result = listed(suite, tmp_path)
    cases = [line.split() for line in result.out.splitlines() if line.startswith("  R")]

    assert result.status == 0
    assert sorted(entry.id for entry in suite.profile.entries) == sorted(case[0] for case in cases)
    assert {"R017/elsewhere-ws2"} == {case[0] for case in cases if case[3] != "runs"}
    assert (
        result.out.rstrip().splitlines()[-1] == "7 of 7 cases in mini, for mine 1.2 on cpu: 6 would run · 1 NOT_RUN_ENV"
    )


@pytest.mark.slow
def test_the_list_takes_the_options_that_select(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """The command takes the same options as `run`."""
    result = listed(suite, tmp_path, "--requirement", "R001,R017", "--case", "*-ws2")

    assert [line.split()[0] for line in result.out.splitlines() if line.startswith("  R")] == [
        "R001/probe-ws2",
        "R017/elsewhere-ws2",
    ]
    assert result.last_line.startswith("2 of 7 cases in mini")


def test_the_cases_of_a_capability(capsys: pytest.CaptureFixture[str]) -> None:
    """`--capability` selects cases, and is not taken for `--capabilities`, which lists the flags."""
    assert main(["list", "--capability", "hsdp"]) == 0
    cases = capsys.readouterr().out
    assert main(["list", "--capabilities"]) == 0
    flags = capsys.readouterr().out

    assert "  R005/hybrid-shard-group1-ws2 " in cases
    assert "  hsdp " in flags
    assert "  hsdp " not in cases


@pytest.mark.slow
def test_why_tells_the_reason(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """The reason is what a case expects if it runs, or what is missing; --not-run lists only the latter."""
    why, not_run = listed(suite, tmp_path, "--why"), listed(suite, tmp_path, "--not-run")

    assert "Each rank holds its share." in why.out
    assert "needs cuda, which this machine does not have" in why.out
    assert [line.split()[0] for line in not_run.out.splitlines() if line.startswith("  R")] == ["R017/elsewhere-ws2"]


@pytest.mark.slow
def test_an_accelerator_holds_as_many_ranks_as_it_has_devices(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """Cases of more ranks would not run."""
    result = listed(suite, tmp_path, "--device", "mtia", "--why")

    assert "needs 4 devices of type mtia, but 2 are present" in result.out


@pytest.mark.slow
def test_what_is_declared_is_asked_of_the_adapter(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """A real adapter is described in its own process: no_sync is not declared, so its case is UNSUPPORTED."""
    text = (
        "from fsdp_conformance.adapters.torch_like import TorchAdapter\nclass Mine(TorchAdapter):\n    name = 'mine'\n"
    )
    text += "    def wrap(self, model, plan):\n        return model\n"
    spec = with_adapter(tmp_path, text)
    result = said("list", "--profile", str(suite.profile_path), "--implementation", spec, "--not-run")

    assert result.status == 0
    assert "no_sync not declared by" in result.out
    assert "for mine" in result.out


@pytest.mark.nightly
def test_requirements_are_listed_with_their_cases(suite: mini_suite.MiniSuite) -> None:
    """All of the contract, whether bound or not."""
    result = said("list", "--requirements", "--profile", str(suite.profile_path))

    assert result.status == 0
    assert "(3 cases)" in next(line for line in result.out.splitlines() if line.startswith("  R001"))
    assert "(no cases)" in next(line for line in result.out.splitlines() if line.startswith("  R002"))
    assert "6 of them covered by the 7 cases in mini" in result.out


def test_explain_tells_a_requirement_with_its_source(suite: mini_suite.MiniSuite, tmp_path: Path) -> None:
    """Text, source, where to look, cases; and nothing of a run where there is none."""
    result = said("explain", "R003", "--profile", str(suite.profile_path), cwd=tmp_path)

    assert result.status == 0
    for expected in ("requires", "source", "look at", "R001/probe-ws{1,2,4}   3 cases"):
        assert expected in result.out
    assert result.last_line.startswith("no results: there is no run in .fsdp-conformance/last")


def test_the_machine_is_judged_before_anything_is_started(suite: mini_suite.MiniSuite) -> None:
    """No device, no backend, a world size or a smallest case that does not fit: each says what should be."""
    cases = chosen_cases.cases_of(suite.profile)
    fours = [case for case in cases if case.world_size == 4]
    settings = RunSettings(device="cuda")

    chosen_cases.check_machine(machine(), cases, settings)
    with pytest.raises(EnvironmentUnavailable, match="no device of type 'cuda' was found"):
        chosen_cases.check_machine(machine(num_ranks=0, backend=""), cases, settings)
    with pytest.raises(EnvironmentUnavailable, match="no backend is available"):
        chosen_cases.check_machine(machine(backend=""), cases, settings)
    with pytest.raises(
        EnvironmentUnavailable,
        match=r"--world-size 4 needs 4 devices.* but found 2 devices of type 'cuda'",
    ):
        chosen_cases.check_machine(machine(), fours, RunSettings(device="cuda", world_sizes=(4,)))
    with pytest.raises(EnvironmentUnavailable, match=r"needs at least 4 devices.* but found 2 devices of type 'cuda'"):
        chosen_cases.check_machine(machine(), fours, settings)
    chosen_cases.check_machine(machine(device="cpu", num_ranks=None, backend="gloo"), fours, settings)


def test_what_is_foreseen_is_what_the_gate_decides(suite: mini_suite.MiniSuite) -> None:
    """The same function decides in the run, so the list cannot promise what the run does not keep."""
    description = AdapterDescription(spec="mine", name="mine", version="1", capabilities=())
    cases = chosen_cases.cases_of(suite.profile)
    foreseen = chosen_cases.foreseen(
        cases, RunSettings(device="cuda"), Survey(machine=machine(), description=description)
    )
    records = [gated.record for gated in foreseen]

    verdicts = {case.id: record.verdict for case, record in zip(cases, records, strict=True) if record is not None}
    assert verdicts == {"R093/deferred-ws2": "UNSUPPORTED", "R001/probe-ws4": "NOT_RUN_ENV"}
