"""Sends tensors of one rank to the others in a few collectives: parameters and buffers at the start, later buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_conformance.engine.bucketing.bucket_assignment import MIB, bucket_assignment
from fsdp_conformance.engine.mesh.collectives import mesh_broadcast

#: Bytes that are sent at once, which is also the extra memory that this takes (at most that of the tensors).
BROADCAST_NBYTES = 250 * MIB


def broadcast(tensors: Sequence[Tensor], group: ProcessGroup, *, source: int = 0) -> None:
    """
    Overwrite tensors, in place, with those of group rank `source`. Collective; sends nothing in a group of one.

    They have the same shapes, dtypes and order on every rank, and may be on several devices and of any dtype.
    """
    tensors = [tensor.detach() for tensor in tensors if tensor.numel()]
    if group.size() == 1 or not tensors:
        return
    receives = group.rank() != source
    with torch.no_grad():
        for indices in bucket_assignment(tensors, [BROADCAST_NBYTES]).buckets:
            members = [tensors[index] for index in indices]
            if len(members) == 1:
                mesh_broadcast(members[0], group, source=source).wait()
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in members])
            mesh_broadcast(flat, group, source=source).wait()
            if receives:
                parts = torch.split(flat, [tensor.numel() for tensor in members])
                for tensor, part in zip(members, parts, strict=True):
                    tensor.copy_(part.view(tensor.shape))
