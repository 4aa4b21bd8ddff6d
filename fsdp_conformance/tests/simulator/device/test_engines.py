"""torch's engines train on the simulated accelerator, to the bit as on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from fsdp_conformance.simulator import checker
from fsdp_conformance.tests.harness.recording.small_training import ThreeLinear
from fsdp_conformance.tests.simulator.simulator_ranks import OnSim, compiled
from fsdp_conformance.tests.torch_versions import FSDP2_TRAINS_ON_THE_CPU

pytestmark = compiled


def wrapped(engine: str, model: nn.Module, device: torch.device) -> nn.Module:
    """The model under one of torch's engines."""
    match engine:
        case "ddp":
            return DistributedDataParallel(model)
        case "fsdp1":
            return FullyShardedDataParallel(
                model,
                auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
                device_id=device,
                use_orig_params=True,
            )
        case _:
            assert isinstance(model, ThreeLinear)
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            return model


def train(engine: str, device: torch.device, steps: int = 3) -> list[Tensor]:
    """The losses of a rank, on the CPU."""
    model = wrapped(engine, ThreeLinear().to(device), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        batch = torch.randn(4, 5, generator=generator).to(device, non_blocking=True)
        loss = model(batch).square().mean()
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if device.type == "cpu":
        return losses
    with checker.suspended():
        return [loss.cpu() for loss in losses]


@pytest.mark.slow
class Training(OnSim):
    """torch's engines train on it, to the bit as on the CPU with gloo, and without a hazard."""

    @pytest.mark.nightly
    def test_engines(self) -> None:
        """DDP, FSDP1 and FSDP2."""
        for engine in ("ddp", "fsdp1", *(["fsdp2"] if FSDP2_TRAINS_ON_THE_CPU else [])):
            with self.subTest(engine):
                expected = train(engine, torch.device("cpu"))
                accesses = checker.accesses()
                got = train(engine, self.device)
                self.assertEqual([loss.item() for loss in expected], [loss.item() for loss in got])
                self.assertEqual([], self.found())
                self.assertGreater(checker.accesses(), accesses + 100)
                with checker.without_waits():
                    train(engine, self.device)
                    self.assertGreater(checker.num_hazards(), 0, msg="the positive control")
                checker.clear()


@pytest.mark.nightly
class TrainingOnFour(Training):
    """The same on four ranks."""

    world_size = 4
