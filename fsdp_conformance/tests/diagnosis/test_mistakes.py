"""
A step with one mistake in it is recognised by its values, which are computed here with a model and an optimizer alone.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fsdp_conformance.checks.parity import kind_parity
from fsdp_conformance.diagnosis.headline import causes_in
from fsdp_conformance.diagnosis.mistakes import supposed_gradients, supposed_losses, supposed_parameters
from fsdp_conformance.diagnosis.optimizer_steps import rate_factors, supposed_steps
from fsdp_conformance.fixtures import adapters, deep, models, probes, reuse
from fsdp_conformance.fixtures.optimizers import grouped
from fsdp_conformance.history.training import Tensors, TrainingHistory
from fsdp_conformance.references.reference_set import Kind, References
from fsdp_conformance.tests.references.reference_runs import damaged, implementation_run, references_of
from fsdp_conformance.workload.definition import BatchKey, Regime
from fsdp_conformance.workload.events import Action, Event, Moment

WORLD_SIZE = 2
RANK = 1


def references(**regime: object) -> References:
    """Of a nested model on the second of two ranks."""
    return references_of(models.nested(), Regime(**regime), rank=RANK, world_size=WORLD_SIZE)  # type: ignore[arg-type]


def loss(
    refs: References, params: Tensors, step: int, *, seen: BatchKey | None = None, micro: int = 0, rank: int = RANK
) -> tuple[Tensor, nn.Module]:
    """The loss of a batch with these parameters, where the model sees the inputs of the batch `seen`."""
    workload = refs.workload
    model = workload.build(rank)
    model.load_state_dict({name: value.float() for name, value in params.items()}, strict=False)
    key = BatchKey(step=step, micro=micro, rank=rank, world_size=WORLD_SIZE)
    batch, inputs = workload.batch(key), workload.batch(seen or key)
    return workload.loss(model(*inputs.args, **inputs.kwargs), batch), model


def cause(history: TrainingHistory, refs: References, kind: Kind) -> str | None:
    """The likely cause of the first finding of a kind; there must be one."""
    return kind_parity(kind, history, refs).findings[0].likely


def with_loss(refs: References, value: Tensor, step: int, micro: int = 0) -> TrainingHistory:
    """A history that is right but for one loss."""
    history = damaged(implementation_run(refs))
    history.steps[step].losses[micro] = value.detach()
    return history


def test_rates_of_other_steps() -> None:
    """With a rate that changes, an update may have that of another step, or that from setup."""
    events = tuple(
        Event(action=Action.LEARNING_RATE, moment=Moment.STEP, step=step, value=value)
        for step, value in ((1, 0.5), (2, 0.125), (3, 2.0))
    )
    refs = references(steps=4, events=events)
    first = refs.workload.optimizers["sgd"]([nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"]

    assert rate_factors(refs, 2) == {
        "the learning rate is that of the previous step: 0.5 in place of 0.125": 4.0,
        "the learning rate is that of the next step: 2 in place of 0.125": 16.0,
        f"the learning rate is that of setup: {first:g} in place of 0.125": first / 0.125,
    }
    assert rate_factors(references(), 1) == {}


def test_a_replay_beside_packed_integers() -> None:
    """The optimizer leaves them alone, and so does the replay."""
    event = Event(action=Action.LEARNING_RATE, moment=Moment.STEP, step=1, value=0.5)
    regime = Regime(steps=2, events=(event,))
    refs = references_of(adapters.lora_packed(), regime, rank=RANK, world_size=WORLD_SIZE)

    assert rate_factors(refs, 1)
    assert list(supposed_steps(refs, 1)) == []  # one group


def test_parameters_of_the_previous_step() -> None:
    """Of the whole model, or of one module."""
    refs = references()
    before, now = refs.expected.initial_params, refs.expected.steps[0].params
    module = next(iter(now)).rpartition(".")[0]
    mixed = {name: before[name] if name.rpartition(".")[0] == module else value for name, value in now.items()}

    whole, _ = loss(refs, before, 1)
    part, _ = loss(refs, mixed, 1)

    assert cause(with_loss(refs, whole, 1), refs, Kind.LOSS) == (
        "stale parameters: forward saw those of the previous step"
    )
    text = str(cause(with_loss(refs, part, 1), refs, Kind.LOSS))
    assert text.startswith("stale parameters: ")
    assert text.endswith("computed with those of the previous step")


def test_inputs_of_another_time_or_rank() -> None:
    """The model sees them, and the loss is taken with the right target."""
    refs = references(micro_batches=2)
    now = refs.expected.steps[0].params
    previous = BatchKey(step=1, micro=0, rank=RANK, world_size=WORLD_SIZE)
    other = BatchKey(step=1, micro=1, rank=0, world_size=WORLD_SIZE)

    stale, _ = loss(refs, now, 1, seen=previous, micro=1)
    foreign, _ = loss(refs, now, 1, seen=other, micro=1)

    assert cause(with_loss(refs, stale, 1, 1), refs, Kind.LOSS) == (
        "stale inputs: forward saw the previous micro-batch"
    )
    assert cause(with_loss(refs, foreign, 1, 1), refs, Kind.LOSS) == (
        "another rank's data: forward saw rank 0's micro-batch"
    )


def test_an_optimizer_that_steps_after_each_micro_batch() -> None:
    """The second forward of the first step sees parameters after plain SGD with the first micro-batch's mean."""
    refs = references(micro_batches=2)
    before = refs.expected.initial_params
    grads: list[dict[str, Tensor]] = []
    for rank in range(WORLD_SIZE):
        value, model = loss(refs, before, 0, rank=rank)
        torch.autograd.backward(value)
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    stepped = {}
    for name, value in before.items():
        parameter = nn.Parameter(value.float().clone())
        parameter.grad = (grads[0][name] + grads[1][name]) / WORLD_SIZE
        refs.workload.optimizers["sgd"]([parameter]).step()
        stepped[name] = parameter.detach()

    early, _ = loss(refs, stepped, 0, micro=1)

    assert str(cause(with_loss(refs, early, 0, 1), refs, Kind.LOSS)).startswith(
        "the optimizer stepped after the first micro-batch"
    )


def test_a_loss_that_fits_nothing_has_no_cause() -> None:
    """It is just another number."""
    refs = references()

    assert cause(with_loss(refs, refs.expected.steps[1].losses[0].float() * 1.1, 1), refs, Kind.LOSS) is None


def _norm_cause(value: Callable[[list[Tensor]], Tensor], *, norm_type: float = 2.0) -> str:
    """The cause of a total norm that is computed so from the right gradients."""
    refs = references(max_norm=0.5, norm_type=norm_type)
    grads = [grad.double() for grad in (refs.expected.steps[0].grads or {}).values() if grad is not None]
    history = damaged(implementation_run(refs))
    for record in history.steps:
        record.grad_norm = value(grads).to(record.losses[0].dtype)
    return str(cause(history, refs, Kind.NORM))


def _shard(grads: list[Tensor], rank: int) -> list[Tensor]:
    return [torch.chunk(grad, WORLD_SIZE)[rank] for grad in grads if len(torch.chunk(grad, WORLD_SIZE)) > rank]


def _whole_norm(grads: list[Tensor], order: float = 2.0) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]), order)
    return norm


def test_norms_of_ranks() -> None:
    """Of one rank's shards, which on this rank may be its own, and added instead of put together."""
    assert "rank 1's shards are left out of the norm" in _norm_cause(lambda grads: _whole_norm(_shard(grads, 0)))
    own = _norm_cause(lambda grads: _whole_norm(_shard(grads, RANK)))
    # One rank does not show whether the other has the same norm.
    assert set(causes_in(own)) == {"the norm of this rank's shards alone", "rank 0's shards are left out of the norm"}
    added = _norm_cause(lambda grads: torch.stack([_whole_norm(_shard(grads, rank)) for rank in range(2)]).sum())
    assert added.startswith("the norms of the ranks are added: ")


@pytest.mark.parametrize(
    "value",
    [
        lambda grads: _whole_norm(grads) * 1.07,
        lambda grads: _whole_norm(grads, 3.0),
        lambda grads: _whole_norm([*_shard(grads, 0), *[part * 1.1 for part in _shard(grads, 1)]]),
    ],
)
def test_norms_that_fit_nothing(value: Callable[[list[Tensor]], Tensor]) -> None:
    """Another factor, another order, a shard that is a little larger."""
    assert not causes_in(_norm_cause(value))


def test_gradients_that_are_clipped_wrongly() -> None:
    """Twice, or not at all, seen in the parameters; a factor between the two is none of them."""
    refs = references(max_norm=0.05)
    history = implementation_run(refs)
    step, name = history.steps[0], next(iter(history.initial_params))
    norm = float(refs.expected.steps[0].grad_norm if refs.expected.steps[0].grad_norm is not None else 0.0)
    factor = 0.05 / (norm + 1e-6)
    assert factor < 0.9
    before = history.initial_params[name]
    update = refs.expected.steps[0].params[name] - before.double()

    def seen(times: float) -> str:
        other = damaged(history)
        other.steps[0].params[name] = (before.double() + update * times).to(step.params[name].dtype)
        return str(cause(other, refs, Kind.PARAMETER))

    assert "the gradient was clipped twice" in seen(factor)
    assert "the gradient was not clipped" in seen(1 / factor)
    assert "clipped" not in seen(factor**0.5)


def test_loss_scales() -> None:
    """A scaler that counts wrongly, or sees another overflow than there was; a scale that fits nothing has no cause."""
    refs = references(init_scale=4.0, growth_interval=2)
    scales = [float(record.loss_scale) for record in refs.expected.steps if record.loss_scale is not None]
    assert scales[:2] == [4.0, 8.0]

    def seen(step: int, scale: float) -> tuple[str, ...]:
        history = damaged(implementation_run(refs))
        history.steps[step].loss_scale = torch.tensor(scale, dtype=torch.float64)
        return causes_in(cause(history, refs, Kind.LOSS_SCALE))

    assert seen(0, 8.0) == ("the loss scale grew too early",)
    assert seen(0, 2.0) == ("the loss scale was reduced",)
    assert seen(1, 4.0) == ("the loss scale did not grow",)
    assert seen(1, 5.0) == ()


def _new_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    optimizer.state.clear()
    optimizer.step()


def _twice(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    optimizer.step()
    optimizer.step()


def _zeros(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (_new_state, "the optimizer's state was lost"),
        (_twice, "the optimizer stepped twice"),
        (_zeros, "the gradient was lost"),
    ],
)
def test_optimizer_steps(name: str, last: Callable[[torch.optim.Optimizer, nn.Parameter], None], expected: str) -> None:
    """The second step of an optimizer that loses its state, steps twice, or gets zeros."""
    refs = references(optimizer=name)
    key = next(iter(refs.expected.initial_params))
    parameter = nn.Parameter(refs.expected.initial_params[key].float().clone())
    optimizer = refs.workload.optimizers[name]([parameter])
    for step, move in enumerate((lambda *_: optimizer.step(), last)):
        grad = (refs.expected.steps[step].grads or {})[key]
        assert grad is not None
        parameter.grad = grad.float()
        move(optimizer, parameter)
    history = damaged(implementation_run(refs))
    history.steps[1].params[key] = parameter.detach()

    assert str(cause(history, refs, Kind.PARAMETER)).startswith(f"{expected}: ")


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_what_the_user_wrote_is_lost(optimizer: str) -> None:
    """A write before or after the step, to a parameter or its gradient, has no effect."""
    key = next(name for name, _ in models.nested().build(0).named_parameters())
    events = (
        Event(action=Action.WRITE, moment=Moment.STEP, step=1, names=(key,), value=0.5),
        Event(action=Action.WRITE_GRADIENT, moment=Moment.OPTIMIZER, step=1, names=(key,), value=0.25),
        Event(action=Action.ASSIGN, moment=Moment.END, step=1, names=(key,), value=0.5),
    )
    refs = references(steps=2, optimizer=optimizer, events=events)
    right = refs.expected.steps[1].params[key].double()
    before = refs.expected.steps[0].params[key].double()
    history = implementation_run(refs)

    def seen(value: Tensor) -> tuple[str, ...]:
        other = damaged(history)
        other.steps[1].params[key] = value.to(other.steps[1].params[key].dtype)
        return causes_in(cause(other, refs, Kind.PARAMETER))

    write = "a write of the user was lost"
    assert seen(2 * right) == (write,)
    assert seen(right + before / 4) == (write,)
    assert seen(2 * right + before / 2) == ("writes of the user were lost",)
    parameter = nn.Parameter(refs.expected.initial_params[key].clone())
    own = refs.workload.optimizers[optimizer]([parameter])
    for step, (write_before, write_after) in enumerate(((1.0, 1.0), (0.5, 0.5))):
        parameter.data *= write_before
        grad = (refs.expected.steps[step].grads or {})[key]
        assert grad is not None
        parameter.grad = grad.clone()
        own.step()
        parameter.data *= write_after
    assert seen(parameter.detach()) == ("what the user did to the gradient was lost",)

    stale, _ = loss(refs, refs.expected.steps[0].params, 1)
    likely = str(cause(with_loss(refs, stale, 1), refs, Kind.LOSS))
    assert likely == f"{write}: forward saw the values before it"


@pytest.mark.parametrize("use", ["embedding.weight", "head.weight"])
def test_a_tied_parameter_that_became_several(use: str) -> None:
    """The gradient of one use alone is recognised, and the use is named; the right gradient is not mistaken for it."""
    refs = references_of(probes.exact_tied(), Regime(), rank=RANK, world_size=WORLD_SIZE)
    history = damaged(implementation_run(refs))
    total: Tensor = torch.zeros(())
    for rank in range(WORLD_SIZE):
        model = refs.workload.build(rank)
        module, _, key = use.rpartition(".")
        own = nn.Parameter(model.get_parameter(use).detach().clone())
        model.get_submodule(module)._parameters[key] = own
        batch = refs.workload.batch(BatchKey(step=0, micro=0, rank=rank, world_size=WORLD_SIZE))
        refs.workload.loss(model(*batch.args, **batch.kwargs), batch).backward()
        assert own.grad is not None
        total = total + own.grad / WORLD_SIZE
    grads = history.steps[0].grads or {}
    listed = next(iter({"embedding.weight", "head.weight"} & grads.keys()))
    grads[listed] = total

    assert cause(history, refs, Kind.GRADIENT) == (
        f"a tied parameter became several: this is the gradient of {use!r} alone"
    )


def test_without_a_mistake_the_replay_is_the_reference() -> None:
    """Each supposed value differs from the right one, or the mistake has no effect, as weight decay that is zero."""
    refs = references(optimizer="adam")
    key = next(iter(refs.expected.initial_params))
    right = refs.expected.steps[1].params[key]

    values = dict(supposed_parameters(refs, 1, key))

    assert len(values) >= 6
    assert [phrase for phrase, value in values.items() if torch.allclose(value, right.double(), rtol=1e-9)] == [
        phrase for phrase in values if "weight decay" in phrase
    ]


def test_gradients_are_supposed_only_where_the_losses_agree() -> None:
    """Right losses leave no room for a forward with a mistake; the stale loss leaves that one."""
    refs = references()
    stale, _ = loss(refs, refs.expected.initial_params, 1)

    right = [phrase for phrase, _ in supposed_gradients(refs, 1, refs.expected.steps[1].losses)]
    seen = dict(supposed_gradients(refs, 1, [stale.detach()]))

    assert not [phrase for phrase in right if phrase.startswith(("stale", "parameters"))]
    assert list(seen) == ["stale parameters: forward saw those of the previous step"]


def test_a_norm_of_part_of_the_gradients() -> None:
    """The square, one rank's own gradients, and one parameter alone."""
    refs = references(max_norm=0.1)
    grads = refs.expected.steps[0].grads or {}
    norm = torch.stack([grad.norm() for grad in grads.values() if grad is not None]).norm()
    first, value = next((name, grad) for name, grad in grads.items() if grad is not None)
    history = damaged(implementation_run(refs))

    causes = []
    for wrong in (norm**2, norm * WORLD_SIZE**0.5, value.norm()):
        history.steps[0].grad_norm = wrong.float()
        causes.append(cause(history, refs, Kind.NORM))

    assert [str(text).partition(": ")[0] for text in causes] == [
        "the norm is not a square root",
        "the squared norms of replicated gradients are added over ranks",
        f"the norm of {first!r} alone",
    ]


def test_inputs_of_other_shapes_are_no_explanation() -> None:
    """Where the size of a batch varies with rank and step, an engine cannot have taken the inputs of another."""
    refs = references_of(deep.deep_ragged(), rank=RANK, world_size=WORLD_SIZE)
    sizes = {len(refs.workload.batch(BatchKey(step=1, micro=0, rank=rank, world_size=2)).args[0]) for rank in range(2)}
    right = refs.expected.steps[1].losses[0]

    assert len(sizes) == 2
    of_losses = [phrase for phrase, _ in supposed_losses(refs, 1, 0)]
    of_gradients = [phrase for phrase, _ in supposed_gradients(refs, 1, [right])]
    assert any(phrase.startswith("stale parameters") for phrase in of_losses)
    assert of_gradients
    assert not any("another rank's data" in phrase or "stale inputs" in phrase for phrase in of_losses + of_gradients)


@pytest.mark.parametrize("in_rows", [False, True])
def test_a_call_without_a_gradient(*, in_rows: bool) -> None:
    """Of a unit that is called twice, the gradient of the second call, everywhere or in the rows of one rank."""
    refs = references_of(reuse.called_twice(), Regime(), rank=RANK, world_size=WORLD_SIZE)
    history = damaged(implementation_run(refs))
    grads = history.steps[0].grads or {}
    first = dict(supposed_gradients(refs, 0, refs.expected.steps[0].losses))
    phrase, wrong = next(
        (phrase, grads) for phrase, grads in first.items() if phrase.endswith("only number 2 gave a gradient")
    )
    module = phrase.split("'")[1]
    key = next(name for name in grads if name.startswith(module) and name.endswith("weight"))
    right = grads[key]
    assert right is not None
    half = -(-len(right) // WORLD_SIZE)
    grads[key] = (
        torch.cat([wrong[key][:half], right[half:].double()]).to(right.dtype) if in_rows else wrong[key].to(right.dtype)
    )

    prefix = "in the rows of rank 0, " if in_rows else ""
    assert str(cause(history, refs, Kind.GRADIENT)).startswith(
        f"{prefix}of 2 calls of '{module}' in a forward only number 2"
    )


@pytest.mark.parametrize(
    "regime",
    [
        Regime(),
        Regime(optimizer="sgd-groups"),
        Regime(optimizer_in_backward=True),
        Regime(events=(Event(action=Action.LEARNING_RATE, moment=Moment.STEP, step=0, value=0.5),)),
    ],
    ids=["plain", "in groups", "in backward", "new learning rate"],
)
def test_a_wrong_gradient_that_only_the_step_shows(regime: Regime) -> None:
    """SGD's step tells the gradient, so the causes of gradients are known where none is shown."""
    refs = references_of(grouped(models.nested()), regime, rank=RANK, world_size=WORLD_SIZE)
    key = next(iter(refs.expected.initial_params))
    right, before = refs.expected.steps[0].params[key].double(), refs.expected.initial_params[key].double()
    grad = (refs.expected.steps[0].grads or {})[key]
    own = refs.contributions()[0][0][0][key]
    assert grad is not None
    assert own is not None
    history = damaged(implementation_run(refs))
    # The first step has no momentum, so the update is proportional to the gradient.
    history.steps[0].params[key] = (before + (right - before) * (own.double() / WORLD_SIZE) / grad.double()).float()

    likely = str(cause(history, refs, Kind.PARAMETER))
    assert "rank 1 missing" in causes_in(likely)
    assert ": in the gradient that the step implies, equals rank 0's own gradient" in likely


def test_gradients_that_are_summed() -> None:
    """Where the right gradient is the sum over the ranks, causes and suppositions are the same."""
    refs = references(sums=True)
    history = damaged(implementation_run(refs))
    grads = history.steps[0].grads or {}
    for name in grads:
        own = refs.contributions()[0][0][0][name]
        assert own is not None
        grads[name] = own.float()

    assert "rank 1 missing" in causes_in(cause(history, refs, Kind.GRADIENT))
    for name, grad in (history.steps[0].grads or {}).items():
        right = (refs.expected.steps[0].grads or {})[name]
        assert right is not None
        grads[name] = (right / WORLD_SIZE).to(grad.dtype if grad is not None else None)
    assert causes_in(cause(history, refs, Kind.GRADIENT)) == ("averaged instead of summed",)
    summed, averaged = (
        dict(supposed_gradients(runs, 0, runs.expected.steps[0].losses)) for runs in (refs, references())
    )
    assert summed.keys() == averaged.keys()
    for phrase, supposed in summed.items():
        for name, value in supposed.items():
            assert torch.allclose(value, averaged[phrase][name] * WORLD_SIZE, rtol=1e-5, atol=1e-8), phrase
