"""The tests on the page docs/simulated-cuda.md, run as the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.simulator.simulated_cuda.runs import compiled, run_pytest
from pages.blocks import blocks_of

pytestmark = [compiled, checkout.required, pytest.mark.nightly]

_PAGE = "docs/simulated-cuda.md"


def test_the_page_says_what_happens(tmp_path: Path) -> None:
    """The test with the race fails with the lines that are quoted, the others pass."""
    files = {
        block.said.removeprefix("test_").removesuffix(".py"): block.text
        for block in blocks_of(_PAGE)
        if block.word == "file"
    }
    # The others show options on files that the page does not have.
    console = next(block for block in blocks_of(_PAGE) if block.language == "console" and "test_prefetch" in block.text)
    quoted = [line for line in console.text.splitlines()[1:] if line and line != "..."]

    run = run_pytest(tmp_path, "--simulate-cuda=1", "test_prefetch.py", texts=files)
    marked = run_pytest(tmp_path, "--simulate-cuda=2", "test_marked.py", texts=files)

    printed = run.out.splitlines()
    assert [line for line in quoted if line not in printed] == [], run.out
    assert set(marked.outcomes.values()) == {"PASSED"}, marked.out
