"""
Worlds inside a case: fewer ranks for a while, and a directory that all of them see.

A checkpoint that is saved by some ranks and loaded by others takes two trainings of different sizes. The ranks of the
case form a smaller world for each of them; those left over wait.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from fsdp_conformance.cases.rank import CaseRank
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.harness import context
from fsdp_conformance.harness.rank import destroy_process_group
from fsdp_conformance.harness.recording import process_group


class CaseWorlds:
    """The worlds of a case, on one rank."""

    def __init__(self, here: CaseRank, *, close_everything: Callable[[], object]) -> None:
        self._here = here
        self._close_everything = close_everything
        """Closes the adapters of the current world, and forgets its references."""
        self._worlds_made = 0

    def in_world(self, size: int, body: Callable[[], object]) -> None:
        """
        Run `body` on the first `size` ranks, which are the whole world meanwhile; the others wait. Collective.

        Adapters of the worlds before and after are closed: nothing survives the end of a world but files. Raises
        SuiteError for a size that the case does not have.
        """
        whole = self._here.case.world_size
        if not 1 <= size <= whole:
            raise SuiteError(f"a world inside this case has 1 to {whole} ranks, got {size} [{self._here.case.id}]")
        self._close_everything()
        if size == whole:
            body()
            self._close_everything()
            return
        store: Store = PrefixStore(f"world {self._worlds_made}", distributed_c10d._get_default_store())
        self._worlds_made += 1
        self._end_world(store, "whole", whole)
        if self._here.rank < size:
            self._begin_world(store, "smaller", size)
            body()
            self._close_everything()
            self._end_world(store, "smaller", size)
            store.set("the smaller world has ended", "")
        else:
            # This may take longer than a collective: the other ranks train meanwhile.
            with self._here.blaming("suite"):
                store.wait(["the smaller world has ended"], self._patience)
        self._begin_world(store, "next whole", whole)

    def shared_directory(self) -> Path:
        """A new directory that every rank sees and that goes away with the case. Collective."""
        place: list[Any] = [None]
        with self._here.blaming("suite"), process_group.log().phase("observe"):
            if dist.get_rank() == 0:
                place = [tempfile.mkdtemp(prefix="checkpoint-", dir=context.running().order.case.directory)]
            dist.broadcast_object_list(place)
        return Path(str(place[0]))

    def _begin_world(self, store: Store, name: str, size: int) -> None:
        """Meet the first `size` ranks in a new world."""
        with self._here.blaming("suite"):
            self._here.world_size = size
            dist.init_process_group(
                process_group.BACKEND,
                store=PrefixStore(name, store),
                rank=self._here.rank,
                world_size=size,
                timeout=timedelta(seconds=context.running().order.case.collective_timeout_s),
            )
            process_group.require_recording()
            process_group.ensure_cpu_backend(self._patience)
            self._meet(store, f"{name} begins", size)

    def _end_world(self, store: Store, name: str, size: int) -> None:
        """Leave the current world, once every rank has finished what it does there."""
        with self._here.blaming("suite"):
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
