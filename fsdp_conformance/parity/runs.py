"""A recording by steps. Whole tensors are added up from the ranks' parts."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, TypeVar

from fsdp_conformance.recordings.events import Backward, Clip, Forward, Initial, Mark, Step
from fsdp_conformance.recordings.files import Recording
from fsdp_conformance.recordings.fingerprint import Fingerprint, Whole, relative, whole

E = TypeVar("E")

#: Each rank's values by name.
OfRanks = Sequence[Mapping[str, Fingerprint]]


@dataclass(frozen=True, slots=True)
class Tensors:
    """Tensors of one moment by name, whole."""

    values: Mapping[str, Whole]
    differing: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Ranks whose replica differs from an earlier rank's."""
    others: Mapping[str, Whole] = field(default_factory=dict)
    """Those tensors made of the last replicas; `values` has them made of the first."""
    incomplete: Mapping[str, str] = field(default_factory=dict)
    """Why a tensor could not be added up."""

    def farthest(self, expected: Tensors) -> Mapping[str, Whole]:
        """
        The values, made of those replicas that are further from the expected ones.

        Not where ranks are expected to differ.
        """
        farther = {
            name: other
            for name, other in self.others.items()
            if name in expected.values
            and name not in expected.differing
            and relative(other, expected.values[name]) > relative(self.values[name], expected.values[name])
        }
        return {**self.values, **farther}


def whole_tensors(of_ranks: OfRanks) -> Tensors:
    """The whole tensors."""
    parts: dict[str, list[tuple[int, Fingerprint]]] = defaultdict(list)
    for rank, values in enumerate(of_ranks):
        for name, value in values.items():
            parts[name].append((rank, value))
    wholes: dict[str, Whole] = {}
    others: dict[str, Whole] = {}
    differing: dict[str, tuple[int, ...]] = {}
    incomplete: dict[str, str] = {}
    for name, items in parts.items():
        try:
            wholes[name], indices = whole([value for _, value in items])
        except ValueError as error:
            incomplete[name] = str(error)
            continue
        if indices:
            differing[name] = tuple(items[index][0] for index in indices)
            others[name], _ = whole([value for _, value in reversed(items)])
    return Tensors(values=wholes, differing=differing, others=others, incomplete=incomplete)


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """A step on all ranks: from the first forward to the end of the optimizer's step."""

    number: int
    steps: tuple[Step, ...]
    forwards: tuple[tuple[Forward, ...], ...]
    """Of each rank."""
    backwards: tuple[tuple[Backward, ...], ...]
    clips: tuple[tuple[Clip, ...], ...]
    initial: tuple[Initial, ...]
    """The values of modules that had not been trained before this step; of all ranks."""
    previous: TrainingStep | None = None

    @functools.cached_property
    def gradients(self) -> Tensors:
        """As the optimizer got them."""
        return whole_tensors([step.gradients for step in self.steps])

    def settings_of(self, rank: int) -> dict[str, dict[str, Any]]:
        """The settings of a rank's optimizer, by the names of its parameters."""
        return {name: group.settings for group in self.steps[rank].groups for name in group.parameters}

    @functools.cached_property
    def unclipped(self) -> Tensors:
        """Before the first clipping, or as the optimizer got them if nothing was clipped."""
        return whole_tensors([self.unclipped_of(rank) for rank in range(len(self.steps))])

    def reduced_of(self, rank: int) -> Mapping[str, Fingerprint]:
        """A rank's gradients after the last backward that reduces them."""
        return self.steps[rank].reduced or self.unclipped_of(rank)

    def unclipped_of(self, rank: int) -> Mapping[str, Fingerprint]:
        """A rank's gradients before the first clipping, or as the optimizer got them if nothing was clipped."""
        return self.clips[rank][0].gradients if all(self.clips) else self.steps[rank].gradients

    @functools.cached_property
    def reduced(self) -> Tensors:
        """After the last backward that reduces them."""
        return whole_tensors([self.reduced_of(rank) for rank in range(len(self.steps))])

    @functools.cached_property
    def parameters(self) -> Tensors:
        """After the step."""
        return whole_tensors([step.parameters for step in self.steps])

    @property
    def is_written(self) -> bool:
        """True if parameters were written to on some rank since the step before."""
        return self.previous is not None and any(step.begin for step in self.steps)

    @functools.cached_property
    def begin(self) -> Tensors:
        """The parameters before the step's first forward that trains."""
        if self.previous is None:
            return self.initial_values
        before = self.previous.steps
        return whole_tensors([step.begin or last.parameters for step, last in zip(self.steps, before, strict=True)])

    @functools.cached_property
    def state(self) -> Tensors:
        """The optimizer's, after the step."""
        return whole_tensors([step.state for step in self.steps])

    @functools.cached_property
    def loaded(self) -> Tensors:
        """The optimizer's state that was loaded before the step; nothing if none was."""
        return whole_tensors([step.loaded for step in self.steps])

    @functools.cached_property
    def buffers(self) -> Tensors:
        """After the step."""
        return whole_tensors([step.buffers for step in self.steps])

    @functools.cached_property
    def initial_values(self) -> Tensors:
        """Parameters and buffers before their first training."""
        merged: list[dict[str, Fingerprint]] = [{} for _ in self.steps]
        count = max(1, len(self.initial) // max(1, len(self.steps)))
        for index, event in enumerate(self.initial):
            merged[min(index // count, len(merged) - 1)].update(event.values)
        return whole_tensors(merged)

    @property
    def passes(self) -> int:
        """How many backwards the step has."""
        return len(self.backwards[0])

    def training_forwards(self, rank: int) -> list[Forward]:
        """Without evaluation."""
        return [forward for forward in self.forwards[rank] if forward.with_gradients]

    def evaluations(self, rank: int) -> list[Forward]:
        """The forwards without gradients, as of an evaluation or a teacher."""
        return [forward for forward in self.forwards[rank] if not forward.with_gradients]

    @property
    def backward_line(self) -> str:
        """The line of the first backward."""
        return self.backwards[0][0].line if self.backwards[0] else ""


class Run:
    """A recording, ready to be compared."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.name = recording.name
        self.world_size = recording.world_size
        begin = recording.ranks[0].begin
        self.sharding = begin.sharding
        self.steps = _steps(recording)

    @functools.cached_property
    def counts(self) -> list[int]:
        """How often each rank has stepped."""
        return [sum(isinstance(event, Step) for event in rank.events) for rank in self.recording.ranks]

    @property
    def errors(self) -> dict[int, str]:
        """The exceptions that ended ranks, by rank; also of ranks that were killed."""
        return {rank.begin.rank: rank.error for rank in self.recording.ranks if rank.error}

    @property
    def recorder_errors(self) -> dict[int, str]:
        """The errors of the recorder that ended recordings of ranks."""
        ends = {rank.begin.rank: rank.end.recorder for rank in self.recording.ranks if rank.end is not None}
        return {rank: error for rank, error in ends.items() if error}

    @functools.cached_property
    def initial(self) -> list[Initial]:
        """The modules of rank 0 before it trained them."""
        return [event for event in self.recording.ranks[0].events if isinstance(event, Initial)]

    @functools.cached_property
    def events(self) -> list[list[object]]:
        """The events of rank 0, by step."""
        return events_by_step(self.recording.ranks[0].events)

    @property
    def tied(self) -> dict[str, tuple[str, ...]]:
        """The other names of parameters that have several."""
        return {name: others for event in self.initial for name, others in event.tied.items()}

    @property
    def replaced(self) -> int | None:
        """How many calls of sharding functions were replaced; None if that was not counted."""
        return max((event.replaced for event in self.initial if event.replaced is not None), default=None)

    @property
    def marks(self) -> list[Mark]:
        """The marks of rank 0."""
        return [event for event in self.recording.ranks[0].events if isinstance(event, Mark)]

    def loss_factor(self, number: int) -> float:
        """By what losses are multiplied so that their gradients are averaged over the ranks."""
        divisor = self.divisor(number)
        return 1.0 if divisor is None else self.world_size / divisor

    def divisor(self, number: int) -> float | None:
        """The divisor of sums of gradients that the script has set until this step; None if it has set none."""
        set_ = [mark.detail for mark in self.marks if mark.kind == "divide factor" and mark.step <= number]
        return float(set_[-1]) if set_ else None

    @property
    def script(self) -> str:
        """The name of the script."""
        words = self.recording.ranks[0].begin.command
        return next((PurePath(word).name for word in words[1:] if word.endswith(".py")), " ".join(words[:3]))


def _steps(recording: Recording) -> list[TrainingStep]:
    """The steps that all ranks have finished."""
    of_ranks = [events_by_step(rank.events) for rank in recording.ranks]
    count = min(len(steps) for steps in of_ranks)

    def select(kind: type[E], number: int) -> tuple[tuple[E, ...], ...]:
        return tuple(tuple(event for event in steps[number] if isinstance(event, kind)) for steps in of_ranks)

    made: list[TrainingStep] = []
    for number in range(count):
        step = TrainingStep(
            number=number,
            steps=tuple(events[0] for events in select(Step, number)),
            forwards=select(Forward, number),
            backwards=_without_scale(select(Backward, number)),
            clips=select(Clip, number),
            initial=tuple(event for events in select(Initial, number) for event in events),
            previous=made[-1] if made else None,
        )
        made.append(step)
    return made


def _without_scale(backwards: tuple[tuple[Backward, ...], ...]) -> tuple[tuple[Backward, ...], ...]:
    """The backwards of all ranks without the scale of a gradient scaler, unless it covers only some: a mistake."""
    scales = {backward.scale for of_rank in backwards for backward in of_rank}
    return multiplied(backwards, 1 / scales.pop()) if len(scales) == 1 else backwards


def multiplied(backwards: tuple[tuple[Backward, ...], ...], factor: float) -> tuple[tuple[Backward, ...], ...]:
    """The backwards of all ranks with losses times a factor."""
    return tuple(
        tuple(replace(each, loss=None if each.loss is None else each.loss * factor) for each in of_rank)
        for of_rank in backwards
    )


def norm_together(step: TrainingStep) -> float | None:
    """The norm that the ranks' norms of the first clipping add up to. None if one of them is not finite."""
    clips = [clips[0] for clips in step.clips]
    known = [clip.norm for clip in clips if clip.norm is not None]
    if len(known) < len(clips):
        return None
    kind = clips[0].kind
    return max(known) if kind < 0 else float(sum(norm**kind for norm in known) ** (1 / kind))


def divisions(step: TrainingStep) -> set[str]:
    """How ranks hold parts of matrices: "range" of the elements in a row, as in FSDP1, or "box", as in a DTensor."""
    values = [value for each in step.steps for value in each.gradients.values()]
    parts = [value for value in values if len(value.shape) > 1 and value.elements < math.prod(value.shape)]
    return {"box" if "," in part.region else "range" for part in parts}


def events_by_step(events: Iterable[object]) -> list[list[object]]:
    """Lists of events, each of which ends with a step. What comes after the last one is left out."""
    steps: list[list[object]] = []
    current: list[object] = []
    for event in events:
        current.append(event)
        if isinstance(event, Step):
            steps.append(current)
            current = []
    return steps
