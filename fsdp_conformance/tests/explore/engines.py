"""Engines for tests of `explore`: wrong only where two axes meet, lying about what they do, crashing, hanging."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from fsdp_conformance.adapters.base import LoadedKeys
from fsdp_conformance.adapters.sharded import full_copies, full_gradients, local_part
from fsdp_conformance.adapters.vendors.reference import Reference
from fsdp_conformance.adapters.vendors.torch_ddp import TorchDDP
from fsdp_conformance.adapters.vendors.torch_fsdp1 import TorchFSDP1
from fsdp_conformance.adapters.vendors.torch_fsdp2 import TorchFSDP2
from fsdp_conformance.errors import Unsupported
from fsdp_conformance.mutants.scenarios import LosesARowOfTheSecondMicroBatch


class OddAndSecond(LosesARowOfTheSecondMicroBatch):
    """Wrong where an odd number of rows meets a second micro-batch."""

    name: ClassVar[str] = "odd-and-second"


class SaysItShards(TorchDDP):
    """Replicated training that claims to shard everything."""

    name: ClassVar[str] = "says-it-shards"
    capabilities: ClassVar[frozenset[str]] = frozenset({"zero3", "reshard_after_forward"})


class DiesWhenAccumulating(TorchFSDP2):
    """The process ends in the third step, if there are several micro-batches."""

    name: ClassVar[str] = "dies-when-accumulating"
    _steps = 0

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        self._steps += 1
        if self._steps == 3 and self.plan.micro_batches > 1:
            os._exit(7)
        return super().step(max_norm, norm_type=norm_type)


class WaitsAlone(TorchFSDP2):
    """Rank 0 issues a collective that no other rank issues, if there are several micro-batches."""

    name: ClassVar[str] = "waits-alone"

    def setup(self, model_fn: Any, optim_fn: Any, plan: Any) -> None:
        super().setup(model_fn, optim_fn, plan)
        if plan.micro_batches > 1 and dist.get_rank() == 0 and dist.get_world_size() > 1:
            dist.barrier()


class RefusesNesting(TorchFSDP2):
    """Refuses units inside of others: a combination, in clear words."""

    name: ClassVar[str] = "refuses-nesting"

    def wrap(self, model: Any, plan: Any) -> Any:
        if any(".inner." in unit for unit in plan.units):
            raise Unsupported("zero3", "units inside of units are not offered")
        return super().wrap(model, plan)


class KeepsTheRateWhenAccumulating(Reference):
    """Wrong where a new learning rate meets several micro-batches: the first rate stays."""

    name: ClassVar[str] = "keeps-the-rate-when-accumulating"

    def set_learning_rate(self, value: float) -> None:
        if self.plan.micro_batches == 1:
            super().set_learning_rate(value)


class SavingHalvesMomentum(Reference):
    """Wrong only after a checkpoint was saved: the optimizer goes on with half of its momentum."""

    name: ClassVar[str] = "saving-halves-momentum"

    def save_checkpoint(self, directory: Path) -> None:
        super().save_checkpoint(directory)
        for state in self.optimizer.state.values() if self.optimizer is not None else ():
            if state.get("momentum_buffer") is not None:
                state["momentum_buffer"].mul_(0.5)


class RollbackKeepsMomentum(Reference):
    """Wrong only where a checkpoint is loaded after a step: the optimizer keeps the state that it has by then."""

    name: ClassVar[str] = "rollback-keeps-momentum"

    def load_checkpoint(self, directory: Path) -> None:
        states = self.optimizer.state if self.optimizer is not None else {}
        copies = {parameter: copy.deepcopy(state) for parameter, state in states.items()}
        super().load_checkpoint(directory)
        if self.optimizer is not None and copies:
            self.optimizer.state.update(copies)


class RecoversLate(Reference):
    """Wrong only after an exception that follows a backward: gradients that were reduced before it remain."""

    name: ClassVar[str] = "recovers-late"

    def discard_gradients(self) -> None:
        """Drop none."""


class AnotherClass(Reference):
    """Wrong only where user code raises in a forward: the caller gets an exception of another class."""

    name: ClassVar[str] = "another-class"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*args, **kwargs)
        except Exception as error:
            raise ValueError(str(error)) from error


class GoesOnWithoutException(Reference):
    """Wrong only where user code raises in a backward: the exception does not reach the caller."""

    name: ClassVar[str] = "goes-on-without-exception"

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        try:
            super().backward(loss, retain_graph=retain_graph)
        except Exception:  # noqa: BLE001 - the defect
            return


class StaysGathered(Reference):
    """Wrong only after a recovery: the root holds full parameters until the next forward."""

    name: ClassVar[str] = "stays-gathered"

    def recover(self) -> None:
        super().recover()
        self.unshard("")


class ClippingLeavesZeros(Reference):
    """Wrong only where gradients are clipped: they are zeros after the step, and not None."""

    name: ClassVar[str] = "clipping-leaves-zeros"

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        norm = super().step(max_norm, norm_type=norm_type)
        if max_norm is not None:
            for parameter in self.parameters().values():
                parameter.grad = torch.zeros_like(parameter)
        return norm


class EvaluationLeavesAUnitGathered(Reference):
    """Holds more than it should only after an evaluation: the first unit stays gathered, until it is used again."""

    name: ClassVar[str] = "evaluation-leaves-a-unit-gathered"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            self.unshard(self.plan.units[0])
        return output


class KeepsAUnitThatReturnsViews(TorchFSDP2):
    """A unit whose output is a view stays gathered from its forward to its backward."""

    name: ClassVar[str] = "keeps-a-unit-that-returns-views"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kept: list[str] = []

        def keep(name: str, output: Any) -> None:
            if any(isinstance(leaf, torch.Tensor) and leaf._is_view() for leaf in tree_leaves(output)):
                kept.append(name)

        handles = [
            self.model.get_submodule(name).register_forward_hook(lambda _, args, output, name=name: keep(name, output))
            for name in self.plan.units
        ]
        output = super().forward(*args, **kwargs)
        for handle in handles:
            handle.remove()
        for name in kept:
            self.unshard(name)
        return output


class DrawsInForward(Reference):
    """Where the model has set a seed for its dropout, random numbers are drawn before the forward of the first unit."""

    name: ClassVar[str] = "draws-in-forward"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = torch.initial_seed()

        def draw(module: nn.Module, inputs: Any) -> None:
            if torch.initial_seed() != before:
                torch.rand(1)

        with self.module().get_submodule(self.plan.units[0]).register_forward_pre_hook(draw):
            return super().forward(*args, **kwargs)


class NeverRecovers(Reference):
    """Recovering raises."""

    name: ClassVar[str] = "never-recovers"

    def recover(self) -> None:
        raise RuntimeError("no way back")


class KnowsItsOwnBackwardOnly(Reference):
    """Wrong only where user code differentiates: what did not begin in the adapter's backward counts half."""

    name: ClassVar[str] = "knows-its-own-backward-only"
    _is_own = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient if self._is_own else gradient / 2)
        return output

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self._is_own = True
        super().backward(loss, retain_graph=retain_graph)
        self._is_own = False


class HalvesGradientsOfInputs(Reference):
    """Wrong only in the gradient of an input that requires one."""

    name: ClassVar[str] = "halves-gradients-of-inputs"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, *others = args
        return super().forward((x + x.detach()) / 2 if x.requires_grad else x, *others, **kwargs)


class StepsWithWhatBackwardLeft(Reference):
    """Wrong only where user code changes gradients: the optimizer steps with those from before."""

    name: ClassVar[str] = "steps-with-what-backward-left"

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        super().backward(loss, retain_graph=retain_graph)
        self._gradients = {
            name: parameter.grad.clone() for name, parameter in self.parameters().items() if parameter.grad is not None
        }

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        for name, parameter in self.parameters().items():
            parameter.grad = self._gradients.get(name)
        return super().step(max_norm, norm_type=norm_type)


class ClipsSomeByTheirShards(TorchFSDP2):
    """Wrong only where some parameters are clipped: user code sees plain shards, and clips by their norm."""

    name: ClassVar[str] = "clips-some-by-their-shards"

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: _shown(parameter) for name, parameter in super().parameters().items()}

    def full_params(self) -> dict[str, Tensor]:
        return full_copies(super().parameters(), self.full)

    def full_grads(self) -> dict[str, Tensor | None]:
        return full_gradients(super().parameters(), self.device, self.full)

    def full_optim_state(self) -> dict[str, dict[str, Tensor]]:
        raise NotImplementedError

    declines: ClassVar[frozenset[str]] = frozenset({"full_optim_state", "orig_params"})


def _shown(parameter: nn.Parameter) -> nn.Parameter:
    """This rank's shard, with the shard of the gradient."""
    shard = nn.Parameter(local_part(parameter).detach())
    if parameter.grad is not None:
        shard.grad = local_part(parameter.grad)
    return shard


class AnyNormIsTheSecond(Reference):
    """Wrong only where gradients are clipped by another norm: it takes the 2-norm."""

    name: ClassVar[str] = "any-norm-is-the-second"

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        return super().clip(max_norm, 2.0)


class LoadsOneParameterWrongly(Reference):
    """Wrong only where a state dict of the model is loaded: the first parameter is another one."""

    name: ClassVar[str] = "loads-one-parameter-wrongly"

    def load_full_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> LoadedKeys:
        keys = super().load_full_state_dict(state, strict=strict)
        self._add_one()
        return keys

    def load_sharded_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_sharded_state_dict(state)
        self._add_one()

    def _add_one(self) -> None:
        name = next(iter(self.names.parameters))
        self.write_params({name: self.full_params()[name] + 1})


class LoadsNoOptimizerState(Reference):
    """Wrong only where the state dict of the optimizer is loaded: it is not."""

    name: ClassVar[str] = "loads-no-optimizer-state"

    def load_optim_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load nothing."""


class IsCast(TorchDDP):
    """Wrong only after a cast to another dtype and back: its buckets hold the gradients from before."""

    name: ClassVar[str] = "is-cast"
    capabilities: ClassVar[frozenset[str]] = frozenset({"cast_between_steps"})


class IsMoved(TorchFSDP1):
    """Wrong after any move, also one that changes nothing: torch's FSDP1 steps another storage then."""

    name: ClassVar[str] = "is-moved"
    capabilities: ClassVar[frozenset[str]] = frozenset({"move_again"})


class LooksAtItsOwnGradients(Reference):
    """Wrong only where gradients overflow on one rank: they are looked at before they are reduced."""

    name: ClassVar[str] = "looks-at-its-own-gradients"

    def make_scaler(self, **options: Any) -> torch.amp.GradScaler:
        return _Deaf(self.device.type, **options)


class _Deaf(torch.amp.GradScaler):
    """A scaler that the last rank never tells of an overflow."""

    def unscale_(self, optimizer: Optimizer) -> None:
        super().unscale_(optimizer)
        if dist.get_rank() == dist.get_world_size() - 1:
            for flag in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                flag.zero_()


class EvaluatingDropsGradients(Reference):
    """Wrong only where an evaluation comes after a backward: the gradients so far are dropped."""

    name: ClassVar[str] = "evaluating-drops-gradients"

    def train(self, mode: bool = True) -> None:
        super().train(mode)
        if not mode:
            self.discard_gradients()


class ClearsAnyway(Reference):
    """Wrong only where user code clears gradients: it does that, too."""

    name: ClassVar[str] = "clears-anyway"

    def leave_grads(self) -> None:
        """Go on."""


class StepsCopiesOfGradients(Reference):
    """Wrong only where user code clears gradients by hand: what it has accumulated comes back."""

    name: ClassVar[str] = "steps-copies-of-gradients"

    def leave_grads(self) -> None:
        super().leave_grads()
        self._held: dict[str, Tensor] = {}

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        for name, parameter in self.parameters().items() if not self.clears else ():
            if parameter.grad is not None:
                parameter.grad += self._held.get(name, torch.zeros_like(parameter.grad))
                self._held[name] = parameter.grad.clone()
        return super().step(max_norm, norm_type=norm_type)


class ForgetsAttributes(Reference):
    """Wrong only where parameters have attributes of the user: it drops them."""

    name: ClassVar[str] = "forgets-attributes"

    def wrap(self, model: nn.Module, plan: Any) -> nn.Module:
        for parameter in model.parameters():
            vars(parameter).clear()
        return super().wrap(model, plan)


class ReturnsPlainContainers(Reference):
    """Wrong only where the model returns a container of a class of its own: the caller gets a plain one."""

    name: ClassVar[str] = "returns-plain-containers"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if isinstance(output, dict):
            return dict(output)
        return tuple(output) if isinstance(output, tuple) else output


class AveragesWhatItIgnores(Reference):
    """Wrong only where a module is ignored and trained: its gradients are averaged with the others."""

    name: ClassVar[str] = "averages-what-it-ignores"

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        super().backward(loss, retain_graph=retain_graph)
        for name, parameter in self.parameters().items():
            if name.startswith(tuple(f"{module}." for module in self.plan.ignored)) and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


class EmptiesWhatItIgnores(Reference):
    """Wrong only where a module is ignored: it loses its values."""

    name: ClassVar[str] = "empties-what-it-ignores"

    def wrap(self, model: nn.Module, plan: Any) -> nn.Module:
        for module in plan.ignored:
            for parameter in model.get_submodule(module).parameters():
                parameter.data.zero_()
        return super().wrap(model, plan)


class DropsHooks(Reference):
    """Wrong only where the user has put a hook on a module: it is gone after wrapping."""

    name: ClassVar[str] = "drops-hooks"

    def wrap(self, model: nn.Module, plan: Any) -> nn.Module:
        for module in model.modules():
            for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
                hooks.clear()
        return super().wrap(model, plan)


class AveragesAnyway(Reference):
    """Wrong only where the user divides gradients by another number: they are means still."""

    name: ClassVar[str] = "averages-anyway"

    def divide_gradients_by(self, factor: float) -> None:
        """Go on."""


class KnowsTheLastModel(Reference):
    """Wrong only where it wraps a second model: gradients of the first are halved."""

    name: ClassVar[str] = "knows-the-last-model"
    _last: ClassVar[dict[int, Any]] = {}

    def setup(self, model_fn: Any, optim_fn: Any, plan: Any) -> None:
        super().setup(model_fn, optim_fn, plan)
        self._last[dist.get_rank()] = self

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        super().backward(loss if self._last[dist.get_rank()] is self else loss / 2, retain_graph=retain_graph)


class SavingDraws(Reference):
    """Saving a checkpoint draws a number for its tag: dropout masks after it are others."""

    name: ClassVar[str] = "saving-draws"

    def save_checkpoint(self, directory: Path) -> None:
        torch.rand(1)
        super().save_checkpoint(directory)


class ReducesInBfloat16(TorchFSDP2):
    """Gradients are reduced in bfloat16, also where the plan says float32."""

    name: ClassVar[str] = "reduces-in-bfloat16"

    def setup(self, model_fn: Any, optim_fn: Any, plan: Any) -> None:
        super().setup(model_fn, optim_fn, replace(plan, reduce_dtype=plan.param_dtype))


class LoadsIntoNothing(Reference):
    """Wrong only where a new engine loads a checkpoint: its optimizer has no state to load into yet."""

    name: ClassVar[str] = "loads-into-nothing"

    def load_checkpoint(self, directory: Path) -> None:
        is_new = self.optimizer is not None and not self.optimizer.state
        super().load_checkpoint(directory)
        if self.optimizer is not None and is_new:
            self.optimizer.state.clear()


class ReducesInTrainingMode(Reference):
    """Wrong only where a model trains in evaluation mode: its gradients are halved."""

    name: ClassVar[str] = "reduces-in-training-mode"

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        super().backward(loss if self.model.training else loss / 2, retain_graph=retain_graph)


class ReusesItsOutputs(Reference):
    """Wrong only for the outputs of an evaluation that are kept: the next one writes over them."""

    name: ClassVar[str] = "reuses-its-outputs"
    _output: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if torch.is_grad_enabled():
            return output
        if self._output is None:
            self._output = torch.zeros_like(output)
        return self._output.copy_(output)


class ReusesItsStateDicts(Reference):
    """Wrong only for a state dict that is kept: the next one is written over it."""

    name: ClassVar[str] = "reuses-its-state-dicts"

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        state = super().full_state_dict(rank0_only=rank0_only)
        self._held = getattr(self, "_held", None) or {name: tensor.clone() for name, tensor in state.items()}
        return {name: self._held[name].copy_(tensor) for name, tensor in state.items()}


class CallsTheLastHook(Reference):
    """Wrong only where a parameter has two hooks for its gradient: the first one is never called."""

    name: ClassVar[str] = "calls-the-last-hook"

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        for parameter in self.parameters().values():
            hooks = parameter._post_accumulate_grad_hooks
            for key in list(hooks or ())[:-1]:
                del hooks[key]
        super().backward(loss, retain_graph=retain_graph)


class KeepsItsInputs(Reference):
    """Wrong only in what it holds: the inputs of the last forward, for as long as there is no other."""

    name: ClassVar[str] = "keeps-its-inputs"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._inputs = [arg.clone() for arg in args if isinstance(arg, Tensor)]
        return super().forward(*args, **kwargs)


class SwitchesDeterminism(Reference):
    """Wrong only in a global setting, which wrapping a model changes for good."""

    name: ClassVar[str] = "switches-determinism"

    def wrap(self, model: nn.Module, plan: Any) -> nn.Module:
        torch.use_deterministic_algorithms(True, warn_only=True)
        return super().wrap(model, plan)


class ConvertsToTheFirstDtype(TorchFSDP2):
    """Wrapping converts all parameters to the dtype of the first one."""

    name: ClassVar[str] = "converts-to-the-first-dtype"

    def wrap(self, model: nn.Module, plan: Any) -> nn.Module:
        first = next(model.parameters()).dtype
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(first)
        return super().wrap(model, plan)


class AccumulatesInTheComputeDtype(TorchFSDP1):
    """FSDP1 itself: ci/findings/torch-fsdp1/accumulates_in_the_compute_dtype.py."""

    name: ClassVar[str] = "accumulates-in-the-compute-dtype"


class ReducesInTheSmallestDtype(Reference):
    """Gradients have passed through a buffer in the smallest of the parameters' dtypes."""

    name: ClassVar[str] = "reduces-in-the-smallest-dtype"

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        super().backward(loss, retain_graph=retain_graph)
        parameters = [parameter for parameter in self.parameters().values() if parameter.is_floating_point()]
        smallest = min((parameter.dtype for parameter in parameters), key=lambda dtype: dtype.itemsize)
        for parameter in parameters:
            if parameter.grad is not None:
                held = local_part(parameter.grad)
                held.copy_(held.to(smallest))


class CopiesInputs(TorchFSDP2):
    """Each unit gets copies of the tensors that need no gradient: what it writes into them is lost."""

    name: ClassVar[str] = "copies-inputs"

    def wrap(self, model: nn.Module, plan: Any) -> nn.Module:
        wrapped = super().wrap(model, plan)
        for unit in plan.units:
            wrapped.get_submodule(unit).register_forward_pre_hook(_copies, with_kwargs=True)
        return wrapped


def _copies(module: nn.Module, args: Any, kwargs: Any) -> Any:
    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) and not value.requires_grad else value

    return tree_map(copied, (args, kwargs))


class KeepsEvaluations(Reference):
    """The outputs of all evaluations are kept."""

    name: ClassVar[str] = "keeps-evaluations"

    def setup(self, model_fn: Any, optim_fn: Any, plan: Any) -> None:
        self._outputs: list[Any] = []
        super().setup(model_fn, optim_fn, plan)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if not self.model.training:
            self._outputs.append(output)
        return output


class GathersFromAllRanks(TorchFSDP2):
    """Parameters are resharded to all ranks after forward, also where the plan has a smaller group."""

    name: ClassVar[str] = "gathers-from-all-ranks"

    def setup(self, model_fn: Any, optim_fn: Any, plan: Any) -> None:
        is_smaller = type(plan.reshard_after_forward) is int
        super().setup(model_fn, optim_fn, replace(plan, reshard_after_forward=True) if is_smaller else plan)


class StepsItsOwnCopy(TorchFSDP2):
    """The optimizer steps from copies that were made after the last step: what users write in between is lost."""

    name: ClassVar[str] = "steps-its-own-copy"

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        with torch.no_grad():
            for name, copied in getattr(self, "_copies", {}).items():
                local_part(self.parameters()[name]).copy_(copied)
        norm = super().step(max_norm, norm_type=norm_type)
        self._copies = {name: local_part(parameter).clone() for name, parameter in self.parameters().items()}
        return norm


class RoundsWhenEvaluating(TorchFSDP2):
    """An evaluation in low precision leaves the parameters rounded to it."""

    name: ClassVar[str] = "rounds-when-evaluating"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if not self.model.training and self.plan.param_dtype is not None:
            with torch.no_grad():
                for parameter in self.parameters().values():
                    shard = local_part(parameter)
                    shard.copy_(shard.to(getattr(torch, self.plan.param_dtype)))
        return output


class ClipsTheFirstModel(TorchFSDP2):
    """Clipping is that of the first model that the process has wrapped."""

    name: ClassVar[str] = "clips-the-first-model"
    _first: ClassVar[dict[int, TorchFSDP2]] = {}

    def setup(self, model_fn: Any, optim_fn: Any, plan: Any) -> None:
        super().setup(model_fn, optim_fn, plan)
        self._first.setdefault(dist.get_rank(), self)

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        return TorchFSDP2.clip(self._first[dist.get_rank()], max_norm, norm_type)

    def close(self) -> None:
        if self._first.get(dist.get_rank()) is self:
            del self._first[dist.get_rank()]
        super().close()


class SeedsWhenWrapping(TorchFSDP2):
    """Wrapping for training with dropout sets the random numbers back to their seed."""

    name: ClassVar[str] = "seeds-when-wrapping"

    def wrap(self, model: nn.Module, plan: Any) -> nn.Module:
        wrapped = super().wrap(model, plan)
        if any(getattr(getattr(module, "drawn", None), "dropout", False) for module in model.modules()):
            torch.manual_seed(torch.initial_seed())
        return wrapped
