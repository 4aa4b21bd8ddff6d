"""
Takes the sharding out of a script: torch's sharding functions replicate instead.

The script is the same, to the line. Parameters keep their names, and the optimizer is made of them where the script
makes it. What cannot be replaced is refused by its name, in the script's own process.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._common_utils import TrainingState
from torch.optim import Optimizer

from fsdp_conformance.recorder.flat_parameter import FlatParameterInPlace
from fsdp_conformance.recorder.observer import Observer
from fsdp_conformance.recorder.replica import Replica, Replicas, owned_modules
from fsdp_conformance.recorder.rounding import Rounding

#: What FSDP1's wrapper adds to names.
_WRAPPED = "_fsdp_wrapped_module."


class CannotTakeOut(RuntimeError):
    """The script shards in a way that has no unsharded counterpart here."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} cannot be taken out of a script: give the unsharded training as --reference COMMAND")


class Replacement:
    """The functions that replace torch's sharding functions, with the replicas that they have made."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.replicas = Replicas(self._contributed)
        self.units: dict[int, tuple[nn.Module, Replica]] = {}

    def install(self) -> None:
        """Replace the functions for the rest of the process, before the script imports them."""
        function = self._fully_shard_function()
        self._show("fully_shard", function)
        ReplicatedInPlaceOfFSDP.replacement = self
        self._show("FullyShardedDataParallel", ReplicatedInPlaceOfFSDP)
        from torch.distributed.checkpoint import state_dict

        state_dict.FSDP = AsCheckpointsSeeIt  # type: ignore[assignment, attr-defined]
        from torch.distributed.tensor import parallel

        parallel.parallelize_module = _refusing("parallelize_module (tensor parallelism)")
        # Scripts ask these of the DTensors that they get from FSDP2.
        for name in ("full_tensor", "to_local"):
            setattr(Tensor, name, _itself)
        self._watch()

    @staticmethod
    def _show(name: str, value: object) -> None:
        """Put a value in every module of torch that has this name."""
        original = getattr(fsdp, name)
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("torch.") and vars(module).get(name) is original:
                setattr(module, name, value)

    def _watch(self) -> None:
        """Average after each backward; start the replicas before the first forward; clear what the script clears."""
        backward = torch.autograd.backward
        is_inside = False

        @functools.wraps(backward)
        def averaging(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside:
                return backward(*args, **kwargs)
            is_inside = True
            try:
                self.replicas.before_backward()
                result = backward(*args, **kwargs)
                self.replicas.after_backward()
                return result
            finally:
                is_inside = False

        torch.autograd.backward = averaging
        for owner, parameters_of in ((Optimizer, _parameters_in), (nn.Module, nn.Module.parameters)):
            owner.zero_grad = self._clearing(owner.zero_grad, parameters_of)  # type: ignore[method-assign]
        self._observer.before_forward = self.replicas.start

    def _clearing(self, original: Any, parameters_of: Callable[[Any], Iterable[Tensor]]) -> Any:
        @functools.wraps(original)
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> None:
            original(owner, *args, **kwargs)
            self.replicas.clear(parameters_of(owner))

        return zero_grad

    def _contributed(self, gradients: dict[int, Tensor]) -> None:
        observer = self._observer
        if observer.sharding == "taken out":
            observer.contributions = observer.named_gradients(gradients)

    def replicate(
        self, modules: list[nn.Module], *, group: Any, device: torch.device | None, ignored: Any = (), **options: Any
    ) -> Replica:
        """Replicate modules in place of sharding them."""
        self._observer.replaced += 1
        if device is not None:
            left_out = {id(tensor) for tensor in ignored or ()}
            for tensor in [item for module in modules for item in (*module.parameters(), *module.buffers())]:
                if not tensor.is_meta and tensor.device != device and id(tensor) not in left_out:
                    tensor.data = tensor.to(device)
        return self.replicas.add(modules, ignored or (), group=group, **options)

    def _fully_shard_function(self) -> Callable[..., Any]:
        original = fsdp.fully_shard

        @functools.wraps(original)
        def fully_shard(module: Any, *, mesh: DeviceMesh | None = None, **options: Any) -> Any:
            modules = [module] if isinstance(module, nn.Module) else list(module)
            group = _group_of(mesh, options.get("dp_mesh_dims"))
            policy = options.get("mp_policy") or fsdp.MixedPrecisionPolicy()
            offload = options.get("offload_policy")
            device = None if isinstance(offload, fsdp.CPUOffloadPolicy) else _device(mesh)
            replica = self.replicate(
                modules,
                group=group,
                device=device,
                ignored=options.get("ignored_params"),
                reduce_dtype=_reduce_dtype(policy),
                starts_with_rank0=False,
                is_flat=False,
            )
            for each in modules:
                self.units[id(each)] = (each, replica)
            rounding = Rounding(
                param_dtype=policy.param_dtype,
                output_dtype=policy.output_dtype,
                casts_inputs=policy.cast_forward_inputs,
            )
            for each in modules:
                inner = owned_modules([each], lambda child: id(child) in self.units)
                rounding.install(each, inner)
            for each in modules:
                kind = type(each)
                # As FSDP2 does, so that the script's own checks hold.
                each.__class__ = type(f"FSDP{kind.__name__}", (_ReplicatedModule, kind), {"_replacement": self})
            return module

        return fully_shard


def _reduce_dtype(policy: Any) -> torch.dtype | None:
    """The dtype in which gradients are reduced under a policy of FSDP1 or FSDP2: by default, that of the parameters."""
    dtype: torch.dtype | None = getattr(policy, "reduce_dtype", None) or getattr(policy, "param_dtype", None)
    return dtype


class _ReplicatedModule(fsdp.FSDPModule):
    """Has the methods of FSDP2's modules. Those that only change when something is communicated do nothing."""

    _replacement: Replacement

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # A copy of the module is made by its own class.
        return object.__new__(cls)

    def _replicas(self, recurse: bool) -> Iterator[Replica]:
        for module in self.modules() if recurse else [self]:  # type: ignore[attr-defined]
            unit = self._replacement.units.get(id(module))
            if unit is not None:
                yield unit[1]

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        for replica in self._replicas(recurse):
            replica.synchronises = requires_gradient_sync
        self._replacement._observer.is_reduced = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        # Gradients that are not reduced over replicas yet are sums to be reduced later, as without any reduction.
        for replica in self._replicas(recurse):
            replica.synchronises = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float) -> None:
        for replica in self._replicas(recurse=False):
            replica.factor = factor

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def unshard(self, async_op: bool = False) -> Any:
        return _Done() if async_op else None

    def reshard(self) -> None:
        """Nothing is sharded."""

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        return nn.Module._apply(self, *args, **kwargs)  # type: ignore[arg-type,no-untyped-call]


class _Done:
    """A handle of something that is done."""

    def wait(self) -> None:
        """Return at once."""


def _nothing(self: object, *args: object, **kwargs: object) -> None:
    """Only changes when something is communicated."""


for _name in dir(fsdp.FSDPModule):
    if (_name.startswith("set_") or _name == "reset_iter_state") and _name not in vars(_ReplicatedModule):
        setattr(_ReplicatedModule, _name, _nothing)


class ReplicatedInPlaceOfFSDP(nn.Module):
    """Has the interface of FSDP1's wrapper. Its parameters, gradients and state dicts are the module's own."""

    replacement: Replacement
    num_summoned = 0
    """How many `summon_full_params` are open."""

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: Any = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: Any = None,
        mixed_precision: Any = None,
        ignored_modules: Any = None,
        param_init_fn: Any = None,
        device_id: Any = None,
        sync_module_states: bool = False,
        *,
        ignored_states: Any = None,
        device_mesh: DeviceMesh | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if param_init_fn is not None:
            for each in module.modules():
                if any(tensor.is_meta for tensor in (*each.parameters(False), *each.buffers(False))):
                    param_init_fn(each)
        ignored = list(ignored_states or ())
        left_out = [item for item in (*(ignored_modules or ()), *ignored) if isinstance(item, nn.Module)]
        tensors = [item for item in ignored if isinstance(item, Tensor)]
        tensors += [parameter for item in left_out for parameter in item.parameters()]
        group = _group_of(device_mesh, None) if device_mesh is not None else process_group
        device = torch.device(device_id) if isinstance(device_id, str | torch.device) else None
        if isinstance(device_id, int):
            device = torch.device(str(torch.accelerator.current_accelerator() or "cuda"), device_id)
        self.replica = self.replacement.replicate(
            [module],
            group=group if not isinstance(group, tuple) else None,
            device=device,
            ignored=tensors,
            reduce_dtype=_reduce_dtype(mixed_precision),
            starts_with_rank0=sync_module_states,
            is_flat=True,
        )
        if mixed_precision is not None:
            exempt = tuple(mixed_precision._module_classes_to_ignore)
            modules = owned_modules([module], lambda child: child in left_out)
            Rounding(
                param_dtype=mixed_precision.param_dtype,
                casts_inputs=mixed_precision.cast_forward_inputs or mixed_precision.cast_root_forward_inputs,
            ).install(module, [each for each in modules if not isinstance(each, exempt)])
        self.sharding_strategy = sharding_strategy or fsdp.ShardingStrategy.FULL_SHARD
        self.process_group = self._group_in(group)
        self.mixed_precision = mixed_precision or fsdp.MixedPrecision()
        self.cpu_offload = cpu_offload or fsdp.CPUOffload()
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = bool(options.get("forward_prefetch"))
        self.limit_all_gathers = bool(options.get("limit_all_gathers", True))
        self.compute_device = device or next((each.device for each in module.parameters()), torch.device("cpu"))
        self.training_state = TrainingState.IDLE
        self._use_orig_params = bool(options.get("use_orig_params"))
        self._is_root = True
        for each in self.fsdp_modules(module):
            each._is_root = False  # type: ignore[assignment]
        self._fsdp_wrapped_module = module
        owned = owned_modules([module], lambda child: isinstance(child, ReplicatedInPlaceOfFSDP))
        own = {id(parameter) for each in owned for parameter in each.parameters(recurse=False)}
        self._flat_param = FlatParameterInPlace([item for item in module.named_parameters() if id(item[1]) in own])
        self._handle = SimpleNamespace()
        self.register_load_state_dict_pre_hook(self._with_wrapper_in_names)  # type: ignore[no-untyped-call]

    @staticmethod
    def _group_in(group: Any) -> Any:
        """The one group of ranks, of what FSDP1 takes: a group, or one to shard in and one to replicate over."""
        if group is not None and not isinstance(group, tuple):
            return group
        return dist.group.WORLD if dist.is_initialized() else None

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    @property
    def rank(self) -> int:
        """This process's rank in its group."""
        return dist.get_rank(self.process_group)

    @property
    def world_size(self) -> int:
        """The size of its group."""
        return dist.get_world_size(self.process_group)

    def check_is_root(self) -> bool:
        """True if no other wrapper has it inside."""
        return self._is_root

    def register_comm_hook(self, *args: object, **kwargs: object) -> None:
        """Refuse: gradients are averaged in float32, without a hook."""
        raise CannotTakeOut("register_comm_hook of FullyShardedDataParallel")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._start(self)
        self._flat_param.cast_parameters()
        return self._fsdp_wrapped_module(*args, **kwargs)

    @property
    def _has_params(self) -> bool:
        return bool(self._flat_param)

    @classmethod
    def _start(cls, module: nn.Module) -> None:
        """Give the buffers their dtype, as FSDP1 does in the first of several calls."""
        for each in (module for module in module.modules() if isinstance(module, cls)):
            dtype = each.mixed_precision.buffer_dtype
            for buffer in each._fsdp_wrapped_module.buffers() if dtype is not None else ():
                if buffer.is_floating_point() and buffer.dtype is not dtype:
                    buffer.data = buffer.to(dtype)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_fsdp_wrapped_module"), name)

    def __getitem__(self, key: int) -> Any:
        return self._fsdp_wrapped_module[key]  # type: ignore[index]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Average nothing in the block."""
        self._start(self)
        observer, before = self.replacement._observer, self.replica.synchronises
        self.replica.synchronises = observer.is_reduced = False
        try:
            yield
        finally:
            self.replica.synchronises = observer.is_reduced = before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all parameters."""
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, without the wrapper in its names."""
        self._start(self)
        return self._fsdp_wrapped_module.state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        # As FSDP1 does: scripts that put parameters into groups join the names of modules with those of parameters.
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield _clean(name) if self.num_summoned else name, parameter

    @staticmethod
    def _with_wrapper_in_names(module: nn.Module, state: dict[str, Any], prefix: str, *args: object) -> None:
        for name in [name for name in state if name.startswith(prefix)]:
            rest = name[len(prefix) :]
            if not rest.startswith(_WRAPPED):
                state[f"{prefix}{_WRAPPED}{rest}"] = state.pop(name)

    @classmethod
    def fsdp_modules(cls, module: nn.Module, root_only: bool = False) -> Sequence[nn.Module]:
        """The wrappers in a module."""
        return [each for each in module.modules() if isinstance(each, cls)][: 1 if root_only else None]

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(module: nn.Module, *args: object, **kwargs: object) -> Iterator[None]:
        """Parameters are always whole. Inside, their names are those of the model, as with FSDP1."""
        ReplicatedInPlaceOfFSDP._start(module)
        ReplicatedInPlaceOfFSDP.num_summoned += 1
        try:
            yield
        finally:
            ReplicatedInPlaceOfFSDP.num_summoned -= 1

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(module: nn.Module, *args: object, **kwargs: object) -> Iterator[None]:
        """There is one type."""
        yield

    @staticmethod
    def set_state_dict_type(*args: object, **kwargs: object) -> None:
        """There is one type."""

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> Any:
        """State dicts are whole."""
        return fsdp.StateDictSettings(
            fsdp.StateDictType.FULL_STATE_DICT, fsdp.FullStateDictConfig(), fsdp.FullOptimStateDictConfig()
        )

    @staticmethod
    def optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The optimizer's state by parameters' names."""
        names = {id(parameter): _clean(name) for name, parameter in model.named_parameters()}
        state = optim.state_dict()
        order = [names[id(parameter)] for group in optim.param_groups for parameter in group["params"]]
        groups = [{**group, "params": [order[index] for index in group["params"]]} for group in state["param_groups"]]
        return {"state": {order[index]: value for index, value in state["state"].items()}, "param_groups": groups}

    full_optim_state_dict = sharded_optim_state_dict = optim_state_dict

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """The inverse of `optim_state_dict`."""
        names = {id(parameter): _clean(name) for name, parameter in model.named_parameters()}
        order = [names[id(parameter)] for group in optim.param_groups for parameter in group["params"]]
        numbers = {name: index for index, name in enumerate(order)}
        groups = [
            {**group, "params": [numbers[name] for name in group["params"]]}
            for group in optim_state_dict["param_groups"]
        ]
        state = {numbers[name]: value for name, value in optim_state_dict["state"].items()}
        return {"state": state, "param_groups": groups}


class _Wrappers(type):
    """Instances are the wrappers."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, ReplicatedInPlaceOfFSDP)


class AsCheckpointsSeeIt(metaclass=_Wrappers):
    """FSDP1 for `torch.distributed.checkpoint.state_dict`: the names have wrappers, and nothing is sharded."""

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[nn.Module]:
        """No module has a shard."""
        return []


def _clean(name: str) -> str:
    return name.replace(_WRAPPED, "")


def _group_of(mesh: DeviceMesh | None, dims: Any) -> Any:
    """The process group of all ranks of a mesh. Raises CannotTakeOut for a mesh that is a part of a larger one."""
    if mesh is None:
        return None
    if dims is not None:
        raise CannotTakeOut("fully_shard with dp_mesh_dims")
    ranks = sorted(mesh.mesh.flatten().tolist())
    if ranks != list(range(dist.get_world_size())):
        raise CannotTakeOut("fully_shard over a part of the ranks (tensor or pipeline parallelism)")
    return None


def _device(mesh: DeviceMesh | None) -> torch.device:
    if mesh is not None:
        kind = mesh.device_type
    else:
        # As FSDP2's own default mesh.
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kind = accelerator.type if accelerator is not None else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _refusing(what: str) -> Callable[..., Any]:
    def refuse(*args: object, **kwargs: object) -> Any:
        raise CannotTakeOut(what)

    return refuse


def _parameters_in(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _itself(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
    """A replicated tensor is whole and local."""
    return tensor
