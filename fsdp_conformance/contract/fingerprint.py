"""The hash of the suite itself, so that a certificate says by which cases and checks it was earned."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import fsdp_conformance

#: What a verdict can depend on. Documents and the package's own tests are left out.
_SUFFIXES = frozenset({".py", ".toml", ".json", ".cpp", ".h"})
_LEFT_OUT = frozenset({"tests", "docs", "__pycache__"})


@functools.cache
def suite_sha256() -> str:
    """The hash of the package's files, names included. A checkout and its wheel have the same."""
    digest = hashlib.sha256()
    for name, path in sorted(_files().items()):
        digest.update(f"{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _files() -> dict[str, Path]:
    """By name inside the package. In a checkout, cases and fixtures lie next to the package and not within it."""
    roots = {"": Path(fsdp_conformance.__file__).parent}
    for part in ("suites", "fixtures"):
        spec = importlib.util.find_spec(f"fsdp_conformance.{part}")
        places = spec.submodule_search_locations if spec is not None else None
        roots |= {f"{part}/": Path(place) for place in places or ()}
    return {f"{prefix}{name}": root / name for prefix, root in roots.items() for name in _names(root)}


def _names(root: Path) -> Iterator[str]:
    """
    The files below `root` that count, with slashes, in no order.

    Every run hashes the suite, and os.walk takes a tenth of the time that Path.rglob takes.
    """
    for directory, below, files in os.walk(root):
        below[:] = [name for name in below if name not in _LEFT_OUT]
        inside = directory[len(str(root)) :].replace(os.sep, "/").lstrip("/")
        for name in files:
            if os.path.splitext(name)[1] in _SUFFIXES:
                yield f"{inside}/{name}" if inside else name
