"""A sharded model and its optimizer through torch.distributed.checkpoint, at other numbers of ranks and other units."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fsdp_conformance.engine.fully_sharded.model_state import load_sharded_state_dict, sharded_state_dict
from fsdp_conformance.engine.fully_sharded.optimizer_state import (
    full_optimizer_state,
    load_optimizer_state,
    sharded_optimizer_state,
)
from fsdp_conformance.engine.fully_sharded.wrapper import FullyShardedDataParallel
from fsdp_conformance.tests.engine.fully_sharded.checkpoint_ranks import CheckpointTestCase
from fsdp_conformance.tests.engine.fully_sharded.sharded_ranks import LEARNING_RATE, chain, full_params, sharded


class TestCheckpoint(CheckpointTestCase):
    """Four ranks; some models are sharded over two of them."""

    @property
    def world_size(self) -> int:
        return 4

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_saved_on_four_loaded_on_two(self) -> None:
        """Training saved on four ranks resumes on two, with other units, as if it had not been interrupted."""
        directory = self.shared_directory()
        subject = sharded(chain())
        optimizer = self.adam(subject)
        self.train(subject, optimizer=optimizer)
        save(
            {"model": sharded_state_dict(subject), "optimizer": sharded_optimizer_state(subject, optimizer)},
            storage_writer=FileSystemWriter(directory),
        )
        params, state = full_params(subject), full_optimizer_state(subject, optimizer)
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        other = FullyShardedDataParallel(chain(), groups[self.rank // 2])
        restored = self.adam(other)
        self.fill_state(other, restored)
        loaded: dict[str, Any] = {
            "model": sharded_state_dict(other),
            "optimizer": sharded_optimizer_state(other, restored),
        }
        load(loaded, storage_reader=FileSystemReader(directory), process_group=groups[self.rank // 2])
        load_sharded_state_dict(other, loaded["model"])
        load_optimizer_state(other, restored, loaded["optimizer"])
        for name, value in full_params(other).items():
            self.assertTrue(torch.equal(params[name], value), msg=name)
        loaded_state = full_optimizer_state(other, restored)
        for name, entries in state["state"].items():
            for key, value in entries.items():
                self.assertTrue(torch.equal(value, loaded_state["state"][name][key]), msg=f"{name} {key}")

    def adam(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
