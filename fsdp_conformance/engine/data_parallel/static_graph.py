"""
A graph that never changes: how many gradients each parameter gets in one backward, counted in the first of them.

    begin    a backward's first gradient is there; which parameters will get none, once that is known
    is_last  a gradient is there: whether it is its parameter's last in this backward
    learn    the end of the first backward
    restart  whatever this backward has counted is forgotten
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_conformance.engine.errors import GraphChanged


class StaticGraph:
    """Of parameters with these names, known by their indices."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._counts: list[int] | None = None  # gradients of each parameter in one backward
        self._left = [0] * len(names)  # how many of them are still to come
        self._came: list[int] = []  # whose gradients came in the first backward, in order

    @property
    def is_learnt(self) -> bool:
        """Whether the first backward has ended."""
        return self._counts is not None

    def begin(self) -> list[int]:
        """Expect the gradients of a backward. The parameters that get none; empty in the first, which shows it."""
        if self._counts is None:
            return []
        self._left = list(self._counts)
        return [index for index, count in enumerate(self._counts) if not count]

    def is_last(self, index: int) -> bool:
        """
        Whether parameter `index` gets no further gradient in this backward, as the first one has shown.

        Never in the first. Raises GraphChanged for a gradient more than there.
        """
        if self._counts is None:
            self._left[index] -= 1  # Counted downwards: see learn.
            self._came.append(index)
            return False
        if not self._left[index]:
            raise GraphChanged(
                f"parameter {self._names[index]} got {self._counts[index] + 1} gradients in this backward, but should "
                f"get {self._counts[index]} as in the first one",
                where="backward",
                hint="static_graph=True is for models whose graph never changes.",
            )
        self._left[index] -= 1
        return self._left[index] == 0

    def learn(self) -> list[int]:
        """The first backward has ended: now it is known who gets how many. Those, in the order of their last ones."""
        self._counts = [-left for left in self._left]
        last = {index: tick for tick, index in enumerate(self._came)}
        self._came = []
        return sorted(last, key=last.__getitem__)

    def restart(self) -> None:
        """Forget what this backward has counted."""
        self._left = [0] * len(self._names)
        self._came = []
