"""E. Full parameters outside forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.adapters.sharded import local_part
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks.result import comparison
from fsdp_conformance.driver.recorder import storage_bytes
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.fixtures import buffers, deep, precision, probes
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.references.rounding import rounding_reference
from fsdp_conformance.workload.definition import Regime, Workload

#: Words of which a refusal inside forward or backward must contain one.
_BUSY = ("forward", "backward", "step", "state", "idle")


class FullAccessCase(ConformanceTestCase):
    """Shared parts of the cases of this chapter."""

    def opened(self, adapter: Adapter, unit: str = "", **options: bool) -> AbstractContextManager[Any]:
        """The engine's context. What it communicates does not count as training."""
        return _Opened(self, adapter, unit, options)

    def shown(self, adapter: Adapter) -> dict[str, Tensor]:
        """The values that user code sees now: live storage, and this rank's part of sharded parameters."""
        with self.blaming("implementation"):
            return {name: parameter.detach() for name, parameter in adapter.parameters().items()}

    def values_shown(self, adapter: Adapter) -> dict[str, Tensor]:
        """Copies of the values that user code sees now; of sharded parameters, this rank's part."""

        def look() -> dict[str, Tensor]:
            return {name: local_part(parameter).clone() for name, parameter in adapter.parameters().items()}

        with self.blaming("implementation"):
            return self.observe("the values shown", look)

    def check_values(
        self, requirement: str, shown: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, step: int
    ) -> None:
        """Every expected parameter is shown with its shape and dtype, and its value bit for bit."""
        for name, value in expected.items():
            where: dict[str, Any] = {"fqn": name, "step": step, "phase": "observe"}
            self.check_equal(requirement, shown.get(name), value, check="parameters in the context", **where)

    def check_sharded(
        self, requirement: str, shown: Mapping[str, Tensor], workload: Workload, unit: str, **where: Any
    ) -> None:
        """A unit's own parameters are not whole on this rank. What a flat layout does not show is not there."""
        sizes = {name: value.numel() for name, value in workload.build(self.rank).named_parameters()}
        own = [name for name in sizes if _unit_of(name, workload) == unit]
        held = sum(shown[name].numel() for name in own if name in shown)
        whole = sum(sizes[name] for name in own)
        message = comparison("elements that this rank has", expected=f"fewer than {whole}", got=held)
        self.expect(held < whole, requirement, message, fqn=unit or "the root", phase="observe", **where)

    def params_after(self, workload: Workload, regime: Regime, step: int) -> dict[str, Tensor]:
        """The expected parameters after a step, in the model's dtype."""
        expected = self.references(workload, regime).expected.steps[step].params
        dtypes = {name: parameter.dtype for name, parameter in workload.build(0).named_parameters()}
        return {name: value.to(dtypes[name]) for name, value in expected.items()}


class _Opened:
    """`Adapter.full_params_context`, with its collectives labelled and its errors blamed on the implementation."""

    def __init__(self, case: ConformanceTestCase, adapter: Adapter, unit: str, options: dict[str, bool]) -> None:
        self._case = case
        with case.blaming("implementation"):
            self._context = adapter.full_params_context(unit, **options)

    def __enter__(self) -> None:
        with process_group.log().phase("observe"), self._case.blaming("implementation"):
            self._context.__enter__()

    def __exit__(self, *error: Any) -> bool:
        with process_group.log().phase("observe"), self._case.blaming("implementation"):
            return bool(self._context.__exit__(*error))


class Values(FullAccessCase):
    """The values that the context shows."""

    @conformance_case(
        "R044",
        "R002",
        chapter="E",
        axes={"recurse": (True, False), "world_size": (2, 3)},
        needs=("full_params",),
        kills=lambda values: [
            *(
                ["reference-shows-one-unit", "fsdp1-shows-one-unit", "shows-rotated-shards"]
                if values["recurse"]
                else ["reference-always-recurses", "fsdp1-always-recurses"]
            ),
            "shows-values-of-the-step-before",
        ],
    )
    def test_values(self, recurse: bool, world_size: int) -> None:
        """
        After every step, the context of a unit shows its parameters with their names, shapes and values, bit for bit,
        and those of the units inside it if asked to; other parameters stay sharded.
        """
        workload, adapter, regime = probes.exact_nested(), self.subject(), Regime()
        # The innermost of three nested units, with the middle one as the unit that is opened.
        inner, opened, outer = workload.units[:3]
        seen: list[dict[str, Tensor]] = []

        def look(step: int) -> None:
            expected = self.params_after(workload, regime, step)
            for unit in ("", opened) if recurse else (opened,):
                with self.opened(adapter, unit, recurse=recurse):
                    shown = self.values_shown(adapter)
                    below = [name for name in expected if not unit or name.startswith(f"{unit}.")]
                    names = below if recurse else [name for name in below if _unit_of(name, workload) == unit]
                    self.check_values("R044", shown, {name: expected[name] for name in names}, step=step)
                    if unit:
                        self.check_sharded("R044", shown, workload, outer, step=step)
                    if not recurse:
                        self.check_sharded("R044", shown, workload, inner, step=step)
                    seen.append(dict(shown))

        run = self.train(workload, regime=regime, adapter=adapter, on_step=look)
        self.expect_equal("R044", "contexts", len(seen), 6 if recurse else 3)
        self.check_parity(run, workload, regime, requirements={"parameter": "R044"})

    @conformance_case(
        "R044",
        chapter="E",
        axes={"world_size": (2,)},
        needs=("full_params",),
        kills=("ddp-shows-wrapper-names", "reference-shows-wrapper-names"),
    )
    def test_names(self, world_size: int) -> None:
        """In the context, parameters and buffers have the names of the local module, with any prefix, in its order."""
        workload, adapter = buffers.batch_norm(), self.subject()
        local = workload.build(self.rank)

        def look(step: int) -> None:
            with self.opened(adapter), self.blaming("implementation"):
                names = self.observe("names and shapes", lambda: _names_and_shapes(adapter.module()))
            for got, (what, expected) in zip(names, _names_and_shapes(local), strict=True):
                self.expect_equal("R044", what, got[1], expected, step=step, phase="observe")

        self.train(workload, adapter=adapter, on_step=look)

    @conformance_case(
        "R050",
        chapter="E",
        axes={"world_size": (2,)},
        needs=("full_params", "mixed_precision"),
        kills=("reference-shows-low-precision", "fsdp1-shows-rounded-values"),
    )
    def test_full_precision(self, world_size: int) -> None:
        """With units that compute in bfloat16, the context shows the parameters that the optimizer updates."""
        workload, adapter = precision.scaled(), self.subject()
        plan, regime = self.plan(workload, param_dtype="bfloat16"), Regime()
        with self.blaming("suite"):
            expected = rounding_reference(
                workload, regime, plan, rank=self.rank, world_size=world_size, device=self.reference_device
            )

        def look(step: int) -> None:
            params = expected.steps[step].params
            if all(torch.equal(value, value.bfloat16().float()) for value in params.values()):
                raise SuiteError(f"parameters must not be exact in bfloat16 [{self.case.id}, step {step}]")
            with self.opened(adapter):
                self.check_precision(self.values_shown(adapter), params, step)

        self.train(workload, plan, regime, adapter=adapter, on_step=look)

    def check_precision(self, shown: Mapping[str, Tensor], params: Mapping[str, Tensor], step: int) -> None:
        """Parameters are in float32, and nearer to the expected values than bfloat16 can be."""
        for name, value in params.items():
            got = shown.get(name)
            where: dict[str, Any] = {"fqn": name, "step": step, "phase": "observe"}
            dtype = None if got is None else got.dtype
            self.expect_equal("R050", "dtype", str(dtype), "torch.float32", check="precision in the context", **where)
            if got is None or got.shape != value.shape:
                self.expect(False, "R050", comparison("shape", expected=value.shape, got=got and got.shape), **where)
                continue
            apart = (got.double().cpu() - value.double()).abs().max().item()
            rounded = (value.bfloat16().double() - value.double()).abs().max().item()
            message = comparison("distance", expected=f"at most {rounded / 64:.3g}", got=f"{apart:.3g}")
            self.expect(
                apart <= rounded / 64, "R050", message, check="precision in the context",
                bound="a 64th of what bfloat16 loses", **where,
            )  # fmt: skip


class Writes(FullAccessCase):
    """The effect of writes in the context."""

    @conformance_case(
        "R045",
        "R002",
        chapter="E",
        axes={"writeback": (True, False), "world_size": (2, 3)},
        needs=("full_params_writeback",),
        kills=lambda values: (
            ["reference-loses-writes-of-one-rank", "fsdp1-loses-writes-of-one-rank", "writes-into-padding"]
            if values["writeback"]
            else ["reference-persists-always", "fsdp1-persists-always", "ddp-persists-always"]
        ),
    )
    def test_written(self, writeback: bool, world_size: int) -> None:
        """
        What every rank writes after the first step is what trains on, bit for bit, if writes are kept, and else gone,
        for parameters of many rows, of fewer than ranks, and of one element.
        """
        workload = replace(probes.exact_tiny(), optimizers={"sgd": partial(torch.optim.SGD, lr=2.0**-6)})
        adapter = self.subject()
        values = {name: _written(value) for name, value in workload.build(0).named_parameters()}

        def write(step: int) -> None:
            if step:
                return
            with self.opened(adapter, writeback=writeback), torch.no_grad():
                for name, shown in self.shown(adapter).items():
                    shown.copy_(values[name])

        regime = Regime(steps=3)
        run = self.train(workload, regime=regime, adapter=adapter, on_step=write)
        if not writeback:
            self.check_parity(run, workload, regime, requirements={"parameter": "R045"})
            return
        # Without momentum, nothing but the parameters is left of the first step.
        later = replace(
            workload,
            name="exact-tiny-written",
            build=partial(_build_with, workload, values),
            batch=lambda key: workload.batch(replace(key, step=key.step + 1)),
        )
        rest = [replace(record, step=record.step - 1) for record in run.steps[1:]]
        tail = replace(run, initial_params=values, steps=rest, collectives=[])
        self.check_parity(tail, later, Regime(steps=2), requirements={"parameter": "R045"})

    @conformance_case(
        "R046",
        chapter="E",
        axes={"world_size": (3,)},
        needs=("full_params_rank0",),
        kills=("reference-shows-on-all-ranks", "ddp-shows-on-all-ranks"),
    )
    def test_first_rank_only(self, world_size: int) -> None:
        """Only the first rank sees full parameters, bit for bit; the others keep their shards."""
        workload, adapter, regime = probes.exact_nested(), self.subject(), Regime()

        def look(step: int) -> None:
            expected = self.params_after(workload, regime, step)
            with self.opened(adapter, rank0_only=True):
                shown = self.values_shown(adapter)
                if self.rank == 0:
                    self.check_values("R046", shown, expected, step=step)
                else:
                    for unit in ("", *workload.units):
                        self.check_sharded("R046", shown, workload, unit, step=step)

        run = self.train(workload, regime=regime, adapter=adapter, on_step=look)
        self.check_parity(run, workload, regime, requirements={"parameter": "R046"})

    @conformance_case(
        "R046",
        chapter="E",
        world_size=2,
        needs=("full_params_rank0",),
        environment=("accelerator",),
        kills=(
            "reference-shows-on-the-device",
            "fsdp1-shows-on-the-device",
            "reference-shows-one-unit",
            "reference-stays-whole",
        ),
    )
    def test_on_the_cpu(self) -> None:
        """On the CPU, the first rank sees full parameters there, and no device memory is held for them."""
        workload, adapter = deep.deep_4(), self.subject()
        model = workload.build(0)
        unit = max(sum(p.nbytes for p in model.get_submodule(name).parameters()) for name in workload.units)

        def look(step: int) -> None:
            if step == 0:
                # One-time allocations happen in the first context.
                with self.opened(adapter, rank0_only=True, to_cpu=True):
                    pass
            before = self.allocated_bytes()
            with self.opened(adapter, rank0_only=True, to_cpu=True):
                inside = self.allocated_bytes()
                kinds = {tensor.device.type for tensor in self.shown(adapter).values()} if self.rank == 0 else {"cpu"}
                self.expect_equal("R046", "devices of the parameters shown", sorted(kinds), ["cpu"], step=step)
            after = self.allocated_bytes()
            message = comparison(
                "device memory in the context", expected=f"less than {unit} B", got=f"{inside - before} B"
            )
            self.expect(inside - before < unit, "R046", message, step=step, phase="observe")
            self.expect_equal("R046", "device memory after the context", after, before, step=step, phase="observe")

        self.train(workload, adapter=adapter, on_step=look)

    @conformance_case(
        "R046",
        chapter="E",
        world_size=2,
        needs=("full_params_rank0", "full_params_writeback"),
        kills=(
            "reference-accepts-writes-on-one-rank",
            "reference-gives-no-reasons",
            "reference-persists-always",
        ),
    )
    def test_first_rank_writes(self) -> None:
        """Keeping what the first rank alone writes is rejected, or its values arrive on every rank."""
        workload, adapter = probes.exact_nested(), self.subject()
        names = ("writeback", "rank0", "rank 0")
        values = {name: _written(value) for name, value in workload.build(0).named_parameters()}

        def write(step: int) -> None:
            if step:
                return
            with self.refusal("R046", "writes on one rank only", names=names) as outcome:
                with self.opened(adapter, writeback=True, rank0_only=True), torch.no_grad():
                    for name, shown in self.shown(adapter).items():
                        if self.rank == 0:
                            shown.copy_(values[name])
                with self.blaming("implementation"):
                    arrived = adapter.full_params()
                outcome.excused = True
            if outcome.excused:
                self.check_values("R046", arrived, values, step=step)

        self.train(workload, adapter=adapter, on_step=write)


class States(FullAccessCase):
    """Where the context may be entered, and what it leaves behind."""

    @conformance_case(
        "R047",
        "R002",
        chapter="E",
        axes={"place": ("forward", "backward"), "world_size": (2,)},
        needs=("full_params",),
        kills=lambda values: [f"reference-enters-in-{values['place']}", "reference-refuses-and-forgets"],
    )
    def test_inside_a_step(self, place: str, world_size: int) -> None:
        """Entering the context in a forward, or in a backward, raises on every rank, and the step is at parity."""
        workload, adapter = probes.exact_nested(), self.subject()
        attempts: list[Exception | None] = []

        def attempt() -> None:
            error = None
            try:
                with adapter.full_params_context():
                    pass
            except Exception as raised:  # noqa: BLE001 - it is raised again when the training is over
                error = raised
            attempts.append(error)

        def again() -> None:
            if (error := attempts.pop(0)) is not None:
                raise error

        run = self.train(
            workload,
            adapter=adapter,
            on_setup=self.with_module(lambda module: _hook(module, "stages.1", place, attempt)),
        )
        made = self.observe("number of attempts", lambda: len(attempts))
        for _ in range(made):
            refusal = self.refusal("R047", f"full parameters in {place}", names=_BUSY)
            with refusal, self.blaming("implementation"):
                self.observe(f"an attempt in {place}", again)
        self.expect_equal("R047", f"attempts in {place}", made, len(run.steps))
        self.check_parity(run, workload, requirement="R047")

    @conformance_case(
        "R048",
        "R002",
        chapter="E",
        axes={"leaving": ("normally", "by-exception"), "world_size": (2,)},
        needs=("full_params",),
        kills=lambda values: (
            ["reference-stays-whole", "fsdp1-stays-whole"]
            if values["leaving"] == "normally"
            else [
                "reference-stays-whole-after-exception",
                "fsdp1-stays-whole-after-exception",
                "context-swallows-exceptions",
            ]
        ),
    )
    def test_left(self, leaving: str, world_size: int) -> None:
        """Once the context is left, every rank holds what it held before, and training is at parity."""
        workload, adapter = probes.exact_nested(), self.subject()

        def look(step: int) -> None:
            before, objects = self._held(adapter), self.shown(adapter)
            passed = False
            try:
                with self.opened(adapter):
                    inside = self._held(adapter)
                    if leaving == "by-exception":
                        raise _InTheBody
            except _InTheBody:
                passed = True
            where: dict[str, Any] = {"step": step, "phase": "observe"}
            self.expect_equal("R048", "the body's exception arrived", passed, leaving == "by-exception", **where)
            if inside <= before:
                self.report.notes.append("the context does not show in what the adapter counts as held")
            self.expect_equal("R048", "bytes of parameters after the context", self._held(adapter), before, **where)
            self.expect_equal("R048", "parameters after the context", _shapes(self.shown(adapter)), _shapes(objects))
            if self.declares("sharded_state"):
                with self.blaming("implementation"):
                    whole = [unit for unit in ("", *workload.units) if adapter.unit_is_unsharded(unit)]
                self.expect_equal("R048", "units that are still unsharded", whole, [], **where)

        plan = self.plan(workload)
        run = self.train(workload, plan, adapter=adapter, on_step=look)
        self.check_parity(run, workload, requirements={"parameter": "R048"})
        self.check_resharded(adapter, workload, "R048", run, plan)

    def _held(self, adapter: Adapter) -> int:
        """Bytes of storage behind what user code sees."""
        return storage_bytes(local_part(value) for value in self.shown(adapter).values())

    @conformance_case(
        "R048",
        "R002",
        chapter="E",
        world_size=2,
        needs=("full_params", "manual_unshard", "sharded_state"),
        kills=(
            "reference-reshards-on-leaving",
            "reference-damages-gathered-parameters",
            "reference-gathers-noise",
        ),
    )
    def test_unsharded_before(self) -> None:
        """A unit that was unsharded by hand before the context is still unsharded after it, and can be resharded."""
        workload, adapter = probes.exact_nested(), self.subject()
        unit = workload.units[0]

        def look(step: int) -> None:
            states = []
            with process_group.log().phase("observe"), self.blaming("implementation"):
                adapter.unshard(unit)
                states.append(adapter.unit_is_unsharded(unit))
                with adapter.full_params_context():
                    pass
                states.append(adapter.unit_is_unsharded(unit))
                adapter.reshard(unit)
                states.append(adapter.unit_is_unsharded(unit))
            what = "unsharded before, after the context, and once resharded"
            self.expect_equal("R048", what, states, [True, True, False], fqn=unit, step=step, phase="observe")

        run = self.train(workload, adapter=adapter, on_step=look)
        self.check_parity(run, workload, requirements={"parameter": "R048"})


class Gradients(FullAccessCase):
    """Full gradients in the context."""

    @conformance_case(
        "R049",
        "R003",
        chapter="E",
        axes={"world_size": (2, 3)},
        needs=("full_params_grads",),
        kills=("reference-shows-summed-gradients", "fsdp1-shows-summed-gradients", "reference-shows-zeros-for-none"),
    )
    def test_values(self, world_size: int) -> None:
        """
        Between backward and step, the context shows the mean gradients, bit for bit, and None where there is none; a
        flat layout may show zeros, as long as it has another parameter of the unit with a gradient.
        """
        workload, adapter, regime = probes.exact_unused(), self.subject(), Regime()
        expected = self.references(workload, regime).expected
        unused = {
            unit: all(expected.steps[0].grads[name] is None for name in self._own(workload, unit))  # type: ignore[index]
            for unit in ("", *workload.units)
        }

        def look(_: Adapter, step: int) -> None:
            with self.opened(adapter, with_grads=True), self.blaming("implementation"):
                shown = self.observe("gradients in the context", lambda: _gradients(adapter))
                for name, names in (expected.steps[step].grads or {}).items():
                    got = shown.get(name)
                    where: dict[str, Any] = {"fqn": name, "step": step, "phase": "observe"}
                    if names is not None:
                        value = names.float()
                        self.check_equal("R049", got, value, check="gradients in the context", **where)
                        continue
                    may_be_zeros = not unused[_unit_of(name, workload)] and not self.declares("unused_untouched")
                    holds = got is None or (may_be_zeros and not bool(got.any()))
                    described = "None" if got is None else f"a tensor of {tuple(got.shape)}"
                    message = comparison("gradient", expected="None", got=described)
                    self.expect(holds, "R049", message, check="gradients in the context", **where)

        run = self.train(workload, regime=regime, adapter=adapter, on_gradients=look)
        self.check_parity(run, workload, regime, requirements={"parameter": "R049"}, none_or_zero=True)

    def _own(self, workload: Workload, unit: str) -> list[str]:
        """The parameters of a unit, without those of units inside it."""
        names = (name for name, _ in workload.build(0).named_parameters())
        return [name for name in names if _unit_of(name, workload) == unit]

    @conformance_case(
        "R049",
        "R002",
        chapter="E",
        axes={"world_size": (2, 3)},
        needs=("full_params_grads", "full_params_writeback"),
        kills=("reference-loses-written-gradients", "fsdp1-loses-written-gradients"),
    )
    def test_written(self, world_size: int) -> None:
        """Gradients that are doubled in the context of every step train like a doubled learning rate, bit for bit."""
        workload, adapter, regime = probes.exact_nested(), self.subject(), Regime()

        def double(_: Adapter, step: int) -> None:
            with self.opened(adapter, writeback=True, with_grads=True), torch.no_grad():
                for parameter in adapter.parameters().values():
                    if parameter.grad is not None:
                        parameter.grad.mul_(2)

        half = replace(
            workload, name="exact-nested-slow", optimizers={"sgd": partial(torch.optim.SGD, lr=2.0**-4, momentum=0.5)}
        )
        run = self.train(half, regime=regime, adapter=adapter, on_gradients=double)
        self.check_parity(run, workload, regime, requirements={"parameter": "R049"})


class Apply(FullAccessCase):
    """A function for every module."""

    @conformance_case(
        "R051",
        "R002",
        chapter="E",
        axes={"workload": ("nested", "tied"), "world_size": (3,)},
        needs=("apply_fn",),
        kills=lambda values: [
            "reference-applies-to-shards",
            "fsdp1-applies-to-shards",
            "ddp-applies-twice",
            "reference-loses-what-is-applied",
        ],
    )
    def test_applied(self, workload: str, world_size: int) -> None:
        """
        A function is applied once to every module, inner ones first, with full parameters, what it writes is what
        trains, bit for bit, and every rank does the same.
        """
        plain = probes.exact_nested() if workload == "nested" else probes.exact_tied()
        calls: list[tuple[str, tuple[tuple[int, ...], ...]]] = []
        expected: list[tuple[str, tuple[tuple[int, ...], ...]]] = []
        changed = replace(plain, name=f"{plain.name}-applied", build=partial(_build_applied, plain, expected))
        own = {type(module).__name__ for module in plain.build(0).modules()}

        def apply(adapter: Adapter) -> None:
            with process_group.log().phase("observe"), self.blaming("implementation"):
                adapter.apply(partial(_negate, calls))

        run = self.train(plain, on_setup=apply)
        calls = self.observe("calls of the function", lambda: calls)
        changed.build(self.rank)
        got = [call for call in calls if call[0] in own]
        self.expect_equal("R051", "modules, with their parameters' shapes, in order", got, expected)
        self.check_parity(run, changed, requirements=dict.fromkeys(("initial", "loss", "parameter"), "R051"))

    @conformance_case(
        "R051",
        chapter="E",
        world_size=2,
        needs=("apply_fn", "full_params"),
        kills=("reference-applies-in-the-context",),
    )
    def test_in_the_context(self) -> None:
        """Applying a function in an open context raises, and training goes on at parity."""
        workload, adapter = probes.exact_nested(), self.subject()

        def attempt(step: int) -> None:
            with (
                self.opened(adapter),
                self.blaming("implementation"),
                self.refusal("R051", "apply in the context", names=(*_BUSY, "summon")),
            ):
                adapter.apply(lambda module: None)

        run = self.train(workload, adapter=adapter, on_step=attempt)
        self.check_parity(run, workload, requirement="R051")


class _InTheBody(Exception):
    """The exception that the body of a context raises."""


def _gradients(adapter: Adapter) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in adapter.parameters().items()}


def _unit_of(name: str, workload: Workload) -> str:
    """The innermost unit that contains a parameter; "" is the root."""
    return max((unit for unit in workload.units if name.startswith(f"{unit}.")), key=len, default="")


def _names_and_shapes(module: nn.Module) -> list[tuple[str, list[tuple[str, tuple[int, ...]]]]]:
    """The names and shapes of parameters and buffers, with and without a prefix, by the call that gives them."""
    return [
        (f"{method}(prefix={prefix!r})", _shapes(dict(getattr(module, method)(prefix=prefix))))
        for prefix in ("", "outer")
        for method in ("named_parameters", "named_buffers")
    ]


def _shapes(tensors: Mapping[str, Tensor]) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(tensor.shape)) for name, tensor in tensors.items()]


def _written(value: Tensor) -> Tensor:
    """New values for a parameter: multiples of 1/2 that differ from element to element, and from the initial ones."""
    code = torch.arange(value.numel(), dtype=value.dtype).view(value.shape)
    return (code % 4 - 1.5) * 0.5


def _build_with(workload: Workload, values: Mapping[str, Tensor], rank: int) -> nn.Module:
    model = workload.build(rank)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    return model


def _negate(calls: list[tuple[str, tuple[tuple[int, ...], ...]]], module: nn.Module) -> None:
    """Note the module and its parameters' shapes; change what it holds in a way that shows order and repetition."""
    parameters = list(module.parameters(recurse=False))
    calls.append((type(module).__name__, tuple(tuple(parameter.shape) for parameter in parameters)))
    with torch.no_grad():
        for parameter in parameters:
            # Reversed, so that each element comes from another rank's shard, and moved, so that twice is not once.
            parameter.copy_(0.5 - parameter.flatten().flip(0).view(parameter.shape))


def _build_applied(workload: Workload, calls: list[Any], rank: int) -> nn.Module:
    model = workload.build(rank)
    calls.clear()
    model.apply(partial(_negate, calls))
    return model


def _hook(module: nn.Module, unit: str, place: str, attempt: Callable[[], None]) -> None:
    """Call `attempt` once in every forward, or backward, of a submodule."""

    def before(_: nn.Module, arguments: Any) -> None:
        attempt()

    def after(_: nn.Module, arguments: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: attempt())

    # Of a module inside the unit, so that the unit itself is in its forward.
    inner = module.get_submodule(f"{unit}.grid")
    if place == "forward":
        inner.register_forward_pre_hook(before)
    else:
        inner.register_forward_hook(after)
