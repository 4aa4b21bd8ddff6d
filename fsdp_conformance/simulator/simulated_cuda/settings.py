"""
The settings of the simulated GPUs, in an environment variable that child processes inherit.

Standard library only: every Python process that is started meanwhile reads it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.simulator.checker.options import CheckerOptions

__all__ = ["HAZARDS", "MAX_DEVICES", "STARTUP", "VARIABLE", "Briefing", "Children", "CudaSettings"]

#: What can be done about hazards.
HAZARDS: Final = ("fail", "report", "off")

#: A device index has 8 bits.
MAX_DEVICES: Final = 127

#: Holds the settings, as JSON.
VARIABLE: Final = "FSDP_CONFORMANCE_SIMULATE_CUDA"

#: The directory of the `sitecustomize` that Python runs at its start.
STARTUP: Final = Path(__file__).parent / "startup"


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaSettings:
    """The simulated GPUs of a process."""

    num_devices: int
    checks: bool
    """True if the race checker is on."""
    directory: str
    """The directory in which processes leave their observations."""
    prefix: str
    """`sys.prefix` of the environment that this is for: another one has another torch, or none."""
    as_cuda: bool = True
    """True if the devices go by CUDA's name; else they are called "sim"."""
    options: CheckerOptions = field(default_factory=CheckerOptions)
    inherited: Mapping[str, str] = field(default_factory=dict)
    """Variables of the parent, a rank, that do not make its children ranks: `outbox.process_name`."""

    @staticmethod
    def checked_count(value: object, *, where: str) -> int:
        """The number of GPUs. Raises ConfigError for anything but an integer from 1 to MAX_DEVICES."""
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_DEVICES:
            raise ConfigError(
                [f"the number of GPUs must be an integer from 1 to {MAX_DEVICES}, got {value!r}"], where=where
            )
        return value

    @staticmethod
    def checked_hazards(value: object, *, where: str) -> str:
        """How hazards are treated. Raises ConfigError for an unknown word."""
        if value not in HAZARDS:
            raise ConfigError([f"hazards must be one of {', '.join(HAZARDS)}, got {value!r}"], where=where)
        return str(value)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> CudaSettings | None:
        """The settings for this process; None if there are none, or they are for another Python."""
        text = environment.get(VARIABLE)
        if not text:
            return None
        try:
            fields = json.loads(text)
            settings = cls(**{**fields, "options": CheckerOptions(**fields["options"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                [f"{VARIABLE} is set by pytest --simulate-cuda, simulated_cuda() and sanitize, not by hand: {error}"],
                where="the environment",
            ) from error
        return settings if settings.prefix == sys.prefix else None

    def to_text(self) -> str:
        """The value of the variable."""
        return json.dumps(asdict(self))


class Briefing:
    """
    The variables with which Python processes see the GPUs, and the directory that they report into, until `close`.

    One variable has the settings, and in PYTHONPATH Python finds our `sitecustomize` (which then
    runs the environment's own). A process that ignores PYTHONPATH (`python -I`) or gets another environment sees no
    GPUs.
    """

    def __init__(
        self,
        num_devices: int,
        *,
        checks: bool = True,
        as_cuda: bool = True,
        options: CheckerOptions | None = None,
        inherited: Mapping[str, str] | None = None,
        parent: Path | None = None,
    ) -> None:
        """`parent`: where to make the directory; None for the system's place for temporary files."""
        self._directory = tempfile.mkdtemp(prefix="fsdp-conformance-cuda-", dir=parent)
        self._pid = os.getpid()
        self.settings = CudaSettings(
            num_devices=num_devices,
            checks=checks,
            directory=self._directory,
            prefix=sys.prefix,
            as_cuda=as_cuda,
            options=options or CheckerOptions(),
            inherited=dict(inherited or {}),
        )

    @property
    def directory(self) -> Path:
        """The directory in which processes leave their observations."""
        return Path(self._directory)

    def variables(self) -> dict[str, str]:
        """The variables that tell it."""
        path = [str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {VARIABLE: self.settings.to_text(), "PYTHONPATH": os.pathsep.join(path)}

    def close(self) -> None:
        """Remove the files. A process that is still running has nowhere to report to."""
        if os.getpid() == self._pid:  # not in a process that was forked meanwhile
            shutil.rmtree(self._directory, ignore_errors=True)


class Children(Briefing):
    """Makes the Python processes that this one starts see the same GPUs, however they are started, until `close`."""

    def __init__(self, num_devices: int, *, checks: bool, variables: Mapping[str, str]) -> None:
        """`variables` are set for children in addition."""
        super().__init__(num_devices, checks=checks)
        values = {**variables, **self.variables()}
        self._before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)

    def set_checks(self, checks: bool) -> None:
        """Turn the race checker on or off in processes that are started from now on."""
        self.settings = replace(self.settings, checks=checks)
        os.environ[VARIABLE] = self.settings.to_text()

    def close(self) -> None:
        """Restore the environment and remove the files."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        super().close()
