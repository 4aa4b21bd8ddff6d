"""
Correct engines with seams that a subclass overrides to introduce one defect.

`SeamFSDP2` extends torch's FSDP2 through its public hooks, without patches: tensor hooks on the unsharded parameters
see the local gradients, and `.grad` holds the reduced ones. By hand it adds what FSDP2 lacks (scalars, ties across
units, sync at init), so that the cases that need these features also have a mutant to fail.
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
from fsdp_conformance.adapters.vendors.torch_ddp import TorchDDP
from fsdp_conformance.adapters.vendors.torch_fsdp2 import TorchFSDP2
from fsdp_conformance.harness.devices import use_device
from fsdp_conformance.plan import Plan, Sharding


class SeamFSDP2(TorchFSDP2):
    """A correct FSDP2 with seams to override."""

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
    """Number of optimizer steps taken."""

    # The seams.

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        """Return what replaces this rank's gradient of a full parameter, before accumulation."""
        return grad

    def after_backward(self) -> None:
        """Called after each backward, once its reduction (if any) has finished."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        """Called with the model before it is wrapped; returns the plan to wrap with."""
        return plan

    def synchronise(self, model: nn.Module) -> None:
        """Sync at init: broadcast every tensor of the first rank."""
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
                # Registered after FSDP2's own hook, so the parameters are full when it runs.
                module.register_forward_pre_hook(self._hook_parameters)

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        if plan.device_id is not None:
            # FSDP2 computes on the current device, and moves parameters to it, but not buffers.
            use_device(self.device)
            model.to(self.device)
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

    def pipeline_module(self) -> nn.Module | None:
        # The seams are in `backward`.
        return None

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        norm = super().step(max_norm, norm_type=norm_type)
        self.num_steps += 1
        return norm

    # Helpers for mutants.

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
        """This rank's part of every gradient, as live tensors."""
        return {
            name: grad.to_local() if isinstance(grad, DTensor) else grad
            for name, parameter in self.parameters().items()
            if (grad := parameter.grad) is not None
        }

    def shard_dim_of(self, tensor: Tensor) -> int:
        """The dim that a full tensor is sharded along."""
        return self.plan.shard_dim if tensor.dim() > self.plan.shard_dim else 0

    def rows_per_rank(self, tensor: Tensor) -> int:
        """Length of a shard along its sharded dim, including padding."""
        return -(-tensor.shape[self.shard_dim_of(tensor)] // self.world_size) if tensor.dim() else 1

    def own_rows(self, tensor: Tensor) -> Tensor:
        """A view of the part of a full tensor that this rank stores."""
        if not tensor.dim():
            return tensor
        dim, rows = self.shard_dim_of(tensor), self.rows_per_rank(tensor)
        begin = min(self.rank * rows, tensor.shape[dim])
        return tensor.narrow(dim, begin, min(rows, tensor.shape[dim] - begin))

    # Implementation.

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
            # Kept alive so that its id cannot be reused.
            self._hooked[id(parameter)] = parameter
            parameter.register_hook(partial(self.local_gradient, name))  # type: ignore[no-untyped-call]

    def _reduce_left_out(self) -> None:
        """Average the gradients of the parameters that FSDP2 does not take and that are replicated."""
        for name, parameter in self.parameters().items():
            if name in self._left_out and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(self.world_size)


class SeamDDP(TorchDDP):
    """DistributedDataParallel that claims to shard, for defects that FSDP2 rules out by raising."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"zero3", "rewrap", "subgroups", "hsdp"})


def _unfit(model: nn.Module, plan: Plan) -> Iterator[str]:
    """
    Names of the parameters that stay whole: those that `fully_shard` rejects (scalars, non-contiguous parameters,
    parameters shared by two units) and those that the plan keeps full because they are small.
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
    """The methods through which a unit that does not define `forward` is called."""
    if type(unit).forward is not nn.Module.forward:
        return
    for base in type(unit).__mro__:
        if issubclass(base, nn.Module) and not base.__module__.startswith("torch."):
            yield from (name for name, value in vars(base).items() if callable(value) and not name.startswith("_"))
