"""Profiles: frozen lists of cases, made from suites and compared with them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.contract import Level
from fsdp_conformance.contract.profile import (
    PROFILES,
    Profile,
    collect_cases,
    difference,
    load_profile,
    main,
    names,
    profile_from_json,
    profile_of,
    shipped,
)
from fsdp_conformance.contract.scopes import BASE
from fsdp_conformance.errors import ConfigError, SuiteError, UsageError
from fsdp_conformance.run_settings import OWN_MODEL
from fsdp_conformance.tests.pytest_plugin import mini_suite
from fsdp_conformance.tests.report.evidence import a_case


def made(*changes: dict[str, Any], **options: Any) -> Profile:
    """A profile of cases that differ in these fields."""
    return profile_of("some", [a_case(**change) for change in changes or ({},)], **options)


# What is shipped.


def test_the_core_profile_is_what_the_suites_make() -> None:
    """Every case but those of components is in it as it is bound; `--write core-2026.11` makes it so again."""
    core = load_profile("core-2026.11")

    assert difference(core, profile_of(core.name, collect_cases())) == []


@pytest.mark.parametrize("name", names())
def test_every_shipped_profile_has_the_cases_of_a_certifying_one(name: str) -> None:
    """A selection is a part of it, entry by entry. The cases on the user's own model are in none that certifies."""
    profile = load_profile(name)
    whole = {**load_profile("core-2026.11").by_id, **load_profile("components-2026.11").by_id}

    assert profile.entries
    strangers = [entry.id for entry in profile.entries if whole.get(entry.id) != entry]
    assert strangers == ([*profile.by_id] if name == OWN_MODEL else [])
    assert profile.certifies == (not profile.name.startswith(("sample", "quick-", "own-model-")))


def test_profiles_that_follow_from_the_core() -> None:
    """The base, everything, and the base with one extension: each has a hash, and a name with or without a date."""
    core, base, full, offload = (load_profile(name) for name in ("core", "base", "full", "offload-2026.11"))

    assert [entry.id for entry in base.entries] == [entry.id for entry in core.entries if entry.scope == BASE]
    assert len(full.entries) == len(core.entries) + len(load_profile("components").entries)
    assert {entry.scope for entry in offload.entries} == {BASE, ("offload",)}
    assert len({profile.sha256 for profile in (core, base, full, offload)}) == 4
    assert [shipped(profile.name) for profile in (base, full, offload)] == [
        profile.sha256 for profile in (base, full, offload)
    ]
    assert (load_profile("base-2026.11"), shipped("base-2025.01"), shipped("nothing")) == (base, None, None)


def test_a_renamed_profile_is_refused_with_its_new_name() -> None:
    """`smoke` is only the command that checks an adapter."""
    with pytest.raises(UsageError, match="the profile smoke is called sample now: use --profile sample"):
        load_profile("smoke")
    assert not load_profile("sample").certifies


def test_the_quick_profile_stays_as_it_was_chosen(tmp_path: Path) -> None:
    """Its cases follow the suites, but are not chosen again when others kill more."""
    cases = collect_cases()
    quick = load_profile("quick")
    chosen = [case for case in cases if case.id in quick.by_id]
    file = tmp_path / "quick.json"
    file.write_text(json.dumps(replace(quick, entries=quick.entries[:3]).to_json()), encoding="utf-8")

    assert difference(quick, profile_of(quick.name, cases, only=list(quick.by_id), certifies=False)) == []
    assert main(["--write", quick.name, "--output", str(file)]) == 0
    assert len(load_profile(str(file)).entries) == 3
    assert {(case.world_size, case.environment) for case in chosen} == {(2, ())}
    assert len({name for case in chosen for name in case.kills}) > len(chosen)


@pytest.mark.parametrize("name", ["cores", "of-load", "base-2026.10"])
def test_an_unknown_profile_is_refused_with_the_known_ones(name: str) -> None:
    """The error also suggests the name that was probably meant."""
    with pytest.raises(UsageError, match=r"profile must be one of .*base-2026\.11.*Did you mean '\w+-2026\.11'"):
        load_profile(name)


def test_components_have_a_profile_of_their_own() -> None:
    """A case is in the one or in the other: by its chapter, unless it is named."""
    cases = [a_case(id="R163/some-ws2", requirements=("R163",), chapter="AA"), a_case()]

    assert [entry.id for entry in profile_of("components-1", cases).entries] == ["R163/some-ws2"]
    assert [entry.id for entry in profile_of("core-1", cases).entries] == [a_case().id]
    assert [entry.id for entry in profile_of("core-1", cases, only=["R163/some-ws2"]).entries] == ["R163/some-ws2"]


# Making.


def test_an_entry_has_what_a_certificate_needs() -> None:
    """The level is the primary requirement's."""
    (entry,) = made({"requirements": ("R005", "R001"), "needs": ("zero2",), "environment": ("cuda",)}).entries

    assert (entry.id, entry.requirements, entry.primary) == ("R005/probe-ws2", ("R005", "R001"), "R005")
    assert (entry.level, entry.needs, entry.environment) == (Level.DECLARED, ("zero2",), ("cuda",))


def test_entries_are_in_the_order_of_ids() -> None:
    """The order of the suites makes no difference."""
    ids = [entry.id for entry in made({"world_size": 4}, {"world_size": 2}, {"world_size": 3}).entries]

    assert ids == ["R001/probe-ws2", "R001/probe-ws3", "R001/probe-ws4"]


def test_a_selection_has_only_what_was_named() -> None:
    """The profile states that it cannot certify."""
    profile = made({}, {"world_size": 3}, only=["R001/probe-ws3"], certifies=False)

    assert ([entry.id for entry in profile.entries], profile.certifies) == (["R001/probe-ws3"], False)


def test_unknown_ids_and_requirements_are_refused_together() -> None:
    """One error has all problems."""
    with pytest.raises(ConfigError) as raised:
        made({"requirements": ("R999",)}, only=["R999/probe-ws2", "R001/other-ws2"])

    assert raised.value.problems == (
        "no suite has a case with id 'R001/other-ws2'",
        "R999/probe-ws2: requirement must be one of the contract's, got 'R999'",
    )


def test_cases_are_collected_from_every_class_of_every_module(tmp_path: Path) -> None:
    """The cases are sorted by id; plain tests are left out."""
    suite = mini_suite.write(tmp_path)

    assert list(suite.profile.by_id) == [
        "R001/probe-ws1",
        "R001/probe-ws2",
        "R001/probe-ws4",
        "R017/elsewhere-ws2",
        "R070/order-ws2",
        "R093/deferred-ws2",
        "R188/it-shards-ws2",
    ]


def test_an_id_that_two_methods_have_is_refused(tmp_path: Path) -> None:
    """The error names both places."""
    suite = mini_suite.write(tmp_path)
    (suite.package / "test_more.py").write_text((suite.package / "test_cases.py").read_text(encoding="utf-8"))

    with (
        mini_suite.importable(tmp_path),
        pytest.raises(SuiteError, match=r"R188/it-shards-ws2 is bound to .*test_cases.* and to .*test_more"),
    ):
        collect_cases(mini_suite.PACKAGE)


# The hash.


def test_the_hash_is_of_the_content() -> None:
    """Equal profiles have equal hashes; a title is for people and not part of it."""
    assert made({}).sha256 == made({"title": "Another sentence."}).sha256


@pytest.mark.parametrize(
    "change",
    [
        {"id": "R001/other-ws2"},
        {"requirements": ("R001",)},
        {"world_size": 3, "id": "R001/probe-ws2"},
        {"needs": ("zero3",)},
        {"environment": ("cuda",)},
    ],
)
def test_the_hash_sees_every_change_that_matters(change: dict[str, Any]) -> None:
    """Each field that a certificate reads changes the hash."""
    assert made(change).sha256 != made({}).sha256


def test_the_hash_sees_whether_a_profile_certifies() -> None:
    """A selection cannot be passed off as the whole."""
    assert made({}, certifies=False).sha256 != made({}).sha256


def test_a_profile_survives_its_file() -> None:
    """A profile that is written and read again is the same."""
    profile = made({}, {"world_size": 3, "needs": ("zero3",)})

    assert profile_from_json(profile.to_text(), where="here") == profile


def test_a_file_has_one_case_a_line() -> None:
    """A diff of two profiles shows the cases that differ, and titles stay readable."""
    profile = made({"title": "Ω holds."}, {"world_size": 3, "needs": ("zero3",)})
    lines = profile.to_text().splitlines()

    assert [json.loads(line.rstrip(","))["id"] for line in lines[6:-2]] == list(profile.by_id)
    assert "Ω holds." in lines[6]


@pytest.mark.parametrize("indent", [None, 1, 4])
def test_a_profile_may_be_laid_out_in_any_way(indent: int | None) -> None:
    """Users have files from earlier versions, which had one value a line."""
    profile = made({}, {"world_size": 3})

    assert profile_from_json(json.dumps(profile.to_json(), indent=indent), where="here") == profile


def test_shipped_profiles_have_the_layout_that_the_command_writes() -> None:
    """Otherwise the next one that is written would change every line."""
    for path in PROFILES.glob("*.json"):
        assert path.read_text(encoding="utf-8") == load_profile(path.stem).to_text(), path.name


def test_a_profile_that_was_edited_is_refused() -> None:
    """The hash that it states is not that of its content."""
    data = made({}, {"world_size": 3}).to_json()
    data["cases"].pop()

    with pytest.raises(UsageError, match=r"sha256 of the content: expected \w{12}, got \w{12} \[here\]"):
        profile_from_json(json.dumps(data), where="here")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "x"}'])
def test_what_is_no_profile_is_refused(text: str) -> None:
    """The error names the place."""
    with pytest.raises(UsageError, match="here is not a profile"):
        profile_from_json(text, where="here")


def test_an_unknown_profile_suggests_a_near_one() -> None:
    """The error also lists the profiles that are shipped."""
    with pytest.raises(
        UsageError, match=r"profile must be one of .*, got 'core-2026\.12'.*Did you mean 'core-2026\.11'"
    ):
        load_profile("core-2026.12")


# Comparing.


def test_equal_profiles_do_not_differ() -> None:
    assert difference(made({}), made({})) == []


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (made({}), made({}, {"world_size": 3}), "R001/probe-ws3 is not in the profile"),
        (made({}, {"world_size": 3}), made({}), "R001/probe-ws3 is in no suite"),
        (
            made({}),
            made({"environment": ("gloo",)}),
            "R001/probe-ws2: environment: () in the profile, ('gloo',) in the suites",
        ),
        (
            made({}),
            made({"title": "New."}),
            "R001/probe-ws2: title: \"Losses equal DDP's.\" in the profile, 'New.' in the suites",
        ),
        (made({}, certifies=False), made({}), "certifies: False in the profile, True from the suites"),
    ],
)
def test_each_difference_is_said(ours: Profile, theirs: Profile, words: str) -> None:
    """Each difference is one sentence."""
    assert difference(ours, theirs) == [words]


# The command.


def test_a_profile_is_written_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 if the profile matches the suites, 1 with the differences if not."""
    suite = mini_suite.write(tmp_path)
    written = tmp_path / "written.json"
    where = ["--suites", mini_suite.PACKAGE, "--output", str(written)]

    with mini_suite.importable(tmp_path):
        assert main(["--write", "mini", *where]) == 0
        assert load_profile(str(written)) == suite.profile
        assert main(["--check", "mini", *where]) == 0
        data = suite.profile.to_json()
        data["cases"][0]["title"] = "Something else."
        written.write_text(json.dumps(data), encoding="utf-8")
        assert main(["--check", "mini", *where]) == 1
    assert re.search(r"R001/probe-ws1: title: 'Something else\.'", capsys.readouterr().out)


def test_a_selection_is_checked_against_the_cases_that_it_has(tmp_path: Path) -> None:
    """The other cases of the suites do not count as a difference."""
    mini_suite.write(tmp_path)
    where = ["--suites", mini_suite.PACKAGE, "--output", str(tmp_path / "written.json")]

    with mini_suite.importable(tmp_path):
        assert main(["--write", "quick", "--only", "R001/probe-ws2", "--not-certifying", *where]) == 0
        assert main(["--check", "quick", *where]) == 0


def test_an_error_of_the_command_has_its_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing profile is a usage error."""
    assert main(["--check", "none", "--suites", "fsdp_conformance.report"]) == 2
    assert "profile must be one of" in capsys.readouterr().err
