"""Which collective last wrote a value, as far as a history can tell."""

from __future__ import annotations

from fsdp_conformance.checks.references import Kind
from fsdp_conformance.checks.units import owner, owning_units
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.workload import Workload

_REDUCING = frozenset({Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.REDUCE})
#: Padding that implementations have been seen to add to a unit: up to a sixth, plus a row per rank.
_SLACK = 1.25


def last_writer(history: TrainingHistory, kind: Kind, step: int, workload: Workload, name: str) -> str | None:
    """
    The collective that reduced a gradient, in one line, or None where none fits or several do.

    It is recognised by its size: between the bytes of the parameter's unit and a quarter more.
    """
    if kind is not Kind.GRADIENT:
        return None
    reduced = [r for r in history.collectives if r.step == step and r.op in _REDUCING and r.phase == "backward"]
    if len(reduced) == 1:
        return _told(reduced[0])
    units = owning_units(workload)
    unit = owner(name, workload.units)
    if unit not in units.params:
        return None
    nbytes = units.num_bytes(unit, trainable_only=True)
    padding = sum(
        history.world_size * param[:1].numel() * param.element_size()
        for param in units.params[unit].values()
        if param.dim()
    )
    fitting = [record for record in reduced if nbytes <= record.nbytes <= nbytes * _SLACK + padding]
    return _told(fitting[0]) if len(fitting) == 1 else None


def _told(record: CollectiveRecord) -> str:
    return f"#{record.seq} {record.line()}" + (f" at {record.site}" if record.site else "")
