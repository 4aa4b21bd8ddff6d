"""
Bounds are as wide as the noise of the references asks for, never as wide as a fault; comparisons tell where and how
far.
"""

from __future__ import annotations

import math

import pytest
import torch

from fsdp_conformance.checks import parity
from fsdp_conformance.checks.comparison import compare
from fsdp_conformance.fixtures import workload_by_name
from fsdp_conformance.references.reference_set import Kind
from fsdp_conformance.references.tolerance import (
    BITWISE,
    CEILING,
    NOISE_FACTOR,
    WEAKEST_FAULT,
    Bound,
    floor_of,
    magnitude,
)
from fsdp_conformance.tests.checks.one_tensor import calibrate_one
from fsdp_conformance.tests.references.reference_runs import damaged, gradient, implementation_run, references_of
from fsdp_conformance.workload.definition import Regime

_EXPECTED = torch.tensor([4.0, -2.0, 1.0, 0.5], dtype=torch.float64)


def _off(*by: float) -> torch.Tensor:
    return _EXPECTED + torch.tensor(by, dtype=torch.float64)


def test_the_floor_grows_with_the_square_root_of_the_terms() -> None:
    """Four eps at one term, eight at four: 4 * 2**-23 * 2 = 2**-20."""
    assert floor_of(1) == 4 * 2**-23
    assert floor_of(4) == 2**-20
    assert floor_of(4, torch.bfloat16) == 2**-4


def test_a_bound_is_the_noise_or_the_floor() -> None:
    """Noise is the largest distance of any reference over the scale, 4; sixteen times that, but not below the floor."""
    samples = [_off(0, 0, 4e-6, 0), _off(0, -8e-6, 0, 0)]

    assert calibrate_one(_EXPECTED, samples, floor=1e-6).relative == pytest.approx(NOISE_FACTOR * 2e-6)
    assert calibrate_one(_EXPECTED, samples, floor=1e-4).relative == 1e-4


def test_without_references_the_floor_is_the_bound() -> None:
    """Nothing shows any noise."""
    bound = calibrate_one(_EXPECTED, [], floor=1e-4)

    assert (bound.noise, bound.relative) == (0.0, 1e-4)


def test_a_scale_that_is_given_replaces_the_tensors_own() -> None:
    """The noise is measured in it."""
    bound = calibrate_one(_EXPECTED, [_off(0, 4e-4, 0, 0)], scale=40.0, floor=1e-6)

    assert bound.scale == 40.0
    assert bound.noise == pytest.approx(1e-5)


def test_parameters_are_measured_by_how_far_they_have_moved() -> None:
    """A parameter that moved by 0.01 from 4 is compared on the scale of 0.01."""
    bound = calibrate_one(_EXPECTED, [_off(0, 0, 0, 0)], base=_EXPECTED - 0.01, floor=1e-3)

    assert bound.scale == pytest.approx(0.01)
    assert compare(_off(0, 0, 0, 0.9e-5), _EXPECTED, bound) is None
    assert compare(_off(0, 0, 0, 1.1e-5), _EXPECTED, bound) is not None


def test_a_vanishing_tensor_is_judged_by_the_models_rounding() -> None:
    """A gradient that is zero but for rounding may be any rounding error of the model's size, and nothing larger."""
    zero = torch.full((3,), 1e-17, dtype=torch.float64)
    bound = calibrate_one(zero, [torch.full((3,), 2e-9)], model_scale=1.0, floor=1e-6)

    assert bound.vanishing
    assert "zero but for rounding" in bound.text()
    assert compare(torch.full((3,), -1e-6), zero, bound) is None
    assert compare(torch.full((3,), 1e-4), zero, bound) is not None
    scaled = Bound(limit=torch.tensor(6e-6), relative=3e-6, scale=2.0, vanishing=True)
    assert scaled.text() == "6e-06 absolute: the tensor is zero but for rounding"


def test_only_a_small_tensor_with_noise_vanishes() -> None:
    """Up to 64 eps of the model's scale, 2**-17 of it; a model whose scale is not given has none that vanishes."""
    loud = [_off(0.5, 0.5, 0.5, 0)]

    assert calibrate_one(_EXPECTED, loud, scale=2.0**-17, model_scale=1.0, floor=1e-6).vanishing
    assert not calibrate_one(_EXPECTED, loud, scale=1.01 * 2.0**-17, model_scale=1.0, floor=1e-6).vanishing
    assert not calibrate_one(_EXPECTED, loud, scale=2.0**-18, floor=1e-6).vanishing


def test_a_vanishing_parameter_may_be_rounded_once_more() -> None:
    """
    A parameter of 1 that hardly moves, in a model of scale 4, with references 4 eps away: half an eps of that is no
    noise. 16 times 4 eps of the model's size outweigh 16 times 3.5 of noise; an eps of rounding is added.
    """
    eps = 2.0**-23
    one = torch.ones(2, dtype=torch.float64)
    moved = {"base": one - 1e-9, "roundings": 1, "model_scale": 4.0, "floor": 1e-6}
    bound = calibrate_one(one, [one + 4 * eps], **moved)  # type: ignore[arg-type]

    assert bound.limit is not None
    assert bound.limit.tolist() == [65 * eps] * 2
    assert (bound.relative, bound.scale, bound.noise, bound.vanishing) == (64 * eps, 1.0, 3.5 * eps, True)
    assert calibrate_one(one, [one], **moved).vanishing, "its rounding alone is noise"  # type: ignore[arg-type]


def test_an_indeterminate_element_leaves_the_others_sharp() -> None:
    """An element on which references differ by a third of the scale does not widen the bound of its neighbours."""
    bound = calibrate_one(_EXPECTED, [_off(1.5, 0, 4e-6, 0)], floor=1e-6)

    assert (bound.indeterminate, bound.inconclusive) == (1, False)
    assert compare(_off(2.0, 0, 0, 0), _EXPECTED, bound) is None
    assert compare(_off(0, 4e-4, 0, 0), _EXPECTED, bound) is not None


def test_half_of_a_tensor_may_be_indeterminate() -> None:
    """Here it is two of four elements."""
    bound = calibrate_one(_EXPECTED, [_off(1.5, 1.5, 4e-6, 0)], floor=1e-6)

    assert (bound.indeterminate, bound.inconclusive) == (2, False)


def test_noise_at_the_ceiling_is_still_a_bound() -> None:
    """Neither indeterminate nor inconclusive: 16 times the ceiling on a scale of 16."""
    expected = torch.tensor([16.0, 0.0], dtype=torch.float64)
    bound = calibrate_one(expected, [torch.tensor([16.0, CEILING], dtype=torch.float64)], floor=1e-6)

    assert (bound.relative, bound.indeterminate, bound.inconclusive) == (CEILING, 0, False)


def test_a_tensor_whose_elements_are_mostly_noise_is_inconclusive() -> None:
    """Three of four elements indeterminate: nothing can be said of the tensor."""
    bound = calibrate_one(_EXPECTED, [_off(0.5, 0.5, 0.5, 0)], floor=1e-6)

    assert (bound.indeterminate, bound.inconclusive) == (0, True)


@pytest.mark.parametrize(("noise", "inconclusive"), [(CEILING / NOISE_FACTOR * 0.9, False), (1e-3, True)])
def test_a_bound_above_the_ceiling_is_inconclusive(noise: float, inconclusive: bool) -> None:
    """The ceiling is a third of the weakest fault, so a bound below it hides none."""
    samples = [_off(*[4 * noise] * 4)]

    assert calibrate_one(_EXPECTED, samples, floor=1e-6).inconclusive is inconclusive
    assert CEILING * 3 == pytest.approx(WEAKEST_FAULT)


def test_the_rounding_of_a_parameter_is_no_noise() -> None:
    """
    Two steps of 1e-3 on parameters of size 4: half an ulp per step is not noise, and a whole one is allowed.

    An ulp of 4 is 4 eps, so 8 eps on a scale of 1e-3 are 9.5e-4 of it: too wide to judge, so the bound is inconclusive.
    """
    eps = 2.0**-23
    quiet = calibrate_one(
        _EXPECTED, [_off(4 * eps, 0, 0, 0)], base=_EXPECTED - 1e-3, roundings=2, scale=1e-3, floor=1e-6
    )
    wide = calibrate_one(_EXPECTED, [_off(4 * eps, 0, 0, 0)], base=_EXPECTED - 0.1, roundings=2, floor=1e-6)

    assert (quiet.noise, quiet.inconclusive) == (0.0, True)
    assert quiet.rounding == pytest.approx(8 * eps / 1e-3)
    assert "0.00095 for rounding" in quiet.text()
    assert (wide.noise, wide.inconclusive) == (0.0, False)
    louder = calibrate_one(_EXPECTED, [_off(8 * eps, 0, 0, 0)], base=_EXPECTED - 0.1, roundings=2, floor=1e-6)
    assert louder.noise == pytest.approx(4 * eps / 0.1)
    assert compare(_off(8 * eps, 0, 0, 0), _EXPECTED, wide) is None
    assert compare(_off(1e-5, 0, 0, 0), _EXPECTED, wide) is not None


def test_what_stands_still_must_stand_still() -> None:
    """A frozen parameter is compared bit for bit."""
    bound = calibrate_one(_EXPECTED, [_off(0, 0, 0, 0)], base=_EXPECTED, model_scale=1.0, floor=1e-3)

    assert compare(_EXPECTED, _EXPECTED, bound) is None
    assert compare(_off(0, 0, 1e-9, 0), _EXPECTED, bound) is not None
    assert (bound.bitwise, bound.noise) == (False, 0.0)


def test_a_reference_of_nan_lets_nothing_pass() -> None:
    """This holds for frozen parameters too."""
    bound = calibrate_one(_EXPECTED, [_off(0, math.nan, 0, 0)], base=_EXPECTED, floor=1e-3)

    assert math.isnan(bound.noise)
    assert compare(_EXPECTED, _EXPECTED, bound) is not None


def test_the_magnitude_of_nothing_is_zero() -> None:
    """A shard may be empty."""
    assert magnitude(torch.empty(0)) == 0.0
    assert magnitude(torch.tensor([1.0, -3.0])) == 3.0


def test_bounds_explain_themselves() -> None:
    """The text has the figure, the scale and where the figure comes from."""
    assert BITWISE.text() == "bitwise"
    assert calibrate_one(_EXPECTED, [_off(0, 0, 4e-6, 0)], floor=1e-6).text() == (
        "1.6e-05 of the scale 4 (16 x noise of the references, noise 1e-06)"
    )
    assert calibrate_one(_EXPECTED, [_off(0, 0, 0, 0)], floor=1e-6).text() == (
        "1e-06 of the scale 4 (that of sums, or of the gradient, noise 0)"
    )


def test_a_difference_is_told_in_full() -> None:
    """The first element, both values, their ratio, the distance in ulps of float32 at 4, and how many differ."""
    got = torch.tensor([[1.0, 2.0], [3.0, 5.0], [6.0, 8.0]])
    expected = torch.tensor([[1.0, 2.0], [3.0, 4.0], [6.0, 7.0]], dtype=torch.float64)

    difference = compare(got, expected, BITWISE)

    assert difference is not None
    assert (difference.element, difference.got, difference.expected) == ((1, 1), 5.0, 4.0)
    assert (difference.ratio, difference.ulps) == (1.25, 2.0**21)
    assert (difference.differing, difference.elements, difference.worst) == (2, 6, 1.0)
    assert difference.place() == {
        "element": (1, 1), "ratio": 1.25, "ulps": 2.0**21, "differing": 2, "elements": 6,
    }  # fmt: skip


def test_ulps_are_counted_down_to_the_smallest_normal_number() -> None:
    """Twice 2**-126 is a whole binade away: 2**23 ulps. Below it, and at infinity, there are none."""
    tiny = torch.tensor([2.0**-126])
    pairs = [(2 * tiny, tiny), (tiny, tiny / 2), (torch.tensor([math.inf]), tiny)]
    differences = [compare(got, expected.double(), BITWISE) for got, expected in pairs]

    assert [difference and difference.ulps for difference in differences] == [2.0**23, None, None]


def test_a_ratio_of_zero_has_no_sign() -> None:
    """A zero shows no sign, so that -0 does not look like an error."""
    difference = compare(torch.tensor([0.0]), torch.tensor([-2.0], dtype=torch.float64), BITWISE)

    assert difference is not None
    assert str(difference.ratio) == "0.0"


def test_nan_is_never_within_a_bound() -> None:
    """A tensor of NaN differs everywhere, whatever the bound, and so does infinity."""
    wide = Bound(limit=torch.tensor(1e9, dtype=torch.float64))
    difference = compare(torch.full((4,), math.nan), _EXPECTED, wide)

    assert difference is not None
    assert (difference.differing, difference.ratio, difference.worst) == (4, None, math.inf)
    assert compare(torch.full((4,), math.inf), _EXPECTED, wide) is not None


def test_the_sign_of_zero_does_not_count() -> None:
    """-0.0 and 0.0 are equal values, and sums of both are legal in another order."""
    assert compare(torch.tensor([-0.0]), torch.tensor([0.0], dtype=torch.float64), BITWISE) is None


def test_integers_and_scalars_and_empty_tensors() -> None:
    """Integers have no ulps, a 0-dim tensor has no index, an empty tensor cannot differ."""
    integers = compare(torch.tensor([3]), torch.tensor([4]), BITWISE)
    scalar = compare(torch.tensor(3.0), torch.tensor(4.0, dtype=torch.float64), BITWISE)

    at_zero = compare(torch.tensor([0.5]), torch.tensor([0.0], dtype=torch.float64), BITWISE)

    assert integers is not None
    assert integers.ulps is None
    assert at_zero is not None
    assert (at_zero.ulps, at_zero.ratio) == (None, None)
    assert scalar is not None
    assert scalar.element == ()
    assert scalar.place()["element"] is None
    assert compare(torch.empty(0), torch.empty(0, dtype=torch.float64), BITWISE) is None


@pytest.mark.daily(4)
@pytest.mark.nightly_params("sgd-transformer", "adam-transformer")
@pytest.mark.parametrize("name", ["nested", "norm-mlp", "transformer", "uneven", "tiny", "convolution", "wide-mlp"])
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_weakest_fault_is_seen_in_every_tensor(name: str, optimizer: str) -> None:
    """The gradient of any one tensor, reduced in bf16, is beyond the bound: the weakest of 99 seeded defects."""
    references = references_of(workload_by_name(name), Regime(optimizer=optimizer, steps=2))
    run = implementation_run(references)
    seen = []
    for tensor in run.initial_params:
        history = damaged(run)
        grad = gradient(history, 1, tensor)
        grad.copy_(grad.bfloat16())
        seen += [finding.fqn for finding in parity.kind_parity(Kind.GRADIENT, history, references).findings]

    assert seen == list(run.initial_params)
