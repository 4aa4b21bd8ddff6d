"""What Python and torch keep once per process, as a rank's own: saved when its turn ends, restored when it comes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch

from fsdp_conformance.harness import rank
from fsdp_conformance.harness.recording import collective_log

#: Names that are bound anew in every rank, and what makes their first values.
_NAMES: Final[dict[tuple[ModuleType, str], Callable[[], Any]]] = {
    # Without a trace: the file that the environment names belongs to the process.
    (collective_log, "_log"): collective_log.CollectiveLog,
    (rank, "_current"): lambda: None,
}


class RankState:
    """
    The state of one rank: random numbers of torch's CPU generator, numpy and Python, variables of the environment,
    default dtype, and module-level names of this package.

    It begins as a copy of the process's, so that all ranks begin alike.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._variables = dict(variables or {})
        self._values = {place: make() for place, make in _NAMES.items()}
        self._save_random()

    def save(self) -> None:
        """Take over what the rank has made of it."""
        self._save_random()
        for name in self._variables:
            self._variables[name] = os.environ.get(name, "")
        for module, name in self._values:
            self._values[module, name] = getattr(module, name)

    def restore(self) -> None:
        """Make it the process's."""
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        if torch.get_default_dtype() != self._dtype:
            torch.set_default_dtype(self._dtype)
        os.environ.update(self._variables)
        for (module, name), value in self._values.items():
            setattr(module, name, value)

    def _save_random(self) -> None:
        self._torch = torch.get_rng_state()
        self._numpy = np.random.get_state()
        self._python = random.getstate()
        self._dtype = torch.get_default_dtype()
