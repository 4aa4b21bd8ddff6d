"""A process group of one rank, which several tests of the recorder need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore


@pytest.fixture
def group() -> Iterator[None]:
    """This process is the only rank of gloo's default group."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
