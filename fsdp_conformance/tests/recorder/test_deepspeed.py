"""DeepSpeed, whose engine steps by itself: the recording, and the same script without ZeRO."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from fsdp_conformance.recorder.deepspeed_engine import without_zero
from fsdp_conformance.recorder.whole_batch import OwnSamples
from fsdp_conformance.tests.cli.cli_runs import said

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is an extra with a separate environment"
)

SCRIPT = """
import sys
import deepspeed
import torch
from torch import nn

stage, mistake = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": stage},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
}
model = nn.Sequential(nn.Linear(17, 33), nn.GELU(), nn.Linear(33, 5))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
data = torch.randn(6, 2, 4, 17, generator=torch.Generator().manual_seed(1))
for number in range(6):
    loss = engine(data[number, torch.distributed.get_rank()]).square().mean()
    # DeepSpeed divides by the number of passes itself.
    engine.backward(loss / 2 if mistake == "divided twice" else loss)
    engine.step()
"""


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_is_equal_to_deepspeed_without_it(stage: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    run = said("parity", str(tmp_path / "train.py"), str(stage), "none")

    assert run.status == 0, run.output
    assert "EQUAL  3 steps of 2 ranks" in run.output
    # In each step: two outputs on each rank; of four parameters the gradients before and after clipping, the values,
    # and two states.
    assert "compared    72 tensors" in run.output


@needs_deepspeed
def test_a_mistake_of_the_script_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    reference = f"{tmp_path / 'train.py'} 0 none"

    run = said("parity", "--reference", reference, str(tmp_path / "train.py"), "3", "divided twice")

    assert run.status == 1, run.output
    assert "The loss differs although the outputs agree" in run.output
    assert "the loss is scaled by 0.5" in run.output


@pytest.mark.parametrize("is_file", [False, True])
def test_zero_is_taken_out_of_a_configuration(is_file: bool, tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))

    result = without_zero(str(tmp_path / "config.json") if is_file else config)

    assert result == {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 0}}
    assert config["zero_optimization"] != result["zero_optimization"]


def test_a_rank_gets_its_own_samples_of_the_whole_batch() -> None:
    own = OwnSamples(begin=2, end=5, total=6)
    output = {"logits": torch.arange(12).view(6, 2), "loss": torch.tensor(1.5), "table": torch.zeros(4)}

    result = own.of(output)

    assert torch.equal(result["logits"], output["logits"][2:5])
    assert result["loss"] is output["loss"]
    assert result["table"] is output["table"]
    assert own.rows_of(output["table"]) is None
