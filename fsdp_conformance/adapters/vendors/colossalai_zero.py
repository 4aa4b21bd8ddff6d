"""
Colossal-AI's LowLevelZeroOptimizer: ZeRO-1 and 2 around the user's optimizer. Requires `colossalai`.

It has the training's own backward, and clips as its constructor was told to. Gemini, Colossal-AI's ZeRO-3, computes in
half precision only, so that no case in float32 can judge it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_conformance.adapters.base import CPU_ONLY, OptimFn
from fsdp_conformance.adapters.sharded import full_copy, state_tensors
from fsdp_conformance.adapters.torch_like import TorchAdapter, refuse_other_norm
from fsdp_conformance.adapters.vendors import stub_cuda
from fsdp_conformance.plan import SIMULATED, Plan


class ColossalAIZeRO(TorchAdapter):
    """Base of the two stages; each one is a subclass."""

    package: ClassVar[str] = "colossalai"
    capabilities: ClassVar[frozenset[str]] = frozenset({"init_never", "shared_params", "shared_module"})
    declines: ClassVar[frozenset[str]] = frozenset({"wrap_again", "own_clearing"})
    #: On an accelerator the user moves the model.
    declines_on: ClassVar[Mapping[str, frozenset[str]]] = {**CPU_ONLY, SIMULATED: frozenset({"init_never"})}
    cuda_names: ClassVar[bool] = True
    #: Its import takes seconds, which every rank would pay.
    preload: ClassVar[tuple[str, ...]] = ("colossalai.zero", "colossalai.accelerator")
    shims: ClassVar[tuple[str, ...]] = (
        stub_cuda.SHIM,
        "Colossal-AI's CpuAccelerator calls itself cuda, and its streams do nothing: the engine refuses the CPU",
    )
    grad_reduction_of_accumulation: ClassVar[str] = "reduced"
    stage: ClassVar[int]

    optimizer: Any
    """The engine, with torch's optimizer in `optim`; None for a model without parameters."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        stub_cuda.install(plan, "Colossal-AI")
        _use_cuda(pretended=plan.device == "cpu")
        return model

    def make_optimizer(self, optim_fn: OptimFn) -> Optimizer:
        from colossalai.zero import LowLevelZeroOptimizer

        engine: Optimizer = LowLevelZeroOptimizer(
            super().make_optimizer(optim_fn),
            partition_grad=self.stage == 2,
            clip_grad_norm=self.plan.max_norm or 0.0,
        )
        return engine

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        if self.optimizer is None:
            super().backward(loss, retain_graph=retain_graph)
        else:
            self.optimizer.backward(loss, retain_graph=retain_graph)

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        refuse_other_norm(self.plan, max_norm)
        super().step()
        return None if max_norm is None else torch.tensor(self.optimizer.get_grad_norm())

    def discard_gradients(self) -> None:
        super().discard_gradients()
        if self.optimizer is not None:
            # What was reduced is the engine's, and no longer in `.grad`.
            self.optimizer.zero_grad()

    def full_grads(self) -> dict[str, Tensor | None]:
        grads = {name: self.optimizer.get_param_grad(parameter) for name, parameter in self.parameters().items()}
        return {name: None if grad is None else full_copy(grad) for name, grad in grads.items()}

    def full_optim_state(self) -> dict[str, dict[str, Tensor]]:
        names = {id(parameter): name for name, parameter in self.parameters().items()}
        masters = [master for group in self.optimizer.param_groups for master in group["params"]]
        state = self.optimizer.state_dict()["state"]
        return {
            names[id(self.optimizer.master_to_working_param[id(master)])]: {
                key: full_copy(value) for key, value in state[index].items() if isinstance(value, Tensor)
            }
            for index, master in enumerate(masters)
            if index in state
        }

    def write_params(self, values: Mapping[str, Tensor]) -> None:
        super().write_params(values)
        # The next step starts from the optimizer's own copies.
        self.optimizer.update_master_params(self.model)

    def local_tensors(self) -> dict[str, list[Tensor]]:
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        return {
            "params": [parameter.detach() for parameter in self.parameters().values()],
            "master": [master.detach() for group in groups for master in group["params"]],
            "optim": list(state_tensors(self.optimizer.optim)) if self.optimizer is not None else [],
        }


class ColossalAIZeRO1(ColossalAIZeRO):
    """Stage 1: the optimizer state is sharded."""

    name: ClassVar[str] = "colossalai-zero1"
    capabilities: ClassVar[frozenset[str]] = frozenset({"zero1"})
    stage: ClassVar[int] = 1

    def no_sync(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.optimizer.no_sync()
        return context


class ColossalAIZeRO2(ColossalAIZeRO):
    """Stage 2: gradients and optimizer state are sharded."""

    name: ClassVar[str] = "colossalai-zero2"
    capabilities: ClassVar[frozenset[str]] = frozenset({"zero2"})
    stage: ClassVar[int] = 2


def _use_cuda(*, pretended: bool) -> None:
    """Let Colossal-AI compute on CUDA, or on the CPU, which it is to take for an accelerator that has streams."""
    from colossalai.accelerator import set_accelerator
    from colossalai.accelerator.cpu_accelerator import CpuAccelerator

    if not pretended:
        # It chose when it was imported, which may have been in the warm process.
        set_accelerator("cuda")
        return

    class Pretended(CpuAccelerator):  # type: ignore[misc]
        Stream, Event = stub_cuda.Stream, stub_cuda.Event

        def __init__(self) -> None:
            super().__init__()
            self._name = "cuda"

        def current_stream(self, device: Any = None) -> stub_cuda.Stream:
            return stub_cuda.Stream()

        def stream(self, stream: object) -> AbstractContextManager[None]:
            return nullcontext()

        def synchronize(self, device: Any = None) -> None: ...

    set_accelerator(Pretended())
