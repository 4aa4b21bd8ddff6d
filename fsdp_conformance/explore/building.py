"""
From a scenario to an example: the model, the plan and the schedule that a choice of values stands for.

Each axis is one function here, or one entry of a table. What the values leave open (which block, which step, which
numbers) is fixed, or follows from `salt`, so a scenario and a number are an example, on any machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from fsdp_conformance.explore.example import UNREACHED_NORM, Example, Initial
from fsdp_conformance.explore.own_model import OwnModel
from fsdp_conformance.fixtures.drawn import EXACT_STEPS, DrawnBlock, DrawnModel, Passing
from fsdp_conformance.plan import BackwardPrefetch, Offload, Plan, Sharding
from fsdp_conformance.scenarios.scenario import Scenario
from fsdp_conformance.workload.definition import Regime
from fsdp_conformance.workload.events import Action, Event, Moment, in_order

#: The block with something special. The others are as plain as their scenario allows.
_SPECIAL = 1

_EXTRAS: dict[str, tuple[tuple[int, ...], ...]] = {
    "none": (),
    "single elements": ((1,), (1, 1)),
    "several dims": ((3, 12, 2), (2, 12)),
    "scalar": ((),),
    "not contiguous": ((3, 12),),
}

#: Trainings that compute in bfloat16, but reduce gradients in float32.
_REDUCED_IN_FLOAT32 = ("bfloat16, reduced in float32", "bfloat16, one unit in float32")

#: The first three blocks in the order of their calls, by turn. Further blocks follow in order.
_CALLS: dict[str, tuple[tuple[int, ...], ...]] = {
    "another order by step": ((0, 1, 2), (1, 0, 2)),
    "one skipped by step": ((0, 1, 2), (0, 2)),
    "one never": ((0, 2),),
}

#: Uses in which the special block does not run in some step.
_LEAVING_OUT = ("one skipped by step", "one never")

#: A deeper model, or one with more ranks, has more digits than float32, so it cannot be exact.
_EXACT_BLOCKS, _EXACT_RANKS = 4, 4

_SHARDING = {
    "everything": Sharding.FULL,
    "gradients and optimizer": Sharding.GRAD_OPTIM,
    "optimizer": Sharding.OPTIM,
    "nothing": Sharding.NONE,
    "hybrid": Sharding.HYBRID,
    "hybrid, shards of one": Sharding.HYBRID,
    "hybrid, one replica": Sharding.HYBRID,
}

_PREFETCH: dict[str, dict[str, Any]] = {
    "none in backward": {"backward_prefetch": BackwardPrefetch.NONE},
    "before gradients": {"backward_prefetch": BackwardPrefetch.PRE},
    "after gradients": {"backward_prefetch": BackwardPrefetch.POST},
    "forward": {"forward_prefetch": True},
    "the next unit": {"explicit_prefetch": 1},
    "the next two units": {"explicit_prefetch": 2},
}

#: Number of micro-batches, and which of them are reduced; empty: all.
_MICRO_BATCHES: dict[str, tuple[int, tuple[bool, ...]]] = {
    "none": (1, ()),
    "two reduced": (2, ()),
    "two, first deferred": (2, (False, True)),
    "three, two deferred": (3, (False, False, True)),
    "three, middle deferred": (3, (True, False, True)),
    "kept gathered": (2, (False, True)),
    "deferred in one unit": (2, (False, True)),
    "deferred over replicas": (2, ()),
}

_ASIDE = {"nothing": "", "a frozen module": "frozen", "a trained module": "trained"}

_OPTIMIZERS = {
    "sgd": "sgd",
    "adam, foreach": "adam-foreach",
    "adamw, fused": "adamw-fused",
    "sgd, in groups": "sgd-groups",
    "sgd, two of them": "sgd-two",
}

_CLIPPING: dict[str, dict[str, Any]] = {
    "2-norm": {"max_norm": 1.0},
    "1-norm": {"max_norm": 8.0, "norm_type": 1.0},
    "largest element": {"max_norm": 0.5, "norm_type": float("inf")},
    "never reached": {"max_norm": UNREACHED_NORM},
}

#: Value of an axis of events to the points at which it happens: action, moment, step.
_EVENTS: dict[str, dict[str, tuple[tuple[Action, Moment, int], ...]]] = {
    "evaluation": {
        "before steps": ((Action.EVALUATE, Moment.STEP, 1), (Action.EVALUATE, Moment.STEP, 2)),
        "between the passes": ((Action.EVALUATE, Moment.LOSS, 0), (Action.EVALUATE, Moment.LOSS, 2)),
        "before the optimizer": ((Action.EVALUATE, Moment.OPTIMIZER, 0), (Action.EVALUATE, Moment.OPTIMIZER, 1)),
        "in inference mode first": ((Action.INFER, Moment.STEP, 0), (Action.INFER, Moment.END, 1)),
    },
    "forward alone": {
        "before a step": ((Action.FORWARD, Moment.STEP, 0), (Action.FORWARD, Moment.STEP, 2)),
        "after a backward": ((Action.FORWARD, Moment.OPTIMIZER, 0), (Action.FORWARD, Moment.OPTIMIZER, 1)),
    },
    "full parameters": {
        "read between steps": ((Action.READ, Moment.STEP, 0), (Action.READ, Moment.END, 1)),
        "read before the optimizer": ((Action.READ, Moment.OPTIMIZER, 0), (Action.READ, Moment.OPTIMIZER, 1)),
    },
    "gathered by hand": {
        "before a forward": ((Action.UNSHARD, Moment.FORWARD, 0), (Action.UNSHARD, Moment.FORWARD, 2)),
        "between the passes": ((Action.UNSHARD, Moment.LOSS, 0), (Action.UNSHARD, Moment.LOSS, 1)),
        "after a backward": ((Action.UNSHARD, Moment.BACKWARD, 0), (Action.UNSHARD, Moment.BACKWARD, 1)),
    },
    "written by the user": {
        "parameters in place": ((Action.WRITE, Moment.STEP, 1), (Action.WRITE, Moment.END, 1)),
        "parameters assigned": ((Action.ASSIGN, Moment.STEP, 1), (Action.ASSIGN, Moment.END, 1)),
        "gradients in place": (
            (Action.WRITE_GRADIENT, Moment.OPTIMIZER, 0), (Action.WRITE_GRADIENT, Moment.OPTIMIZER, 1)
        ),
        "gradients assigned": (
            (Action.ASSIGN_GRADIENT, Moment.OPTIMIZER, 0), (Action.ASSIGN_GRADIENT, Moment.OPTIMIZER, 1)
        ),
    },
    "full-parameter context": {
        "values read": ((Action.SHOW, Moment.STEP, 0), (Action.SHOW, Moment.OPTIMIZER, 1)),
        "parameters written": ((Action.WRITE_SHOWN, Moment.STEP, 1), (Action.WRITE_SHOWN, Moment.END, 1)),
        "gradients written": (
            (Action.WRITE_SHOWN_GRADIENT, Moment.OPTIMIZER, 0), (Action.WRITE_SHOWN_GRADIENT, Moment.OPTIMIZER, 1)
        ),
    },
    "clipping by the user": {
        "values": ((Action.CLIP_VALUES, Moment.OPTIMIZER, 0), (Action.CLIP_VALUES, Moment.OPTIMIZER, 1)),
        "norm of some": ((Action.CLIP_SOME, Moment.OPTIMIZER, 0), (Action.CLIP_SOME, Moment.OPTIMIZER, 1)),
    },
    "dropped": {
        "one gradient": ((Action.DROP, Moment.OPTIMIZER, 0), (Action.DROP, Moment.OPTIMIZER, 1)),
        "a whole step": ((Action.SKIP, Moment.OPTIMIZER, 1),),
    },
    "learning rate": {"new": ((Action.LEARNING_RATE, Moment.STEP, 1), (Action.LEARNING_RATE, Moment.END, 1))},
    "zeroing": {"zeros": ((Action.ZEROS, Moment.STEP, 0),)},
    "checkpoints": {
        "saved": ((Action.SAVE, Moment.STEP, 1), (Action.SAVE, Moment.END, 1)),
        "loaded at once": ((Action.SAVE, Moment.STEP, 1), (Action.LOAD, Moment.STEP, 1)),
        "loaded later": ((Action.SAVE, Moment.END, 0), (Action.LOAD, Moment.END, 1)),
        "second one loaded": (
            (Action.SAVE, Moment.STEP, 0), (Action.SAVE, Moment.END, 0), (Action.LOAD, Moment.END, 1)
        ),
        "saved meanwhile": ((Action.SAVE_MEANWHILE, Moment.END, 0), (Action.LOAD, Moment.END, 1)),
    },
    "evaluation in accumulation": {
        # After the backward of the first micro-batch.
        "between micro-batches": ((Action.EVALUATE, Moment.BACKWARD, 0), (Action.EVALUATE, Moment.BACKWARD, 1)),
    },
    "state dicts": {
        "full": (
            (Action.TAKE_MODEL, Moment.END, 0), (Action.LOAD_MODEL, Moment.STEP, 1), (Action.LOAD_MODEL, Moment.END, 1)
        ),
        "sharded": (
            (Action.TAKE_SHARDS, Moment.END, 0), (Action.LOAD_SHARDS, Moment.STEP, 1),
            (Action.LOAD_SHARDS, Moment.END, 1),
        ),
        "of the optimizer": (
            (Action.TAKE_OPTIMIZER, Moment.END, 0), (Action.LOAD_OPTIMIZER, Moment.STEP, 1),
            (Action.LOAD_OPTIMIZER, Moment.END, 1),
        ),
    },
    "moved": {
        "to its device": ((Action.MOVE, Moment.END, 0), (Action.MOVE, Moment.STEP, 2)),
        "to its dtype": ((Action.CAST, Moment.END, 0), (Action.CAST, Moment.STEP, 2)),
        "to another dtype and back": ((Action.CAST_BACK, Moment.END, 0), (Action.CAST_BACK, Moment.STEP, 2)),
    },
    "exception": {
        "in forward": ((Action.RAISE, Moment.FORWARD, 0), (Action.RAISE, Moment.FORWARD, 1)),
        "in backward": ((Action.RAISE, Moment.LOSS, 0), (Action.RAISE, Moment.LOSS, 1)),
        "before the optimizer": ((Action.RAISE, Moment.OPTIMIZER, 0), (Action.RAISE, Moment.OPTIMIZER, 1)),
    },
    "derivatives": {
        "of inputs before a step": ((Action.DIFFERENTIATE, Moment.STEP, 0), (Action.DIFFERENTIATE, Moment.STEP, 2)),
        "of inputs after a backward": (
            (Action.DIFFERENTIATE, Moment.OPTIMIZER, 0), (Action.DIFFERENTIATE, Moment.OPTIMIZER, 1)
        ),
    },
    "trains in": {"evaluation mode, from the second step": ((Action.EVAL_MODE, Moment.END, 0),)},
    "mode": {
        "toggled": ((Action.TOGGLE, Moment.LOSS, 0), (Action.TOGGLE, Moment.FORWARD, 1)),
        "toggled on one rank": ((Action.TOGGLE, Moment.LOSS, 0), (Action.TOGGLE, Moment.FORWARD, 1)),
    },
}  # fmt: skip

#: Each multiplies one parameter, or its gradient.
_WRITING = frozenset({
    Action.WRITE, Action.ASSIGN, Action.WRITE_GRADIENT, Action.ASSIGN_GRADIENT, Action.WRITE_SHOWN,
    Action.WRITE_SHOWN_GRADIENT,
})  # fmt: skip

#: The factor of what is written: a power of two, so that exact models stay exact.
_FACTOR = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class _Numbers:
    """The names and values of events, for the first and for the second of a kind: powers of two, too."""

    written: tuple[str, str]
    """The parameters that are written, or whose gradients are."""
    clipped: tuple[str, ...]
    """The parameters whose norm the user clips: of the root, and of a unit."""
    rates: tuple[float, float] = (0.25, 0.0625)
    """New learning rates."""
    largest: tuple[float, float] = (0.25, 0.125)
    """The largest elements of gradients after clipping by the user."""
    norms: tuple[float, float] = (0.25, 0.125)
    """Their largest norms."""


def example_of(scenario: Scenario, *, salt: int | None = None) -> Example:
    """The example of a scenario. `salt` chooses the numbers of the model and its batches; None: the scenario's."""
    if scenario.workload:
        return _OwnBuilder(scenario, scenario.choice, 0, OwnModel(scenario.workload)).example()
    return _Builder(scenario, scenario.choice, scenario.salt if salt is None else salt).example()


def second_model(example: Example) -> Example:
    """A plain model beside that of an example: sharded, accumulated and clipped alike, for as many steps."""
    regime, size = example.regime, max(example.world_size, 2)
    model = DrawnModel(
        inputs=size,
        # No rank is without a part of a parameter: that is another axis.
        width=2 * size,
        outputs=size,
        blocks=(DrawnBlock(hidden=size),) * 2,
        smooth=regime.max_norm not in (None, UNREACHED_NORM),
        salt=example.model.salt + 1,
    )
    # A unit that is deferred by itself is one of the other model.
    defers = not example.plan.deferred_units
    plan = Plan(
        sharding=example.plan.sharding,
        replicas=example.plan.replicas,
        units=model.units(),
        reshard_after_forward=example.plan.reshard_after_forward,
        offload=example.plan.offload,
        micro_batches=regime.micro_batches,
        defer_reduction=example.plan.defer_reduction and defers,
        defer_all_reduce=example.plan.defer_all_reduce,
        reshard_after_backward=example.plan.reshard_after_backward,
    )
    beside = Regime(
        steps=regime.steps,
        micro_batches=regime.micro_batches,
        reduced=regime.reduced if defers else (),
        max_norm=regime.max_norm,
        norm_type=regime.norm_type,
        keep_outputs=True,
    )
    return Example(world_size=example.world_size, model=model, plan=plan, regime=beside)


@dataclass(frozen=True, slots=True)
class _Builder:
    """Makes the parts of an example, each from the axes that it depends on."""

    scenario: Scenario
    choice: dict[str, str]
    salt: int

    def example(self) -> Example:
        model = self._model()
        return self._example(model, self._plan(model), self._block_name(0))

    def _example(self, model: DrawnModel | OwnModel, plan: Plan, left: str) -> Example:
        """The example; `left` is the unit that a new engine leaves to the root."""
        others = tuple(unit for unit in plan.units if unit != left)
        return Example(
            world_size=self._ranks,
            model=model,
            plan=plan,
            regime=self._regime(model, plan, others or plan.units),
            initial=Initial(self.choice["initial values"]),
            attributes=self.choice["attributes of parameters"] != "none",
            summing_hook=self.choice["communication hook"] == "sum",
            second=self.choice["second model"] != "none",
            resumed={"by a new engine": plan, "in other units": replace(plan, units=others)}.get(
                self.choice["resumed"]
            ),
        )

    @property
    def _ranks(self) -> int:
        return self.scenario.world_size

    def _block_name(self, index: int) -> str:
        return f"{self.scenario.extent.names[1]}.{index}"

    @property
    def _special(self) -> str:
        """The name of the block with something special."""
        return self._block_name(_SPECIAL)

    @property
    def _smooth(self) -> bool:
        """True if the training rounds, so that the model must not have steps."""
        extent = self.scenario.extent
        return (
            extent.steps > EXACT_STEPS
            or extent.blocks > _EXACT_BLOCKS
            or self._ranks > _EXACT_RANKS
            or self.choice["optimizer"] in ("adam, foreach", "adamw, fused")
            or self.choice["clipping"] in ("2-norm", "1-norm", "largest element")
            or self.choice["clipping by the user"] == "norm of some"
        )

    # --- the model ---------------------------------------------------------------------------------------------------

    def _model(self) -> DrawnModel:
        choice = self.choice
        inputs, width, hidden, outputs = self._sizes()
        return DrawnModel(
            inputs=inputs,
            width=width,
            outputs=outputs,
            blocks=tuple(self._block(index, hidden) for index in range(self.scenario.extent.blocks)),
            calls=tuple((*called, *range(3, self.scenario.extent.blocks)) for called in _CALLS.get(choice["use"], ())),
            ends_are_units=choice["units"] == "each block and both ends",
            joined=choice["units"] == "two blocks as one",
            ties=self._ties(),
            frozen=self._frozen(),
            smooth=self._smooth,
            passing=Passing(
                inputs=choice["inputs"],
                leaf=choice["input gradients"] != "none",
                outputs=choice["outputs"],
                types=choice["types of outputs"],
                checkpointing=choice["checkpointing"],
                hooks=choice["hooks of modules"],
            ),
            dropout=choice["dropout"] != "none",
            overflows=choice["overflow"] != "none",
            ragged={"shape by step": "step", "shape by rank": "rank", "shape by micro-batch": "micro"}.get(
                choice["batches"], ""
            ),
            casts=choice["precision"] == "bfloat16, one unit in float32" or choice["dtypes"] == "one for each unit",
            fine=choice["precision"] != "float32",
            # Where gradients are reduced in bfloat16, it is open in which dtype an engine adds them up.
            finer_micro_batches=choice["precision"] in _REDUCED_IN_FLOAT32,
            salt=self.salt,
            names=self.scenario.extent.names,
        )

    def _sizes(self) -> tuple[int, int, int, int]:
        """Features of a sample, between blocks, inside them, and of the head."""
        inputs, width, hidden, outputs = self._smallest_sizes()
        extent = self.scenario.extent
        return inputs, width + self._ranks * extent.wider, extent.hidden or hidden, outputs

    def _smallest_sizes(self) -> tuple[int, int, int, int]:
        ranks = self._ranks
        match self.choice["rows"]:
            case "uneven":
                return (3, 2 * ranks + 1, ranks + 1, ranks + 1) if ranks > 1 else (3, 3, 3, 3)
            case "fewer than ranks":
                return 3, ranks + 1, 1, 1
            case _:
                return max(ranks, 2), max(2 * ranks, 4), max(ranks, 2), max(ranks, 2)

    def _block(self, index: int, hidden: int) -> DrawnBlock:
        choice, special = self.choice, index == _SPECIAL
        # An extra parameter in float64 has a gradient that float32 would round.
        double = {"two in a unit": "extras", "one for each unit": "all"}.get(choice["dtypes"], "") if special else ""
        units = choice["units"]
        inner: tuple[DrawnBlock, ...] = ()
        if choice["ties"] == "within a unit" and special:
            inner = (DrawnBlock(hidden=hidden, is_unit=False),)
        if units == "nested" and index != 2:
            inner += (DrawnBlock(hidden=hidden, is_unit=True),)
        return DrawnBlock(
            hidden=hidden,
            bias=index != 2,
            extras=_EXTRAS[choice["other shapes"]] or (((3,),) if double else ()),
            transposed=choice["other shapes"] == "not contiguous",
            inner=inner,
            is_unit=units != "only the root" and (units != "some blocks" or special),
            repeat=2 if choice["use"] == "one twice" and special else 1,
            by_rank=choice["use"] == "by rank" and special,
            counts=choice["buffers"] in ("counter", "not persistent") and index != 2,
            is_persistent=choice["buffers"] != "not persistent",
            runs=choice["buffers"] == "running values" and index != 2,
            packed=choice["dtypes"] == "packed integers" and special,
            double=double,
            # In a block that always runs: what is left out elsewhere must not touch it.
            aside=_ASIDE[choice["ignored"]] if index == (0 if choice["use"] in _LEAVING_OUT else _SPECIAL) else "",
        )

    def _ties(self) -> tuple[tuple[str, str], ...]:
        match self.choice["ties"]:
            case "within a unit":
                return ((f"{self._special}.inner.0.up.weight", f"{self._special}.up.weight"),)
            case "across units":
                return ((f"{self._block_name(2)}.up.weight", f"{self._special}.up.weight"),)
            case _:
                return ()

    def _frozen(self) -> tuple[str, ...]:
        return {
            "a block": (self._special,),
            "the first layer": (self.scenario.extent.names[0],),
            "part of a block": (f"{self._special}.down.weight",),
            # The root would mix it with others if it were no unit.
            "thawed later": (self._special if self.choice["units"] == "some blocks" else self._block_name(0),),
        }.get(self.choice["frozen"], ())

    # --- the plan ----------------------------------------------------------------------------------------------------

    def _units(self, model: Any) -> tuple[str, ...]:
        """The units that the plan names."""
        units: tuple[str, ...] = model.units()
        return units

    def _special_unit(self, model: Any) -> str:
        """The unit that is treated in its own way."""
        return next(unit for unit in self._units(model) if self._special in unit.split("+"))

    def _policy(self) -> str | None:
        """The policy that chooses the units; None: the plan names them."""
        return {"chosen by class": "class:Block", "chosen by size": "size:20"}.get(self.choice["units"])

    def _plan(self, model: DrawnModel | OwnModel) -> Plan:
        choice = self.choice
        low = choice["precision"] != "float32"
        policy = self._policy()
        return Plan(
            sharding=_SHARDING.get(choice["sharding"], Sharding.DEFAULT),
            replicas={"hybrid": 2, "hybrid, shards of one": self._ranks}.get(choice["sharding"], 1),
            units=self._units(model) if policy is None else (),
            auto_wrap=policy,
            reshard_after_forward={"after forward": True, "after backward": False, "to a smaller group": 2}.get(
                choice["resharding"]
            ),
            shard_dim=int(choice["shard dim"]),
            ignored=model.ignored(),
            persist_numel=6 if choice["small parameters"] == "whole" else 0,
            offload=Offload.CPU if choice["offload"] == "CPU" else Offload.OFF,
            param_dtype="bfloat16" if low else None,
            reduce_dtype="float32" if low and choice["precision"] != "bfloat16" else None,
            unit_dtypes=((self._special_unit(model), "float32"),)
            if choice["precision"] == "bfloat16, one unit in float32"
            else (),
            sync_module_states=choice["initial values"] == "from the first rank",
            meta_init=choice["built"] == "on meta",
            micro_batches=_MICRO_BATCHES[choice["accumulation"]][0],
            defer_reduction=bool(_MICRO_BATCHES[choice["accumulation"]][1]),
            deferred_units=(self._special_unit(model),) if choice["accumulation"] == "deferred in one unit" else (),
            reshard_after_backward=False if choice["accumulation"] == "kept gathered" else None,
            defer_all_reduce=choice["accumulation"] == "deferred over replicas",
            **_PREFETCH.get(choice["prefetch"], {}),
        )

    # --- the schedule ------------------------------------------------------------------------------------------------

    def _frozen_at(self, model: Any) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Steps from which other parameters are frozen, with their names."""
        match self.choice["frozen"]:
            case "later":
                return ((1, tuple({*model.never_trained(), *_below(model, self._special)})),)
            case "thawed later":
                return ((1, model.never_trained()),)
            case _:
                return ()

    def _of_model(self, model: Any) -> dict[str, Any]:
        """The fields of the regime that depend on what the model is."""
        return {
            "optimizer": _OPTIMIZERS[self.choice["optimizer"]],
            "unused_parameters": True,
            "keep_outputs": True,
            **_CLIPPING.get(self.choice["clipping"], {}),
        }

    def _numbers(self, model: Any) -> _Numbers:
        first, _, head = self.scenario.extent.names
        block = f"{self._block_name(0)}.up.weight"
        return _Numbers(written=(block, f"{head}.bias"), clipped=(f"{first}.weight", block))

    def _regime(self, model: DrawnModel | OwnModel, plan: Plan, units: tuple[str, ...]) -> Regime:
        """`units`: those that every engine of the training has, and that events gather by hand."""
        choice = self.choice
        micro_batches, reduced = _MICRO_BATCHES[choice["accumulation"]]
        regime = Regime(
            steps=self.scenario.extent.steps,
            micro_batches=micro_batches,
            reduced=reduced,
            init_scale=4.0 if choice["loss scaling"] == "dynamic" else None,
            clearing={"by hand": "hand", "not after the first step": "late"}.get(choice["clearing"], "optimizer"),
            backward_from="output" if choice["derivatives"] == "of outputs" else "loss",
            backwards_per_forward=2 if choice["backwards"] == "two of one forward" else 1,
            optimizer_in_backward=choice["update"] == "in backward",
            frozen_at=self._frozen_at(model),
            sums=choice["gradients divided by"] == "one" or choice["communication hook"] == "sum",
            keep_input_gradients=True,
            **self._of_model(model),
        )
        numbers = self._numbers(model)
        events = [
            self._event(index, action, moment, step, numbers, units)
            for axis, values in _EVENTS.items()
            for index, (action, moment, step) in enumerate(values.get(choice[axis], ()))
        ]
        return replace(regime, events=in_order(events))

    def _event(
        self, index: int, action: Action, moment: Moment, step: int, numbers: _Numbers, units: tuple[str, ...]
    ) -> Event:
        fields: dict[str, Any] = {}
        match action:
            case Action.UNSHARD:
                fields["names"] = (units[-1 - index % len(units)],)
            case Action.LEARNING_RATE:
                fields["value"] = numbers.rates[index]
            case action if action in _WRITING:
                fields["names"] = tuple(dict.fromkeys(numbers.written))  # a small model may have only one
                fields["value"] = _FACTOR
            case Action.CLIP_VALUES:
                fields["value"] = numbers.largest[index]
            case Action.CLIP_SOME:
                fields["names"] = numbers.clipped
                fields["value"] = numbers.norms[index]
            case Action.DROP:
                fields["names"] = (numbers.written[index],)
            case Action.TOGGLE if self.choice["mode"] == "toggled on one rank":
                fields["ranks"] = (index,)
        return Event(action=action, moment=moment, step=step, **fields)


@dataclass(frozen=True, slots=True)
class _OwnBuilder(_Builder):
    """The same for the user's own model: its values are clipped, and its rates lowered, by what one batch shows."""

    own: OwnModel

    def example(self) -> Example:
        shared = [unit for unit in self.own.workload.units if unit not in self.own.workload.local_units]
        return self._example(self.own, self._plan(self.own), shared[0] if shared else "")

    def _units(self, model: Any) -> tuple[str, ...]:
        units, joined = self.own.workload.units, self.own.neighbours()
        match self.choice["units"]:
            case "only the root":
                return self.own.workload.local_units
            case "some blocks":
                return tuple(unit for unit in units[1::2] if unit not in self.own.workload.local_units) + (
                    self.own.workload.local_units
                )
            case "two blocks as one" if joined is not None:
                return (*(unit for unit in units if unit not in joined), "+".join(joined))
            case _:
                return units

    def _special_unit(self, model: Any) -> str:
        shared = [unit for unit in self._units(model) if unit not in self.own.workload.local_units]
        return shared[-1]

    def _policy(self) -> str | None:
        largest = max(math.prod(shape) for shape in self.own.shapes().values())
        by_class, by_size = f"class:{self.own.measured.unit_class}", f"size:{largest}"
        return {"chosen by class": by_class, "chosen by size": by_size}.get(self.choice["units"])

    def _frozen_at(self, model: Any) -> tuple[tuple[int, tuple[str, ...]], ...]:
        return ()

    def _of_model(self, model: Any) -> dict[str, Any]:
        clipping = dict(_CLIPPING.get(self.choice["clipping"], {}))
        if clipping and clipping["max_norm"] != UNREACHED_NORM:
            clipping["max_norm"] = _below_it(self.own.measured.norms[clipping.get("norm_type", 2.0)])
        return {
            "optimizer": self.own.optimizer(self.choice["optimizer"]),
            "unused_parameters": not self.own.uses_all,
            "keep_outputs": self.own.measured.has_tensor_output,
            **clipping,
        }

    def _numbers(self, model: Any) -> _Numbers:
        measured = self.own.measured
        rate, largest = _below_it(measured.rate), _below_it(measured.norms[math.inf])
        norm = _below_it(measured.norm_of_written)
        return _Numbers(
            written=measured.written,
            clipped=tuple(dict.fromkeys(measured.written)),
            rates=(rate, rate / 4),
            largest=(largest, largest / 2),
            norms=(norm, norm / 2),
        )


def _below_it(value: float) -> float:
    """A power of two between a quarter and a half of the value, at which clipping strikes and rates differ."""
    return 2.0 ** (math.floor(math.log2(value)) - 1) if value > 0 else 1.0


def _below(model: DrawnModel, block: str) -> tuple[str, ...]:
    """The parameters of a block."""
    return tuple(name for name in model.shapes() if name.startswith(f"{block}."))
