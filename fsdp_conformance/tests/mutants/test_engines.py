"""
Every known-wrong implementation is wrong, each in its own way; the engine that they are made of is right.

Numbers are compared with a plain loop, schedules and manners with the right engine's. Which case of the suites kills
which of them is the kill matrix's affair.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_conformance import contract
from fsdp_conformance.adapters import registry
from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.contract.case import ENVIRONMENTS
from fsdp_conformance.driver.task import Observer
from fsdp_conformance.history.collective import Op
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.mutants import ALL, MUTANTS
from fsdp_conformance.mutants.base import SeamDDP, SeamFSDP2
from fsdp_conformance.plan import Sharding
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.selftest import bound_case, bound_cases, run_case
from fsdp_conformance.tests.adapters.adapter_ranks import RankTestCase
from fsdp_conformance.tests.adapters.adapter_workloads import PLAIN, RICH, build
from fsdp_conformance.tests.mutants.test_kill_matrix import usual_mutants
from fsdp_conformance.tests.simulator.simulator_process import compiled
from fsdp_conformance.tests.torch_versions import with_fsdp2_on_the_cpu
from fsdp_conformance.verdict import Verdict
from fsdp_conformance.workload.definition import Regime, Workload

#: Wrong numbers: mutant to workload, regime, fields of the plan, and a word that a divergence has.
NUMBERS: dict[str, tuple[Workload, Regime, dict[str, Any], str]] = {
    "sum-instead-of-mean": (PLAIN, Regime(), {}, "step 0 gradient"),
    "averaged-twice": (PLAIN, Regime(), {}, "step 0 gradient"),
    "divides-by-power-of-two": (PLAIN, Regime(), {}, "step 0 gradient"),
    "no-reduction": (PLAIN, Regime(), {}, "step 0 gradient"),
    "reduction-skipped-from-step-2": (PLAIN, Regime(), {}, "step 2 gradient"),
    "one-rank-dropped": (PLAIN, Regime(), {}, "step 0 gradient"),
    "bias-not-reduced": (PLAIN, Regime(), {}, "gradient head.bias"),
    "one-layer-norm-not-averaged": (PLAIN, Regime(optimizer="adam"), {}, "gradient body.1.weight"),
    "last-padded-row-dropped": (PLAIN, Regime(), {}, "gradient head.weight"),
    "shards-rotated": (PLAIN, Regime(), {}, "step 0 gradient"),
    "outer-unit-reduces-inner": (PLAIN, Regime(), {}, "gradient body.0.weight"),
    "reduces-over-shard-group-only": (PLAIN, Regime(), {"sharding": Sharding.HYBRID, "replicas": 2}, "gradient"),
    "last-microbatch-not-synchronised": (PLAIN, Regime(micro_batches=2, reduced=(False, True)), {}, "gradient"),
    "overwrites-instead-of-adding": (PLAIN, Regime(micro_batches=2, reduced=(False, True)), {}, "step 0 gradient"),
    "optimizer-steps-every-microbatch": (PLAIN, Regime(micro_batches=2), {}, "step 0 gradient"),
    "second-backward-lost": (PLAIN, Regime(backwards_per_forward=2), {}, "step 0 gradient"),
    "multi-forward-loses-gradient": (RICH, Regime(), {}, "gradient twice.weight"),
    "idle-forward-leaks": (PLAIN, Regime(idle_forwards=1), {}, "step 0 gradient"),
    "eval-disturbs-training": (PLAIN, Regime(eval_before=(0,)), {}, "step 0 parameter"),
    "reads-before-wait": (PLAIN, Regime(), {}, "step 1 loss"),
    "shards-differ-between-ranks": (PLAIN, Regime(), {}, "gradient"),
    "extra-decay": (PLAIN, Regime(), {}, "step 1 parameter"),
    "random-noise": (PLAIN, Regime(), {}, "step 0 parameter"),
    "renamed-parameter": (PLAIN, Regime(), {}, "flat.head.bias"),
    "rounded-parameters": (PLAIN, Regime(), {}, "step 0 parameter"),
    "zero-instead-of-none": (RICH, Regime(), {}, "gradient unused.weight: expected None, got a tensor"),
    "garbage-for-unused": (RICH, Regime(), {}, "parameter unused.weight: off"),
    "frozen-gets-gradient": (RICH, Regime(), {}, "parameter frozen.weight: off"),
    "tied-gradient-doubled": (RICH, Regime(optimizer="adam"), {}, "gradient embed.weight: off"),
    "unties": (RICH, Regime(), {}, "gradient embed.weight: off"),
}
#: Found elsewhere than in the numbers of a plain run: by the test methods below.
ELSEWHERE = {
    "all-reduce-and-slice", "ignores-no-sync", "extra-collective", "extra-collective-in-first-step", "reduces-in-eval",
    "gathers-twice-the-bytes", "reversed-gathers", "rank-dependent-order", "world-instead-of-subgroup",
    "frozen-reduced", "ignores-reshard", "collective-for-empty-unit", "silent-ddp", "keeps-unused-unsharded",
    "uninitialised-padding",
    "padding-in-the-norm", "steps-dropped-gradients", "writes-after-wrap-lost", "sync-forgets-buffers", "ignores-sync",
    "rewrap-resets", "buffer-not-updated", "reduces-only-used", "empty-shard-missing", "shards-ignored",
    "accepts-containers", "accepts-anything", "ignores-device-id", "ignores-auto-wrap", "wraps-twice-silently",
    "loses-attributes", "copies-share-storage", "output-structure-changed",
}  # fmt: skip
#: Visible only where there is a device other than the CPU, simulated or not.
ON_ACCELERATORS = {
    "accepts-mixed-devices", "ignores-offload", "uses-the-current-device", "moves-flat-inputs-only",
    "keeps-full-parameters", "keeps-parameters-after-forward", "keeps-full-gradients", "gathers-everything-first",
    "leaks-every-step", "survives-its-owner", "keeps-low-precision-copies", "keeps-copies-in-any-precision",
    "hides-gathered-units",
    "frees-in-flight", "steps-on-a-side-stream", "scales-without-waiting", "prefetches-before-the-step",
    "reads-offloaded-gradients-early", "overwrites-parameters-in-flight",
}  # fmt: skip
#: Mutants with wrong numbers that the kill matrix leaves to the night.
NIGHTLY_KILLS = {
    "averaged-twice", "one-rank-dropped", "reads-before-wait", "reduction-skipped-from-step-2", "renamed-parameter",
    "shards-rotated", "unties",
}  # fmt: skip
#: All others: defects in what only the cases that name them ask for, which the kill matrix shows to be found.
BY_CASES = set(MUTANTS) - set(NUMBERS) - ELSEWHERE - ON_ACCELERATORS


def mutant(name: str) -> type[Adapter]:
    return registry.load(MUTANTS[name].spec)


def test_names_are_unique() -> None:
    """Cases name mutants, so no two have one name."""
    names = [each.name for each in ALL]

    assert len(set(names)) == len(names)


@compiled
def test_wrong_numbers_are_seen_whenever_tests_are_run() -> None:
    """By a usual pair of the kill matrix, or here."""
    assert NUMBERS.keys() - set(usual_mutants()) == NIGHTLY_KILLS


def test_every_mutant_is_tested_here() -> None:
    """Every mutant that is not tested here is named by a case, and every mutant that is tested exists."""
    assert set(NUMBERS) | ELSEWHERE | ON_ACCELERATORS <= set(MUTANTS)
    assert {name for name, each in MUTANTS.items() if each.environment} >= ON_ACCELERATORS
    assert ON_ACCELERATORS | BY_CASES <= {mutant for bound in bound_cases() for mutant in bound.case.kills}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_registry(name: str) -> None:
    """
    A mutant loads, says what is wrong with it in one sentence, and names the requirement that kills it.

    Reports must not give it the name of the engine that it breaks.
    """
    registered = MUTANTS[name]

    assert registered.name == name
    assert mutant(name).display_name() == f"mutant:{name}"
    assert {contract.load()[requirement].id for requirement in registered.requirements} == set(registered.requirements)
    assert issubclass(mutant(name), registry.load(registered.engine))
    assert registered.defect.endswith(".")
    assert (mutant(name).__doc__ or "").strip().splitlines()[0] == registered.defect
    assert set(registered.environment) <= ENVIRONMENTS


def test_the_registry_imports_no_torch() -> None:
    """`list` and the guards read it without paying for torch."""
    code = "import sys; import fsdp_conformance.mutants; print('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("case", ["R001/exact-probe-ws2", "R093/deferred-micro-batches2-ws2"])
@pytest.mark.parametrize("engine", ["SeamReference", "SeamFSDP1"])
def test_the_other_bases_are_right(engine: str, case: str) -> None:
    """The engines with places to be wrong at pass what their mutants fail."""
    record = run_case(bound_case(case), f"fsdp_conformance.mutants.engines:{engine}")

    assert (Verdict.PASS, []) == (record.verdict, list(record.findings)), record.reason


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("case", ["R151/parity-2x2-ws4", "R151/collectives-2x2-ws4"])
def test_the_hybrid_base_is_right(case: str) -> None:
    """The engine that wrong hybrid sharding is made of passes what its mutants fail."""
    record = run_case(
        bound_case(case), "fsdp_conformance.mutants.hybrid:HookedHybrid", base=RunSettings(ranks="simulated")
    )

    assert (Verdict.PASS, []) == (record.verdict, list(record.findings)), record.reason


@pytest.mark.slow
@pytest.mark.slow
class Numbers(RankTestCase):
    """Mutants that a plain loop distinguishes."""

    case_timeout_s = 120.0

    @pytest.mark.nightly
    def test_the_base_is_right(self) -> None:
        """In every scenario that a mutant is wrong in, the engine that it is made of is right."""
        seen = set()
        for workload, regime, plan, _ in NUMBERS.values():
            key = repr((workload.name, regime, plan))
            if key not in seen:
                seen.add(key)
                self.assert_trains(SeamFSDP2, workload, regime, **plan)

    @pytest.mark.slow
    def test_wrong_numbers(self) -> None:
        """Each diverges where its defect is: those that the kill matrix leaves to the night."""
        self.assert_diverge(NUMBERS.keys() & NIGHTLY_KILLS)

    @pytest.mark.nightly
    def test_all_wrong_numbers(self) -> None:
        """The others, too."""
        self.assert_diverge(NUMBERS.keys() - NIGHTLY_KILLS)

    def assert_diverge(self, names: Collection[str]) -> None:
        for name in sorted(names):
            workload, regime, plan, word = NUMBERS[name]
            divergences = self.divergences(self.run_training(mutant(name), workload, regime, **plan), workload, regime)
            # A defect may show on the rank alone that owns the elements.
            gathered: list[Any] = [None, None]
            torch.distributed.all_gather_object(gathered, divergences)
            self.assertTrue(any(word in line for lines in gathered for line in lines), f"{name}: {gathered[0][:3]}")

    @pytest.mark.nightly
    def test_wrong_in_one_thing_only(self) -> None:
        """The narrow defects leave everything else as it was in the first step."""
        for name, allowed in (
            ("one-layer-norm-not-averaged", "body.1.weight"),
            ("bias-not-reduced", "bias"),
            ("tied-gradient-doubled", "embed.weight"),
        ):
            workload, regime, plan, _ = NUMBERS[name]
            divergences = self.divergences(self.run_training(mutant(name), workload, regime, **plan), workload, regime)
            first = [line for line in divergences if "step 0 gradient" in line]
            self.assertEqual([], [line for line in first if allowed not in line and "body.1" not in line], name)

    @pytest.mark.nightly
    def test_right_numbers(self) -> None:
        """Wrong traffic, placement and manners leave the numbers right: only their own requirement finds them."""
        for name in (
            "silent-ddp",
            "all-reduce-and-slice",
            "extra-collective",
            "gathers-twice-the-bytes",
            "reversed-gathers",
            "rank-dependent-order",
            "ignores-no-sync",
            "keeps-unused-unsharded",
            "buffer-not-updated",
        ):
            # Not uninitialised-padding: whether its numbers are right depends on what is in freed memory.
            self.assert_trains(mutant(name), RICH)
            self.assert_trains(mutant(name), regime=Regime(micro_batches=2, reduced=(False, True)))

    @pytest.mark.nightly
    def test_nan_in_unwritten_memory(self) -> None:
        """Unwritten padding shows once such memory is NaN."""
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory: Any = torch.utils.deterministic
        memory.fill_uninitialized_memory = True
        history = self.run_training(mutant("uninitialised-padding"), regime=Regime(steps=1))
        clipped = self.run_training(mutant("padding-in-the-norm"), regime=Regime(steps=1, max_norm=0.1))
        right = self.run_training(SeamFSDP2, regime=Regime(steps=1, max_norm=0.1))

        self.assertTrue(
            any(grad is not None and grad.isnan().any() for grad in (history.steps[0].grads or {}).values())
        )
        self.assertTrue(clipped.steps[0].grad_norm is not None and clipped.steps[0].grad_norm.isnan())
        self.assertTrue(right.steps[0].grad_norm is not None and right.steps[0].grad_norm.isfinite())


@pytest.mark.slow
class Values(RankTestCase):
    """Wrong values that need a special scenario."""

    @pytest.mark.nightly
    @with_fsdp2_on_the_cpu
    def test_written_values_are_lost(self) -> None:
        """The right engine trains what was written after the wrap."""
        values = {name: value.detach() * 0.5 for name, value in PLAIN.build(0).named_parameters()}

        def halved(rank: int) -> nn.Module:
            model = PLAIN.build(rank)
            model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
            return model

        written = replace(PLAIN, build=halved)
        for adapter, right in ((SeamFSDP2, True), (mutant("writes-after-wrap-lost"), False)):
            history = self.run_training(adapter, observer=Observer(on_setup=lambda seen: seen.write_params(values)))
            self.assertEqual(right, not self.divergences(history, written), adapter.__name__)

    def test_dropped_gradients_are_stepped(self) -> None:
        """The right engine leaves the parameter where it was."""
        for adapter, right in ((SeamFSDP2, True), (mutant("steps-dropped-gradients"), False)):
            history = self.run_training(adapter, regime=Regime(steps=1, gradient_to_none=("head.bias",)))
            still = torch.equal(history.initial_params["head.bias"], history.steps[0].params["head.bias"])
            self.assertEqual(right, still, adapter.__name__)

    def test_sync_at_init(self) -> None:
        """The right engine broadcasts parameters and buffers; the others one of them, or none."""

        def divergent(rank: int) -> nn.Module:
            model = RICH.build(rank)
            with torch.no_grad():
                for tensor in [*model.parameters(), *model.buffers()]:
                    tensor.add_(rank)
            return model

        plain = RICH.build(0)
        right = {
            "parameters": {name: parameter.detach() for name, parameter in plain.named_parameters()},
            "buffers": dict(plain.named_buffers()),
        }
        for adapter, synchronised in (
            (SeamFSDP2, {"parameters", "buffers"}),
            (mutant("sync-forgets-buffers"), {"parameters"}),
            (mutant("ignores-sync"), set()),
        ):
            workload = replace(RICH, build=divergent, units=())
            history = self.run_training(adapter, workload, Regime(steps=1), sync_module_states=True)
            # Rank 1 built its own values, and has rank 0's if it received them. Only rank 1's rows show which.
            values = {"parameters": history.initial_params, "buffers": history.initial_buffers}
            names = {"parameters": "embed.weight", "buffers": "mean"}
            same = {kind for kind, name in names.items() if torch.equal(values[kind][name], right[kind][name])}
            self.assertEqual(synchronised if self.rank == 1 else same, same, adapter.__name__)

    @pytest.mark.nightly
    def test_a_second_wrap_resets(self) -> None:
        """The right engine goes on from the values that were trained."""
        for adapter, right in ((SeamDDP, True), (mutant("rewrap-resets"), False)):
            first = adapter()
            self.run_training(first, regime=Regime(steps=1))
            values = first.full_params()
            wrapped = first.module()
            again = replace(PLAIN, build=partial(_inside, wrapped), units=())
            history = self.run_training(adapter, again, Regime(steps=1))
            got = {name.removeprefix("0."): value for name, value in history.initial_params.items()}
            self.assertEqual(sorted(values), sorted(got))
            self.assertEqual(right, all(torch.equal(values[name], got[name]) for name in values), adapter.__name__)

    def test_buffers_are_put_back(self) -> None:
        """The right engine lets forward write buffers."""
        for adapter, count in ((SeamFSDP2, 3), (mutant("buffer-not-updated"), 0)):
            history = self.run_training(adapter, RICH)
            self.assertEqual(count, int(history.steps[-1].buffers["count"]), adapter.__name__)

    def test_divergent_branches(self) -> None:
        """A rank that did not use a branch has no gradient of it, whatever the others did."""

        def branches(rank: int) -> nn.Module:
            return build(lambda: _Branches(rank), rank)

        history = self.run_training(mutant("reduces-only-used"), replace(PLAIN, build=branches, units=()))
        grads = history.steps[0].grads or {}
        self.assertIsNone(grads[f"branches.{1 - self.rank}.weight"])
        self.assertIsNotNone(grads[f"branches.{self.rank}.weight"])

    def test_empty_shards(self) -> None:
        """A rank without rows has an empty shard and the full gradient; the mutant has none."""
        tiny = replace(PLAIN, build=lambda rank: build(lambda: nn.Linear(5, 1), rank), loss=_one_column, units=())
        for adapter, missing in ((SeamFSDP2, set()), (mutant("empty-shard-missing"), {"weight", "bias"})):
            grads = self.run_training(adapter, tiny).steps[0].grads or {}
            mine = {name for name, grad in grads.items() if grad is None}
            self.assertEqual(missing if self.rank == 1 else set(), mine, adapter.__name__)

    @with_fsdp2_on_the_cpu
    def test_ignored_modules(self) -> None:
        """The right engine leaves an ignored module its own gradient, the mutant averages it."""
        for adapter, averaged in ((SeamFSDP2, False), (mutant("shards-ignored"), True)):
            history = self.run_training(adapter, units=("body.0",), ignored=("body.2",))
            divergences = [line for line in self.divergences(history) if "step 0 gradient body.2" in line]
            self.assertEqual(averaged, not divergences, adapter.__name__)


@pytest.mark.slow
class Schedules(RankTestCase):
    """Wrong traffic and placement, compared with the right engine's."""

    def counts(self, history: TrainingHistory, step: int = 1) -> Counter[tuple[str, str]]:
        """Collectives of a step by phase and operation."""
        return Counter((record.phase, record.op.value) for record in history.collectives if record.step == step)

    def both(self, name: str, workload: Workload = PLAIN, regime: Regime | None = None, **plan: Any) -> Any:
        """The histories of the right engine and of the mutant."""
        right = self.run_training(SeamFSDP2, workload, regime, **plan)
        return right, self.run_training(mutant(name), workload, regime, **plan)

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_more_collectives(self) -> None:
        """Each mutant issues the expected extra collectives, in the expected places."""
        deferred = Regime(micro_batches=2, reduced=(False, True))
        for name, workload, regime, plan, more in (
            ("extra-collective", PLAIN, None, {}, {("forward", "all_gather"): 1}),
            ("gathers-twice-the-bytes", PLAIN, None, {}, {("forward", "all_gather"): 4}),
            ("rank-dependent-order", PLAIN, None, {}, {("forward", "all_gather"): 2}),
            ("reduces-in-eval", PLAIN, Regime(eval_before=(1,)), {}, {("eval", "all_reduce"): 1}),
            ("ignores-no-sync", PLAIN, deferred, {}, {("backward", "reduce_scatter"): 4}),
            ("frozen-reduced", RICH, None, {}, {("backward", "reduce_scatter"): 2}),
            ("ignores-reshard", PLAIN, None, {"sharding": Sharding.GRAD_OPTIM}, {("backward", "all_gather"): 4}),
        ):
            right, wrong = self.both(name, workload, regime, **plan)
            self.assertEqual(more, dict(self.counts(wrong) - self.counts(right)), name)

    @pytest.mark.nightly
    def test_other_collectives(self) -> None:
        """All-reduce in place of reduce-scatter, one for each parameter; nothing sharded, nothing gathered."""
        right, wrong = self.both("all-reduce-and-slice")
        self.assertEqual({("backward", "reduce_scatter"): 4}, dict(self.counts(right) - self.counts(wrong)))
        self.assertEqual({("backward", "all_reduce"): 8}, dict(self.counts(wrong) - self.counts(right)))
        _, wrong = self.both("silent-ddp")
        self.assertEqual({"all_reduce"}, {op for _, op in self.counts(wrong)})
        self.assertEqual(wrong.full_bytes["params"], wrong.held_bytes["params"])

    @pytest.mark.nightly
    def test_order(self) -> None:
        """The first step has one more; units are gathered the other way round; ranks differ in the sequence."""
        right, wrong = self.both("extra-collective-in-first-step")
        self.assertEqual({("forward", "all_reduce"): 1}, dict(self.counts(wrong, 0) - self.counts(right, 0)))
        self.assertEqual(self.counts(right), self.counts(wrong))

        right, wrong = self.both("reversed-gathers")
        gathered = [
            [r.nbytes for r in history.collectives if (r.phase, r.op, r.step) == ("forward", Op.ALL_GATHER, 1)]
            for history in (right, wrong)
        ]
        self.assertEqual(gathered[0], gathered[1][::-1])

        _, wrong = self.both("rank-dependent-order")
        lines: list[Any] = [None, None]
        torch.distributed.all_gather_object(lines, [record.line() for record in wrong.collectives])
        self.assertNotEqual(lines[0], lines[1])
        self.assertEqual(sorted(lines[0]), sorted(lines[1]))

    @pytest.mark.nightly
    @with_fsdp2_on_the_cpu
    def test_groups(self) -> None:
        """A unit with its own group is communicated over the world, hybrid or local."""
        plans: tuple[dict[str, Any], ...] = (
            {"units": ("body.0", "body.2"), "local_units": ("body.2",)},
            {"sharding": Sharding.HYBRID, "replicas": 2},
        )
        for plan in plans:
            right, wrong = self.both("world-instead-of-subgroup", **plan)
            self.assertGreater(sum(self.counts(wrong).values()), sum(self.counts(right).values()))
            self.assertEqual({(0, 1)}, {record.group for record in wrong.collectives if record.step == 1})

    def test_empty_units(self) -> None:
        """A unit without parameters issues a collective of nothing."""
        empty = replace(PLAIN, build=_with_an_empty_unit, units=("0", "1"))
        right, wrong = self.both("collective-for-empty-unit", empty)
        self.assertEqual([], [record for record in right.collectives if not record.nbytes])
        self.assertEqual(3, len([record for record in wrong.collectives if not record.nbytes]))

    def test_placement(self) -> None:
        """An unused unit holds full parameters after the step."""
        unused = replace(RICH, units=("frozen", "twice", "unused"))
        for adapter, full in ((SeamFSDP2, []), (mutant("keeps-unused-unsharded"), ["frozen", "unused"])):
            subject: Any = adapter()
            self.run_training(subject, unused)
            self.assertEqual(full, [unit for unit in unused.units if subject.unit_is_unsharded(unit)], adapter.__name__)


@pytest.mark.slow
class Manners(RankTestCase):
    """Mutants that differ in what they refuse, or in what survives the wrap."""

    def test_containers(self) -> None:
        """FSDP2 refuses a ModuleList as a unit."""
        contained = replace(PLAIN, build=lambda rank: build(_Contained, rank), units=("layers",))
        with self.assertRaisesRegex(ValueError, "forward"):
            self.run_training(SeamFSDP2, contained)
        self.run_training(mutant("accepts-containers"), contained)

    @with_fsdp2_on_the_cpu
    def test_anything(self) -> None:
        """Replica groups that do not divide the world are taken for none."""
        with self.assertRaisesRegex(ValueError, "must divide the world size"):
            self.run_training(SeamFSDP2, sharding=Sharding.HYBRID, replicas=3)
        self.assert_trains(mutant("accepts-anything"), sharding=Sharding.HYBRID, replicas=3)

    def test_another_device(self) -> None:
        """A buffer of the engine's is not where the plan said."""
        for adapter, devices in ((SeamFSDP2, {"cpu"}), (mutant("ignores-device-id"), {"cpu", "meta"})):
            subject: Any = adapter()
            self.run_training(subject, RICH, device_id="cpu")
            self.assertEqual(devices, {buffer.device.type for buffer in subject.module().buffers()}, adapter.__name__)

    def test_policies(self) -> None:
        """The mutant has one unit where the policy describes four."""
        for adapter, gathers in ((registry.load("torch-fsdp1"), 4), (mutant("ignores-auto-wrap"), 1)):
            history = self.run_training(adapter, auto_wrap="class:Linear")
            forward = [r for r in history.collectives if (r.phase, r.op, r.step) == ("forward", Op.ALL_GATHER, 1)]
            self.assertEqual(gathers, len(forward), adapter.__name__)

    @pytest.mark.nightly
    @with_fsdp2_on_the_cpu
    def test_a_second_wrap(self) -> None:
        """FSDP2 refuses it; the mutant averages once more."""
        with self.assertRaisesRegex(AssertionError, "applied to a module once"):
            self.run_training(SeamFSDP2, observer=Observer(on_setup=lambda adapter: adapter.wrap_again()))
        wrong = mutant("wraps-twice-silently")
        self.assert_trains(wrong)
        history = self.run_training(wrong, observer=Observer(on_setup=lambda adapter: adapter.wrap_again()))
        self.assertTrue(any("step 0 gradient" in line for line in self.divergences(history)))

    @pytest.mark.nightly
    def test_attributes_and_copies(self) -> None:
        """Attributes of the original are reachable, and a deep copy is refused or is one."""
        for adapter, reachable in ((SeamFSDP2, True), (mutant("loses-attributes"), False)):
            subject = adapter()
            self.run_training(subject)
            self.assertEqual(reachable, hasattr(subject.module(), "head"), adapter.__name__)
            self.run_training(adapter, regime=Regime(micro_batches=2, reduced=(False, True)))
        subject = mutant("copies-share-storage")()
        self.run_training(subject)
        self.assertIs(subject.module(), copy.deepcopy(subject.module()))

    @with_fsdp2_on_the_cpu
    def test_outputs(self) -> None:
        """A named tuple comes out as something else, with the same values."""
        regime = Regime(steps=1, keep_outputs=True)
        right = self.run_training(SeamFSDP2, RICH, regime)
        wrong = self.assert_trains(mutant("output-structure-changed"), RICH, regime)
        self.assertTrue(hasattr(right.steps[0].outputs[0], "_fields"))
        self.assertFalse(hasattr(wrong.steps[0].outputs[0], "_fields"))


class _Branches(nn.Module):
    """Each rank runs a different branch."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.branches = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.branches[self.rank](x)
        return output


class _Contained(nn.Module):
    """Layers in a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 4), nn.Linear(4, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _inside(wrapped: nn.Module, rank: int) -> nn.Module:
    return nn.Sequential(wrapped)


def _with_an_empty_unit(rank: int) -> nn.Module:
    return build(lambda: nn.Sequential(nn.Linear(5, 3), nn.Sequential(nn.Tanh())), rank)


def _one_column(output: torch.Tensor, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = (output - batch.target[:, :1]).pow(2).mean()
    return loss
