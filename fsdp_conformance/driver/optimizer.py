"""The optimizer of a training, as the regime names it."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_conformance.adapters.base import OptimFn
from fsdp_conformance.adapters.optimizers import Several
from fsdp_conformance.driver.task import Task
from fsdp_conformance.errors import AdapterError
from fsdp_conformance.history.training import TrainingHistory


class RegimeOptimizer:
    """Builds the optimizer of the regime for the engine, or lets each parameter step in backward."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._built: dict[str, nn.Parameter] = {}
        """The parameters of the newly built model by name, if an optimizer needs their names."""

    def note_model(self, model: nn.Module) -> None:
        """Remember the parameters of a model that is not wrapped yet, if the optimizer needs their names."""
        if self._task.regime.optimizer in self._task.workload.optimizer_sets:
            self._built = dict(model.named_parameters())

    def optim_fn(self) -> OptimFn:
        """
        The function that builds the regime's optimizer, or one that stands for several. The engine calls it in setup.

        An adapter may keep it, so it refers to this object only where names are needed: otherwise a model that is
        dropped would be part of a cycle.
        """
        workload, regime = self._task.workload, self._task.regime
        build = workload.optimizer_sets.get(regime.optimizer)
        if build is None:
            return workload.optimizers[regime.optimizer]
        return lambda params: Several(build(self._named(params)))

    def _named(self, params: Any) -> dict[str, nn.Parameter]:
        """The parameters that an engine hands to its optimizer, by original name."""
        given_ids = {id(parameter) for each in params for parameter in _parameters_of(each)}
        try:
            named = self._task.adapter.parameters()
        except (AttributeError, NotImplementedError):
            # Not wrapped yet: they are those of the model.
            named = self._built
        unknown = len(given_ids - {id(parameter) for parameter in named.values()})
        if unknown:
            raise AdapterError(
                f"{unknown} of {len(given_ids)} parameters of the optimizer are not those of parameters(), "
                "as the capability orig_params promises"
            )
        return {name: parameter for name, parameter in named.items() if id(parameter) in given_ids}

    def step_in_backward(self, history: TrainingHistory) -> list[Optimizer]:
        """
        Give each parameter an optimizer that steps when its gradient has been accumulated, and count the steps.

        Another hook comes before it, as a user's own logging does: both must be called. Returns the optimizers.
        """
        optimizers = []
        build = self._task.workload.optimizers[self._task.regime.optimizer]
        for name, parameter in self._task.adapter.parameters().items():
            if parameter.requires_grad:
                optimizers.append(build([parameter]))
                for hook in (partial(_count, history, name), partial(_update, history, name, optimizers[-1])):
                    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return optimizers


def _parameters_of(item: Any) -> list[nn.Parameter]:
    """The parameters of one item of an optimizer's first argument: a parameter or a group."""
    return list(item["params"]) if isinstance(item, dict) else [item]


def _count(history: TrainingHistory, name: str, parameter: Tensor) -> None:
    calls = history.steps[-1].hook_calls
    calls[name] = calls.get(name, 0) + 1


def _update(history: TrainingHistory, name: str, optimizer: Optimizer, parameter: Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    updates = history.steps[-1].updates
    updates[name] = updates.get(name, 0) + 1
