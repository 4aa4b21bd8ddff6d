"""The likely cause of a wrong value in a state dict, in a checkpoint, or after a training was resumed from one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fsdp_conformance.diagnosis.causes import LATER, STALE, likely
from fsdp_conformance.diagnosis.evidence import Evidence
from fsdp_conformance.diagnosis.optimizer_steps import Moment, SupposedStep, possible, resumed_steps, when

#: In place of the name of a state: the values of the model itself.
MODEL = ""


class SavedState:
    """
    Explains what differs from the state of one moment, or from `after` the step that follows it.

    Suppositions are made on first use.
    """

    def __init__(self, moment: Moment, after: Mapping[str, Tensor] | None = None) -> None:
        self.moment = moment
        self._after = after or {}

    def value(self, name: str, key: str, got: Tensor, expected: Tensor) -> str | None:
        """Of a tensor of a parameter or buffer: its own value (`MODEL`), or a state of the optimizer."""
        return explained(lambda: self._value(name, key, got, expected))

    def parameter(self, name: str, got: Tensor, expected: Tensor) -> str | None:
        """Of a parameter after the step that follows the moment: the optimizer's state or settings were wrong."""
        return explained(lambda: self._parameter(name, got, expected))

    def settings(self, index: int, got: Mapping[str, Any], key: str) -> str | None:
        """Of one setting of a group that differs: whose it is, if all settings of the group are those of one other."""
        groups = self.moment.right.optimizer["param_groups"]
        alike = [place for place, group in enumerate(groups) if place != index and _same_settings(group, got)]
        if len(alike) == 1:
            return f"settings of another group: {key} and all others are those of group {alike[0]}"
        built = self.moment.built
        if not alike and built is not None and _same_settings(built.optimizer["param_groups"][index], got):
            return f"settings not loaded: {key} and all others are those that the optimizer was built with"
        return None

    def _value(self, name: str, key: str, got: Tensor, expected: Tensor) -> str | None:
        if got.shape != expected.shape:
            return _of_shape(got, expected, self._others(name, key), self.moment.world_size)
        if got.dtype != expected.dtype or not got.dtype.is_floating_point:
            return None
        evidence = Evidence(
            kind="state", got=got, expected=expected.double(), tolerance=None, world_size=self.moment.world_size,
            rank=0, others={n: v for n, v in self._others(name, key).items() if v.shape == got.shape},
            alternatives=self._alternatives(name, key),
        )  # fmt: skip
        return likely(evidence)

    def _parameter(self, name: str, got: Tensor, expected: Tensor) -> str | None:
        if got.shape != expected.shape or got.dtype != expected.dtype:
            return None
        before = self.moment.right.model.get(name)
        evidence = Evidence(
            kind="parameter", got=got, expected=expected.double(), tolerance=None, world_size=self.moment.world_size,
            rank=0, previous=before,
            supposed=lambda: [(phrase, after[name]) for phrase, after in self._supposed if name in after],
        )  # fmt: skip
        return likely(evidence)

    @cached_property
    def _supposed(self) -> list[SupposedStep]:
        steps = resumed_steps(self.moment)
        return possible(steps, self._after, self.moment.states[self.moment.index + 1].model) if steps else []

    def _alternatives(self, name: str, key: str) -> dict[str, Tensor]:
        """Values that this one may have instead of the right one, by a phrase for each."""
        alternatives: dict[str, Tensor] = {}
        for index, state in enumerate(self.moment.states):
            value = _entry(state, name, key)
            if value is not None and index != self.moment.index:
                cause = f"{STALE}: from an earlier save" if index < self.moment.index else LATER + ":"
                alternatives[f"{cause}, as it was {when(index)}".replace(":,", ":")] = value
        built = _entry(self.moment.built, name, key) if self.moment.built is not None else None
        if built is not None:
            alternatives["not loaded: it has the value that the model was built with"] = built
        for other, value in self.moment.right.optimizer.get("state", {}).get(name, {}).items() if key else ():
            if other != key and isinstance(value, Tensor):
                alternatives[f"states exchanged: it has the value of {other}"] = value
        return alternatives

    def _others(self, name: str, key: str) -> dict[str, Tensor]:
        """The same value of other parameters."""
        right = self.moment.right
        names = right.optimizer.get("state", {}) if key else right.model
        entries = {other: _entry(right, other, key) for other in names if other != name}
        return {other: value for other, value in entries.items() if value is not None}


def explained(cause: Callable[[], str | None]) -> str | None:
    """The cause; a difference must not be lost for want of one."""
    try:
        return cause()
    except Exception as error:  # noqa: BLE001 - see above
        return f"unknown: a bug in the suite, please report it: {type(error).__name__}: {error}"


def merged_groups(groups: Sequence[Mapping[str, Any]], right: Sequence[Mapping[str, Any]]) -> str | None:
    """The cause of a wrong number of groups: one that has the parameters of all."""
    names = {name for group in right for name in group["params"]}
    if len(groups) == 1 and len(right) > 1 and set(groups[0]["params"]) == names:
        return f"groups merged: group 0 has the parameters of all {len(right)} groups"
    return None


def _entry(state: Any, name: str, key: str) -> Tensor | None:
    value = state.optimizer.get("state", {}).get(name, {}).get(key) if key else state.model.get(name)
    return value if isinstance(value, Tensor) else None


def _of_shape(got: Tensor, expected: Tensor, others: Mapping[str, Tensor], world_size: int) -> str | None:
    """Of a wrong shape: another parameter's value, or the padding of the shards behind the right one."""
    same = [name for name, value in others.items() if value.shape == got.shape and torch.equal(value, got)]
    if len(same) == 1:
        return f"mixed up with another parameter: it has the value of {same[0]!r}"
    if not expected.dim() or got.shape[1:] != expected.shape[1:] or not len(expected):
        return None
    padded = -(-len(expected) // world_size) * world_size
    behind = got[len(expected) :]
    if len(got) == padded and torch.equal(got[: len(expected)], expected) and not bool(behind.any()):
        rows = padded // world_size
        return (
            f"padding was saved as data: the last {len(behind)} of {padded} rows are zeros, which fill up {world_size} "
            f"shards of {rows} rows"
        )
    return None


def _same_settings(group: Mapping[str, Any], got: Mapping[str, Any]) -> bool:
    shared = (group.keys() & got.keys()) - {"params"}
    return bool(shared) and all(_plain(group[key]) == _plain(got[key]) for key in shared)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value
