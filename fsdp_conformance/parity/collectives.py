"""
The collectives of two runs, compared as evidence for a difference.

Runs that are sharded in different ways have other collectives, and are right. So they are only compared where most
kinds of them are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fsdp_conformance.parity.runs import Run, TrainingStep
from fsdp_conformance.recordings.events import Collectives

#: A rank of both runs has the same strategy if this part of its kinds of collectives, or more, is in both alike.
_ALIKE = 0.5

#: Lines that are shown.
_MOST = 4

#: Op, reduce op, dtype and group.
Key = tuple[str, str, str, tuple[int, ...]]


def other_collectives(run: Run, reference: Run, last: int) -> tuple[str, ...]:
    """The first collectives that differ in a step up to `last`, in words; none if the strategies are different ones."""
    if run.world_size != reference.world_size or run.sharding != reference.sharding:
        return ()
    for number in range(min(last + 1, len(run.steps), len(reference.steps))):
        lines = list(_of_step(run.steps[number], reference.steps[number]))
        if lines:
            more = (f"and {len(lines) - _MOST} more",) * (len(lines) > _MOST)
            return (*lines[:_MOST], *more)
    return ()


def _of_step(step: TrainingStep, expected: TrainingStep) -> Iterator[str]:
    for rank, (mine, theirs) in enumerate(zip(step.steps, expected.steps, strict=True)):
        for line in _of_rank(_by_key(mine.collectives), _by_key(theirs.collectives)):
            yield f"collectives of rank {rank} in step {step.number}: {line}"


def _by_key(collectives: tuple[Collectives, ...]) -> dict[Key, Collectives]:
    return {(each.op, each.reduce_op, each.dtype, each.group): each for each in collectives}


def _of_rank(mine: Mapping[Key, Collectives], theirs: Mapping[Key, Collectives]) -> Iterator[str]:
    shared = [key for key in theirs if key in mine]
    if _scatters(mine) is not _scatters(theirs):
        return
    if not mine or not theirs or len(shared) < _ALIKE * max(len(mine), len(theirs)):
        return
    missing = {key: each for key, each in theirs.items() if key not in mine}
    for key, each in mine.items():
        wanted = theirs.get(key)
        if wanted is None:
            other = next((name for name in missing if _is_one_of(missing[name], each)), None)
            if other is None:
                yield f"{_words(each)} is extra, {_amount(each)}"
            else:
                yield f"{_words(each)} instead of {_words(missing.pop(other))}, {_amount(each)}"
        elif (each.calls, each.nbytes) != (wanted.calls, wanted.nbytes):
            yield f"{_words(each)}, {_amount(each)} instead of {_amount(wanted)}"
    for each in missing.values():
        yield f"{_words(each)} is missing, {_amount(each)}"


def _scatters(collectives: Mapping[Key, Collectives]) -> bool:
    """True if gradients are scattered, which replicas never do. A script may gather its own tensors."""
    return any(op.startswith("reduce_scatter") for op, *_ in collectives)


def _is_one_of(wanted: Collectives, each: Collectives) -> bool:
    """True if they differ in the dtype, the reduce op or the group alone."""
    pairs = ((wanted.dtype, each.dtype), (wanted.reduce_op, each.reduce_op), (wanted.group, each.group))
    return (wanted.op, wanted.calls) == (each.op, each.calls) and sum(one != other for one, other in pairs) == 1


def _words(each: Collectives) -> str:
    ranks = ", ".join(map(str, each.group))
    return " ".join(word for word in (each.op, each.reduce_op, each.dtype, f"of ranks {ranks}") if word)


def _amount(each: Collectives) -> str:
    return f"{each.calls} call{'s' * (each.calls != 1)} with {each.nbytes} B"
