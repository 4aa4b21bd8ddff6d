"""Tensors by name, each with the parts that this rank holds, and their fingerprints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fsdp_conformance.recorder.fingerprints import Part, Pending
from fsdp_conformance.recorder.layouts import part_of
from fsdp_conformance.recorder.names import named_leaves
from fsdp_conformance.recorder.rounded import Rounded
from fsdp_conformance.recorder.unchanged import Unchanged
from fsdp_conformance.recorder.whole_batch import OwnSamples
from fsdp_conformance.recordings.fingerprint import Fingerprint

#: Tensors by name, each with the parts that this rank holds.
Parts = dict[str, list[Part]]


class Named:
    """Tensors by name whose fingerprints are still being computed."""

    def __init__(self, parts: Mapping[str, Sequence[Part]], earlier: Gradients | None = None) -> None:
        """With `earlier`, fingerprints of tensors that have not changed since are taken from there."""
        self._order = [name for name, held in parts.items() if held]
        self._earlier = earlier
        self._same = earlier.unchanged.among(parts) if earlier is not None else set()
        self._names: dict[torch.device, list[str]] = defaultdict(list)
        for name in self._order:
            if name not in self._same:
                self._names[parts[name][0].values.device].append(name)
        self._pending = {device: Pending([parts[name] for name in names]) for device, names in self._names.items()}
        self._values: dict[str, Fingerprint] | None = None

    def values(self) -> dict[str, Fingerprint]:
        """Wait for the devices, and return the fingerprints."""
        if self._values is None:
            values = {
                name: value
                for device, names in self._names.items()
                for name, value in zip(names, self._pending[device].fingerprints(), strict=True)
            }
            if self._earlier is not None:
                known = self._earlier.values()
                values.update((name, known[name]) for name in self._same)
            self._values = {name: values[name] for name in self._order}
        return self._values


class Gradients(Named):
    """Gradients after a backward. They are recorded again before they are clipped or used, and may be the same then."""

    def __init__(self, parts: Mapping[str, Sequence[Part]]) -> None:
        super().__init__(parts)
        self.unchanged = Unchanged(parts)
        self.rounding = Rounded(parts)


def named_parts(value: object, samples: OwnSamples | None = None) -> Iterator[tuple[str, list[Part]]]:
    """The tensors inside a value, each with its place: "[0]", "['labels']". With `samples`, only rows of these."""
    for place, item in named_leaves(value):
        leaf = item if samples is None else samples.rows_of(item)
        if isinstance(leaf, Tensor) and not leaf.is_sparse and leaf.layout is torch.strided and not leaf.is_meta:
            part = part_of(leaf)
            if part is not None:
                yield place, [part]
