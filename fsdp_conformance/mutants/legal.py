"""
Correct engines, some of which do unusual things: no case that they can run may fail them.

Each variant has one part replaced by a legal alternative. A check that rejects one of them demands an implementation,
not a requirement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from fsdp_conformance.adapters.reference import Reference
from fsdp_conformance.adapters.torch_fsdp2 import TorchFSDP2
from fsdp_conformance.config import BackwardPrefetch, Plan


class ExchangesAndAdds(TorchFSDP2):
    """
    Gradients are reduced by an all-to-all of the ranks' parts and a local sum.

    It does not promise FSDP2's numbers and volumes of collectives, which name reduce-scatters.
    """

    declines: ClassVar[frozenset[str]] = frozenset({"coll_counts", "coll_volume"})

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        wrapped = super().wrap(model, plan)
        for module in wrapped.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(_AllToAllAndSum())
        return wrapped

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            # FSDP2 leaves the root gathered, and the next forward would use it (pytorch#131965).
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return output


class _AllToAllAndSum(ReduceScatter):
    """A reduce-scatter made of an all-to-all and a sum in rank order."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Sum, or average, of row `rank` of every rank's input. Raises NotImplementedError for other operations."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(f"op must be SUM or AVG, got {op}")
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), -1), dim=0, out=output_tensor.view(-1))
        if op == dist.ReduceOp.AVG:
            output_tensor /= group.size()


class SumsThenDivides(TorchFSDP2):
    """Gradients are summed over the ranks and divided afterwards, instead of averaged by the collective."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        wrapped = super().wrap(model, plan)
        for unit in wrapped.modules():
            if isinstance(unit, FSDPModule):
                unit.set_force_sum_reduction_for_comms(True)
        return wrapped


class PrefetchesLate(Reference):
    """Where the plan leaves it open, units are gathered when they are needed, and never before."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        if plan.backward_prefetch is BackwardPrefetch.DEFAULT:
            plan = replace(plan, backward_prefetch=BackwardPrefetch.NONE)
        return super().wrap(model, plan)


#: Correct engines by name, as specs for `--implementation`.
LEGAL: dict[str, str] = {
    "torch-fsdp2": "torch-fsdp2",
    "reference": "reference",
    "reference-components": "reference-components",
    "fsdp2-exchanges-and-adds": f"{__name__}:ExchangesAndAdds",
    "fsdp2-sums-then-divides": f"{__name__}:SumsThenDivides",
    "reference-prefetches-late": f"{__name__}:PrefetchesLate",
}

#: Globs of the cases that FSDP2 fails because of defects in torch, which are reported upstream.
DEFECTS_OF_FSDP2 = (
    "R010/eval-between-backward-and-step-*",
    "R040/given-back-at-once-*",
    "R059/order-differs-between-ranks-*",
    "R119/branches-of-one-unit-*",
    "R121/units-chosen-by-rank-*",
)


def has_upstream_defect(engine: str, case: str) -> bool:
    """Whether a correct use of the engine is known to fail the case: then the case says nothing about mutants of it."""
    return "fsdp2" in engine and any(fnmatchcase(case, pattern) for pattern in DEFECTS_OF_FSDP2)
