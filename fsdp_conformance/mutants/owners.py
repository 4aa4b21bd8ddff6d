"""
Correct engines that share a model by whole parameters: ZeRO-1 and ZeRO-3 with many ways to communicate.

Each parameter has an owner, the rank that has its optimizer's state. The engines are not variants of another one: they
are as unlike FSDP2 as the contract allows.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_conformance.adapters.base import OptimFn
from fsdp_conformance.adapters.sharded import state_tensors
from fsdp_conformance.adapters.torch_like import TorchAdapter
from fsdp_conformance.mutants.mutant import legal_variant
from fsdp_conformance.plan import Plan


@legal_variant()
class WholeParameters(TorchAdapter):
    """
    ZeRO-1 without shards: each parameter's optimizer is on one rank, to which gradients are reduced when they are first
    needed, and which gives the parameter to the others after its step.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset(
        {"zero1", "init_never", "any_accelerator", "shared_params", "shared_module", "frozen_mixed", "frozen_dynamic"}
    )
    declines: ClassVar[frozenset[str]] = frozenset(
        {"full_optim_state", "clip_grad_norm", "orig_params", "own_clearing", "wrap_again"}
    )

    everything: tuple[nn.Parameter, ...] = ()

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        self.summed: dict[nn.Parameter, Tensor] = {}
        """On the owner: the gradients that are reduced. What is in `.grad` is this rank's, and not reduced yet."""
        return model.to(self.device)

    def make_optimizer(self, optim_fn: OptimFn) -> Any:
        self.everything = tuple(self.model.parameters())
        self.shapes = {parameter: parameter.shape for parameter in self.everything}
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        load = [0] * self.size
        self.owner: dict[nn.Parameter, int] = {}
        for parameter in sorted(self.everything, key=Tensor.numel, reverse=True):
            self.owner[parameter] = load.index(min(load))
            load[self.owner[parameter]] += parameter.numel()
        mine = [parameter for parameter in self.everything if self.owner[parameter] == self.rank]
        return optim_fn(mine) if mine else None

    def reduce_all(self) -> None:
        """Reduce the gradients that backwards have left, and add them to the owners' sums. Collective."""
        if not self.everything:
            return
        used = torch.tensor([parameter.grad is not None for parameter in self.everything], dtype=torch.int32)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        for parameter, is_used in zip(self.everything, used.tolist(), strict=True):
            if not is_used:
                continue
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
            parameter.grad = None
            self.reduce(gradient, self.owner[parameter])
            if self.owner[parameter] == self.rank:
                self.summed[parameter] = self.summed[parameter] + gradient if parameter in self.summed else gradient

    def reduce(self, gradient: Tensor, owner: int) -> None:
        """Make the gradient the mean over all ranks, on the owner at least. Collective."""
        dist.reduce(gradient, owner)
        gradient.div_(self.size)

    def share(self) -> None:
        """Give every rank the parameters that the owners have stepped. Collective."""
        for parameter in self.everything:
            self.give(parameter)

    def give(self, parameter: nn.Parameter) -> None:
        """Give the owner's values to all ranks. Collective."""
        values = parameter.data.contiguous()
        dist.broadcast(values, self.owner[parameter])
        parameter.data.copy_(values)

    def full_grads(self) -> dict[str, Tensor | None]:
        self.reduce_all()
        return {name: self.gradient_of(parameter) for name, parameter in self.parameters().items()}

    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        """The owner's gradient, on the CPU. Collective."""
        has = torch.tensor(parameter in self.summed, dtype=torch.int32)
        dist.broadcast(has, self.owner[parameter])
        if not has:
            return None
        empty = torch.empty(self.shapes[parameter], dtype=parameter.dtype, device=self.device)
        gradient = self.summed.get(parameter, empty).clone().contiguous()
        dist.broadcast(gradient, self.owner[parameter])
        return gradient.cpu()

    def drop_grads(self, names: Iterable[str]) -> None:
        dropped = set(names)
        for name, parameter in self.parameters().items():
            if name in dropped:
                parameter.grad = None
                self.summed.pop(parameter, None)

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        self.reduce_all()
        for parameter, gradient in self.summed.items():
            parameter.grad = gradient
        if self.optimizer is not None:
            self.optimizer.step()
        for parameter in self.summed:
            parameter.grad = None
        if self.sets_to_none:
            self.summed.clear()
        else:
            self.summed = {parameter: torch.zeros_like(gradient) for parameter, gradient in self.summed.items()}
        self.share()
        return None

    def local_tensors(self) -> dict[str, list[Tensor]]:
        return {
            "params": [parameter.detach() for parameter in self.everything],
            "grads": list(self.summed.values()),
            "optim": [] if self.optimizer is None else list(state_tensors(self.optimizer)),
        }


@legal_variant()
class GathersGradients(WholeParameters):
    """Gradients are gathered by the owner, which adds them in float64."""

    def reduce(self, gradient: Tensor, owner: int) -> None:
        parts = [torch.empty_like(gradient) for _ in range(self.size)] if self.rank == owner else None
        dist.gather(gradient, parts, dst=owner)
        if parts is not None:
            gradient.copy_(torch.stack([part.double() for part in parts]).sum(0) / self.size)


@legal_variant()
class SendsAndReceives(WholeParameters):
    """Gradients are sent to the owner one by one, which sends the parameter back."""

    def reduce(self, gradient: Tensor, owner: int) -> None:
        if self.rank != owner:
            dist.send(gradient, owner)
            return
        part = torch.empty_like(gradient)
        for peer in range(self.size):
            if peer != owner:
                dist.recv(part, peer)
                gradient.add_(part)
        gradient.div_(self.size)

    def give(self, parameter: nn.Parameter) -> None:
        values, owner = parameter.data.contiguous(), self.owner[parameter]
        if self.rank != owner:
            dist.recv(values, owner)
            parameter.data.copy_(values)
            return
        for peer in range(self.size):
            if peer != owner:
                dist.send(values, peer)


@legal_variant()
class CommunicatesBeneath(WholeParameters):
    """Calls the backend beneath the process group, which the log of collectives does not see."""

    def reduce(self, gradient: Tensor, owner: int) -> None:
        self.backend(gradient).allreduce([gradient]).wait()
        gradient.div_(self.size)

    def backend(self, tensor: Tensor) -> Any:
        """The backend for a tensor's device."""
        group: Any = dist.group.WORLD
        return group._get_backend(tensor.device)


@legal_variant()
class UsesTheStore(WholeParameters):
    """Parameters travel through the store of the rendezvous."""

    given: ClassVar[int] = 0

    def give(self, parameter: nn.Parameter) -> None:
        UsesTheStore.given += 1
        store: Any = dist.distributed_c10d._get_default_store()
        key = f"parameter {UsesTheStore.given}"
        if self.rank == self.owner[parameter]:
            written = io.BytesIO()
            torch.save(parameter.data, written)
            store.set(key, written.getvalue())
        else:
            parameter.data.copy_(torch.load(io.BytesIO(store.get(key)), weights_only=True))
        # Otherwise the store keeps everything.
        dist.barrier()
        if self.rank == self.owner[parameter]:
            store.delete_key(key)


@legal_variant()
class CommunicatesInAThread(WholeParameters):
    """A thread of the engine's own reduces."""

    def reduce(self, gradient: Tensor, owner: int) -> None:
        thread = threading.Thread(target=dist.reduce, args=(gradient, owner))
        thread.start()
        thread.join()
        gradient.div_(self.size)


@legal_variant()
class HasAHelper(WholeParameters):
    """Forks a helper that lives as long as the engine, and shares the pages of its parent."""

    helper = 0

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        reader, self.told = os.pipe()
        self.helper = os.fork()
        if self.helper == 0:
            os.close(self.told)
            os.read(reader, 1)
            os._exit(0)
        os.close(reader)
        return super().wrap(model, plan)

    def close(self) -> None:
        if self.helper:
            os.close(self.told)
            os.waitpid(self.helper, 0)
            self.helper = 0
        super().close()


@legal_variant()
class ReducesInTheStep(WholeParameters):
    """Shows no gradients: they are reduced in the step."""

    declines: ClassVar[frozenset[str]] = frozenset({"full_grads"})


@legal_variant()
class WholeParametersOfOneRank(WholeParameters):
    """ZeRO-3 by whole parameters: outside of forward and backward, a parameter and its gradient are on one rank."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"zero3"})
    declines: ClassVar[frozenset[str]] = frozenset(
        {"zero1", "shared_params", "shared_module", "frozen_dynamic", "write_params"}
    )

    is_whole = False

    def make_optimizer(self, optim_fn: OptimFn) -> Any:
        optimizer = super().make_optimizer(optim_fn)
        self.free()
        return optimizer

    def free(self) -> None:
        """Leave each parameter to its owner."""
        for parameter in self.everything:
            if self.owner[parameter] != self.rank:
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        self.is_whole = False

    @torch.inference_mode(False)
    def take(self) -> None:
        """Fetch all parameters. Collective."""
        if self.is_whole:
            return
        for parameter in self.everything:
            if self.owner[parameter] != self.rank:
                parameter.data = torch.empty(self.shapes[parameter], dtype=parameter.dtype, device=self.device)
            values = parameter.data.contiguous()
            dist.broadcast(values, self.owner[parameter])
            parameter.data = values
        self.is_whole = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.take()
        return super().forward(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.take()
        super().backward(loss, retain_graph=retain_graph)
        self.reduce_all()
        if not retain_graph:
            self.free()

    def full_params(self) -> dict[str, Tensor]:
        was_whole = self.is_whole
        self.take()
        values = {name: parameter.detach().cpu().clone() for name, parameter in self.parameters().items()}
        if not was_whole:
            self.free()
        return values

    def share(self) -> None:
        self.free()

    def local_tensors(self) -> dict[str, list[Tensor]]:
        mine = [parameter.detach() for parameter in self.everything if self.owner[parameter] == self.rank]
        return {**super().local_tensors(), "params": mine}
