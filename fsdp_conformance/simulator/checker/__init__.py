"""
The race checker of the simulated accelerator: its modes, its findings, and how to exclude code from it.

    activate()                             # from here on everything on the device is checked (Mode.RECORD)
    with checker.label("forward"):
        loss = model(inputs)
    with checker.suspended():              # reading the loss here is not a wait and hides no race
        losses.append(loss.item())
    checker.expect_clean()

Two accesses to the same bytes, at least one of them a write, are a hazard if no wait, event or stream order says which
comes first. That depends on the program alone, not on timing, so a race is found in every run or in none. What the host
has waited for is known to everything it submits later. Threads of the host count as one, unless `host_threads` follows
them. Reading a tensor on the host is such a wait, as on a real accelerator: do it in `suspended()`, or it hides races.

A hazard is reported once, where the wait is missing; from then on the wait counts as made. Hazards that differ only in
their tensors are folded into one, with a count.

The checker does not see accesses to device memory that bypass torch's operations, nor races among the threads of the
host. Accesses of NumPy to pinned memory are seen while a copy into it is in flight. As on CUDA, waiting for an event
that was never recorded does nothing, and streams do not wait for the default stream unless told to.

Nothing here compiles or loads the extension: without an active device, these functions raise EnvironmentUnavailable.

This module is the room's front door. Behind it:

    hazard            a finding, and its explanation
    stream_names      what the program calls a stream
    labels            names of modules and parameters in findings
    host_threads      threads of the host, and where one learns what another has waited for
    options           what the checker looks for in a process
    ordering          leaves out kernels that only compute numbers
    sync_sites        the places in a program that make a stream or the host wait
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from fsdp_conformance.errors import HazardsFound, NothingCompared
from fsdp_conformance.simulator.checker.hazard import Hazard, hazard_from_json
from fsdp_conformance.simulator.device import build

__all__ = [
    "HOST",
    "Mode",
    "Reuse",
    "Wait",
    "Waits",
    "accesses",
    "begin_order_digest",
    "clear",
    "clear_hazards",
    "current_lane",
    "expect_clean",
    "hazards",
    "known_to",
    "label",
    "mode",
    "num_hazards",
    "order_digest",
    "reuse",
    "set_mode",
    "set_reuse",
    "set_uninitialized",
    "set_waits",
    "submitted",
    "suspended",
    "uninitialized",
    "wait_filter",
    "without_waits",
]


class Mode(StrEnum):
    """The checker's reaction to a hazard."""

    OFF = "off"
    """Accesses are not checked. Waits are still tracked, so that checking can start at any time."""
    RECORD = "record"
    """It is recorded for `hazards()`."""
    RAISE = "raise"
    """It is recorded, and the operation raises RuntimeError."""
    POISON = "poison"
    """It is recorded, and the operation's result becomes NaN, which shows what depends on it."""


class Waits(StrEnum):
    """Which waits of the host order the streams."""

    ALL = "all"
    EXPLICIT = "explicit"
    """Those that the program asks for: `synchronize`, `query`, a barrier. The host also waits to give the program a
    value or a size (`item`, `nonzero`, a copy that blocks). What is in order only because of that is a hazard then."""


class Reuse(StrEnum):
    """Which unfinished accesses new memory is compared with."""

    EXACT = "exact"
    """Those of its former tenants in this run."""
    WORST_CASE = "worst_case"
    """
    Also those of every free block that a caching allocator could have chosen instead: same stream, large enough, same
    pool (CUDA's allocator has a separate one for requests of up to 1 MiB). Finds memory that is freed too early even if
    nothing of the same size is allocated afterwards.
    """


class Wait(StrEnum):
    """The operations that order one stream, or the host, after another, named after what the program called."""

    STREAM_WAITS_EVENT = "stream_waits_event"
    HOST_WAITS_EVENT = "host_waits_event"
    HOST_WAITS_STREAM = "host_waits_stream"
    HOST_WAITS_DEVICE = "host_waits_device"
    WORK_WAIT = "work_wait"
    EVENT_RECORD = "event_record"
    """An event is recorded; if this is dropped, the event keeps its previous contents."""
    RECORD_STREAM = "record_stream"
    COLLECTIVE_ISSUE = "collective_issue"
    """A process group's stream waits for the current stream when a collective is issued."""


#: The lane of the host.
HOST = 0

#: Called for each wait with its kind, the id of the stream that waits or is waited for, and its device. False drops it.
WaitFilter = Callable[[Wait, int, int], bool]

_filters: list[WaitFilter] = []


def set_mode(mode: Mode | str) -> Mode:
    """Set the mode for all threads; returns the previous mode."""
    checker = _checker()
    before = Mode(checker.mode)
    checker.mode = Mode(mode).value
    return before


@contextmanager
def mode(mode: Mode | str) -> Iterator[None]:
    """A context with this mode."""
    before = set_mode(mode)
    try:
        yield
    finally:
        set_mode(before)


def set_reuse(reuse: Reuse | str) -> Reuse:
    """Set which accesses new memory is compared with; returns the previous setting."""
    checker = _checker()
    before = Reuse(checker.reuse)
    checker.reuse = Reuse(reuse).value
    return before


@contextmanager
def reuse(reuse: Reuse | str) -> Iterator[None]:
    """A context with this setting."""
    before = set_reuse(reuse)
    try:
        yield
    finally:
        set_reuse(before)


def set_waits(waits: Waits | str) -> Waits:
    """
    Set which waits of the host order the streams; returns the previous setting.

    What was done until now counts as waited for.
    """
    checker = _checker()
    before = Waits(checker.waits)
    checker.waits = Waits(waits).value
    return before


def set_uninitialized(on: bool) -> bool:
    """
    Set whether uses of uninitialized memory are hazards too; returns the previous setting. Off at first.

    Copying uninitialized memory, and computing with it, is none: the result counts as uninitialized. A use is what the
    host reads or decides by, or what a collective reduces, broadcasts or sends. Memory that was allocated before is not
    tracked.
    """
    checker = _checker()
    before = bool(checker.tracks_unwritten)
    checker.tracks_unwritten = on
    return before


@contextmanager
def uninitialized(on: bool = True) -> Iterator[None]:
    """A context with this setting."""
    before = set_uninitialized(on)
    try:
        yield
    finally:
        set_uninitialized(before)


def hazards(device: int | None = None) -> tuple[Hazard, ...]:
    """
    The hazards found since the last `clear`, on one device or on all: by device, then in program order.

    Converting stacks to text takes time: use `num_hazards()` to see whether there is anything new.
    """
    build.active().note_touches()
    all_hazards = (hazard_from_json(described) for described in _checker().hazards())
    return tuple(hazard for hazard in all_hazards if device in (None, hazard.device))


def num_hazards() -> int:
    """The number of hazards; equal ones count once."""
    build.active().note_touches()
    return int(_checker().num_hazards())


def clear(device: int | None = None) -> None:
    """
    Forget the hazards and all accesses, on one device or on all: the boundary between two runs.

    Otherwise the unfinished accesses of one run race with the next run in the same memory. What streams know of each
    other is kept.
    """
    checker = _checker()
    checker.clear_hazards(device)
    checker.clear_history(device)


def clear_hazards() -> None:
    """Forget the hazards, but not the accesses."""
    _checker().clear_hazards()


def accesses() -> int:
    """How many accesses have been checked since the process started: a run without any has shown nothing."""
    return int(_checker().accesses())


def submitted(device: int) -> dict[int, int]:
    """How many operations were submitted to each stream of a device since the process started, by the stream's lane."""
    checker = _checker()
    lanes = [lane for lane in range(checker.num_lanes()) if checker.lane_device(lane) == device]
    # A clock is as long as the highest lane that it knows of, itself included from its first operation on.
    return {lane: sum(checker.snapshot(lane)[lane : lane + 1]) for lane in lanes}


def known_to(lane: int) -> tuple[int, ...]:
    """
    For each lane, how many of its operations have finished as far as a lane knows, itself included; 0 is the host.

    An event that is recorded on the lane now would have this clock. Lanes beyond its end are unknown to it.
    """
    return tuple(_checker().snapshot(lane))


def current_lane(device: int) -> int:
    """The lane of this thread's current stream of a device."""
    extension = build.active()
    return int(extension.lane_of(extension.current_stream_id(device), device))


def begin_order_digest() -> None:
    """Start a checksum, for each device, of what each access knows about the other streams: see `order_digest`."""
    _checker().begin_order_digest()


def order_digest(device: int = 0) -> int:
    """
    A checksum of what the accesses on a device since `begin_order_digest` knew about each other.

    It depends on the program alone. If it is the same with and without a wait, no access knew less without it: the wait
    is redundant in that program.
    """
    return int(_checker().order_digest(device))


def expect_clean() -> None:
    """
    Expect that nothing was found since the last `clear`.

    Raises HazardsFound with the explanation of each hazard, and NothingCompared if no access was ever checked.
    """
    if unexpected := hazards():
        raise HazardsFound([hazard.explain() for hazard in unexpected])
    if not accesses():
        raise NothingCompared("no access was checked: nothing in this process ran on the simulated accelerator")


@contextmanager
def suspended() -> Iterator[None]:
    """
    A context in which this thread's operations are not checked or noted, and order nothing: for looking at values.

    An event that is recorded inside holds what its stream had been given before. Inside, copies into pinned memory are
    visible even if the host has not waited for them.
    """
    extension = build.active()
    extension.suspend()
    try:
        yield
    finally:
        extension.resume()


@contextmanager
def label(text: str) -> Iterator[None]:
    """A context that labels what this thread issues, in the text of hazards."""
    extension = build.active()
    before = extension.set_label(text)
    try:
        yield
    finally:
        extension.set_label(before)


@contextmanager
def wait_filter(keep: WaitFilter) -> Iterator[None]:
    """
    A context in which a wait, in any thread, happens only if `keep` returns true. Filters nest: all of them are called.

    `keep` is called in the thread that waits, below the call that waits in its Python stack.
    """
    _filters.append(keep)
    _install_filters()
    try:
        yield
    finally:
        _filters.remove(keep)
        _install_filters()


@contextmanager
def without_waits(device: int | None = None) -> Iterator[None]:
    """
    The positive control: a context in which no stream waits for another, the host waits for nothing, no event is
    recorded, and record_stream does nothing. On one device, or on all.

    If this produces no hazards, the checker cannot find any in the program; if it does, a clean run with the waits
    means something. Operations still run in program order, so results do not change, except that the host does not see
    contents of pinned memory that it did not wait for.

    At the end the checker forgets all accesses, so that these races are not found again later.
    """

    def keep(_wait: Wait, _stream: int, of_device: int) -> bool:
        return device not in (None, of_device)

    with wait_filter(keep):
        try:
            yield
        finally:
            _checker().clear_history(device)


def _install_filters() -> None:
    """Install one function for all filters, or none at all: it is called for each wait."""
    filters = tuple(_filters)
    if not filters:
        build.active().set_wait_filter(None)
        return
    build.active().set_wait_filter(
        lambda kind, stream, device: all([keep(Wait(kind), stream, device) for keep in filters])  # noqa: C419
    )


def _checker() -> Any:
    return build.active().Checker.get()
