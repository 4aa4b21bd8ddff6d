"""Wrong between steps or inside one: what reads, evaluations, new settings and users' writes leave behind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_conformance.adapters.base import ModelFn, OptimFn
from fsdp_conformance.adapters.sharded import local_part
from fsdp_conformance.mutants.base import SeamDDP, SeamFSDP2
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import Plan


@known_wrong("R010")
class EvaluationClearsGradients(SeamFSDP2):
    """A forward in eval mode sets the gradients that were accumulated so far to zero."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if not self.model.training:
            for grad in self.local_grads().values():
                grad.zero_()
        return output


@known_wrong("R010")
class ModeClearsGradients(SeamFSDP2):
    """Switching to eval mode on a rank drops the gradients that it has accumulated."""

    def train(self, mode: bool = True) -> None:
        super().train(mode)
        if not mode:
            for grad in self.local_grads().values():
                grad.zero_()


@known_wrong("R053")
class ForwardReplacesGradients(SeamFSDP2):
    """A forward in training mode drops the gradients of earlier micro-batches, unless a backward follows it."""

    _open = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._open and torch.is_grad_enabled():
            for grad in self.local_grads().values():
                grad.zero_()
        self._open = torch.is_grad_enabled()
        return super().forward(*args, **kwargs)

    def after_backward(self) -> None:
        self._open = False


@known_wrong("R052", "R150")
class ReadingDropsGradients(SeamFSDP2):
    """Reading the full parameters inside a step drops the gradients that were accumulated so far."""

    def full_params(self) -> dict[str, Tensor]:
        for parameter in self.parameters().values():
            parameter.grad = None
        return super().full_params()


@known_wrong("R052")
class ReadsWhatForwardSaw(SeamFSDP2):
    """From the third read after a forward on, the full parameters are those that the forward had."""

    _seen: Mapping[str, Tensor] = MappingProxyType({})
    _reads = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._seen, self._reads = super().full_params(), 0
        return super().forward(*args, **kwargs)

    def full_params(self) -> dict[str, Tensor]:
        self._reads += 1
        return dict(self._seen) if self._reads > 2 and self._seen else super().full_params()


@known_wrong("R041")
class ReshardByHandDropsGradients(SeamFSDP2):
    """Freeing a unit by hand drops the gradients that its parameters have accumulated."""

    def reshard(self, fqn: str) -> None:
        super().reshard(fqn)
        for name, grad in self.local_grads().items():
            if name.startswith(f"{fqn}."):
                grad.zero_()


@known_wrong("R140", "R141")
class NewRateOnOneRank(SeamFSDP2):
    """A new learning rate reaches the first rank only."""

    def set_learning_rate(self, value: float) -> None:
        if self.rank == 0:
            super().set_learning_rate(value)


@known_wrong("R141")
class NewRateReachesTheFirstGroup(SeamFSDP2):
    """A new learning rate reaches the first parameter group only."""

    def set_learning_rate(self, value: float) -> None:
        if self.optimizer is not None:
            self.optimizer.param_groups[0]["lr"] = value


@known_wrong("R113")
class FrozenStillMoves(SeamFSDP2):
    """A parameter that was trained before it was frozen still moves by its momentum."""

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        for parameter in self.parameters().values():
            if not parameter.requires_grad and self.optimizer is not None and self.optimizer.state.get(parameter):
                parameter.grad = torch.zeros_like(parameter)
        return super().step(max_norm, norm_type=norm_type)


@known_wrong("R113")
class ThawedLosesFirstGradient(SeamFSDP2):
    """The first gradient of a parameter after it was unfrozen is lost."""

    _frozen: frozenset[str] = frozenset()
    _thawed: frozenset[str] = frozenset()

    def set_requires_grad(self, frozen: Iterable[str]) -> None:
        names = frozenset(frozen)
        self._thawed, self._frozen = self._frozen - names, names
        super().set_requires_grad(names)

    def after_backward(self) -> None:
        for name, grad in self.local_grads().items():
            if name in self._thawed:
                grad.zero_()
        self._thawed = frozenset()


@known_wrong("R140")
class SkipAdvancesTheCounter(SeamFSDP2):
    """A skipped step still advances the optimizer's count of steps."""

    def drop_grads(self, names: Iterable[str]) -> None:
        super().drop_grads(names)
        for state in self.optimizer.state.values() if self.optimizer is not None else ():
            if "step" in state:
                state["step"] += 1


@known_wrong("R140")
class StepsWithZerosInsteadOfSkipping(SeamFSDP2):
    """A skipped step is made with gradients of zeros, so the momentum moves the parameters."""

    def drop_grads(self, names: Iterable[str]) -> None:
        for grad in self.local_grads().values():
            grad.zero_()
        if self.optimizer is not None:
            self.optimizer.step()
        super().drop_grads(names)


@known_wrong("R141")
class ZerosTakenForNone(SeamFSDP2):
    """A gradient of zeros is taken for a missing one: the momentum does not move the parameter."""

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        for name, parameter in self.parameters().items():
            grad = self.local_grads().get(name)
            if grad is not None:
                somewhere = grad.count_nonzero()
                dist.all_reduce(somewhere)
                if not somewhere:
                    parameter.grad = None
        return super().step(max_norm, norm_type=norm_type)


@known_wrong("R141")
class ZerosKeptFromTheFirstStep(SeamFSDP2):
    """Where gradients are to be set to zero, those of the second step and later are kept instead."""

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        before = {name: grad.clone() for name, grad in self.local_grads().items()} if self.num_steps else {}
        norm = super().step(max_norm, norm_type=norm_type)
        if not self.sets_to_none:
            for name, grad in self.local_grads().items():
                if name in before:
                    grad.copy_(before[name])
        return norm


class _Writable(SeamDDP):
    """Users may write to its parameters."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"writeback_in_place", "writeback_direct"})

    def values(self) -> dict[str, Tensor]:
        """Clones of the parameters."""
        return {name: local_part(parameter).clone() for name, parameter in self.parameters().items()}


@known_wrong("R143")
class WriteLostOnOneRank(_Writable):
    """Writes of users to parameters and gradients are lost on the last rank."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        self._own = self.values()
        self._grads: dict[str, Tensor] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._restore()
        return super().forward(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        super().backward(loss, retain_graph=retain_graph)
        self._grads = {name: p.grad.clone() for name, p in self.parameters().items() if p.grad is not None}

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        self._restore()
        if dist.get_rank() == dist.get_world_size() - 1:
            for name, grad in self._grads.items():
                self.parameters()[name].grad = grad
        norm = super().step(max_norm, norm_type=norm_type)
        self._own = self.values()
        return norm

    def _restore(self) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            for name, parameter in self.parameters().items():
                parameter.data = self._own[name].clone()


@known_wrong("R143")
class StepsTheGradientsOfBackward(_Writable):
    """The optimizer steps with a copy of the gradients that was taken at the end of backward."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        super().backward(loss, retain_graph=retain_graph)
        self._grads = {name: p.grad.clone() for name, p in self.parameters().items() if p.grad is not None}

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        for name, grad in self._grads.items():
            self.parameters()[name].grad = grad
        return super().step(max_norm, norm_type=norm_type)


@known_wrong("R143")
class ComputesWithValuesBeforeWrite(_Writable):
    """A forward computes with what was gathered right after the last step, before users wrote to the parameters."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        self._gathered: dict[str, Tensor] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        written = self.values()
        for name, parameter in self.parameters().items():
            parameter.data.copy_(self._gathered.get(name, written[name]))
        output = super().forward(*args, **kwargs)
        self._written = written
        return output

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        super().backward(loss, retain_graph=retain_graph)
        for name, parameter in self.parameters().items():
            parameter.data.copy_(self._written[name])

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        norm = super().step(max_norm, norm_type=norm_type)
        self._gathered = self.values()
        return norm


@known_wrong("R143", shows=("refusal",))
class TakesAnyShape(_Writable):
    """Data of another shape that users assign to a parameter are silently replaced by the old ones."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        self._own = {name: parameter.data for name, parameter in self.parameters().items()}

    def full_params(self) -> dict[str, Tensor]:
        self._put_back()
        return super().full_params()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._put_back()
        return super().forward(*args, **kwargs)

    def _put_back(self) -> None:
        for name, parameter in self.parameters().items():
            parameter.data = self._own[name]
