"""A scenario is the same in every process: its values, its JSON form, and what it refuses."""

from __future__ import annotations

import json

import pytest

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.scenarios import rows
from fsdp_conformance.scenarios.axes import SPACE
from fsdp_conformance.scenarios.scenario import FORMAT, Scenario, scenario_from_json

_SCENARIO = Scenario.of({"ranks": "4", "sharding": "hybrid", "optimizer": "adam, foreach"}, salt=3)


def _json(**changes: object) -> str:
    data = {"format": FORMAT, "salt": 0, "values": {"ranks": "3"}, **changes}
    return json.dumps({key: value for key, value in data.items() if value is not ...})


def test_json_gives_back_the_same_scenario() -> None:
    """Of the plainest one, of one with a salt, and of every frozen row."""
    for scenario in (Scenario(), _SCENARIO, *rows.pairs()):
        assert scenario_from_json(scenario.to_json()) == scenario


def test_plain_values_are_left_out_and_the_order_does_not_matter() -> None:
    """Equal trainings are equal scenarios, with the same digest."""
    same = Scenario.of({"optimizer": "adam, foreach", "sharding": "hybrid", "ranks": "4", "mode": "training"}, salt=3)

    assert same == _SCENARIO
    assert same.digest == _SCENARIO.digest
    assert scenario_from_json(_json(values={"mode": "training"})) == Scenario()


def test_the_digest_is_of_the_content() -> None:
    """Other values or another salt have another digest, and it is the same on any machine."""
    others = [Scenario(), Scenario(salt=1), Scenario.of({"ranks": "3"}), _SCENARIO]

    assert len({scenario.digest for scenario in others}) == len(others)
    assert Scenario().digest == "52f39cc3"


def test_what_a_scenario_says_of_itself() -> None:
    """Its values in words, its ranks and what it needs."""
    assert _SCENARIO.describe() == "ranks: 4, sharding: hybrid, optimizer: adam, foreach"
    assert _SCENARIO.features == {"ranks: 4", "sharding: hybrid", "optimizer: adam, foreach"}
    assert _SCENARIO.needs == {"hsdp"}
    assert _SCENARIO.world_size == 4
    assert _SCENARIO.choice == {**SPACE.plain, "ranks": "4", "sharding": "hybrid", "optimizer": "adam, foreach"}
    assert Scenario().describe() == "nothing special"
    assert Scenario().features == frozenset()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        "{" * 3000,
        _json(format=1),
        _json(format="2"),
        _json(format=...),
        _json(values=...),
        _json(salt=...),
        _json(values=[["ranks", "3"]]),
        _json(values={"ranks": 3}),
        _json(values={"ranks": ["3"]}),
        _json(values={"wings": "2"}),
        _json(values={"ranks": "7"}),
        _json(salt="0"),
        _json(salt=0.5),
        _json(salt=True),
        _json(world_size=2),
        _json(values={"ranks": "2", "sharding": "hybrid"}),
        _json(values={"update": "in backward", "optimizer": "adam, foreach"}),
    ],
)
def test_other_text_is_refused(text: str) -> None:
    """Text that is not a scenario of this version raises ConfigError instead of training something else."""
    with pytest.raises(ConfigError):
        scenario_from_json(text)


def test_the_reason_of_a_refusal() -> None:
    """It is that of the space, or the version."""
    with pytest.raises(ConfigError, match="sharding: hybrid makes sense only with ranks: 4"):
        scenario_from_json(_json(values={"sharding": "hybrid"}))
    with pytest.raises(ConfigError, match="another version wrote it"):
        scenario_from_json(_json(format=1))
    with pytest.raises(ConfigError, match="got wings: 2"):
        Scenario.of({"wings": "2"})
