"""
Where a script changes its gradients between a backward and the optimizer's step.

Gradients have version numbers, which every change in place increases. They are looked at when a function of the script
returns, and when the script has called one of torch's that changes tensors in place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType

from torch import Tensor

from fsdp_conformance.recorder.guard import Guard
from fsdp_conformance.recorder.lines import is_of_script, script_line


class Changes:
    """Watches the gradients of some parameters, in the thread that calls `watch`, until `stop`."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._watched: list[tuple[Tensor, Tensor | None, int]] = []
        self._is_watching = False
        self.line = ""
        """The last line of the script that has changed a gradient; empty if none has, or it was not seen."""

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Watch from now on. Does nothing where a profiler runs, whose place this would take."""
        self.stop()
        self.line = ""
        if sys.getprofile() is None:
            self._watched = [(each, each.grad, writes_to(each.grad)) for each in parameters]
            self._is_watching = True
            sys.setprofile(self._look)

    def stop(self) -> None:
        """Watch no longer."""
        if self._is_watching and sys.getprofile() == self._look:
            sys.setprofile(None)
        self._is_watching, self._watched = False, []

    def _look(self, frame: FrameType, event: str, function: object) -> None:
        if event == "c_return":
            may_change = getattr(function, "__name__", "").endswith("_")
        else:
            may_change = event == "return"
        # Inline, not `guard.run`: this is called for every function that returns.
        try:
            if may_change and is_of_script(frame.f_code.co_filename) and self._has_changed():
                self.line = script_line(frame)
        except Exception as error:  # noqa: BLE001 - it must not reach the script
            self._guard.fail(error)

    def _has_changed(self) -> bool:
        """True if something has changed since the last look."""
        has_changed = False
        for index, (parameter, gradient, version) in enumerate(self._watched):
            now = parameter.grad
            if now is not gradient or writes_to(now) != version:
                self._watched[index] = parameter, now, writes_to(now)
                has_changed = True
        return has_changed


def writes_to(tensor: Tensor | None) -> int:
    """How often a tensor was changed in place: its version number; 0 if there is no tensor, or it has no number."""
    # A DTensor's own number does not follow that of its shard.
    held = getattr(tensor, "_local_tensor", tensor)
    # Tensors of inference mode have no version.
    return 0 if held is None or held.is_inference() else held._version
