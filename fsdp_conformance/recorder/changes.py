"""
Where a script changes its gradients between a backward and the optimizer's step, and which parameters between steps.

Tensors have version numbers, which every change in place increases, but for those through `.data` or a detached
DTensor. Gradients are looked at when a function of the script returns, and when the script has called one of torch's
that changes tensors in place.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import TypeGuard

import torch
from torch import Tensor

from fsdp_conformance.recorder.guard import Guard
from fsdp_conformance.recorder.lines import is_of_script, script_line

#: How many elements of a tensor are looked at, at least, if it has as many.
_SAMPLED = 16


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


class Contents:
    """The contents of tensors at one point in time: their version numbers, and a few elements of each."""

    @torch.no_grad()
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._versions = {name: writes_to(tensor) for name, tensor in tensors.items()}
        self._samples = _copies({name: sample_of(tensor) for name, tensor in tensors.items()})

    @torch.no_grad()
    def changed_in(self, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
        """
        The names of tensors that were written to since.

        One that now has another size, dtype or device is left out: the engine has gathered, or moved, it.
        """
        now = {
            name: sample
            for name, sample in ((name, sample_of(tensor)) for name, tensor in tensors.items() if name in self._samples)
            if _kind(sample) == _kind(self._samples[name]) and sample.shape == self._samples[name].shape
        }
        old = {name: self._samples[name] for name in now}
        differing = {name for name in now if writes_to(tensors[name]) != self._versions[name]}
        for names in _by_kind(now).values():
            bits, before = (_bits(torch.cat([each[name] for name in names])) for each in (now, old))
            if not torch.equal(bits, before):
                differing.update(name for name in names if not torch.equal(_bits(now[name]), _bits(old[name])))
        return tuple(name for name in now if name in differing)


def sample_of(tensor: Tensor) -> Tensor:
    """A view of at most 32 elements of what this rank holds."""
    held = getattr(tensor, "_local_tensor", tensor)
    step = max(1, held.numel() // _SAMPLED)
    count = min(-(-held.numel() // step), 2 * _SAMPLED)
    # One operation for each tensor: there may be thousands.
    return held.as_strided((count,), (step,)) if held.is_contiguous() else held.reshape(-1)[::step][:count]


def _copies(samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of them, made together."""
    copies: dict[str, Tensor] = {}
    for names in _by_kind(samples).values():
        together = torch.cat([samples[name] for name in names])
        parts = torch.split(together, [samples[name].numel() for name in names])
        copies.update(zip(names, parts, strict=True))
    return copies


def _by_kind(samples: Mapping[str, Tensor]) -> dict[object, list[str]]:
    groups: dict[object, list[str]] = defaultdict(list)
    for name, sample in samples.items():
        groups[_kind(sample)].append(name)
    return groups


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device


def _bits(tensor: Tensor) -> Tensor:
    """A NaN is equal to itself."""
    return tensor.contiguous().view(torch.uint8)


def writes_to(tensor: Tensor | None) -> int:
    """How often a tensor was changed in place: its version number; 0 if there is no tensor, or it has no number."""
    # A DTensor counts what is done with it, and its shard what is done with the shard alone.
    return sum(each._version for each in (tensor, getattr(tensor, "_local_tensor", None)) if _has_version(each))


def _has_version(tensor: Tensor | None) -> TypeGuard[Tensor]:
    """False for a tensor of inference mode."""
    return tensor is not None and not tensor.is_inference()
