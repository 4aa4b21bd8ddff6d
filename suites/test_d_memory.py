"""D. Parameter lifecycle and memory: what is held when, and that it is freed. Bytes are counted exactly."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks import memory
from fsdp_conformance.checks.result import comparison
from fsdp_conformance.fixtures import deep, probes, storage
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.plan import Offload, Plan, Sharding
from fsdp_conformance.workload.definition import Regime, Workload
from fsdp_conformance.workload.events import Action


class Bytes(ConformanceTestCase):
    """The memory that the accelerator's allocator holds at the boundaries of the phases of a step."""

    @conformance_case(
        "R033",
        chapter="D",
        axes={"world_size": (2, 3, 4)},
        environment=("accelerator",),
        kills=("keeps-full-parameters",),
    )
    def test_shards_alone(self, world_size: int) -> None:
        """After wrapping, a rank holds its shard of the parameters, its buffers, and nothing else."""
        workload = deep.deep_4()
        plan = self.plan(workload)
        run = self.train(workload, plan)
        meant = self._as_meant(plan)
        self.check(
            memory.shards_alone(run, workload, meant, total=self.total(memory.held_figures(run)), **self._declared())
        )
        self.check_parity(run, workload)

    @conformance_case(
        "R034",
        chapter="D",
        axes={"world_size": (2, 4), "reshard": (True, False)},
        needs=("zero3", "reshard_after_forward", "sharded_state"),
        environment=("accelerator",),
        kills=lambda values: (
            ["keeps-parameters-after-forward", "hoards-parameters", "reference-keeps-parameters-after-forward"]
            if values["reshard"]
            else ["ignores-reshard"]
        ),
    )
    def test_freed_after_forward(self, world_size: int, reshard: bool) -> None:
        """At the loss, a unit that is resharded after forward holds no full parameters; one that is not holds all."""
        workload = deep.deep_4()
        plan = self.plan(
            workload, sharding=Sharding.FULL if reshard else Sharding.GRAD_OPTIM, reshard_after_forward=reshard
        )
        run = self.train(workload, plan, on_loss=partial(self._expect_state, workload, reshard))
        activations = self.activations(workload)
        self.check(memory.resharded_after_forward(run, workload, plan, activations, world_size=world_size))
        self.check_parity(run, workload)

    def _expect_state(self, workload: Workload, reshard: bool, adapter: Adapter, step: int) -> None:
        for unit in workload.units:
            where: dict[str, Any] = {"fqn": unit, "step": step, "phase": "forward", "check": "unit state at the loss"}
            self.expect_equal("R034", "unsharded at the loss", adapter.unit_is_unsharded(unit), not reshard, **where)

    @conformance_case(
        "R035",
        chapter="D",
        axes={"world_size": (2, 4)},
        environment=("accelerator",),
        kills=("keeps-full-gradients", "reshards-when-read"),
    )
    def test_nothing_full_after_backward(self, world_size: int) -> None:
        """When backward returns, a rank holds shards of parameters and gradients, and no unit is unsharded."""
        workload = deep.deep_4()
        plan = self.plan(workload)
        regimes = [Regime()]
        if self.declares("no_sync"):
            # What was accumulated without a reduction is full, and must not outlive the one that takes it in.
            regimes.append(Regime(micro_batches=2, reduced=(False, True)))
        for regime in regimes:
            adapter = self.subject()
            run = self.train(workload, plan, regime, adapter=adapter)
            total, meant = self.total(memory.backward_growth(run)), self._as_meant(plan)
            self.check(memory.nothing_full_after_backward(run, workload, meant, total=total, **self._declared()))
            self.check_released(adapter, workload, "R035", run, plan)
            self.check_parity(run, workload, regime)

    def _declared(self) -> dict[str, Any]:
        """The figures that bounds depend on besides the model and the plan."""
        return {"world_size": self.world_size, "padding": self.padding, "buffers": self.kept_buffers}

    def _as_meant(self, plan: Plan) -> Plan:
        """The plan, with the only degree that an engine with ZeRO-1 or ZeRO-2 alone can mean by its default."""
        declared = [flag for flag in ("zero1", "zero2", "zero3", "no_shard") if self.declares(flag)]
        alone = {"zero1": Sharding.OPTIM, "zero2": Sharding.GRAD_OPTIM}
        return replace(plan, sharding=alone.get(declared[0], plan.sharding)) if len(declared) == 1 else plan

    @conformance_case(
        "R035",
        chapter="D",
        world_size=2,
        needs=("sharded_state",),
        environment=("accelerator",),
        kills=("keeps-unused-unsharded", "reshards-when-read"),
    )
    def test_unused_unit_is_resharded(self) -> None:
        """A unit whose output does not reach the loss is resharded when backward returns, like the others."""
        workload = probes.exact_unused()
        adapter = self.subject()
        regime = Regime(unused_parameters=True)
        run = self.train(workload, adapter=adapter, regime=regime)
        self.check_released(adapter, workload, "R035", run, regime=regime)
        self.check_parity(run, workload, regime, none_or_zero=True)

    @conformance_case(
        "R038",
        chapter="D",
        axes={"world_size": (2, 4), "reshard": (True, False)},
        needs=lambda values: ("mem_bounds", "zero3" if values["reshard"] else "zero2"),
        environment=("accelerator",),
        kills=lambda values: [
            "gathers-everything-first" if values["reshard"] else "keeps-full-gradients", "keeps-full-parameters"
        ],
    )  # fmt: skip
    def test_peaks(self, world_size: int, reshard: bool) -> None:
        """Peak memory is a few units, whatever the depth, or the whole model if parameters are kept."""
        workload = deep.deep_8()
        plan = self.plan(workload, sharding=Sharding.FULL if reshard else Sharding.GRAD_OPTIM)
        run = self.train(workload, plan)
        activations = self.activations(workload)
        self.check(
            memory.peaks(
                run, workload, plan, activations,
                world_size=world_size, padding=self.padding, transport_copies=int(self.share_devices),
            )
        )  # fmt: skip

    @conformance_case(
        "R039",
        "R033",
        "R035",
        chapter="D",
        axes={"world_size": (2,), "optimizer": ("sgd", "adam"), "micro_batches": (1, 3)},
        only=lambda values: values["optimizer"] == "sgd" or values["micro_batches"] == 1,
        environment=("accelerator",),
        kills=(
            "leaks-every-step",
            "hoards-parameters",
            "reference-hoards-parameters",
        ),
    )
    def test_no_growth(self, world_size: int, optimizer: str, micro_batches: int) -> None:
        """Exactly as many bytes are held after the third, fourth and fifth step as after the second, and no more than
        the plan leaves a rank."""
        workload = deep.deep_4()
        regime = Regime(optimizer=optimizer, steps=5, micro_batches=micro_batches)
        run = self.train(workload, self.plan(workload), regime)
        self.check(memory.no_growth(run))
        self._check_throughout(run, workload, self.plan(workload))

    @conformance_case(
        "R039",
        "R033",
        "R035",
        chapter="D",
        axes={"world_size": (2, 4), "optimizer": ("sgd", "adam")},
        only=lambda values: values["world_size"] == 4 or values["optimizer"] == "sgd",
        kills=("keeps-each-step-on-the-host", "keeps-copies-after-the-first-step"),
        timeout_s=120,
        processes="it counts the memory of each rank's process",
    )
    def test_held_throughout(self, world_size: int, optimizer: str) -> None:
        """From wrap to the last step, a rank holds what the plan leaves it and no more, on the device and the host."""
        self._check_weighed(Regime(steps=3 * memory.PERIOD + 1, optimizer=optimizer))

    @conformance_case(
        "R039",
        "R033",
        "R035",
        chapter="D",
        world_size=2,
        needs=("cpu_offload_params",),
        environment=("accelerator", "pinned_memory"),
        kills=(
            "leaks-every-step",
            "hoards-parameters",
            "reference-hoards-parameters",
            "keeps-each-step-on-the-host",
        ),
        timeout_s=120,
        processes="it counts the memory of each rank's process",
    )
    def test_no_growth_with_offload(self) -> None:
        """With parameters offloaded to pinned memory, neither the device nor the host holds more from step to step."""
        run = self._check_weighed(Regime(steps=3 * memory.PERIOD + 1), offload=Offload.CPU_PINNED)
        self.check(memory.no_growth(run))

    def _check_weighed(self, regime: Regime, **changes: Any) -> TrainingHistory:
        """Train a model so large that copies of it show in the memory of a process, and check what is held."""
        # What torch, the engine and the system load and allocate once is there when the other training begins.
        self._train_weighed(deep.deep_16(), replace(regime, steps=2), changes)
        workload = deep.deep_16_large()
        run = self._train_weighed(workload, regime, changes)
        plan = self.plan(workload, **changes)
        self._check_throughout(run, workload, plan)
        self.check(memory.no_leak(run, workload, self._as_meant(plan), world_size=self.world_size))
        return run

    def _train_weighed(self, workload: Workload, regime: Regime, changes: dict[str, Any]) -> TrainingHistory:
        adapter, plan = self.subject(), self.plan(workload, **changes)
        run = self.train(workload, plan, regime, adapter=adapter, observe=False, weighs_host=True)
        self.drop(adapter)
        return run

    def _check_throughout(self, run: TrainingHistory, workload: Workload, plan: Plan) -> None:
        total = self.total(memory.held_figures(run))
        self.check(memory.held_throughout(run, workload, self._as_meant(plan), total=total, **self._declared()))

    @conformance_case(
        "R040",
        chapter="D",
        axes={"world_size": (2,), "at_once": (False, True)},
        environment=("accelerator",),
        kills=(
            "survives-its-owner",
            "reference-survives-its-owner",
        ),
    )
    def test_given_back(self, world_size: int, at_once: bool) -> None:
        """When the model is dropped, its memory is freed: immediately, and at the latest by the garbage collector."""
        workload = deep.deep_4()
        plan = self.plan(workload)
        adapter = self.subject()
        run = self.train(workload, plan, adapter=adapter)
        self.check(memory.gradients_freed(run, workload, plan, world_size=world_size))
        with self.no_garbage_collection():
            self.drop(adapter)
            del adapter
            if not at_once:
                gc.collect()
            self.check(memory.all_freed(run, self.allocated_bytes_without_backend(memory.bytes_before(run))))

    @conformance_case(
        "R042",
        chapter="D",
        axes={"world_size": (2,), "depth": (4, 8)},
        needs=("rate_limit", "sharded_state", "zero3"),
        environment=("accelerator",),
        kills=("gathers-everything-first", "prefetches-too-far", "hides-gathered-units"),
    )
    def test_bounded_number_of_units(self, world_size: int, depth: int) -> None:
        """While a unit computes, at most the declared number of units is unsharded: by its own account and by bytes."""
        workload = {4: deep.deep_4, 8: deep.deep_8}[depth]()
        adapter = self.subject()
        counts: list[tuple[str, int]] = []
        held: list[tuple[str, int, int]] = []

        def count(moment: str, module: nn.Module) -> None:
            # Every unit computes once in forward and once in backward.
            held.append((moment, len(held) // (2 * depth), self.allocated_bytes()))
            counts.append((moment, sum(adapter.unit_is_unsharded(unit) for unit in workload.units)))

        plan = self.plan(workload, sharding=Sharding.FULL)
        watch = self.with_module(lambda module: deep.visit(module, count))
        run = self.train(workload, plan, adapter=adapter, on_setup=watch)
        counts, held = self.observe("visits", lambda: (counts, held))
        self.check_parity(run, workload)
        self.expect_equal("R042", "visits", len(counts), 2 * depth * len(run.steps), check="visits")
        for moment, unsharded in counts:
            expected = f"1 to {adapter.max_unsharded} as declared"
            message = comparison(f"units unsharded in {moment}", expected=expected, got=unsharded)
            bounded = 1 <= unsharded <= adapter.max_unsharded
            self.expect(bounded, "R042", message, phase=moment, check="units gathered at once")
        activations = self.activations(workload)
        self.check(
            memory.units_gathered(
                run, workload, plan, activations, held,
                world_size=world_size, most=adapter.max_unsharded, padding=self.padding,
                transport_copies=int(self.share_devices),
            )
        )  # fmt: skip


class Lifecycle(ConformanceTestCase):
    """Parameters and gradients as user code and optimizers see them."""

    @conformance_case(
        "R036",
        chapter="D",
        axes={"world_size": (2, 3)},
        kills=(
            "shows-its-own-parameters",
            "takes-biases-for-buffers",
            "reference-takes-biases-for-buffers",
        ),
    )
    def test_parameters_that_user_code_sees(self, world_size: int) -> None:
        """A unit's own code sees full parameters: as attributes in forward and backward, by name in forward."""
        workload = deep.deep_4()
        reference = workload.build(self.rank).get_submodule(workload.units[0])
        looks = {name: _look(parameter) for name, parameter in reference.named_parameters()}
        seen: list[tuple[str, dict[str, _Look]]] = []

        def look(moment: str, module: nn.Module) -> None:
            seen.append((moment, {name: _look(attrgetter(name)(module)) for name in looks}))
            if moment == "forward":
                seen.append((moment, {name: _look(parameter) for name, parameter in module.named_parameters()}))

        run = self.train(workload, on_setup=self.with_module(lambda module: deep.visit(module, look)))
        seen = self.observe("visits", lambda: seen)
        self.check_parity(run, workload)
        self.expect_equal("R036", "visits", len(seen), 3 * len(workload.units) * len(run.steps), check="visits")
        for moment, got in seen:
            message = comparison("parameters", expected=_listed(looks), got=_listed(got))
            self.expect(got == looks, "R036", message, phase=moment, check="parameters in user code")

    @conformance_case(
        "R037",
        chapter="D",
        axes={"world_size": (2, 3), "accumulation": ("each", "deferred")},
        needs=lambda values: ["no_sync"] if values["accumulation"] == "deferred" else [],
        kills=(
            "replicated-gradients",
            "shards-gradients-otherwise",
        ),
    )
    def test_gradients_match_parameters(self, world_size: int, accumulation: str) -> None:
        """After backward, a gradient has the shape, dtype, device and placement of its parameter."""
        workload = probes.exact_accumulation()
        reduced = (False, True) if accumulation == "deferred" else ()
        regime = Regime(micro_batches=2, reduced=reduced)
        run = self.train(workload, self.plan(workload), regime, on_gradients=self._expect_alike)
        self.check_parity(run, workload, regime)

    @conformance_case(
        "R037",
        "R001",
        "R002",
        "R003",
        chapter="D",
        world_size=2,
        needs=("mixed_dtypes",),
        kills=("reference-sums-gradients", "reference-damages-gathered-parameters"),
    )
    def test_parameters_of_two_dtypes(self) -> None:
        """Parameters of one unit that are stored in two dtypes are at parity, with gradients in their own dtypes."""
        workload = storage.mixed_storage()
        run = self.train(workload, on_gradients=self._expect_alike)
        self.check_parity(run, workload)

    @conformance_case(
        "R037",
        chapter="D",
        axes={"offload": ("cpu", "cpu_pinned")},
        world_size=2,
        needs=("cpu_offload_params",),
        environment=lambda values: ["accelerator"] + ["pinned_memory"] * (values["offload"] == "cpu_pinned"),
        kills=(
            "replicated-gradients",
            "shards-gradients-otherwise",
        ),
    )
    def test_offloaded_gradients_match_parameters(self, offload: str) -> None:
        """With offload, gradients are on the CPU like their parameters."""
        workload = probes.exact_nested()
        plan = self.plan(workload, offload=Offload(offload))
        run = self.train(workload, plan, on_gradients=self._expect_alike)
        self.check_parity(run, workload)

    def _expect_alike(self, adapter: Adapter, step: int) -> None:

        def properties() -> dict[str, list[tuple[str, str, str]]]:
            return {
                name: [
                    (what, str(of(parameter.grad)), str(of(parameter)))
                    for what, of in _PROPERTIES.items()
                    if parameter.grad is not None
                ]
                for name, parameter in adapter.parameters().items()
            }

        for name, seen in self.observe("gradients and parameters", properties).items():
            where: dict[str, Any] = {"fqn": name, "step": step, "phase": "reduce", "check": "gradients and parameters"}
            if not seen:
                self.expect(True, "R037", "", check="gradients and parameters")
            for what, got, expected in seen:
                self.expect_equal("R037", f"{what} of the gradient", got, expected, details="the parameter's", **where)

    @conformance_case(
        "R041",
        chapter="D",
        axes={"world_size": (2, 3)},
        needs=("manual_unshard", "sharded_state", "zero2"),
        kills=("manual-reshard-does-nothing",),
    )
    def test_unshard_and_reshard_by_hand(self, world_size: int) -> None:
        """Both are idempotent; a unit kept for backward but resharded explicitly is gathered again, at parity."""
        workload = probes.exact_nested()
        unit = workload.units[-1]

        def twice(adapter: Adapter) -> None:
            for act, unsharded in ((adapter.unshard, True), (adapter.reshard, False)):
                for _ in range(2):
                    act(unit)
                    self._expect_unsharded(adapter, unit, unsharded)

        def between(adapter: Adapter, step: int) -> None:
            self._expect_unsharded(adapter, unit, True)
            adapter.reshard(unit)
            self._expect_unsharded(adapter, unit, False)

        plan = self.plan(workload, sharding=Sharding.GRAD_OPTIM)
        run = self.train(workload, plan, on_setup=twice, on_loss=between)
        self.check_parity(run, workload, requirement="R041")

    @conformance_case(
        "R041",
        "R002",
        "R003",
        chapter="D",
        axes={"world_size": (2, 3)},
        needs=("manual_unshard",),
        kills=("reshard-by-hand-drops-gradients", "no-reduction"),
    )
    def test_by_hand_at_any_point(self, world_size: int) -> None:
        """A unit that is gathered and freed by hand, at any point of a step, leaves training as it was."""
        workload = probes.exact_accumulation()
        regime = Regime(micro_batches=2)
        units = (workload.units[1], "")
        self.check_every_point(workload, regime, Action.UNSHARD, runs=2, requirement="R041", names=units)

    def _expect_unsharded(self, adapter: Adapter, unit: str, expected: bool) -> None:
        got = adapter.unit_is_unsharded(unit)
        self.expect_equal("R041", "unsharded", got, expected, fqn=unit, check="unit state")

    @conformance_case(
        "R043",
        "R002",
        "R003",
        chapter="D",
        axes={"world_size": (2, 3)},
        needs=("persist_small",),
        kills=("persistent-not-reduced", "no-reduction", "reference-sums-gradients"),
    )
    def test_small_parameters_stay_full(self, world_size: int) -> None:
        """Parameters below a threshold, which stay unsharded on every rank, train at parity like the others."""
        workload = probes.exact_nested()
        run = self.train(workload, self.plan(workload, persist_numel=13))
        self.check_parity(run, workload, requirement="R043")
        self.check_same_on_every_rank(run, "R043")


#: What a gradient and its parameter have in common.
_PROPERTIES: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda tensor: tuple(tensor.shape),
    "dtype": lambda tensor: tensor.dtype,
    "device": lambda tensor: tensor.device,
    "placement": lambda tensor: tensor.placements if isinstance(tensor, DTensor) else None,
}


#: Shape and dtype.
_Look = tuple[tuple[int, ...], torch.dtype]


def _look(tensor: Tensor) -> _Look:
    return tuple(tensor.shape), tensor.dtype


def _listed(looks: dict[str, _Look]) -> str:
    return ", ".join(f"{name} {list(shape)} {dtype}" for name, (shape, dtype) in looks.items()) or "none"
