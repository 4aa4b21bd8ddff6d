"""Partly written buffers in a reduce-scatter: to carry padding is not to use unwritten memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.checker.hazard import HazardKind
from fsdp_conformance.tests.simulator.simulator_ranks import OnSim, compiled

pytestmark = compiled

USE = HazardKind.UNINITIALIZED_READ


class UnwrittenParts(OnSim):
    """On two ranks: of eight elements the last three are padding, which belong to the second rank."""

    def init_rank(self) -> None:
        super().init_rank()
        checker.set_uninitialized(True)

    def padded(self) -> Tensor:
        """The buffer, of which five elements are written."""
        buffer = torch.empty(8, device=self.device)
        buffer[:5] = 1.0
        return buffer

    def assert_padding_is_unwritten(self, shard: Tensor) -> None:
        """The second rank's shard has one element that is written, and the first rank's has four."""
        shard[:1].sum().item()
        self.assert_kinds([])
        shard.sum().item()
        self.assert_kinds([USE] if self.rank == 1 else [])

    def test_reduce_scatter_of_a_tensor(self) -> None:
        """The result is unwritten where this rank's part of the input is."""
        shard = torch.empty(4, device=self.device)
        dist.reduce_scatter_tensor(shard, self.padded())
        self.assert_padding_is_unwritten(shard)

    def test_reduce_scatter_with_a_result_in_the_input(self) -> None:
        """The input's bytes count as they were before the call."""
        buffer = self.padded()
        shard = buffer[4 * self.rank : 4 * self.rank + 4]
        dist.reduce_scatter_tensor(shard, buffer)
        self.assert_padding_is_unwritten(shard)

    def test_reduce_scatter_of_a_list(self) -> None:
        """A tensor of the list may be padding only."""
        shard = torch.empty(4, device=self.device)
        dist.reduce_scatter(shard, list(self.padded().split(4)))
        self.assert_padding_is_unwritten(shard)
        whole, padding = torch.ones(4, device=self.device), torch.empty(4, device=self.device)
        dist.reduce_scatter(shard, [whole, padding])
        self.assert_kinds([])
        shard.sum().item()
        self.assert_kinds([USE] if self.rank == 1 else [])

    def test_reduce_scatter_of_several_tensors(self) -> None:
        """Each has its own padding."""
        shards = [torch.empty(4, device=self.device) for _ in range(2)]
        with distributed_c10d._coalescing_manager(device=torch.device(self.device)):
            for shard, buffer in zip(shards, (torch.ones(8, device=self.device), self.padded()), strict=True):
                dist.reduce_scatter_tensor(shard, buffer)
        shards[0].sum().item()
        self.assert_kinds([])
        self.assert_padding_is_unwritten(shards[1])

    def test_nothing_is_written(self) -> None:
        """Then the collective itself is the mistake, and its result is written."""
        for call in (
            lambda shard: dist.reduce_scatter_tensor(shard, torch.empty(8, device=self.device)),
            lambda shard: dist.reduce_scatter(shard, [torch.empty(4, device=self.device) for _ in range(2)]),
        ):
            shard = torch.empty(4, device=self.device)
            call(shard)
            self.assert_kinds([USE])
            shard.sum().item()
            self.assert_kinds([])

    def test_padding_that_is_dropped(self) -> None:
        """It may go through further computations and collectives."""
        shard, whole = torch.empty(4, device=self.device), torch.empty(8, device=self.device)
        dist.reduce_scatter_tensor(shard, self.padded(), op=dist.ReduceOp.AVG)
        shard.mul_(2).add_(torch.ones(4, device=self.device))
        dist.all_gather_into_tensor(whole, shard)
        whole[:5].sum().item()
        self.assert_kinds([])

    def test_padding_in_a_norm(self) -> None:
        """The mistake of engines that sum up squares of a padded shard."""
        shard = torch.empty(4, device=self.device)
        dist.reduce_scatter_tensor(shard, self.padded())
        squares = shard.square().sum()
        dist.all_reduce(squares)
        self.assert_kinds([USE] if self.rank == 1 else [])

    @pytest.mark.slow
    def test_an_onlooker_s_collective(self) -> None:
        """Values that arrive while the thread is suspended, or with the checker off, are written."""
        shard = torch.empty(4, device=self.device)
        with checker.suspended():
            dist.reduce_scatter_tensor(shard, torch.ones(8, device=self.device))
        shard.sum().item()
        other = torch.empty(4, device=self.device)
        with checker.mode("off"):
            dist.reduce_scatter_tensor(other, torch.ones(8, device=self.device))
        other.sum().item()
        self.assert_kinds([])
