"""What units hold and send, in words: for a user who wonders where memory and time go."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_conformance.engine.fully_sharded.unit import ShardedUnit


def memory_report(units: Iterable[ShardedUnit]) -> str:
    """Bytes that each unit holds on this rank now, by type of device, and those of the gradients of its shards."""
    lines = []
    totals: dict[str, int] = {}
    for unit in units:
        held: dict[str, int] = {}
        gradients = 0
        for flat in unit.flats:
            for device, nbytes in flat.chunk.memory_usage.items():
                held[device] = held.get(device, 0) + nbytes
            gradients += sum(m.parameter.grad.nbytes for m in flat.members if m.parameter.grad is not None)
        for device, nbytes in held.items():
            totals[device] = totals.get(device, 0) + nbytes
        totals["gradients"] = totals.get("gradients", 0) + gradients
        state = "unsharded" if unit.is_unsharded else "sharded"
        lines.append(f"{unit.label}: {state}, {_listed(held)}, gradients of shards {gradients:,} B")
    return "\n".join([*lines, f"all units: {_listed(totals)}"])


def communication_plan(units: Iterable[ShardedUnit]) -> str:
    """What each unit gathers and reduces in a step, in bytes on the wire of this rank, and over how many ranks."""
    lines = []
    for unit in units:
        for flat in unit.flats:
            chunk = flat.chunk
            ranks, replicas = chunk.layout.world_size, chunk.num_replicas
            gathered = chunk.numel * chunk.compute_dtype.itemsize if ranks > 1 else 0
            reduced = chunk.numel * chunk.reduce_dtype.itemsize if ranks * replicas > 1 and flat.is_trained else 0
            passes = "in forward and backward" if unit.reshard_after_forward else "in forward"
            parts = [
                f"{len(flat.members)} parameters, {chunk.layout.used_numel:,} elements of {chunk.dtype}",
                f"all-gather {gathered:,} B of {chunk.compute_dtype} over {ranks} ranks {passes}",
                f"reduce {reduced:,} B of {chunk.reduce_dtype} over {ranks} ranks x {replicas} replicas",
            ]
            lines.append(f"{unit.label}: " + "; ".join(parts))
    return "\n".join(lines)


def _listed(held: dict[str, int]) -> str:
    return ", ".join(f"{name} {nbytes:,} B" for name, nbytes in sorted(held.items())) or "nothing"
