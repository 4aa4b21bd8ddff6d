"""J. Gradient accumulation."""

from __future__ import annotations

from typing import Any

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks.communication import collective_counts
from fsdp_conformance.checks.invariance import Losses, same_training
from fsdp_conformance.fixtures import probes, split, unused
from fsdp_conformance.plan import Offload, Sharding
from fsdp_conformance.workload.definition import Regime

#: Which of six micro-batches are reduced immediately, by name.
_PATTERNS = {
    "last-only": (False, False, False, False, False, True),
    "alternating": (False, True, False, True, False, True),
    "late": (False, False, True, True, False, True),
    "early": (True, True, False, False, False, True),
}

#: Units whose reduction is deferred, by name.
_DEFERRED = {"root": ("",), "some": ("stages.0", "stages.2")}


class Accumulation(ConformanceTestCase):
    """Several micro-batches make one step."""

    @conformance_case(
        "R092",
        "R002",
        "R003",
        chapter="J",
        axes={"micro_batches": (2, 3), "world_size": (2,)},
        kills=(
            "overwrites-instead-of-adding",
            "last-microbatch-not-synchronised",
            "optimizer-steps-every-microbatch",
        ),
    )
    def test_synchronised(self, micro_batches: int, world_size: int) -> None:
        """Micro-batches that are each synchronised, without zero_grad in between, accumulate in the shard."""
        workload = probes.exact_accumulation()
        regime = Regime(micro_batches=micro_batches)
        run = self.train(workload, self.plan(workload, micro_batches=micro_batches), regime)
        self.check_parity(run, workload, regime, requirements={"gradient": "R092"})

    @conformance_case(
        "R093",
        "R002",
        "R003",
        chapter="J",
        axes={"micro_batches": (2, 3), "world_size": (2,)},
        needs=("no_sync",),
        kills=(
            *("last-microbatch-not-synchronised", "overwrites-instead-of-adding", "reference-overwrites-collected"),
            "kept-while-deferred",
        ),
    )
    def test_deferred(self, micro_batches: int, world_size: int) -> None:
        """Deferred micro-batches followed by a synchronised one equal one batch."""
        workload = probes.exact_accumulation()
        regime = Regime(micro_batches=micro_batches, reduced=(*[False] * (micro_batches - 1), True))
        run = self.train(workload, self.plan(workload, micro_batches=micro_batches, defer_reduction=True), regime)
        self.check_parity(run, workload, regime, requirements={"gradient": "R093"})

    @conformance_case(
        "R093",
        "R002",
        "R003",
        chapter="J",
        axes={"pattern": tuple(_PATTERNS), "world_size": (2,)},
        needs=("no_sync",),
        kills=("last-microbatch-not-synchronised",),
    )
    def test_interleaved(self, pattern: str, world_size: int) -> None:
        """Any interleaving of deferred and synchronised micro-batches equals one batch."""
        workload = probes.exact_accumulation()
        regime = Regime(steps=1, micro_batches=6, reduced=_PATTERNS[pattern])
        run = self.train(workload, self.plan(workload, micro_batches=6, defer_reduction=True), regime)
        self.check_parity(run, workload, regime, requirements={"gradient": "R093"})

    @conformance_case(
        "R093",
        "R002",
        "R003",
        "R117",
        chapter="J",
        axes={"world_size": (2,)},
        needs=("no_sync",),
        kills=("idle-in-the-last-micro-batch-lost", "last-microbatch-not-synchronised"),
    )
    def test_used_only_while_deferred(self, world_size: int) -> None:
        """A unit that only the deferred micro-batch uses is at parity after the last one, which does not use it."""
        workload = unused.used_in_one_micro_batch()
        regime = Regime(micro_batches=2, reduced=(False, True), unused_parameters=True)
        run = self.train(workload, self.plan(workload, micro_batches=2, defer_reduction=True), regime)
        self.check_parity(run, workload, regime, requirements={"gradient": "R093", "parameter": "R117"})

    @conformance_case(
        "R092",
        "R002",
        chapter="J",
        axes={"parts": (2, 4), "world_size": (2,)},
        kills=("overwrites-instead-of-adding", "optimizer-steps-every-microbatch", "last-microbatch-not-synchronised"),
    )
    def test_split_changes_nothing(self, parts: int, world_size: int) -> None:
        """A batch of four samples, and the same samples in several micro-batches, train the same parameters bitwise."""
        self._compare_splits(parts, (), "R092")

    @conformance_case(
        "R093",
        "R002",
        chapter="J",
        axes={"parts": (2, 4), "world_size": (2,)},
        needs=("no_sync",),
        kills=("last-microbatch-not-synchronised", "reference-overwrites-collected", "kept-while-deferred"),
    )
    def test_deferred_split_changes_nothing(self, parts: int, world_size: int) -> None:
        """The same if the reduction is deferred to the last micro-batch."""
        self._compare_splits(parts, (*[False] * (parts - 1), True), "R093")

    def _compare_splits(self, parts: int, reduced: tuple[bool, ...], requirement: str) -> None:
        whole = self.train(split.split_batch())
        regime = Regime(micro_batches=parts, reduced=reduced)
        run = self.train(split.split_batch(parts), regime=regime)
        what = f"one batch instead of {parts}"
        self.check(same_training(run, whole, what=what, requirement=requirement, losses=Losses.SUMS))

    @conformance_case(
        "R094",
        "R002",
        chapter="J",
        axes={"world_size": (2,)},
        needs=("no_sync",),
        kills=(
            "last-microbatch-not-synchronised",
            "first-deferred-lost",
        ),
    )
    def test_deferred_first_forward(self, world_size: int) -> None:
        """The reduction can be deferred in the very first forward of the wrapped module."""
        workload = probes.exact_accumulation()
        regime = Regime(steps=1, micro_batches=2, reduced=(False, True))
        run = self.train(workload, self.plan(workload, micro_batches=2, defer_reduction=True), regime)
        self.check_parity(run, workload, regime, requirements={"gradient": "R094", "loss": "R094"})

    @conformance_case(
        "R097",
        "R002",
        "R003",
        chapter="J",
        world_size=4,
        axes={"micro_batches": (2, 3)},
        needs=("hsdp", "hsdp_defer_allreduce", "coll_counts"),
        kills=("all-reduces-every-micro-batch", "reduces-over-shard-group-only", "last-microbatch-not-synchronised"),
    )
    def test_replicas_deferred(self, micro_batches: int) -> None:
        """Under hybrid sharding, each micro-batch is reduce-scattered, and their sum is all-reduced after the last."""
        workload = probes.exact_accumulation()
        regime = Regime(micro_batches=micro_batches)
        plan = self.plan(
            workload, sharding=Sharding.HYBRID, replicas=2, micro_batches=micro_batches, defer_all_reduce=True
        )
        run = self.train(workload, plan, regime)
        self.check_parity(run, workload, regime, requirements={"gradient": "R097"})
        self.check(collective_counts(run, workload, plan, requirement="R097"))

    @conformance_case(
        "R098",
        "R002",
        "R003",
        chapter="J",
        axes={"form": ("synchronised", "deferred"), "world_size": (2,)},
        needs=lambda values: ["cpu_offload_params", *(["no_sync"] if values["form"] == "deferred" else [])],
        environment=("accelerator", "pinned_memory"),
        kills=(
            "overwrites-instead-of-adding",
            "offload-forgets-accumulated",
        ),
    )
    def test_with_offload(self, form: str, world_size: int) -> None:
        """With parameters in pinned memory, each form of accumulation gives the sum or is rejected."""
        workload = probes.exact_accumulation()
        regime = Regime(micro_batches=2, reduced=(False, True) if form == "deferred" else ())
        with self.refusal(
            "R098", f"offload with {form} accumulation", names=("offload", "accumulat", "no_sync")
        ) as outcome:
            run = self.check_stream_safety(workload, self.plan(workload, offload=Offload.CPU_PINNED), regime)
            outcome.excused = True
        if outcome.excused:
            self.check_parity(run, workload, regime, requirement="R098")

    @conformance_case(
        "R095",
        "R002",
        "R003",
        chapter="J",
        axes={"units": tuple(_DEFERRED), "world_size": (2,)},
        needs=("zero3", "no_sync", "no_sync_per_unit", "coll_counts"),
        kills=lambda values: (
            ["defers-every-unit", "defers-no-unit", "last-microbatch-not-synchronised"]
            + ["reference-defers-inner-units"] * (values["units"] == "root")
        ),
    )
    def test_some_units_deferred(self, units: str, world_size: int) -> None:
        """Some units are reduced once, after the last micro-batch, and the others after each; all at parity."""
        workload = probes.exact_accumulation()
        regime = Regime(micro_batches=3, reduced=(False, False, True))
        plan = self.plan(
            workload,
            sharding=Sharding.FULL,
            micro_batches=3,
            defer_reduction=True,
            deferred_units=_DEFERRED[units],
        )
        run = self.train(workload, plan, regime)
        self.check_parity(run, workload, regime, requirements=dict.fromkeys(("gradient", "parameter"), "R095"))
        self.check(collective_counts(run, workload, plan, requirement="R095"))

    @conformance_case(
        "R096",
        "R002",
        "R003",
        chapter="J",
        axes={"reduction": ("synchronised", "deferred"), "world_size": (2,)},
        needs=lambda values: [
            *("zero2", "reshard_after_backward", "coll_counts"), *["no_sync"] * (values["reduction"] == "deferred")
        ],
        kills=lambda values: (
            ["keeps-gathered-across-the-step", "reference-keeps-across-the-step"]
            + ["gathers-kept-again"] * (values["reduction"] == "synchronised")
        ),
    )  # fmt: skip
    def test_kept_gathered(self, reduction: str, world_size: int) -> None:
        """Parameters that are kept across micro-batches are gathered once per step, after the optimizer has written."""
        workload = probes.exact_accumulation()
        deferred = reduction == "deferred"
        regime = Regime(micro_batches=3, reduced=(False, False, True) if deferred else ())
        plan = self.plan(
            workload,
            sharding=Sharding.GRAD_OPTIM,
            micro_batches=3,
            defer_reduction=deferred,
            reshard_after_backward=False,
        )
        run = self.train(workload, plan, regime)
        self.check(collective_counts(run, workload, plan, requirement="R096"))
        self.check_parity(run, workload, regime, requirement="R096")

    @conformance_case(
        "R099",
        "R002",
        "R003",
        chapter="J",
        axes={"order": ("forwards-first", "1f1b"), "world_size": (2,)},
        needs=("no_sync", "pipelined_microbatch"),
        kills=("pipelining-loses-the-first", "last-microbatch-not-synchronised"),
    )
    def test_pipelined(self, order: str, world_size: int) -> None:
        """Micro-batches whose forwards run before the backwards of others equal one after the other."""
        workload = probes.exact_accumulation()
        regime = Regime(micro_batches=3, reduced=(False, False, True), pipeline=order)
        run = self.train(workload, regime=regime)
        self.check_parity(run, workload, regime, requirement="R099")

    @conformance_case(
        "R100",
        chapter="J",
        world_size=2,
        axes={"misuse": ("step", "nesting")},
        needs=("no_sync", "deferral_checks"),
        kills=lambda values: (
            ["reference-forgets-deferral", "claims-deferral-checks", "claims-every-check"]
            + ["reference-gives-no-reasons"] * (values["misuse"] == "step")
        ),
    )
    def test_misuse(self, misuse: str) -> None:
        """An optimizer step inside a context that defers the reduction, and another such context in it, are refused."""
        workload = probes.exact_accumulation()
        regime = Regime(micro_batches=2, reduced=(False, True))

        def misused(adapter: Adapter, step: int) -> Any:
            if misuse == "step":
                return adapter.step()
            with adapter.microbatch(False, reduced=False):
                return None

        with self.refusal("R100", f"{misuse} inside no_sync", names=("no_sync", "deferred", "accumulat", "reduced")):
            self.train(workload, self.plan(workload, defer_reduction=True), regime, on_loss=misused)
