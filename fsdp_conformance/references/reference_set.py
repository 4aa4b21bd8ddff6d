"""
The references of a case: trained independently, compared with each other, and only then with an implementation.

    float64      single process, no collectives, all ranks' batches: the expected values
    all-reduce   the full model on every rank and an explicit all-reduce, float32
    torch-ddp    DistributedDataParallel, float32, where it applies (`absent` gives the reason otherwise)

On an exact workload all of them are bitwise equal, and so must be the implementation. Elsewhere the distances of the
float32 references from the float64 one are the noise that `tolerance` derives its bounds from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_conformance.errors import ReferencesDisagree, SuiteError
from fsdp_conformance.history.training import Gradients, Tensors, TrainingHistory
from fsdp_conformance.references.all_reduce import all_reduce_reference
from fsdp_conformance.references.ddp import ddp_absence, ddp_reference
from fsdp_conformance.references.exactness import demands_bitwise
from fsdp_conformance.references.packed_history import Packed, packed, unpacked
from fsdp_conformance.references.segments import Segments
from fsdp_conformance.references.single_process import contributions, single_process_histories, single_process_reference
from fsdp_conformance.references.structures import walk
from fsdp_conformance.references.tolerance import BITWISE, CEILING, Bound, calibrate, floor_of, magnitude
from fsdp_conformance.workload.definition import Regime, Workload
from fsdp_conformance.workload.units import local_names

#: The reference that supplies the expected values.
EXPECTED = "float64"

#: All of them, by their source, and those that do not apply everywhere.
_NAMES = frozenset({EXPECTED, "all-reduce", "torch-ddp"})
_OPTIONAL = frozenset({"torch-ddp"})


class Kind(StrEnum):
    """A kind of values that are compared."""

    INITIAL = "initial"
    LOSS = "loss"
    GRADIENT = "gradient"
    NORM = "norm"
    LOSS_SCALE = "loss scale"
    CLIPPED = "clipped gradient"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    OUTPUT = "output"
    EVAL = "eval"
    READ = "read"
    STATE = "state dict"
    INPUT = "input gradient"


def values(history: TrainingHistory, kind: Kind, step: int) -> dict[str, Any]:
    """
    A history's values of a kind at a step, by name. Losses are named by micro-batch, outputs by path.

    Outputs include leaves of any type and descriptions of containers; other kinds are tensors, or None for no gradient.
    """
    if kind is Kind.INITIAL:
        return {**history.initial_params, **history.initial_buffers}
    if kind is Kind.EVAL:
        return dict(walk(history.eval_outputs))
    if kind is Kind.READ:
        return _numbered(history.reads, "read")
    if kind is Kind.STATE:
        return _numbered(history.states, "taken")
    if kind is Kind.INPUT:
        return {f"gradient {index}": grad for index, grad in enumerate(history.input_grads)}
    record = history.steps[step]
    if kind is Kind.LOSS:
        return {f"micro-batch {micro}": loss for micro, loss in enumerate(record.losses)}
    if kind is Kind.GRADIENT:
        return dict(record.grads or {})
    if kind is Kind.CLIPPED:
        return dict(record.clipped_grads or {})
    if kind is Kind.NORM:
        return {} if record.grad_norm is None else {"total norm": record.grad_norm}
    if kind is Kind.LOSS_SCALE:
        return {} if record.loss_scale is None else {"loss scale": record.loss_scale}
    if kind is Kind.OUTPUT:
        return dict(walk(record.outputs))
    return dict(record.params if kind is Kind.PARAMETER else record.buffers)


def _numbered(events: Sequence[Tensors], verb: str) -> dict[str, Any]:
    """The values of all events, by name, verb and number of the event."""
    return {f"{name}, {verb} {index}": value for index, event in enumerate(events) for name, value in event.items()}


@dataclass(kw_only=True)
class References:
    """The references for one workload and regime, as seen on one rank."""

    workload: Workload
    regime: Regime
    rank: int
    world_size: int
    histories: dict[str, TrainingHistory]
    absent: dict[str, str] = field(default_factory=dict)
    """References that do not apply here, with the reason."""
    exact: bool = False
    """True if comparisons are bitwise."""
    rounds: bool = False
    """True if the model computes in low precision. Then outputs, and what is computed from them, may have any dtype."""
    roundings: Callable[[], Iterable[tuple[str, TrainingHistory]]] = tuple
    """The histories of engines that round elsewhere, each with the likely cause."""
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """The dtype of every parameter and buffer of the newly built model."""
    local: frozenset[str] = frozenset()
    """Parameters that only this rank has."""
    gradient_bases: dict[str, Tensor] = field(default_factory=dict)
    """If gradients are derived from changes of parameters: the values that a change rounds, see `checks.derived`."""
    _bounds: dict[tuple[Kind, int], dict[str, Bound | None]] = field(default_factory=dict, repr=False)
    _scales_so_far: dict[Kind, list[dict[str, float]]] = field(default_factory=dict, repr=False)
    """The scales of tensors, by kind, step and name."""
    _contributions: list[list[list[Gradients]]] | None = field(default=None, repr=False)

    @property
    def expected(self) -> TrainingHistory:
        """The history to compare with."""
        return self.histories[EXPECTED]

    @property
    def samples(self) -> list[TrainingHistory]:
        """The float32 references."""
        return [history for name, history in self.histories.items() if name != EXPECTED]

    def bound(self, kind: Kind, step: int, name: str) -> Bound:
        """How far a value may differ from the expected one. Raises SuiteError if no reference has such a tensor."""
        bound = self._bounds_of(Kind(kind), step).get(name)
        if bound is None:
            raise SuiteError(f"no bound for {kind} {name!r} at step {step}: no reference has such a tensor")
        return bound

    def _bounds_of(self, kind: Kind, step: int) -> dict[str, Bound | None]:
        """The bounds of every tensor of a kind at a step, computed on first use."""
        if (kind, step) not in self._bounds:
            self._bounds[kind, step] = self._calibrated(kind, step)
        return self._bounds[kind, step]

    def agree(self) -> None:
        """
        Raise ReferencesDisagree at the first value on which the references differ too much.

        On an exact workload any difference counts; otherwise names, missing gradients, and distances above the ceiling.
        """
        for step in range(len(self.expected.steps)):
            for kind in (Kind.LOSS, Kind.GRADIENT, Kind.NORM, Kind.LOSS_SCALE, Kind.PARAMETER, Kind.BUFFER):
                for sample in self.samples:
                    problem = self._disagreement(kind, step, sample)
                    if problem is not None:
                        raise ReferencesDisagree(
                            f"{problem} [{self.workload.name}, step {step}, rank {self.rank}, "
                            f"{sample.source} against {self.expected.source}]. They cannot judge an implementation."
                        )

    def contributions(self) -> list[list[list[Gradients]]]:
        """The gradients of each rank's loss alone, by rank, step and micro-batch. Computed on first use."""
        if self._contributions is None:
            self._contributions = contributions(self.workload, self.regime, world_size=self.world_size)
        return self._contributions

    def _disagreement(self, kind: Kind, step: int, sample: TrainingHistory) -> str | None:
        got, expected = values(sample, kind, step), values(self.expected, kind, step)
        nones = [name for name in expected if (got.get(name) is None) != (expected[name] is None)]
        if got.keys() != expected.keys() or nones:
            return f"{kind}s differ in names or in which are None: {sorted(got.keys() ^ expected.keys()) or nones}"
        for name, value in expected.items():
            if value is None:
                continue
            distance = magnitude(got[name].double() - value.double())
            bound = self.bound(kind, step, name)
            if bound.bitwise and distance != 0:
                return f"{kind} {name!r}: expected bitwise equality, got a difference of {distance:.3g}"
            # The noise is that of the farthest reference, so that is the one to name.
            farthest = distance >= 0.999 * bound.noise * bound.scale
            if not bound.bitwise and not bound.vanishing and bound.noise > CEILING and farthest:
                return f"{kind} {name!r}: expected noise of at most {CEILING:g} of its scale, got {bound.noise:.3g}"
        return None

    def _calibrated(self, kind: Kind, step: int) -> dict[str, Bound | None]:
        """Bounds of every tensor of a kind at a step."""
        expected = {
            name: value for name, value in values(self.expected, kind, step).items() if isinstance(value, Tensor)
        }
        if self.exact or kind in (Kind.INITIAL, Kind.LOSS_SCALE):
            return dict.fromkeys(expected, BITWISE)
        samples = [values(sample, kind, step) for sample in self.samples]
        bases, roundings = self._roundings(kind, step)
        scales, floors = self._scales(kind, step), self._floors(kind, step, expected)
        bounds: dict[str, Bound | None] = {}
        # Tensors that the same references have are calibrated together: there are many, and most are small.
        groups: dict[tuple[bool, ...], list[str]] = {}
        for name, value in expected.items():
            if value.is_floating_point():
                groups.setdefault(tuple(_is_like(sample.get(name), value) for sample in samples), []).append(name)
            else:
                bounds[name] = BITWISE
        for has, names in groups.items():
            calibrated = calibrate(
                [expected[name] for name in names],
                [[sample[name] for name in names] for sample, is_there in zip(samples, has, strict=True) if is_there],
                bases=[bases.get(name, torch.zeros_like(expected[name])) for name in names] if bases else None,
                roundings=roundings,
                scales=[scales[name] for name in names],
                model_scale=max(scales.values(), default=0.0),
                floors=[floors[name] for name in names],
            )
            bounds |= zip(names, calibrated, strict=True)
        return bounds

    def _roundings(self, kind: Kind, step: int) -> tuple[dict[str, Tensor], int]:
        """The values whose rounding is part of the noise of a kind, by name, and by how many ulps."""
        if kind is Kind.PARAMETER:
            return self.expected.initial_params, step + 1
        # A change has two rounded parameters in it, and so has the change before, through the momentum: half an ulp
        # each.
        return (self.gradient_bases, 2) if kind is Kind.GRADIENT and self.gradient_bases else ({}, 0)

    def _scales(self, kind: Kind, step: int) -> dict[str, float]:
        """
        The scale of every tensor: its largest magnitude up to this step; for losses, the largest of the whole run.

        One loss, or the gradient of a one-element tensor, may be near zero by chance while its noise is not.
        """
        if kind is Kind.LOSS:
            largest = max(magnitude(loss) for record in self.expected.steps for loss in record.losses)
            return dict.fromkeys(values(self.expected, kind, step), largest)
        so_far = self._scales_so_far.setdefault(kind, [])
        bases = self.expected.initial_params if kind is Kind.PARAMETER else {}
        for earlier in range(len(so_far), step + 1):
            scales = dict(so_far[-1]) if so_far else {}
            changes = {
                name: value
                for name, value in values(self.expected, kind, earlier).items()
                if isinstance(value, Tensor) and value.is_floating_point()
            }
            segments = Segments.of([*changes.values()])
            change_E = segments.join([*changes.values()])
            if bases:
                change_E -= segments.join([bases.get(name, torch.zeros_like(value)) for name, value in changes.items()])
            for name, size in zip(changes, segments.largest(change_E), strict=True):
                scales[name] = max(scales.get(name, 0.0), size)
            so_far.append(scales)
        return so_far[step]

    def _floors(self, kind: Kind, step: int, names: Iterable[str]) -> dict[str, float]:
        """The smallest relative bound of each tensor. A parameter's is at least that of each gradient behind it."""
        floors = dict.fromkeys(names, self._floor())
        if kind is Kind.GRADIENT:
            # What float32 does before is in the noise; a reduction in it would be hidden by its floor.
            doubles = [name for name in floors if self.dtypes.get(name) is torch.float64]
            floors |= dict.fromkeys(doubles, self._floor(torch.float64))
        elif kind is Kind.PARAMETER:
            gradient_kind = Kind.CLIPPED if values(self.expected, Kind.CLIPPED, step) else Kind.GRADIENT
            for earlier in range(step + 1):
                for name, bound in self._bounds_of(gradient_kind, earlier).items():
                    if (
                        bound is not None
                        and name in floors
                        and not (bound.bitwise or bound.vanishing or bound.inconclusive)
                    ):
                        floors[name] = max(floors[name], bound.relative)
        return floors

    def _floor(self, dtype: torch.dtype = torch.float32) -> float:
        dims = [dim for param in self.expected.initial_params.values() for dim in param.shape]
        return floor_of(max(dims, default=1) * self.world_size * self.regime.micro_batches, dtype)

    def measurements(self, kind: Kind) -> dict[str, Any]:
        """Figures for the report: the references, and the largest noise and widest bound of a calibrated comparison."""
        figures: dict[str, Any] = {
            "comparison": "bitwise" if self.exact else "calibrated",
            "references": sorted(self.histories),
        }
        if self.absent:
            figures["absent"] = dict(self.absent)
        if self.exact:
            return figures
        bounds = [bound for bound in self._known(kind) if not bound.bitwise]
        judged = [bound for bound in bounds if not bound.vanishing]
        if judged:
            figures["noise"] = max(bound.noise for bound in judged)
            figures["widest bound"] = max(bound.relative for bound in judged)
        figures["vanishing tensors"] = len(bounds) - len(judged)
        figures["indeterminate elements"] = sum(bound.indeterminate for bound in judged)
        return figures

    def _known(self, kind: Kind) -> Iterator[Bound]:
        for (bounds_kind, _), bounds in self._bounds.items():
            if bounds_kind is kind:
                yield from (bound for bound in bounds.values() if bound is not None)


def train_references(
    workload: Workload, regime: Regime, *, rank: int, world_size: int, device: torch.device | str = "cpu"
) -> References:
    """
    Train every reference that exists for the workload and the regime. Collective over the default process group.

    Call `agree()` before you compare an implementation with them.
    """
    absent: dict[str, str] = {}
    histories = {
        EXPECTED: _expected(workload, regime, rank=rank, world_size=world_size, device=device),
        "all-reduce": all_reduce_reference(workload, regime, rank=rank, world_size=world_size, device=device),
    }
    reason = ddp_absence(workload, regime)
    if reason is None:
        histories["torch-ddp"] = ddp_reference(workload, regime, rank=rank, world_size=world_size, device=device)
    else:
        absent["torch-ddp"] = reason
    return from_histories(workload, regime, rank=rank, world_size=world_size, histories=histories, absent=absent)


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    """The dtypes of parameters and buffers by name. A tied parameter has all of its names, as in a state dict."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    return {name: tensor.dtype for name, tensor in tensors}


def from_histories(
    workload: Workload,
    regime: Regime,
    *,
    rank: int,
    world_size: int,
    histories: dict[str, Any],
    absent: dict[str, str],
) -> References:
    """
    The references made from histories that were trained now or earlier.

    Raises SuiteError if a history is missing, or is that of another reference, rank or run.
    """
    foreign_names = [
        name
        for name, history in histories.items()
        if not isinstance(history, TrainingHistory)
        or (history.source, history.rank, history.world_size, len(history.steps))
        != (name, rank, world_size, regime.steps)
    ]
    if foreign_names or histories.keys() ^ absent.keys() != _NAMES or not absent.keys() <= _OPTIONAL:
        raise SuiteError(
            f"references must be {', '.join(sorted(_NAMES))} of {regime.steps} steps on rank {rank} of {world_size}, "
            f"got {sorted(histories)}, absent {sorted(absent)}, of another run {foreign_names} [{workload.name}]"
        )
    model = workload.build(rank)
    return References(
        workload=workload,
        regime=regime,
        rank=rank,
        world_size=world_size,
        histories=histories,
        absent=absent,
        exact=demands_bitwise(workload, regime, world_size),
        dtypes=dtypes_of(model),
        local=local_names(workload, dict(model.named_parameters())),
    )


def _expected(
    workload: Workload, regime: Regime, *, rank: int, world_size: int, device: torch.device | str
) -> TrainingHistory:
    """
    The single-process run, made by rank 0 for all ranks, which would otherwise repeat the same work.

    The run itself uses no process group; only its results are distributed.
    """
    if world_size == 1:
        return single_process_reference(workload, regime, rank=rank, world_size=world_size, device=device)
    histories = None
    if rank == 0:
        trained = single_process_histories(workload, regime, world_size=world_size, device=device)
        histories = [packed(history) for history in trained]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, histories)
    history = unpacked(mine[0]) if isinstance(mine[0], Packed) else mine[0]
    if not isinstance(history, TrainingHistory):
        raise SuiteError(f"history from rank 0: expected one, got {history!r} [{workload.name}, rank {rank}]")
    return history


def _is_like(sample: Any, expected: Tensor) -> bool:
    """True if a reference has such a tensor."""
    return isinstance(sample, Tensor) and sample.shape == expected.shape
