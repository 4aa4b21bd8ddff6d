"""
Checks that all ranks make the same process groups, in one order.

`torch.distributed.new_group` must be called by every rank of the default group, members or not (its documentation).
torch does not compare the calls: groups are numbered on each rank, so ranks that leave one out meet in another group's
store, hang, or exchange data with the wrong ranks. Only if each rank makes a group of itself does nothing happen.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fsdp_conformance.simulator.checker.labels import caller_of_backward
from fsdp_conformance.simulator.collectives.agreement import Agreement, place_of
from fsdp_conformance.simulator.collectives.calls import Call, Channel, group_of
from fsdp_conformance.simulator.replacements import Replacements


def compare_new_groups(agreement: Callable[[], Agreement | None], replacements: Replacements) -> None:
    """Compare every call of `new_group` in this process with those of the other ranks, until that is undone."""
    original = distributed_c10d.new_group
    signature, process = inspect.signature(original), os.getpid()

    @functools.wraps(original)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        comparing = agreement()
        if comparing is not None and os.getpid() == process and dist.is_initialized():
            arguments = signature.bind(*args, **kwargs).arguments
            # With this option only the members call it.
            if not arguments.get("use_local_synchronization"):
                comparing.check(_described(arguments.get("ranks")))
        return original(*args, **kwargs)

    for module in (dist, distributed_c10d):
        replacements.set(module, new_group=new_group)


def _described(ranks: Any) -> Call:
    world = tuple(range(dist.get_world_size()))
    members = world if ranks is None else tuple(sorted(map(int, ranks)))
    words = group_of(members)
    return Call(
        # Not a communicator: its calls come in one order, and in none with the collectives.
        channel=Channel(group="new_group", ranks=world, device="cpu"),
        title="the default group",
        op=words,
        words=words,
        place=place_of(caller_of_backward),
    )
