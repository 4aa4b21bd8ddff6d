"""
The likely cause of gradients that differ.

Sketches are linear, so a gradient can be tested for being any combination of others: the reference's gradient times a
factor, the sum of two steps' gradients, or what each rank and each backward has added to it, with other weights than
they should have. A cause is named only if it explains the gradients to within their bound, or nearly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdp_conformance.listing import some
from fsdp_conformance.parity.noise import EPS, EXPLAINED, SAME, factor_of, is_loss_scale, is_near
from fsdp_conformance.parity.runs import TrainingStep
from fsdp_conformance.parity.units import unit_of
from fsdp_conformance.recordings.events import Backward
from fsdp_conformance.recordings.fingerprint import Whole, norm_of

#: Tensors that are looked at; the largest ones.
_MOST = 24
#: Pairs of tensors that are named.
_NAMED = 2
#: How the cause begins that is only a guess from the size of differences.
ROUNDED = "rounded to"
#: How causes begin that say which parts of ranks and backwards are in the gradients.
OF_PARTS = ("backward ", "what rank", "not reduced: ", "the ranks are weighted ", "they weigh ")
#: How the cause begins that the gradients of the step before are in those of this one.
NOT_CLEARED = "not cleared: "
#: Contributions that are told apart.
_MOST_CONTRIBUTIONS = 64

Sketch = Sequence[float]

#: The part of the gradients before a place that must be wrong if the backward goes wrong there. Some may be zero.
_NEARLY_ALL = 0.8


@dataclass(frozen=True, slots=True)
class Gradients:
    """The tensors that differ, and what they may be made of."""

    values: Mapping[str, Whole]
    expected: Mapping[str, Whole]
    """Of the same names."""
    all: Mapping[str, Whole]
    """The reference's, of all names."""
    previous: Sequence[Mapping[str, Whole]]
    """The reference's gradients of the step before: as the optimizer got them, and before they were clipped."""
    contributions: Sequence[Sequence[Mapping[str, Sketch]]]
    """The part of each rank and backward, as far as the reference knows: by rank, backward, name."""
    ranks: int
    passes: int
    eps: float
    """Of the dtype that the reference computes in."""
    divisor: float | None = None
    """The divisor of sums over the ranks that the script sets; None if it sets none."""


def likely(gradients: Gradients) -> str:
    """The likely cause, or an empty string."""
    names = sorted(gradients.values, key=lambda name: -gradients.expected[name].norm)[:_MOST]
    for explain in (_nothing, _factor, _of_previous_step, _of_contributions, _exchanged, _of_others, _of_rounding):
        cause = explain(gradients, names)
        if cause:
            return cause
    return ""


def place_of(
    wrong: Sequence[str], order: Sequence[str], tied: Mapping[str, Sequence[str]], units: Collection[str]
) -> str:
    """
    Where in the model gradients that differ in no known way begin to be wrong, in words; empty if that shows nothing.

    `order` has the names of all gradients in the order of the model, `tied` the other names of shared parameters, and
    `units` the names of the sharded units.
    """
    if all(name in tied for name in wrong):
        return (
            f"'{wrong[0]}' is shared with '{tied[wrong[0]][0]}': what one of the modules that share it adds to the "
            "gradient is missing, or is added more than once"
        )
    last = max(map(order.index, wrong))
    if len(wrong) < 2 or last == len(order) - 1 or len(wrong) < _NEARLY_ALL * (last + 1):
        return ""
    following = order[last + 1]
    module = following.rpartition(".")[0]
    if module and not order[last].startswith(f"{module}.") and unit_of(order[last], units) == unit_of(following, units):
        # Its inputs are right, and so is what comes to it in the backward. No hook of the engine is within a unit.
        return (
            f"in the backward, '{module}' computes with other weights than in the forward: its own gradients are "
            f"right, and in the order of the model all before it are wrong, up to '{order[last]}'"
        )
    return (
        f"in the order of the model, the gradients are wrong up to '{order[last]}' and right after it: there, the "
        "backward computes with other weights or activations than the forward, or passes a wrong gradient on"
    )


def contributions_of(step: TrainingStep) -> list[list[dict[str, Sketch]]]:
    """
    The part of each rank and backward, by rank, backward, name.

    Empty if the run has not recorded it, or has a sketch that no recording writes.
    """
    try:
        ranks = [_passes_of(backwards) for backwards in step.backwards]
    except ValueError:
        return []
    return ranks if all(passes and all(passes) for passes in ranks) else []


def _passes_of(backwards: Sequence[Backward]) -> list[dict[str, Sketch]]:
    passes: list[dict[str, Sketch]] = []
    before: dict[str, Sketch] = {}
    for backward in backwards:
        held: dict[str, Sketch] = {name: value.numbers() for name, value in backward.contributions.items()}
        passes.append({name: _minus(sketch, before.get(name)) for name, sketch in held.items()})
        # What has been reduced is set aside; the rest is in the next one as well.
        before = {} if backward.is_reduced else held
    return passes


def previous_gradients(step: TrainingStep | None) -> list[Mapping[str, Whole]]:
    """The gradients of the step before: as they were when it ended, and before they were clipped."""
    if step is None:
        return []
    return [step.gradients.values, *([step.unclipped.values] if all(step.clips) else [])]


def why_zero(step: TrainingStep, expected: TrainingStep, names: Sequence[str]) -> str:
    """In words, that one optimizer gets a gradient of zeros where the other one gets none; empty if there is none."""
    mine, theirs = step.gradients.values, expected.gradients.values
    for name in names:
        values = [each[name] for each in (mine, theirs) if name in each]
        if len(values) == 1 and not values[0].square:
            where, other = ("here", "in the reference") if name in mine else ("in the reference", "here")
            return (
                f"'{name}' has a gradient of zeros {where}, and none {other}. An optimizer leaves out parameters "
                "without a gradient, but with one of zeros, momentum and weight decay still move them. They keep zeros "
                "if they are frozen or not used after `zero_grad(set_to_none=False)`"
            )
    return ""


def _minus(sketch: Sketch, other: Sketch | None) -> Sketch:
    return sketch if other is None else [a - b for a, b in zip(sketch, other, strict=True)]


def _nothing(gradients: Gradients, names: Sequence[str]) -> str:
    lost = [name for name in names if gradients.values[name].nonfinite]
    if lost:
        return f"infinite or NaN elements in '{lost[0]}': an overflow, or memory that was read before it was written"
    if all(not gradients.values[name].square for name in names):
        return "the gradients are zero"
    return ""


def _factor(gradients: Gradients, names: Sequence[str]) -> str:
    factors = []
    for name in names:
        factor = factor_of(gradients.values[name], gradients.expected[name])
        if factor is None:
            return ""
        factors.append(factor)
    if not _are_same(factors) or abs(factors[0] - 1) <= SAME:
        return ""
    factor = sum(factors) / len(factors)
    wrong, total = len(gradients.values), len(gradients.all)
    which = "" if wrong == total else f" ({wrong} of {total} tensors)"
    return f"{_meaning(factor, gradients)}: every element is {_number(factor)} times the expected one{which}"


def _meaning(factor: float, gradients: Gradients) -> str:
    """Two causes have the same factor if there are as many backwards as ranks: both are named."""
    meanings = []
    ranks, passes = gradients.ranks, gradients.passes
    if gradients.divisor is not None and is_near(factor, gradients.divisor / ranks):
        return f"the divisor that the script sets, {_number(gradients.divisor)}, is ignored: averaged over the ranks"
    if ranks > 1 and is_near(factor, ranks):
        meanings.append("added up over the ranks instead of averaged")
    if ranks > 1 and is_near(factor, 1 / ranks):
        meanings.append("divided by the number of ranks twice")
    if passes > 1 and is_near(factor, passes):
        meanings.append("added up over the backwards of the step instead of averaged")
    if passes > 1 and is_near(factor, 1 / passes):
        meanings.append("divided by the number of backwards twice")
    if is_near(factor, -1):
        meanings.append("the sign is wrong")
    if not meanings and is_loss_scale(factor):
        power = round(math.log2(factor))
        meanings.append(f"not unscaled: the factor is 2 to the power of {power}, like that of a gradient scaler")
    return ", or ".join(meanings) or "scaled"


def _of_previous_step(gradients: Gradients, names: Sequence[str]) -> str:
    for before in gradients.previous:
        if not all(name in before for name in names):
            continue
        stale = _weights(gradients, names, [[before[name].numbers] for name in names])
        if stale is not None and is_near(stale[0], 1):
            return "stale: they are the gradients of the step before"
        both = [[gradients.expected[name].numbers, before[name].numbers] for name in names]
        kept = _weights(gradients, names, both)
        if kept is not None and is_near(kept[0], 1) and abs(kept[1]) > SAME:
            times = "" if is_near(kept[1], 1) else f", {_number(kept[1])} times"
            return f"{NOT_CLEARED}they are the step's gradients plus those that the step before has left{times}"
    return ""


def _of_contributions(gradients: Gradients, names: Sequence[str]) -> str:
    flat = [(rank, number) for rank, passes in enumerate(gradients.contributions) for number in range(len(passes))]
    if not flat or len(flat) > _MOST_CONTRIBUTIONS:
        return ""
    names = [name for name in names if all(name in gradients.contributions[rank][number] for rank, number in flat)]
    if not names:
        return ""
    parts = [[gradients.contributions[rank][number][name] for rank, number in flat] for name in names]
    weights = _weights(gradients, names, parts)
    if weights is None:
        return ""
    # A mean over the ranks, unless the script has set another divisor.
    usual = _weights(replace(gradients, values=gradients.expected), names, parts)
    right = usual[0] if usual is not None and _are_same(usual) and abs(usual[0]) > SAME else 1 / gradients.ranks
    # 1 for what counts as it should.
    counts = {key: weight / right for key, weight in zip(flat, weights, strict=True)}
    return _read_counts(counts, gradients)


def _read_counts(counts: Mapping[tuple[int, int], float], gradients: Gradients) -> str:
    if _are_same([*counts.values(), 1.0]):
        return ""
    ranks = sorted({rank for rank, _ in counts})
    numbers = sorted({number for _, number in counts})
    of_ranks = {rank: [counts[key] for key in counts if key[0] == rank] for rank in ranks}
    of_numbers = {number: [counts[key] for key in counts if key[1] == number] for number in numbers}
    if all(map(_are_same, of_ranks.values())):
        return _read_ranks({rank: values[0] for rank, values in of_ranks.items()}, gradients.ranks)
    if all(map(_are_same, of_numbers.values())):
        wrong = {number: values[0] for number, values in of_numbers.items() if not is_near(values[0], 1)}
        missing = [number for number, value in wrong.items() if abs(value) <= SAME]
        if len(missing) == len(wrong):
            return f"{_list('backward', missing)} of the step is not in the gradients of any rank"
        counted = {number: 0.0 if number in missing else value for number, value in wrong.items()}
        return "; ".join(f"backward {number} counts {_number(value)} times" for number, value in counted.items())
    wrong_keys = [key for key, value in counts.items() if not is_near(value, 1)]
    shown = [f"rank {r}, backward {n}: {_number(counts[r, n])}" for r, n in wrong_keys[:4]]
    return f"they weigh ranks and backwards differently, with 1 for what they should be: {'; '.join(shown)}"


def _read_ranks(counts: Mapping[int, float], ranks: int) -> str:
    missing = [rank for rank, value in counts.items() if abs(value) <= SAME]
    others = [value for rank, value in counts.items() if rank not in missing]
    if len(others) == 1 and missing and is_near(others[0], ranks):
        alone = next(rank for rank in counts if rank not in missing)
        return f"not reduced: only what rank {alone} computed is in the gradients"
    if missing:
        return f"what {_list('rank', missing)} computed is not in the gradients"
    shown = " : ".join(_number(counts[rank]) for rank in sorted(counts))
    return f"the ranks are weighted {shown} instead of equally, as where each has another number of samples or tokens"


def _exchanged(gradients: Gradients, names: Sequence[str]) -> str:
    """Two tensors of one shape add up to what they should: they have each other's elements, all or some of them."""
    pairs = [
        (one, other)
        for one, other in itertools.combinations(sorted(names), 2)
        if gradients.expected[one].shape == gradients.expected[other].shape and _is_sum_of(gradients, one, other)
    ]
    if not pairs or {name for pair in pairs for name in pair} != set(names):
        return ""
    return "; ".join(f"'{one}' and '{other}' have elements of each other" for one, other in pairs[:_NAMED])


def _is_sum_of(gradients: Gradients, one: str, other: str) -> bool:
    left = [a + b for a, b in zip(gradients.values[one].numbers, gradients.values[other].numbers, strict=True)]
    right = [a + b for a, b in zip(gradients.expected[one].numbers, gradients.expected[other].numbers, strict=True)]
    # Of what both differ by: a sum of small differences would be small as well.
    differences = min(gradients.values[name].distance(gradients.expected[name]) for name in (one, other))
    return differences > 0 and norm_of([a - b for a, b in zip(left, right, strict=True)]) <= EXPLAINED * differences


def _of_others(gradients: Gradients, names: Sequence[str]) -> str:
    """Each tensor has the elements of another one of its shape."""
    owners = {name: _owner(gradients, name) for name in names}
    if not all(owners.values()):
        return ""
    shown = some([f"'{name}' has the elements of '{owner}'" for name, owner in owners.items()], _NAMED)
    # Of memory that is written over, the last owner keeps its own elements.
    is_exchange = set(owners.values()) == set(owners)
    why = "they were given to one another's parameters" if is_exchange else "memory was used again before it was read"
    return f"{shown}: {why}"


def _owner(gradients: Gradients, name: str) -> str:
    """The other tensor whose elements a tensor has, by its name; empty if there is none."""
    value = gradients.values[name]
    for other, expected in gradients.all.items():
        if other != name and expected.shape == value.shape and value.distance(expected) <= EXPLAINED * expected.norm:
            return other if expected.norm else ""
    return ""


def _of_rounding(gradients: Gradients, names: Sequence[str]) -> str:
    distances = [
        gradients.values[name].distance(gradients.expected[name]) / gradients.expected[name].norm
        for name in names
        if gradients.expected[name].norm
    ]
    for dtype in ("bfloat16", "float16"):
        eps = EPS[dtype]
        # Rounding to nearest changes a tensor by about 0.3 of the eps; sums of rounded values by a few of them.
        if distances and eps > gradients.eps and all(0.05 * eps <= distance <= 2 * eps for distance in distances):
            return f"{ROUNDED} {dtype}: the differences have the size of its rounding errors on every tensor"
    return ""


def _weights(gradients: Gradients, names: Sequence[str], terms: Sequence[Sequence[Sketch]]) -> list[float] | None:
    """
    The weights with which `terms`, those of each name, add up to the gradients. None if they do not.

    Least squares over all names, each relative to its norm.
    """
    # It takes longer to import than most comparisons take.
    import numpy as np

    columns: list[list[float]] = []
    right: list[float] = []
    for name, sketches in zip(names, terms, strict=True):
        scale = 1 / max(gradients.values[name].norm, gradients.expected[name].norm, 1e-300)
        columns += [[scale * number for number in numbers] for numbers in zip(*sketches, strict=True)]
        right += [scale * number for number in gradients.values[name].numbers]
    matrix = np.array(columns)
    if not np.isfinite(matrix).all():
        return None
    weights, _, rank, _ = np.linalg.lstsq(matrix, np.array(right), rcond=1e-9)
    if rank < matrix.shape[1]:
        # Several combinations give the same: none of them is the cause.
        return None
    rest = (matrix @ weights - np.array(right)).reshape(len(names), -1)
    if any(norm_of(row) > EXPLAINED for row in rest.tolist()):
        return None
    return [float(weight) for weight in weights]


def _are_same(values: Sequence[float]) -> bool:
    middle = sum(values) / len(values)
    return all(abs(value - middle) <= SAME * max(1.0, abs(middle)) for value in values)


def _number(value: float) -> str:
    return f"{value:.3g}"


def _list(noun: str, numbers: Sequence[int]) -> str:
    words = ", ".join(map(str, numbers))
    return f"{noun}{'s' * (len(numbers) > 1)} {words}"
