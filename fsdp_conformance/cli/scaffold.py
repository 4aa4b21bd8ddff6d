"""The files that `init` writes: where they belong in a repository, and what is in them."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path, PurePosixPath

from fsdp_conformance.report.expectations import NAME as EXPECTATIONS

TESTS = "tests/test_conformance.py"
WORKFLOW = ".github/workflows/conformance.yml"

#: The files next to the adapter.
OTHERS = (TESTS, EXPECTATIONS, WORKFLOW)

_FORMS = "package.module:Class or path/to/file.py:Class"


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """An adapter to write."""

    spec: str
    """As `--implementation` takes it in the repository's root."""
    path: str
    """The file, relative to the root."""
    class_name: str
    packages: tuple[str, ...] = ()
    """Directories that have to become packages, outermost first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaffold:
    """All files to write below a root."""

    root: Path
    adapter: Adapter
    texts: dict[str, str]
    """Path relative to the root, to content."""

    def problems(self, *, overwrite: bool) -> list[str]:
        """Why the files cannot be written as they should, a sentence each."""
        return [
            problem
            for path in self.texts
            if (problem := _obstacle(self.root, PurePosixPath(path), overwrite=overwrite))
        ]

    def write(self, *, overwrite: bool) -> None:
        """Write all files, or none: if one cannot be written, those that are new are removed. Raises OSError."""
        made: list[Path] = []
        try:
            for name, text in self.texts.items():
                path = self.root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                is_new = not path.exists()
                with path.open("w" if overwrite else "x", encoding="utf-8") as file:
                    made += [path] if is_new else []
                    file.write(text)
        except OSError:
            for path in made:
                path.unlink(missing_ok=True)
            raise


def adapter_of(spec: str, root: Path, problems: list[str]) -> Adapter | None:
    """The adapter that `spec` names, or None: then `problems` says why."""
    place, colon, class_name = spec.rpartition(":")
    before = len(problems)
    if not colon or not _is_name(class_name):
        problems.append(f"the adapter must be {_FORMS}, with the name of a class, got {spec!r}")
    if place.endswith(".py"):
        if not re.fullmatch(r"[\w./-]+", place, re.ASCII) or place.startswith(("/", "-")) or ".." in place.split("/"):
            problems.append(f"the adapter's file must be a plain path below the repository's root, got {place!r}")
        path = PurePosixPath(place)
        adapter = Adapter(spec=f"{path}:{class_name}", path=str(path), class_name=class_name)
        problems += (
            [f"{path} is one of the other files that init writes: choose another path"]
            if adapter.path in OTHERS
            else []
        )
        return adapter if len(problems) == before else None
    words = place.split(".")
    if colon and not all(_is_name(word) for word in words):
        problems.append(f"the adapter's module must be a dotted name, got {place!r}")
    top = _directory_of(words[0], root, problems) if len(problems) == before else None
    if top is None:
        return None
    parents = [top.joinpath(*words[:depth]) for depth in range(1, len(words))]
    path = top.joinpath(*words)
    # Python prefers a package to a module of the same name.
    hidden = [f"{parent}.py is a module, so {parent} cannot become a package" for parent in parents
              if (root / f"{parent}.py").is_file()]  # fmt: skip
    hidden += [f"{path} is a package, which would hide {path}.py"] if (root / path).is_dir() else []
    hidden += (
        [f"{path}.py is one of the other files that init writes: choose another module"]
        if f"{path}.py" in OTHERS
        else []
    )
    problems += hidden
    missing = tuple(str(parent) for parent in parents if not (root / parent).exists())
    adapter = Adapter(spec=spec, path=f"{path}.py", class_name=class_name, packages=missing)
    return adapter if not hidden else None


def scaffold(adapter: Adapter, root: Path) -> Scaffold:
    """The files for an adapter."""
    texts = {f"{package}/__init__.py": "" for package in adapter.packages}
    texts[adapter.path] = _rendered("adapter.py.jinja", adapter)
    texts[TESTS] = _rendered("test_conformance.py.jinja", adapter)
    texts[EXPECTATIONS] = _rendered("conformance.toml.jinja", adapter)
    texts[WORKFLOW] = _rendered("conformance.yml", adapter)
    return Scaffold(root=root, adapter=adapter, texts=texts)


def _rendered(template: str, adapter: Adapter) -> str:
    # Not at the top: it takes a while, and only this command needs it.
    import jinja2

    # A workflow uses braces itself.
    environment = jinja2.Environment(  # noqa: S701 - it writes no HTML, and only words that were checked
        variable_start_string="[[",
        variable_end_string="]]",
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    text = (files(__package__) / "templates" / template).read_text(encoding="utf-8")
    return environment.from_string(text).render(
        spec=adapter.spec, class_name=adapter.class_name, name=_display_name(adapter.class_name)
    )


def _directory_of(package: str, root: Path, problems: list[str]) -> PurePosixPath | None:
    """Where a top-level package or module of the repository is, or should be, relative to the root."""
    for place in (PurePosixPath(), PurePosixPath("src")):
        if (root / place / package).is_dir() or (root / place / f"{package}.py").is_file():
            return place
    location = _installed_in(package)
    if location is None:
        return PurePosixPath()
    try:
        return PurePosixPath(location.relative_to(root.resolve()).as_posix())
    except ValueError:
        problems.append(
            f"the adapter's module must be new or in the repository, but {package!r} is installed in {location}: "
            "choose another name, or path/to/file.py:Class"
        )
        return None


def _installed_in(package: str) -> Path | None:
    """The directory that a top-level name is imported from, or None if there is no such name."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ()) or [spec.origin or ""]
    return Path(places[0]).resolve().parent


def _obstacle(root: Path, path: PurePosixPath, *, overwrite: bool) -> str | None:
    """Why a file cannot be written, or None."""
    blocked = next((up for up in _directories(path) if os.path.lexists(root / up) and not (root / up).is_dir()), None)
    if blocked is not None:
        return f"{blocked} must be a directory, for {path}, but is a file"
    if (root / path).is_dir():
        return f"{path} must be a file, but is a directory"
    if os.path.lexists(root / path) and not overwrite:
        return f"{path} exists already"
    nearest = next(up for up in [*_directories(path), PurePosixPath()] if (root / up).is_dir())
    if not os.access(root / nearest, os.W_OK):
        return f"{path} cannot be written: no permission in {root / nearest}"
    return None


def _directories(path: PurePosixPath) -> Iterator[PurePosixPath]:
    """The directories of a relative path, innermost first, without the root."""
    return (parent for parent in path.parents if parent.parts)


def _is_name(word: str) -> bool:
    return word.isascii() and word.isidentifier() and not keyword.iskeyword(word)


def _display_name(class_name: str) -> str:
    """MyFSDP2 as my-fsdp2."""
    words = re.findall(r"[A-Z]+(?![a-z])[0-9]*|[A-Z]?[a-z]+[0-9]*|[0-9]+", class_name)
    return "-".join(words).lower() or class_name.lower()
