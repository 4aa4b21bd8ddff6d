"""Imports of modules that a user names, by file or by name."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType


def module_of_file(file: Path, kind: str) -> ModuleType | None:
    """
    The module of a file, imported once in a process, under a unique name with `kind` in it.

    The file's directory goes to the end of the path, so that it shadows nothing. Returns None if Python does not take
    it for source; passes on what importing it raises.
    """
    name = f"fsdp_conformance_{kind}_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except Exception:
        del sys.modules[name]
        raise
    return module


def module_of_name(name: str) -> ModuleType:
    """A module that may be named relative to the root of a project, as with `python -m`. Passes on what it raises."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return importlib.import_module(name)
