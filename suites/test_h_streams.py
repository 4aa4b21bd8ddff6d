"""
H. Stream safety: every memory access is ordered after those that it depends on.

The simulated accelerator checks every access against the order that streams, events and waits establish, so a race is
found whether or not it occurs. Each configuration runs once more with every wait dropped, to show that its races would
be found. On a real accelerator these cases compare numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks.streams import every_race
from fsdp_conformance.fixtures import deep, frozen, models, probes, reuse, shapes, transformer
from fsdp_conformance.plan import BackwardPrefetch, InitMode, Offload, Sharding
from fsdp_conformance.workload.definition import Regime, Workload

#: Workload, regime, fields of the plan, and the flags they need.
_Configuration = tuple[Callable[[], Workload], Regime, dict[str, Any], tuple[str, ...]]

CONFIGURATIONS: dict[str, _Configuration] = {
    "plain": (probes.exact_nested, Regime(), {}, ()),
    "kept": (probes.exact_nested, Regime(), {"sharding": Sharding.GRAD_OPTIM}, ("zero2",)),
    "unsharded": (probes.exact_nested, Regime(), {"sharding": Sharding.NONE}, ("no_shard",)),
    "one-unit": (models.nested_flat, Regime(), {}, ()),
    "adam": (models.norm_mlp, Regime(optimizer="adam"), {}, ()),
    "accumulation": (probes.exact_accumulation, Regime(micro_batches=3), {}, ()),
    "deferred": (probes.exact_accumulation, Regime(micro_batches=3, reduced=(False, False, True)), {}, ("no_sync",)),
    "partly-deferred": (
        probes.exact_accumulation, Regime(micro_batches=3, reduced=(False, True, True)), {}, ("no_sync",)
    ),
    "clipping": (models.nested, Regime(max_norm=0.1), {}, ("clip_grad_norm",)),
    "tied": (probes.exact_tied, Regime(), {}, ("shared_params",)),
    "tied-module": (reuse.shared_module, Regime(), {}, ("shared_module",)),
    "multi-forward": (probes.exact_multi_forward, Regime(), {}, ()),
    "idle-forwards": (probes.exact_nested, Regime(idle_forwards=2), {}, ()),
    "eval": (probes.exact_nested, Regime(eval_before=(0, 1, 2)), {}, ()),
    "frozen": (frozen.frozen_units, Regime(), {}, ()),
    "frozen-mixed": (frozen.non_uniform, Regime(), {}, ("frozen_mixed",)),
    "ragged": (deep.deep_ragged, Regime(micro_batches=2), {}, ()),
    "uneven": (shapes.uneven, Regime(), {}, ()),
    "convolution": (shapes.convolution, Regime(), {}, ()),
    "attention": (transformer.transformer, Regime(), {}, ()),
    "bfloat16": (deep.deep_4, Regime(), {"param_dtype": "bfloat16"}, ("mixed_precision",)),
    "moved-later": (probes.exact_nested, Regime(), {"init_mode": InitMode.AFTER}, ("init_after",)),
    "never-moved": (probes.exact_nested, Regime(), {"init_mode": InitMode.NEVER}, ("init_never",)),
    "forward-prefetch": (deep.deep_4, Regime(), {"forward_prefetch": True}, ("prefetch_forward",)),
    "prefetch-post": (
        deep.deep_4, Regime(), {"backward_prefetch": BackwardPrefetch.POST}, ("prefetch_backward",)
    ),
    "prefetch-none": (
        deep.deep_4, Regime(), {"backward_prefetch": BackwardPrefetch.NONE}, ("prefetch_backward",)
    ),
}  # fmt: skip

#: On four ranks, in two replica groups.
HYBRID: dict[str, _Configuration] = {
    "plain": (probes.exact_nested, Regime(), {}, ()),
    "accumulation": (probes.exact_accumulation, Regime(micro_batches=2), {}, ()),
    "deferred": (probes.exact_accumulation, Regime(micro_batches=2, reduced=(False, True)), {}, ("no_sync",)),
    "clipping": (models.nested, Regime(max_norm=0.1), {}, ("clip_grad_norm",)),
    "ragged": (deep.deep_ragged, Regime(), {}, ()),
    "bfloat16": (deep.deep_4, Regime(), {"param_dtype": "bfloat16"}, ("mixed_precision",)),
}

#: bfloat16 has no reference with the same rounding, so only the order is judged.
_WITHOUT_PARITY = frozenset({"bfloat16"})


def _kills(values: dict[str, Any]) -> list[str]:
    if "prefetch_backward" in CONFIGURATIONS[values["configuration"]][3]:
        return ["reference-forgets-the-gather", "reference-sums-gradients"]
    return ["frees-in-flight", *["no-reduction"] * (values["configuration"] != "bfloat16")]


class StreamSafety(ConformanceTestCase):
    """Training configurations, each with its positive control."""

    @conformance_case(
        "R075",
        "R002",
        "R003",
        chapter="H",
        slug="stream-safety",
        world_size=2,
        axes={"configuration": tuple(CONFIGURATIONS)},
        needs=lambda values: CONFIGURATIONS[values["configuration"]][3],
        environment=("accelerator",),
        kills=_kills,
    )
    def test_two_ranks(self, configuration: str) -> None:
        """Every access waits for those that it depends on, and training is at parity."""
        self._check(configuration, *CONFIGURATIONS[configuration][:3])

    @conformance_case(
        "R075",
        "R002",
        "R003",
        chapter="H",
        slug="stream-safety-hybrid",
        world_size=4,
        axes={"configuration": tuple(HYBRID)},
        needs=lambda values: ("hsdp", *HYBRID[values["configuration"]][3]),
        environment=("accelerator",),
        kills=("frees-in-flight", "scales-without-waiting"),
    )
    def test_hybrid(self, configuration: str) -> None:
        """The same holds if gradients are reduced over shards and then over replicas."""
        workload, regime, plan, _ = HYBRID[configuration]
        self._check(configuration, workload, regime, {**plan, "sharding": Sharding.HYBRID, "replicas": 2})

    @conformance_case(
        "R075",
        "R002",
        "R003",
        chapter="H",
        slug="stream-safety",
        world_size=4,
        axes={"configuration": ("plain", "deferred", "ragged")},
        needs=lambda values: CONFIGURATIONS[values["configuration"]][3],
        environment=("accelerator",),
        kills=("frees-in-flight",),
    )
    def test_four_ranks(self, configuration: str) -> None:
        """Every access waits for those that it depends on, on four ranks."""
        self._check(configuration, *CONFIGURATIONS[configuration][:3])

    def _check(
        self, configuration: str, workload_of: Callable[[], Workload], regime: Regime, changes: dict[str, Any]
    ) -> None:
        workload = workload_of()
        run = self.check_stream_safety(workload, self.plan(workload, **changes), regime)
        if configuration not in _WITHOUT_PARITY:
            self.check_parity(run, workload, regime)


class UpdatedParameters(ConformanceTestCase):
    """The order of the optimizer's writes and the gathers of the next forward."""

    @conformance_case(
        "R074",
        "R002",
        chapter="H",
        axes={"world_size": (2,), "optimizer": ("sgd", "adam"), "prefetch": (False, True)},
        only=lambda values: values["optimizer"] == "sgd" or not values["prefetch"],
        needs=lambda values: ["prefetch_forward"] if values["prefetch"] else [],
        environment=("accelerator",),
        kills=("steps-on-a-side-stream", "prefetches-before-the-step"),
    )
    def test_gathers_wait_for_the_step(self, world_size: int, optimizer: str, prefetch: bool) -> None:
        """The gathers of the next forward wait for the optimizer's last write."""
        workload = models.norm_mlp() if optimizer == "adam" else deep.deep_4()
        regime = Regime(optimizer=optimizer)
        run = self.check_stream_safety(workload, self.plan(workload, forward_prefetch=prefetch), regime)
        self.check_parity(run, workload, regime)

    @conformance_case(
        "R074",
        "R002",
        chapter="H",
        slug="gathers-wait-for-the-step-hybrid",
        world_size=4,
        needs=("hsdp",),
        environment=("accelerator",),
        kills=("steps-on-a-side-stream", "prefetches-before-the-step"),
    )
    def test_hybrid(self) -> None:
        """The gathers of the next forward wait for the optimizer's last write on every replica."""
        workload = probes.exact_nested()
        run = self.check_stream_safety(workload, self.plan(workload, sharding=Sharding.HYBRID, replicas=2))
        self.check_parity(run, workload)


class WrongPrefetch(ConformanceTestCase):
    """The recorded order of execution no longer holds, or a prefetched unit is never reached."""

    hazard_requirements = every_race("R078")

    @conformance_case(
        "R078",
        "R002",
        "R003",
        chapter="H",
        axes={
            "world_size": (2,),
            "scenario": ("reordered", "unused", "repeated"),
            "prefetch": ("default", "forward", "pre", "post"),
        },
        needs=lambda values: {
            "default": [], "forward": ["prefetch_forward"], "pre": ["prefetch_backward"], "post": ["prefetch_backward"]
        }[values["prefetch"]],
        environment=("accelerator",),
        kills=lambda values: {
            "default": ["frees-in-flight", *["keeps-unused-unsharded"] * (values["scenario"] == "unused")],
            "forward": ["frees-in-flight", *["keeps-unused-unsharded"] * (values["scenario"] == "unused")],
        }.get(
            values["prefetch"],
            ["reference-forgets-the-gather", *["reference-keeps-unused"] * (values["scenario"] == "unused")],
        ),
    )  # fmt: skip
    def test_harmless(self, world_size: int, scenario: str, prefetch: str) -> None:
        """Units that run in a new order, never, or repeatedly stay at parity, and all are resharded at the end."""
        workload = {
            "reordered": probes.exact_reordered,
            "unused": probes.exact_unused,
            "repeated": probes.exact_multi_forward,
        }[scenario]()
        regime = Regime(steps=4, unused_parameters=scenario == "unused")
        adapter = self.subject()
        plan = self.plan(
            workload,
            forward_prefetch=prefetch == "forward",
            backward_prefetch=BackwardPrefetch.DEFAULT if prefetch == "forward" else BackwardPrefetch(prefetch),
        )
        run = self.check_stream_safety(workload, plan, regime, adapter=adapter)
        self.check_parity(run, workload, regime, requirement="R078", none_or_zero=scenario == "unused")
        self.check_resharded(adapter, workload, "R078", run, plan)


class ChangedSizes(ConformanceTestCase):
    """Collectives' sizes change from step to step, so that memory is reused in a different order."""

    @conformance_case(
        "R075",
        "R002",
        chapter="H",
        slug="reuse-with-changing-sizes",
        world_size=2,
        axes={"offload": ("off", "cpu_pinned")},
        needs=lambda values: [] if values["offload"] == "off" else ["cpu_offload_params"],
        environment=lambda values: ["accelerator"] + ["pinned_memory"] * (values["offload"] == "cpu_pinned"),
        kills=("frees-in-flight",),
    )
    def test_batches(self, offload: str) -> None:
        """With batches of changing size, with and without offload, no memory is reused before its last use ends."""
        workload = deep.deep_ragged()
        regime = Regime(steps=5)
        plan = self.plan(workload, offload=Offload(offload))
        run = self.check_stream_safety(workload, plan, regime)
        self.check_parity(run, workload, regime)
