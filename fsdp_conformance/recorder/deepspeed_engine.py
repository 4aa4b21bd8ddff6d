"""
DeepSpeed, whose engine has its own optimizer step and hides what each rank holds.

Gradients, parameters and optimizer states are gathered at each step, one at a time. The unsharded counterpart of a
script is DeepSpeed without ZeRO: stage 0, without offload, and `zero.Init` and `GatheredParameters` that do nothing.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fsdp_conformance.recorder.deepspeed_values import whole_gradient, whole_states, whole_value
from fsdp_conformance.recorder.fingerprints import whole_part
from fsdp_conformance.recorder.named import Named, Parts
from fsdp_conformance.recorder.observer import Observer, Stepped
from fsdp_conformance.recorder.plain import settings_of
from fsdp_conformance.recordings.events import Group

#: Sections of DeepSpeed's configuration that shard or offload.
_SHARDING = ("zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer")


class DeepSpeedHooks:
    """The hooks of an observer in DeepSpeed, which has been imported."""

    def __init__(self, observer: Observer, replace: Callable[[Any, str, Callable[[Any], Any]], None]) -> None:
        """`replace` puts what a function makes of an attribute in its place, until recording ends."""
        import deepspeed

        self._observer = observer
        replace(deepspeed.DeepSpeedEngine, "step", self._step)
        if observer.sharding != "kept":
            replace(deepspeed, "initialize", self._initialize)
            replace(deepspeed.zero.Init, "__init__", _disabled)
            replace(deepspeed.zero.GatheredParameters, "__init__", _disabled)

    def _initialize(self, original: Any) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs)
            arguments = call.arguments
            config = arguments.pop("config_params", None) or arguments.get("config")
            if config is None:
                config = getattr(arguments.get("args"), "deepspeed_config", None)
                arguments["args"] = None
            arguments["config"] = without_zero(config)
            if isinstance(arguments.get("model"), nn.Module):
                # Before the optimizer makes copies of the parameters.
                self._observer.nudge(arguments["model"])
            self._observer.replaced += 1
            return original(**arguments)

        return initialize

    def _step(self, original: Any) -> Any:
        @functools.wraps(original)
        def step(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if not engine.is_gradient_accumulation_boundary():
                return original(engine, *args, **kwargs)
            return self._observer.guard.around(
                lambda call: self._recorded(engine, lambda: call(engine, *args, **kwargs)),
                original,
                engine,
                *args,
                **kwargs,
            )

        return step

    def _recorded(self, engine: Any, call: Callable[[], Any]) -> Any:
        """Call an engine's step, and record it."""
        observer = self._observer
        with observer.stepping():
            gradients = _gradients(observer)
            limit = float(engine.gradient_clipping() or 0.0)
            result = observer.clip_by_engine(call, gradients, limit, engine.get_global_grad_norm)
        observer.stepped(_stepped(observer, engine), Named(gradients))
        return result


def without_zero(config: Any) -> dict[str, Any]:
    """A configuration, or the file that has it, without ZeRO."""
    content = json.loads(Path(config).read_text()) if isinstance(config, str | Path) else copy.deepcopy(config)
    content = {key: value for key, value in (content or {}).items() if key not in _SHARDING}
    return {**content, "zero_optimization": {"stage": 0}}


def _disabled(original: Any) -> Any:
    """Like `zero.Init`, which takes `enabled`, without an effect."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        call = inspect.signature(original).bind(self, *args, **kwargs)
        call.arguments["enabled"] = False
        original(*call.args, **call.kwargs)

    return init


def _trained(observer: Observer) -> list[tuple[str, Tensor]]:
    return [(name, parameter) for name, parameter in observer.named_parameters() if parameter.requires_grad]


def _gradients(observer: Observer) -> Parts:
    values = ((name, whole_gradient(parameter)) for name, parameter in _trained(observer))
    return {name: [whole_part(value)] for name, value in values if value is not None}


def _stepped(observer: Observer, engine: Any) -> Stepped:
    trained = _trained(observer)
    names = {id(parameter): name for name, parameter in trained}
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        members = [names[id(parameter)] for parameter in _members(optimizer, index) if id(parameter) in names]
        groups.append(Group(settings=settings_of(group), parameters=tuple(members), unknown=0))
    values = ((name, whole_value(parameter)) for name, parameter in trained)
    parameters = {name: [whole_part(value)] for name, value in values if value is not None}
    states = {
        f"{name}/{key}": [whole_part(value)]
        for name, parameter in trained
        for key, value in whole_states(parameter, inner)
    }
    return Stepped(type(inner).__name__, tuple(groups), parameters, states, {})


def _members(optimizer: Any, index: int) -> list[Tensor]:
    """The model's parameters in a group of one of DeepSpeed's optimizers."""
    for attribute in ("bit16_groups", "bf16_groups"):
        if hasattr(optimizer, attribute):
            return list(getattr(optimizer, attribute)[index])
    if hasattr(optimizer, "sub_group_to_group_id"):
        # ZeRO-3 divides each group.
        parts = enumerate(optimizer.fp16_groups)
        return [
            parameter
            for number, part in parts
            if optimizer.sub_group_to_group_id[number] == index
            for parameter in part
        ]
    if hasattr(optimizer, "fp16_groups"):
        return list(optimizer.fp16_groups[index])
    return list(optimizer.param_groups[index]["params"])
