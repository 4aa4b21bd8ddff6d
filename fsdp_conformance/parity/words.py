"""Differences in words: two numbers, two tensors, two settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdp_conformance.listing import some
from fsdp_conformance.recordings.events import Backward, Forward
from fsdp_conformance.recordings.fingerprint import Whole, relative

#: Factors between losses that differ by less, relative to the largest, are one factor: losses have rounding errors.
_SAME_FACTOR = 1e-3
#: Parameters that are named of many.
_NAMED = 3


def instead(value: float, wanted: float) -> str:
    """Two numbers, with as many digits as it takes to tell them apart."""
    digits = next((digits for digits in (6, 9, 12) if f"{value:.{digits}g}" != f"{wanted:.{digits}g}"), 17)
    return f"{value:.{digits}g} instead of {wanted:.{digits}g}"


def size_of_difference(value: Whole, wanted: Whole, bound: float | None = None) -> str:
    """How far a tensor is from the expected one."""
    if value.dtype != wanted.dtype:
        return f"{value.dtype} instead of {wanted.dtype}"
    if value.shape != wanted.shape:
        return f"shape {list(value.shape)} instead of {list(wanted.shape)}"
    if value.nonfinite != wanted.nonfinite:
        return f"{value.nonfinite} infinite or NaN elements instead of {wanted.nonfinite}"
    limit = f" (rounding explains {bound:.2g})" if bound is not None else ""
    # A part of a tensor can change while its norm stays the same.
    norms = f"{value.norm:.6g}", f"{wanted.norm:.6g}"
    norm = f"norm {norms[0]} instead of {norms[1]}" if norms[0] != norms[1] else f"norm {norms[0]} in both"
    return f"relative difference {relative(value, wanted):.2g}{limit} · {norm}"


def scaled(value: Whole, wanted: Whole) -> str:
    """The factor between two tensors; empty if it is 1."""
    factor = f"{value.norm / wanted.norm:.4g}" if wanted.norm else "1"
    return f"scaled by {factor}" if factor != "1" else ""


def named_with_ties(name: str, tied: Mapping[str, Sequence[str]]) -> str:
    """A parameter's name, with those of modules that share it."""
    others = tied.get(name, ())
    return f"'{name}' (tied to {', '.join(map(repr, others))})" if others else f"'{name}'"


def why_context(forward: Forward, expected: Forward) -> str:
    """The difference between the mode or the autocast that two forwards run in; empty if there is none."""
    if forward.dtype != expected.dtype:
        return f"it runs {_autocast(forward)}, and the reference {_autocast(expected)}"
    if forward.training != expected.training:
        modes = ("evaluation", "training") if expected.training else ("training", "evaluation")
        return (
            f"it runs in {modes[0]} mode, and the reference in {modes[1]} mode: `model.train()` or `model.eval()` is "
            "called elsewhere, or not at all"
        )
    return ""


def why_drawn(forward: Forward, expected: Forward) -> str:
    """The likely cause of a forward that draws random numbers where the expected one does not, or the other way."""
    if not forward.draws or not expected.draws:
        drawn = "it draws no random numbers, and the reference does"
        if forward.draws:
            drawn = "it draws random numbers, and the reference does not"
    else:
        drawn = f"it draws random numbers from {' and '.join(forward.draws)} instead of {' and '.join(expected.draws)}"
    return f"{drawn}: a dropout has another probability, such as one set on a wrapper, which the module never sees"


def _autocast(forward: Forward) -> str:
    return f"under autocast to {forward.dtype}" if forward.dtype else "without autocast"


def why_loss(backwards: Sequence[Sequence[Backward]], expected: Sequence[Sequence[Backward]]) -> str:
    """The likely cause of losses, by rank, that differ from the expected ones although the outputs do not."""
    factors = [
        (rank, mine.number, mine.loss / theirs.loss)
        for rank, pair in enumerate(zip(backwards, expected, strict=False))
        for mine, theirs in zip(*pair, strict=False)
        if mine.loss is not None and theirs.loss
    ]
    if not factors:
        return ""
    values = [factor for _, _, factor in factors]
    others = [value for value in values if not _are_equal(value, 1)]
    if not others:
        # They differ by too little to tell a factor.
        return ""
    one = others[0] if all(_are_equal(value, others[0]) for value in others) else None
    if one is not None and len(others) == len(values):
        if any(_are_equal(each, round(each)) for each in (one, 1 / one) if one):
            return (
                f"the loss is scaled by {one:.4g}: {_why_multiple(one, ranks=len(backwards), passes=len(backwards[0]))}"
            )
        return (
            f"the loss is {one:.4g} times the expected one: it is divided by another count of tokens, or a term of it, "
            "such as an auxiliary loss, has another weight"
        )
    shown = ", ".join(f"rank {rank} micro-batch {number}: {factor:.4g}" for rank, number, factor in factors[:4])
    if one is not None:
        return (
            f"some losses are scaled by {one:.4g} and others are not ({shown}): a gradient scaler, or a division by a "
            "number of batches, does not cover all backwards"
        )
    if _are_shares(values, ranks=len(backwards)):
        return (
            f"each batch is scaled by another factor ({shown}): its loss is divided by its own number of tokens or "
            "samples, and not by one that counts those of all ranks and micro-batches, or the other way round"
        )
    return (
        f"each batch has another factor ({shown}), and together they are not those of another count of tokens: the "
        "loss has other labels (shifted, masked or padded differently), or is computed in another way"
    )


def _why_multiple(factor: float, *, ranks: int, passes: int) -> str:
    """The reason for a loss that is a multiple, in words. `passes`: the number of micro-batches of a step."""
    counts = [
        f"the number of {what} ({count})"
        for what, count in (("micro-batches", passes), ("ranks", ranks))
        if count > 1 and any(_are_equal(each, count) for each in (factor, 1 / factor))
    ]
    if not counts:
        return "by a count of tokens, or by a gradient scaler"
    known = " or ".join(counts)
    if factor > 1:
        return f"it is not divided by {known}, as the reference's is, or it is multiplied by that"
    return f"it is divided by {known}, and the reference's is not, or it is divided twice, as by a framework as well"


def _are_equal(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= _SAME_FACTOR * abs(wanted)


def _are_shares(factors: Sequence[float], *, ranks: int) -> bool:
    """
    True if factors are what dividing by each batch's own count makes of losses that were divided by the count of all.

    A batch of n of N tokens has the factor N / n, so the reciprocals of all factors add up to 1; where both losses are
    averaged over ranks or micro-batches, to their number. The other way round, the factors themselves do.
    """
    sums = {1, ranks, len(factors), len(factors) // ranks}
    totals = sum(factors), sum(1 / factor for factor in factors if factor)
    return any(_are_equal(total, expected) for total in totals for expected in sums)


def why_random(generators: str) -> str:
    """The likely cause of another state of random number generators, which are in words."""
    return (
        f"random numbers: the generators of {generators} are in another state: something draws more or fewer numbers "
        "than in the reference (dropout, augmentation, a checkpoint that does not preserve the random state), or sets "
        "a seed"
    )


def why_replicas(ranks: Sequence[int]) -> str:
    """The likely cause of a gradient that has other values on these ranks than on others that hold the same part."""
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return f"{who} and others hold the same part of it with different values: it was not reduced over all ranks"


def some_names(names: Sequence[str]) -> str:
    """The first names of many."""
    return some(list(map(repr, names)), _NAMED)


def why_written(names: Sequence[str]) -> str:
    """The likely cause of a forward that differs after a script has written to parameters, which agree all the same."""
    return (
        f"the script writes to {some_names(names)} between the steps. The parameters agree before the forward, but "
        "units that were gathered when it wrote still have other values: gather them again (FSDP2: `reshard()`)"
    )


def number_of_tensors(count: int, total: int) -> tuple[str, ...]:
    """Evidence: how many tensors differ."""
    return (f"{count} of {total} tensors differ",)


def missing_and_extra(missing: int, extra: int, total: int) -> tuple[str, ...]:
    """Evidence: how many of `total` expected parameters are missing, and how many others there are."""
    words = [f"{missing} of {total} {'is' if missing == 1 else 'are'} missing"] * bool(missing)
    words += [f"{extra} {'is' if extra == 1 else 'are'} extra"] * bool(extra)
    return (", and ".join(words),)


def short(value: object) -> str:
    """A setting, short."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def both_settings(value: object, wanted: object) -> str:
    """A setting and the expected one."""
    if isinstance(value, float) and isinstance(wanted, float):
        return instead(value, wanted)
    return f"{short(value)} instead of {short(wanted)}"


def why_scaled(difference: str, ranks: int) -> str:
    """The likely cause of a setting that is a multiple of the expected one; empty if it is none."""
    words = difference.split()
    try:
        ratio = float(words[2]) / float(words[-1])
    except (ValueError, IndexError, ZeroDivisionError):
        return ""
    if ranks > 1 and abs(ratio - ranks) < 1e-6 * ranks:
        return "it is scaled by the number of ranks"
    if ranks > 1 and abs(ratio - 1 / ranks) < 1e-6:
        return "it is divided by the number of ranks"
    return ""


def of_own_optimizer(optimizer: str, defined: str, likely: str) -> str:
    """The likely cause of an update by a class that is neither torch's nor the engine's."""
    more = f"; {likely}" if likely else ""
    return (
        f"the optimizer's class {optimizer}, defined at {defined}, computes something over a shard, such as a norm or "
        f"a mean of each tensor, which must be combined over the ranks{more}"
    )


def exactly_those_of(units: str) -> tuple[str, ...]:
    """Evidence: the units whose tensors differ, all of them and no others; nothing if `units` is empty."""
    return (f"they are all those of {units}, and none of another unit",) if units else ()
