"""
The case that `ci/bench/harness` times: FSDP2 trained against DDP on four ranks, once per harness.

The body is the same object for both, so only the starting, supervising and ending of ranks differs.
"""

from __future__ import annotations

import copy
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_distributed import MultiProcessTestCase

from fsdp_conformance.harness.testcase import ShardedTrainingTestCase

WORLD_SIZE = 4
STEPS = 4
SIZES = (33, 64, 47, 8)


class ParityBody:
    """The rank's body in both test cases."""

    world_size = WORLD_SIZE

    def train_and_compare(self) -> None:
        """Compare FSDP2's losses with DDP's at every step, and write the training time next to the store."""
        began = time.perf_counter()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(*shape), nn.ReLU()) for shape in pairwise(SIZES)]
        model = nn.Sequential(*layers)
        reference = DistributedDataParallel(copy.deepcopy(model))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (reference, model)]
        generator = torch.Generator().manual_seed(1 + self.rank)  # type: ignore[attr-defined]
        for _ in range(STEPS):
            batch = torch.randn(6, SIZES[0], generator=generator)
            losses = []
            for each, optimizer in zip((reference, model), optimizers, strict=True):
                optimizer.zero_grad()
                losses.append(each(batch).square().mean())
                losses[-1].backward()
                optimizer.step()
            self.assertEqual(*losses)  # type: ignore[attr-defined]
        seconds = time.perf_counter() - began
        Path(f"{self.file_name}.seconds{self.rank}").write_text(str(seconds))  # type: ignore[attr-defined]

    def start_group(self) -> None:
        """Start the default process group from the case's rendezvous file."""
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{self.file_name}",  # type: ignore[attr-defined]
            rank=self.rank,  # type: ignore[attr-defined]
            world_size=self.world_size,
        )

    def training_seconds(self) -> float:
        """Training seconds of the slowest rank. Removes the files."""
        files = [Path(f"{self.file_name}.seconds{rank}") for rank in range(WORLD_SIZE)]  # type: ignore[attr-defined]
        slowest = max(float(file.read_text()) for file in files)
        for file in files:
            file.unlink()
        return slowest


class OnTorch(ParityBody, MultiProcessTestCase):
    """The case on torch's harness: four spawned processes."""

    training_s = 0.0

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def test_parity(self) -> None:
        self.start_group()
        self.train_and_compare()

    def tearDown(self) -> None:
        self.training_s = self.training_seconds()
        super().tearDown()
        Path(self.file_name).unlink(missing_ok=True)


class OnOurs(ParityBody, ShardedTrainingTestCase):
    """The case on our harness: four ranks from the warm process."""

    training_s = 0.0

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def test_parity(self) -> None:
        self.start_group()
        self.train_and_compare()

    def tearDown(self) -> None:
        self.training_s = self.training_seconds()
        super().tearDown()


class OnOursReused(OnOurs):
    """The case on our harness, on reused ranks."""

    reuse_ranks = True
