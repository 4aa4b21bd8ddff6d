"""Parameters of integers, as quantised weights are: sharded and gathered as they are, and never cast or reduced."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_conformance.engine.errors import ParameterMoved
from fsdp_conformance.engine.fully_sharded.checkpoint import load_checkpoint, save_checkpoint
from fsdp_conformance.engine.fully_sharded.order_watch import tag_of
from fsdp_conformance.engine.fully_sharded.wrapper import FullyShardedDataParallel
from fsdp_conformance.engine.sharding_strategy import CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.harness.simulated_ranks.ranks import run_ranks

KINDS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
TIMEOUT_S = 120.0


class Packed(nn.Module):
    """A layer beside one whose weight is integers, for which there is a factor."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        codes = torch.arange(15).view(5, 3) % 2 if dtype is torch.bool else torch.arange(15).view(5, 3) + 112
        self.codes = nn.Parameter(codes.to(dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor([0.25]))
        self.linear = nn.Linear(3, 3)
        nn.init.constant_(self.linear.weight, 0.5)
        nn.init.zeros_(self.linear.bias)
        self.gathered: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.gathered.add(self.codes.dtype)
        low = self.codes.to(x.dtype) % 4
        output: Tensor = self.linear(nn.functional.linear(x, low.T @ low) * self.scale)
        return output


class Answer:
    """An output of an unknown kind."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Answering(Packed):
    """The same, with such an output."""

    def forward(self, x: Tensor) -> Any:
        return Answer(super().forward(x))


def train(model: nn.Module, rank: int, *, steps: int = 2) -> list[float]:
    """The losses of some steps with SGD; it is given all parameters, as users do."""
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-8, momentum=0.5)
    losses = []
    for step in range(steps):
        output = model(torch.arange(6.0).view(2, 3) % (2 + rank + step))
        loss = (output.tensor if isinstance(output, Answer) else output).float().sum()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_trains_as_ddp(dtype: torch.dtype, world_size: int) -> None:
    """Every kind of integers trains as with DDP, and comes out as it went in, in and out of a unit of its own."""

    def body(rank: int) -> None:
        model = Packed(dtype)
        codes = model.codes.detach().clone()
        plain = copy.deepcopy(model)
        # DDP sends them with gloo, which lacks some kinds.
        plain.codes.data = codes.long()
        expected = train(DistributedDataParallel(plain), rank)
        subject = FullyShardedDataParallel(nn.Sequential(FullyShardedDataParallel(model)))
        assert train(subject, rank) == expected
        assert model.gathered == {dtype}
        assert sum(each.numel() for each in subject.parameters() if each.dtype is dtype) < 15 or world_size == 1
        state = subject.state_dict()
        assert torch.equal(state["0.codes"], codes)
        state["0.codes"] = 1 - codes.int()
        subject.load_state_dict(state)
        with subject.summon_full_params(subject):
            assert torch.equal(model.codes, (1 - codes.int()).to(dtype))

    run_ranks(world_size, body, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    "options",
    [
        {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        {"cpu_offload": CPUOffload(offload_params=True)},
        {"persist_numel": 15},
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        {"reshard_after_forward": 1},
        {"sync_module_states": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options(options: dict[str, Any]) -> None:
    """Whatever the options, modules see integers in their own dtype and with their own values."""

    def body(rank: int) -> None:
        for kind in (Packed, Answering):
            model = kind(torch.uint8)
            codes = model.codes.detach().clone()
            if options.get("sync_module_states") and rank:
                model.codes.data.zero_()
            subject = FullyShardedDataParallel(nn.Sequential(FullyShardedDataParallel(model, **options)), **options)
            losses = train(subject, rank)
            assert losses[0] != losses[1]
            assert model.gathered == {torch.uint8}
            subject.eval()
            with torch.no_grad():
                subject(torch.ones(1, 3))
            assert torch.equal(subject.state_dict()["0.codes"], codes)
            twin = copy.deepcopy(subject)
            assert torch.equal(twin.state_dict()["0.codes"], codes)

    run_ranks(2, body, timeout_s=TIMEOUT_S)


def test_in_a_checkpoint(tmp_path: Path) -> None:
    """Saved on four ranks, loaded on two."""
    codes = Packed(torch.uint8).codes.detach().clone()

    def save(rank: int) -> None:
        subject = FullyShardedDataParallel(Packed(torch.uint8))
        optimizer = torch.optim.Adam(subject.parameters())
        save_checkpoint(subject, optimizer, tmp_path)

    def load(rank: int) -> None:
        model = Packed(torch.uint8)
        model.codes.data.zero_()
        subject = FullyShardedDataParallel(model)
        load_checkpoint(subject, torch.optim.Adam(subject.parameters()), tmp_path)
        assert torch.equal(subject.state_dict()["codes"], codes)

    run_ranks(4, save, timeout_s=TIMEOUT_S)
    run_ranks(2, load, timeout_s=TIMEOUT_S)


def test_casts() -> None:
    """`to` casts what is not integers, as it does without an engine; integers that are cast by hand are refused."""

    def body(rank: int) -> None:
        model = Packed(torch.uint8)
        subject = FullyShardedDataParallel(model)
        subject.to(torch.float64)
        subject(torch.ones(1, 3, dtype=torch.float64))
        assert model.gathered == {torch.uint8}
        assert {each.dtype for each in subject.parameters()} == {torch.uint8, torch.float64}
        model.codes.data = model.codes.data.to(torch.int32)
        with pytest.raises(ParameterMoved, match=r"must keep their dtype torch.uint8, got torch.int32"):
            subject(torch.ones(1, 3, dtype=torch.float64))

    run_ranks(2, body, timeout_s=TIMEOUT_S)


def test_complex_numbers_are_refused() -> None:
    """They would have to be reduced."""

    def body(rank: int) -> None:
        model = nn.Linear(2, 2, dtype=torch.complex64)
        with pytest.raises(ConfigError, match=r"weight must be a floating-point dtype or one of integers, got"):
            FullyShardedDataParallel(model)

    run_ranks(2, body, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("dtype", [*KINDS, torch.float32, torch.bfloat16], ids=str)
def test_tags_are_exact(dtype: torch.dtype) -> None:
    """The tag of any unit is a number that the dtype has."""
    tags = [tag_of(ordinal, dtype) for ordinal in range(1000)]
    assert torch.tensor(tags, dtype=dtype).long().tolist() == tags
    assert len(set(tags)) == {torch.bool: 1, torch.int8: 127}.get(dtype, 251)
