"""Megatron-FSDP, whose optimizer has other parameters than the modules, and the same script without it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from fsdp_conformance.tests.cli.cli_runs import said

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron_fsdp") is None, reason="megatron-fsdp is an extra with a separate environment"
)

SCRIPT = """
import os
import sys

import torch
import torch.distributed as dist
from megatron_fsdp import fully_shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

stage, dtype, mistake = int(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(17, 33), nn.Linear(33, 17)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(50, 17), nn.Sequential(Block(), Block())
        self.head = nn.Linear(17, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
torch.manual_seed(0)
model = Net().to(dtype)
mesh = init_device_mesh("cuda", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
model, optimizer = fully_shard(
    model,
    torch.optim.Adam(model.parameters(), lr=1e-2),
    mesh,
    dp_shard_dim="dp",
    tp_dim="tp",
    fsdp_unit_modules=[Block],
    zero_dp_strategy=stage,
    device=device,
)
if mistake == "rank":
    optimizer.param_groups[0]["lr"] /= 1 + dist.get_rank()
data = torch.Generator().manual_seed(dist.get_rank())
for step in range(3):
    for last in (False, True):
        model.set_model_auto_sync(last)
        tokens = torch.randint(0, 50, (4, 9), generator=data).to(device)
        logits = model(tokens[:, :-1]).flatten(0, 1).float()
        (nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()) / 2).backward()
    optimizer.step()
    # Megatron-FSDP keeps gradients in buffers, which its model's and its optimizer's functions clear.
    (model if mistake == "kept" else optimizer).zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("stage", "dtype"), [(1, "float32"), (2, "float32"), (3, "float32"), (3, "bfloat16")])
def test_shards_are_equal_to_whole_parameters(stage: int, dtype: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    run = said("parity", "--as-cuda", str(tmp_path / "train.py"), str(stage), dtype, "none")

    assert run.status == 0, run.output
    assert "EQUAL  3 steps of 2 ranks" in run.output
    # In each step: three outputs of two micro-batches on each rank; nine gradients, parameters, and two states of each.
    assert "compared    144 tensors" in run.output
    assert "The engine has stepped the optimizer before the training" in run.output
    assert "the optimizer counts one step more than the training has" in run.output


def test_gradients_that_stay_in_a_buffer_are_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    run = said("parity", "--as-cuda", str(tmp_path / "train.py"), "3", "float32", "kept")

    assert run.status == 1, run.output
    assert "The gradients differ, from step 1 on" in run.output
    assert "not cleared" in run.output
