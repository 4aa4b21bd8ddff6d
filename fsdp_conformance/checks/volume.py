"""How many bytes go over the wire under full sharding, against the bytes of the parameters."""

from __future__ import annotations

from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.checks.sizes import padded_bytes, parameter_bytes, sized_units
from fsdp_conformance.checks.traffic import in_step, nbytes, of, sites, steady_steps
from fsdp_conformance.config import Plan, Sharding
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.history.training import StepRecord, TrainingHistory
from fsdp_conformance.workload import Workload


def wire_volume(
    history: TrainingHistory, workload: Workload, plan: Plan, *, world_size: int, padding: float, requirement: str
) -> CheckResult:
    """
    All-gathers receive, and reduce-scatters send, the bytes of the parameters and no more than declared padding (R068).

    A pass over all parameters is ideally P bytes, where P is their size; at most P with dim 0 of each parameter padded
    to a multiple of the shard group, times 1 + `padding`. A forward is one pass of gathers, a backward at most one, and
    a step one pass of reductions (of trainable parameters), unless micro-batches multiply them. Other ops carry no more
    than the padding; under hybrid sharding all-reduces carry one more shard's worth.
    """
    if plan.sharding not in (Sharding.FULL, Sharding.HYBRID) or plan.replicas == world_size > 1:
        raise SuiteError(
            f"sharding={plan.sharding}, replicas={plan.replicas}, but should shard parameters over at least 2 of "
            f"{world_size} ranks [wire_volume]"
        )
    tally = Tally("wire volume", requirement, rank=history.rank)
    units = sized_units(workload, plan).shared
    group_size = world_size // plan.replicas
    ideal, ideal_trained = parameter_bytes(units), parameter_bytes(units, trainable_only=True)
    most = padded_bytes(units, group_size) * (1 + padding)
    most_trained = padded_bytes(units, group_size, trainable_only=True) * (1 + padding)
    seen: dict[str, float] = {}
    for step in steady_steps(history):
        records = in_step(history, step.step)
        passes = len(step.losses)
        reductions = 1 if plan.defer_reduction else passes
        forward, backward = (
            of([record for record in records if record.phase == phase], Op.ALL_GATHER)
            for phase in ("forward", "backward")
        )
        scattered = of(records, Op.REDUCE_SCATTER)
        _judge(tally, step, "forward", "all-gathers receive", forward, ideal * passes, most * passes)
        _judge(tally, step, "backward", "all-gathers receive", backward, 0, most * passes)
        least, limit = ideal_trained * reductions, most_trained * reductions
        _judge(tally, step, "reduce", "reduce-scatters send", scattered, least, limit)
        shard = most_trained / group_size * reductions if plan.replicas > 1 else 0
        other = [record for record in records if record.op not in (Op.ALL_GATHER, Op.REDUCE_SCATTER)]
        _judge(tally, step, None, "other collectives carry", other, 0, shard + padding * ideal)
        seen = {
            "forward": nbytes(forward) / ideal,
            "backward": nbytes(backward) / ideal,
            "reduce": nbytes(scattered) / ideal_trained,
        }
    return tally.result(measurements={"wire volume over ideal": seen, "parameter bytes": ideal})


def _judge(
    tally: Tally,
    step: StepRecord,
    phase: str | None,
    what: str,
    records: list[CollectiveRecord],
    least: float,
    most: float,
) -> None:
    got = nbytes(records)
    wanted = f"{int(least)} to {int(most)} B" if least else f"at most {int(most)} B"
    tally.expect(
        least <= got <= most,
        f"{what} {got} B, but should be {wanted}",
        elements=max(len(records), 1), step=step.step, phase=phase, got=f"{got} B", expected=wanted,
        ratio=got / least if least else None, call=sites(records),
    )  # fmt: skip
