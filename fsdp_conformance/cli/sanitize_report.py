"""The report of `sanitize`: findings merged over ranks, how much was checked, the verdict, the exit status."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fsdp_conformance.cli import messages
from fsdp_conformance.outcome.endings import Attribution, Ending, attribute
from fsdp_conformance.outcome.records import RankExit, RankReport
from fsdp_conformance.report.terminal import duration
from fsdp_conformance.simulated_cuda.of_ranks import ChildOfRank
from fsdp_conformance.simulator.calls import Call, unanswered
from fsdp_conformance.simulator.disagreement import Disagreement, disagreement_from_json
from fsdp_conformance.simulator.hazard import Access, Hazard, hazard_from_json
from fsdp_conformance.simulator.launch import ScriptOrder
from fsdp_conformance.stack import Owner, frames_of_stack, owner
from fsdp_conformance.status import Status

#: Patterns in the text of a failure, and what they mean here.
_HINTS: Mapping[str, str] = {
    r"not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs|not linked with support for cuda devices": (
        "the script uses CUDA: pass --as-cuda before the script's name, or use the device 'sim' in it"
    ),
    r"\btriton\b": "Triton compiles for GPUs, but the simulated accelerator runs the CPU kernels of torch's operators",
    r"No module named '(flash_attn|apex|transformer_engine|xformers|bitsandbytes)": (
        "this package has GPU kernels only, but the simulated accelerator runs the CPU kernels of torch's operators"
    ),
    r"requested and \d+ written|Bad address": (
        "a file or a socket may have been given pinned memory that a copy is still writing: wait for the copy first"
    ),
    r"Distributed package doesn't have NCCL": (
        "NCCL is simulated only with --as-cuda; without it, omit the backend or use 'sim:simccl'"
    ),
}

#: Version of the format that --json writes.
_FORMAT_VERSION = 1

#: What the report says of each rank that has observed something.
_OF_RANKS = ("accesses", "waits", "streams", "notes")

#: The function of `simulator.script` that runs in the suite's own thread.
_KEEPER = "in keep_observations"


@dataclass(slots=True)
class FoldedHazard:
    """A hazard between two lines of the script, merged over places and ranks."""

    hazard: Hazard
    """The hazard as found by the first of the ranks."""
    places: dict[Hashable, Hazard] = field(default_factory=dict)
    """The ways in which the program reaches the two lines, by what differs: operations, labels, stacks."""
    ranks: list[int] = field(default_factory=list)
    """The ranks that have it, or have started a process that has it."""
    processes: dict[str, int] = field(default_factory=dict)
    """Names of the processes that have it and are no ranks, each with the rank that started it."""
    count: int = 0
    """How often it was found, over all places and ranks."""


@dataclass(slots=True)
class FoldedDisagreement:
    """A finding about collectives, merged over the ranks that noticed it."""

    found: Disagreement
    ranks: set[int] = field(default_factory=set)
    """The ranks that it is about."""


class ScriptReport:
    """One run of a script, judged."""

    def __init__(
        self,
        order: ScriptOrder,
        *,
        observed: Sequence[Mapping[str, Any] | None],
        reports: Sequence[RankReport | None],
        exits: Sequence[RankExit],
        seconds: float,
        calls: Sequence[Sequence[Call]] = (),
        interrupted: bool = False,
        children: Sequence[Sequence[ChildOfRank]] = (),
    ) -> None:
        self.order = order
        self.observed = observed
        self.reports = reports
        self.exits = exits
        self.seconds = seconds
        self.interrupted = interrupted
        self.calls = calls
        self.children = children
        """What processes have observed that the ranks have started, by rank."""
        self.hazards = folded(observed, children)
        self.disagreements = folded_disagreements(observed)
        self.found: Attribution | None = attribute(reports, exits) if exits else None

    @property
    def accesses(self) -> int:
        """The number of accesses checked on all ranks, and in processes that they have started."""
        of_children = [child.accesses for of_rank in self.children for child in of_rank]
        return sum([*of_children, *(one["accesses"] for one in self.observed if one)])

    @property
    def failed(self) -> bool:
        """Whether the script failed to complete on some rank."""
        return self.found is not None and self.found.first is not None

    @property
    def failed_by_finding(self) -> bool:
        """Whether the script failed because this program stopped it at a finding about collectives."""
        error = self.found.first.error if self.found is not None and self.found.first is not None else None
        # Raised in autograd's C++, it arrives as a RuntimeError with its name in the text.
        is_ours = error is not None and "CollectiveMismatch" in error.kind + error.message
        return is_ours and bool(self.disagreements)

    @property
    def missing(self) -> str:
        """Why this machine cannot run it at all; empty if it can."""
        return next((report.not_run for report in self.reports if report and report.not_run), "")

    @property
    def own_mistake(self) -> bool:
        """Whether a rank failed before the script started, so that the script is not to blame."""
        if self.found is None or self.found.first is None:
            return False
        report = self.reports[self.found.first.rank]
        return report is not None and report.error is not None and report.error.blame == "suite"

    @property
    def status(self) -> Status:
        """The exit status of a run that was not interrupted."""
        if self.missing:
            return Status.ENVIRONMENT
        if self.own_mistake:
            return Status.SUITE
        if self.hazards or self.disagreements:
            return Status.NOT_CERTIFIED
        if self.failed:
            return Status.SCRIPT_FAILED
        return Status.CERTIFIED if self.accesses else Status.USAGE

    def paragraphs(self) -> Iterator[tuple[str, str]]:
        """The paragraphs to print, each with its style on a terminal; the verdict comes last."""
        yield "", ""
        for note in dict.fromkeys(self._notes()):
            yield f"note: {note}\n", "yellow"
        for number, one in enumerate(self.hazards, 1):
            head, _, rest = replace(one.hazard, count=1).explain().partition("\n")
            yield f"✗ hazard {number}: {head}", "bold red"
            places = f" in {len(one.places)} places" if len(one.places) > 1 else ""
            yield f"{rest}\n  seen: {_times(one.count)}{places}, on {_ranks(one.ranks)}{_in_processes(one)}\n", ""
        for number, of_ranks in enumerate(self.disagreements, 1):
            head, _, rest = of_ranks.found.explain().partition("\n")
            yield f"✗ collectives {number}: {head}", "bold red"
            yield f"{rest}\n", ""
        if self.failed and not self.failed_by_finding:
            yield from self._failure()
        checked = self._checked()
        if checked:
            yield checked, ""
        yield self.verdict(), "bold green" if self.status is Status.CERTIFIED else "bold red"

    def _notes(self) -> Iterator[str]:
        yield from (note for one in self.observed if one for note in one["notes"])
        for rank, of_rank in enumerate(self.children):
            for child in of_rank:
                yield from child.notes
                if not child.has_ended:
                    ending = "was killed or outlived it: its last findings may be missing"
                    yield f"{child.name}, started by rank {rank}, {ending}"

    def verdict(self) -> str:
        """The last line."""
        if self.interrupted:
            return f"interrupted after {self._number_of_findings()}"
        exit_words = f"[exit {int(self.status)}]"
        if self.missing:
            return f"not run: {self.missing} {exit_words}"
        failure = f"{self._who_failed}: {self.found.headline}" if self.failed and self.found is not None else ""
        if self.status is Status.NOT_CERTIFIED:
            has_failed = failure and not self.failed_by_finding
            return f"{self._found_words()}{'; the script failed' if has_failed else ''} {exit_words}"
        if failure:
            return f"{failure} {exit_words}"
        if not self.accesses:
            return (
                "nothing was checked: the script put no tensor on the device 'sim'. Use that device, or the device "
                f"of torch.accelerator; if the script uses 'cuda', pass --as-cuda {exit_words}"
            )
        return f"clean: {self._amount()}, 0 hazards {exit_words}"

    def _number_of_findings(self) -> str:
        words = messages.plural(len(self.hazards), "hazard")
        if self.disagreements:
            words += f" and {messages.plural(len(self.disagreements), 'finding')} about collectives"
        return words

    def _found_words(self) -> str:
        """The findings in numbers."""
        parts = []
        if self.hazards:
            total = sum(one.count for one in self.hazards)
            places = sum(len(one.places) for one in self.hazards)
            ranks = sorted({rank for one in self.hazards for rank in one.ranks})
            parts.append(
                f"{messages.plural(len(self.hazards), 'hazard')} in {messages.plural(places, 'place')}, "
                f"seen {_times(total)} on {_ranks(ranks)}"
            )
        if self.disagreements:
            ranks = sorted({rank for one in self.disagreements for rank in one.ranks})
            number = messages.plural(len(self.disagreements), "finding")
            parts.append(f"{number} about collectives of {_ranks(ranks)}")
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The run as data."""
        endings = self.found.endings if self.found is not None else ()
        return {
            "format": _FORMAT_VERSION,
            "script": self.order.target,
            "module": self.order.is_module,
            "arguments": list(self.order.arguments),
            "world_size": self.order.world_size,
            "mode": self.order.mode,
            "as_cuda": self.order.as_cuda,
            "status": None if self.interrupted else int(self.status),
            "verdict": self.verdict(),
            "seconds": self.seconds,
            "hazards": [
                {
                    **one.hazard.to_json(),
                    "ranks": one.ranks,
                    "processes": one.processes,
                    "count": one.count,
                    "sentence": one.hazard.sentence(),
                    "text": one.hazard.explain(),
                    "places": [hazard.to_json() for hazard in one.places.values()],
                }
                for one in self.hazards
            ],
            "collectives": [
                {
                    **asdict(one.found),
                    "ranks": sorted(one.ranks),
                    "sentence": one.found.sentence(),
                    "text": one.found.explain(),
                }
                for one in self.disagreements
            ],
            "unanswered": list(self._unanswered()),
            "failure": self.found.headline if self.found is not None else "",
            "traceback": self._traceback(),
            "ranks": [
                {
                    "rank": rank,
                    "ending": str(endings[rank].ending) if endings else "interrupted",
                    **{name: (self.observed[rank] or {})[name] for name in _OF_RANKS if self.observed[rank]},
                    "children": [
                        {"process": child.name, "accesses": child.accesses, "has_ended": child.has_ended}
                        for child in self._children_of(rank)
                    ],
                }
                for rank in range(self.order.world_size)
            ],
        }

    def _children_of(self, rank: int) -> Sequence[ChildOfRank]:
        return self.children[rank] if self.children else ()

    @property
    def _who_failed(self) -> str:
        return "an error in this suite, not in the script" if self.own_mistake else "the script failed"

    def _checked(self) -> str:
        """How much was checked: a run that checks little proves little."""
        waits = sum(sum(one["waits"].values()) for one in self.observed if one)
        if not self.accesses:
            return ""
        idle = [
            rank
            for rank, one in enumerate(self.observed)
            if one is not None and not one["accesses"] and not self._children_of(rank)
        ]
        words = f"checked: {self._amount()}, {waits:,} waits, {duration(self.seconds)}"
        if self.order.ordering_only:
            words += "; ordering only, without numbers"
        return words + (f"; nothing on {_ranks(idle)}" if idle else "")

    def _amount(self) -> str:
        streams = max((one["streams"] for one in self.observed if one), default=0)
        on_streams = f" on {messages.plural(streams, 'stream')}" if streams else ""  # children do not count them
        words = f"{self.accesses:,} accesses{on_streams} of {_ranks_count(self.observed)}"
        started = sum(map(len, self.children))
        if started:
            words += f" and {started} child process{'es' if started > 1 else ''}"
        compared = sum((one or {}).get("collectives", {}).get("checked", 0) for one in self.observed)
        return words + (f", {compared:,} collectives compared" if compared and len(self.observed) > 1 else "")

    def _traceback(self) -> str:
        if self.found is None or self.found.first is None:
            return ""
        report = self.reports[self.found.first.rank]
        return report.error.traceback if report is not None and report.error is not None else ""

    def _failure(self) -> Iterator[tuple[str, str]]:
        """The first rank to fail with its evidence, the consequences, then the evidence of the other ranks."""
        found = self.found
        if found is None or found.first is None:
            return
        yield f"✗ {self._who_failed}: {found.headline}", "bold red"
        for sentence in found.consequences:
            yield f"  then {sentence}", ""
        first = found.first.rank
        for rank in sorted(range(len(self.exits)), key=lambda rank: (rank != first, rank)):
            evidence = self._evidence(rank, is_first=rank == first)
            if evidence:
                yield "\n".join(f"  {line}" for line in evidence), ""
        for line in self._unanswered():
            yield f"  {line}", ""
        hint = self._hint()
        if hint:
            yield f"  hint: {hint}", "yellow"
        yield "", ""

    def _unanswered(self) -> Iterator[str]:
        """For a run that hung: the collectives that not all ranks have called, and where the others are."""
        if self.found is None or not self.found.is_hang:
            return
        for one in unanswered(self.calls):
            where = "; ".join(f"rank {rank} {self._whereabouts(rank)}" for rank in one.missing)
            yield f"only {_ranks(one.callers)} called {one.call}; {where}"

    def _whereabouts(self, rank: int) -> str:
        """Where a rank is, or how it ended."""
        assert self.found is not None, "asked for runs that ended"
        ending = self.found.endings[rank]
        frames = frames_of_stack(_of_script(self.exits[rank].stack or ""))
        frame = next((frame for frame in frames if owner(frame.file) is Owner.USER), None)
        last = self.calls[rank][-1] if self.calls[rank] else None
        where = f"is at {frame}" if frame is not None else ending.sentence.removeprefix(f"rank {rank} ")
        return where + (f", after {last}" if last is not None else ", before any collective")

    def _evidence(self, rank: int, *, is_first: bool) -> list[str]:
        report, end = self.reports[rank], self.exits[rank]
        lines: list[str] = []
        if self.found is None or self.found.endings[rank].ending in (Ending.FINISHED, Ending.LEFT_OUT):
            return lines
        # The traceback of a peer that lost the first rank is long and adds nothing.
        if is_first and report is not None and report.error is not None:
            lines += report.error.traceback.rstrip().splitlines()
        if end.stack:
            lines += [f"stacks of rank {rank}:", *(f"  {line}" for line in _of_script(end.stack).splitlines())]
        if end.last_collectives and (is_first or end.stack or end.ended_by_controller):
            lines += [f"last collectives of rank {rank}:", *(f"  {line}" for line in end.last_collectives)]
        return lines

    def _hint(self) -> str:
        text = self._traceback()
        return next((hint for pattern, hint in _HINTS.items() if re.search(pattern, text)), "")


def folded(
    observed: Sequence[Mapping[str, Any] | None], children: Sequence[Sequence[ChildOfRank]] = ()
) -> list[FoldedHazard]:
    """
    The hazards of all ranks, and of the processes that they have started.

    Hazards of one kind between the same two lines of the script are merged, however the program reaches these lines,
    and whatever the devices, streams, blocks and sizes.
    """
    found: dict[Hashable, FoldedHazard] = {}
    for rank, one in enumerate(observed):
        of_rank = [("", data) for data in (one["hazards"] if one else ())]
        of_rank += [(child.name, data) for child in (children[rank] if children else ()) for data in child.hazards]
        for process, data in of_rank:
            hazard = hazard_from_json(data)
            key = (hazard.kind, hazard.pinned, _line(hazard.then), _line(hazard.now))
            same = found.setdefault(key, FoldedHazard(hazard))
            same.places.setdefault((_way(hazard.then), _way(hazard.now)), hazard)
            same.count += hazard.count
            if rank not in same.ranks:
                same.ranks.append(rank)
            if process:
                same.processes.setdefault(process, rank)
    return list(found.values())


def folded_disagreements(observed: Sequence[Mapping[str, Any] | None]) -> list[FoldedDisagreement]:
    """The findings about collectives, each once: usually both ranks notice, and later steps repeat them."""
    found: dict[Hashable, FoldedDisagreement] = {}
    for one in observed:
        for data in (one or {}).get("collectives", {}).get("found", ()):
            disagreement = disagreement_from_json(data)
            same = found.setdefault(disagreement.key, FoldedDisagreement(disagreement))
            same.ranks |= {party.rank for party in disagreement.parties}
    return list(found.values())


def _line(access: Access) -> Hashable:
    """The line that issued an access; if no line of the script did, the operation and its label."""
    site = access.site
    frame = site.innermost()
    return (access.stream.is_host, frame) if frame is not None else (access.stream.is_host, site.op, site.label)


def _way(access: Access) -> Hashable:
    return access.stream.number, access.stream.name, access.site.op, access.site.label, access.site.stack


def _of_script(dump: str) -> str:
    """The stacks of a rank without the suite's own thread, and without the frames that started the script."""
    blocks = []
    for block in dump.strip().split("\n\n"):
        lines = block.splitlines()
        if any(_KEEPER in line for line in lines):
            continue
        bottom = next((index for index, line in enumerate(lines) if "<frozen runpy>" in line), len(lines))
        blocks.append("\n".join(lines[:bottom]))
    return "\n\n".join(blocks)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _in_processes(one: FoldedHazard) -> str:
    """Which processes have a hazard that are no ranks."""
    if not one.processes:
        return ""
    return f", in the child process{'es' if len(one.processes) > 1 else ''} {', '.join(one.processes)}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _ranks_count(observed: Sequence[object]) -> str:
    return messages.plural(len(observed), "rank")
