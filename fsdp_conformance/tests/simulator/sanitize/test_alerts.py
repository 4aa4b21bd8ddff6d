"""Findings of `sanitize` for other programs: SARIF files and annotations of a GitHub workflow."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.cli.alerts import sarif, workflow_commands
from fsdp_conformance.simulator.checker.hazard import HazardKind, Site
from fsdp_conformance.simulator.collectives.disagreement import Disagreement, DisagreementKind, Party
from fsdp_conformance.simulator.frames import Frame
from fsdp_conformance.simulator.sanitize import alerts
from fsdp_conformance.simulator.sanitize.alerts import alerts_of
from fsdp_conformance.simulator.sanitize.report import ExitStatus
from fsdp_conformance.tests.simulator.sanitize.test_report import access, hazard, observed, printed, report


def differing(directory: Path | str = "/src") -> Disagreement:
    """Two ranks that reduce in different ways."""
    parties = [
        Party(rank=rank, words=f"all_reduce({word}, 4 float32) on the default group", place=place)
        for rank, word, place in (
            (0, "SUM", Frame(file=f"{directory}/train.py", line=10, function="step")),
            (1, "MAX", Frame(file=f"{directory}/train.py", line=12, function="step")),
        )
    ]
    return Disagreement.between(DisagreementKind.DIFFERENT, parties, "reductions")


def with_collectives(*disagreements: Disagreement) -> dict[str, Any]:
    """The report of a rank that compared collectives."""
    return {**observed(), "collectives": {"found": [asdict(one) for one in disagreements], "checked": 5}}


class TestReport:
    """Findings about collectives in the report."""

    def test_both_ranks_notice_and_it_is_one_finding(self) -> None:
        """The report has both calls with their lines, and advice; the status is 1."""
        merged = report(with_collectives(differing()), with_collectives(differing()))
        text = printed(merged)

        assert ExitStatus.FINDINGS == merged.status
        assert text.count("✗ collectives") == 1
        assert "rank 0: all_reduce(SUM, 4 float32) on the default group\n      /src/train.py:10 in step" in text
        assert "rank 1: all_reduce(MAX, 4 float32) on the default group\n      /src/train.py:12 in step" in text
        assert "to do: all ranks of a group must make the same calls" in text
        assert text.endswith("1 finding about collectives of ranks 0, 1 [exit 1]")

    def test_with_a_hazard(self) -> None:
        """The verdict counts both."""
        rank = {**with_collectives(differing()), "hazards": [hazard().to_json()]}

        assert report(rank, observed()).verdict() == (
            "1 hazard in 1 place, seen once on rank 0; 1 finding about collectives of ranks 0, 1 [exit 1]"
        )

    def test_a_clean_run_says_how_many_were_compared(self) -> None:
        """A number that is too small shows that little was checked, as for accesses."""
        merged = report(with_collectives(), with_collectives())

        assert (
            merged.verdict()
            == "clean: 200 accesses on 2 streams of 2 ranks, 10 collectives compared, 0 hazards [exit 0]"
        )

    def test_the_file_has_them(self) -> None:
        """The file has them as data and as text."""
        (one,) = report(with_collectives(differing()), observed()).to_json()["collectives"]

        assert (one["kind"], one["what"], one["ranks"]) == ("different_collectives", "reductions", [0, 1])
        assert one["parties"][1]["place"]["line"] == 12
        assert one["sentence"] in one["text"].replace("\n  ", " ")


class TestSarif:
    """Findings as code-scanning alerts."""

    def test_a_finding_is_an_alert_at_its_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The line to change first, the other one as related; every rule has a sentence."""
        monkeypatch.chdir(tmp_path)
        (tmp_path / "train.py").touch()
        merged = report({**with_collectives(differing(tmp_path)), "hazards": [hazard().to_json()]}, observed())
        content = json.loads(sarif(alerts_of(merged), merged))
        (run,) = content["runs"]

        assert content["version"] == "2.1.0"
        assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["different_collectives", "read_after_write"]
        assert all(rule["shortDescription"]["text"].endswith(".") for rule in run["tool"]["driver"]["rules"])
        assert [
            (one["ruleId"], self.lines(one["locations"]), self.lines(one["relatedLocations"])) for one in run["results"]
        ] == [
            ("read_after_write", [("train.py", 12)], [("train.py", 10)]),
            ("different_collectives", [("train.py", 10)], [("train.py", 12)]),
        ]

    def test_freed_memory_is_placed_where_it_is_freed(self) -> None:
        """That is the line to change."""
        freed = Site(op="free", stack=(Frame(file="train.py", line=20, function="main"),))
        merged = report(observed(replace(hazard(), kind=HazardKind.REUSE_IN_FLIGHT, freed=freed)), observed())
        (result,) = json.loads(sarif(alerts_of(merged), merged))["runs"][0]["results"]

        assert self.lines(result["locations"]) == [("train.py", 20)]

    def test_an_alert_keeps_its_identity(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Lines that move do not make it another alert; another kind does."""
        monkeypatch.chdir(tmp_path)

        def identity(one: Any) -> str:
            merged = report(observed(one), observed())
            (result,) = json.loads(sarif(alerts_of(merged), merged))["runs"][0]["results"]
            return str(result["partialFingerprints"]["fsdpConformance/v1"])

        assert identity(hazard()) == identity(hazard(line=99))
        assert identity(hazard()) != identity(replace(hazard(), kind=HazardKind.WRITE_AFTER_WRITE))

    def test_lines_outside_the_repository_have_no_place(self) -> None:
        """The alert is there all the same."""
        merged = report(with_collectives(differing("/elsewhere")), observed())
        (result,) = json.loads(sarif(alerts_of(merged), merged))["runs"][0]["results"]

        assert "locations" not in result

    def test_every_kind_has_a_rule(self) -> None:
        """A kind that is added needs a sentence."""
        rules = {str(kind) for kind in alerts.RULES}

        assert rules == {str(kind) for kind in (*HazardKind, *DisagreementKind)}

    def test_a_clean_run_is_an_empty_file(self) -> None:
        """An empty file makes code hosts close the alerts of the previous run."""
        merged = report(observed(), observed())

        assert json.loads(sarif(alerts_of(merged), merged))["runs"][0]["results"] == []

    def lines(self, locations: list[dict[str, Any]]) -> list[tuple[str, int]]:
        """Files and lines."""
        physical = [one["physicalLocation"] for one in locations]
        return [(one["artifactLocation"]["uri"], one["region"]["startLine"]) for one in physical]


def test_annotations_are_workflow_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each finding is one line; newlines and percent signs are escaped."""
    monkeypatch.chdir(tmp_path)
    odd = replace(hazard(), now=access("read", "aten::100%", 12, device=0, stream=0))
    merged = report({**observed(odd), "collectives": {"found": [asdict(differing())], "checked": 1}}, observed())
    first, second = workflow_commands(alerts_of(merged))

    assert first.startswith("::error file=train.py,line=12,title=read_after_write::read after write on sim:0: ")
    assert "aten::100%25" in first
    assert "%0A" in first
    assert "\n" not in first
    assert second.startswith("::error title=different_collectives::")
