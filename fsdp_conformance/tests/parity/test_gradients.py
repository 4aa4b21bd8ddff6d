"""The likely cause of gradients, from what they are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from fsdp_conformance.parity.gradients import Gradients, likely, place_of
from fsdp_conformance.recorder.fingerprints import Pending, whole_part
from fsdp_conformance.recordings.fingerprint import Whole, whole

NAMES = ("first", "second")
RANKS, PASSES = 3, 2


def parts() -> dict[tuple[int, int], dict[str, Tensor]]:
    """The part of each rank and backward."""
    generator = torch.Generator().manual_seed(0)
    keys = product(range(RANKS), range(PASSES))
    return {
        key: {name: torch.randn(40, 30, generator=generator, dtype=torch.float64) for name in NAMES} for key in keys
    }


def wholes(tensors: Mapping[str, Tensor]) -> dict[str, Whole]:
    prints = Pending([[whole_part(tensor)] for tensor in tensors.values()]).fingerprints()
    return {name: whole([each])[0] for name, each in zip(tensors, prints, strict=True)}


def combined(weights: Mapping[tuple[int, int], float]) -> dict[str, Tensor]:
    """The sum of all parts, each with its weight or 1, over the number of ranks."""
    terms = [(weights.get(key, 1.0), part) for key, part in parts().items()]
    return {name: torch.stack([weight * part[name] for weight, part in terms]).sum(0) / RANKS for name in NAMES}


def cause(
    gradients: Mapping[str, Tensor],
    previous: Sequence[Mapping[str, Tensor]] = (),
    *,
    divisor: float = RANKS,
    is_set: bool = False,
) -> str:
    contributions = [
        [{name: each.numbers for name, each in wholes(parts()[rank, number]).items()} for number in range(PASSES)]
        for rank in range(RANKS)
    ]
    return likely(
        Gradients(
            values=wholes(gradients),
            expected=wholes({name: combined({})[name] * (RANKS / divisor) for name in gradients}),
            all=wholes(combined({})),
            previous=[wholes(each) for each in previous],
            contributions=contributions,
            ranks=RANKS,
            passes=PASSES,
            eps=2.0**-23,
            divisor=divisor if is_set else None,
        )
    )


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({(0, 1): 0.0, (1, 1): 0.0, (2, 1): 0.0}, "backward 1 of the step is not in the gradients of any rank"),
        ({(0, 0): 2.0, (1, 0): 2.0, (2, 0): 2.0}, "backward 0 counts 2 times"),
        ({(2, 0): 0.0, (2, 1): 0.0}, "what rank 2 computed is not in the gradients"),
        (
            {(0, 0): 3.0, (0, 1): 3.0, (1, 0): 0.0, (1, 1): 0.0, (2, 0): 0.0, (2, 1): 0.0},
            "not reduced: only what rank 0 computed is in the gradients",
        ),
        (
            {(1, 0): 0.0, (1, 1): 0.0, (2, 0): 0.0, (2, 1): 0.0},
            "what ranks 1, 2 computed is not in the gradients",
        ),
        (
            {(0, 0): 1.2, (0, 1): 1.2, (1, 0): 0.9, (1, 1): 0.9, (2, 0): 0.9, (2, 1): 0.9},
            "the ranks are weighted 1.2 : 0.9 : 0.9 instead of equally",
        ),
        ({(1, 0): 0.0}, "with 1 for what they should be: rank 1, backward 0: "),
    ],
)  # fmt: skip
def test_parts_that_count_otherwise(weights: dict[tuple[int, int], float], expected: str) -> None:
    assert expected in cause(combined(weights))


def test_parts_are_counted_as_the_script_divides_them() -> None:
    """A divisor of 1 makes sums of them, in both runs."""
    summed = {name: total * RANKS for name, total in combined({(rank, 0): 0 for rank in range(RANKS)}).items()}

    assert cause(summed, divisor=1) == "backward 0 of the step is not in the gradients of any rank"


def test_a_divisor_that_is_ignored() -> None:
    assert cause(combined({}), divisor=1, is_set=True).startswith(
        "the divisor that the script sets, 1, is ignored: averaged over the ranks: every element is 0.333 times"
    )


def test_others_have_no_cause() -> None:
    """Neither the expected ones, nor some that nothing explains."""
    generator = torch.Generator().manual_seed(5)

    assert cause(combined({})) == ""
    assert cause({name: torch.randn(40, 30, generator=generator, dtype=torch.float64) for name in NAMES}) == ""


def test_gradients_of_the_step_before() -> None:
    generator = torch.Generator().manual_seed(5)
    before = {name: torch.randn(40, 30, generator=generator, dtype=torch.float64) for name in NAMES}
    kept = {name: gradient + before[name] for name, gradient in combined({}).items()}

    assert cause(before, [before]).startswith("stale")
    assert cause(kept, [before]).startswith("not cleared")
    # Without them, nothing explains it.
    assert cause(kept) == ""


def test_a_factor_of_a_gradient_scaler() -> None:
    assert "not unscaled: the factor is 2 to the power of 16" in cause(
        {name: gradient * 2.0**16 for name, gradient in combined({}).items()}
    )


def test_tensors_that_have_rows_of_each_other() -> None:
    """As where one rank's shards are taken from each other's place. With another change it is not that."""
    first, second = NAMES[:2]
    exchanged = combined({})
    rows = exchanged[first][30:].clone()
    exchanged[first][30:] = exchanged[second][30:]
    exchanged[second][30:] = rows

    assert cause(exchanged) == f"'{first}' and '{second}' have elements of each other"
    exchanged[second][0] *= 2
    assert "each other" not in cause(exchanged)


def test_rounding_has_the_size_of_its_dtype() -> None:
    rounded = {name: gradient.to(torch.bfloat16).to(torch.float64) for name, gradient in combined({}).items()}

    assert cause(rounded).startswith("rounded to bfloat16")


ORDER = ("embedding", "first.weight", "first.bias", "second.weight", "head")


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (("embedding", "first.weight", "first.bias"), "wrong up to 'first.bias' and right after it"),
        (("first.weight", "first.bias"), ""),
        (ORDER, ""),
        (("first.weight",), ""),
        (("embedding", "first.weight"), "wrong up to 'first.weight' and right after it"),
        (("embedding",), "'embedding' is shared with 'output': what one of the modules that share it adds"),
    ],
)
def test_where_the_backward_goes_wrong(wrong: Sequence[str], expected: str) -> None:
    """Only where nearly all gradients before a place are wrong and all after it are right, or a shared one alone is."""
    text = place_of(wrong, ORDER, {"embedding": ("output",)}, {"first", "second"})

    assert expected in text
    assert bool(text) is bool(expected)


def test_weights_that_differ_in_the_backward() -> None:
    """The engine has no hooks between two modules of a unit, so the second module must have other weights."""
    text = place_of(ORDER[:3], ORDER, {}, {"a.unit"})
    assert text.startswith("in the backward, 'second' computes with other weights than in the forward")


def test_the_elements_of_another_tensor() -> None:
    """As of a buffer that is used again: one tensor has the other's elements, which has its own."""
    right = combined({})
    first, second = NAMES

    overwritten = cause({first: right[second]}, [])

    assert overwritten == f"'{first}' has the elements of '{second}': memory was used again before it was read"


def test_gradients_that_are_given_to_one_anothers_parameters() -> None:
    """No tensor keeps its own elements, and none is lost: it is not that memory was written over."""
    generator = torch.Generator().manual_seed(0)
    right = {name: torch.randn(6, 5, generator=generator, dtype=torch.float64) for name in "abc"}
    turned = dict(zip("abc", (right[name] for name in "bca"), strict=True))
    expected = wholes(right)

    turned_cause = likely(
        Gradients(
            values=wholes(turned),
            expected=expected,
            all=expected,
            previous=[],
            contributions=[],
            ranks=RANKS,
            passes=PASSES,
            eps=2.0**-23,
        )
    )

    assert turned_cause.endswith(": they were given to one another's parameters")
