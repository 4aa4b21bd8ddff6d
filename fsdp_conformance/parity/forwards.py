"""Forwards that some ranks of a failed run have begun, and others have not: each of them waits for another one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from fsdp_conformance.parity.finding import Finding, Whose
from fsdp_conformance.parity.runs import Run
from fsdp_conformance.recordings.events import Mark, Step

#: What a rank says when another one has gone.
_LOST = re.compile(
    r"connection (reset|refused|closed)|closed by peer|broken pipe|timed? ?out|remote|SIGTERM", re.IGNORECASE
)


def first_error(errors: Mapping[int, str]) -> tuple[int, str]:
    """The rank that has failed first, as far as can be told: ranks that lost a connection failed after another one."""

    def order(item: tuple[int, str]) -> tuple[int, int]:
        rank, error = item
        return (2 if _LOST.search(error) else 1 if error.startswith("it was killed") else 0), rank

    return min(errors.items(), key=order)


def unequal_forwards(run: Run) -> Finding | None:
    """The first forward that some ranks have begun where others have begun another one; None if there is none."""
    of_ranks = [_forwards(rank.events) for rank in run.recording.ranks]
    for number, steps in enumerate(zip_longest(*of_ranks, fillvalue=())):
        for begun in zip_longest(*steps):
            marks = {rank: mark for rank, mark in enumerate(begun) if mark is not None}
            if len({mark.detail for mark in marks.values()}) > 1:
                return _finding(number, marks)
    return None


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
    names = [f"rank{'s' * (len(each) > 1)} {', '.join(map(str, each))}" for each in (ranks[odd], ranks[others[0]])]
    return Finding(
        title="The ranks ran different forwards",
        whose=Whose.SCRIPT,
        step=number,
        first=f"{names[0]} ran a forward that {names[1]} did not · {odd}",
        likely="a forward of a sharded model communicates, so every rank must run it: evaluate on all ranks",
        evidence=(f"{names[1]} ran another one instead · {others[0]}",),
        line=marks[ranks[odd][0]].line,
        is_exact=True,
    )
