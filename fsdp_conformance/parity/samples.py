"""The inputs of the ranks: the same samples, the same ones in another place, or others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from fsdp_conformance.listing import some
from fsdp_conformance.parity.finding import Finding, Whose
from fsdp_conformance.parity.runs import Run, TrainingStep
from fsdp_conformance.recordings.events import Forward, Input

#: How many ranks are named.
_NAMED = 4


def compare_samples(run: Run, reference: Run, number: int) -> tuple[Finding | None, bool]:
    """
    The difference between the inputs of a step, if there is one that matters; and whether each rank had the same ones.

    Samples that are only distributed differently over ranks and passes matter for nothing but the order of sums.
    """
    step, other = run.steps[number], reference.steps[number]
    mine = [list(_hashes(step, rank)) for rank in range(run.world_size)]
    theirs = [list(_hashes(other, rank)) for rank in range(reference.world_size)]
    if mine == theirs:
        return None, True
    first = next((forward for rank in range(run.world_size) for forward in step.training_forwards(rank)), None)
    line = first.line if first is not None else ""
    made = _other_arguments(step, other, run, reference)
    samples, expected = Counter(_samples(step, run)), Counter(_samples(other, reference))
    if samples == expected and samples and not made:
        return None, False
    common = sum((samples & expected).values())
    total, count = sum(expected.values()), sum(samples.values())
    whose, likely = Whose.DATA, ""
    if run.world_size > 1 and _are_alike(step, run) and not _are_alike(other, reference):
        likely = "every rank gets the same samples: the data is not distributed over the ranks"
    elif passes := _other_passes(step, other, run, reference):
        whose, likely = Whose.SCRIPT, passes
    elif made:
        likely = made
    elif count != total and count and total:
        likely = (
            f"the step has {count} samples instead of {total}: another batch size, or a last batch that is left out"
        )
    elif repeated := _repeated(run, reference, number):
        likely = repeated
    elif shifted := _shifted(run, reference, number):
        likely = shifted
    elif drawn := _from_other_states(run, reference, number):
        likely = drawn
    elif doubled := _doubled(mine, theirs):
        likely = (
            f"{doubled}: the rank or the number of ranks by which the data is divided is that of a part of them, as of "
            "one dim of the mesh"
        )
    elif others := _ranks_of_their_own(mine, theirs):
        likely = f"only {_named(others)} other samples: a sampler or a shuffle has another seed there"
    elif samples and common == 0:
        likely = "none of the samples is the same: another order of the data, or random numbers that change it"
    evidence = (f"{common} of {total} samples are the same",) if samples and expected and not made else ()
    return (
        Finding(
            title="The inputs differ",
            whose=whose,
            step=number,
            first=_first_difference(step, other, run, reference),
            likely=likely,
            evidence=evidence,
            line=line,
        ),
        False,
    )


def _other_passes(step: TrainingStep, other: TrainingStep, run: Run, reference: Run) -> str:
    """In words, that every rank has another number of micro-batches in a step; empty if not, or if ranks vary."""
    if run.world_size != reference.world_size or reference.sharding == "whole batch":
        return ""
    counts = [{len(each.training_forwards(rank)) for rank in range(run.world_size)} for each in (step, other)]
    if counts[0] == counts[1] or any(len(each) > 1 or 0 in each for each in counts):
        return ""
    (mine,), (theirs,) = counts
    return (
        f"every rank accumulates {mine} micro-batch{'es' * (mine > 1)} in this step instead of {theirs}: the number of "
        "accumulation steps, or the condition that ends a step, is another one, or an epoch ends in it"
    )


def _from_other_states(run: Run, reference: Run, number: int) -> str:
    """In words, which generator is in another state at the first inputs that differ; empty if none is."""
    if run.world_size != reference.world_size:
        return ""
    of_ranks = [list(_forwards(run, reference, rank, number)) for rank in range(run.world_size)]
    for place, pairs in enumerate(zip(*of_ranks, strict=False)):
        rank = next(
            (rank for rank, (mine, theirs) in enumerate(pairs) if input_hashes(mine) != input_hashes(theirs)), None
        )
        if rank is None:
            continue
        mine, theirs = pairs[rank]
        others = [name for name, state in mine.random.items() if theirs.random.get(name) != state]
        alike = [
            name
            for name in others
            if _share_state(name, [pair[0] for pair in pairs])
            and run.world_size > 1
            and not _share_state(name, [pair[1] for pair in pairs])
        ]
        if alike:
            return (
                f"the data is drawn from the generator of {' and '.join(alike)}, which has the same state on all ranks "
                "from there on: something gives all of them one seed, such as an evaluation"
            )
        before = of_ranks[rank][place - 1] if place else None
        changed = [
            name for name in others if before is not None and before[0].random.get(name) == before[1].random.get(name)
        ]
        if changed:
            return (
                f"the data is drawn from the generator of {' and '.join(changed)}, which has got another state on rank "
                f"{rank} since the micro-batch before: something seeds it, or draws from it, such as an evaluation"
            )
        break
    return ""


def _share_state(name: str, forwards: Sequence[Forward]) -> bool:
    return len({forward.random.get(name) for forward in forwards}) == 1


def _forwards(run: Run, reference: Run, rank: int, number: int) -> Iterator[tuple[Forward, Forward]]:
    """The micro-batches of a rank in both runs, from the step before `number` to it."""
    for step in range(max(0, number - 1), number + 1):
        yield from zip(*(each.steps[step].training_forwards(rank) for each in (run, reference)), strict=False)


def _doubled(mine: Sequence[object], theirs: Sequence[object]) -> str:
    """In words, which ranks train the samples of another one, and not their own; empty if none does."""
    if len(mine) != len(theirs):
        return ""
    first = {rank: mine.index(samples) for rank, samples in enumerate(mine)}
    doubled = [rank for rank, other in first.items() if other != rank and theirs[rank] != theirs[other]]
    return some([f"rank {rank} trains the samples of rank {first[rank]}" for rank in doubled], _NAMED)


def _ranks_of_their_own(mine: Sequence[object], theirs: Sequence[object]) -> list[int]:
    """The ranks that have other samples; none if all have."""
    others = [rank for rank, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]]
    return others if len(mine) == len(theirs) and 0 < len(others) < len(mine) else []


def repetition(run: Run, *, least: int) -> tuple[int, int] | None:
    """
    After how many micro-batches those of all ranks come again in the same order, and the step in which they do.

    At least so many must have come again, and all that have been trained since. None if they do not.
    """
    of_ranks = [
        [
            (step.number, item.samples)
            for step in run.steps
            for forward in step.training_forwards(rank)
            if (item := main_input(forward)) is not None
        ]
        for rank in range(run.world_size)
    ]
    count = len(of_ranks[0])
    if any(len(batches) != count for batches in of_ranks):
        return None
    orders = [tuple(batches[index][1] for batches in of_ranks) for index in range(count)]
    for period in range(2, count - least + 1):
        comes_again = orders[period:] == orders[: count - period]
        # Each once, or the order would have a shorter period, or not be one of a shuffled epoch.
        if comes_again and len(set(orders[:period])) == len(orders[:period]):
            return period, of_ranks[0][period][0]
    return None


def _repeated(run: Run, reference: Run, number: int) -> str:
    """In words, that the run begins again with the samples of its first epoch; empty if it does not."""
    mine = repetition(run, least=1)
    if mine is None or number < mine[1] or repetition(reference, least=1) is not None:
        return ""
    again = f"after {mine[0]} micro-batches the run trains the same samples again in the same order, and the reference"
    epoch = {sample for step in run.steps[: mine[1]] for sample in _samples(step, run)}
    if epoch.issuperset(_samples(reference.steps[number], reference)):
        return f"{again} in another one: the sampler's `set_epoch` is not called in each epoch"
    return f"{again} goes on with others: the loader, its iterator or its sampler begins again where it should go on"


def _shifted(run: Run, reference: Run, number: int) -> str:
    """In words, which step of the reference has the samples of the ranks that have other ones; empty if none has."""
    if run.world_size != reference.world_size:
        return ""
    ranks = range(run.world_size)
    mine = {rank: list(samples_of(run.steps[number], rank)) for rank in ranks}
    others = [rank for rank in ranks if mine[rank] != list(samples_of(reference.steps[number], rank))]
    if not all(mine[rank] for rank in others):
        return ""
    by_distance = sorted(range(len(reference.steps)), key=lambda step: abs(step - number))
    for step in by_distance:
        if all(mine[rank] == list(samples_of(reference.steps[step], rank)) for rank in others):
            who = "every rank has the" if len(others) == len(ranks) else f"{_named(others)} the"
            away = abs(step - number)
            steps = f"{away} step{'s' * (away > 1)}"
            what = (
                f"{steps} ahead: a batch was left out"
                if step > number
                else f"{steps} behind: a batch was trained twice, or another number of batches came before"
            )
            return f"{who} samples of step {step} of the reference, {what}"
    return ""


def _named(ranks: Sequence[int]) -> str:
    plural = len(ranks) > 1
    return f"rank{'s' * plural} {', '.join(map(str, ranks))} {'have' if plural else 'has'}"


def _first_difference(step: TrainingStep, other: TrainingStep, run: Run, reference: Run) -> str:
    for rank in range(min(run.world_size, reference.world_size)):
        pairs = zip(step.training_forwards(rank), other.training_forwards(rank), strict=False)
        for forward, expected in pairs:
            for name in dict.fromkeys((*forward.inputs, *expected.inputs)):
                mine, theirs = forward.inputs.get(name), expected.inputs.get(name)
                if mine is None or theirs is None or mine.value.hash != theirs.value.hash:
                    shapes = [list(item.value.shape) if item is not None else "none" for item in (mine, theirs)]
                    seen = f" · shape {shapes[0]} instead of {shapes[1]}" if shapes[0] != shapes[1] else ""
                    return f"rank {rank} · micro-batch {forward.number} · {argument(name)}{seen}"
    return "another number of micro-batches or ranks"


def _arguments(names: Sequence[str]) -> str:
    return " and ".join(map(argument, names))


def argument(name: str) -> str:
    """An argument in words. Its name is its place in the positional arguments, [0], and those with names, [1]."""
    kind, _, place = name.partition("][")
    key, _, rest = place.partition("]")
    return f"{'positional argument' if kind == '[0' else 'argument'} {key}{rest}"


def _hashes(step: TrainingStep, rank: int) -> Iterator[tuple[str, ...]]:
    yield from map(input_hashes, step.training_forwards(rank))


def input_hashes(forward: Forward) -> tuple[str, ...]:
    """The arguments of a forward: names, shapes and hashes."""
    return tuple(f"{name} {item.value.shape} {item.value.hash}" for name, item in sorted(forward.inputs.items()))


def main_input(forward: Forward) -> Input | None:
    """The input whose first dim has the samples: the largest one that has any."""
    inputs = [item for item in forward.inputs.values() if item.samples]
    return max(inputs, key=lambda item: item.value.elements, default=None)


def _samples(step: TrainingStep, run: Run) -> Iterator[str]:
    """A hash of each sample of a step, over all ranks and passes."""
    for rank in range(run.world_size):
        yield from samples_of(step, rank)


def _other_arguments(step: TrainingStep, other: TrainingStep, run: Run, reference: Run) -> str:
    """In words, that the samples agree in some arguments and differ in others; empty if they do not."""
    mine, theirs = _by_argument(step, run), _by_argument(other, reference)
    same = [name for name in mine if Counter(mine[name]) == Counter(theirs.get(name, ()))]
    if not same or mine.keys() != theirs.keys():
        # With other names, arguments cannot be compared one by one.
        return ""
    differing = [name for name in mine if name not in same]
    if differing:
        return (
            f"the samples are the same in {_arguments(same)}, and others in {_arguments(differing)}: what is made "
            "of the data, such as labels or a mask, is made in another way"
        )
    together, wanted = (Counter(zip(*each.values(), strict=False)) for each in (mine, theirs))
    return "" if together == wanted else f"{_arguments(same)} are paired in another way"


def _by_argument(step: TrainingStep, run: Run) -> dict[str, list[str]]:
    """The hashes of all samples of a step in each argument that has as many as the main one, by its name."""
    hashes: dict[str, list[str]] = defaultdict(list)
    for rank in range(run.world_size):
        for forward in step.training_forwards(rank):
            main = main_input(forward)
            for name, item in sorted(forward.inputs.items()):
                if main is not None and len(item.samples) == len(main.samples):
                    hashes[name] += item.samples
    return hashes


def samples_of(step: TrainingStep, rank: int) -> Iterator[str]:
    """A hash of each sample that a rank trained in a step."""
    for forward in step.training_forwards(rank):
        item = main_input(forward)
        if item is not None:
            yield from item.samples


def _are_alike(step: TrainingStep, run: Run) -> bool:
    """True if all ranks have the same samples, and more than none."""
    of_ranks = [list(samples_of(step, rank)) for rank in range(run.world_size)]
    return bool(of_ranks[0]) and all(samples == of_ranks[0] for samples in of_ranks)


def shares_samples(run: Run, number: int) -> bool:
    """True if all ranks train the same samples in a step."""
    return run.world_size > 1 and _are_alike(run.steps[number], run)
