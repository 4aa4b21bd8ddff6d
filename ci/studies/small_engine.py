"""
A sharded engine in a few functions, and a class for each defect that it can have.

Each unit is one flat tensor, cut into equal parts over the ranks, so that a part may begin and end inside a parameter.
Forward gathers every unit, backward reduce-scatters, and the optimizer steps views of the local part. It shares no code
with torch's FSDP or with the reference engine: what is said about its defects was not made for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_conformance.adapters.base import Adapter, ModelFn, OptimFn
from fsdp_conformance.adapters.sharded import state_tensors
from fsdp_conformance.plan import Plan


@dataclass(eq=False)
class Unit:
    """The parameters of a unit, as one flat tensor of which this rank keeps a part."""

    fqn: str
    names: list[str]
    params: list[nn.Parameter]
    shard: Tensor
    views: dict[str, nn.Parameter]
    """The local part of each parameter that has one, in `shard`."""
    grad: Tensor | None = None
    """The reduced gradient, like `shard`."""
    used: set[str] = field(default_factory=set)
    """Parameters that have a gradient on some rank."""

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters in a flat tensor."""
        sizes = [p.numel() for p in self.params]
        parts = flat[: sum(sizes)].split(sizes)
        return {name: part.view(p.shape) for name, part, p in zip(self.names, parts, self.params, strict=True)}


class SmallEngine(Adapter):
    """Correct. Methods below `Seams` are what a defect overrides."""

    name = "small-engine"
    capabilities: ClassVar[frozenset[str]] = frozenset(
        {"cpu_compute", "init_before", "init_never", "clip_grad_norm", "no_sync", "zero1", "unused_divergent"}
    )

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        self.refuse_undeclared(plan)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.model = model_fn()
        self.num_steps = self.num_micro = 0
        self._reduced = True
        parameters = dict(self.model.named_parameters())
        groups: dict[str, list[str]] = {}
        for name in parameters:
            inside = [unit for unit in plan.units if any(name.startswith(f"{part}.") for part in unit.split("+"))]
            groups.setdefault(max(inside, key=len, default=""), []).append(name)
        self.units = [self._unit(fqn, names, parameters) for fqn, names in groups.items()]
        views = [view for unit in self.units for view in unit.views.values()]
        self.optimizer = optim_fn(views or [nn.Parameter(torch.zeros(1))])
        self.began()

    @contextmanager
    def microbatch(self, last: bool, *, reduced: bool = True) -> Iterator[None]:
        self._reduced, self.is_last = reduced, last
        yield
        self.num_micro = 0 if last else self.num_micro + 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args = self.inputs(args)
        with torch.no_grad():
            for unit in self.units:
                for parameter, value in zip(unit.params, unit.split(self.gathered(unit)).values(), strict=True):
                    parameter.copy_(value)
        return self.model(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        torch.autograd.backward(loss, retain_graph=retain_graph)
        if self._reduced:
            with torch.no_grad():
                for unit in self.units:
                    self._reduce(unit)

    @torch.no_grad()
    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        for unit in self.units:
            for name, view in unit.views.items():
                view.grad = None
                if name in unit.used and unit.grad is not None:
                    view.grad = unit.grad[self._inside(view, unit)].clone()
        norm = None if max_norm is None else self.norm()
        if norm is not None and max_norm is not None:
            self.scale((max_norm / (norm + 1e-6)).clamp(max=1.0))
        self.update()
        self.num_steps += 1
        self.clear()
        return norm

    def full_params(self) -> dict[str, Tensor]:
        values = {name: value for unit in self.units for name, value in unit.split(self._gather(unit.shard)).items()}
        return {name: values[name].clone() for name, _ in self.model.named_parameters()}

    def full_grads(self) -> dict[str, Tensor | None]:
        grads: dict[str, Tensor | None] = {}
        for unit in self.units:
            whole = unit.split(self._gather(torch.zeros_like(unit.shard) if unit.grad is None else unit.grad))
            grads |= {name: value.clone() if name in unit.used else None for name, value in whole.items()}
        return {name: grads[name] for name, _ in self.model.named_parameters()}

    def full_buffers(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.named_buffers()}

    def local_tensors(self) -> dict[str, list[Tensor]]:
        return {"params": [unit.shard for unit in self.units], "optim": list(state_tensors(self.optimizer))}

    def module(self) -> nn.Module:
        return self.model

    # Seams.

    def began(self) -> None:
        """Called at the end of setup."""

    def inputs(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments that forward gets."""
        return args

    def gathered(self, unit: Unit) -> Tensor:
        """The flat parameters that forward computes with."""
        return self._gather(unit.shard)

    def local(self, unit: Unit, flat: Tensor) -> Tensor:
        """This rank's flat gradient, with padding, before it is reduced."""
        return flat

    def reduce(self, unit: Unit, flat: Tensor) -> Tensor:
        """This rank's part of the mean."""
        shard = torch.empty_like(unit.shard)
        dist.reduce_scatter_tensor(shard, flat)
        return shard / self.world_size

    def accumulate(self, unit: Unit, before: Tensor | None, shard: Tensor) -> Tensor:
        """The accumulated gradient of the micro-batches so far and of this one."""
        return shard if before is None else before + shard

    def norm(self) -> Tensor:
        """The total norm of the gradients."""
        total = sum((view.grad.square().sum() for view in self.views() if view.grad is not None), torch.zeros(()))
        dist.all_reduce(total)
        return total.sqrt()

    def scale(self, factor: Tensor) -> None:
        """Clip."""
        for view in self.views():
            if view.grad is not None:
                view.grad.mul_(factor)

    def update(self) -> None:
        """The optimizer step."""
        self.optimizer.step()

    def clear(self) -> None:
        """Drop the gradients."""
        for unit in self.units:
            unit.grad = None
            unit.used.clear()

    def agreed(self, used: Tensor) -> Tensor:
        """Which parameters any rank used, from which of them this one did."""
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        return used

    # Parts.

    def views(self) -> Iterator[nn.Parameter]:
        """The parameters that the optimizer updates."""
        for unit in self.units:
            yield from unit.views.values()

    def own(self, unit: Unit, flat: Tensor) -> Tensor:
        """This rank's part of a flat tensor."""
        return flat.view(self.world_size, -1)[self.rank].clone()

    def _unit(self, fqn: str, names: list[str], parameters: Mapping[str, nn.Parameter]) -> Unit:
        params = [parameters[name] for name in names]
        flat = torch.cat([p.detach().flatten() for p in params])
        rows = -(-flat.numel() // self.world_size)
        flat = torch.cat([flat, flat.new_zeros(rows * self.world_size - flat.numel())])
        shard = flat.view(self.world_size, rows)[self.rank].clone()
        views, offset = {}, -rows * self.rank
        for name, parameter in zip(names, params, strict=True):
            begin, end = max(offset, 0), min(offset + parameter.numel(), rows)
            if begin < end:
                views[name] = nn.Parameter(shard[begin:end])
            offset += parameter.numel()
        return Unit(fqn=fqn, names=names, params=params, shard=shard, views=views)

    def _inside(self, view: nn.Parameter, unit: Unit) -> slice:
        begin = view.storage_offset() - unit.shard.storage_offset()
        return slice(begin, begin + view.numel())

    def _gather(self, shard: Tensor) -> Tensor:
        flat = shard.new_empty(self.world_size * shard.numel())
        dist.all_gather_into_tensor(flat, shard.contiguous())
        return flat

    def _reduce(self, unit: Unit) -> None:
        used = self.agreed(torch.tensor([p.grad is not None for p in unit.params], dtype=torch.int32))
        unit.used |= {name for name, flag in zip(unit.names, used.tolist(), strict=True) if flag}
        grads = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in unit.params]
        padding = self.world_size * unit.shard.numel() - sum(grad.numel() for grad in grads)
        flat = self.local(unit, torch.cat([*grads, unit.shard.new_zeros(padding)]))
        for parameter in unit.params:
            parameter.grad = None
        unit.grad = self.accumulate(unit, unit.grad, self.reduce(unit, flat))
