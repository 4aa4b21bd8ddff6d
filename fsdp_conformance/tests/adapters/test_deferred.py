"""Models on meta get memory and values as documented, on the adapters' side and in torch's engines."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_conformance.adapters import deferred
from fsdp_conformance.errors import ConfigError, SuiteError
from fsdp_conformance.fixtures.deferred import Deferred, Unready, deferred_nested, deferred_unready
from fsdp_conformance.plan import Plan, Sharding
from fsdp_conformance.tests.adapters.adapter_ranks import RankTestCase
from fsdp_conformance.tests.adapters.adapter_workloads import PLAIN

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def _on_meta() -> nn.Module:
    build = deferred_nested().build_on_meta
    assert build is not None
    return build(0)


def test_modules_on_meta_stay_there_when_the_rest_moves() -> None:
    """An ignored module on meta does not keep the others from moving to the device; Module.to refuses such a model."""
    real = nn.Linear(2, 2)
    model = nn.Sequential(real, nn.Linear(2, 2, device="meta"))

    with pytest.raises(NotImplementedError, match="meta tensor"):
        model.to(CPU)
    before = real.weight.detach().clone()
    deferred.move_values(model, CPU)

    assert [parameter.device.type for parameter in model.parameters()] == ["cpu"] * 2 + ["meta"] * 2
    assert torch.equal(real.weight, before)


def test_every_module_is_initialised_once() -> None:
    """Parameters and buffers get the values of a model that is built for real."""
    model = _on_meta()

    deferred.materialise(model, device=CPU)

    expected = deferred_nested().build(0)
    assert {module.num_initialised for module in model.modules() if isinstance(module, Deferred)} == {1}
    for got, expected_state in (
        (model.named_parameters(), expected.named_parameters()),
        (model.named_buffers(), expected.named_buffers()),
    ):
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(got, expected_state, strict=True))


def test_the_users_function_is_called_from_the_top_down() -> None:
    """It is called once for each module that owns tensors, after their memory is allocated."""
    model = _on_meta()
    called: list[nn.Module] = []
    seen: list[bool] = []

    def init(module: nn.Module) -> None:
        called.append(module)
        seen.extend(parameter.is_meta for parameter in module.parameters(recurse=False))

    deferred.materialise(model, device=CPU, init_fn=init)

    assert called == [module for module in model.modules() if isinstance(module, Deferred)]
    assert not any(seen)


def test_what_is_skipped_and_what_nothing_initialises_stays_on_meta() -> None:
    """A skipped module with all that is inside, and one without `reset_parameters`."""
    build = deferred_unready().build_on_meta
    assert build is not None
    model = build(0)
    skipped = model.get_submodule("stages.0")

    deferred.materialise(model, device=CPU, skipped=[skipped])

    assert all(parameter.is_meta for parameter in skipped.parameters())
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta and "stages.0" not in name]
    assert left == ["head.0.scale"]
    assert isinstance(model.get_submodule("head.0"), Unready)


def test_an_init_function_belongs_to_a_model_on_meta() -> None:
    """A plan that names one without `meta_init` makes no sense; with it, both flags are needed."""
    with pytest.raises(ConfigError, match="init_fn must be None without meta_init"):
        Plan(init_fn=print)

    assert {"meta_init", "meta_init_fn"} <= Plan(meta_init=True, init_fn=print).capabilities()


class Engines(RankTestCase):
    """Engines start a model from meta with the values of one that was built for real."""

    case_timeout_s = 120.0

    @pytest.mark.nightly
    def test_starts_from_meta(self) -> None:
        """Initial values are those of the real model, under its names."""
        workload = deferred_nested()
        for name in ("torch-fsdp1", "torch-fsdp2", "reference"):
            history = self.run_training(name, workload, meta_init=True)
            expected = dict(workload.build(self.rank).named_parameters())
            self.assertEqual(sorted(expected), sorted(history.initial_params), name)
            for key, value in history.initial_params.items():
                self.assertTrue(torch.equal(value, expected[key]), msg=f"{name} {key}")

    def test_only_some_workloads_can_be_built_on_meta(self) -> None:
        """Asking for another one is a mistake of the suite."""
        with self.assertRaisesRegex(SuiteError, "must have build_on_meta"):
            self.run_training("torch-fsdp2", PLAIN, meta_init=True)

    def test_options_of_a_plan_are_refused_where_they_are_not_offered(self) -> None:
        """DDP builds no model from meta."""
        with self.assertRaisesRegex(NotImplementedError, "meta_init"):
            self.run_training("torch-ddp", deferred_nested(), meta_init=True, sharding=Sharding.NONE)
