"""Tensors by name, each with the parts that this rank holds, and their fingerprints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fsdp_conformance.recorder.fingerprints import Part, Pending
from fsdp_conformance.recorder.layouts import part_of
from fsdp_conformance.recorder.names import named_leaves
from fsdp_conformance.recorder.whole_batch import OwnSamples
from fsdp_conformance.recordings.fingerprint import Fingerprint

#: Tensors by name, each with the parts that this rank holds.
Parts = dict[str, list[Part]]


class Named:
    """Tensors by name whose fingerprints are still being computed."""

    def __init__(self, parts: Mapping[str, Sequence[Part]]) -> None:
        self._names: dict[torch.device, list[str]] = defaultdict(list)
        for name, held in parts.items():
            if held:
                self._names[held[0].values.device].append(name)
        self._pending = {device: Pending([parts[name] for name in names]) for device, names in self._names.items()}

    def values(self) -> dict[str, Fingerprint]:
        """Wait for the devices, and return the fingerprints."""
        return {
            name: value
            for device, names in self._names.items()
            for name, value in zip(names, self._pending[device].fingerprints(), strict=True)
        }


def named_parts(value: object, samples: OwnSamples | None = None) -> Iterator[tuple[str, list[Part]]]:
    """The tensors inside a value, each with its place: "[0]", "['labels']". With `samples`, only rows of these."""
    for place, item in named_leaves(value):
        leaf = item if samples is None else samples.rows_of(item)
        if isinstance(leaf, Tensor) and not leaf.is_sparse and leaf.layout is torch.strided and not leaf.is_meta:
            part = part_of(leaf)
            if part is not None:
                yield place, [part]
