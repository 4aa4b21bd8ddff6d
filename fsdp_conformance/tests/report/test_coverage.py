"""The table of the whole contract."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_conformance import contract
from fsdp_conformance.contract.profile import load_profile, profile_of
from fsdp_conformance.errors import UsageError
from fsdp_conformance.report.coverage import Coverage, Row, Seen, coverage, markdown
from fsdp_conformance.report.tally import Part, Shown, Tally, digest_of
from fsdp_conformance.tests.cli.cli_runs import answered
from fsdp_conformance.tests.report import test_tally
from fsdp_conformance.tests.report.evidence import a_case
from fsdp_conformance.verdict import Verdict

PROFILE = profile_of(
    "some",
    [
        a_case(),
        a_case(requirements=("R001", "R003"), world_size=4, id="R001/probe-ws4"),
        a_case(requirements=("R117",), needs=("hsdp",)),
    ],
)
CONTRACT = replace(
    contract.load(), requirements={name: contract.load()[name] for name in ("R001", "R003", "R117", "R131")}
)


def shown(verdict: Verdict, case: str, *failed: str) -> Shown:
    """The result of a run of the current case."""
    return Shown(verdict=verdict, digest=digest_of(PROFILE.by_id[case]), failed=failed)


def an_engine(name: str = "one", cases: Mapping[str, Shown] | None = None) -> Tally:
    """An engine's tally, with these cases."""
    return Tally(
        name=name, version="1", adapter="ada9", torch="2.13.0", device="cpu", suite="5u17e", date="2026-11-22",
        declared=("zero3",), declines_on={}, runs=(), cases=dict(cases or {}),
    )  # fmt: skip


def a_table(*engines: Tally, **changes: object) -> Coverage:
    """Of the profile above."""
    declared = {
        "hybrid": lambda device: frozenset({"hsdp"} if device == "cpu" else ()),
        "plain": lambda device: frozenset(),
    }
    given = {"contract": CONTRACT, "excused": {"R131": "There is no case yet."}, **changes}
    return coverage(engines, PROFILE.entries, declared, **given)  # type: ignore[arg-type]


def row(table: Coverage, requirement: str) -> Row:
    """The row of a requirement."""
    (only,) = (row for row in table.rows if row.requirement.id == requirement)
    return only


def texts(table: Coverage, requirement: str) -> list[str]:
    """Its cells."""
    return [cell.text() for cell in row(table, requirement).cells]


def test_a_row_counts_cases_known_wrong_engines_and_adapters() -> None:
    """Of every requirement that a case binds; an adapter counts if it can run at least one of them."""
    table = a_table()

    assert [(each.requirement.id, each.cases, each.adapters, each.reason) for each in table.rows] == [
        ("R001", 2, ("hybrid", "plain"), ""),
        ("R003", 2, ("hybrid", "plain"), ""),
        ("R117", 1, ("hybrid",), ""),
        ("R131", 0, (), "There is no case yet."),
    ]
    assert row(table, "R003").wrong > row(table, "R131").wrong == 0
    assert table.problems == ()


def test_a_failure_counts_for_the_requirements_that_it_names() -> None:
    """A crash for the one that the case tests, as does a finding of a requirement that it does not bind."""
    cases = ("R001/probe-ws2", "R001/probe-ws4")
    failed = an_engine("a", {case: shown(Verdict.FAIL, case, "R003") for case in cases})
    crashed = an_engine("b", {case: shown(Verdict.CRASH, case) for case in cases})
    loud = an_engine("c", {case: shown(Verdict.FAIL, case, "R000") for case in cases})
    foretold = an_engine("d", {case: shown(Verdict.XFAIL, case, "R001", "R003") for case in cases})

    table = a_table(failed, crashed, loud, foretold)

    assert texts(table, "R001") == ["not judged", "✗ 2 of 2", "✗ 2 of 2", "✗ 2 of 2"]
    assert texts(table, "R003") == ["✗ 2 of 2", "not judged", "not judged", "✗ 2 of 2"]
    assert texts(table, "R117") == ["not run"] * 4
    assert texts(table, "R131") == [""] * 4


def test_a_verdict_on_a_case_that_has_changed_is_not_shown() -> None:
    """A verdict on a case that is gone is not shown either; both are counted."""
    case = "R001/probe-ws2"
    old = replace(shown(Verdict.PASS, case), digest="00000000")
    gone = shown(Verdict.PASS, case)

    table = a_table(
        an_engine(cases={case: old, "R001/gone-ws2": gone, "R117/probe-ws2": shown(Verdict.PASS, "R117/probe-ws2")})
    )

    assert (texts(table, "R001"), texts(table, "R117"), table.stale) == (["not run"], ["✓ 1"], ((2, 1),))


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (Seen(passed=3), "✓ 3"),
        (Seen(passed=2, declined=1), "✓ 2 of 3"),
        (Seen(passed=2, absent=1), "✓ 2 of 3"),
        (Seen(passed=2, failed=1, absent=1), "✗ 1 of 4"),
        (Seen(declined=2), "declined"),
        (Seen(declined=2, absent=1), "not run"),
        (Seen(declined=2, unjudged=1, absent=1), "not judged"),
        (Seen(), ""),
    ],
)
def test_a_cell(cell: Seen, text: str) -> None:
    """A failure is never hidden, and a tick without a fraction means all cases."""
    assert cell.text() == text


def test_rows_that_are_empty_without_a_reason_are_named() -> None:
    """Reasons that no longer hold are named too, and so are cases that nothing has shown to be able to fail."""
    assert [text.partition(" ")[0] for text in a_table(excused={}).problems] == ["R131"]
    stale = a_table(excused={"R131": "None yet.", "R001": "None yet."}).problems
    assert stale == ("R001 (Losses equal DDP's) has 2 cases for 2 adapters, and a reason why it has none",)
    alone = coverage([], PROFILE.entries, {}, contract=CONTRACT, excused={"R131": "None yet.", "R117": "No."})
    assert [text.partition(" ")[0] for text in alone.problems] == ["R001", "R003"]
    unkilled = coverage(
        [], profile_of("some", [a_case(requirements=("R131",))]).entries, {"plain": lambda device: frozenset()},
        contract=replace(CONTRACT, requirements={"R131": CONTRACT["R131"]}), excused={},
    )  # fmt: skip
    (problem,) = unkilled.problems
    assert problem.startswith("R131 (Buffer semantics are documented, and")
    assert problem.endswith("has 1 cases, but no known-wrong engine names it")


def test_two_columns_of_one_engine_are_refused() -> None:
    """A reader could not tell them apart."""
    with pytest.raises(UsageError, match="each engine must have one tally, got one, one"):
        a_table(an_engine(), an_engine())


def test_the_page_has_a_table_for_each_chapter() -> None:
    """Each table has the engines that ran something of the chapter."""
    case = "R001/probe-ws2"
    text = markdown(a_table(an_engine(cases={case: shown(Verdict.PASS, case)}), an_engine("idle")))

    assert "| engine | one | idle |\n|---|---|---|\n| version | 1 | 1 |" in text
    assert "| cases not run, or changed since | 2 | 3 |" in text
    assert "## A. Numerical parity with DDP\n\n| requirement | cases | known wrong | adapters | one |\n" in text
    assert "| R001 Losses equal DDP's | 2 |" in text
    assert "| 2 of 2 | ✓ 1 of 2 |" in text
    assert "Buffer semantics are documented, and the reference matches them. There is no case yet. |  |  |  |\n" in text
    assert (
        "## N. Unused parameters and rank-divergent graphs\n\n| requirement | cases | known wrong | adapters |\n"
        in text
    )


@pytest.mark.slow
def test_runs_of_components_have_a_separate_table() -> None:
    """Each engine misses only cases of the profiles that it ran."""

    def ran(name: str, *profiles: str) -> Tally:
        runs = tuple(Part(profile=profile, words="NOT CERTIFIED", seconds=1.0) for profile in profiles)
        return replace(an_engine(name), runs=runs)

    engines = [ran("whole", "core-2026.11"), ran("part", "components-2026.11")]
    both = ran("both", "core-2026.11", "components-2026.11")
    sizes = [len(load_profile(name).entries) for name in ("core", "components", "full")]
    table = coverage([*engines, both], load_profile("full").entries, {})
    ran_table, components, *_ = markdown(table).split("\n\n### Components\n\n")

    assert [new for new, _ in table.stale] == sizes
    assert ran_table.splitlines()[0] == "| engine | whole | both |"
    assert components.splitlines()[0] == "| engine | part |"
    assert "### Components" not in markdown(coverage(engines[:1], PROFILE.entries, {}, excused={}))


def test_the_command_shows_runs_beside_the_contract(tmp_path: Path) -> None:
    """Each requirement with a case; a run of a private profile is refused, because no other run has its cases."""
    own = answered("scoreboard", "--coverage", str(test_tally.ran(tmp_path / "own").run.path))
    sample = load_profile("sample")
    path = str(test_tally.ran(tmp_path / "sample", cases=tuple(sample.by_id), profile=sample).run.path)

    text, data = (answered("scoreboard", "--coverage", path, *more) for more in ((), ("--json",)))

    assert (own.status, "give its file with --profile" in own.err) == (2, True)
    assert (text.status, text.out.splitlines()[0]) == (0, "| engine | one |")
    table = json.loads(data.out)
    entry = sample.entries[0]
    assert table["requirements"].keys() == contract.load().requirements.keys()
    assert table["requirements"][entry.primary]["shown"]["one"].startswith("✓")
    assert table["requirements"]["R131"]["reason"] == contract.uncovered()["R131"]
