"""Large inputs that a policy of mixed precision rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp

from fsdp_conformance.parity.alone import suspicions
from fsdp_conformance.parity.comparison import compare
from fsdp_conformance.parity.finding import Whose
from fsdp_conformance.parity.runs import Run
from fsdp_conformance.recorder.process import recording
from fsdp_conformance.recordings import files
from fsdp_conformance.recordings.files import Recording

TIMES = torch.tensor([[1.0, 900.5]])


class Timed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)

    def forward(self, x: Tensor, *, time: Tensor) -> Tensor:
        return self.first(x) * time.sin()  # type: ignore[no-any-return]


def _of_fsdp1(model: nn.Module, **policy: Any) -> nn.Module:
    return fsdp.FullyShardedDataParallel(
        model, mixed_precision=fsdp.MixedPrecision(**policy), use_orig_params=True, device_id=torch.device("cpu")
    )


def _of_fsdp2(model: nn.Module, **policy: Any) -> nn.Module:
    fsdp.fully_shard(model, mp_policy=fsdp.MixedPrecisionPolicy(**policy))
    return model


def _train(directory: Path, shard: Any, policy: dict[str, Any], x: Tensor, time: Tensor) -> Recording:
    with recording(directory):
        torch.manual_seed(0)
        model = shard(Timed(), **policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(x, time=time).sum().backward()
            optimizer.step()
    return files.read(directory)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("shard", [_of_fsdp1, _of_fsdp2])
@pytest.mark.parametrize(
    ("policy", "time", "first"),
    [
        (
            {"param_dtype": torch.bfloat16}, TIMES,
            "argument 'time' has values up to 900.5, where the numbers of bfloat16 are 4 apart",
        ),
        ({"param_dtype": torch.bfloat16}, TIMES.round() / 4, None),
        ({"param_dtype": torch.bfloat16}, torch.tensor([[1.0, 512.0]]), None),
        ({"param_dtype": torch.bfloat16}, TIMES.long(), None),
        ({"param_dtype": torch.bfloat16, "cast_forward_inputs": False}, TIMES, None),
        ({}, TIMES, None),
    ],
)  # fmt: skip
def test_a_large_input_that_is_rounded_is_suspicious(
    shard: Any, policy: dict[str, Any], time: Tensor, first: str | None, tmp_path: Path
) -> None:
    if shard is _of_fsdp1 and "cast_forward_inputs" in policy:
        policy = {**policy, "cast_root_forward_inputs": False}
    x = torch.ones(1, 2) if policy.get("cast_forward_inputs", True) else torch.ones(1, 2, dtype=torch.bfloat16)

    run = Run(_train(tmp_path / "run", shard, policy, x, time))

    shown = [each for each in suspicions(run) if "rounded" in each.title]
    assert [each.first for each in shown] == ([] if first is None else [first])


@pytest.mark.usefixtures("group")
def test_an_input_that_only_the_run_rounds_is_the_cause(tmp_path: Path) -> None:
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    run, reference = (
        _train(
            tmp_path / str(casts), _of_fsdp2, {"param_dtype": torch.bfloat16, "cast_forward_inputs": casts}, x, TIMES
        )
        for casts in (True, False)
    )

    finding = compare(run, reference).findings[0]

    assert (finding.title, finding.whose) == ("The forward computes something else", Whose.SCRIPT)
    assert finding.likely.startswith("mixed precision rounds an input: argument 'time' has values up to 900.5")
