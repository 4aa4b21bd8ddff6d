"""Ranks that save a sharded model and load it, in a directory that all of them see."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fsdp_conformance.tests.engine.fully_sharded.sharded_ranks import ShardedTestCase


class CheckpointTestCase(ShardedTestCase):
    """Base class of tests whose ranks save and load."""

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
