"""Wrong simulated ranks: mixed-up values, shared state, and missed errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from fsdp_conformance.adapters.vendors.reference_components import ReferenceComponents
from fsdp_conformance.errors import RankFailed
from fsdp_conformance.harness.simulated_ranks import meeting
from fsdp_conformance.harness.simulated_ranks.state import RankState
from fsdp_conformance.history.collective import Op
from fsdp_conformance.mutants.mutant import known_wrong


@contextmanager
def _replaced(owner: Any, values: Mapping[Any, Any]) -> Iterator[None]:
    """Replace members of a mapping or attributes of an object inside the context."""
    if isinstance(owner, dict):
        before = {name: owner[name] for name in values}
        owner.update(values)
    else:
        before = {name: getattr(owner, name) for name in values}
        for name, value in values.items():
            setattr(owner, name, value)
    try:
        yield
    finally:
        if isinstance(owner, dict):
            owner.update(before)
        else:
            for name, value in before.items():
                setattr(owner, name, value)


class SeamRanks(ReferenceComponents):
    """Simulated ranks with one part replaced."""

    def parts(self) -> tuple[Any, Mapping[Any, Any]]:
        """The parts to replace, and their replacements."""
        raise NotImplementedError

    def run_ranks(self, world_size: int, function: Callable[[int], Any]) -> list[Any]:
        with _replaced(*self.parts()):
            return super().run_ranks(world_size, function)


class WrongResult(SeamRanks):
    """One collective returns something else."""

    op: ClassVar[Op]

    def result(self, brought: Any, rank: int, right: list[Tensor]) -> list[Tensor]:
        """The wrong result that a rank gets instead of `right`, the correct one."""
        raise NotImplementedError

    def parts(self) -> tuple[Any, Mapping[Any, Any]]:
        before = meeting.RESULTS[self.op]
        return meeting.RESULTS, {
            self.op: lambda brought, rank: self.result(brought, rank, before(brought, rank)),
        }


@known_wrong("R186")
class AveragesByTwo(WrongResult):
    """An average divides by two, whatever the number of ranks."""

    op = Op.ALL_REDUCE

    def result(self, brought: Any, rank: int, right: list[Tensor]) -> list[Tensor]:
        is_average = brought[rank].reduce_op == "AVG"
        return [tensor * len(brought) / 2.0 for tensor in right] if is_average else right


@known_wrong("R187")
class TrainsOtherwise(WrongResult):
    """Only the first rank's contribution is summed."""

    op = Op.ALL_REDUCE

    def result(self, brought: Any, rank: int, right: list[Tensor]) -> list[Tensor]:
        return [tensor.clone() for tensor in brought[0].inputs]


@known_wrong("R186")
class FirstPartForAll(WrongResult):
    """Every rank gets the first part of a reduce-scatter."""

    op = Op.REDUCE_SCATTER

    def result(self, brought: Any, rank: int, right: list[Tensor]) -> list[Tensor]:
        return meeting.reduce_scattered(brought, 0)


@known_wrong("R186")
class LastPartFirst(WrongResult):
    """An all-gather puts the last rank's part first."""

    op = Op.ALL_GATHER

    def result(self, brought: Any, rank: int, right: list[Tensor]) -> list[Tensor]:
        return right[::-1] if len(right) > 1 else right


@known_wrong("R186")
class FirstRankIsRoot(WrongResult):
    """A broadcast always sends the first rank's tensor, whatever its root."""

    op = Op.BROADCAST

    def result(self, brought: Any, rank: int, right: list[Tensor]) -> list[Tensor]:
        return right if brought[0] is None else list(brought[0].inputs)


@known_wrong("R186")
class ExchangesNothing(WrongResult):
    """In an all-to-all each rank keeps its own parts."""

    op = Op.ALL_TO_ALL

    def result(self, brought: Any, rank: int, right: list[Tensor]) -> list[Tensor]:
        own = brought[rank].inputs[0].reshape(-1)
        return [own.repeat(right[0].numel())[: right[0].numel()]]


@known_wrong("R186")
class AveragesOverTheWorld(WrongResult):
    """A subgroup averages over all ranks of the world."""

    op = Op.ALL_REDUCE

    def result(self, brought: Any, rank: int, right: list[Tensor]) -> list[Tensor]:
        if brought[rank].reduce_op != "AVG":
            return right
        return [tensor * len(brought) / torch.distributed.get_world_size() for tensor in right]


@known_wrong("R186")
class TakesWhatIsThere(SeamRanks):
    """Work completes before all peers have joined."""

    def parts(self) -> tuple[Any, Mapping[Any, Any]]:
        from fsdp_conformance.harness.simulated_ranks.group import SimulatedWork

        return SimulatedWork, {"wait": lambda work, *_: True}


@known_wrong("R186")
class CommonRandomNumbers(SeamRanks):
    """All ranks draw from one random sequence."""

    def parts(self) -> tuple[Any, Mapping[Any, Any]]:
        return RankState, {"restore": lambda state: None}


@known_wrong("R186")
class MismatchUnnoticed(SeamRanks):
    """The calls of different ranks are not compared."""

    def parts(self) -> tuple[Any, Mapping[Any, Any]]:
        return meeting.Contribution, {"agreed": property(lambda contribution: ())}

    def run_ranks(self, world_size: int, function: Callable[[int], Any]) -> list[Any]:
        try:
            return super().run_ranks(world_size, function)
        except RankFailed as error:
            raise RuntimeError("a rank failed") from error


@known_wrong("R186")
class FailureUnnoticed(ReferenceComponents):
    """A rank that raises, and its peers, appear to return normally."""

    def run_ranks(self, world_size: int, function: Callable[[int], Any]) -> list[Any]:
        try:
            return super().run_ranks(world_size, function)
        except RankFailed:
            return [None] * world_size
