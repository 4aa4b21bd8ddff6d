"""An exception of a default method of the suite itself is a problem of the adapter, and not the engine's."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import ClassVar

import pytest
from torch import Tensor, nn
from torch.optim import SGD

from fsdp_conformance.adapters.base import ModelFn, OptimFn
from fsdp_conformance.adapters.sharded import full_copies
from fsdp_conformance.adapters.torch_like import TorchAdapter, refuse_other_norm
from fsdp_conformance.adapters.vendors.torch_ddp import TorchDDP
from fsdp_conformance.cases.default_methods import as_adapter_error
from fsdp_conformance.errors import Unsupported
from fsdp_conformance.plan import Plan
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.selftest import bound_case, run_case
from fsdp_conformance.verdict import Verdict

CASE = "R114/dropped-gradient-ws2"


class HidesParameters(TorchDDP):
    """Declares `orig_params`, as every TorchAdapter does, but shows the user no parameters."""

    def full_params(self) -> dict[str, Tensor]:
        return full_copies(super().parameters(), self.full)

    def full_grads(self) -> dict[str, Tensor | None]:
        return {
            name: None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in super().parameters().items()
        }

    def parameters(self) -> dict[str, nn.Parameter]:
        return {}


class ForgetsNames(TorchDDP):
    """Its own `setup` leaves out what `drop_grads` of the base class needs."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        kept, self.kept = self.names, self.names
        del self.names
        self.full_params = lambda: full_copies(kept.parameters_of(self.model))  # type: ignore[method-assign]

    def full_grads(self) -> dict[str, Tensor | None]:
        return {
            name: None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in self.kept.parameters_of(self.model).items()
        }

    def parameters(self) -> dict[str, nn.Parameter]:
        return self.kept.parameters_of(self.model)

    def full_buffers(self) -> dict[str, Tensor]:
        return full_copies(self.kept.buffers_of(self.model))


class BreaksDown(TorchDDP):
    """Its own code raises."""

    def drop_grads(self, names: Iterable[str]) -> None:
        raise KeyError("the engine has lost a gradient")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "verdict", "words"),
    [
        (HidesParameters, Verdict.ERROR_ADAPTER, "Adapter.drop_grads, the default of this suite, raised Unsupported"),
        (ForgetsNames, Verdict.ERROR_ADAPTER, "TorchAdapter.drop_grads, the default of this suite, raised Attribute"),
        (BreaksDown, Verdict.FAIL, "the engine has lost a gradient"),
    ],
)
def test_only_what_the_engine_raises_is_its_failure(engine: type, verdict: Verdict, words: str) -> None:
    """The reason names the method to override."""
    record = run_case(bound_case(CASE), f"{__file__}:{engine.__name__}", base=RunSettings())

    assert record.verdict is verdict, record.reason
    assert words in record.reason
    assert ("Override it in" in record.reason) == (verdict is Verdict.ERROR_ADAPTER)


class _Engine(TorchAdapter):
    capabilities: ClassVar[frozenset[str]] = frozenset({"frozen_dynamic"})

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        raise LookupError("no such unit")

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        refuse_other_norm(Plan(max_norm=1.0), max_norm)
        return None


def _problem(call: object, *, declared: frozenset[str]) -> str | None:
    assert callable(call)
    with pytest.raises(Exception) as raised:  # noqa: PT011
        call()
    error = as_adapter_error(raised.value, declares=declared.__contains__, adapter="mine")
    return None if error is None else str(error)


def test_whose_code_raised_decides() -> None:
    """Neither what an engine raises below our method, nor a helper that it calls, is ours."""
    engine = _Engine()
    engine.module = nn.Linear(2, 2).train  # type: ignore[method-assign]
    every = frozenset({"frozen_dynamic", "clip_grad_norm", "no_sync"})

    assert "TorchAdapter.no_sync, the default of this suite" in str(_problem(engine.no_sync, declared=every))
    assert "TorchAdapter.parameters" in str(_problem(engine.parameters, declared=every))
    assert _problem(lambda: engine.step(2.0), declared=every) is None
    setup = partial(engine.setup, lambda: nn.Linear(2, 2), SGD, Plan())
    assert _problem(setup, declared=every) is None

    def refuse() -> None:
        raise Unsupported("no_sync")

    assert _problem(refuse, declared=every) is None
