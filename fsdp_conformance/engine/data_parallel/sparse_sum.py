"""
The sum of sparse tensors over ranks: sizes first, then indices and values, gathered and coalesced.

Every backend can gather, so this works wherever dense collectives do. On the wire go the ranks' own elements, padded to
the rank that has most.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from fsdp_conformance.engine.errors import GradientRefused
from fsdp_conformance.engine.flat_collectives import all_gather
from fsdp_conformance.engine.mesh.gathering import mesh_all_gather


class SparseSum:
    """
    A sum under way. Collective, in two parts: sizes when it is made, the rest in `wait`.

    `mine` is coalesced. Ranks may hold different numbers of elements, none included, but those that hold any must agree
    on the number of sparse dims.
    """

    def __init__(self, mine: Tensor, group: ProcessGroup) -> None:
        self._mine = mine
        self._group = group
        size = torch.tensor([mine.values().shape[0], mine.sparse_dim()], dtype=torch.int64).to(mine.device)
        self._sizes = size.new_empty(group.size() * 2)  # elements and sparse dims, rank by rank
        self._work: Work | None = all_gather(self._sizes, size, group)

    def wait(self) -> Tensor:
        """
        The sum, coalesced. Collective; the host waits for the sizes.

        Raises GradientRefused, on every rank, if ranks disagree on the number of sparse dims.
        """
        self.wait_for_sizes()
        sizes = self._sizes.view(-1, 2).tolist()
        counts = [count for count, _ in sizes]
        dims = {dim for count, dim in sizes if count}
        if not dims:
            return self._mine.clone()
        if len(dims) > 1:
            raise GradientRefused(
                f"sparse_dim={[dim for _, dim in sizes]} by rank, but should be equal on all ranks", where="SparseSum"
            )
        (sparse_dim,) = dims
        shape = self._mine.shape
        if counts[self._group.rank()]:
            indices, values = self._mine.indices().t(), self._mine.values()
        else:
            indices = self._mine.indices().new_empty((0, sparse_dim))
            values = self._mine.values().new_empty((0, *shape[sparse_dim:]))
        return torch.sparse_coo_tensor(
            mesh_all_gather(indices, self._group, sizes=counts).wait().t(),
            mesh_all_gather(values, self._group, sizes=counts).wait(),
            shape,
            check_invariants=False,
        ).coalesce()

    def wait_for_sizes(self) -> None:
        """Wait for what was issued when it was made."""
        if self._work is not None:
            self._work.wait()
            self._work = None
