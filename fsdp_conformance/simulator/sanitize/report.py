"""The report of `sanitize`: findings merged over ranks, how much was checked, the verdict, the exit status."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import Any

from fsdp_conformance.simulator.checker.hazard import Access, Hazard, hazard_from_json
from fsdp_conformance.simulator.collectives.calls import Call, unanswered
from fsdp_conformance.simulator.collectives.disagreement import Disagreement, disagreement_from_json
from fsdp_conformance.simulator.frames import Owner, owner
from fsdp_conformance.simulator.sanitize.order import ScriptOrder
from fsdp_conformance.simulator.sanitize.rank_children import ChildOfRank
from fsdp_conformance.simulator.suppressions import Suppressed

#: Patterns in the text of a failure, and what they mean here.
_HINTS: Mapping[str, str] = {
    r"not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs|not linked with support for cuda devices": (
        "the script uses CUDA: pass --as-cuda before the script's name, or use the device 'sim' in it"
    ),
    # NotSimulated already explains why a kernel is refused.
    r"(?s)\A(?!.*NotSimulated).*\btriton\b": (
        "Triton compiles for GPUs, but the simulated accelerator runs the CPU kernels of torch's operators"
    ),
    r"No module named '(flash_attn|apex|transformer_engine|xformers|bitsandbytes)": (
        "this package has GPU kernels only, but the simulated accelerator runs the CPU kernels of torch's operators"
    ),
    r"requested and \d+ written|Bad address": (
        "a file or a socket may have been given pinned memory that a copy is still writing: wait for the copy first"
    ),
    r"\bBdbQuit\b": "the debugger was left with quit, which ends the script: continue lets it go on",
    r"Distributed package doesn't have NCCL": (
        "NCCL is simulated only with --as-cuda; without it, omit the backend or use 'sim:simccl'"
    ),
}

#: Version of the format that --json writes.
_FORMAT_VERSION = 2

#: What the report says of each rank that has observed something.
_OF_RANKS = ("accesses", "waits", "streams", "notes")

#: The function of `script` that runs in a thread of this package's own.
_OWN_THREAD = "in keep_observations"

#: A line of a stack that faulthandler wrote.
_STACK_LINE = re.compile(r'File "([^"]+)", line (\d+),? in (\S+)')


class ExitStatus(IntEnum):
    """How a run ended. The value is the exit status of the command."""

    CLEAN = 0
    FINDINGS = 1
    NOTHING_CHECKED = 2
    CANNOT_RUN = 3
    """This machine lacks something."""
    OWN_ERROR = 4
    """This package failed, not the script."""
    SCRIPT_FAILED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnd:
    """How one rank ended."""

    ending: str
    """In a word or two: "finished", "raised"."""
    sentence: str
    """"rank 1 raised ValueError: ..."."""
    is_failure: bool
    error: str = ""
    """Class and message of the exception that ended it."""
    traceback: str = ""
    is_own_error: bool = False
    """The script had not started: this package is to blame."""
    not_run: str = ""
    """Why this machine cannot run the script."""
    stack: str = ""
    """The stacks of its threads, as faulthandler wrote them when it was ended."""
    last_collectives: tuple[str, ...] = ()
    was_ended: bool = False
    """It did not end by itself: the controller ended it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptEnd:
    """How the ranks of a script ended, and which of them failed first."""

    ranks: tuple[RankEnd, ...]
    first: int | None = None
    """The rank that failed first; None if none did."""
    is_hang: bool = False
    """No rank failed by itself: they waited for each other."""
    consequences: tuple[str, ...] = ()
    """A sentence for each other rank that did not finish."""

    @property
    def first_failure(self) -> RankEnd | None:
        """The end of the rank that failed first; None if no rank failed."""
        return None if self.first is None else self.ranks[self.first]


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
    """Names of processes other than ranks that have it, each with the rank that started it."""
    count: int = 0
    """How often it was found, over all places and ranks."""


@dataclass(slots=True)
class FoldedDisagreement:
    """A finding about collectives, merged over the ranks that noticed it."""

    disagreement: Disagreement
    ranks: set[int] = field(default_factory=set)
    """The ranks that it is about."""


class ScriptReport:
    """One run of a script, judged."""

    def __init__(
        self,
        order: ScriptOrder,
        *,
        observed: Sequence[Mapping[str, Any] | None],
        end: ScriptEnd | None,
        seconds: float,
        calls: Sequence[Sequence[Call]] = (),
        interrupted: bool = False,
        children: Sequence[Sequence[ChildOfRank]] = (),
    ) -> None:
        self.order = order
        self.observed = observed
        self.end = end
        """None if the run was interrupted."""
        self.seconds = seconds
        self.interrupted = interrupted
        self.calls = calls
        self.children = children
        """By rank, the observations of the processes that it has started."""
        known = order.suppressions
        self.hazards = folded(observed, children, accepts=lambda hazard: not known.of_hazard(hazard))
        of_children = [{"collectives": child.collectives} for of_rank in children for child in of_rank]
        disagreements = folded_disagreements([*observed, *of_children])
        self.disagreements = [one for one in disagreements if not known.of_disagreement(one.disagreement)]
        self.suppressed = [
            *(
                Suppressed(
                    f"{one.hazard.sentence()}, seen {_times(one.count)} on {_ranks(one.ranks)}",
                    tuple(sorted({line for place in one.places.values() for line in known.of_hazard(place)})),
                )
                for one in folded(observed, children, accepts=lambda hazard: bool(known.of_hazard(hazard)))
            ),
            *(
                Suppressed(one.disagreement.sentence(), lines)
                for one in disagreements
                if (lines := known.of_disagreement(one.disagreement))
            ),
        ]
        """The findings that are not reported."""
        self.unmatched = known.unmatched(self.suppressed) if not interrupted else []
        """The suppressions that match nothing."""
        self.failure = end.first_failure if end is not None else None

    @property
    def accesses(self) -> int:
        """The number of accesses checked on all ranks, and in processes that they have started."""
        of_children = [child.accesses for of_rank in self.children for child in of_rank]
        return sum([*of_children, *(one["accesses"] for one in self.observed if one)])

    @property
    def failed(self) -> bool:
        """True if the script failed to complete on some rank."""
        return self.failure is not None

    @property
    def failed_by_finding(self) -> bool:
        """True if the script failed because this program stopped it at a finding about collectives."""
        # Raised in autograd's C++, it arrives as a RuntimeError with its name in the text.
        is_ours = self.failure is not None and "CollectiveMismatch" in self.failure.error
        return is_ours and bool(self.disagreements)

    @property
    def missing(self) -> str:
        """The thing that this machine lacks to run it at all; empty if nothing."""
        return next((rank.not_run for rank in self.end.ranks if rank.not_run), "") if self.end is not None else ""

    @property
    def own_mistake(self) -> bool:
        """True if a rank failed before the script started, so that the script is not to blame."""
        return self.failure is not None and self.failure.is_own_error

    @property
    def status(self) -> ExitStatus:
        """The exit status of a run that was not interrupted."""
        if self.missing:
            return ExitStatus.CANNOT_RUN
        if self.own_mistake:
            return ExitStatus.OWN_ERROR
        if self.hazards or self.disagreements:
            return ExitStatus.FINDINGS
        if self.failed:
            return ExitStatus.SCRIPT_FAILED
        if self.unmatched and self.order.strict_suppressions and self.accesses:
            return ExitStatus.FINDINGS
        return ExitStatus.CLEAN if self.accesses else ExitStatus.NOTHING_CHECKED

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
            head, _, rest = of_ranks.disagreement.explain().partition("\n")
            yield f"✗ collectives {number}: {head}", "bold red"
            yield f"{rest}\n", ""
        if self.failed and not self.failed_by_finding:
            yield from self._failure()
        if self.suppressed:
            words = [self.order.suppressions.words(one) for one in self.suppressed]
            yield "\n  ".join([f"suppressed: {_plural(len(words), 'finding')}", *words]), ""
        if self.unmatched:
            yield f"matched nothing: {', '.join(self.unmatched)}", "yellow"
        checked = self._checked()
        if checked:
            yield checked, ""
        yield self.verdict(), "bold green" if self.status is ExitStatus.CLEAN else "bold red"

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
        failure = f"{self._who_failed}: {self.failure.sentence}" if self.failure is not None else ""
        if self.status is ExitStatus.FINDINGS and not (self.hazards or self.disagreements):
            number = _plural(len(self.unmatched), "suppression")
            return f"nothing new, but {number} matched nothing: remove {_it(self.unmatched)} {exit_words}"
        if self.status is ExitStatus.FINDINGS:
            has_failed = failure and not self.failed_by_finding
            return f"{self._found_words()}{'; the script failed' if has_failed else ''} {exit_words}"
        if failure:
            return f"{failure} {exit_words}"
        if not self.accesses and self.order.on_gpus:
            return f"nothing was checked: no operator of the script's main thread had a tensor on a GPU {exit_words}"
        if not self.accesses:
            return (
                "nothing was checked: the script put no tensor on the device 'sim'. Use that device, or the device "
                f"of torch.accelerator; if the script uses 'cuda', pass --as-cuda {exit_words}"
            )
        besides = f", {len(self.suppressed)} suppressed" if self.suppressed else ""
        return f"clean: {self._amount()}, 0 hazards{besides} {exit_words}"

    def _number_of_findings(self) -> str:
        words = _plural(len(self.hazards), "hazard")
        if self.disagreements:
            words += f" and {_plural(len(self.disagreements), 'finding')} about collectives"
        return words

    def _found_words(self) -> str:
        """The findings in numbers."""
        parts = []
        if self.hazards:
            total = sum(one.count for one in self.hazards)
            places = sum(len(one.places) for one in self.hazards)
            ranks = sorted({rank for one in self.hazards for rank in one.ranks})
            parts.append(
                f"{_plural(len(self.hazards), 'hazard')} in {_plural(places, 'place')}, "
                f"seen {_times(total)} on {_ranks(ranks)}"
            )
        if self.disagreements:
            ranks = sorted({rank for one in self.disagreements for rank in one.ranks})
            number = _plural(len(self.disagreements), "finding")
            parts.append(f"{number} about collectives of {_ranks(ranks)}")
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The run as data."""
        return {
            "format": _FORMAT_VERSION,
            "script": self.order.target,
            "module": self.order.is_module,
            "arguments": list(self.order.arguments),
            "world_size": self.order.world_size,
            "mode": self.order.mode,
            "as_cuda": self.order.as_cuda,
            "on_gpus": self.order.on_gpus,
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
                    **asdict(one.disagreement),
                    "ranks": sorted(one.ranks),
                    "sentence": one.disagreement.sentence(),
                    "text": one.disagreement.explain(),
                }
                for one in self.disagreements
            ],
            "suppressed": [{"sentence": one.sentence, "lines": list(one.lines)} for one in self.suppressed],
            "unmatched_suppressions": self.unmatched,
            "unanswered": list(self._unanswered()),
            "failure": self.failure.sentence if self.failure is not None else "",
            "traceback": self.failure.traceback if self.failure is not None else "",
            "ranks": [
                {
                    "rank": rank,
                    "ending": self.end.ranks[rank].ending if self.end is not None else "interrupted",
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
        words = f"checked: {self._amount()}, {waits:,} wait{'' if waits == 1 else 's'}, {_duration(self.seconds)}"
        if self.order.ordering_only:
            words += "; ordering only, without numbers"
        return words + (f"; nothing on {_ranks(idle)}" if idle else "")

    def _amount(self) -> str:
        streams = max((one["streams"] for one in self.observed if one), default=0)
        on_streams = f" on {_plural(streams, 'stream')}" if streams else ""  # children do not count them
        words = f"{self.accesses:,} accesses{on_streams} of {_ranks_count(self.observed)}"
        started = sum(map(len, self.children))
        if started:
            words += f" and {started} child process{'es' if started > 1 else ''}"
        compared = sum((one or {}).get("collectives", {}).get("checked", 0) for one in self.observed)
        return words + (f", {compared:,} collectives compared" if compared and len(self.observed) > 1 else "")

    def _failure(self) -> Iterator[tuple[str, str]]:
        """The first rank to fail with its evidence, the consequences, then the evidence of the other ranks."""
        end = self.end
        if end is None or self.failure is None:
            return
        yield f"✗ {self._who_failed}: {self.failure.sentence}", "bold red"
        for sentence in end.consequences:
            yield f"  then {sentence}", ""
        for rank in sorted(range(len(end.ranks)), key=lambda rank: (rank != end.first, rank)):
            evidence = _evidence(rank, end.ranks[rank], is_first=rank == end.first)
            if evidence:
                yield "\n".join(f"  {line}" for line in evidence), ""
        for line in self._unanswered():
            yield f"  {line}", ""
        hint = next((hint for pattern, hint in _HINTS.items() if re.search(pattern, self.failure.traceback)), "")
        if hint:
            yield f"  hint: {hint}", "yellow"
        yield "", ""

    def _unanswered(self) -> Iterator[str]:
        """For a run that hung: the collectives that not all ranks have called, and where the others are."""
        if self.end is None or not self.end.is_hang:
            return
        for one in unanswered(self.calls):
            where = "; ".join(f"rank {rank} {self._whereabouts(rank, self.end.ranks[rank])}" for rank in one.missing)
            yield f"only {_ranks(one.callers)} called {one.call}; {where}"

    def _whereabouts(self, rank: int, end: RankEnd) -> str:
        """Where a rank is, or how it ended."""
        frames = (match.groups() for match in _STACK_LINE.finditer(_of_script(end.stack)))
        frame = next((frame for frame in frames if owner(frame[0]) is Owner.USER), None)
        last = self.calls[rank][-1] if self.calls[rank] else None
        where = f"is at {_frame(*frame)}" if frame is not None else end.sentence.removeprefix(f"rank {rank} ")
        return where + (f", after {last}" if last is not None else ", before any collective")


def folded(
    observed: Sequence[Mapping[str, Any] | None],
    children: Sequence[Sequence[ChildOfRank]] = (),
    *,
    accepts: Callable[[Hazard], bool] = lambda _: True,
) -> list[FoldedHazard]:
    """
    The hazards of all ranks, and of the processes that they have started; those that `accepts` selects.

    Hazards of one kind between the same two lines of the script are merged, however the program reaches these lines,
    and whatever the devices, streams, blocks and sizes.
    """
    by_key: dict[Hashable, FoldedHazard] = {}
    for rank, one in enumerate(observed):
        of_rank = [("", data) for data in (one["hazards"] if one else ())]
        of_rank += [(child.name, data) for child in (children[rank] if children else ()) for data in child.hazards]
        for process, data in of_rank:
            hazard = hazard_from_json(data)
            if not accepts(hazard):
                continue
            key = (hazard.kind, hazard.pinned, _line(hazard.then), _line(hazard.now))
            same = by_key.setdefault(key, FoldedHazard(hazard))
            same.places.setdefault((_way(hazard.then), _way(hazard.now)), hazard)
            same.count += hazard.count
            if rank not in same.ranks:
                same.ranks.append(rank)
            if process:
                same.processes.setdefault(process, rank)
    return list(by_key.values())


def folded_disagreements(observed: Sequence[Mapping[str, Any] | None]) -> list[FoldedDisagreement]:
    """The findings about collectives, each once: usually both ranks notice, and later steps repeat them."""
    by_key: dict[Hashable, FoldedDisagreement] = {}
    for one in observed:
        for data in (one or {}).get("collectives", {}).get("found", ()):
            disagreement = disagreement_from_json(data)
            same = by_key.setdefault(disagreement.key, FoldedDisagreement(disagreement))
            same.ranks |= {party.rank for party in disagreement.parties}
    return list(by_key.values())


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
        if any(_OWN_THREAD in line for line in lines):
            continue
        bottom = next((index for index, line in enumerate(lines) if "<frozen runpy>" in line), len(lines))
        blocks.append("\n".join(lines[:bottom]))
    return "\n\n".join(blocks)


def _evidence(rank: int, end: RankEnd, *, is_first: bool) -> list[str]:
    """The lines that show why a rank failed."""
    lines: list[str] = []
    if not end.is_failure:
        return lines
    # The traceback of a peer that lost the first rank is long and adds nothing.
    if is_first and end.traceback:
        lines += end.traceback.rstrip().splitlines()
    if end.stack:
        lines += [f"stacks of rank {rank}:", *(f"  {line}" for line in _of_script(end.stack).splitlines())]
    if end.last_collectives and (is_first or end.stack or end.was_ended):
        lines += [f"last collectives of rank {rank}:", *(f"  {line}" for line in end.last_collectives)]
    return lines


def _frame(file: str, line: str, function: str) -> str:
    """ "train.py:12 in main"; paths begin below site-packages or the working directory."""
    file = re.split(r"[/\\](?:site|dist)-packages[/\\]", file)[-1]
    return f"{file.removeprefix(os.getcwd() + os.sep)}:{line} in {function}"


def _duration(seconds: float) -> str:
    """ "0.4 s", "48 s", "3 min 05 s"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _plural(count: int, noun: str) -> str:
    """ "1 rank", "2 ranks"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _it(things: Sequence[object]) -> str:
    return "it" if len(things) == 1 else "them"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _in_processes(one: FoldedHazard) -> str:
    """A phrase that names the processes, other than ranks, that have a hazard."""
    if not one.processes:
        return ""
    return f", in the child process{'es' if len(one.processes) > 1 else ''} {', '.join(one.processes)}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _ranks_count(observed: Sequence[object]) -> str:
    return _plural(len(observed), "rank")
