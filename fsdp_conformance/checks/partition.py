"""
The sharding witness: tells sharded from replicated training by the bytes that ranks hold.

Parity cannot do this: an engine that silently falls back to replicated training is at parity in every step. The bytes
give it away, because unsharded optimizer state has the size of the whole model's. Traffic shows less: an engine may
choose what carries gradients and parameters, and when. Where batches differ between ranks, parity shows that they have
arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.checks.traffic import (
    expect_bytes,
    in_step,
    nbytes,
    of,
    parameter_gathers,
)
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.collective import Op
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.plan import Plan, Sharding
from fsdp_conformance.workload.definition import Workload
from fsdp_conformance.workload.units import owning_units, padded_bytes, parameter_bytes

#: What a plan promises to shard. An engine's default must shard at least its optimizer state.
SHARDED_KINDS = {
    Sharding.FULL: ("params", "grads", "optim"),
    Sharding.HYBRID: ("params", "grads", "optim"),
    Sharding.GRAD_OPTIM: ("grads", "optim"),
    Sharding.OPTIM: ("optim",),
    Sharding.DEFAULT: ("optim",),
    Sharding.NONE: (),
}

_NAMES = {"params": "parameters", "grads": "gradients", "optim": "optimizer state"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The fraction of all parameters that one rank holds if dim 0 of each is cut into equal chunks."""

    largest: float
    """The first rank's: dim 0 rounded up."""
    smallest: float
    """The last rank's: what is left."""


def sharding_witness(
    history: TrainingHistory, plan: Plan, *, world_size: int, padding: float, total: Mapping[str, int] | None = None
) -> CheckResult:
    """
    The bytes of this rank match the plan's sharding degree (R188), and it holds only its shard (R033).

    R188, for every kind that the plan shards: the bytes held are nearer to a shard than to the whole, and not zero for
    optimizer state. A kind that the plan leaves open counts as sharded if the tensors shown are shards: views of a
    whole are no shards.

    R033, for parameters that are sharded: at most the largest shard times 1 + `padding`. A module that is emptied
    between steps holds none.

    `total` are the bytes that all ranks hold together, by kind. An engine may give whole tensors to ranks, however
    unevenly, if all ranks together hold the model once, or once for each replica, times 1 + `padding`. Raises
    SuiteError if no bytes were recorded.
    """
    if not history.held_bytes or not history.full_bytes:
        raise SuiteError(
            f"held_bytes and full_bytes must be recorded, got {history.held_bytes} and {history.full_bytes} "
            "[sharding_witness]"
        )
    tally = Tally("sharding witness", "R188", rank=history.rank)
    group_size = shard_group_size(history, plan, world_size=world_size)
    notes = []
    once = {kind: int(full * world_size // group_size * (1 + padding)) for kind, full in history.full_bytes.items()}
    dealt_out = {kind for kind, most in once.items() if total is not None and 0 < total.get(kind, 0) <= most}
    if plan.sharding is Sharding.NONE:
        notes.append("sharding=none: every rank holds the whole")
        _judge_whole(tally, history)
    elif group_size == 1:
        notes.append(f"shard group of one rank (world size {world_size}): the shard is the whole and shows nothing")
        _judge_shard_size(tally, history, plan, group_size=1, padding=padding)
    else:
        for kind in _sharded_kinds(history, plan, group_size):
            if kind in dealt_out:
                _note_dealt_out(tally, kind, total or {}, once, notes)
            else:
                _judge_kind(tally, history, plan, kind, group_size=group_size, notes=notes)
        if _params_are_sharded(history, plan, group_size) and "params" not in dealt_out:
            _judge_shard_size(tally, history, plan, group_size=group_size, padding=padding)
    return tally.result(measurements=_measurements(history, group_size), notes=notes)


def _note_dealt_out(
    tally: Tally, kind: str, total: Mapping[str, int], once: Mapping[str, int], notes: list[str]
) -> None:
    tally.expect(True, "", elements=once[kind])
    notes.append(f"{_NAMES[kind]} of all ranks: {total[kind]} B, at most {once[kind]} B, however they are distributed")


def process_witness(held: int, history: TrainingHistory, plan: Plan, *, world_size: int) -> CheckResult:
    """
    The tensors in this rank's process, whoever shows them, are not those of replicated training (R188).

    `held` are the bytes of all tensors after the last step, less those from before wrapping. An engine may keep one
    copy of the parameters and one of the gradients for the next step. A replica of the optimizer's state, or a second
    copy of the rest, is too much.
    """
    tally = Tally("tensors in the process", "R188", rank=history.rank)
    full = history.full_bytes
    sharded = share(history, plan, shard_group_size(history, plan, world_size=world_size)).largest
    state = full.get("optim", 0)
    most = full["params"] * 2 + int(state * (1 + sharded) / 2)
    tally.compare(
        held <= most, "bytes of tensors in the process", expected=f"at most {most} B", got=f"{held} B",
        details=f"two copies of {full['params']} B of parameters, and halfway between a shard and the whole of "
        f"{state} B of optimizer state",
        elements=held, ratio=held / most, likely="replicated training: the rank holds more than it shows",
    )  # fmt: skip
    return tally.result()


def degree_used(
    history: TrainingHistory, workload: Workload, plan: Plan, *, world_size: int, regathers: bool, requirement: str
) -> CheckResult:
    """
    This rank holds and gathers as much as the requested sharding degree means (R005).

    Every kind that the degree shards is held as a shard, by bytes; without sharding, parameters are held whole. In a
    step, parameters are gathered once under ZeRO-1 and 2, and not at all without sharding. With full sharding they are
    gathered again in backward if `regathers`: the engine promises to reshard them after forward.
    """
    tally = Tally("sharding degree", requirement, rank=history.rank)
    group_size = shard_group_size(history, plan, world_size=world_size)
    notes: list[str] = []
    if group_size > 1:
        for kind in _sharded_kinds(history, plan, group_size):
            _judge_kind(tally, history, plan, kind, group_size=group_size, notes=notes)
    if plan.sharding is Sharding.NONE:
        _judge_whole(tally, history)
    least, most = _passes(plan, group_size, regathers=regathers)
    units = owning_units(workload, plan).shared
    step = history.steps[-1].step
    expect_bytes(
        tally, "parameters gathered in the step", parameter_gathers(in_step(history, step)),
        least=least * parameter_bytes(units), most=most * padded_bytes(units, world_size), step=step, phase="forward",
        details=f"sharding={plan.sharding}", likely="a different sharding degree was used",
    )  # fmt: skip
    return tally.result(measurements=_measurements(history, group_size), notes=notes)


def _judge_whole(tally: Tally, history: TrainingHistory) -> None:
    held, full = history.held_bytes.get("params", 0), history.full_bytes["params"]
    tally.compare(
        held >= full, "parameters held", expected=f"{full} B", got=f"{held} B", details="no sharding was requested",
        elements=full, phase="init", likely="the parameters are sharded",
    )  # fmt: skip


def _passes(plan: Plan, group_size: int, *, regathers: bool) -> tuple[float, float]:
    """The least and the most times that a step of one micro-batch gathers all parameters: halves decide."""
    if plan.sharding is Sharding.NONE or group_size == 1:
        return 0, 0.5
    if plan.sharding in (Sharding.FULL, Sharding.HYBRID):
        return (1.5 if regathers else 0.5), 2.5
    return 0.5, 1.5


def shard_group_size(history: TrainingHistory, plan: Plan, *, world_size: int) -> int:
    """
    The number of ranks over which a parameter is sharded.

    An engine's default may be hybrid; then it is the size of the largest group that all-gathers run over.
    """
    if plan.sharding is not Sharding.DEFAULT:
        return world_size // plan.replicas
    records = [record for step in history.steps for record in in_step(history, step.step)]
    return max((len(record.group) for record in of(records, Op.ALL_GATHER)), default=world_size)


def share(history: TrainingHistory, plan: Plan, group_size: int) -> Share:
    """
    The shards of this model's parameters; local units and ignored submodules are whole on every rank.

    Raises SuiteError for a model without parameters.
    """
    tensors = history.initial_params or history.steps[-1].params
    whole, largest, smallest = 0, 0, 0
    for fqn, tensor in tensors.items():
        size = 1 if _under(fqn, (*plan.local_units, *plan.ignored)) else group_size
        rows = tensor.shape[0] if tensor.dim() else 1
        row = prod(tensor.shape[1:]) * tensor.element_size()
        chunk = -(-rows // size)
        whole += rows * row
        largest += chunk * row
        smallest += max(0, rows - (size - 1) * chunk) * row
    if not whole:
        raise SuiteError("the model has no parameters to shard [sharding_witness]")
    return Share(largest=largest / whole, smallest=smallest / whole)


def _under(fqn: str, modules: Iterable[str]) -> bool:
    return any(fqn == module or fqn.startswith(f"{module}.") for unit in modules for module in unit.split("+"))


def _limit(history: TrainingHistory, plan: Plan, kind: str, group_size: int) -> int:
    """Halfway between a shard and the whole."""
    return int(history.full_bytes[kind] * (1 + share(history, plan, group_size).largest) / 2)


def _params_are_sharded(history: TrainingHistory, plan: Plan, group_size: int) -> bool:
    """True if the plan promises to shard parameters, or an engine's default does so."""
    if plan.sharding is Sharding.DEFAULT:
        return history.held_bytes.get("params", 0) <= _limit(history, plan, "params", group_size)
    return "params" in SHARDED_KINDS[plan.sharding]


def _sharded_kinds(history: TrainingHistory, plan: Plan, group_size: int) -> list[str]:
    """The kinds that the plan promises to shard, and those that are shown as shards although it promises nothing."""
    promised = SHARDED_KINDS[plan.sharding]
    shown = [kind for kind in _NAMES if _shown_as_shards(history, plan, kind, group_size)]
    return [kind for kind in _NAMES if kind in promised or kind in shown]


def _shown_as_shards(history: TrainingHistory, plan: Plan, kind: str, group_size: int) -> bool:
    shown, full = history.shown_bytes.get(kind, 0), history.full_bytes.get(kind, 0)
    return 0 < shown <= _limit(history, plan, kind, group_size) < full


def _judge_kind(
    tally: Tally, history: TrainingHistory, plan: Plan, kind: str, *, group_size: int, notes: list[str]
) -> None:
    full = history.full_bytes.get(kind, 0)
    if not full:
        notes.append(f"an unsharded run holds no {_NAMES[kind]}, so they cannot show sharding")
        return
    if kind not in history.held_bytes:
        notes.append(f"the adapter does not report the {_NAMES[kind]} that a rank holds")
        return
    held, limit = history.held_bytes[kind], _limit(history, plan, kind, group_size)
    shard, shown = share(history, plan, group_size), history.shown_bytes.get(kind, held)
    target = f"about {int(full * shard.largest)} B, at most {limit} B"
    likely = "replicated training: every rank holds the whole" if held >= full else None
    if held > limit >= shown:
        likely = f"the shards, of {shown} B, are views of whole tensors, so nothing is freed"
    tally.compare(
        held <= limit, f"{_NAMES[kind]} held", expected=target, got=f"{held} B",
        details=f"{held / full:.3f} of {full} B, which is sharded over {group_size} ranks",
        elements=full, phase="init" if kind == "params" else None, ratio=held / full, likely=likely,
    )  # fmt: skip
    if kind == "optim" and shard.smallest > 0:
        tally.compare(
            held > 0, "optimizer state held", expected=f"about {int(full * shard.smallest)} B", got="0 B",
            details=f"a shard of {full} B", likely="the adapter's local_tensors leaves out the optimizer state",
        )  # fmt: skip


def _judge_shard_size(tally: Tally, history: TrainingHistory, plan: Plan, *, group_size: int, padding: float) -> None:
    full, held = history.full_bytes["params"], history.held_bytes.get("params", 0)
    most = int(full * share(history, plan, group_size).largest * (1 + padding))
    tally.compare(
        held <= most, "parameters held", expected=f"at most {most} B", got=f"{held} B",
        details=f"the largest shard of {full} B over {group_size} ranks, plus {padding:.0%} padding",
        requirement="R033", elements=full, phase="init", ratio=held / most if most else None,
    )  # fmt: skip


def _measurements(history: TrainingHistory, group_size: int) -> dict[str, object]:
    records = in_step(history, history.steps[-1].step)
    return {
        "bytes held": {
            kind: {"held": held, "full": history.full_bytes.get(kind, 0)} for kind, held in history.held_bytes.items()
        },
        "bytes on the wire in the last step": {
            op.value: nbytes(of(records, op)) for op in dict.fromkeys(record.op for record in records)
        },
        "shard group size": group_size,
    }
