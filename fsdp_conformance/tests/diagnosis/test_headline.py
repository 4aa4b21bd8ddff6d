"""Which finding says most: races first, then a cause on which the findings of its check agree."""

from __future__ import annotations

from typing import Any

from fsdp_conformance.diagnosis import headline
from fsdp_conformance.diagnosis.headline import PROVEN, causes_in, most_telling
from fsdp_conformance.outcome.records import CaseRecord, Finding, Takes
from fsdp_conformance.verdict import Verdict


def finding(check: str, likely: str | None, *, step: int | None = 0, **fields: Any) -> Finding:
    """A finding of a check in step 0."""
    return Finding(requirement="R003", check=check, message=f"{check} differs", step=step, likely=likely, **fields)


def headline_of(*findings: Finding) -> str | None:
    """The headline of these findings."""
    finding = most_telling(findings)
    return None if finding is None else finding.likely


def gradients(*likely: str | None, step: int = 0) -> list[Finding]:
    """Findings of gradients in one step."""
    return [finding("gradient parity", cause, fqn=f"{index}.weight", step=step) for index, cause in enumerate(likely)]


def test_nothing_says_nothing() -> None:
    """There is no headline without findings, and the first one if none names a cause."""
    first, second = gradients(None, "scaled: got / expected = 0.9")

    assert most_telling([]) is None
    assert most_telling([first, second]) is first


def test_the_gradients_explain_the_loss_of_their_step() -> None:
    """A loss that differs names no cause; the gradients behind it do."""
    loss = finding("loss parity", None)
    rounded = gradients("computed in bfloat16: with parameters that were rounded to it")

    assert headline_of(loss, *rounded) == "computed in bfloat16: with parameters that were rounded to it"


def test_a_race_explains_what_is_not_finite() -> None:
    """Even if the first value that differs was seen before."""
    nan = gradients("storage was read before it was written: 30 of 65 elements are not finite")
    race = finding(
        "stream safety", "a wait is missing between the stream that writes and the one that reads", step=None
    )

    assert most_telling([*nan, race]) is race


def test_how_a_case_ended_decides() -> None:
    """An exception, or training on what should have been refused, is not replaced by a value that it led to."""
    refused = finding("loud refusal", None)

    assert most_telling([refused, *gradients("dropped: every element is zero")]) is refused


def test_later_steps_are_consequences() -> None:
    """A cause that fits a later step is not believed, and a cause that was not believed is not shown."""
    first = gradients(None)
    later = gradients("dropped: every element is zero", step=1)

    assert most_telling([*first, *later]) is first[0]


def test_a_cause_of_few_is_not_believed() -> None:
    """One tensor of four fits a cause by chance. At one of two it is still not the most of them."""
    assert headline_of(*gradients(None, "transposed: all 3 rows", None, None)) is None
    assert headline_of(*gradients(None, "transposed: all 3 rows")) is None
    assert headline_of(*gradients(None, "transposed: all 3 rows", "transposed: all 5 rows")) == "transposed: all 3 rows"


def test_causes_that_do_not_fit_the_others_are_left_out() -> None:
    """Two ranks: a tensor alone may be unreduced or lack a rank, all of them together only one of both."""
    both = "rank 1 missing, or not reduced: equals this rank's own gradient divided by the world size"
    one = "not reduced: the rows of each rank equal its own gradient divided by the world size"

    assert str(headline_of(*gradients(both, one))).startswith("not reduced: ")
    assert str(headline_of(*gradients(both, both))).startswith("rank 1 missing: equals"), (
        "the cause that is refuted more easily"
    )
    several = "summed over ranks instead of averaged, or counted twice: got / expected = 2"
    assert headline_of(*gradients(several, several)) == several


def test_a_parameter_does_not_explain_what_it_follows_from() -> None:
    """A norm that differs without a cause leaves none for the update that it scales."""
    norm = finding("norm parity", "scaled: got / expected = 1.3")
    update = finding("parameter parity", "update scaled by 2: at every element")

    assert most_telling([norm, update]) is norm


def test_a_norm_of_something_else() -> None:
    """If all parameters are exactly what one mistake gives, that is believed whatever the norm is."""
    norm = finding("norm parity", None)
    proven = finding("parameter parity", f"the gradient was not clipped: {PROVEN}")

    assert headline_of(norm, proven, proven) == proven.likely
    assert most_telling([norm, proven, finding("parameter parity", "update scaled by 2: at every element")]) is norm
    assert headline_of(*gradients(None), proven) is None


def test_losses_must_be_unanimous() -> None:
    """One number fits many causes, so a loss is believed only if all ranks say the same, and gradients say nothing."""
    stale = "stale parameters: forward saw those of the previous step"
    losses = [finding("loss parity", stale, rank=0), finding("loss parity", None, rank=1)]

    assert headline_of(*losses[:1], *gradients(None)) == stale
    assert headline_of(*losses, *gradients(None)) is None
    assert headline_of(*losses[:1], *gradients("wrong sign: got / expected = -1")) == "wrong sign: got / expected = -1"


def test_causes_are_read_from_an_explanation() -> None:
    """The headline is the text up to the colon; a description is not a cause."""
    assert causes_in("summed over ranks, or counted twice: got / expected = 2, which is 2") == (
        "summed over ranks", "counted twice",
    )  # fmt: skip
    assert causes_in("scaled: got / expected = 0.9") == ()
    assert causes_in(None) == ()


def test_each_rank_with_its_own_gradient_is_not_reduced() -> None:
    """A tensor that is zero, or twice the right one, fits several causes; those without zeros fit one."""
    zero = "dropped, or rows of a shard lost, or not reduced: every element is zero"
    twice = "summed over ranks instead of averaged, or counted twice, or not reduced: got / expected = 2"
    own = "not reduced, or averaged over rank 0 only: equals this rank's own gradient"

    assert headline_of(*gradients(zero, twice, own)) == "not reduced: equals this rank's own gradient"


def test_causes_that_agree_are_few() -> None:
    """Tensors that all fit four causes show none of them."""
    likely = "first, or second, or third, or fourth: got / expected = 2"

    assert headline_of(*gradients(likely, likely)) is None


def test_ranks_that_differ_do_not_hide_the_cause_of_a_plainer_training() -> None:
    """Ranks differ after many mistakes; the plainest training that fails says which one it is."""
    differs = finding("equality over ranks", "ranks drift apart: rank 1 and rank 0 hold different values")
    takes = Takes(values=("sharding: everything",), trainings=1, complete=True, likely="not reduced: equals its own")
    record = CaseRecord(
        case="R000/pairs-row1-ws2", requirements=["R000"], chapter="A", verdict=Verdict.FAIL, findings=[differs],
        takes=takes,
    )  # fmt: skip
    shown = headline.headline_of(record)

    assert shown is not None
    assert shown.likely == f"{takes.likely}, in the plainest training that fails in this way"


def test_random_numbers_explain_what_was_computed_with_them() -> None:
    """Another mask of dropout changes losses and gradients, and shows no cause there."""
    random = finding(headline.RANDOM, "the engine draws random numbers in a forward: dropout differs")

    assert most_telling([finding("loss parity", None), *gradients(None, None), random]) == random
