"""The hash of the suite itself, so that a certificate says by which cases and checks it was earned."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import fsdp_conformance

#: What a verdict can depend on. Documents and the package's own tests are left out.
_SUFFIXES = frozenset({".py", ".toml", ".json", ".cpp", ".h"})
_LEFT_OUT = frozenset({"tests", "docs", "__pycache__"})


@functools.cache
def suite_sha256() -> str:
    """The hash of the package's files, names included. A checkout and its wheel have the same."""
    root = Path(fsdp_conformance.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root)
        if path.suffix in _SUFFIXES and not _LEFT_OUT & set(inside.parts):
            digest.update(f"{inside.as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()
