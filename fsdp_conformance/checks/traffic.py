"""
The collectives of a history by step, phase and kind, and comparisons of their number and bytes.

A collective over a single rank moves nothing, so it is not traffic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fsdp_conformance.checks.result import Tally
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.history.training import StepRecord, TrainingHistory
from fsdp_conformance.listing import some

#: Phases of training. What an engine sends during setup (meshes, shape checks, broadcasts) is not judged.
TRAINING = ("forward", "backward", "step")

#: Ops that bring a rank values that it does not hold.
GATHERING = frozenset({Op.ALL_GATHER, Op.BROADCAST, Op.GATHER, Op.SCATTER, Op.ALL_TO_ALL, Op.RECV})

#: Ops that add values of several ranks.
REDUCING = frozenset({Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.REDUCE})

#: Ops by which ranks exchange values that they then add themselves. A message counts where it is sent.
EXCHANGING = frozenset({Op.ALL_TO_ALL, Op.SEND})


def in_step(history: TrainingHistory, step: int, *phases: str) -> list[CollectiveRecord]:
    """The traffic of one step, in order, in `phases` (default: those of training)."""
    counted = phases or TRAINING
    return [
        record
        for record in history.collectives
        if record.step == step and record.phase in counted and len(record.group) > 1
    ]


def steady_steps(history: TrainingHistory) -> Sequence[StepRecord]:
    """All steps but the first, which may contain one-time checks (R071). Raises SuiteError if there are none."""
    if len(history.steps) < 2:
        raise SuiteError(
            f"steps: expected at least 2, got {len(history.steps)} [collectives of {history.source}]. "
            "The first step is not judged, so train one more."
        )
    return history.steps[1:]


def of(records: Iterable[CollectiveRecord], *ops: Op) -> list[CollectiveRecord]:
    """The records of these ops."""
    return [record for record in records if record.op in ops]


def nbytes(records: Iterable[CollectiveRecord]) -> int:
    """Total bytes, counted on the unsharded side."""
    return sum(record.nbytes for record in records)


def gradient_reductions(records: Iterable[CollectiveRecord]) -> list[CollectiveRecord]:
    """
    The collectives that reduce gradients: reduce-scatters if there are any, else all-reduces and reduces of floats,
    and what ranks exchange after the loss to add it themselves.

    An all-reduce beside reduce-scatters belongs to hybrid sharding and carries the same gradients again; one of
    integers is bookkeeping. An exchange in forward carries no gradients.
    """
    traffic = list(records)
    return of(traffic, Op.REDUCE_SCATTER) or [
        record
        for record in traffic
        if "float" in record.dtype
        and (record.op in REDUCING or (record.op in EXCHANGING and record.phase in ("backward", "step")))
    ]


def parameter_gathers(records: Iterable[CollectiveRecord]) -> list[CollectiveRecord]:
    """The collectives that bring this rank parameters; what ranks exchange after the loss are gradients."""
    exchanging = EXCHANGING | {Op.RECV}
    return [
        record
        for record in of(records, *GATHERING)
        if record.op not in exchanging or record.phase not in ("backward", "step")
    ]


def sites(records: Iterable[CollectiveRecord]) -> str | None:
    """The places where the records were issued, each once, as text; None if none is known."""
    return ", ".join(dict.fromkeys(record.site for record in records if record.site)) or None


def lines(records: Iterable[CollectiveRecord], limit: int = 3) -> str:
    """The first records on one line."""
    return some([record.line() for record in records], limit, separator="; ")


def expect_count(
    tally: Tally, what: str, records: Sequence[CollectiveRecord], *, least: int = 0, most: int = 0, **where: Any
) -> None:
    """Compare the number of records with a range; their call sites go into the finding."""
    expected = str(most) if least == most else f"{least} to {most}"
    _compare(tally, least <= len(records) <= most, what, records, expected=expected, got=len(records), **where)


def expect_bytes(
    tally: Tally,
    what: str,
    records: Sequence[CollectiveRecord],
    *,
    least: float = 0,
    most: float | None = None,
    **where: Any,
) -> None:
    """Compare the total bytes of records with a range; their call sites go into the finding."""
    got = nbytes(records)
    if most is None:
        expected = f"at least {int(least)} B"
    elif least:
        expected = f"{int(least)} B" if int(least) == int(most) else f"{int(least)} to {int(most)} B"
    else:
        expected = f"at most {int(most)} B"
    holds = least <= got and (most is None or got <= most)
    _compare(tally, holds, what, records, expected=expected, got=f"{got} B", **where)


def _compare(
    tally: Tally, holds: bool, what: str, records: Sequence[CollectiveRecord], *, elements: int | None = None,
    **where: Any,
) -> None:  # fmt: skip
    num_elements = max(len(records), 1) if elements is None else elements
    tally.compare(holds, what, elements=num_elements, call=sites(records), **where)
