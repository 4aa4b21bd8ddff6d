"""
Worlds inside a case: fewer ranks for a while, and a directory that all of them see.

A checkpoint that is saved by some ranks and loaded by others takes two trainings of different sizes. The ranks of the
case form a smaller world for each of them; those left over wait. A mixin of `ConformanceTestCase`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.harness import context
from fsdp_conformance.harness.rank import destroy_process_group
from fsdp_conformance.harness.recording import process_group


class CaseWorlds:
    """The worlds of a case, on one rank."""

    _smaller_world: int | None = None
    """How many ranks the current world has, if not all of the case's."""
    _worlds_made: int = 0

    if TYPE_CHECKING:
        rank: int
        subjects: list[Adapter]
        trained_references: dict[Any, Any]

        @property
        def case(self) -> Any: ...

        def drop(self, adapter: Adapter) -> None: ...

        def blaming(self, part: str) -> Any: ...

    def in_world(self, size: int, body: Callable[[], object]) -> None:
        """
        Run `body` on the first `size` ranks, which are the whole world meanwhile; the others wait. Collective.

        Adapters of the worlds before and after are closed: nothing survives the end of a world but files.
        """
        everybody = self.case.world_size
        if not 1 <= size <= everybody:
            raise SuiteError(f"a world inside this case has 1 to {everybody} ranks, got {size} [{self.case.id}]")
        store = distributed_c10d._get_default_store()
        self._worlds_made += 1
        self._close_everything()
        ended = f"the smaller world {self._worlds_made} has ended"
        if self.rank < size:
            self._begin_world(store, size, "smaller")
            body()
            self._close_everything()
            store.set(ended, "yes")
        else:
            # Longer than a collective may take: a whole training goes on meanwhile.
            with self.blaming("suite"):
                store.wait([ended], timedelta(seconds=context.running().order.case.deadlines.case_s))
        self._begin_world(store, everybody, "whole")

    def shared_directory(self) -> Path:
        """A new directory that every rank sees and that goes away with the case. Collective."""
        place: list[Any] = [None]
        with self.blaming("suite"), process_group.log().phase("observe"):
            if dist.get_rank() == 0:
                place = [tempfile.mkdtemp(prefix="checkpoint-", dir=context.running().order.case.directory)]
            dist.broadcast_object_list(place)
        return Path(str(place[0]))

    def _begin_world(self, store: Any, size: int, name: str) -> None:
        """Leave the current world, and meet the first `size` ranks in a new one."""
        with self.blaming("suite"):
            destroy_process_group()
            self._smaller_world = None if size == self.case.world_size else size
            dist.init_process_group(
                process_group.BACKEND,
                store=PrefixStore(f"{name} world {self._worlds_made}", store),
                rank=self.rank,
                world_size=size,
                timeout=timedelta(seconds=context.running().order.case.deadlines.collective_s),
            )
            process_group.require_recording()

    def _close_everything(self) -> None:
        self.trained_references.clear()
        for adapter in list(self.subjects):
            self.drop(adapter)
