"""
The states of the tensors in a chunk: what each is being used for, and the legal moves between them.

A chunk may be released only while none of its tensors is in use (RELEASABLE), and reduced only once the gradients of
all of them are ready (READY_FOR_REDUCE).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from enum import Enum
from types import MappingProxyType

from fsdp_conformance.engine.errors import IllegalTransition


class TensorState(Enum):
    """The use that is being made of a tensor of a chunk."""

    # Members are singletons. Enum hashes their names in Python, and states are looked up all the time.
    __hash__ = object.__hash__

    FREE = "free"
    """Not needed: its values need not be anywhere but in the shards."""
    HOLD = "hold"
    """Kept, but not in use: before and after forward, and after the reduction."""
    COMPUTE = "compute"
    """In use by a forward or backward: the unsharded values must stay in place."""
    HOLD_AFTER_BWD = "hold_after_bwd"
    """Used by one backward. It may be used again (a shared parameter, a recomputed forward)."""
    READY_FOR_REDUCE = "ready_for_reduce"
    """Its gradient is complete and in the gradient buffer; its values are no longer needed."""


#: The legal moves. A tensor that is used twice, or recomputed, goes from HOLD_AFTER_BWD back to COMPUTE.
TENSOR_TRANSITIONS = MappingProxyType(
    {
        TensorState.FREE: frozenset({TensorState.HOLD, TensorState.COMPUTE}),
        TensorState.HOLD: frozenset({TensorState.FREE, TensorState.COMPUTE}),
        TensorState.COMPUTE: frozenset({TensorState.HOLD, TensorState.HOLD_AFTER_BWD}),
        TensorState.HOLD_AFTER_BWD: frozenset({TensorState.COMPUTE, TensorState.READY_FOR_REDUCE}),
        TensorState.READY_FOR_REDUCE: frozenset({TensorState.HOLD}),
    }
)

#: A chunk may be released while each of its tensors is in one of these states: no kernel reads them.
RELEASABLE = frozenset({TensorState.FREE, TensorState.HOLD, TensorState.HOLD_AFTER_BWD, TensorState.READY_FOR_REDUCE})


class TensorStates:
    """The states of the tensors of one chunk, by index, with a count per state."""

    def __init__(self) -> None:
        self._states: list[TensorState] = []
        self._counts = dict.fromkeys(TensorState, 0)

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, index: int) -> TensorState:
        return self._states[index]

    def count(self, state: TensorState) -> int:
        """The number of tensors in `state`."""
        return self._counts[state]

    def add(self) -> None:
        """Add one tensor, in HOLD."""
        self._states.append(TensorState.HOLD)
        self._counts[TensorState.HOLD] += 1

    def move(self, index: int, state: TensorState, *, where: object) -> None:
        """
        Move one tensor. Moving it to its current state does nothing.

        Raises IllegalTransition, with the text of `where`; the tensor then keeps its state.
        """
        previous = self._states[index]
        if previous is state:
            return
        if state not in TENSOR_TRANSITIONS[previous]:
            raise IllegalTransition(_refusal(index, previous, state), where=str(where))
        self._states[index] = state
        self._counts[previous] -= 1
        self._counts[state] += 1

    def move_all(self, state: TensorState, *, where: object) -> None:
        """
        Move every tensor, or none.

        Raises IllegalTransition naming each tensor that may not move; all of them then keep their states.
        """
        allowed = {previous for previous, nexts in TENSOR_TRANSITIONS.items() if state in nexts} | {state}
        if sum(self._counts[previous] for previous in allowed) != len(self._states):
            barred = [(index, previous) for index, previous in enumerate(self._states) if previous not in allowed]
            raise IllegalTransition([_refusal(*tensor, state) for tensor in barred], where=str(where))
        self.reset(state)

    def reset(self, state: TensorState = TensorState.HOLD) -> None:
        """Put every tensor into `state` regardless of the one it was in: after a reduction, or an exception."""
        self._states = [state] * len(self._states)
        self._counts = dict.fromkeys(TensorState, 0)
        self._counts[state] = len(self._states)

    def all_in(self, states: Iterable[TensorState]) -> bool:
        """True if each tensor is in one of `states`."""
        return sum(self._counts[state] for state in states) == len(self._states)

    def outside(self, states: Container[TensorState]) -> list[str]:
        """One phrase for each tensor that is in none of `states`, naming it and its state."""
        return [f"tensor {index} is {state.name}" for index, state in enumerate(self._states) if state not in states]


def _refusal(index: int, previous: TensorState, state: TensorState) -> str:
    legal = ", ".join(sorted(legal.name for legal in TENSOR_TRANSITIONS[previous]))
    return f"tensor {index} cannot go from {previous.name} to {state.name}, only to {legal}"
