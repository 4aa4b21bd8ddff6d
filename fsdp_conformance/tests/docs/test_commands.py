"""Commands print the output that the pages quote, and the code on the pages runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdp_conformance.checks.result import CheckResult
from fsdp_conformance.driver.smoke import smoke
from fsdp_conformance.history.training import StepRecord, TrainingHistory
from fsdp_conformance.selftest import bound_case, run_case
from fsdp_conformance.simulator.device import build
from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.verdict import Verdict
from pages.blocks import Block, blocks_of, pages
from pages.transcript import is_run, run_page, same_output, write_files

pytestmark = [checkout.required, pytest.mark.slow]

ADAPTERS = "docs/writing-an-adapter.md"

#: Pages whose commands take long, and whose features have their own tests.
NIGHTLY = frozenset(
    f"docs/{name}.md"
    for name in (
        "engine",
        "exploring",
        "harness",
        "own-model",
        "own-training",
        "planner",
        "reading-a-verdict",
        "sanitize",
        "sanitize-and-csan",
        "simulated-cuda",
        "simulated-ranks",
        "tutorial",
    )
)

#: Pages whose commands need the simulated accelerator's extension.
SIMULATED = ("docs/sanitize.md", "docs/sanitize-and-csan.md")

#: Pages with something to run. Those that need the simulated accelerator cannot be shown where it cannot be compiled.
RUN = [
    pytest.param(
        page,
        marks=[
            pytest.mark.skipif(page in SIMULATED and build.unavailable() is not None, reason=str(build.unavailable())),
            *([pytest.mark.nightly] if page in NIGHTLY else []),
        ],
    )
    for page in pages()
    if any(is_run(block) or block.word == "script" for block in blocks_of(page))
]


def blocks_with(word: str) -> list[Block]:
    """Every block whose comment begins with a word."""
    return [block for page in pages() for block in blocks_of(page) if block.word == word]


@pytest.mark.nightly_params("docs/quickstart.md")
@pytest.mark.parametrize("page", RUN)
def test_commands_print_what_the_page_says(page: str, tmp_path: Path) -> None:
    """Exit status and output, but for numbers; the page's files are in the directory, and nothing else."""
    if page in SIMULATED:
        build.require()
    ran = list(run_page(page, tmp_path))

    assert [problem for one in ran if (problem := one.problem())] == []
    assert ran != []


@pytest.mark.daily(1)
@pytest.mark.parametrize("spec", [block.said for block in blocks_of(ADAPTERS) if block.word == "adapter"])
def test_adapters_pass_smoke(spec: str, tmp_path: Path) -> None:
    """The adapters on the page are whole files without a problem."""
    write_files(ADAPTERS, tmp_path)

    results = smoke(str(tmp_path / spec))

    assert [problem for result in results for problem in result.problems] == []
    assert not any(result.not_run for result in results)


@pytest.mark.nightly
def test_what_smoke_says_of_an_adapter_without_a_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`<!-- smoke: FILE:CLASS without METHOD -->`: the text is a problem that smoke then has."""
    write_files(ADAPTERS, tmp_path)
    (block,) = blocks_with("smoke")
    spec, _, method = block.said.partition(" without ")
    file, _, adapter = spec.partition(":")
    lacking = tmp_path / "lacking.py"
    lacking.write_text(
        f"from fsdp_conformance.adapters.torch_like import TorchAdapter\n"
        f"from {file.removesuffix('.py')} import {adapter}\n\n\n"
        f"class Lacking({adapter}):\n    {method} = TorchAdapter.{method}\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    problems = [problem for result in smoke(f"{lacking}:Lacking") for problem in result.problems]

    assert len(problems) == 1
    assert same_output(block.text, problems[0])


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("case", "verdict"), [("R003/every-rank-contributes-once-ws2", Verdict.PASS), ("R188/it-shards-ws2", Verdict.FAIL)]
)
def test_an_engine_that_does_not_shard_trains_correctly(case: str, verdict: Verdict, tmp_path: Path) -> None:
    """The page's statements about the adapter that averages gradients by hand are true."""
    write_files(ADAPTERS, tmp_path)

    record = run_case(bound_case(case), f"{tmp_path / 'by_hand.py'}:ByHand")

    assert record.verdict is verdict, record.reason


def test_fragments_run() -> None:
    """Code that is not a program: imports succeed, and the check finds what it should."""
    names: dict[str, object] = {}
    for block in blocks_with("fragment"):
        exec(compile(block.text, block.place, "exec"), names)
    check = names["losses_are_finite"]
    history = TrainingHistory(source="a test", rank=0, world_size=1)
    history.steps = [
        StepRecord(step=0, losses=[torch.tensor(1.0)]),
        StepRecord(step=1, losses=[torch.tensor(torch.nan)]),
    ]

    assert callable(check)
    result = check(history, requirement="R001")
    assert isinstance(result, CheckResult)
    assert [(finding.requirement, finding.step) for finding in result.findings] == [("R001", 1)]
    assert result.count.comparisons == 2


@pytest.mark.parametrize(
    ("quoted", "output", "same"),
    [
        ("1.5 s, 3 cases", "27 s, 4 cases", True),
        ("a\n...\nd\n", "a\nb\nc\nd\n", True),
        ("a\n...\n", "a\n", True),
        ("a\nb\n", "a\nc\n", False),
        ("a\n...\nd\n", "a\nb\n", False),
        ("2 min 05 s", "59 s", True),
        ("the gradient is 1", "the loss is 1", False),
    ],
)
def test_outputs_are_compared_without_numbers(quoted: str, output: str, *, same: bool) -> None:
    """Words decide, and `...` stands for lines."""
    assert same_output(quoted, output) == same
