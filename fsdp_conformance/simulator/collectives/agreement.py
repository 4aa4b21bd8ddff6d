"""
Checks that all ranks call the same collectives, while a script runs.

Before a collective is issued, it is compared with the calls of the other ranks of its group that are already there
(`calls`): the operation, the reduction, the dtype, the sizes, the root, and for an all-to-all what each pair exchanges.
A difference raises CollectiveMismatch on the rank that comes last, before it moves any data. Also reported: two
communicators that two ranks use in different orders, messages whose tags differ, two ranks on one device, and a rank
that ends while others wait for it. At the end of the script: devices that wait for each other (`device_order`).

CUDA_VISIBLE_DEVICES is respected: scripts may give each process its own device 0.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistBackendError, ProcessGroup, distributed_c10d

from fsdp_conformance.simulator.collectives.calls import (
    COMMUNICATORS,
    Call,
    CallLog,
    CallReader,
    Channel,
    Standstills,
    deadlocked,
    difference,
    issued_logs,
    logs_of,
)
from fsdp_conformance.simulator.collectives.device_order import device_deadlocks
from fsdp_conformance.simulator.collectives.disagreement import Disagreement, DisagreementKind, Party
from fsdp_conformance.simulator.device import SIMULATED, build
from fsdp_conformance.simulator.frames import Frame, Owner, calling_frame, owner

#: For how many looks a rank must have been in the same wait before it counts as stuck.
_LOOKS = 4

#: How many parts of an all-to-all are shown.
_SHOWN = 8

#: Where the calls of a thread without frames of the user come from: the call of backward that it works for.
Caller = Callable[[], Frame | None]


class CollectiveMismatch(DistBackendError):
    """Ranks call different collectives, or one of them does not call a collective at all."""


@dataclass(slots=True)
class _Match:
    """A collective that two ranks have both called."""

    my_call: Call
    their_call: Call
    mine: int
    """Position among the calls of this rank."""
    theirs: int


@dataclass(slots=True)
class _Peer:
    """Another rank's calls, as far as this rank knows them."""

    rank: int
    reader: CallReader
    counts: dict[Channel, int] = field(default_factory=dict)
    position: int = 0
    mine: dict[tuple[Channel, int], tuple[int, Call]] = field(default_factory=dict)
    """Calls of this rank that the peer has not made yet, with their positions."""
    theirs: dict[tuple[Channel, int], tuple[int, Call]] = field(default_factory=dict)
    """Calls of the peer that this rank has not made yet."""
    furthest_mine: _Match | None = None
    furthest_theirs: _Match | None = None
    """Among those that both have made: the last by this rank's order, and by the peer's."""


class Agreement:
    """One rank's side of the check: `check` is called before each collective."""

    def __init__(self, directory: Path, rank: int, world_size: int, caller: Caller = lambda: None) -> None:
        self.disagreements: list[Disagreement] = []
        self.checked = 0
        """How many calls were compared or are still to be compared."""
        self._rank = rank
        self._caller = caller
        self._log = CallLog(directory, rank)
        self._peers = {
            other: _Peer(other, CallReader(directory, other)) for other in range(world_size) if other != rank
        }
        self._counts: dict[Channel, int] = {}
        self._lock = threading.Lock()  # autograd's threads issue collectives too
        self._reported: set[object] = set()
        self._directory = directory
        self._world_size = world_size
        self._groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
        self.abort: Callable[[str], None] = self._abort_groups
        """Makes the collectives of this rank fail, those to come too; takes the reason."""
        self._standstills = Standstills(directory, rank)
        self._last_wait: tuple[int, int] | None = None
        self._looks = 0
        self.stopped_by: Disagreement | None = None
        """Why the collectives of this rank were aborted."""

    def watch(self, group: ProcessGroup) -> None:
        """Abort the collectives of this group, too, when the ranks are in a deadlock."""
        self._groups.add(group)

    def check(self, call: Call, number: int = 0, waits_for: int = 0) -> None:
        """Note a call (`IssuedCall`) and compare it. Raises CollectiveMismatch."""
        with self._lock:
            count = self._counts.get(call.channel, 0)
            self._counts[call.channel] = count + 1
            position = self.checked
            self.checked += 1
            # First written, then read: of two ranks at least one sees the other's call.
            self._log.append(call, number, waits_for)
            problems: list[Disagreement | None] = []
            for member in call.channel.members:
                peer = self._peers.get(member)
                if peer is None:
                    continue
                key = (call.channel, count)
                self._catch_up(peer)
                earlier = peer.theirs.pop(key, None)
                if earlier is None:
                    peer.mine[key] = (position, call)
                    if peer.reader.has_ended:
                        problems.append(self._note(_missing(call, self._rank, peer.rank)))
                    continue
                problems.append(self._compared(peer, call, position, earlier[1], earlier[0]))
        problem = next((problem for problem in problems if problem is not None), None)
        if problem is not None:
            raise CollectiveMismatch(problem.sentence())

    def end(self) -> None:
        """The script has ended on this rank. Raises CollectiveMismatch if others have made calls that it has not."""
        with self._lock:
            self._log.end()
            problems = []
            for peer in self._peers.values():
                self._catch_up(peer)
                first = next(iter(peer.theirs.values()), None)
                if first is not None:
                    problems.append(self._note(_missing(first[1], peer.rank, self._rank)))
            if all(peer.reader.has_ended for peer in self._peers.values()):  # the last rank sees the calls of all
                self._compare_devices()
        if problems:
            raise CollectiveMismatch(problems[0].sentence())

    def look_at_this_process(self) -> None:
        """`look`, with what holds this process up."""
        in_main, in_others, number = build.load().waiting()
        # The main thread waits for autograd's during a backward pass, and for no other thread that we know of.
        held_up = in_main or (in_others and self._caller() is not None)
        self.look(number if held_up else None)

    def look(self, waits: int | None) -> None:
        """
        Abort this rank's collectives if it waits for a call that will never come. Called periodically.

        `waits` is the number of the wait for peers that holds this rank up; None if it runs. Ranks that have been in
        the same wait for several looks, each in a collective that another of them has not called, will never continue.
        """
        with self._lock:
            now = (waits, self.checked) if waits is not None else None
            self._looks = self._looks + 1 if now is not None and now == self._last_wait else 0
            self._last_wait = now
            self._standstills.say(self.checked if self._looks >= _LOOKS else None)
            if now is None or self._looks == 0 or self.stopped_by is not None:
                return
            self.stopped_by = self._answered_otherwise() or self._abandoned() or self._stuck()
            if self.stopped_by is None:
                return
        self.abort(self.stopped_by.sentence())

    def explained(self) -> Disagreement | None:
        """Why collectives of this rank cannot end, if that is known: a call that differs, or a rank that has left."""
        with self._lock:
            self.stopped_by = self.stopped_by or self._answered_otherwise() or self._abandoned()
            return self.stopped_by

    def _abort_groups(self, reason: str) -> None:
        for group in list(self._groups):
            if SIMULATED in [device.type for device in group._device_types]:
                group._get_backend(torch.device(SIMULATED)).abort()

    def _answered_otherwise(self) -> Disagreement | None:
        """A call of this rank that another rank has answered by a different one; that rank may have gone on since."""
        for peer in self._peers.values():
            self._catch_up(peer)
        return next((one for one in self.disagreements if one.kind is DisagreementKind.DIFFERENT), None)

    def _abandoned(self) -> Disagreement | None:
        """A call of this rank that another rank has ended without."""
        for peer in self._peers.values():
            if peer.reader.has_ended and peer.mine:
                _, call = next(iter(peer.mine.values()))
                return self._note(_missing(call, self._rank, peer.rank))
        return None

    def _stuck(self) -> Disagreement | None:
        """The ranks that wait for each other, if this rank is one of them."""
        if self._looks <= _LOOKS:
            return None
        stuck = deadlocked(logs_of(self._directory, self._world_size), self._standstills.read(self._world_size))
        if self._rank not in stuck:
            return None
        parties = [Party.of(rank, call) for rank, call in stuck.items()]
        return self._note(Disagreement.between(DisagreementKind.DEADLOCK, parties, ""))

    def close(self) -> None:
        """Close all files."""
        self._log.close()
        for peer in self._peers.values():
            peer.reader.close()

    def _catch_up(self, peer: _Peer) -> None:
        """Read what the peer has called since the last time."""
        for call in (issued.call for issued in peer.reader.read()):
            number = peer.counts.get(call.channel, 0)
            peer.counts[call.channel] = number + 1
            position = peer.position
            peer.position += 1
            if self._rank not in call.channel.members:
                continue
            key = (call.channel, number)
            earlier = peer.mine.pop(key, None)
            if earlier is None:
                peer.theirs[key] = (position, call)
            else:
                # The peer has seen this rank's call, and raises if they differ.
                self._compared(peer, earlier[1], earlier[0], call, position)

    def _compared(
        self, peer: _Peer, mine: Call, my_position: int, theirs: Call, their_position: int
    ) -> Disagreement | None:
        """Compare two calls of one collective; returns the problem that this rank should raise, if there is one."""
        what = difference(mine, theirs, self._rank, peer.rank)
        party_of = Party.of_message if what == COMMUNICATORS else Party.of
        parties = [party_of(self._rank, mine), party_of(peer.rank, theirs)]
        if what:
            return self._note(Disagreement.between(DisagreementKind.DIFFERENT, parties, what))
        if mine.device_index is not None and mine.device_index == theirs.device_index:
            self._note(Disagreement.between(DisagreementKind.ONE_DEVICE, parties, str(mine.device_index)))
        if mine.tag != theirs.tag and mine.channel.device != "cpu":
            self._note(Disagreement.between(DisagreementKind.TAGS, parties, ""))
        if mine.orders:
            self._compare_order(peer, _Match(mine, theirs, my_position, their_position))
        return None

    def _compare_order(self, peer: _Peer, now: _Match) -> None:
        """Report a communicator that the two ranks use before another one and after it."""
        for earlier in (peer.furthest_mine, peer.furthest_theirs):
            if earlier is not None and (earlier.mine < now.mine) != (earlier.theirs < now.theirs):
                # What each of the two ranks calls first.
                parties = [
                    Party.of(self._rank, min(earlier, now, key=lambda match: match.mine).my_call),
                    Party.of(peer.rank, min(earlier, now, key=lambda match: match.theirs).their_call),
                ]
                self._note(Disagreement.between(DisagreementKind.ORDER, parties, ""))
        if peer.furthest_mine is None or now.mine > peer.furthest_mine.mine:
            peer.furthest_mine = now
        if peer.furthest_theirs is None or now.theirs > peer.furthest_theirs.theirs:
            peer.furthest_theirs = now

    def compare_devices(self) -> None:
        """Report devices that wait for each other, as far as the ranks have come: the script has failed."""
        with self._lock:
            self._compare_devices()

    def _compare_devices(self) -> None:
        for calls in device_deadlocks(issued_logs(self._directory, self._world_size)):
            if len(calls) == 2 and all(call.orders for call in calls.values()):
                continue  # two communicators that two ranks use in different orders
            parties = [Party.of(rank, call) for rank, call in calls.items()]
            both_send = len(calls) == 2 and all(call.op == "send" for call in calls.values())
            kind = DisagreementKind.BOTH_SEND if both_send else DisagreementKind.DEVICE_DEADLOCK
            self._note(Disagreement.between(kind, parties, ""))

    def _note(self, disagreement: Disagreement) -> Disagreement:
        if disagreement.key not in self._reported:
            self._reported.add(disagreement.key)
            self.disagreements.append(disagreement)
        return disagreement

    def observed(self) -> dict[str, Any]:
        """The findings, JSON-ready."""
        return {"found": [asdict(one) for one in self.disagreements], "checked": self.checked}


def _missing(call: Call, caller: int, absent: int) -> Disagreement:
    parties = [Party.of(caller, call), Party(rank=absent, words="", place=None)]
    return Disagreement.between(DisagreementKind.MISSING, parties, "")


def words_of(
    op: str,
    reduce_op: str,
    size: str,
    root: int | None = None,
    pair: tuple[int, int] | None = None,
    *,
    tag: int = 0,
    sends: Sequence[int] = (),
    takes: Sequence[int] = (),
) -> str:
    """A call as people read it: "all_reduce(SUM, 12 float32)", "all_to_all(4 int8, to each 1, 3, from each 2, 2)"."""
    words = [reduce_op, size, f"root {root}" if root is not None else "", f"tag {tag}" if tag else ""]
    words += [f"{which} each {_shortened(numels)}" for which, numels in (("to", sends), ("from", takes)) if numels]
    text = f"{op}({', '.join(word for word in words if word)})"
    return text if pair is None else f"{text} from rank {pair[0]} to rank {pair[1]}"


def _shortened(numels: Sequence[int]) -> str:
    shown = ", ".join(map(str, numels[:_SHOWN]))
    return shown if len(numels) <= _SHOWN else f"{shown}, .."


def place_of(caller: Caller) -> Frame | None:
    """The line of the user's that called; in autograd's threads, the line that called backward."""
    frame = calling_frame()
    if frame is None or owner(frame.file) is Owner.TORCH:
        frame = caller() or frame
    return frame


def is_paired(group: ProcessGroup, *, on_gpus: bool = False) -> bool:
    """
    True if a message that a group issues now runs on a communicator of its two ranks.

    One of a `batch_isend_irecv`, and any message of a group that is bound to a device, runs on the group's.
    """
    if distributed_c10d._world.pg_coalesce_state:
        return False
    if on_gpus:
        return group.bound_device_id is None
    return not getattr(group._get_backend(torch.device(SIMULATED)), "has_one_communicator", False)


def device_order(index: int | None) -> tuple[int, int]:
    """The place of a call on a device that is issued now: `IssuedCall.number` and `waits_for`."""
    number, waits_for = build.load().exchange_order(-1 if index is None else index)
    return number, waits_for


def visible_index(index: int | None) -> int | None:
    """A device of this process, counted on the machine: CUDA_VISIBLE_DEVICES renumbers devices for a process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if index is not None and index < len(visible) and visible[index].strip().isdecimal():
        return int(visible[index])
    return index


def title_of(name: str, description: str, ranks: Sequence[int]) -> str:
    """A group in words."""
    if description == "default_pg" or name == "0":
        return "the default group"
    label = f"{description!r}" if description and description != "undefined" else name
    members = ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, .., {ranks[-1]}"
    return f"group {label} of ranks {members}"
