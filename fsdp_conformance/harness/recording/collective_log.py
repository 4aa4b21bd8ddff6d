"""
The log of a rank's collectives: what was issued, in which phase of training, from which line of code.

Each rank has one log, `harness.context.log()`. The recording process groups write to it; training loops label what they
do with `phase`; checks read `records`. To see a collective while it happens, or to interfere with it, add a
`CollectiveObserver` to `observers`, as faults do.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup, Work

from fsdp_conformance.harness.recording.call_site import call_site
from fsdp_conformance.harness.recording.collective_trace import CollectiveTrace, Mark
from fsdp_conformance.history.collective import CollectiveRecord, Op


class Traffic(NamedTuple):
    """The tensors and bytes that a collective moves, from its arguments."""

    op: Op
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    nbytes: int
    """Bytes of the unsharded side."""
    dtype: str
    device: str
    reduce_op: str
    num_tensors: int


class Collective(NamedTuple):
    """A collective that has been recorded and not issued yet."""

    record: CollectiveRecord
    group: ProcessGroup
    traffic: Traffic
    method: Callable[..., Work | None]
    """The backend's method, which takes `args` and `kwargs`, or others in their place."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def issue(self) -> Work | None:
        """Hand it to the backend."""
        return self.method(*self.args, **self.kwargs)


class CollectiveObserver:
    """
    Sees every collective of this rank as it is issued, and may interfere. Override what you need.

    Observers are called in the order of `CollectiveLog.observers`, in the thread that issues the collective, which on
    an accelerator may be autograd's. An observer's exception reaches the caller as if the backend had raised it.
    """

    def before(self, record: CollectiveRecord, group: ProcessGroup) -> None:
        """Called before the collective is issued: delay it, refuse it, or end the process here."""

    def wrap_work(
        self, record: CollectiveRecord, work: Work, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
    ) -> Work:
        """
        Called after the collective was issued; the caller gets the result in place of `work`.

        A wrapper is a subclass of `torch.distributed.Work` with `wait` and `get_future`: C++ callers use only these
        two. It must keep `work`. `inputs` and `outputs` are the caller's own tensors (the same ones for an in-place
        collective): here a result can be held back, poisoned until `wait`, or checked for having been written too
        early.
        """
        return work

    def after(self, record: CollectiveRecord, work: Work | None) -> None:
        """Called last, with the Work that the caller gets; None if the collective has none."""


def _nothing() -> None:
    """Do nothing: for a process that runs no case."""


class CollectiveLog:
    """The collectives of one rank, in the order in which it issued them."""

    def __init__(self) -> None:
        self.records: list[CollectiveRecord] = []
        self.observers: list[CollectiveObserver] = []
        self.on_issue: Callable[[], object] = _nothing
        """Called before each collective, without its record."""
        self.issuer: Callable[[Collective], Work | None] = Collective.issue
        """Issues collectives, at once or later, and returns the Work for the caller."""
        self._trace: CollectiveTrace | None = None
        self._numbers = itertools.count()
        self._phase = ""
        self._step: int | None = None

    @contextmanager
    def phase(self, name: str, step: int | None = None) -> Iterator[None]:
        """
        Label the collectives issued inside: setup, forward, backward, step, eval, observe.

        Phases nest: the innermost name counts, and a phase without a step keeps the step of the outer one. The label
        belongs to the rank, not to the thread: on an accelerator, backward runs in other threads.
        """
        outer = self._phase, self._step
        self._phase, self._step = name, self._step if step is None else step
        try:
            yield
        finally:
            self._phase, self._step = outer

    @property
    def label(self) -> tuple[str, int | None]:
        """The phase and the step that the next record gets."""
        return self._phase, self._step

    def schedule(self) -> list[str]:
        """One line per collective, in order; equal on all ranks of a group."""
        return [record.line() for record in self.records]

    def clear(self) -> None:
        """Drop the records. Observers stay, and numbering continues."""
        self.records.clear()

    def trace_to(self, path: str | os.PathLike[str] | None, mark: Callable[[], Mark] | None = None) -> None:
        """Write the last collectives to a file from now on; None stops that. For `mark` see `CollectiveTrace`."""
        if self._trace is not None:
            self._trace.close()
        self._trace = CollectiveTrace(path, mark) if path is not None else None

    def note(
        self, name: str, group: tuple[int, ...], traffic: Traffic, label: tuple[str, int | None] | None = None
    ) -> CollectiveRecord:
        """Add the record of a collective that is being issued."""
        phase, step = label or self.label
        record = CollectiveRecord(
            seq=next(self._numbers),
            op=traffic.op,
            name=name,
            group=group,
            nbytes=traffic.nbytes,
            dtype=traffic.dtype,
            device=traffic.device,
            reduce_op=traffic.reduce_op,
            num_tensors=traffic.num_tensors,
            step=step,
            phase=phase,
            site=call_site(),
        )
        self.records.append(record)
        return record

    def carry_out(
        self,
        name: str,
        group: ProcessGroup,
        ranks: tuple[int, ...],
        traffic: Traffic,
        method: Callable[..., Work | None],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Work | None:
        """Record a collective, tell the observers, issue it, and return the Work for its caller."""
        self.on_issue()
        record = self.note(name, ranks, traffic)
        if self._trace is not None:
            self._trace.issued(record)
        observers = tuple(self.observers)
        for observer in observers:
            observer.before(record, group)
        work = self.issuer(Collective(record, group, traffic, method, args, kwargs))
        if work is not None:
            for observer in observers:
                work = observer.wrap_work(record, work, traffic.inputs, traffic.outputs)
        for observer in observers:
            observer.after(record, work)
        if self._trace is not None:
            self._trace.follow(record, work)
        return work
