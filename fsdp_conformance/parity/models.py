"""The models of two runs: their initial values, the parameters that are frozen, and those that the optimizer has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from fsdp_conformance.parity.alone import different_models, first_line
from fsdp_conformance.parity.changed import may_be_gathered
from fsdp_conformance.parity.finding import Finding, Whose
from fsdp_conformance.parity.noise import factor_of, is_near
from fsdp_conformance.parity.runs import Run, TrainingStep
from fsdp_conformance.parity.units import unit_names, unit_of
from fsdp_conformance.parity.words import missing_and_extra, named_with_ties, number_of_tensors, size_of_difference
from fsdp_conformance.recordings.events import Forward
from fsdp_conformance.recordings.fingerprint import Whole, relative

#: Causes of other initial values.
MOVED = "the same numbers are in other places: shards or rows are exchanged, as where a checkpoint is loaded"
DRAWN = (
    "the generators are seeded differently or draw in another order, as when a sharded model is initialised after it "
    "was sharded; or the model is loaded from other files"
)
_OTHER_SCALE = (
    "a function that initialises them is not called, or is another one than in the reference. What a model does after "
    "building its layers, such as scaling some of them, must be done again after `to_empty` and `reset_parameters`"
)
_MADE_AGAIN = (
    "only buffers differ: the script computes them in another way, or again, as after building the model on the meta "
    "device. A checkpoint has no buffer that is not persistent, such as a rotary cache"
)
_NOT_EQUAL = "each rank has drawn or loaded its own, and nothing has given all of them those of rank 0, as DDP does"
_OWN_BUFFERS = (
    "each rank has drawn or loaded its own: DDP gives all ranks the buffers of rank 0, FSDP2 does not. Seed all ranks "
    "alike before the model is built, or broadcast them"
)
_CAST = (
    "the model is cast, or made under another default dtype: the optimizer, its state and the reductions then have "
    "that dtype as well. A mixed-precision policy casts for the computation alone"
)
_FROZEN_BEFORE = (
    "`requires_grad_` was called on parameters from before the model was sharded, which replaces them: freeze those of "
    "`model.parameters()`, before or after sharding"
)
_FROZEN_GATHERED = (
    "`requires_grad_` was called on gathered parameters, and the shards replace them again: an evaluation leaves "
    "FSDP2's root gathered. Call `reshard()` on the model before"
)
#: Tensors that differ by more, relative to the expected one, differ by more than rounding.
_FAR = 1e-3
#: Norms that differ by less, relative to themselves, are of the same numbers: only the order of their sum differs.
_SAME_NORM = 1e-9
#: Norms of as many numbers drawn from one distribution differ by less: the logarithm of their ratio.
_MANY, _OTHER_NORM = 256, 0.2


def compare_models(run: Run, reference: Run, number: int) -> Iterator[Finding]:
    """The differences between the models of a step, and between what its optimizers have of them."""
    yield from _initial(run, reference, number)
    yield from _frozen(run, reference, number)
    yield from _members(run, reference, number)


def ties_of(run: Run, reference: Run) -> dict[str, tuple[str, ...]]:
    """The other names of parameters that have several in either run."""
    return {**run.tied, **reference.tied}


def divided_tie(tied: Mapping[str, Sequence[str]], forward: Forward) -> str:
    """The cause of units that compute with different copies of a parameter that they share; empty if none share one."""
    units = unit_names([forward])
    for name, others in tied.items():
        other = next((other for other in others if unit_of(other, units) != unit_of(name, units)), None)
        if other is not None:
            return (
                f"'{name}' is tied to '{other}', which another unit has: each unit computes with a copy, and the "
                "optimizer updates one of them. Tie parameters before sharding, and give both modules to one call, "
                "fully_shard([a, b])"
            )
    return ""


def _initial(run: Run, reference: Run, number: int) -> Iterator[Finding]:
    step, expected, tied = run.steps[number], reference.steps[number], ties_of(run, reference)
    values, others = step.initial_values, expected.initial_values
    # One process has one model. Other references of the same script may begin with other values on each rank, too.
    equal_there = set(others.values) - (set() if reference.sharding == "whole batch" else set(others.differing))
    alone = [name for name in values.differing if name in equal_there]
    if alone:
        ranks = ", ".join(map(str, values.differing[alone[0]]))
        # An engine that keeps whole parameters on every rank has to make them equal; buffers are the script's.
        is_trained = alone[0] in _names_of(step)
        yield Finding(
            title="The initial values differ between ranks",
            whose=Whose.EITHER if is_trained else Whose.SCRIPT,
            step=step.number,
            first=f"{named_with_ties(alone[0], tied)} · rank {ranks} differs from rank 0",
            likely=_NOT_EQUAL if is_trained else _OWN_BUFFERS,
            evidence=number_of_tensors(len(alone), len(others.values)),
            line=first_line(run),
            is_exact=True,
        )
    for name, wanted in others.values.items():
        value = values.values.get(name)
        if value is None or value.equals(wanted):
            continue
        shared = [key for key in others.values if key in values.values]
        pieces = next(different_models(run), None)
        differing = [key for key in shared if not values.values[key].equals(others.values[key])]
        own = pieces.likely if pieces is not None else ""
        is_cast = value.dtype != wanted.dtype
        are_buffers = all(key in step.buffers.values for key in differing)
        # A rotary cache has the same norm with any frequencies.
        is_moved = not are_buffers and all(_is_moved(values.values[key], others.values[key]) for key in differing)
        drawn = _why_drawn(values.values, others.values, differing)
        likely = _CAST if is_cast else _MADE_AGAIN if are_buffers else own or (MOVED if is_moved else drawn)
        # Only elements show whether rows are in the wrong place.
        is_open = likely in (MOVED, DRAWN)
        yield Finding(
            title="The initial values differ",
            whose=Whose.EITHER if is_moved else Whose.SCRIPT,
            step=step.number,
            first=f"{named_with_ties(name, tied)} · {size_of_difference(value, wanted)}",
            likely=likely,
            evidence=(*number_of_tensors(len(differing), len(shared)), *([pieces.first] if pieces is not None else [])),
            line=first_line(run),
            kind="begin" if is_open else "",
            tensors=tuple(differing) if is_open else (),
        )
        return


def _why_drawn(values: Mapping[str, Whole], others: Mapping[str, Whole], names: Sequence[str]) -> str:
    """Why these tensors have other initial values than the reference's."""
    pairs = [(values[name], others[name]) for name in names]
    if all(not value.square for value, _ in pairs):
        return (
            "they are zero here: nothing has initialised them, as after `to_empty`, or something else than in the "
            "reference has"
        )
    if all(not wanted.square for _, wanted in pairs):
        return "they are zero in the reference alone: what sets them to zero there is not called here"
    factors = [factor_of(value, wanted) for value, wanted in pairs]
    if None not in factors:
        return f"the same numbers, times {_range([each for each in factors if each is not None])}: {_OTHER_SCALE}"
    large = [value.norm / wanted.norm for value, wanted in pairs if wanted.square and _size(wanted) >= _MANY]
    if large and all(not ratio or abs(math.log(ratio)) > _OTHER_NORM for ratio in large):
        return f"they are drawn from another distribution (norms {_range(large)} times as large): {_OTHER_SCALE}"
    return DRAWN


def _range(factors: Sequence[float]) -> str:
    """In words: "2.45", "0.5 to 2"."""
    low, high = min(factors), max(factors)
    return f"{high:.3g}" if is_near(low, high) else f"{low:.3g} to {high:.3g}"


def _size(value: Whole) -> int:
    return math.prod(value.shape)


def _is_moved(value: Whole, wanted: Whole) -> bool:
    """True if a tensor has the norm of the expected one, although it is far from it."""
    is_far = value.dtype == wanted.dtype and relative(value, wanted) > _FAR
    return is_far and abs(value.norm - wanted.norm) <= _SAME_NORM * wanted.norm


def _frozen(run: Run, reference: Run, number: int) -> Iterator[Finding]:
    """Parameters that only one of the models trains, from the first step or from a later one on."""
    step, expected, tied = run.steps[number], reference.steps[number], ties_of(run, reference)
    if number:
        mine, theirs = ({name for each in both.steps for name in each.frozen} for both in (step, expected))
    else:
        mine, theirs = ({name for event in each.initial for name in event.frozen} for each in (run, reference))
    if mine == theirs:
        return
    known = [name for name in expected.begin.values if name in step.begin.values]
    other = [name for name in known if (name in mine) is not (name in theirs)]
    if other:
        is_frozen = other[0] in mine
        here = "frozen" if is_frozen else "trained"
        yield Finding(
            title="Different parameters are frozen",
            whose=Whose.SCRIPT if not number or may_be_gathered(run, number) else Whose.EITHER,
            step=step.number,
            first=f"{named_with_ties(other[0], tied)} is {here} here, and not in the reference",
            likely=_why_frozen(run, number, is_frozen=is_frozen),
            evidence=number_of_tensors(len(other), len(known)),
            line=step.backward_line if number else first_line(run),
            is_exact=True,
        )


def _why_frozen(run: Run, number: int, *, is_frozen: bool) -> str:
    """The cause of a parameter that only the run, or only the reference, has frozen."""
    if number:
        return _FROZEN_GATHERED if may_be_gathered(run, number) or not is_frozen else ""
    return "" if is_frozen else _FROZEN_BEFORE


def _members(run: Run, reference: Run, number: int) -> Iterator[Finding]:
    """Parameters that only one of the optimizers has."""
    step, expected = run.steps[number], reference.steps[number]
    mine, theirs = _names_of(step), _names_of(expected)
    missing = [name for name in theirs if name not in mine]
    extra = [name for name in mine if name not in theirs]
    if not missing and not extra:
        return
    unknown = sum(group.unknown for group in step.steps[0].groups)
    likely = "the script leaves them out where it makes the optimizer, as by a condition on their names or shapes"
    if extra and not missing:
        likely = "the script leaves them out in the reference alone, or the model has other parameters there"
    untied = [(name, first) for name in extra for first, others in reference.tied.items() if name in others]
    if untied:
        likely = _why_untied(run, step, *untied[0])
    if unknown:
        likely = (
            f"the optimizer was made before the model was wrapped or moved: {unknown} of its tensors belong to no "
            "module any more"
        )
    yield Finding(
        title="The optimizer has different parameters",
        is_exact=True,
        whose=Whose.SCRIPT,
        step=step.number,
        first=f"'{missing[0]}' is missing" if missing else f"'{extra[0]}' should not be there",
        likely=likely,
        evidence=missing_and_extra(len(missing), len(extra), len(theirs)),
        line=step.steps[0].line,
    )


def _why_untied(run: Run, step: TrainingStep, name: str, first: str) -> str:
    """Why a parameter is tied to another one in the reference alone."""
    tie = f"in the reference, '{name}' is tied to '{first}': they are one parameter. "
    units = unit_names(step.training_forwards(0))
    if not units or unit_of(name, units) != unit_of(first, units):
        return (
            f"{tie}Sharding them in different units, or replacing one, breaks the tie: give both modules to one call, "
            "fully_shard([a, b])"
        )
    loads = [event.loaded for event in run.initial if event.loaded]
    where = f" at {loads[0]}" if loads else ""
    return (
        f"{tie}Here they are two parameters of one unit, so it is not sharding that breaks the tie. One of them was "
        f"replaced before: `load_state_dict(assign=True)`{where}, `to_empty()` or an assignment. Tie them again "
        "afterwards, before the model is sharded"
    )


def _names_of(step: TrainingStep) -> dict[str, None]:
    """The names of the parameters that the optimizer has, in its order."""
    return dict.fromkeys(name for group in step.steps[0].groups for name in group.parameters)
