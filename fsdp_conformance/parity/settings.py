"""The settings of an optimizer in two runs, and why one of them differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_conformance.parity.runs import Run, TrainingStep
from fsdp_conformance.parity.words import both_settings, short, why_scaled

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


def why_setting(run: Run, reference: Run, number: int, difference: str) -> str:
    """The likely cause of a setting that differs at a step as `setting_difference` says."""
    key, _, value, *_ = difference.split()
    why = _why_rate(run, reference, number, value) if key == "lr" else ""
    return why or why_scaled(difference, run.world_size)


def _why_rate(run: Run, reference: Run, number: int, value: str) -> str:
    rates, schedule = ([short(rate) for rate in map(_rate_of, each.steps)] for each in (run, reference))
    if len(rates) > number + 2 and rates[number + 1 :] == schedule[number : len(rates) - 1]:
        return (
            "every rate comes one step late: the script sets it, or steps the scheduler, after the optimizer "
            "has stepped, and the reference before"
        )
    place = _place_of(value, rates, schedule, number)
    if place is not None:
        how = "more" if place > number else "less"
        return f"it is the rate of the reference's step {place}: the scheduler is stepped {how} often"
    starts = [_first_group(each.steps[number]).get("initial_lr") for each in (run, reference)]
    if starts[0] is None or starts[0] != starts[1]:
        return ""
    causes = ["is stepped a different number of times", "is made for a different number of steps"]
    if any(mark.kind == "load" for mark in run.marks):
        causes.append("begins again, as its state was not loaded with the rest of the checkpoint")
    return f"both begin with {short(starts[0])}: the scheduler {', or '.join(causes)}"


def _place_of(value: str, rates: Sequence[str], schedule: Sequence[str], number: int) -> int | None:
    """The other step in which the reference has this rate, if that shows how often the scheduler was stepped."""
    if schedule[number] == value:
        # It is the rate of another parameter group that differs.
        return None
    places = [place for place, rate in enumerate(schedule) if rate == value]
    if rates[:number] == schedule[:number]:
        # Until now it was stepped as often. One step more or less is left; a schedule may come back to an old rate.
        places = [place for place in places if abs(place - number) == 1]
    return places[0] if places else None


def _first_group(step: TrainingStep) -> Mapping[str, Any]:
    """The settings of the first parameter group."""
    return next((group.settings for group in step.steps[0].groups), {})


def _rate_of(step: TrainingStep) -> object:
    """The learning rate of the first group."""
    return _first_group(step).get("lr")
