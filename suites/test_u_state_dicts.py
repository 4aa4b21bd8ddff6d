"""U. State dicts in full: names, values, loads, and what reading leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks.checkpoint import Footprint, footprint, same_parameters, same_state_dict, unchanged
from fsdp_conformance.checks.result import comparison
from fsdp_conformance.diagnosis.optimizer_steps import Moment, built_state
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.fixtures import buffers, checkpointing, precision, probes, workload_by_name
from fsdp_conformance.fixtures.recipes import with_values
from fsdp_conformance.references.plain_training import PlainState, plain_training
from fsdp_conformance.references.rounding import rounding_reference
from fsdp_conformance.workload.definition import BatchKey, Regime, Workload

STEPS = 3


class FullStateDicts(ConformanceTestCase):
    """Whole values under the names of the unwrapped model."""

    @conformance_case(
        "R146",
        chapter="U",
        axes={"workload": ("rank-coded", "exact-tiny"), "world_size": (2, 3)},
        needs=("full_state_dict",),
        kills=("state-dict-once", "state-dict-pads", "state-dict-swaps-shards", "state-dict-keeps-last-row"),
    )
    def test_as_the_local_model(self, workload: str, world_size: int) -> None:
        """
        Before any forward, after each step, twice in a row and after a forward, it is the unwrapped model's, bit for
        bit.
        """
        problem = workload_by_name(workload)
        expected = self.plain(problem)
        adapter = self.subject()

        def judge(subject: Adapter, step: int) -> None:
            for moment in (f"after step {step}", f"after step {step}, again"):
                self._judge(subject, expected[step + 1], moment, step, known=self._known(problem, expected, step + 1))

        self.train(
            problem,
            adapter=adapter,
            on_setup=lambda subject: self._judge(subject, expected[0], "before any forward"),
            after_step=judge,
        )
        batch = self.placed(problem.batch(BatchKey(step=STEPS, rank=self.rank, world_size=world_size)))
        with self.blaming("implementation"), torch.no_grad():
            adapter.train(False)
            adapter.forward(*batch.args, **batch.kwargs)
        self._judge(adapter, expected[STEPS], "after a forward")

    @conformance_case(
        "R146",
        chapter="U",
        world_size=3,
        needs=("full_state_dict",),
        kills=("state-dict-pads", "state-dict-swaps-shards"),
    )
    def test_loads_into_the_local_model(self) -> None:
        """The unwrapped model loads it strictly, and then computes what the engine computes."""
        workload = probes.exact_nested()
        adapter = self.subject()
        self.train(workload, adapter=adapter)
        with self.blaming("implementation"):
            state = adapter.full_state_dict()
        local = workload.build(self.rank)
        problem = "nothing"
        try:
            local.load_state_dict({name: _on_cpu(value) for name, value in state.items()}, strict=True)
        except RuntimeError as error:
            problem = str(error).splitlines()[-1].strip()
        message = comparison("strict load into the unwrapped model", expected="no complaint", got=problem)
        self.expect(problem == "nothing", "R146", message, phase="checkpoint")
        if problem == "nothing":
            batch = workload.batch(BatchKey(step=STEPS, rank=self.rank, world_size=self.world_size))
            placed = self.placed(batch)
            with self.blaming("implementation"), torch.no_grad():
                got = adapter.forward(*placed.args, **placed.kwargs)
            with torch.no_grad():
                output = local(*batch.args, **batch.kwargs)
            self.check_equal("R146", got, output, check="output after the load")

    @conformance_case(
        "R146",
        "R002",
        chapter="U",
        axes={"world_size": (2, 3)},
        needs=("full_state_dict",),
        kills=("load-by-position", "load-skips-last-row", "load-into-a-copy"),
    )
    def test_loads_the_local_model(self, world_size: int) -> None:
        """
        A model that was built with other values loads the unwrapped model's state dict, in another order of names, and
        trains like that model.
        """
        workload = probes.exact_reordered()
        state = dict(reversed(list(workload.build(self.rank).state_dict().items())))
        others = with_values(workload, lambda value: value + 1)

        def load(subject: Adapter) -> None:
            subject.load_full_state_dict({name: value.to(self.device) for name, value in state.items()})

        run = self.train(others, self.plan(workload), on_setup=load)
        known = replace(self._known(workload, [built_state(workload, "sgd")], 0), built=built_state(others, "sgd"))
        self.check(
            same_parameters(
                run.initial_params, state, requirement="R146", rank=self.rank, phase="checkpoint", known=known
            )
        )
        self.check_parity(run, workload, requirement="R146")

    @conformance_case(
        "R146",
        chapter="U",
        world_size=2,
        needs=("full_state_dict",),
        kills=("state-dict-last-buffer", "state-dict-rounds-to-bfloat16"),
    )
    def test_buffers(self) -> None:
        """It has every persistent buffer with its own dtype and live value, and none that is not persistent."""
        workload = buffers.batch_norm()
        adapter = self.subject()
        run = self.train(workload, adapter=adapter)
        live = {**run.steps[-1].params, **run.steps[-1].buffers}
        expected = workload.build(self.rank).state_dict()
        if not run.shows_buffers:
            self.leave_unobserved("full_buffers")
            return
        with self.blaming("implementation"):
            state = adapter.full_state_dict()
        # Parity judges the live values (R130, R133); here only whether the state dict has them.
        expected_buffers = {name: live[name].to(value.dtype) for name, value in expected.items()}
        known = self._known(workload, [PlainState(expected_buffers, {})], 0)
        where: dict[str, Any] = {"requirement": "R146", "rank": self.rank, "moment": "after training"}
        self.check(same_state_dict(state, expected_buffers, known=known, **where))

    @conformance_case(
        "R146",
        chapter="U",
        world_size=2,
        needs=("full_state_dict", "mixed_precision"),
        kills=("state-dict-rounds-to-bfloat16", "state-dict-once"),
    )
    def test_in_full_precision(self) -> None:
        """With units that compute in bfloat16, it has the float32 parameters, also after a forward in eval mode."""
        workload = precision.scaled()
        plan = self.plan(workload, param_dtype="bfloat16")
        regime = Regime(eval_before=(1, 2))
        with self.blaming("suite"):
            expected = rounding_reference(
                workload, regime, plan, rank=self.rank, world_size=self.world_size, device=self.reference_device
            )
            params = expected.steps[-1].params
            if all(torch.equal(value, value.bfloat16().to(value.dtype)) for value in params.values()):
                raise SuiteError("every parameter is a bfloat16 number, so rounding would not show [precision.scaled]")

        def judge(subject: Adapter, step: int) -> None:
            state = {name: value for name, value in subject.full_state_dict().items() if name in params}
            after_step = expected.steps[step].params
            self.check(
                same_state_dict(state, after_step, requirement="R146", rank=self.rank, moment="of the step", step=step)
            )

        self.train(workload, plan, regime, after_step=judge)

    @conformance_case(
        "R147",
        chapter="U",
        world_size=2,
        needs=("full_state_dict",),
        kills=("state-dict-keeps-wrapper-names", "load-ignores-wrapped-names"),
    )
    def test_activation_checkpointing(self) -> None:
        """Wrappers for activation checkpointing appear in no name, and the plain model's state dict loads."""
        workload = probes.exact_long()
        wrapped = replace(workload, build=partial(checkpointing.wrapped_stages, workload.build))
        expected = self.plain(workload)
        adapter = self.subject()
        self.train(
            wrapped,
            adapter=adapter,
            on_setup=lambda subject: self._judge(subject, expected[0], "before any forward", requirement="R147"),
            after_step=lambda subject, step: self._judge(
                subject, expected[step + 1], f"after step {step}", step, requirement="R147"
            ),
        )
        with self.blaming("implementation"):
            adapter.load_full_state_dict(_placed(expected[1].model, self.device))
            params = adapter.full_params()
        self.check(same_parameters(params, expected[1].model, requirement="R147", rank=self.rank, phase="checkpoint"))

    @conformance_case(
        "R147",
        chapter="U",
        world_size=3,
        needs=("full_state_dict",),
        kills=("state-dict-on-every-rank", "state-dict-swaps-shards"),
    )
    def test_on_rank_0_only(self) -> None:
        """On request rank 0 has it on the CPU, and the other ranks have nothing."""
        workload = probes.rank_coded()
        expected = self.plain(workload)
        adapter = self.subject()
        self.train(workload, adapter=adapter)
        with self.blaming("implementation"):
            state = adapter.full_state_dict(rank0_only=True)
        model: Mapping[str, Any] = expected[STEPS].model if self.rank == 0 else {}
        self.check(same_state_dict(state, model, requirement="R147", rank=self.rank, moment="of rank 0 only"))
        for name, value in state.items():
            if isinstance(value, Tensor):
                self.expect_equal("R147", "device", value.device.type, "cpu", fqn=name, check="state dict's device")

    @conformance_case(
        "R147",
        chapter="U",
        world_size=2,
        needs=("full_state_dict", "ignored_modules"),
        kills=("state-dict-omits-ignored", "state-dict-swaps-shards"),
    )
    def test_ignored_modules(self) -> None:
        """Parameters of ignored modules are in it with the others, and are loaded with them."""
        workload = replace(probes.exact_long(), ignored=("stages.1",), units=("stages.0", "stages.2"))
        expected = workload.build(self.rank).state_dict()
        others = {name: value + 1 for name, value in expected.items()}
        adapter = self.subject()
        self.train(
            workload,
            adapter=adapter,
            on_setup=lambda subject: self._judge(
                subject, PlainState(expected, {}), "before any forward", requirement="R147"
            ),
        )
        with self.blaming("implementation"):
            adapter.load_full_state_dict(_placed(others, self.device))
        self._judge(adapter, PlainState(others, {}), "after a load", requirement="R147")

    @conformance_case(
        "R147",
        chapter="U",
        axes={"wrong": ("missing", "unexpected")},
        world_size=2,
        needs=("full_state_dict",),
        kills=lambda values: (
            ["load-never-strict", "load-names-nothing"]
            if values["wrong"] == "missing"
            else ["load-never-strict", "load-names-nothing", "load-always-strict"]
        ),
    )
    def test_names_that_do_not_fit(self, wrong: str) -> None:
        """Strict, the load names them as the user knows them; otherwise it returns them and loads the rest."""
        workload = probes.exact_long()
        before, name = workload.build(self.rank).state_dict(), "stages.1.linear.weight"
        state = {key: value + 1 for key, value in before.items()}
        if wrong == "missing":
            del state[name]
        else:
            name = "stages.7.linear.weight"
            state[name] = torch.ones(2)
        for strict in (True, False):
            adapter = self.subject()
            self.train(workload, regime=Regime(steps=1), adapter=adapter)
            with self.blaming("implementation"):
                adapter.load_full_state_dict(_placed(before, self.device))
            if strict:
                with (
                    self.refusal("R147", f"a state dict with a name that is {wrong}", names=(name,)),
                    self.blaming("implementation"),
                ):
                    adapter.load_full_state_dict(_placed(state, self.device), strict=True)
                continue
            with self.blaming("implementation"):
                mismatch = adapter.load_full_state_dict(_placed(state, self.device), strict=False)
                params = adapter.full_params()
            reported = {"missing": list(mismatch[0]), "unexpected": list(mismatch[1])}
            for kind, names in reported.items():
                expected_names = [name] if kind == wrong else []
                self.expect_equal(
                    "R147", f"{kind} names", names, expected_names, check="reported names", phase="checkpoint"
                )
            loaded = {key: state.get(key, value) for key, value in before.items()}
            self.check(same_parameters(params, loaded, requirement="R147", rank=self.rank, phase="checkpoint"))

    def _judge(
        self,
        adapter: Adapter,
        expected: PlainState,
        moment: str,
        step: int | None = None,
        requirement: str = "R146",
        known: Moment | None = None,
    ) -> None:
        with self.blaming("implementation"):
            state = adapter.full_state_dict()
        where: dict[str, Any] = {"requirement": requirement, "rank": self.rank, "moment": moment, "step": step}
        self.check(same_state_dict(state, expected.model, known=known, **where))

    def _known(self, workload: Workload, states: list[PlainState], index: int) -> Moment:
        return Moment(workload=workload, optimizer="sgd", states=states, index=index, world_size=self.world_size)

    def plain(self, workload: Workload, optimizer: str = "sgd") -> list[PlainState]:
        """The unwrapped model before the first of three steps and after each one."""
        with self.blaming("suite"):
            return plain_training(workload, (self.world_size,) * STEPS, optimizer=optimizer)


#: What is read in a case of R150, the capability for it, and how.
_READ: dict[str, tuple[str, Callable[[Adapter], object]]] = {
    "state-dict": ("full_state_dict", lambda adapter: adapter.full_state_dict()),
    "sharded": ("sharded_state_dict", lambda adapter: adapter.sharded_state_dict()),
    "optimizer": ("optim_state_dict", lambda adapter: adapter.optim_state_dict()),
}


class ReadingChangesNothing(ConformanceTestCase):
    """Training goes on as if nobody had looked."""

    @conformance_case(
        "R150",
        "R002",
        "R003",
        chapter="U",
        axes={"world_size": (2, 3)},
        kills=("reading-leaves-a-hook", "reading-drops-gradients", "reading-keeps-parameters-gathered"),
    )
    def test_parameters_and_module(self, world_size: int) -> None:
        """
        Full parameters and the module's own state dict, read at every legal moment of every step, leave hooks, bytes
        and training as they are.
        """
        workload = probes.exact_nested()

        def read(adapter: Adapter) -> None:
            adapter.full_params()
            module = _module_of(adapter)
            if module is not None:
                module.state_dict()

        run = self._train_and_read(workload, Regime(eval_before=(1,)), read, "full parameters")
        self.check_parity(run, workload, Regime(eval_before=(1,)), requirement="R150")

    @conformance_case(
        "R150",
        "R002",
        "R003",
        chapter="U",
        axes={"kind": ("state-dict", "sharded", "optimizer")},
        world_size=2,
        needs=lambda values: (_READ[values["kind"]][0],),
        kills=lambda values: [
            {
                "state-dict": "reading-leaves-a-hook",
                "sharded": "reading-keeps-parameters-gathered",
                "optimizer": "optimizer-state-steps",
            }[values["kind"]]
        ],
    )
    def test_state_dicts(self, kind: str) -> None:
        """A state dict of this kind, taken after setup, between backward and step, and after each step, likewise."""
        workload = probes.exact_nested()
        run = self._train_and_read(workload, Regime(), _READ[kind][1], f"a {kind} state dict")
        self.check_parity(run, workload, requirement="R150")

    @conformance_case(
        "R150",
        "R004",
        chapter="U",
        world_size=2,
        needs=("optim_state_dict",),
        kills=("optimizer-state-initialises",),
    )
    def test_optimizer_state_before_the_first_step(self) -> None:
        """An optimizer state dict that is taken before the first step does not count as a step of Adam."""
        workload = workload_by_name("norm-mlp")
        regime = Regime(optimizer="adam")
        run = self.train(workload, regime=regime, on_setup=lambda subject: subject.optim_state_dict())
        self.check_parity(run, workload, regime, requirement="R150")

    def _train_and_read(self, workload: Workload, regime: Regime, read: Callable[[Adapter], object], what: str) -> Any:
        """A training in which `read` is called after setup, between backward and step, and after each step."""
        adapter = self.subject()

        def look(subject: Adapter, *moment: int) -> None:
            before, after = self.observe(f"before and after {what}", lambda: _read_twice(subject, read))
            self.check(unchanged(before, after, requirement="R150", rank=self.rank, reading=what))

        run = self.train(
            workload, self.plan(workload), regime, adapter=adapter, on_setup=look, on_gradients=look, after_step=look
        )
        self.check_resharded(adapter, workload, "R150", run)
        return run


def _read_twice(adapter: Adapter, read: Callable[[Adapter], object]) -> tuple[Footprint, Footprint]:
    """The footprints before and after reading."""
    module = _module_of(adapter)
    before = footprint(module, adapter.local_tensors())
    for _ in range(2):
        read(adapter)
    return before, footprint(module, adapter.local_tensors())


def _module_of(adapter: Adapter) -> nn.Module | None:
    """The module that user code holds, where the implementation shows one."""
    try:
        return adapter.module()
    except NotImplementedError:
        return None


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _placed(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A copy of a state dict on a device: an engine may keep what it loads."""
    return {
        name: value.detach().to(device, copy=True) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }
