"""
Correct engines that do unusual things: no case that they can run may fail them.

Each is torch's FSDP2 with one part replaced by a legal alternative. A check that rejects one of them demands an
implementation, not a requirement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from fsdp_conformance.adapters.torch_fsdp2 import TorchFSDP2
from fsdp_conformance.config import Plan


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
