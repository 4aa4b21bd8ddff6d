"""
The base class for engines with a torch-like API: implement `wrap`, and whatever differs from stock behaviour.

    class MyFSDP(TorchAdapter):
        name = "my-fsdp"

        def wrap(self, model, plan):
            return my_engine.shard(model, [model.get_submodule(unit) for unit in plan.units])

Everything else works as in stock torch: the optimizer is built from `wrapped.parameters()`, the backward is
`loss.backward()`, full parameters are DTensors' full tensors or plain clones.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from fsdp_conformance.adapters.base import Adapter, CommunicationHook, ModelFn, OptimFn
from fsdp_conformance.adapters.deferred import move_values
from fsdp_conformance.adapters.names import OriginalNames
from fsdp_conformance.adapters.sharded import (
    full_copies,
    full_copy,
    full_gradients,
    local_part,
    materialise_norm,
    state_tensors,
    write_full,
)
from fsdp_conformance.errors import AdapterError, ConfigError, Unsupported
from fsdp_conformance.plan import InitMode, Plan


class TorchAdapter(Adapter):
    """
    An engine that wraps a module, leaves gradients in `.grad`, and is stepped by a stock torch optimizer.

    Declares what stock torch offers on the CPU and with the model moved before wrapping; subclasses add flags to
    `capabilities`, or remove inherited ones with `declines`.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset({"cpu_compute", "init_before", "clip_grad_norm", "orig_params"})
    #: The step can use a scaler, but only an engine knows one that looks at all shards: see `make_scaler`.
    declines: ClassVar[frozenset[str]] = frozenset({"grad_scaler"})
    optional: ClassVar[Mapping[str, str]] = {
        "no_sync": "no_sync",
        "no_sync_of": "no_sync_per_unit",
        "no_all_reduce": "hsdp_defer_allreduce",
        "keep_gathered": "reshard_after_backward",
        "make_scaler": "grad_scaler",
    }

    model: nn.Module
    """The wrapped module."""
    optimizer: Optimizer | None
    """None for a model without parameters: stock optimizers reject an empty list."""
    sets_to_none = True
    """True if `step` sets gradients to None, or to zero."""
    clears = True
    """True if `step` clears gradients."""
    scaler: torch.amp.GradScaler | None = None
    """Set by `scale_losses`."""
    names: OriginalNames
    plan: Plan
    device: torch.device
    mesh: DeviceMesh
    """Only for a plan with stages or tensor parallelism: see `parallel_shape`."""

    @abstractmethod
    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        """
        The wrapped model. Collective.

        `model` is on the device that `plan.init_mode` implies, or on meta with `plan.meta_init`; `plan` uses only
        options that the class declares.
        """

    def no_sync(self) -> AbstractContextManager[Any]:
        """The context for micro-batches whose gradients must not be reduced yet. Declares `no_sync`."""
        raise NotImplementedError

    def no_sync_of(self, units: Sequence[str]) -> AbstractContextManager[Any]:
        """The same for some units only, without those inside them; the root is "". Declares `no_sync_per_unit`."""
        raise NotImplementedError

    def keep_gathered(self) -> AbstractContextManager[Any]:
        """The context for micro-batches after which parameters stay gathered. Declares `reshard_after_backward`."""
        raise NotImplementedError

    def no_all_reduce(self) -> AbstractContextManager[Any]:
        """The context for micro-batches that must not be reduced over replicas. Declares `hsdp_defer_allreduce`."""
        raise NotImplementedError

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        """Clip the gradients by their total norm and return it. Collective."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)

    def make_mesh(self, plan: Plan) -> DeviceMesh:
        """The mesh for a plan with stages or tensor parallelism. Collective."""
        return parallel_mesh(plan, self.device.type)

    def norm_of_stages(self, own: Tensor, norm_type: float) -> Tensor:
        """The norm over all stages of a pipeline, from that of this rank's stage. 0-dimensional. Collective."""
        group = self.mesh.get_group("stage")
        if norm_type == math.inf:
            dist.all_reduce(own, op=dist.ReduceOp.MAX, group=group)
            return own
        total = own**norm_type
        dist.all_reduce(total, group=group)
        norm: Tensor = total ** (1.0 / norm_type)
        return norm

    def make_optimizer(self, optim_fn: OptimFn) -> Optimizer:
        """
        The optimizer of the wrapped model, which has parameters. Collective.

        Override it for an engine that wraps the user's optimizer or creates its own. `optim_fn` makes a stock one from
        parameters. Called once, after `wrap`, and again by `wrap_again`.
        """
        return optim_fn(list(self.model.parameters()))

    def full(self, tensor: Tensor) -> Tensor:
        """
        A full, detached clone on the CPU of a parameter, its gradient or its optimizer state. Collective.

        Override it for an engine that has shards of its own kind. Regular DTensors are gathered without it.
        """
        return full_copy(tensor)

    def gathered(self, *, writeback: bool = False) -> AbstractContextManager[Any]:
        """
        The context in which `parameters()` are full, for an engine with flat parameters. Collective.

        `writeback`: what is written inside reaches the shards.
        """
        return nullcontext()

    def make_scaler(self, **options: Any) -> torch.amp.GradScaler:
        """A scaler with these options of torch's GradScaler that looks at all shards. Declares `grad_scaler`."""
        raise NotImplementedError

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        self.refuse_undeclared(plan)
        self.plan = plan
        self.device = compute_device(plan)
        if plan.stages or plan.tensor_parallel > 1:
            self.mesh = self.make_mesh(plan)
        model = model_fn()
        self.names = OriginalNames(model)
        if plan.init_mode is InitMode.BEFORE and not plan.meta_init:
            move_values(model, self.device)
        wrapped: object = self.wrap(model, plan)
        if not isinstance(wrapped, nn.Module):
            raise AdapterError(
                f"{self.display_name()}.wrap() must return the wrapped nn.Module, got {type(wrapped).__name__}"
            )
        if plan.init_mode is InitMode.AFTER:
            move_values(wrapped, self.device)
        self.model = wrapped
        self._optim_fn = optim_fn
        self._make_optimizer()

    def microbatch(self, last: bool, *, reduced: bool = True) -> AbstractContextManager[Any]:
        return self._microbatch(last, reduced)

    @contextmanager
    def _microbatch(self, last: bool, reduced: bool) -> Iterator[None]:
        with ExitStack() as contexts:
            if not reduced:
                units = self.plan.deferred_units
                contexts.enter_context(self.no_sync_of(units) if units else self.no_sync())
            elif self.plan.defer_all_reduce and not last:
                contexts.enter_context(self.no_all_reduce())
            if self.plan.reshard_after_backward is False and not last:
                contexts.enter_context(self.keep_gathered())
            yield

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        torch.autograd.backward(loss if self.scaler is None else self.scaler.scale(loss), retain_graph=retain_graph)

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        if self.scaler is not None and self.optimizer is not None:
            return self._scaled_step(self.scaler, self.optimizer, max_norm, norm_type)
        norm = None if max_norm is None else self._clip(max_norm, norm_type)
        if self.optimizer is not None:
            self.optimizer.step()
            self._clear(self.optimizer)
        return norm

    def _clear(self, optimizer: Optimizer) -> None:
        if self.clears:
            optimizer.zero_grad(set_to_none=self.sets_to_none)

    def _clip(self, max_norm: float, norm_type: float) -> Tensor:
        if not self.plan.stages:
            return self.clip(max_norm, norm_type)
        # As torchtitan does: the engine knows the norm of its stage, and the others' are added by hand.
        own = materialise_norm(self.clip(math.inf, norm_type)).to(self.device)
        total = self.norm_of_stages(own, norm_type)
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(coefficient)
        return total

    def set_learning_rate(self, value: float) -> None:
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            group["lr"] = value

    def keep_zero_grads(self) -> None:
        self.sets_to_none = False

    def leave_grads(self) -> None:
        self.clears = False

    def full_params(self) -> dict[str, Tensor]:
        with self.gathered():
            return full_copies(self.parameters(), self.full)

    def full_grads(self) -> dict[str, Tensor | None]:
        return full_gradients(self.parameters(), self.device, self.full, groups=self._model_groups())

    def _model_groups(self) -> Sequence[dist.ProcessGroup | None]:
        """The groups that together connect the ranks with this rank's model: in a pipeline, those of its stage."""
        if not self.plan.stages:
            return (None,)
        names = self.mesh.mesh_dim_names or ()
        return [self.mesh.get_group(name) for name in names if name != "stage"]

    def full_buffers(self) -> dict[str, Tensor]:
        return full_copies(self.names.buffers_of(self.model))

    def full_optim_state(self) -> dict[str, dict[str, Tensor]]:
        state = self.optimizer.state if self.optimizer is not None else {}
        parameters = {name: parameter for name, parameter in self.parameters().items() if parameter in state}
        values = {
            (name, key): value
            for name, parameter in parameters.items()
            for key, value in state[parameter].items()
            if isinstance(value, Tensor)
        }
        full: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
        for (name, key), value in full_copies(values, self.full).items():
            full[name][key] = value
        return full

    def write_params(self, values: Mapping[str, Tensor]) -> None:
        with self.gathered(writeback=True):
            parameters = self.parameters()
            for name, value in values.items():
                write_full(parameters[name], value)

    def local_tensors(self) -> dict[str, list[Tensor]]:
        parameters = list(self.parameters().values())
        return {
            "params": [local_part(parameter) for parameter in parameters],
            "grads": [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None],
            "optim": list(state_tensors(self.optimizer)) if self.optimizer is not None else [],
        }

    def scale_losses(self, init_scale: float, growth_interval: int) -> None:
        self.scaler = self.make_scaler(init_scale=init_scale, growth_interval=growth_interval)

    def loss_scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def drop_grads(self, names: Iterable[str]) -> None:
        names = set(names)
        if names >= set(self.names.parameters):
            # Whatever the engine shows in place of the user's parameters, such as flat ones.
            self.discard_gradients()
        else:
            super().drop_grads(names)

    def discard_gradients(self) -> None:
        """Set all gradients to None, after an exception in a step."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def wrap_again(self) -> None:
        self.model = self.wrap(self.model, self.plan)
        self._make_optimizer()

    def module(self) -> nn.Module:
        return self.model

    def parameters(self) -> dict[str, nn.Parameter]:
        return self.names.parameters_of(self.model)

    def _scaled_step(
        self, scaler: torch.amp.GradScaler, optimizer: Optimizer, max_norm: float | None, norm_type: float
    ) -> Tensor | None:
        norm = None
        if max_norm is not None:
            scaler.unscale_(optimizer)
            norm = self.clip(max_norm, norm_type)
        scaler.step(optimizer)
        scaler.update()
        self._clear(optimizer)
        return norm

    def _make_optimizer(self) -> None:
        has_parameters = next(self.model.parameters(), None) is not None
        self.optimizer = self.make_optimizer(self._optim_fn) if has_parameters else None


def compute_device(plan: Plan) -> torch.device:
    """
    The device that the plan computes on, with an index if its type has several devices.

    Without an explicit index it is the current device of its type: the harness assigns each rank its own.
    """
    device = torch.device(plan.device_id or plan.device)
    index: int | None = device.index
    if device.type == "cpu" or index is not None:
        return device
    return torch.device(device.type, torch.get_device_module(device.type).current_device())


def torch_dtype(name: str | None) -> torch.dtype | None:
    """The dtype with the name used in a plan."""
    dtype: torch.dtype | None = None if name is None else getattr(torch, name)
    return dtype


def hybrid_shape(plan: Plan, world_size: int) -> tuple[int, int]:
    """Number of replica groups and of ranks in each. Raises ConfigError if they do not divide the world size."""
    if world_size % plan.replicas:
        raise ConfigError(
            [f"replicas must divide the world size {world_size}, got {plan.replicas}"], where="hybrid sharding"
        )
    return plan.replicas, world_size // plan.replicas


def parallel_shape(plan: Plan, world_size: int) -> dict[str, int]:
    """
    The dimensions of the mesh of a plan with stages or tensor parallelism, the outermost first, with their sizes.

    "stage": the stages of a pipeline, "shard": data-parallel ranks, "tensor": consecutive ranks that share layers.
    Raises ConfigError if the groups do not divide the world.
    """
    num_stages = len(plan.stages) or 1
    if world_size % num_stages:
        raise ConfigError(
            [f"stages must divide the world size {world_size}, got {num_stages} stages"], where="pipeline parallelism"
        )
    stage_size = world_size // num_stages
    if stage_size % plan.tensor_parallel:
        what = f"the {stage_size} ranks of a stage" if plan.stages else f"the world size {world_size}"
        raise ConfigError(
            [f"tensor_parallel must divide {what}, got {plan.tensor_parallel}"], where="tensor parallelism"
        )
    shape = {"stage": num_stages, "shard": stage_size // plan.tensor_parallel, "tensor": plan.tensor_parallel}
    axes = {"shard", *["stage"] * bool(plan.stages), *["tensor"] * (plan.tensor_parallel > 1)}
    return {name: size for name, size in shape.items() if name in axes}


def parallel_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """The mesh with the dimensions of `parallel_shape`. Collective."""
    shape = parallel_shape(plan, dist.get_world_size())
    return init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))


def apply_tensor_parallelism(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Shard the layers that the plan names over the mesh's "tensor" dimension, with torch's tensor parallelism."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {"column": ColwiseParallel, "row": RowwiseParallel}
    parallelize_module(model, mesh["tensor"], {fqn: styles[style]() for fqn, style in plan.tensor_styles})


def all_units(plan: Plan) -> list[str]:
    """The units below the root, innermost first, including local units."""
    return [*(unit for unit in plan.local_units if unit and unit not in plan.units), *plan.units]


def units_to_shard(model: nn.Module, plan: Plan) -> list[Any]:
    """
    The modules to pass to `fully_shard` and similar functions, in order: the plan's units, innermost first, then the
    model.

    Each is a module, or a list of modules for a unit of several.
    """
    units = [submodules(model, unit.split("+")) for unit in plan.units]
    return [*(modules if len(modules) > 1 else modules[0] for modules in units), model]


def wrap_units(model: nn.Module, plan: Plan, wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    """
    Wrap each of the plan's units, innermost first, and then the model.

    Returns the wrappers by unit; that of the model is under "".
    """
    wrappers = {}
    for unit, module in zip(plan.units, submodules(model, plan.units), strict=True):
        wrappers[unit] = wrap(module)
        replace_submodule(model, module, wrappers[unit])
    return {**wrappers, "": wrap(model)}


def hook_of_both_kinds(hook: CommunicationHook) -> Callable[..., None]:
    """
    The hook as FSDP1 calls it, and engines with its interface: with a state, a gradient and, where that is sharded, the
    shard to fill.

    Without a shard, as in a group of one rank, this rank's part is the whole gradient, which is replaced in place.
    """

    def reduce(state: object, gradient: Tensor, shard: Tensor | None = None) -> None:
        if shard is None:
            # A copy, because a hook may write to the shard before it has read all of the gradient.
            hook(gradient.clone(), gradient)
        else:
            hook(gradient, shard)

    return reduce


def refuse_other_norm(plan: Plan, max_norm: float | None) -> None:
    """For engines that are told at construction how to clip. Raises Unsupported if a step asks for another norm."""
    if max_norm != plan.max_norm:
        raise Unsupported("clip_grad_norm", f"max_norm must be {plan.max_norm} as at construction, got {max_norm}")


def submodules(model: nn.Module, fqns: Iterable[str]) -> list[nn.Module]:
    """
    The named submodules, in order. Raises AdapterError that lists every one that does not exist.

    A user may wrap a model that is wrapped already, which is for the engine to refuse: so names are also looked up
    below a wrapper that has the model as `module`.
    """
    inner = getattr(model, "module", None)
    modules, missing = [], []
    for fqn in fqns:
        try:
            modules.append(model.get_submodule(fqn))
        except AttributeError:
            try:
                if isinstance(inner, nn.Module):
                    modules.append(inner.get_submodule(fqn))
                    continue
            except AttributeError:
                pass
            missing.append(f"the plan names unit {fqn!r}, which is not a submodule of {type(model).__name__}")
    if missing:
        raise AdapterError(missing)
    return modules


def replace_submodule(model: nn.Module, module: nn.Module, wrapped: nn.Module) -> None:
    """Put `wrapped`, which contains the submodule, in its place wherever it appears."""
    for parent in list(model.modules()):
        if parent is wrapped:
            continue
        # Not named_children(), which lists a module that appears twice only once.
        for key, child in list(parent._modules.items()):
            if child is module:
                setattr(parent, key, wrapped)


def unit_classes(model: nn.Module, plan: Plan) -> list[type[nn.Module]]:
    """
    Classes whose instances are exactly the plan's units, for engines that take unit classes and not modules.

    A plan names modules, and others may be of the same class. So each unit gets a subclass of its class that adds
    nothing, as if the user had written one: `LinearUnit` for `Linear`. A unit of several modules is refused.
    """
    several = [unit for unit in plan.units if "+" in unit]
    if several:
        raise Unsupported("multi_module_unit", f"a class cannot stand for {several[0]!r}, which is several modules")
    own: dict[type[nn.Module], type[nn.Module]] = {}
    for module in submodules(model, plan.units):
        cls = type(module)
        if cls not in own.values():
            made: Any = type(f"{cls.__name__}Unit", (cls,), {"__module__": cls.__module__})
            module.__class__ = own.setdefault(cls, made)
    return list(own.values())


@contextmanager
def refusal(capability: str, *errors: type[Exception], when: bool = True) -> Iterator[None]:
    """
    Report the engine's own rejection of an option as Unsupported, with the engine's message.

    For options that an engine offers only on some devices: if the engine does not raise, nothing happens. `when` is the
    condition under which its error is known to be a rejection; otherwise the error passes through.
    """
    try:
        yield
    except errors as error:
        if not when or isinstance(error, Unsupported):
            raise
        raise Unsupported(capability, f"{type(error).__name__}: {error}") from error
