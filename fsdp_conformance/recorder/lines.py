"""Lines of the script, as they are shown: "train.py:30"."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sys
from collections.abc import Iterator
from types import FrameType

from fsdp_conformance.stack import Owner, owner, shown

#: Directories of this package whose code stands between the script and torch.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN = tuple(os.path.join(_PACKAGE, part, "") for part in ("recorder", "engine"))

#: Packages whose optimizers belong to an engine.
_ENGINES = frozenset({
    "torch", "accelerate", "colossalai", "deepspeed", "fairscale", "lightning", "megatron", "megatron_fsdp",
    "pytorch_lightning",
})  # fmt: skip


def is_of_script(file: str) -> bool:
    """True for a file of the script or of a library, named as in `co_filename`: neither torch's nor one of these."""
    return owner(file) is Owner.USER and not file.startswith(_OWN)


def script_line(frame: FrameType | None = None) -> str:
    """The innermost line of the script, from a frame or the caller's; of a library, if no script is on the stack."""
    library = ""
    for file, line in _lines(frame or sys._getframe(1)):
        if "site-packages" not in file:
            return f"{shown(file)}:{line}"
        library = library or f"{os.path.basename(file)}:{line}"
    return library


def script_lines(most: int = 4) -> list[str]:
    """The innermost lines of the script, each called from the next one."""
    lines = (f"{shown(file)}:{line}" for file, line in _lines(sys._getframe(1)) if "site-packages" not in file)
    return list(itertools.islice(lines, most))


def makes_state() -> bool:
    """True if torch's functions for checkpoints have called this step, or Megatron-FSDP's for optimizers."""
    return any(
        frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"
        or frame.f_code.co_name == "fully_shard_optimizer"
        for frame in _frames(sys._getframe(1))
    )


@functools.cache
def place_of(kind: type) -> str:
    """Where a class is defined, "train.py:86". Empty for a class of torch's or an engine's, or without a source."""
    if kind.__module__.partition(".")[0] in _ENGINES:
        return ""
    try:
        file, line = inspect.getsourcefile(kind), inspect.getsourcelines(kind)[1]
    except (OSError, TypeError):
        return ""
    return f"{shown(file)}:{line}" if file is not None else ""


def _lines(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    for each in _frames(frame):
        file = each.f_code.co_filename
        if is_of_script(file):
            yield file, each.f_lineno


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back
