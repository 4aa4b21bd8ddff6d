"""
A finding about the collectives of several ranks: calls that differ, come in different orders, or are missing.

`sentence()` states it in one line and `explain()` with the lines of code and what to do. Both are the same whichever
rank noticed it. Standard library only.
"""

from __future__ import annotations

import textwrap
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fsdp_conformance.simulator.collectives.calls import COMMUNICATORS, Call
from fsdp_conformance.simulator.frames import Frame

#: Line length of the first sentence.
_WIDTH = 110


class DisagreementKind(StrEnum):
    """The kinds of differences between ranks."""

    DIFFERENT = "different_collectives"
    """Two ranks meet in one collective with different calls."""
    ORDER = "order_of_communicators"
    """Two ranks use two communicators in different orders."""
    BOTH_SEND = "both_send_first"
    """Two ranks send to each other before they receive."""
    DEVICE_DEADLOCK = "deadlock_of_devices"
    """The devices of several ranks wait for each other, each in a call that the others make later."""
    TAGS = "tags_of_messages"
    """A send and the receive that it meets have different tags."""
    ONE_DEVICE = "ranks_on_one_device"
    """Two ranks of a group use the same device."""
    MISSING = "missing_collective"
    """A rank has ended without a collective that another rank has called."""
    DEADLOCK = "deadlock"
    """Ranks wait for each other, each in a collective that the others have not called."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Party:
    """One rank's call."""

    rank: int
    words: str
    """ "all_reduce(SUM, 12 float32) on the default group"; empty for a rank that has not called."""
    place: Frame | None

    @classmethod
    def of(cls, rank: int, call: Call) -> Party:
        """The call of a rank."""
        return cls(rank=rank, words=f"{call.words} on {call.title}", place=call.place)

    @classmethod
    def of_message(cls, rank: int, call: Call) -> Party:
        """The message of a rank, with its communicator."""
        where = "of its two ranks" if call.is_paired else "of the group"
        return cls(rank=rank, words=f"{call.words} on the communicator {where}, {call.title}", place=call.place)


@dataclass(frozen=True, kw_only=True, slots=True)
class Disagreement:
    """One finding, about two ranks or more."""

    kind: DisagreementKind
    what: str
    """For different calls, in which respect they differ; for one device, its index."""
    parties: tuple[Party, ...]
    """By rank."""

    @classmethod
    def between(cls, kind: DisagreementKind, parties: Sequence[Party], what: str) -> Disagreement:
        """A finding, with the parties in the order of their ranks."""
        return cls(kind=kind, what=what, parties=tuple(sorted(parties, key=lambda party: party.rank)))

    @property
    def key(self) -> Hashable:
        """Findings with the same key are shown as one: the same lines, whichever ranks and sizes."""
        places = [(party.place, party.words.partition("(")[0]) for party in self.parties]
        if self.kind is DisagreementKind.ONE_DEVICE:
            return (self.kind, self.what)
        return (self.kind, self.what, tuple(sorted(places, key=str)))

    @property
    def place(self) -> Frame | None:
        """The line to show first."""
        return next((party.place for party in self.parties if party.place is not None), None)

    def sentence(self) -> str:
        """The problem in one line."""
        if self.kind is DisagreementKind.DEADLOCK:
            return f"ranks {self._ranks()} wait for each other: {self._calls('has called')}"
        if self.kind is DisagreementKind.DEVICE_DEADLOCK:
            claim = f"the devices of ranks {self._ranks()} wait for each other, each in a call that others make later"
            return f"{claim}: {self._calls('runs')}"
        first, second = self.parties
        match self.kind:
            case DisagreementKind.DIFFERENT:
                return (
                    f"the {self.what} of a {self._subject()} differ: rank {first.rank} calls {_at(first)}, "
                    f"rank {second.rank} calls {_at(second)}"
                )
            case DisagreementKind.ORDER:
                return (
                    f"two communicators are used in different orders: rank {first.rank} calls {_at(first)} before "
                    f"what rank {second.rank} calls first, {_at(second)}"
                )
            case DisagreementKind.BOTH_SEND:
                return (
                    f"ranks {first.rank} and {second.rank} both send before they receive: rank {first.rank} calls "
                    f"{_at(first)}, rank {second.rank} calls {_at(second)}"
                )
            case DisagreementKind.TAGS:
                return (
                    f"the tags of a message differ: rank {first.rank} calls {_at(first)}, rank {second.rank} calls "
                    f"{_at(second)}"
                )
            case DisagreementKind.ONE_DEVICE:
                return f"ranks {first.rank} and {second.rank} use the same device, {self.what}: {_at(first)}"
        caller, absent = (first, second) if first.words else (second, first)
        return f"rank {caller.rank} calls {_at(caller)}, but rank {absent.rank} has ended without calling it"

    def _ranks(self) -> str:
        return ", ".join(str(party.rank) for party in self.parties)

    def _calls(self, verb: str) -> str:
        return "; ".join(f"rank {party.rank} {verb} {_at(party)}" for party in self.parties)

    def _subject(self) -> str:
        is_message = all(party.words.startswith(("send(", "recv(")) for party in self.parties)
        return "message" if is_message else "collective"

    def advice(self) -> str:
        """Advice on how to fix it."""
        match self.kind:
            case DisagreementKind.DIFFERENT if self.what == COMMUNICATORS:
                return (
                    "pass both messages to torch.distributed.batch_isend_irecv, or neither, or bind the group to its "
                    "device: init_process_group(..., device_id=device). In a group that is not bound, only messages of "
                    "a batch use the group's communicator, and NCCL hangs"
                )
            case DisagreementKind.DIFFERENT:
                return (
                    "all ranks of a group must make the same calls in the same order. NCCL does not compare them: it "
                    "hangs, or mixes up the data"
                )
            case DisagreementKind.ORDER:
                return (
                    "call the collectives of the two groups in one order on all ranks, or let the host wait in "
                    "between. With NCCL the ranks can deadlock"
                )
            case DisagreementKind.BOTH_SEND:
                return (
                    "let one of the two receive first, or pass all of these messages to "
                    "torch.distributed.batch_isend_irecv. NCCL's send may last until its receive runs: both hang"
                )
            case DisagreementKind.DEVICE_DEADLOCK:
                return (
                    "call these in one order on all ranks that take part, or let the next one run on a stream that "
                    "does not wait for the one before. On a GPU they hang; a send may get through while its message "
                    "fits NCCL's buffers"
                )
            case DisagreementKind.TAGS:
                return (
                    "send and receive in the same order. NCCL ignores tags: it delivers the messages between two ranks "
                    "in the order of the calls, here into the wrong tensors"
                )
            case DisagreementKind.ONE_DEVICE:
                return (
                    "call torch.cuda.set_device(local_rank) before anything else, or pass device_ids. NCCL refuses this"
                )
        if self.kind is DisagreementKind.DEADLOCK:
            return "all ranks of a group must call its collectives in the same order as those of other groups"
        return "every rank of the group must call it, or none. With NCCL the callers hang"

    def explain(self) -> str:
        """The sentence, the calls with their lines, and what to do."""
        lines = textwrap.wrap(
            self.sentence(), _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        for party in self.parties:
            if not party.words:
                lines.append(f"  rank {party.rank}: the script has ended")
                continue
            lines.append(f"  rank {party.rank}: {party.words}")
            lines.append(f"      {party.place or '(no line of the script)'}")
        lines += textwrap.wrap(
            f"to do: {self.advice()}", _WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip
        return "\n".join(lines)


def disagreement_from_json(data: Mapping[str, Any]) -> Disagreement:
    """The inverse of `dataclasses.asdict` on a Disagreement."""
    return Disagreement(
        kind=DisagreementKind(data["kind"]),
        what=data["what"],
        parties=tuple(
            Party(
                rank=party["rank"],
                words=party["words"],
                place=Frame(**party["place"]) if party["place"] else None,
            )
            for party in data["parties"]
        ),
    )


def _at(party: Party) -> str:
    return party.words + (f" at {party.place}" if party.place is not None else "")
