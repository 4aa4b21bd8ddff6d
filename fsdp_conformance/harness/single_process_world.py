"""A world in which only this process exists: collectives return at once and move nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg


@contextmanager
def imaginary_world(world_size: int) -> Iterator[None]:
    """
    Make this process rank 0 of `world_size` ranks, to see which calls a program makes.

    Values that come out of collectives mean nothing.
    """
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
