"""
The settings of the processes of a recorded run: an environment variable that they inherit.

Standard library only: every Python process that is started meanwhile reads it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.recordings.events import Keep, Sharding

#: The directory of the `sitecustomize` that Python runs at its start.
STARTUP: Final = Path(__file__).parent / "startup"

#: Holds the settings, as JSON.
VARIABLE: Final = "FSDP_CONFORMANCE_RECORD"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordSettings:
    """The directory of a recording, and how its processes train."""

    directory: str
    prefix: str
    """`sys.prefix` of the environment that this is for: another one has another torch, or none."""
    sharding: Sharding = "kept"
    nudge: float = 0.0
    """By how much parameters are changed before the first step, relative to themselves."""
    keep: Keep | None = None
    """The tensors to keep as a whole; recording ends with their step."""

    def variables(self) -> dict[str, str]:
        """The variables with which a Python process records."""
        path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        path = [str(STARTUP), *(entry for entry in path if entry and entry != str(STARTUP))]
        return {VARIABLE: json.dumps(asdict(self)), "PYTHONPATH": os.pathsep.join(path)}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> RecordSettings | None:
        """The settings of this process; None if it has none, or they are for another Python."""
        text = environment.get(VARIABLE)
        if not text:
            return None
        try:
            values = json.loads(text)
            keep = values.pop("keep", None)
            settings = cls(**values, keep=None if keep is None else Keep(**{**keep, "names": tuple(keep["names"])}))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ConfigError(
                [f"{VARIABLE} is set by `record` and `parity`, not by hand: {error}"], where="the environment"
            ) from error
        return settings if settings.prefix == sys.prefix else None
