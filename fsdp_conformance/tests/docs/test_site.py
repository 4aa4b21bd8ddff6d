"""The site: its pages are made from stored verdicts, and its checks notice what they are there for."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fsdp_conformance.report.coverage import Seen
from fsdp_conformance.report.tally import Shown, Tally
from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import ROOT
from fsdp_conformance.verdict import Verdict
from pages import scoreboard
from pages.site import __main__ as command
from pages.site import built, cells, history, prose, stage
from pages.site.results import results

pytestmark = checkout.required

#: ci/site says with this status that the generator cannot be installed here.
NOT_INSTALLABLE = 3


@pytest.mark.parametrize(
    ("seen", "kind", "label"),
    [
        (Seen(passed=3), cells.PASS, "✓3"),
        (Seen(passed=3, absent=1), cells.SOME, "✓3"),
        (Seen(passed=3, failed=2, declined=1), cells.FAIL, "✗2"),
        (Seen(declined=2), cells.DECLINED, "-"),
        (Seen(declined=2, absent=1), cells.ABSENT, "·"),
        (Seen(declined=2, unjudged=1), cells.UNJUDGED, "?"),
        (Seen(), cells.ABSENT, "·"),
    ],
)
def test_a_cell_has_one_kind(seen: Seen, kind: cells.Kind, label: str) -> None:
    """The worst that its cases have shown, with a mark that says the same as the colour."""
    assert cells.kind_of(seen) is kind
    assert cells.label(seen) == label


def test_every_kind_has_a_colour() -> None:
    """The style names the class of each kind."""
    style = (ROOT / "ci/pages/site/assets/site.css").read_text(encoding="utf-8")

    assert [kind.name for kind in cells.KINDS if f".{kind.name}" not in style] == []


def test_pages_are_converted_for_the_generator() -> None:
    """Comments go, list items get four spaces and blank lines, and links to files lead to pages with their text."""
    block = "   <!-- parsed: it is an example -->\n   ```console\n   $ a\n   ```\n"
    text = f"Lines:\n1. First\n\n{block}2. [x](../ci/docs#a)\n"

    assert prose.converted(text, lambda path: f"source/{path}.md") == (
        "Lines:\n\n1. First\n\n    ```text\n    $ a\n    ```\n\n2. [x](source/ci/docs.md#a)\n"
    )


def test_what_is_wrong_with_a_page_is_reported(tmp_path: Path) -> None:
    """Links to pages and anchors that are not there, and everything that would be loaded from the network."""
    (tmp_path / "a.css").write_text('@import "https://fonts.example/x.css"; b { background: url(//cdn.example/y.png) }')
    (tmp_path / "b.html").write_text('<p id="there"></p>')
    (tmp_path / "a.html").write_text(
        '<link rel="stylesheet" href="a.css"><link rel="canonical" href="https://example.org/">'
        '<script src="https://cdn.example/x.js"></script><img src="absent.png"><img src="data:image/png;base64,aa">'
        '<a href="b.html#there">1</a><a href="b.html#gone">2</a><a href="c.html">3</a><a href="https://example.org">4</a>'
    )

    assert built.problems(tmp_path) == [
        "a.html loads https://cdn.example/x.js: expected a file of the site",
        "a.html loads absent.png: there is no such file",
        "a.html links to b.html#gone: the page has no such anchor",
        "a.html links to c.html: there is no such page",
        "a.css loads https://fonts.example/x.css: expected a file of the site",
        "a.css loads //cdn.example/y.png: expected a file of the site",
    ]


def test_versions_lie_next_to_each_other(tmp_path: Path) -> None:
    """Each build adds its version; the newest one is where a reader arrives, by number and not by alphabet."""
    for version in ("2026.9.0", "2026.11.0", "2026.10.1"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "index.html").touch()
        command.list_version(tmp_path, version)

    listed = json.loads((tmp_path / command.VERSIONS).read_text(encoding="utf-8"))
    assert [(each["version"], each["aliases"]) for each in listed] == [
        ("2026.11.0", ["latest"]),
        ("2026.10.1", []),
        ("2026.9.0", []),
    ]
    assert "url=2026.11.0/index.html" in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_runs_are_compared_on_the_cases_that_both_have() -> None:
    """A case that has changed, or that only one of them has, is no difference between two runs."""
    one = scoreboard.kept()[0]

    def ran(version: str, **cases: str) -> Tally:
        shown = {
            case: Shown(verdict=Verdict(words.split()[0]), digest=words.split()[1]) for case, words in cases.items()
        }
        return replace(one, version=version, cases=shown)

    before = ran("1", a="PASS 1", b="PASS 1", c="FAIL 1", d="PASS 1")
    first, second = history.compared([before, ran("2", a="PASS 1", b="FAIL 1", c="PASS 2", e="FAIL 1")])

    assert (first.compared, first.changes) == (0, ())
    assert (second.compared, second.changes) == (
        2,
        (history.Change(case="b", before=Verdict.PASS, after=Verdict.FAIL),),
    )
    assert dict(second.counts) == {"passed": 2, "failed": 2}


@pytest.mark.nightly
@pytest.mark.slow
def test_engines_and_requirements_have_pages() -> None:
    """Each has one, and a failing cell of the scoreboard leads to the place on the engine's page that says why."""
    everything = results()
    texts = dict(stage.all_pages())

    assert {f"engines/{engine.name}.md" for engine in everything.engines} <= texts.keys()
    assert {f"requirements/{row.requirement.id.lower()}.md" for row in everything.rows} <= texts.keys()
    assert everything.failed
    for each in everything.failed:
        anchor = each.requirement.id.lower()
        assert f'href="engines/{each.engine}.html#{anchor}"' in texts["scoreboard.md"]
        assert f'<li id="{anchor}">' in texts[f"engines/{each.engine}.md"]
        assert f'href="../engines/{each.engine}.html#{anchor}"' in texts[f"requirements/{anchor}.md"]
    for script, defects in everything.scripts().items():
        assert all(f'href="../source/{script}.html"' in texts[f"engines/{defect.engine}.md"] for defect in defects)
        assert f"source/{script}.md" in texts


class _Rows(HTMLParser):
    """Counts the rows of requirements and their cells."""

    rows = cells = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.rows += tag == "tr" and "data-level" in dict(attrs)
        self.cells += tag == "td"


@pytest.mark.nightly
def test_the_site_can_be_built(tmp_path: Path) -> None:
    """Without a warning of the generator, a broken link or a load from the network."""
    done = subprocess.run(
        [ROOT / "ci/site", "--output", tmp_path], capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode == NOT_INSTALLABLE:
        pytest.skip(f"the generator cannot be installed here: {done.stderr[-300:]}")

    assert done.returncode == 0, done.stdout + done.stderr
    (version,) = json.loads((tmp_path / command.VERSIONS).read_text(encoding="utf-8"))
    table = _Rows()
    table.feed((tmp_path / version["version"] / "scoreboard.html").read_text(encoding="utf-8"))
    everything = results()
    assert (table.rows, table.cells) == (len(everything.rows), len(everything.rows) * len(everything.engines))
