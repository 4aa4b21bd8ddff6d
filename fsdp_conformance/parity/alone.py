"""Suspicious signs in one recording by itself: mistakes that a reference made of the same script has as well."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fsdp_conformance.listing import some
from fsdp_conformance.parity.finding import Finding, Whose
from fsdp_conformance.parity.noise import is_near
from fsdp_conformance.parity.runs import Run, TrainingStep
from fsdp_conformance.parity.samples import argument, repetition, shares_samples
from fsdp_conformance.parity.words import both_settings, some_names
from fsdp_conformance.recordings.events import Backward, Clip, Initial, Mark
from fsdp_conformance.recordings.fingerprint import Fingerprint

#: The cause of a last backward that is not reduced.
WRONG_BACKWARD = "`no_sync`, or `set_requires_gradient_sync(False)`, covers the wrong backward"

REPLICAS_DIFFER = "Parameters differ between ranks that should hold the same"
#: The cause of parameters that differ between ranks where others are sharded.
IN_NO_UNIT = (
    "nothing reduces their gradients, so each rank trains its own copy: they are in no sharded module, or it ignores "
    "them. Shard the module that has them as well, which is usually the root, or reduce their gradients in the script"
)

#: Names that are shown of many.
_SHOWN = 3
#: Factors that differ by less, relative to themselves, are equal.
_SAME = 1e-3


def suspicions(run: Run) -> Iterator[Finding]:
    """Signs of what may be meant, but is often a mistake."""
    yield from different_models(run)
    yield from _same_samples(run)
    yield from _repeated_order(run)
    yield from _different_settings(run)
    yield from _untrained(run)
    yield from _nothing_trained(run)
    yield from _unknown(run)
    yield from _originals(run)
    yield from _assigned(run)
    yield from _evaluation(run)
    yield from _unreduced(run)
    yield from _summed(run)
    yield from _rounded_inputs(run)
    yield from _stepped_by_engine(run)
    yield from _unequal_means(run)
    yield from _clipped_before_unscaled(run)
    yield from _different_replicas(run)


def _suspicion(title: str, whose: Whose = Whose.SCRIPT, **details: object) -> Finding:
    return Finding(title=title, whose=whose, is_certain=False, **details)  # type: ignore[arg-type]


def different_models(run: Run) -> Iterator[Finding]:
    """The ranks had other values when they sharded the model."""
    initial = [
        next((event for event in rank.events if isinstance(event, Initial)), None) for rank in run.recording.ranks
    ]
    wrapped = [event.wrapped if event is not None else "" for event in initial]
    if all(wrapped) and len(set(wrapped)) > 1:
        differing = [rank for rank, value in enumerate(wrapped) if value != wrapped[0]]
        loads = {rank: event.loaded for rank, event in enumerate(initial) if event is not None and event.loaded}
        likely = (
            "each rank has drawn its own initial values, so the model is made of pieces of several: seed all ranks "
            "alike before the model is built, or load one state afterwards"
        )
        if 0 < len(loads) < run.world_size:
            ranks = ", ".join(map(str, loads))
            likely = (
                f"only rank {ranks} loads a state ({next(iter(loads.values()))}), so the model is made of pieces of "
                "several. Unlike DDP, FSDP2 sends no state to other ranks: load it on every rank, or send it "
                "(`broadcast_from_rank0` of `set_model_state_dict`)"
            )
        yield _suspicion(
            "The ranks sharded different models",
            step=0,
            first=f"rank {', '.join(map(str, differing))} differed from rank 0 when the model was sharded",
            likely=likely,
            line=first_line(run),
        )


def _same_samples(run: Run) -> Iterator[Finding]:
    steps = [step.number for step in run.steps if shares_samples(run, step.number)]
    if run.world_size > 1 and steps and len(steps) == len(run.steps):
        yield _suspicion(
            "Every rank trains the same samples",
            Whose.DATA,
            step=0,
            likely="the data is not distributed over the ranks: a DistributedSampler is missing, or gets one rank",
            line=first_line(run),
        )


def _repeated_order(run: Run) -> Iterator[Finding]:
    """The micro-batches repeat with a period: the order is the same in every epoch."""
    repeated = repetition(run, least=2)
    if repeated is not None:
        period, step = repeated
        yield _suspicion(
            "The samples come in the same order in every epoch",
            Whose.DATA,
            step=step,
            likely="the sampler's `set_epoch` is not called, or the data is not shuffled",
            evidence=(f"the order repeats every {period} micro-batches",),
            line=first_line(run),
        )


def _different_settings(run: Run) -> Iterator[Finding]:
    """The optimizers of the ranks update the same parameter in different ways."""
    for step in run.steps:
        first = step.settings_of(0)
        for rank in range(1, len(step.steps)):
            for name, settings in step.settings_of(rank).items():
                key = next((key for key, value in first.get(name, {}).items() if settings.get(key, value) != value), "")
                if key:
                    yield _suspicion(
                        "The ranks' optimizers have different settings",
                        step=step.number,
                        first=f"rank {rank} · '{name}' · {key} is {both_settings(settings[key], first[name][key])}, "
                        "which rank 0 has",
                        likely="what the script sets depends on the rank",
                        line=step.steps[rank].line,
                    )
                    return


def _untrained(run: Run) -> Iterator[Finding]:
    names = run.steps[-1].steps[0].untrained if run.steps else ()
    if names:
        yield _suspicion(
            "Parameters that require gradients are in no optimizer",
            step=run.steps[-1].number,
            first=_names(names),
            likely="the optimizer was made before the model was complete or wrapped, or of a part of the parameters",
            line=run.steps[-1].steps[0].line,
        )


def _nothing_trained(run: Run) -> Iterator[Finding]:
    steps = [step for step in run.steps if step.steps[0].parameters and step.passes]
    if steps and not any(value.square or value.nonfinite for step in steps for value in _at_step(step)):
        yield _suspicion(
            "The optimizer gets no gradient",
            step=steps[0].number,
            likely="gradients are cleared between backward and step, or no parameter of the optimizer is trained",
            line=steps[0].steps[0].line,
        )


def _at_step(step: TrainingStep) -> Iterator[Fingerprint]:
    """The gradients that the optimizer got; before clipping, if an engine has clipped inside its step."""
    for rank, each in enumerate(step.steps):
        yield from each.gradients.values()
        for clip in step.clips[rank] if not each.gradients else ():
            yield from clip.gradients.values()


def _unknown(run: Run) -> Iterator[Finding]:
    for step in run.steps[:1]:
        unknown = sum(group.unknown for group in step.steps[0].groups)
        if unknown:
            yield _suspicion(
                "The optimizer has tensors that belong to no module",
                step=step.number,
                first=f"{unknown} tensors",
                likely="the optimizer was made before the model was wrapped or moved, and steps parameters from before",
                line=step.steps[0].line,
            )


def of_originals(step: TrainingStep, names: Sequence[str] | None = None) -> str:
    """In words, that the loss uses parameters that sharding has replaced, one of `names`; empty if it uses none."""
    originals = list(dict.fromkeys(name for each in step.steps for name in each.originals))
    if not originals or (names is not None and not set(names).intersection(originals)):
        return ""
    return (
        f"the loss is computed with {some_names(originals)} as they were before the model was sharded: sharding has "
        "replaced these parameters, so they keep their first values and no optimizer sees their gradients. Take them "
        "from the model after sharding"
    )


def _originals(run: Run) -> Iterator[Finding]:
    for step in run.steps:
        likely = of_originals(step)
        if likely:
            yield _suspicion(
                "The loss uses parameters from before the model was sharded",
                step=step.number,
                likely=likely,
                line=step.backward_line,
            )
            return


def without_effect(run: Run, number: int | None = None) -> tuple[str, str] | None:
    """In words, that the script assigns to `.data` of a DTensor, in a step if one is given, and the line; or None."""
    for mark in run.marks:
        if mark.kind == "data" and number in (None, mark.step):
            return (
                f"`.data` of a sharded parameter is assigned at {mark.line}, which has no effect: its values are in "
                "the shard inside of the DTensor. Copy into the parameter, under `no_grad`: `parameter.copy_(values)`"
            ), mark.line
    return None


def _assigned(run: Run) -> Iterator[Finding]:
    assigned = without_effect(run)
    if assigned is not None:
        likely, line = assigned
        yield _suspicion("An assignment to a parameter's `.data` has no effect", likely=likely, line=line)


def _evaluation(run: Run) -> Iterator[Finding]:
    for step in run.steps:
        for forward in step.training_forwards(0):
            if not forward.training and step.passes:
                yield _suspicion(
                    "The model is trained in evaluation mode",
                    step=step.number,
                    likely="`model.train()` is not called again after an evaluation",
                    line=forward.line,
                )
                return


def _unreduced(run: Run) -> Iterator[Finding]:
    for step in run.steps:
        last = unreduced_backward(step)
        if last is not None and run.world_size > 1:
            yield _suspicion(
                "The gradients of the last backward are not reduced before the step",
                step=step.number,
                likely=WRONG_BACKWARD,
                line=last.line,
            )
            return


def unreduced_backward(step: TrainingStep) -> Backward | None:
    """The last backward of a step, if the script keeps the engine from reducing its gradients."""
    last = step.backwards[0][-1] if step.backwards[0] else None
    return None if last is None or last.is_reduced else last


def _summed(run: Run) -> Iterator[Finding]:
    """The script asks for a sum over ranks in place of an average, and a reference made of it does so as well."""
    for event in run.marks:
        if event.kind == "divide factor" and float(event.detail) == 1.0 and run.world_size > 1:
            if any(map(_counts_all_tokens, run.steps)):
                # The sum of the ranks' gradients is then that of one mean.
                return
            yield _suspicion(
                "The gradients of the ranks are summed, not averaged",
                step=event.step,
                first="the divide factor is set to 1",
                likely=f"the gradients are {run.world_size} times as large as in one process, unless the loss is "
                "divided by a number that counts all ranks, such as the tokens of the whole batch",
                line=event.line,
            )
            return


def _rounded_inputs(run: Run) -> Iterator[Finding]:
    """A reference made of the script rounds them as well."""
    rounded = rounded_input(run)
    if rounded is not None:
        words, event = rounded
        yield _suspicion(
            "An input is rounded by mixed precision",
            step=event.step,
            first=words,
            likely="the policy casts the inputs of the model, as `cast_forward_inputs` says by default, and times, "
            "positions and counts lose their value: set it to False, or give them to the model in another form",
            line=event.line,
        )


def rounded_input(run: Run) -> tuple[str, Mark] | None:
    """A large input that mixed precision rounds, in words, and its mark; None if there is none."""
    event = next((event for event in run.marks if event.kind == "rounded input"), None)
    if event is None:
        return None
    name, _, values = event.detail.partition(" has ")
    return f"{argument(name)} has {values}", event


def _counts_all_tokens(step: TrainingStep) -> bool:
    """True if each loss is a sum over a rank's tokens, divided by the number of those of all ranks."""
    backwards = [backward for of_rank in step.backwards for backward in of_rank]
    sums = [backward.means[0] for backward in backwards if [each.is_sum for each in backward.means] == [True]]
    if not sums or len(sums) != len(backwards):
        return False
    total, passes = sum(each.targets for each in sums), len(step.backwards[0])
    divisors = [
        (each.value or 0.0) / backward.loss for each, backward in zip(sums, backwards, strict=True) if backward.loss
    ]
    # Of the whole step, or of each micro-batch.
    return bool(divisors) and any(all(is_near(each, count) for each in divisors) for count in (total, total / passes))


def _stepped_by_engine(run: Run) -> Iterator[Finding]:
    """A step that the engine takes to make the optimizer's state, where it has an effect."""
    mark = next((event for event in run.marks if event.kind == "step of the engine"), None)
    if mark is None or not run.steps:
        return
    first = run.steps[0].steps[0]
    is_counted = any(name.endswith("/step") for name in first.counters)
    decays = any(group.settings.get("weight_decay") for group in first.groups)
    seen = {"counts one step more than the training has": is_counted, "has decayed the weights once more": decays}
    effects = [effect for effect, is_there in seen.items() if is_there]
    if effects:
        yield _suspicion(
            "The engine has stepped the optimizer before the training",
            Whose.ENGINE,
            step=0,
            likely=f"`{mark.detail}` makes the optimizer's state by a step with gradients of zero: the optimizer "
            f"{' and '.join(effects)}",
            evidence=("the reference takes this step as well, so that the rest can be compared",),
            line=mark.line,
        )


def _unequal_means(run: Run) -> Iterator[Finding]:
    """Means over different numbers of tokens, each with the same factor in the loss."""
    for step in run.steps:
        backwards = [
            (rank, backward) for rank in range(run.world_size) for backward in step.backwards[rank] if backward.means
        ]
        counts = [sum(mean.targets for mean in backward.means) for _, backward in backwards]
        if len(set(counts)) < 2 or not all(map(_is_mean, [backward for _, backward in backwards])):
            continue
        factors = [_factor(backward) for _, backward in backwards]
        if max(factors) - min(factors) > _SAME * abs(factors[0]):
            # The script weights them.
            continue
        shown = ", ".join(
            f"rank {rank} micro-batch {backward.number}: {count}"
            for (rank, backward), count in list(zip(backwards, counts, strict=True))[:_SHOWN]
        )
        yield _suspicion(
            "The loss is averaged over each batch by itself, and the batches have different numbers of tokens",
            step=step.number,
            first=f"targets that are not ignored · {shown}",
            likely="a token of a short batch counts more than one of a long batch: divide the sum by the number of "
            "tokens of all ranks and micro-batches, times the number of ranks",
            line=backwards[0][1].line,
        )
        return


def _is_mean(backward: Backward) -> bool:
    """True if the loss is a multiple of one mean, as far as can be told."""
    mean = backward.means[0].value
    is_one = len(backward.means) == 1 and not backward.means[0].is_sum
    return is_one and bool(mean) and backward.loss is not None


def _factor(backward: Backward) -> float:
    return (backward.loss or 0.0) / (backward.means[0].value or 1.0)


def _clipped_before_unscaled(run: Run) -> Iterator[Finding]:
    for number, events in enumerate(run.events[: len(run.steps)]):
        clips = [place for place, event in enumerate(events) if isinstance(event, Clip)]
        unscaled = [place for place, event in enumerate(events) if isinstance(event, Mark) and event.kind == "unscale"]
        # A script may have divided them by itself.
        is_changed = any(each.changed for each in run.steps[number].steps)
        if clips and unscaled and clips[0] < unscaled[0] and not is_changed:
            clip = events[clips[0]]
            assert isinstance(clip, Clip), "the index is that of a Clip"
            yield _suspicion(
                "The gradients are clipped before they are unscaled",
                step=number,
                likely="their norm is still times the scale: call `scaler.unscale_(optimizer)` before clipping",
                line=clip.line,
            )
            return


def _different_replicas(run: Run) -> Iterator[Finding]:
    for step in run.steps:
        for kind, tensors in (("Parameters", step.parameters), ("Buffers", step.buffers)):
            if tensors.differing:
                name, ranks = next(iter(tensors.differing.items()))
                likely = "each rank updates its own, as batch norm does: synchronise them, or save rank 0's"
                if kind == "Parameters":
                    likely = _why_replicas_differ(step, list(tensors.differing))
                others = len(tensors.differing) - 1
                more = f" · and {others} more" if others else ""
                yield _suspicion(
                    REPLICAS_DIFFER if kind == "Parameters" else REPLICAS_DIFFER.replace("Parameters", kind),
                    step=step.number,
                    first=f"'{name}' · rank {', '.join(map(str, ranks))}{more}",
                    likely=likely,
                    line=step.steps[0].line,
                )
                return


def _why_replicas_differ(step: TrainingStep, names: Sequence[str]) -> str:
    """Why parameters that should be equal on several ranks are not, after a step."""
    if set(step.begin.differing).intersection(names):
        if step.previous is not None:
            return "the script writes different values to them on each rank, before this step"
        return "the ranks began with different values: seed all ranks alike, or load one state into all"
    if in_no_unit(step, names):
        return IN_NO_UNIT
    if set(step.gradients.differing).intersection(names):
        return "their gradients are not reduced"
    return "the ranks step with equal gradients, but not in the same way"


def in_no_unit(step: TrainingStep, names: Sequence[str]) -> bool:
    """True if each rank holds these parameters as a whole, and shards of others."""
    held = step.steps[0].parameters
    return all(_is_whole(held[name]) for name in names if name in held) and not all(map(_is_whole, held.values()))


def _is_whole(value: Fingerprint) -> bool:
    return value.elements == math.prod(value.shape)


def _names(names: tuple[str, ...]) -> str:
    return some([f"'{name}'" for name in names], _SHOWN)


def first_line(run: Run) -> str:
    """Where the script first runs the model to train it."""
    forwards = run.steps[0].training_forwards(0) if run.steps else []
    return forwards[0].line if forwards else ""
