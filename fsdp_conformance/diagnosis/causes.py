"""
From the pattern of a difference to its likely cause: summed instead of averaged, a missing rank, dropped rows, stale.

Every answer begins with the cause and quotes the numbers that support it. A signature must fit every element of the
tensor; if none fits, there is no answer. Where several causes have the same effect on this tensor, all are named: two
ranks cannot tell a sum from a gradient counted twice.

A gradient is compared with sums of the ranks' own gradients (`Evidence.contributions`), as a whole and in pieces: the
full gradient of a sharded engine is put together from the rows of each rank, so one that was never reduced holds a
different rank's gradient in every shard. What depends on the forward or on the optimizer is compared with a step that
has one mistake in it (`Evidence.supposed`, made by `diagnosis.mistakes`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_conformance.diagnosis.evidence import Evidence
from fsdp_conformance.diagnosis.headline import cause_and_fact
from fsdp_conformance.diagnosis.places import (
    FEWEST_TAKEN,
    NEAR,
    exchanged_shards,
    moved_elements,
    same,
    shifted,
    shifted_in_unit,
)
from fsdp_conformance.references.tolerance import magnitude

#: How much closer a tensor must be to a supposed value than that value is to the right one.
_CLOSER = 0.05
#: Largest number of ranks for which every subset is tried.
_MAX_SUBSET_RANKS = 8
#: Causes that one answer may name. A report names those on which the tensors agree, so a small tensor may fit several.
_MAX_NAMED = 6
#: What rows of zeros, and a tensor of zeros, have in common.
_LOST = "rows of a shard lost"
#: How a supposition begins that is only known up to rounding.
IN_LOW_PRECISION = "computed in "
#: Causes of states that are those of another moment; between the two of them only the values decide.
STALE = "stale"
LATER = "of a later step than the save"
AVERAGED_TWICE = "averaged twice"
#: How causes begin that say whose settings a parameter was stepped with: settings are those of whole groups.
OF_SETTINGS = ("every group ", "each group ", "each parameter ", "the learning rate ")
_LOW = (torch.bfloat16, torch.float16)
#: How much of a rounding error may be another than the predicted one, and the fewest elements that show it.
_ROUNDED_ALIKE = 0.5
_LEAST_ROUNDED = 4


def likely(evidence: Evidence) -> str | None:
    """The likely cause in one sentence, or None."""
    return next(causes(evidence), None)


def causes(evidence: Evidence) -> Iterator[str]:
    """Everything that fits, the likeliest first."""
    got = evidence.got.double()
    if not bool(got.isfinite().all()):
        yield _not_finite(got)
        return
    expected = evidence.expected.double()
    # A tensor that is nearly right is nearly everything that the right one resembles.
    signatures = _SIGNATURES if not same(got, expected) else _FOR_SMALL_DIFFERENCES
    for signature in signatures:
        yield from signature(evidence, got, expected)


def likely_none(
    got: Tensor | None, expected: Tensor | None, *, trainable: bool = True, used: bool = False
) -> str | None:
    """The likely cause of a gradient that is None on one side only. `used`: this rank's loss depends on it."""
    if got is None and expected is not None:
        if used:
            return "no gradient: this rank used the parameter, and the reduction never gave it one"
        return "left out of the reduction: this rank did not use the parameter, and others did"
    if got is not None and not bool(got.any()):
        return "a gradient of zeros was created for a parameter that no rank used"
    if got is None:
        return None
    if not trainable:
        return "a frozen parameter received a gradient"
    return "an unused parameter received a gradient: one of an earlier step, or memory that was never written"


def _not_finite(got: Tensor) -> str:
    bad = int((~got.isfinite()).sum())
    if bad == got.numel():
        return f"uninitialised storage, freed storage or overflow: none of the {bad} elements is finite"
    tail = got.flatten().isfinite().logical_not().nonzero().flatten()
    at_end = int(tail[0]) == got.numel() - bad
    cause = "padding was read" if at_end else "storage was read before it was written"
    return f"{cause}: {'the last ' if at_end else ''}{bad} of {got.numel()} elements are not finite"


# --- signatures: each takes the evidence and the actual and expected tensors in float64 -------------------------------


class _Guess(NamedTuple):
    """A cause, what it predicts, and in words what the tensor would then equal."""

    cause: str
    fact: str
    value: Tensor


def _unchanged(evidence: Evidence, got: Tensor, expected: Tensor) -> Iterator[str]:
    previous = evidence.previous
    if evidence.kind != "parameter" or previous is None:
        return
    if _moved(expected, previous.double()):
        if _is_kept(got, previous.double(), expected):
            if _moved(got, previous.double()):
                yield from _as_supposed(evidence, got, expected)
            yield "no update: the parameter has its value from before the step"
    elif _moved(got, previous.double()):
        # With a learning rate of zero it should not change either, and has a gradient.
        yield from _as_supposed(evidence, got, expected)
        yield "updated without a gradient: the parameter should not change in this step"


def _all_zero(evidence: Evidence, got: Tensor, expected: Tensor) -> Iterator[str]:
    if evidence.kind == "gradient" and not magnitude(got) and magnitude(expected):
        own = _totals(evidence)[evidence.rank] if evidence.contributions is not None else None
        names = ["dropped", _LOST]
        if own is not None and evidence.world_size > 1 and not magnitude(own):
            names.append("not reduced")
        yield f"{', or '.join(names)}: every element is zero"


def _other_step(evidence: Evidence, got: Tensor, expected: Tensor) -> Iterator[str]:
    previous = evidence.previous
    if previous is None or evidence.kind == "parameter" or previous.shape != got.shape:
        return
    before = previous.double()
    if evidence.kind == "buffer" and not magnitude(before) and not magnitude(got) and magnitude(expected):
        yield "stale by one step, or set to zero: the buffer was zero before the step, and is"
    if not magnitude(before) or same(before, expected):
        return
    if same(got, before):
        yield f"stale by one step: every element equals the previous step's {evidence.kind}"
    elif evidence.kind == "gradient" and same(got, expected + before):
        yield "not cleared: the previous step's gradient is included"


def _saved(evidence: Evidence, got: Tensor, expected: Tensor) -> Iterator[str]:
    """A state that has the value of another moment, state or parameter, as a whole or in one run of rows."""
    if evidence.kind != "state":
        return
    others = {
        f"mixed up with another parameter: it has the value of {name!r}": value
        for name, value in evidence.others.items()
    }
    zeros = {"zeros: the value was not saved, or not loaded": torch.zeros_like(expected)}
    wrong = (got != expected).view(max(len(got), 1) if got.dim() else 1, -1).any(1).nonzero().flatten().tolist()
    rows = slice(wrong[0], wrong[-1] + 1)
    some = bool(got.dim()) and len(wrong) < len(got)
    fitting = []
    for phrase, value in {**evidence.alternatives, **others, **zeros}.items():
        wide = value.double()
        if wide.shape != got.shape:
            continue
        seen, predicted, right = (each[rows] if some else each for each in (got, wide, expected))
        apart = magnitude(predicted - right)
        if apart and magnitude(seen - predicted) <= _CLOSER * apart and same(seen, predicted):
            cause, fact = cause_and_fact(phrase)
            fitting.append(_Guess(cause, fact + _of_rows(evidence, wrong, len(got)) if some else fact, got))
    if len({guess.cause for guess in fitting if guess.cause in (STALE, LATER)}) < 2:
        yield from _named(fitting)


def _of_rows(evidence: Evidence, rows: list[int], num_rows: int) -> str:
    """Which rows of a tensor differ, and whose they are."""
    which = f"row {rows[0]}" if len(rows) == 1 else f"rows {rows[0]} to {rows[-1]}"
    shard = _shard_of(rows, num_rows, evidence.world_size)
    return f"; only {which} of {num_rows}" + (f", which is rank {shard}'s shard" if shard is not None else "")


def _linear(evidence: Evidence, got: Tensor, expected: Tensor) -> Iterator[str]:
    """
    A sum of the right parts with wrong weights: a factor, a missing rank, a micro-batch counted twice.

    Different weights may give the same tensor, so all that fit are named. Pieces are tried only if the whole fits none.
    """
    if evidence.kind not in ("gradient", "input gradient", "norm", "clipped gradient"):
        return
    factor = _uniform_ratio(got, expected)
    fitting = [] if factor is None else list(_factors(evidence, got, expected, factor))
    for guess in _sums(evidence, expected):
        if not same(guess.value, expected) and same(got, guess.value):
            fitting.append(guess)
    if not fitting:
        fitting = list(_owned_sums(evidence, got, expected))[:1]
    yield from _named(fitting)


def _named(fitting: Sequence[_Guess]) -> Iterator[str]:
    """One sentence for all guesses; nothing if there are too many."""
    facts = dict(reversed([(guess.cause, guess.fact) for guess in fitting]))
    names = list(dict.fromkeys(guess.cause for guess in fitting))
    if 0 < len(names) <= _MAX_NAMED:
        yield f"{', or '.join(names)}: {facts[names[0]]}"


def _factors(evidence: Evidence, got: Tensor, expected: Tensor, factor: float) -> Iterator[_Guess]:
    """The possible meanings of a single factor at every element."""
    world_size, micro = evidence.world_size, evidence.micro_batches
    is_norm = evidence.kind == "norm"
    places = " at every element" if expected.numel() > 1 else ""

    def guess(cause: str, target: float, which: str = "") -> Iterator[_Guess]:
        if target != 1 and _close(factor, target):
            yield _Guess(cause, f"got / expected = {_figure(factor)}{places}{which}", got)

    if evidence.kind == "input gradient":
        # It belongs to one rank: nothing reduces it.
        yield from guess("divided by the number of ranks", 1 / world_size, ", which is 1 / world size")
        yield from guess("multiplied by the number of ranks", world_size, ", which is the world size")
        return
    yield from guess("summed over ranks instead of averaged", world_size, ", which is the world size")
    yield from guess(AVERAGED_TWICE, 1 / world_size, ", which is 1 / world size")
    yield from guess("divided by the number of micro-batches", 1 / micro, f", which is 1 / {micro}")
    yield from guess("multiplied by the number of micro-batches", micro, f", which is {micro}")
    if not is_norm:
        yield from guess("counted twice", 2)
        if -1 not in evidence.factors.values():
            yield from guess("wrong sign", -1)
        for cause, target in evidence.factors.items():
            yield from guess(cause, target)
        divisor = round(world_size / factor) if abs(factor) * 2.5 > 1 else 0
        if 2 <= divisor <= 2 * world_size and divisor != world_size:
            yield from guess(f"divided by {divisor} instead of {world_size}", world_size / divisor)


def _sums(evidence: Evidence, expected: Tensor) -> Iterator[_Guess]:
    """The gradient as it would be with wrong weights of ranks or micro-batches."""
    if evidence.contributions is None:
        return
    if evidence.world_size > 1:
        yield from _unreduced(evidence)
        yield from _subsets(evidence)
        for rank, total in enumerate(_totals(evidence)):
            fact = f"its gradient divided by {evidence.world_size} is added once more"
            yield _Guess(f"rank {rank} counted twice", fact, expected + total / evidence.world_size)
    if evidence.micro_batches > 1:
        yield from _micro_batches(evidence, expected)


def _unreduced(evidence: Evidence) -> Iterator[_Guess]:
    """One rank's gradient everywhere: on this rank, or in the shard of that rank if it holds the whole tensor."""
    for rank, total in enumerate(_totals(evidence)):
        if magnitude(total):
            whose = "this rank's" if rank == evidence.rank else f"rank {rank}'s"
            fact = f"equals {whose} own gradient"
            yield _Guess("not reduced", fact, total)
            fact += " divided by the world size"
            yield _Guess("not reduced", fact, total / evidence.world_size)
            if evidence.world_size == 2:
                yield _Guess("every rank leaves itself out", fact, total / evidence.world_size)


def _subsets(evidence: Evidence) -> Iterator[_Guess]:
    totals = _totals(evidence)
    world_size = len(totals)
    if world_size > _MAX_SUBSET_RANKS:
        return
    for size in range(world_size - 1, 0, -1):
        for ranks in itertools.combinations(range(world_size), size):
            absent = [rank for rank in range(world_size) if rank not in ranks]
            if not any(magnitude(totals[rank]) for rank in absent):
                continue
            total = _sum([totals[rank] for rank in ranks])
            fact = f"equals the sum over {_ranks(ranks)}, divided by {world_size}"
            yield _Guess(f"{_ranks(absent)} missing", fact, total / world_size)
            fact = f"as in a group of {size}, with {_ranks(absent)} left out"
            yield _Guess(f"averaged over {_ranks(ranks)} only", fact, total / size)


def _micro_batches(evidence: Evidence, expected: Tensor) -> Iterator[_Guess]:
    parts = evidence.contributions or ()
    last = evidence.micro_batches - 1
    means = [_mean([rank[micro] for rank in parts], expected) for micro in range(last + 1)]
    if magnitude(means[last]):
        fact = f"equals the gradient of micro-batch {last} alone"
        yield _Guess("overwritten instead of accumulated", fact, means[last])
    for micro, mean in enumerate(means):
        if not magnitude(mean):
            continue
        yield _Guess(f"micro-batch {micro} missing", "the others are included", expected - mean)
        yield _Guess(f"micro-batch {micro} counted twice", "it is added once more", expected + mean)
        own = parts[evidence.rank][micro]
        if own is not None and evidence.world_size > 1:
            fact = "this rank's own gradient is in its place"
            yield _Guess(f"micro-batch {micro} not reduced", fact, expected - mean + own.double())
            fact += ", divided by the world size"
            yield _Guess(f"micro-batch {micro} not reduced", fact, expected - mean + own.double() / len(parts))


def _owned_sums(evidence: Evidence, got: Tensor, expected: Tensor) -> Iterator[_Guess]:
    """The same, where each rank's shard has that rank's mistake in it: its own gradient instead of the mean."""
    if evidence.contributions is None or evidence.world_size == 1:
        return
    totals, world_size = _totals(evidence), evidence.world_size
    whose = "the rows of each rank equal its own gradient"
    choices = [
        ("not reduced", whose, totals),
        ("not reduced", f"{whose} divided by the world size", [total / world_size for total in totals]),
        (
            "every rank leaves itself out", "the rows of each rank lack its own gradient",
            [expected - total / world_size for total in totals],
        ),
        (
            "every rank counts itself twice", "the rows of each rank have its own gradient once more",
            [expected + total / world_size for total in totals],
        ),
    ]  # fmt: skip
    for micro in range(evidence.micro_batches if evidence.micro_batches > 1 else 0):
        own = [_mean([rank[micro]], expected) for rank in evidence.contributions]
        rest = expected - _sum(own) / world_size
        fact = "in the rows of each rank its own gradient is in the place of the mean"
        choices.append((f"micro-batch {micro} not reduced", fact, [rest + mine for mine in own]))
        divided = [rest + mine / world_size for mine in own]
        choices.append((f"micro-batch {micro} not reduced", f"{fact}, divided by the world size", divided))
    for cause, fact, by_owner in choices:
        if _is_pieced(got, expected, by_owner):
            yield _Guess(cause, fact, got)


def _is_pieced(got: Tensor, expected: Tensor, by_owner: Sequence[Tensor]) -> bool:
    """
    True if the tensor is made of consecutive pieces of these, in order of rank, along dim 0 or dim 1.

    At least two of them are needed: a single one is not a piece but the whole.
    """
    scale = max(magnitude(got), *(magnitude(value) for value in by_owner))
    for dim in range(min(got.dim(), 2)):
        flat = got.movedim(dim, 0).flatten()
        begin, used = 0, 0
        for value in by_owner:
            fits = ((flat - value.movedim(dim, 0).flatten()).abs() <= NEAR * scale)[begin:]
            length = int(fits.long().cumprod(0).sum()) if fits.numel() else 0
            right = expected.movedim(dim, 0).flatten()[begin : begin + length]
            used += bool(((flat[begin : begin + length] - right).abs() > NEAR * scale).any())
            begin += length
        if begin == flat.numel() and used > 1:
            return True
    return False


def _swapped(evidence: Evidence, got: Tensor, expected: Tensor) -> Iterator[str]:
    if evidence.kind in ("loss", "norm", "state"):
        return
    for name, other in evidence.others.items():
        wide = other.double()
        if not magnitude(wide) or same(wide, expected):
            continue
        if same(got, wide):
            yield f"mixed up with another parameter: every element equals the {evidence.kind} of {name!r}"
        elif count := _taken(evidence, got, expected, wide):
            owner = f"the {evidence.kind} of {name!r}"
            yield f"mixed up with another parameter: the {count} wrong elements are those of {owner}"
        elif evidence.kind == "gradient" and same(got, expected + wide):
            yield f"mixed up with another parameter: equals the sum of its own gradient and that of {name!r}"


def _taken(evidence: Evidence, got: Tensor, expected: Tensor, other: Tensor) -> int:
    """How many elements are wrong, if each has the value of another tensor at its place; else 0."""
    wrong = _outside(evidence, got, expected)
    count = int(wrong.sum())
    return count if count >= FEWEST_TAKEN and same(got[wrong], other[wrong]) else 0


def _scaled_otherwise(evidence: Evidence, got: Tensor, expected: Tensor) -> Iterator[str]:
    """By a factor without a name."""
    if evidence.kind not in ("gradient", "norm", "clipped gradient"):
        return
    ratio = _uniform_ratio(got, expected)
    if ratio is None or _close(ratio, 1):
        return
    where = " at every element" if expected.numel() > 1 else ""
    # Some engines clip unless they are told not to.
    clipped = ", as by gradient clipping" if evidence.kind == "gradient" and 0 < ratio < 1 else ""
    yield f"scaled: got / expected = {_figure(ratio)}{where}{clipped}"


def _update_scaled(evidence: Evidence, got: Tensor, expected: Tensor) -> Iterator[str]:
    factor = _update_factor(evidence, got, expected)
    if factor is not None and not _close(factor, 1):
        named = [cause for cause, target in evidence.factors.items() if _close(factor, target)]
        if named:
            yield named[0]
        elif _is_plain(factor, evidence.world_size):
            yield f"{_update_scaled_by(factor)}: at every element{_ratio_of(factor, evidence.world_size)}"
        else:
            yield f"scaled: the update is {_figure(factor)} times the right one at every element"
        return
    if evidence.kind != "parameter" or expected.numel() < 2:
        return
    # A parameter is nearly proportional to itself: the factor must explain the difference, not the value.
    ratio = _uniform_ratio(got, expected, spread=1.0)
    if ratio is None or abs(ratio - 1) <= 1e-6:
        return
    if magnitude(got - ratio * expected) <= 0.01 * magnitude(got - expected):
        yield f"the parameter itself is scaled by {ratio:.6g}: it decays, or its weight decay is another"


def _update_factor(evidence: Evidence, got: Tensor, expected: Tensor) -> float | None:
    """The actual update in units of the expected one, if that is one number."""
    if evidence.kind != "parameter" or evidence.previous is None:
        return None
    before = evidence.previous.double()
    return _uniform_ratio(got - before, expected - before, spread=1e-3)


def _update_scaled_by(factor: float) -> str:
    return f"update scaled by {_figure(factor)}"


def _is_plain(factor: float, world_size: int) -> bool:
    """True for a factor that could be in a program, or missing from it."""
    return any(abs(factor - plain) < 1e-3 * plain for plain in (2.0, 0.5, world_size, 1 / world_size) if plain != 1)


def _rows(evidence: Evidence, got: Tensor, expected: Tensor) -> Iterator[str]:
    """Differences confined to a run of rows, or of elements."""
    if expected.dim() == 0 or evidence.kind not in ("gradient", "parameter", "initial", "used parameter"):
        return
    outside_E = _outside(evidence, got, expected)
    rows = outside_E.flatten(1).any(1) if expected.dim() > 1 else outside_E
    bad = rows.nonzero().flatten().tolist()
    num_rows = len(rows)
    if not bad or bad != list(range(bad[0], bad[-1] + 1)):
        return
    flat_E = outside_E.flatten().nonzero().flatten()
    inside_E = slice(int(flat_E[0]), int(flat_E[-1]) + 1)
    if int(flat_E[-1]) - int(flat_E[0]) + 1 == expected.numel():
        return
    missing = _missing(evidence, got.flatten()[inside_E], inside_E)
    if missing is None:
        return
    which = f"row {bad[0]}" if len(bad) == 1 else f"rows {bad[0]} to {bad[-1]}"
    shard = _shard_of(bad, num_rows, evidence.world_size)
    cause = _LOST
    if bad[-1] == num_rows - 1 and num_rows % evidence.world_size:
        cause = f"last padded rows dropped, or {_LOST}"
    whose = f" (rank {shard}'s shard)" if shard is not None else ""
    part = "" if got[bad].numel() == got.flatten()[inside_E].numel() else "elements in "
    are = "is" if len(bad) == 1 and not part else "are"
    yield f"{cause}: {part}{which} of {num_rows}{whose} {are} {missing}, the others are correct"


def _missing(evidence: Evidence, wrong: Tensor, inside_E: slice) -> str | None:
    """The content of a run of wrong elements."""
    if not magnitude(wrong):
        return "zero"
    if evidence.previous is None or evidence.kind != "parameter":
        return None
    before, right = (value.double().flatten()[inside_E] for value in (evidence.previous, evidence.expected))
    return "not updated" if _is_kept(wrong, before, right) else None


def _is_kept(got: Tensor, before: Tensor, expected: Tensor) -> bool:
    """True if a parameter has its value from before the step, apart from rounding, and should have another."""
    return magnitude(got - before) <= 1e-2 * magnitude(expected - before)


def _rounded(evidence: Evidence, got: Tensor, expected: Tensor) -> Iterator[str]:
    """Every element is the expected one at lower precision."""
    if not magnitude(expected) or evidence.kind in ("loss", "norm"):
        return
    # Numbers with few digits, rounded to float32, are representable in less.
    for dtype in (torch.float32, *_LOW) if evidence.got.dtype is torch.float64 else _LOW:
        representable = torch.equal(got.to(dtype).double(), got)
        near = magnitude(got - expected) <= 2 * torch.finfo(dtype).eps * magnitude(expected)
        if representable and near and not torch.equal(expected.to(dtype).double(), expected):
            yield f"rounded to {_name(dtype)}: every element is representable in it"


def _reduced_in_low_precision(evidence: Evidence, got: Tensor, expected: Tensor) -> Iterator[str]:
    """The ranks' gradients were rounded before they were added, or their sums were."""
    if evidence.kind != "gradient" or evidence.contributions is None or got.numel() < _LEAST_ROUNDED:
        return
    world_size = evidence.world_size
    for dtype in _LOW:
        eps = torch.finfo(dtype).eps
        totals = [total.to(dtype) for total in _totals(evidence)]
        # What rounding each of them, and each sum, can do. Contributions to something else, such as the gradient before
        # it was clipped, are farther away.
        rounding = 2 * world_size * eps * max(magnitude(total.double()) for total in totals)
        sums = (
            _sum([total.double() for total in totals]) / world_size,
            _sum([(total / world_size).double() for total in totals]),
            (_sum(totals) / world_size).double(),
            _sum([total / world_size for total in totals]).double(),
        )
        near = [value for value in sums if magnitude(value - expected) <= rounding]
        if any(_is_like(got, expected, value) for value in near):
            off = magnitude(got - expected) / magnitude(expected)
            yield f"reduced in {_name(dtype)}: off by {off:.1e} of the largest element (eps is {eps:.1e})"


def _is_like(got: Tensor, expected: Tensor, wide: Tensor) -> bool:
    """True if most of the difference is that of a value which is rounded differently each time."""
    apart = torch.linalg.vector_norm(wide - expected)
    return bool(apart > 0 and torch.linalg.vector_norm(got - wide) <= _ROUNDED_ALIKE * apart)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _as_supposed(evidence: Evidence, got: Tensor, expected: Tensor) -> Iterator[str]:
    """The value of a step with one mistake in it."""
    fitting = []
    shard = _only_shard(evidence, got, expected)
    for phrase, value in evidence.supposed():
        wide = value.double()
        if wide.shape != got.shape or not bool(wide.isfinite().all()):
            continue
        if shard is not None:
            rank, rows = shard
            wide = torch.cat([expected[: rows.start], wide[rows], expected[rows.stop :]])
        apart = magnitude(wide - expected)
        if apart <= 10 * NEAR * NEAR * magnitude(expected) or _is_before(evidence, wide, got):
            continue
        exact = magnitude(got - wide) <= _CLOSER * apart and same(got, wide)
        # Low precision rounds differently in every implementation, and a few elements may be close by chance.
        rounded = phrase.startswith(IN_LOW_PRECISION) and got.numel() >= _LEAST_ROUNDED
        if exact or (rounded and _is_like(got, expected, wide)):
            cause, fact = cause_and_fact(phrase)
            fitting.append(_Guess(cause if shard is None else f"in the rows of rank {rank}, {cause}", fact, got))
    factor = _update_factor(evidence, got, expected)
    # Wrong settings scale the update, so the factor is not another cause.
    if fitting and factor is not None and _is_plain(factor, evidence.world_size) and not _of_settings(fitting):
        fitting.append(_Guess(_update_scaled_by(factor), "", got))
    yield from _named(fitting)


def _only_shard(evidence: Evidence, got: Tensor, expected: Tensor) -> tuple[int, slice] | None:
    """The rank in whose rows all wrong elements are, and these rows; None if there are several, or no others."""
    if evidence.world_size == 1 or not got.dim() or len(got) < 2:
        return None
    wrong = ((got - expected).abs() > NEAR * magnitude(expected)).reshape(len(got), -1).any(1).nonzero().flatten()
    for rank, rows in enumerate(_shards(len(got), evidence.world_size)):
        if len(wrong) and all(int(row) in rows for row in wrong):
            return rank, slice(rows.start, rows.stop)
    return None


def _of_settings(guesses: Sequence[_Guess]) -> bool:
    return any(guess.cause.startswith(OF_SETTINGS) for guess in guesses)


def _is_before(evidence: Evidence, value: Tensor, got: Tensor) -> bool:
    """True if a parameter would just keep its value, or does as far as one can see."""
    if evidence.kind != "parameter" or evidence.previous is None:
        return False
    before = evidence.previous.double()
    is_seen = magnitude(got - value) <= _CLOSER * magnitude(value - before)
    return _is_kept(value, before, evidence.expected) and not is_seen


_Signature = Callable[[Evidence, Tensor, Tensor], Iterator[str]]
_SIGNATURES: tuple[_Signature, ...] = (
    _unchanged,
    _all_zero,
    _saved,
    _other_step,
    _linear,
    _swapped,
    _rows,
    exchanged_shards,
    moved_elements,
    shifted,
    shifted_in_unit,
    _rounded,
    _as_supposed,
    _reduced_in_low_precision,
    _scaled_otherwise,
    _update_scaled,
)


#: Those that look at the change of a parameter, or at the size of the difference.
_FOR_SMALL_DIFFERENCES = (_unchanged, _saved, _rows, _rounded, _as_supposed, _reduced_in_low_precision, _update_scaled)


# --- helpers ----------------------------------------------------------------------------------------------------------


def _moved(after: Tensor, before: Tensor) -> bool:
    return not torch.equal(after, before)


def _uniform_ratio(got: Tensor, expected: Tensor, *, spread: float = NEAR) -> float | None:
    """got / expected if it is the same at every element, relative to the largest one."""
    index = int(expected.abs().argmax()) if expected.numel() else 0
    if not expected.numel() or expected.flatten()[index] == 0:
        return None
    ratio = float(got.flatten()[index] / expected.flatten()[index])
    if not ratio or magnitude(got - ratio * expected) > spread * abs(ratio) * magnitude(expected):
        return None
    return ratio


def _close(value: float, target: float) -> bool:
    return abs(value - target) <= NEAR * abs(target)


def _ratio_of(ratio: float, world_size: int) -> str:
    if world_size > 1 and abs(ratio - world_size) < 1e-3 * world_size:
        return ", which is the world size"
    if world_size > 1 and abs(ratio * world_size - 1) < 1e-3:
        return ", which is 1 / world size"
    return ""


def _figure(ratio: float) -> str:
    """Rounded, without the noise of the last digits."""
    return f"{round(ratio, 4):g}"


def _totals(evidence: Evidence) -> list[Tensor]:
    """By rank: the sum of its micro-batches' gradients; zeros for a rank without one."""
    zeros = torch.zeros_like(evidence.expected, dtype=torch.float64)
    return [
        _sum([zeros, *(grad.double() for grad in rank if grad is not None)]) for rank in evidence.contributions or ()
    ]


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)


def _mean(tensors: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """Over all, those without a value counted as zeros."""
    values = [tensor.double() for tensor in tensors if tensor is not None]
    return _sum([torch.zeros_like(like), *values]) / len(tensors)


def _outside(evidence: Evidence, got: Tensor, expected: Tensor) -> Tensor:
    distance = (got - expected).abs()
    return distance > (0 if evidence.tolerance is None else evidence.tolerance)


def _shard_of(rows: list[int], num_rows: int, world_size: int) -> int | None:
    """The rank whose dim-0 shard, as torch.chunk makes it, is exactly these rows."""
    return next((rank for rank, shard in enumerate(_shards(num_rows, world_size)) if list(shard) == rows), None)


def _shards(num_rows: int, world_size: int) -> list[range]:
    """The rows of each rank that has any, as torch.chunk makes them."""
    held = -(-num_rows // world_size)
    return [range(start, min(num_rows, start + held)) for start in range(0, num_rows, held)] if held else []


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
