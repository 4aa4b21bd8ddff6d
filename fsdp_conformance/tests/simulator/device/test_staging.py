"""Values on their way between ranks: large ones share memory one after another, and never at the same time."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.checker.hazard import HazardKind
from fsdp_conformance.simulator.device import memory
from fsdp_conformance.simulator.device import torch_sim as sim
from fsdp_conformance.tests.simulator.simulator_ranks import OnSim, compiled

pytestmark = compiled

#: Elements of float32: below the size from which memory is kept, that size, and above.
SIZES = ((1 << 18) - 1, 1 << 18, (1 << 18) + 1, 3 << 18)


class Staging(OnSim):
    """On two ranks."""

    def test_one_after_another(self) -> None:
        """Nothing of an earlier call is left in a later one, of another size too."""
        for step, size in enumerate((*SIZES, *reversed(SIZES))):
            mine = torch.full((size,), float(step + self.rank), device=self.device)
            dist.all_reduce(mine)
            self.assertEqual({2.0 * step + 1}, set(mine.unique().tolist()))
        self.assert_kinds([])

    def test_several_in_flight(self) -> None:
        """Calls that have not ended do not share memory."""
        tensors = [torch.full((SIZES[1],), float(10 * step + self.rank), device=self.device) for step in range(4)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for step, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
            work.wait()
            self.assertEqual({20.0 * step + 1}, set(tensor.unique().tolist()))
        self.assert_kinds([])

    def test_what_is_kept_is_freed_on_request(self) -> None:
        """Before the memory of the process is measured, where it would look like the engine's."""
        memory.free_staging()
        mine = torch.ones(SIZES[3], device=self.device)
        for _ in range(3):  # The process group holds the values of the last call.
            dist.all_reduce(mine)
        self.assertEqual(8.0, mine.unique().item())
        self.assertGreaterEqual(memory.free_staging(), 4 * SIZES[3])
        self.assertEqual(0, memory.free_staging())
        self.assert_kinds([])

    def test_other_calls(self) -> None:
        """Pieces, strided tensors, and bytes that are not floating-point numbers."""
        size = SIZES[2]
        whole = torch.empty(2 * size, device=self.device)
        dist.all_gather_into_tensor(whole, torch.full((size,), float(self.rank), device=self.device))
        self.assertEqual([0.0, 1.0], [half.unique().item() for half in whole.chunk(2)])
        strided = [torch.full((2, size), float(part), device=self.device).t() for part in range(2)]
        shard = torch.empty(size, 2, device=self.device)
        dist.reduce_scatter(shard, strided)
        self.assertEqual(2.0 * self.rank, shard.unique().item())
        swapped = torch.empty(2 * size, dtype=torch.int64, device=self.device)
        dist.all_to_all_single(swapped, torch.full((2 * size,), self.rank + 5, device=self.device))
        self.assertEqual([5, 6], [half.unique().item() for half in swapped.chunk(2)])
        self.assert_kinds([])

    @pytest.mark.slow
    def test_a_group_of_one_rank(self) -> None:
        """A reduction only scales its tensor, and is checked like any other."""
        groups = [dist.new_group([rank]) for rank in range(self.world_size)]
        mine = torch.full((SIZES[1],), 3.0, device=self.device)
        dist.all_reduce(mine, group=groups[self.rank])
        dist.all_reduce(mine, op=dist.ReduceOp.AVG, group=groups[self.rank])
        self.assertEqual(3.0, mine.unique().item())
        dist.all_reduce(mine, op=torch._C._distributed_c10d._make_nccl_premul_sum(2.0), group=groups[self.rank])
        self.assertEqual(6.0, mine.unique().item())
        self.assert_kinds([])
        work = dist.all_reduce(mine, group=groups[self.rank], async_op=True)
        mine.add_(1)
        self.assert_kinds([HazardKind.READ_AFTER_WRITE])
        work.wait()

    def test_a_racing_reduction_of_one_rank_is_poisoned(self) -> None:
        """In the mode that shows what a race touches."""
        groups = [dist.new_group([rank]) for rank in range(self.world_size)]
        mine, side = torch.ones(4, device=self.device), sim.Stream()
        with checker.mode("poison"):
            side.wait_stream(sim.current_stream())
            with sim.stream(side):
                mine.mul_(2)
            dist.all_reduce(mine, group=groups[self.rank])
            with checker.suspended():
                self.assertTrue(bool(mine.isnan().all()))
        checker.clear()
