"""
Tensors that enter and leave a unit, and are changed there: training is compared with the same unsharded.

Each use is a model's forward over its three units, which returns a loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_conformance.engine.errors import UsedWhileSharded
from fsdp_conformance.engine.fully_sharded.fully_shard import fully_shard
from fsdp_conformance.engine.fully_sharded.wrapper import FullyShardedDataParallel
from fsdp_conformance.engine.sharding_strategy import BackwardPrefetch, ShardingStrategy
from fsdp_conformance.tests.engine.fully_sharded.sharded_ranks import ShardedTestCase, full_params, sharded

pytestmark = pytest.mark.slow

WIDTH = 5
UNITS = ("a", "b", "c")
STEPS = 2

Use = Callable[[Any, Tensor], Tensor]
Backward = Callable[[Tensor, Tensor], None]
"""From a loss and the input of the model."""


def squares(x: Tensor) -> Tensor:
    return x.square().mean()


# --- units -----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A unit whose output is a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def transformed(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(x) * self.scale)
        return output

    def forward(self, x: Tensor) -> Any:
        return self.transformed(x)


class Cloning(Layer):
    """Lets its input be changed after the forward."""

    def forward(self, x: Tensor) -> Any:
        return self.transformed(x.clone())


class View(Layer):
    def forward(self, x: Tensor) -> Any:
        return self.transformed(x.unsqueeze(0)).squeeze(0)


class Transposed(Layer):
    def forward(self, x: Tensor) -> Any:
        return self.transformed(x).t()


class Slices(Layer):
    def forward(self, x: Tensor) -> Any:
        both = torch.cat([self.first(x), self.second(x)], 1)
        return both[:, :WIDTH], both[:, WIDTH:]


class Aliases(Layer):
    def forward(self, x: Tensor) -> Any:
        output = self.transformed(x)
        return output, output, output.view(-1)


class ShownBase(Layer):
    """Keeps the tensor that its output is a view of."""

    def forward(self, x: Tensor) -> Any:
        self.base = self.transformed(x)
        return self.base[:]


class ChangesAfterView(Layer):
    def forward(self, x: Tensor) -> Any:
        output = self.first(x)
        row = output[0]
        output.mul_(self.scale)
        return row, self.second(output.clone())


@dataclass
class Held:
    first: Tensor
    others: list[Any]


class Pair(NamedTuple):
    first: Tensor
    second: Any


class Structured(Layer):
    def forward(self, x: Tensor) -> Any:
        first, second = self.first(x.unsqueeze(0)).squeeze(0), self.second(x).squeeze(-1)
        return {"held": Held(first, [second, [(second * 2).view(-1)]]), "pair": Pair(first * 3, None)}


class Detaching(Layer):
    def forward(self, x: Tensor) -> Any:
        return self.first(x), self.second(x).detach()


class Skipped(Layer):
    def forward(self, x: Tensor) -> Any:
        return x


class SkippedView(Layer):
    def forward(self, x: Tensor) -> Any:
        return x.view(-1)


class InputAndOutput(Layer):
    def forward(self, x: Tensor) -> Any:
        return x, x.view(-1), self.transformed(x.clone())


class ReluFirst(Layer):
    def forward(self, x: Tensor) -> Any:
        return self.transformed(F.relu_(x))


class Scaling(Layer):
    def forward(self, x: Tensor) -> Any:
        return x.mul_(self.scale)


class ScalingOnly(Layer):
    """Returns nothing: the caller goes on with the input."""

    def forward(self, x: Tensor) -> Any:
        x.mul_(self.scale)


class TwoInputs(Layer):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        assert y is not None
        late = self.first(x + 1)
        x.relu_()
        return torch.tanh(late) + self.second(x) + y


class Hiding(Layer):
    """Keeps a part of the loss in an attribute."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        self.loss = squares(self.second(hidden))
        return hidden


class OwnParameter(Layer):
    def forward(self, x: Tensor) -> Any:
        return self.transformed(x), self.scale


class ClonedParameter(Layer):
    def forward(self, x: Tensor) -> Any:
        return self.transformed(x), self.scale.clone()


class OwnParameterView(Layer):
    def forward(self, x: Tensor) -> Any:
        return self.transformed(x), [self.first.weight.t()]


# --- uses ------------------------------------------------------------------------------------------------------------

USES: list[tuple[type[Layer], Use]] = []


def use(unit: type[Layer]) -> Callable[[Use], Use]:
    """Add a use of three units of a class."""

    def add(function: Use) -> Use:
        USES.append((unit, function))
        return function

    return add


@use(View)
def adds_to_a_view(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y += x
    z = m.b(y)
    z += 1
    w = m.c(z)
    w *= 2
    return squares(w)


@use(Layer)
def activates_in_place(m: Any, x: Tensor) -> Tensor:
    return squares(F.relu_(m.c(F.relu_(m.b(F.relu_(m.a(x)))))))


@use(Transposed)
def activates_a_transposed_view(m: Any, x: Tensor) -> Tensor:
    return squares(F.relu_(m.c(F.relu_(m.b(F.relu_(m.a(x)).t())).t())))


@use(View)
def writes_elements(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y[0] = 0
    z = m.b(y)
    z[:, 1] = x[:, 0]
    return squares(m.c(z))


@use(View)
def writes_without_a_graph(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    with torch.no_grad():
        y += 1
    z = m.b(y.clone())
    z.data.mul_(2)
    return squares(m.c(z.clone()))


@use(Slices)
def changes_one_slice(m: Any, x: Tensor) -> Tensor:
    p, q = m.a(x)
    p += 1
    r, s = m.b(p)
    s *= q
    t, u = m.c(s)
    u.relu_()
    return squares(t) + squares(u) + squares(r)


@use(Slices)
def uses_one_of_two(m: Any, x: Tensor) -> Tensor:
    _, q = m.a(x)
    q.mul_(2)
    _, s = m.b(q)
    t, _ = m.c(s)
    t -= 1
    return squares(t)


@use(Aliases)
def changes_an_alias(m: Any, x: Tensor) -> Tensor:
    p, q, r = m.a(x)
    r += 1
    s, t, u = m.b(q)
    s *= 2
    v, _, w = m.c(t)
    v.relu_()
    return squares(w) + squares(u) + squares(p)


@use(ShownBase)
def changes_the_base(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    m.a.base.add_(1)
    z = m.b(y)
    m.b.base.relu_()
    return squares(m.c(z))


@use(ChangesAfterView)
def changes_a_view_of_what_the_unit_has_changed(m: Any, x: Tensor) -> Tensor:
    p, q = m.a(x)
    p += 1
    r, s = m.b(q)
    r *= 2
    return squares(m.c(s)[1]) + squares(r) + squares(p)


@use(Structured)
def changes_inside_structures(m: Any, x: Tensor) -> Tensor:
    p = m.a(x)
    p["held"].first += 1
    p["held"].others[1][0].mul_(2)
    q = m.b(p["held"].first)
    q["pair"].first.relu_()
    r = m.c(q["held"].others[0])
    r["held"].others[1][0].mul_(2)
    return sum(
        (squares(each["pair"].first) + squares(each["held"].others[1][0]) for each in (p, q, r)), x.new_zeros(())
    )


@use(Detaching)
def changes_what_needs_no_gradient(m: Any, x: Tensor) -> Tensor:
    p, q = m.a(x)
    q += 1
    r, s = m.b(p + q)
    return squares(m.c(r + s)[0])


@use(Layer)
def detaches(m: Any, x: Tensor) -> Tensor:
    z = m.b(m.a(x).detach())
    m.c(z)
    return squares(z)


@use(View)
def uses_units_and_outputs_twice(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y += 1
    z = m.a(y)
    z += 1
    w = m.b(z)
    w *= 2
    return squares(m.c(m.b(w))) + squares(z)


@use(View)
def hooks_change_gradients(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y.register_hook(lambda gradient: gradient * 2)
    y += 1
    y.register_hook(lambda gradient: gradient * 3)
    z = m.b(y)
    z.retain_grad()
    z.register_hook(lambda gradient: gradient * torch.arange(WIDTH))
    return squares(m.c(z))


@use(Skipped)
def changes_an_input_that_was_returned(m: Any, x: Tensor) -> Tensor:
    y = m.a(x * m.scale)
    y += 1
    z = m.b(y)
    z *= 2
    return squares(m.c(z))


@use(SkippedView)
def changes_a_view_of_the_input(m: Any, x: Tensor) -> Tensor:
    x = x * m.scale
    y = m.a(x)
    y += 1
    m.b(x).mul_(2)
    return squares(m.c(x)) + squares(y)


@use(InputAndOutput)
def changes_the_input_beside_the_output(m: Any, x: Tensor) -> Tensor:
    p, q, r = m.a(x * m.scale)
    p += 1
    s, t, u = m.b(r * 1)
    t *= 2
    v, _, w = m.c(s + u)
    v += p
    return squares(v) + squares(w) + squares(q)


@use(ReluFirst)
def units_change_their_inputs(m: Any, x: Tensor) -> Tensor:
    x = x * m.scale
    x = x + m.a(x)
    y = x + m.b(x[1:]).sum(0)
    return squares(m.c(y)) + squares(x)


@use(Scaling)
def units_return_their_changed_inputs(m: Any, x: Tensor) -> Tensor:
    y = m.a(x * 1)
    y += 1
    z = m.b(y)
    z *= 2
    return squares(m.c(z + 1))


@use(ScalingOnly)
def units_return_nothing(m: Any, x: Tensor) -> Tensor:
    x = x * 1
    m.a(x)
    y = x + 1
    m.b(y)
    m.c(y)
    return squares(y)


@use(TwoInputs)
def units_change_one_of_two_inputs(m: Any, x: Tensor) -> Tensor:
    y = m.a(x * 1, x * 2)
    z = m.b(y * 2, y=y * 1)
    return squares(m.c(z * 1, y * 3))


@use(Cloning)
def changes_inputs_around_units(m: Any, x: Tensor) -> Tensor:
    x = x * m.scale
    x += 1
    y = m.a(x)
    x.relu_()
    z = m.b(x + y)
    z.relu_()
    return squares(m.c(z)) + squares(x)


class Net(nn.Module):
    """Three units of a class, and a parameter of the root."""

    def __init__(self, unit: type[Layer], function: Use) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = unit(), unit(), unit()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Checkpointed(nn.Module):
    """Runs a unit under a checkpoint."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.module, *args, use_reentrant=False, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "module" else getattr(self.module, name)


def at_once(loss: Tensor, _: Tensor) -> None:
    loss.backward()


def with_a_gradient(loss: Tensor, _: Tensor) -> None:
    loss.backward(torch.tensor(0.5))


def retained(loss: Tensor, _: Tensor) -> None:
    for retain in (True, True, False):
        loss.backward(retain_graph=retain)


def after_the_gradient_of_the_input(loss: Tensor, x: Tensor) -> None:
    x.grad = torch.autograd.grad(loss, x, retain_graph=True, allow_unused=True)[0]
    loss.backward()


def inputs_of(rank: int, step: int) -> Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(10 * rank + step))


class BoundaryTestCase(ShardedTestCase):
    """Compares with unsharded training."""

    def assert_trains_as_unsharded(
        self, reference: nn.Module, subject: nn.Module, *, backward: Backward = at_once, requires_grad: bool, what: str
    ) -> None:
        """Gradients of inputs in each step, and parameters after some, are those of `reference`."""
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (reference, subject)]
        for step in range(STEPS):
            expected = []
            for rank in range(self.world_size):
                x = inputs_of(rank, step).requires_grad_(requires_grad)
                backward(reference(x) / self.world_size, x)
                expected.append(x)
            x = inputs_of(self.rank, step).requires_grad_(requires_grad)
            backward(subject(x), x)
            want = expected[self.rank].grad
            if want is not None:
                assert x.grad is not None, what
                torch.testing.assert_close(x.grad, want * self.world_size, msg=what)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        got = full_params(subject)
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(got[name], parameter.detach(), msg=f"{what}, {name}")


def checked(unit: type[Layer]) -> bool:
    """True if a unit can run under a checkpoint: that needs the inputs as they were."""
    return unit not in (ReluFirst, Scaling, ScalingOnly, TwoInputs, InputAndOutput, ShownBase, Cloning)


class TestUses(BoundaryTestCase):
    """Tests of every use."""

    def options(self) -> Iterator[tuple[dict[str, Any], bool]]:
        """Options, and whether the input of the model requires a gradient."""
        yield {}, False
        yield {"backward_prefetch": None}, True
        yield {"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "forward_prefetch": True}, False
        yield {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, True
        yield {"cpu_offload": True}, False

    @pytest.mark.nightly
    def test_trains_as_unsharded(self) -> None:
        """Whatever users do to inputs and outputs, the gradients are right; and nothing stays unsharded."""
        for options, requires_grad in self.options():
            for unit, function in USES:
                what = f"{function.__name__} with {options}, an input that requires grad: {requires_grad}"
                reference = Net(unit, function)
                subject = sharded(copy.deepcopy(reference), units=UNITS, **options)
                self.assert_trains_as_unsharded(reference, subject, requires_grad=requires_grad, what=what)
                self.assertEqual([], [each.label for each in subject.units if each.is_unsharded], msg=what)

    @pytest.mark.nightly
    def test_ways_to_go_backward(self) -> None:
        """With a gradient of the user's, several times, or after `torch.autograd.grad`."""
        for backward in (with_a_gradient, retained, after_the_gradient_of_the_input):
            for unit, function in USES:
                reference = Net(unit, function)
                subject = sharded(copy.deepcopy(reference), units=UNITS)
                what = f"{function.__name__}, {backward.__name__}"
                self.assert_trains_as_unsharded(reference, subject, backward=backward, requires_grad=True, what=what)

    @pytest.mark.nightly
    def test_under_checkpoints(self) -> None:
        """Units that are computed twice."""
        for unit, function in USES:
            if checked(unit):
                reference, inner = Net(unit, function), Net(unit, function)
                for name in UNITS:
                    setattr(reference, name, Checkpointed(getattr(reference, name)))
                    setattr(inner, name, Checkpointed(FullyShardedDataParallel(getattr(inner, name))))
                what = f"{function.__name__} under checkpoints"
                self.assert_trains_as_unsharded(
                    reference, FullyShardedDataParallel(inner), requires_grad=True, what=what
                )

    @pytest.mark.nightly
    def test_without_wrappers(self) -> None:
        """Units by `fully_shard`."""
        for unit, function in USES:
            reference = Net(unit, function)
            subject = copy.deepcopy(reference)
            for name in UNITS:
                fully_shard(getattr(subject, name))
            fully_shard(subject)
            what = f"{function.__name__} with fully_shard"
            self.assert_trains_as_unsharded(reference, subject, requires_grad=True, what=what)

    @pytest.mark.nightly
    def test_deferred(self) -> None:
        """Gradients of micro-batches add up."""
        for unit, function in USES:
            reference = Net(unit, function)
            subject = sharded(copy.deepcopy(reference), units=UNITS)
            for rank in range(self.world_size):
                for number in range(2):
                    (reference(inputs_of(rank, number)) / self.world_size).backward()
            with subject.no_sync():
                subject(inputs_of(self.rank, 0)).backward()
            subject(inputs_of(self.rank, 1)).backward()
            for model in (reference, subject):
                torch.optim.SGD(model.parameters(), lr=0.1).step()
            got = full_params(subject)
            for name, parameter in reference.named_parameters():
                torch.testing.assert_close(got[name], parameter.detach(), msg=f"{function.__name__}, {name}")


class TestUnseen(BoundaryTestCase):
    """Tensors that leave a unit unseen."""

    def hiding(self, function: Use, **options: Any) -> tuple[Any, Any]:
        reference = Net(Hiding, function)
        return reference, sharded(copy.deepcopy(reference), units=UNITS, **options)

    def test_refused_when_freed(self) -> None:
        """A backward that needs parameters whose memory is free raises, and nothing is computed with it."""
        every: list[dict[str, Any]] = [{}, {"backward_prefetch": None}, {"cpu_offload": True}]
        for options in every:
            reference, subject = self.hiding(_adds_hidden_losses, **options)
            for _ in range(2):
                with self.assertRaisesRegex(RuntimeError, "is at version 10000"):
                    subject(inputs_of(self.rank, 0)).backward()
            reference.function = subject.module.function = lambda m, x: squares(m.c(m.b(m.a(x))))
            subject.zero_grad()
            self.assert_trains_as_unsharded(reference, subject, requires_grad=False, what="after the error")

    def test_right_when_kept(self) -> None:
        """The gradients are right if the unit stays whole until its backward, even if no output is in the loss."""
        for function in (_adds_hidden_losses, _only_hidden_loss):
            reference, subject = self.hiding(function, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
            self.assert_trains_as_unsharded(reference, subject, requires_grad=False, what=function.__name__)
        reference, subject = self.hiding(
            lambda m, x: m.c(m.b(m.a(x))), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP
        )
        for rank in range(self.world_size):
            reference(inputs_of(rank, 0))
            (reference.a.loss / self.world_size).backward()
        subject(inputs_of(self.rank, 0))
        subject.module.a.loss.backward()
        with FullyShardedDataParallel.summon_full_params(subject, with_grads=True):
            got = {name: parameter.grad for name, parameter in subject.named_parameters()}
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(got[name], parameter.grad, msg=name)

    def test_own_parameters(self) -> None:
        """A unit that returns a parameter is refused if that has been freed; a clone is not."""
        for unit, name in ((OwnParameter, "scale"), (OwnParameterView, "first.weight")):
            for training in (True, False):
                subject = sharded(Net(unit, lambda m, x: squares(m.a(x)[0])), units=UNITS)
                with torch.set_grad_enabled(training), self.assertRaisesRegex(UsedWhileSharded, f"{name} .*of a"):
                    subject(inputs_of(self.rank, 0))
        reference = Net(OwnParameter, _scales_by_returned)
        for strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
            subject = sharded(copy.deepcopy(reference), units=UNITS, sharding_strategy=strategy)
            self.assert_trains_as_unsharded(copy.deepcopy(reference), subject, requires_grad=False, what=strategy.name)
        reference = Net(ClonedParameter, _scales_by_returned)
        subject = sharded(copy.deepcopy(reference), units=UNITS)
        self.assert_trains_as_unsharded(reference, subject, requires_grad=False, what="cloned")


def _adds_hidden_losses(m: Any, x: Tensor) -> Tensor:
    loss: Tensor = squares(m.c(m.b(m.a(x)))) + m.a.loss + m.b.loss
    return loss


def _only_hidden_loss(m: Any, x: Tensor) -> Tensor:
    m.c(m.b(m.a(x)))
    loss: Tensor = m.b.loss
    return loss


def _scales_by_returned(m: Any, x: Tensor) -> Tensor:
    p, scale = m.a(x)
    q, other = m.b(p * scale)
    return squares(m.c(q * other)[0])
