"""The counts of an exploration as text. Without torch: the command line prints it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_conformance.report.folding import WIDTH, folded
from fsdp_conformance.report.terminal import duration


def summary(counters: Mapping[str, Any], *, width: int = WIDTH) -> str:
    """An exploration in words, from its JSON: counts, why examples could not be judged, the values of every axis."""
    ran, seconds = int(counters["ran"]), float(counters["seconds"])
    rate = f", {60 * (ran + counters['shrinks']) / seconds:.0f} a minute" if seconds else ""
    lines = [f"{ran} examples ran in {duration(seconds)}{rate}: {counters['passed']} passed"]
    lines += [f"  {counters['shrinks']} more were run to shrink failures"] * bool(counters["shrinks"])
    lines += [f"  {counters['left_out']} were left out, as known failures"] * bool(counters["left_out"])
    for title, counts in (
        ("values that were not drawn", counters.get("not_drawn") or {}),
        ("could not be judged", counters["rejected"]),
        ("refused by the engine", counters["declined"]),
    ):
        lines += [f"  {title}: {count} ({reason})" for reason, count in sorted(counts.items(), key=_most_first)]
    for words in ("pairs", "triples"):
        judged, possible = counters.get(words) or (0, 0)
        lines += [f"  {words} of values judged: {judged} of {possible}"] * bool(judged)
    covered: Mapping[str, Mapping[str, int]] = counters["covered"]
    for axis, values in covered.items():
        listed = ", ".join(f"{value} {count}" for value, count in sorted(values.items(), key=_most_first))
        lines += folded(f"  {axis}: {listed}", width, indent="      ")
    return "\n".join(lines)


def _most_first(item: tuple[str, int]) -> tuple[int, str]:
    return -item[1], item[0]
