"""The reference engine's fully sharded module, each with one defect."""

from __future__ import annotations

from typing import ClassVar

from fsdp_conformance.engine.fully_sharded.flat_parameter import FlatParameter, ReductionHook
from fsdp_conformance.mutants.engines import SeamReference
from fsdp_conformance.mutants.mutant import known_wrong


class _Overwriting(FlatParameter):
    def accumulate(self) -> None:
        self._forget_collected()
        super().accumulate()

    def start_reduction(self, hook: ReductionHook | None = None, *, all_reduce: bool = True) -> None:
        self._forget_collected()
        super().start_reduction(hook, all_reduce=all_reduce)

    def _forget_collected(self) -> None:
        if any(leaf.grad is not None for leaf in self.leaves):
            self.storage.discard_gradients()


@known_wrong("R093")
class ReferenceOverwritesCollected(SeamReference):
    """The gradients of a micro-batch replace those that earlier ones left to its reduction."""

    flat_class: ClassVar[type[FlatParameter]] = _Overwriting
