"""
Adapters of engines that are neither torch's nor DeepSpeed's.

Each engine has its own environment: `.venvs/fairscale/bin/python -m pytest` with this file, after
`ci/setup fairscale`. Where an engine is absent, its tests are skipped.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from fsdp_conformance.adapters import registry
from fsdp_conformance.adapters.names import OriginalNames
from fsdp_conformance.driver.smoke import CHECKS, smoke
from fsdp_conformance.errors import AdapterNotFound
from fsdp_conformance.tests.adapters.adapter_ranks import RankTestCase
from fsdp_conformance.workload.definition import Regime

#: Adapter to the package that it needs.
ENGINES = {
    "fairscale-fsdp": "fairscale",
    "megatron-fsdp-zero1": "megatron_fsdp",
    "megatron-fsdp-zero2": "megatron_fsdp",
    "megatron-fsdp-zero3": "megatron_fsdp",
    "colossalai-zero1": "colossalai",
    "colossalai-zero2": "colossalai",
    "simplefsdp": "torchtitan",
    "accelerate-fsdp1": "accelerate",
    "accelerate-fsdp2": "accelerate",
    "accelerate-fsdp2-unforced": "accelerate",
    "lightning-fsdp1": "lightning_fabric",
    "lightning-fsdp2": "lightning_fabric",
}

INSTALLED = [name for name, package in ENGINES.items() if importlib.util.find_spec(package) is not None]
ABSENT = [name for name in ENGINES if name not in INSTALLED]
#: Those that compute on the CPU.
ON_CPU = [name for name in INSTALLED if "cpu_compute" in registry.load(name).declared()]


@pytest.mark.parametrize("name", ENGINES)
def test_it_is_known_without_the_engine(name: str) -> None:
    """Loading the class imports no engine; what it changes is said, and its degree is one that a plan can ask for."""
    adapter = registry.load(name)

    assert adapter.display_name() == name
    assert {"zero1", "zero2", "zero3"} & adapter.declared()
    assert "wrap_again" not in adapter.declared()
    assert all(shim and not shim.endswith(".") for shim in adapter.shims)


@pytest.mark.parametrize("name", ABSENT)
def test_what_to_install(name: str) -> None:
    """The adapter is there, its engine is not."""
    extra = name.partition("-")[0]
    with pytest.raises(AdapterNotFound, match=rf"the engine of '{name}' cannot be imported: ") as caught:
        registry.describe_here(name)
    package = registry.load(name).package
    assert f"Install it in this environment ({sys.prefix}): pip install {package}. In a checkout" in str(caught.value)
    assert f"`ci/certify --with {extra}`" in str(caught.value)


@pytest.mark.parametrize("name", ["colossalai-zero1", "colossalai-zero2", "megatron-fsdp-zero1", "megatron-fsdp-zero3"])
def test_a_skipped_step_drops_what_the_engine_has_reduced(name: str) -> None:
    """These engines keep reduced gradients in their own buffers, which only their optimizer empties."""
    adapter: Any = registry.load(name)()
    adapter.model = nn.Linear(2, 1)
    adapter.names = OriginalNames(adapter.model)
    adapter.optimizer = Mock()
    adapter.model(torch.ones(1, 2)).sum().backward()

    adapter.drop_grads(["weight", "bias"])

    adapter.optimizer.zero_grad.assert_called_once_with()
    assert all(parameter.grad is None for parameter in adapter.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_CPU)
def test_smoke(name: str) -> None:
    """The adapter keeps to the protocol."""
    results = smoke(name, timeout_s=240)

    assert [(result.problems, result.not_run) for result in results] == [((), "")] * len(CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in INSTALLED if name != "accelerate-fsdp2-unforced"])
def test_smoke_on_the_simulated_accelerator(name: str) -> None:
    """The same where the device is called cuda, or by its own name."""
    results = smoke(name, device="sim", timeout_s=240)

    assert [(result.problems, result.not_run) for result in results] == [((), "")] * len(CHECKS)


@pytest.mark.slow
@pytest.mark.skipif(not ON_CPU, reason="each of these engines is an extra with a separate environment")
class Parity(RankTestCase):
    """On two ranks, as a plain loop."""

    case_timeout_s = 240.0

    def test_sgd(self) -> None:
        """Losses and parameters of every step, with one micro-batch and with several."""
        for name in ON_CPU:
            for regime in (Regime(), Regime(micro_batches=3)):
                self.assert_trains(name, regime=regime)
