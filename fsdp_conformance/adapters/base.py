"""
The seam: what the suite asks of an implementation.

An adapter lives in each rank's fresh process, with the default process group up. It gets functions, not objects: meta
initialisation and DeepSpeed's `zero.Init` need the model's factory, and engines disagree on whether the optimizer is
made before or after the wrap.

`Adapter` is the protocol with its optional methods; overriding an optional method (or naming a flag in `capabilities`)
declares a capability, which the suite then probes. Engines with a torch-like API subclass `TorchAdapter` and write
`wrap`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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
from fsdp_conformance.config import Plan
from fsdp_conformance.errors import Unsupported

ModelFn = Callable[[], nn.Module]
"""Builds the model on the CPU, in float32, with this rank's initial values."""
OptimFn = Callable[[Any], Optimizer]
"""Parameters, or parameter groups, to a stock torch optimizer."""


class Adapter(ABC):
    """
    An implementation of sharded data-parallel training, as the suite sees it.

    One instance trains one model. Methods marked collective are called on every rank in the same order. Import the
    engine inside methods, not at the top of the file: then `environment` is applied first.
    """

    name: ClassVar[str] = ""
    """How reports call the implementation; empty: the class's name."""
    capabilities: ClassVar[frozenset[str]] = frozenset()
    """Flags declared beside those of the base classes and those that overridden methods declare."""
    declines: ClassVar[frozenset[str]] = frozenset()
    """Flags of the base classes, or of inherited methods, that this implementation does not offer."""
    declines_on: ClassVar[Mapping[str, frozenset[str]]] = {}
    """Flags that are not offered on a device type ("cpu"), although they are on others."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Variables that must be set before the engine is imported; applied first thing in every rank."""
    shims: ClassVar[tuple[str, ...]] = ()
    """What the adapter changes in the engine or in torch so that it runs here; printed on the certificate."""
    padding: ClassVar[float] = 0.15
    """Declared overhead on the wire over the ideal, as a fraction, beside the padding of uneven shards."""
    grad_reduction_of_accumulation: ClassVar[str] = "local"
    """"local": micro-batches are summed on the rank, then reduced; "reduced": each is reduced, then added."""
    max_unsharded: ClassVar[int] = 0
    """How many units below the root hold full parameters at once at most; promised by whoever declares `rate_limit`."""
    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that the warm process may import before it forks ranks: none that touches a device."""
    optional: ClassVar[Mapping[str, str]] = {
        "full_grads": "full_grads",
        "full_buffers": "full_buffers",
        "full_optim_state": "full_optim_state",
        "write_params": "write_params",
        "unit_is_unsharded": "sharded_state",
        "reshard": "manual_unshard",
        "unshard_async": "async_unshard",
        "wrap_again": "wrap_again",
        "reducer": "reducer",
        "reduce_scatter_bucketer": "bucketing",
        "chunk_pool": "chunk_pool",
        "mesh_collectives": "mesh",
        "redistribution_cost": "mesh",
        "run_ranks": "sim_ranks",
    }
    """Optional method to the flag that overriding it declares. A base class for adapters adds its own hooks."""

    @classmethod
    def declared(cls) -> frozenset[str]:
        """
        Every flag that the class declares on some device: see `declines_on`.

        From the oldest base class to itself, each adds its methods and `capabilities` and takes away its `declines`.
        """
        flags: set[str] = set()
        methods: dict[str, str] = {}
        for base in reversed(cls.__mro__):
            flags.update(flag for method, flag in methods.items() if method in vars(base))
            # Its own hooks count from the next class on: here they are introduced, not overridden.
            methods.update(vars(base).get("optional", {}))
            flags.update(vars(base).get("capabilities", ()))
            flags.difference_update(vars(base).get("declines", ()))
        return frozenset(flags)

    @classmethod
    def refuse_undeclared(cls, plan: Plan) -> None:
        """
        Raise Unsupported if the plan needs flags that are not declared; the message names all of them.

        What is not offered on this device alone is left to the engine, whose own words say more.
        """
        missing = sorted(plan.capabilities() - cls.declared())
        if missing:
            raise Unsupported(
                missing[0],
                f"the plan needs {', '.join(missing)}, but {cls.display_name()} does not declare "
                f"{'it' if len(missing) == 1 else 'them'}",
            )

    @classmethod
    def display_name(cls) -> str:
        """`name`, or the class's name where there is none."""
        return cls.name or cls.__name__

    @classmethod
    def version(cls) -> str:
        """The version of the implementation. Must not need a device."""
        return ""

    @abstractmethod
    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        """
        Build the model, wrap it, build the optimizer. Collective.

        Raises Unsupported for a plan that the implementation cannot carry out; any other exception is the
        implementation's refusal, or its failure if the plan needs only what is mandatory or declared.
        """

    def microbatch(self, last: bool, *, reduced: bool = True) -> AbstractContextManager[Any]:
        """
        Entered before the forward of each micro-batch and left after its backward.

        `last` marks the last micro-batch of the step. `reduced` is False only for plans with `defer_reduction`: then
        the gradients of this micro-batch must not be reduced yet. The last micro-batch is always reduced.
        """
        return nullcontext()

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, in training or eval mode as `train` said last."""

    @abstractmethod
    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """
        The backward pass of a scalar loss; the gradient is the mean over the data-parallel ranks.

        The gradients of several micro-batches add up: they are not divided by the number of micro-batches.
        """

    @abstractmethod
    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        """
        Clip if asked, step the optimizer, drop the gradients. Collective.

        Returns the total norm before clipping if it is known; a lazily reduced one (DTensor) is reduced by the caller.
        """

    @abstractmethod
    def full_params(self) -> dict[str, Tensor]:
        """
        Every parameter in full, under its original name, on the CPU, cloned. Collective.

        A tied parameter is listed once, under the name `model.named_parameters()` gives it; frozen ones are included.
        """

    @abstractmethod
    def local_tensors(self) -> dict[str, list[Tensor]]:
        """
        What this rank holds between steps: {"params": [...], "optim": [...]}, live storage, not clones.

        This is the sharding witness: bytes are counted, each storage once. "optim" has tensors of the optimizer's state
        with more than one element. Other kinds ("grads", "master") may be listed beside these. Not collective.
        """

    # Optional: overriding one declares the flag beside it in `optional`.

    def full_grads(self) -> dict[str, Tensor | None]:
        """Every gradient in full, as `full_params`; None where there is none. Collective. Called before `step`."""
        raise NotImplementedError

    def full_buffers(self) -> dict[str, Tensor]:
        """Every buffer of this rank under its original name, on the CPU, cloned."""
        raise NotImplementedError

    def full_optim_state(self) -> dict[str, dict[str, Tensor]]:
        """Optimizer state in full: parameter name to state name to tensor. Collective."""
        raise NotImplementedError

    def write_params(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite full parameters in place after setup and before the first forward. Collective."""
        raise NotImplementedError

    def unit_is_unsharded(self, fqn: str) -> bool:
        """True while the unit (root: "") holds full parameters. Declares `sharded_state`."""
        raise NotImplementedError

    def unshard(self, fqn: str) -> None:
        """Gather a unit's full parameters now. Collective. Comes with `reshard`."""
        raise NotImplementedError

    def reshard(self, fqn: str) -> None:
        """Free a unit's full parameters now, wherever the training step is. Declares `manual_unshard`."""
        raise NotImplementedError

    def unshard_async(self, fqn: str) -> Any:
        """Begin to gather a unit's full parameters; returns what has a `wait`. Collective. Declares `async_unshard`."""
        raise NotImplementedError

    def wrap_again(self) -> None:
        """Wrap the wrapped module once more, as a careless caller would: an implementation refuses."""
        raise NotImplementedError

    # Components, each driven by itself, without `setup`: see `adapters.components`.

    def reducer(self, module: nn.Module, options: ReducerOptions) -> GradientReducer:
        """`module`, on its device, with a reducer around it. Collective. Comes with `bucket_assignment`."""
        raise NotImplementedError

    def bucket_assignment(
        self,
        tensors: Sequence[Tensor],
        limits: Sequence[int],
        sparse_flags: Sequence[bool] = (),
        order: Sequence[int] = (),
    ) -> Assignment:
        """
        How the reducer puts tensors into buckets of `limits` bytes, the first, second, ...; the last repeats.

        `sparse_flags[i]`: the gradient of tensor i will be sparse. `order[k]`: the index that tensors[k] is known by.
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
        What bringing a tensor of that (full) shape to another layout takes, in microseconds, infinite if it cannot be.

        Not collective. Declares `mesh`.
        """
        raise NotImplementedError

    def run_ranks(self, world_size: int, function: Callable[[int], Any]) -> list[Any]:
        """
        What `function(rank)` returns on each of `world_size` ranks that are simulated in this process, in order.

        Each has a default group whose backend is for CPU tensors, and random numbers of its own. An exception of a rank
        ends all, and is raised. Not collective. Declares `sim_ranks`.
        """
        raise NotImplementedError

    # What a user does with the module in hand.

    def module(self) -> nn.Module:
        """The module that user code holds after the wrap. Needed for hooks, attributes and `train`."""
        raise NotImplementedError

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameter objects that user code sees, by original name. Not collective."""
        return cleaned_parameters(self.module())

    def set_requires_grad(self, frozen: Iterable[str]) -> None:
        """From now on exactly the parameters named have `requires_grad=False`."""
        names = set(frozen)
        for name, parameter in self.parameters().items():
            parameter.requires_grad_(name not in names)

    def drop_grads(self, names: Iterable[str]) -> None:
        """Set the gradients of the parameters named to None, as a user does who freezes without the flag."""
        parameters = self.parameters()
        for name in names:
            parameters[name].grad = None

    def train(self, mode: bool = True) -> None:
        """Training or eval mode."""
        self.module().train(mode)

    def close(self) -> None:
        """Release what the engine holds, before the process group goes away. Collective."""
