"""The counts of an exploration as text. Without torch: the command line prints it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_conformance.report.folding import WIDTH, folded
from fsdp_conformance.report.terminal import duration


def summary(found: Mapping[str, Any], *, width: int = WIDTH) -> str:
    """An exploration in words, from its JSON: counts, why examples could not be judged, the values of every axis."""
    ran, seconds = int(found["ran"]), float(found["seconds"])
    rate = f", {60 * (ran + found['shrinks']) / seconds:.0f} a minute" if seconds else ""
    lines = [f"{ran} examples ran in {duration(seconds)}{rate}: {found['passed']} passed"]
    lines += [f"  {found['shrinks']} more were run to shrink failures"] * bool(found["shrinks"])
    lines += [f"  {found['left_out']} were left out, as known failures"] * bool(found["left_out"])
    for title, counts in (("could not be judged", found["rejected"]), ("refused by the engine", found["declined"])):
        lines += [f"  {title}: {count} ({reason})" for reason, count in sorted(counts.items(), key=_most_first)]
    covered: Mapping[str, Mapping[str, int]] = found["covered"]
    for axis, values in covered.items():
        listed = ", ".join(f"{value} {count}" for value, count in sorted(values.items(), key=_most_first))
        lines += folded(f"  {axis}: {listed}", width, indent="      ")
    return "\n".join(lines)


def _most_first(item: tuple[str, int]) -> tuple[int, str]:
    return -item[1], item[0]
