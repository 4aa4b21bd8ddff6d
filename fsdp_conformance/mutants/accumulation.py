"""Wrong accumulation: what is deferred, what is added, when the optimizer steps, and what a forward leaves behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fsdp_conformance.adapters.base import ModelFn, OptimFn
from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import Plan


@known_wrong("R093", name="last-microbatch-not-synchronised")
class LastMicroBatchNotSynchronised(SeamFSDP2):
    """The reduction of the last micro-batch is deferred as well."""

    @contextmanager
    def microbatch(self, last: bool, *, reduced: bool = True) -> Iterator[None]:
        with super().microbatch(last, reduced=reduced and not (last and self.plan.micro_batches > 1)):
            yield


@known_wrong("R092")
class OverwritesInsteadOfAdding(SeamFSDP2):
    """A micro-batch's gradient replaces the accumulated one."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        self._there: dict[str, Tensor] = {}
        super().setup(model_fn, optim_fn, plan)

    @contextmanager
    def microbatch(self, last: bool, *, reduced: bool = True) -> Iterator[None]:
        for parameter in self.model.parameters():
            parameter.grad = None
        with super().microbatch(last, reduced=reduced):
            yield
        if reduced:
            self._there.clear()

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        # Adding this to the deferred gradients cancels them.
        before = self._there.get(name)
        self._there[name] = grad.clone()
        return grad if before is None else grad - before


@known_wrong("R092", name="optimizer-steps-every-microbatch")
class StepsEveryMicroBatch(SeamFSDP2):
    """The optimizer steps after every micro-batch."""

    @contextmanager
    def microbatch(self, last: bool, *, reduced: bool = True) -> Iterator[None]:
        with super().microbatch(last, reduced=reduced):
            yield
        if not last:
            self.step()


@known_wrong("R065")
class IgnoresNoSync(SeamFSDP2):
    """Deferred micro-batches are reduced anyway."""

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext()


@known_wrong("R093")
class KeptWhileDeferred(SeamFSDP2):
    """Forwards of deferred micro-batches compute with the parameters that the first one of them gathered."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        self._gathered: dict[nn.Parameter, Tensor] = {}
        super().setup(model_fn, optim_fn, plan)
        for module in self.model.modules():
            # Runs after FSDP2's own hook, which gathers the parameters.
            module.register_forward_pre_hook(self._restore)

    def _restore(self, module: nn.Module, args: Any) -> None:
        if not self._reduced:
            for parameter in module.parameters(recurse=False):
                parameter.data.copy_(self._gathered.setdefault(parameter, parameter.detach().clone()))


@known_wrong("R156")
class SecondBackwardLost(SeamFSDP2):
    """The second backward of a forward contributes nothing."""

    _kept = False

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        if not self._kept:
            super().backward(loss, retain_graph=retain_graph)
        self._kept = retain_graph


@known_wrong("R156")
class SecondBackwardNotReduced(SeamFSDP2):
    """The second backward of a forward adds the gradient of the first rank instead of the mean."""

    _is_second = False
    _kept = False

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self._is_second, self._kept = self._kept, retain_graph
        super().backward(loss, retain_graph=retain_graph)

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        if not self._is_second:
            return grad
        return grad * self.world_size if self.rank == 0 else torch.zeros_like(grad)


@known_wrong("R093")
class IdleInTheLastMicroBatchLost(SeamFSDP2):
    """Deferred gradients of a unit are lost if the micro-batch that is reduced does not use the unit."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        self._deferred: set[str] = set()
        super().setup(model_fn, optim_fn, plan)

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        if self._reduced:
            self._deferred.discard(name)
        else:
            self._deferred.add(name)
        return grad

    def after_backward(self) -> None:
        if self._reduced:
            parameters = self.parameters()
            for name in self._deferred:
                parameters[name].grad = None
            self._deferred.clear()


@known_wrong("R155")
class MultiForwardLosesGradient(SeamFSDP2):
    """When a module is called several times, only the first call contributes a gradient."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        self._calls: dict[nn.Module, int] = {}
        self._hidden: dict[nn.Module, dict[str, nn.Parameter | None]] = {}
        for module in self.model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._hide)
                # Runs before FSDP2's own hook, which may reshard the module.
                module.register_forward_hook(self._show, prepend=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._calls.clear()
        return super().forward(*args, **kwargs)

    def _hide(self, module: nn.Module, args: Any) -> None:
        """Make the parameters constants from the second call on."""
        self._calls[module] = self._calls.get(module, 0) + 1
        if self._calls[module] > 1 and torch.is_grad_enabled():
            self._hidden[module] = dict(module._parameters)
            constants: Any = {
                key: value if value is None else value.detach() for key, value in module._parameters.items()
            }
            module._parameters.update(constants)

    def _show(self, module: nn.Module, args: Any, output: Any) -> None:
        module._parameters.update(self._hidden.pop(module, {}))


@known_wrong("R053")
class IdleForwardLeaks(SeamFSDP2):
    """Forwards without a backward count in the gradient average."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"nonroot_forward"})

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        self._forwards: dict[str, int] = {}
        # FSDP2 treats the first unit to run as the root; this makes it the real root.
        self._root_first()
        for module in self.model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._count)

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        return grad / self._forwards.get(name.rpartition(".")[0], 1)

    def after_backward(self) -> None:
        self._forwards.clear()

    def _count(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            name = self.names.name_of(module)
            self._forwards[name] = self._forwards.get(name, 0) + 1

    def _root_first(self) -> None:
        root: Any = self.model
        root._get_fsdp_state()._lazy_init()


@known_wrong("R114")
class StepsDroppedGradients(SeamFSDP2):
    """The optimizer still steps gradients that were set to None."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        self._kept: dict[str, Tensor] = {}
        super().setup(model_fn, optim_fn, plan)

    def after_backward(self) -> None:
        self._kept = {
            name: parameter.grad for name, parameter in self.parameters().items() if parameter.grad is not None
        }

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        for name, parameter in self.parameters().items():
            if parameter.grad is None:
                parameter.grad = self._kept.get(name)
        return super().step(max_norm, norm_type=norm_type)


@known_wrong("R010")
class EvalDisturbsTraining(SeamFSDP2):
    """The optimizer step after a forward in eval mode is skipped."""

    _evaluated = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._evaluated |= not self.model.training
        return super().forward(*args, **kwargs)

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        if self._evaluated:
            self._evaluated = False
            self.model.zero_grad()
            return None
        return super().step(max_norm, norm_type=norm_type)


@known_wrong("R123")
class PaddingInTheNorm(SeamFSDP2):
    """The total norm includes uninitialized padding."""

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        norm = super().clip(max_norm, norm_type)
        padding = torch.empty(self.world_size)
        return norm + 0.0 * padding.sum()


@known_wrong("R097")
class AllReducesEveryMicroBatch(SeamFSDP2):
    """The all-reduce over replicas runs for every micro-batch, even when it is deferred."""

    def no_all_reduce(self) -> AbstractContextManager[Any]:
        return nullcontext()


@known_wrong("R095")
class DefersEveryUnit(SeamFSDP2):
    """Where the reduction of some units is to be deferred, that of all units is."""

    def no_sync_of(self, units: Sequence[str]) -> AbstractContextManager[Any]:
        return self.no_sync()


@known_wrong("R095")
class DefersNoUnit(SeamFSDP2):
    """Where the reduction of some units is to be deferred, none is."""

    def no_sync_of(self, units: Sequence[str]) -> AbstractContextManager[Any]:
        return nullcontext()


@known_wrong("R096")
class GathersKeptAgain(SeamFSDP2):
    """Parameters that are to be kept across micro-batches are resharded after each backward."""

    def keep_gathered(self) -> AbstractContextManager[Any]:
        return nullcontext()


@known_wrong("R096")
class KeepsGatheredAcrossTheStep(SeamFSDP2):
    """Parameters that were kept across micro-batches are kept across the optimizer step, too."""

    @contextmanager
    def keep_gathered(self) -> Iterator[None]:
        self._unit("").set_reshard_after_backward(False)
        yield


@known_wrong("R099")
class PipeliningLosesTheFirst(SeamFSDP2):
    """A backward whose forward is not the last one contributes nothing."""

    _open = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._open += 1
        return super().forward(*args, **kwargs)

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        return grad * (self._open == 1)

    def after_backward(self) -> None:
        self._open -= 1


@known_wrong("R100", shows=("refusal",))
class ClaimsDeferralChecks(SeamFSDP2):
    """Misuse of a context that defers the reduction is said to raise, and does not."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"deferral_checks"})
