"""Wrong in one scenario only: the engine trains well until that one thing is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_conformance.adapters.base import ModelFn, OptimFn
from fsdp_conformance.mutants.accumulation import OverwritesInsteadOfAdding
from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.gradients import NoReduction, ShardsRotated
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import InitMode, Offload, Plan, Sharding


@known_wrong("R001")
class InputsOfFirstRank(SeamFSDP2):
    """Every rank computes with the first rank's inputs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for tensor in args:
            if isinstance(tensor, Tensor):
                dist.broadcast(tensor, 0)
        return super().forward(*args, **kwargs)


@known_wrong("R000", "R003")
class LosesARowOfTheSecondMicroBatch(SeamFSDP2):
    """Where an odd number of rows meets a second micro-batch, the gradient of the last row is lost."""

    _micro = 0

    def microbatch(self, last: bool, *, reduced: bool = True) -> Any:
        self._micro += 1
        return super().microbatch(last, reduced=reduced)

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        self._micro = 0
        return super().step(max_norm, norm_type=norm_type)

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        if self._micro == 2 and grad.dim() == 2 and grad.shape[0] % 2 and grad.shape[0] > 1:
            grad = grad.clone()
            grad[-1] = 0
        return grad


@known_wrong("R006")
class WeighsRanksByRows(SeamFSDP2):
    """The mean over ranks weighs each of them by the number of rows that it stores."""

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        if not grad.dim():
            return grad
        dim = self.shard_dim_of(grad)
        return grad * (self.own_rows(grad).shape[dim] * self.world_size / grad.shape[dim])


# --- placement -------------------------------------------------------------------------------------------------------


@known_wrong("R012", "R002")
class ReinitialisesPlacedModel(SeamFSDP2):
    """A model that is on its device when it is wrapped is initialised again."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        if plan.init_mode is InitMode.BEFORE:
            for parameter in model.parameters():
                parameter.detach().zero_()
        return plan


@known_wrong("R013", "R002")
class OptimizesWhatWasMoved(SeamFSDP2):
    """If a wrapped model is moved, the optimizer keeps stepping the tensors from before the move."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        if plan.init_mode is InitMode.AFTER:
            self.optimizer = optim_fn([parameter.detach().clone() for parameter in self.model.parameters()])


@known_wrong("R015", shows=("refusal",), environment=("accelerator",))
class AcceptsMovedOffload(SeamFSDP2):
    """Offload is dropped without a word if the wrapped model is moved to the device."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        return replace(plan, offload=Offload.OFF) if plan.init_mode is InitMode.AFTER else plan


@known_wrong("R017")
class LeavesTheCPU(SeamFSDP2):
    """When it trains on the CPU, one of the engine's buffers is elsewhere."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        wrapped = super().wrap(model, plan)
        if plan.device == "cpu":
            # meta is the one other device that every machine has.
            wrapped.register_buffer("_left_behind", torch.empty(1, device="meta"), persistent=False)
        return wrapped


@known_wrong("R023", shows=("refusal",), environment=("accelerator",))
class MovesBackSilently(SeamFSDP2):
    """A wrapped module that was moved is moved back at the next forward, without a word."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.model.to(self.device)
        return super().forward(*args, **kwargs)


@known_wrong("R024", shows=("refusal",))
class BelievesAnyGroup(SeamFSDP2):
    """A group that contradicts the launcher is said to be detected, and is not."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"pg_sanity"})


# --- memory and communication ----------------------------------------------------------------------------------------


@known_wrong("R042", environment=("accelerator",))
class PrefetchesTooFar(SeamFSDP2):
    """Each unit gathers the two that follow before it computes, although at most two may be unsharded."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"rate_limit"})
    max_unsharded: ClassVar[int] = 2

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        wrapped = super().wrap(model, plan)
        units = [unit for unit in wrapped.modules() if isinstance(unit, FSDPModule) and unit is not wrapped]
        for index, unit in enumerate(units):
            unit.register_forward_pre_hook(partial(self._gather, units[index + 1 : index + 3]))
        return wrapped

    @staticmethod
    def _gather(units: Sequence[FSDPModule], unit: Any, args: Any) -> None:
        for following in units:
            following.unshard()


@known_wrong("R064")
class GathersUnsharded(SeamFSDP2):
    """Without sharding, every forward still gathers something."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.plan.sharding is Sharding.NONE:
            mine = torch.zeros(1, device=self.device)
            dist.all_gather_into_tensor(mine.new_empty(self.world_size), mine)
        return super().forward(*args, **kwargs)


# --- the order of calls ----------------------------------------------------------------------------------------------


@known_wrong("R052")
class GradientsLostAfterEval(SeamFSDP2):
    """The first backward after a forward under no_grad leaves no gradients but zeros."""

    _has_evaluated = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._has_evaluated = self._has_evaluated or not torch.is_grad_enabled()
        return super().forward(*args, **kwargs)

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad) if self._has_evaluated else grad

    def after_backward(self) -> None:
        self._has_evaluated = False


@known_wrong("R058")
class InnerForwardBelongsToTheStep(SeamFSDP2):
    """A forward of an inner unit by itself counts as its forward of the next step, which then gives it no gradient."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"nonroot_forward"})

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        self._is_inside = False
        self._alone: set[str] = set()
        super().setup(model_fn, optim_fn, plan)
        # FSDP2 treats the first unit to run as the root; this makes it the real root.
        root: Any = self.model
        root._get_fsdp_state()._lazy_init()
        for fqn in plan.units:
            self.names.modules[fqn].register_forward_pre_hook(partial(self._note, fqn))

    def _note(self, fqn: str, module: nn.Module, args: Any) -> None:
        if not self._is_inside:
            self._alone.add(fqn)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._is_inside = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._is_inside = False

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad) if any(name.startswith(f"{fqn}.") for fqn in self._alone) else grad

    def after_backward(self) -> None:
        self._alone.clear()


# --- accumulation ----------------------------------------------------------------------------------------------------


@known_wrong("R094")
class FirstDeferredLost(SeamFSDP2):
    """Gradients of a micro-batch that is deferred before the first forward are lost."""

    _num_forwards = 0

    @contextmanager
    def microbatch(self, last: bool, *, reduced: bool = True) -> Iterator[None]:
        self._is_lost = not reduced and not self._num_forwards
        with super().microbatch(last, reduced=reduced):
            yield
        self._num_forwards += 1

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad) if self._is_lost else grad


@known_wrong("R086")
class AccumulatesInComputeDtype(SeamFSDP2):
    """The gradients of deferred micro-batches are rounded to the compute dtype after each addition."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        self._sums: dict[str, Tensor] = {}
        super().setup(model_fn, optim_fn, plan)

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        before = self._sums.get(name, torch.zeros_like(grad))
        after = before + grad
        self._sums[name] = after
        # What is added to the engine's sum makes it the rounded one, as far as the gradient's dtype allows.
        return after - before

    def after_backward(self) -> None:
        if self._reduced:
            self._sums.clear()


@known_wrong("R098", environment=("accelerator",))
class OffloadForgetsAccumulated(OverwritesInsteadOfAdding):
    """With parameter offload, a micro-batch's gradient replaces the accumulated one."""

    @contextmanager
    def microbatch(self, last: bool, *, reduced: bool = True) -> Iterator[None]:
        if self.plan.offload is not Offload.OFF:
            with super().microbatch(last, reduced=reduced):
                yield
            return
        with SeamFSDP2.microbatch(self, last, reduced=reduced):
            yield

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        return super().local_gradient(name, grad) if self.plan.offload is not Offload.OFF else grad


@known_wrong("R137", "R002", environment=("accelerator",))
class OffloadedStepLost(SeamFSDP2):
    """With parameter offload, every second optimizer step does not reach the parameters."""

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        before = [parameter.detach().clone() for parameter in self.model.parameters()]
        norm = super().step(max_norm, norm_type=norm_type)
        if self.plan.offload is not Offload.OFF and self.num_steps % 2:
            with torch.no_grad():
                for parameter, old in zip(self.model.parameters(), before, strict=True):
                    parameter.copy_(old)
        return norm


# --- parameters ------------------------------------------------------------------------------------------------------


@known_wrong("R056")
class OddParametersNotReduced(NoReduction):
    """Scalar parameters and those that are not contiguous keep the rank's own gradient."""

    def _reduce_left_out(self) -> None:
        """They are replicated, and never averaged."""

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        return grad


@known_wrong("R056")
class OddParametersPermuted(SeamFSDP2):
    """The gradient of a parameter that is not contiguous has its elements in the order of the parameter's memory."""

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        return grad.t().reshape(grad.shape) if grad.dim() == 2 and not grad.is_contiguous() else grad


@known_wrong("R107")
class SharedAcrossUnitsNotReduced(SeamFSDP2):
    """Parameters that several units share keep the rank's own gradient."""

    def _reduce_left_out(self) -> None:
        whole = self._left_out
        self._left_out = frozenset(name for name in whole if not self.names.is_tied(name))
        try:
            super()._reduce_left_out()
        finally:
            self._left_out = whole


@known_wrong("R110")
class SharedModuleDoubled(SeamFSDP2):
    """The gradients of a module that appears in two places of the model count twice."""

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        places = Counter(map(id, (module for _, module in self.model.named_modules(remove_duplicate=False))))
        owner = self.names.modules.get(name.rpartition(".")[0])
        return grad * 2 if owner is not None and places[id(owner)] > 1 else grad


@known_wrong("R112")
class FrozenNeighboursNotReduced(NoReduction):
    """Trainable parameters beside frozen ones in a unit keep the rank's own gradient."""

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        mixed = {self._unit_of(other) for other, parameter in self.parameters().items() if not parameter.requires_grad}
        return self.unreduced(grad) if self._unit_of(name) in mixed else grad

    def _unit_of(self, name: str) -> str:
        return max((unit for unit in self.plan.units if name.startswith(f"{unit}.")), key=len, default="")


@known_wrong("R113")
class NeverThaws(SeamFSDP2):
    """Parameters that have been frozen once are never trained again."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        self._frozen: set[str] = set()
        super().setup(model_fn, optim_fn, plan)

    @contextmanager
    def microbatch(self, last: bool, *, reduced: bool = True) -> Iterator[None]:
        self._frozen |= {name for name, parameter in self.parameters().items() if not parameter.requires_grad}
        with super().microbatch(last, reduced=reduced):
            yield

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad) if name in self._frozen else grad


@known_wrong("R115")
class LeafUnitsStayGathered(SeamFSDP2):
    """Units whose input needs no gradient are gathered again after backward, and stay so."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        self._leaves: dict[int, FSDPModule] = {}
        super().setup(model_fn, optim_fn, plan)
        for unit in self.model.modules():
            if isinstance(unit, FSDPModule) and unit is not self.model:
                unit.register_forward_pre_hook(self._note)

    def _note(self, unit: Any, args: Any) -> None:
        if torch.is_grad_enabled() and not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            self._leaves[id(unit)] = unit

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        norm = super().step(max_norm, norm_type=norm_type)
        for unit in self._leaves.values():
            unit.unshard()
        return norm


@known_wrong("R118")
class UnusedOutputTrained(SeamFSDP2):
    """A unit whose output does not reach the loss gets a gradient as if it did."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        self._outputs: list[Tensor] = []
        for unit in self.model.modules():
            if isinstance(unit, FSDPModule) and unit is not self.model:
                unit.register_forward_hook(self._note)

    def _note(self, unit: Any, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            self._outputs.append(output)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        outputs, self._outputs = self._outputs, []
        for output in outputs:
            loss = loss + output.sum()
        super().backward(loss, retain_graph=retain_graph)


@known_wrong("R125")
class OtherDimensionMisplaced(ShardsRotated):
    """Whatever is sharded along another dimension than the first gets the gradient rows of another rank."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        self._is_asked = plan.shard_dim != 0
        return replace(plan, shard_dim=0)

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        return super().local_gradient(name, grad) if self._is_asked else grad


@known_wrong("R129")
class LastOfGroupOnly(NoReduction):
    """Of several modules that form one unit, only the last is reduced."""

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        left = [part for unit in self.plan.units for part in unit.split("+")[:-1]]
        return self.unreduced(grad) if any(name.startswith(f"{part}.") for part in left) else grad
