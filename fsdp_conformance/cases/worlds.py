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
from torch._C._distributed_c10d import PrefixStore, Store
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
        self._close_everything()
        if size == everybody:
            body()
            self._close_everything()
            return
        store: Store = PrefixStore(f"world {self._worlds_made}", distributed_c10d._get_default_store())
        self._worlds_made += 1
        self._end_world(store, "whole", everybody)
        if self.rank < size:
            self._begin_world(store, "smaller", size)
            body()
            self._close_everything()
            self._end_world(store, "smaller", size)
            store.set("the smaller world has ended", "")
        else:
            # Longer than a collective may take: a whole training goes on meanwhile.
            with self.blaming("suite"):
                store.wait(["the smaller world has ended"], self._patience)
        self._begin_world(store, "next whole", everybody)

    def shared_directory(self) -> Path:
        """A new directory that every rank sees and that goes away with the case. Collective."""
        place: list[Any] = [None]
        with self.blaming("suite"), process_group.log().phase("observe"):
            if dist.get_rank() == 0:
                place = [tempfile.mkdtemp(prefix="checkpoint-", dir=context.running().order.case.directory)]
            dist.broadcast_object_list(place)
        return Path(str(place[0]))

    def _begin_world(self, store: Store, name: str, size: int) -> None:
        """Meet the first `size` ranks in a new world."""
        with self.blaming("suite"):
            self._smaller_world = None if size == self.case.world_size else size
            dist.init_process_group(
                process_group.BACKEND,
                store=PrefixStore(name, store),
                rank=self.rank,
                world_size=size,
                timeout=timedelta(seconds=context.running().order.case.collective_timeout_s),
            )
            process_group.require_recording()
            process_group.ensure_cpu_backend(self._patience)
            self._meet(store, f"{name} begins", size)

    def _end_world(self, store: Store, name: str, size: int) -> None:
        """Leave the current world, once every rank has finished what it does there."""
        with self.blaming("suite"):
            self._meet(store, f"{name} ends", size)
            destroy_process_group()

    def _meet(self, store: Store, what: str, size: int) -> None:
        """
        Wait for the others at the store.

        A barrier would not do: its own connections are closed as soon as the first rank has left it.
        """
        if store.add(f"{what}, arrived", 1) == size:
            store.set(what, "")
        store.wait([what], self._patience)

    @property
    def _patience(self) -> timedelta:
        return timedelta(seconds=context.running().order.case.deadlines.case_s)

    def _close_everything(self) -> None:
        self.trained_references.clear()
        for adapter in list(self.subjects):
            self.drop(adapter)
