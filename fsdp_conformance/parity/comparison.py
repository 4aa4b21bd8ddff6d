"""
All steps of two recordings, in the order in which a step computes.

The first difference that rounding does not explain is the finding; what follows from it is not reported again. Whose it
is follows from what was still equal: data, random numbers, initial values and settings are the script's, and what
differs although all of them are equal is the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsdp_conformance.parity import gradients
from fsdp_conformance.parity.alone import IN_NO_UNIT, in_no_unit, of_originals, rounded_input, suspicions
from fsdp_conformance.parity.bounds import Bounds
from fsdp_conformance.parity.changed import (
    NO_GRADIENT,
    OR_THE_REDUCTION,
    after_replicas,
    clear_alike,
    cleared_while_gathered,
    drawn_in_backward,
    gathers_values,
    is_updated,
    kept_from_clearing,
    lost_or_kept,
    may_be_gathered,
    whose_backward,
    whose_writing,
    why_buffers,
    why_changed,
    why_stale,
    without_consequences,
)
from fsdp_conformance.parity.collectives import other_collectives
from fsdp_conformance.parity.finding import Finding, Whose
from fsdp_conformance.parity.forwards import different_counts, first_error, skips_on_some_ranks, unequal_forwards
from fsdp_conformance.parity.models import compare_models, divided_tie, ties_of
from fsdp_conformance.parity.noise import FACTOR, TENSORS, Noise, noise_of
from fsdp_conformance.parity.norms import norm_differences
from fsdp_conformance.parity.precision import rounded_gradients
from fsdp_conformance.parity.result import Comparison
from fsdp_conformance.parity.runs import Run, Tensors, TrainingStep, multiplied, whole_tensors
from fsdp_conformance.parity.same_names import prefixes_of, without_prefix
from fsdp_conformance.parity.samples import compare_samples, input_hashes
from fsdp_conformance.parity.settings import setting_difference, why_setting
from fsdp_conformance.parity.units import exactly_units, unit_names
from fsdp_conformance.parity.updates import Updates
from fsdp_conformance.parity.vacuous import not_recorded, nothing_to_compare
from fsdp_conformance.parity.words import (
    exactly_those_of,
    instead,
    missing_and_extra,
    size_of_difference,
    why_context,
    why_drawn,
    why_loss,
    why_random,
    why_replicas,
)
from fsdp_conformance.recordings.events import USED, Backward, Forward
from fsdp_conformance.recordings.files import Recording
from fsdp_conformance.recordings.fingerprint import Fingerprint, Whole, relative

#: The beginning of the cause where losses differ too little for a finding of their own.
_OTHER_LOSSES = "the losses differ a little as well"
#: Losses of equal outputs may differ by this many eps, if they are added up in another order.
_ANOTHER_TERM = 16
#: A loss may differ by this much, relative to itself, from one that is computed of equal outputs in another order.
_LOSS = 1e-3
#: ... or by this many times the eps of the least precise dtype of the reference, if that is less.
_SUMMED = 256.0
#: By how much a loss may differ more than the outputs that it is computed of.
_AMPLIFIED = 16.0


def compare(recording: Recording, reference: Recording, nudged: Recording | None = None) -> Comparison:
    """Compare a recording with a reference, and the reference with one whose parameters were nudged."""
    mine, theirs = prefixes_of(recording, reference)
    run, other = Run(without_prefix(recording, mine)), Run(without_prefix(reference, theirs))
    noise = noise_of(other, Run(without_prefix(nudged, theirs)) if nudged is not None else None, run)
    return replace(_Comparing(run, other, noise).result(), is_renamed=bool(mine or theirs))


class _Comparing:
    def __init__(self, run: Run, reference: Run, noise: Noise) -> None:
        self.run = run
        self.reference = reference
        self.noise = noise
        steps = min(len(run.steps), len(reference.steps))
        self.comparison = Comparison(run=run, reference=reference, noise=noise, steps=steps)
        # Samples went to other ranks or passes: what one rank computes cannot be compared.
        self.are_aligned = True
        self._random = ""
        self.bounds = Bounds(self.comparison, ties_of(run, reference))
        #: Each rank of the reference computed the samples of all of them.
        self._is_whole_batch = reference.sharding == "whole batch"
        #: The reference is the run's script, without its sharding.
        self._is_same_script = reference.sharding != "kept"

    def result(self) -> Comparison:
        """The comparison."""
        comparison = self.comparison
        comparison.findings += nothing_to_compare(self.run, self.reference)
        if comparison.findings:
            comparison.is_vacuous = True
            return comparison
        for number in range(comparison.steps):
            finding = next(self._differences(number), None)
            if finding is not None:
                comparison.findings.append(finding)
                break
        else:
            comparison.findings += self._ends()
        comparison.findings += self._other_settings()
        self._compare_collectives()
        # A finding says more of the same line, but not which batches are uneven.
        known = {(finding.whose, finding.line) for finding in comparison.findings if not self._is_whole_batch}
        comparison.suspicions = [item for item in suspicions(self.run) if (item.whose, item.line) not in known]
        if comparison.findings:
            first = after_replicas(comparison.findings[0], comparison.suspicions)
            comparison.findings[0] = first
            comparison.suspicions = without_consequences(first, comparison.suspicions)
        return comparison

    def _compare_collectives(self) -> None:
        findings = self.comparison.findings
        last = next((each.step for each in findings if each.step is not None), self.comparison.steps)
        self.comparison.collectives = seen = other_collectives(self.run, self.reference, last)
        findings[:1] = [replace(each, evidence=(*each.evidence, *seen)) for each in findings[:1]]

    def _ends(self) -> Iterator[Finding]:
        """Nothing differs as far as both have come; but one has come further."""
        lost = next(not_recorded(self.run, self.reference), None)
        if lost is not None:
            yield lost
            return
        errors, others = self.run.errors, self.reference.errors
        if bool(errors) is not bool(others):
            rank, error = first_error(errors or others)
            failed = f"rank {rank} · {error.splitlines()[0]}"
            counts = f"the run has {len(self.run.steps)} steps, the reference {len(self.reference.steps)}"
            cause = unequal_forwards(self.run) if errors else None
            if cause is not None:
                yield replace(cause, evidence=(*cause.evidence, f"the run ended early: {failed}", counts))
                return
            yield Finding(
                title="The run ended early" if errors else "The reference ended early",
                whose=Whose.RUN,
                step=self.comparison.steps,
                first=failed,
                evidence=(counts,),
                is_exact=True,
            )
        elif len(set(self.run.counts)) > 1:
            yield different_counts(self.run)
        elif len(self.run.steps) != len(self.reference.steps):
            yield Finding(
                title="The runs have different numbers of steps",
                whose=Whose.SCRIPT,
                step=self.comparison.steps,
                first=f"{len(self.run.steps)} instead of {len(self.reference.steps)}",
                likely=self._why_more_steps(),
                is_exact=True,
            )

    def _why_more_steps(self) -> str:
        if any(mark.kind == "load" for mark in (*self.run.marks, *self.reference.marks)):
            return "one of them has gone on from a checkpoint: give each its own directory"
        return "an epoch ends elsewhere, or a step was skipped, as by a gradient scaler"

    # --- one step ----------------------------------------------------------------------------------------------------

    def _differences(self, number: int) -> Iterator[Finding]:
        """The differences of a step, in the order in which a step computes. Only the first one is asked for."""
        step, expected = self.run.steps[number], self.reference.steps[number]
        if skips_on_some_ranks(self.run, step):
            yield different_counts(self.run)
        finding, are_same = compare_samples(self.run, self.reference, number)
        if finding is not None:
            if self.are_aligned:
                # What earlier micro-batches have computed may be why later ones differ, as where data is drawn.
                yield from self._outputs(step, expected)
            yield finding
        self.are_aligned = self.are_aligned and are_same
        self._compare_random(step, expected)
        yield from self._other_draws(expected)
        yield from self._incomplete(step)
        yield from compare_models(self.run, self.reference, number)
        yield from self._written(step, expected)
        if self.are_aligned:
            yield from self._outputs(step, expected)
            if not self._is_whole_batch:
                yield from self._after_evaluation(self._losses(step, expected), step, expected)
        yield from self._after_evaluation(self._gradients(step, expected), step, expected)
        yield from norm_differences(self.bounds, self.run, self.reference, number, self._whose())
        yield from self._settings(number)
        yield from Updates(self.run, self.reference, self.bounds, self._whose()).differences(step, expected)

    def _incomplete(self, step: TrainingStep) -> Iterator[Finding]:
        for kind, tensors in (("gradient", step.unclipped), ("parameter", step.parameters)):
            for name, why in tensors.incomplete.items():
                yield Finding(
                    title=f"A {kind} cannot be put together from the ranks' parts",
                    whose=Whose.RUN,
                    step=step.number,
                    first=f"{kind} · '{name}' · {why}",
                    likely="only some ranks have it, or the engine hides which elements each rank holds",
                    line=step.backward_line,
                )

    def _compare_random(self, step: TrainingStep, expected: TrainingStep) -> None:
        """The state of a generator matters if a forward draws from it, and once something differs."""
        if self._random or self.run.world_size != self.reference.world_size:
            return
        for rank in range(self.run.world_size):
            for mine, theirs in zip(step.training_forwards(rank), expected.training_forwards(rank), strict=False):
                names = [
                    name
                    for name in dict.fromkeys((*mine.draws, *theirs.draws))
                    if mine.random.get(name) != theirs.random.get(name)
                ]
                if names:
                    self._random = f"{' and '.join(names)} on rank {rank}"
                    return
                if mine.draws != theirs.draws:
                    # The states of later forwards follow from what this one draws.
                    break

    def _other_draws(self, expected: TrainingStep) -> Iterator[Finding]:
        """A batch of another size takes other random numbers."""
        drawing = next((forward for forward in expected.training_forwards(0) if forward.draws), None)
        if self._is_whole_batch and drawing is not None:
            yield Finding(
                title="The model draws random numbers, and one process draws different ones for the whole batch",
                whose=Whose.RUN,
                step=expected.number,
                first=f"micro-batch {drawing.number} · {' and '.join(drawing.draws)}",
                likely="dropout: set it to 0 for this comparison, or compare without --reference one-process",
                line=drawing.line,
                is_exact=True,
            )

    def _written(self, step: TrainingStep, expected: TrainingStep) -> Iterator[Finding]:
        """Parameters that were written to between two steps, and then differ."""
        if not (step.is_written or expected.is_written):
            return
        beyond = self.bounds.exceeded("begin", step.number, step.begin.values, expected.begin.values)
        if beyond:
            whose, likely, line = whose_writing(self.run, self.reference, step.number, [item[0] for item in beyond])
            yield self.bounds.finding(
                "Parameters have changed differently since the step before",
                step,
                "begin",
                beyond,
                total=len(expected.begin.values),
                whose=whose,
                likely=likely,
                evidence=("after the optimizer's step they agreed",),
                line=line or next((forward.line for forward in step.training_forwards(0)), ""),
            )

    def _outputs(self, step: TrainingStep, expected: TrainingStep) -> Iterator[Finding]:
        """Compare what each rank computes from equal inputs."""
        for rank in range(min(self.run.world_size, self.reference.world_size)):
            for mine, theirs in zip(step.training_forwards(rank), expected.training_forwards(rank), strict=False):
                if input_hashes(mine) != input_hashes(theirs):
                    break
                for kind, select in (("unit", _units_of), ("output", _outputs_of)):
                    yield from self._forward((step, expected), rank, mine, theirs, kind, select)

    def _forward(
        self,
        steps: tuple[TrainingStep, TrainingStep],
        rank: int,
        mine: Forward,
        theirs: Forward,
        kind: str,
        select: Any,
    ) -> Iterator[Finding]:
        step, expected = steps
        values, others = whole_tensors([select(mine)]).values, whole_tensors([select(theirs)]).values

        def of(each: TrainingStep) -> Any:
            forwards = each.training_forwards(rank)
            position = step.training_forwards(rank).index(mine)
            return whole_tensors([select(forwards[position])] if position < len(forwards) else [])

        for name, value, wanted, bound in self.bounds.exceeded(
            f"{kind} {rank} {mine.number}", step.number, values, others, of
        ):
            output = f"output of {name!r}" if name else "output of the model"
            where = f"rank {rank} · micro-batch {mine.number} · {output}"
            by_script = (divided_tie(self.run.tied, mine) if step.number else "") or self._why_rounded()
            by_script = by_script or why_context(mine, theirs)
            if not by_script and not self._random:
                by_script = why_stale(self.run, self.reference, step.number)
            if not (by_script or self._random or self._is_same_script):
                by_script = why_buffers(step, expected, rank)
            whose = Whose.SCRIPT if by_script else self._whose_forward(step, mine, theirs)
            if mine.draws != theirs.draws and not (by_script or self._random):
                by_script, whose = why_drawn(mine, theirs), Whose.EITHER if self._is_same_script else Whose.SCRIPT
            # A buffer that the forward updates is another one afterwards, and need not be what it has computed with.
            begin = [] if whose is Whose.SCRIPT else expected.begin.values
            names = [name for name in begin if not is_updated(name, expected)]
            aliases = (other for name in names for other in self.run.tied.get(name, ()))
            yield Finding(
                title="The forward computes something else",
                whose=whose,
                step=step.number,
                first=f"{where} · {size_of_difference(value, wanted, bound)}",
                likely=by_script or self._why_forward(step, value, wanted),
                line=mine.line,
                evidence=self._still_equal(),
                kind=USED,
                tensors=(*names, *aliases),
                number=mine.number,
            )

    def _why_rounded(self) -> str:
        """An input that is rounded in the run alone."""
        mine, theirs = map(rounded_input, (self.run, self.reference))
        if mine is None or theirs is not None or self._is_same_script:
            return ""
        return f"mixed precision rounds an input: {mine[0]} (`cast_forward_inputs`)"

    def _whose_forward(self, step: TrainingStep, mine: Forward, theirs: Forward) -> Whose:
        if self._is_whole_batch:
            return Whose.SCRIPT
        same_file = mine.line.partition(":")[0] == theirs.line.partition(":")[0]
        # Another script may have another model, and an evaluation may have swapped weights and left units gathered.
        is_another_script = self.reference.sharding == "kept" and not (step.number and same_file)
        is_gathered = step.number > 0 and may_be_gathered(self.run, step.number)
        return Whose.EITHER if (is_another_script or is_gathered) and not self._random else self._whose()

    def _why_forward(self, step: TrainingStep, value: Whole, wanted: Whole) -> str:
        if self._random:
            return why_random(self._random)
        if value.dtype != wanted.dtype:
            return f"it computes in {value.dtype} instead of {wanted.dtype}"
        if self._is_whole_batch:
            return (
                "the result for a sample depends on the other samples of its batch, as with batch normalisation: each "
                "rank has normalised its own. Use SyncBatchNorm, or expect this difference"
            )
        if not value.square:
            return "the output is zero: parameters were released, or not gathered, before they were used"
        if step.number and not self.comparison.findings:
            return "the parameters agree before it: it computes with copies that were not updated, or in another way"
        return ""

    def _losses(self, step: TrainingStep, expected: TrainingStep) -> Iterator[Finding]:
        averaged = [step.backwards, expected.backwards]
        if not self._is_same_script:
            # Where sums of gradients are divided by something else, losses have another factor.
            factors = [each.loss_factor(step.number) for each in (self.run, self.reference)]
            averaged = list(map(multiplied, averaged, factors))
        for rank in range(min(self.run.world_size, self.reference.world_size)):
            for mine, theirs in zip(*(backwards[rank] for backwards in averaged), strict=False):
                if mine.loss is None or theirs.loss is None:
                    continue
                difference = abs(mine.loss - theirs.loss)
                if difference <= self._loss_tolerance(step, expected, rank, theirs) * abs(theirs.loss):
                    continue
                yield Finding(
                    title="The loss differs although the outputs agree",
                    whose=Whose.SCRIPT,
                    step=step.number,
                    first=f"rank {rank} · micro-batch {mine.number} · {instead(mine.loss, theirs.loss)}",
                    likely=of_originals(step) or why_loss(*averaged),
                    line=mine.line,
                )

    def _after_evaluation(
        self, findings: Iterator[Finding], step: TrainingStep, expected: TrainingStep
    ) -> Iterator[Finding]:
        """Findings whose reason may be a forward without gradients, as of a teacher, that is part of the loss."""
        for finding in findings:
            # What the script has done to gradients is known better.
            is_known = self._is_whole_batch or self._random or (finding.kind and finding.whose is Whose.SCRIPT)
            line = "" if is_known else self._other_evaluation(step, expected)
            if not line:
                yield finding
                continue
            stale = why_stale(self.run, self.reference, step.number)
            yield replace(
                finding,
                whose=Whose.SCRIPT if stale else Whose.EITHER,
                likely=f"the forward without gradients at {line} computes something else" + (stale and f": {stale}"),
            )

    def _other_evaluation(self, step: TrainingStep, expected: TrainingStep) -> str:
        """The line of the first forward without gradients whose outputs differ for equal inputs; empty if none do."""
        for rank in range(min(self.run.world_size, self.reference.world_size)):
            pairs = zip(step.evaluations(rank), expected.evaluations(rank), strict=False)
            for place, (mine, theirs) in enumerate(pairs):
                if mine.module != theirs.module or input_hashes(mine) != input_hashes(theirs) or mine.draws:
                    break

                def of(each: TrainingStep, rank: int = rank, place: int = place) -> Tensors:
                    return whole_tensors([forward.outputs for forward in each.evaluations(rank)[place : place + 1]])

                if self.bounds.exceeded(
                    f"evaluation {rank} {place}", step.number, of(step).values, of(expected).values, of
                ):
                    return mine.line
        return ""

    def _loss_tolerance(self, step: TrainingStep, expected: TrainingStep, rank: int, theirs: Backward) -> float:
        """The part of a loss that rounding explains, relative to it: little where the outputs are equal."""
        pairs = zip(step.training_forwards(rank), expected.training_forwards(rank), strict=False)
        distance = max((_distance_of_outputs(mine, other) for mine, other in pairs), default=0.0)
        noise = self.noise.of_loss(step.number, rank, theirs)
        return max(min(_LOSS, _SUMMED * self.noise.eps), _AMPLIFIED * distance, FACTOR * noise)

    def _gradients(self, step: TrainingStep, expected: TrainingStep) -> Iterator[Finding]:
        values, others = step.unclipped.farthest(expected.unclipped), expected.unclipped.values
        yield from self._missing_gradients(step, expected, values)
        beyond = self.bounds.exceeded("gradient", step.number, values, others)
        if not beyond:
            yield from rounded_gradients(self.run, self.reference, step.number, self._whose())
            return
        if self._agree_after_backward(step, expected, [item[0] for item in beyond]):
            yield self.bounds.finding(
                "The gradients agree after the backward, but not after the script has changed them",
                step,
                "gradient",
                beyond,
                total=len(others),
                whose=Whose.SCRIPT,
                likely=why_changed(step, expected),
                line=next((each.changed for each in step.steps if each.changed), _after_backward(step)),
            )
            return
        previous = self.reference.steps[step.number - 1] if step.number else None
        made_of = gradients.Gradients(
            values={name: value for name, value, *_ in beyond},
            expected={name: wanted for name, _, wanted, _ in beyond},
            all=others,
            previous=gradients.previous_gradients(previous),
            contributions=gradients.contributions_of(expected),
            ranks=self.run.world_size,
            passes=step.passes,
            eps=self.noise.eps,
            divisor=self.run.divisor(step.number),
        )
        likely = gradients.likely(made_of) or self._why_gradients(step, expected)
        names = [item[0] for item in beyond]
        whose, likely, line = self._blame_gradients(step, expected, names, likely)
        evidence = exactly_those_of(self._units(step, names, others))
        yield self.bounds.finding(
            "The gradients differ",
            step,
            "gradient",
            beyond,
            total=len(others),
            whose=whose,
            likely=likely,
            evidence=(*evidence, *self._still_equal(with_outputs=True, but_losses=likely.startswith(_OTHER_LOSSES))),
            line=line,
        )

    def _missing_gradients(
        self, step: TrainingStep, expected: TrainingStep, values: Mapping[str, Whole]
    ) -> Iterator[Finding]:
        """Parameters of which only one of the runs has a gradient; `values` are the run's."""
        others = expected.unclipped.values
        missing = [name for name in others if name not in values and others[name].square]
        extra = [name for name in values if name not in others and values[name].square]
        if (missing or extra) and not step.unclipped.incomplete:
            name, verb = (missing[0], "is missing") if missing else (extra[0], "should not be there")
            whose, likely, line = self._blame_gradients(step, expected, [name])
            if missing and whose is Whose.EITHER:
                likely = f"{OR_THE_REDUCTION}{NO_GRADIENT}"
            units = self._units(step, missing, others)
            if units and whose is Whose.ENGINE and not likely:
                likely = f"the engine did not reduce the gradients of {units}"
            yield Finding(
                title="Different parameters have gradients",
                whose=whose,
                step=step.number,
                first=f"the gradient of '{name}' {verb}",
                likely=likely,
                evidence=(*missing_and_extra(len(missing), len(extra), len(others)), *exactly_those_of(units)),
                line=line,
            )

    @staticmethod
    def _units(step: TrainingStep, names: Sequence[str], others: Mapping[str, Whole]) -> str:
        """In words, the units whose gradients these are, if they are exactly those of some units."""
        return exactly_units(names, [name for name, value in others.items() if value.square], step.training_forwards(0))

    def _blame_gradients(
        self, step: TrainingStep, expected: TrainingStep, names: Sequence[str], likely: str = ""
    ) -> tuple[Whose, str, str]:
        """
        Whose gradients are that differ in these tensors, the likely cause, and the line.

        `likely` is what their numbers show; what the script has done is known better.
        """
        by_script = lost_or_kept(self.run, self.reference, step.number) or kept_from_clearing(self.run, step.number)
        if by_script is not None:
            return Whose.SCRIPT, *by_script
        if stale := of_originals(step, names):
            return Whose.SCRIPT, stale, step.backward_line
        if likely.startswith(gradients.NOT_CLEARED):
            gathered = cleared_while_gathered(self.run, step.number)
            if gathered is not None:
                return Whose.SCRIPT, *gathered
        whose = self._whose_gradients(step, expected)
        if whose is Whose.ENGINE and not likely:
            if names[0] in step.unclipped.differing:
                if in_no_unit(step, list(step.unclipped.differing)):
                    return Whose.SCRIPT, IN_NO_UNIT, step.backward_line
                likely = why_replicas(step.unclipped.differing[names[0]])
            else:
                same = self._is_same_script
                whose, likely = (
                    drawn_in_backward(self.run, self.reference, step.number, same_script=same)
                    or gathers_values(self.run, self.reference, step.number)
                    or self._other_term(step, expected)
                    or whose_backward(step, expected, same_script=same)
                )
        if whose is Whose.ENGINE and not likely and all(name in expected.unclipped.values for name in names):
            # One that is zero in both, as of a factor of LoRA in the first step, shows nothing.
            order = [name for name, value in expected.unclipped.values.items() if value.square or name in names]
            units = unit_names(step.training_forwards(0))
            likely = gradients.place_of(names, order, self.bounds.tied, units)
        return whose, likely, step.backward_line

    def _other_term(self, step: TrainingStep, expected: TrainingStep) -> tuple[Whose, str] | None:
        """The cause of gradients that differ, if losses of equal outputs differ a little as well, or None."""
        if self._is_same_script or self._is_whole_batch:
            return None
        for rank in range(min(self.run.world_size, self.reference.world_size)):
            forwards = zip(step.training_forwards(rank), expected.training_forwards(rank), strict=False)
            if any(_distance_of_outputs(mine, theirs) for mine, theirs in forwards):
                return None
            for mine, theirs in zip(step.backwards[rank], expected.backwards[rank], strict=False):
                if mine.loss is None or theirs.loss is None or not theirs.loss:
                    continue
                ratio = mine.loss / theirs.loss
                if abs(ratio - 1) > _ANOTHER_TERM * self.noise.eps:
                    return Whose.SCRIPT, (
                        f"{_OTHER_LOSSES}, by {abs(ratio - 1):.1e} on rank {rank}, although the "
                        "outputs are equal: the scripts compute a term of the loss in different ways, as of the "
                        "samples of one rank, where the reference takes those of all ranks"
                    )
        return None

    def _agree_after_backward(self, step: TrainingStep, expected: TrainingStep, names: Sequence[str]) -> bool:
        """True if these gradients were the expected ones when the last backward had reduced them."""
        values, others = step.reduced.values, expected.reduced.values
        if not any(each.reduced for each in (*step.steps, *expected.steps)):
            return False
        bounds = {name: self.noise.bound("reduced", TENSORS["reduced"], step.number, name) for name in names}
        return all(
            name in values
            and name in others
            and values[name].dtype == others[name].dtype
            and relative(values[name], others[name]) <= (bounds[name] or 0.0)
            for name in names
        )

    def _whose_gradients(self, step: TrainingStep, expected: TrainingStep) -> Whose:
        if self._is_whole_batch:
            # The engine is compared with replicas that train as the script says, without the option.
            return Whose.SCRIPT
        if step.passes != expected.passes or not self.are_aligned:
            return Whose.SCRIPT
        if not self._is_same_script and _reduced(step) != _reduced(expected):
            return Whose.SCRIPT
        clears_alike = self._is_same_script and clear_alike(self.run, self.reference, step.number)
        if step.steps[0].kept != expected.steps[0].kept and not clears_alike:
            return Whose.SCRIPT
        return self._whose()

    def _why_gradients(self, step: TrainingStep, expected: TrainingStep) -> str:
        if self._random:
            return why_random(self._random)
        if step.passes != expected.passes:
            return f"the step has {step.passes} backwards instead of {expected.passes}"
        if self._is_whole_batch:
            return (
                "the model's loss is a mean over the tokens or samples of each rank, and the ranks have other numbers "
                "of them: a mean over all of them weighs each token equally"
            )
        return ""

    # --- settings ----------------------------------------------------------------------------------------------------

    def _settings(self, number: int) -> Iterator[Finding]:
        difference = setting_difference(self.run, self.reference, number)
        if difference is not None:
            rank, parameter, what = difference
            name = self.bounds.named(parameter)
            of_one = "rank 0 has the same setting as the reference: what the script sets depends on the rank"
            yield Finding(
                title="The optimizer has different settings",
                is_exact=True,
                whose=Whose.SCRIPT,
                step=number,
                first=f"rank {rank} · {name} · {what}" if rank else f"{name} · {what}",
                likely=of_one if rank else why_setting(self.run, self.reference, number, parameter, what),
                line=self.run.steps[number].steps[rank].line,
            )

    def _other_settings(self) -> Iterator[Finding]:
        """A setting that differs in the step whose finding is something else, which came before it."""
        findings = self.comparison.findings
        number = findings[0].step if findings else None
        # Where one run has left out a step, as after a spike of the loss, this one is not the other's.
        if (
            number is not None
            and number < self.comparison.steps
            and self.run.steps[number].passes == self.reference.steps[number].passes
        ):
            yield from (finding for finding in self._settings(number) if finding not in findings)

    def _whose(self) -> Whose:
        return Whose.SCRIPT if self._random else Whose.ENGINE

    def _still_equal(self, *, with_outputs: bool = False, but_losses: bool = False) -> tuple[str, ...]:
        if self._random:
            return ()
        words = ["inputs", "random numbers", "initial values"]
        if with_outputs and self.are_aligned:
            words += ["outputs"] if self._is_whole_batch or but_losses else ["outputs", "losses"]
        return (f"{', '.join(words[:-1])} and {words[-1]} agree",)


def _units_of(forward: Forward) -> Mapping[str, Fingerprint]:
    return forward.units


def _outputs_of(forward: Forward) -> Mapping[str, Fingerprint]:
    return forward.outputs


def _after_backward(step: TrainingStep) -> str:
    """The first line after the last backward that is known."""
    return step.clips[0][0].line if step.clips[0] else step.steps[0].line


def _reduced(step: TrainingStep) -> list[bool]:
    return [backward.is_reduced for backward in step.backwards[0]]


def _distance_of_outputs(forward: Forward, expected: Forward) -> float:
    values = whole_tensors([forward.outputs]).values
    others = whole_tensors([expected.outputs]).values
    return max((relative(values[name], other) for name, other in others.items() if name in values), default=0.0)
