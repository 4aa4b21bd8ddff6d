"""
F. State machine and misuse: what an implementation permits between, before and around training steps, and what it
rejects.
"""

from __future__ import annotations

import copy
import operator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.bystanders import BystanderWatch
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.fixtures import models, probes
from fsdp_conformance.fixtures.data import normal, place, seeded_init
from fsdp_conformance.fixtures.recipes import field_optimizers, mean_squared_error
from fsdp_conformance.plan import Sharding
from fsdp_conformance.workload.definition import Batch, BatchKey, Regime, Workload
from fsdp_conformance.workload.events import Action


class StateMachine(ConformanceTestCase):
    """Which operations may follow each other."""

    @conformance_case(
        "R052",
        "R002",
        chapter="F",
        axes={"world_size": (2, 3)},
        kills=(
            "eval-disturbs-training",
            "gradients-lost-after-eval",
        ),
    )
    def test_idle_between_steps(self, world_size: int) -> None:
        """
        After a backward, and after a forward under no_grad, full parameters can be read and the next step is at parity.
        """
        workload = probes.exact_nested()
        regime = Regime(eval_before=(1, 2))
        run = self.train(workload, regime=regime)
        self.check_parity(run, workload, regime, requirements={"loss": "R052", "parameter": "R052"})

    @conformance_case("R053", "R002", "R003", chapter="F", axes={"world_size": (2, 3)}, kills=("idle-forward-leaks",))
    def test_forwards_without_backward(self, world_size: int) -> None:
        """After forwards in training mode without a backward, the next step is at parity, bit for bit."""
        workload = probes.exact_nested()
        regime = Regime(idle_forwards=2)
        run = self.train(workload, regime=regime)
        self.check_parity(run, workload, regime, requirements={"gradient": "R053", "parameter": "R053"})

    @conformance_case(
        "R053",
        "R002",
        "R003",
        chapter="F",
        axes={"world_size": (2, 3)},
        kills=("forward-replaces-gradients", "idle-forward-leaks"),
    )
    def test_forward_at_any_point(self, world_size: int) -> None:
        """
        A forward in training mode without a backward, between steps or micro-batches, leaves training as it was.
        """
        self.check_every_point(
            probes.exact_accumulation(),
            Regime(micro_batches=2),
            Action.FORWARD,
            runs=3,
            requirement="R053",
            pending=False,
        )

    @conformance_case(
        "R053",
        "R002",
        "R003",
        chapter="F",
        axes={"world_size": (2,)},
        kills=("reference-sums-gradients", "forward-replaces-gradients", "idle-forward-leaks"),
    )
    def test_forward_before_the_update(self, world_size: int) -> None:
        """Such a forward between backward and the optimizer step does not make the next step see old parameters."""
        self.check_every_point(
            probes.exact_accumulation(), Regime(micro_batches=2), Action.FORWARD, requirement="R053", pending=True
        )

    @conformance_case(
        "R052",
        "R002",
        "R003",
        chapter="F",
        axes={"world_size": (2, 3)},
        kills=("reading-drops-gradients", "reads-what-forward-saw"),
    )
    def test_read_at_any_point(self, world_size: int) -> None:
        """
        Full parameters can be read wherever no forward waits for its backward; they are current, and training goes on.
        """
        self.check_every_point(
            probes.exact_accumulation(), Regime(micro_batches=2), Action.READ, runs=2, requirement="R052"
        )

    @conformance_case(
        "R058",
        "R002",
        chapter="F",
        axes={"world_size": (2,)},
        needs=("nonroot_forward",),
        kills=(
            "idle-forward-leaks",
            "inner-forward-belongs-to-the-step",
        ),
    )
    def test_inner_unit_first(self, world_size: int) -> None:
        """Training is at parity after an inner unit runs before the root, or that run raises."""
        workload = models.wide_mlp()
        unit = workload.units[0]
        batch = workload.batch(BatchKey(step=0, rank=self.rank, world_size=world_size))
        run = self.train(
            workload, on_setup=self.with_module(lambda module: module.get_submodule(unit)(*self.placed(batch).args))
        )
        self.check_parity(run, workload, requirements={"gradient": "R058", "parameter": "R058"})

    @conformance_case(
        "R059",
        chapter="F",
        world_size=2,
        needs=("exec_order_divergent",),
        kills=(
            "rank-dependent-order",
            "reference-ignores-order",
            "ddp-keeps-last-bucket",
        ),
        timeout_s=45,
        starts_early=True,
    )
    def test_order_differs_between_ranks(self) -> None:
        """Units that run in different orders on different ranks raise or train at parity, never to wrong numbers."""
        workload = _two_branches()
        run = self.train(workload)
        self.check_parity(run, workload, requirement="R059")


class Refusals(ConformanceTestCase):
    """Arguments and calls that are rejected immediately, not later."""

    @conformance_case("R054", chapter="F", world_size=2, needs=("wrap_again",), kills=("wraps-twice-silently",))
    def test_wrapped_already(self) -> None:
        """Wrapping a wrapped module again is rejected, or changes nothing."""
        workload = probes.exact_mlp()
        with self.refusal("R054", "the module is wrapped already", names=_WRAPPED) as outcome:
            run = self.train(workload, on_setup=lambda adapter: adapter.wrap_again())
            outcome.excused = True
        if outcome.excused:
            self.check_parity(run, workload, requirement="R054")

    @conformance_case(
        "R054",
        chapter="F",
        world_size=2,
        kills=("wraps-twice-silently", "refuses-late"),
    )
    def test_wrapped_model(self) -> None:
        """A model that is wrapped already is rejected when it is wrapped, or trains like one that is wrapped once."""
        workload = probes.exact_mlp()
        first = self.subject()
        with self.blaming("implementation"):
            first.setup(lambda: workload.build(self.rank), workload.optimizers["sgd"], self.plan(workload))
            models = [first.module()]
        # Only the engine gets the wrapped model; whoever builds another one gets a new one.
        passed_on = replace(workload, build=lambda rank: models.pop() if models else workload.build(rank))
        with self.refusal("R054", "the model is wrapped already", names=_WRAPPED) as outcome:
            run = self.train(passed_on)
            outcome.excused = True
        if outcome.excused:
            self.check_parity(run, workload, requirement="R054")

    @conformance_case(
        "R055",
        chapter="F",
        world_size=2,
        kills=(
            "accepts-containers",
            "warns-of-something-else",
            "gives-no-reasons",
            "reference-breaks-down-at-every-error",
        ),
        processes="Python catches warnings for all threads of a process at once",
    )
    def test_container(self) -> None:
        """A ModuleList, which has no forward to hook into, is rejected as a unit or causes a warning that names it."""
        workload = probes.exact_nested()
        names = ("ModuleList", "stages")
        with (
            self.catching_warnings() as warned,
            self.refusal("R055", "a ModuleList has no forward", names=names) as outcome,
        ):
            try:
                self.train(workload, self.plan(workload, units=("stages",)), Regime(steps=1))
            finally:
                # After the warning, the engine may fail in any way.
                outcome.excused = any(name in text for text in warned() for name in names)

    @conformance_case(
        "R056",
        "R002",
        chapter="F",
        axes={"kind": ("scalar", "noncontiguous"), "world_size": (2,)},
        needs=lambda values: [f"{values['kind']}_params"],
        kills=(
            "sum-instead-of-mean",
            "odd-parameters-not-reduced",
        ),
    )
    def test_unusual_parameters(self, kind: str, world_size: int) -> None:
        """Scalar and non-contiguous parameters train at parity or are rejected when wrapping."""
        workload = _unusual(kind)
        run = self.train(workload)
        self.check_parity(run, workload, requirements={"gradient": "R056", "parameter": "R056"})

    @conformance_case(
        "R056",
        "R002",
        chapter="F",
        axes={"kind": ("scalar", "noncontiguous"), "world_size": (2,)},
        needs=lambda values: [f"{values['kind']}_params", "no_shard"],
        kills=lambda values: (
            "odd-parameters-not-reduced",
            *(["odd-parameters-permuted"] if values["kind"] == "noncontiguous" else []),
        ),
    )
    def test_unusual_parameters_unsharded(self, kind: str, world_size: int) -> None:
        """The same where nothing is sharded."""
        workload = _unusual(kind)
        run = self.train(workload, self.plan(workload, sharding=Sharding.NONE))
        self.check_parity(run, workload, requirements={"gradient": "R056", "parameter": "R056"})

    @conformance_case(
        "R057",
        chapter="F",
        axes={"mistake": ("replicas", "reshard-group", "device"), "world_size": (4,)},
        kills=(
            "accepts-anything",
            "ignores-what-it-does-not-offer",
            "breaks-down",
            "gives-no-reasons",
            "reference-breaks-down-at-every-error",
        ),
    )
    def test_invalid_configuration(self, mistake: str, world_size: int) -> None:
        """
        A group size that does not divide the world size, or a device that does not exist, is rejected at construction.

        An engine that does not offer the option must reject these, too.
        """
        workload = probes.exact_mlp()
        changes, names = _MISTAKES[mistake]
        adapter = self.subject()
        with self.refusal("R057", f"{mistake}: {changes}", names=names), self.blaming("implementation"):
            adapter.setup(lambda: workload.build(self.rank), workload.optimizers["sgd"], self.plan(workload, **changes))


class WrappedModule(ConformanceTestCase):
    """Uses of a wrapped module that must still work."""

    @conformance_case(
        "R060",
        chapter="F",
        world_size=2,
        kills=(
            "loses-attributes",
            "loses-attribute-writes",
            "shows-an-empty-module",
            "reference-shows-an-empty-module",
        ),
    )
    def test_behaves_like_the_original(self) -> None:
        """
        Attributes, indexing, the training flag and the user's own names survive wrapping and reach the original module.
        """
        workload = replace(probes.exact_mlp(), build=_with_user_attributes)
        adapter = self.subject()
        self.train(workload, regime=Regime(steps=1), adapter=adapter)
        with self.blaming("implementation"):
            module = adapter.module()
            got = self.observe("attributes", lambda: [getattr(module, name, None) for name in _ATTRIBUTES])
            self.observe("attributes are set", lambda: _write_attributes(module))
            self._run_eval(adapter, workload)
            written = self.observe("written attributes", lambda: [getattr(module, name, None) for name in _WRITTEN])
            flags, trains, has_first, inner, is_original = self.observe("uses of the module", lambda: _used(module))
        for (name, value), seen in zip(_ATTRIBUTES.items(), got, strict=True):
            self.expect_equal("R060", f"module.{name}", seen, value)
        for (name, value), seen in zip(_WRITTEN.items(), written, strict=True):
            self.expect_equal("R060", f"module.{name} after it was set", seen, value)
        self.expect_equal("R060", "modules in training mode after train(False)", flags, [])
        self.expect_equal("R060", "training after train(True)", trains, True)
        self.expect(has_first, "R060", "module[0] does not work, although the original is a Sequential")
        self.expect(is_original, "R060", f"none of the modules has the original class: {inner}")

    @conformance_case(
        "R060",
        chapter="F",
        world_size=2,
        kills=(
            "shows-a-copy",
            "shows-an-empty-module",
            "reference-shows-an-empty-module",
        ),
    )
    def test_written_attribute_is_used(self) -> None:
        """What user code sets on a submodule takes effect in the next forward."""
        workload = probes.exact_mlp()
        adapter = self.subject()
        run = self.train(workload, regime=Regime(steps=1), adapter=adapter)
        with self.blaming("implementation"):
            before = self._run_eval(adapter, workload)
            self.observe("limits are set", lambda: _narrow(adapter.module()))
            after = self._run_eval(adapter, workload)
        plain = workload.build(self.rank)
        plain.load_state_dict(run.steps[-1].params)
        batch = workload.batch(self._eval_key())
        with torch.no_grad():
            self.check_equal("R060", before, plain(*batch.args), check="output before the limits are set")
            _narrow(plain)
            expected = plain(*batch.args)
        if self.judges and torch.equal(before.cpu(), expected):
            raise SuiteError(f"the limits must change the output [{self.case.id}, rank {self.rank}]")
        self.check_equal("R060", after, expected, check="output after the limits were set on a submodule")

    def _eval_key(self) -> BatchKey:
        return BatchKey(step=1, rank=self.rank, world_size=self.world_size)

    def _run_eval(self, adapter: Adapter, workload: Workload) -> Tensor:
        """The output of a forward under no_grad. Collective."""
        batch = self.placed(workload.batch(self._eval_key()))
        with torch.no_grad():
            output: Tensor = adapter.forward(*batch.args, **batch.kwargs)
        return output.detach().clone()

    @conformance_case(
        "R061",
        chapter="F",
        world_size=2,
        needs=("copyable",),
        kills=(
            "copies-share-storage",
            "reference-damages-gathered-parameters",
            "reference-gathers-noise",
        ),
    )
    def test_deepcopy(self) -> None:
        """A deep copy has its own parameters of equal value and gives the same output, or deepcopy raises."""
        workload = models.wide_mlp()
        adapter = self.subject()
        self.train(workload, regime=Regime(steps=1), adapter=adapter)
        batch = self.placed(workload.batch(BatchKey(step=1, rank=self.rank, world_size=self.world_size)))

        def look() -> list[tuple[Tensor, list[int]]]:
            twins = adapter.module(), copy.deepcopy(adapter.module())
            with torch.no_grad():
                return [(each(*batch.args), [p.data_ptr() for p in each.parameters() if p.numel()]) for each in twins]

        with self.refusal("R061", "deepcopy of a wrapped module", names=("copy", "copied", "copies")) as outcome:
            (original, held), (copied, held_by_copy) = self.observe("the original and its copy", look)
            outcome.excused = True
        if outcome.excused:
            self.check_equal("R061", copied, original, check="output of the copy")
            shared = {*held} & {*held_by_copy}
            self.expect_equal("R061", "parameters that share storage with the original", len(shared), 0)


#: What is wrong with a plan, and the words of which a refusal must contain one.
_MISTAKES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "replicas": ({"sharding": Sharding.HYBRID, "replicas": 3}, ("replica", "mesh", "divi")),
    "reshard-group": ({"reshard_after_forward": 3}, ("reshard", "factor", "divi")),
    # Torch 2.6, built for CUDA, says that there is no driver.
    "device": ({"device_id": "cuda:99"}, ("device", "cuda", "driver")),
}
#: Words of which the refusal of a second wrap must contain one.
_WRAPPED = ("already", "once", "again", "twice", "wrapped", "DTensor")


class _UserSequential(nn.Sequential):
    """A user-defined class."""


#: Attributes that engines have been seen to overwrite.
_ATTRIBUTES: dict[str, Any] = {"id": "mine", "scale": 3.0}


#: What user code sets later: one of them again, and one that is new.
_WRITTEN: dict[str, Any] = {"scale": 4.0, "note": "added later"}


def _write_attributes(module: nn.Module) -> None:
    for name, value in _WRITTEN.items():
        setattr(module, name, value)


def _used(module: nn.Module) -> tuple[list[str], bool, bool, list[str], bool]:
    """
    Modules in training mode after `train(False)`, the flag after `train(True)`, True if it has a first element, and
    the classes of its modules, with True if the original one is there.
    """
    module.train(False)
    flags = sorted(name for name, child in module.named_modules() if child.training)
    module.train(True)
    has_first = hasattr(module, "__getitem__") and operator.getitem(cast(Any, module), 0) is not None
    children = [module, *module.modules()]
    is_original = any(isinstance(child, _UserSequential) for child in children)
    return flags, module.training, has_first, [type(child).__name__ for child in children[1:]], is_original


def _narrow(model: nn.Module) -> None:
    """Set the limits of every hardtanh to an eighth."""
    for module in model.modules():
        if isinstance(module, nn.Hardtanh):
            module.min_val, module.max_val = -0.125, 0.125


def _with_user_attributes(rank: int) -> nn.Module:
    """The probe's model as a user-defined class with attributes."""
    model = _UserSequential(*probes.exact_mlp().build(rank).children())
    vars(model).update(_ATTRIBUTES)
    return model


class _Branches(nn.Module):
    """Two branches of equal shape whose sum does not depend on the order in which they run."""

    def __init__(self, reverse: bool) -> None:
        super().__init__()
        self.reverse = reverse
        self.left = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if self.reverse:
            right = self.right(x)
            return torch.tanh(self.left(x)) + torch.sigmoid(right)
        left = self.left(x)
        return torch.tanh(left) + torch.sigmoid(self.right(x))


def _branch_batch(key: BatchKey) -> Batch:
    return Batch(args=(normal((4, 6), "branches", place(key)),), target=normal((4, 6), "branch targets", place(key)))


def _build_branches(rank: int) -> nn.Module:
    with seeded_init("branches"):
        return _Branches(reverse=rank % 2 == 1)


def _two_branches() -> Workload:
    return Workload(
        name="rank-ordered-branches",
        build=_build_branches,
        batch=_branch_batch,
        loss=mean_squared_error,
        optimizers=field_optimizers(),
        units=("left", "right"),
        micro_batch_size=4,
        capabilities=frozenset({"exec_order_divergent"}),
    )


class Bystanders(ConformanceTestCase):
    """Training leaves alone what is not the engine's."""

    @conformance_case(
        "R189",
        chapter="F",
        axes={"optimizer": ("sgd", "adam"), "world_size": (2,)},
        kills=("draws-random-numbers", "leaves-the-default-dtype", "exchanges-parameters"),
    )
    def test_left_alone(self, optimizer: str, world_size: int) -> None:
        """Random numbers, global settings and what users attach to parameters are after each step what they were."""
        watch = BystanderWatch(self)
        regime = Regime(optimizer=optimizer)
        self.train(probes.exact_nested(), regime=regime, on_setup=watch.begin, after_step=watch.look)
        watch.note_replaced()


class _Unusual(nn.Module):
    """A linear layer whose weight is transposed in memory, or with a scalar factor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(6, 5)
        if kind == "scalar":
            self.factor = nn.Parameter(torch.tensor(0.75))
        else:
            self.linear.weight = nn.Parameter(self.linear.weight.detach().t().contiguous().t())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * self.factor if self.kind == "scalar" else y


def _build_unusual(rank: int, *, kind: str) -> nn.Module:
    with seeded_init("unusual", kind):
        return _Unusual(kind)


def _unusual_batch(key: BatchKey) -> Batch:
    return Batch(args=(normal((4, 6), "unusual", place(key)),), target=normal((4, 5), "unusual targets", place(key)))


def _unusual(kind: str) -> Workload:
    return Workload(
        name=f"unusual-{kind}",
        build=partial(_build_unusual, kind=kind),
        batch=_unusual_batch,
        loss=mean_squared_error,
        optimizers=field_optimizers(),
        micro_batch_size=4,
        capabilities=frozenset({f"{kind}_params"}),
    )
