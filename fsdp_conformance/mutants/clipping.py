"""Wrong norms of the gradients, wrong clipping, and loss scaling that ranks do not agree on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_conformance.adapters.sharded import local_part
from fsdp_conformance.adapters.vendors.torch_ddp import TorchDDP
from fsdp_conformance.adapters.vendors.torch_fsdp1 import TorchFSDP1
from fsdp_conformance.engine.fully_sharded.gradient_scaler import ShardedGradScaler
from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.engines import SeamReference
from fsdp_conformance.mutants.mutant import known_wrong


def norm_of(tensors: list[Tensor], norm_type: float) -> Tensor:
    """The norm of the elements of some tensors, which may be empty."""
    filled = [tensor.detach().float().flatten() for tensor in tensors if tensor.numel()]
    norm: Tensor = torch.linalg.vector_norm(torch.cat(filled) if filled else torch.zeros(1), norm_type)
    return norm


def added(part: Tensor, norm_type: float, *, copies: int = 1) -> Tensor:
    """The norm of all ranks' parts, of which each is on `copies` ranks."""
    if norm_type == math.inf:
        dist.all_reduce(part, op=dist.ReduceOp.MAX)
        return part
    total = part**norm_type
    dist.all_reduce(total)
    return (total / copies) ** (1.0 / norm_type)


class OwnNorm(SeamFSDP2):
    """FSDP2 with a norm that is computed by hand; correct by itself."""

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        norm = self.norm(list(self.local_grads().values()), norm_type)
        self.scale(self.coefficient(max_norm, norm))
        return norm

    def norm(self, parts: list[Tensor], norm_type: float) -> Tensor:
        """The norm of all gradients, from this rank's parts. Collective."""
        return added(norm_of(parts, norm_type), norm_type, copies=self.plan.replicas)

    def coefficient(self, max_norm: float, norm: Tensor) -> Tensor:
        """The factor by which gradients are multiplied."""
        return torch.clamp(max_norm / (norm + 1e-6), max=1.0)

    def scale(self, coefficient: Tensor) -> None:
        """Multiply the gradients."""
        for part in self.local_grads().values():
            part.mul_(coefficient)


@known_wrong("R101")
class ClipsByItsOwnShard(OwnNorm):
    """Each rank clips by the norm of its own shards."""

    def norm(self, parts: list[Tensor], norm_type: float) -> Tensor:
        return norm_of(parts, norm_type)


@known_wrong("R102")
class ReportsItsOwnNorm(OwnNorm):
    """Gradients are clipped by the total norm, but each rank returns that of its own shards."""

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        own = norm_of(list(self.local_grads().values()), norm_type)
        super().clip(max_norm, norm_type)
        return own


@known_wrong("R101")
class AddsNormsOfRanks(OwnNorm):
    """The total norm is the sum of the ranks' norms, instead of the root of the sum of their squares."""

    def norm(self, parts: list[Tensor], norm_type: float) -> Tensor:
        return added(norm_of(parts, norm_type), 1.0)


@known_wrong("R101")
class AddsLargestElements(OwnNorm):
    """The largest elements of the ranks are added, instead of taking the largest of them."""

    def norm(self, parts: list[Tensor], norm_type: float) -> Tensor:
        return added(norm_of(parts, norm_type), 1.0 if norm_type == math.inf else norm_type)


@known_wrong("R101")
class NormWithoutOneRank(OwnNorm):
    """The shards of the last rank do not count."""

    def norm(self, parts: list[Tensor], norm_type: float) -> Tensor:
        return super().norm([] if self.rank == self.world_size - 1 else parts, norm_type)


@known_wrong("R101")
class CountsReplicas(OwnNorm):
    """Under hybrid sharding, every replica counts."""

    def norm(self, parts: list[Tensor], norm_type: float) -> Tensor:
        return added(norm_of(parts, norm_type), norm_type)


@known_wrong("R101")
class CountsPadding(OwnNorm):
    """The padding of uneven shards counts, with what was in it before."""

    def norm(self, parts: list[Tensor], norm_type: float) -> Tensor:
        padded = []
        for parameter in self.sharded().values():
            rows, row = self.rows_per_rank(parameter), parameter[:1].numel() if parameter.dim() else 1
            missing = rows * max(row, 1) - local_part(parameter).numel()
            padded.append(torch.full((max(missing, 0),), 1e3))
        return super().norm([*parts, *padded], norm_type)


@known_wrong("R101")
class ClipsTwice(OwnNorm):
    """Gradients are multiplied by the coefficient twice."""

    def scale(self, coefficient: Tensor) -> None:
        super().scale(coefficient)
        super().scale(coefficient)


@known_wrong("R101")
class ScalesUp(OwnNorm):
    """Gradients below the maximum are scaled up, and those above it are not scaled down."""

    def coefficient(self, max_norm: float, norm: Tensor) -> Tensor:
        return torch.clamp(max_norm / (norm + 1e-6), min=1.0, max=2.0)


@known_wrong("R101")
class NormalisesAlways(OwnNorm):
    """Gradients are always scaled to the maximum."""

    def coefficient(self, max_norm: float, norm: Tensor) -> Tensor:
        return max_norm / (norm + 1e-6)


@known_wrong("R101")
class AddsEpsilonOnEveryRank(OwnNorm):
    """Every rank adds an epsilon to the norm."""

    def coefficient(self, max_norm: float, norm: Tensor) -> Tensor:
        return torch.clamp(max_norm / (norm + 1e-6 * self.world_size), max=1.0)


@known_wrong("R102")
class NormTensorByTensor(SeamFSDP2):
    """The norm of each parameter is reduced by itself."""

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        for part in self.local_grads().values():
            added(norm_of([part], norm_type), norm_type)
        return super().clip(max_norm, norm_type)


@known_wrong("R103", "R101")
class NormForgetsLowPrecision(OwnNorm):
    """Only gradients in float32 count."""

    def norm(self, parts: list[Tensor], norm_type: float) -> Tensor:
        return super().norm([part for part in parts if part.dtype is torch.float32], norm_type)


@known_wrong("R103")
class NormOfOldGradients(OwnNorm):
    """Without gradients, the norm of the step before is returned."""

    _before: ClassVar[float] = 1.0

    def norm(self, parts: list[Tensor], norm_type: float) -> Tensor:
        return super().norm(parts, norm_type) if parts else torch.tensor(self._before)


@known_wrong("R103", name="norm-of-nothing-is-nan")
class NormOfNothingIsNaN(OwnNorm):
    """Without gradients, the norm is the mean of nothing."""

    def norm(self, parts: list[Tensor], norm_type: float) -> Tensor:
        return super().norm(parts, norm_type) if parts else torch.zeros(0).mean()


class _Mixed(OwnNorm):
    """Sharded and whole parameters count separately."""

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        sharded = self.sharded()
        grads = self.local_grads()
        parts = [grad for name, grad in grads.items() if name in sharded]
        whole = [grad for name, grad in grads.items() if name not in sharded]
        total = self.total(added(norm_of(parts, norm_type), norm_type), norm_of(whole, norm_type), norm_type)
        self.scale(self.coefficient(max_norm, total))
        return total

    def total(self, sharded: Tensor, whole: Tensor, norm_type: float) -> Tensor:
        """The norm of both."""
        norm: Tensor = torch.linalg.vector_norm(torch.stack([sharded, whole]), norm_type)
        return norm


@known_wrong("R103", "R101")
class NormForgetsWholeParameters(_Mixed):
    """Only sharded parameters count."""

    def total(self, sharded: Tensor, whole: Tensor, norm_type: float) -> Tensor:
        return sharded


@known_wrong("R103", "R101")
class CountsWholeParametersPerRank(_Mixed):
    """Parameters that are whole on every rank count once for each rank."""

    def total(self, sharded: Tensor, whole: Tensor, norm_type: float) -> Tensor:
        return super().total(sharded, added(whole, norm_type), norm_type)


# --- DDP --------------------------------------------------------------------------------------------------------------


@known_wrong("R101", name="ddp-counts-every-rank")
class DDPCountsEveryRank(TorchDDP):
    """The norm is reduced over the ranks, although every rank has all gradients."""

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        total = added(norm_of(grads, norm_type), norm_type)
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, total)
        return total


@known_wrong("R101", name="ddp-clips-on-one-rank")
class DDPClipsOnOneRank(TorchDDP):
    """Only the first rank scales its gradients."""

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        return super().clip(max_norm if dist.get_rank() == 0 else math.inf, norm_type)


@known_wrong("R101", name="ddp-normalises-always")
class DDPNormalisesAlways(TorchDDP):
    """Gradients are always scaled to the maximum."""

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        norm = super().clip(math.inf, norm_type)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad *= max_norm / norm
        return norm


# --- FSDP1 ------------------------------------------------------------------------------------------------------------


@known_wrong("R101", name="fsdp1-counts-ties-twice")
class FSDP1CountsTiesTwice(TorchFSDP1):
    """A parameter counts once for each of its names."""

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        grads = {name: self.parameters()[name].grad for name in self.names.parameters}
        twice = [grad for name, grad in grads.items() if grad is not None and self.names.is_tied(name)]
        once = [grad for grad in grads.values() if grad is not None]
        scaled = twice if norm_type != math.inf else [2 * grad for grad in twice]
        total = added(norm_of([*once, *scaled], norm_type), norm_type)
        for grad in once:
            grad.mul_(torch.clamp(max_norm / (total + 1e-6), max=1.0))
        return total


@known_wrong("R103", "R101", name="fsdp1-forgets-ignored")
class FSDP1ForgetsIgnored(TorchFSDP1):
    """Ignored parameters neither count nor are clipped."""

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        ignored = {
            name: parameter
            for name, parameter in self.parameters().items()
            if any(name.startswith(f"{module}.") for module in self.plan.ignored)
        }
        grads = {name: parameter.grad for name, parameter in ignored.items()}
        for parameter in ignored.values():
            parameter.grad = None
        norm = super().clip(max_norm, norm_type)
        for name, parameter in ignored.items():
            parameter.grad = grads[name]
        return norm


def _clips_below(unit: nn.Module, max_norm: float) -> None:
    torch.nn.utils.clip_grad_norm_(unit.parameters(), max_norm)


@known_wrong("R104", shows=("refusal", "finding"), name="fsdp1-clips-units")
class FSDP1ClipsUnits(TorchFSDP1):
    """A unit inside the root clips its own gradients."""

    def clip_unit(self, fqn: str, max_norm: float) -> None:
        _clips_below(self._wrapper(fqn), max_norm)


# --- the reference engine ---------------------------------------------------------------------------------------------


@known_wrong("R104", shows=("refusal", "finding"))
class ReferenceClipsUnits(SeamReference):
    """A unit inside the root clips its own gradients."""

    def clip_unit(self, fqn: str, max_norm: float) -> None:
        _clips_below(self._unit(fqn), max_norm)


class _ReferenceNorm(SeamReference):
    """The reference engine with a norm that is computed by hand."""

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        grads = {name: each.grad for name, each in self.parameters().items() if each.grad is not None}
        total = self.total(grads, norm_type)
        for grad in grads.values():
            grad.mul_(torch.clamp(max_norm / (total + 1e-6), max=1.0))
        return total

    def total(self, grads: Mapping[str, Tensor], norm_type: float) -> Tensor:
        """The norm, from this rank's parts of the gradients."""
        return added(norm_of(list(grads.values()), norm_type), norm_type)

    def is_local(self, name: str) -> bool:
        """True if a parameter belongs to this rank alone."""
        return any(name.startswith(f"{unit}.") for unit in self.plan.local_units)


@known_wrong("R101")
class ReferenceNormOfOneUnit(_ReferenceNorm):
    """The norm is that of one unit."""

    def total(self, grads: Mapping[str, Tensor], norm_type: float) -> Tensor:
        unit = self.plan.units[0]
        return super().total({name: grad for name, grad in grads.items() if name.startswith(unit)}, norm_type)


@known_wrong("R103", "R101")
class ReferenceAveragesLargestElements(_ReferenceNorm):
    """The largest elements of the ranks are averaged."""

    def total(self, grads: Mapping[str, Tensor], norm_type: float) -> Tensor:
        part = norm_of(list(grads.values()), norm_type)
        return added(part, 1.0) / dist.get_world_size() if norm_type == math.inf else added(part, norm_type)


@known_wrong("R102", "R101")
class ReferenceNormOfOwnExperts(_ReferenceNorm):
    """The experts of other ranks do not count, so each rank has a norm of its own."""

    def total(self, grads: Mapping[str, Tensor], norm_type: float) -> Tensor:
        shared = super().total({name: grad for name, grad in grads.items() if not self.is_local(name)}, norm_type)
        own = norm_of([grad for name, grad in grads.items() if self.is_local(name)], norm_type)
        norm: Tensor = torch.linalg.vector_norm(torch.stack([shared, own]), norm_type)
        return norm


@known_wrong("R102", "R101")
class ReferenceForgetsExperts(_ReferenceNorm):
    """Experts do not count."""

    def total(self, grads: Mapping[str, Tensor], norm_type: float) -> Tensor:
        return super().total({name: grad for name, grad in grads.items() if not self.is_local(name)}, norm_type)


# --- loss scaling -----------------------------------------------------------------------------------------------------


@known_wrong("R105", name="fsdp1-scales-rank-by-rank")
class FSDP1ScalesRankByRank(TorchFSDP1):
    """Each rank looks for overflows in its own shards only: torch's GradScaler, as for DDP."""

    def make_scaler(self, **options: Any) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self.device.type, **options)


@known_wrong("R105")
class ReferenceSkipsRankByRank(SeamReference):
    """Each rank skips the steps that overflow in its own shards."""

    def make_scaler(self, **options: Any) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self.device.type, **options)


class _OwnUpdate(torch.amp.GradScaler):
    """Steps are skipped together, but each rank adapts its scale by itself."""

    def __init__(self, device: str, **options: Any) -> None:
        super().__init__(device, **options)
        self._own: Tensor | None = None

    def unscale_(self, optimizer: Optimizer) -> None:
        super().unscale_(optimizer)
        overflows: dict[torch.device, Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for flag in overflows.values():
            self._own = flag.clone()
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        for state in self._per_optimizer_states.values():
            for flag in state["found_inf_per_device"].values():
                if self._own is not None:
                    flag.copy_(self._own)
        super().update(new_scale)


@known_wrong("R105")
class ReferenceBacksOffOnOneRank(SeamReference):
    """All ranks skip a step that overflows, but only the rank that saw the overflow changes its scale."""

    def make_scaler(self, **options: Any) -> torch.amp.GradScaler:
        return _OwnUpdate(self.device.type, **options)


class _Early(ShardedGradScaler):
    _unscale_grads_ = torch.amp.GradScaler._unscale_grads_


@known_wrong("R105", "R138", shows=("finding", "hazard"), environment=("accelerator",))
class ReferenceReadsFlagsEarly(SeamReference):
    """The host reads and sets what says that gradients overflow before it has arrived there, as in torch's scaler."""

    def make_scaler(self, **options: Any) -> torch.amp.GradScaler:
        return _Early(self.device.type, **options)


class _Reckless(torch.amp.GradScaler):
    """Overflows change the scale, but nothing is skipped: what overflowed counts as zero."""

    def unscale_(self, optimizer: Optimizer) -> None:
        super().unscale_(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    part = local_part(parameter.grad)
                    part.copy_(part.nan_to_num(0.0, 0.0, 0.0))

    def _maybe_opt_step(self, optimizer: Optimizer, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)


@known_wrong("R105")
class StepsThroughOverflows(SeamFSDP2):
    """A step that overflows is taken with zeros in place of what is infinite or NaN."""

    def make_scaler(self, **options: Any) -> torch.amp.GradScaler:
        return _Reckless(self.device.type, **options)


@known_wrong("R105")
class NeverScalesBack(SeamFSDP2):
    """A step that overflows is skipped, but the scale stays as it is."""

    def make_scaler(self, **options: Any) -> torch.amp.GradScaler:
        return super().make_scaler(backoff_factor=1.0 - 2.0**-20, **options)


@known_wrong("R105", name="ddp-never-scales-up")
class DDPNeverScalesUp(TorchDDP):
    """The scale never grows again."""

    def make_scaler(self, **options: Any) -> torch.amp.GradScaler:
        return super().make_scaler(**{**options, "growth_interval": 10**6})


@known_wrong("R105")
class ClipsScaledGradients(SeamFSDP2):
    """Gradients are clipped before they are unscaled."""

    def _scaled_step(
        self, scaler: torch.amp.GradScaler, optimizer: Optimizer, max_norm: float | None, norm_type: float
    ) -> Tensor | None:
        norm = None if max_norm is None else self.clip(max_norm, norm_type)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return norm


class _Forgetful(torch.amp.GradScaler):
    """The gradient of the last parameter stays scaled."""

    def unscale_(self, optimizer: Optimizer) -> None:
        last = optimizer.param_groups[-1]["params"][-1]
        grad, last.grad = last.grad, None
        super().unscale_(optimizer)
        last.grad = grad


@known_wrong("R105")
class UnscalesAllButOne(SeamFSDP2):
    """The gradient of one parameter stays scaled."""

    def make_scaler(self, **options: Any) -> torch.amp.GradScaler:
        return _Forgetful(self.device.type, **options)


@known_wrong("R105", name="fsdp1-unscales-twice")
class FSDP1UnscalesTwice(TorchFSDP1):
    """Gradients that were unscaled for clipping are unscaled again by the step."""

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        norm = super().clip(max_norm, norm_type)
        if self.scaler is not None:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= self.scaler.get_scale()
        return norm
