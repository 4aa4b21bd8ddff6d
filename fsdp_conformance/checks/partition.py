"""
The sharding witness: bytes held and traffic seen tell sharded from replicated training.

Parity cannot: an engine that silently falls back to replicated training is at parity in every step. What a rank holds
cannot lie in the same way, because optimizer state that is not sharded has the size of the whole model's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.checks.traffic import GATHERING, gradient_reductions, in_step, nbytes, of
from fsdp_conformance.config import Plan, Sharding
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.history.collective import Op
from fsdp_conformance.history.training import TrainingHistory

#: What a plan promises to be sharded. An engine's default must shard its optimizer state at least.
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
    """The part of all parameters that one rank holds if the dim 0 of each is cut in equal chunks, as a fraction."""

    largest: float
    """Of the first rank: dim 0 rounded up."""
    smallest: float
    """Of the last rank: what is left."""


def sharding_witness(history: TrainingHistory, plan: Plan, *, world_size: int, padding: float) -> CheckResult:
    """
    Whether bytes and traffic of this rank are those of the plan's sharding degree (R188), and of a shard alone (R033).

    R188, for every kind that the plan shards: what is held is nearer to a shard than to the whole, and not nothing
    where it is optimizer state; and in the last step parameters come over the wire, as they must if no rank has all.
    (An engine may deal out whole parameters, unevenly, so "nearer to" is all that can be asked.)

    R033, for parameters that are sharded: at most the largest shard times 1 + `padding`. A module that is emptied
    between steps holds none.
    """
    if not history.held_bytes or not history.full_bytes:
        raise SuiteError(
            f"held_bytes={history.held_bytes}, full_bytes={history.full_bytes}, but should be filled [sharding_witness]"
        )
    tally = Tally("sharding witness", "R188", rank=history.rank)
    group_size = shard_group_size(history, plan, world_size=world_size)
    notes = []
    if plan.sharding is Sharding.NONE:
        notes.append("sharding=none: exempt from the sharding witness; gradients are still reduced")
    elif group_size == 1:
        notes.append(f"shard group of one rank (world size {world_size}): a shard is the whole, nothing shows sharding")
        _judge_shard_size(tally, history, plan, group_size=1, padding=padding)
    else:
        for kind in SHARDED_KINDS[plan.sharding]:
            _judge_kind(tally, history, plan, kind, group_size=group_size, notes=notes)
        _judge_parameter_traffic(tally, history)
        if _params_are_sharded(history, plan, group_size):
            _judge_shard_size(tally, history, plan, group_size=group_size, padding=padding)
    if world_size > 1:
        _judge_gradient_traffic(tally, history)
    return tally.result(measurements=_measurements(history, group_size), notes=notes)


def shard_group_size(history: TrainingHistory, plan: Plan, *, world_size: int) -> int:
    """
    Over how many ranks a parameter is sharded.

    An engine's default may be hybrid: there the largest group that all-gathers run over says it.
    """
    if plan.sharding is not Sharding.DEFAULT:
        return world_size // plan.replicas
    records = [record for step in history.steps for record in in_step(history, step.step)]
    return max((len(record.group) for record in of(records, Op.ALL_GATHER)), default=world_size)


def share(history: TrainingHistory, plan: Plan, group_size: int) -> Share:
    """The shards of this model's parameters; those of local units and ignored submodules are whole on every rank."""
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
        raise SuiteError("parameters=0 B, but should be more [sharding_witness]: the model has nothing to shard")
    return Share(largest=largest / whole, smallest=smallest / whole)


def _under(fqn: str, modules: Iterable[str]) -> bool:
    return any(fqn == module or fqn.startswith(f"{module}.") for unit in modules for module in unit.split("+"))


def _limit(history: TrainingHistory, plan: Plan, kind: str, group_size: int) -> int:
    """Half way from a shard to the whole."""
    return int(history.full_bytes[kind] * (1 + share(history, plan, group_size).largest) / 2)


def _params_are_sharded(history: TrainingHistory, plan: Plan, group_size: int) -> bool:
    """Promised by the plan, or shown by an engine's default."""
    if plan.sharding is Sharding.DEFAULT:
        return history.held_bytes.get("params", 0) <= _limit(history, plan, "params", group_size)
    return "params" in SHARDED_KINDS[plan.sharding]


def _judge_kind(
    tally: Tally, history: TrainingHistory, plan: Plan, kind: str, *, group_size: int, notes: list[str]
) -> None:
    full = history.full_bytes.get(kind, 0)
    if not full:
        notes.append(f"an unsharded run holds no {_NAMES[kind]}, so none can show sharding")
        return
    if kind not in history.held_bytes:
        notes.append(f"the adapter does not show which {_NAMES[kind]} are held on a rank")
        return
    held, limit = history.held_bytes[kind], _limit(history, plan, kind, group_size)
    shard = share(history, plan, group_size)
    wanted = f"about {int(full * shard.largest)} B, at most {limit} B"
    tally.expect(
        held <= limit,
        f"{_NAMES[kind]} held={held} B of {full} B ({held / full:.3f}), but should be {wanted}: "
        f"a shard over {group_size} ranks",
        elements=full, phase="init" if kind == "params" else None, got=f"{held} B", expected=wanted, ratio=held / full,
        likely="replicated training: every rank holds the whole" if held >= full else None,
    )  # fmt: skip
    if kind == "optim" and shard.smallest > 0:
        tally.expect(
            held > 0,
            f"optimizer state held=0 B of {full} B, but should be about {int(full * shard.smallest)} B: a shard",
            got="0 B", expected=wanted, likely="the adapter's local_tensors leaves the optimizer state out",
        )  # fmt: skip


def _judge_shard_size(tally: Tally, history: TrainingHistory, plan: Plan, *, group_size: int, padding: float) -> None:
    full, held = history.full_bytes["params"], history.held_bytes.get("params", 0)
    most = int(full * share(history, plan, group_size).largest * (1 + padding))
    tally.expect(
        held <= most,
        f"parameters held={held} B, but should be at most {most} B: the largest shard of {full} B over {group_size} "
        f"ranks and {padding:.0%} padding",
        requirement="R033", elements=full, phase="init", got=f"{held} B", expected=f"at most {most} B",
        ratio=held / most if most else None,
    )  # fmt: skip


def _judge_parameter_traffic(tally: Tally, history: TrainingHistory) -> None:
    """Half of what trains, so that neither padding nor what an engine keeps on all ranks decides."""
    least = history.full_bytes.get("grads", 0) // 2
    step = history.steps[-1].step
    seen = of(in_step(history, step), *GATHERING)
    tally.expect(
        nbytes(seen) >= least,
        f"{nbytes(seen)} B of parameters gathered or broadcast in the step, but should be at least {least} B: "
        "a rank does not have the others' shards",
        elements=max(len(seen), 1), step=step, phase="forward", got=f"{nbytes(seen)} B", expected=f"at least {least} B",
        likely="replicated training: no rank needs another one's parameters",
    )  # fmt: skip


def _judge_gradient_traffic(tally: Tally, history: TrainingHistory) -> None:
    least = history.full_bytes.get("grads", 0) // 2
    step = history.steps[-1].step
    seen = gradient_reductions(in_step(history, step))
    tally.expect(
        nbytes(seen) >= least,
        f"{nbytes(seen)} B of gradients reduced in the step, but should be at least {least} B: "
        "ranks see different batches",
        elements=max(len(seen), 1), step=step, phase="reduce", got=f"{nbytes(seen)} B", expected=f"at least {least} B",
        likely="ranks train apart",
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
