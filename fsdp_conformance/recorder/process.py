"""
Begins to record in a process that has the variables for it.

Python runs `prepare` at its start (`startup`); nothing happens before the program imports
torch. `recording` does the same for a block of code.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.recorder.settings import RecordSettings
from fsdp_conformance.recordings.stacks import announce
from fsdp_conformance.simulator.import_hook import when_imported


def prepare() -> None:
    """If this process has settings, record from the moment that it imports torch."""
    settings = RecordSettings.from_environment(os.environ)
    if settings is not None:
        when_imported("torch", lambda: _begin(settings))


def _begin(settings: RecordSettings) -> None:
    announce(Path(settings.directory), os.environ.get("RANK", ""))
    try:
        _observe(settings)
    except Exception as error:
        # The script imports torch, and waits for this.
        if settings.sharding != "kept":
            raise
        print(
            f"fsdp-conformance: this process is not recorded, because the recorder cannot start: "
            f"{type(error).__name__}: {error}. The training goes on. Please report this as a bug in fsdp-conformance",
            file=sys.stderr,
        )


def _take_out_megatron(replacement: Any) -> None:
    from fsdp_conformance.recorder.megatron_unsharded import take_out

    take_out(replacement)


def _observe(settings: RecordSettings) -> None:
    from fsdp_conformance.recorder.hooks import Hooks
    from fsdp_conformance.recorder.observer import Observer

    observer = Observer(Path(settings.directory), sharding=settings.sharding, nudge=settings.nudge, keep=settings.keep)
    if settings.sharding != "kept":
        from fsdp_conformance.recorder.unsharded import Replacement

        # The hooks see the replacements, and backwards with what is averaged after them.
        replacement = Replacement(observer)
        replacement.install()
        when_imported("megatron_fsdp", partial(_take_out_megatron, replacement))
    Hooks(observer)
    atexit.register(observer.end)
    hook = sys.excepthook

    def note_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Texts of exceptions are made by the script's classes.
        observer.guard.run(lambda: observer.end(f"{kind.__name__}: {error}"))
        hook(kind, error, trace)

    sys.excepthook = note_error


@contextlib.contextmanager
def recording(directory: str | os.PathLike[str]) -> Iterator[None]:
    """
    Record what this process trains during the block. All ranks may use one directory, which must be new or empty.

    Raises ConfigError if this process records already, or if it has recorded into the directory before.
    """
    from fsdp_conformance.recorder import hooks
    from fsdp_conformance.recorder.observer import Observer
    from fsdp_conformance.recordings.files import file_name

    path = Path(directory)
    rank = os.environ.get("RANK", "0")
    if hooks.is_recording():
        raise ConfigError(["this process records already"], where=str(path))
    if (path / file_name(int(rank), os.getpid())).exists():
        raise ConfigError(["this process has recorded here before; give a new directory"], where=str(path))
    observer = Observer(path, sharding="kept", nudge=0.0)
    installed = hooks.Hooks(observer)
    error = ""
    try:
        yield
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
        raise
    finally:
        installed.remove()
        observer.end(error)
