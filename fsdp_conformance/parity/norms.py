"""The norm by which gradients are clipped, and how one that is wrong was made."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fsdp_conformance.parity.bounds import Bounds
from fsdp_conformance.parity.changed import leaves_gathered, lost_or_kept, why_rewritten
from fsdp_conformance.parity.finding import Finding, Whose
from fsdp_conformance.parity.noise import eps_of
from fsdp_conformance.parity.runs import Run, TrainingStep, divisions, norm_together
from fsdp_conformance.parity.words import instead, scaled

#: The kind of the 2-norm.
_TWO = 2.0


def norm_differences(bounds: Bounds, run: Run, reference: Run, number: int, whose: Whose) -> Iterator[Finding]:
    """Compare how two runs clip in a step. `whose` a difference is that no mistake of the script explains."""
    step, expected = run.steps[number], reference.steps[number]
    mine, theirs = clipping(step), clipping(expected)
    if (mine is None) is not (theirs is None):
        yield Finding(
            title="Only one of the runs clips its gradients",
            is_exact=True,
            whose=Whose.SCRIPT,
            step=step.number,
            first="the run does not" if mine is None else "the reference does not",
            line=step.steps[0].line,
        )
    if mine is None or theirs is None:
        return
    (norm, limit, line), (expected_norm, expected_limit, _) = mine, theirs
    if limit != expected_limit:
        yield Finding(
            title="The gradients are clipped to a different norm",
            is_exact=True,
            whose=Whose.SCRIPT,
            step=step.number,
            first=instead(limit, expected_limit),
            line=line,
        )
    # The gradients may differ by rounding. The norm must still be the norm of the gradients that it was taken of.
    own, expected_own = norm_of_gradients(step), norm_of_gradients(expected)
    changed = own / expected_own if own and expected_own else 1.0
    dtypes = {value.dtype for value in (*step.unclipped.values.values(), *expected.unclipped.values.values())}
    tolerance = max(1e-3, 8 * max(map(eps_of, dtypes), default=0.0))
    if norm is not None and expected_norm and abs(norm / expected_norm - changed) > tolerance * changed:
        if of_gathered := gathered_tensors(step, is_meant=leaves_gathered(run, number)):
            by_script, likely = of_gathered
        else:
            by_script, likely = why_norm(step, expected, norm, expected_norm, tolerance)
        yield Finding(
            title="The norm of the gradients differs although the gradients agree",
            whose=Whose.SCRIPT if by_script else whose,
            step=step.number,
            first=instead(norm, expected_norm),
            likely=likely,
            line=line,
        )
    clipped = bounds.exceeded("clipped", step.number, step.gradients.values, expected.gradients.values)
    if clipped:
        _, value, wanted, _ = clipped[0]
        rewritten = next((each.rewritten for each in step.steps if each.rewritten), "")
        likely = why_rewritten(value, wanted, step, expected)
        lost = lost_or_kept(run, reference, number)
        if not likely and lost is not None:
            likely, line = lost
        whose = Whose.SCRIPT if likely else whose
        yield bounds.finding(
            "The gradients differ after clipping",
            step,
            "clipped",
            clipped,
            total=len(expected.gradients.values),
            whose=whose,
            likely=likely or scaled(value, wanted),
            line=rewritten or line,
        )


def clipping(step: TrainingStep) -> tuple[float | None, float, str] | None:
    """The norm over all ranks, the limit and the line of the first clipping of a step."""
    if not all(step.clips):
        return None
    clips = [clips[0] for clips in step.clips]
    first = clips[0]
    together = norm_together(step) if first.is_partial else None
    return first.norm if together is None else together, first.limit, first.line


def norm_of_gradients(step: TrainingStep) -> float:
    """The 2-norm of all gradients before they were clipped. 0 if it is not finite, or another norm is taken."""
    values = step.unclipped.values.values()
    if any(value.nonfinite for value in values) or any(clip.kind != _TWO for clips in step.clips for clip in clips):
        return 0.0
    return math.sqrt(sum(value.square for value in values))


def why_norm(
    step: TrainingStep, reference: TrainingStep, norm: float, expected: float, tolerance: float
) -> tuple[bool, str]:
    """True if the script has taken another norm than the reference, and how it was made, in words."""
    together = norm_together(step)
    if together is not None and abs(together - expected) <= tolerance * expected and _are_own(step, tolerance):
        own = "each rank computed the norm of only its own shards"
        if "range" not in divisions(step) or step.clips[0][0].tensors is None:
            return False, own
        # FSDP1's shards are plain tensors: torch's own function sees those of this rank alone.
        return True, f"{own}: call the `clip_grad_norm_` of the engine, which adds them up over the ranks"
    # A rank that holds no part of a tensor clips fewer tensors, which is not a mistake in itself.
    others = other_tensors(step, reference)
    if others:
        return True, others
    for likely, candidate in _mistakes(step):
        if abs(norm - candidate) <= tolerance * candidate:
            return False, likely
    ratio = norm / expected
    local = "as of one rank's shards" if ratio < 1 else "as of gradients that were counted several times"
    return False, f"it is {ratio:.4g} times the expected one, {local}"


def _are_own(step: TrainingStep, tolerance: float) -> bool:
    """True if the norm that each rank got is that of what it holds; also of norms that sketches do not give."""
    first = [clips[0] for clips in step.clips]
    if first[0].kind != _TWO:
        return True
    norms = [math.sqrt(sum(value.square for value in clip.gradients.values())) for clip in first]
    return all(abs((clip.norm or 0.0) - norm) <= tolerance * norm for clip, norm in zip(first, norms, strict=True))


def gathered_tensors(step: TrainingStep, *, is_meant: bool) -> tuple[bool, str] | None:
    """
    That the first clipping of a step was given gathered parameters, and whether it is the script that keeps them so.

    None if it was not. `is_meant`: the script has kept the engine from resharding.
    """
    gathered = step.clips[0][0].gathered
    if not gathered:
        return None
    seen = f"{gathered} of the tensors that it was given are gathered parameters, and the gradients are those of shards"
    if not is_meant:
        return (
            False,
            f"{seen}: the engine has not resharded them after the backward, although nothing in the script prevents it",
        )
    return True, (
        f"{seen}: the model must be resharded before (FSDP2: `reshard()`, `set_reshard_after_backward(True)` for the "
        "last micro-batch)"
    )


def other_tensors(step: TrainingStep, expected: TrainingStep) -> str:
    """How the first clipping of a step was given other tensors than the reference's, in words; empty if it was not."""
    mine, theirs = step.clips[0][0], expected.clips[0][0]
    if mine.strangers > theirs.strangers:
        return (
            f"{mine.strangers} of the tensors that it was given belong to no module: they were collected before the "
            "model was sharded or moved, which makes other parameters, and never get a gradient"
        )
    if mine.tensors is not None and theirs.tensors is not None and mine.tensors != theirs.tensors:
        return f"the gradients of {mine.tensors} tensors are clipped, and in the reference those of {theirs.tensors}"
    return ""


def _mistakes(step: TrainingStep) -> Iterator[tuple[str, float]]:
    """Wrong norms of the gradients of a step, and how each is made."""
    whole = [math.sqrt(value.square) for value in step.unclipped.values.values()]
    parts = [[math.sqrt(value.square) for value in clips[0].gradients.values()] for clips in step.clips]
    norms = [math.hypot(*of_rank) for of_rank in parts]
    for rank, norm in enumerate(norms):
        largest = ", the largest one: of this rank only, or a maximum over the ranks" if norm == max(norms) else ""
        yield f"it is the norm of the shards of rank {rank} alone{largest}", norm
    added = "the norms of the tensors are added up, and not their squares"
    yield added, math.fsum(whole)
    yield f"on each rank {added}", math.hypot(*(math.fsum(of_rank) for of_rank in parts))
    yield "the norms of the ranks are added up, and not their squares", math.fsum(norms)
    yield "the squares of the ranks' norms are averaged, and not added up", math.hypot(*norms) / math.sqrt(len(norms))
    yield "it is the square of the norm: the root was not taken", math.hypot(*whole) ** 2
    yield "it is the largest norm of a tensor", max(whole, default=0.0)
    repeated = math.sqrt(len(norms)) * math.hypot(*whole)
    yield "every rank has counted all gradients, and the squares are added up over the ranks", repeated
