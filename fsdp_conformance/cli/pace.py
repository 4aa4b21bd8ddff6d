"""
How long cases take on this machine, compared with typical durations: learned from each run, for the next one.

A file in the user's cache has two sums for each type of device: what cases should have taken, and what they took. Each
run halves the earlier sums, so that the last runs count most.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from fsdp_conformance import codec
from fsdp_conformance.simulator.device.build import cache_directory

#: Seconds that count as having been as expected, so that a few short cases change little.
_PRIOR_S = 10.0


def known() -> dict[str, float]:
    """The factor for typical durations by type of device; a device that is not in it has 1."""
    return {device: (took + _PRIOR_S) / (expected + _PRIOR_S) for device, (expected, took) in _sums().items()}


def learn(cases: Iterable[tuple[str, float, float]]) -> None:
    """Remember a run: for each case its device, and what it should have taken and took. A full disk learns nothing."""
    sums = {device: (expected / 2, took / 2) for device, (expected, took) in _sums().items()}
    for device, expected, took in cases:
        before = sums.get(device, (0.0, 0.0))
        sums[device] = (before[0] + expected, before[1] + took)
    path = _file()
    fresh = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(sums), encoding="utf-8")
        fresh.replace(path)


def _sums() -> dict[str, tuple[float, float]]:
    """Expected and measured seconds by type of device; none if the file is absent or damaged."""
    try:
        sums = codec.typed(dict[str, tuple[float, float]], json.loads(_file().read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}
    return {device: pair for device, pair in sums.items() if all(0.0 <= each < float("inf") for each in pair)}


def _file() -> Path:
    return cache_directory() / "pace.json"
