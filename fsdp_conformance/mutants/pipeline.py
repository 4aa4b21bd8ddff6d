"""Wrong beside pipelines: gradients, norms and state dicts that mix up stages and the ranks of a stage."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fsdp_conformance.adapters.sharded import state_tensors
from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.engines import SeamReference
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import Plan


@known_wrong("R154")
class AveragesOverThePipeline(SeamFSDP2):
    """Gradients are averaged over all ranks of the pipeline, although other stages have other parameters."""

    _last = False
    _sent: tuple[Work, ...] = ()

    @contextmanager
    def microbatch(self, last: bool, *, reduced: bool = True) -> Iterator[None]:
        self._last = last
        with super().microbatch(last, reduced=reduced):
            yield

    def after_backward(self) -> None:
        if self.plan.stages and self._last:
            # Not waited for here: the stage before this one computes its gradients from what this one sends next.
            group = self.mesh.get_group("stage")
            works = [dist.all_reduce(grad, group=group, async_op=True) for grad in self.local_grads().values()]
            self._sent = tuple(cast(Work, work) for work in works)

    def full_grads(self) -> dict[str, Tensor | None]:
        self._finish()
        return super().full_grads()

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        self._finish()
        return super().step(max_norm, norm_type=norm_type)

    def _finish(self) -> None:
        for work in self._sent:
            work.wait()
        if self._sent:
            for grad in self.local_grads().values():
                grad.div_(len(self.plan.stages))
        self._sent = ()


@known_wrong("R154")
class ReducesTheFirstMicroBatchOnly(SeamFSDP2):
    """In a pipeline gradients are reduced after a step's first backward; those of later ones wait for the next step."""

    _backwards = 0

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        if self.plan.stages:
            cast(FSDPModule, self.model).set_requires_gradient_sync(self._backwards == 0)
        self._backwards += 1
        super().backward(loss, retain_graph=retain_graph)

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        self._backwards = 0
        return super().step(max_norm, norm_type=norm_type)


@known_wrong("R154")
class StageOnEachRankAlone(SeamFSDP2):
    """Each rank of a pipeline keeps all of its stage for itself, and nothing is averaged over the stage's ranks."""

    def _mesh(self, plan: Plan) -> DeviceMesh:
        return self._own_mesh() if plan.stages else super()._mesh(plan)


@known_wrong("R154")
class NormOfTheOwnStage(SeamFSDP2):
    """Gradients are clipped by the norm of the rank's own stage."""

    def norm_of_stages(self, own: Tensor, norm_type: float) -> Tensor:
        return own


@known_wrong("R154")
class NormOfAllRanksOfThePipeline(SeamReference):
    """The norms of the stages are added over all ranks, so that each stage counts once for every one of its ranks."""

    def norm_of_stages(self, own: Tensor, norm_type: float) -> Tensor:
        if norm_type == math.inf:
            return super().norm_of_stages(own, norm_type)
        total = own**norm_type
        dist.all_reduce(total)
        norm: Tensor = total ** (1.0 / norm_type)
        return norm


@known_wrong("R154")
class NamesByPlaceInTheStage(SeamFSDP2):
    """State dicts of a pipeline name what a stage has as if it were the first one."""

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        state = super().full_state_dict(rank0_only=rank0_only)
        if not self.plan.stages:
            return state
        own, first = self.plan.stages[self.mesh.get_local_rank("stage")], self.plan.stages[0]
        return {f"{first}{name.removeprefix(own)}": value for name, value in state.items()}


@known_wrong("R154")
class StateDictOfTheFirstStage(SeamReference):
    """A full state dict on the first rank alone is that of the first stage: rank 0 is the only rank that keeps it."""

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        state = super().full_state_dict(rank0_only=rank0_only)
        return {} if rank0_only and dist.get_rank() else state


@known_wrong("R154")
class LoadsTheOptimizerOfTheFirstStage(SeamFSDP2):
    """From a checkpoint of a pipeline, the optimizer of every stage loads the state of the first one's parameters."""

    def load_checkpoint(self, directory: Path) -> None:
        super().load_checkpoint(directory)
        if self.plan.stages and self.optimizer is not None:
            group = self.mesh.get_group("stage")
            for state in state_tensors(self.optimizer):
                dist.broadcast(state, dist.get_global_rank(group, 0), group=group)
