"""
Lists of PyTorch's own tests that are known to fail here, and why: ci/upstream-known.toml on torch itself, and
ci/upstream-known-reference.toml on the reference engine.

`release` is the release of PyTorch that the tests are from, "2.6", and `files` are the files that it is about: with
--known, ci/upstream runs these. Each [[known]] has `file`, below
test/distributed; `tests`, each as "Class.test"; `kind`, one of `KINDS`; and `why`. Each [[left_out]] has `file`,
`tests` and `why`: these are not run.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_conformance.errors import UsageError

#: The lists, by subject.
LISTS = {
    "torch": Path(__file__).resolve().parent / "upstream-known.toml",
    "reference": Path(__file__).resolve().parent / "upstream-known-reference.toml",
}

#: What lies behind a known failure. The first four say nothing about ranks or devices, nor about the engine, and are
#: left out of the share of tests that pass.
KINDS = {
    "compiled": "compiled code or graphs",
    "renamed": "names that changed",
    "changed": "torch has changed since the tests were written",
    "internals": "internals of torch's class",
    "refused": "refused by name",
    "differs": "a documented difference",
    "words": "an error in other words",
    "time": "times of kernels",
    "digits": "the last digits of numbers",
    "race": "a race in the test",
    "torch_race": "a race in torch",
    "unwritten": "memory that nothing has written",
    "together": "tests that only pass alone",
    "device": "what is not simulated",
}

#: The kinds that have nothing to do with what is tested here.
ELSEWHERE = tuple(KINDS[name] for name in ("compiled", "renamed", "changed", "internals"))

_FIELDS = {
    "known": {"file", "tests", "kind", "why"},
    "left_out": {"file", "tests", "why"},
}


@dataclass(frozen=True, slots=True)
class Known:
    """A test that is known to fail."""

    kind: str
    """As `KINDS` says it."""
    why: str


#: Tests that are known to fail, by file and name.
KnownTests = Mapping[tuple[str, str], Known]


@dataclass(frozen=True, slots=True)
class KnownFailures:
    """The list."""

    release: str
    """Of PyTorch, that the tests are from; "" if the list does not say."""
    files: tuple[str, ...]
    tests: KnownTests
    left_out: Mapping[tuple[str, str], str]
    """Why a test is not run, by file and name."""


NOTHING = KnownFailures("", (), {}, {})


def load(path: Path) -> KnownFailures:
    """Read a list. Raises UsageError if the file is not one."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} must be a list of known failures in TOML: {error}") from error
    release = content.get("release", "")
    if not isinstance(release, str):
        raise UsageError(f'release in {path} must be a release of PyTorch such as "2.6", got {release!r}')
    files = content.get("files", [])
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise UsageError(f"files in {path} must be a list of names, got {files!r}")
    failures: dict[tuple[str, str], Known] = {}
    left_out: dict[tuple[str, str], str] = {}
    for table in _FIELDS:
        for where, entry in _entries(content, table, path):
            if entry["file"] not in files:
                raise UsageError(f"{where} is about {entry['file']}, which `files` has not")
            if table == "known" and entry["kind"] not in KINDS:
                raise UsageError(f"the kind in {where} must be one of {', '.join(KINDS)}, got {entry['kind']!r}")
            for test in entry["tests"]:
                if (entry["file"], test) in {**failures, **left_out}:
                    raise UsageError(f"{where} has {test} of {entry['file']} again")
                if table == "known":
                    failures[entry["file"], test] = Known(KINDS[entry["kind"]], entry["why"])
                else:
                    left_out[entry["file"], test] = entry["why"]
    return KnownFailures(release, tuple(files), failures, left_out)


def _entries(content: Mapping[str, Any], table: str, path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The entries of one kind, each with its name in messages."""
    entries = content.get(table, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{path} must be a list of known failures in TOML: got {table} = {entries!r}")
    for number, entry in enumerate(entries, start=1):
        where = f"entry {number} of {path.name}" if table == "known" else f"{table} {number} of {path.name}"
        if set(entry) != _FIELDS[table]:
            raise UsageError(
                f"{where} must have the fields {', '.join(sorted(_FIELDS[table]))}, got {', '.join(entry)}"
            )
        yield where, entry


def news(known_tests: KnownTests, file: str, passed: set[str], failed: set[str]) -> list[str]:
    """Results of a file's tests that are not in the list, one line each."""
    listed = {test for listed_file, test in known_tests if listed_file == file}
    return [
        *(f"{file}: {test} failed, and is not in the list" for test in sorted(failed - listed)),
        *(f"{file}: {test} passed, and is in the list" for test in sorted(passed & listed)),
    ]
