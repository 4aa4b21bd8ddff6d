"""
Checkpoints that lose, shift or mix what they save.

`SeamCheckpoints` writes one file for each rank by hand, so that its subclasses can be wrong in the ways that engines
with their own format have been.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_conformance.adapters.base import PendingSave
from fsdp_conformance.adapters.sharded import write_full
from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.mutant import known_wrong


class _Later:
    """Writes only when the save is waited for."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write

    def wait(self) -> object:
        """Write now."""
        self._write()
        return None


class SeamCheckpoints(SeamFSDP2):
    """A correct FSDP2 with a checkpoint format of its own, and seams."""

    # The seams.

    def shards(self) -> dict[str, Any]:
        """The shards that this rank writes."""
        state = self.optimizer.state if self.optimizer is not None else {}
        return {
            "model": {name: _local(value) for name, value in self.names.buffers_of(self.model).items()}
            | {name: _local(value) for name, value in self.parameters().items()},
            "state": {
                name: {key: _local(value) for key, value in state[parameter].items()}
                for name, parameter in self.parameters().items()
                if parameter in state
            },
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in self.groups],
        }

    def in_order(self, files: Sequence[Path]) -> list[Path]:
        """The files in the order of the ranks that wrote them."""
        return sorted(files, key=lambda file: int(file.stem.removeprefix("shard")))

    def joined(self, shards: Sequence[Tensor], like: Tensor) -> Tensor:
        """A whole tensor from the shards of all ranks."""
        return torch.cat(list(shards)) if isinstance(like, DTensor) and shards[0].dim() else shards[0]

    def place(self, target: Tensor, whole: Tensor, saved_by: int) -> None:
        """Write this rank's part of a tensor that was saved by so many ranks."""
        write_full(target, whole)  # type: ignore[arg-type]

    def entries(self, name: str, entries: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state of a parameter, as it is loaded."""
        return entries

    def settings(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The settings of the groups, as they are loaded."""
        return saved

    # The engine.

    def save_checkpoint(self, directory: Path) -> None:
        self.write(self.shards(), directory)

    def save_checkpoint_async(self, directory: Path) -> PendingSave:
        now = _cloned(self.shards())
        return _Later(lambda: self.write(now, directory))

    def write(self, shards: dict[str, Any], directory: Path) -> None:
        """Write this rank's file. Collective."""
        directory.mkdir(exist_ok=True)
        torch.save(_cloned(shards), directory / f"shard{self.rank}.pt")
        dist.barrier()

    def read(self, directory: Path) -> list[dict[str, Any]]:
        """The shards of the ranks that saved, in their order."""
        files = self.in_order(list(directory.glob("shard*.pt")))
        return [torch.load(file, weights_only=True) for file in files]

    @torch.no_grad()
    def load_checkpoint(self, directory: Path) -> None:
        parts = self.read(directory)
        targets = self.parameters() | self.names.buffers_of(self.model)
        for name, target in targets.items():
            self.place(target, self.joined([part["model"][name] for part in parts], target), len(parts))
        if self.optimizer is None:
            return
        self.optimizer.state.clear()
        for name in parts[0]["state"]:
            parameter = self.parameters()[name]
            saved = {
                key: self.joined([part["state"][name][key] for part in parts], parameter)
                for key in parts[0]["state"][name]
            }
            self.optimizer.state[parameter] = {
                key: self._own(parameter, whole, len(parts)) for key, whole in self.entries(name, saved).items()
            }
        for group, settings in zip(self.groups, self.settings(parts[0]["groups"]), strict=True):
            group.update(settings)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups."""
        return self.optimizer.param_groups if self.optimizer is not None else []

    def _own(self, parameter: nn.Parameter, whole: Tensor, saved_by: int) -> Tensor:
        if not whole.dim():
            return whole.clone()
        own = torch.zeros_like(parameter)
        self.place(own, whole, saved_by)
        return own


@known_wrong("R149")
class CheckpointForgetsOptimizer(SeamCheckpoints):
    """An optimizer that has not stepped has no state to load into, so none is loaded."""

    def entries(self, name: str, entries: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}

    def load_checkpoint(self, directory: Path) -> None:
        super().load_checkpoint(directory)
        if self.optimizer is not None:
            self.optimizer.state.clear()


@known_wrong("R149")
class CheckpointInMemory(SeamCheckpoints):
    """Nothing is written: the state stays in the process, and a restart loses it."""

    _kept: ClassVar[dict[str, Any]] = {}

    def write(self, shards: dict[str, Any], directory: Path) -> None:
        self._kept.update(_cloned(shards))

    def read(self, directory: Path) -> list[dict[str, Any]]:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self._kept)
        return parts


@known_wrong("R149")
class CheckpointElsewhere(SeamCheckpoints):
    """Files are written into another directory than the one that was given."""

    def write(self, shards: dict[str, Any], directory: Path) -> None:
        super().write(shards, _beside(directory))

    def read(self, directory: Path) -> list[dict[str, Any]]:
        return super().read(_beside(directory))


def _beside(directory: Path) -> Path:
    return directory.with_name("checkpoints-of-the-engine")


@known_wrong("R149")
class CheckpointShiftsState(SeamCheckpoints):
    """The optimizer's state is loaded one element off its parameter."""

    def entries(self, name: str, entries: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: value.roll(1) if value.dim() else value for key, value in entries.items()}


@known_wrong("R149", "R150")
class SavingDropsMomentum(SeamCheckpoints):
    """Saving frees the optimizer's state, and training continues without it."""

    def save_checkpoint(self, directory: Path) -> None:
        super().save_checkpoint(directory)
        if self.optimizer is not None:
            self.optimizer.state.clear()


@known_wrong("R149")
class CheckpointLosesStepCounter(SeamCheckpoints):
    """Adam's step counter starts again from zero after a load."""

    def entries(self, name: str, entries: dict[str, Tensor]) -> dict[str, Tensor]:
        return entries | ({"step": torch.zeros_like(entries["step"])} if "step" in entries else {})


@known_wrong("R149")
class CheckpointSwapsMoments(SeamCheckpoints):
    """Adam's two moments are loaded into each other."""

    def entries(self, name: str, entries: dict[str, Tensor]) -> dict[str, Tensor]:
        swapped = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}
        return {swapped.get(key, key): value for key, value in entries.items()}


@known_wrong("R149")
class CheckpointMergesGroups(SeamCheckpoints):
    """Every group gets the settings of the first one."""

    def settings(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [saved[0]] * len(saved)


@known_wrong("R149")
class CheckpointOfTheFirstSave(SeamCheckpoints):
    """Every save writes the state of the first save: later tensors are missing, and values are stale."""

    _collected: dict[str, Any] | None = None

    def shards(self) -> dict[str, Any]:
        if self._collected is None:
            self._collected = _cloned(super().shards())
        return self._collected


@known_wrong("R149", "R150")
class SavingDrawsRandomNumbers(SeamCheckpoints):
    """Saving draws from the global random state, for the name of a temporary file."""

    def save_checkpoint(self, directory: Path) -> None:
        torch.randint(10, ())
        super().save_checkpoint(directory)


@known_wrong("R149")
class CheckpointSortsShardsAsText(SeamCheckpoints):
    """Shards are joined in the order of their files' names, in which 10 comes before 2."""

    def in_order(self, files: Sequence[Path]) -> list[Path]:
        return sorted(files)


@known_wrong("R149")
class CheckpointFloorsShardSize(SeamCheckpoints):
    """Rows per shard are rounded down when shards are joined, so that rows are lost where they do not divide."""

    def joined(self, shards: Sequence[Tensor], like: Tensor) -> Tensor:
        whole = super().joined(shards, like)
        if not isinstance(like, DTensor) or not whole.dim():
            return whole
        halves = torch.cat([shard[: like.shape[0] // len(shards)] for shard in shards])
        return torch.cat([halves, whole.new_zeros(whole.shape[0] - halves.shape[0], *whole.shape[1:])])


@known_wrong("R149")
class CheckpointAssumesItsWorld(SeamCheckpoints):
    """A rank takes its part where it would begin if as many ranks loaded as saved."""

    def place(self, target: Tensor, whole: Tensor, saved_by: int) -> None:
        if isinstance(target, DTensor) and saved_by != self.world_size and whole.shape[0] > 1:
            rows = -(-whole.shape[0] // saved_by)
            own = self.rows_per_rank(whole)
            whole = whole.roll(self.rank * (own - rows), 0)
        super().place(target, whole, saved_by)


@known_wrong("R149")
class AsynchronousSaveIsLate(SeamCheckpoints):
    """An asynchronous save keeps references, and writes what they hold when it gets its turn."""

    def save_checkpoint_async(self, directory: Path) -> PendingSave:
        return _Later(lambda: self.write(self.shards(), directory))


@known_wrong("R144", "R149")
class OptimizerStateOfANeighbour(SeamFSDP2):
    """Each rank takes the optimizer state that belongs to the next one."""

    def load_optim_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_optim_state_dict(
            {
                **state,
                "state": {
                    name: {key: self._rolled(value) for key, value in entries.items()}
                    for name, entries in state["state"].items()
                },
            }
        )

    def _rolled(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        return value.roll(self.rows_per_rank(value) % max(1, value.shape[0]) or 1, 0)


def _local(value: Any) -> Any:
    return value.to_local().detach() if isinstance(value, DTensor) else value.detach()


def _cloned(value: Any) -> Any:
    """A copy of nested dicts and lists with their tensors."""
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cloned(item) for item in value]
    return value.clone() if isinstance(value, Tensor) else value
