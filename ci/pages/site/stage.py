"""The folder that the generator reads: the pages of docs/, the pages made of stored verdicts, and the settings."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from finding_scripts import read_script, scripts

from fsdp_conformance.contract import CHAPTERS, Level
from fsdp_conformance.report.coverage import Row
from pages import scoreboard
from pages.blocks import ROOT, Block, blocks_of, pages, text_of
from pages.site import history, prose, render
from pages.site.results import Results, known_wrong, reason_without_case, results

#: Pages of docs/ that the site has in another form.
_REPLACED = ("docs/index.md", "docs/scoreboard.md", "docs/requirements.md")

_GROUP = re.compile(r"^\*\*(.+)\*\*\n\n((?:- .*\n)+)", re.MULTILINE)
_PAGE = re.compile(r"^- \[(.+?)\]\((.+?\.md)\)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way into the suite, on the landing page."""

    id: str
    title: str
    page: str
    text: str

    @property
    def block(self) -> Block:
        """The first console block of the page that shows a finding, which `ci/docs` runs."""
        return next(
            block for block in blocks_of(f"docs/{self.page}.md") if block.language == "console" and "✗" in block.text
        )


_WAYS = (
    Way(
        id="judge",
        title="Judge an engine",
        page="tutorial",
        text="Write an adapter of twelve lines, and run the cases. The report leads from a failure to the faulty line.",
    ),
    Way(
        id="check",
        title="Check your own training",
        page="own-training",
        text="Your script runs sharded and unsharded, as it is. The first tensor that differs is the finding, with its "
        "line, and with whose fault it is.",
    ),
    Way(
        id="sanitize",
        title="Sanitize a script",
        page="sanitize",
        text="Find races between streams, mismatched collectives and uninitialized memory, on a simulated accelerator.",
    ),
)


def write(folder: Path) -> int:
    """Write the settings and all pages into an empty folder. Returns the number of pages."""
    docs = folder / "docs"
    count = 0
    for path, text in all_pages():
        file = docs / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        count += 1
    shutil.copytree(render.HERE / "assets", docs / "assets")
    settings = (render.HERE / "mkdocs.yml").read_text(encoding="utf-8")
    (folder / "mkdocs.yml").write_text(f"{settings}nav: {json.dumps(navigation())}\n", encoding="utf-8")
    return count


def all_pages() -> Iterator[tuple[str, str]]:
    """Path and text of every page."""
    everything = results()
    index, linked = _from_docs("docs/index.md")
    yield "index.md", _landing(everything, index)
    sources = {str(path.relative_to(ROOT)) for path in scripts()} | linked
    for page in pages():
        if page.startswith("docs/") and page not in _REPLACED:
            text, linked = _from_docs(page)
            sources |= linked
            yield page.removeprefix("docs/"), text
    yield "scoreboard.md", _scoreboard(everything)
    yield "requirements.md", _requirements(everything)
    timelines = history.timelines()
    for place, engine in enumerate(everything.engines):
        yield f"engines/{engine.name}.md", _engine(everything, place, timelines[engine.name])
    for row in everything.rows:
        yield f"requirements/{row.requirement.id.lower()}.md", _requirement(everything, row)
    for path in sorted(sources):
        yield f"source/{path}.md", _source(everything, path)
    yield (
        "history.md",
        render.page(
            "history.md",
            timelines=timelines,
            complete=history.is_complete(),
            defects=history.defects_by_torch(),
            versions=history.TORCH,
            up="",
        ),
    )


def navigation() -> list[dict[str, object]]:
    """The groups of docs/index.md, and the scoreboard with its pages."""
    replaced = {PurePosixPath(page).name for page in _REPLACED}
    groups: list[dict[str, object]] = [
        {title: [{name: page} for name, page in _PAGE.findall(members) if page not in replaced and "/" not in page]}
        for title, members in _GROUP.findall(text_of("docs/index.md"))
    ]
    board: list[dict[str, object]] = [
        {"Scoreboard": "scoreboard.md"},
        {"Requirements": "requirements.md"},
        {"Over time": "history.md"},
        {"Engines": [{engine.name: f"engines/{engine.name}.md"} for engine in results().engines]},
    ]
    return [{"Home": "index.md"}, *groups, {"Scoreboard": board}]


def _from_docs(page: str) -> tuple[str, set[str]]:
    """The text of a page of docs/, and the files of the checkout that it links to."""
    linked: set[str] = set()

    def source_page(path: str) -> str:
        linked.add(path)
        return f"source/{path}.md"

    return prose.converted(text_of(page), source_page), linked


def _landing(everything: Results, index: str) -> str:
    failure = next(block for block in blocks_of("README.md") if block.language == "console" and "✗" in block.text)
    contents = "".join(f"**{title}**\n\n{members}\n" for title, members in _GROUP.findall(index))
    return render.page(
        "landing.md",
        results=everything,
        requirements=len(everything.rows),
        scripts=len(everything.scripts()),
        failure=failure,
        ways=_WAYS,
        contents=render.markdown(contents),
    )


def _scoreboard(everything: Results) -> str:
    return render.page("scoreboard.md", results=everything, levels=[level.word for level in Level])


def _requirements(everything: Results) -> str:
    levels = Counter(row.requirement.level.word for row in everything.rows)
    return render.page(
        "requirements.md",
        results=everything,
        levels=", ".join(f"{number} {level}" for level, number in levels.items()),
    )


def _engine(everything: Results, place: int, timeline: list[history.Stored]) -> str:
    engine = everything.engines[place]
    return render.page(
        "engine.md",
        results=everything,
        engine=engine,
        verdicts=list(dict.fromkeys(run.words for run in engine.runs)),
        profiles=list(dict.fromkeys(run.profile for run in engine.runs)),
        seconds=sum(run.seconds for run in engine.runs),
        stale=scoreboard.table().stale[place][0],
        failed=everything.of_engine(engine.name),
        column=everything.column(engine.name),
        timeline=timeline,
        up="../",
    )


def _requirement(everything: Results, row: Row) -> str:
    name = row.requirement.id
    own, others = everything.cases_of(name)
    return render.page(
        "requirement.md",
        results=everything,
        requirement=row.requirement,
        chapter=CHAPTERS[row.requirement.chapter],
        reason=reason_without_case(name),
        failed=everything.of_requirement(name),
        engines=list(zip(everything.engines, row.cells, strict=True)),
        adapters=(len(row.adapters), len(scoreboard.table().adapters)),
        own=own,
        others=others,
        wrong=known_wrong(name),
    )


def _source(everything: Results, path: str) -> str:
    file = ROOT / path
    text = file.read_text(encoding="utf-8")
    # Pages may link to any file: a changelog has no docstring, so its text is shown.
    is_python = path.endswith(".py") or (text.startswith("#!") and "python" in text.partition("\n")[0])
    description = (ast.get_docstring(ast.parse(text)) if is_python else None) or ""
    is_finding = path.startswith("ci/findings/")
    return render.page(
        "source.md",
        path=path,
        text=text.rstrip("\n"),
        language="python" if is_python else file.suffix.removeprefix(".") or "text",
        sentence=description.partition("\n\n")[0],
        script=read_script(file) if is_finding else None,
        defects=everything.scripts().get(path, []),
        up="../" * (path.count("/") + 1),
    )
