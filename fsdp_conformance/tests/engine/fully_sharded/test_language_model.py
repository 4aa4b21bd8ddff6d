"""A language model is trained by the engine, interrupted, and goes on at another number of ranks."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fsdp_conformance.engine.fully_sharded.model_state import load_sharded_state_dict, sharded_state_dict
from fsdp_conformance.engine.fully_sharded.optimizer_state import load_optimizer_state, sharded_optimizer_state
from fsdp_conformance.engine.fully_sharded.wrap_policy import ClassPolicy
from fsdp_conformance.engine.fully_sharded.wrapper import FullyShardedDataParallel
from fsdp_conformance.tests.engine.fully_sharded.checkpoint_ranks import CheckpointTestCase
from fsdp_conformance.tests.engine.fully_sharded.language_model import (
    Layer,
    adam,
    language_model,
    step_loss,
    unsharded_losses,
)

#: Steps before the interruption, and of the whole run.
INTERRUPTED, STEPS = 120, 240


@pytest.mark.nightly
class TestLanguageModel(CheckpointTestCase):
    """Four ranks, of which two begin."""

    @property
    def world_size(self) -> int:
        return 4

    def test_resumed_at_another_world_size(self) -> None:
        """The losses of both halves are those of an uninterrupted unsharded run, and the model learns."""
        directory = self.shared_directory()
        pair = dist.new_group([0, 1])
        losses: list[float] = []
        if self.rank < 2:
            model, optimizer = self.wrapped(pair)
            losses += self.losses(model, optimizer, range(INTERRUPTED), pair)
            save(
                {"model": sharded_state_dict(model), "optimizer": sharded_optimizer_state(model, optimizer)},
                storage_writer=FileSystemWriter(directory),
                process_group=pair,
            )
        dist.barrier()

        model, optimizer = self.wrapped(dist.group.WORLD)
        self.fill_state(model, optimizer)
        loaded = {"model": sharded_state_dict(model), "optimizer": sharded_optimizer_state(model, optimizer)}
        load(loaded, storage_reader=FileSystemReader(directory))
        load_sharded_state_dict(model, loaded["model"])
        load_optimizer_state(model, optimizer, loaded["optimizer"])
        losses += self.losses(model, optimizer, range(INTERRUPTED, STEPS), dist.group.WORLD)

        if self.rank == 0:
            expected = unsharded_losses(STEPS)
            torch.testing.assert_close(losses, expected, rtol=1e-7, atol=0.0)
            self.assertLess(sum(expected[-10:]) / 10, 0.75 * expected[0])

    def wrapped(self, group: ProcessGroup | None) -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
        model = FullyShardedDataParallel(language_model(), group, auto_wrap_policy=ClassPolicy({Layer}))
        return model, adam(model)

    def losses(
        self,
        model: FullyShardedDataParallel,
        optimizer: torch.optim.Optimizer,
        steps: Iterable[int],
        group: ProcessGroup | None,
    ) -> list[float]:
        """Train, and say the mean losses over the ranks of a group."""
        means = []
        for step in steps:
            loss = step_loss(model, step, dist.get_rank(group), dist.get_world_size(group))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=group)
            means.append(mean.item() / dist.get_world_size(group))
        return means
