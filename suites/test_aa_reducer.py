"""AA. The reducer: collects gradients in buckets and averages them while backward runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_conformance.adapters.components import GradientReducer, ReducerOptions
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.fixtures.coded import SHAPES, Coded, mean_code, position_code, rank_code
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.history.collective import Op

MIB = 2**20
#: A cap that gives each parameter its own bucket.
EACH = 1
#: torch.distributed has functions for the debug level, but its type stubs do not.
_DEBUG: Any = dist


class Reducing(ConformanceTestCase):
    """Shared parts of the cases below."""

    def reducer(self, module: nn.Module, **options: Any) -> GradientReducer:
        """The implementation's reducer around a module on this rank's device."""
        adapter = self.subject()
        with self.blaming("implementation"):
            return adapter.reducer(module.to(self.device), ReducerOptions(**options))

    def step(self, reducer: GradientReducer, step: int = 0, use: Sequence[int] | None = None) -> list[int]:
        """One forward and backward on this rank's code. Returns the bytes of the all-reduces, in order."""
        begin = len(process_group.log().records)
        with self.blaming("implementation"):
            reducer(rank_code(self.rank, step), use).backward()
        return self.reduced_since(begin)

    def reduced_since(self, begin: int) -> list[int]:
        """The bytes of each all-reduce of float32 tensors since record `begin`."""
        records = process_group.log().records[begin:]
        return [record.nbytes for record in records if record.op is Op.ALL_REDUCE and record.dtype == "float32"]

    def check_mean(self, requirement: str, module: nn.Module, name: str, factor: float, **where: Any) -> None:
        """The gradient of one parameter is the position code times `factor`."""
        parameter = module.get_parameter(name)
        expected = position_code(parameter.shape) * factor
        self.check_equal(requirement, parameter.grad, expected, check="averaged gradient", fqn=name, **where)

    def check_means(self, requirement: str, module: nn.Module, step: int = 0) -> None:
        """Every gradient is the mean over all ranks."""
        factor = mean_code(range(self.world_size), self.world_size, step)
        for name, _ in module.named_parameters():
            self.check_mean(requirement, module, name, factor, step=step)

    def own_order(self, *, reverse_on_odd: bool) -> tuple[int, ...]:
        """An order of use other than the parameters' order; ranks can differ."""
        order = (2, 0, 3, 1)
        return order[::-1] if reverse_on_odd and self.rank % 2 else order


class Reductions(Reducing):
    """Which gradients are reduced, when, and only once."""

    @conformance_case(
        "R165",
        chapter="AA",
        axes={"world_size": (2, 3)},
        needs=("reducer",),
        kills=("launches-when-ready", "averages-twice", "lost-after-none"),
        timeout_s=30,
        starts_early=True,
    )
    def test_in_bucket_order(self, world_size: int) -> None:
        """
        All ranks reduce buckets in the same order, each once, although gradients become ready in different orders.
        """
        model = Coded()
        use = self.own_order(reverse_on_odd=True)
        ready = _note_ready(model)
        reducer = self.reducer(model, bucket_cap_bytes=EACH)
        for step in range(3):
            ready.clear()
            sizes = self.step(reducer, step, use)
            if ready != list(use[::-1]):
                raise SuiteError(f"order in which gradients become ready: expected {use[::-1]}, got {ready}")
            self.check_means("R165", model, step)
            total = 4 * sum(torch.Size(shape).numel() for shape in SHAPES)
            self.expect_equal("R165", "bytes reduced", sum(sizes), total)
            self.check_digests({f"buckets of step {step}": str(sizes)}, "buckets", "R165", "bucket order")
            model.zero_grad()

    @conformance_case(
        "R165",
        chapter="AA",
        world_size=2,
        needs=("reducer",),
        kills=("first-bucket-large", "averages-twice", "lost-after-none", "reducer-has-one-bucket"),
    )
    def test_first_bucket_is_small(self) -> None:
        """By default the first bucket closes at 1 MiB, and the rest is reduced together."""
        model = Coded([(MIB // 8,)] * 6)  # half a MiB each
        reducer = self.reducer(model)
        for step in range(3):
            sizes = self.step(reducer, step)
            self.check_means("R165", model, step)
            model.zero_grad()
        self.expect_equal("R165", "bytes of each all-reduce", sizes, [MIB, 2 * MIB])

    @conformance_case("R164", chapter="AA", world_size=2, needs=("reducer",), kills=("averages-twice",))
    def test_sparse_gradients(self) -> None:
        """Sparse gradients of different rows are averaged over ranks, as dense ones are."""
        model = nn.Embedding(4, 3, sparse=True)
        nn.init.zeros_(model.weight)
        reducer = self.reducer(model)
        rows = [[0, 1], [1, 3]]
        with self.blaming("implementation"):
            (reducer(torch.tensor(rows[self.rank], device=self.device)).sum() * rank_code(self.rank)).backward()
        expected = torch.zeros(4, 3)
        for rank, touched in enumerate(rows):
            expected[touched] += rank_code(rank) / 2
        grad = model.weight.grad
        layout = "none" if grad is None else "sparse" if grad.is_sparse else "dense"
        self.expect_equal("R164", "gradient", layout, "sparse")
        self.check_equal("R164", None if grad is None else grad.to_dense(), expected, check="sparse gradient")


class Misuse(Reducing):
    """Tensors that cannot be reduced, and the errors for them."""

    @conformance_case(
        "R166",
        chapter="AA",
        axes={"others": ("pending", "ready"), "world_size": (2,)},
        needs=("reducer",),
        kills=("second-gradient-ignored",),
        timeout_s=30,
        starts_early=True,
    )
    def test_ready_twice(self, others: str, world_size: int) -> None:
        """
        A parameter that gets two gradients in one backward raises an error with its name or index, even if all others
        were ready when the first one arrived.
        """
        model = _Twice(with_first=others == "pending")
        reducer = self.reducer(model, bucket_cap_bytes=EACH)
        x = torch.ones(2, 3, device=self.device, requires_grad=True)
        with (
            self.refusal("R166", "two gradients of one parameter", names=("ready", "gradient")) as outcome,
            self.blaming("implementation"),
        ):
            reducer(x).sum().backward()
        if outcome.error is not None:
            self._expect_named(
                "R166", str(outcome.error), {"twice.weight": 1 if others == "pending" else 0}, names=False
            )

    @conformance_case(
        "R166",
        chapter="AA",
        axes={"detail": ("off", "info")},
        world_size=2,
        needs=("reducer",),
        kills=("reducer-refuses-nothing", "unfinished-unnoticed", "unfinished-without-names"),
        timeout_s=30,
        starts_early=True,
    )
    def test_unfinished_reduction(self, detail: str) -> None:
        """
        A reduction with missing gradients raises at the next forward and lists the parameters, at higher debug levels
        by name.
        """
        before = _DEBUG.get_debug_level()
        _DEBUG.set_debug_level(getattr(_DEBUG.DebugLevel, detail.upper()))
        try:
            reducer = self.reducer(Coded(), bucket_cap_bytes=EACH)
            self.step(reducer, use=(0, 3))
            with self.refusal(
                "R166", "parameters p1 and p2 had no gradient", names=("reduction", "gradient")
            ) as outcome:
                self.step(reducer, 1)
        finally:
            _DEBUG.set_debug_level(before)
        if outcome.error is not None:
            self._expect_named("R166", str(outcome.error), {"p1": 1, "p2": 2}, names=detail == "info")

    def _expect_named(self, requirement: str, text: str, expected: dict[str, int], *, names: bool) -> None:
        for name, index in expected.items():
            is_named = name in text or (not names and f" {index}" in text)
            self.expect(is_named, requirement, f"the error does not mention {name!r} (index {index}): {text[:400]}")


class Unused(Reducing):
    """The search for unused parameters."""

    @conformance_case(
        "R167",
        chapter="AA",
        axes={"world_size": (2, 3)},
        needs=("reducer",),
        kills=("unused-becomes-zero", "left-alone-where-unused"),
    )
    def test_unused(self, world_size: int) -> None:
        """
        A parameter that some ranks use gets the mean on all, with zeros for the others. If no rank uses it, its
        gradient stays None or keeps its old value.
        """
        model = Coded()
        reducer = self.reducer(model, bucket_cap_bytes=EACH, find_unused=True)
        stale = position_code(SHAPES[3], first=1000).to(self.device)
        for step in range(2):
            model.zero_grad()
            model.p3.grad = stale.clone()
            self.step(reducer, step, (0, 1) if self.rank == 0 else (0,))
            self.check_mean("R167", model, "p0", mean_code(range(world_size), world_size, step), step=step)
            self.check_mean("R167", model, "p1", mean_code([0], world_size, step), step=step)
            self.expect_no_gradient("R167", model, "p2")
            self.check_equal("R167", model.p3.grad, stale.cpu(), check="gradient left alone", fqn="p3", step=step)

    def expect_no_gradient(self, requirement: str, module: nn.Module, name: str) -> None:
        """A parameter that no rank used has no gradient."""
        got = "None" if module.get_parameter(name).grad is None else "a tensor"
        self.expect_equal(requirement, "gradient", got, "None", details="no rank used the parameter", fqn=name)

    @conformance_case(
        "R167",
        chapter="AA",
        world_size=2,
        needs=("reducer",),
        kills=(
            "unused-marked-at-the-end",
            "reducer-has-one-bucket",
        ),
        timeout_s=30,
        starts_early=True,
    )
    def test_unused_are_ready_first(self) -> None:
        """A bucket of unreachable parameters does not delay the others: it is reduced with the first gradient."""
        model = _Chain()
        reducer = self.reducer(model, bucket_cap_bytes=EACH, find_unused=True)
        begin = len(process_group.log().records)
        seen: list[int] = []
        model.on_middle = lambda: seen.append(len(self.reduced_since(begin)))
        with self.blaming("implementation"):
            reducer(rank_code(self.rank)).backward()
        if len(seen) != 1:
            raise SuiteError(f"hook calls in the middle of backward: expected 1, got {len(seen)}")
        # That of `unused`, which is first, and that of `second`; `first` has no gradient yet.
        self.expect_equal("R167", "buckets reduced halfway through backward", seen[0], 2)
        self.expect_no_gradient("R167", model, "unused")


class Rebuilding(Reducing):
    """The buckets after the first iteration."""

    @conformance_case(
        "R168",
        chapter="AA",
        axes={"world_size": (2, 3)},
        needs=("reducer",),
        kills=("never-rebuilds", "rebuilds-by-own-order", "rebuilds-every-time", "averages-twice"),
        timeout_s=30,
        starts_early=True,
    )
    def test_rebuilt_once(self, world_size: int) -> None:
        """
        From the second iteration on, buckets keep the order in which gradients became ready on rank 0 in the first;
        gradients stay correct.
        """
        model = Coded()
        first = self.own_order(reverse_on_odd=True)
        reducer = self.reducer(model, bucket_cap_bytes=EACH)
        # Rank 0 used parameters 2, 0, 3, 1, so they were ready as 1, 3, 0, 2.
        expected = [4 * torch.Size(SHAPES[index]).numel() for index in (1, 3, 0, 2)]
        for step, use in enumerate((first, (0, 1, 2, 3), (3, 0, 2, 1), first)):
            sizes = self.step(reducer, step, use)
            self.check_means("R168", model, step)
            if step:
                self.expect_equal("R168", "bytes of each all-reduce", sizes, expected, step=step)
            model.zero_grad()

    @conformance_case("R168", chapter="AA", world_size=2, needs=("reducer",), kills=("rebuilds-with-unused-search",))
    def test_not_rebuilt_with_the_search(self) -> None:
        """With the search for unused parameters, buckets are not rebuilt."""
        model = Coded()
        reducer = self.reducer(model, bucket_cap_bytes=EACH, find_unused=True)
        all_sizes = []
        for step in range(3):
            all_sizes.append(self.step(reducer, step, self.own_order(reverse_on_odd=False)))
            self.check_means("R168", model, step)
            model.zero_grad()
        for step, sizes in enumerate(all_sizes[1:], 1):
            details = "as in the first step"
            self.expect_equal("R168", "bytes of each all-reduce", sizes, all_sizes[0], details=details, step=step)


class Layout(Reducing):
    """The memory of gradients."""

    @conformance_case(
        "R169",
        chapter="AA",
        axes={"as_view": (False, True), "world_size": (2,)},
        needs=("reducer",),
        kills=("gradients-contiguous",),
    )
    def test_layout(self, as_view: bool, world_size: int) -> None:
        """A gradient has the strides of its parameter, also in channels_last, and holds the mean."""
        model = Coded([(2, 3, 2, 2), (5,)])
        weight = model.p0
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        reducer = self.reducer(model, gradient_as_bucket_view=as_view)
        for step in range(2):
            self.step(reducer, step)
            got = None if weight.grad is None else weight.grad.stride()
            self.expect_equal("R169", "stride of the gradient", got, weight.stride(), fqn="p0")
            self.check_means("R169", model, step)
            model.zero_grad()

    @conformance_case(
        "R169",
        chapter="AA",
        axes={"as_view": (False, True), "world_size": (2,)},
        needs=("reducer",),
        kills=("lost-after-none", "averages-twice"),
    )
    def test_detach_and_none(self, as_view: bool, world_size: int) -> None:
        """After gradients are detached, set to None or zeroed in place, the next ones are correct."""
        model = Coded()
        reducer = self.reducer(model, gradient_as_bucket_view=as_view)
        for step in range(4):
            self.step(reducer, step)
            self.check_means("R169", model, step)
            for parameter in model.parameters():
                grad = parameter.grad
                if step == 0 or grad is None:
                    parameter.grad = None
                elif step == 1:
                    parameter.grad = grad.detach().zero_()
                else:
                    grad.zero_()

    @conformance_case(
        "R169", chapter="AA", world_size=2, needs=("reducer",), kills=("writes-into-kept-gradients", "lost-after-none")
    )
    def test_kept_gradients(self) -> None:
        """A gradient that is not a view of a bucket can be detached in place, and later steps do not change it."""
        model = Coded()
        reducer = self.reducer(model)
        self.step(reducer)
        grads = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                raise SuiteError(f"{name} has no gradient after a step")
            with self.blaming("implementation"):
                grads[name] = parameter.grad.detach_()
            parameter.grad = None
        self.step(reducer, 1)
        self.check_means("R169", model, 1)
        factor = mean_code(range(2), 2)
        for name, grad in grads.items():
            self.check_equal("R169", grad, position_code(grad.shape) * factor, check="gradient kept", fqn=name)


class Hooks(Reducing):
    """A communication hook in place of the averaging all-reduce."""

    @conformance_case(
        "R170",
        chapter="AA",
        axes={"world_size": (2, 3)},
        needs=("reducer",),
        kills=("reducer-negates", "divides-after-hook", "divides-before-hook", "hook-result-dropped"),
    )
    def test_hook_replaces_the_average(self, world_size: int) -> None:
        """A hook receives the rank's own undivided gradients, and its result becomes the gradient, undivided."""
        model = Coded([(5,)])
        reducer = self.reducer(model)
        given: list[Tensor] = []

        def tripled_sum(state: object, bucket: Any) -> Any:
            given.append(bucket.buffer().detach().cpu().clone())
            total = bucket.buffer().clone()
            dist.all_reduce(total)
            return _done(total * 3)

        with self.blaming("implementation"):
            reducer.register_comm_hook(None, _unannotated(tripled_sum))
        for step in range(2):
            given.clear()
            self.step(reducer, step)
            own = position_code((5,)) * rank_code(self.rank, step)
            self.expect_equal("R170", "calls of the hook", len(given), 1)
            for buffer in given:
                self.check_equal("R170", buffer, own, check="what the hook gets", step=step)
            self.check_mean("R170", model, "p0", 3 * mean_code(range(world_size), 1, step), step=step)
            model.zero_grad()

    @conformance_case(
        "R170",
        chapter="AA",
        axes={"mistake": ("second", "not-callable", "wrong-bucket")},
        world_size=2,
        needs=("reducer",),
        kills=(
            "reducer-gives-no-reasons",
            "any-hook-accepted",
        ),
    )
    def test_hook_refused(self, mistake: str) -> None:
        """A second hook, one that is not callable, and one for another kind of bucket are rejected."""
        reducer = self.reducer(Coded())
        wrong: dict[str, Any] = {"second": _right_hook, "not-callable": 3, "wrong-bucket": _wrong_hook}
        if mistake == "second":
            with self.blaming("implementation"):
                reducer.register_comm_hook(None, _right_hook)
        with self.refusal("R170", f"hook: {mistake}", names=("hook",)), self.blaming("implementation"):
            reducer.register_comm_hook(None, wrong[mistake])

    @conformance_case(
        "R170",
        chapter="AA",
        axes={"result": ("no-future", "no-tensor", "other-size", "other-dtype")},
        world_size=2,
        needs=("reducer",),
        kills=("any-hook-result-accepted",),
    )
    def test_hook_result_refused(self, result: str) -> None:
        """
        A hook result that is not a future, not a tensor, or has the wrong size raises in backward; one of another dtype
        raises, too, or is converted.
        """

        def hook(state: object, bucket: Any) -> Any:
            buffer: Tensor = bucket.buffer()
            value = {"no-tensor": 3, "other-size": buffer[1:], "other-dtype": buffer.double() * 3}.get(result, buffer)
            return buffer if result == "no-future" else _done(value)

        model = Coded([(5,)])
        reducer = self.reducer(model)
        with self.blaming("implementation"):
            reducer.register_comm_hook(None, _unannotated(hook))
        names = ("hook", "result", "tensor") if result == "no-tensor" else ("hook", "result")
        with self.refusal("R170", f"a hook's result: {result}", names=names) as outcome:
            with self.blaming("implementation"):
                reducer(rank_code(self.rank)).backward()
            converted = position_code((5,)) * (3 * rank_code(self.rank))
            grad = model.p0.grad
            outcome.excused = result == "other-dtype" and grad is not None and torch.equal(grad.cpu(), converted)


class UnevenInputs(Reducing):
    """Ranks with fewer inputs than others."""

    @conformance_case(
        "R171",
        chapter="AA",
        axes={"divisor": ("initial", "effective"), "world_size": (2, 3)},
        needs=("reducer",),
        kills=lambda values: {
            "initial": ["always-divides-by-present", "left-behind-after-join"],
            "effective": ["always-divides-by-all", "left-behind-after-join"],
        }[values["divisor"]],
        timeout_s=30,
        starts_early=True,
    )
    def test_join(self, divisor: str, world_size: int) -> None:
        """
        Ranks that stop early take part in the others' reductions, the divisor is the requested one, and at the end all
        ranks have the model of the rank that trained longest.
        """
        model = Coded()
        reducer = self.reducer(model, bucket_cap_bytes=EACH)
        with self.blaming("implementation"), reducer.join(divide_by_initial_world_size=divisor == "initial"):
            # Rank r has r + 1 inputs, so from step k on ranks k, k + 1, ... take part.
            for step in range(self.rank + 1):
                self.step(reducer, step)
                self._check_joined(model, step, divisor)
                with torch.no_grad():
                    for parameter in model.parameters():
                        if parameter.grad is not None:
                            parameter.sub_(parameter.grad)
                model.zero_grad()
        total = sum(self._factor(step, divisor) for step in range(world_size))
        for name, parameter in model.named_parameters():
            expected = position_code(parameter.shape) * -total
            self.check_equal("R171", parameter, expected, check="parameters after the join", fqn=name)

    def _factor(self, step: int, divisor: str) -> float:
        present = range(step, self.world_size)
        return mean_code(present, self.world_size if divisor == "initial" else len(present), step)

    def _check_joined(self, model: Coded, step: int, divisor: str) -> None:
        for name, _ in model.named_parameters():
            self.check_mean("R171", model, name, self._factor(step, divisor), step=step)


class _Twice(nn.Module):
    """A linear layer in two reentrant checkpoints: its gradient arrives in two parts, and that of `first` last."""

    def __init__(self, *, with_first: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False) if with_first else nn.Identity()
        self.twice = nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Any:
        once = checkpoint(self.twice, self.first(x), use_reentrant=True)
        return checkpoint(self.twice, once, use_reentrant=True)


class _Chain(nn.Module):
    """Two scalars in sequence, and an unused one; `on_middle` is called between their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(1))
        self.second = nn.Parameter(torch.zeros(1))
        self.unused = nn.Parameter(torch.zeros(1))
        self.on_middle: Callable[[], object] = lambda: None

    def forward(self, x: float) -> Tensor:
        middle = self.first * x
        middle.register_hook(lambda grad: self.on_middle() and None)
        return (middle * self.second).sum()


def _note_ready(model: Coded) -> list[int]:
    """The indices of parameters, in the order in which their gradients arrive."""
    ready: list[int] = []
    for index in range(model.count):
        parameter = model.get_parameter(f"p{index}")
        parameter.register_hook(lambda grad, index=index: ready.append(index))
    return ready


def _unannotated(hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The hook without annotations, as users write it: implementations check them, and bucket classes differ."""
    hook.__annotations__ = {}
    return hook


def _done(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


@_unannotated
def _right_hook(state: object, bucket: Any) -> Any:
    """A valid hook: the rank's own gradients."""
    return _done(bucket.buffer())


def _wrong_hook(state: object, bucket: int) -> Any:
    """A hook whose annotation is not a bucket."""
    return _right_hook(state, bucket)
