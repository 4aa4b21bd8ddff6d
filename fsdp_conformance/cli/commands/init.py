"""
`fsdp-conformance init`: an adapter to fill in, a test file, a workflow and an empty list of known failures, written
into a repository.

Nothing that exists is overwritten, and nothing at all is written unless everything can be.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
from pathlib import Path, PurePosixPath

from fsdp_conformance import docs
from fsdp_conformance.cli.scaffold import TESTS, WORKFLOW, Adapter, adapter_of, scaffold
from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.errors import ConfigError, EnvironmentUnavailable
from fsdp_conformance.report.expectations import NAME as EXPECTATIONS
from fsdp_conformance.status import Status

#: The profile of the tests.
QUICK = "quick"

_ABOUT = {
    TESTS: f"{len(load_profile(QUICK).entries)} cases as tests of your own",
    EXPECTATIONS: "failures that you know of: none yet",
    WORKFLOW: "for each pull request, and each night",
}


def main(arguments: argparse.Namespace) -> int:
    """
    Write the files, and print what to do next.

    Raises ConfigError with everything that is in the way, and EnvironmentUnavailable if the disk refuses a file.
    """
    root = Path(arguments.directory)
    problems = [] if root.is_dir() else [f"DIR must be a directory, got {arguments.directory!r}"]
    adapter = adapter_of(arguments.adapter, root, problems)
    if adapter is None:
        raise ConfigError(problems, where="init")
    planned = scaffold(adapter, root)
    if root.is_dir():
        problems += planned.problems(overwrite=arguments.force)
    if problems:
        exist = any(problem.endswith("exists already") for problem in problems)
        hint = ["nothing was written; --force overwrites files"] if exist else []
        raise ConfigError([*problems, *hint], where="init")
    try:
        planned.write(overwrite=arguments.force)
    except OSError as error:
        raise EnvironmentUnavailable(
            f"{error.filename or root} cannot be written: {error.strerror or error}. No new file was left in {root}."
        ) from error
    _tell(root, adapter, list(planned.texts))
    return Status.CERTIFIED


def _tell(root: Path, adapter: Adapter, paths: list[str]) -> None:
    about = {adapter.path: f"the adapter: fill in {adapter.class_name}.wrap", **_ABOUT}
    width = max(map(len, paths))
    for path in paths:
        print(f"wrote  {path:<{width}}  {about.get(path, 'makes it a package')}")
    top = _enclosing_repository(root)
    if top is not None:
        print("\nGitHub reads workflows only from the root of a repository. Move")
        print(f"  {WORKFLOW}\nto the same place in\n  {top}")
        print("and give its steps this directory as their working-directory.")
    print("\nnext:\n")
    if root.resolve() != Path.cwd():
        print(f"  cd {shlex.quote(str(root))}")
    if PurePosixPath(adapter.path).parts[0] == "src" and not _is_importable(adapter):
        print("  pip install --editable .")
    print(f"  fsdp-conformance smoke --implementation {adapter.spec}\n")
    print(f"It fails until {adapter.class_name}.wrap is filled in.")
    print(docs.see(docs.ADAPTER))


def _is_importable(adapter: Adapter) -> bool:
    """True if Python finds the adapter's package; one named by its file needs no package."""
    if adapter.spec.startswith(adapter.path):
        return True
    return importlib.util.find_spec(adapter.spec.partition(":")[0].partition(".")[0]) is not None


def _enclosing_repository(root: Path) -> Path | None:
    """The root of the git repository that this directory lies in, or None if it is that itself, or in none."""
    resolved = root.resolve()
    if (resolved / ".git").exists():
        return None
    return next((parent for parent in resolved.parents if (parent / ".git").exists()), None)
