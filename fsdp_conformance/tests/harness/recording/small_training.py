"""
A model of three linear layers and the engines of torch that train it, for tests that look at communication.

The layers are 5-7-7-3: odd sizes, so that padding shows. Parameters by layer: 42, 56 and 24, in all 122 or 488 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from fsdp_conformance.harness.context import log

STEPS = 2


def world() -> ProcessGroup:
    """The default group."""
    return _get_default_group()


class ThreeLinear(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)])

    def forward(self, x: Tensor) -> Tensor:
        """The last layer's output."""
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        output: Tensor = self.layers[-1](x)
        return output


class Engine(NamedTuple):
    """A wrapped model, its optimizer, and how to read its parameters in full."""

    module: nn.Module
    optimizer: Any
    full_params: Callable[[], dict[str, Tensor]]


class Trained(NamedTuple):
    """The result of a run on this rank."""

    losses: list[Tensor]
    params: dict[str, Tensor]

    def assert_bitwise_equal(self, other: Trained) -> None:
        """Raises AssertionError, naming the first tensor that differs."""
        mine, theirs = self._named(), other._named()
        if mine.keys() != theirs.keys() or len(mine) < 7:
            raise AssertionError(f"expected names {sorted(theirs)}, got {sorted(mine)}")
        for name, tensor in mine.items():
            if not torch.equal(tensor, theirs[name]):
                raise AssertionError(f"{name}: expected bitwise {theirs[name]}, got {tensor}")

    def _named(self) -> dict[str, Tensor]:
        return {**{f"loss {step}": loss for step, loss in enumerate(self.losses)}, **self.params}


def _sgd(module: nn.Module) -> SGD:
    return SGD(module.parameters(), lr=0.125, momentum=0.5)


def ddp(model: nn.Module) -> Engine:
    """torch's DistributedDataParallel."""
    module = DistributedDataParallel(model)
    return Engine(module, _sgd(module), lambda: {name: p.detach().clone() for name, p in model.named_parameters()})


def zero_redundancy(model: nn.Module) -> Engine:
    """DDP with torch's ZeroRedundancyOptimizer."""
    module = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), optimizer_class=SGD, lr=0.125, momentum=0.5)
    return Engine(module, optimizer, lambda: {name: p.detach().clone() for name, p in model.named_parameters()})


def fsdp1(strategy: ShardingStrategy, *, replicas: int = 1) -> Callable[[nn.Module], Engine]:
    """torch's FullyShardedDataParallel, a unit per layer."""

    def wrap(model: nn.Module) -> Engine:
        module = FullyShardedDataParallel(
            model,
            device_id=torch.device("cpu"),
            use_orig_params=True,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            sharding_strategy=strategy,
            device_mesh=_mesh(replicas),
        )

        def full_params() -> dict[str, Tensor]:
            with FullyShardedDataParallel.summon_full_params(module, writeback=False):
                return {
                    name.replace("_fsdp_wrapped_module.", ""): p.detach().clone()
                    for name, p in module.named_parameters()
                }

        return Engine(module, _sgd(module), full_params)

    return wrap


def fsdp2(
    *, reshard_after_forward: bool, replicas: int = 1, reduce_dtype: torch.dtype | None = None
) -> Callable[[nn.Module], Engine]:
    """torch's fully_shard, a unit per layer."""

    def wrap(model: nn.Module) -> Engine:
        for layer in [*model.get_submodule("layers").children(), model]:
            fully_shard(
                layer,
                mesh=_mesh(replicas),
                reshard_after_forward=reshard_after_forward,
                mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
            )

        def full_params() -> dict[str, Tensor]:
            params = dict(model.named_parameters())
            return {name: p.full_tensor().clone() if isinstance(p, DTensor) else p for name, p in params.items()}

        return Engine(model, _sgd(model), full_params)

    return wrap


def _mesh(replicas: int) -> DeviceMesh:
    if replicas == 1:
        return init_device_mesh("cpu", (dist.get_world_size(),))
    shards = dist.get_world_size() // replicas
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


ENGINES: dict[str, Callable[[nn.Module], Engine]] = {
    "ddp": ddp,
    "zero_redundancy": zero_redundancy,
    "fsdp1_full_shard": fsdp1(ShardingStrategy.FULL_SHARD),
    "fsdp1_shard_grad_op": fsdp1(ShardingStrategy.SHARD_GRAD_OP),
    "fsdp1_no_shard": fsdp1(ShardingStrategy.NO_SHARD),
    "fsdp2_reshard": fsdp2(reshard_after_forward=True),
    "fsdp2_keep": fsdp2(reshard_after_forward=False),
    # With float16 FSDP2 sums and divides by itself, where it has the backend average otherwise.
    "fsdp2_reduce_float16": fsdp2(reshard_after_forward=True, reduce_dtype=torch.float16),
}

#: Those that need four ranks: two replicas of two shards.
HYBRIDS: dict[str, Callable[[nn.Module], Engine]] = {
    "fsdp1_hybrid_shard": fsdp1(ShardingStrategy.HYBRID_SHARD, replicas=2),
    "fsdp2_hybrid_shard": fsdp2(reshard_after_forward=True, replicas=2),
}


def train(
    engine_name: str,
    *,
    prepare: Callable[[nn.Module], None] = lambda model: None,
    at: Callable[[str, int], None] = lambda point, step: None,
) -> Trained:
    """
    Train STEPS steps on data that differs between ranks and steps, labelling the phases in the process's log.

    `prepare` gets the model before it is wrapped; `at` is told of the points after_loss and before_step.
    """
    with log().phase("setup"):
        model = ThreeLinear()
        prepare(model)
        engine = {**ENGINES, **HYBRIDS}[engine_name](model)
    losses = []
    for step in range(STEPS):
        data = torch.Generator().manual_seed(100 * step + dist.get_rank())
        with log().phase("forward", step):
            loss = engine.module(torch.randn(4, 5, generator=data)).square().mean()
        at("after_loss", step)
        with log().phase("backward", step):
            loss.backward()
        at("before_step", step)
        with log().phase("step", step):
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        losses.append(loss.detach())
    with log().phase("observe"):
        return Trained(losses, engine.full_params())
