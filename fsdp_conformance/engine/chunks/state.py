"""
The states of a chunk and of the tensors in it, each by what is in memory then, and the moves that are legal.

A chunk knows where its data are, a tensor what it is being used for. A chunk may be released only while all of its
tensors are idle (RELEASABLE), and reduced only when the gradients of all are there (READY_FOR_REDUCE).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from types import MappingProxyType

from fsdp_conformance.engine.errors import IllegalTransition


class TensorState(Enum):
    """What a tensor of a chunk is being used for."""

    # Members are single objects. Enum hashes their names, in Python, and states are looked up all the time.
    __hash__ = object.__hash__

    FREE = "free"
    """Nobody wants it: its values need not be anywhere but in the shards."""
    HOLD = "hold"
    """Its values are kept, and not in use: before and after forward, and after the reduction."""
    COMPUTE = "compute"
    """A forward or backward is reading it: the unsharded values must stay where they are."""
    HOLD_AFTER_BWD = "hold_after_bwd"
    """One backward has used it. It may be used again (a shared parameter, a recomputed forward)."""
    READY_FOR_REDUCE = "ready_for_reduce"
    """Its gradient is complete and in the gradient buffer; its values are not needed any more."""


class ChunkState(Enum):
    """Where the data of a chunk are."""

    __hash__ = object.__hash__

    OPEN = "open"
    """The whole chunk, in a buffer on this rank that tensors are appended to. No shard yet."""
    SHARDED = "sharded"
    """This rank's shard, and nothing else."""
    GATHERING = "gathering"
    """The shard, and a block into which the all-gather writes: not to be read yet."""
    UNSHARDED = "unsharded"
    """The shard, and a block with the whole chunk."""


#: The legal moves. A tensor leaves HOLD_AFTER_BWD by COMPUTE again where it is used twice, or recomputed.
TENSOR_TRANSITIONS = MappingProxyType(
    {
        TensorState.FREE: frozenset({TensorState.HOLD, TensorState.COMPUTE}),
        TensorState.HOLD: frozenset({TensorState.FREE, TensorState.COMPUTE}),
        TensorState.COMPUTE: frozenset({TensorState.HOLD, TensorState.HOLD_AFTER_BWD}),
        TensorState.HOLD_AFTER_BWD: frozenset({TensorState.COMPUTE, TensorState.READY_FOR_REDUCE}),
        TensorState.READY_FOR_REDUCE: frozenset({TensorState.HOLD}),
    }
)

#: GATHERING to SHARDED: a gather that nobody waited for is released.
CHUNK_TRANSITIONS = MappingProxyType(
    {
        ChunkState.OPEN: frozenset({ChunkState.SHARDED}),
        ChunkState.SHARDED: frozenset({ChunkState.GATHERING, ChunkState.UNSHARDED}),
        ChunkState.GATHERING: frozenset({ChunkState.UNSHARDED, ChunkState.SHARDED}),
        ChunkState.UNSHARDED: frozenset({ChunkState.SHARDED}),
    }
)

#: A chunk may be released while each of its tensors is in one of these: no kernel reads them.
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
        """How many tensors are in `state`."""
        return self._counts[state]

    def add(self) -> None:
        """One more tensor, in HOLD."""
        self._states.append(TensorState.HOLD)
        self._counts[TensorState.HOLD] += 1

    def move(self, index: int, state: TensorState, *, where: object) -> None:
        """
        Move one tensor. The state that it is in already is no move.

        Raises IllegalTransition, with the text of `where`; the tensor then stays where it was.
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

        Raises IllegalTransition naming each tensor that may not move; then all stay where they were.
        """
        allowed = {previous for previous, nexts in TENSOR_TRANSITIONS.items() if state in nexts} | {state}
        if sum(self._counts[previous] for previous in allowed) != len(self._states):
            barred = [(index, previous) for index, previous in enumerate(self._states) if previous not in allowed]
            raise IllegalTransition([_refusal(*tensor, state) for tensor in barred], where=str(where))
        self.reset(state)

    def reset(self, state: TensorState = TensorState.HOLD) -> None:
        """Put every tensor into `state`, whatever it was in: after a reduction, or an exception."""
        self._states = [state] * len(self._states)
        self._counts = dict.fromkeys(TensorState, 0)
        self._counts[state] = len(self._states)

    def all_in(self, states: Iterable[TensorState]) -> bool:
        """Whether each tensor is in one of `states`."""
        return sum(self._counts[state] for state in states) == len(self._states)

    def outside(self, states: Iterable[TensorState]) -> list[str]:
        """Phrases that name the tensors in none of `states`, with their state."""
        wanted = frozenset(states)
        return [f"tensor {index} is {state.name}" for index, state in enumerate(self._states) if state not in wanted]


def _refusal(index: int, previous: TensorState, state: TensorState) -> str:
    legal = ", ".join(sorted(legal.name for legal in TENSOR_TRANSITIONS[previous]))
    return f"tensor {index} goes from {previous.name} to {state.name}, but should go to {legal}"
