"""The training loop of a script: with what this case does, and nothing for other cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import indent

from fsdp_conformance.workload.definition import Regime
from fsdp_conformance.workload.events import PER_MICRO_BATCH, Action, Event, Moment

#: Forwards besides those of a training, and whether they are in training mode with a graph.
FORWARDS = {Action.EVALUATE: False, Action.INFER: False, Action.FORWARD: True}


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """The parts that the loops of a script share; texts are source."""

    regimes: Sequence[Regime]
    """Equal but for their events, unless there is one."""
    inputs: str
    """The arguments of a forward, from a `batch`."""
    loss: Callable[[str], str]
    """The loss for a forward."""
    optimizer: str
    """The optimizer of a model; "" if the model has no parameters."""

    @property
    def micro_batches(self) -> int:
        """In a step."""
        return self.regimes[0].micro_batches

    @property
    def batch(self) -> str:
        """The call that makes a batch."""
        return f"make_batch(step, {'micro, ' if self.micro_batches > 1 else ''}rank)"

    @property
    def deferred(self) -> list[int]:
        """The micro-batches whose gradients are reduced later."""
        return [micro for micro in range(self.micro_batches) if not self.regimes[0].is_reduced(micro)]

    @property
    def variants(self) -> str:
        """The parameter that tells several trainings apart."""
        return "variant" if len(self.regimes) > 1 else ""

    def of_model(self, *, clipping: str, wrapped: bool) -> str:
        """
        Training of a model on the batches of some ranks, with averaged gradients.

        If also the `wrapped` model trains in this way, its engine averages, as it defers a reduction.
        """
        given = _listed("model", "ranks", "sharded" if wrapped else "", self.variants)
        step = "\n".join([
            *self._events(Moment.STEP, "ranks", _to_model),
            *self._micro_batches("\n".join(["for rank in ranks:", indent("\n".join(self._of_rank(wrapped)), _TAB)])),
            *self._events(Moment.OPTIMIZER, "ranks", _to_model),
            *_averaging(wrapped),
            *([clipping] if clipping else []),
            *(["optimizer.step()", "optimizer.zero_grad()"] if self.optimizer else []),
            *self._events(Moment.END, "ranks", _to_model),
            "for name, parameter in full_parameters(model).items():",
            '    seen[f"step {step}, parameter {name}"] = parameter',
        ])  # fmt: skip
        lines = [
            *([f"optimizer = {self.optimizer}"] if self.optimizer else []),
            "seen = {}",
            f"for step in range({self.regimes[0].steps}):",
            indent(step, _TAB),
            "return seen",
        ]
        forwards = [*self._forward_only("forward_only", "model", "model.train"), ""] if self._has_forwards() else []
        return "\n".join([*forwards, f"def train({given}):", indent("\n".join(lines), _TAB)])

    def of_engine(self, adapter: str, *, clipping: str) -> str:
        """Training through an adapter, on this rank's batches."""
        body = "\n".join([
            *self._events(Moment.FORWARD, "[rank]", _to_engine),
            f"with engine.microbatch({self._is_last()}, reduced={self._reduced()}):",
            f"    batch = {self.batch}",
            f"    loss = {self.loss(f'engine.forward({self.inputs})')}",
            f"    seen[{self._loss_name()}] = loss.detach().clone()",
            *(indent(each, _TAB) for each in self._events(Moment.LOSS, "[rank]", _to_engine)),
            "    engine.backward(loss)",
            *self._events(Moment.BACKWARD, "[rank]", _to_engine),
        ])  # fmt: skip
        step = "\n".join([
            *self._events(Moment.STEP, "[rank]", _to_engine),
            *self._micro_batches(body),
            *self._events(Moment.OPTIMIZER, "[rank]", _to_engine),
            f"engine.step({clipping})",
            *self._events(Moment.END, "[rank]", _to_engine),
            "for name, parameter in engine.full_params().items():",
            '    seen[f"step {step}, parameter {name}"] = parameter',
        ])  # fmt: skip
        lines = [
            f"engine = {adapter}()",
            "engine.setup(make_model, make_optimizer, PLAN)",
            "engine.full_params()  # read before training, too, as in the case",
            "engine.train(True)",
            "rank, seen = dist.get_rank(), {}",
            f"for step in range({self.regimes[0].steps}):",
            indent(step, _TAB),
            "engine.close()",
            "return seen",
        ]
        forwards = self._forward_only("engine_forward_only", "engine.forward", "engine.train")
        return "\n".join([
            *([*forwards, ""] if self._has_forwards() else []),
            f"def train_engine({self.variants}):",
            indent("\n".join(lines), _TAB),
        ])  # fmt: skip

    def call(self, *given: str) -> str:
        """A call of `train` or `train_engine`, for each variant if there are several."""
        name, *arguments = given
        called = f"{name}({_listed(*arguments, 'variant=variant' if self.variants else '')})"
        return f"[{called} for variant in range({len(self.regimes)})]" if self.variants else called

    def _of_rank(self, wrapped: bool) -> Iterator[str]:
        """Forward and backward of one rank's micro-batch."""
        passes = [
            f"loss = {self.loss(f'model({self.inputs})')}",
            *self._events(Moment.LOSS, "[rank]", _to_model),
            "loss.backward()",
        ]
        yield from self._events(Moment.FORWARD, "[rank]", _to_model)
        yield f"batch = {self.batch}"
        if wrapped and self.deferred:
            later = f"sharded and micro in {self.deferred}"
            yield f"with no_sync(model) if {later} else contextlib.nullcontext():"
            yield indent("\n".join(passes), _TAB)
        else:
            yield from passes
        yield "if rank == dist.get_rank():"
        yield f"    seen[{self._loss_name()}] = loss.detach().clone()"
        yield from self._events(Moment.BACKWARD, "[rank]", _to_model)

    def _micro_batches(self, body: str) -> Iterator[str]:
        if self.micro_batches == 1:
            yield body
        else:
            yield f"for micro in range({self.micro_batches}):"
            yield indent(body, _TAB)

    def _is_last(self) -> str:
        return f"micro == {self.micro_batches - 1}" if self.micro_batches > 1 else "True"

    def _reduced(self) -> str:
        return f"micro not in {self.deferred}" if self.deferred else "True"

    def _loss_name(self) -> str:
        return 'f"step {step}, loss of micro-batch {micro}"' if self.micro_batches > 1 else 'f"step {step}, loss"'

    def _has_forwards(self) -> bool:
        return any(event.action in FORWARDS for _, _, event in self._all_events())

    def _forward_only(self, name: str, forward: str, train: str) -> Iterator[str]:
        where = _listed("step", "micro" if self.micro_batches > 1 else "")
        yield f"def {name}({forward.partition('.')[0]}, ranks, {where}, *, training):"
        yield f"    {train}(training)"
        yield "    with torch.set_grad_enabled(training):"
        yield "        for rank in ranks:"
        yield f"            batch = {self.batch}"
        yield f"            {forward}({self.inputs})"
        yield f"    {train}(True)" if train.startswith("engine") else f"    {train}()"

    def _all_events(self) -> Iterator[tuple[int, int, Event]]:
        """All events with their variant and step."""
        for variant, regime in enumerate(self.regimes):
            for step in range(regime.steps):
                for event in regime.in_step(step):
                    yield variant, step, event

    def _events(self, moment: Moment, ranks: str, statement: Callable[[Event, str, str], str]) -> Iterator[str]:
        """The statements of a moment besides training, each after its condition."""
        is_inside = moment in PER_MICRO_BATCH
        micro = "micro" if is_inside else "0"
        where = _listed("step", micro if self.micro_batches > 1 else "")
        happening: dict[str, list[tuple[int, ...]]] = {}
        for variant, step, event in self._all_events():
            if event.moment is moment:
                happening.setdefault(statement(event, ranks, where), []).append((variant, step, event.micro))
        sizes = (len(self.regimes), self.regimes[0].steps, self.micro_batches if is_inside else 1)
        for text, places in happening.items():
            condition = _condition(places, sizes)
            yield f"if {condition}:\n{indent(text, _TAB)}" if condition else text


_TAB = " " * 4


def _averaging(wrapped: bool) -> Iterator[str]:
    lines = [
        "for parameter in model.parameters():",
        "    if parameter.grad is not None:",
        "        parameter.grad /= len(ranks)",
    ]
    if wrapped:
        yield "if not sharded:"
    yield indent("\n".join(lines), _TAB if wrapped else "")


def _to_model(event: Event, ranks: str, where: str) -> str:
    names = list(event.names)
    if event.action is Action.FREEZE:
        return f"for name, parameter in model.named_parameters():\n    parameter.requires_grad_(name not in {names!r})"
    if event.action is Action.DROP:
        return f"for name in {names!r}:\n    model.get_parameter(name).grad = None"
    return f"forward_only(model, {ranks}, {where}, training={FORWARDS[event.action]})"


def _to_engine(event: Event, ranks: str, where: str) -> str:
    if event.action in FORWARDS:
        return f"engine_forward_only(engine, {ranks}, {where}, training={FORWARDS[event.action]})"
    method = "set_requires_grad" if event.action is Action.FREEZE else "drop_grads"
    return f"engine.{method}({list(event.names)!r})"


def _condition(places: Sequence[tuple[int, ...]], sizes: tuple[int, ...]) -> str:
    """When an event happens, in terms of those of variant, step and micro-batch of which there are several."""
    names = ("variant", "step", "micro")
    several = [number for number, size in enumerate(sizes) if size > 1]
    chosen = sorted({tuple(place[number] for number in several) for place in places})
    total = 1
    for number in several:
        total *= sizes[number]
    if len(chosen) == total:
        return ""
    if len(several) == 1:
        values = [each for (each,) in chosen]
        name = names[several[0]]
        return f"{name} == {values[0]}" if len(values) == 1 else f"{name} in {values}"
    listed = f"({', '.join(names[number] for number in several)})"
    return f"{listed} == {chosen[0]}" if len(chosen) == 1 else f"{listed} in {chosen}"


def _listed(*parts: str) -> str:
    return ", ".join(filter(None, parts))
