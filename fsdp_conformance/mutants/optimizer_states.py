"""Optimizer state dicts that mix up parameters, shards, settings or counters, and wrong sharded state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.engines import SeamReference
from fsdp_conformance.mutants.mutant import known_wrong


@known_wrong("R144")
class OptimizerStateSwapsShards(SeamReference):
    """The shards of each state tensor are put together in the wrong order."""

    def optim_state_dict(self) -> dict[str, Any]:
        state = super().optim_state_dict()
        for entries in state["state"].values():
            for key, value in entries.items():
                if isinstance(value, Tensor) and value.dim():
                    entries[key] = torch.cat(torch.chunk(value, dist.get_world_size())[::-1])
        return state


@known_wrong("R144")
class OptimizerStateWithoutMomentum(SeamReference):
    """The momentum is what it was after the first step, as if a copy had been kept."""

    _kept: dict[str, Any] | None = None

    def optim_state_dict(self) -> dict[str, Any]:
        state = super().optim_state_dict()
        if self._kept is None:
            self._kept = {
                name: entries["momentum_buffer"].clone()
                for name, entries in state["state"].items()
                if "momentum_buffer" in entries
            }
        for name, value in self._kept.items():
            state["state"][name]["momentum_buffer"] = value
        return state


@known_wrong("R144")
class OptimizerStateOfAllParameters(SeamReference):
    """Parameters that the optimizer does not have are in its first group."""

    def optim_state_dict(self) -> dict[str, Any]:
        state = super().optim_state_dict()
        first, *others = state["param_groups"]
        elsewhere = {name for group in others for name in group["params"]}
        names = [name for name in self.parameters() if name not in elsewhere]
        return {**state, "param_groups": [{**first, "params": names}, *others]}


@known_wrong("R145")
class OptimizerStateByPosition(SeamReference):
    """State is named by the position of its parameter in the optimizer, as if that were the model's order."""

    def optim_state_dict(self) -> dict[str, Any]:
        state = super().optim_state_dict()
        given = [name for group in state["param_groups"] for name in group["params"]]
        listed = [name for name in self.names.parameters if name in self.parameters()]
        renamed = dict(zip(given, listed, strict=False))
        return {**state, "state": {renamed[name]: entries for name, entries in state["state"].items()}}


@known_wrong("R144")
class OptimizerStateWithoutStep(SeamReference):
    """The step counter is missing."""

    def optim_state_dict(self) -> dict[str, Any]:
        state = super().optim_state_dict()
        for entries in state["state"].values():
            entries.pop("step", None)
        return state


@known_wrong("R144")
class OptimizerStateOfOneGroup(SeamReference):
    """All parameters are in one group, with the settings of the first."""

    def optim_state_dict(self) -> dict[str, Any]:
        state = super().optim_state_dict()
        first, *others = state["param_groups"]
        names = [name for group in (first, *others) for name in group["params"]]
        return {**state, "param_groups": [{**first, "params": names}]}


@known_wrong("R144")
class OptimizerStateMadeUp(SeamReference):
    """An optimizer that has not stepped gets state for its state dict."""

    def optim_state_dict(self) -> dict[str, Any]:
        state = super().optim_state_dict()
        if not state["state"]:
            values = self.full_params()
            state["state"] = {name: {"exp_avg": torch.zeros_like(value)} for name, value in values.items()}
        return state


@known_wrong("R144")
class OptimizerStateWithoutGroups(SeamReference):
    """The settings of the groups are missing before the first step."""

    def optim_state_dict(self) -> dict[str, Any]:
        state = super().optim_state_dict()
        if not state["state"]:
            state["param_groups"] = [{"params": group["params"]} for group in state["param_groups"]]
        return state


@known_wrong("R144")
class OptimizerLoadForgetsMomentum(SeamReference):
    """Loaded moments are zeros: only their shapes were taken over."""

    def load_optim_state_dict(self, state: Mapping[str, Any]) -> None:
        empty = {
            name: {key: torch.zeros_like(value) if value.dim() else value for key, value in entries.items()}
            for name, entries in state["state"].items()
        }
        super().load_optim_state_dict({**state, "state": empty})


@known_wrong("R144")
class OptimizerLoadKeepsSettings(SeamReference):
    """The settings of the groups are not loaded."""

    def load_optim_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_optim_state_dict({**state, "param_groups": []})


@known_wrong("R145", shows=("refusal",))
class OptimizerStateUnchecked(SeamReference):
    """A rank that lacks the state of a parameter fills in zeros, and says nothing."""

    def optim_state_dict(self) -> dict[str, Any]:
        if self.optimizer is None:
            return super().optim_state_dict()
        like: dict[str, Tensor] = next(iter(self.optimizer.state.values()), {})
        for parameter in self.parameters().values():
            if parameter not in self.optimizer.state:
                self.optimizer.state[parameter] = {
                    key: torch.zeros_like(parameter) if value.dim() else value.clone() for key, value in like.items()
                }
        return super().optim_state_dict()


@known_wrong("R145", shows=("refusal",))
class OptimizerStateCheckedOnOneRank(SeamReference):
    """Only the rank that lacks state raises; the others get a state dict without it."""

    def optim_state_dict(self) -> dict[str, Any]:
        try:
            return super().optim_state_dict()
        except Exception:
            if self.optimizer is not None and len(self.optimizer.state) < len(self.parameters()):
                raise
            return {"state": {}, "param_groups": []}


@known_wrong("R150")
class OptimizerStateSteps(SeamReference):
    """Taking an optimizer state dict steps every counter of the optimizer, and halves every momentum."""

    def optim_state_dict(self) -> dict[str, Any]:
        state = super().optim_state_dict()
        for entries in self.optimizer.state.values() if self.optimizer is not None else ():
            for key, value in entries.items():
                value.add_(1) if key == "step" else value.mul_(0.5)
        return state


@known_wrong("R150", "R144")
class OptimizerStateInitialises(SeamReference):
    """A look at an optimizer that has not stepped makes it step, with gradients of zeros and no learning rate."""

    def optim_state_dict(self) -> dict[str, Any]:
        if self.optimizer is not None and not self.optimizer.state:
            rates = [group["lr"] for group in self.optimizer.param_groups]
            for group in self.optimizer.param_groups:
                group["lr"] = 0.0
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()
            self.optimizer.zero_grad()
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        return super().optim_state_dict()


@known_wrong("R148")
class ShardedStateIsOld(SeamFSDP2):
    """Sharded state dicts have the values from before the first step."""

    def setup(self, *arguments: Any) -> None:
        super().setup(*arguments)
        self._first = {name: value.detach().clone() for name, value in super().sharded_state_dict().items()}

    def sharded_state_dict(self) -> dict[str, Any]:
        return dict(self._first)


@known_wrong("R148")
class ShardedStateOfAnotherRank(SeamFSDP2):
    """Shards are reported for the place of the next rank."""

    def sharded_state_dict(self) -> dict[str, Any]:
        return {name: self._moved(value) for name, value in super().sharded_state_dict().items()}

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, DTensor) or value.shape[0] < self.world_size:
            return value
        whole = value.full_tensor()
        return distribute_tensor(whole.roll(self.rows_per_rank(whole), 0), value.device_mesh, value.placements)


@known_wrong("R148")
class ShardedStateIsGathered(SeamFSDP2):
    """Every parameter is gathered for its own shard."""

    def sharded_state_dict(self) -> dict[str, Any]:
        state = super().sharded_state_dict()
        for value in state.values():
            if isinstance(value, DTensor):
                value.full_tensor()
        return state


@known_wrong("R148")
class ShardedStateIsCopied(SeamFSDP2):
    """Values are copies of the shards."""

    def sharded_state_dict(self) -> dict[str, Any]:
        return {name: value.detach().clone() for name, value in super().sharded_state_dict().items()}


@known_wrong("R148")
class ShardedLoadReplacesStorage(SeamFSDP2):
    """A load puts new storage in place of the shards."""

    def load_sharded_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_sharded_state_dict(state)
        self._kept = []
        for parameter in self.sharded().values():
            local = parameter.to_local()  # type: ignore[attr-defined]
            self._kept.append(local.untyped_storage())
            local.data = local.data.clone()
            parameter._local_tensor.data = parameter._local_tensor.data.clone()  # type: ignore[attr-defined]


@known_wrong("R148")
class ShardedLoadDoesNothing(SeamFSDP2):
    """Loaded state is thrown away: the state dict was a copy."""

    def sharded_state_dict(self) -> dict[str, Any]:
        return {name: value.detach().clone() for name, value in super().sharded_state_dict().items()}

    def load_sharded_state_dict(self, state: Mapping[str, Any]) -> None:
        pass
