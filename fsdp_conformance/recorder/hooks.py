"""
The places in torch where a training loop is seen: calls of modules, backwards, clipping, optimizer steps, files.

`nn.Module.__call__` is replaced only while no module is being called, so inner modules run as always, also under
torch.compile.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp_conformance.recorder import megatron
from fsdp_conformance.recorder.gradient_hooks import counted
from fsdp_conformance.recorder.lines import is_of_script
from fsdp_conformance.recorder.observer import Observer
from fsdp_conformance.recorder.originals import Owned, owned_by
from fsdp_conformance.recordings.events import ALIAS
from fsdp_conformance.simulator.import_hook import when_imported
from fsdp_conformance.simulator.replacements import Replacements

__all__ = ["Hooks"]

#: The methods of FSDP2's modules that set what sums of gradients are divided by. Torch 2.6 has only the second one.
DIVIDES = ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor")

#: The observer of this process: hooks of modules, which are copied and saved with them, find it here.
_current: Observer | None = None


class Hooks:
    """The hooks of an observer, until `remove`."""

    def __init__(self, observer: Observer) -> None:
        global _current
        _current = observer
        self._observer = observer
        self._guard = observer.guard
        self._replaced = Replacements()
        try:
            self._install()
        except BaseException:
            self.remove()
            raise

    def _install(self) -> None:
        observer = self._observer
        self._forget_in_forks()
        self._watch_modules()
        self._replace(torch.autograd, "backward", self._backward)
        # `torch.nn.utils.clip_grad` is the module of the function that `torch.nn.utils` shows.
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            self._replace(owner, "clip_grad_norm_", self._clip)
        self._replace(torch.nn.functional, "cross_entropy", self._cross_entropy)
        self._replace(Tensor, "register_hook", self._counted)
        self._watch_scaler(torch.amp.GradScaler)
        self._replace(Optimizer, "zero_grad", functools.partial(self._marked, "clear"))
        self._replace(nn.Module, "zero_grad", functools.partial(self._marked, "clear"))
        self._replace(nn.Module, "load_state_dict", self._loading_module)
        self._replace(Optimizer, "load_state_dict", self._loading)
        for name in ("save", "load"):
            self._replace(torch, name, functools.partial(self._marked, name))
        self._replaced.on_undo(register_optimizer_step_pre_hook(self._before_step).remove)
        self._replaced.on_undo(register_optimizer_step_post_hook(self._after_step).remove)
        self._replaced.on_undo(when_imported("deepspeed", self._watch_deepspeed))
        self._replaced.on_undo(
            when_imported(megatron.PACKAGE, lambda: megatron.watch(observer, self._replace, watch_unit))
        )
        if torch.distributed.is_available():
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            self._watch_scaler(ShardedGradScaler)
            self._replace(torch.distributed, "destroy_process_group", self._leaving)
            self._watch_sharding()
            self._watch_data()
            observer.traffic.watch(self._replace)

    def _forget_in_forks(self) -> None:
        """
        A forked process records nothing: it must not even look at tensors, as the threads that would compute with them
        exist in its parent alone.
        """
        mine = weakref.ref(self)

        def forget() -> None:
            hooks = mine()
            if hooks is not None and _current is hooks._observer:
                hooks.remove()

        os.register_at_fork(after_in_child=forget)

    def remove(self) -> None:
        """Put everything back."""
        global _current
        self._replaced.undo()
        _current = None

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._replaced.set(owner, **{name: make(getattr(owner, name))})

    def _watch_modules(self) -> None:
        original = nn.Module.__call__
        observer, guard = self._observer, self._guard
        lock = threading.Lock()
        calls = 0

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if not guard.run(observer.watches, module):
                return original(module, *args, **kwargs)
            with lock:
                calls += 1
                nn.Module.__call__ = original  # type: ignore[method-assign]
            try:
                return guard.around(
                    lambda call: observer.forward(module, call, args, kwargs), original, module, *args, **kwargs
                )
            finally:
                with lock:
                    calls -= 1
                    if not calls and not is_over:
                        nn.Module.__call__ = call  # type: ignore[method-assign]

        is_over = False

        def undo() -> None:
            nonlocal is_over
            is_over = True
            nn.Module.__call__ = original  # type: ignore[method-assign]

        nn.Module.__call__ = call  # type: ignore[method-assign]
        self._replaced.on_undo(undo)

    def _backward(self, original: Any) -> Any:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            return self._guard.around(
                lambda call: self._observer.backward(tensors, lambda: call(tensors, *args, **kwargs)),
                original,
                tensors,
                *args,
                **kwargs,
            )

        return backward

    def _clip(self, original: Any) -> Any:
        @functools.wraps(original)
        def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
            # A generator can be read once.
            tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            return self._clipped(original, tensors, max_norm, norm_type, *args, **kwargs)

        return clip_grad_norm_

    def _clipped(
        self, original: Any, gradients_of: Any, max_norm: float, norm_type: float, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a function that clips, and record it. `gradients_of`: its first argument."""
        return self._guard.around(
            lambda call: self._observer.clip(
                lambda: call(gradients_of, max_norm, norm_type, *args, **kwargs),
                float(max_norm),
                float(norm_type),
                gradients_of if isinstance(gradients_of, list) else None,
            ),
            original,
            gradients_of,
            max_norm,
            norm_type,
            *args,
            **kwargs,
        )

    def _watch_deepspeed(self) -> None:
        from fsdp_conformance.recorder.deepspeed_engine import DeepSpeedHooks

        DeepSpeedHooks(self._observer, self._replace)

    def _cross_entropy(self, original: Any) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def cross_entropy(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not torch.compiler.is_compiling():
                self._guard.run(note_mean, result, args, kwargs)
            return result

        def note_mean(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            target = call.arguments["target"]
            # Distributed, fake and batched tensors have no values to be counted here.
            is_plain = type(target) is type(result) is Tensor and not is_functorch_wrapped_tensor(target)
            reduction = call.arguments["reduction"]
            if is_plain and reduction in ("mean", "sum") and not target.is_floating_point():
                targets = (target != call.arguments["ignore_index"]).sum()
                self._observer.mean(result, targets, is_sum=reduction == "sum")

        return cross_entropy

    def _counted(self, original: Any) -> Any:
        @functools.wraps(original)
        def register_hook(tensor: Tensor, hook: Any) -> Any:
            return original(tensor, counted(tensor, hook))

        return register_hook

    def _marked(self, kind: str, original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._guard.run(self._observer.mark, kind)
            return original(*args, **kwargs)

        return call

    def _watch_scaler(self, kind: type[torch.amp.GradScaler]) -> None:
        def scale(original: Any) -> Any:
            @functools.wraps(original)
            def call(scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
                result = original(scaler, *args, **kwargs)
                self._guard.run(note_scale, scaler)
                return result

            return call

        def note_scale(scaler: torch.amp.GradScaler) -> None:
            # One that is not enabled has none. `get_scale()` would wait for the device.
            scale = getattr(scaler, "_scale", None)
            self._observer.scale = scale.detach().clone() if isinstance(scale, Tensor) else None

        self._replace(kind, "scale", scale)
        self._replace(kind, "unscale_", functools.partial(self._marked, "unscale"))

    def _loading_module(self, original: Any) -> Any:
        @functools.wraps(original)
        def load_state_dict(module: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            self._guard.run(note_load, module, state_dict)
            return original(module, state_dict, *args, **kwargs)

        def note_load(module: nn.Module, state: Any) -> None:
            own = {address(parameter) for parameter in module.parameters()} - {None}
            given = state.values() if isinstance(state, Mapping) else ()
            is_alias = bool(own) and own.issubset(map(address, given))
            self._observer.mark("load state", ALIAS if is_alias else "")

        def address(tensor: object) -> int | None:
            local = getattr(tensor, "_local_tensor", tensor)
            if not isinstance(local, Tensor) or local.is_meta or not local.numel():
                return None
            return local.data_ptr()

        return load_state_dict

    def _loading(self, original: Any) -> Any:
        @functools.wraps(original)
        def load_state_dict(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self._guard.run(self._observer.loads, optimizer)
            original(optimizer, *args, **kwargs)

        return load_state_dict

    def _leaving(self, original: Any) -> Any:
        @functools.wraps(original)
        def destroy_process_group(group: Any = None) -> None:
            if group in (None, torch.distributed.group.WORLD):
                self._guard.run(self._observer.leave)
            original(group)

        return destroy_process_group

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Called with the arguments of `step`, `args` with the optimizer. Returns those to use instead, if any."""
        is_named = "closure" in kwargs
        closure = kwargs["closure"] if is_named else next(iter(args[1:]), None)
        caller = sys._getframe(1)
        self._guard.run(self._observer.before_step, optimizer, frame=caller, has_closure=callable(closure))
        if not callable(closure):
            return None

        @functools.wraps(closure)
        def call() -> Any:
            result = closure()
            self._guard.run(self._observer.after_closure, optimizer)
            return result

        return (args, {**kwargs, "closure": call}) if is_named else ((args[0], call, *args[2:]), kwargs)

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._guard.run(self._observer.after_step, optimizer)

    def _watch_data(self) -> None:
        """See where `.data` of a DTensor is assigned, which has no effect."""
        from torch.distributed.tensor import DTensor

        def data(original: Any) -> property:
            def assign(tensor: DTensor, value: Tensor) -> None:
                # By the script: torch knows better.
                if is_of_script(sys._getframe(1).f_code.co_filename):
                    self._guard.run(note_data, tensor, value)
                original.__set__(tensor, value)

            return property(original.__get__, assign)

        def note_data(tensor: DTensor, value: Tensor) -> None:
            local = value.to_local() if isinstance(value, DTensor) else value
            if isinstance(tensor, nn.Parameter) and local.data_ptr() != tensor.to_local().data_ptr():
                self._observer.mark("data")

        self._replace(DTensor, "data", data)

    def _watch_sharding(self) -> None:
        """See which modules become units, and when FSDP2 is told not to reduce gradients."""
        from torch.distributed import fsdp

        def fully_shard(original: Any) -> Any:
            @functools.wraps(original)
            def wrapped(module: Any, *args: Any, **kwargs: Any) -> Any:
                units = [module] if isinstance(module, nn.Module) else list(module)
                self._guard.run(self._observer.wrapping, units)
                before = self._guard.run(owned_by, units)
                result = original(module, *args, **kwargs)
                self._guard.run(self._observer.originals.add_replaced, before or ())
                for unit in units:
                    watch_unit(unit)
                    self._guard.run(self._observer.shards.remember, unit)
                return result

            # `fully_shard.state(module)` gives a module's state.
            return wrapped

        def set_requires_gradient_sync(original: Any) -> Any:
            @functools.wraps(original)
            def wrapped(module: Any, requires_gradient_sync: bool, *args: Any, **kwargs: Any) -> Any:
                self._observer.is_reduced = requires_gradient_sync
                return original(module, requires_gradient_sync, *args, **kwargs)

            return wrapped

        def set_reshard_after_backward(original: Any) -> Any:
            @functools.wraps(original)
            def wrapped(module: Any, reshard_after_backward: bool, *args: Any, **kwargs: Any) -> Any:
                self._guard.run(lambda: self._observer.mark("reshard", str(bool(reshard_after_backward))))
                return original(module, reshard_after_backward, *args, **kwargs)

            return wrapped

        def set_divide_factor(original: Any) -> Any:
            @functools.wraps(original)
            def wrapped(module: Any, factor: float) -> Any:
                self._guard.run(lambda: self._observer.mark("divide factor", str(float(factor))))
                return original(module, factor)

            return wrapped

        def clip_grad_norm_(original: Any) -> Any:
            @functools.wraps(original)
            def wrapped(module: Any, max_norm: float, norm_type: float = 2.0) -> Any:
                return self._clipped(original, module, max_norm, norm_type)

            return wrapped

        def init(original: Any) -> Any:
            @functools.wraps(original)
            def wrapped(wrapper: Any, /, *args: Any, **kwargs: Any) -> None:
                before = self._guard.run(note_module, type(wrapper), args, kwargs)
                original(wrapper, *args, **kwargs)
                self._guard.run(self._observer.originals.add_replaced, before or ())
                watch_unit(wrapper)

            return wrapped

        def note_module(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Owned]:
            # The module that it wraps may be given as `module=`.
            module = kwargs["module"] if "module" in kwargs else args[0]
            if not any(isinstance(each, kind) for each in module.modules()):
                # Units that `auto_wrap_policy` makes are wrapped inside of this call.
                self._observer.wrapping([module], starts_with_rank0=bool(kwargs.get("sync_module_states")))
            return owned_by([module])

        self._replace(fsdp, "fully_shard", fully_shard)
        self._replace(fsdp.FSDPModule, "set_requires_gradient_sync", set_requires_gradient_sync)
        self._replace(fsdp.FSDPModule, "set_reshard_after_backward", set_reshard_after_backward)
        for name in ("reshard", "unshard"):
            self._replace(fsdp.FSDPModule, name, functools.partial(self._marked, f"{name}ed"))
        # In newer releases the second one calls the first.
        divides = next(name for name in DIVIDES if hasattr(fsdp.FSDPModule, name))
        self._replace(fsdp.FSDPModule, divides, set_divide_factor)
        self._replace(fsdp.FullyShardedDataParallel, "clip_grad_norm_", clip_grad_norm_)
        self._replace(fsdp.FullyShardedDataParallel, "__init__", init)


def is_recording() -> bool:
    """True if this process records."""
    return _current is not None


def watch_unit(module: nn.Module) -> None:
    """Record the outputs of a unit. Nothing of the recording is in the hook, which is copied and saved with it."""
    module.register_forward_hook(_after_unit)


def _after_unit(module: nn.Module, args: object, output: object) -> None:
    if _current is not None:
        _current.guard.run(_current.unit_output, module, output)
