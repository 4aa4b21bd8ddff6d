"""The module hooks of a unit that was sharded in place, which tell its schedule when its modules run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from torch import nn

from fsdp_conformance.engine.fully_sharded.inputs import Arguments
from fsdp_conformance.engine.fully_sharded.unit import ShardedUnit, TrainingState
from fsdp_conformance.errors import Unsupported


class UnitHooks:
    """Hooks on the modules of one unit. Inside an outer unit, several modules count as one forward."""

    def __init__(self, modules: Sequence[nn.Module], unit: ShardedUnit) -> None:
        self._unit = unit
        self._members = {id(module) for module in modules}
        self._waiting: set[int] = set()
        """Modules that have not run in this forward."""
        for module in modules:
            module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after, always_call=True)
            module.register_state_dict_pre_hook(self._refuse_shards)  # type: ignore[no-untyped-call]

    def _before(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Arguments | None:
        unit, schedule = self._unit, self._unit.schedule
        if unit.state is TrainingState.FORWARD and id(module) in self._waiting:
            return None
        if len(self._members) > 1 and schedule.is_in_forward:
            self._waiting |= self._members
        return schedule.before_forward(unit, (args, kwargs), training=module.training)

    def _after(self, module: nn.Module, _: tuple[object, ...], output: object) -> None:
        unit, schedule = self._unit, self._unit.schedule
        self._waiting.discard(id(module))
        if output is None and sys.exc_info()[0] is not None:
            self._waiting.clear()
            schedule.forward_failed(unit)
        elif self._waiting and unit.state is TrainingState.FORWARD:
            schedule.watch(unit, output)
        else:
            self._waiting.clear()
            schedule.after_forward(unit, output)

    def _refuse_shards(self, _: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not keep_vars and not self._unit.is_as_wrapped:
            raise Unsupported(
                "full_state_dict",
                f"state_dict() of {self._unit.label} would contain shards or low-precision buffers: use "
                "full_state_dict or sharded_state_dict",
            )

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        raise Unsupported(
            "copyable",
            f"{self._unit.label} was sharded in place and cannot be copied: wrap it in FullyShardedDataParallel, which "
            "can be, or load its full_state_dict into another module",
        )

    def __reduce__(self) -> NoReturn:
        raise Unsupported(
            "copyable", f"{self._unit.label} is sharded and cannot be pickled: save its full_state_dict and load that"
        )
