"""Every tensor over the steps, and its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_conformance.parity.comparison import compare
from fsdp_conformance.parity.result import Comparison
from fsdp_conformance.parity.trajectory import Trajectory, curves, trajectories
from fsdp_conformance.recordings import files
from fsdp_conformance.report.html.training import training_page
from fsdp_conformance.tests.parity.test_comparison import scaled
from fsdp_conformance.tests.parity.trainings import STEPS, Script, compared


def of(comparison: Comparison) -> dict[tuple[str, str], Trajectory]:
    return {
        (each.kind, each.name): each for each in trajectories(comparison.run, comparison.reference, comparison.noise)
    }


def test_a_difference_is_followed_beyond_its_first_step(tmp_path: Path) -> None:
    comparison = compared(Script(gradients=scaled(2.0, name="second.bias", from_step=1)), tmp_path)

    tensors = of(comparison)

    bias = tensors["gradient", "second.bias"]
    assert [each.step for each in bias.distances] == list(range(STEPS))
    assert [each.is_beyond for each in bias.distances] == [False, True, True, True]
    # An estimate from the sketch.
    assert 0.5 < bias.distances[1].value < 2
    assert [each.value for each in tensors["parameter", "first.weight"].distances[:1]] == [0.0]
    assert bias.worst > tensors["parameter", "first.weight"].worst
    loss, norm = curves(comparison.run, comparison.reference)
    assert loss.run[:2] == loss.reference[:2]
    assert None not in (*loss.run, *norm.run)
    assert norm.run[0] == norm.reference[0]
    assert norm.run[1] != norm.reference[1]


@pytest.mark.slow
def test_the_page_has_the_finding_and_every_tensor(tmp_path: Path) -> None:
    page = training_page(compared(Script(gradients=scaled(2.0, name="second.bias", from_step=1)), tmp_path))

    assert page.count("<h3>The gradients differ, from step 1 on</h3>") == 1
    assert "every element is 2 times the expected one" in page
    for name in ("first.weight", "second.bias", "second.weight/exp_avg"):
        assert f'<th scope="row">{name}</th>' in page
    assert "gradient &#39;second.bias&#39; at step 1: relative difference 1" in page
    assert page.count("<polyline") == 4
    assert "http" not in page


@pytest.mark.slow
def test_names_of_a_recording_are_escaped(tmp_path: Path) -> None:
    compared(Script(), tmp_path)
    for file in tmp_path.glob("*/*.jsonl"):
        file.write_text(file.read_text(encoding="utf-8").replace("second.bias", "<script>"), encoding="utf-8")

    page = training_page(compare(files.read(tmp_path / "run"), files.read(tmp_path / "reference")))

    assert "<script>" not in page
    assert "&lt;script&gt;" in page
