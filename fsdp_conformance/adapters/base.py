"""
The seam: what the suite asks of an implementation.

An adapter lives in each rank's fresh process, with the default process group up. It gets functions, not objects: meta
initialisation and DeepSpeed's `zero.Init` need the model's factory, and engines disagree on whether the optimizer is made
before or after the wrap.

`Adapter` is the protocol with its optional methods; overriding an optional method (or naming a flag in `capabilities`)
declares a capability, which the suite then probes. Engines with a torch-like API subclass `TorchAdapter` and write `wrap`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_conformance.config import Plan

ModelFn = Callable[[], nn.Module]
"""Builds the model on the CPU, in float32, with this rank's initial values."""
OptimFn = Callable[[Any], Optimizer]
"""Parameters, or parameter groups, to a stock torch optimizer."""


class Adapter(ABC):
    """
    An implementation of sharded data-parallel training, as the suite sees it.

    One instance trains one model. Methods marked collective are called on every rank in the same order.
    """

    name: ClassVar[str] = ""
    """How reports call the implementation."""
    capabilities: ClassVar[frozenset[str]] = frozenset()
    """Flags declared beside those that overridden methods declare."""
    environment: ClassVar[dict[str, str]] = {}
    """Variables that must be set before the engine is imported; applied first thing in every rank."""
    shims: ClassVar[tuple[str, ...]] = ()
    """What the adapter changes in the engine or in torch so that it runs here; printed on the certificate."""
    padding: ClassVar[float] = 0.15
    """Declared overhead on the wire over the ideal, as a fraction, beside the padding of uneven shards."""
    grad_reduction_of_accumulation: ClassVar[str] = "local"
    """"local": micro-batches are summed on the rank, then reduced; "reduced": each is reduced, then added."""

    @classmethod
    def version(cls) -> str:
        """The version of the implementation."""
        return ""

    @abstractmethod
    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        """
        Build the model, wrap it, build the optimizer. Collective.

        Raises Unsupported for a plan that the implementation cannot carry out; any other exception is the
        implementation's refusal, or its failure if the plan needs only what is mandatory or declared.
        """

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        """
        Entered before the forward of each micro-batch and left after its backward.

        With `plan.defer_reduction` the gradients of all but the last must not be reduced.
        """
        return nullcontext()

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, in training or eval mode as `train` said last."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """The backward pass of a scalar loss; the gradient is the mean over the data-parallel ranks."""

    @abstractmethod
    def step(self, max_norm: float | None = None) -> Tensor | None:
        """Clip if asked, step the optimizer, drop the gradients. Returns the total norm before clipping if it is known."""

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
        with more than one element. Not collective.
        """

    # Optional: overriding one declares the capability of the same name, unless said otherwise.

    def full_grads(self) -> dict[str, Tensor | None]:
        """Every gradient in full, as `full_params`; None where there is none. Collective. Called before `step`."""
        raise NotImplementedError

    def full_buffers(self) -> dict[str, Tensor]:
        """Every buffer of this rank under its original name, on the CPU, cloned."""
        raise NotImplementedError

    def full_optim_state(self) -> dict[str, dict[str, Tensor]]:
        """Optimizer state in full: parameter name to state name to tensor. Collective."""
        raise NotImplementedError

    def write_params(self, values: dict[str, Tensor]) -> None:
        """Overwrite full parameters in place after setup and before the first forward. Collective."""
        raise NotImplementedError

    def unit_is_unsharded(self, fqn: str) -> bool:
        """True while the unit (root: "") holds full parameters. Declares `sharded_state`."""
        raise NotImplementedError

    def module(self) -> nn.Module:
        """The module that user code holds after the wrap. Needed for hooks, attributes and `train`."""
        raise NotImplementedError

    def train(self, mode: bool = True) -> None:
        """Training or eval mode."""
        self.module().train(mode)

    def close(self) -> None:
        """Release what the engine holds, before the process group goes away. Collective."""
