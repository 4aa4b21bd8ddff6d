"""Text summaries of what units hold and send, which show where memory and time go."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_conformance.engine.fully_sharded.unit import ShardedUnit


def memory_report(units: Iterable[ShardedUnit]) -> str:
    """Bytes that each unit holds on this rank now, by device type, and bytes of its shards' gradients."""
    lines = []
    totals: dict[str, int] = {}
    for unit in units:
        bytes_by_device: dict[str, int] = {}
        gradients = 0
        for flat in unit.flats:
            for device, nbytes in flat.memory_usage.items():
                bytes_by_device[device] = bytes_by_device.get(device, 0) + nbytes
            gradients += sum(m.parameter.grad.nbytes for m in flat.members if m.parameter.grad is not None)
        for device, nbytes in bytes_by_device.items():
            totals[device] = totals.get(device, 0) + nbytes
        totals["gradients"] = totals.get("gradients", 0) + gradients
        state = "unsharded" if unit.is_unsharded else "sharded"
        lines.append(f"{unit.label}: {state}, {_listed(bytes_by_device)}, gradients of shards {gradients:,} B")
    return "\n".join([*lines, f"all units: {_listed(totals)}"])


def communication_plan(units: Iterable[ShardedUnit]) -> str:
    """The traffic of each unit in a step: bytes that this rank sends, and over how many ranks."""
    lines = []
    for unit in units:
        for flat in unit.flats:
            storage = flat.storage
            ranks, replicas = storage.layout.world_size, storage.num_replicas
            gathered = storage.numel * storage.compute_dtype.itemsize if ranks > 1 else 0
            reduces = ranks * replicas > 1 and flat.reduction.is_trained
            reduced = storage.numel * storage.reduce_dtype.itemsize if reduces else 0
            passes = "in forward and backward" if unit.reshard_after_forward else "in forward"
            parts = [
                f"{len(flat.members)} parameters, {storage.layout.used_numel:,} elements of {storage.dtype}",
                f"all-gather {gathered:,} B of {storage.compute_dtype} over {ranks} ranks {passes}",
                f"reduce {reduced:,} B of {storage.reduce_dtype} over {ranks} ranks x {replicas} replicas",
            ]
            lines.append(f"{unit.label}: " + "; ".join(parts))
    return "\n".join(lines)


def _listed(held: dict[str, int]) -> str:
    return ", ".join(f"{name} {nbytes:,} B" for name, nbytes in sorted(held.items())) or "nothing"
