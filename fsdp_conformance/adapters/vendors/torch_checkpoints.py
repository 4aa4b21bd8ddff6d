"""
State dicts and checkpoints for engines that `torch.distributed.checkpoint` knows: FSDP2, FSDP1 and DDP.

Everything goes the way that torch's documentation shows to users: `get_state_dict` and `set_state_dict`, and
`torch.distributed.checkpoint` for files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from fsdp_conformance.adapters.base import LoadedKeys, PendingSave
from fsdp_conformance.adapters.sharded import full_copy
from fsdp_conformance.adapters.torch_like import TorchAdapter

#: Values of the axis `checkpoints` with a load.
LOADS = ("loaded at once", "loaded later", "second one loaded", "saved meanwhile")
#: Those with a step between the save and the load.
_LATER_LOADS = LOADS[1:]
#: Values of the axis `resumed` with a load, into a new engine.
_RESUMED = ("by a new engine", "in other units")
#: All axes and values with a load of a checkpoint.
LOADING = (*(("checkpoints", loaded) for loaded in LOADS), *(("resumed", loaded) for loaded in _RESUMED))


class TorchCheckpoints(TorchAdapter):
    """The optional methods for state dicts and checkpoints, with torch's own functions."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"reshard_load"})
    avoids: ClassVar[tuple[Mapping[str, str], ...]] = (
        # torch.distributed.checkpoint.state_dict loses the settings of an empty group that is not the last one:
        # ci/findings/torch-fsdp2/settings_of_an_empty_group.py.
        *({"optimizer": "sgd, in groups", axis: loaded} for axis, loaded in LOADING),
        # It drops the state of parameters that are frozen when a checkpoint is loaded:
        # ci/findings/torch-fsdp2/optimizer_state_of_a_frozen_parameter.py, pytorch#192202.
        *({"frozen": "later", "checkpoints": loaded} for loaded in LOADS),
        # It steps an optimizer that has no state yet, and so Adam's first step counts twice:
        # ci/findings/torch-fsdp2/optimizer_state_before_first_step.py, pytorch#164929.
        *({"optimizer": adam, "checkpoints": "second one loaded"} for adam in ("adam, foreach", "adamw, fused")),
        # In the same way, parameters that have had no gradient get a state.
        {"use": "one never", "checkpoints": "second one loaded"},
        {"inputs": "detached", "checkpoints": "second one loaded"},
        {"frozen": "the first layer", "checkpointing": "reentrant", "checkpoints": "second one loaded"},
        # A new optimizer expects state of every parameter, also of one that had no gradient before the save:
        # ci/findings/torch-fsdp2/optimizer_state_of_an_unused_parameter.py.
        *(
            {**values, "resumed": resumed}
            for resumed in _RESUMED
            for values in (
                {"use": "one never"},
                {"inputs": "detached"},
                {"frozen": "the first layer", "checkpointing": "reentrant"},
                # Loading an optimizer's state dict drops that of frozen parameters: pytorch#192202.
                {"frozen": "later", "state dicts": "of the optimizer"},
            )
        ),
        # By design: a checkpoint is loaded in place, so state that a parameter got after it was saved is an error.
        *({"frozen": "thawed later", "checkpoints": loaded} for loaded in _LATER_LOADS),
        *({"dropped": "one gradient", "checkpoints": loaded} for loaded in ("loaded later", "saved meanwhile")),
        # State that a parameter got after a state dict was taken stays: pytorch#192202.
        {"dropped": "one gradient", "state dicts": "of the optimizer"},
        {"frozen": "thawed later", "state dicts": "of the optimizer"},
    )

    _saving_group: dist.ProcessGroup | None = None
    """For asynchronous saves, whose collectives must not meet those of the training."""

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        if rank0_only and self.plan.stages:
            # That of torch would be lost for all stages but the first.
            state = self.full_state_dict()
            own = {name: full_copy(value) if isinstance(value, Tensor) else value for name, value in state.items()}
            return {} if any(group.rank() for group in self._model_groups() if group is not None) else own
        # In torch, a full state dict on the CPU is only on rank 0.
        return get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=rank0_only))

    def load_full_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> LoadedKeys:
        options = StateDictOptions(full_state_dict=True, strict=strict)
        # torch changes the dict that it is given.
        keys = set_model_state_dict(self.model, dict(state), options=options)
        return LoadedKeys(list(keys.missing_keys), list(keys.unexpected_keys))

    def sharded_state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_sharded_state_dict(self, state: Mapping[str, Any]) -> None:
        set_model_state_dict(self.model, dict(state))

    def optim_state_dict(self) -> dict[str, Any]:
        if self.optimizer is None:
            return {"state": {}, "param_groups": []}
        options = StateDictOptions(full_state_dict=True)
        return dict(get_optimizer_state_dict(self.model, self.optimizer, options=options))

    def load_optim_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.optimizer is not None:
            options = StateDictOptions(full_state_dict=True, strict=False)
            set_optimizer_state_dict(self.model, self.optimizer, _copied(state), options=options)

    def save_checkpoint(self, directory: Path) -> None:
        save(self._state_to_save(), checkpoint_id=directory)

    def load_checkpoint(self, directory: Path) -> None:
        # Loaded in place: torch takes the names and shapes to read from the model and the optimizer.
        state = self._state_to_save()
        load(state, checkpoint_id=directory)
        set_model_state_dict(self.model, state["model"])
        if self.optimizer is not None:
            set_optimizer_state_dict(self.model, self.optimizer, state["optim"], options=self._options_to_save())

    def save_checkpoint_async(self, directory: Path) -> PendingSave:
        if self._saving_group is None:
            self._saving_group = dist.new_group(backend="gloo")
        future: Any = async_save(self._state_to_save(), checkpoint_id=directory, process_group=self._saving_group)
        return FutureSave(future)

    def _state_to_save(self) -> dict[str, Any]:
        state: dict[str, Any] = {"model": get_model_state_dict(self.model)}
        if self.optimizer is not None:
            state["optim"] = get_optimizer_state_dict(self.model, self.optimizer, options=self._options_to_save())
        return state

    def _options_to_save(self) -> StateDictOptions:
        # Groups have numbers and not names: those of two stages would be in each other's place. Not strict: that means
        # only that a parameter without state is an error, and SGD without momentum, for example, has none.
        return StateDictOptions(flatten_optimizer_state_dict=bool(self.plan.stages), strict=False)


class FutureSave:
    """The future that torch's asynchronous save returns."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def wait(self) -> object:
        """The future's result, or its exception."""
        return self._future.result()


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the containers of an optimizer's state dict: torch changes those that it is given."""
    return {
        "state": {name: dict(entries) for name, entries in state["state"].items()},
        "param_groups": [dict(group) for group in state["param_groups"]],
    }
