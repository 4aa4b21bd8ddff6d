"""The collectives of a history by step, phase and kind. One over a single rank moves nothing: it is no traffic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.history.training import StepRecord, TrainingHistory

#: Phases of training. What an engine says while it is set up (meshes, checks of shapes, broadcasts) is its own affair.
TRAINING = ("forward", "backward", "step")

#: Ops that bring a rank values which it does not hold.
GATHERING = frozenset({Op.ALL_GATHER, Op.BROADCAST, Op.GATHER, Op.SCATTER, Op.ALL_TO_ALL, Op.RECV})

#: Ops that add values of several ranks.
REDUCING = frozenset({Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.REDUCE})


def in_step(history: TrainingHistory, step: int, *phases: str) -> list[CollectiveRecord]:
    """The traffic of one step, in order, in `phases` (default: those of training)."""
    wanted = phases or TRAINING
    return [
        record
        for record in history.collectives
        if record.step == step and record.phase in wanted and len(record.group) > 1
    ]


def steady_steps(history: TrainingHistory) -> Sequence[StepRecord]:
    """All steps but the first, which may hold one-time checks (R071). Raises SuiteError if there is none."""
    if len(history.steps) < 2:
        raise SuiteError(
            f"steps={len(history.steps)}, but should be at least 2 [collectives of {history.source}]. "
            "The first step is not judged, so train one more."
        )
    return history.steps[1:]


def of(records: Iterable[CollectiveRecord], *ops: Op) -> list[CollectiveRecord]:
    """The records of these ops."""
    return [record for record in records if record.op in ops]


def nbytes(records: Iterable[CollectiveRecord]) -> int:
    """Bytes of the unsharded sides together."""
    return sum(record.nbytes for record in records)


def gradient_reductions(records: Iterable[CollectiveRecord]) -> list[CollectiveRecord]:
    """
    The collectives that reduce gradients: reduce-scatters if there is any, else all-reduces and reduces of floats.

    An all-reduce beside reduce-scatters is that of hybrid sharding and carries the same gradients again; one of
    integers is bookkeeping.
    """
    seen = list(records)
    return of(seen, Op.REDUCE_SCATTER) or [
        record for record in of(seen, Op.ALL_REDUCE, Op.REDUCE) if "float" in record.dtype
    ]


def sites(records: Iterable[CollectiveRecord]) -> str | None:
    """Where the records were issued, each place once."""
    return ", ".join(dict.fromkeys(record.site for record in records if record.site)) or None
