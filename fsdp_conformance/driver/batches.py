"""The inputs of a training: on an accelerator they are placed before it begins."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdp_conformance.adapters.structures import map_tensors, moved
from fsdp_conformance.driver.task import Task
from fsdp_conformance.driver.watch import Watch
from fsdp_conformance.harness import context
from fsdp_conformance.harness.accounting import Part
from fsdp_conformance.workload.definition import Batch, BatchKey
from fsdp_conformance.workload.events import RUNS_A_FORWARD


class Batches:
    """The batches of one rank."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._device = torch.device("cpu") if task.conditions.inputs_on_cpu else task.device
        self._waiting: dict[tuple[int, int], list[Batch]] = {}
        self._spent: list[Batch] = []

    def place(self, watch: Watch) -> None:
        """Put the whole run's inputs on the device in advance: copying pageable memory makes the host wait."""
        regime = self._task.regime
        with context.working(Part.SUITE), watch.suspended():
            for step in range(self._task.conditions.first_step, regime.steps):
                for micro in range(regime.micro_batches):
                    # A separate batch for each use, as on the CPU: a model may write into its inputs.
                    uses = 1 + sum(
                        event.micro == micro and event.action in RUNS_A_FORWARD for event in regime.in_step(step)
                    )
                    uses += sum(micro < begun for _, begun in regime.attempts(step))
                    self._waiting[step, micro] = [self._new(step, micro) for _ in range(uses)]

    def batch(self, step: int, micro: int) -> Batch:
        """A batch for one use."""
        waiting = self._waiting.get((step, micro))
        if not waiting:
            return self._new(step, micro)
        # Held until the end of the run, so that the loop holds the same bytes at every mark.
        self._spent.append(waiting.pop())
        return self._spent[-1]

    def _new(self, step: int, micro: int) -> Batch:
        """A batch with its inputs on the run's input device, and its target where the loss is computed."""
        task = self._task
        batch = task.workload.batch(BatchKey(step=step, micro=micro, rank=task.world.rank, world_size=task.world.size))
        return Batch(
            args=self._placed(batch.args),
            kwargs=self._placed(batch.kwargs),
            target=moved(batch.target, task.device),
        )

    def _placed(self, value: Any) -> Any:
        """The inputs on their device. One that requires a gradient is a new leaf, with a gradient of this use alone."""

        def place(tensor: Tensor) -> Tensor:
            placed = tensor.detach().to(self._device)
            return placed.requires_grad_() if tensor.requires_grad else placed

        return map_tensors(value, place)
