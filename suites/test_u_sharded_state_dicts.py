"""U. Sharded state dicts: this rank's part, without communication, in the storage that the model uses."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load, load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks.checkpoint import (
    addresses,
    same_state_dict,
    shares_storage,
    silent,
    storages,
    storages_of_parts,
    unmoved,
)
from fsdp_conformance.diagnosis.optimizer_steps import Moment
from fsdp_conformance.fixtures import probes, workload_by_name
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.history.collective import CollectiveRecord
from fsdp_conformance.references.plain_training import plain_training
from fsdp_conformance.workload.definition import BatchKey, Workload

STEPS = 3


class ShardedStateDicts(ConformanceTestCase):
    """State dicts that torch.distributed.checkpoint saves and loads."""

    @conformance_case(
        "R148",
        chapter="U",
        axes={"workload": ("rank-coded", "exact-tiny"), "world_size": (2, 3)},
        only=lambda values: (values["workload"] == "exact-tiny") == (values["world_size"] == 3),
        needs=("sharded_state_dict",),
        kills=("sharded-state-is-old", "sharded-state-of-another-rank"),
    )
    def test_values(self, workload: str, world_size: int) -> None:
        """
        After training, and right after a forward that leaves units unsharded, torch.distributed.checkpoint writes the
        parameters, which an unwrapped model in one process reads.
        """
        problem = workload_by_name(workload)
        with self.blaming("suite"):
            states = plain_training(problem, (world_size,) * STEPS)
        known = Moment(workload=problem, optimizer="sgd", states=states, index=STEPS, world_size=world_size)
        adapter = self.subject()
        options = {"reshard_after_forward": False} if self.declares("reshard_after_forward") else {}
        self.train(problem, self.plan(problem, **options), adapter=adapter)
        for moment in ("after training", "after a forward"):
            if moment == "after a forward":
                self._forward(adapter, problem)
            directory = self.shared_directory()
            with self.blaming("implementation"):
                self.observe("save", partial(self._save, adapter, directory))
                read = self.observe("what an unwrapped model reads", partial(self._read, problem, directory))
            where: dict[str, Any] = {"requirement": "R148", "rank": self.rank, "moment": moment}
            self.check(same_state_dict(read, known.right.model, known=known, **where))

    @conformance_case(
        "R148",
        chapter="U",
        axes={"world_size": (2, 3)},
        needs=("sharded_state_dict",),
        kills=("sharded-state-is-gathered", "sharded-state-is-copied"),
    )
    def test_neither_communicates_nor_copies(self, world_size: int) -> None:
        """It issues no collective, and its values lie in the storage that the rank holds."""
        workload = probes.rank_coded()
        adapter = self.subject()
        run = self.train(workload, adapter=adapter)
        log = process_group.log()

        def look() -> tuple[list[CollectiveRecord], set[int], dict[str, list[int]]]:
            begin = len(log.records)
            state = adapter.sharded_state_dict()
            live = [tensor for tensors in adapter.local_tensors().values() for tensor in tensors]
            return (
                log.records[begin:],
                storages(live),
                {name: storages_of_parts(value) for name, value in state.items()},
            )

        with self.blaming("implementation"):
            records, held, parts = self.observe("collectives and storage of a sharded state dict", look)
        where: dict[str, Any] = {"requirement": "R148", "rank": self.rank}
        self.check(silent(records, during="a sharded state dict", **where))
        self.check(shares_storage(parts, held, run.steps[-1].params, **where))

    @conformance_case(
        "R148",
        chapter="U",
        axes={"world_size": (2, 3)},
        needs=("sharded_state_dict",),
        kills=("sharded-load-replaces-storage", "sharded-load-does-nothing"),
    )
    def test_loads_in_place(self, world_size: int) -> None:
        """What torch.distributed.checkpoint loads into it is in the model afterwards, in the same storage."""
        workload = probes.rank_coded()
        with self.blaming("suite"):
            expected = plain_training(workload, (world_size,) * STEPS)
        directory = self.shared_directory()
        adapter = self.subject()

        def write(subject: Adapter, step: int) -> None:
            if step == 0:
                self.observe("save", partial(self._save, subject, directory))

        self.train(workload, adapter=adapter, after_step=write)

        def held() -> dict[str, list[int]]:
            return addresses({str(index): value for index, value in enumerate(adapter.local_tensors()["params"])})

        def look() -> tuple[dict[str, list[int]], dict[str, list[int]]]:
            state = adapter.sharded_state_dict()
            before = held()
            load(state, checkpoint_id=directory)
            adapter.load_sharded_state_dict(state)
            return before, held()

        with self.blaming("implementation"):
            before, after = self.observe("addresses before and after a load", look)
            params = adapter.full_params()
        self.check(unmoved(before, after, requirement="R148", rank=self.rank))
        known = Moment(workload=workload, optimizer="sgd", states=expected, index=1, world_size=world_size)
        where: dict[str, Any] = {"requirement": "R148", "rank": self.rank, "moment": "loaded"}
        self.check(same_state_dict(params, expected[1].model, known=known, **where))

    def _forward(self, adapter: Adapter, workload: Workload) -> None:
        key = BatchKey(step=STEPS, rank=self.rank, world_size=self.world_size)
        batch = self.placed(workload.batch(key))
        with self.blaming("implementation"), torch.no_grad():
            adapter.forward(*batch.args, **batch.kwargs)

    def _save(self, adapter: Adapter, directory: Path) -> None:
        save(adapter.sharded_state_dict(), checkpoint_id=directory)

    def _read(self, workload: Workload, directory: Path) -> dict[str, Any]:
        """The checkpoint in the unwrapped model's own tensors, read by this process alone."""
        state = {name: torch.full_like(value, -1.0) for name, value in workload.build(self.rank).state_dict().items()}
        if "no_dist" in inspect.signature(load).parameters:
            load(state, checkpoint_id=directory, no_dist=True)
        else:  # torch 2.6
            load_state_dict(state, FileSystemReader(directory), no_dist=True)
        return state
