"""Every workload is what the index of `fixtures` says of it: rank-dependent, pure, picklable, found by its name."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fsdp_conformance import fixtures
from fsdp_conformance.errors import ConfigError, SuiteError
from fsdp_conformance.fixtures import models, probes, workload_by_name, workload_names
from fsdp_conformance.fixtures.self_check import self_check
from fsdp_conformance.fixtures.transformer import KeyedDropout, transformer
from fsdp_conformance.fixtures.wrappers import DummyDDP, delayed
from fsdp_conformance.workload import Batch, BatchKey, Workload


@pytest.mark.parametrize("name", workload_names())
def test_a_workload_passes_its_self_check(name: str) -> None:
    """Names exist, builds and batches are pure, and the gradients of ranks differ."""
    assert self_check(workload_by_name(name)) > 5


@pytest.mark.parametrize("name", workload_names())
def test_a_workload_can_be_pickled(name: str) -> None:
    """A workload goes to other processes by the names of its functions, and builds the same there."""
    workload = workload_by_name(name)

    twin = pickle.loads(pickle.dumps(workload))

    built, other = workload.build(1), twin.build(1)
    assert [n for n, _ in built.named_parameters()] == [n for n, _ in other.named_parameters()]
    assert all(torch.equal(p, q) for p, q in zip(built.parameters(), other.parameters(), strict=True))
    assert twin.units == workload.units


@pytest.mark.parametrize("name", workload_names())
def test_a_workload_is_in_the_index(name: str) -> None:
    """The package's docstring is a table of contents: a new workload gets a line there."""
    assert f" {name} " in (fixtures.__doc__ or "")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    """A misspelt name names what was meant."""
    with pytest.raises(ConfigError, match="workload='norm-mpl', but should be one of norm-mlp"):
        workload_by_name("norm-mpl")


def _same_batch(key: BatchKey) -> Batch:
    return models.regression_batch(replace(key, rank=0, step=0, micro=0), inputs=8, outputs=8)


def _impure_batch(key: BatchKey) -> Batch:
    return Batch(args=(torch.randn(4, 8),), target=torch.randn(4, 8))


def _sum(output: Tensor, batch: Batch) -> Tensor:
    return output.sum()


def _nan(output: Tensor, batch: Batch) -> Tensor:
    return output.sum() * float("nan")


def _build_by_rank(rank: int) -> nn.Module:
    model = models.build_nested(0)
    with torch.no_grad():
        next(model.parameters()).add_(rank)
    return model


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ({"batch": _same_batch}, "the batch is the same for another rank"),
        ({"batch": _same_batch}, "gradients of 'module.3.weight' differ between ranks by 0"),
        ({"batch": _impure_batch}, "changes the global random state"),
        ({"batch": _impure_batch}, "batch gives other values the second time"),
        ({"loss": _sum}, "gradients of 'module.3.bias' differ between ranks by 0 of their size"),
        ({"loss": _nan}, "losses=\\[nan, nan, nan, nan\\], but should be finite"),
        ({"build": _build_by_rank}, "'module.0.weight' differs between ranks 0 and 1, but should be equal"),
        ({"units": ("module.9",)}, "units has 'module.9', but should name submodules of NestedWrappedModule"),
        ({"units": ("module.1", "module.1.0")}, "unit 'module.1.0' comes after 'module.1'"),
        ({"local_params": ("module.2.weight",)}, "local parameter 'module.2.weight' is the same on ranks 0 and 1"),
        ({"local_params": ("gone",)}, "local_params has 'gone'"),
    ],
)
def test_the_self_check_reports(damage: dict[str, object], told: str) -> None:
    """What would make a comparison vacuous is named."""
    broken = replace(models.nested(), **damage)  # type: ignore[arg-type]

    with pytest.raises(SuiteError, match=told):
        self_check(broken)


def test_every_problem_is_told_at_once() -> None:
    """Two wrong names are two problems in one error."""
    broken = replace(models.nested(), units=("one", "two"))

    with pytest.raises(SuiteError, match=r"'one'.*'two'"):
        self_check(broken)


def test_dropout_is_on_and_the_same_in_every_dtype() -> None:
    """The transformer drops elements in training, the same in float32 and float64, and none in eval mode."""
    workload = transformer()
    batch = workload.batch(BatchKey(step=0))
    model = workload.build(0)

    trained, wide = model(*batch.args), workload.build(0).double()(*batch.args)
    evaluated = model.eval()(*batch.args)

    assert any(isinstance(module, KeyedDropout) for module in model.modules())
    assert not any(isinstance(module, nn.Dropout) for module in model.modules())
    torch.testing.assert_close(trained.double(), wide, rtol=1e-4, atol=1e-4)
    assert (trained - evaluated).abs().max() > 0.01


def test_dropout_masks_differ_between_ranks() -> None:
    """Each rank's batch has a key of its own for the masks."""
    keys = [transformer().batch(BatchKey(step=0, rank=rank)).args[2] for rank in range(3)]

    assert len(set(keys)) == 3


def test_closed_form_by_hand() -> None:
    """At 2 ranks the mean gradient of column j is (j + 1) * 1.5, so row 0 becomes 0 - 0.375, 1 - 0.75, 2 - 1.125."""
    assert probes.closed_form_weight(2)[0].tolist() == [-0.375, 0.25, 0.875]


@pytest.mark.parametrize(("world_size", "expected"), [(1, 1.0), (2, 1.0), (3, 0.75), (4, 1.0), (5, 1.25), (6, 0.75)])
def test_the_loss_scale_divides_by_the_world_size(world_size: int, expected: float) -> None:
    """The scale is near 1, and a multiple of the odd part of the world size."""
    assert probes.loss_scale(world_size) == expected


class _Clock:
    """Counts pauses instead of waiting."""

    def __init__(self) -> None:
        self.pauses = 0

    def __call__(self) -> None:
        self.pauses += 1


def _trained_once(workload: Workload, rank: int) -> nn.Module:
    model = workload.build(rank)
    batch = workload.batch(BatchKey(step=0, rank=rank, world_size=2))
    torch.autograd.backward(workload.loss(model(*batch.args, **batch.kwargs), batch))
    return model


def test_a_delayed_workload_is_late_on_its_ranks_only() -> None:
    """The pause comes in forward and in backward on rank 1, and never on rank 0; gradients are the plain model's."""
    clock = _Clock()
    plain = models.nested()
    late = delayed(plain, clock, ranks=(1,))

    _trained_once(late, 0)
    after_rank_0 = clock.pauses
    model = _trained_once(late, 1)

    assert (after_rank_0, clock.pauses) == (0, 2)
    expected = {f"module.{name}": p.grad for name, p in _trained_once(plain, 1).named_parameters()}
    assert {name: p.grad is not None for name, p in model.named_parameters()} == dict.fromkeys(expected, True)
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())  # type: ignore[arg-type]
    assert self_check(late) > 5


def test_dummy_ddp_passes_through() -> None:
    """The stand-in gives the module's output and shows it as `.module`."""
    module = models.build_nested(0)
    x = torch.ones(2, 8)

    assert torch.equal(DummyDDP(module)(x), module(x))
    assert DummyDDP(module).module is module


def test_frozen_first_shards_hold_no_trainable_element() -> None:
    """In a flat layout of the mixed unit over 4 ranks the first two shards, 54 of 108 elements, are all frozen."""
    unit = workload_by_name("non-uniform").build(0).get_submodule("module.2")

    flags = [param.requires_grad for param in unit.parameters() for _ in range(param.numel())]

    assert len(flags) == 108
    assert not any(flags[:54])
    assert all(flags[81:])


def test_pauses_pickle_with_the_workload() -> None:
    """A delayed workload is as picklable as the pause it was given."""
    late = delayed(models.nested(), partial(abs, 1))

    assert pickle.loads(pickle.dumps(late)).units == tuple(f"module.{unit}" for unit in models.nested().units)
