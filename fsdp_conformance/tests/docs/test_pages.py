"""The README and docs/: links lead somewhere, tables are complete, commands parse, and figures are today's."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import shlex
import textwrap
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from fsdp_conformance import contract, docs, errors
from fsdp_conformance.adapters import registry
from fsdp_conformance.adapters.absent import ENGINES
from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.adapters.torch_like import TorchAdapter
from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.cli import arguments
from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.driver.smoke import CHECKS
from fsdp_conformance.plan import Plan
from fsdp_conformance.report import expectations
from fsdp_conformance.run_settings import OPTIONS
from fsdp_conformance.status import Status
from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import ROOT
from fsdp_conformance.verdict import Verdict
from pages.blocks import WORDS, blocks_of, pages, prose_of, text_of
from pages.figures import with_figures
from pages.generated import GENERATED, with_tables
from pages.transcript import MODULES, is_run

pytestmark = checkout.required

#: How many blocks of a page nothing here can run. A block that joins them is a change of this table.
NOT_RUN = {
    "README.md": 1,
    "docs/engine.md": 1,
    "docs/extending.md": 1,
    "docs/gpus-and-clusters.md": 6,
    "docs/how-it-works.md": 1,
    "docs/quickstart.md": 1,
    "docs/reading-a-verdict.md": 3,
    "docs/running.md": 1,
    "docs/sanitize.md": 1,
    "docs/simulated-accelerator.md": 1,
    "docs/simulated-cuda.md": 2,
    "docs/simulated-ranks.md": 3,
}

#: What a block of a language must be, if it is not run as it stands.
WORDS_OF = {
    "console": WORDS,
    "diff": ("change",),
    "python": ("file", "adapter", "script", "fragment", "from", "inside", "parsed"),
    "text": ("file", "output", "from", "smoke", "not run"),
    "toml": (),
    "yaml": ("inside", "parsed", "not run"),
    "bash": ("parsed",),
}

#: Programs whose command lines only a comment `not run` excuses.
FOREIGN = ("pip", "python", "pytest", "torchrun", "sbatch", "kubectl")

MAX_README_LINES = 180
#: What the README promises of its adapter.
MAX_ADAPTER_LINES = 12


def section(page: str, title: str) -> str:
    """The part of a page under a heading, whatever its level."""
    match = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,6}} |\Z)", text_of(page), re.DOTALL | re.MULTILINE)
    assert match is not None, f"{page} has no section {title!r}"
    return match[2]


def rows(text: str) -> list[list[str]]:
    """The cells of the tables in a text, header and ruler left out."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not re.match(r"^\|[ :-]*-", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def anchors(page: str) -> set[str]:
    """Where a link into a page can go: the headings, as GitHub names them, and explicit anchors."""
    text = text_of(page)
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


def test_running_lists_the_options_that_pytest_has_under_longer_names() -> None:
    """All of them, and no others."""
    listed = re.findall(r"`(--conformance-[\w-]+)`", section("docs/running.md", "Under pytest"))

    assert Counter(listed) == Counter(option.pytest_flag for option in OPTIONS.values() if not option.same_in_pytest)


@pytest.mark.parametrize("page", pages())
def test_every_link_leads_somewhere(page: str) -> None:
    """Relative links name pages and files of the checkout, and anchors that are there."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists() or (anchor and anchor not in anchors(file.resolve().relative_to(ROOT).as_posix())):
            broken.append(target)

    assert broken == []


@pytest.mark.parametrize("page", pages())
def test_every_path_exists(page: str) -> None:
    """Paths in backquotes that belong to the checkout are there."""
    paths = re.findall(r"`((?:ci|docs|suites|fixtures|fsdp_conformance)/[\w./-]*)", text_of(page))

    assert sorted({name for name in paths if not (ROOT / name).exists()}) == []


def test_every_page_is_in_the_index() -> None:
    """The index links to every page, and the README to the index."""
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", text_of("docs/index.md")))

    assert {page.removeprefix("docs/") for page in pages()} - {"README.md", "index.md"} - linked == set()
    assert "(docs/index.md)" in text_of("README.md")


@pytest.mark.parametrize("page", pages())
def test_every_block_says_how_it_is_checked(page: str) -> None:
    """Console blocks are run unless a comment says otherwise; other blocks need one, with a reason."""
    unsaid = [
        f"{block.place}: {block.language} {block.word}"
        for block in blocks_of(page)
        if block.language not in WORDS_OF
        or (block.word and block.word not in WORDS_OF[block.language])
        or (not block.word and block.language not in ("console", "toml"))
        or (block.word in ("not run", "parsed") and len(block.said.split()) < 3)
    ]

    assert unsaid == []


def test_blocks_that_nothing_runs_are_counted() -> None:
    """Those that need a GPU, two hosts, a cluster or another environment, and no others."""
    counted = Counter(block.page for page in pages() for block in blocks_of(page) if block.word == "not run")

    assert dict(counted) == NOT_RUN


@pytest.mark.parametrize("page", pages())
def test_every_command_can_be_parsed(page: str) -> None:
    """Each command line in a block is one that the command takes, or a script that is there."""
    for block in blocks_of(page):
        if block.language != "console":
            continue
        for command in block.commands():
            program, *rest = command.words()
            if program == "fsdp-conformance":
                assert arguments.parse(rest).command == rest[0]
            elif program.startswith("ci/"):
                assert (ROOT / program).is_file(), f"{block.place}: {program}"
            elif not (program in MODULES and is_run(block)):
                assert program in FOREIGN, f"{block.place}: {program}"
                assert block.word == "not run", f"{block.place}: {program}"


@pytest.mark.parametrize("page", pages())
def test_every_command_in_a_script_can_be_parsed(page: str) -> None:
    """A shell or a workflow that a page shows calls the command as it is."""
    for block in blocks_of(page):
        if block.word != "parsed" or block.language not in ("bash", "yaml"):
            continue
        lines = re.findall(
            r"^(?:- )?fsdp-conformance (.*)$", textwrap.dedent(block.text).replace("    ", ""), re.MULTILINE
        )
        for line in lines:
            words = shlex.split(line.partition(" || ")[0])
            assert arguments.parse(words).command == words[0], block.place
        assert lines or "uses: OWNER/" in block.text, block.place


def test_the_workflow_for_others_has_the_inputs_of_the_page() -> None:
    """Those of the table, in order and with their defaults, and those of the example."""
    page, workflow = "docs/continuous-integration.md", text_of(".github/workflows/conformance.yml")
    inputs = re.findall(
        r"^ {6}([\w-]+):\n {8}description: .*\n {8}required: (\w+)\n {8}type: string\n(?: {8}default: (.*)\n)?",
        workflow, re.MULTILINE,
    )  # fmt: skip
    defaults = {row[0].strip("`"): row[1].strip("`") for row in rows(section(page, "GitHub"))[1:]}
    (called,) = [block.text for block in blocks_of(page) if "uses: OWNER/" in block.text]
    given = re.findall(r"^      ([\w-]+):", called.partition("with:")[2], re.MULTILINE)
    words = ("", "the newest", "none")

    assert list(defaults) == [name for name, _, _ in inputs]
    assert [name for name, required, _ in inputs if required == "true"] == ["adapter", "suite"]
    for name, _, default in inputs:
        plain = default.strip('"')
        assert defaults[name] == plain or (not plain and defaults[name] in words), name
    assert given
    assert set(given) <= set(defaults)


def test_the_commands_that_print_json_are_listed() -> None:
    """All that have the flag, and no other; that of `sanitize` names a file."""
    sentence = section("docs/continuous-integration.md", "What a program reads").partition(". ")[0]
    commands = [
        name
        for action in arguments.parser()._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, command in action.choices.items()
        if any("--json" in option.option_strings and option.nargs == 0 for option in command._actions)
    ]

    assert set(re.findall(r"`([a-z]+)`", sentence)) == set(commands)


@pytest.mark.usefixtures("capsys")
@pytest.mark.parametrize("page", pages())
def test_every_command_in_the_text_can_be_parsed(page: str) -> None:
    """The same for `fsdp-conformance ...` in a sentence; a command may be named alone, without what it needs."""
    for line in re.findall(r"`fsdp-conformance ([a-z][^`]*)`", prose_of(page)):
        words = shlex.split(line)
        if words[1:] and "--help" not in words:
            assert arguments.parse(words).command == words[0]
        else:
            with pytest.raises(SystemExit) as ended:
                arguments.parse([*words, "--help"])
            assert ended.value.code == 0


@pytest.mark.parametrize("page", pages())
def test_what_is_quoted_twice_is_the_same(page: str) -> None:
    """A block `from` another page or `inside` a file has that one's lines."""
    for block in blocks_of(page):
        if block.word == "from":
            lines = {line.strip() for other in blocks_of(block.said) for line in other.text.splitlines()}
            missing = [line for line in block.text.splitlines() if line.strip() not in lines | {"..."}]
            assert missing == [], f"{block.place}: not on {block.said}"
        elif block.word == "inside":
            source = [line.strip() for line in text_of(block.said).splitlines()]
            quoted = [line.strip() for line in block.text.splitlines()]
            is_there = any(source[at : at + len(quoted)] == quoted for at in range(len(source)))
            assert is_there, f"{block.place}: not in {block.said}"


def test_python_that_is_not_run_compiles() -> None:
    """A block that needs more than a page can give is at least Python."""
    blocks = [block for page in pages() for block in blocks_of(page) if block.word == "parsed"]
    for block in blocks:
        if block.language == "python":
            compile(block.text, block.place, "exec")


def test_files_of_the_diagram_exist() -> None:
    """The page that says which file to open names files that are there: below the package, or in the checkout."""
    files = set(re.findall(r"[\w/]+/[\w/]*\.py|\w+\.py", text_of("docs/how-it-works.md")))

    assert {
        name for name in files if not (ROOT / "fsdp_conformance" / name).exists() and not (ROOT / name).exists()
    } == set()


def test_toml_blocks_are_what_the_package_reads(tmp_path: Path) -> None:
    """Each is a list of expectations, or names the group of entry points that the registry looks for."""
    blocks = [block.text for page in pages() for block in blocks_of(page) if block.language == "toml"]
    lists = [text for text in blocks if expectations.TABLE in tomllib.loads(text)]
    others = [tomllib.loads(text) for text in blocks if text not in lists]
    for text in lists:
        (tmp_path / expectations.NAME).write_text(text, encoding="utf-8")
        expectations.load_expectations(tmp_path / expectations.NAME)

    assert lists
    assert others
    assert all("fsdp_conformance.adapters" in one["project"]["entry-points"] for one in others)


@pytest.mark.parametrize("page", pages())
def test_what_is_generated_is_up_to_date(page: str) -> None:
    """Pages and tables say what the contract and the code say."""
    text = GENERATED[page]() if page in GENERATED else with_figures(with_tables(text_of(page)))

    assert text_of(page) == text, "run ci/docs --write --no-run"


def test_the_readme_is_short() -> None:
    """One can read all of it, and the adapter is as short as it says."""
    adapter = next(block for block in blocks_of("README.md") if "class MyFSDP" in block.text)

    assert len(text_of("README.md").splitlines()) <= MAX_README_LINES
    assert len([line for line in adapter.text.splitlines() if line.strip()]) <= MAX_ADAPTER_LINES


def test_every_verdict_is_explained() -> None:
    """The table of verdicts has each of the twelve."""
    explained = {row[0] for row in rows(section("docs/reading-a-verdict.md", "The verdicts"))}

    assert set(Verdict) - explained == set()


def test_the_exit_statuses_are_those_of_the_code() -> None:
    """Each status that the commands end with has a row, and no other."""
    carried = {
        value.exit_status
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.ConformanceError)
    }
    listed = {int(row[0]) for row in rows(section("docs/reading-a-verdict.md", "Exit statuses"))[1:]}
    of_sanitize = {int(row[0]) for row in rows(section("docs/sanitize.md", "Exit statuses"))[1:]}

    assert listed | {int(Status.SCRIPT_FAILED)} == of_sanitize == set(map(int, Status))
    assert carried <= listed


def test_reasons_against_a_certificate_are_those_of_the_code() -> None:
    """The module that gives the reasons contains the texts of the table, except for numbers and names."""
    source = (ROOT / "fsdp_conformance/report/certificate.py").read_text(encoding="utf-8")
    quoted = [
        words
        for row in rows(section("docs/reading-a-verdict.md", "Why a run is not certified"))[1:]
        for text in re.findall(r"`([^`]+)`", row[0])
        for words in re.split(r"\.\.\.|\bN\b|\bM\b|\bR\b|--case|sample|[A-Z_]+:", text)
        if len(words.strip(" )")) > 3
    ]

    assert len(quoted) > 5
    assert [words for words in quoted if words.strip(" )") not in source] == []


def test_every_field_of_the_plan_is_described() -> None:
    """One row per field, with capabilities that exist."""
    table = rows(section("docs/writing-an-adapter.md", "The plan"))[1:]
    fields = [re.findall(r"`(\w+)`", row[0])[0] for row in table]
    flags = {flag for row in table for flag in re.findall(r"`(\w+)`", row[3])} - {"cpu", "cuda"}

    assert fields == [field.name for field in dataclasses.fields(Plan)]
    assert flags <= CAPABILITIES.keys()
    # The flags that a plan can ask for, whatever its values.
    assert flags == set(re.findall(r'"(\w+)": ', inspect.getsource(Plan.capabilities))) | {
        *("zero1", "zero2", "zero3", "no_shard", "hsdp"),
        *("init_before", "init_after", "init_never"),
    }


def test_every_method_of_an_adapter_is_described() -> None:
    """Each public method and each class variable of the two base classes is on the page."""
    text = text_of("docs/writing-an-adapter.md")
    methods = set(re.findall(r"`(\w+)\(", text)) | {row[0].strip("`") for row in rows(section(
        "docs/writing-an-adapter.md", "Class variables"))}  # fmt: skip
    public = {
        name
        for base in (Adapter, TorchAdapter)
        for name, value in vars(base).items()
        if not name.startswith("_")
        and (callable(value) or isinstance(value, classmethod) or name in base.__annotations__)
    }

    assert public - methods - set(TorchAdapter.__annotations__) - {"capabilities", "optional"} == set()


def test_every_default_of_torch_adapters_is_described() -> None:
    """Each method of `TorchAdapter`, and each attribute that changes one, is in the table; no other."""
    text = section("docs/writing-an-adapter.md", "What `TorchAdapter` does by default")
    named = {name for row in rows(text)[1:] for name in re.findall(r"`(\w+)`", row[2])}
    hooks = {name for row in rows(text)[1:] for name in re.findall(r"`(\w+)\(", row[1])} & vars(TorchAdapter).keys()
    own = {name for name, value in vars(TorchAdapter).items() if not name.startswith("_") and inspect.isfunction(value)}

    assert own - named - hooks == set()
    assert [name for name in named - {"TorchCheckpoints"} if not hasattr(TorchAdapter, name)] == []


def test_what_orig_params_obliges_to_is_listed() -> None:
    """Each requirement with a case that needs the flag."""
    listed = section("docs/writing-an-adapter.md", "What declaring `orig_params` obliges an engine to")
    needing = {entry.primary for entry in load_profile("core").entries if "orig_params" in entry.needs}

    assert needing
    assert [name for name in needing if f"\n- [{name}]" not in listed] == []


def test_every_check_of_smoke_is_described() -> None:
    """A row for each, in order."""
    table = rows(section("docs/writing-an-adapter.md", "When smoke complains"))[1:]

    assert [row[0].split()[0] for row in table] == list(CHECKS)


def test_every_class_variable_is_described() -> None:
    """The page has every class variable with its default."""
    described = {row[0].strip("`") for row in rows(section("docs/writing-an-adapter.md", "Class variables"))[1:]}

    assert described == set(Adapter.__annotations__)


def test_messages_link_to_pages_that_exist() -> None:
    """Every place that a message names, and every requirement."""
    broken = [
        (page, anchor)
        for page, anchor in docs.LINKED
        if not (ROOT / f"docs/{page}.md").is_file() or (anchor and anchor not in anchors(f"docs/{page}.md"))
    ]
    requirements = anchors("docs/requirements.md")

    assert broken == []
    assert {name for name in contract.load().requirements if name.lower() not in requirements} == set()


def test_a_link_can_be_opened_from_here(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative to the working directory in a checkout, absolute elsewhere."""
    monkeypatch.chdir(ROOT)
    assert docs.see(docs.VERDICT) == "see docs/reading-a-verdict.md"
    assert docs.see(docs.requirement("R003")) == "see docs/requirements.md#r003"

    monkeypatch.chdir(str(tmp_path))
    assert docs.link("reading-a-verdict") == str(ROOT / "docs/reading-a-verdict.md")


def test_engines_without_adapter() -> None:
    """The table of docs/running.md says of each what its error message says, and none of them has an adapter."""
    rows = [f"| {engine.title} | {engine.tried} | {engine.seen} |" for engine in ENGINES.values()]

    assert [row for row in rows if row not in text_of("docs/running.md")] == []
    assert set(ENGINES) & set(registry.names()) == set()


def test_every_bundled_engine_is_listed() -> None:
    """The table of docs/running.md names each adapter of an engine that is an extra, by its name or its ending."""
    lines = [line for line in text_of("docs/running.md").splitlines() if line.startswith("| `")]
    others = [name for name in registry.names() if (ROOT / f"ci/constraints-{name.partition('-')[0]}.txt").exists()]

    for name in others:
        first, _, ending = name.rpartition("-")
        assert any(f"`{name}`" in line or (f"`{first}-" in line and f"`-{ending}`" in line) for line in lines), name
