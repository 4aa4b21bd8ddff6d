"""
The adapter protocol: the interface between the suite and an implementation.

An adapter lives in each rank's fresh process, after the default process group is initialised. It receives functions,
not objects: meta initialisation and DeepSpeed's `zero.Init` need the model's factory, and engines disagree on whether
the optimizer is created before or after wrapping.

`Adapter` is the protocol with its optional methods. Overriding an optional method, or naming a flag in `capabilities`,
declares a capability, which the suite then probes. For engines with a torch-like API, subclass `TorchAdapter` and
implement `wrap`.
"""

from __future__ import annotations

import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_conformance.adapters.allowances import DEFAULT_PADDING
from fsdp_conformance.adapters.components import (
    Assignment,
    Bucketer,
    ChunkPool,
    GradientReducer,
    MeshCollectives,
    ReducerOptions,
    TensorLayout,
)
from fsdp_conformance.adapters.names import cleaned_parameters
from fsdp_conformance.errors import Unsupported
from fsdp_conformance.history.transfer import carry
from fsdp_conformance.plan import Plan, flags_of_names

ModelFn = Callable[[], nn.Module]
"""Builds the model on the CPU, in float32, with this rank's initial values; on meta if the plan has `meta_init`."""
OptimFn = Callable[[Any], Optimizer]
"""Builds a stock torch optimizer from parameters or parameter groups."""
CommunicationHook = Callable[[Tensor, Tensor], None]
"""Fills this rank's shard of a unit's reduced gradients, from the unit's gradients on this rank."""


@carry
class LoadedKeys(NamedTuple):
    """The keys that a non-strict load left out, under original names."""

    missing: list[str]
    """Names of the model that the state lacks: they keep their values."""
    unexpected: list[str]
    """Names of the state that the model lacks."""


class PendingSave(Protocol):
    """A checkpoint that is being written."""

    def wait(self) -> object:
        """Return once the checkpoint is complete on every rank. Collective."""


#: `declines_on` of an adapter that has not been tried with its engine on a GPU: no model can be placed there.
CPU_ONLY: Mapping[str, frozenset[str]] = {"cuda": frozenset({"init_before", "init_never"})}


class Adapter(ABC):
    """
    An implementation of sharded data-parallel training, as the suite sees it.

    One instance trains one model. Methods marked collective are called on every rank in the same order. Import the
    engine inside methods, not at the top of the file, so that `environment` is applied first.
    """

    name: ClassVar[str] = ""
    """The implementation's name in reports; empty: the class's name."""
    package: ClassVar[str] = ""
    """The distribution that the engine comes in, as pip names it: reports give its installed version."""
    capabilities: ClassVar[frozenset[str]] = frozenset()
    """Flags declared in addition to those of the base classes and of overridden methods."""
    declines: ClassVar[frozenset[str]] = frozenset()
    """Flags of the base classes, or of inherited methods, that this implementation does not offer."""
    declines_on: ClassVar[Mapping[str, frozenset[str]]] = {}
    """Device type ("cpu") to flags that are not offered there, although they are on others."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Environment variables that must be set before the engine is imported; every rank sets them first."""
    cuda_names: ClassVar[bool] = False
    """True if the engine knows only "cuda": on the simulated accelerator it finds the device under that name."""
    shims: ClassVar[tuple[str, ...]] = ()
    """Changes that the adapter makes to the engine or to torch so that it runs here; printed on the certificate."""
    padding: ClassVar[float] = DEFAULT_PADDING
    """
    Declared overhead on the wire as a fraction of the ideal, in addition to the padding of uneven shards.

    At most `allowances.MAX_PADDING`; an adapter that declares more is not loaded.
    """
    alignment: ClassVar[int] = 16
    """Bytes to which the engine aligns each parameter in what it sends, which shows in small models; 0: it does not."""
    grad_reduction_of_accumulation: ClassVar[str] = "local"
    """"local": micro-batches are summed on the rank, then reduced; "reduced": each is reduced, then added."""
    max_unsharded: ClassVar[int] = 0
    """The most units below the root that hold full parameters at once. Required with `rate_limit`."""
    kept_buffers: ClassVar[int] = 0
    """
    The most buffers, each as large as the largest unit in full, that the engine keeps between steps for gathers and
    gradients. At most `allowances.MAX_KEPT_BUFFERS`; an adapter that declares more is not loaded.
    """
    avoids: ClassVar[tuple[Mapping[str, str], ...]] = ()
    """
    Combinations that the implementation is known to get wrong or to refuse, each as axis to value of the scenario space
    (`scenarios.axes`). Rows of the pair profile run without them, so that they hide nothing else. Such a row is
    UNSUPPORTED at best, and the certificate lists them.
    """
    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that the warm process may import before it forks ranks. They must not touch a device."""
    optional: ClassVar[Mapping[str, str]] = {
        "full_grads": "full_grads",
        "full_buffers": "full_buffers",
        "full_optim_state": "full_optim_state",
        "write_params": "write_params",
        "unit_is_unsharded": "sharded_state",
        "reshard": "manual_unshard",
        "unshard_async": "async_unshard",
        "wrap_again": "wrap_again",
        "set_learning_rate": "learning_rate",
        "keep_zero_grads": "zero_grads",
        "leave_grads": "own_clearing",
        "register_comm_hook": "comm_hook",
        "divide_gradients_by": "divide_factor",
        "full_params_context": "full_params",
        "apply": "apply_fn",
        "clip_unit": "clip_unit",
        "scale_losses": "grad_scaler",
        "recover": "exception_recovery",
        "full_state_dict": "full_state_dict",
        "sharded_state_dict": "sharded_state_dict",
        "optim_state_dict": "optim_state_dict",
        "save_checkpoint": "checkpoint",
        "save_checkpoint_async": "async_checkpoint",
        "reducer": "reducer",
        "reduce_scatter_bucketer": "bucketing",
        "chunk_pool": "chunk_pool",
        "mesh_collectives": "mesh",
        "redistribution_cost": "mesh_costs",
        "run_ranks": "sim_ranks",
    }
    """Optional method to the flag that overriding it declares. Base classes for adapters add their own hooks."""

    @classmethod
    def declared(cls) -> frozenset[str]:
        """
        Every flag that the class declares on some device: see `declines_on`.

        From the oldest base class down, each class adds its methods and `capabilities` and removes its `declines`.
        """
        flags: set[str] = set()
        methods: dict[str, str] = {}
        for base in reversed(cls.__mro__):
            flags.update(flag for method, flag in methods.items() if method in vars(base))
            # A class's own hooks count from its subclasses on: here they are introduced, not overridden.
            methods.update(vars(base).get("optional", {}))
            flags.update(vars(base).get("capabilities", ()))
            flags.difference_update(vars(base).get("declines", ()))
        return frozenset(flags)

    @classmethod
    def refuse_undeclared(cls, plan: Plan) -> None:
        """
        Raise Unsupported if the plan needs flags that are not declared; the message names all of them.

        What is not offered only on this device is left to the engine, whose own error is more informative.
        """
        missing = sorted(plan.capabilities() - cls.declared() - flags_of_names(plan.device, cuda_names=cls.cuda_names))
        if missing:
            raise Unsupported(
                missing[0],
                f"the plan needs {', '.join(missing)}, but {cls.display_name()} does not declare "
                f"{'it' if len(missing) == 1 else 'them'}",
            )

    @classmethod
    def display_name(cls) -> str:
        """`name`, or the class's name if it is empty."""
        return cls.name or cls.__name__

    @classmethod
    def version(cls) -> str:
        """The version of `package`, or "" if the class names none. Must not require a device."""
        return importlib.metadata.version(cls.package) if cls.package else ""

    @abstractmethod
    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        """
        Build the model, wrap it, build the optimizer. Collective.

        Raises Unsupported for a plan that the implementation does not support. Any other exception counts as a
        refusal, or as a failure if the plan needs only what is mandatory or declared.
        """

    def microbatch(self, last: bool, *, reduced: bool = True) -> AbstractContextManager[Any]:
        """
        The context for a micro-batch: entered before its forward and left after its backward.

        In a pipeline (`pipelined_microbatch`) it is entered twice, around the forward and around the backward, because
        other micro-batches' passes lie between the two.

        `last` marks the last micro-batch of the step. `reduced` is False only for plans with `defer_reduction`: then
        the gradients of this micro-batch must not be reduced yet. The last micro-batch is always reduced.
        """
        return nullcontext()

    def pipeline_module(self) -> nn.Module | None:
        """
        The module that torch.distributed.pipelining calls and differentiates itself. It has special support for some
        engines.

        None: a pipeline goes through `microbatch`, `forward` and `backward`, as training without one does.
        """
        return None

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, in the mode last set by `train`."""

    @abstractmethod
    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """
        The backward pass of a scalar loss; the gradient is the mean over the data-parallel ranks.

        Gradients of micro-batches accumulate: they are not divided by the number of micro-batches.
        """

    @abstractmethod
    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        """
        Clip if `max_norm` is given, step the optimizer, drop the gradients. Collective.

        Returns the total norm before clipping if known; the caller reduces a lazily reduced one (DTensor). In a
        pipeline, it is the norm of the gradients of all stages.
        """

    @abstractmethod
    def full_params(self) -> dict[str, Tensor]:
        """
        Full clones of all parameters on the CPU, by original name. Collective.

        A tied parameter is listed once, under its name in `model.named_parameters()`; frozen ones are included.

        In a pipeline, here and in the methods below, the model is this rank's stage.
        """

    @abstractmethod
    def local_tensors(self) -> dict[str, list[Tensor]]:
        """
        The tensors this rank stores between steps: {"params": [...], "optim": [...]}, live storage, not clones.

        The sharding witness counts their bytes, each storage once. "optim" lists tensors of the optimizer's state with
        more than one element. Other kinds ("grads", "master") may be added. Not collective.
        """

    # Optional: overriding one declares its flag in `optional`.

    def full_grads(self) -> dict[str, Tensor | None]:
        """Full gradients, in the form of `full_params`; None for no gradient. Collective. Called before `step`."""
        raise NotImplementedError

    def full_buffers(self) -> dict[str, Tensor]:
        """Clones of this rank's buffers on the CPU, by original name."""
        raise NotImplementedError

    def full_optim_state(self) -> dict[str, dict[str, Tensor]]:
        """Full optimizer state: parameter name to state name to tensor. Collective."""
        raise NotImplementedError

    def write_params(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite full parameters in place after setup and before the first forward. Collective."""
        raise NotImplementedError

    def unit_is_unsharded(self, fqn: str) -> bool:
        """True if the unit (root: "") currently holds full parameters. Declares `sharded_state`."""
        raise NotImplementedError

    def unshard(self, fqn: str) -> None:
        """Gather a unit's full parameters now. Collective. Implemented together with `reshard`."""
        raise NotImplementedError

    def reshard(self, fqn: str) -> None:
        """Free a unit's full parameters now, at any point of the step. Declares `manual_unshard`."""
        raise NotImplementedError

    def unshard_async(self, fqn: str) -> Any:
        """Start gathering a unit's parameters; returns a handle with `wait`. Collective. Declares `async_unshard`."""
        raise NotImplementedError

    def wrap_again(self) -> None:
        """Wrap the wrapped module again, as a careless caller might. An implementation should raise."""
        raise NotImplementedError

    def set_learning_rate(self, value: float) -> None:
        """Give all parameter groups this learning rate from now on, as a scheduler does. Not collective."""
        raise NotImplementedError

    def keep_zero_grads(self) -> None:
        """From now on, `step` sets gradients to zero instead of None. Not collective."""
        raise NotImplementedError

    def leave_grads(self) -> None:
        """From now on, `step` leaves gradients as they are: the user clears them. Declares `own_clearing`."""
        raise NotImplementedError

    def register_comm_hook(self, hook: CommunicationHook) -> None:
        """
        Let `hook(gradient, shard)` replace the average of gradients in every unit, from the next backward on.

        Called once, after setup. `gradient`: 1D, all gradients of a unit on this rank, padded to the same size on every
        rank. `shard`: 1D, for the hook to fill with this rank's part of the mean, after which nothing is divided.
        """
        raise NotImplementedError

    def divide_gradients_by(self, factor: float) -> None:
        """
        Let every unit divide sums of gradients by `factor` instead of the number of ranks, from the next backward on.

        Called once, after setup. Declares `divide_factor`.
        """
        raise NotImplementedError

    def full_params_context(
        self,
        unit: str = "",
        *,
        recurse: bool = True,
        writeback: bool = False,
        rank0_only: bool = False,
        to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[Any]:
        """
        The engine's context in which `module()` and `parameters()` show full parameters. Declares `full_params`.

        Collective. `unit`: the submodule whose parameters are shown; `recurse`: with those of the units inside it. The
        other options need flags of their own, and are not set without them. `writeback`: whether what is written inside
        persists (`full_params_writeback`); every rank writes the same. `rank0_only`: only the first rank of each shard
        group sees full parameters, and `to_cpu`: as copies on the CPU (`full_params_rank0`). `with_grads`: with full
        gradients in `.grad` (`full_params_grads`). The engine should raise inside a forward or a backward.
        """
        raise NotImplementedError

    def apply(self, fn: Callable[[nn.Module], None]) -> None:
        """Call `fn` on every module, inner ones first, with full parameters, and keep what it writes. Collective."""
        raise NotImplementedError

    def clip_unit(self, fqn: str, max_norm: float) -> None:
        """Clip through a unit's own method, as a careless caller might. An implementation should raise."""
        raise NotImplementedError

    def scale_losses(self, init_scale: float, growth_interval: int) -> None:
        """
        Scale losses dynamically from now on, as torch's GradScaler does. Called once, after `setup`.

        From then on `backward` multiplies the loss by the scale, and `step` divides the gradients by it before it
        clips; if one of them is infinite or NaN on any rank, it skips the optimizer and halves the scale. After
        `growth_interval` steps in a row that were not skipped, the scale doubles. Declares `grad_scaler`.
        """
        raise NotImplementedError

    def loss_scale(self) -> float:
        """The scale of this rank's next loss. Implemented together with `scale_losses`. Not collective."""
        raise NotImplementedError

    def recover(self) -> None:
        """
        Return to the state between two steps: an exception ended a step on every rank before its optimizer stepped, in
        a forward, in a backward or after one, and was caught.

        The recovery that the engine documents; if that is automatic, there is nothing to do for it. Gradients of the
        interrupted step are dropped. Collective. Declares `exception_recovery`.
        """
        raise NotImplementedError

    # State dicts and checkpoints.

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """
        The state dict of the unwrapped model: whole values under original names, aliases included. Collective.

        With `rank0_only`, rank 0 gets it on the CPU, and the others get an empty one; in a pipeline, the first rank of
        each stage gets that of the stage.
        """
        raise NotImplementedError

    def load_full_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> LoadedKeys:
        """
        Load a state dict of the unwrapped model, which every rank has in full. Collective.

        If `strict`, missing and unexpected names raise. Implemented together with `full_state_dict`.
        """
        raise NotImplementedError

    def sharded_state_dict(self) -> dict[str, Any]:
        """
        This rank's part of the state dict, under original names, for torch.distributed.checkpoint. Not collective.

        Values are live storage in a form that `torch.distributed.checkpoint` saves, and loads in place: DTensors,
        ShardedTensors, or its protocol for others.
        """
        raise NotImplementedError

    def load_sharded_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a `sharded_state_dict` whose values were loaded. Implemented together with it. Collective."""
        raise NotImplementedError

    def optim_state_dict(self) -> dict[str, Any]:
        """
        The whole optimizer state: {"state": {name: {key: value}}, "param_groups": [{"params": [names], ...}]}.

        Collective. It has what the optimizer over the unwrapped model has, under original names.
        """
        raise NotImplementedError

    def load_optim_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load an `optim_state_dict`, from any ranks and units. Implemented together with it. Collective."""
        raise NotImplementedError

    def save_checkpoint(self, directory: Path) -> None:
        """Save model and optimizer in a directory that every rank sees, the way users of the engine do. Collective."""
        raise NotImplementedError

    def load_checkpoint(self, directory: Path) -> None:
        """
        Load model and optimizer between two steps: before the first one, or later, to return to what was saved. The
        directory may have been moved since it was written.

        Collective. Implemented with `save_checkpoint`.

        The ranks may be as many as those that saved it, or, with the flag `reshard_load`, any number.
        """
        raise NotImplementedError

    def save_checkpoint_async(self, directory: Path) -> PendingSave:
        """Start to save what model and optimizer are now; training goes on meanwhile. Declares `async_checkpoint`."""
        raise NotImplementedError

    # Components, each used separately, without `setup`: see `adapters.components`.

    def reducer(self, module: nn.Module, options: ReducerOptions) -> GradientReducer:
        """Wrap `module`, on its device, in a reducer. Collective. Implemented together with `bucket_assignment`."""
        raise NotImplementedError

    def bucket_assignment(
        self,
        tensors: Sequence[Tensor],
        limits: Sequence[int],
        sparse_flags: Sequence[bool] = (),
        order: Sequence[int] = (),
    ) -> Assignment:
        """
        How the reducer assigns tensors to buckets. Each bucket has the next limit in bytes; the last limit repeats.

        `sparse_flags[i]`: the gradient of tensor i will be sparse. `order[k]`: the original index of tensors[k].
        """
        raise NotImplementedError

    def reduce_scatter_bucketer(self, cap_bytes: float) -> Bucketer:
        """A bucketer whose buckets hold `cap_bytes` for all ranks together. Declares `bucketing`."""
        raise NotImplementedError

    def chunk_pool(self, num_blocks: int, numel: int, dtype: torch.dtype, device: torch.device) -> ChunkPool:
        """A pool of `num_blocks` blocks of `numel` elements, for chunks of that size."""
        raise NotImplementedError

    def mesh_collectives(self) -> MeshCollectives:
        """Collectives along the axes of a mesh. Declares `mesh`."""
        raise NotImplementedError

    def redistribution_cost(
        self, shape: Sequence[int], dtype: torch.dtype, source: TensorLayout, target: TensorLayout
    ) -> float:
        """
        The cost of redistributing a tensor of that (full) shape, in microseconds; infinite if impossible.

        Not collective. Declares `mesh_costs`; the cases also need `mesh`.
        """
        raise Unsupported("mesh_costs", f"{self.display_name()} has no cost model")

    def run_ranks(self, world_size: int, function: Callable[[int], Any]) -> list[Any]:
        """
        The results of `function(rank)` on `world_size` ranks that are simulated in this process, in order.

        Each rank has a default group with a backend for CPU tensors, and its own random numbers. An exception on one
        rank ends all ranks, and is raised. Not collective. Declares `sim_ranks`.
        """
        raise NotImplementedError

    # Access to the wrapped module.

    def module(self) -> nn.Module:
        """The module that user code holds after wrapping. Needed for hooks, attributes and `train`."""
        raise NotImplementedError

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameter objects that user code sees, by original name. Not collective."""
        return cleaned_parameters(self.module())

    def set_requires_grad(self, frozen: Iterable[str]) -> None:
        """
        From now on exactly the named parameters have `requires_grad=False`.

        Raises Unsupported if the user has no such parameter to set, as with flat parameters.
        """
        names, parameters = set(frozen), self.parameters()
        hidden = sorted(names - parameters.keys())
        if hidden:
            raise Unsupported(
                "frozen_dynamic", f"the wrapped model exposes no parameter {hidden[0]!r} that can be frozen"
            )
        for name, parameter in parameters.items():
            parameter.requires_grad_(name not in names)

    def drop_grads(self, names: Iterable[str]) -> None:
        """
        Set the gradients of the named parameters to None, which freezes them without the flag.

        Raises Unsupported if the user has no such parameter, as with flat parameters.
        """
        names, parameters = list(names), self.parameters()
        hidden = [name for name in names if name not in parameters]
        if hidden:
            raise Unsupported(
                "orig_params", f"the wrapped model exposes no parameter {hidden[0]!r} that has a gradient"
            )
        for name in names:
            parameters[name].grad = None

    def train(self, mode: bool = True) -> None:
        """Set training or eval mode."""
        self.module().train(mode)

    def close(self) -> None:
        """
        Release the engine's resources, before the process group is destroyed. Collective.

        Also called if `setup` has raised: there may be no engine yet.
        """
