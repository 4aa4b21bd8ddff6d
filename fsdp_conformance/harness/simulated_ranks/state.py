"""State that Python and torch keep once per process, switched with the turn so that each rank has a copy."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping

import numpy as np
import torch

from fsdp_conformance.harness import context
from fsdp_conformance.harness.context import RankContext


class RankState:
    """
    The state of one rank: the random numbers of torch's CPU generator, numpy and Python, the default dtype, environment
    variables, and the rank's context.

    It starts as a copy of the process's state, with a new context, so that all ranks start alike.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._variables = dict(variables or {})
        self._context = RankContext()
        self._save_random()

    def save(self) -> None:
        """Copy the state of the process."""
        self._save_random()
        for name in self._variables:
            self._variables[name] = os.environ.get(name, "")
        self._context = context.current()

    def restore(self) -> None:
        """Make it the state of the process."""
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        if torch.get_default_dtype() != self._dtype:
            torch.set_default_dtype(self._dtype)
        os.environ.update(self._variables)
        context.switch_to(self._context)

    def _save_random(self) -> None:
        self._torch = torch.get_rng_state()
        self._numpy = np.random.get_state()
        self._python = random.getstate()
        self._dtype = torch.get_default_dtype()
