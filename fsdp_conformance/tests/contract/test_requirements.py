"""The contract as data: it loads, and its lint reports nothing but what is wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fsdp_conformance import contract
from fsdp_conformance.contract import CHAPTERS, Contract, Level, Requirement
from fsdp_conformance.contract.lint import lint
from fsdp_conformance.errors import ConfigError, UsageError

ENTRY = """
[[requirement]]
id = "R000"
name = "A name"
level = "M"
chapter = "A"
sentence = "Something holds."
observation = ["BB"]
source = ["derived"]
"""


def requirement(**changes: Any) -> Requirement:
    """R000, sound unless changed."""
    fields: dict[str, Any] = {
        "id": "R000",
        "name": "A name",
        "level": Level.MUST,
        "chapter": "A",
        "sentence": "Something holds.",
        "observation": ("BB",),
        "source": ("pytorch#1",),
    }
    return Requirement(**{**fields, **changes})


def linted(*requirements: Requirement, **future: str) -> list[str]:
    """The lint's complaints about a contract of these requirements."""
    return lint(Contract({item.id: item for item in requirements}, future))


# The contract that is shipped.


def test_the_contract_is_sound() -> None:
    """The lint has nothing to say."""
    assert lint(contract.load()) == []


def test_every_requirement_is_there() -> None:
    """The ids go from R000 to R189 without a gap."""
    assert list(contract.load().requirements) == [f"R{number:03d}" for number in range(190)]


def test_the_levels_are_those_of_the_specification() -> None:
    """54 MUST, 119 MUST if declared and 14 SHOULD in R001 to R187, and R000, R188 and R189, which are MUST."""
    levels = [item.level for item in contract.load().requirements.values()]

    assert [levels.count(level) for level in Level] == [57, 119, 14]


def test_components_are_conditional() -> None:
    """R163 to R187 bind engines that declare the component."""
    components = {"reducer", "bucketing", "chunk_pool", "mesh", "sim_ranks"}
    bound = [contract.load()[f"R{number}"] for number in range(163, 188)]

    assert {item.level for item in bound} == {Level.DECLARED}
    assert {flag for item in bound for flag in item.flags} == components


def test_every_chapter_has_a_requirement() -> None:
    """Each chapter comes once, in the order of CHAPTERS, except for the requirements added at the end."""
    chapters = [item.chapter for item in contract.load().requirements.values()][:-2]

    assert list(dict.fromkeys(chapters)) == list(CHAPTERS)


def test_it_shards_cannot_be_declined() -> None:
    """R188 is mandatory, and no flag excuses any part of it."""
    item = contract.load()["R188"]

    assert (item.name, item.level, item.flags) == ("It shards", Level.MUST, ())


def test_every_requirement_says_where_to_look() -> None:
    """Every requirement suggests a next step."""
    assert [item.id for item in contract.load().requirements.values() if not item.look_at] == []


def test_sentences_say_no_requirement_twice() -> None:
    """Names and sentences are unlike one another."""
    items = contract.load().requirements.values()

    assert len({item.name for item in items}) == len({item.sentence for item in items}) == 190


def test_sources_are_public() -> None:
    """No paths of a machine, and no documents that are not public."""
    sources = [source for item in contract.load().requirements.values() for source in item.source]

    assert [source for source in sources if re.search(r"(^|\s)/|\.md\b|contract", source)] == []


def test_an_unknown_requirement_suggests_a_near_one() -> None:
    """It raises a usage error, not a KeyError."""
    with pytest.raises(UsageError, match=r"requirement must be one of R000 to R189, got 'R0033'; did you mean .*R003"):
        contract.load()["R0033"]


def test_levels_have_words() -> None:
    """Reports print these words."""
    assert [level.word for level in Level] == ["MUST", "MUST if declared", "SHOULD"]


# Reading.


def test_a_requirement_is_read() -> None:
    """Lists become tuples, what is optional is empty."""
    item = contract.parse(ENTRY)["R000"]

    assert item == requirement(source=("derived",))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('name = "A name"\n', "", "R000: name is missing"),
        ('level = "M"', 'level = "X"', "R000: level must be M, C or S, got 'X'"),
        ('sentence = "Something holds."', 'sentence = " "', "R000: sentence must be a non-empty string, got ' '"),
        ('observation = ["BB"]', 'observation = "BB"', "R000: observation must be a list of strings, got 'BB'"),
        ('chapter = "A"', 'chapter = "A"\nseverity = 3', "R000: unknown field severity"),
        ('id = "R000"\n', "", "entry 1: id is missing"),
    ],
)
def test_a_malformed_requirement_is_refused(old: str, new: str, problem: str) -> None:
    """The error names the id and the field."""
    with pytest.raises(ConfigError, match=re.escape(problem)):
        contract.parse(ENTRY.replace(old, new))


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        contract.parse(ENTRY.replace('"M"', '"X"') + ENTRY.replace('name = "A name"\n', ""))

    assert len(raised.value.problems) == 2


def test_an_id_that_comes_twice_is_refused() -> None:
    """Ids are never used again."""
    with pytest.raises(ConfigError, match="R000: duplicate id"):
        contract.parse(ENTRY + ENTRY)


# The lint.


def test_a_sound_contract_has_no_problems() -> None:
    """The lint can be silent."""
    assert linted(requirement()) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"id": "X000"}, "id must be R and three digits, got 'X000'"),
        ({"id": "R001"}, "id: expected R000, got R001"),
        ({"chapter": "ZZ"}, "R000: chapter must be one of"),
        ({"observation": ("EYE",)}, "R000: observation must be one of"),
        ({"observation": ()}, "R000: observation is empty"),
        ({"flags": ("sunshine",)}, "R000: flag 'sunshine' is neither a capability nor a future flag"),
        ({"level": Level.DECLARED}, "R000: a requirement of level C must name the flags"),
        ({"name": "x" * 73}, "R000: name must have at most 72 characters, got 73"),
        ({"sentence": "Something holds"}, "R000: sentence must end with a full stop"),
        ({"source": ()}, "R000: source must name a public test or issue, or be 'derived'"),
        ({"source": ("somewhere",)}, "R000: source must name a public test or issue, got 'somewhere'"),
        ({"look_at": " The  hook."}, "R000: look_at has stray whitespace"),
    ],
)
def test_the_lint_speaks(changes: dict[str, Any], problem: str) -> None:
    """Each rule has a contract that breaks it."""
    problems = linted(requirement(**changes))

    assert len(problems) == 1
    assert problems[0].startswith(problem)


def test_a_future_flag_that_has_come_is_reported() -> None:
    """The list of flags to come does not rot."""
    assert linted(requirement(flags=("zero3",)), zero3="now") == [
        "future flag zero3 is a capability now: delete it from [future_flags]"
    ]


def test_a_future_flag_that_no_requirement_names_is_reported() -> None:
    """The list of flags to come does not grow needlessly."""
    assert linted(requirement(), later="later") == ["no requirement names future flag later"]
    assert linted(requirement(flags=("later",)), later="later") == []
