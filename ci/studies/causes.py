"""
Which cause a report names for a known defect: the truth about each, and how an answer is scored.

    TRUTHS      what a report may name for each class of defects
    DEFECTS     known-wrong implementations and the class of each, with the cases to run them on
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from fsdp_conformance.mutants import MUTANTS

#: Class of defects to the causes that are right for it: patterns for the beginning of a cause.
TRUTHS: Mapping[str, str] = {
    "summed": r"summed over ranks",
    "averaged twice": r"averaged twice",
    "wrong divisor": r"divided by \d+ instead",
    "wrong sign": r"wrong sign",
    "not reduced": r"not reduced|micro-batch \d+ not reduced",
    "missing rank": r"ranks? [\d, ]+ missing|averaged over ranks",
    "own rank missing": r"every rank leaves itself out",
    "rank counted twice": r"rank \d+ counted twice",
    "smaller group": r"averaged over ranks? [\d, ]+ only|replicas train independently",
    "low precision": r"rounded to|(computed|reduced) in (bfloat16|float16)",
    "dropped": r"dropped",
    "rows lost": r"last padded rows dropped|rows of a shard lost",
    "wrong place": r"shards (rotated|in the wrong place)",
    "wrong offset": r"flat offset off by",
    "mixed up": r"mixed up with",
    "stale gradient": r"stale by one step|the step was made with the previous step's gradient",
    "not cleared": r"not cleared|the previous step's gradient was not cleared",
    "uninitialised": r"uninitialised|padding was read|storage was read",
    "lost accumulation": r"overwritten instead of accumulated|micro-batch \d+ missing",
    "divided by micro-batches": r"divided by the number of micro-batches",
    "micro-batch not reduced": r"(micro-batch \d+ )?not reduced|no gradient",
    "micro-batch missing": r"micro-batch \d+ missing|overwritten instead of accumulated",
    "micro-batch counted twice": r"micro-batch \d+ counted twice",
    "counted twice": r"counted twice",
    "stale parameters": r"stale parameters",
    "stale inputs": r"stale inputs",
    "another rank's data": r"another rank's data",
    "parameters in the wrong place": r"parameters in the wrong place|shards of the parameters",
    "optimizer state lost": r"the optimizer's state was lost",
    "stepped twice": r"the optimizer stepped twice",
    "no update": r"no update|rows of a shard lost|last padded rows",
    "updated without a gradient": r"updated without a gradient|a frozen parameter received",
    "update scaled": r"update scaled",
    "decay": r"the parameter itself is scaled",
    "not clipped": r"the gradient was not clipped|not clipped",
    "norm of one rank": r"the norm of .*'s shards alone|rank \d+'s shards are left out of the norm",
    "squared norm": r"the norm is not a square root",
    "norm added over ranks": r"the squared norms of replicated",
    "zeros for unused": r"a gradient of zeros was created",
    "garbage for unused": r"an unused parameter received|updated without a gradient",
    "left out where unused": r"left out of the reduction",
    "raised on one rank": r"only rank \d+ raised",
    "raised on every rank": r"every rank raised",
    "different collectives": r"the ranks of group|ranks issue different collectives|rank \d+ .*(never|did not)",
    "race": r"a wait is missing|memory is overwritten|two streams write|freed too early",
    "replicated": r"replicated training|ranks train independently",
    "backward missing": r"one of 2 backwards missing",
    "divided by forwards": r"divided by all forwards",
    "ranks differ": r"ranks drift apart",
    "stepped early": r"the optimizer stepped after",
    "no cause": r"(?!)",
}

#: Answers that describe the difference and name no cause.
_NEUTRAL = re.compile(r"scaled:|elements permuted|a consequence of|copies of one tensor")


class Score(StrEnum):
    """How good an answer is."""

    RIGHT = "right"
    BOTH = "named among several"
    UNKNOWN = "unknown"
    WRONG = "wrong"


def scored(truth: str, likely: str | None) -> Score:
    """The score of an answer for a defect of a class."""
    if not likely or _NEUTRAL.match(likely):
        return Score.UNKNOWN
    likely_causes = causes_in(likely)
    right = [name for name in likely_causes if re.match(TRUTHS[truth], name)]
    if not right:
        return Score.WRONG
    return Score.RIGHT if len(right) == len(likely_causes) else Score.BOTH


def causes_in(likely: str) -> list[str]:
    """The causes that an answer names."""
    return re.split(r", or ", likely.partition(": ")[0])


@dataclass(frozen=True, slots=True)
class Defect:
    """A known-wrong implementation, and what is wrong with it."""

    name: str
    """For `studies.cause_recording`."""
    truth: str
    """A key of TRUTHS."""
    cases: tuple[str, ...]


#: Known-wrong implementations of the package that train, and their class. Their cases are those that kill them.
_MUTANTS: Mapping[str, str] = {
    "sum-instead-of-mean": "summed",
    "averaged-twice": "averaged twice",
    "divides-by-power-of-two": "wrong divisor",
    "no-reduction": "not reduced",
    "reduction-skipped-from-step-2": "not reduced",
    "bias-not-reduced": "not reduced",
    "one-rank-dropped": "missing rank",
    "one-layer-norm-not-averaged": "summed",
    "last-padded-row-dropped": "rows lost",
    "shards-rotated": "wrong place",
    "outer-unit-reduces-inner": "averaged twice",
    "uninitialised-padding": "uninitialised",
    "reduces-over-shard-group-only": "smaller group",
    "last-microbatch-not-synchronised": "micro-batch not reduced",
    "overwrites-instead-of-adding": "lost accumulation",
    "optimizer-steps-every-microbatch": "stepped early",
    "second-backward-lost": "backward missing",
    "multi-forward-loses-gradient": "no cause",
    "idle-forward-leaks": "divided by forwards",
    "steps-dropped-gradients": "updated without a gradient",
    "eval-disturbs-training": "no update",
    "padding-in-the-norm": "uninitialised",
    "reads-before-wait": "stale parameters",
    "shards-differ-between-ranks": "ranks differ",
    "extra-decay": "decay",
    "random-noise": "no cause",
    "rounded-parameters": "low precision",
    "writes-after-wrap-lost": "no cause",
    "buffer-not-updated": "raised on every rank",
    "silent-ddp": "replicated",
    "zero-instead-of-none": "zeros for unused",
    "garbage-for-unused": "garbage for unused",
    "reduces-only-used": "left out where unused",
    "frozen-gets-gradient": "updated without a gradient",
    "tied-gradient-doubled": "counted twice",
    "divides-by-shard-group-only": "wrong divisor",
    "divides-by-replicas-only": "wrong divisor",
    "persistent-not-reduced": "not reduced",
    "rank-dependent-order": "different collectives",
    "wraps-twice-silently": "averaged twice",
    "steps-on-a-side-stream": "race",
    "scales-without-waiting": "race",
    "frees-in-flight": "race",
}

#: For mutants whose own cases check something else first.
_OTHER_CASES: Mapping[str, tuple[str, ...]] = {
    "no-reduction": ("R001/exact-probe-ws2", "R001/sgd-nested-ws2"),
    "reads-before-wait": ("R001/exact-probe-ws2", "R001/sgd-nested-ws2"),
    "sum-instead-of-mean": ("R001/exact-probe-ws2", "R001/sgd-norm-mlp-ws2"),
    "extra-decay": ("R001/sgd-nested-ws2",),
    # In a shard group of one rank it is not reduced at all.
    "reduces-over-shard-group-only": ("R005/hybrid-shard-group2-ws4", "R151/parity-2x4-ws8"),
    "one-rank-dropped": ("R003/every-rank-contributes-once-ws2", "R001/sgd-nested-ws2"),
}


def defects() -> list[Defect]:
    """Every defect of the study."""
    return [*_of_the_package(), *_of_the_small_engine()]


def _of_the_package() -> Iterable[Defect]:
    from fsdp_conformance.selftest import bound_cases

    killing: dict[str, list[tuple[bool, int, str]]] = {}
    for bound in bound_cases():
        case = bound.case
        for name in case.kills:
            if name in _MUTANTS:
                elsewhere = MUTANTS[name].requirement not in case.requirements[:1]
                killing.setdefault(name, []).append((elsewhere, case.world_size, case.id))
    for name, truth in _MUTANTS.items():
        ordered = sorted(killing[name])
        smallest = ordered[0]
        larger = [sized for sized in ordered if sized[:2] > smallest[:2] and sized[0] == smallest[0]][:1]
        cases = tuple(sized[2] for sized in [smallest, *larger])
        yield Defect(name, truth, _OTHER_CASES.get(name, cases))


def _of_the_small_engine() -> Iterable[Defect]:
    from studies import small_defects

    for name, member in vars(small_defects).items():
        if inspect.isclass(member) and issubclass(member, small_defects.Defect) and member.truth:
            yield Defect(name, member.truth, member.cases)
