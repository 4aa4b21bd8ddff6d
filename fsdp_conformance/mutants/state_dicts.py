"""State dicts that have other values, names or ranks than they should, and loads that lose something."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_conformance.adapters.base import LoadedKeys
from fsdp_conformance.adapters.sharded import local_part
from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.engines import SeamReference
from fsdp_conformance.mutants.mutant import known_wrong


@known_wrong("R146")
class StateDictOnce(SeamFSDP2):
    """Every state dict has the values of the first one."""

    _first: dict[str, Any] | None = None

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        state = super().full_state_dict(rank0_only=rank0_only)
        if self._first is None:
            self._first = {name: _copied(value) for name, value in state.items()}
        return self._first


@known_wrong("R146")
class StateDictPads(SeamFSDP2):
    """Values are as long as all padded shards together."""

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        state = super().full_state_dict(rank0_only=rank0_only)
        for name in self.sharded().keys() & state.keys():
            value = state[name]
            rows = self.rows_per_rank(value) * self.world_size - value.shape[0]
            state[name] = torch.cat([value, value.new_zeros(rows, *value.shape[1:])])
        return state


@known_wrong("R146")
class StateDictSwapsShards(SeamFSDP2):
    """The shards of each parameter are put together in the wrong order."""

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        state = super().full_state_dict(rank0_only=rank0_only)
        for name in self.sharded().keys() & state.keys():
            shards = torch.chunk(state[name], self.world_size)
            state[name] = torch.cat(shards[::-1])
        return state


@known_wrong("R146")
class StateDictKeepsLastRow(SeamFSDP2):
    """The last row of each parameter is the one before it, as if an index were off by one."""

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        state = super().full_state_dict(rank0_only=rank0_only)
        for name in self.sharded().keys() & state.keys():
            value = state[name] = state[name].clone(memory_format=torch.contiguous_format)
            if value.numel() > 1:
                value.view(-1)[-1] = value.view(-1)[-2]
        return state


@known_wrong("R146")
class StateDictLastBuffer(SeamFSDP2):
    """Buffers of one module with the same shape all have the value of the last one."""

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        state = super().full_state_dict(rank0_only=rank0_only)
        last = {self._alike(name, value): value for name, value in state.items()}
        buffers = self.names.buffers_of(self.model).keys() & state.keys()
        return state | {name: last[self._alike(name, state[name])] for name in buffers}

    @staticmethod
    def _alike(name: str, value: Any) -> tuple[str, torch.Size]:
        return name.rpartition(".")[0], value.shape


@known_wrong("R146")
class StateDictRoundsToBfloat16(SeamFSDP2):
    """Values have passed through bfloat16."""

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        state = super().full_state_dict(rank0_only=rank0_only)
        return {
            name: value.bfloat16().to(value.dtype) if value.is_floating_point() else value
            for name, value in state.items()
        }


@known_wrong("R147")
class StateDictKeepsWrapperNames(SeamFSDP2):
    """Names contain the component of the wrapper for activation checkpointing."""

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        state = super().full_state_dict(rank0_only=rank0_only)
        return {self._as_in_the_model().get(name, name): value for name, value in state.items()}

    def _as_in_the_model(self) -> dict[str, str]:
        names = [name for name, _ in self.model.named_parameters()]
        return {name.replace("_checkpoint_wrapped_module.", ""): name for name in names}


@known_wrong("R147")
class LoadIgnoresWrappedNames(SeamFSDP2):
    """Parameters inside a wrapper for activation checkpointing are not loaded."""

    def load_full_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> LoadedKeys:
        inside = {
            name.replace("_checkpoint_wrapped_module.", "")
            for name, _ in self.model.named_parameters()
            if "_checkpoint_wrapped_module." in name
        }
        return super().load_full_state_dict(
            {name: value for name, value in state.items() if name not in inside}, strict=False
        )


@known_wrong("R147")
class StateDictOnEveryRank(SeamFSDP2):
    """A state dict meant for rank 0 only is returned on every rank."""

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        return super().full_state_dict()


@known_wrong("R147")
class StateDictOmitsIgnored(SeamFSDP2):
    """Parameters of ignored modules are missing."""

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        state = super().full_state_dict(rank0_only=rank0_only)
        prefixes = tuple(f"{name}." for name in self.plan.ignored)
        return {name: value for name, value in state.items() if not prefixes or not name.startswith(prefixes)}


@known_wrong("R146")
class LoadByPosition(SeamFSDP2):
    """Values of the same shape are loaded in the order of the state dict, whatever their names are."""

    def load_full_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> LoadedKeys:
        waiting: dict[torch.Size, list[Tensor]] = {}
        for value in state.values():
            waiting.setdefault(value.shape, []).append(value)
        own = [name for name in nn.Module.state_dict(self.model) if name in state]
        return super().load_full_state_dict({name: waiting[state[name].shape].pop(0) for name in own}, strict=strict)


@known_wrong("R146")
class LoadSkipsLastRow(SeamFSDP2):
    """The last row of a shard that is shorter than the others keeps its old value."""

    def load_full_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> LoadedKeys:
        before = {name: local_part(parameter).clone() for name, parameter in self.sharded().items()}
        keys = super().load_full_state_dict(state, strict=strict)
        for name, parameter in self.sharded().items():
            local = local_part(parameter)
            if 0 < local.shape[0] < self.rows_per_rank(parameter):
                local[-1:] = before[name][-1:]
        return keys


@known_wrong("R146")
class LoadIntoACopy(SeamFSDP2):
    """Loaded values are visible everywhere except to the optimizer, whose step starts from the old ones."""

    _loaded = False

    def load_full_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> LoadedKeys:
        self._old = {name: local_part(parameter).clone() for name, parameter in self.sharded().items()}
        keys = super().load_full_state_dict(state, strict=strict)
        self._loaded = True
        return keys

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        if self._loaded and not self.num_steps:
            for name, parameter in self.sharded().items():
                local_part(parameter).copy_(self._old[name])
        return super().step(max_norm, norm_type=norm_type)


@known_wrong("R147", shows=("refusal", "finding"))
class LoadNeverStrict(SeamReference):
    """Names that do not fit are ignored, and not reported."""

    def load_full_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> LoadedKeys:
        super().load_full_state_dict(state, strict=False)
        return LoadedKeys([], [])


@known_wrong("R147", shows=("refusal", "finding"))
class LoadNamesNothing(SeamReference):
    """Names that do not fit are counted, but not named."""

    def load_full_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> LoadedKeys:
        keys = super().load_full_state_dict(state, strict=False)
        if strict and any(keys):
            raise RuntimeError(f"{len(keys.missing)} names are missing and {len(keys.unexpected)} unexpected")
        return LoadedKeys(["?" for _ in keys.missing], ["?" for _ in keys.unexpected])


@known_wrong("R147", shows=("raised",), raises="ParameterReplaced")
class LoadAlwaysStrict(SeamReference):
    """A load that is not strict refuses names that do not fit."""

    def load_full_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> LoadedKeys:
        return super().load_full_state_dict(state, strict=True)


@known_wrong("R109")
class StateDictDropsAliases(SeamFSDP2):
    """A tied parameter is under its first name only."""

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        state = super().full_state_dict(rank0_only=rank0_only)
        return {name: value for name, value in state.items() if self.names.listed_name(name) == name}


@known_wrong("R109")
class StateDictKeepsOldAliases(SeamFSDP2):
    """The second name of a tied parameter has the value of the first state dict, like a copy that is never updated."""

    _aliases: dict[str, Any] | None = None

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        state = super().full_state_dict(rank0_only=rank0_only)
        if self._aliases is None:
            others = [name for name in state if self.names.listed_name(name) != name]
            self._aliases = {name: _copied(state[name]) for name in others}
        return state | self._aliases


@known_wrong("R109")
class LoadSkipsTies(SeamFSDP2):
    """Tied parameters keep their values at a load, because two names claim them."""

    def load_full_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> LoadedKeys:
        before = {name: value.clone() for name, value in self._tied().items()}
        keys = super().load_full_state_dict(state, strict=strict)
        for name, value in self._tied().items():
            value.copy_(before[name])
        return keys

    def _tied(self) -> dict[str, Tensor]:
        return {name: local_part(value) for name, value in self.parameters().items() if self.names.is_tied(name)}


@known_wrong("R139", environment=("accelerator",))
class LoadMovesToDevice(SeamFSDP2):
    """A load into an offloaded model leaves a copy on the device, as a buffer."""

    def load_full_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> LoadedKeys:
        keys = super().load_full_state_dict(state, strict=strict)
        self.model.register_buffer("loaded", torch.zeros(1, device=self.device), persistent=False)
        return keys


@known_wrong("R150")
class ReadingLeavesAHook(SeamFSDP2):
    """Every look at the parameters registers a hook that stays."""

    def full_params(self) -> dict[str, Tensor]:
        self._watch()
        return super().full_params()

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        self._watch()
        return super().full_state_dict(rank0_only=rank0_only)

    def _watch(self) -> None:
        self.model.register_forward_pre_hook(lambda module, args: None)


@known_wrong("R150")
class ReadingKeepsParametersGathered(SeamFSDP2):
    """After reading full parameters or a sharded state dict, units stay gathered."""

    def full_params(self) -> dict[str, Tensor]:
        params = super().full_params()
        self._gather()
        return params

    def sharded_state_dict(self) -> dict[str, Any]:
        shards = super().sharded_state_dict()
        self._gather()
        return shards

    def _gather(self) -> None:
        for unit in self.plan.units:
            self.unshard(unit)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
