"""
Ordering only: the device leaves out kernels that only compute floating-point numbers.

Races depend on which bytes operations touch and on what orders them, not on the numbers. So an operation that makes
floating-point numbers from others computes only once for each kind of arguments (shapes, dtypes, options); after that
its results are zeros, and what it would update in place stays as it is. Whatever can decide what a program does next is
computed, from these numbers: integers, booleans, and values that the host reads. First values (`fill_`, random numbers,
copies) are written, and collectives move their data.

A program that branches on its numbers (a loss that must fall, a search that must converge) may take another way than
with all numbers; hazards on the way that it takes are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fsdp_conformance.simulator.device import build

__all__ = ["ordering_only", "set_ordering_only"]


def set_ordering_only(on: bool) -> bool:
    """Leave numbers out, or compute everything again. Returns what held before. Call `activate` first."""
    extension = build.active()
    before: bool = extension.ordering_only()
    extension.set_ordering_only(on)
    return before


@contextmanager
def ordering_only() -> Iterator[None]:
    """A context without numbers."""
    before = set_ordering_only(True)
    try:
        yield
    finally:
        set_ordering_only(before)
