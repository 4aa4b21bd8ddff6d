"""Misuse that is accepted, and things lost by wrapping."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_state

from fsdp_conformance.adapters.base import ModelFn, OptimFn
from fsdp_conformance.adapters.vendors.torch_fsdp1 import TorchFSDP1
from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import BackwardPrefetch, Offload, Plan


@known_wrong("R055", shows=("refusal",))
class AcceptsContainers(SeamFSDP2):
    """A container without a forward is accepted as a unit."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        containers = (nn.ModuleList, nn.ModuleDict)
        return replace(
            plan,
            units=tuple(unit for unit in plan.units if not isinstance(model.get_submodule(unit), containers)),
        )


@known_wrong("R057", shows=("refusal",))
class AcceptsAnything(SeamFSDP2):
    """An invalid configuration is replaced by the default."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, Plan(device=plan.device, units=plan.units))


@known_wrong("R018", shows=("finding", "refusal"), environment=("accelerator",))
class AcceptsMixedDevices(SeamFSDP2):
    """A model on several devices is moved silently, and the values from the other device are lost."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        if len({parameter.device for parameter in model.parameters()}) > 1:
            for parameter in model.parameters():
                if parameter.device != self.device:
                    parameter.data = torch.zeros_like(parameter, device=self.device)
        return plan

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.model.to(self.device)
        return super().forward(*args, **kwargs)


@known_wrong("R016")
class IgnoresDeviceId(SeamFSDP2):
    """A buffer stays on a device other than the requested one."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        wrapped = super().wrap(model, plan)
        if plan.device_id is not None:
            # meta is the one other device that every machine has: leave one of the engine's buffers there.
            wrapped.register_buffer("_left_behind", torch.empty(1, device="meta"), persistent=False)
        return wrapped


@known_wrong("R014", "R137", shows=("finding", "refusal"), environment=("accelerator",))
class IgnoresOffload(SeamFSDP2):
    """Parameter offload is accepted but does nothing."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        return replace(plan, offload=Offload.OFF)


@known_wrong("R127")
class IgnoresAutoWrap(TorchFSDP1):
    """A wrap policy is accepted, but the whole model becomes one unit."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        return super().wrap(model, replace(plan, auto_wrap=None))


@known_wrong("R076")
class SwapsPrefetch(TorchFSDP1):
    """Backward prefetch uses a different policy than the requested one."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        requested = plan.backward_prefetch
        other = BackwardPrefetch.NONE if requested is BackwardPrefetch.PRE else BackwardPrefetch.PRE
        return super().wrap(model, replace(plan, backward_prefetch=other))


@known_wrong("R054")
class WrapsTwiceSilently(SeamFSDP2):
    """A second wrap is accepted and averages gradients again."""

    _again = False

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        self._again = isinstance(model, FSDPModule)
        return model if self._again else super().wrap(model, plan)

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        return grad / self.world_size if self._again else grad


@known_wrong("R060")
class LosesAttributes(SeamFSDP2):
    """The wrapper hides the attributes of the wrapped module."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        return _Wrapper(super().wrap(model, plan))

    def no_sync(self) -> Any:
        outer, self.model = self.model, self.model.get_submodule("inner")
        context = super().no_sync()
        self.model = outer
        return context


@known_wrong("R061")
class CopiesShareStorage(SeamFSDP2):
    """A deep copy shares its storage with the original."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"copyable"})

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        wrapped = super().wrap(model, plan)
        vars(wrapped)["__deepcopy__"] = lambda memo: wrapped
        return wrapped


@known_wrong("R157")
class OutputStructureChanged(SeamFSDP2):
    """Named tuples and dataclasses are returned as plain tuples."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _flattened(super().forward(*args, **kwargs))


@known_wrong("R157", shows=("raised",), raises="RuntimeError", environment=("accelerator",))
class MovesFlatInputsOnly(SeamFSDP2):
    """Inputs inside containers stay on the host."""

    capabilities = SeamFSDP2.capabilities | {"move_inputs"}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(_fsdp_state, "_to_kwargs", self._moved):
            return super().forward(*args, **kwargs)

    def _moved(self, args: Any, kwargs: Any, device: torch.device, *_: Any) -> Any:
        def moved(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        return (tuple(moved(value) for value in args),), ({name: moved(value) for name, value in kwargs.items()},)


@known_wrong("R016", environment=("accelerator",))
class UsesTheCurrentDevice(TorchFSDP1):
    """A requested device is accepted, but the current one is used."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, replace(plan, device_id=None))


@known_wrong("R060")
class LosesAttributeWrites(SeamFSDP2):
    """Attributes that are set on the wrapped module are lost; those of the original can be read."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        return _ReadOnlyWrapper(super().wrap(model, plan))


@known_wrong("R060")
class ShowsACopy(SeamFSDP2):
    """User code gets the module as it was before it was wrapped, which does not compute."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        self._copy = copy.deepcopy(model)
        return plan

    def module(self) -> nn.Module:
        return self._copy


@known_wrong("R129")
class WrapsModulesOneByOne(SeamFSDP2):
    """Modules that should form one unit become one unit each."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        return replace(plan, units=tuple(module for unit in plan.units for module in unit.split("+")))


@known_wrong("R054", shows=("refusal",))
class RefusesLate(SeamFSDP2):
    """A module that was wrapped twice trains, and is rejected after two steps."""

    _again = False

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        self._again = isinstance(model, FSDPModule)
        return model if self._again else super().wrap(model, plan)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._again and self.num_steps == 2:
            raise ValueError("the module was wrapped already")
        return super().forward(*args, **kwargs)


@known_wrong("R055", shows=("refusal",))
class WarnsOfSomethingElse(AcceptsContainers):
    """A container without a forward is accepted as a unit, and a warning speaks of something else."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        warnings.warn("the first forward allocates memory", stacklevel=1)
        return super().forward(*args, **kwargs)


@known_wrong("R057", shows=("refusal",))
class IgnoresWhatItDoesNotOffer(SeamFSDP2):
    """Options that the engine does not offer are accepted, and do nothing."""

    declines: ClassVar[frozenset[str]] = frozenset({"hsdp", "reshard_int", "device_id"})

    @classmethod
    def refuse_undeclared(cls, plan: Plan) -> None:
        return

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, Plan(device=plan.device, units=plan.units))


@known_wrong("R057", shows=("refusal",))
class BreaksDown(SeamFSDP2):
    """An invalid configuration is not checked: the code that uses it breaks down."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        try:
            super().setup(model_fn, optim_fn, plan)
        except (ValueError, RuntimeError, AssertionError):
            groups: dict[int, Any] = {}
            groups[plan.replicas].wait()


class _Wrapper(nn.Module):
    """Calls the wrapped module and hides its attributes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class _ReadOnlyWrapper(_Wrapper):
    """Shows the wrapped module's attributes, and forgets those that are set on it."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("inner", "training") or name.startswith("_"):
            super().__setattr__(name, value)

    def __getitem__(self, index: int) -> Any:
        inner: Any = self.inner
        return inner[index]


class _Flattened(tuple):  # type: ignore[type-arg]  # noqa: SLOT001 - the names need a dict
    """A tuple that keeps the original field names, so that the loss can still be computed."""

    fields: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(name) from None


def _flattened(value: Any) -> Any:
    """`value` with everything that has named fields replaced by plain tuples."""
    if isinstance(value, dict):
        return {key: _flattened(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        by_field = dict(zip(value._fields, value, strict=True))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        by_field = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, list | tuple):
        return type(value)(_flattened(item) for item in value)
    else:
        return value
    flat = _Flattened(_flattened(item) for item in by_field.values())
    flat.fields = dict(zip(by_field, flat, strict=True))
    return flat


@known_wrong("R189")
class DrawsRandomNumbers(SeamFSDP2):
    """Every forward draws a random number, as an engine does that shuffles or initialises something on the way."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        torch.rand(1)
        return super().forward(*args, **kwargs)


@known_wrong("R189")
class LeavesTheDefaultDtype(SeamFSDP2):
    """The first step sets torch's default dtype, and never sets it back."""

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        norm = super().step(max_norm, norm_type=norm_type)
        torch.set_default_dtype(torch.bfloat16)
        return norm


@known_wrong("R189")
class ExchangesParameters(SeamFSDP2):
    """After a step the module has new parameter objects; the optimizer has the old ones, with the same memory."""

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        norm = super().step(max_norm, norm_type=norm_type)
        for module in self.model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad))
        return norm
