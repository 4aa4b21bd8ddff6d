"""
Do all ranks of a group say the same? A digest goes around first; only where digests differ do the texts follow.

Every rank comes to the same answer, so that all raise or none does: a rank that went on alone would hang in the first
collective that its peers never issue.
"""

from __future__ import annotations

import hashlib

import torch
from torch.distributed import ProcessGroup

from fsdp_conformance.engine.mesh.gathering import mesh_all_gather


def texts_unless_equal(text: str, group: ProcessGroup, *, device: torch.device) -> list[str] | None:
    """
    The text of every rank in group order, or None if all are equal. Collective; nothing is sent in a group of one.

    `device` is one that the group can communicate from.
    """
    if group.size() == 1:
        return None
    mine = text.encode()
    digest = torch.frombuffer(bytearray(hashlib.sha256(mine).digest()), dtype=torch.uint8).to(device)
    digests = mesh_all_gather(digest, group).wait().cpu().view(group.size(), -1)
    if bool((digests == digests[0]).all()):
        return None
    lengths = mesh_all_gather(torch.tensor([len(mine)]).to(device), group).wait().tolist()
    letters = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    every = mesh_all_gather(letters, group, sizes=lengths).wait().cpu()
    return [bytes(part.tolist()).decode() for part in torch.split(every, lengths)]
