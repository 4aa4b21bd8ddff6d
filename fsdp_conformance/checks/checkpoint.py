"""
Oracles for state dicts and checkpoints: names, values, storage, and whether a resumed training continues the first.

    same_state_dict         a full state dict against that of the unwrapped model
    same_optimizer_state    a full optimizer state dict, by names, with its groups
    same_continuation       a resumed training against the uninterrupted one
    shares_storage          a sharded state dict against the storage that the rank holds
    silent                  no collective was issued
    Footprint, unchanged    what reading a model must leave as it was: hooks, attributes, bytes

None of them calls an engine: they read what a case passes to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.diagnosis.headline import LOADED
from fsdp_conformance.diagnosis.optimizer_steps import Moment, is_alike, moment_of_save
from fsdp_conformance.diagnosis.saved_state import MODEL, SavedState, merged_groups
from fsdp_conformance.history.collective import CollectiveRecord
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.history.transfer import carry
from fsdp_conformance.outcome.records import Finding
from fsdp_conformance.workload.definition import Workload

_PHASE = "checkpoint"

#: Parts of names that wrappers add. `module` is not here: users call their own submodules that.
WRAPPER_PARTS = frozenset(
    {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_forward_module", "_fpw_module", "_flat_param"}
)

#: How far a rounded element may be off, in units of the last place of the largest element of its tensor, per step. The
#: kernels of Adam round each element at most twice more or less in a vector than in a scalar loop (fused or separate
#: multiply and add), and where a shard begins decides which loop an element is in.
ULPS_PER_STEP = 4

#: Returns the likely cause of a difference, given the actual and the expected tensor.
_Explained = Callable[[Tensor, Tensor], str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """How a training was resumed, so that its differences can be explained."""

    workload: Workload
    optimizer: str
    built: Workload | None = None
    """The workload of the training that loads; None if it is `workload`."""


def same_state_dict(
    state: Mapping[str, Any],
    expected: Mapping[str, Any],
    *,
    requirement: str,
    rank: int,
    moment: str = "",
    step: int | None = None,
    ulps: float = 0.0,
    known: Moment | None = None,
) -> CheckResult:
    """
    The state dict has exactly these names, and whole tensors of these dtypes, shapes and values, in any order.

    `moment` says in findings when it was taken; `ulps` allows rounding, see `ULPS_PER_STEP`. `known` is the training at
    that moment, from which the likely cause of a difference is found.
    """
    tally = Tally("state dict", requirement, rank=rank)
    where: dict[str, Any] = {"phase": _PHASE, "step": step}
    what = f"state dict {moment}".strip()
    _compare_names(tally, state, expected, f"names in the {what}", where)
    for name in expected:
        if name in state:
            cause = _cause_of_value(known, name, MODEL)
            _compare_value(tally, state[name], expected[name], what, ulps, where | {"fqn": name}, cause)
    return tally.result()


def same_optimizer_state(
    state: Mapping[str, Any],
    expected: Mapping[str, Any],
    *,
    requirement: str,
    rank: int,
    moment: str = "",
    step: int | None = None,
    ulps: float = 0.0,
    known: Moment | None = None,
) -> CheckResult:
    """
    The optimizer's state dict has the same parameters, values and groups, under original names.

    The order of groups counts. The order of names within a group does not: engines may choose it.
    """
    tally = Tally("optimizer state dict", requirement, rank=rank)
    where: dict[str, Any] = {"phase": _PHASE, "step": step}
    when = f" {moment}" if moment else ""
    state_of_parameters, expected_state = state.get("state", {}), expected["state"]
    _compare_names(tally, state_of_parameters, expected_state, f"parameters with optimizer state{when}", where)
    for name in expected_state:
        if name not in state_of_parameters:
            continue
        here = where | {"fqn": name}
        _compare_names(tally, state_of_parameters[name], expected_state[name], f"optimizer state{when}", here)
        for key in expected_state[name]:
            if key in state_of_parameters[name]:
                what = f"{key} in the optimizer state{when}"
                cause = _cause_of_value(known, name, key)
                _compare_value(
                    tally, state_of_parameters[name][key], expected_state[name][key], what, ulps, here, cause
                )
    groups, expected_groups = state.get("param_groups", []), expected["param_groups"]
    same_number = len(groups) == len(expected_groups)
    likely = None if same_number else merged_groups(groups, expected_groups)
    tally.compare(
        same_number, "number of groups", expected=len(expected_groups), got=len(groups), likely=likely, **where
    )
    for index, (group, expected_group) in enumerate(zip(groups, expected_groups, strict=False)):
        what = f"group {index} of the optimizer{when}"
        _compare_names(tally, dict.fromkeys(group["params"]), dict.fromkeys(expected_group["params"]), what, where)
        _compare_names(tally, group, expected_group, f"settings of {what}", where)
        for key in sorted((expected_group.keys() & group.keys()) - {"params"}):
            same = _plain(group[key]) == _plain(expected_group[key])
            likely = None if same or known is None else SavedState(known).settings(index, group, key)
            tally.compare(
                same,
                f"{key} of {what}",
                expected=_plain(expected_group[key]),
                got=_plain(group[key]),
                likely=likely,
                **where,
            )
    return tally.result()


def same_continuation(
    run: TrainingHistory,
    uninterrupted: TrainingHistory,
    *,
    requirement: str,
    rank: int,
    resumption: Resumption | None = None,
) -> CheckResult:
    """
    Losses and parameters of a resumed training equal those of the same steps of another one, bit for bit.

    If they do not, the values right after the load are compared as well: what is wrong there explains the rest.
    """
    tally = Tally("continuation", requirement, rank=rank)
    by_step = {record.step: record for record in uninterrupted.steps}
    for record in run.steps:
        other = by_step.get(record.step)
        if other is None:
            continue
        for index, (loss, expected) in enumerate(zip(record.losses, other.losses, strict=True)):
            here: dict[str, Any] = {"step": record.step, "phase": "forward", "bound": "bitwise"}
            _compare_value(tally, loss, expected, "loss", 0.0, here | {"fqn": f"loss of micro-batch {index}"})
        for name, value in other.params.items():
            here = {"step": record.step, "phase": "step", "fqn": name, "bound": "bitwise"}
            _compare_value(tally, record.params.get(name), value, "parameter", 0.0, here)
    result = tally.result()
    if result.findings and run.steps:
        moment = None
        if resumption is not None and any(record.step == run.steps[0].step - 1 for record in uninterrupted.steps):
            workload, optimizer = resumption.workload, resumption.optimizer
            built = resumption.built or workload
            moment = moment_of_save(uninterrupted, workload, optimizer, run.steps[0].step, built=built)
        load_findings = _loaded(run, uninterrupted, requirement, moment)
        result.findings = (
            load_findings + result.findings
            if load_findings
            else _explained(result.findings, run, uninterrupted, moment)
        )
    return result


def _loaded(
    run: TrainingHistory, uninterrupted: TrainingHistory, requirement: str, known: Moment | None
) -> list[Finding]:
    """The differences right after the load, in parameters that are shown there."""
    before = run.steps[0].step - 1
    right = next((record.params for record in uninterrupted.steps if record.step == before), {})
    tally = Tally(LOADED, requirement, rank=run.rank)
    for name in (name for name in right if name in run.initial_params):
        here: dict[str, Any] = {"phase": _PHASE, "fqn": name, "bound": "bitwise"}
        cause = _cause_of_value(known, name, MODEL)
        _compare_value(tally, run.initial_params[name], right[name], "parameter after the load", 0.0, here, cause)
    return tally.findings


def _explained(
    findings: Sequence[Finding], run: TrainingHistory, uninterrupted: TrainingHistory, known: Moment | None
) -> list[Finding]:
    """The findings; in the first step that differs, those of parameters say what was wrong with the optimizer."""
    step = findings[0].step
    if known is None or step is None or len(known.states) < step + 2:
        return list(findings)
    right, moment = known.states[step + 1].model, replace(known, index=step)
    resumed, whole = (
        next(record.params for record in each.steps if record.step == step) for each in (run, uninterrupted)
    )
    # Saving may have harmed the training that went on, and not the one that was resumed.
    is_resumed_right = all(is_alike(value, right[name]) for name, value in resumed.items() if name in right)
    wrong, where = (whole, "; it is the uninterrupted training that goes wrong") if is_resumed_right else (resumed, "")
    saved = SavedState(moment, wrong)

    def cause(finding: Finding) -> str | None:
        name = finding.fqn or ""
        if finding.step != step or name not in wrong or name not in right:
            return finding.likely
        likely = saved.parameter(name, wrong[name], right[name])
        return likely + where if likely else None

    return [replace(finding, likely=cause(finding)) for finding in findings]


def _cause_of_value(known: Moment | None, name: str, key: str) -> _Explained | None:
    return None if known is None else partial(SavedState(known).value, name, key)


def same_parameters(
    params: Mapping[str, Tensor],
    expected: Mapping[str, Any],
    *,
    requirement: str,
    rank: int,
    step: int | None = None,
    phase: str = "step",
    ulps: float = 0.0,
    known: Moment | None = None,
) -> CheckResult:
    """
    Full parameters equal the values of a state dict under the same names, which may have more.

    `known` is the training at the moment of a load, or, with a `step`, before that step.
    """
    tally = Tally(LOADED if step is None else "parameters after a load", requirement, rank=rank)
    saved = None if known is None else SavedState(known, params)
    for name, value in params.items():
        here: dict[str, Any] = {"step": step, "phase": phase, "fqn": name}
        cause: _Explained | None = None
        if saved is not None:
            cause = partial(saved.value, name, MODEL) if step is None else partial(saved.parameter, name)
        _compare_value(tally, value, expected.get(name), "parameter", ulps, here, cause)
    return tally.result()


def storages(live: Iterable[Tensor]) -> set[int]:
    """The addresses of the storage of tensors that a rank holds; without empty storage, which has none."""
    return {tensor.untyped_storage().data_ptr() for tensor in live if tensor.untyped_storage().nbytes()}


def storages_of_parts(value: Any) -> list[int]:
    """The address of the storage of each tensor that this rank holds of a value in a sharded state dict."""
    return [part.untyped_storage().data_ptr() for part in local_parts(value) if part.numel()]


def shares_storage(
    state: Mapping[str, Sequence[int]], held: Set[int], names: Iterable[str], *, requirement: str, rank: int
) -> CheckResult:
    """
    The values under these names lie in storage of the tensors that the rank holds: they are not copies.

    `state` has the addresses of the storage of their parts (`storages_of_parts`), `held` those of what the rank holds
    (`storages`).
    """
    tally = Tally("shared storage", requirement, rank=rank)
    for name in names:
        parts = state[name]
        copied = [part for part in parts if part not in held]
        tally.compare(
            not copied,
            "storage of the sharded state dict",
            expected="that of the model",
            got=f"{len(copied)} of {len(parts)} parts in other storage",
            fqn=name,
            phase=_PHASE,
        )
    return tally.result()


def unmoved(
    before: Mapping[str, Sequence[int]], after: Mapping[str, Sequence[int]], *, requirement: str, rank: int
) -> CheckResult:
    """Addresses of storage, by name, are what they were before a load in place."""
    tally = Tally("storage after a load", requirement, rank=rank)
    for name, addresses in before.items():
        tally.compare(
            list(after.get(name, ())) == list(addresses),
            "storage after a load in place",
            expected="the same",
            got="another one",
            fqn=name,
            phase=_PHASE,
        )
    return tally.result()


def silent(records: Sequence[CollectiveRecord], *, requirement: str, rank: int, during: str) -> CheckResult:
    """No collective was issued."""
    tally = Tally("silence", requirement, rank=rank)
    lines = [record.line() for record in records]
    tally.compare(
        not lines, f"collectives during {during}", expected="none", got="; ".join(lines[:4]) or "none", phase=_PHASE
    )
    return tally.result()


def addresses(state: Mapping[str, Any]) -> dict[str, list[int]]:
    """The addresses of the tensors that this rank holds of each value; without empty ones, which have none."""
    return {
        name: [part.data_ptr() for part in local_parts(value) if part.numel()]
        for name, value in state.items()
        if isinstance(value, Tensor) or hasattr(value, "local_shards")
    }


def local_parts(value: Any) -> list[Tensor]:
    """The tensors that this rank holds of a value in a sharded state dict."""
    if isinstance(value, DTensor):
        return local_parts(value.to_local())
    if hasattr(value, "local_shards"):
        # ShardedTensor has a method, torch's wrapper of several shards too.
        return [part for shard in value.local_shards() for part in local_parts(getattr(shard, "tensor", shard))]
    return [value.detach()] if isinstance(value, Tensor) else []


@carry
@dataclass(frozen=True, slots=True)
class Footprint:
    """The values that reading a model must leave as they were."""

    hooks: dict[str, int]
    """Number of hooks by registry, over all modules and parameters."""
    bytes: dict[str, int]
    """Bytes that the rank holds, by kind."""


def footprint(module: nn.Module | None, held: Mapping[str, Sequence[Tensor]]) -> Footprint:
    """The hooks of a module, if the implementation shows one, and the bytes that the rank holds."""
    counts: dict[str, int] = {}
    if module is not None:
        for each in module.modules():
            for registry, hooks in vars(each).items():
                if registry.endswith("hooks") and isinstance(hooks, dict):
                    counts[registry] = counts.get(registry, 0) + len(hooks)
        for parameter in module.parameters():
            for registry in (f"_{kind}_hooks" for kind in ("backward", "post_accumulate_grad")):
                hooks = getattr(parameter, registry, None) or {}
                counts[f"{registry} of parameters"] = counts.get(f"{registry} of parameters", 0) + len(hooks)
    return Footprint(counts, {kind: _storage_bytes(tensors) for kind, tensors in held.items()})


def unchanged(before: Footprint, after: Footprint, *, requirement: str, rank: int, reading: str) -> CheckResult:
    """Reading has left no hook behind, has removed none, and holds no memory."""
    tally = Tally("footprint", requirement, rank=rank)
    for what, old, new in (("hooks", before.hooks, after.hooks), ("bytes held", before.bytes, after.bytes)):
        for key in sorted(old.keys() | new.keys()):
            was, is_now = old.get(key, 0), new.get(key, 0)
            tally.compare(was == is_now, f"{what} ({key}) after {reading}", expected=was, got=is_now, phase=_PHASE)
    return tally.result()


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _compare_names(
    tally: Tally, got: Mapping[Any, Any], expected: Mapping[Any, Any], what: str, where: Mapping[str, Any]
) -> None:
    missing, extra = sorted(map(str, expected.keys() - got.keys())), sorted(map(str, got.keys() - expected.keys()))
    details = []
    if missing:
        details.append(f"missing {', '.join(missing[:4])}")
    if extra:
        wrapped = [name for name in extra if WRAPPER_PARTS.intersection(name.split("."))]
        details.append(
            f"{'with a wrapper in the name' if wrapped else 'unexpected'} {', '.join((wrapped or extra)[:4])}"
        )
    tally.expect(
        not details,
        f"{what}: expected {len(expected)} of the unwrapped model, got {len(got)}; {'; '.join(details)}",
        elements=max(1, len(expected)),
        **where,
    )


def _compare_value(
    tally: Tally,
    got: Any,
    expected: Any,
    what: str,
    ulps: float,
    where: Mapping[str, Any],
    cause: _Explained | None = None,
) -> None:
    if not isinstance(expected, Tensor):
        tally.compare(_plain(got) == _plain(expected), what, expected=_plain(expected), got=_plain(got), **where)
        return
    kind = _kind_problem(got, expected)
    if kind is not None:
        is_shape = isinstance(got, Tensor) and not isinstance(got, DTensor) and got.shape != expected.shape
        likely = cause(got.detach().cpu(), expected.detach().cpu()) if is_shape and cause is not None else None
        tally.compare(False, what, expected=kind[0], got=kind[1], likely=likely, **where)
        return
    here, right = got.detach().cpu(), expected.detach().cpu()
    if ulps and right.is_floating_point():
        eps = torch.finfo(right.dtype).eps * float(right.double().abs().max() if right.numel() else 0.0)
        # Written so that NaN is wrong.
        wrong = ~((here.double() - right.double()).abs() <= ulps * eps)
    else:
        wrong = here != right
    count = int(wrong.sum())
    first = wrong.flatten().nonzero()[:1].flatten().tolist()
    details = f"{count} of {right.numel()} elements differ, the first is {first[0]}" if first else ""
    tally.compare(
        not count,
        what,
        expected=right.flatten()[first[0]].item() if first else "equal values",
        got=here.flatten()[first[0]].item() if first else "equal values",
        details=details,
        elements=max(1, right.numel()),
        likely=cause(here, right) if count and cause is not None else None,
        **where,
    )


def _kind_problem(got: Any, expected: Tensor) -> tuple[str, str] | None:
    """Expected and found kind of value, shape or dtype, where they differ."""
    if not isinstance(got, Tensor) or isinstance(got, DTensor):
        return "a whole tensor", type(got).__name__
    if got.shape != expected.shape:
        return f"shape {tuple(expected.shape)}", f"{tuple(got.shape)}"
    if got.dtype != expected.dtype:
        return str(expected.dtype), str(got.dtype)
    return None


def _plain(value: Any) -> Any:
    """A setting in a form that can be compared and shown: tensors of one element as numbers, tuples as lists."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
