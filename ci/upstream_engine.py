"""
The reference engine in place of torch's FullyShardedDataParallel and ShardedGradScaler, for PyTorch's tests: see
ci/upstream_world.py.

Tests read much of torch's class that is not part of its interface. What the engine has too, under other names, gets
torch's name here, for these tests alone: attributes of a wrapper, and `FlatParameter` as far as it tells where a unit's
data are. What torch makes to implement its class is left out, and tests of it fail.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp import _traversal_utils, fully_sharded_data_parallel, sharded_grad_scaler
from torch.distributed.fsdp._common_utils import TrainingState
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_conformance.engine.fully_sharded import unit as engine_unit
from fsdp_conformance.engine.fully_sharded.flat_parameter import FlatParameter
from fsdp_conformance.engine.fully_sharded.gradient_scaler import ShardedGradScaler
from fsdp_conformance.engine.fully_sharded.wrapper import FullyShardedDataParallel as Engine
from fsdp_conformance.engine.sharding_strategy import MixedPrecision
from fsdp_conformance.harness.torch_testing import common_fsdp

#: States of the engine's units, by those of torch's.
_STATES = {"IDLE": ("IDLE",), "FORWARD_BACKWARD": ("FORWARD", "BACKWARD"), "SUMMON_FULL_PARAMS": ("SUMMONED",)}


class FlatView:
    """The attributes of torch's FlatParameter that tests read, from the engine's. Reading changes nothing."""

    def __init__(self, unit: engine_unit.ShardedUnit, flat: FlatParameter) -> None:
        self._unit = unit
        self._flat = flat

    @property
    def _is_whole(self) -> bool:
        """True if modules see whole parameters, or could without a collective."""
        summoned = self._unit.state is engine_unit.TrainingState.SUMMONED
        shown = any(shown is not own for shown, own in zip(self._flat.shown.registered, self._params, strict=True))
        return (summoned and shown) or self._flat.is_unsharded

    @property
    def data(self) -> Tensor:
        """The unsharded data if there are any, else the shard: 1D."""
        flat = self._flat
        return flat.storage.payload if flat.is_unsharded else flat.storage.shard

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def shape(self) -> torch.Size:
        return torch.Size([self.numel()])

    def data_ptr(self) -> int:
        return self.data.data_ptr()

    def numel(self) -> int:
        layout = self._flat.storage.layout
        return layout.numel if self._is_whole else layout.shard_numel

    @property
    def grad(self) -> Tensor | None:
        """The gradients of this rank's parts, one after the other; None if no parameter has one."""
        grads = [member.parameter.grad for member in self._flat.members if member.parameter.grad is not None]
        return torch.cat([each.reshape(-1) for each in grads]) if grads else None

    @property
    def _sharded_size(self) -> torch.Size:
        return self._local_shard.shape

    @property
    def _local_shard(self) -> Tensor:
        return self._flat.storage.shard

    @property
    def _full_param_padded(self) -> Tensor:
        """A view of the unsharded data, whose storage is empty while there are none."""
        return self._flat.shown.leaves[0].data

    @property
    def _mp_shard(self) -> Tensor:
        """The engine casts shards in place of their gather, so it never has one. Not there without a cast."""
        storage = self._flat.storage
        if storage.compute_dtype is storage.dtype:
            raise AttributeError("_mp_shard")
        return torch.empty(0, dtype=storage.compute_dtype)

    @property
    def _params(self) -> list[nn.Parameter]:
        return [member.parameter for member in self._flat.members]

    @property
    def _fqns(self) -> list[str]:
        return [member.name for member in self._flat.members]


class HandleView:
    """The attributes of torch's FlatParamHandle that tests read."""

    def __init__(self, unit: engine_unit.ShardedUnit, flat: FlatParameter) -> None:
        self.flat_param = FlatView(unit, flat)
        self.uses_sharded_strategy = not flat.is_whole
        self._orig_param_dtype = flat.storage.dtype
        self._fwd_bwd_param_dtype = flat.storage.compute_dtype
        self._reduce_dtype = flat.storage.reduce_dtype

    @property
    def sharded_grad(self) -> Tensor | None:
        return self.flat_param.grad


def _handles_of(wrapper: Engine) -> list[HandleView]:
    return [HandleView(wrapper.unit, flat) for flat in wrapper.unit.flats]


def use_the_engine(placed: Callable[[Any], Callable[..., None]] | None) -> None:
    """Replace torch's class. `placed`: from the engine's class to a constructor for devices that are not there."""
    constructor = Engine.__init__ if placed is None else placed(Engine)
    make = Engine._make

    @functools.wraps(constructor)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("use_orig_params", None)
        group = kwargs.get("process_group", args[1] if len(args) > 1 else None)
        if not isinstance(group, common_fsdp.DummyProcessGroup):
            constructor(self, *args, **kwargs)
            return
        with _alone(group) as kwargs["process_group"]:
            constructor(self, *args[:1], **kwargs)
        self.process_group = group

    def make_with_attributes(self: Any, module: nn.Module, options: Any) -> None:
        make(self, module, options)
        names = {kind.name.lstrip("_"): kind for kind in fsdp.ShardingStrategy}
        self.sharding_strategy = names[options.sharding_strategy.name]
        self.cpu_offload = fsdp.CPUOffload(offload_params=options.offload.offload_params)
        self.backward_prefetch = options.backward_prefetch and fsdp.BackwardPrefetch[options.backward_prefetch.name]
        self.forward_prefetch = options.forward_prefetch
        self.mixed_precision = _torchs_precision(self.unit.mixed_precision)
        self.compute_device = self.unit.device
        self.process_group = self.unit.spec.groups.shard
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()

    def training_state(self: Any) -> TrainingState:
        return next(TrainingState[name] for name, ours in _STATES.items() if self.unit.state.name in ours)

    def assert_state(self: Any, state: Any) -> None:
        allowed = state if isinstance(state, list) else [state]
        if self.training_state not in allowed:
            raise ValueError(f"expected {allowed} but current state is {self.training_state}")

    def handle(self: Any) -> HandleView | None:
        return next(iter(_handles_of(self)), None)

    attributes = {
        "training_state": property(training_state),
        "params": property(lambda self: [each.flat_param for each in _handles_of(self)]),
        "_handle": property(handle),
        "_flat_param": property(lambda self: self._handle and self._handle.flat_param),
        "_comm_hook": property(lambda self: self.unit.communication_hook and self.unit.communication_hook.function),
        "_comm_hook_state": property(lambda self: self.unit.communication_hook and self.unit.communication_hook.state),
        "_inter_node_pg": property(lambda self: self.unit.spec.groups.replica),
        "_unshard": lambda self, async_op=False: self.unshard(async_op),
        "_is_root": property(lambda self: self.check_is_root()),
    }
    # Written into the classes and modules for these tests alone.
    _set(Engine, __init__=init, _make=make_with_attributes, _assert_state=assert_state, **attributes)
    _set(fsdp, FullyShardedDataParallel=Engine)
    _set(fully_sharded_data_parallel, FullyShardedDataParallel=Engine)
    _set(common_fsdp, FSDP=Engine)
    _set(sharded_grad_scaler, ShardedGradScaler=ShardedGradScaler)
    _set(_traversal_utils, _get_fsdp_states=Engine.fsdp_modules, _get_fsdp_handles=_handles_in)


def _torchs_precision(ours: MixedPrecision) -> fsdp.MixedPrecision:
    names = ("param_dtype", "reduce_dtype", "buffer_dtype", "cast_forward_inputs", "cast_root_forward_inputs")
    return fsdp.MixedPrecision(**{name: getattr(ours, name) for name in names})


@contextmanager
def _alone(group: Any) -> Iterator[dist.ProcessGroup]:
    """Replace a group that only knows its size, for the engine, by a group of torch's, which sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=group.rank(), world_size=group.size())
    try:
        yield dist.distributed_c10d._get_default_group()
    finally:
        dist.destroy_process_group()


def _handles_in(module: nn.Module) -> list[HandleView]:
    return [each for wrapper in Engine.fsdp_modules(module) for each in _handles_of(wrapper)]


def _set(owner: object, **values: Any) -> None:
    for name, value in values.items():
        setattr(owner, name, value)
