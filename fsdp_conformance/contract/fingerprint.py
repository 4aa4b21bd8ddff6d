"""The hash of the suite itself, so that a certificate says by which cases and checks it was earned."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
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
    return {
        f"{prefix}{inside.as_posix()}": path
        for prefix, root in roots.items()
        for path in root.rglob("*")
        if path.suffix in _SUFFIXES and not _LEFT_OUT & set((inside := path.relative_to(root)).parts)
    }
