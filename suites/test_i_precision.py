"""I. Mixed precision: where values are rounded, and how long low-precision copies live."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks import memory
from fsdp_conformance.checks.communication import reductions_in
from fsdp_conformance.checks.result import comparison
from fsdp_conformance.fixtures import deep, precision, probes
from fsdp_conformance.references.reference_set import Kind
from fsdp_conformance.workload.definition import BatchKey, Regime


class LowPrecision(ConformanceTestCase):
    """Parameters are kept in float32 and gathered in bfloat16."""

    @conformance_case(
        "R085",
        chapter="I",
        axes={"world_size": (2,)},
        needs=("mixed_precision",),
        environment=("accelerator",),
        kills=(
            "keeps-low-precision-copies",
            "keeps-copies-in-any-precision",
            "hoards-parameters",
            "reference-hoards-parameters",
        ),
    )
    def test_copies_live_while_gathered(self, world_size: int) -> None:
        """Between steps and after each backward, shards are held in their own dtype alone, and no more than without."""
        workload = deep.deep_4()
        plain = self.train(workload, self.plan(workload), observe=False)
        plan = self.plan(workload, param_dtype="bfloat16")
        lower = self.train(workload, plan, observe=False)
        self.check(
            memory.shards_without_copies(
                lower, workload, plan, world_size=world_size, padding=self.padding, requirement="R085"
            )
        )
        self.check(memory.same_bytes(lower, plain, "R085", what="mixed precision"))

    @conformance_case(
        "R081",
        chapter="I",
        world_size=2,
        needs=("mixed_precision",),
        kills=(
            "ignores-param-dtype",
            "rounds-integer-inputs",
            "confuses-half-precisions",
            "reference-confuses-half-precisions",
        ),
    )
    def test_dtypes_in_forward(self) -> None:
        """In forward, parameters are in bfloat16, and integer inputs keep their dtype."""
        workload = precision.scaled()
        seen: dict[str, list[str]] = {}
        run = self.train(
            workload,
            self.plan(workload, param_dtype="bfloat16"),
            on_setup=self.with_module(lambda module: _watch_dtypes(module, seen)),
        )
        seen = self.observe("dtypes in forward", lambda: seen)
        self.expect_equal("R081", "training", len(run.steps), 3)
        dtypes = {"parameters": "bfloat16", "tokens": "int64"}
        for what, dtype in dtypes.items():
            self.expect_equal(
                "R081", f"dtypes of {what}", sorted(set(seen.get(what, []))), [dtype], phase="forward",
                check="dtypes in forward",
            )  # fmt: skip

    @conformance_case(
        "R082",
        chapter="I",
        world_size=2,
        axes={"optimizer": ("sgd", "adam")},
        needs=("mixed_precision",),
        kills=(
            "keeps-gradients-in-low-precision",
            "keeps-state-in-low-precision",
            "has-no-full-precision",
            "reference-has-no-full-precision",
        ),
    )
    def test_dtypes_for_the_optimizer(self, optimizer: str) -> None:
        """After backward, and between steps, parameters, gradients and optimizer state are in float32."""
        workload = precision.scaled()
        plan, adapter = self.plan(workload, param_dtype="bfloat16"), self.subject()
        self.train(workload, plan, Regime(optimizer=optimizer), adapter=adapter, on_gradients=self._expect_float32)
        held = self.observe(
            "dtypes of what is held", lambda: {kind: _dtypes(held) for kind, held in adapter.local_tensors().items()}
        )
        for kind, dtypes in held.items():
            self._expect_only_float32(kind, dtypes, phase="step")

    def _expect_float32(self, adapter: Adapter, step: int) -> None:
        def look() -> tuple[list[str], list[str]]:
            parameters = list(adapter.parameters().values())
            return _dtypes(parameters), _dtypes(each.grad for each in parameters if each.grad is not None)

        parameters, grads = self.observe("dtypes of parameters and gradients", look)
        self.expect(
            bool(grads), "R082", comparison("gradients", expected="some", got="none"), step=step, phase="reduce"
        )
        self._expect_only_float32("parameters", parameters, step=step, phase="reduce")
        self._expect_only_float32("gradients", grads, step=step, phase="reduce")

    def _expect_only_float32(self, what: str, dtypes: Iterable[str], **where: Any) -> None:
        strange = sorted({*dtypes} - {"torch.float32"})
        self.expect_equal("R082", f"other dtypes of {what} than float32", strange, [], check="dtypes", **where)

    @conformance_case(
        "R084",
        chapter="I",
        world_size=2,
        axes={"reduce": ("default", "float32")},
        needs=lambda values: ["mixed_precision", *(["mp_reduce"] if values["reduce"] == "float32" else [])],
        kills=lambda values: ["ignores-param-dtype", *["ignores-reduce-dtype"] * (values["reduce"] == "float32")],
    )
    def test_rounds_as_the_reference(self, reduce: str) -> None:
        """Losses, gradients and parameters equal those of a reference that rounds at the same points, bit for bit."""
        workload = precision.scaled()
        plan = self.plan(workload, param_dtype="bfloat16", reduce_dtype="float32" if reduce == "float32" else None)
        run = self.train(workload, plan)
        self.check_rounding(run, workload, plan, requirement="R084")

    @conformance_case(
        "R083",
        chapter="I",
        axes={"world_size": (2,), "compute": ("own", "bfloat16"), "reduce": ("default", "bfloat16", "float32")},
        only=lambda values: values["compute"] == "bfloat16" or values["reduce"] == "bfloat16",
        needs=lambda values: [
            *["mixed_precision"] * (values["compute"] != "own"), *["mp_reduce"] * (values["reduce"] != "default")
        ],
        kills=lambda values: {
            ("bfloat16", "default"): ["ignores-param-dtype", "always-reduces-in-float32"],
            ("bfloat16", "bfloat16"): ["always-reduces-in-float32"],
            ("own", "bfloat16"): [
                "ignores-reduce-dtype", "confuses-half-precisions", "reference-confuses-half-precisions"
            ],
        }.get((values["compute"], values["reduce"]), ["ignores-reduce-dtype"]),
    )  # fmt: skip
    def test_dtype_on_the_wire(self, world_size: int, compute: str, reduce: str) -> None:
        """Gradients are reduced in the reduce dtype, or in the compute dtype if there is none."""
        workload = precision.scaled()
        dtypes = {
            "param_dtype": None if compute == "own" else compute,
            "reduce_dtype": None if reduce == "default" else reduce,
        }
        run = self.train(workload, self.plan(workload, **dtypes))
        self.check(reductions_in(run, dtypes["reduce_dtype"] or compute, requirement="R083"))

    @conformance_case(
        "R090",
        chapter="I",
        axes={"world_size": (2,)},
        needs=("mixed_precision", "fp16"),
        kills=("sums-float16-first", "divides-float16-by-too-much"),
    )
    def test_averages_in_float16(self, world_size: int) -> None:
        """Gradients near the largest number of float16, and near the smallest, keep their mean."""
        workload = precision.extremes()
        run = self.train(workload, self.plan(workload, param_dtype="float16"))
        self.check_parity(run, workload, requirement="R090")

    @conformance_case(
        "R091",
        chapter="I",
        axes={"world_size": (2,)},
        needs=("fp16",),
        kills=("trains-in-float32-anyway", "averages-float32-alone"),
    )
    def test_whole_model_in_float16(self, world_size: int) -> None:
        """A model in float16 keeps its parameters and gradients in it, and trains like DDP."""
        workload = probes.exact_half()
        run = self.train(workload, self.plan(workload))
        self.check_parity(run, workload, requirement="R091")

    @conformance_case(
        "R086",
        chapter="I",
        world_size=2,
        axes={"micro_batches": (2, 3)},
        needs=("mixed_precision", "mp_reduce", "no_sync"),
        kills=(
            "ignores-reduce-dtype",
            "accumulates-in-compute-dtype",
        ),
    )
    def test_accumulates_in_the_reduce_dtype(self, micro_batches: int) -> None:
        """Gradients of deferred micro-batches, computed in bfloat16, are accumulated in float32."""
        workload = precision.scaled()
        regime = Regime(micro_batches=micro_batches, reduced=(*[False] * (micro_batches - 1), True))
        plan = self.plan(workload, param_dtype="bfloat16", reduce_dtype="float32", defer_reduction=True)
        run = self.train(workload, plan, regime)
        self.check_rounding(run, workload, plan, regime, requirement="R086")

    @conformance_case(
        "R088",
        chapter="I",
        world_size=2,
        needs=("mixed_precision",),
        kills=(
            "rounds-inputs-outside-of-autograd",
            "detaches-inputs",
            "reference-detaches-inputs",
        ),
    )
    def test_gradients_of_inputs(self) -> None:
        """A float32 input receives a float32 gradient from a forward in bfloat16."""
        workload = precision.scaled()
        batch = self.placed(workload.batch(BatchKey(step=0, rank=self.rank, world_size=self.world_size)))
        x: Tensor = batch.args[0].requires_grad_()
        adapter = self.subject()

        def look() -> Tensor | None:
            adapter.backward(workload.loss(adapter.forward(*batch.args), batch))
            return x.grad

        with self.blaming("implementation"):
            adapter.setup(
                lambda: workload.build(self.rank),
                workload.optimizers["sgd"],
                self.plan(workload, param_dtype="bfloat16"),
            )
            grad = self.observe("gradient of the input", look)
        got = None if grad is None else grad.dtype
        self.expect_equal("R088", "dtype of the input's gradient", got, torch.float32, phase="backward")
        nonzero = grad is not None and bool(grad.any())
        self.expect(nonzero, "R088", "the gradient of the input is zero", phase="backward")


def _dtypes(tensors: Iterable[Tensor]) -> list[str]:
    return [str(tensor.dtype) for tensor in tensors]


def _watch_dtypes(module: nn.Module, seen: dict[str, list[str]]) -> None:
    """Note the dtypes of each linear layer's parameters and of the embedding's tokens in each forward."""

    def note(what: str, tensors: Iterable[Tensor]) -> None:
        seen.setdefault(what, []).extend(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)

    for child in module.modules():
        # Inside of whatever wraps the modules: the hooks run when the user's own forward does.
        if isinstance(child, nn.Linear):
            child.register_forward_pre_hook(lambda linear, args: note("parameters", [linear.weight, linear.bias]))
        elif isinstance(child, nn.Embedding):
            child.register_forward_pre_hook(lambda table, args: note("tokens", args))


class PrecisionByUnit(ConformanceTestCase):
    """Units with different precision policies."""

    @conformance_case(
        "R087",
        "R084",
        chapter="I",
        world_size=2,
        axes={"low": ("first", "second", "both")},
        needs=lambda values: ["mp_per_unit", *["fp16"] * (values["low"] == "both")],
        kills=("one-policy-for-all-units",),
    )
    def test_policies_differ(self, low: str) -> None:
        """Each unit computes and reduces in its own dtype, and casts all of its inputs, also those from outside."""
        workload = precision.scaled()
        dtypes = {
            "first": ("bfloat16", "float32"), "second": ("float32", "bfloat16"), "both": ("bfloat16", "float16")
        }[low]  # fmt: skip
        # The root receives the last unit's output.
        root = None if low == "first" else "bfloat16" if low == "second" else "float16"
        plan = self.plan(workload, param_dtype=root, unit_dtypes=tuple(zip(workload.units, dtypes, strict=True)))
        run = self.train(workload, plan)
        self.check_rounding(run, workload, plan, requirement="R087")


class PrecisionInEval(ConformanceTestCase):
    """Low precision in training, full precision in evaluation."""

    @conformance_case(
        "R089",
        chapter="I",
        world_size=2,
        axes={"when": ("before", "between")},
        needs=("mixed_precision", "mp_eval_full"),
        kills=("low-precision-in-eval", "reference-sums-gradients"),
    )
    def test_evaluates_in_full_precision(self, when: str) -> None:
        """Outputs in eval mode are those of float32 parameters, and training continues unaffected in bfloat16."""
        workload = precision.scaled()
        regime = Regime(eval_before=(1, 2)) if when == "before" else Regime(eval_between=(0, 2))
        plan = self.plan(workload, param_dtype="bfloat16", full_precision_in_eval=True)
        run = self.train(workload, plan, regime)
        kinds = (Kind.EVAL, Kind.LOSS, Kind.GRADIENT, Kind.PARAMETER)
        self.check_rounding(run, workload, plan, regime, requirement="R089", kinds=kinds)
