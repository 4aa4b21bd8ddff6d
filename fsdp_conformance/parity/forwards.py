"""Forwards that some ranks of a failed run have begun, and others have not: each of them waits for another one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from fsdp_conformance.parity.finding import Finding, Whose
from fsdp_conformance.parity.runs import Run, TrainingStep
from fsdp_conformance.recordings.events import Forward, Mark, Step
from fsdp_conformance.recordings.files import RankRecording

#: What a rank says when another one has gone.
_LOST = re.compile(
    r"connection (reset|refused|closed)|closed by peer|broken pipe|timed? ?out|remote|SIGTERM", re.IGNORECASE
)
#: How `Run.errors` begins where a rank has not ended by itself.
_KILLED = "it was killed"


def first_error(errors: Mapping[int, str]) -> tuple[int, str]:
    """The rank that has failed first, as far as can be told: ranks that lost a connection failed after another one."""

    def order(item: tuple[int, str]) -> tuple[int, int]:
        rank, error = item
        return (2 if _LOST.search(error) else 1 if error.startswith(_KILLED) else 0), rank

    return min(errors.items(), key=order)


def unequal_forwards(run: Run) -> Finding | None:
    """
    The first forward that some ranks have begun where others have begun another one, or have left; None if there is
    none.
    """
    of_ranks = [_forwards(rank.events) for rank in run.recording.ranks]
    for number, steps in enumerate(zip_longest(*of_ranks, fillvalue=())):
        for begun in zip_longest(*steps):
            marks = {rank: mark for rank, mark in enumerate(begun) if mark is not None}
            if len({mark.detail for mark in marks.values()}) > 1:
                return _finding(number, marks)
    return _left_alone(run, of_ranks)


def skips_on_some_ranks(run: Run, step: TrainingStep) -> bool:
    """True if some ranks have left out the optimizer's step at the end of this one."""
    return len(set(run.counts)) > 1 and len({len(each) for each in step.backwards}) > 1


def different_counts(run: Run) -> Finding:
    """The ranks have stepped their optimizers differently often."""
    skipped = next((step for step in run.steps if skips_on_some_ranks(run, step)), None)
    likely, seen = "their data has different lengths, or some ranks end earlier", ""
    if skipped is not None:
        counts = [len(each) for each in skipped.backwards]
        shown = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
        likely = "a step is skipped on some ranks alone: what decides about it must be equal on all ranks, as a mean is"
        seen = f"backwards of step {skipped.number}: {shown}"
    return Finding(
        title="The ranks have different numbers of steps",
        whose=Whose.SCRIPT,
        step=min(run.counts) if skipped is None else skipped.number,
        first=", ".join(f"rank {rank}: {count}" for rank, count in enumerate(run.counts)),
        likely=likely,
        evidence=(seen,) if seen else (),
        line="" if skipped is None else skipped.steps[0].line,
        is_exact=True,
    )


def _left_alone(run: Run, of_ranks: Sequence[list[list[Mark]]]) -> Finding | None:
    """The forward in which a rank has lost others that left before it."""
    left = {rank: words for rank, each in enumerate(run.recording.ranks) if (words := _how_it_left(each))}
    for rank, steps in enumerate(of_ranks):
        error = run.errors.get(rank, "")
        has_lost = bool(_LOST.search(error)) or error.startswith(_KILLED)
        if not has_lost or not steps[-1] or _is_finished(run.recording.ranks[rank].events, steps[-1]):
            continue
        number, place = len(steps) - 1, len(steps[-1]) - 1
        missing = [other for other in left if len(of_ranks[other]) <= number or len(of_ranks[other][number]) <= place]
        if missing:
            mark = steps[-1][-1]
            is_evaluation = mark.detail.startswith("evaluation")
            return Finding(
                title="The ranks ran different forwards",
                whose=Whose.SCRIPT,
                step=number,
                first=f"rank {rank} ran a forward that {_names(missing)} did not · {mark.detail}",
                likely="a forward of a sharded model communicates, so every rank must run it: "
                + ("evaluate on all ranks" if is_evaluation else "give all ranks the same number of batches"),
                evidence=tuple(f"rank {other} {left[other]}" for other in missing),
                line=mark.line,
                is_exact=True,
            )
    return None


def _how_it_left(rank: RankRecording) -> str:
    """Empty if the rank failed, was killed, or still runs."""
    marks = [event for event in rank.events if isinstance(event, Mark) and event.kind in ("forward", "left")]
    # It may have made another group and gone on.
    if marks and marks[-1].kind == "left":
        return f"had destroyed its process group · {marks[-1].line}"
    return "had ended" if rank.end is not None and not rank.end.error else ""


def _is_finished(events: Sequence[object], marks: Sequence[Mark]) -> bool:
    """True if the last of the forwards that were begun in a step has returned."""
    return any(
        isinstance(event, Forward) and (event.step, event.number) == (marks[-1].step, len(marks) - 1)
        for event in events
    )


def _forwards(events: Sequence[object]) -> list[list[Mark]]:
    """The forwards of each step, and of the one that was not finished."""
    steps: list[list[Mark]] = [[]]
    for event in events:
        if isinstance(event, Step):
            steps.append([])
        elif isinstance(event, Mark) and event.kind == "forward":
            steps[-1].append(event)
    return steps


def _finding(number: int, marks: Mapping[int, Mark]) -> Finding:
    ranks: dict[str, list[int]] = {}
    for rank, mark in marks.items():
        ranks.setdefault(mark.detail, []).append(rank)
    # The odd one is an evaluation among trainings, or what the fewest ranks do.
    odd, *others = sorted(ranks, key=lambda detail: (not detail.startswith("evaluation"), len(ranks[detail])))
    names = [_names(each) for each in (ranks[odd], ranks[others[0]])]
    return Finding(
        title="The ranks ran different forwards",
        whose=Whose.SCRIPT,
        step=number,
        first=f"{names[0]} ran a forward that {names[1]} did not · {odd}",
        likely="a forward of a sharded model communicates, so every rank must run it: evaluate on all ranks",
        evidence=(f"{names[1]} ran a different one instead · {others[0]}",),
        line=marks[ranks[odd][0]].line,
        is_exact=True,
    )


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
