"""
Adapters that break the protocol, one way each: what the validator and the smoke run must find.

Most stand on the FSDP2 adapter, so that everything else about them is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_conformance.adapters.base import Adapter, ModelFn, OptimFn
from fsdp_conformance.adapters.vendors.torch_fsdp2 import TorchFSDP2
from fsdp_conformance.plan import Plan


class Bare(Adapter):
    """The abstract methods and nothing else: right, as far as it goes."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"zero3", "cpu_compute"})

    def setup(self, model_fn: Any, optim_fn: Any, plan: Plan) -> None: ...

    def forward(self, *args: Any, **kwargs: Any) -> Any: ...

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None: ...

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None: ...

    def full_params(self) -> dict[str, Tensor]:
        return {}

    def local_tensors(self) -> dict[str, list[Tensor]]:
        return {}


# What the class alone shows.


class MisspeltFlags(TorchFSDP2):
    capabilities: ClassVar[frozenset[str]] = frozenset({"zero_3", "full_grad"})


class WrongVariables(TorchFSDP2):
    name = None  # type: ignore[assignment]
    capabilities = "zero3"  # type: ignore[assignment]
    environment = {"THREADS": 1}  # type: ignore[dict-item]  # noqa: RUF012
    shims = "a shim"  # type: ignore[assignment]
    padding = -0.5
    grad_reduction_of_accumulation = "later"
    declines_on = {"cpu": "zero3"}  # type: ignore[dict-item]  # noqa: RUF012


class DeclaresWithoutMethod(Adapter):
    capabilities: ClassVar[frozenset[str]] = frozenset({"full_grads", "cpu_compute"})

    def forward(self, *args: Any, **kwargs: Any) -> Any: ...


class WrongSignatures(TorchFSDP2):
    def setup(self, model: nn.Module, plan: Plan) -> None: ...  # type: ignore[override]

    def microbatch(self, last: bool) -> AbstractContextManager[Any]: ...  # type: ignore[override,empty-body]

    def step(self) -> Tensor | None: ...  # type: ignore[override]

    def forward(self, x: Tensor) -> Any: ...

    @property
    def full_params(self) -> dict[str, Tensor]:  # type: ignore[override]
        return {}

    async def local_tensors(self) -> dict[str, list[Tensor]]:  # type: ignore[override]
        return {}


class GeneratorMicroBatch(TorchFSDP2):
    def microbatch(self, last: bool, *, reduced: bool = True) -> Iterator[None]:  # type: ignore[override]
        yield


class MisspeltMethods(Bare):
    def full_gradients(self) -> dict[str, Tensor]:
        return {}

    def micro_batch(self, last: bool) -> None: ...

    def unit_is_unshard(self, fqn: str) -> bool:
        return False


# What shows at work.


class PrefixedNames(TorchFSDP2):
    def full_params(self) -> dict[str, Tensor]:
        return {f"module.{name}": value for name, value in super().full_params().items()}


class MissingName(TorchFSDP2):
    def full_params(self) -> dict[str, Tensor]:
        return {name: value for name, value in super().full_params().items() if name != "head.bias"}


class ShardsForFull(TorchFSDP2):
    def full_params(self) -> dict[str, Tensor]:
        return dict(zip(self.parameters(), map(torch.clone, super().local_tensors()["params"]), strict=True))


class FlatForFull(TorchFSDP2):
    def full_params(self) -> dict[str, Tensor]:
        return {name: value.flatten()[:6] for name, value in super().full_params().items()}


class DTensorsForFull(TorchFSDP2):
    def full_params(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.parameters().items()}


class WrongDtype(TorchFSDP2):
    def full_params(self) -> dict[str, Tensor]:
        return {name: value.double() for name, value in super().full_params().items()}


class RequiresGrad(TorchFSDP2):
    def full_params(self) -> dict[str, Tensor]:
        return {name: value.requires_grad_() for name, value in super().full_params().items()}


class WrongDevice(TorchFSDP2):
    def full_params(self) -> dict[str, Tensor]:
        return {name: value.to("meta") for name, value in super().full_params().items()}


class ListForDict(TorchFSDP2):
    def full_params(self) -> dict[str, Tensor]:
        return list(super().full_params().items())  # type: ignore[return-value]


class DiffersOnRanks(TorchFSDP2):
    def full_params(self) -> dict[str, Tensor]:
        return {name: value + dist.get_rank() for name, value in super().full_params().items()}


class LiveStorage(TorchFSDP2):
    """On a mesh of one rank the full tensor is the local one."""

    def full_params(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.parameters().items()}

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        return model


class StaleWrites(TorchFSDP2):
    def write_params(self, values: Any) -> None:
        return


class GradsOfOtherNames(TorchFSDP2):
    def full_grads(self) -> dict[str, Tensor | None]:
        return {name: grad for name, grad in super().full_grads().items() if "bias" not in name}


class LocalGradients(TorchFSDP2):
    def full_grads(self) -> dict[str, Tensor | None]:
        grads = super().full_grads()
        return {name: grad if grad is None else grad * (1 + dist.get_rank()) for name, grad in grads.items()}


class NoContextManager(TorchFSDP2):
    def microbatch(self, last: bool, *, reduced: bool = True) -> AbstractContextManager[Any]:
        return None  # type: ignore[return-value]


class IgnoresNoSync(TorchFSDP2):
    def microbatch(self, last: bool, *, reduced: bool = True) -> AbstractContextManager[Any]:
        return super().microbatch(True)


class TrainsNothing(TorchFSDP2):
    def train(self, mode: bool = True) -> None:
        pass


class PadsFullTensors(TorchFSDP2):
    """As an engine does that gathers padded shards and forgets to cut them: nothing an adapter makes up."""

    def full_params(self) -> dict[str, Tensor]:
        return {
            name: torch.cat([tensor, tensor[:1]]) if name == "body.0.weight" else tensor
            for name, tensor in super().full_params().items()
        }


class ForwardWithoutGraph(TorchFSDP2):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs).detach()


class StepStepsNothing(TorchFSDP2):
    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        self.model.zero_grad()
        return None


class StaleOptimizer(TorchFSDP2):
    """The optimizer holds the parameters from before the wrap."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        self.optimizer = optim_fn(list(model_fn().parameters()))

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        super().step(max_norm, norm_type=norm_type)
        self.model.zero_grad()
        return None


class KeepsGradients(TorchFSDP2):
    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        if self.optimizer is not None:
            self.optimizer.step()
        return None


class ReturnsNorms(TorchFSDP2):
    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        super().step(max_norm, norm_type=norm_type)
        return torch.zeros(3)


class ClonesForLocal(TorchFSDP2):
    def local_tensors(self) -> dict[str, list[Tensor]]:
        return {kind: [tensor.clone() for tensor in tensors] for kind, tensors in super().local_tensors().items()}


class FullForLocal(TorchFSDP2):
    def local_tensors(self) -> dict[str, list[Tensor]]:
        return super().local_tensors() | {"params": list(self.full_params().values())}


class NoOptimState(TorchFSDP2):
    def local_tensors(self) -> dict[str, list[Tensor]]:
        return {"params": super().local_tensors()["params"]}


class DTensorsForLocal(TorchFSDP2):
    def local_tensors(self) -> dict[str, list[Tensor]]:
        return super().local_tensors() | {"params": [p.detach() for p in self.parameters().values()]}


class RaisesInSetup(TorchFSDP2):
    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        raise KeyError("no such unit")


class RaisesOnOneRank(TorchFSDP2):
    def full_grads(self) -> dict[str, Tensor | None]:
        grads = super().full_grads()
        if dist.get_rank() == 1:
            raise ValueError("rank 1 is different")
        return grads


class ReturnsNothingFromWrap(TorchFSDP2):
    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        super().wrap(model, plan)
        return None  # type: ignore[return-value]


class DiesInStep(TorchFSDP2):
    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        import os
        import signal

        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(max_norm, norm_type=norm_type)


class CudaOnly(TorchFSDP2):
    declines: ClassVar[frozenset[str]] = frozenset({"cpu_compute"})
