"""Wrong optimizers: steps that are added, missing or made with the wrong settings."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_conformance.adapters.base import ModelFn, OptimFn
from fsdp_conformance.adapters.sharded import local_part
from fsdp_conformance.adapters.torch_like import TorchAdapter
from fsdp_conformance.adapters.vendors.torch_ddp import TorchDDP
from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.engines import SeamFSDP1, SeamReference
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import Plan


@known_wrong("R140")
class AllocatesStateWithAStep(SeamFSDP2):
    """At wrap time, a step with gradients of zeros allocates the optimizer's state, and advances its count."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        if self.optimizer is not None:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


@known_wrong("R141")
class FirstGroupForAll(SeamFSDP2):
    """Every parameter group is stepped with the settings of the first one."""

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        first, *others = self.optimizer.param_groups if self.optimizer is not None else [{}]
        for group in others:
            group |= {key: value for key, value in first.items() if key != "params"}
        return super().step(max_norm, norm_type=norm_type)


@known_wrong("R141")
class SwapsParametersOfTheOptimizer(SeamFSDP2):
    """The settings of each parameter belong to the next one: parameters were matched by position, off by one."""

    def parameters(self) -> dict[str, nn.Parameter]:
        by_name = super().parameters()
        if self._building:
            return dict(zip(by_name, [*list(by_name.values())[1:], next(iter(by_name.values()))], strict=True))
        return by_name

    _building = False

    def _make_optimizer(self) -> None:
        self._building = True
        super()._make_optimizer()
        self._building = False


@known_wrong("R142", name="ddp-steps-before-reducing")
class DDPStepsBeforeReducing(TorchDDP):
    """Hooks of parameters run when this rank's gradient is there, before it is reduced."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"optim_in_backward"})


@known_wrong("R142")
class HooksRunTwice(SeamFSDP2):
    """The hooks of parameters run once when the gradient is reduced, and once more at the end of backward."""

    def after_backward(self) -> None:
        for parameter in self.model.parameters():
            for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(parameter)


@known_wrong("R140", name="fsdp1-steps-twice")
class FSDP1StepsTwice(SeamFSDP1):
    """The optimizer steps once for the root and once more for the other units, with all parameters each time."""

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        if self.optimizer is not None:
            self.optimizer.step()
        return super().step(max_norm, norm_type=norm_type)


@known_wrong("R140", name="fsdp1-new-rate-comes-late")
class FSDP1NewRateComesLate(SeamFSDP1):
    """A new learning rate holds from the step after the next one on."""

    _next: float | None = None

    def set_learning_rate(self, value: float) -> None:
        self._next = value

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        norm = super().step(max_norm, norm_type=norm_type)
        if self._next is not None:
            super().set_learning_rate(self._next)
            self._next = None
        return norm


@known_wrong("R140", name="ddp-steps-flat-shards")
class DDPStepsFlatShards(TorchDDP):
    """Each rank steps its part of each flattened parameter, even with an optimizer that needs whole tensors."""

    def _make_optimizer(self) -> None:
        self._stepped_parts = [
            nn.Parameter(self._part(parameter.data).clone()) for parameter in self.model.parameters()
        ]
        self.optimizer = self._optim_fn(self._stepped_parts)

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        parameters = list(self.model.parameters())
        for parameter, shard in zip(parameters, self._stepped_parts, strict=True):
            shard.grad = None if parameter.grad is None else self._part(parameter.grad).clone()
        norm = super().step(max_norm, norm_type=norm_type)
        for parameter, shard in zip(parameters, self._stepped_parts, strict=True):
            self._part(parameter.data).copy_(shard.detach())
            for rank, part in enumerate(self._parts(parameter.data)):
                dist.broadcast(part, rank)
            parameter.grad = None
        return norm

    def _part(self, tensor: Tensor) -> Tensor:
        return self._parts(tensor)[dist.get_rank()]

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        split: Any = tensor.view(-1).tensor_split
        return list(split(dist.get_world_size()))


@known_wrong("R140", name="ddp-steps-its-rows")
class DDPStepsItsRows(DDPStepsFlatShards):
    """Each rank steps its rows of each matrix, even with an optimizer that needs all of them."""

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.tensor_split(dist.get_world_size()))


@known_wrong("R140")
class StepsItsRows(SeamFSDP2):
    """The optimizer gets this rank's rows as plain matrices, and does not know that there are others."""

    def _make_optimizer(self) -> None:
        self._rows = [nn.Parameter(local_part(parameter)) for parameter in self.model.parameters()]
        self.optimizer = self._optim_fn(self._rows)

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        for parameter, rows in zip(self.model.parameters(), self._rows, strict=True):
            rows.data = local_part(parameter)
            rows.grad = None if parameter.grad is None else local_part(parameter.grad)
            parameter.grad = None
        return super().step(max_norm, norm_type=norm_type)


@known_wrong("R140", name="ddp-shows-copies-after-a-forward")
class DDPShowsCopiesAfterAForward(TorchDDP):
    """From a forward to the end of its backward, user code sees copies of the parameters, which nothing trains."""

    _copies: dict[str, nn.Parameter] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        self._copies = {name: _copied(parameter) for name, parameter in super().parameters().items()}
        return output

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        super().backward(loss, retain_graph=retain_graph)
        self._copies = None

    def parameters(self) -> dict[str, nn.Parameter]:
        return super().parameters() if self._copies is None else self._copies


class _KnowsTheRootIsGathered(TorchAdapter):
    """Mixed in before an adapter: notes that the root is gathered, from a forward to the end of its backward."""

    _gathered = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        self._gathered = True
        return output

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        super().backward(loss, retain_graph=retain_graph)
        self._gathered = False


@known_wrong("R140", name="fsdp1-hides-gathered-parameters")
class FSDP1HidesGatheredParameters(_KnowsTheRootIsGathered, SeamFSDP1):
    """From a forward to the end of its backward, the root's parameters are missing: its module has plain tensors."""

    def parameters(self) -> dict[str, nn.Parameter]:
        shown = super().parameters()
        return {name: each for name, each in shown.items() if not (self._gathered and _of_the_root(name, self.plan))}


@known_wrong("R140")
class ReferenceShowsCopiesOfTheRoot(_KnowsTheRootIsGathered, SeamReference):
    """From a forward to the end of its backward, user code sees copies of the root's parameters."""

    def parameters(self) -> dict[str, nn.Parameter]:
        return {
            name: _copied(each) if self._gathered and _of_the_root(name, self.plan) else each
            for name, each in super().parameters().items()
        }


@known_wrong("R140", name="ddp-forgets-state")
class DDPForgetsState(TorchDDP):
    """The optimizer is recreated before each step, so its state is lost."""

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        self._make_optimizer()
        return super().step(max_norm, norm_type=norm_type)


def _copied(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of its own with the same value."""
    return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)


def _of_the_root(name: str, plan: Plan) -> bool:
    """True if a parameter belongs to no unit of the plan."""
    return not any(name.startswith(f"{unit}.") for unit in plan.units)
