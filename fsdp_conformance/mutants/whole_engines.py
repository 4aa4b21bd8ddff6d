"""Defects of a whole engine: everything that it refuses, communicates, reads, computes or keeps is wrong in one way."""

from __future__ import annotations

import inspect
import itertools
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard

from fsdp_conformance.adapters.base import Adapter, LoadedKeys, ModelFn, OptimFn
from fsdp_conformance.errors import Unsupported
from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.engines import SeamFSDP1, SeamReference
from fsdp_conformance.mutants.memory import GatheringFirst
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import Plan, Sharding

# --- refusals ---------------------------------------------------------------------------------------------------------


def _answering(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method of an adapter that answers errors as the adapter does, also those that its context raises."""

    def call(self: _Answering, *args: Any, **kwargs: Any) -> Any:
        with self.answering(name):
            result = method(self, *args, **kwargs)
        return self.inside(name, result) if isinstance(result, AbstractContextManager) else result

    return call


class _Answering(Adapter):
    """Answers each of its engine's errors, and those of user code that the engine calls, in the same way."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, method in inspect.getmembers(cls, inspect.isfunction):
            # To override an optional method is to declare it, so those that the engine lacks are left alone.
            if not name.startswith("_") and getattr(Adapter, name, method) is not method:
                setattr(cls, name, _answering(name, method))

    @contextmanager
    def answering(self, name: str) -> Iterator[None]:
        """A call of this method: errors become the answer, but for a plan that the adapter declines."""
        try:
            yield
        except Exception as error:
            if isinstance(error, Unsupported) and name == "setup":
                raise
            self.answer()

    @contextmanager
    def inside(self, name: str, context: AbstractContextManager[Any]) -> Iterator[Any]:
        """The context that this method has returned, with the same answers."""
        with self.answering(name):
            shown = context.__enter__()
        try:
            yield shown
        finally:
            with self.answering(name):
                context.__exit__(*sys.exc_info())

    def answer(self) -> None:
        """Called in the place of each error."""
        raise NotImplementedError


class _Wordless(_Answering):
    def answer(self) -> None:
        raise RuntimeError("that does not work") from None


class _Broken(_Answering):
    def answer(self) -> None:
        nothing: Any = None
        nothing.wait()


@known_wrong("R057", "R160", shows=("refusal", "finding"))
class GivesNoReasons(_Wordless, SeamFSDP2):
    """Whatever the engine refuses, and whatever fails in a user's code, the error does not say what."""


@known_wrong("R057", "R160", shows=("refusal", "finding"))
class BreaksDownAtEveryError(_Broken, SeamFSDP2):
    """Whatever the engine refuses, and whatever fails in a user's code, ends in an AttributeError of None."""


@known_wrong("R057", "R160", shows=("refusal", "finding"))
class ReferenceGivesNoReasons(_Wordless, SeamReference):
    """Whatever the engine refuses, and whatever fails in a user's code, the error does not say what."""


@known_wrong("R057", "R160", shows=("refusal", "finding"))
class ReferenceBreaksDownAtEveryError(_Broken, SeamReference):
    """Whatever the engine refuses, and whatever fails in a user's code, ends in an AttributeError of None."""


# --- communication ----------------------------------------------------------------------------------------------------


class _Chatty(Adapter):
    """Sums one element over the ranks in each forward, backward and optimizer step."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.sum_an_element()
        return super().forward(*args, **kwargs)  # type: ignore[safe-super]

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.sum_an_element()
        super().backward(loss, retain_graph=retain_graph)  # type: ignore[safe-super]

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        self.sum_an_element()
        return super().step(max_norm, norm_type=norm_type)  # type: ignore[safe-super]

    def sum_an_element(self) -> None:
        dist.all_reduce(torch.zeros(1, device=self.device))  # type: ignore[attr-defined]


class _ChattyApart(_Chatty):
    """Sums the element over all ranks but the last."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        self._others = list(range(dist.get_world_size() - 1)) or [0]
        self._apart = dist.new_group(self._others)
        super().setup(model_fn, optim_fn, plan)  # type: ignore[safe-super]

    def sum_an_element(self) -> None:
        if dist.get_rank() in self._others:
            dist.all_reduce(torch.zeros(1, device=self.device), group=self._apart)  # type: ignore[attr-defined]


class _Disagreeing(_Chatty):
    """The first rank asks for the largest element, the others for the sum."""

    def sum_an_element(self) -> None:
        op = dist.ReduceOp.MAX if dist.get_rank() == 0 else dist.ReduceOp.SUM
        dist.all_reduce(torch.zeros(1, device=self.device), op)  # type: ignore[attr-defined]


class _ChattyAtTimes(_Chatty):
    """Sums the element before every second optimizer step."""

    is_due = False

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        self.is_due = not self.is_due
        return super().step(max_norm, norm_type=norm_type)

    def sum_an_element(self) -> None:
        if self.is_due:
            super().sum_an_element()


@known_wrong("R062", "R066", "R071")
class CommunicatesInEveryCall(_Chatty, SeamFSDP2):
    """Each forward, backward and optimizer step sums one element over the ranks."""


@known_wrong("R062", "R066", "R071")
class ReferenceCommunicatesInEveryCall(_Chatty, SeamReference):
    """Each forward, backward and optimizer step sums one element over the ranks."""


@known_wrong("R069", "R062")
class CommunicatesApart(_ChattyApart, SeamFSDP2):
    """Each forward, backward and optimizer step sums one element over all ranks but the last."""


@known_wrong("R069", "R062")
class ReferenceCommunicatesApart(_ChattyApart, SeamReference):
    """Each forward, backward and optimizer step sums one element over all ranks but the last."""


@known_wrong("R067")
class RanksDisagree(_Disagreeing, SeamFSDP2):
    """The ranks name different reductions in a sum of one element."""


@known_wrong("R067")
class ReferenceRanksDisagree(_Disagreeing, SeamReference):
    """The ranks name different reductions in a sum of one element."""


@known_wrong("R071")
class CommunicatesAtTimes(_ChattyAtTimes, SeamFSDP2):
    """From every second optimizer step to the next, each call sums one element over the ranks."""


@known_wrong("R071")
class ReferenceCommunicatesAtTimes(_ChattyAtTimes, SeamReference):
    """From every second optimizer step to the next, each call sums one element over the ranks."""


class _ReducingTwice(Adapter):
    """After each backward, reduces and scatters as many zeros as the model has parameters."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        numel = sum(parameter.numel() for parameter in model_fn().parameters())
        self._numel = -(-numel // dist.get_world_size())
        super().setup(model_fn, optim_fn, plan)  # type: ignore[safe-super]

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        super().backward(loss, retain_graph=retain_graph)  # type: ignore[safe-super]
        parts = torch.zeros(dist.get_world_size(), self._numel, device=self.device)  # type: ignore[attr-defined]
        dist.reduce_scatter_tensor(torch.empty_like(parts[0]), parts.view(-1))


@known_wrong("R072", "R068")
class ReducesTwice(_ReducingTwice, SeamFSDP2):
    """As many bytes as all parameters have are reduced a second time, also for frozen ones."""


@known_wrong("R072", "R068")
class ReferenceReducesTwice(_ReducingTwice, SeamReference):
    """As many bytes as all parameters have are reduced a second time, also for frozen ones."""


class _Twice(Adapter):
    """Runs each forward twice."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            super().forward(*args, **kwargs)  # type: ignore[safe-super]
        return super().forward(*args, **kwargs)  # type: ignore[safe-super]


@known_wrong("R062", "R158")
class RunsForwardTwice(_Twice, SeamFSDP2):
    """The model runs twice in each forward, and the first result is dropped."""


@known_wrong("R062", "R158")
class ReferenceRunsForwardTwice(_Twice, SeamReference):
    """The model runs twice in each forward, and the first result is dropped."""


# --- values -----------------------------------------------------------------------------------------------------------


@known_wrong("R011")
class ReferenceAddsNoise(SeamReference):
    """Every step adds noise that no seed controls."""

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        norm = super().step(max_norm, norm_type=norm_type)
        generator = torch.Generator().manual_seed(secrets.randbits(32))
        with torch.no_grad():
            for local in self.local_tensors()["params"]:
                local.add_(torch.randn(local.shape, generator=generator).to(local) * 1e-4)
        return norm


class _Reading(Adapter):
    """On the last rank, everything that is read whole is larger than on the others."""

    def full_params(self) -> dict[str, Tensor]:
        return self._read(super().full_params())  # type: ignore[safe-super]

    def full_grads(self) -> dict[str, Tensor | None]:
        return self._read(super().full_grads())

    def full_buffers(self) -> dict[str, Tensor]:
        return self._read(super().full_buffers())

    def full_optim_state(self) -> dict[str, dict[str, Tensor]]:
        return {name: self._read(state) for name, state in super().full_optim_state().items()}

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        return self._read(super().full_state_dict(rank0_only=rank0_only))

    def _read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        if dist.get_rank() != dist.get_world_size() - 1:
            return dict(values)
        return {name: value + value.abs() + 1 if _is_number(value) else value for name, value in values.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@known_wrong("R007")
class LastRankGathersOtherValues(_Reading, SeamFSDP2):
    """Parameters, gradients, buffers and optimizer state that are gathered have other values on the last rank."""


@known_wrong("R007")
class ReferenceLastRankGathersOtherValues(_Reading, SeamReference):
    """Parameters, gradients, buffers and optimizer state that are gathered have other values on the last rank."""


class _Damaging(Adapter):
    """A module computes with values that differ from its shards in one element, by more in each forward."""

    #: Of the process, so that a copy of the model goes on where the model is.
    damages: ClassVar[Iterator[int]] = itertools.count(1)

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)  # type: ignore[safe-super]
        for module in self.module().modules():
            module.register_forward_pre_hook(self._damage)

    def next_damage(self) -> float:
        """The error that is added in the next module."""
        return next(self.damages)

    def _damage(self, module: nn.Module, args: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters(recurse=False):
                if not isinstance(parameter, DTensor) and parameter.numel():
                    parameter.view(-1)[0] += self.next_damage()


class _Noisy(_Damaging):
    """The difference is one that no seed controls."""

    def next_damage(self) -> float:
        return 1 + secrets.randbelow(1000)


@known_wrong("R001", "R048")
class DamagesGatheredParameters(_Damaging, SeamFSDP2):
    """The first element of each gathered parameter is larger than the one in its shard, by more each time."""


@known_wrong("R001", "R048")
class ReferenceDamagesGatheredParameters(_Damaging, SeamReference):
    """The first element of each gathered parameter is larger than the one in its shard, by more each time."""


@known_wrong("R011", "R001")
class GathersNoise(_Noisy, SeamFSDP2):
    """The first element of each gathered parameter is larger than the one in its shard, by a random number."""


@known_wrong("R011", "R001")
class ReferenceGathersNoise(_Noisy, SeamReference):
    """The first element of each gathered parameter is larger than the one in its shard, by a random number."""


class _BehindTheDevice(Adapter):
    """Leaves buffers on the CPU."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)  # type: ignore[safe-super]
        for module in self.module().modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                module._buffers[name] = buffer.cpu()


@known_wrong("R016", "R013", environment=("accelerator",))
class LeavesBuffersBehind(_BehindTheDevice, SeamFSDP2):
    """Buffers stay on the CPU."""


@known_wrong("R016", "R013", environment=("accelerator",))
class ReferenceLeavesBuffersBehind(_BehindTheDevice, SeamReference):
    """Buffers stay on the CPU."""


class _Detaching(Adapter):
    """Cuts the graph in front of the model."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cut = [value.detach() if isinstance(value, Tensor) else value for value in args]
        return super().forward(*cut, **kwargs)  # type: ignore[safe-super]


@known_wrong("R088", "R099")
class DetachesInputs(_Detaching, SeamFSDP2):
    """No gradient flows to the inputs of the model."""


@known_wrong("R088", "R099")
class ReferenceDetachesInputs(_Detaching, SeamReference):
    """No gradient flows to the inputs of the model."""


# --- precision --------------------------------------------------------------------------------------------------------

_OTHER = {"bfloat16": "float16", "float16": "bfloat16"}


class _Confusing(Adapter):
    """Takes one half precision for the other."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        variables = ("param_dtype", "reduce_dtype", "buffer_dtype")
        dtypes = {name: _OTHER.get(getattr(plan, name), getattr(plan, name)) for name in variables}
        super().setup(model_fn, optim_fn, replace(plan, **dtypes))  # type: ignore[safe-super]


@known_wrong("R081", "R083")
class ConfusesHalfPrecisions(_Confusing, SeamFSDP2):
    """Where bfloat16 is asked for it is float16, and the other way round."""


@known_wrong("R081", "R083")
class ReferenceConfusesHalfPrecisions(_Confusing, SeamReference):
    """Where bfloat16 is asked for it is float16, and the other way round."""


class _Low(Adapter):
    """Keeps the parameters in the precision that they are computed in."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        dtype = getattr(torch, plan.param_dtype) if plan.param_dtype else torch.float32
        super().setup(lambda: model_fn().to(dtype), optim_fn, plan)  # type: ignore[safe-super]


@known_wrong("R082", "R085")
class HasNoFullPrecision(_Low, SeamFSDP2):
    """Shards, gradients and optimizer state have the dtype that the model computes in."""


@known_wrong("R082", "R085")
class ReferenceHasNoFullPrecision(_Low, SeamReference):
    """Shards, gradients and optimizer state have the dtype that the model computes in."""


# --- memory -----------------------------------------------------------------------------------------------------------


class _Hoarding(Adapter):
    """In each forward, registers another hook that keeps a copy of what was gathered."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        copies: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            copies.extend(parameter.detach().clone() for parameter in module.parameters(recurse=False))

        for module in self.module().modules():
            module.register_forward_hook(keep)
        return super().forward(*args, **kwargs)  # type: ignore[safe-super]


@known_wrong("R039", "R034", "R158", environment=("accelerator",))
class HoardsParameters(_Hoarding, SeamFSDP2):
    """Each forward adds hooks that keep copies of the full parameters."""


@known_wrong("R039", "R034", "R158", environment=("accelerator",))
class ReferenceHoardsParameters(_Hoarding, SeamReference):
    """Each forward adds hooks that keep copies of the full parameters."""


@known_wrong("R037")
class ShardsGradientsOtherwise(SeamFSDP2):
    """Until the optimizer steps, gradients of matrices are sharded along other dimensions than their parameters."""

    def after_backward(self) -> None:
        self._shard_gradients(along=1)

    @contextmanager
    def microbatch(self, last: bool, *, reduced: bool = True) -> Iterator[None]:
        # FSDP2 adds to the gradients where its parameters are.
        self._shard_gradients(along=0)
        with super().microbatch(last, reduced=reduced):
            yield

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        self._shard_gradients(along=0)
        return super().step(max_norm, norm_type=norm_type)

    def _shard_gradients(self, along: int) -> None:
        for parameter in self.sharded().values():
            grad = parameter.grad
            if isinstance(grad, DTensor) and grad.dim() > 1 and grad.device_mesh.ndim == 1:
                parameter.grad = grad.redistribute(placements=[Shard(along)])


@known_wrong("R103")
class NormsAreNeverZero(SeamFSDP2):
    """A constant is added to each norm that clipping returns."""

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        return super().clip(max_norm, norm_type) + 1e-3


@known_wrong("R103")
class ReferenceNormsAreNeverZero(SeamReference):
    """A constant is added to each norm that clipping returns."""

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        return super().clip(max_norm, norm_type) + 1e-3


# --- what the engine shows, takes and promises ------------------------------------------------------------------------


class _Empty(Adapter):
    """Shows a module without contents in the place of the wrapped one."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        self._empty = nn.Module()
        super().setup(model_fn, optim_fn, plan)  # type: ignore[safe-super]

    def module(self) -> nn.Module:
        return self._empty


@known_wrong("R060", "R158")
class ShowsAnEmptyModule(_Empty, SeamFSDP2):
    """The wrapped module is hidden behind one without children, attributes and parameters."""


@known_wrong("R060", "R158")
class ReferenceShowsAnEmptyModule(_Empty, SeamReference):
    """The wrapped module is hidden behind one without children, attributes and parameters."""


class _Biasless(Adapter):
    """Turns parameters of one dimension into buffers."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.dim() == 1:
                    delattr(module, name)
                    module.register_buffer(name, parameter.detach())
        wrapped: nn.Module = super().wrap(model, plan)  # type: ignore[misc]
        return wrapped


@known_wrong("R036", "R001")
class TakesBiasesForBuffers(_Biasless, SeamFSDP2):
    """Parameters of one dimension become buffers, which are not trained."""


@known_wrong("R036", "R001")
class ReferenceTakesBiasesForBuffers(_Biasless, SeamReference):
    """Parameters of one dimension become buffers, which are not trained."""


class _Unloading(Adapter):
    """Loads nothing."""

    def load_full_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> LoadedKeys:
        return LoadedKeys([], [])

    def load_sharded_state_dict(self, state: Mapping[str, Any]) -> None:
        return None

    def load_optim_state_dict(self, state: Mapping[str, Any]) -> None:
        return None

    def load_checkpoint(self, directory: Path) -> None:
        return None


@known_wrong("R149", "R141")
class LoadsNothing(_Unloading, SeamFSDP2):
    """Loading a state dict or a checkpoint has no effect."""


@known_wrong("R149", "R141")
class ReferenceLoadsNothing(_Unloading, SeamReference):
    """Loading a state dict or a checkpoint has no effect."""


_CHECKS = frozenset({"pg_sanity", "structure_check", "deferral_checks", "exec_order_check"})


@known_wrong("R024", "R162", "R100", shows=("refusal", "finding"))
class ClaimsEveryCheck(SeamFSDP2):
    """Groups, structures and orders that contradict each other are said to be reported, and are not."""

    capabilities: ClassVar[frozenset[str]] = _CHECKS


@known_wrong("R024", "R162", "R100", shows=("refusal", "finding"), name="fsdp1-claims-every-check")
class FSDP1ClaimsEveryCheck(SeamFSDP1):
    """Groups, structures and orders that contradict each other are said to be reported, and are not."""

    capabilities: ClassVar[frozenset[str]] = _CHECKS

    def alter(self, unit: FullyShardedDataParallel) -> None:
        """Alter nothing."""


# --- the reference engine's schedule ----------------------------------------------------------------------------------


@known_wrong("R076", "R038")
class ReferenceGathersEverythingFirst(GatheringFirst, SeamReference):
    """Every unit is gathered at the start of forward and again at the start of backward."""

    def gather_all(self) -> None:
        for fqn in self.plan.units:
            self.unshard(fqn)


@known_wrong("R076", "R034")
class ReferenceKeepsParametersAfterForward(SeamReference):
    """Units keep their full parameters from forward to backward, whatever was requested."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        sharding = Sharding.GRAD_OPTIM if plan.sharding in (Sharding.FULL, Sharding.DEFAULT) else plan.sharding
        super().setup(model_fn, optim_fn, replace(plan, reshard_after_forward=False, sharding=sharding))
