"""
Records, on the simulated accelerator, what each collective and each unit's computation waits for.

    recorder = OverlapRecorder(device)
    with recorder:
        train(...)        # calls `recorder.compute()` in the middle of a unit's computation
    recorder.work

It changes nothing: it reads the clocks that the simulator's checker keeps of each stream and of the host.
"""

from __future__ import annotations

import itertools
from types import TracebackType
from typing import Self

import torch
from torch.distributed import ProcessGroup, Work

from fsdp_conformance.harness.context import log
from fsdp_conformance.harness.recording.collective_log import CollectiveObserver
from fsdp_conformance.history.collective import CollectiveRecord
from fsdp_conformance.history.overlap import Communicated, Computed, DeviceWork


class OverlapRecorder(CollectiveObserver):
    """Records the work of this rank on its simulated device, while it is entered as a context."""

    def __init__(self, device: torch.device) -> None:
        from fsdp_conformance.simulator import checker

        self.device = device
        self._checker = checker
        self.work = DeviceWork()
        self._order = itertools.count()
        self._before: dict[int, dict[int, int]] = {}
        """The number of operations that each stream had, by the number of each collective that is being issued."""

    def __enter__(self) -> Self:
        log().observers.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        log().observers.remove(self)

    def before(self, record: CollectiveRecord, group: ProcessGroup) -> None:
        self._before[record.seq] = self._checker.submitted(self.device.index)

    def after(self, record: CollectiveRecord, work: Work | None) -> None:
        """A collective is one operation: of its group's stream, or of the current one if the caller is to wait."""
        before = self._before.pop(record.seq)
        for stream, number in self._checker.submitted(self.device.index).items():
            if number > before.get(stream, 0):
                self.work.communicated.append(
                    Communicated(
                        stream=stream,
                        number=number,
                        after=_all_but_itself(self._checker.known_to(stream), stream),
                        phase=record.phase,
                        step=record.step,
                        op=record.op,
                        nbytes=record.nbytes,
                        known_to_host=self._checker.known_to(self._checker.HOST),
                        order=next(self._order),
                    )
                )

    def compute(self) -> None:
        """The last operation of the current stream is a unit's kernel."""
        phase, step = log().label
        stream = self._checker.current_lane(self.device.index)
        numbers = self._checker.known_to(stream)
        self.work.computed.append(
            Computed(
                stream=stream,
                number=numbers[stream],
                after=_all_but_itself(numbers, stream),
                phase=phase,
                step=step,
                known_to_host=self._checker.known_to(self._checker.HOST),
                order=next(self._order),
            )
        )


def _all_but_itself(clock: tuple[int, ...], stream: int) -> tuple[int, ...]:
    """A clock taken right after an operation of the stream, without that operation."""
    return (*clock[:stream], clock[stream] - 1, *clock[stream + 1 :])
