"""
A hazard found by the checker: two accesses to the same memory that nothing orders, or a use of uninitialized memory.

`sentence()` states it in one line. `explain()` gives the evidence: both accesses with their stacks, the memory, and the
missing wait as code. The texts are the same in every run of a program: they contain no addresses, and streams and
blocks are numbered per device.

Standard library only, so that reading hazards from a file does not require torch.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import groupby
from math import prod
from typing import Any

from fsdp_conformance.simulator.checker.stream_names import assigned_to
from fsdp_conformance.simulator.device import SIMULATED
from fsdp_conformance.simulator.frames import Frame, Owner, below_torch, is_installed, owner, shown

__all__ = ["Access", "Hazard", "HazardKind", "Site", "Stream", "Useless", "UselessWait", "hazard_from_json", "sites_in"]

#: Line length of the first sentence of an explanation.
_WIDTH = 110

#: How many frames are listed of a stack without frames of the user's.
_INTERNAL_FRAMES = 8

#: Files of torch that are preferred when a folded group of frames is named: code that issues operations, not code that
#: passes them on.
_TELLING = re.compile(r"torch/(distributed/(fsdp|_composable|tensor|optim)|nn/parallel|optim)/")

#: Operations of a process group, which return a Work; on a GPU they have the names of torch's operators.
_COLLECTIVE = re.compile(r"(_?c10d(_functional)?::|all_|broadcast|coalesced|gather|recv|reduce|scatter|send)")


#: Files of torch whose functions wait for their callers.
_PASS_ON = ("_streambase.py", "_ops.py", "_utils.py", "accelerator/", "cuda/", "utils/", "distributed/c10d_logger.py")


class HazardKind(StrEnum):
    """How the two accesses conflict."""

    READ_AFTER_WRITE = "read_after_write"
    WRITE_AFTER_READ = "write_after_read"
    WRITE_AFTER_WRITE = "write_after_write"
    REUSE_IN_FLIGHT = "reuse_in_flight"
    """The memory was freed and allocated again while its previous tenant was still in use."""
    HOST_WRITE_IN_FLIGHT = "host_write_in_flight"
    """The host wrote into pinned memory that a copy was still using."""
    HOST_READ_IN_FLIGHT = "host_read_in_flight"
    """The host read pinned memory before the copy into it was done."""
    UNINITIALIZED_READ = "uninitialized_read"
    """A value that nothing has written reached a collective, the host or a branch."""


_KINDS: Mapping[HazardKind, str] = {
    HazardKind.READ_AFTER_WRITE: "read after write",
    HazardKind.WRITE_AFTER_READ: "write after read",
    HazardKind.WRITE_AFTER_WRITE: "write after write",
    HazardKind.REUSE_IN_FLIGHT: "reuse of memory in flight",
    HazardKind.HOST_WRITE_IN_FLIGHT: "host write in flight",
    HazardKind.HOST_READ_IN_FLIGHT: "host read in flight",
    HazardKind.UNINITIALIZED_READ: "use of uninitialized memory",
}

_ING = {"read": "reading", "write": "writing"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """The origin of an access, an allocation or a free."""

    op: str
    """"aten::add_.Tensor", "all_gather_into_tensor", "free"."""
    label: str = ""
    """Module, unit or phase, if it was named (`checker.label`)."""
    tensor: str = ""
    """Name of the tensor, if it was named."""
    stack: tuple[Frame, ...] = ()
    """Innermost first; empty if none was captured."""

    def innermost(self) -> Frame | None:
        """The innermost frame of the user's code; without one, the innermost frame."""
        return next((frame for frame in self.stack if owner(frame.file) is Owner.USER), next(iter(self.stack), None))


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """A stream of a device, or the host."""

    device: int
    """Index; -1 is the host."""
    number: int
    """Numbered within the device, in the order of first use."""
    name: str
    """"default stream", "all-gather"; "stream" if it was not named."""
    assigned_to: str = ""
    """The program's name for it: "side", "self.copy_stream"; "" if that is not known."""

    @property
    def is_host(self) -> bool:
        """True for the host, which is not a stream."""
        return self.device < 0

    def __str__(self) -> str:
        if not self._is_unnamed:
            return f"the {self._title()}"
        return f"{self._title()} ({self.assigned_to})" if self.assigned_to else self._title()

    @property
    def numbered(self) -> str:
        """A name for the stream in code that no other stream of its device has."""
        return re.sub(r"\W+", "_", self._title())

    @property
    def _is_unnamed(self) -> bool:
        return self.name in ("", "stream")

    def _title(self) -> str:
        if self._is_unnamed:
            return f"stream {self.number}"
        return self.name if self.is_host or self.name.endswith("stream") else f"{self.name} stream"


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """A read or write of some bytes of a block of memory by one operation."""

    kind: str
    """"read" or "write"."""
    stream: Stream
    offset: int
    """Offset of the first byte within the block."""
    run: int
    """Bytes in one run."""
    repeats: tuple[tuple[int, int], ...]
    """(count, stride in bytes) of runs, outermost first; empty for one run."""
    allocation: int
    """The tenant of the block that it belongs to, counted from 1."""
    site: Site

    @property
    def nbytes(self) -> int:
        """How many bytes it touches."""
        return self.run * prod(count for count, _ in self.repeats)

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.offset + self.run + sum((count - 1) * stride for count, stride in self.repeats)

    def extent(self) -> str:
        """The bytes, in words."""
        inside = f"bytes {self.offset} to {self.end - 1}"
        if not self.repeats:
            return f"{inside} ({self.nbytes} bytes)"
        return f"{self.nbytes} of {inside} ({self.nbytes // self.run} runs of {self.run} bytes)"


class Useless(StrEnum):
    """The reason why a wait does not order two accesses."""

    RECORDED_TOO_EARLY = "recorded_too_early"
    """It is for an event of the right stream that was recorded before the first access."""
    OTHER_STREAM = "other_stream"
    OTHER_DEVICE = "other_device"
    OTHER_EVENT = "other_event"
    """It is for an event of another stream that was recorded before the first access."""
    WAITS_TOO_EARLY = "waits_too_early"
    """It is for the right stream, but comes before the first access."""
    OTHER_WAITER = "other_waiter"
    """It is for the first access, but by another stream than that of the second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UselessWait:
    """A wait that does not order two accesses."""

    why: Useless
    stream: Stream
    """The stream that is waited for, or that the event was recorded on."""
    device: int
    """The device that is waited for; -1 for a stream or an event."""
    recorded: Site | None
    """The line that recorded the event, or the collective; None for a stream or a device."""
    waiter: Stream
    """The stream that waits, or the host."""
    waited: Site | None
    """The line that waits."""

    @property
    def is_telling(self) -> bool:
        """True if it may have been meant to order the two: torch's own waits are for what it does itself."""
        if self.why in (Useless.RECORDED_TOO_EARLY, Useless.OTHER_STREAM):
            return True
        stack = self.waited.stack if self.waited is not None else ()
        return next((owner(frame.file) is Owner.USER for frame in stack if not _passes_on(frame)), False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hazard:
    """
    One race: `now` should have waited for `then`, which comes first in the program.

    For uninitialized memory, `then` is its allocation, which wrote nothing, and `now` is the use.
    """

    kind: HazardKind
    then: Access
    now: Access
    device: int
    """The device of the memory; for pinned memory, the device that was current when it was allocated."""
    device_type: str = SIMULATED
    """Its name in texts: "cuda" for a program that uses that name."""
    pinned: bool
    """True for pinned memory of the host."""
    block: int
    """The block that `now` touches, numbered from 1 within its device."""
    nbytes: int
    """The size of that block."""
    allocated: Site | None
    """Where the memory that `now` touches was allocated."""
    freed: Site | None
    """For reuse: where the memory that `then` touches was freed."""
    tenant_stream: Stream
    """The stream that the memory of `then` was allocated on."""
    then_block: int
    """The block that `then` touches; differs from `block` only under worst-case reuse."""
    then_nbytes: int
    useless_waits: tuple[UselessWait, ...] = ()
    """Waits that do not order the two, the likeliest mistake first."""
    hidden_by: Site | None = None
    """Where implicit waits are ignored: the operation that the host waited for in between, which orders them here."""
    count: int
    """How often it was found: hazards with equal kind, operations, labels, streams and stacks are one."""

    @property
    def useless_wait(self) -> UselessWait | None:
        """The wait that was meant to order the two, if there is one."""
        return next((wait for wait in self.useless_waits if wait.is_telling), None)

    @property
    def is_worst_case(self) -> bool:
        """True if the two had different memory in this run, but could share it in another."""
        return self.kind is HazardKind.REUSE_IN_FLIGHT and self.then_block != self.block

    @property
    def is_derived(self) -> bool:
        """True if not the uninitialized memory itself is used, but a value computed or copied from it."""
        return self.kind is HazardKind.UNINITIALIZED_READ and self.then_block != self.block

    @property
    def _is_noticed_later(self) -> bool:
        """True if code that torch does not see has written, some time before the line of `now`."""
        return self.now.site.op.startswith("code outside torch (noticed at ")

    def sentence(self) -> str:
        """The two accesses and the problem, in one line."""
        return f"{_KINDS[self.kind]} on {self._place()}: {self._claim()}"

    def explain(self, *, full_stacks: bool = False) -> str:
        """
        The evidence, for people: both accesses, the memory, and the missing wait.

        Stacks start with the innermost frame; frames inside torch, Python and this package are folded, unless
        `full_stacks` is set.
        """
        stack = _full_stack if full_stacks else _folded_stack
        times = f" (seen {self.count} times)" if self.count > 1 else ""
        lines = textwrap.wrap(
            self.sentence() + times, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        if self.kind is HazardKind.UNINITIALIZED_READ:
            return "\n".join([*lines, *self._explained_use(stack)])
        for title, access in (("first", self.then), ("then", self.now)):
            lines.append(f"  {title}: {self._op(access)} {access.kind}s {access.extent()}")
            lines += _belongs(access.site) + stack(access.site.stack)
        lines.append(f"  memory: block {self.block} of {self._place()} ({self.nbytes} bytes)")
        if self.allocated is not None:
            by = "" if self.allocated.op == "allocate" else f" by {self.allocated.op}"
            lines.append(f"  allocated{by}")
            lines += _belongs(self.allocated) + stack(self.allocated.stack)
        if self.is_worst_case:
            lines.append(
                f"  in another run, a caching allocator may choose block {self.then_block} "
                f"({self.then_nbytes} bytes) instead"
            )
        if self.kind is HazardKind.REUSE_IN_FLIGHT:
            lines.append(f"  its previous tenant, allocated on {self._name(self.tenant_stream)}, was {self._freed()}")
            lines += _belongs(self.freed) + stack(self.freed.stack) if self.freed is not None else []
        lines += self._explained_wait()
        if self.kind is HazardKind.HOST_READ_IN_FLIGHT:
            lines.append(
                "  until the host has waited, it reads NaN here; on a GPU it reads whatever the memory holds by then"
            )
        if self.hidden_by is not None:
            lines.append(f"  in this run the host waits in between, to get a result of {self.hidden_by.op}")
            lines += stack(self.hidden_by.stack)
            lines.append("  without that, nothing orders the two, for example if losses are read less often")
        lines.append("  missing:")
        lines += [f"    {line}" for line in self.missing()]
        return "\n".join(lines)

    def missing(self) -> list[str]:
        """The wait that would order the two accesses, as lines of code, with comments that say where."""
        first, second = self.then.stream, self.now.stream
        if self.kind is HazardKind.REUSE_IN_FLIGHT:
            return self._missing_for_reuse()
        if self.kind is HazardKind.UNINITIALIZED_READ:
            return [
                f"# after {self._at(self.then.site)}, before {self._at(self.now.site)}",
                "tensor.zero_()  # if zeros are right there; else write every element, or leave out what is padding",
            ]
        if second.is_host:
            verb = "writes" if self.kind is HazardKind.HOST_WRITE_IN_FLIGHT else "reads"
            return [
                f"# after {self._at(self.then.site)}",
                f"event = {_in_code(first)[0]}.record_event()",
                f"# before the host {verb}: "
                + ("the first write after that" if self._is_noticed_later else self._at(self.now.site)),
                "event.synchronize()",
            ]
        waiting, awaited = _in_code(second, first)
        lines = [f"# before {self._at(self.now.site)}", f"{waiting}.wait_stream({awaited})"]
        if _COLLECTIVE.match(self.then.site.op):
            # Programs hold the Work; they know the stream of a group by no name.
            work = [f"# before {self._at(self.now.site)}, with {self._name(second)} current", "work.wait()"]
            return [*work, f"# or, if {self.then.site.op} returned no Work", lines[1]]
        return lines

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping; `hazard_from_json` is the inverse."""
        return asdict(self)

    def _explained_use(self, stack: Callable[[Sequence[Frame]], list[str]]) -> list[str]:
        """The allocation and the use of uninitialized memory."""
        lines = [f"  allocated by {self.then.site.op}, {self.then_nbytes} bytes"]
        lines += _belongs(self.then.site) + stack(self.then.site.stack)
        lines.append(f"  used: {self._op(self.now)} reads {self.now.extent()}")
        lines += _belongs(self.now.site) + stack(self.now.site.stack)
        lines.append("  missing:")
        return lines + [f"    {line}" for line in self.missing()]

    def _explained_wait(self) -> list[str]:
        """Why the wait between the two does not order them."""
        wait = self.useless_wait
        if wait is None:
            return []
        frame = wait.waited.innermost() if wait.waited is not None else None
        at = f"at {frame} " if frame is not None else ""
        return [
            f"  {at}{self._name(wait.waiter)} waits for {self._awaited(wait)}, which does not order the two:",
            f"    {self._advice(wait)}",
        ]

    def _awaited(self, wait: UselessWait) -> str:
        """The event, collective, stream or device that a wait is for, in words."""
        if wait.device >= 0:
            return f"{self.device_type}:{wait.device}"
        stream = self._name(wait.stream)
        recorded, waited = (site.innermost() if site is not None else None for site in (wait.recorded, wait.waited))
        if wait.recorded is None or (recorded == waited and wait.recorded.op.startswith("event")):
            return stream  # wait_stream records an event and waits for it
        what = "an event that was recorded" if wait.recorded.op.startswith("event") else wait.recorded.op
        return f"{what} on {stream}" + (f" at {recorded}" if recorded is not None else "")

    def _advice(self, wait: UselessWait) -> str:
        """The change that makes a wait help."""
        first, right = self._op(self.then), self._name(self.then.stream)
        match wait.why:
            case Useless.WAITS_TOO_EARLY:
                return f"{first} comes later. Wait after that"
            case Useless.RECORDED_TOO_EARLY if wait.recorded is not None and not wait.recorded.op.startswith("event"):
                return f"{first} comes after it. Wait for that, too"
            case Useless.RECORDED_TOO_EARLY:
                return f"it was recorded before {first}. Record it after that"
            case Useless.OTHER_DEVICE:
                return f"{first} runs on {self.device_type}:{self.then.stream.device}. Wait for that device"
            case Useless.OTHER_WAITER if self.now.stream.is_host:
                return "only that stream waits, and the host goes on. Let the host wait: event.synchronize()"
            case Useless.OTHER_WAITER:
                return f"{self._op(self.now)} does not wait. Let that stream wait"
        return f"{first} is not on that stream. Wait for {right}"

    def _place(self) -> str:
        return "pinned memory" if self.pinned else f"{self.device_type}:{self.device}"

    def _at(self, site: Site) -> str:
        """The operation and where it was issued: inside torch, if the same line of the user's issued both."""
        frame = site.innermost()
        if self.then.site.innermost() == self.now.site.innermost():
            frame = next((inner for inner in site.stack if _TELLING.search(shown(inner.file))), frame)
        return site.op if frame is None else f"{site.op} ({frame})"

    def _freed(self) -> str:
        """torch frees memory without the interpreter's lock: the stack may be that of the thread's next operation."""
        return "freed before this operation" if self.freed is not None and self.freed.op == "free, before" else "freed"

    def _name(self, stream: Stream) -> str:
        """A stream in words, with its device if that is not the device of the memory."""
        is_elsewhere = not (stream.is_host or self.pinned or stream.device == self.device)
        return f"{stream} of {self.device_type}:{stream.device}" if is_elsewhere else str(stream)

    def _op(self, access: Access) -> str:
        return f"{access.site.op} on {self._name(access.stream)}"

    def _claim(self) -> str:
        first, second = self._op(self.then), self._op(self.now)
        match self.kind:
            case HazardKind.READ_AFTER_WRITE:
                return f"{second} reads what {first} writes, without waiting for it"
            case HazardKind.WRITE_AFTER_READ:
                return f"{second} overwrites what {first} reads, without waiting for it"
            case HazardKind.WRITE_AFTER_WRITE:
                return f"{second} overwrites what {first} writes, without waiting for it"
            case HazardKind.HOST_WRITE_IN_FLIGHT if self._is_noticed_later:
                # NumPy, for example: torch does not see it write.
                return (
                    f"code outside torch overwrites what {first} {self.then.kind}s, without having waited for it, some "
                    f"time before {_at_line(self.now.site)}"
                )
            case HazardKind.HOST_WRITE_IN_FLIGHT:
                return f"{second} overwrites what {first} {self.then.kind}s, without having waited for it"
            case HazardKind.HOST_READ_IN_FLIGHT:
                return f"{second} reads what {first} writes, without having waited for it"
            case HazardKind.UNINITIALIZED_READ:
                what = "a value that nothing has written"
                if self.is_derived:
                    what = "a value computed or copied from memory that nothing has written"
                return f"{second} uses {what}"
        given = "may be given" if self.is_worst_case else "uses"
        return f"{second} {given} memory that was freed while {first} was still {_ING[self.then.kind]} it"

    def _missing_for_reuse(self) -> list[str]:
        first, second, owner = self.then.stream, self.now.stream, self.tenant_stream
        if self.pinned:
            return [
                f"# after {self._at(self.then.site)}, before the tensor is freed",
                f"event = {_in_code(first)[0]}.record_event()",
                "event.synchronize()",
            ]
        if first == owner:
            # The allocator reuses memory in the order of its own stream; other streams have to wait for that.
            return [
                f"# after the memory is allocated, before {self._at(self.now.site)}",
                "{}.wait_stream({})".format(*_in_code(second, owner)),
            ]
        using, owning = _in_code(first, owner)
        frame = self.freed.innermost() if self.freed is not None else None
        return [
            "# before the tensor is freed" + (f" ({frame})" if frame is not None else ""),
            f"tensor.record_stream({using})",
            f"# or, after {self._at(self.then.site)} and still before the tensor is freed",
            f"{owning}.wait_stream({using})",
        ]


def hazard_from_json(data: Mapping[str, Any]) -> Hazard:
    """The hazard described by `to_json`, or by the checker."""
    return Hazard(
        kind=HazardKind(data["kind"]),
        then=_access(data["then"]),
        now=_access(data["now"]),
        allocated=_site(data["allocated"]),
        freed=_site(data["freed"]),
        tenant_stream=_stream(data["tenant_stream"]),
        useless_waits=tuple(map(_useless_wait, data.get("useless_waits", ()))),
        hidden_by=_site(data.get("hidden_by")),
        device_type=data.get("device_type", SIMULATED),
        **{name: data[name] for name in ("device", "pinned", "block", "nbytes", "then_block", "then_nbytes", "count")},
    )


def sites_in(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All sites in the JSON of a hazard, to change their stacks."""
    places = [data["then"]["site"], data["now"]["site"]]
    places += [wait[name] for wait in data["useless_waits"] for name in ("recorded", "waited")]
    return [site for site in (*places, data["allocated"], data["freed"], data["hidden_by"]) if site is not None]


def _useless_wait(data: Mapping[str, Any]) -> UselessWait:
    return UselessWait(
        why=Useless(data["why"]),
        stream=_stream(data["stream"]),
        device=data["device"],
        recorded=_site(data["recorded"]),
        waiter=_stream(data["waiter"]),
        waited=_site(data["waited"]),
    )


def _passes_on(frame: Frame) -> bool:
    """True for code that waits because its caller asks for it: methods of streams and events, decorators."""
    below = below_torch(frame.file)
    return owner(frame.file) is Owner.MACHINERY or (below is not None and below.startswith(_PASS_ON))


def _access(data: Mapping[str, Any]) -> Access:
    return Access(
        kind=data["kind"],
        stream=_stream(data["stream"]),
        offset=data["offset"],
        run=data["run"],
        repeats=tuple((count, stride) for count, stride in data["repeats"]),
        allocation=data["allocation"],
        site=_site(data["site"]) or Site(op="an operation"),
    )


def _stream(data: Mapping[str, Any]) -> Stream:
    """From JSON, or as the checker describes it: with the stacks of the last calls that made it."""
    made = {assigned_to([Frame(**frame) for frame in stack]) for stack in data.get("made", ())}
    return Stream(
        device=data["device"],
        number=data["number"],
        name=data["name"],
        # A pool's stream that was made in two places has no name that is always right.
        assigned_to=data.get("assigned_to") or (made.pop() if len(made) == 1 else ""),
    )


def _in_code(*streams: Stream) -> list[str]:
    """Names for streams in code: the program's, if they are known and tell the streams apart."""
    names = [stream.assigned_to or stream.numbered for stream in streams]
    return names if len(set(names)) == len(set(streams)) else [stream.numbered for stream in streams]


def _site(data: Mapping[str, Any] | None) -> Site | None:
    if data is None:
        return None
    stack = tuple(Frame(**frame) for frame in data["stack"])
    return Site(op=data["op"], label=data["label"], tensor=data["tensor"], stack=stack)


def _at_line(site: Site) -> str:
    frame = site.innermost()
    return str(frame) if frame is not None else "a line that is not known"


def _belongs(site: Site) -> list[str]:
    """The names of a site's tensor and unit, if it has any."""
    names = ([f"of {site.tensor}"] if site.tensor else []) + ([f"in {site.label}"] if site.label else [])
    return [f"    {', '.join(names)}"] if names else []


def _full_stack(stack: Sequence[Frame]) -> list[str]:
    return [f"      {frame}" for frame in stack] or ["      (no Python stack)"]


def _folded_stack(stack: Sequence[Frame]) -> list[str]:
    """
    The user's frames, with each group of others folded into one line, and without those outside the last.

    Frames of installed libraries are others, too, unless the user has none.
    """
    users = {frame.file for frame in stack if owner(frame.file) is Owner.USER}
    if not users:
        frames = [frame for frame in stack if owner(frame.file) is not Owner.MACHINERY][:_INTERNAL_FRAMES]
        return _full_stack(frames)
    shown_files = {file for file in users if not is_installed(file)} or users
    return [f"      {line}" for line in _folded(stack, shown_files)]


def _folded(stack: Sequence[Frame], shown_files: Container[str]) -> Iterator[str]:
    groups = [(is_user, list(frames)) for is_user, frames in groupby(stack, lambda frame: frame.file in shown_files)]
    for index, (is_user, frames) in enumerate(groups):
        if is_user:
            yield from map(str, frames)
        elif index + 1 < len(groups):
            libraries = (frame for frame in frames if owner(frame.file) is Owner.USER)
            telling = next((f for f in frames if _TELLING.search(shown(f.file))), next(libraries, frames[0]))
            yield f"... {telling}" if len(frames) == 1 else f"... {len(frames)} frames, among them {telling}"
