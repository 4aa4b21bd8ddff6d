"""
Replicated training: every rank holds the whole module, and gradients are averaged during backward.

    model = DataParallel(module)
    for batch in batches:
        loss(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

The interface and the contract are those of torch's DistributedDataParallel, except where these let a run continue with
wrong numbers:

  - Parameters may be frozen or unfrozen between iterations.
  - The wrapped module may be moved or cast (`model.to(...)`). Replacing a parameter raises an error.
  - Two forwards followed by two backwards, or several backwards of one forward, are averaged once each.
  - If parameters differ between ranks, every rank raises an error that names them.
  - After an exception in backward on all ranks, training can continue with the next forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, SupportsIndex, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn import parameter as nn_parameter
from torch.utils import _python_dispatch

from fsdp_conformance.engine.accelerator import present_accelerator
from fsdp_conformance.engine.bucketing.broadcast import broadcast
from fsdp_conformance.engine.bucketing.bucket_assignment import DEFAULT_LIMITS, MIB
from fsdp_conformance.engine.communication import resolve_group
from fsdp_conformance.engine.data_parallel.communication_hook import Hook
from fsdp_conformance.engine.data_parallel.join import RollCall, agreed_rank
from fsdp_conformance.engine.data_parallel.reducer import Reducer, ReducerConfig
from fsdp_conformance.engine.errors import ParameterReplaced
from fsdp_conformance.engine.structures import tensors_in, with_tensors
from fsdp_conformance.engine.verification import verify_parameters
from fsdp_conformance.errors import ConfigError, Unsupported

_preserve_version_counter: Any = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]


class _Place(NamedTuple):
    """Where a parameter is registered."""

    registry: dict[str, nn.Parameter | None]
    key: str
    name: str
    parameter: nn.Parameter


class DataParallel(nn.Module, Joinable):
    """
    A module whose gradients are averaged over the ranks of a group. The constructor is collective.

    It broadcasts the parameters and buffers of the group's first rank. Buffers are broadcast again before a forward
    that follows a synchronised one (so once for several micro-batches under `no_sync`), as DistributedDataParallel
    does. Names in state dicts start with `module.`.

    Raises ConfigError for invalid options and for a module on several devices, Unsupported for parameters that cannot
    be averaged, and StructureMismatch, on every rank, if parameters differ between ranks.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | None = None,
        *,
        device_id: int | torch.device | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float | Sequence[float] | None = None,
        ignored_names: Collection[str] = (),
        sync_module_states: bool = True,
    ) -> None:
        """
        `process_group`: None is the default group. `device_id`: moves the module, and the inputs of every forward, to
        this device; an int is an index of the current accelerator. `bucket_cap_mb`: the limit of a bucket in MiB, or
        of the first, second, ... bucket, of which the last repeats; None is 1 for the first and 25 for the others.
        `ignored_names`: parameters and buffers that are never communicated. `sync_module_states=False`: broadcast
        nothing here, because parameters are already equal. The other options are those of `ReducerConfig`.
        """
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self.module = module
        self.process_group: ProcessGroup = resolve_group(process_group)
        self._config = ReducerConfig(
            bucket_limits=_limits(bucket_cap_mb),
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
        )
        self._broadcast_buffers = broadcast_buffers
        self._ignored_names = frozenset(ignored_names)
        self._options: dict[str, Any] = {
            "device_id": device_id,
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "broadcast_buffers": broadcast_buffers,
            "bucket_cap_mb": bucket_cap_mb,
            "ignored_names": tuple(ignored_names),
        }
        self._input_device = None if device_id is None else _device(device_id)
        if self._input_device is not None:
            module.to(self._input_device)
        self._synchronise = True
        self._buffers_due = True
        self._divide_by_initial_world_size = True
        self._hook: tuple[object, Hook] | None = None
        # The reducer at the last forward under no_sync, and its number of reductions then.
        self._deferred_at: tuple[Reducer, int] | None = None
        self._reducer: Reducer | None = None
        self._note_parameters()
        _check(self.module, self._ignored_names, self._managed)
        self._device = self._input_device or torch.device("cpu")
        self._renew_reducer(verify=sync_module_states)
        if sync_module_states:
            tensors: list[Tensor] = [parameter for _, parameter in self._managed]
            broadcast([*tensors, *self._current_buffers()], self.process_group)

    # --- training ----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. Collective if buffers are broadcast or buckets rebuilt."""
        with record_function("DataParallel::before_forward"):
            keeps_graph = torch.is_grad_enabled()
            self._before_forward(keeps_graph)
            if self._input_device is not None:
                # Streams order what follows a copy to a device; nothing orders the host after a copy to the CPU.
                overlaps = self._input_device.type != "cpu"
                move = partial(Tensor.to, device=self._input_device, non_blocking=overlaps)
                args, kwargs = with_tensors((args, kwargs), move)
        output = self.module(*args, **kwargs)
        with record_function("DataParallel::after_forward"):
            self._buffers_due = keeps_graph and self._synchronise
            if keeps_graph:
                self.reducer.prepare_for_backward(tensors_in(output), synchronise=self._synchronise)
                if not self._synchronise:
                    self._deferred_at = (self.reducer, self.reducer.reductions)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """
        The backward of a forward in this context adds to this rank's gradients and reduces nothing.

        The next synchronised backward averages everything that was accumulated.
        """
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Let `hook(state, bucket)` reduce: see `Reducer.register_comm_hook`."""
        self.reducer.register_comm_hook(state, hook)
        self._hook = (state, hook)

    def reset(self) -> None:
        """
        Drop a reduction that began and cannot end. After an exception, the next forward calls this.

        All ranks must have issued the same collectives, as they have if each raised the exception at the same place.
        Otherwise a new process group is needed.
        """
        self.reducer.reset()

    @property
    def reducer(self) -> Reducer:
        """Averages the gradients. Replaced when parameters are frozen, unfrozen, moved or cast."""
        assert self._reducer is not None, "the constructor makes one"
        return self._reducer

    def _before_forward(self, keeps_graph: bool) -> None:
        sends_buffers = self._buffers_due and self._broadcast_buffers and bool(self._buffer_places)
        roll: RollCall | None = None
        if self._join_config.enable:
            Join.notify_join_context(self)
            roll = RollCall(
                self.process_group,
                self._device,
                present=True,
                keeps_graph=keeps_graph,
                synchronises=keeps_graph and self._synchronise,
                broadcasts=sends_buffers,
            )
        if keeps_graph:
            self._follow_changes()
            self.reducer.prepare_for_forward()
            divisor = None if roll is None or self._divide_by_initial_world_size else partial(_number_present, roll)
            self.reducer.set_divisor(divisor)
        if sends_buffers:
            self._send_buffers(roll.present[-1] if roll is not None else 0)

    def _send_buffers(self, source: int) -> None:
        buffers = self._current_buffers()
        # The graph of an earlier forward may have saved them; autograd must not reject its backward for the new values.
        with ExitStack() as versions:
            for buffer in buffers:
                versions.enter_context(_preserve_version_counter(buffer))
            broadcast(buffers, self.process_group, source=source)

    def _current_buffers(self) -> list[Tensor]:
        """The buffers that are registered now: a forward may have replaced some."""
        return [buffer for registry, key in self._buffer_places if (buffer := registry.get(key)) is not None]

    def __getattr__(self, name: str) -> Any:
        """
        The module's own attributes, if they are data.

        Methods and submodules bypass the wrapper, so the gradients of their backward stay on this rank. They are only
        available through `.module`.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or not hasattr(self.module, name):
                raise
        value = getattr(self.module, name)
        if callable(value):
            raise AttributeError(
                f"{name} of {type(self.module).__name__} bypasses DataParallel, so the gradients of its backward stay "
                f"on this rank until a forward of the wrapper is reduced: use .module.{name} if that is intended"
            )
        return value

    def __getitem__(self, key: object) -> Any:
        """The module's item, if it is a container."""
        return cast(Any, self.module)[key]

    # --- what may change between iterations --------------------------------------------------------------------------

    def _note_parameters(self) -> None:
        """Find where parameters and buffers are registered, each under the first of its names."""
        places: dict[int, _Place] = {}
        buffers: dict[int, tuple[dict[str, Tensor | None], str]] = {}
        self._sparse: set[str] = set()
        for path, owner in self.module.named_modules():
            for key, parameter in owner._parameters.items():
                name = f"{path}.{key}" if path else key
                if parameter is None or name in self._ignored_names:
                    continue
                place = places.setdefault(id(parameter), _Place(owner._parameters, key, name, parameter))
                if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.sparse:
                    self._sparse.add(place.name)
            for key, buffer in owner._buffers.items():
                if buffer is not None and (f"{path}.{key}" if path else key) not in self._ignored_names:
                    buffers.setdefault(id(buffer), (owner._buffers, key))
        self._places = list(places.values())
        self._buffer_places = list(buffers.values())
        self._managed = [(place.name, place.parameter) for place in self._places]

    def _follow_changes(self) -> None:
        """Renew the reducer if parameters changed, as they must have on every rank. Collective if they did."""
        replaced = [place.name for place in self._places if place.registry.get(place.key) is not place.parameter]
        if replaced:
            raise ParameterReplaced(
                f"parameters were replaced after the module was wrapped: {', '.join(replaced)}",
                where="DataParallel.forward",
                hint="Wrap the module again.",
            )
        reduced = self._keeps_frozen and not self._has_deferred()
        if reduced or self._traits() != self._noted_traits:
            if self._join_config.enable:
                raise Unsupported("frozen_dynamic", "parameters were frozen, unfrozen, moved or cast inside join()")
            self.reducer.expect_finished()
            self._renew_reducer(verify=True)

    def _has_deferred(self) -> bool:
        """True if gradients of this step are still to be reduced. The answer is the same on every rank."""
        return self._reducer is not None and self._deferred_at == (self._reducer, self._reducer.reductions)

    def _traits(self) -> list[tuple[bool, torch.dtype, torch.device]]:
        return [(parameter.requires_grad, parameter.dtype, parameter.device) for _, parameter in self._managed]

    def _renew_reducer(self, *, verify: bool) -> None:
        """Make a reducer for the parameters that have, or will get, gradients to average. Collective with `verify`."""
        old_reducer = self._reducer
        kept_names: frozenset[str] = frozenset()
        used_names: list[str] = []
        if old_reducer is not None:
            used_names = old_reducer.used_names()
            if self._has_deferred():
                # They may be frozen now, but have gradients of this step to reduce.
                kept_names = frozenset(old_reducer.names)
            old_reducer.close()
        if self._managed:
            self._device = self._managed[0][1].device
        if verify:
            verify_parameters(self._managed, self.process_group, device=self._device)
        named = [
            (name, parameter) for name, parameter in self._managed if parameter.requires_grad or name in kept_names
        ]
        self._reducer = Reducer(
            named, self.process_group, config=self._config, sparse=self._sparse & {name for name, _ in named}
        )
        self._reducer.mark_used(used_names)
        if kept_names:
            self._deferred_at = (self._reducer, 0)
        self._keeps_frozen = any(not parameter.requires_grad for _, parameter in named)
        if self._hook is not None:
            self._reducer.register_comm_hook(*self._hook)
        self._noted_traits = self._traits()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DataParallel:
        """
        Move or cast, as `.to()` and `.double()` do. Not collective: one rank alone may do it, to save a model.

        If this changes the parameter objects, or their traits, the next forward makes a new reducer.
        """
        before = [parameter for _, parameter in self._managed]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._note_parameters()
        after = [parameter for _, parameter in self._managed]
        if any(old is not new for old, new in zip(before, after, strict=True)):
            self._noted_traits = []
        if self._input_device is not None and self._managed:
            self._input_device = self._managed[0][1].device
        return self

    # --- uneven inputs -----------------------------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """
        A context for ranks with different numbers of inputs, like DistributedDataParallel's `join`.

        A rank that leaves the loop early contributes zeros until the others have left it too; then all ranks copy the
        model of one that left last. Gradients are divided by the size of the group, or (with
        `divide_by_initial_world_size=False`) by the number of ranks that still have inputs. With
        `throw_on_early_termination` every rank raises as soon as one has run out.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook for torch's `Join`. Reads `divide_by_initial_world_size`; other options are for other joinables."""
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return _JoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device that the context communicates from."""
        return self._device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group that the context communicates over."""
        return self.process_group

    def shadow_iteration(self) -> None:
        """Take part in one iteration of the ranks that still have inputs. Collective."""
        roll = RollCall(self.process_group, self._device, present=False)
        if roll.keeps_graph:
            self.reducer.rebuild()
        if roll.broadcasts:
            self._send_buffers(roll.present[-1])
        self._buffers_due = roll.keeps_graph and roll.synchronises
        if roll.synchronises:
            self.reducer.shadow_backward()

    def adopt_last_model(self, *, is_last: bool) -> None:
        """Copy the model of a rank that joined last, and end the context. Collective."""
        source = agreed_rank(self.process_group, self._device, candidate=is_last)
        tensors: list[Tensor] = [parameter for _, parameter in self._managed]
        broadcast(tensors, self.process_group, source=source)
        if self._broadcast_buffers:
            self._send_buffers(source)
        self._join_config = self._join_config._replace(enable=False)
        self._divide_by_initial_world_size = True

    # --- copies ------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, object]) -> DataParallel:
        """A wrapper of a copy of the module, on the same group. Not collective."""
        self._refuse_copy()
        return _restored(type(self), copy.deepcopy(self.module, memo), self._options, self.training, self.process_group)

    def __reduce__(self) -> tuple[object, ...]:
        """For pickle: the module and the options. Unpickled on the default group. Not collective."""
        self._refuse_copy()
        if self.process_group is not dist.group.WORLD:
            raise Unsupported("copyable", "only a DataParallel on the default group can be pickled")
        return _restored, (type(self), self.module, self._options, self.training)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        return self.__reduce__()

    def __copy__(self) -> DataParallel:
        raise Unsupported("copyable", "two wrappers cannot share one module: use copy.deepcopy")

    def _refuse_copy(self) -> None:
        if self._hook is not None:
            raise Unsupported(
                "copyable",
                "a DataParallel with a communication hook cannot be copied: the hook's state belongs to one rank",
            )


class _JoinHook(JoinHook):
    """The part that a finished rank takes in the training of the others."""

    def __init__(self, wrapper: DataParallel) -> None:
        super().__init__()
        self._wrapper = wrapper

    def main_hook(self) -> None:
        self._wrapper.shadow_iteration()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._wrapper.adopt_last_model(is_last=is_last_joiner)


def _restored(
    kind: type[DataParallel],
    module: nn.Module,
    options: dict[str, Any],
    training: bool,
    process_group: ProcessGroup | None = None,
) -> DataParallel:
    """A wrapper with the options and the mode of the one that was copied."""
    wrapper = kind(module, process_group, **options, sync_module_states=False)
    wrapper.training = training
    return wrapper


def _number_present(roll: RollCall) -> int:
    return len(roll.present)


def _limits(bucket_cap_mb: float | Sequence[float] | None) -> tuple[int, ...]:
    """Bucket limits in bytes."""
    if bucket_cap_mb is None:
        return DEFAULT_LIMITS
    caps = [bucket_cap_mb] if isinstance(bucket_cap_mb, (int, float)) else list(bucket_cap_mb)
    if not caps or min(caps) < 0:
        raise ConfigError(
            [f"bucket_cap_mb must be one or more non-negative numbers of MiB, got {bucket_cap_mb}"], where=_WHERE
        )
    return tuple(int(cap * MIB) for cap in caps)


def _device(device_id: int | torch.device) -> torch.device:
    """The device, with an index unless it is the CPU."""
    if isinstance(device_id, int):
        accelerator = present_accelerator()
        if accelerator is None:
            problem = f"device_id must be a torch.device on a machine without an accelerator, got {device_id}"
            raise ConfigError([problem], where=_WHERE)
        return torch.device(accelerator.type, device_id)
    index: int | None = device_id.index
    if device_id.type == "cpu" or index is not None:
        return device_id
    return torch.device(device_id.type, torch.get_device_module(device_id.type).current_device())


def _check(module: nn.Module, ignored: Collection[str], managed: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise if a module cannot be replicated, with every reason."""
    wrapped = [name or "the module itself" for name, child in module.named_modules() if isinstance(child, _WRAPPERS)]
    existing_names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    existing_names |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    problems = []
    if getattr(type(module), "forward", None) is nn.Module.forward and "forward" not in vars(module):
        problems.append(f"module must have a forward, got a {type(module).__name__}, which has none")
    if wrapped:
        problems.append(f"module must not average gradients already, as {', '.join(wrapped)} does")
    if set(ignored) - existing_names:
        problems.append(
            f"ignored_names must be names of parameters or buffers, got {sorted(set(ignored) - existing_names)}"
        )
    devices: dict[str, list[str]] = {}
    for name, parameter in managed:
        devices.setdefault(str(parameter.device), []).append(name)
    if len(devices) > 1:
        where = "; ".join(f"{', '.join(names[:3])} on {device}" for device, names in devices.items())
        problems.append(f"parameters must be on one device, got {len(devices)}: {where}")
    if "meta" in devices:
        problems.append(f"parameters must have values, got {', '.join(devices['meta'][:3])} on the meta device")
    if problems:
        raise ConfigError(problems, where=_WHERE)
    lazy = [name for name, parameter in managed if _is_lazy(parameter)]
    if lazy:
        raise Unsupported("meta_init", f"{', '.join(lazy)} have no shape yet: run a forward first")
    foreign = [name for name, parameter in managed if _is_subclass(parameter)]
    if foreign:
        raise Unsupported("tp", f"{', '.join(foreign)} are tensor subclasses such as DTensor, which cannot be averaged")


#: Untyped, because mypy believes that no parameter is either.
_is_lazy: Callable[[Any], bool] = nn_parameter.is_lazy
_is_subclass: Callable[[object], bool] = _python_dispatch.is_traceable_wrapper_subclass
_WHERE = "DataParallel"
_WRAPPERS = (DataParallel, nn.parallel.DistributedDataParallel)
