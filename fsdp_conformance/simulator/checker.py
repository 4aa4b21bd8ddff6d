"""
The race checker of the simulated accelerator: which modes it has, what it has found, what it shall not look at.

    device.activate()                      # from here on everything on the device is checked (Mode.RECORD)
    with checker.label("forward"):
        loss = model(inputs)
    with checker.suspended():              # looking at the loss waits for nothing and hides nothing
        losses.append(loss.item())
    checker.expect_clean()

Two accesses of which one writes, to bytes that both touch, are a hazard if no wait, event or order within a stream says
which comes first. That depends on the program alone, not on timing: a race is found in each run or in none. What the
host waits for it knows, and so does everything that it submits later; all threads of the host are one. Reading a
tensor on the host is such a wait, on a real accelerator too: do it in `suspended()`, or it hides races.

A hazard is reported where the wait is missing, once; from there on the wait counts as made. Hazards that differ in
nothing but their tensors are one, with a count.

Not seen: what reaches the device's memory past torch's operations (an address, a NumPy array over it), and the order of
several threads of the host among each other. A stream's wait for an event that was never recorded is no wait, as on
CUDA; streams do not wait for the default stream unless told, as torch's do not.

Nothing in here compiles or loads the extension: without an active device these functions raise EnvironmentUnavailable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from fsdp_conformance.errors import EnvironmentUnavailable, HazardsFound, NothingCompared
from fsdp_conformance.simulator import build
from fsdp_conformance.simulator.hazard import Hazard, hazard_from_json

__all__ = [
    "Mode",
    "Reuse",
    "Wait",
    "accesses",
    "begin_order_digest",
    "clear",
    "clear_hazards",
    "expect_clean",
    "hazards",
    "label",
    "mode",
    "num_hazards",
    "order_digest",
    "reuse",
    "set_mode",
    "set_reuse",
    "suspended",
    "wait_filter",
    "without_waits",
]


class Mode(StrEnum):
    """What happens at a hazard."""

    OFF = "off"
    """Nothing is looked at. Waits are still followed, so that checking can begin at any time."""
    RECORD = "record"
    """It is kept for `hazards()`."""
    RAISE = "raise"
    """It is kept, and the operation raises RuntimeError."""
    POISON = "poison"
    """It is kept, and the result of the operation becomes NaN: what depends on it can be seen."""


class Reuse(StrEnum):
    """Whose unfinished accesses new memory meets."""

    EXACT = "exact"
    """Those of its own former tenants in this run."""
    WORST_CASE = "worst_case"
    """
    And those of every free block that a caching allocator could have given out instead: same stream, large enough, same
    pool (CUDA's allocator keeps requests of up to 1 MiB apart). Finds memory that is freed too early although nothing
    of the same size is allocated afterwards.
    """


class Wait(StrEnum):
    """What orders one stream, or the host, after another, by what the program called."""

    STREAM_WAITS_EVENT = "stream_waits_event"
    HOST_WAITS_EVENT = "host_waits_event"
    HOST_WAITS_STREAM = "host_waits_stream"
    HOST_WAITS_DEVICE = "host_waits_device"
    WORK_WAIT = "work_wait"
    EVENT_RECORD = "event_record"
    """An event is recorded; dropped, it holds what it held before."""
    RECORD_STREAM = "record_stream"
    COLLECTIVE_ISSUE = "collective_issue"
    """The stream of a process group waits for the current one when a collective is issued."""


#: Asked at each wait: what it is, the id of the stream that is waited on or waits, and its device. False drops it.
WaitFilter = Callable[[Wait, int, int], bool]

_filters: list[WaitFilter] = []


def set_mode(mode: Mode | str) -> Mode:
    """Check in this way from now on, in every thread; returns the mode of before."""
    checker = _checker()
    before = Mode(checker.mode)
    checker.mode = Mode(mode).value
    return before


@contextmanager
def mode(mode: Mode | str) -> Iterator[None]:
    """Check in this way inside."""
    before = set_mode(mode)
    try:
        yield
    finally:
        set_mode(before)


def set_reuse(reuse: Reuse | str) -> Reuse:
    """Take new memory to be this from now on; returns what it was before."""
    checker = _checker()
    before = Reuse(checker.reuse)
    checker.reuse = Reuse(reuse).value
    return before


@contextmanager
def reuse(reuse: Reuse | str) -> Iterator[None]:
    """Take new memory to be this inside."""
    before = set_reuse(reuse)
    try:
        yield
    finally:
        set_reuse(before)


def hazards(device: int | None = None) -> tuple[Hazard, ...]:
    """
    What was found since the last `clear`, on one device or on all: by device, then in the order of the program.

    Stacks become text here, which takes a while for many: ask `num_hazards()` whether there is anything new.
    """
    found = (hazard_from_json(described) for described in _checker().hazards())
    return tuple(hazard for hazard in found if device in (None, hazard.device))


def num_hazards() -> int:
    """How many there are; equal ones count once."""
    return int(_checker().num_hazards())


def clear(device: int | None = None) -> None:
    """
    Forget the hazards, and who touched what, on one device or on all: the border between two runs.

    Otherwise what one run has left in flight races with the next one in the same memory. The order of streams stays.
    """
    checker = _checker()
    checker.clear_hazards(device)
    checker.clear_history(device)


def clear_hazards() -> None:
    """Forget the hazards alone."""
    _checker().clear_hazards()


def accesses() -> int:
    """How many accesses have been checked since the process began: a run without any has shown nothing."""
    return int(_checker().accesses())


def begin_order_digest() -> None:
    """From now on sum up, for each device, what each access knew of the other streams: for `order_digest`."""
    _checker().begin_order_digest()


def order_digest(device: int = 0) -> int:
    """
    A number that says what the accesses on a device since `begin_order_digest` knew of one another.

    It depends on the program alone. A program that gives the same with a wait as without it never knew less without it:
    the wait is redundant in that program.
    """
    return int(_checker().order_digest(device))


def expect_clean() -> None:
    """
    Nothing was found since the last `clear`.

    Raises HazardsFound with the explanation of each hazard, and NothingCompared if nothing was ever checked.
    """
    if found := hazards():
        raise HazardsFound([hazard.explain() for hazard in found])
    if not accesses():
        raise NothingCompared("accesses=0, but should be more: nothing of this run was on the simulated accelerator")


@contextmanager
def suspended() -> Iterator[None]:
    """
    What this thread does inside is not checked, not noted, and orders nothing: it looks on from outside of time.

    An event that is recorded inside holds what its stream had been given before. Copies into pinned memory are there
    inside, whether or not the host has waited for them.
    """
    extension = _extension()
    extension.suspend()
    try:
        yield
    finally:
        extension.resume()


@contextmanager
def label(text: str) -> Iterator[None]:
    """What this thread issues inside is said to belong to `text`, in what hazards say."""
    extension = _extension()
    before = extension.set_label(text)
    try:
        yield
    finally:
        extension.set_label(before)


@contextmanager
def wait_filter(keep: WaitFilter) -> Iterator[None]:
    """
    Inside, a wait happens only if `keep` says so, in every thread. Filters nest: every one of them is asked.

    `keep` is called in the thread that waits, with the Python stack of the call.
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
    The positive control: inside no stream waits for another, nor the host; no event is recorded, and record_stream does
    nothing. On one device, or on all.

    A program in which that makes no hazard cannot show one; where it does, finding none with the waits means something.
    Operations are carried out in the order of the program all the same, so numbers do not change; but the host does not
    find in pinned memory what it did not wait for.

    At its end the checker forgets who touched what: the races in here are not to be found again later.
    """

    def keep(_wait: Wait, _stream: int, of_device: int) -> bool:
        return device not in (None, of_device)

    with wait_filter(keep):
        try:
            yield
        finally:
            _checker().clear_history(device)


def _install_filters() -> None:
    """One function for all filters; none where there are none, because it is called at each wait."""
    kept = tuple(_filters)
    if not kept:
        _extension().set_wait_filter(None)
        return
    _extension().set_wait_filter(
        lambda kind, stream, device: all([keep(Wait(kind), stream, device) for keep in kept])  # noqa: C419
    )


def _checker() -> Any:
    return _extension().Checker.get()


def _extension() -> Any:
    extension = build.loaded()
    if extension is None:
        raise EnvironmentUnavailable(
            "the simulated accelerator is not active, but should be before its checker is asked: call "
            "fsdp_conformance.simulator.device.activate()"
        )
    return extension
