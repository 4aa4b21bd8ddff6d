"""Ranks that save a sharded model and load it, in a directory that all of them see."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_conformance.tests.engine.fully_sharded.sharded_ranks import ShardedTestCase


class CheckpointTestCase(ShardedTestCase):
    """Ranks that save and load."""

    def fill_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """State of the right shape, to be loaded into, without a step on parameters."""
        before = copy.deepcopy({id(p): p.detach().clone() for p in model.parameters()})
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(before[id(parameter)])

    def shared_directory(self) -> Path:
        """A directory that all ranks see, and that goes with the test."""
        made: list[Any] = [None]
        if self.rank == 0:
            directory = tempfile.TemporaryDirectory()
            self.addCleanup(directory.cleanup)
            made = [directory.name]
        dist.broadcast_object_list(made)
        return Path(made[0])
