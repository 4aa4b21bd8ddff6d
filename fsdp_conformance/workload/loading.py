"""
Loads the workload that a user names: `path/to/file.py:FUNCTION` or `package.module:FUNCTION`.

The function takes no arguments and returns a `Workload`. Every process that needs the workload calls it for itself:
each rank, the references, and the referee. The file is the user's, not the engine's.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import traceback
from pathlib import Path
from types import ModuleType

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.suggestions import near
from fsdp_conformance.user_modules import module_of_file, module_of_name
from fsdp_conformance.workload.definition import Workload

#: The option, where problems are reported.
OPTION = "--workload"

_FORMS = "path/to/file.py:FUNCTION or package.module:FUNCTION"


def load_workload(spec: str) -> Workload:
    """
    The workload that the function returns.

    Raises ConfigError for a file, module or function that does not exist, cannot be imported, or raises, and for a
    function that returns something else.
    """
    place, separator, name = spec.rpartition(":")
    if not separator or not place or not name.isidentifier():
        raise _problem(f"must be {_FORMS}, got {spec!r}")
    module = _from_file(place) if place.endswith(".py") else _from_module(place)
    function = getattr(module, name, None)
    if function is None:
        raise _problem(f"{place} has no function {name!r}. {_functions_of(module, name)}")
    if isinstance(function, Workload):
        raise _problem(f"{name} in {place} must be a function that returns the workload, got the workload itself")
    if not callable(function):
        raise _problem(f"{name} in {place} must be a function, got {type(function).__name__}")
    try:
        workload = function()
    except Exception as error:  # the user's code may raise anything
        raise _problem(f"{name}() in {place} raised {described(error)}") from error
    if not isinstance(workload, Workload):
        raise _problem(
            f"{name}() in {place} must return a Workload (fsdp_conformance.workload.definition), got "
            f"{type(workload).__name__}"
        )
    return workload


def described(error: BaseException) -> str:
    """An exception of the user's code: its class, its first line, and the last line of the user's that it came from."""
    text = next(iter(str(error).splitlines()), "")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_USERS)]
    where = f" [{frames[-1].filename}:{frames[-1].lineno}]" if frames else ""
    return f"{type(error).__name__}: {text}{where}"


def _library(name: str) -> str:
    """The directory of an installed package, found without importing it."""
    found = importlib.util.find_spec(name)
    return str(Path(found.origin).parent) if found is not None and found.origin else "\0"


#: Where frames are not the user's: this package, torch, and Python itself.
_NOT_USERS = (str(Path(__file__).parents[1]), _library("torch"), str(Path(os.__file__).parent), "<frozen")


def _from_file(path: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        names = sorted(item.name for item in file.parent.glob("*.py")) if file.parent.is_dir() else []
        likely = near(file.name, names, cutoff=0.6) or names[:5]
        there = f"Python files there: {', '.join(likely)}" if likely else f"{file.parent} has no Python files"
        raise _problem(f"the file {path!r} does not exist (looked for {file}). {there}.")
    try:
        module = module_of_file(file, "workload")
    except Exception as error:  # as in load_workload
        raise _problem(f"{path} cannot be imported: {described(error)}") from error
    if module is None:
        raise _problem(f"{file} cannot be imported as a Python file")
    return module


def _from_module(name: str) -> ModuleType:
    try:
        return module_of_name(name)
    except Exception as error:  # as in load_workload
        raise _problem(f"module {name!r} cannot be imported: {described(error)}") from error


def _functions_of(module: ModuleType, name: str) -> str:
    """The functions that a module defines, those with near names first."""
    defined = sorted(
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    )
    close = near(name, defined, cutoff=0.6)
    if close:
        return f"Did you mean {', '.join(close)}?"
    return f"Its functions: {', '.join(defined)}." if defined else "It defines no function."


def _problem(text: str) -> ConfigError:
    return ConfigError([text], where=OPTION)
