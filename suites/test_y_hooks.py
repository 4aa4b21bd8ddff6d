"""Y. Hooks: those of users on modules and tensors, and the engine's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks import communication
from fsdp_conformance.checks.result import comparison
from fsdp_conformance.fixtures import hooks, models, probes
from fsdp_conformance.fixtures.hooks import HookCounts
from fsdp_conformance.plan import Sharding
from fsdp_conformance.references.reference_set import Kind
from fsdp_conformance.workload.definition import Regime
from fsdp_conformance.workload.units import owning_units

#: As many iterations as upstream's regression tests: what accumulates shows.
_ITERATIONS = 10

#: Units, layers inside units, a layer of the root, and the root itself.
_MODULES = ("stages.0", "stages.0.linear", "stages.1", "stages.1.linear", "head", "")

_WORKLOADS = {"once": probes.exact_long, "repeatedly": probes.exact_multi_forward}


class Hooks(ConformanceTestCase):
    """Hooks fire as often as on a model that is not sharded."""

    @conformance_case(
        "R158",
        chapter="Y",
        axes={"registered": ("before", "after"), "called": tuple(_WORKLOADS), "world_size": (2, 3)},
        only=lambda values: values["world_size"] == 2 or (values["registered"], values["called"]) == ("after", "once"),
        kills=lambda values: (
            ["calls-hooks-twice", "ddp-bypasses-hooks", "hooks-pile-up"]
            + ["runs-forward-twice", "reference-runs-forward-twice"]
            + ["drops-earlier-hooks"] * (values["registered"] == "before")
        ),
    )
    def test_fire_as_often(self, registered: str, called: str, world_size: int) -> None:
        """A user's hooks on modules and tensors, registered before or after wrapping, fire as often as under DDP."""
        workload = _WORKLOADS[called]()
        expected = self._under_ddp(called)
        counts = HookCounts()
        found: list[str] = []
        seen: list[dict[str, int]] = []

        def register(module: nn.Module) -> None:
            modules = hooks.marked_modules(module)
            found.extend(name for name in _MODULES if name in modules)
            for name in found:
                counts.register(name, modules[name])

        self.train(
            hooks.marked(workload, _MODULES, counts if registered == "before" else None),
            regime=Regime(steps=_ITERATIONS),
            observe=False,
            on_setup=self.with_module(register) if registered == "after" else None,
            on_gradients=lambda adapter, step: seen.append(self.observe("hooks that fired", counts.taken)),
        )
        if registered == "after":
            found = self.observe("modules found", lambda: found)
            for name in _MODULES:
                self.expect(name in found, "R158", f"the module {name!r} is not in the wrapped model", fqn=name)
        for step, fired in enumerate(seen):
            for hook in sorted({*expected, *fired}):
                self.expect_equal("R158", hook, fired.get(hook, 0), expected.get(hook, 0), step=step, phase="backward")

    @conformance_case(
        "R158",
        chapter="Y",
        axes={"world_size": (2,)},
        kills=(
            "hooks-pile-up",
            "hoards-parameters",
            "reference-hoards-parameters",
        ),
    )
    def test_internal_hooks(self, world_size: int) -> None:
        """After the first iteration, the number of hooks on modules and parameters stays the same."""
        workload = probes.exact_nested()
        before: list[int] = []
        after: list[int] = []

        def count(adapter: Adapter, into: list[int]) -> None:
            with self.blaming("implementation"):
                into.append(self.observe("hooks", lambda: hooks.registered_hooks(adapter.module())))

        self.train(
            workload,
            regime=Regime(steps=_ITERATIONS),
            observe=False,
            on_loss=lambda adapter, step: count(adapter, before),
            on_gradients=lambda adapter, step: count(adapter, after),
        )
        for phase, numbers in (("forward", before), ("backward", after)):
            for step, number in enumerate(numbers[2:], start=2):
                self.expect_equal("R158", f"hooks after {phase}", number, numbers[1], step=step, phase=phase)

    def _under_ddp(self, called: str) -> dict[str, int]:
        """How often the hooks fire in a step of DistributedDataParallel."""
        counts = HookCounts()
        self.ddp_history(hooks.marked(_WORKLOADS[called](), _MODULES, counts), Regime(steps=1))
        return counts.taken()

    @conformance_case(
        "R159",
        "R002",
        "R003",
        chapter="Y",
        axes={"world_size": (2, 3)},
        needs=("comm_hook",),
        kills=(
            "fsdp1-hook-misses-a-unit",
            "fsdp1-divides-what-the-hook-averaged",
            "reference-hooks-in-pieces",
            "reference-ignores-the-hook",
        ),
    )
    def test_hook_averages(self, world_size: int) -> None:
        """A hook that is registered once sees every unit's whole gradient and a shard, and replaces the average."""
        workload = probes.exact_nested()
        seen: list[tuple[int, torch.Size, torch.Size]] = []

        def average(gradient: Tensor, shard: Tensor) -> None:
            seen.append((len(run_steps), gradient.shape, shard.shape))
            dist.reduce_scatter_tensor(shard, gradient)
            shard /= world_size

        run_steps: list[int] = []
        run = self.train(
            workload,
            on_setup=lambda adapter: adapter.register_comm_hook(average),
            on_gradients=lambda adapter, step: run_steps.append(step),
        )
        seen = self.observe("calls of the hook", lambda: seen)
        for _, gradient, shard in seen:
            self._expect_flat(gradient, shard)
        self.check_parity(run, workload, requirement="R159")
        units = owning_units(workload, self.plan(workload)).trainable
        for step in range(len(run.steps)):
            sizes = [gradient.numel() for index, gradient, _ in seen if index == step]
            self.expect_equal("R159", "calls of the hook", len(sizes), len(units), step=step, phase="reduce")
            least, got = sum(unit.numel for unit in units), sum(sizes)
            message = comparison("elements of gradients that the hook saw", expected=f"at least {least}", got=got)
            self.expect(got >= least, "R159", message, step=step, phase="reduce")

    @conformance_case(
        "R159",
        chapter="Y",
        axes={"world_size": (2,)},
        needs=("comm_hook",),
        kills=("reference-ignores-the-hook", "fsdp1-hook-misses-a-unit"),
    )
    def test_hook_decides(self, world_size: int) -> None:
        """If the hook fills every shard with zeros, no parameter changes."""
        workload = probes.exact_nested()
        run = self.train(
            workload, on_setup=lambda adapter: adapter.register_comm_hook(lambda gradient, shard: _clear(shard))
        )
        for record in run.steps:
            for name, value in run.initial_params.items():
                where: dict[str, Any] = {"step": record.step, "fqn": name, "phase": "step"}
                self.check_equal("R159", record.params.get(name), value, check="parameter after zeros", **where)

    @conformance_case(
        "R159",
        chapter="Y",
        axes={"dtype": ("bfloat16", "float16"), "world_size": (2,)},
        needs=("comm_hook", "full_grads"),
        kills=("reference-ignores-the-hook", "fsdp1-hook-misses-a-unit"),
    )
    def test_compression(self, dtype: str, world_size: int) -> None:
        """A hook that sends gradients in 16 bits rounds them as a reduction in that dtype does, bit for bit."""
        workload = models.wide_mlp()

        def compress(gradient: Tensor, shard: Tensor) -> None:
            sent = gradient.to(getattr(torch, dtype))
            received = sent.new_empty(shard.numel())
            dist.reduce_scatter_tensor(received, sent)
            shard.copy_(received / world_size)

        run = self.train(workload, on_setup=lambda adapter: adapter.register_comm_hook(compress))
        self.check(communication.reductions_in(run, dtype, requirement="R159"))
        self.check_rounding(
            run, workload, self.plan(workload, reduce_dtype=dtype), requirement="R159", kinds=(Kind.GRADIENT,)
        )

    @conformance_case(
        "R159",
        chapter="Y",
        world_size=4,
        needs=("comm_hook", "hsdp"),
        kills=(
            "reference-hooks-hybrid",
            "reference-gives-no-reasons",
            "reference-breaks-down-at-every-error",
        ),
    )
    def test_hook_with_hybrid_sharding(self) -> None:
        """Under hybrid sharding, whose second reduction a hook cannot replace, registering one is refused."""
        workload = probes.exact_nested()
        plan = self.plan(workload, sharding=Sharding.HYBRID, replicas=2)

        def clear(adapter: Adapter) -> None:
            adapter.register_comm_hook(lambda gradient, shard: _clear(shard))

        with self.refusal("R159", "a hook with hybrid sharding", names=("hook", "hybrid")):
            self.train(workload, plan, on_setup=clear)

    def _expect_flat(self, gradient: torch.Size, shard: torch.Size) -> None:
        """Both shapes are flat, and a shard is one rank's part."""
        got = f"{tuple(gradient)} and {tuple(shard)}"
        message = comparison("gradient and shard", expected=f"1D, {self.world_size} times as large", got=got)
        fits = len(gradient) == len(shard) == 1 and gradient.numel() == shard.numel() * self.world_size
        self.expect(fits, "R159", message, phase="reduce")


def _clear(shard: Tensor) -> None:
    shard.zero_()
