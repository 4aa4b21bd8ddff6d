"""
A collective that is issued late and completes later.

    pending    its caller has the `LateWork`; the backend knows nothing yet
    started    the backend has it, with copies of its tensors: inputs are read now, and outputs are still poison
    finished   the caller waited, so the results were copied into its tensors

All of this is legal: from the issue of an asynchronous collective until `wait()` has returned, a backend may read the
inputs and write the outputs at any time, and its caller may do neither.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from fsdp_conformance.faults.poison import is_there, poison, unnoticed
from fsdp_conformance.harness.recording.collective_log import Collective


class PendingCollective:
    """
    One collective between its issue and its completion.

    With `reads_late` the backend gets the inputs as they are at the start, otherwise as they were at the issue. Outputs
    are poisoned at the issue, so an input that shares memory with an output must be read at the issue. The exception is
    a tensor that is both input and output: with `reads_late` it keeps its value until the start and is poisoned then.

    Not safe for threads: `LateCollectives` calls it under its lock, except for `wait_for_backend`.
    """

    def __init__(self, collective: Collective, number: int, *, reads_late: bool) -> None:
        self.collective = collective
        self.number = number
        self.reads_late = reads_late
        self.work: Work | None = None
        """The backend's work, once started."""
        self.error: BaseException | None = None
        """The exception that the backend raised at the start."""
        self.finished = False
        self._private: dict[int, Tensor] = {}
        self._both = {id(tensor) for tensor in self.inputs} & {id(tensor) for tensor in self.outputs}
        if not reads_late:
            self._read_inputs()
        for output in self.outputs:
            if not (reads_late and id(output) in self._both):
                poison(output)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The caller's input tensors."""
        return self.collective.traffic.inputs

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The caller's output tensors."""
        return self.collective.traffic.outputs

    @property
    def started(self) -> bool:
        """True if the backend has it, or has rejected it."""
        return self.work is not None or self.error is not None

    def start(self) -> None:
        """Hand it to the backend, once."""
        if self.started:
            return
        if self.reads_late:
            self._read_inputs()
        with unnoticed():
            for output in self.outputs:
                if id(output) not in self._private:
                    self._private[id(output)] = torch.empty_like(output)
                elif self.reads_late:
                    poison(output)
        try:
            self.work = self.collective.method(
                *self._in_place_of(self.collective.args),
                **{name: self._in_place_of(value) for name, value in self.collective.kwargs.items()},
            )
        except Exception as error:  # noqa: BLE001 - its caller gets it from `wait`
            self.error = error

    def wait_for_backend(self, timeout: timedelta) -> None:
        """Wait for the backend, with its own timeout if `timeout` is zero. Raises what the backend raises."""
        if self.error is not None:
            raise self.error
        if self.work is not None:
            self.work.wait(timeout) if timeout else self.work.wait()

    def finish(self) -> None:
        """Copy the results into the caller's tensors, once."""
        if self.finished:
            return
        self.finished = True
        for output in self.outputs:
            if is_there(output):  # else the caller has freed it
                with unnoticed(output):
                    output.data.copy_(self._private[id(output)])
        self._private.clear()

    def _read_inputs(self) -> None:
        for tensor in self.inputs:
            if id(tensor) in self._private:
                continue
            with unnoticed():
                copy = torch.empty_like(tensor)
            if is_there(tensor):
                with unnoticed():
                    copy.copy_(tensor.data)
            else:
                poison(copy)
            self._private[id(tensor)] = copy

    def _in_place_of(self, value: Any) -> Any:
        """An argument with private tensors in place of the caller's."""
        if isinstance(value, Tensor):
            return self._private[id(value)]
        if isinstance(value, list | tuple):
            return type(value)(self._in_place_of(item) for item in value)
        return value


class LateWork(Work):
    """The work that the caller of a pending collective receives."""

    def __init__(
        self,
        pending: PendingCollective,
        finish: Callable[[PendingCollective, timedelta], None],
        start: Callable[[], None],
        promise: Callable[[PendingCollective], torch.futures.Future[Any]],
    ) -> None:
        super().__init__()
        self._pending = pending
        self._finish = finish
        self._start = start
        self._promise = promise
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Let it start if it has not, wait for the backend, and deliver the results."""
        self._finish(self._pending, timeout)
        return True

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """False at the call that starts it; after that, what the backend says. Delivers the results when it is True."""
        if not self._pending.started:
            self._start()
            return False
        if self._pending.error is not None:
            return True
        done = self._pending.work is None or self._pending.work.is_completed()
        if done and self.is_success():
            self.wait()
        return done

    def is_success(self) -> bool:
        """True if the backend says so; False before the start."""
        return self._pending.work is not None and self._pending.work.is_success()

    def exception(self) -> Any:
        """The exception of the backend, or None."""
        return self._pending.work.exception() if self._pending.work is not None else self._pending.error

    def result(self) -> list[Tensor]:
        """The outputs."""
        return list(self._pending.outputs)

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the outputs, which completes by itself, late."""
        if self._future is None:
            self._future = self._promise(self._pending)
        return self._future
