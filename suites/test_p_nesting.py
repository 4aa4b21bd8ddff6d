"""P. Nesting and auto-wrap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks import communication
from fsdp_conformance.checks.invariance import same_training
from fsdp_conformance.checks.result import comparison
from fsdp_conformance.checks.traffic import nbytes, of
from fsdp_conformance.fixtures import deep, models, probes
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.history.collective import Op
from fsdp_conformance.plan import Sharding
from fsdp_conformance.workload.definition import Regime, Workload
from fsdp_conformance.workload.units import owning_units, parameter_bytes


class Nesting(ConformanceTestCase):
    """The choice of units changes what is sent, never what is learned."""

    @conformance_case(
        "R126",
        "R002",
        "R003",
        chapter="P",
        axes={"wrapping": ("flat", "nested", "every-module", "leaves-only"), "world_size": (2,)},
        kills=("sum-instead-of-mean", "outer-unit-reduces-inner"),
    )
    def test_wrapping(self, wrapping: str, world_size: int) -> None:
        """
        One unit, nested units, every module as a unit, and a root without its own parameters train alike, bit for bit.
        """
        workload = probes.exact_nested()
        model = workload.build(0)
        modules = [
            name
            for name, module in model.named_modules()
            # A container has no forward, so it cannot be a unit.
            if name
            and any(True for _ in module.parameters())
            and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        ]
        leaves = [name for name in modules if not any(other.startswith(name + ".") for other in modules)]
        units = {
            "flat": [],
            "nested": list(workload.units),
            "leaves-only": leaves,
            "every-module": sorted(modules, key=lambda name: -name.count(".")),
        }[wrapping]
        run = self.train(workload, self.plan(workload, units=tuple(units)))
        self.check_parity(run, workload, requirements={"gradient": "R126", "parameter": "R126"})

    @conformance_case(
        "R126",
        "R002",
        chapter="P",
        axes={"wrapping": ("flat", "every-module"), "world_size": (2,)},
        kills=lambda values: (
            ("loses-bits-without-units", "damages-gathered-parameters", "gathers-noise")
            if values["wrapping"] == "flat"
            else ("loses-bits-in-small-units",)
        ),
    )
    def test_units_change_nothing(self, wrapping: str, world_size: int) -> None:
        """On two ranks, Adam trains a model with rounding errors to the same bits, whatever its units are."""
        workload = models.norm_mlp()
        children = tuple(
            name for name, module in workload.build(0).named_modules() if name and not any(module.children())
        )
        regime = Regime(optimizer="adam", steps=4)
        run = self.train(workload, self.plan(workload, units=() if wrapping == "flat" else children), regime)
        usual = self.train(workload, regime=regime)
        self.check(same_training(run, usual, what="the usual units", requirement="R126"))

    @conformance_case(
        "R127",
        "R002",
        chapter="P",
        axes={"policy": ("size", "class"), "world_size": (2,)},
        needs=("auto_wrap", "coll_counts", "zero3"),
        kills=("ignores-auto-wrap", "reference-sums-gradients"),
    )
    def test_auto_wrap(self, policy: str, world_size: int) -> None:
        """A policy by size or by class creates the units that it describes: each is gathered separately."""
        workload = models.wide_mlp()
        model = workload.build(0)
        largest = max(sum(p.numel() for p in module.parameters()) for module in model.children())
        rule = f"size:{largest}" if policy == "size" else f"class:{nn.Linear.__name__}"
        run = self.train(workload, self.plan(workload, units=(), auto_wrap=rule, sharding=Sharding.FULL))
        self.check_parity(run, workload, requirements={"parameter": "R127"})
        expected = tuple(name for name, child in model.named_children() if self._is_unit(child, policy, largest))
        counted = replace(workload, units=expected)
        self.check(
            communication.collective_counts(
                run, counted, self.plan(counted, sharding=Sharding.FULL), requirement="R127"
            )
        )

    @conformance_case(
        "R128",
        "R002",
        chapter="P",
        axes={"world_size": (2,)},
        needs=("rewrap",),
        kills=("rewrap-resets", "reference-sums-gradients"),
    )
    def test_wrapped_again(self, world_size: int) -> None:
        """
        A unit that was wrapped and trained can be wrapped again inside a larger model, and continues from its values.
        """
        inner = models.wide_mlp()
        outer = replace(inner, name="wide-mlp-wrapped-again", build=_around_plain(inner, values=None))
        first = self.subject()
        self.train(inner, regime=Regime(steps=1), adapter=first)
        with self.blaming("implementation"):
            values = first.full_params()
            wrapped = first.module()
        again = replace(outer, build=lambda rank: _Around(wrapped))
        run = self.train(again, self.plan(outer, units=()))
        self.check_parity(
            run,
            replace(outer, build=_around_plain(inner, values=values)),
            requirement="R128",
        )

    @conformance_case(
        "R129",
        "R002",
        "R003",
        chapter="P",
        axes={"world_size": (2,)},
        needs=("multi_module_unit",),
        kills=(
            "sum-instead-of-mean",
            "last-of-group-only",
        ),
    )
    def test_several_modules_as_one_unit(self, world_size: int) -> None:
        """Two modules that form one unit are at parity bit for bit."""
        workload = probes.exact_mlp()
        first, second = [name for name, _ in workload.build(0).named_children()][:2]
        grouped = replace(workload, units=(f"{first}+{second}",))
        run = self.train(grouped)
        self.check_parity(run, workload, requirements={"gradient": "R129", "parameter": "R129"})

    @conformance_case(
        "R129",
        chapter="P",
        axes={"world_size": (2,)},
        needs=("multi_module_unit", "zero3"),
        kills=("wraps-modules-one-by-one",),
    )
    def test_gathered_together(self, world_size: int) -> None:
        """Modules that form one unit are all gathered when the first of them computes, and the unit only once."""
        deepest = deep.deep_steps()
        first, second, *others = deepest.units
        workload = replace(deepest, units=(f"{first}+{second}", *others))
        plan = self.plan(workload, sharding=Sharding.FULL)
        log = process_group.log()
        visits: list[tuple[str, str, int | None, int]] = []

        def note(moment: str, module: nn.Module) -> None:
            visits.append((moment, *log.label, len(log.records) - begin))

        begin = len(log.records)
        run = self.train(workload, plan, on_setup=self.with_module(lambda module: deep.visit(module, note)))
        visits, records = self.observe("visits, and collectives", lambda: (visits, log.records[begin:]))
        self.check_parity(run, workload)
        received: dict[int | None, int] = {}
        for moment, phase, step, issued in visits:
            if moment == phase == "forward" and step not in received:
                gathers = [each for each in records[:issued] if (each.phase, each.step) == (phase, step)]
                received[step] = nbytes(of(gathers, Op.ALL_GATHER))
        unit = next(each for each in owning_units(workload, plan).shared if "+" in each.fqn)
        for step in range(len(run.steps)):
            got, least = received.get(step, 0), parameter_bytes([unit])
            what = f"gathered when the first module of {unit.fqn} computes"
            message = comparison(what, expected=f"at least {least} B", got=f"{got} B")
            self.expect(got >= least, "R129", message, step=step, phase="forward", check="gathered together")
        if self.declares("coll_counts"):
            self.check(communication.collective_counts(run, workload, plan, requirement="R129"))

    @conformance_case(
        "R129",
        "R002",
        "R003",
        chapter="P",
        axes={"world_size": (2,)},
        needs=("multi_module_unit",),
        kills=("sum-instead-of-mean",),
    )
    def test_only_some_of_a_unit(self, world_size: int) -> None:
        """A forward that uses one of the two modules of a unit is at parity bit for bit, in every step."""
        workload = probes.exact_unused()
        grouped = replace(workload, units=("+".join(workload.units),))
        regime = Regime(unused_parameters=True)
        run = self.train(grouped, regime=regime)
        self.check_parity(
            run, workload, regime, requirements={"gradient": "R129", "parameter": "R129"}, none_or_zero=True
        )

    @staticmethod
    def _is_unit(module: nn.Module, policy: str, largest: int) -> bool:
        """The policy's decision about a child of the root, derived independently."""
        if policy == "class":
            return type(module) is nn.Linear
        return sum(parameter.numel() for parameter in module.parameters()) >= largest


class _Around(nn.Module):
    """A larger model that applies a further layer to the body's output."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.scale = nn.Parameter(torch.full((6,), 0.5))

    def forward(self, *args: Any) -> Tensor:
        output: Tensor = self.body(*args)
        return output * self.scale.mean()


def _around_plain(inner: Workload, values: dict[str, Tensor] | None) -> Callable[[int], nn.Module]:
    """The larger model around the plain body, which starts from `values` if given."""

    def build(rank: int) -> nn.Module:
        body = inner.build(rank)
        if values is not None:
            body.load_state_dict(values, strict=False)
        return _Around(body)

    return build
