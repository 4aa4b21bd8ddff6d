"""
The cause of gradients that a script changes wrongly, in hooks or between the backward and the optimizer's step.

A gradient can be compared at both ends, on every rank by itself: a script that takes a norm of its shard alone scales
the shard of each rank by another factor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from fsdp_conformance.parity.alone import REPLICAS_DIFFER, WRONG_BACKWARD, unreduced_backward, without_effect
from fsdp_conformance.parity.finding import Finding, Whose
from fsdp_conformance.parity.noise import EXPLAINED, is_loss_scale, is_near
from fsdp_conformance.parity.runs import Run, TrainingStep, divisions
from fsdp_conformance.parity.words import some_names, why_written
from fsdp_conformance.recordings.events import ALIAS, Backward, Clip, Forward, Mark
from fsdp_conformance.recordings.fingerprint import Fingerprint, Whole, inner_product, norm_of

E = TypeVar("E", Mark, Clip)

#: The cause of a script that changes the tensors that it sees, which are shards.
OF_A_SHARD = (
    "what it does to the shard of a rank is not what it does to a whole tensor: a norm, a mean or a maximum of a shard "
    "must be combined over the ranks, and random numbers must be those of its part of the whole tensor"
)

#: How a cause begins that may be the engine's. What follows is the script's.
OR_THE_REDUCTION = "the reduction, or "

#: Where another script is the reference, and both write to parameters.
OTHER_VALUES = "other values than the reference, as where weights that were exchanged are not put back"

#: The cause of gradients that are missing, if it is the script's.
NO_GRADIENT = (
    "a part of the model that the loss does not reach: it is not used, it runs under `detach` or `no_grad`, or in a "
    "reentrant checkpoint of which no input requires a gradient"
)

#: The cause of gradients that are clipped between two backwards.
_INCOMPLETE = (
    "gradients are clipped before the last backward of the step has added to them: clip once, when they are complete"
)

#: The cause of gradients that are cleared between a forward and its backward.
_GATHERED = (
    "not cleared: `zero_grad` is called between the forward and the backward, while FSDP2's root is gathered, so the "
    "model's parameters are the gathered ones, and the gradients of the shards stay. Call it before the forward, or "
    "call that of the optimizer"
)

#: The cause of a state that only the run loads.
_LOADED = (
    "the script loads a state into the model at {line}, and the reference does not. To put weights back, it needs a "
    "copy: `state_dict()` returns the parameters themselves"
)

#: How a cause ends that may be the engine's. What comes before is the script's.
OR_ITS_LOADING = ", or how the engine loads it"

#: The cause of a state that changes nothing.
_ALIAS = (
    "the state that is loaded at {line} has no effect: its tensors are the parameters themselves, which `state_dict()` "
    "returns. Copy them when the state is taken (`copy.deepcopy(model.state_dict())`)"
)

#: The cause of gradients that come back after they were cleared.
_UNSEEN = (
    "gradients are cleared while the engine holds some that were not reduced: with "
    "`set_requires_gradient_sync(False)`, FSDP2 keeps them where `zero_grad` does not see them, and adds them to the "
    "next reduction"
)


def why_changed(step: TrainingStep, expected: TrainingStep) -> str:
    """The likely cause of gradients that agree after the backward and no longer before the step; in words."""
    factors = _factors(step)
    wanted = _factors(expected)
    if not factors or not wanted or not _are_near(wanted, [wanted[0]] * len(wanted)):
        return OF_A_SHARD
    shown = ", ".join(f"rank {rank}: {factor:.3g}" for rank, factor in enumerate(factors))
    if _are_near(factors, _by_own_norm(step, wanted[0] * _norm(expected.reduced.values))):
        return (
            "they are clipped by a norm of this rank's shard alone, which is smaller than that of the whole gradients: "
            "call torch.nn.utils.clip_grad_norm_ on the model's parameters (FSDP2), or the model's own "
            f"clip_grad_norm_ (FSDP1), which add it up over the ranks. Scaled by {shown}, instead of {wanted[0]:.3g}"
        )
    if not _are_near(factors, [factors[0]] * len(factors)):
        return (
            f"each rank has scaled its own shard, {shown}, instead of all by {wanted[0]:.3g}: a norm, or another "
            "number of this rank's shard, must be combined over the ranks"
        )
    scaled = f"they are scaled by {factors[0]:.3g} instead of {wanted[0]:.3g}"
    if is_loss_scale(factors[0] / wanted[0] if wanted[0] else 0.0):
        return (
            f"they are still multiplied by the scale of the loss: call scaler.unscale_(optimizer) before they are "
            f"clipped or changed; {scaled}"
        )
    return scaled


def why_rewritten(value: Whole, wanted: Whole, step: TrainingStep, expected: TrainingStep) -> str:
    """How the script may have changed gradients after they were clipped, in words; empty if nothing shows it."""
    if value.square and is_loss_scale(wanted.norm / value.norm):
        return (
            f"they are divided by the scale of the loss, {wanted.norm / value.norm:.6g}, once more: `scaler.step` "
            "unscales them unless `scaler.unscale_` has, so gradients that are unscaled by hand are unscaled twice"
        )
    mine, theirs = ([each.rewritten for each in other.steps if each.rewritten] for other in (step, expected))
    if mine and theirs:
        return f"the script changes them afterwards: {OF_A_SHARD}"
    if mine:
        return (
            "the script changes them afterwards, and the reference does not: `to_local()` gives the memory of the "
            "gradient itself, where a calculation for a whole tensor may have made a copy"
        )
    return ""


def why_stale(run: Run, reference: Run, number: int) -> str:
    """
    Why the script may be the reason of a forward that differs although the parameters agreed after the step before.

    In words; empty if it has done nothing in between that is known.
    """
    gathered = _left_gathered(run, number)
    if gathered:
        return gathered
    # The reference has no engine that might write to them. Training alone leaves no unit gathered after a step.
    names = _written(reference, number)
    if may_be_gathered(run, number) and any(name in names for name in _written(run, number)):
        return why_written(names)
    loaded, others = (_loads(each, number) for each in (run, reference))
    if number and loaded and not others:
        return _LOADED.format(line=loaded[-1].line)
    if number and run.steps[number - 1].steps[0].in_autocast > reference.steps[number - 1].steps[0].in_autocast:
        return (
            "autocast was on while the optimizer stepped: it keeps copies of weights in low precision until it ends, "
            "so the forward may compute with those of an earlier step. Enter it around each forward"
        )
    return ""


def _left_gathered(run: Run, number: int) -> str:
    """In words, that the script has kept FSDP2 from resharding in the step before; empty if it has not."""
    line = in_force = ""
    for events in run.events[:number]:
        for event in events:
            if isinstance(event, Mark) and event.kind == "reshard":
                line = "" if event.detail == "True" else event.line
            elif isinstance(event, Backward):
                in_force = line
    if not in_force:
        return ""
    return (
        f"`set_reshard_after_backward(False)` of {in_force} is still in force in the last backward of the step: units "
        "stay gathered, and the next forward computes with what they held before the optimizer's step"
    )


def leaves_gathered(run: Run, number: int) -> bool:
    """True if the script has kept FSDP2 from resharding after the last backward of a step, or has gathered units."""
    events = run.events[number]
    last = max((place for place, event in enumerate(events) if isinstance(event, Backward)), default=-1)
    # A forward leaves the root gathered, and it is for the script to reshard it after an evaluation.
    is_gathered = any(isinstance(event, Forward) for event in events[last + 1 :]) or any(
        mark.kind == "unsharded" and mark.step == number for mark in run.marks
    )
    return is_gathered or bool(_left_gathered(run, number + 1))


def why_buffers(step: TrainingStep, expected: TrainingStep, rank: int) -> str:
    """
    The cause of a forward that differs first on this rank, if it may be that the ranks have different buffers.

    In words; empty if they have not. `expected` is a step of another script.
    """
    own = [name for name in step.buffers.differing if _is_shared(name, expected)]
    if own:
        return (
            f"each rank has updated {some_names(own)} from its own batch alone, and in the reference all ranks have "
            "the same, as with SyncBatchNorm: convert the model before it is sharded "
            "(`nn.SyncBatchNorm.convert_sync_batchnorm`)"
        )
    if step.previous is None or not rank:
        return ""
    names = [name for name, ranks in step.previous.buffers.differing.items() if rank in ranks]
    if not names:
        return ""
    what = f"buffers {some_names(names)}" if len(names) > 1 else f"buffer {names[0]!r}"
    return (
        f"the ranks differ in the {what}, as where each updates its own: DDP sends rank 0's before each forward, "
        "and FSDP does not"
    )


def _is_shared(name: str, expected: TrainingStep) -> bool:
    """True if the ranks of a step update a buffer together: each has another batch, and all have the same value."""
    buffers = expected.buffers
    return (
        len(expected.steps) > 1
        and name in buffers.values
        and name not in buffers.differing
        and is_updated(name, expected)
    )


def is_updated(name: str, step: TrainingStep) -> bool:
    """True if a step changes a buffer."""
    before = (step.previous.buffers if step.previous is not None else step.initial_values).values
    after = step.buffers.values
    return name in before and name in after and not before[name].equals(after[name])


def whose_writing(run: Run, reference: Run, number: int, names: Sequence[str]) -> tuple[Whose, str, str]:
    """Whose a change of these parameters between two steps is that is not the reference's: the cause, and a line."""
    mine, theirs = _written(run, number), _written(reference, number)
    loads, others = _loads(run, number), _loads(reference, number)
    files = [mark for mark in run.marks if mark.kind == "load" and mark.step == number]
    line = next((mark.line for mark in (*reversed(loads), *reversed(files))), "")
    whose, assigned = Whose.SCRIPT, without_effect(run, number)
    if assigned is not None:
        likely, line = assigned
    elif loads and not others:
        likely = _LOADED.format(line=line)
    elif loads and any(mark.detail == ALIAS for mark in loads):
        likely = _ALIAS.format(line=line)
    elif loads:
        # An engine's own hooks, or torch's functions for checkpoints, may have part in it.
        whose, likely = Whose.EITHER, f"the state that is loaded at {line}{OR_ITS_LOADING}"
    elif mine and theirs and may_be_gathered(run, number) and set(mine) - set(names):
        likely = (
            f"the script writes to {some_names(mine)} after an evaluation, and not all of them differ: units that are "
            "still gathered, as FSDP2's root is, take what is written, and their shards do not. Call `reshard()` first"
        )
    elif mine and theirs:
        alternative = f"{OTHER_VALUES}; or " if reference.sharding == "kept" else ""
        likely = f"the script writes to {some_names(mine)}: {alternative}{OF_A_SHARD}"
    elif theirs and (how := _gathered_by(run, number)):
        likely = (
            f"the script writes to {some_names(theirs)} in a gathered unit, {how}: the shards, which are trained, do "
            "not take what is written. Call `reshard()` first, and write to the shards"
        )
    elif theirs:
        likely = (
            f"only the reference writes to {some_names(theirs)}: with sharding, what the script writes to is another "
            "tensor, such as a parameter of before the model was sharded, or it has another shape"
        )
    else:
        # Of the same script without its sharding, the engine is what is left.
        whose = Whose.EITHER if reference.sharding == "kept" else Whose.ENGINE
        likely = f"only the run writes to {some_names(mine)}"
    return whose, likely, line


def may_be_gathered(run: Run, number: int) -> bool:
    """True if units may still be gathered before a step: an evaluation came last, and no call of `reshard()`."""
    is_gathered = False
    for event in run.events[number]:
        if isinstance(event, Forward):
            if event.with_gradients:
                break
            is_gathered = True
        elif isinstance(event, Mark) and event.kind == "resharded":
            is_gathered = False
    return is_gathered


def _gathered_by(run: Run, number: int) -> str:
    """In words, why FSDP2's units may be gathered when a script writes to them before a step; empty if they are not."""
    if any(mark.kind == "unsharded" and mark.step == number for mark in run.marks):
        return "by `unshard()`"
    stays_gathered = "box" in divisions(run.steps[number]) and may_be_gathered(run, number)
    return "as FSDP2's root is after an evaluation" if stays_gathered else ""


def _written(run: Run, number: int) -> list[str]:
    """The parameters that were written to since the step before, each once."""
    return list(dict.fromkeys(name for each in run.steps[number].steps for name in each.written))


def _loads(run: Run, number: int) -> list[Mark]:
    return [mark for mark in run.marks if mark.kind == "load state" and mark.step == number]


def lost_or_kept(run: Run, reference: Run, number: int) -> tuple[str, str] | None:
    """
    How the script loses gradients in a step that the reference keeps, or keeps those that it clears, in words and as a
    line; None if it does neither.
    """
    clearing, expected = _clearing(run, number), _clearing(reference, number)
    if clearing is None and expected is not None and not expected[1]:
        kept = (
            "the reference clears the gradients between two backwards of the step, as where a step is left out, and "
            "here what the first ones have added is kept"
        )
        return kept, run.steps[number].backward_line
    if clearing is not None and expected is None:
        mark, is_last = clearing
        if is_last:
            return "gradients are cleared between the backward and the step", mark.line
        return (
            "gradients are cleared between two backwards of the step: what the first one has added is lost",
            mark.line,
        )
    early = _clipped_early(run, number)
    if early is not None and _clipped_early(reference, number) is None:
        return _INCOMPLETE, early.line
    return _unreduced(run, number)


def _unreduced(run: Run, number: int) -> tuple[str, str] | None:
    """
    That the last backward of this step or of the one before is not reduced, and the line; None if both are.

    A reference of the same script does not reduce it either, but engines differ in when they add it after all.
    """
    for step in run.steps[max(number - 1, 0) : number + 1]:
        last = unreduced_backward(step)
        if last is not None:
            when = "" if step.number == number else ", and what it has added comes with a later reduction"
            return f"the last backward of step {step.number} is not reduced{when}: {WRONG_BACKWARD}", last.line
    return None


def gathers_values(run: Run, reference: Run, number: int) -> tuple[Whose, str] | None:
    """
    The cause of gradients that differ if, before a backward of a step, the script alone gathers tensors that need
    gradients with a collective that has no backward; None if it does not.
    """
    mine, theirs = (_gathers(each, number) for each in (run, reference))
    if mine is None or theirs is not None:
        return None
    return Whose.SCRIPT, (
        f"the script gathers tensors that need gradients at {mine.line} by {mine.detail}, which gives them none: use "
        "`torch.distributed.nn.functional.all_gather`, or put the rank's own tensor back in its place"
    )


def _gathers(run: Run, number: int) -> Mark | None:
    """The first gather of a tensor that needs a gradient in a step, if a backward of the step comes after it."""
    marks = (event for event in run.events[number] if isinstance(event, Mark) and event.kind == "gather")
    return _before_backward(run, number, next(marks, None))


def _clipped_early(run: Run, number: int) -> Clip | None:
    """The first clipping of a step, if a backward of the step comes after it."""
    return _before_backward(run, number, next((event for event in run.events[number] if isinstance(event, Clip)), None))


def _before_backward(run: Run, number: int, event: E | None) -> E | None:
    """The event of a step, if a backward of the step comes after it; None if none does."""
    later = itertools.dropwhile(lambda each: each is not event, run.events[number])
    return event if any(isinstance(each, Backward) for each in later) else None


def clear_alike(run: Run, reference: Run, number: int) -> bool:
    """True if both call `zero_grad` between a step and the one before, and equally often."""
    calls = [sum(mark.kind == "clear" and mark.step == number for mark in each.marks) for each in (run, reference)]
    return calls[0] == calls[1] > 0


def kept_from_clearing(run: Run, number: int) -> tuple[str, str] | None:
    """
    How gradients that the script has cleared come back in a step, in words and as a line; None if nothing shows it.

    FSDP2 keeps gradients that it has not reduced where `zero_grad` does not see them.
    """
    if "box" not in divisions(run.steps[number]):
        return None
    waits = False
    for event in run.events[number]:
        if isinstance(event, Backward):
            waits = not event.is_reduced
        elif isinstance(event, Mark) and event.kind == "clear" and waits:
            return _UNSEEN, event.line
    return None


def cleared_while_gathered(run: Run, number: int) -> tuple[str, str] | None:
    """
    How gradients of FSDP2's shards have survived a `zero_grad` of a step, in words and as a line; None if nothing shows
    it.
    """
    if "box" not in divisions(run.steps[number]):
        return None
    has_forward = False
    for event in run.events[number]:
        if isinstance(event, Forward | Backward):
            has_forward = isinstance(event, Forward) and event.with_gradients
        elif isinstance(event, Mark) and event.kind == "clear" and has_forward:
            return _GATHERED, event.line
    return None


def after_replicas(finding: Finding, signs: Sequence[Finding]) -> Finding:
    """A finding whose cause is only a guess, if parameters have differed between ranks before it: that is the cause."""
    before = next((sign for sign in signs if sign.title == REPLICAS_DIFFER), None)
    is_open = not finding.likely or OF_A_SHARD in finding.likely
    if before is None or before.step is None or not is_open or before.step >= (finding.step or 0):
        return finding
    return replace(
        finding,
        whose=before.whose,
        likely=f"from step {before.step} on, {before.first.partition(' · ')[0]} differs between ranks: {before.likely}",
    )


def without_consequences(finding: Finding, signs: Sequence[Finding]) -> list[Finding]:
    """The signs without parameters that differ between ranks because of a finding that is the engine's."""
    if finding.whose is not Whose.ENGINE or finding.step is None:
        return list(signs)
    return [sign for sign in signs if sign.title != REPLICAS_DIFFER or (sign.step or 0) < finding.step]


def drawn_in_backward(run: Run, reference: Run, number: int, *, same_script: bool) -> tuple[Whose, str] | None:
    """
    Whose gradients are that differ because a backward draws other random numbers, and the cause; None if none does.

    The generators agreed before all forwards of the step, which draw, and no longer before the forward that comes next.
    """
    if run.world_size != reference.world_size or number + 1 >= min(len(run.steps), len(reference.steps)):
        return None
    for rank in range(run.world_size):
        mine, theirs = (
            [*each.steps[number].training_forwards(rank), *each.steps[number + 1].training_forwards(rank)]
            for each in (run, reference)
        )
        passes = len(run.steps[number].training_forwards(rank))
        for place, (before, wanted) in enumerate(zip(mine, theirs, strict=False)):
            # The states of others say nothing: a script may not seed what it does not draw from.
            drawing = mine[place - 1].draws if place else before.draws
            if all(before.random.get(name) == wanted.random.get(name) for name in drawing):
                continue
            if not place:
                break
            # Between two steps, a script may draw for something else.
            whose = Whose.SCRIPT if place < passes or not same_script else Whose.EITHER
            return whose, (
                f"random numbers: after the backward, the generators of {' and '.join(drawing)} on rank {rank} are in "
                "another state, and before it they agreed: activations are computed again with other random numbers "
                "(a checkpoint with `preserve_rng_state=False`)"
            )
    return None


def _clearing(run: Run, number: int) -> tuple[Mark, bool] | None:
    """The first call that clears gradients of a step, and True if no backward of the step comes after it."""
    clearing: Mark | None = None
    has_gradients = False
    for event in run.events[number]:
        if isinstance(event, Backward):
            if clearing is not None:
                return clearing, False
            has_gradients = True
        elif isinstance(event, Mark) and event.kind == "clear" and has_gradients:
            clearing = clearing or event
    return None if clearing is None else (clearing, True)


def whose_backward(step: TrainingStep, expected: TrainingStep, *, same_script: bool) -> tuple[Whose, str]:
    """
    Whose gradients are that differ after the backward for no cause that is known, and the likely cause, if any.

    `same_script`: the reference is the script itself, without its sharding.
    """
    mine, theirs = step.steps[0].hooks, expected.steps[0].hooks
    if theirs and not mine:
        return Whose.SCRIPT, (
            f"the hook of {theirs[0]} is on a parameter or module of the reference, and on none here: it was "
            "registered before the model was sharded, which replaces parameters. Register it afterwards"
        )
    also_there = expected.steps[0].silent_hooks
    silent = [hook for hook in step.steps[0].silent_hooks if hook in theirs and hook not in also_there]
    if silent:
        return Whose.SCRIPT, (
            f"the hook of {silent[0]} never runs here, and it does in the reference: an engine that sets the gradients "
            "of shards itself calls no hooks of tensors. FSDP2 calls those of `register_post_accumulate_grad_hook`"
        )
    if mine and not theirs:
        return Whose.SCRIPT, f"the hook of {mine[0]} changes gradients, and the reference has none"
    if mine:
        return Whose.EITHER, f"{OR_THE_REDUCTION}the hook of {mine[0]}, which sees this rank's shard of a gradient"
    if not same_script:
        return Whose.EITHER, (
            f"{OR_THE_REDUCTION}what one of the two scripts does in its backward, such as `detach` or a hook"
        )
    return Whose.ENGINE, ""


def _by_own_norm(step: TrainingStep, limit: float) -> list[float]:
    """The factors of ranks each of which clips by the norm of what it holds."""
    norms = [_norm(step.reduced_of(rank)) for rank in range(len(step.steps))]
    return [min(1.0, limit / norm) if norm else 1.0 for norm in norms]


def _norm(values: Mapping[str, Fingerprint] | Mapping[str, Whole]) -> float:
    return math.sqrt(math.fsum(value.square for value in values.values()))


def _factors(step: TrainingStep) -> list[float]:
    """The factor by which each rank has scaled all that it holds; empty if one has not scaled it all alike."""
    factors = []
    for rank in range(len(step.steps)):
        factor = _factor(step.reduced_of(rank), step.unclipped_of(rank))
        if factor is None:
            return []
        factors.append(factor)
    return factors


def _factor(before: Mapping[str, Fingerprint], after: Mapping[str, Fingerprint]) -> float | None:
    factors = []
    for name, value in after.items():
        if name in before and before[name].square:
            old, new = before[name].numbers(), value.numbers()
            factor = inner_product(new, old) / inner_product(old, old)
            rest = norm_of([b - factor * a for a, b in zip(old, new, strict=True)])
            if rest > EXPLAINED * math.sqrt(before[name].square):
                return None
            factors.append(factor)
    return factors[0] if factors and _are_near(factors, [factors[0]] * len(factors)) else None


def _are_near(values: Sequence[float], others: Sequence[float]) -> bool:
    return all(map(is_near, values, others))
