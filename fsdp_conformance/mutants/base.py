"""
Engines to be wrong with: right in themselves, with places where a subclass can be wrong.

`SeamFSDP2` is torch's FSDP2 as its users can extend it, without patches: local gradients are seen by tensor hooks on
the unsharded parameters, reduced ones in `.grad`. It also offers what FSDP2 does not (scalars, ties across units, sync
at init), by hand, because a case that needs it must be able to fail somebody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from fsdp_conformance.adapters.base import ModelFn, OptimFn
from fsdp_conformance.adapters.torch_ddp import TorchDDP
from fsdp_conformance.adapters.torch_fsdp2 import TorchFSDP2
from fsdp_conformance.config import Plan, Sharding


class SeamFSDP2(TorchFSDP2):
    """FSDP2 with seams; itself right."""

    capabilities: ClassVar[frozenset[str]] = frozenset(
        {
            "no_shard",
            "device_id",
            "sync_module_states",
            "scalar_params",
            "noncontiguous_params",
            "shared_across_units",
            "custom_forward_methods",
            "persist_small",
        }
    )
    num_steps = 0
    """Optimizer steps done."""

    # The seams.

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        """This rank's gradient of a full parameter, before it is added to anything; the result takes its place."""
        return grad

    def after_backward(self) -> None:
        """Called after each backward, when its reduction (if any) is done."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        """Called with the model before it is wrapped; returns the plan to wrap by."""
        return plan

    def synchronise(self, model: nn.Module) -> None:
        """Sync at init: every tensor of the first rank to all."""
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), 0)

    # The engine.

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        self._hooked: dict[int, nn.Parameter] = {}
        self._left_out: frozenset[str] = frozenset()
        self._reduced = True
        super().setup(model_fn, optim_fn, plan)
        for module in self.model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                # Registered after FSDP2's own, which comes first: the parameters of the module are full by then.
                module.register_forward_pre_hook(self._hook_parameters)

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        if plan.sync_module_states:
            self.synchronise(model)
        plan = self.prepare(model, plan)
        self._left_out = frozenset(_unfit(model, plan))
        wrapped = super().wrap(model, plan)
        for module in wrapped.modules():
            if isinstance(module, FSDPModule):
                for method in list(_entrances(module)):
                    register_fsdp_forward_method(module, method)
        return wrapped

    @contextmanager
    def microbatch(self, last: bool, *, reduced: bool = True) -> Iterator[None]:
        self._reduced = reduced
        with super().microbatch(last, reduced=reduced):
            yield

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        super().backward(loss, retain_graph=retain_graph)
        if self._reduced:
            self._reduce_left_out()
        self.after_backward()

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        norm = super().step(max_norm, norm_type=norm_type)
        self.num_steps += 1
        return norm

    # What mutants use.

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size()

    @property
    def rank(self) -> int:
        """This rank."""
        return dist.get_rank()

    def sharded(self) -> Mapping[str, nn.Parameter]:
        """The parameters that FSDP2 shards, by name."""
        return {name: parameter for name, parameter in self.parameters().items() if isinstance(parameter, DTensor)}

    def local_grads(self) -> Mapping[str, Tensor]:
        """This rank's part of every gradient, live."""
        return {
            name: grad.to_local() if isinstance(grad, DTensor) else grad
            for name, parameter in self.parameters().items()
            if (grad := parameter.grad) is not None
        }

    def shard_dim_of(self, tensor: Tensor) -> int:
        """The dimension along which a full tensor is sharded."""
        return self.plan.shard_dim if tensor.dim() > self.plan.shard_dim else 0

    def rows_per_rank(self, tensor: Tensor) -> int:
        """Length of a shard along its dimension, padding included."""
        return -(-tensor.shape[self.shard_dim_of(tensor)] // self.world_size) if tensor.dim() else 1

    def own_rows(self, tensor: Tensor) -> Tensor:
        """The part of a full tensor that this rank stores, as a view."""
        if not tensor.dim():
            return tensor
        dim, rows = self.shard_dim_of(tensor), self.rows_per_rank(tensor)
        begin = min(self.rank * rows, tensor.shape[dim])
        return tensor.narrow(dim, begin, min(rows, tensor.shape[dim] - begin))

    # The rest.

    def _options(self, model: nn.Module, plan: Plan) -> dict[str, Any]:
        options = super()._options(model, plan)
        left_out = {parameter for name, parameter in self.names.parameters_of(model).items() if name in self._left_out}
        if left_out:
            options["ignored_params"] = options.get("ignored_params", set()) | left_out
        return options

    def _mesh(self, plan: Plan) -> DeviceMesh:
        if plan.sharding is Sharding.NONE:
            # Shard groups of one rank: replicated.
            return init_device_mesh(self.device.type, (self.world_size, 1), mesh_dim_names=("replicate", "shard"))
        return super()._mesh(plan)

    def _hook_parameters(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            return
        fqn = self.names.name_of(module)
        for key, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad or id(parameter) in self._hooked:
                continue
            name = self.names.listed_name(f"{fqn}.{key}" if fqn else key)
            # Held, so that no other tensor gets its id.
            self._hooked[id(parameter)] = parameter
            parameter.register_hook(partial(self.local_gradient, name))  # type: ignore[no-untyped-call]

    def _reduce_left_out(self) -> None:
        """What FSDP2 does not take is replicated, and its gradients are averaged here."""
        for name, parameter in self.parameters().items():
            if name in self._left_out and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(self.world_size)


class SeamDDP(TorchDDP):
    """DistributedDataParallel that says it shards, for defects that FSDP2 cannot have: it refuses what leads there."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"zero3", "rewrap", "subgroups", "hsdp"})


def _unfit(model: nn.Module, plan: Plan) -> Iterator[str]:
    """
    Parameters that stay whole: those that `fully_shard` refuses (scalars, non-contiguous ones, those that two units
    share), and those that the plan says are small.
    """
    first: dict[int, str] = {}
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        units = [unit for unit in plan.units if any(name.startswith(f"{part}.") for part in unit.split("+"))]
        first.setdefault(id(parameter), name)
        owners.setdefault(id(parameter), set()).add(max(units, key=len, default=""))
    for parameter in model.parameters():
        small = parameter.numel() <= plan.persist_numel
        if small or not parameter.dim() or not parameter.is_contiguous() or len(owners[id(parameter)]) > 1:
            yield first[id(parameter)]


def _entrances(unit: nn.Module) -> Iterator[str]:
    """The methods by which a unit without forward of its own is used."""
    if type(unit).forward is not nn.Module.forward:
        return
    for base in type(unit).__mro__:
        if issubclass(base, nn.Module) and not base.__module__.startswith("torch."):
            yield from (name for name, value in vars(base).items() if callable(value) and not name.startswith("_"))
