"""The settings of an optimizer in two runs, and why one of them differs."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_conformance.parity.runs import Run, TrainingStep
from fsdp_conformance.parity.words import both_settings, short, why_scaled

#: Steps after which a rate that has not changed is taken for constant.
_CONSTANT = 3

#: Settings that a scheduler or a script may leave out of one run, and that change nothing by themselves.
_IGNORED = frozenset({"initial_lr", "name", "decoupled_weight_decay", "maximize"})


def setting_difference(run: Run, reference: Run, number: int) -> tuple[int, str, str] | None:
    """The first setting of an optimizer that differs at a step: the rank, the parameter, and what differs."""
    step, expected = run.steps[number], reference.steps[number]
    for rank in range(len(step.steps)):
        mine = step.settings_of(rank)
        for name, wanted in expected.settings_of(rank % len(expected.steps)).items():
            for key, value in wanted.items():
                if name in mine and key not in _IGNORED and mine[name].get(key, value) != value:
                    return rank, name, f"{key} is {both_settings(mine[name][key], value)}"
    return None


def why_setting(run: Run, reference: Run, number: int, name: str, difference: str) -> str:
    """The likely cause of a parameter's setting that differs at a step as `setting_difference` says."""
    moved = _in_another_group(run.steps[number], reference.steps[number], name)
    if moved:
        return moved
    key, _, value, *_ = difference.split()
    why = _why_rate(run, reference, number, name, value) if key == "lr" else ""
    return why or why_scaled(difference, run.world_size)


def _in_another_group(step: TrainingStep, expected: TrainingStep, name: str) -> str:
    """In words, that a parameter shares its group with others than in the reference; empty if it does not."""
    here, there = (_group_of(each, name) for each in (step, expected))
    if set(here) == set(there):
        return ""
    places = [
        f"the first of {len(group)} is {group[0]!r}" if len(group) > 1 else "it is alone" for group in (here, there)
    ]
    return (
        f"it is in another parameter group than in the reference (here {places[0]}; there {places[1]}): a condition on "
        "the names or shapes of parameters, which a wrapper or sharding changes, or a collection of parameters from "
        "before the model was sharded, which replaces them"
    )


def _group_of(step: TrainingStep, name: str) -> tuple[str, ...]:
    """The names of a parameter's group."""
    return next((group.parameters for group in step.steps[0].groups if name in group.parameters), (name,))


def _why_rate(run: Run, reference: Run, number: int, name: str, value: str) -> str:
    rates, schedule = ([short(_rate_of(step, name)) for step in each.steps] for each in (run, reference))
    if len(rates) >= _CONSTANT and len(set(rates)) == 1 and len(set(schedule[: len(rates)])) > 1:
        return (
            "the rate never changes here, and in the reference it does: no scheduler changes this optimizer, as where "
            "the optimizer is made again after its scheduler, or the scheduler is never stepped"
        )
    if len(rates) > number + 2 and rates[number + 1 :] == schedule[number : len(rates) - 1]:
        return (
            "every rate comes one step late: the script sets it, or steps the scheduler, after the optimizer "
            "has stepped, and the reference before"
        )
    place = _place_of(value, rates, schedule, number)
    if place is not None:
        how = "more" if place > number else "less"
        return f"it is the rate of the reference's step {place}: the scheduler is stepped {how} often"
    starts = [each.steps[number].settings_of(0).get(name, {}).get("initial_lr") for each in (run, reference)]
    if starts[0] is None or starts[0] != starts[1]:
        return ""
    causes = ["is stepped a different number of times", "is made for a different number of steps"]
    if any(mark.kind == "load" for mark in run.marks):
        causes.append("begins again, as its state was not loaded with the rest of the checkpoint")
    return f"both begin with {short(starts[0])}: the scheduler {', or '.join(causes)}"


def _place_of(value: str, rates: Sequence[str], schedule: Sequence[str], number: int) -> int | None:
    """The other step in which the reference has this rate, if that shows how often the scheduler was stepped."""
    places = [place for place, rate in enumerate(schedule) if rate == value]
    if rates[:number] == schedule[:number]:
        # Until now it was stepped as often. One step more or less is left; a schedule may come back to an old rate.
        places = [place for place in places if abs(place - number) == 1]
    if rates[number + 1 : number + 2] == [value]:
        # The scheduler does not go on from there, where the reference's does.
        places = [place for place in places if schedule[place + 1 : place + 2] in ([], [value])]
    return places[0] if places else None


def _rate_of(step: TrainingStep, name: str) -> object:
    """A parameter's learning rate."""
    return step.settings_of(0).get(name, {}).get("lr")
