"""Wrong full parameters outside forward and backward: what is shown, what persists, and what stays behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdp_conformance.adapters.base import ModelFn, OptimFn
from fsdp_conformance.adapters.sharded import full_copy, write_full
from fsdp_conformance.adapters.vendors.reference import Reference
from fsdp_conformance.adapters.vendors.torch_ddp import TorchDDP
from fsdp_conformance.adapters.vendors.torch_fsdp1 import TorchFSDP1
from fsdp_conformance.mutants.base import SeamDDP, SeamFSDP2
from fsdp_conformance.mutants.engines import SeamReference
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import Plan

_Context = AbstractContextManager[Any]


class _Altered(SeamReference):
    """The reference engine, with a place to alter what its context shows."""

    @contextmanager
    def full_params_context(self, unit: str = "", **options: Any) -> Iterator[None]:
        with super().full_params_context(unit, **self.options(options)):
            self.alter(options)
            yield

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options for the engine."""
        return options

    def alter(self, options: Mapping[str, Any]) -> None:
        """Called inside the context, before its body."""


class _AlteredFSDP1(TorchFSDP1):
    """The same for FSDP1."""

    @contextmanager
    def full_params_context(self, unit: str = "", **options: Any) -> Iterator[None]:
        with super().full_params_context(unit, **self.options(options)):
            self.alter(options)
            yield

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options for the engine."""
        return options

    def alter(self, options: Mapping[str, Any]) -> None:
        """Called inside the context, before its body."""


# --- what is shown ----------------------------------------------------------------------------------------------------


@known_wrong("R044")
class ReferenceShowsOneUnit(_Altered):
    """Units inside the one that is opened stay sharded."""

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        return options | {"recurse": False}


@known_wrong("R044", name="fsdp1-shows-one-unit")
class FSDP1ShowsOneUnit(_AlteredFSDP1):
    """Units inside the one that is opened stay sharded."""

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        return options | {"recurse": False}


@known_wrong("R044")
class ReferenceAlwaysRecurses(_Altered):
    """Units inside the one that is opened are gathered, too, whether asked for or not."""

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        return options | {"recurse": True}


@known_wrong("R044", name="fsdp1-always-recurses")
class FSDP1AlwaysRecurses(_AlteredFSDP1):
    """Units inside the one that is opened are gathered, too, whether asked for or not."""

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        return options | {"recurse": True}


@known_wrong("R044")
class ReferenceShowsWrapperNames(_Altered):
    """User code sees the names that the wrappers add."""

    def module(self) -> nn.Module:
        module = super().module()
        vars(module)["named_parameters"] = lambda *args, **kwargs: nn.Module.named_parameters(module, *args, **kwargs)
        return module


@known_wrong("R050")
class ReferenceShowsLowPrecision(_Altered):
    """Parameters are shown in the dtype that units compute in."""

    def alter(self, options: Mapping[str, Any]) -> None:
        if self.plan.param_dtype is not None:
            for parameter in self.parameters().values():
                parameter.data = parameter.data.bfloat16()


@known_wrong("R050", name="fsdp1-shows-rounded-values")
class FSDP1ShowsRoundedValues(_AlteredFSDP1):
    """Parameters are shown in float32, but with the values that units compute with."""

    def alter(self, options: Mapping[str, Any]) -> None:
        if self.plan.param_dtype is not None:
            for parameter in self.parameters().values():
                parameter.data.copy_(parameter.data.bfloat16())


@known_wrong("R049")
class ReferenceShowsSummedGradients(_Altered):
    """Gradients are shown as sums over the ranks, instead of means."""

    def alter(self, options: Mapping[str, Any]) -> None:
        _scale_gradients(self.parameters(), dist.get_world_size())


@known_wrong("R049", name="fsdp1-shows-summed-gradients")
class FSDP1ShowsSummedGradients(_AlteredFSDP1):
    """Gradients are shown as sums over the ranks, instead of means."""

    def alter(self, options: Mapping[str, Any]) -> None:
        _scale_gradients(self.parameters(), dist.get_world_size())


def _scale_gradients(parameters: Mapping[str, nn.Parameter], factor: float) -> None:
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * factor


@known_wrong("R049")
class ReferenceShowsZerosForNone(_Altered):
    """Where there is no gradient, zeros are shown."""

    def alter(self, options: Mapping[str, Any]) -> None:
        if options.get("with_grads"):
            for parameter in self.parameters().values():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)


# --- what persists ----------------------------------------------------------------------------------------------------


@known_wrong("R045")
class ReferenceLosesWritesOfOneRank(SeamReference):
    """The last rank does not keep what is written."""

    @contextmanager
    def full_params_context(self, unit: str = "", **options: Any) -> Iterator[None]:
        with super().full_params_context(unit, **options):
            is_last = dist.get_rank() == dist.get_world_size() - 1
            # Writing back is collective, so this rank takes part, with what was there before.
            before = {name: shown.detach().clone() for name, shown in self.parameters().items()} if is_last else {}
            yield
            for name, value in before.items():
                shown = self.parameters()[name]
                if not torch.equal(shown, value):
                    shown.data.copy_(value)


@known_wrong("R045", name="fsdp1-loses-writes-of-one-rank")
class FSDP1LosesWritesOfOneRank(_AlteredFSDP1):
    """The last rank does not keep what is written."""

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        is_last = dist.get_rank() == dist.get_world_size() - 1
        return options | ({"writeback": False} if is_last else {})


@known_wrong("R045")
class ReferencePersistsAlways(_Altered):
    """Writes persist even where `writeback` is off."""

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        return options | {"writeback": not options.get("rank0_only")}


@known_wrong("R045", name="fsdp1-persists-always")
class FSDP1PersistsAlways(_AlteredFSDP1):
    """Writes persist even where `writeback` is off."""

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        return options | {"writeback": not options.get("rank0_only")}


@known_wrong("R049")
class ReferenceLosesWrittenGradients(_Altered):
    """Written parameters persist, written gradients do not."""

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        return options | ({"writeback": False} if options.get("with_grads") else {})


@known_wrong("R049", name="fsdp1-loses-written-gradients")
class FSDP1LosesWrittenGradients(_AlteredFSDP1):
    """Written parameters persist, written gradients do not."""

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        return options | ({"writeback": False} if options.get("with_grads") else {})


@known_wrong("R046", shows=("refusal", "finding"))
class ReferenceAcceptsWritesOnOneRank(_Altered):
    """Keeping what the first rank alone writes is accepted, and nothing is kept."""

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        return options | ({"writeback": False} if options.get("rank0_only") else {})


# --- where it is shown ------------------------------------------------------------------------------------------------


@known_wrong("R046")
class ReferenceShowsOnAllRanks(_Altered):
    """All ranks gather and keep full parameters, even if only the first one should."""

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        return options | {"rank0_only": False}


@known_wrong("R046", environment=("accelerator",))
class ReferenceShowsOnTheDevice(_Altered):
    """Parameters that were asked for on the CPU stay on the device."""

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        return options | {"to_cpu": False}


@known_wrong("R046", environment=("accelerator",), name="fsdp1-shows-on-the-device")
class FSDP1ShowsOnTheDevice(_AlteredFSDP1):
    """Parameters that were asked for on the CPU stay on the device."""

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        return options | {"to_cpu": False}


# --- states -----------------------------------------------------------------------------------------------------------


class _Entered(SeamReference):
    """The reference engine, with a place to let its context be entered inside a step."""

    place: ClassVar[str] = ""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        self._inside = ""
        super().setup(model_fn, optim_fn, plan)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._inside = "forward"
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._inside = ""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self._inside = "backward"
        try:
            super().backward(loss, retain_graph=retain_graph)
        finally:
            self._inside = ""

    def full_params_context(self, unit: str = "", **options: Any) -> _Context:
        if self._inside and self._inside == self.place:
            return nullcontext()
        return super().full_params_context(unit, **options)


@known_wrong("R047", shows=("refusal",))
class ReferenceEntersInForward(_Entered):
    """The context can be entered in a forward, and shows whatever is there."""

    place: ClassVar[str] = "forward"


@known_wrong("R047", shows=("refusal",))
class ReferenceEntersInBackward(_Entered):
    """The context can be entered in a backward, and shows whatever is there."""

    place: ClassVar[str] = "backward"


@known_wrong("R047")
class ReferenceRefusesAndForgets(_Entered):
    """The context refuses to be entered in a step, and the gradients of that step are lost on the last rank."""

    _is_spoilt = False

    def full_params_context(self, unit: str = "", **options: Any) -> _Context:
        self._is_spoilt |= bool(self._inside)
        return super().full_params_context(unit, **options)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        super().backward(loss, retain_graph=retain_graph)
        if self._is_spoilt and dist.get_rank() == dist.get_world_size() - 1:
            for parameter in self.parameters().values():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        self._is_spoilt = False


def _leave_whole(adapter: Reference) -> None:
    for unit in ("", *adapter.plan.units):
        adapter.unshard(unit)


@known_wrong("R048")
class ReferenceStaysWhole(_Altered):
    """After the context, all units stay unsharded until the next step."""

    @contextmanager
    def full_params_context(self, unit: str = "", **options: Any) -> Iterator[None]:
        with super().full_params_context(unit, **options):
            yield
        _leave_whole(self)


@known_wrong("R048")
class ReferenceStaysWholeAfterException(_Altered):
    """If the body raises, all units stay unsharded until the next step."""

    @contextmanager
    def full_params_context(self, unit: str = "", **options: Any) -> Iterator[None]:
        try:
            with super().full_params_context(unit, **options):
                yield
        except Exception:
            _leave_whole(self)
            raise


@known_wrong("R048")
class ContextSwallowsExceptions(_Altered):
    """Exceptions of the body are swallowed."""

    @contextmanager
    def full_params_context(self, unit: str = "", **options: Any) -> Iterator[None]:
        with super().full_params_context(unit, **options):
            try:
                yield
            except Exception:  # noqa: BLE001 - that is the defect
                return


@known_wrong("R048")
class ReferenceReshardsOnLeaving(_Altered):
    """The context leaves every unit sharded, also those that were not before."""

    @contextmanager
    def full_params_context(self, unit: str = "", **options: Any) -> Iterator[None]:
        with super().full_params_context(unit, **options):
            yield
        for each in ("", *self.plan.units):
            self.reshard(each)


class _Whole(TorchFSDP1):
    """FSDP1, with parameters that are swapped for whole copies."""

    def show_whole(self) -> None:
        """Replace what each unit has by whole copies, until the next forward."""
        for name, value in self.full_params().items():
            self.parameters()[name].data = value


@known_wrong("R048", name="fsdp1-stays-whole", shows=("finding", "raised"), raises="RuntimeError")
class FSDP1StaysWhole(_Whole):
    """After the context, user code still sees whole parameters."""

    @contextmanager
    def full_params_context(self, unit: str = "", **options: Any) -> Iterator[None]:
        with super().full_params_context(unit, **options):
            yield
        self.show_whole()


@known_wrong("R048", name="fsdp1-stays-whole-after-exception", shows=("finding", "raised"), raises="RuntimeError")
class FSDP1StaysWholeAfterException(_Whole):
    """If the body raises, user code still sees whole parameters."""

    @contextmanager
    def full_params_context(self, unit: str = "", **options: Any) -> Iterator[None]:
        try:
            with super().full_params_context(unit, **options):
                yield
        except Exception:
            self.show_whole()
            raise


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


class FullAccessFSDP2(SeamFSDP2):
    """FSDP2 with a context by hand, which it does not have: modules get whole copies in place of shards."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"full_params_writeback"})

    @contextmanager
    def full_params_context(
        self, unit: str = "", *, recurse: bool = True, writeback: bool = False, **options: bool
    ) -> Iterator[None]:
        prefix = f"{unit}." if unit else ""
        inside = [f"{each}." for each in self.plan.units if each != unit and each.startswith(prefix)]
        shards = {
            name: parameter
            for name, parameter in self.sharded().items()
            if name.startswith(prefix) and (recurse or not any(name.startswith(each) for each in inside))
        }
        shown = {name: nn.Parameter(self.gathered_parameter(name, parameter)) for name, parameter in shards.items()}
        self._register(shards, shown)
        try:
            yield
        finally:
            self._register(shown, shards)
            if writeback:
                for name, parameter in shards.items():
                    self.write_back(parameter, shown[name].detach())

    def gathered_parameter(self, name: str, parameter: nn.Parameter) -> Tensor:
        """A parameter in full. Collective."""
        return full_copy(parameter).to(self.device)

    def write_back(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Keep what was written to a parameter."""
        write_full(parameter, value)

    def _register(self, before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]) -> None:
        for module in self.model.modules():
            for key, parameter in list(module._parameters.items()):
                for name, old in before.items():
                    if parameter is old:
                        module._parameters[key] = after[name]


@known_wrong("R044")
class ShowsRotatedShards(FullAccessFSDP2):
    """The shards of a parameter are shown in the wrong order."""

    def gathered_parameter(self, name: str, parameter: nn.Parameter) -> Tensor:
        value = super().gathered_parameter(name, parameter)
        return value.roll(self.rows_per_rank(value), dims=0) if value.dim() else value


@known_wrong("R044")
class ShowsValuesOfTheStepBefore(FullAccessFSDP2):
    """The context shows what it showed the last time, or what was there at first."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        self._before = self.full_params()

    def gathered_parameter(self, name: str, parameter: nn.Parameter) -> Tensor:
        before, self._before[name] = self._before[name], super().gathered_parameter(name, parameter)
        return before.clone()


@known_wrong("R045")
class WritesIntoPadding(FullAccessFSDP2):
    """Of an uneven parameter, the last row is written behind the shard, into its padding."""

    def write_back(self, parameter: nn.Parameter, value: Tensor) -> None:
        if isinstance(parameter, DTensor) and value.dim() and value.shape[0] % self.world_size:
            value = value.clone()
            value[-1] = full_copy(parameter)[-1].to(value.device)
        super().write_back(parameter, value)


# --- DDP --------------------------------------------------------------------------------------------------------------


@known_wrong("R044", name="ddp-shows-wrapper-names")
class DDPShowsWrapperNames(SeamDDP):
    """The context shows the names that the wrapper adds."""

    def full_params_context(self, unit: str = "", **options: Any) -> _Context:
        return nullcontext()


@known_wrong("R045", name="ddp-persists-always")
class DDPPersistsAlways(SeamDDP):
    """The context shows the parameters themselves: what is written persists."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"full_params_writeback"})

    def full_params_context(self, unit: str = "", **options: Any) -> _Context:
        return nullcontext()


@known_wrong("R046", name="ddp-shows-on-all-ranks")
class DDPShowsOnAllRanks(SeamDDP):
    """All ranks have full parameters, even if only the first one should."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"full_params_rank0"})

    def full_params_context(self, unit: str = "", **options: Any) -> _Context:
        return nullcontext()


# --- apply ------------------------------------------------------------------------------------------------------------


@known_wrong("R051")
class ReferenceAppliesToShards(SeamReference):
    """A function is applied to this rank's parts of the parameters."""

    def apply(self, fn: Callable[[nn.Module], None]) -> None:
        for module in reversed(list(self.model.modules())):
            if module in self.names.modules.values():
                fn(module)


@known_wrong("R051", name="fsdp1-applies-to-shards")
class FSDP1AppliesToShards(TorchFSDP1):
    """A function is applied to this rank's parts of the parameters."""

    def apply(self, fn: Callable[[nn.Module], None]) -> None:
        for module in reversed(list(self.model.modules())):
            if not isinstance(module, FullyShardedDataParallel):
                fn(module)


def _visit(module: nn.Module, fn: Callable[[nn.Module], None]) -> None:
    """Like `nn.Module.apply`, but without the `apply` of the wrappers inside."""
    for child in module.children():
        _visit(child, fn)
    fn(module)


@known_wrong("R051", name="ddp-applies-twice")
class DDPAppliesTwice(TorchDDP):
    """A function is applied through the wrapper, and once more through the module in it."""

    def apply(self, fn: Callable[[nn.Module], None]) -> None:
        super().apply(fn)
        super().apply(fn)


@known_wrong("R051")
class ReferenceLosesWhatIsApplied(SeamReference):
    """A function sees full parameters, but what it writes is lost."""

    def apply(self, fn: Callable[[nn.Module], None]) -> None:
        with self.full_params_context(writeback=False):
            _visit(self.model, fn)


@known_wrong("R051", shows=("refusal",))
class ReferenceAppliesInTheContext(SeamReference):
    """A function can be applied in an open context."""

    _is_open = False

    @contextmanager
    def full_params_context(self, unit: str = "", **options: Any) -> Iterator[None]:
        with super().full_params_context(unit, **options):
            self._is_open = True
            try:
                yield
            finally:
                self._is_open = False

    def apply(self, fn: Callable[[nn.Module], None]) -> None:
        if self._is_open:
            _visit(self.model, fn)
        else:
            super().apply(fn)
