"""
The likely cause of a wrong number of bytes: whose they are, and which calls carried them.

A cause is named only if the number of bytes is that of something whole. Parameters and their gradients have equally
many, so that both are named where both can be held.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

#: Units of which every subset is tried.
_MAX_UNITS = 12


def units_held(excess: int, units: Mapping[str, int], *, slack: int) -> str | None:
    """The units whose full bytes are so many, in words; None if no choice fits, or if choices differ in size."""
    if not units or excess <= slack:
        return None
    if abs(excess - sum(units.values())) <= slack:
        return "the unit" if len(units) == 1 else f"all {len(units)} units"
    if len(units) > _MAX_UNITS:
        return None
    choices = [
        chosen
        for size in range(1, len(units))
        for chosen in itertools.combinations(units, size)
        if abs(excess - sum(units[name] for name in chosen)) <= slack
    ]
    if len({len(chosen) for chosen in choices}) != 1:
        return None
    names = ", ".join(choices[0])
    return names if len(choices) == 1 else f"{len(choices[0])} of {len(units)} units"


def growth(held: Mapping[int, int]) -> str | None:
    """The cause of a growth between steps: the same in each step, or in one of them. `held` has the bytes by step."""
    steps = sorted(held)
    added = [held[after] - held[before] for before, after in itertools.pairwise(steps)]
    if len(added) > 1 and added[0] > 0 and len(set(added)) == 1:
        return f"kept in every step: each of {len(added)} steps adds {added[0]} B"
    grown = [step for step, bytes_ in zip(steps[1:], added, strict=True) if bytes_]
    if len(added) > 1 and len(grown) == 1 and sum(added) > 0:
        return f"kept once: only step {grown[0]} adds {sum(added)} B"
    return None


def left_over(held: int, parts: Mapping[str, int], *, slack: int) -> str | None:
    """The parts of a model that are still there after it was dropped; None if no sum of them, or several, fit."""
    fitting = [
        chosen
        for size in range(1, len(parts) + 1)
        for chosen in itertools.combinations(parts, size)
        if abs(held - sum(parts[name] for name in chosen)) <= slack
    ]
    if len(fitting) != 1:
        return None
    return f"{' and '.join(fitting[0])} stay: {held} B are as many as theirs"


def volume(
    calls: Sequence[tuple[int, str]], ideal: float, *, dtypes: set[str], units: int, padding: float
) -> str | None:
    """
    The cause of too many bytes of one kind of call: another dtype, each call repeated, or larger calls.

    `calls` are the bytes and the dtype of each, `ideal` the bytes of one pass in `dtypes`, with a call for each of
    `units`. Only a whole multiple has a cause.
    """
    total = sum(nbytes for nbytes, _ in calls)
    times = int(total / ideal) if ideal else 0
    if times < 2 or total > times * ideal * (1 + padding):
        return None
    seen = {dtype.removeprefix("torch.") for _, dtype in calls}
    if len(seen) == 1 and not seen & dtypes:
        other = next(iter(seen))
        return f"sent in {other} instead of {' and '.join(sorted(dtypes))}: {times} times the bytes"
    if units and len(calls) == times * units and all(count % times == 0 for count in Counter(calls).values()):
        return f"every unit is sent {times} times: {len(calls)} calls for {units} units, each with the planned bytes"
    if len(calls) == units:
        return f"every call carries {times} times the planned bytes: {units} calls for {units} units"
    return None
