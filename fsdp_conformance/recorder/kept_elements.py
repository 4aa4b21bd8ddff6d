"""The elements that a run is for: those of some tensors of one step, and of the step before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from torch import nn

from fsdp_conformance.recorder.elements import elements_of
from fsdp_conformance.recorder.fingerprints import Part
from fsdp_conformance.recorder.guard import Guard
from fsdp_conformance.recorder.in_use import watch_parameters
from fsdp_conformance.recorder.named import Parts
from fsdp_conformance.recorder.writer import Writer
from fsdp_conformance.recordings.events import USED, Keep


class KeptElements:
    """Writes the elements that `keep` asks for; none if it is None."""

    def __init__(self, keep: Keep | None, writer: Writer, guard: Guard) -> None:
        self._keep = keep
        self._writer = writer
        self._guard = guard
        self._has_used_before = False

    def are_complete(self, step: int) -> bool:
        """True at the end of the step that the run is for."""
        return self._keep is not None and step >= self._keep.step

    def are_of(self, kind: str) -> bool:
        """True if tensors of this kind are kept."""
        return self._keep is not None and self._keep.kind == kind

    def note(self, kind: str, parts: Parts, *, step: int, number: int = 0) -> None:
        """Write the elements of these tensors of a step, as far as they are asked for."""
        keep = self._keep
        wanted = "gradient" if kind == "contribution" else kind
        if keep is None or wanted != keep.kind or step not in (keep.step - 1, keep.step):
            return
        for name in keep.names:
            for part in parts.get(name, ()):
                self._writer.write(elements_of(part, step=step, kind=kind, name=name, number=number))

    def noting_used(
        self, modules: Iterable[tuple[str, nn.Module]], *, step: int, number: int
    ) -> contextlib.AbstractContextManager[None]:
        """
        Around a forward that trains, with its number in a step: write the parameters that modules compute with, as far
        as they are asked for. Of the step before, the first such forward is enough.
        """
        keep = self._keep
        if keep is None or keep.kind != USED:
            return contextlib.nullcontext()
        is_before = step == keep.step - 1 and not self._has_used_before
        if not is_before and (step, number) != (keep.step, keep.number):
            return contextlib.nullcontext()
        self._has_used_before |= is_before

        def write(name: str, part: Part) -> None:
            self._writer.write(elements_of(part, step=step, kind=USED, name=name, number=0))

        return watch_parameters(modules, keep.names, lambda name, part: self._guard.run(write, name, part))
