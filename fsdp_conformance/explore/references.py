"""
The references of a scenario, computed once for all ranks: the model in one process, in float64 and in float32.

    exact            every order of adding ranks gives the same bits in float32 as in float64: comparisons are bitwise.
                     A scenario that ought to be exact and is not has run out of mantissa: NotExact, it is not judged
    smooth           the distances between the orders are the noise that bounds are derived from
    low precision    the values of the reference that rounds where the plan says: comparisons are bitwise

Nothing of it communicates, and in a rank it happens before any code of the engine is loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_conformance.errors import ConformanceError, NotExact
from fsdp_conformance.explore.building import example_of, second_model
from fsdp_conformance.explore.example import Example
from fsdp_conformance.explore.own_model import OwnModel
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.plan import Plan
from fsdp_conformance.references.exactness import demands_bitwise, values
from fsdp_conformance.references.packed_history import packed, unpacked
from fsdp_conformance.references.reference_set import EXPECTED, Kind, References, dtypes_of
from fsdp_conformance.references.reference_set import values as values_of
from fsdp_conformance.references.rounding import rounding_histories, rounding_mistakes
from fsdp_conformance.references.single_process import Order, single_process_histories
from fsdp_conformance.scenarios.scenario import Scenario, scenario_from_json
from fsdp_conformance.workload.definition import Regime, Workload
from fsdp_conformance.workload.units import local_names

#: A model is good enough if so many of its parameters have gradients other than zero. In others, mistakes do not show.
_ALIVE = 0.9

#: How many models with other numbers are tried for a scenario.
_SALTS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The references of one scenario for all ranks, in rank order."""

    workload: Workload
    """The scenario's workload; models and batches are made once and copied."""
    regime: Regime
    histories: tuple[dict[str, TrainingHistory], ...]
    """By rank: the histories by source. In low precision, there is one source."""
    exact: bool = False
    rounds: Plan | None = None
    """The plan of a training in low precision: there is one history, and no noise."""

    def of_rank(self, rank: int) -> References:
        """The references as a rank uses them."""
        model = self.workload.build(rank)
        return References(
            workload=self.workload,
            regime=self.regime,
            rank=rank,
            world_size=len(self.histories),
            histories=self.histories[rank],
            exact=self.exact or self.rounds is not None,
            rounds=self.rounds is not None,
            # Trained once for all kinds of values, and only if some differ.
            roundings=cache(partial(self._roundings, rank)),
            dtypes=dtypes_of(model),
            local=local_names(self.workload, dict(model.named_parameters())),
        )

    def _roundings(self, rank: int) -> list[tuple[str, TrainingHistory]]:
        if self.rounds is None:
            return []
        size = len(self.histories)
        return list(rounding_mistakes(self.workload, self.regime, self.rounds, rank=rank, world_size=size))


class Trained(NamedTuple):
    """The references of a scenario: of its example, and of the second model if it has one."""

    scenario: Scenario
    example: Example
    prepared: Prepared
    second: tuple[Example, Prepared] | None = None


def prepare(example: Example) -> Prepared:
    """Train the references. Not collective. Raises NotExact if bitwise judgement is due but impossible."""
    workload = remembering(example)
    size, regime = example.world_size, example.regime
    if example.plan.param_dtype is not None:
        rounded = rounding_histories(workload, regime, example.plan, world_size=size)
        histories = tuple({EXPECTED: history.without_norms()} for history in rounded)
        return Prepared(workload=workload, regime=regime, histories=histories, rounds=example.plan)
    exact = demands_bitwise(workload, regime, size)
    orders = orders_for(size, regime, exact=exact)
    twins = single_process_histories(workload, regime, world_size=size, dtype=torch.float64)
    runs = {
        order: single_process_histories(workload, regime, world_size=size, dtype=torch.float32, order=order)
        for order in orders
    }
    if exact:
        for order, histories_of_order in runs.items():
            _demand_equal(workload, order, histories_of_order, twins)
    return Prepared(
        workload=workload,
        regime=regime,
        histories=tuple(
            {EXPECTED: twins[rank], **{order.value: runs[order][rank] for order in orders}} for rank in range(size)
        ),
        exact=exact,
    )


def judgeable(scenario: Scenario, *, salts: int = _SALTS) -> tuple[Example, Prepared]:
    """
    The example of a scenario with its references, such that these can judge it if possible.

    Whether they can depends on the numbers, so `salts` models are tried, beginning with the one that the scenario's
    salt gives. Not collective. Raises NotExact if none of them is exact, although it ought to be.
    """
    candidates: list[tuple[Example, Prepared]] = []
    problem: NotExact | None = None
    # The user's own model has its own numbers.
    for salt in range(scenario.salt, scenario.salt + (1 if scenario.workload else salts)):
        example = example_of(scenario, salt=salt)
        try:
            candidates.append((example, prepare(example)))
        except NotExact as error:
            problem = error
            continue
        if too_wide(candidates[-1][1]) is None and liveness(candidates[-1][1]) >= _ALIVE:
            return candidates[-1]
    if problem is not None and not candidates:
        raise problem
    # The one that shows most. Of equals it is the first.
    return max(candidates, key=lambda candidate: (too_wide(candidate[1]) is None, liveness(candidate[1])))


def liveness(prepared: Prepared) -> float:
    """
    The fraction of the parameters with gradients that have one other than zero in some step.

    None, if the gradients of inputs are looked at and all of them are zero.
    """
    history = next(iter(prepared.histories[0].values()))
    of_inputs = [grad for grad in history.input_grads if grad is not None]
    if of_inputs and not any(bool(grad.any()) for grad in of_inputs):
        return 0.0
    alive: dict[str, bool] = {}
    for record in history.steps:
        for name, grad in (record.grads or {}).items():
            if grad is not None:
                alive[name] = alive.get(name, False) or bool(grad.any())
    return sum(alive.values()) / len(alive) if alive else 1.0


def too_wide(prepared: Prepared) -> str | None:
    """The bound in which a fault could hide, in words; None if there is none."""
    if prepared.exact or prepared.rounds is not None:
        return None
    steps = range(len(prepared.of_rank(0).expected.steps))
    of_all_ranks = [
        (Kind.PARAMETER, steps[-1]),
        *((kind, step) for kind in (Kind.GRADIENT, Kind.NORM) for step in steps),
    ]
    # Each rank has its own batches.
    of_each = [(kind, step) for kind in (Kind.LOSS, Kind.OUTPUT, Kind.EVAL, Kind.BUFFER) for step in steps]
    for rank in range(len(prepared.histories)):
        references = prepared.of_rank(rank)
        for kind, step in of_each + (of_all_ranks if rank == 0 else []):
            for name, value in values_of(references.expected, kind, step).items():
                bound = references.bound(kind, step, name) if isinstance(value, Tensor) else None
                if bound is not None and bound.inconclusive:
                    return f"the bound of {name} is {bound.text()}"
    return None


def trained(scenario: Scenario, *, salts: int = _SALTS) -> Trained:
    """Train the references of a scenario and its second model. Not collective. Raises NotExact as `judgeable` does."""
    example, prepared = judgeable(scenario, salts=salts)
    if not example.second:
        return Trained(scenario, example, prepared)
    other = second_model(example)
    return Trained(scenario, example, prepared, (other, prepare(other)))


def first_judged(candidates: Sequence[Scenario]) -> Trained:
    """
    The references of the first scenario that these can judge; of the last one, if they can judge none. Not collective.

    Raises NotExact as `judgeable` does.
    """
    *others, last = candidates
    for scenario in others:
        with suppress(NotExact):
            # Another scenario is as good as other numbers.
            candidate = trained(scenario, salts=1)
            parts = [candidate.prepared, *(() if candidate.second is None else (candidate.second[1],))]
            if all(too_wide(part) is None for part in parts) and liveness(candidate.prepared) >= _ALIVE:
                return candidate
    return trained(last)


def untrained(scenario: Scenario, salt: int) -> Trained:
    """The same for a rank that needs no references, only what they belong to. `salt` is that of `trained`'s model."""
    example = example_of(scenario, salt=salt)
    second = second_model(example) if example.second else None
    return Trained(
        scenario, example, _without_histories(example), None if second is None else (second, _without_histories(second))
    )


def _without_histories(example: Example) -> Prepared:
    return Prepared(workload=remembering(example), regime=example.regime, histories=())


def shared(candidates: Sequence[Scenario], *, rank: int) -> Trained:
    """
    The references that rank 0 has trained for the first scenario that they can judge, for all ranks, which would
    otherwise repeat the same work. Collective.
    """
    if candidates[0].world_size == 1:
        return first_judged(candidates)
    sent: list[Any] = [None]
    if rank == 0:
        try:
            all_of_it = first_judged(candidates)
            second = None if all_of_it.second is None else _to_send(all_of_it.second[1])
            chosen = all_of_it.scenario.to_json(), all_of_it.example.model.salt
            sent = [(*chosen, _to_send(all_of_it.prepared), second)]
        except ConformanceError as error:
            # The other ranks wait for something.
            sent = [error]
    dist.broadcast_object_list(sent)
    if isinstance(sent[0], ConformanceError):
        raise sent[0]
    text, salt, of_first, of_second = sent[0]
    scenario = scenario_from_json(text)
    example = example_of(scenario, salt=salt)
    if of_second is None:
        return Trained(scenario, example, _received(example, of_first))
    other = second_model(example)
    return Trained(scenario, example, _received(example, of_first), (other, _received(other, of_second)))


def _to_send(prepared: Prepared) -> tuple[list[dict[str, Any]], bool, bool]:
    histories = [{name: packed(history) for name, history in of_rank.items()} for of_rank in prepared.histories]
    return histories, prepared.exact, prepared.rounds is not None


def _received(example: Example, sent: tuple[list[dict[str, Any]], bool, bool]) -> Prepared:
    histories, exact, rounds = sent
    return Prepared(
        workload=remembering(example),
        regime=example.regime,
        histories=tuple({name: unpacked(history) for name, history in of_rank.items()} for of_rank in histories),
        exact=exact,
        rounds=example.plan if rounds else None,
    )


def orders_for(world_size: int, regime: Regime, *, exact: bool = False) -> tuple[Order, ...]:
    """
    The orders of adding and dividing that can differ: at one rank none does, and halving never rounds.

    Of an exact model two orders show that none of them rounds; of others, each is a sample of the noise.
    """
    orders = [Order.SUM]
    if world_size > 2:
        orders.append(Order.REVERSED)
    if regime.sums:
        return tuple(orders)
    if world_size & (world_size - 1):
        orders += [Order.RECIPROCAL] if exact else [Order.PREDIVIDED, Order.RECIPROCAL, Order.SPLIT]
    if regime.micro_batches > 1 and any(regime.is_reduced(micro) for micro in range(regime.micro_batches - 1)):
        orders.append(Order.ACCUMULATED)
    return tuple(orders)


def remembering(example: Example) -> Workload:
    """
    The workload of an example, which for a drawn model remembers: batches are never written to, and models are copied.

    What the user's own model does to them is unknown.
    """
    workload = example.workload()
    if isinstance(example.model, OwnModel):
        return workload

    @cache
    def built(rank: int) -> nn.Module:
        return workload.build(rank)

    # Drawn models are the same on every rank.
    return replace(workload, build=lambda rank: copy.deepcopy(built(0)), batch=cache(workload.batch))


def _demand_equal(
    workload: Workload, order: Order, histories: list[TrainingHistory], twins: list[TrainingHistory]
) -> None:
    for history, twin in zip(histories, twins, strict=True):
        for (label, got), (_, expected) in zip(values(history), values(twin), strict=True):
            if not torch.equal(got.double(), expected.double()):
                raise NotExact(
                    f"{label} in float32 differs from float64: the mantissa is used up "
                    f"[{workload.name}, rank {history.rank}, order {order}]"
                )
