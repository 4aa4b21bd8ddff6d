"""`init` writes files that work as they are, or nothing."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.cli import arguments
from fsdp_conformance.cli.command import main
from fsdp_conformance.cli.scaffold import OTHERS, TESTS, WORKFLOW, adapter_of, scaffold
from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.report.expectations import NAME as EXPECTATIONS
from fsdp_conformance.report.expectations import load_expectations
from fsdp_conformance.tests.cli.cli_runs import said

SPEC = "acme.adapter:AcmeFSDP"


@pytest.fixture(name="root")
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty git repository, as the working directory."""
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(root: Path) -> dict[str, str]:
    """Every file but git's, with its text."""
    files = (path for path in root.rglob("*") if path.is_file() and ".git" not in path.parts)
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in files}


def problems(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The lines on stderr, without program and command. Asserts status 2 and an empty stdout."""
    status = main(["init", *words])
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    return [line.removeprefix("fsdp-conformance: ").removesuffix(" [init]") for line in captured.err.splitlines()]


def test_every_file_is_written_and_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In an empty repository, with what to type next."""
    status = main(["init", "--adapter", SPEC])
    out = capsys.readouterr().out
    wrote = [line.split()[1] for line in out.splitlines() if line.startswith("wrote")]
    (smoke,) = [line.strip() for line in out.splitlines() if line.startswith("  fsdp-conformance")]

    assert status == 0
    assert sorted(wrote) == sorted(contents(root)) == sorted(["acme/__init__.py", "acme/adapter.py", *OTHERS])
    assert arguments.parse(smoke.split()[1:]).implementation == SPEC
    assert "cd " not in out
    assert [line for line in out.splitlines()[:-1] if len(line) > 80] == []


def test_the_texts_are_what_others_read(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Python, TOML without an entry, a test file of three lines, and a workflow whose command parses."""
    main(["init", "--adapter", SPEC])
    output, written = capsys.readouterr().out, contents(root)
    compile(written["acme/adapter.py"], "adapter.py", "exec")
    lines = [line for line in written[TESTS].splitlines() if line]
    run = " ".join(written[WORKFLOW].partition("fsdp-conformance run ")[2].partition("\n      - ")[0].split())
    parsed = arguments.parse(["run", *run.replace('"', "").split()])
    quick = len(load_profile("quick").entries)

    assert load_expectations(root / EXPECTATIONS) == ()
    assert "[[expect]]" in written[EXPECTATIONS]
    assert len(lines) == 2
    assert f'"{SPEC}"' in lines[1]
    assert (parsed.implementation, parsed.profile, parsed.expectations) == ("$ADAPTER", "$PROFILE", EXPECTATIONS)
    assert f'ADAPTER: "{SPEC}"' in written[WORKFLOW]
    assert f"path: {parsed.report_dir}\n" in written[WORKFLOW]
    assert "SUITE: ${{ vars.FSDP_CONFORMANCE }}" in written[WORKFLOW]
    assert "run the profile `quick`" in written[WORKFLOW]
    assert output.count(f"{quick} cases") == 1
    assert not any(place in text for text in written.values() for place in ("[[ ", "{{ spec", str(root)))


def test_nothing_is_written_unless_all_is_new(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each file that exists is told, also a link that leads nowhere, and none is touched."""
    (root / "tests").mkdir()
    (root / TESTS).write_text("mine", encoding="utf-8")
    (root / EXPECTATIONS).symlink_to("nowhere.toml")

    messages = problems(capsys, "--adapter", SPEC)

    assert messages[:2] == [f"{TESTS} exists already", f"{EXPECTATIONS} exists already"]
    assert "--force" in messages[2]
    assert contents(root) == {TESTS: "mine"}
    assert not (root / "acme").exists()


def test_force_overwrites(root: Path) -> None:
    """`--force` overwrites all files."""
    main(["init", "--adapter", SPEC])
    before = contents(root)
    (root / TESTS).write_text("mine", encoding="utf-8")

    assert main(["init", "--adapter", SPEC, "--force"]) == 0
    assert contents(root) == before


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("acme.adapter", "the adapter must be package.module:Class or path/to/file.py:Class, with the name of a class"),
        ("acme.adapter:", "with the name of a class, got 'acme.adapter:'"),
        ("acme.adapter:class", "with the name of a class, got 'acme.adapter:class'"),
        ("acme..adapter:A", "the adapter's module must be a dotted name, got 'acme..adapter'"),
        ("acme-fsdp.adapter:A", "the adapter's module must be a dotted name, got 'acme-fsdp.adapter'"),
        (":A", "the adapter's module must be a dotted name, got ''"),
        ("../adapter.py:A", "must be a plain path below the repository's root, got '../adapter.py'"),
        ("/tmp/adapter.py:A", "must be a plain path below the repository's root, got '/tmp/adapter.py'"),
        ("${{ x }}.py:A", "must be a plain path below the repository's root, got '${{ x }}.py'"),
        ('a"b.py:A', "must be a plain path below the repository's root"),
        ("json.adapter:A", "but 'json' is installed in "),
        ("types:A", "but 'types' is installed in "),
        ("taken.adapter:A", "taken.py is a module, so taken cannot become a package"),
        ("package:A", "package is a package, which would hide package.py"),
        (f"{TESTS}:A", f"{TESTS} is one of the other files"),
        ("tests.test_conformance:A", f"{TESTS} is one of the other files"),
    ],
)  # fmt: skip
def test_an_adapter_that_cannot_be_is_refused(
    spec: str, expected: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is written; what would be written but never imported, too."""
    (root / "taken.py").touch()
    (root / "package").mkdir()

    (message,) = problems(capsys, "--adapter", spec)

    assert expected in message
    assert sorted(contents(root)) == ["taken.py"]


def test_problems_come_at_once(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory that is none, a class that is none, and files in the place of directories."""
    assert len(problems(capsys, "nowhere", "--adapter", "acme.adapter")) == 2
    (root / "tests").touch()
    (root / ".github").touch()
    (root / "acme").mkdir()
    (root / "acme" / "adapter.py").mkdir()

    assert problems(capsys, "--adapter", SPEC) == [
        "acme/adapter.py must be a file, but is a directory",
        f"tests must be a directory, for {TESTS}, but is a file",
        f".github must be a directory, for {WORKFLOW}, but is a file",
    ]
    assert not (root / "nowhere").exists()


@pytest.mark.parametrize(
    ("there", "spec", "path", "packages"),
    [
        ([], "adapter:A", "adapter.py", ()),
        ([], "acme.inner.adapter:A", "acme/inner/adapter.py", ("acme", "acme/inner")),
        (["acme/__init__.py"], "acme.adapter:A", "acme/adapter.py", ()),
        (["src/acme/__init__.py"], "acme.adapter:A", "src/acme/adapter.py", ()),
        (["src/acme/__init__.py"], "acme.inner.adapter:A", "src/acme/inner/adapter.py", ("src/acme/inner",)),
        ([], "tests/adapters/mine.py:A", "tests/adapters/mine.py", ()),
        ([], "./mine.py:A", "mine.py", ()),
    ],
)
def test_where_an_adapter_belongs(
    there: list[str], spec: str, path: str, packages: tuple[str, ...], tmp_path: Path
) -> None:
    """In the package that is there, below src/ too; new directories become packages."""
    for name in there:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    wrong: list[str] = []
    place = adapter_of(spec, tmp_path, wrong)

    assert wrong == []
    assert place is not None
    assert (place.path, place.packages) == (path, packages)


def test_a_package_is_found_where_it_is_imported_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable install of a repository may have its own layout."""
    (tmp_path / "python" / "acme").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "python"))

    place = adapter_of("acme.adapter:A", tmp_path, [])

    assert place is not None
    assert place.path == "python/acme/adapter.py"


@pytest.mark.parametrize(
    ("class_name", "name"), [("MyFSDP", "my-fsdp"), ("FSDP2", "fsdp2"), ("Acme", "acme"), ("acme_x", "acme-x")]
)
def test_the_name_in_reports(class_name: str, name: str, tmp_path: Path) -> None:
    """That of the class, as engines are named."""
    adapter = adapter_of(f"a:{class_name}", tmp_path, [])

    assert adapter is not None
    assert f'    name = "{name}"\n' in scaffold(adapter, tmp_path).texts["a.py"]


def test_a_disk_that_refuses_a_file_leaves_none(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 3; what was written before is gone again."""
    real: Any = Path.open

    def full(path: Path, *given: object, **options: object) -> Any:
        if path.name == EXPECTATIONS:
            raise OSError(28, "No space left on device", str(path))
        return real(path, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        status = main(["init", "--adapter", SPEC])

    assert status == 3
    assert "conformance.toml cannot be written: No space left on device" in capsys.readouterr().err
    assert contents(root) == {}


def test_a_directory_inside_a_repository_is_told(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GitHub would never read the workflow there; and the next command is to be typed elsewhere."""
    (root / "inner").mkdir()
    (root / "inner" / "src" / "acme").mkdir(parents=True)
    assert main(["init", "inner", "--adapter", SPEC]) == 0
    out = capsys.readouterr().out

    assert "GitHub reads workflows only from the root of a repository" in out
    assert "\n  cd inner\n  pip install --editable .\n  fsdp-conformance smoke" in out
    assert contents(root / "inner").keys() == {"src/acme/adapter.py", *OTHERS}


@pytest.mark.nightly
def test_what_is_written_works(root: Path) -> None:
    """As it is, smoke and the tests fail and say what to do; with the example in `wrap` they pass."""
    main(["init", "--adapter", SPEC])
    adapter = root / "acme" / "adapter.py"
    todo = "wrap is not filled in: shard `model` with your engine, and return it"
    unfilled, failed = said("smoke", SPEC, cwd=root), pytest_on(root)

    adapter.write_text(filled_in(adapter.read_text(encoding="utf-8")), encoding="utf-8")
    filled, passed = said("smoke", SPEC, cwd=root), pytest_on(root)

    assert unfilled.status == 1, unfilled.err
    assert f"wrap() raised AdapterError: {todo}" in unfilled.out
    assert (filled.status, "7 of 7 checks ok" in filled.out) == (0, True), filled.out
    assert failed.returncode == 1
    assert todo in failed.stdout
    assert "1 failed" in failed.stdout
    assert "1 passed" in passed.stdout, passed.stdout


def filled_in(text: str) -> str:
    """Return the skeleton with the FSDP2 example of its comment as the body of `wrap`."""
    before, _, rest = text.partition("        # With torch's FSDP2, for example:\n        #\n")
    example, _, after = rest.partition("        raise AdapterError(")
    body = "\n".join(line.removeprefix("        #") for line in example.splitlines())
    return before + textwrap.indent(textwrap.dedent(body), " " * 8) + "\n" + after.partition("\n")[2]


def pytest_on(root: Path) -> subprocess.CompletedProcess[str]:
    """One case of the test file."""
    command = [sys.executable, "-m", "pytest", "-q", TESTS, "-k", "R003/every-rank-contributes-once-ws2"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
