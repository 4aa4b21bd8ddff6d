"""
The likely cause of a difference: one damage each, and what is said of it word by word.

The tensors are small integers, so that an example can be followed: rank r's gradient of micro-batch m is 2**r times the
numbers 1 to 21, turned by r + 5m places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import expecttest
import torch
from torch import Tensor

from fsdp_conformance.diagnosis.causes import likely, likely_none
from fsdp_conformance.diagnosis.evidence import Evidence

#: Of one rank: 7 rows of 3, elements 1 to 21.
CODE = torch.arange(1.0, 22.0, dtype=torch.float64).view(7, 3)


def gradient(world_size: int = 3, rank: int = 1, *, micro_batches: int = 1, turned: bool = True) -> Evidence:
    """
    A gradient that is right: the mean over ranks of the sums over micro-batches. Unless `turned`, all are proportional.

    Seven rows over 3 ranks are shards of 3, 3 and 1.
    """
    contributions = [
        [own(other, micro) if turned else CODE * 2**other for micro in range(micro_batches)]
        for other in range(world_size)
    ]
    expected = torch.stack([part for parts in contributions for part in parts]).sum(0) / world_size
    return Evidence(
        kind="gradient", got=expected.clone(), expected=expected, tolerance=None, world_size=world_size, rank=rank,
        micro_batches=micro_batches, contributions=contributions,
    )  # fmt: skip


def own(rank: int, micro: int = 0) -> Tensor:
    """The gradient of one rank's micro-batch."""
    turned: Tensor = CODE.flatten().roll(rank + 5 * micro).view(7, 3)
    return turned * float(2**rank)


def cause(evidence: Evidence, got: Tensor, **fields: Any) -> str:
    """The likely cause if `got` is seen in place of the right tensor; a long text takes two lines."""
    text = str(likely(replace(evidence, got=got, **fields)))
    return text if len(text) <= 115 else text.replace(": ", ":\n    ", 1)


def by_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Each rank's rows from its own tensor."""
    parts = [torch.chunk(tensor, len(tensors))[rank] for rank, tensor in enumerate(tensors)]
    return torch.cat(parts)


def flat(tensors: Sequence[Tensor], length: int) -> Tensor:
    """Each rank's part, of that length, from its own flat tensor."""
    parts = [tensor.flatten()[rank * length : (rank + 1) * length] for rank, tensor in enumerate(tensors)]
    return torch.cat(parts).view(tensors[0].shape)


def edited(tensor: Tensor, rows: slice, value: float) -> Tensor:
    """A copy with these rows set."""
    copy = tensor.clone()
    copy[rows] = value
    return copy


class Explain(expecttest.TestCase):
    """Texts as they are shown to a person."""

    def test_scale(self) -> None:
        """One factor at every element names the division that is missing, doubled, or by another number."""
        right = gradient()
        factors = (3.0, 1 / 3, 2.0, 1.5, 0.75, -1.0)

        self.assertExpectedInline(
            "\n".join(cause(right, right.expected * factor) for factor in factors),
            """\
summed over ranks instead of averaged: got / expected = 3 at every element, which is the world size
averaged twice: got / expected = 0.3333 at every element, which is 1 / world size
counted twice: got / expected = 2 at every element
divided by 2 instead of 3: got / expected = 1.5 at every element
divided by 4 instead of 3: got / expected = 0.75 at every element
wrong sign: got / expected = -1 at every element""",
        )

    def test_scale_of_an_input(self) -> None:
        """Nothing reduces the gradient of an input, so nothing may divide it."""
        right = replace(gradient(), kind="input gradient", contributions=None)

        self.assertExpectedInline(
            "\n".join(cause(right, right.expected * factor) for factor in (1 / 3, 3.0)),
            """\
divided by the number of ranks: got / expected = 0.3333 at every element, which is 1 / world size
multiplied by the number of ranks: got / expected = 3 at every element, which is the world size""",
        )

    def test_scale_that_the_case_knows(self) -> None:
        """A mistake that would scale a gradient, or an update, is named in place of what else has the same factor."""
        right = replace(gradient(), factors={"a hook of the user on a module was not called": -1.0})
        self.assertEqual(
            "a hook of the user on a module was not called: got / expected = -1 at every element",
            cause(right, -right.expected),
        )
        rate = "the learning rate is that of the previous step: 0.5 in place of 0.25"
        step = replace(right, kind="parameter", previous=CODE, expected=CODE - own(1), factors={rate: 2.0})
        self.assertEqual(rate, cause(step, CODE - 2 * own(1)).replace("\n    ", " "))

    def test_scale_of_micro_batches(self) -> None:
        """One over the number of micro-batches, and the number itself."""
        right = gradient(2, micro_batches=4)

        self.assertExpectedInline(
            "\n".join(cause(right, right.expected * factor) for factor in (0.25, 4.0)),
            """\
divided by the number of micro-batches: got / expected = 0.25 at every element, which is 1 / 4
multiplied by the number of micro-batches: got / expected = 4 at every element, which is 4""",
        )

    def test_ranks(self) -> None:
        """A gradient that was not reduced, lacks a rank, is a smaller group's, or has a rank twice."""
        right = gradient()
        seen = (
            own(1), own(1) / 3, own(0), right.expected - own(2) / 3, (own(0) + own(1)) / 2, right.expected + own(1) / 3,
        )  # fmt: skip

        self.assertExpectedInline(
            "\n".join(cause(right, got) for got in seen),
            """\
not reduced, or averaged over rank 1 only: equals this rank's own gradient
not reduced, or ranks 0, 2 missing: equals this rank's own gradient divided by the world size
not reduced, or averaged over rank 0 only: equals rank 0's own gradient
rank 2 missing: equals the sum over ranks 0, 1, divided by 3
averaged over ranks 0, 1 only: as in a group of 2, with rank 2 left out
rank 1 counted twice: its gradient divided by 3 is added once more""",
        )

    def test_ranks_with_proportional_gradients(self) -> None:
        """If a missing rank is also a factor, the rank is named instead; other factors are only reported."""
        right = gradient(4, turned=False)
        seen = (right.expected * 13 / 15, right.expected * 17 / 15, right.expected * 0.9)

        self.assertExpectedInline(
            "\n".join(cause(right, got) for got in seen),
            """\
rank 1 missing: equals the sum over ranks 0, 2, 3, divided by 4
rank 1 counted twice: its gradient divided by 4 is added once more
scaled: got / expected = 0.9 at every element, as by gradient clipping""",
        )

    def test_micro_batches(self) -> None:
        """The last one alone, one twice, one missing, one not reduced."""
        right = gradient(2, rank=0, micro_batches=3)
        first, last = (own(0, micro) + own(1, micro) for micro in (0, 2))
        seen = (
            last / 2, right.expected + first / 2, right.expected - first / 2, right.expected - last / 2 + own(0, 2),
        )  # fmt: skip

        self.assertExpectedInline(
            "\n".join(cause(right, got) for got in seen),
            """\
overwritten instead of accumulated: equals the gradient of micro-batch 2 alone
micro-batch 0 counted twice: it is added once more
micro-batch 0 missing: the others are included
micro-batch 2 not reduced: this rank's own gradient is in its place""",
        )

    def test_shards_of_each_rank(self) -> None:
        """
        The full gradient of a sharded engine is made of the rows of each rank: 3, 3 and 1, or flat ones of 8, 8 and 5.
        """
        right = gradient()
        totals = [own(rank) for rank in range(3)]
        lacking = [right.expected - total / 3 for total in totals]
        doubled = [right.expected + total / 3 for total in totals]
        seen = (
            by_rows(totals), by_rows([total / 3 for total in totals]), flat(totals, 8), by_rows(lacking),
            by_rows(doubled), by_rows([total.t() for total in totals]).t(),
        )  # fmt: skip

        self.assertExpectedInline(
            "\n".join(cause(right, got) for got in seen),
            """\
not reduced: the rows of each rank equal its own gradient
not reduced: the rows of each rank equal its own gradient divided by the world size
not reduced: the rows of each rank equal its own gradient
every rank leaves itself out: the rows of each rank lack its own gradient
every rank counts itself twice: the rows of each rank have its own gradient once more
not reduced: the rows of each rank equal its own gradient""",
        )

    def test_shards_of_a_deferred_micro_batch(self) -> None:
        """The last micro-batch is each rank's own, in its own rows."""
        right = gradient(2, micro_batches=2)
        first = (own(0) + own(1)) / 2

        self.assertExpectedInline(
            cause(right, by_rows([first + own(rank, 1) for rank in range(2)])),
            """micro-batch 1 not reduced: in the rows of each rank its own gradient is in the place of the mean""",
        )

    def test_what_looks_alike_is_named_together(self) -> None:
        """Two ranks cannot tell a sum from a gradient that is counted twice; other numbers of ranks can."""
        two, four = gradient(2), gradient(4)
        regime = {"factors": {"one of 2 backwards missing": 0.5}}
        seen = (
            cause(two, two.expected * 2), cause(two, two.expected / 2), cause(two, own(0) / 2, rank=0),
            cause(four, four.expected * 2), cause(four, four.expected * 4), cause(two, two.expected / 2, **regime),
        )  # fmt: skip

        self.assertExpectedInline(
            "\n".join(seen),
            """\
summed over ranks instead of averaged, or counted twice:
    got / expected = 2 at every element, which is the world size
averaged twice, or divided by 4 instead of 2: got / expected = 0.5 at every element, which is 1 / world size
not reduced, or every rank leaves itself out, or rank 1 missing:
    equals this rank's own gradient divided by the world size
counted twice, or divided by 2 instead of 4: got / expected = 2 at every element
summed over ranks instead of averaged: got / expected = 4 at every element, which is the world size
averaged twice, or one of 2 backwards missing, or divided by 4 instead of 2:
    got / expected = 0.5 at every element, which is 1 / world size""",
        )

    def test_too_many_causes_are_none(self) -> None:
        """If eight ranks have equal gradients, three quarters of the mean may lack any two of them."""
        same = [[CODE] for _ in range(8)]
        right = replace(gradient(8), expected=CODE, contributions=same)

        self.assertEqual(
            "scaled: got / expected = 0.75 at every element, as by gradient clipping", cause(right, CODE * 0.75)
        )

    def test_coincidence_in_pieces(self) -> None:
        """A single rank's gradient does not count as a piece, nor do pieces that are right."""
        right = gradient()
        totals = [own(rank) for rank in range(3)]
        turned = by_rows([totals[1], totals[0], totals[2]])

        self.assertEqual([None, None], [
            likely(replace(right, got=turned)),
            likely(replace(right, got=by_rows([right.expected, totals[1] * 1.5, right.expected]))),
        ])  # fmt: skip

    def test_places_in_a_unit(self) -> None:
        """A unit of 40 elements, of which the last 21 are this parameter: turned by a rank, reversed, shifted."""
        whole = torch.cat([torch.arange(100.0, 119.0).double(), CODE.flatten()])
        right = replace(gradient(), expected=CODE, contributions=None)
        shards = torch.cat([whole, torch.zeros(2).double()]).view(3, 14)
        seen = (shards.roll(1, 0).flatten()[:40], shards.flip(0).flatten()[:40], whole.roll(9))

        self.assertExpectedInline(
            "\n".join(cause(right, unit[19:].view(7, 3), unit=(unit, whole)) for unit in seen),
            """\
shards in the wrong place:
    rank 0 has rank 2's, rank 1 has rank 0's, rank 2 has rank 1's (14 elements of the unit each)
shards in the wrong place: rank 0 has rank 2's, rank 2 has rank 0's (14 elements of the unit each)
flat offset off by 9: element i has the value of element i - 9 in the unit's flat tensor""",
        )

    def test_supposed_values(self) -> None:
        """A value that one mistake gives; mistakes that give the right value, or only nearly this one, do not count."""
        right = replace(gradient(), kind="loss", expected=torch.tensor(2.0).double(), contributions=None)
        stale = ("stale parameters: forward saw those of the previous step", torch.tensor(2.5).double())
        same = ("another rank's data: rank 1's", torch.tensor(2.0).double())
        right = replace(right, supposed=lambda: [same, stale])
        seen = [likely(replace(right, got=torch.tensor(got))) for got in (2.5, 2.4, 2.0001)]

        self.assertEqual([stale[0], None, None], seen)

    def test_low_precision_in_the_reduction(self) -> None:
        """Rounded before it is added: the error is that of the ranks' own gradients, not any error of that size."""
        right = gradient()
        parts = [own(rank) / 7 + 0.1234567 for rank in range(3)]
        whole = [[part] for part in parts]
        right = replace(right, contributions=whole, expected=torch.stack(parts).sum(0) / 3)
        rounded = torch.stack([part.bfloat16().double() for part in parts]).sum(0) / 3
        other = right.expected * (1 + 2e-3 * torch.linspace(-1, 1, 21, dtype=torch.float64).view(7, 3).sin())

        self.assertExpectedInline(
            cause(right, rounded), """reduced in bfloat16: off by 2.1e-03 of the largest element (eps is 7.8e-03)"""
        )
        self.assertIsNone(likely(replace(right, got=other)))
        # Contributions before clipping, and a wrong factor of it, say nothing about precision.
        clipped = replace(right, expected=0.6 * right.expected)
        self.assertNotIn("reduced in", likely(replace(clipped, got=0.83 * right.expected)) or "")

    def test_rows(self) -> None:
        """Rows that were never written: the padded tail, one rank's shard, others."""
        right = gradient()
        seen = [edited(right.expected, rows, 0.0) for rows in (slice(6, 7), slice(0, 3), slice(2, 4))]

        self.assertExpectedInline(
            "\n".join(cause(right, got) for got in seen),
            """\
last padded rows dropped, or rows of a shard lost: row 6 of 7 (rank 2's shard) is zero, the others are correct
rows of a shard lost: rows 0 to 2 of 7 (rank 0's shard) are zero, the others are correct
rows of a shard lost: rows 2 to 3 of 7 are zero, the others are correct""",
        )

    def test_rows_of_a_parameter(self) -> None:
        """Rows that are as before the step."""
        before, after = CODE, CODE - 0.5
        right = replace(gradient(), kind="parameter", expected=after, previous=before, contributions=None)
        got = after.clone()
        got[6:] = before[6:]

        self.assertExpectedInline(
            cause(right, got),
            """\
last padded rows dropped, or rows of a shard lost:
    row 6 of 7 (rank 2's shard) is not updated, the others are correct""",
        )

    def test_places(self) -> None:
        """The right values elsewhere: shards rotated, exchanged, overwritten, offset, transposed, permuted."""
        right = gradient(2)
        square = replace(right, expected=torch.arange(16.0, dtype=torch.float64).view(4, 4), contributions=None)
        rows = square.expected
        four = replace(square, world_size=4)
        seen = (
            cause(square, rows[[2, 3, 0, 1]]),
            cause(four, rows[[0, 2, 1, 3]]),
            cause(four, rows[[0, 2, 2, 3]]),
            cause(square, rows.flatten().roll(1).view(4, 4)),
            cause(square, torch.cat([torch.tensor([99.0]).double(), rows.flatten()[:-1]]).view(4, 4)),
            cause(square, rows.t()),
            cause(square, rows.flip(1)),
        )

        self.assertExpectedInline(
            "\n".join(seen),
            """\
shards in the wrong place: rank 0 has rank 1's, rank 1 has rank 0's (2 rows each)
shards in the wrong place: rank 1 has rank 2's, rank 2 has rank 1's (1 rows each)
shards in the wrong place: rank 1 has rank 2's (1 rows each)
flat offset off by one: element i has the value of element i - 1
flat offset off by one: element i has the value of element i - 1
transposed: element [i, j] has the value of element [j, i] in all 4 rows
elements permuted: every value is right but in the wrong place""",
        )

    def test_time(self) -> None:
        """The value of the step before; a parameter that was not updated, or by another factor."""
        before = CODE * 3
        stale = replace(gradient(), previous=before)
        parameter = replace(stale, kind="parameter", expected=before - CODE, contributions=None)
        seen = (
            cause(stale, before),
            cause(replace(stale, kind="buffer", contributions=None), before),
            cause(replace(stale, kind="buffer", previous=before * 0, contributions=None), before * 0),
            cause(parameter, before),
            cause(parameter, before - 3 * CODE),
        )

        self.assertExpectedInline(
            "\n".join(seen),
            """\
stale by one step: every element equals the previous step's gradient
stale by one step: every element equals the previous step's buffer
stale by one step, or set to zero: the buffer was zero before the step, and is
no update: the parameter has its value from before the step
update scaled by 3: at every element, which is the world size""",
        )

    def test_a_parameter_that_is_kept_in_float32(self) -> None:
        """A later step's values are rounded: kept means much closer to the old value than the right one is."""
        before = CODE / 7
        right = replace(gradient(), kind="parameter", expected=before + 0.01, previous=before, contributions=None)

        self.assertEqual(
            "no update: the parameter has its value from before the step", cause(right, before.float().double())
        )
        self.assertNotIn("no update", cause(right, before + 0.004))

    def test_memory(self) -> None:
        """NaN in the tail, in the middle, everywhere; zeros everywhere."""
        right = gradient()
        nan = float("nan")
        seen = (
            cause(right, edited(right.expected, slice(6, 7), nan)),
            cause(right, edited(right.expected, slice(2, 4), nan)),
            cause(right, torch.full((7, 3), nan)),
            cause(right, torch.zeros(7, 3)),
        )

        self.assertExpectedInline(
            "\n".join(seen),
            """\
padding was read: the last 3 of 21 elements are not finite
storage was read before it was written: 6 of 21 elements are not finite
uninitialised storage, freed storage or overflow: none of the 21 elements is finite
dropped, or rows of a shard lost: every element is zero""",
        )

    def test_names(self) -> None:
        """Another tensor of the same shape in its place."""
        right = replace(gradient(), contributions=None, others={"1.weight": CODE.flip(0) ** 2})

        self.assertExpectedInline(
            cause(right, CODE.flip(0) ** 2),
            """mixed up with another parameter: every element equals the gradient of '1.weight'""",
        )
        partly = right.expected.clone()
        partly[-2:] = CODE.flip(0)[-2:] ** 2
        self.assertExpectedInline(
            cause(right, partly),
            """mixed up with another parameter: the 6 wrong elements are those of the gradient of '1.weight'""",
        )

    def test_precision(self) -> None:
        """The cause is rounding to fewer bits."""
        right = replace(gradient(), contributions=None)
        thirds = right.expected / 7 + 0.1234567

        self.assertExpectedInline(
            cause(replace(right, expected=thirds), thirds.to(torch.bfloat16).double()),
            """rounded to bfloat16: every element is representable in it""",
        )

    def test_precision_of_a_parameter_in_float64(self) -> None:
        """Values that float32 would round are rounded to it. Of a parameter in float32, nothing can be said."""
        right = replace(gradient(), contributions=None)
        fine = right.expected * (1 + 2.0**-26)

        self.assertExpectedInline(
            cause(replace(right, expected=fine), fine.float().double()),
            """rounded to float32: every element is representable in it""",
        )
        self.assertNotIn("rounded to", str(cause(replace(right, expected=fine), fine.float())))

    def test_none(self) -> None:
        """One side alone has a gradient."""
        zeros, some = torch.zeros(3), torch.ones(3)
        seen = (
            likely_none(None, some), likely_none(None, some, used=True), likely_none(zeros, None),
            likely_none(some, None), likely_none(some, None, trainable=False),
        )  # fmt: skip

        self.assertExpectedInline(
            "\n".join(map(str, seen)),
            """\
left out of the reduction: this rank did not use the parameter, and others did
no gradient: this rank used the parameter, and the reduction never gave it one
a gradient of zeros was created for a parameter that no rank used
an unused parameter received a gradient: one of an earlier step, or memory that was never written
a frozen parameter received a gradient""",
        )

    def test_nothing_is_made_up(self) -> None:
        """Noise has no cause, nor a single wrong element, nor a loss that is just another number."""
        right = gradient()
        noise = right.expected + torch.linspace(-1, 1, 21, dtype=torch.float64).view(7, 3).sin() * 3
        one = edited(right.expected, slice(0, 1), 5.0)
        loss = replace(right, kind="loss", expected=torch.tensor(2.0).double(), contributions=None)

        self.assertEqual([None] * 3, [
            likely(replace(right, got=noise)), likely(replace(right, got=one)),
            likely(replace(loss, got=torch.tensor(2.5))),
        ])  # fmt: skip
