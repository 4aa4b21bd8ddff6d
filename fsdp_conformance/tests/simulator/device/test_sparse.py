"""Sparse tensors in coordinate format: the CPU's numbers, races in indices and values, optimizers, the all-reduce."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.checker.hazard import HazardKind
from fsdp_conformance.simulator.device import process_group
from fsdp_conformance.simulator.device import torch_sim as sim
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own
from fsdp_conformance.tests.simulator.simulator_ranks import OnSim

pytestmark = compiled

# Said aloud, because torch warns of what is off by default. The checks would make the host wait, and hide races.
torch.sparse.check_sparse_tensor_invariants.disable()

Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

#: Optimizers that accept sparse gradients.
OPTIMIZERS: dict[str, Optimizers] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(parameters, lr=0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


def made(device: str = "sim") -> Tensor:
    """Row 0 once, row 1 twice."""
    indices = torch.tensor([[0, 1, 1]], device=device)
    return torch.sparse_coo_tensor(indices, torch.arange(9.0, device=device).view(3, 3), (4, 3))


def trained(device: str, optimizers: Optimizers, *, to_none: bool = True) -> list[Tensor]:
    """The parameters after three steps with sparse gradients."""
    torch.manual_seed(0)
    embedding = nn.Embedding(10, 3, sparse=True).to(device)
    bag = nn.EmbeddingBag(10, 3, sparse=True, mode="sum").to(device)
    parameters = [*embedding.parameters(), *bag.parameters()]
    optimizer = optimizers(parameters)
    for step in range(3):
        words = torch.tensor([[1, 2, 2], [step, 5, 1]], device=device)
        (embedding(words).square().sum() + bag(words).square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    return [parameter.detach().cpu() for parameter in parameters]


def kinds() -> list[HazardKind]:
    """The hazards so far, which are then cleared."""
    hazard_kinds = [hazard.kind for hazard in checker.hazards()]
    checker.clear()
    return hazard_kinds


class TestNumbers:
    """Equal to the CPU's."""

    @in_process_of_its_own
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_training(self, optimizer: str) -> None:
        """Gradients that are dropped after each step, and those that are set to zero; no hazard, nothing unwritten."""
        with checker.uninitialized():
            for to_none in (True, False):
                expected = trained("cpu", OPTIMIZERS[optimizer], to_none=to_none)
                got = trained("sim", OPTIMIZERS[optimizer], to_none=to_none)
                assert all(map(torch.equal, expected, got)), to_none

    @in_process_of_its_own
    def test_operations(self) -> None:
        """Those that take a sparse tensor apart, compute with one, or make one."""
        programs: dict[str, Callable[[str], Tensor]] = {
            "to": lambda device: made("cpu").to(device),
            "coalesce": lambda device: made(device).coalesce(),
            "values": lambda device: made(device).coalesce().values(),
            "indices": lambda device: made(device).coalesce().indices(),
            "to_dense": lambda device: made(device).to_dense(),
            "to_sparse": lambda device: torch.eye(3, device=device).to_sparse(),
            "add": lambda device: made(device) + made(device),
            "add to dense": lambda device: torch.ones(4, 3, device=device).add_(made(device), alpha=-0.5),
            "add in place": lambda device: made(device).add_(made(device)),
            "add to zero": lambda device: made(device).zero_().add_(made(device)),
            "mul": lambda device: made(device).mul_(2.0),
            "half": lambda device: made(device).half(),
            "sum": lambda device: torch.sparse.sum(made(device)),
            "norm": lambda device: made(device).norm(),
            "clone": lambda device: made(device).clone(),
            "copy_": lambda device: made(device).zero_().copy_(made(device)),
            "detach": lambda device: made(device).detach(),
            "cat": lambda device: torch.cat([made(device), made(device)]),
            "mask": lambda device: torch.ones(4, 3, device=device).sparse_mask(made(device).coalesce()),
            "zeros": lambda device: torch.zeros(3, 3, device=device, layout=torch.sparse_coo),
            "mm": lambda device: torch.eye(4, device=device).to_sparse() @ torch.ones(4, 2, device=device),
        }
        for name, program in programs.items():
            expected, got = program("cpu"), program("sim:1" if name == "clone" else "sim").cpu()
            assert expected.layout == got.layout, name
            assert expected.dtype == got.dtype, name
            if expected.is_sparse:
                assert expected.is_coalesced() == got.is_coalesced(), name
                expected, got = expected.to_dense(), got.to_dense()
            assert torch.equal(expected, got), name

    @in_process_of_its_own
    def test_devices(self) -> None:
        """A result is where its arguments are, whichever device is the current one."""
        for program in (
            lambda: made("sim:1").coalesce(),
            lambda: made("sim:1").clone(),
            lambda: made("sim:1") * 2,
            lambda: torch.empty_like(made("sim:1")),
            lambda: torch.eye(2, device="sim:1").to_sparse(),
        ):
            assert program().device == torch.device("sim:1")
        with pytest.raises(RuntimeError, match="at least two devices"):
            made("sim:0").add_(made("sim:1"))

    @in_process_of_its_own
    def test_other_formats_are_refused_by_name(self) -> None:
        """Compressed sparse tensors."""
        with pytest.raises(NotImplementedError, match="_to_sparse_csr: expected a strided or a sparse COO"):
            torch.eye(2, device="sim").to_sparse_csr()


class TestAccesses:
    """Operations read and write the memory of indices and values."""

    @in_process_of_its_own
    @pytest.mark.parametrize("part", ["indices", "values"])
    def test_parts_that_another_stream_writes(self, part: str) -> None:
        """Each part on its own; with a wait there is nothing to find."""
        for waits in (False, True):
            indices = torch.tensor([[0, 1]], device="sim")
            values = torch.ones(2, 3, device="sim")
            weight = torch.zeros(4, 3, device="sim")
            side = sim.Stream()
            side.wait_stream(sim.current_stream())
            with sim.stream(side):
                (indices if part == "indices" else values).mul_(1)
            if waits:
                sim.current_stream().wait_stream(side)
            weight.add_(torch.sparse_coo_tensor(indices, values, (4, 3)))
            assert kinds() == ([] if waits else [HazardKind.READ_AFTER_WRITE])

    @in_process_of_its_own
    def test_a_result_that_another_stream_reads(self) -> None:
        """The memory that the operation has made, and values that it has changed in place."""
        side = sim.Stream()
        gradient = made()
        side.wait_stream(sim.current_stream())
        gradient.mul_(2)
        with sim.stream(side):
            gradient.to_dense()
        assert kinds() == [HazardKind.READ_AFTER_WRITE]
        total = made().coalesce() + made().coalesce()
        with sim.stream(side):
            total.to_dense()
        assert HazardKind.READ_AFTER_WRITE in kinds()

    @in_process_of_its_own
    def test_the_host_waits_for_coalesce(self) -> None:
        """As on CUDA, where it must know how many indices there are."""
        data = torch.ones(2).pin_memory()
        copy = data.to("sim", non_blocking=True)
        made().coalesce()
        data.zero_()
        assert kinds() == []
        assert copy.tolist() == [1, 1]

    @in_process_of_its_own
    def test_unwritten_values(self) -> None:
        """They are found where they are used; values that are written are not."""
        with checker.uninitialized():
            for fill in (False, True):
                indices = torch.tensor([[0, 1]], device="sim")
                values = torch.empty(2, 3, device="sim")
                if fill:
                    values.fill_(1.0)
                torch.sparse_coo_tensor(indices, values, (4, 3)).coalesce()._values().sum().item()
                assert kinds() == ([] if fill else [HazardKind.UNINITIALIZED_READ])


class Reductions(OnSim):
    """The all-reduce that gloo has and NCCL has not."""

    @pytest.mark.slow
    def test_as_gloo(self) -> None:
        """The same result as gloo's on the CPU, also where a rank has nothing, and in a subgroup."""
        with process_group.as_gloo(True):
            group = dist.new_group([0, 1])
        for rows in ([self.rank, 3, 3], [1] if self.rank else [], []):
            expected, got = (self._reduced(rows, device, group) for device in ("cpu", str(self.device)))
            self.assertTrue(got.is_coalesced())
            self.assertEqual(expected.coalesce().indices().tolist(), got.cpu().indices().tolist())
            self.assertEqual(expected.coalesce().values().tolist(), got.cpu().values().tolist())
        self.assertEqual([], self.found())

    def _reduced(self, rows: list[int], device: str, group: dist.ProcessGroup) -> Tensor:
        indices = torch.tensor([rows], dtype=torch.int64, device=device)
        gradient = torch.sparse_coo_tensor(indices, torch.full((len(rows), 2), self.rank + 1.0, device=device), (6, 2))
        dist.all_reduce(gradient, group=group)
        return gradient

    def test_what_nccl_says(self) -> None:
        """Without gloo it is refused, and gloo sums only."""
        gradient = made(str(self.device))
        with self.assertRaisesRegex(RuntimeError, "NCCL does not support all_reduce with sparse tensors"):
            dist.all_reduce(gradient)
        with process_group.as_gloo(True):
            group = dist.new_group([0, 1])
        with self.assertRaisesRegex(ValueError, "only works with ReduceOp.SUM"):
            dist.all_reduce(gradient, op=dist.ReduceOp.MAX, group=group)

    def test_missing_wait(self) -> None:
        """A gradient that is used before the stream waits, and one that is overwritten before."""
        with process_group.as_gloo(True):
            group = dist.new_group([0, 1])
        for use, kind in (
            (lambda gradient, values: gradient.to_dense(), HazardKind.READ_AFTER_WRITE),
            (lambda gradient, values: values.zero_(), HazardKind.WRITE_AFTER_READ),
        ):
            gradient = made(str(self.device))
            values = gradient._values()
            work = dist.all_reduce(gradient, group=group, async_op=True)
            use(gradient, values)
            self.assertEqual({kind}, {hazard.kind for hazard in checker.hazards()})
            checker.clear()
            work.wait()
            use(gradient, values)
            self.assertEqual([], self.found())

    def test_ddp(self) -> None:
        """DDP's gradients of an embedding: parameters as on the CPU, and no hazard."""
        with process_group.as_gloo(True):
            group = dist.new_group([0, 1])
        expected, got = (self._trained(device, group) for device in ("cpu", str(self.device)))
        self.assertEqual([one.tolist() for one in expected], [one.tolist() for one in got])
        self.assertEqual([], self.found())

    def _trained(self, device: str, group: dist.ProcessGroup) -> list[Tensor]:
        torch.manual_seed(0)
        model = DistributedDataParallel(
            nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 2)).to(device), process_group=group
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        for step in range(3):
            words = torch.tensor([[self.rank + 1, 2, 2], [step, 5, 1]], device=device)
            optimizer.zero_grad()
            model(words).square().sum().backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]
