"""
State dicts by the calls of torch's FullyShardedDataParallel: `state_dict_type`, `optim_state_dict` and others.

    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
        optimizer_state = FullyShardedDataParallel.optim_state_dict(model, optimizer)

Full state dicts are as torch's. Sharded ones hold `LocalPieces` where torch's hold DTensors or ShardedTensors: they are
for torch.distributed.checkpoint, like `model_state.sharded_state_dict`. Local state dicts do not exist here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from fsdp_conformance.engine.fully_sharded.local_pieces import LocalPieces
from fsdp_conformance.engine.fully_sharded.model_state import (
    full_state_dict,
    load_full_state_dict,
    load_sharded_state_dict,
    sharded_state_dict,
)
from fsdp_conformance.engine.fully_sharded.optimizer_state import (
    full_optimizer_state,
    loadable_optimizer_state,
    sharded_optimizer_state,
)
from fsdp_conformance.errors import ConfigError, Unsupported

if TYPE_CHECKING:
    from torch.distributed.fsdp import OptimStateDictConfig, StateDictConfig, StateDictSettings, StateDictType

_WHERE = "state_dict_type"


class TorchStateDicts(nn.Module):
    """The wrapper's share of torch's interface to state dicts. Saving is collective, as in torch's class."""

    _state_settings: StateDictSettings | None = None
    """The settings of the last `set_state_dict_type`; None: full state dicts."""

    # --- which kind --------------------------------------------------------------------------------------------------

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """
        Choose the kind of state dict that the wrappers in `module` return and load. Returns the settings before.

        Raises Unsupported for local state dicts and for DTensors in sharded ones, ConfigError for a configuration of
        another kind, or if no wrapper is in `module`.
        """
        old_settings = TorchStateDicts.get_state_dict_type(module)
        settings = _settings(state_dict_type, state_dict_config, optim_state_dict_config)
        for wrapper in _wrappers(module):
            wrapper._state_settings = settings
        return old_settings

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The settings of the outermost wrapper in `module`. Raises ConfigError if there is none."""
        wrappers = _wrappers(module)
        if not wrappers:
            raise ConfigError(
                [f"module must be or contain a FullyShardedDataParallel, got a {type(module).__name__}"], where=_WHERE
            )
        return wrappers[0]._state_settings or _default_settings()

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """A context with other settings: see `set_state_dict_type`."""
        before = [(wrapper, wrapper._state_settings) for wrapper in _wrappers(module)]
        TorchStateDicts.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            for wrapper, settings in before:
                wrapper._state_settings = settings

    # --- the model's -------------------------------------------------------------------------------------------------

    def _chosen_state_dict(self) -> dict[str, Any]:
        """Parameters and persistent buffers, as chosen by `set_state_dict_type`."""
        settings = self._state_settings
        if settings is None:
            return full_state_dict(self)
        config: Any = settings.state_dict_config
        if _is_sharded(settings):
            return _on_cpu(sharded_state_dict(self)) if config.offload_to_cpu else sharded_state_dict(self)
        return full_state_dict(self, rank0_only=config.rank0_only, offload_to_cpu=config.offload_to_cpu)

    def _load_chosen_state_dict(self, state: Mapping[str, Any], *, strict: bool) -> tuple[list[str], list[str]]:
        """Load what `_chosen_state_dict` returned. Returns the missing and the unexpected names."""
        if self._state_settings is None or not _is_sharded(self._state_settings):
            return load_full_state_dict(self, state, strict=strict)
        return load_sharded_state_dict(self, state, strict=strict)

    # --- the optimizer's ---------------------------------------------------------------------------------------------

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: Mapping[str, Any] | None = None,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """
        The optimizer's state under the parameters' names, full or sharded as chosen by `set_state_dict_type`.

        Raises Unsupported for a state dict other than the optimizer's own, and for a group.
        """
        if optim_state_dict is not None:
            raise Unsupported("optim_state_dict", "optim_state_dict=...: only the optimizer's own state can be taken")
        _check_group(model, group)
        settings = TorchStateDicts.get_state_dict_type(model)
        config: Any = settings.optim_state_dict_config
        if _is_sharded(settings):
            state = sharded_optimizer_state(model, optim)
            return _on_cpu(state) if config.offload_to_cpu else state
        return _full(model, optim, rank0_only=config.rank0_only, offload_to_cpu=config.offload_to_cpu)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: Mapping[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """
        This rank's part of what `optim_state_dict` returned, for `optim.load_state_dict`. Every rank has to pass it.

        `load_directly`: load it as well. Raises StructureMismatch for parameters that the optimizer does not have,
        Unsupported for optimizers with a state dict by names, and for a group.
        """
        if is_named_optimizer:
            raise Unsupported("optim_state_dict", "is_named_optimizer=True: only optimizers of torch.optim are known")
        _check_group(model, group)
        state = loadable_optimizer_state(model, optim, optim_state_dict)
        if load_directly:
            optim.load_state_dict(state)
        return state

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: object = None,
        rank0_only: bool = True,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """The optimizer's state in full, on the CPU. With `rank0_only`, ranks but the first of a group get {}."""
        _refuse_optim_input(optim_input)
        _check_group(model, group)
        return _full(model, optim, rank0_only=rank0_only, offload_to_cpu=True)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: Optimizer, group: ProcessGroup | None = None
    ) -> dict[str, Any]:
        """This rank's part of the optimizer's state, on the CPU."""
        _check_group(model, group)
        state: dict[str, Any] = _on_cpu(sharded_optimizer_state(model, optim))
        return state

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: Mapping[str, Any],
        model: nn.Module,
        optim_input: object = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """This rank's part of a full state, for `optim.load_state_dict`. Raises Unsupported without `optim`."""
        _refuse_optim_input(optim_input)
        if optim is None:
            raise Unsupported("optim_state_dict", "shard_full_optim_state_dict without optim: pass the optimizer")
        return loadable_optimizer_state(model, optim, full_optim_state_dict)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: Mapping[str, Any], model: nn.Module, optim: Optimizer
    ) -> dict[str, Any]:
        """A sharded state, for `optim.load_state_dict`."""
        return loadable_optimizer_state(model, optim, sharded_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(*_: object, **__: object) -> NoReturn:
        """Raises Unsupported: every rank has to pass the state."""
        raise Unsupported(
            "optim_state_dict",
            "scatter_full_optim_state_dict: give every rank the state, and call shard_full_optim_state_dict",
        )

    @staticmethod
    def rekey_optim_state_dict(*_: object, **__: object) -> NoReturn:
        """Raises Unsupported: states have names as keys."""
        raise Unsupported("optim_state_dict", "rekey_optim_state_dict: parameters are identified by name")


def _wrappers(module: nn.Module) -> list[TorchStateDicts]:
    """The wrappers in a module, outermost first."""
    return [each for each in module.modules() if isinstance(each, TorchStateDicts)]


def _settings(kind: object, config: Any, optimizer_config: Any) -> StateDictSettings:
    # Not at the top: importing it takes a while, and most users do not ask.
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictSettings,
        StateDictType,
    )

    if not isinstance(kind, StateDictType):
        raise ConfigError([f"state_dict_type must be a StateDictType, got {kind!r}"], where=_WHERE)
    configurations: dict[str, tuple[type[Any], type[Any]]] = {
        "FULL_STATE_DICT": (FullStateDictConfig, FullOptimStateDictConfig),
        "SHARDED_STATE_DICT": (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    }
    classes = configurations.get(kind.name)
    if classes is None:
        raise Unsupported("sharded_state_dict", f"{kind.name}: use SHARDED_STATE_DICT, which also communicates nothing")
    configs = [
        config_class() if value is None else value
        for value, config_class in zip((config, optimizer_config), classes, strict=True)
    ]
    for value, config_class in zip(configs, classes, strict=True):
        if not isinstance(value, config_class):
            raise ConfigError(
                [f"the configuration of {kind.name} must be a {config_class.__name__}, got {value!r}"], where=_WHERE
            )
        if getattr(value, "_use_dtensor", False):
            raise Unsupported("sharded_state_dict", "_use_dtensor=True: shards are ranges of elements, not of rows")
    return StateDictSettings(kind, *configs)


def _default_settings() -> StateDictSettings:
    from torch.distributed.fsdp import StateDictType

    return _settings(StateDictType.FULL_STATE_DICT, None, None)


def _is_sharded(settings: StateDictSettings) -> bool:
    return settings.state_dict_type.name == "SHARDED_STATE_DICT"


def _full(model: nn.Module, optim: Optimizer, *, rank0_only: bool, offload_to_cpu: bool) -> dict[str, Any]:
    state = full_optimizer_state(model, optim, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu)
    return {} if rank0_only and not _is_first(model) else state


def _is_first(model: nn.Module) -> bool:
    """True if this rank is the first of the outermost unit's shard group."""
    unit: Any = next((wrapper.unit for wrapper in _wrappers(model)), None)
    return unit is None or unit.spec.groups.shard.rank() == 0


def _check_group(model: nn.Module, group: ProcessGroup | None) -> None:
    """Raise Unsupported for a group other than the one that the outermost unit is sharded over."""
    unit: Any = next((wrapper.unit for wrapper in _wrappers(model)), None)
    if group is not None and (unit is None or group is not unit.spec.groups.shard):
        raise Unsupported(
            "optim_state_dict", "group=...: each unit communicates over the group that it is sharded over"
        )


def _refuse_optim_input(optim_input: object) -> None:
    if optim_input is not None:
        raise Unsupported("optim_state_dict", "optim_input: pass the optimizer itself, as optim")


def _on_cpu(value: Any) -> Any:
    """Copies of the tensors in a state dict, on the CPU."""
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    if isinstance(value, LocalPieces):
        with torch.no_grad():
            return LocalPieces(value.part.to("cpu", copy=True), value.shape, value.begin)
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
