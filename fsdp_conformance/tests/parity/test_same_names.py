"""Recordings of one model that name its parameters from different modules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_conformance.parity.comparison import compare
from fsdp_conformance.parity.finding import Whose
from fsdp_conformance.parity.same_names import prefixes_of, without_prefix
from fsdp_conformance.recordings.events import Initial
from fsdp_conformance.recordings.files import Recording
from fsdp_conformance.tests.parity.trainings import Script, record


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Of 'first.weight' and others."""
    return record(Script(), tmp_path_factory.mktemp("run") / "run")


def named(recording: Recording, names: dict[str, str]) -> Recording:
    """The recording whose initial values have other names."""
    ranks = (
        replace(
            rank,
            events=tuple(
                replace(event, values={names.get(name, name): value for name, value in event.values.items()})
                if isinstance(event, Initial)
                else event
                for event in rank.events
            ),
        )
        for rank in recording.ranks
    )
    return replace(recording, ranks=tuple(ranks))


def begun(recording: Recording) -> list[str]:
    return [name for event in recording.ranks[0].events if isinstance(event, Initial) for name in event.values]


def test_a_prefix_of_one_side_is_left_out(trained: Recording) -> None:
    names = begun(trained)
    longer = named(trained, {name: f"model.{name}" for name in names})
    longest = named(trained, {name: f"net.model.{name}" for name in names})
    with_loss = named(trained, {name: f"model.{name}" for name in names[:-1]} | {names[-1]: "loss.weight"})

    assert prefixes_of(longer, trained) == ("model.", "")
    assert prefixes_of(trained, longer) == ("", "model.")
    assert prefixes_of(longest, longer) == ("net.model.", "model.")
    assert prefixes_of(with_loss, trained) == ("model.", "")
    assert begun(without_prefix(longest, "net.model.")) == names


def test_other_models_and_equal_names_stay_as_they_are(trained: Recording) -> None:
    names = begun(trained)
    other = named(trained, {name: f"encoder.{number}.bias" for number, name in enumerate(names)})
    some = named(trained, {names[0]: "model.first.weight"})

    assert prefixes_of(trained, trained) == prefixes_of(some, trained) == prefixes_of(other, trained) == ("", "")


def test_a_difference_is_found_under_other_names(trained: Recording, tmp_path: Path) -> None:
    """Not that all parameters are missing."""
    faster = record(Script(lr=0.2, is_inside=True), tmp_path / "faster")
    comparison = compare(faster, trained)
    finding = comparison.findings[0]

    assert comparison.is_renamed
    assert (finding.title, finding.whose) == ("The optimizer has different settings", Whose.SCRIPT)
    assert finding.first == "'first.weight' · lr is 0.2 instead of 0.1"
    assert not compare(trained, trained).is_renamed
