"""Memory held too long: full parameters, full gradients, copies, and leaks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from fsdp_conformance.adapters.base import Adapter, ModelFn, OptimFn
from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import Plan, Sharding


@known_wrong("R033", environment=("accelerator",))
class KeepsFullParameters(SeamFSDP2):
    """A full copy of the parameters stays on the device next to the shards."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        self._copies = [parameter.detach().clone().to(self.device) for parameter in model.parameters()]
        return super().wrap(model, plan)


@known_wrong("R034", environment=("accelerator",))
class KeepsParametersAfterForward(SeamFSDP2):
    """Units keep their full parameters from forward to backward, whatever was requested."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        sharding = Sharding.GRAD_OPTIM if plan.sharding in (Sharding.FULL, Sharding.DEFAULT) else plan.sharding
        return replace(plan, reshard_after_forward=False, sharding=sharding)


@known_wrong("R035", environment=("accelerator",))
class KeepsFullGradients(SeamFSDP2):
    """The full gradients of a step are kept until the next forward."""

    _full: ClassVar[list[Tensor]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._full.clear()
        return super().forward(*args, **kwargs)

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        self._full.append(grad)
        return grad


class GatheringFirst(Adapter):
    """Gathers at the start of forward and again at the start of backward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.gather_all()
        return super().forward(*args, **kwargs)  # type: ignore[safe-super]

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.gather_all()
        super().backward(loss, retain_graph=retain_graph)  # type: ignore[safe-super]

    def gather_all(self) -> None:
        """Gather every unit."""
        raise NotImplementedError


@known_wrong("R038", environment=("accelerator",))
class GathersEverythingFirst(GatheringFirst, SeamFSDP2):
    """Every unit is gathered at the start of forward and again at the start of backward."""

    def gather_all(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule) and any(True for _ in module.parameters()):
                module.unshard()


@known_wrong("R039", environment=("accelerator",))
class LeaksEveryStep(SeamFSDP2):
    """Each step leaks a few bytes on the device."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        self._leaked: list[Tensor] = []

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        self._leaked.append(torch.zeros(3, device=self.device))
        return super().step(max_norm, norm_type=norm_type)


@known_wrong("R040", environment=("accelerator",))
class SurvivesItsOwner(SeamFSDP2):
    """The engine keeps every model it has ever wrapped alive."""

    _wrapped: ClassVar[list[nn.Module]] = []

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        wrapped = super().wrap(model, plan)
        self._wrapped.append(wrapped)
        return wrapped


@known_wrong("R041")
class ManualReshardDoesNothing(SeamFSDP2):
    """A unit that is resharded by hand stays gathered."""

    def reshard(self, fqn: str) -> None:
        return None


@known_wrong("R043")
class PersistentNotReduced(SeamFSDP2):
    """Small parameters that stay full keep each rank's own gradient."""

    def _reduce_left_out(self) -> None:
        if not self.plan.persist_numel:
            super()._reduce_left_out()


@known_wrong("R085", environment=("accelerator",))
class KeepsLowPrecisionCopies(SeamFSDP2):
    """The low-precision copies of the shards outlive the reshard."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        super().backward(loss, retain_graph=retain_graph)
        if self.plan.param_dtype is not None:
            dtype = getattr(torch, self.plan.param_dtype)
            self._copies = [
                parameter.detach().to_local().to(dtype)  # type: ignore[attr-defined]
                for parameter in self.sharded().values()
            ]


@known_wrong("R036")
class ShowsItsOwnParameters(SeamFSDP2):
    """During forward and backward a unit exposes a parameter that the user never created."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        for fqn in plan.units:
            unit = self.names.modules[fqn]
            unit.register_forward_pre_hook(self._show)
        self.model.register_forward_pre_hook(self._show)

    def after_backward(self) -> None:
        for fqn in ("", *self.plan.units):
            self.names.modules[fqn]._parameters.pop("flat_parameter", None)

    def _show(self, module: nn.Module, args: Any) -> None:
        flat = nn.Parameter(torch.zeros(1, device=self.device), requires_grad=False)
        module._parameters["flat_parameter"] = flat


@known_wrong("R037")
class ReplicatedGradients(SeamFSDP2):
    """Every rank keeps the full gradients instead of the shards that its optimizer holds."""

    @contextmanager
    def microbatch(self, last: bool, *, reduced: bool = True) -> Iterator[None]:
        with super().microbatch(last, reduced=reduced):
            yield
        # Earlier, another micro-batch would add its shards to the full gradients.
        for parameter in self.sharded().values() if last else ():
            grad = parameter.grad
            if isinstance(grad, DTensor):
                parameter.grad = grad.redistribute(placements=[Replicate()] * grad.device_mesh.ndim)


@known_wrong("R042", environment=("accelerator",))
class HidesGatheredUnits(GathersEverythingFirst):
    """Every unit is gathered at the start of forward and backward, and one of them is reported."""

    def unit_is_unsharded(self, fqn: str) -> bool:
        return fqn == self.plan.units[0]


@known_wrong("R085", environment=("accelerator",))
class KeepsCopiesInAnyPrecision(SeamFSDP2):
    """Low-precision copies of the shards are kept from the start, whether or not a low precision is requested."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        self._copies = [local.bfloat16() for local in self.local_tensors()["params"]]


class _KeepsCopies(SeamFSDP2):
    """Keeps tensors of ones, each with as many elements as the model, for longer than a step."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        self._kept: list[Tensor] = []
        self._numel = sum(parameter.numel() for parameter in self.sharded().values())

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        norm = super().step(max_norm, norm_type=norm_type)
        self.keep()
        return norm

    def keep(self) -> None:
        """Called at the end of each step."""
        raise NotImplementedError


@known_wrong("R039", "R035")
class KeepsCopiesAfterTheFirstStep(_KeepsCopies):
    """From the end of the first step on, ten full copies of the model are held on the device."""

    def keep(self) -> None:
        if not self._kept:
            self._kept = [torch.ones(self._numel, device=self.device) for _ in range(10)]


@known_wrong("R039", "R035")
class KeepsEachStepOnTheHost(_KeepsCopies):
    """Each step leaves a full copy of the model behind in the host's memory."""

    def keep(self) -> None:
        self._kept.append(torch.ones(self._numel))
