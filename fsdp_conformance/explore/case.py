"""
One scenario as a case: trained through the adapter and judged by everything that can judge it.

The same body runs on simulated ranks in a warm worker, on processes for the rows of the pair profile, and from a file
that was saved. Whatever requirement it was made for, it checks losses, outputs, gradients, parameters, buffers,
optimizer state and evaluations against the references; equality of all ranks; collectives against the plan; units
resharded; bytes held; and what else an engine must leave alone (`cases.bystanders`).
"""

from __future__ import annotations

import json
import math
import unittest
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_conformance import run_settings
from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.bystanders import BystanderWatch
from fsdp_conformance.cases.refusal import why_no_refusal
from fsdp_conformance.checks import communication, groups, growth, partition, traffic_bound
from fsdp_conformance.checks.equality import parameter_digests
from fsdp_conformance.checks.optimizer_state import same_state, stepped_once
from fsdp_conformance.contract.case import CASE_ATTRIBUTE, EXPLORED, TIMEOUT_S, Case
from fsdp_conformance.diagnosis.headline import RANDOM
from fsdp_conformance.driver.further_step import further_step
from fsdp_conformance.driver.session import Steps
from fsdp_conformance.driver.task import World
from fsdp_conformance.errors import SuiteError, Unsupported
from fsdp_conformance.explore.example import Example, Initial, asks, shard_group_size, trains_all, uses_all
from fsdp_conformance.explore.needs import needs_of
from fsdp_conformance.explore.references import Prepared, Trained, shared, untrained
from fsdp_conformance.fixtures.drawn import DrawnModel
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.outcome.records import DECLINED, SCENARIO, CaseRecord
from fsdp_conformance.plan import Plan, Sharding
from fsdp_conformance.run_settings import RunOrder, RunSettings, order_from_json
from fsdp_conformance.scenarios.scenario import Scenario, scenario_from_json
from fsdp_conformance.workload.definition import Regime, Workload
from fsdp_conformance.workload.events import EVALUATIONS, FORWARDS, Action, Moment

#: What a scenario is about: any combination of what is declared meets the contract, or is refused.
COMBINATIONS = "R000"
REQUIREMENTS = (
    COMBINATIONS, "R001", "R002", "R003", "R005", "R007", "R010", "R033", "R034", "R035", "R039", "R040", "R048",
    "R067", "R068", "R084", "R101", "R105", "R130", "R140", "R142", "R146", "R150", "R157", "R160", "R161", "R188",
    "R189",
)  # fmt: skip

#: The attribute that the user gives to parameters before the model is wrapped.
_ATTRIBUTE = "name_before_wrapping"

#: Degrees of sharding under which a unit is resharded after its forward.
_RESHARD = (Sharding.DEFAULT, Sharding.FULL, Sharding.HYBRID)

#: Events, beside evaluations, after which a unit must be sharded again if it was before. Each set has its requirement.
_CONTEXTS = frozenset({Action.SHOW, Action.WRITE_SHOWN, Action.WRITE_SHOWN_GRADIENT})
_STATE = frozenset({Action.READ, Action.TAKE_MODEL, Action.TAKE_SHARDS, Action.TAKE_OPTIMIZER, Action.SAVE})

#: The user's own changes of where the model is, and in which dtype.
_MOVES = (Action.MOVE, Action.CAST, Action.CAST_BACK)

#: Bytes for each parameter that even an engine without alignment may hold beside it, such as a counter.
_TAG = 16
#: Bytes of a parameter below which the bytes held show more of the alignment than of the sharding.
_SHOWS_SHARDING = 36

#: How many steps are trained further to see what each leaves behind. The first may still gather what stays gathered.
_STEPS_ON = 4

#: What is done twice more at the end if a training does it: its name, and the adapter's method.
_REPEATED = {
    Action.READ: ("read of all parameters", "full_params"),
    Action.TAKE_MODEL: ("full state dict", "full_state_dict"),
    Action.TAKE_OPTIMIZER: ("state dict of the optimizer", "optim_state_dict"),
}

#: What of a model gets other values than the right ones.
_PARAMETERS, _SAVED, _EVERYTHING = "parameters", "saved", "everything"

#: In a warm worker: by digest, the references of the scenario that runs. Its ranks need not train them.
prepared: dict[str, Trained] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """A training, perhaps of two engines one after the other."""

    history: TrainingHistory
    adapter: Adapter
    """The one that trained the last step."""
    parts: tuple[tuple[TrainingHistory, Plan], ...]
    """The steps of each engine, with its plan: two of them if training was resumed."""

    @property
    def plan(self) -> Plan:
        """That of the last step."""
        return self.parts[-1][1]


class ScenarioCase(ConformanceTestCase):
    """A case whose body trains a scenario."""

    has_control = False
    """True if values that are wrong on purpose are sent as well."""
    may_refuse = True
    """False if every engine must train its scenarios."""
    _watch: BystanderWatch
    _second: tuple[Example, Prepared] | None = None
    """The second model, with its references, if the scenario has one."""
    _beside: Steps | None = None
    """Its training."""

    def check_scenario(self, *candidates: Scenario) -> None:
        """Train a scenario, the first of several that the references can judge, and check everything that it shows."""
        known = prepared.get(candidates[0].digest) or self._references_of(candidates)
        scenario, example, expected, self._second = known
        if len(candidates) > 1:
            self.report.measurements[SCENARIO] = scenario.to_json()
        workload = expected.workload
        plan = self.placed_plan(example, workload)
        self._watch = BystanderWatch(self)
        trained = self._trained(example, workload, plan)
        outcome = "refused" if trained is None else "trained"
        self.check_digests({"outcome": outcome}, "outcome", COMBINATIONS, "refusals")
        if trained is None:
            return
        self._watch.note_replaced()
        run = trained.history
        if self.judges:
            self.case_references.use(workload, example.regime, expected.of_rank(self.rank))
        self._check_values(example, trained, workload)
        if self.has_control:
            self.checks.check_control(run, workload, example.regime)
        if self._second is not None and self._beside is not None:
            other, others_expected = self._second
            if self.judges:
                self.case_references.use(others_expected.workload, other.regime, others_expected.of_rank(self.rank))
            self.check_parity(self._beside.history, others_expected.workload, other.regime)
        self._check_left_gathered(example, run, trained.plan)
        self._check_kept_outputs(run)
        if isinstance(example.model, DrawnModel):
            # The user's own model may return what it keeps itself.
            self._check_dropped_outputs(run)
        self.expect_equal(
            "R189", "wrapping and events that changed the state of torch's random numbers", run.drawn_by, [],
            check=RANDOM,
            likely="the engine draws random numbers, or sets their state, where unsharded training does not",
        )  # fmt: skip
        self._check_ranks(example, run)
        for part, its_plan in trained.parts:
            self._check_traffic(example, part, workload, its_plan)
            self._check_dtypes(example, part, workload, its_plan)
            self._check_reshard_group(example, part, workload, its_plan)
        self._check_sharding(example, trained, workload)
        self._check_growth(example, trained.adapter)

    def _references_of(self, candidates: Sequence[Scenario]) -> Trained:
        """The references, before any code of the engine is in this process. Collective."""
        of_referee: list[Trained] = []

        def choose() -> tuple[str, int]:
            of_referee.append(shared(candidates, rank=self.rank))
            return of_referee[0].scenario.to_json(), of_referee[0].example.model.salt

        with process_group.log().phase("observe"), self.blaming("suite"):
            text, salt = self.decide("the scenario and the model's numbers", choose)
            return of_referee[0] if of_referee else untrained(scenario_from_json(text), salt)

    def placed_plan(self, example: Example, workload: Workload) -> Plan:
        """The plan of the example on this case's device."""
        general = self.plan(workload)
        return replace(example.plan, device=general.device, init_mode=general.init_mode)

    def _trained(self, example: Example, workload: Workload, plan: Plan) -> _Run | None:
        """The run of the engine; None if it declined the combination."""
        self.here.steps_trained = 0
        built = workload
        if example.initial is Initial.WRITTEN or (example.initial is Initial.FIRST_RANK and self.rank):
            written_only = example.initial is Initial.WRITTEN
            built = replace(
                workload,
                build=partial(_with_other_values, workload, which=_PARAMETERS if written_only else _EVERYTHING),
            )
        built = _attributed(example, built)
        # A state of random numbers that wrapping sets back to its seed shows only if something has been drawn.
        torch.rand(1)
        regime, adapter = example.regime_of_engine, self.subject()
        try:
            with ExitStack() as beside:
                run = self.train(
                    built, plan, regime if example.resumed is None else regime.up_to(regime.steps - 1),
                    adapter=adapter, on_setup=self._on_setup(example, workload, beside),
                    after_step=self._after_step(example),
                )  # fmt: skip
                with self.blaming("implementation"):
                    beside.close()
            if example.resumed is not None:
                return self._resumed(example, workload, run, plan, adapter)
            return _Run(history=run, adapter=adapter, parts=((run, plan),))
        except Exception as error:
            if not self.may_refuse or not _declines(error, example, self.here.steps_trained):
                raise
            self.note_refusal()
            self.report.measurements[DECLINED] = f"{type(error).__name__}: {_first_line(error)}"
            return None

    def _resumed(
        self, example: Example, workload: Workload, first: TrainingHistory, plan: Plan, adapter: Adapter
    ) -> _Run:
        """Save what an engine has trained, and train the last step with a new one that has loaded it."""
        assert example.resumed is not None, "the example is one that is resumed"
        directory = self.shared_directory()
        with process_group.log().phase("event"), self.blaming("implementation"):
            adapter.save_checkpoint(directory)
        self.drop(adapter)
        built = _attributed(example, replace(workload, build=partial(_with_other_values, workload, which=_SAVED)))
        on_setup = self._on_setup(example, workload, ExitStack())

        def load(new: Adapter) -> None:
            on_setup(new)
            if example.regime.happens(Action.ZEROS):
                new.keep_zero_grads()
            new.load_checkpoint(directory)

        others = replace(example.resumed, device=plan.device, init_mode=plan.init_mode)
        self._watch.before_wrapping()
        new, regime = self.subject(), example.regime_of_engine
        last = self.train(
            built, others, regime, adapter=new, on_setup=load, after_step=self._after_step(example),
            first_step=regime.steps - 1,
        )  # fmt: skip
        return _Run(history=first.continued_by(last), adapter=new, parts=((first, plan), (last, others)))

    def _on_setup(self, example: Example, workload: Workload, beside: ExitStack) -> Any:
        """The user's code between wrapping and training. What it begins ends with `beside`."""

        def on_setup(adapter: Adapter) -> None:
            if self._second is not None:
                other, expected = self._second
                plan = self.placed_plan(other, expected.workload)
                self._beside = beside.enter_context(self.training_beside(expected.workload, plan, other.regime))
            if example.initial is Initial.WRITTEN:
                model = workload.build(self.rank)
                adapter.write_params({name: value.detach() for name, value in model.named_parameters()})
            if example.summing_hook:
                adapter.register_comm_hook(_sum)
            self._watch.begin(adapter)
            self._look_at_attributes(example, adapter, None)

        return on_setup

    def _after_step(self, example: Example) -> Any:
        """Look at what the engine must have left alone, and train a step of the second model."""

        def after_step(adapter: Adapter, step: int) -> None:
            waiting = any(event.action in FORWARDS for event in example.regime.in_step(step))
            # What a move leaves of attributes is up to torch.
            waiting = waiting or example.regime.happens(*_MOVES)
            self._watch.look(adapter, step, draws=example.model.dropout, is_gathered=waiting)
            if not waiting:
                self._look_at_attributes(example, adapter, step)
                self._look_at_gradients(example, adapter, step)
            if self._beside is not None:
                next(self._beside)

        return after_step

    def _look_at_gradients(self, example: Example, adapter: Adapter, step: int) -> None:
        """Check that a step has set gradients to None, unless the user keeps them."""
        keeps = example.regime.happens(Action.ZEROS, Action.SKIP) or example.regime.clearing != "optimizer"
        if self.declares("orig_params") and not keeps:
            left = self.observe(
                "gradients",
                lambda: [name for name, parameter in adapter.parameters().items() if parameter.grad is not None],
            )
            self.expect_equal("R040", "parameters with a gradient after a step", left, [], step=step, check="cleared")

    def _look_at_attributes(self, example: Example, adapter: Adapter, step: int | None) -> None:
        """Check that parameters have what the user gave to them before wrapping, if the engine keeps it."""
        keeps = example.attributes and self.declares("param_attributes")
        if not keeps:
            return
        attributes = self.observe(
            "attributes",
            lambda: {name: getattr(parameter, _ATTRIBUTE, None) for name, parameter in adapter.parameters().items()},
        )
        for name, got in attributes.items():
            self.expect_equal("R189", f"{_ATTRIBUTE} of {name}", got, name, step=step, check="attributes of parameters")

    def _check_values(self, example: Example, trained: _Run, workload: Workload) -> None:
        run, adapter = trained.history, trained.adapter
        lenient = self._takes_none_for_zero(example)
        # The rounding of a norm in low precision is not determined.
        seen = run if example.plan.param_dtype is None else run.without_norms()
        self.check_parity(seen, workload, example.regime, none_or_zero=lenient)
        # A state dict has one value of a parameter, also if it differs between ranks.
        has_state = self.declares("full_optim_state") and not lenient and not example.model.local_params()
        has_state = has_state and not example.regime.optimizer_in_backward
        if has_state:
            with self.blaming("implementation"):
                state = adapter.full_optim_state()
        if not self.judges:
            return
        references = self.references(workload, example.regime)
        if example.model.dropout and self.here.device_type == "cpu":
            self._check_random_states(run, references.expected, example.regime)
        if example.regime.happens(Action.RAISE):
            caught = references.expected.caught
            self.expect_equal("R160", "exceptions that reached the caller", run.caught, caught, check="the exception")
            left = "units that a recovery left unsharded"
            self.expect_equal("R161", left, run.left_unsharded, [], check="clean after recovery")
        if example.regime.optimizer_in_backward:
            if all(grad is not None for record in references.expected.steps for grad in (record.grads or {}).values()):
                self.check(stepped_once(run, requirement="R142"))
        elif has_state:
            self.check(same_state(state, references, requirement="R140"))

    def _check_random_states(self, run: TrainingHistory, expected: TrainingHistory, regime: Regime) -> None:
        """Check that a forward has drawn as many random numbers as without sharding, from the model's own seed."""
        for got, right in zip(run.steps, expected.steps, strict=True):
            # In evaluation mode, the model sets no seed.
            for micro in range(0 if regime.is_in_eval_mode(got.step) else regime.micro_batches):
                self.expect_equal(
                    "R189", f"the state of torch's random numbers after the forward of micro-batch {micro}",
                    got.random_states[micro : micro + 1], right.random_states[micro : micro + 1], step=got.step,
                    phase="forward", check=RANDOM,
                    likely="the engine draws random numbers in a forward, or sets their state: dropout differs",
                )  # fmt: skip

    def _check_kept_outputs(self, run: TrainingHistory) -> None:
        """Check that outputs and state dicts which the user keeps have the values that they came with."""
        for requirement, what, prefix in (
            ("R157", "outputs", "output"),
            ("R010", "outputs of evaluations", "evaluation"),
            ("R150", "state dicts", "state dict"),
        ):
            changed = [name for name in run.changed_outputs if name.startswith(prefix)]
            message = f"{what} that changed after they were returned"
            self.expect_equal(requirement, message, changed, [], check="what the user keeps")

    def _check_dropped_outputs(self, run: TrainingHistory) -> None:
        """Check that the engine keeps no outputs which the user has dropped."""
        self.expect_equal(
            "R039", "outputs that still exist when the user has dropped them", run.held_outputs, [],
            check="what the user drops", likely="the engine keeps outputs, or the graph that belongs to them",
        )  # fmt: skip

    def _check_left_gathered(self, example: Example, run: TrainingHistory, plan: Plan) -> None:
        """Check that evaluations, and looks at the state of the engine, leave no unit gathered that was sharded."""
        reshards = self.declares("zero3") and plan.sharding in _RESHARD and plan.reshard_after_forward in (None, True)
        # In another order, units may be prefetched that do not run any more.
        evaluations = EVALUATIONS if reshards and not example.model.calls else frozenset()
        for requirement, what, actions in (
            # The root may wait for the next forward, which begins with it.
            ("R034", "an evaluation", evaluations),
            ("R048", "the full-parameter context", _CONTEXTS),
            ("R150", "reading or saving state", _STATE),
        ):
            exempt = {"the root"} if actions is evaluations else set()
            left = [unit for action, unit in run.left_gathered if action in actions and unit not in exempt]
            self.expect_equal(
                requirement, f"units that {what} left gathered", left, [], check="resharded again",
                likely=f"not resharded: {what} gathers units, and nothing frees them",
            )  # fmt: skip
        if reshards and not example.model.calls and shard_group_size(example) > 1:
            self._check_resharded_after_forward(run)

    def _check_resharded_after_forward(self, run: TrainingHistory) -> None:
        """Check that no unit below the root stays gathered from its forward to its backward."""
        for record in run.steps:
            for micro, held in enumerate(record.unsharded_after_forward):
                # The root's backward begins at once.
                left = [unit for unit in held or () if unit != "the root"]
                self.expect_equal(
                    "R034", f"units below the root that stay gathered after the forward of micro-batch {micro}", left,
                    [], step=record.step, phase="forward", check="resharded after forward",
                    likely="not resharded: a unit stays gathered until its backward",
                )  # fmt: skip

    def _takes_none_for_zero(self, example: Example) -> bool:
        """True if parameters that a step does not use may have a gradient of zeros (R117)."""
        return not uses_all(example) and not self.declares("unused_untouched")

    def _check_ranks(self, example: Example, run: TrainingHistory) -> None:
        digests = parameter_digests(run, exclude=example.model.local_params())
        self.check_digests(digests, "params", "R007", "cross-rank equality")
        # While a checkpoint is saved, its thread communicates in between.
        if "unused_divergent" not in asks(example) and not example.regime.happens(Action.SAVE_MEANWHILE):
            self.check_same_schedule(run, "R067")

    def _check_traffic(self, example: Example, run: TrainingHistory, workload: Workload, plan: Plan) -> None:
        """Check that no step sends more than its passes need."""
        regime = example.regime
        if plan.sharding is Sharding.NONE or plan.persist_numel or plan.auto_wrap is not None:
            return
        if regime.happens(Action.SAVE_MEANWHILE):
            return
        # Which unit has a parameter that several units use is up to the engine: it may be one that has no other. What
        # is prefetched for nothing, because units run in another order, is few bytes, but a collective.
        counts = self.declares("coll_counts") and "shared_across_units" not in asks(example) and not example.model.calls
        bound = traffic_bound.at_most(
            run, workload, plan, partial(needs_of, example), padding=self.padding, alignment=self.alignment,
            counts=counts, requirement="R068",
        )  # fmt: skip
        self.check(bound)

    def _check_dtypes(self, example: Example, run: TrainingHistory, workload: Workload, plan: Plan) -> None:
        """Check that gradients are reduced in the dtype of the plan, unless a hook of the user reduces."""
        has_one = plan.param_dtype is not None or plan.reduce_dtype is not None
        if has_one and plan.sharding is not Sharding.NONE and not example.summing_hook:
            self.check(communication.reduced_as_planned(run, workload, plan, requirement="R084"))

    def _check_reshard_group(self, example: Example, run: TrainingHistory, workload: Workload, plan: Plan) -> None:
        """Check that backward gathers over the smaller group of the plan, where all units are gathered in backward."""
        size = plan.reshard_after_forward
        between = any(event.moment is Moment.LOSS for event in example.regime.events)
        is_known = (
            trains_all(example) and not example.regime.frozen_at and plan.auto_wrap is None and plan.param_dtype is None
        )
        if type(size) is int and is_known and not between and not plan.persist_numel:
            self.check(groups.reshard_group_used(run, workload, plan, requirement="R005"))

    def _check_growth(self, example: Example, adapter: Adapter) -> None:
        """Train on, without events, and check that no step leaves anything behind."""
        if self.here.device_type != "cpu" or self.order.settings.ranks == "simulated":
            # An accelerator counts bytes for the memory cases; simulated ranks share a process.
            return
        world = World(rank=self.rank, size=example.world_size)
        last = example.regime.steps + _STEPS_ON - 1
        # Of the usual batches, activations are smaller than the model.
        workload = example.workload(growth.LARGE)

        def train_on() -> tuple[growth.Held, growth.Held, growth.Held]:
            module, held = _module(adapter), None
            before = growth.Held.now(module)
            with process_group.log().phase("observe"):
                for step in range(example.regime.steps, last + 1):
                    with self.blaming("implementation"):
                        further_step(adapter, workload, example.regime, world, step)
                    # What differs from step to step is the same in every second one.
                    if step == last - 2:
                        held = growth.Held.now(module)
                assert held is not None, "more than two steps are trained"
                return before, held, growth.Held.settled(module, held)

        before, held, later = self.observe("what is held", train_on)
        requirements = {"bytes": "R039", "hooks": "R189", "groups": "R189", "threads": "R189"}
        self.check(growth.no_more(held, later, rank=self.rank, step=last, requirements=requirements))
        for action, (name, method) in _REPEATED.items():
            if example.regime.happens(action):
                twice = partial(self._held_after_each, adapter, method)
                # Once, an engine may make what it uses from then on.
                first, second = self.observe(f"what a {name} leaves", twice)
                self.check(growth.no_more(first, second, rank=self.rank, step=last, requirements=requirements, by=name))
        size = sum(4 * math.prod(shape) for shape in example.model.shapes().values())
        self.check(
            growth.no_activations(before, later, model_bytes=size, rank=self.rank, step=last, requirement="R039")
        )

    def _held_after_each(self, adapter: Adapter, method: str) -> tuple[growth.Held, growth.Held]:
        """Call a method of the adapter twice, and count what is held after each call, whose result is dropped."""
        module = _module(adapter)
        with process_group.log().phase("observe"):
            with self.blaming("implementation"):
                getattr(adapter, method)()
            first = growth.Held.now(module)
            with self.blaming("implementation"):
                getattr(adapter, method)()
            return first, growth.Held.settled(module, first)

    def _check_sharding(self, example: Example, trained: _Run, workload: Workload) -> None:
        """Check bytes and traffic, where the schedule determines them."""
        (run, plan), adapter = trained.parts[-1], trained.adapter
        regime, model = example.regime, example.model
        # Then some parameters have no gradients, and so no state: the bytes held say less.
        lacks_state = regime.frozen_at or regime.happens(Action.DROP, Action.SKIP, Action.LOAD, Action.LOAD_OPTIMIZER)
        if lacks_state or not trains_all(example) or plan.sharding is Sharding.NONE or plan.persist_numel:
            return
        # After a forward that no backward follows, units may wait for one. Which units a policy has chosen, only the
        # engine knows.
        waits = any(event.action in FORWARDS for event in regime.in_step(regime.steps - 1))
        if shard_group_size(example) > 1 and plan.auto_wrap is None and not waits and not model.calls:
            # In other units if training was resumed so.
            self.check_released(adapter, replace(workload, units=plan.units), "R035", run, plan, regime)
        tensors = run.initial_params.values()
        whole = sum(tensor.nbytes for tensor in tensors)
        if plan.param_dtype is None and whole >= _SHOWS_SHARDING * len(tensors):
            padding = self.padding + max(self.alignment, _TAG) * len(tensors) * example.world_size / whole
            held = self.total(run.held_bytes)
            self.check(
                partition.sharding_witness(run, plan, world_size=example.world_size, padding=padding, total=held)
            )


def _module(adapter: Adapter) -> nn.Module | None:
    """The wrapped module; None if the adapter exposes none, which the protocol allows."""
    try:
        return adapter.module()
    except NotImplementedError:
        return None


def case_for(scenario: Scenario) -> Case:
    """The case of a scenario that `explore` has drawn."""
    return Case(
        id=f"{COMBINATIONS}/{EXPLORED}{scenario.digest}-ws{scenario.world_size}",
        requirements=REQUIREMENTS,
        chapter="A",
        world_size=scenario.world_size,
        title="A drawn scenario is at parity with unsharded training, or the combination is refused.",
        timeout_s=TIMEOUT_S,
    )


class DrawnCase(ScenarioCase):
    """One scenario that was drawn. In the controller, set `scenario` before it runs."""

    scenario: Scenario | None = None
    shares_references = False
    """No other run draws the same scenario."""

    @property
    def case(self) -> Case:
        """The case of the scenario."""
        return case_for(self._scenario)

    @property
    def _scenario(self) -> Scenario:
        if self.scenario is None:
            if not isinstance(self.launch_payload, str):
                raise SuiteError("a drawn case has no scenario: set `scenario` before it runs")
            self.scenario = scenario_from_json(json.loads(self.launch_payload)["scenario"])
        return self.scenario

    @cached_property
    def order(self) -> RunOrder:
        """The order for the run; in a rank it comes with the scenario."""
        return order_from_json(_order_text(self.launch_payload))

    def _spawn_processes(self) -> None:
        self.launch_payload = payload(_order_text(self.launch_payload), self._scenario)
        super()._spawn_processes()

    def test_drawn(self) -> None:
        """A drawn scenario is at parity with unsharded training, or the combination is refused."""
        self.check_scenario(self._scenario)


def payload(order: str, scenario: Scenario) -> str:
    """The JSON that the ranks of a scenario receive."""
    return json.dumps({"order": json.loads(order), "scenario": scenario.to_json()})


def run_on(scenario: Scenario, implementation: str, *, base: RunSettings) -> CaseRecord:
    """
    The record of a scenario on fresh ranks, as `base` says.

    Raises SuiteError, with unittest's output, if it ends without a record.
    """
    before, description = run_settings.current(), run_settings.description()
    run_settings.use(replace(base, implementation=implementation))
    try:
        test = DrawnCase("test_drawn")
        test.scenario = scenario
        result = unittest.TestResult()
        test.run(result)  # type: ignore[no-untyped-call]
    finally:
        run_settings.use(before, description)
    if test.record is None:
        texts = [text for _, text in [*result.errors, *result.failures]] + [reason for _, reason in result.skipped]
        raise SuiteError(f"{test.case.id} on {implementation} ended without a record:\n" + "\n".join(texts))
    return test.record


def bind(owner: type[DrawnCase], scenario: Scenario) -> None:
    """Make a class of `DrawnCase` the case of one scenario."""
    owner.scenario = scenario

    def test_drawn(self: DrawnCase) -> None:
        DrawnCase.test_drawn(self)

    test_drawn.__doc__ = DrawnCase.test_drawn.__doc__
    setattr(test_drawn, CASE_ATTRIBUTE, case_for(scenario))
    owner.test_drawn = test_drawn  # type: ignore[method-assign]


def declined_by(measurements: Mapping[str, Any]) -> str | None:
    """Why the engine declined the combination, from a record's measurements; None if it did not."""
    declines = measurements.get(DECLINED)
    return next(iter(declines.values()), None) if isinstance(declines, dict) else declines


def _order_text(sent: Any) -> str:
    data = json.loads(sent)
    return json.dumps(data["order"]) if "order" in data else str(sent)


def _declines(error: Exception, example: Example, steps_trained: int) -> bool:
    """
    True if an exception is the engine's way to decline a combination.

    It must come before anything was trained, and be made for it. Two backwards through one forward, or a change in
    place, may be rejected wherever they are noticed (R156), by torch itself.
    """
    if steps_trained:
        return False
    if why_no_refusal(error, [""]) is not None:
        return False
    if isinstance(error, (Unsupported, NotImplementedError, ValueError)) or _is_stated(error):
        return True
    words: list[str] = []
    if example.regime.backwards_per_forward > 1:
        words += ["second time", "second backward", "twice", "retain_graph"]
    if example.changes_in_place:
        words += ["modified inplace", "modified by an inplace operation", "modified in place"]
    return any(word in str(error) for word in words)


def _is_stated(error: Exception) -> bool:
    """True for an assertion with a message, by which torch's engines refuse what they were not made for."""
    return isinstance(error, AssertionError) and bool(str(error))


def _attributed(example: Example, workload: Workload) -> Workload:
    """The workload, with attributes of the user on its parameters if the example has them."""
    return replace(workload, build=partial(_with_attributes, workload)) if example.attributes else workload


def _with_attributes(workload: Workload, rank: int) -> nn.Module:
    """The model with an attribute of the user on each parameter."""
    model = workload.build(rank)
    for name, parameter in model.named_parameters():
        setattr(parameter, _ATTRIBUTE, name)
    return model


def _with_other_values(workload: Workload, rank: int, *, which: str) -> nn.Module:
    """The model in which parameters, what a checkpoint saves, or everything has values that are not the right ones."""
    model = workload.build(rank)
    saved = model.state_dict()
    buffers = [each for name, each in model.named_buffers() if which == _EVERYTHING or name in saved]
    with torch.no_grad():
        for tensor in [*model.parameters(), *(buffers if which != _PARAMETERS else ())]:
            tensor.copy_(tensor.logical_not() if tensor.dtype is torch.bool else tensor + 1)
    return model


def _sum(gradient: Tensor, shard: Tensor) -> None:
    """The sum over all ranks, as a user's communication hook."""
    import torch.distributed as dist

    dist.reduce_scatter_tensor(shard, gradient)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:160]
