"""
Ranks that are late: before a collective, at a point of the training loop, or before parameters are freed.

A late rank does not change the results of a correct implementation. It exposes one that reads a buffer before its
collective has finished, frees a buffer that is still in use, or relies on ranks being in step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.faults import points
from fsdp_conformance.faults.fault import POINTS, QUIET_PHASES, Fault
from fsdp_conformance.faults.pause import calibrate, device_in_use, pause
from fsdp_conformance.faults.recorded import CollectiveFault
from fsdp_conformance.harness import context
from fsdp_conformance.harness.context import log
from fsdp_conformance.history.collective import CollectiveRecord, Op

_QUIET = " and ".join(sorted(QUIET_PHASES))


class Delay(Fault):
    """Base of all delays: a duration, and the ranks that are late."""

    def __init__(self, ranks: Iterable[int] | None, milliseconds: float, problems: Iterable[str] = ()) -> None:
        ranks = None if ranks is None else tuple(ranks)
        errors = list(problems)
        if ranks is not None and not (ranks and all(_is_int(rank, minimum=0) for rank in ranks)):
            errors.append(f"ranks must be one or more non-negative ints, or None for every rank, got {list(ranks)}")
        if not 0 < milliseconds < float("inf"):
            errors.append(f"milliseconds must be a positive number, got {milliseconds!r}")
        if errors:
            raise ConfigError(errors, where=type(self).__name__)
        super().__init__(ranks)
        self.milliseconds = milliseconds

    def _attach(self) -> None:
        super()._attach()
        calibrate(device_in_use())

    def _strike(self, device_type: str) -> None:
        self._fired += 1
        pause(self.milliseconds, device_type)

    def _phrase(self, where: str) -> str:
        return f"delay of {self.milliseconds:g} ms {where} on {self._ranks_phrase()}"


class CollectiveDelay(CollectiveFault, Delay):
    """
    A delay before every `every`-th `op` of training on the given ranks. `op=None` stands for any collective.

    Collectives of the phases setup and observe are not training, and are not delayed.
    """

    def __init__(
        self, op: Op | str | None, ranks: Iterable[int] | None, milliseconds: float, *, every: int = 1
    ) -> None:
        problems = []
        if op is not None and op not in list(Op):
            problems.append(f"op must be one of {', '.join(Op)}, got {op!r}")
        if not _is_int(every, minimum=1):
            problems.append(f"every must be at least 1, got {every!r}")
        super().__init__(ranks, milliseconds, problems)
        self.op = None if op is None else Op(op)
        self.every = every
        self._met = 0

    def before(self, record: CollectiveRecord, group: ProcessGroup) -> None:
        """Strike if the collective is one that it delays, and if it is its turn."""
        if not self._concerns(record) or not self._strikes_here():
            return
        if self._met % self.every == 0:
            self._strike(record.device)
        self._met += 1

    @property
    def need(self) -> str:  # type: ignore[override]
        """The collectives that the engine must issue, and the phases that do not count."""
        ops = ", ".join(sorted(self.ops)) if len(self.ops) < len(Op) else "collectives"
        return f"the engine must issue {ops} while it is installed, outside of the phases {_QUIET} of the log"

    @property
    def ops(self) -> frozenset[Op]:
        """The collectives that it delays."""
        return frozenset(Op) if self.op is None else frozenset({self.op})

    def unmet(self, rank: int, records: Iterable[CollectiveRecord]) -> dict[str, frozenset[Op]]:
        """Its description with its ops, if it is silent and the engine issued none of those in training."""
        met = any(self._concerns(record) for record in records)
        return {} if met else dict.fromkeys(self.silent(rank), self.ops)

    def _concerns(self, record: CollectiveRecord) -> bool:
        return record.op in self.ops and record.phase not in QUIET_PHASES

    def describe(self) -> str:
        """E.g. "delay of 20 ms before every reduce_scatter on ranks [1]"."""
        name = self.op.value if self.op is not None else "collective"
        return self._phrase(f"before every {name}" if self.every == 1 else f"before one in {self.every} {name}s")

    def _attach(self) -> None:
        super()._attach()
        self._met = 0


class ReductionDelay(CollectiveDelay):
    """
    A delay before every collective that reduces, and before all-to-alls, because a rank may add up their outputs
    itself.

    The engine chooses which of them carry gradients.
    """

    def __init__(self, ranks: Iterable[int] | None, milliseconds: float) -> None:
        super().__init__(None, ranks, milliseconds)

    @property
    def ops(self) -> frozenset[Op]:
        """The collectives that it delays."""
        return frozenset({Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.REDUCE, Op.ALL_TO_ALL})

    def describe(self) -> str:
        """E.g. "delay of 20 ms before every reduction on ranks [1]"."""
        return self._phrase("before every reduction")


class PointDelay(Delay):
    """
    A delay at a point of the training loop: after the loss, or before the optimizer step.

    If the loop neither calls `at` for this point nor labels its phases, the delay comes whenever torch begins a
    backward pass, or an optimizer makes a step.
    """

    need = "call backward() and step() of a torch optimizer while it is installed, or its at(point, step) in the loop"

    def __init__(self, point: str, ranks: Iterable[int] | None, milliseconds: float) -> None:
        problems = [] if point in POINTS else [f"point must be one of {', '.join(POINTS)}, got {point!r}"]
        super().__init__(ranks, milliseconds, problems)
        self.point = point
        self._is_called = False

    def at(self, point: str, step: int) -> None:
        """Strike if this is the point."""
        if point == self.point:
            self._is_called = True
            if self._strikes_here():
                self._strike(device_in_use())

    def describe(self) -> str:
        """E.g. "delay of 20 ms after loss on every rank"."""
        return self._phrase(self.point.replace("_", " "))

    def _attach(self) -> None:
        super()._attach()
        self._is_called = False
        self._context = context.current()
        points.watch(self._notice)

    def _detach(self) -> None:
        points.unwatch(self._notice)
        super()._detach()

    def _notice(self, point: str) -> None:
        # A loop that labels its phases announces its points, too.
        is_announced = self._is_called or log().label[0]
        if point == self.point and not is_announced and context.current() is self._context and self._strikes_here():
            self._strike(device_in_use())


class FreeDelay(Delay):
    """
    A delay before a unit's parameters are freed, in forward and in backward.

    `fqn` names a module inside the unit, ideally its last one. The delay comes before that module's computation in
    forward and before its gradients in backward, so that a device's kernels still read the parameters when the host has
    reached the end of the unit and reshards. After the computation it would be too late. It uses public hooks of the
    module, registered before the implementation wraps the model, so it does not depend on the implementation.
    Without `prepare`, the first forward pass while it is installed raises ConfigError.
    """

    need = "the model that prepare(model) has seen must run that module, forward and backward, while it is installed"

    def __init__(self, fqn: str, ranks: Iterable[int] | None, milliseconds: float) -> None:
        super().__init__(ranks, milliseconds, [] if fqn else ["fqn must name a submodule of the model, got ''"])
        self.fqn = fqn
        self._hooks: list[RemovableHandle] = []
        self._prepared = False

    def prepare(self, model: nn.Module) -> None:
        """
        Register the hooks, which do nothing unless the fault is installed; `remove` removes them.

        Raises ConfigError if the model has no such submodule.
        """
        modules = dict(model.named_modules(remove_duplicate=False))
        if self.fqn not in modules:
            raise ConfigError(
                [f"fqn must name a submodule of {type(model).__name__}, got {self.fqn!r}"], where=type(self).__name__
            )
        module = modules[self.fqn]
        self._prepared = True

        # Functions, not bound methods: a deep copy of the model would copy the object of a bound method, too, and then
        # strikes would be counted in a copy of this fault.
        def before_forward(_module: nn.Module, _args: Any) -> None:
            self._meet()

        def before_backward(_gradients: Any) -> None:
            self._meet()

        def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
            # On the graph's node: its hooks run after those of the output tensor, which engines use to unshard. It also
            # does not change the graph; a full backward hook would forbid in-place operations on the output.
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                    leaf.grad_fn.register_prehook(before_backward)
                    return

        self._hooks += [module.register_forward_pre_hook(before_forward), module.register_forward_hook(after_forward)]

    def describe(self) -> str:
        """E.g. "delay of 20 ms before the parameters around 'layers.1' are freed on ranks [0]"."""
        return self._phrase(f"before the parameters around {self.fqn!r} are freed")

    def _attach(self) -> None:
        super()._attach()
        self._context = context.current()
        if not self._prepared:
            self._hooks.append(register_module_forward_pre_hook(self._require_preparation))

    def _require_preparation(self, module: nn.Module, _args: Any) -> None:
        phase, _ = log().label
        if not self._prepared and phase not in QUIET_PHASES and context.current() is self._context:
            problem = (
                f"{self.describe()} cannot strike in {type(module).__name__}: call prepare(model) when the model is "
                "built, before the engine wraps it"
            )
            raise ConfigError([problem], where=type(self).__name__)

    def _meet(self) -> None:
        phase, _ = log().label
        if phase not in QUIET_PHASES and self._strikes_here():
            self._strike(device_in_use())

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._prepared = False
        super()._detach()


def _is_int(value: object, *, minimum: int) -> bool:
    return isinstance(value, int) and value >= minimum
