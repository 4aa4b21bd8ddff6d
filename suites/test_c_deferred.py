"""C. Deferred initialisation: a model that is built on the meta device gets memory and values once it is wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.errors import AdapterError, EnvironmentUnavailable, SuiteError, Unsupported
from fsdp_conformance.fixtures import deferred
from fsdp_conformance.fixtures.deferred import Deferred
from fsdp_conformance.plan import Sharding
from fsdp_conformance.workload.definition import Batch, BatchKey, Regime, Workload
from fsdp_conformance.workload.units import owner

T = TypeVar("T")

_ALL = ("initial", "loss", "gradient", "parameter", "buffer")


class DeferredInit(ConformanceTestCase):
    """Initialisation by the modules' own `reset_parameters`."""

    @conformance_case(
        "R025",
        "R002",
        "R003",
        chapter="C",
        axes={"world_size": (2,)},
        needs=("meta_init",),
        kills=(
            "initialised-twice",
            "initialised-with-the-shard",
            "buffers-without-values",
            "inner-units-without-values",
        ),
    )
    def test_values_of_a_real_model(self, world_size: int) -> None:
        """
        Nested units that are built on meta start with the values of a model built for real, each set once, and train
        like it.
        """
        workload = deferred.deferred_nested()
        with self.built_on_meta(workload) as (watched, built):
            run = self.train(watched, self.plan(workload, meta_init=True))
        self.check_parity(run, workload, requirements=dict.fromkeys(_ALL, "R025"))
        for name, times in self._of_each_module(built, lambda module: module.num_initialised):
            self.expect_equal("R025", f"calls of reset_parameters of {name}", times, 1, check="initialised once")

    @conformance_case(
        "R025",
        chapter="C",
        axes={"world_size": (2,)},
        needs=("meta_init",),
        kills=("draws-of-another-rank", "reference-draws-shards"),
    )
    def test_random_values(self, world_size: int) -> None:
        """Values that `reset_parameters` draws from a seed are those that it draws in a model built for real."""
        workload = deferred.deferred_drawn(str(self.device))
        run = self.train(workload, self.plan(workload, meta_init=True))
        self.check_parity(run, workload, requirements=dict.fromkeys(_ALL, "R025"))

    @conformance_case(
        "R026",
        chapter="C",
        axes={"kind": ("even", "uneven", "hybrid"), "world_size": (3, 4)},
        only=lambda values: (values["kind"] == "hybrid") == (values["world_size"] == 4),
        needs=lambda values: ["meta_init", *(["hsdp"] if values["kind"] == "hybrid" else [])],
        kills=lambda values: [
            "buffers-without-values",
            *([] if values["kind"] == "even" else ["initialised-with-the-shard"]),
            *(["replicas-initialised-apart"] if values["kind"] == "hybrid" else []),
        ],
    )
    def test_sharded_over_a_mesh(self, kind: str, world_size: int) -> None:
        """Shards that are even, uneven or part of a 2-D mesh start with the values of a model built for real."""
        workload = deferred.deferred_even() if kind == "even" else deferred.deferred_nested()
        changes: dict[str, Any] = {"sharding": Sharding.HYBRID, "replicas": 2} if kind == "hybrid" else {}
        run = self.train(workload, self.plan(workload, meta_init=True, **changes))
        self.check_parity(run, workload, requirements=dict.fromkeys(_ALL, "R026"))
        self.check_same_on_every_rank(run, "R026")

    @conformance_case(
        "R027",
        chapter="C",
        world_size=2,
        needs=("meta_init",),
        kills=("meta-error-without-the-name", "leaves-garbage", "gives-no-reasons", "reference-gives-no-reasons"),
    )
    def test_left_on_meta(self) -> None:
        """A forward with a parameter that nothing initialises raises and names it, if the wrap has not raised."""
        workload = deferred.deferred_unready()
        batch = self.placed(workload.batch(BatchKey(step=0, rank=self.rank, world_size=self.world_size)))
        adapter = self.subject()
        build: Any = workload.build_on_meta
        wrapped = False
        error: Exception | None = None
        try:
            with self.blaming("implementation"):
                adapter.setup(lambda: build(self.rank), workload.optimizers["sgd"], self.plan(workload, meta_init=True))
                wrapped = True
                adapter.forward(*batch.args, **batch.kwargs)
        except (Unsupported, AdapterError, SuiteError, EnvironmentUnavailable):
            raise
        except Exception as caught:  # noqa: BLE001 - any error will do, if it says which parameter
            self.note_refusal()
            error = caught
        # At the wrap it may also name the module that cannot be initialised.
        names = ("head.0.scale",) if wrapped else ("scale", deferred.Unready.__name__)
        outcome = "no error" if error is None else f"{type(error).__name__}: {error}"
        self.expect(
            error is not None and any(name in str(error) for name in names),
            "R027",
            f"a parameter on meta: expected an error that names {' or '.join(names)}, got {outcome}",
            fqn="head.0.scale",
            phase="forward" if wrapped else "init",
            check="the parameter is named",
        )

    @conformance_case(
        "R029",
        chapter="C",
        world_size=2,
        needs=("meta_init", "mixed_precision"),
        kills=("initialised-in-bf16", "fsdp1-initialises-in-bf16"),
    )
    def test_in_full_precision(self) -> None:
        """A unit that computes in bfloat16 is initialised in float32, and trains like one that was built for real."""
        workload = deferred.deferred_fine()
        plan = self.plan(workload, param_dtype="bfloat16")
        with self.built_on_meta(workload) as (watched, built):
            run = self.train(watched, replace(plan, meta_init=True))
        for name, value in workload.build(self.rank).named_parameters():
            self.check_equal("R029", run.initial_params.get(name), value.detach(), check="initial value", fqn=name)
        for name, dtypes in self._of_each_module(built, lambda module: sorted(map(str, module.dtypes_seen))):
            self.expect_equal("R029", f"dtypes that {name} was initialised in", dtypes, ["torch.float32"])
        self.check_bitwise(run, self.train(workload, plan), "R029")

    @conformance_case(
        "R030",
        "R002",
        "R003",
        chapter="C",
        axes={"world_size": (2,)},
        needs=("meta_init", "full_state_dict"),
        kills=(
            "load-zeroes-other-buffers",
            "initialised-after-the-load",
            "buffers-without-values",
            "load-skips-last-row",
        ),
    )
    def test_filled_by_rank_0(self, world_size: int) -> None:
        """
        Rank 0's state dict, broadcast and loaded into a model that was built on meta, gives rank 0's values, and the
        buffers that no state dict has are those of rank 0 as well.
        """
        workload = deferred.deferred_loaded()
        # Only rank 0 has the values that count.
        built = workload if self.rank == 0 else deferred.deferred_nested()
        with self.blaming("suite"):
            broadcast = [built.build(self.rank).state_dict()]
            torch.distributed.broadcast_object_list(broadcast)
        state = {name: value.to(self.device) for name, value in broadcast[0].items()}
        run = self.train(
            workload,
            self.plan(workload, meta_init=True),
            on_setup=lambda adapter: adapter.load_full_state_dict(state),
        )
        self.check_parity(run, workload, requirements=dict.fromkeys(_ALL, "R030"))
        self.check_same_on_every_rank(run, "R030")

    @conformance_case(
        "R031",
        "R002",
        "R003",
        chapter="C",
        axes={"world_size": (2,)},
        needs=("meta_init", "shared_params"),
        kills=("materialisation-breaks-ties", "reference-breaks-ties"),
    )
    def test_ties(self, world_size: int) -> None:
        """A weight that two modules share is one parameter after materialisation, and trains like one."""
        workload = deferred.deferred_tied()
        with self.built_on_meta(workload) as (watched, built):
            run = self.train(
                watched,
                self.plan(workload, meta_init=True),
                on_setup=lambda adapter: self._expect_tied(built),
            )
        self.check_parity(run, workload, requirements=dict.fromkeys(_ALL, "R031"))

    def _expect_tied(self, built: list[_Built]) -> None:
        """Both modules have the same parameter."""
        self.expect(
            self.observe("the tie", lambda: built[-1].module("embedding").weight is built[-1].module("head").weight),
            "R031",
            "the weight of embedding and head: expected one parameter, got two",
            fqn="embedding.weight",
            phase="init",
            check="ties",
        )

    @conformance_case(
        "R032",
        chapter="C",
        axes={"rest": ("real", "meta"), "world_size": (2,)},
        needs=lambda values: ["ignored_modules", *(["meta_init"] if values["rest"] == "meta" else [])],
        kills=("ignored-modules-materialised", "fsdp1-materialises-ignored"),
    )
    def test_ignored_modules(self, rest: str, world_size: int) -> None:
        """An ignored module on meta stays there, through three steps of training, and the rest trains at parity."""
        workload = deferred.deferred_aside()
        regime = Regime()
        adapter = self.subject()
        with self.built_on_meta(workload) as (watched, built), self.blaming("implementation"):
            plan = self.plan(workload, meta_init=rest == "meta")
            build: Any = watched.build_on_meta if rest == "meta" else partial(_kept, built, deferred.with_aside_on_meta)
            adapter.setup(lambda: build(self.rank), workload.optimizers[regime.optimizer], plan)
            losses = []
            for step in range(regime.steps):
                self._expect_on_meta(built, step)
                batch = self.placed(workload.batch(BatchKey(step=step, rank=self.rank, world_size=world_size)))
                losses.append(self.observe("loss of a step", partial(_trained, adapter, workload, batch)))
        self._expect_on_meta(built, regime.steps)
        expected = self.references(workload, regime).expected
        for step, loss in enumerate(losses):
            loss_expected = expected.steps[step].losses[0].to(loss.dtype)
            self.check_equal("R032", loss, loss_expected, check="loss beside an ignored module", step=step)

    def _expect_on_meta(self, built: list[_Built], step: int) -> None:
        def devices() -> list[tuple[str, torch.device]]:
            ignored: nn.Module = built[-1].module("aside")
            return [(name, tensor.device) for name, tensor in [*ignored.named_parameters(), *ignored.named_buffers()]]

        for name, device in self.observe("devices of the ignored module", devices):
            message = f"device before step {step}: expected meta, got {device}"
            where: dict[str, Any] = {"fqn": f"aside.{name}", "check": "ignored modules stay on meta"}
            self.expect(device.type == "meta", "R032", message, **where)

    def _of_each_module(self, built: list[_Built], look: Callable[[Deferred], T]) -> list[tuple[str, T]]:
        """The result of `look` for each module that holds tensors, by its name before it was wrapped."""
        return self.observe(
            "modules that hold tensors", lambda: [(name, look(module)) for name, module in built[-1].initialisable()]
        )

    @contextmanager
    def built_on_meta(self, workload: Workload) -> Iterator[tuple[Workload, list[_Built]]]:
        """The workload, and the models that it builds on meta from now on."""
        build = workload.build_on_meta
        if build is None:
            raise SuiteError(f"{workload.name} must have build_on_meta [{self.case.id}]")
        built: list[_Built] = []
        yield replace(workload, build_on_meta=partial(_kept, built, build)), built


class InitFunctions(ConformanceTestCase):
    """Initialisation by a function of the user's."""

    @conformance_case(
        "R028",
        chapter="C",
        world_size=2,
        needs=("meta_init_fn",),
        kills=(
            "accepts-any-init-function",
            "reference-gives-no-reasons",
            "reference-breaks-down-at-every-error",
        ),
    )
    def test_not_callable(self) -> None:
        """An init function that cannot be called is refused when the model is wrapped."""
        workload = deferred.deferred_nested()
        adapter = self.subject()
        build: Any = workload.build_on_meta
        plan = self.plan(workload, meta_init=True, init_fn=3)
        names = ("callable", "init_fn", "function")
        with self.refusal("R028", "the init function is 3", names=names), self.blaming("implementation"):
            adapter.setup(lambda: build(self.rank), workload.optimizers["sgd"], plan)

    @conformance_case(
        "R028",
        "R025",
        chapter="C",
        axes={"world_size": (2,)},
        needs=("meta_init_fn",),
        kills=("calls-the-init-function-twice", "inner-modules-first", "ignores-the-init-function"),
    )
    def test_called_with_each_module(self, world_size: int) -> None:
        """
        The user's function is called once with each module that holds parameters or buffers, in each unit from the top
        down, and what it writes is what trains.
        """
        workload = deferred.deferred_nested()
        called: list[nn.Module] = []
        built: list[_Built] = []
        build: Any = workload.build_on_meta
        plan = self.plan(workload, meta_init=True, init_fn=partial(_initialise, called))
        run = self.train(replace(workload, build_on_meta=partial(_kept, built, build)), plan)
        self.check_parity(run, workload, requirements=dict.fromkeys(_ALL, "R028"))
        calls = self.observe(
            "modules that the function was called with",
            lambda: [(type(module).__name__, built[-1].names.get(module)) for module in called],
        )
        strangers = [kind for kind, name in calls if name is None]
        self.expect_equal("R028", "calls with modules that the model does not have", strangers, [])
        order = [name for _, name in calls if name is not None]
        for name, module in _Built(build(self.rank)).initialisable():
            times = order.count(name)
            self.expect_equal("R028", f"calls with {name}, a {type(module).__name__}", times, 1, check="each module")
        for outer, inner in _pairs(list(dict.fromkeys(order)), workload.units):
            self.expect(
                order.index(outer) < order.index(inner),
                "R028",
                f"order of calls: expected {outer or 'the root'} before {inner}, got {', '.join(order)}",
                check="top-down order",
            )


def _trained(adapter: Adapter, workload: Workload, batch: Batch) -> Tensor:
    """The loss of a step, which is trained."""
    with adapter.microbatch(True):
        loss = workload.loss(adapter.forward(*batch.args, **batch.kwargs), batch)
        adapter.backward(loss)
    adapter.step()
    return loss.detach().cpu()


class _Built:
    """A model that the suite has built, with the names of its modules before they were wrapped."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}

    def initialisable(self) -> list[tuple[str, Deferred]]:
        """The modules that hold tensors, by name."""
        return [(name, module) for module, name in self.names.items() if isinstance(module, Deferred)]

    def module(self, name: str) -> Any:
        """A module by its name before it was wrapped."""
        (match,) = (module for module, fqn in self.names.items() if fqn == name)
        return match


def _kept(built: list[_Built], build: Any, rank: int) -> nn.Module:
    """Build a model, and keep it."""
    built.append(_Built(build(rank)))
    return built[-1].model


def _initialise(called: list[nn.Module], module: nn.Module) -> None:
    """A user's init function, which notes its calls."""
    called.append(module)
    if isinstance(module, Deferred):
        module.reset_parameters()


def _pairs(order: Sequence[str], units: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Modules of one unit of which the first contains the second."""
    for outer in order:
        for inner in order:
            if inner.startswith(f"{outer}.") and owner(inner, units) == owner(outer, units):
                yield outer, inner
