"""
The fully sharded module under every two of its options together, on the simulated accelerator.

Strategy, init mode, offload, prefetch, precision and number of ranks: bitwise as on the CPU, without a hazard, and each
combination once more without waits, to show that its hazards would be seen.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_conformance.engine.fully_sharded.wrapper import FullyShardedDataParallel
from fsdp_conformance.engine.sharding_strategy import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_conformance.simulator import checker
from fsdp_conformance.tests.engine.fully_sharded.covering import Combination, covering, pairs
from fsdp_conformance.tests.engine.fully_sharded.sharded_ranks import LEARNING_RATE, batch, chain, full_params, sharded
from fsdp_conformance.tests.simulator.simulator_ranks import OnSim, compiled

AXES = {
    "strategy": tuple(ShardingStrategy),
    "init": ("before", "after", "never"),
    "offload": ("off", "pageable", "pinned"),
    "prefetch": ("pre", "post", "none", "forward"),
    "precision": ("own", "low", "low, reduced in float32"),
    "accumulation": ("none", "synchronised", "deferred", "replicas deferred"),
    "ranks": (2, 4),
}

PRECISION = {
    "own": None,
    "low": MixedPrecision(param_dtype=torch.bfloat16),
    "low, reduced in float32": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


def is_legal(row: Combination) -> bool:
    """Two ranks are too few for hybrid strategies, which alone have replicas; what is offloaded is not moved later."""
    moved_later, offloaded = row["init"] == "after", row["offload"] != "off"
    if moved_later and offloaded:
        return False
    if row["strategy"].is_hybrid:
        return bool(row["ranks"] == 4)
    return bool(row["accumulation"] != "replicas deferred")


ROWS = covering(AXES, is_legal)


class Matrix(OnSim):
    """The combinations with as many ranks as a subclass has."""

    case_timeout_s = 300.0

    def check_all(self) -> None:
        checker.set_reuse(checker.Reuse.WORST_CASE)
        for row in ROWS:
            if row["ranks"] != self.world_size:
                continue
            expected = self._trained(row, torch.device("cpu"))
            got = self._trained(row, torch.device(self.device))
            self.assertEqual([], self.found(), msg=str(row))
            for name, value in expected.items():
                self.assertTrue(torch.equal(value, got[name]), msg=f"{row}: {name}={got[name]}, not {value}")
            with checker.without_waits():
                self._trained(row, torch.device(self.device))
            self.assertNotEqual([], self.found(), msg=f"nothing is seen without waits: {row}")

    def _trained(self, row: Combination, device: torch.device) -> dict[str, Tensor]:
        """Full parameters after two steps."""
        model: nn.Module = chain()
        if row["init"] == "before":
            model.to(device)
        subject = sharded(model, **_options(row, device, self.world_size))
        if row["init"] == "after":
            subject.to(device)
        optimizer = torch.optim.SGD(subject.parameters(), lr=LEARNING_RATE, momentum=0.5)
        inputs = [batch(self.rank, number).to(device) for number in range(4)]
        for step in range(2):
            _backward(subject, inputs[2 * step : 2 * step + 2], row["accumulation"])
            optimizer.step()
            optimizer.zero_grad()
        with checker.suspended():
            return {name: value.cpu() for name, value in full_params(subject).items()}


def _options(row: Combination, device: torch.device, world_size: int) -> dict[str, Any]:
    prefetch = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST}
    options = {
        "sharding_strategy": row["strategy"],
        "cpu_offload": CPUOffload(offload_params=row["offload"] != "off", pin_memory=row["offload"] == "pinned"),
        "backward_prefetch": prefetch.get(row["prefetch"]),
        "forward_prefetch": row["prefetch"] == "forward",
        "mixed_precision": PRECISION[row["precision"]],
    }
    if row["init"] == "never":
        options["device_id"] = device
    if row["strategy"].is_hybrid:
        options["device_mesh"] = init_device_mesh(
            device.type, (2, world_size // 2), mesh_dim_names=("replicate", "shard")
        )
    return options


def _backward(model: FullyShardedDataParallel, inputs: list[Tensor], accumulation: str) -> None:
    first, last = inputs
    if accumulation == "synchronised":
        model(first).float().sum().backward()
    elif accumulation != "none":
        with model.no_sync() if accumulation == "deferred" else model.no_all_reduce():
            model(first).float().sum().backward()
    model(last).float().sum().backward()


@compiled
class TestOnTwoRanks(Matrix):
    """All strategies but the hybrid ones."""

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_every_pair_of_options(self) -> None:
        """Parameters are those of the CPU, without a hazard; without waits there are hazards."""
        self.check_all()


@compiled
class TestOnFourRanks(Matrix):
    """Hybrid strategies have two shard groups of two, the others one of four."""

    world_size = 4

    @pytest.mark.slow
    @pytest.mark.nightly
    def test_every_pair_of_options(self) -> None:
        """Parameters are those of the CPU, without a hazard; without waits there are hazards."""
        self.check_all()


def test_every_legal_pair_is_there() -> None:
    """Every legal pair of values is in a combination that is run, and few combinations are run."""
    legal = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    legal_pairs = {pair for row in legal if is_legal(row) for pair in pairs(row)}

    assert legal_pairs == {pair for row in ROWS for pair in pairs(row)}
    assert len(ROWS) < 30


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_covering_is_complete(size: int) -> None:
    """The helper itself, on axes without a rule: all pairs, in no more rows than there are combinations."""
    axes = {name: tuple(range(size)) for name in "abcd"}
    rows = covering(axes)

    assert len({pair for row in rows for pair in pairs(row)}) == 6 * size**2
    assert size**2 <= len(rows) <= size**3
