"""The engine's waits on the simulated accelerator: which are executed, and what happens without one of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType

from fsdp_conformance import engine
from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.checker import Reuse, Wait

SiteOf = Callable[[Wait], str | None]
"""The engine's function that asks for a wait; None if another function does."""

#: The engine's directory.
_ENGINE = os.path.dirname(engine.__file__) + os.sep


@contextmanager
def noting_sites(sites: set[str], dropped: Collection[str], site_of: SiteOf) -> Iterator[None]:
    """Note the engine's waits that are executed in this context, and skip those in `dropped`."""

    def keep(kind: Wait, _stream: int, _device: int) -> bool:
        site = site_of(kind)
        if site is not None:
            sites.add(site)
        return site not in dropped

    with checker.wait_filter(keep):
        yield


@contextmanager
def watching_engine(sites: set[str], dropped: Collection[str]) -> Iterator[None]:
    """
    `noting_sites` for a part of the engine that a test calls.

    New memory counts as any free block that the allocator might have returned, so a premature free is found even if
    that memory is not reused.
    """
    with noting_sites(sites, dropped, _site), checker.reuse(Reuse.WORST_CASE):
        yield


def _nobody(_file: str, _kind: Wait, _function: str) -> bool:
    return False


def site_in_program(kind: Wait, *, is_others: Callable[[str, Wait, str], bool] = _nobody) -> str | None:
    """
    The innermost function of the engine that asks for a wait in a whole program.

    None if torch, the model, or a function for which `is_others` is true asks for it.
    """
    if kind is Wait.HOST_WAITS_STREAM:
        return None  # a tensor is read on the host, which requires a wait
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if _passes_on(frame):
            frame = frame.f_back
            continue
        path = frame.f_code.co_filename
        name = file_in_engine(path) or os.path.basename(path)
        if is_others(name, kind, frame.f_code.co_name):
            return None
        if file_in_engine(path):
            return f"{kind} {name} {frame.f_code.co_name}"
        parts = set(path.split(os.sep))
        if "tests" in parts or not {"engine", "simulator", "torch"} & parts:
            return None
        frame = frame.f_back
    return None


def file_in_engine(path: str) -> str | None:
    """A file of the engine, relative to it: "chunks/storage.py"; None for other files."""
    return os.path.relpath(path, _ENGINE) if path.startswith(_ENGINE) else None


def _passes_on(frame: FrameType) -> bool:
    """True for the methods of `Streams` and `ChunkStreams`, which only pass a call on: their caller is the site."""
    owner = frame.f_code.co_qualname.partition(".")[0]
    return file_in_engine(frame.f_code.co_filename) == "communication.py" and owner in ("Streams", "ChunkStreams")


def _site(kind: Wait) -> str | None:
    """The innermost function of the engine that asks for a wait; None if there is none or it is in a collective."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = file_in_engine(frame.f_code.co_filename)
        if name and not _passes_on(frame):
            # A collective records an event when it is issued.
            inside = name == "communication.py" and kind is Wait.EVENT_RECORD
            return None if inside else f"{kind} {name} {frame.f_code.co_name}"
        frame = frame.f_back
    return None
