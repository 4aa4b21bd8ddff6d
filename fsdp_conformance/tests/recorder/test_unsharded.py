"""The wrapper that takes FSDP1's place in the reference has its names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from fsdp_conformance.recorder.replica import Replicas
from fsdp_conformance.recorder.unsharded import AsCheckpointsSeeIt, ReplicatedInPlaceOfFSDP


@pytest.fixture(name="model")
def _model(monkeypatch: pytest.MonkeyPatch) -> ReplicatedInPlaceOfFSDP:
    """A unit within the root."""
    taken_out = SimpleNamespace(replicate=lambda modules, **options: SimpleNamespace(synchronises=True))
    monkeypatch.setattr(ReplicatedInPlaceOfFSDP, "replacement", taken_out, raising=False)
    return ReplicatedInPlaceOfFSDP(nn.Sequential(ReplicatedInPlaceOfFSDP(nn.Linear(3, 2)), nn.Linear(2, 1)))


def test_parameters_are_named_as_in_fsdp1(model: ReplicatedInPlaceOfFSDP) -> None:
    """With the wrappers in them, so that they fit those of modules; as in the model while parameters are summoned."""
    wrapped = "_fsdp_wrapped_module"
    joined = {
        f"{name}.{own}" if name else own
        for name, module in model.named_modules()
        for own, _ in module.named_parameters()
    }

    assert [name for name, _ in model.named_parameters()] == [
        f"{wrapped}.0.{wrapped}.weight", f"{wrapped}.0.{wrapped}.bias", f"{wrapped}.1.weight", f"{wrapped}.1.bias",
    ]  # fmt: skip
    assert joined >= dict(model.named_parameters()).keys()
    with ReplicatedInPlaceOfFSDP.summon_full_params(model):
        assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_states_are_named_as_in_the_model(model: ReplicatedInPlaceOfFSDP) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()

    state = ReplicatedInPlaceOfFSDP.optim_state_dict(model, optimizer)
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(ReplicatedInPlaceOfFSDP.optim_state_dict_to_load(model, optimizer, state))

    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(model.state_dict()) == names
    assert list(state["state"]) == state["param_groups"][0]["params"] == names


def test_it_has_what_instances_of_fsdp1_have(model: ReplicatedInPlaceOfFSDP, tmp_path: Path) -> None:
    """Torch, libraries and scripts read these. What handles flat parameters is not among them."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        original = FullyShardedDataParallel(nn.Linear(3, 2), device_id=torch.device("cpu"))
        public = {name for name in (*dir(original), *vars(original)) if not name.startswith("_")}
        missing = {name for name in public if not hasattr(model, name)}
        values = (model.rank, model.world_size, model.sharding_strategy, model[0].check_is_root())
    finally:
        dist.destroy_process_group()

    layouts = {"flatten_sharded_optim_state_dict", "rekey_optim_state_dict"}
    layouts |= {"scatter_full_optim_state_dict", "shard_full_optim_state_dict", "params"}
    assert missing - layouts == set()
    assert values == (0, 1, ShardingStrategy.FULL_SHARD, False)


def test_accelerate_can_cast_its_parameters(model: ReplicatedInPlaceOfFSDP) -> None:
    """As Accelerate does it: the flat parameter of each wrapper, which takes effect when it is gathered."""
    model.to(torch.bfloat16)
    wrappers: Any = ReplicatedInPlaceOfFSDP.fsdp_modules(model)
    outer, inner = wrappers
    flat: Any = inner._flat_param
    assert (inner._has_params, outer._has_params, flat._fqns) == (True, True, ("weight", "bias"))

    flat.data = flat.data.to(torch.float32)
    inner._handle._orig_param_dtype = torch.float32

    assert flat.dtype is torch.float32
    inner(torch.ones(1, 3))
    assert {parameter.dtype for parameter in inner.parameters()} == {torch.float32}
    assert {parameter.dtype for parameter in outer.parameters()} == {torch.float32, torch.bfloat16}


def test_buffers_are_cast_by_the_first_call_that_starts_fsdp1(monkeypatch: pytest.MonkeyPatch) -> None:
    taken_out = SimpleNamespace(
        replicate=lambda *args, **kwargs: SimpleNamespace(synchronises=True), _observer=SimpleNamespace(is_reduced=True)
    )
    monkeypatch.setattr(ReplicatedInPlaceOfFSDP, "replacement", taken_out, raising=False)
    policy = MixedPrecision(buffer_dtype=torch.bfloat16)
    model = ReplicatedInPlaceOfFSDP(
        nn.Sequential(ReplicatedInPlaceOfFSDP(nn.BatchNorm1d(3), mixed_precision=policy), nn.Linear(3, 2))
    )
    mean = next(model.buffers())
    assert mean.dtype is torch.float32

    with model.no_sync():
        assert mean.dtype is torch.bfloat16


def test_torchs_state_dicts_are_those_of_the_model(
    model: ReplicatedInPlaceOfFSDP, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_dict, "FSDP", AsCheckpointsSeeIt)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()

    values, states = state_dict.get_state_dict(model, optimizer)

    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(values) == list(states["state"]) == names
    state_dict.set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=states)


def test_gradients_that_wait_are_cleared_with_those_that_the_script_sees() -> None:
    """In the unsharded twin, a backward that is not synchronised adds to the same gradients as any other."""
    replicas = Replicas(lambda gradients: None)
    cleared, kept = nn.Linear(2, 1), nn.Linear(2, 1)
    for model in (cleared, kept):
        replicas.add([model], group=None, reduce_dtype=None, starts_with_rank0=True, is_flat=False, synchronises=False)
        replicas.before_backward()
        model(torch.ones(1, 2)).sum().backward()
        replicas.after_backward()
    assert cleared.weight.grad is None

    replicas.clear(cleared.parameters())
    replicas.before_backward()

    assert cleared.weight.grad is None
    assert kept.weight.grad is not None
    assert torch.equal(kept.weight.grad, torch.ones(1, 2))


def test_a_frozen_parameter_keeps_its_gradient(group: None) -> None:
    """An optimizer may still move it by that, as it does without a reference."""
    replicas = Replicas(lambda gradients: None)
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    model = nn.Sequential(first, second)
    replica = replicas.add([model], group=None, reduce_dtype=None, starts_with_rank0=True, is_flat=False)
    frozen, trained = first.weight, second.weight
    seen = []
    for step, is_frozen in enumerate((False, True, True, False)):
        replica.synchronises = step != 1
        frozen.requires_grad_(not is_frozen)
        replicas.before_backward()
        model(torch.ones(1, 2)).sum().backward()
        replicas.after_backward()
        seen.append([each.grad.clone() for each in (frozen, trained) if each.grad is not None])

    assert torch.equal(seen[1][0], seen[0][0])
    assert torch.equal(seen[2][0], seen[0][0])
    assert torch.equal(seen[3][0], 2 * seen[0][0])
    # The second step is not reduced: what it adds comes with the third.
    factors = [float(each[1].sum() / seen[0][1].sum()) for each in seen]
    assert factors == pytest.approx([1, 1, 3, 4])
