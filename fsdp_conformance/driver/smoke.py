"""
Tests an adapter on two ranks, before the suite judges the implementation behind it.

A small model of odd sizes is set up, read, trained for two steps, and read again. All problems are reported at once,
and in terms of the adapter: a missing name, a shard instead of the full tensor, live storage instead of a clone, a step
that changes nothing. Where adapter and engine cannot be told apart (gradients that differ between ranks), the message
states the requirement. Problems of which an engine cannot be the cause are breaches: a run does not start with them.

    smoke          the controller's side: starts ranks and merges their results
    smoke_rank     a rank's side: one dict for each of CHECKS
"""

from __future__ import annotations

import hashlib
import inspect
import re
import traceback
import unittest
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD

from fsdp_conformance.adapters import cuda_names, registry
from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.adapters.sharded import local_part
from fsdp_conformance.adapters.torch_like import compute_device
from fsdp_conformance.adapters.validator import validate
from fsdp_conformance.errors import AdapterError, SuiteError, Unsupported
from fsdp_conformance.harness.context import log
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.harness.testcase import ShardedTrainingTestCase
from fsdp_conformance.outcome.endings import attribute
from fsdp_conformance.outcome.records import RankExit, RankReport
from fsdp_conformance.plan import InitMode, Plan, flags_of_names
from fsdp_conformance.stack import Frame, Owner, owner

#: The checks, in order. A check does not run if an earlier one that it needs has found problems.
CHECKS = {
    "ADAPTER-01": "the class follows the protocol",
    "ADAPTER-02": "setup, module and parameters",
    "ADAPTER-03": "full parameters and buffers, equal on all ranks",
    "ADAPTER-04": "forward, backward and full gradients",
    "ADAPTER-05": "step updates the parameters and drops the gradients",
    "ADAPTER-06": "local tensors are those that this rank stores",
    "ADAPTER-07": "micro-batches before the last one are not reduced",
}
#: The method of SmokeRun that makes each check.
_BODIES = dict(
    zip(CHECKS, ("_protocol", "_setup", "_parameters", "_gradients", "_step", "_local", "_deferred"), strict=True)
)

#: A frame of a stack as faulthandler writes it.
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>\S+)')

#: How many of the frames in which a rank waited are shown, innermost first, beside the adapter's.
_FRAMES_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class SmokeResult:
    """The findings of one check, over all ranks."""

    check: str
    title: str
    problems: tuple[str, ...] = ()
    breaches: tuple[str, ...] = ()
    """The problems that are the adapter's: whatever the engine does, the adapter must not answer like this."""
    not_run: str = ""
    """The reason why the check did not run; empty if it did."""


def smoke(spec: str, *, world_size: int = 2, device: str = "cpu", timeout_s: float = 60.0) -> list[SmokeResult]:
    """
    The results of CHECKS for an adapter, from `world_size` fresh ranks.

    Raises AdapterNotFound or AdapterError if the adapter cannot be loaded. Raises SuiteError if the ranks cannot be
    started.
    """
    description = registry.describe_once(spec)
    case = _SmokeCase("test_adapter")
    case.device_type = device
    case.case_timeout_s = timeout_s
    case.launch_payload = _Order(spec=spec, world_size=world_size, device=device)
    case.preload = description.preload
    case.rank_environment = case.preload_environment = dict(description.environment)
    outcome = unittest.TestResult()
    unittest.TestSuite([case]).run(outcome)
    errors = [text for _, text in [*outcome.errors, *outcome.failures]]
    if case.reports is None or errors:
        raise SuiteError("cannot start the smoke run:\n" + "\n".join(errors))
    return merge(case.reports, case.exits)


def merge(reports: Sequence[RankReport | None], exits: Sequence[RankExit]) -> list[SmokeResult]:
    """
    One result per check; a problem that not all ranks have names its ranks.

    If the ranks failed, that is a problem of the first check that no rank has finished.
    """
    by_rank = {
        report.rank: {result["check"]: result for result in report.measurements.get("smoke", ())}
        for report in reports
        if report is not None
    }
    end = attribute(reports, exits)
    reached, waits = _where_stuck(exits)
    ended = False
    results = []
    for check, title in CHECKS.items():
        results_by_rank = {rank: checks[check] for rank, checks in by_rank.items() if check in checks}
        by_problem = {
            problem: problem if len(ranks) == len(reports) else f"{problem} [rank {', '.join(map(str, ranks))}]"
            for problem, ranks in _by_problem(results_by_rank).items()
        }
        problems = [*by_problem.values()]
        breaches = {problem for result in results_by_rank.values() for problem in result["breaches"]}
        not_run = next((result["not_run"] for result in results_by_rank.values() if result["not_run"]), "")
        done = any(result["done"] for result in results_by_rank.values())
        if ended:
            not_run = "the ranks had ended"
        elif not done and end.first is not None and check >= reached:
            # First, because what other ranks report ("connection closed by peer") is a consequence.
            problems[:0] = [end.headline, *waits]
            ended = True
        results.append(
            SmokeResult(
                check=check,
                title=title,
                problems=tuple(problems),
                breaches=tuple(text for problem, text in by_problem.items() if problem in breaches),
                not_run=not_run,
            )
        )
    return results


def _where_stuck(exits: Sequence[RankExit]) -> tuple[str, list[str]]:
    """
    The check that the ranks without a report had reached ("": unknown), and the frames in which the first one waited.

    Such a rank can no longer say what it has checked, but the stack that was taken of it shows where it was.
    """
    collected: list[tuple[str, list[str]]] = []
    for end in exits:
        if end.reported or not end.stack:
            continue
        frames = [
            Frame(file=each["file"], line=int(each["line"]), function=each["function"])
            for each in _FRAME.finditer(end.stack)
        ]
        ours = [index for index, frame in enumerate(frames) if frame.file == __file__]
        checks = {body: check for check, body in _BODIES.items()}
        names = (frames[index].function for index in reversed(ours))  # outermost first
        check = next((checks[name] for name in names if name in checks), "")
        above = frames[: ours[0]] if ours else []
        # The innermost frame says for what it waited, even if it is torch's; the outermost one is the adapter's.
        inner = [
            frame
            for frame in above[:-1]
            if frame is above[0] or owner(frame.file) not in (Owner.TORCH, Owner.PYTHON, Owner.MACHINERY)
        ]
        shown = [*inner[:_FRAMES_SHOWN], *above[-1:]]
        lines = [
            f"rank {end.rank} was at {frame}" if not at else f"  called at {frame}" for at, frame in enumerate(shown)
        ]
        collected.append((check, lines))
    return min(collected, key=lambda each: each[0], default=("", []))


def _by_problem(results: Mapping[int, Mapping[str, Any]]) -> dict[str, list[int]]:
    """Each problem with the ranks that have it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, result in results.items():
        for problem in result["problems"]:
            ranks_of.setdefault(problem, []).append(rank)
    return ranks_of


def smoke_rank(
    spec: str, *, rank: int, world_size: int, device: str = "cpu", results: list[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """
    Run CHECKS in a rank whose default process group is initialised: a dict of check, title, problems, breaches, not_run
    and done for each.

    Exceptions of the adapter become problems. `results` is filled as checks finish, so that they are known if the ranks
    diverge.
    """
    results = [] if results is None else results
    adapter = registry.load(spec)
    cuda_names.provide(adapter, device)
    SmokeRun(adapter=adapter, rank=rank, world_size=world_size, device=device).run(results)
    return results


@dataclass(frozen=True, slots=True)
class _Order:
    spec: str
    world_size: int
    device: str


class _SmokeCase(ShardedTrainingTestCase):
    """The ranks of a smoke run. No test runner collects it."""

    reports: Sequence[RankReport | None] | None = None
    exits: Sequence[RankExit] = ()

    @property
    def world_size(self) -> int:
        return int(self.launch_payload.world_size)

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def conclude(self, reports: Sequence[RankReport | None], exits: Sequence[RankExit]) -> None:
        self.reports, self.exits = reports, exits

    def init_rank(self) -> None:
        super().init_rank()
        process_group.register_recording_backend(self.device_type)
        self.start_process_group(process_group.BACKEND)

    def test_adapter(self) -> None:
        """Runs in a rank."""
        order: _Order = self.launch_payload
        results: list[dict[str, Any]] = []
        self.report.measurements["smoke"] = results
        smoke_rank(order.spec, rank=self.rank, world_size=order.world_size, device=order.device, results=results)


class _Model(nn.Module):
    """5-7-7-3: no dimension is even, and forward writes a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 7))
        self.head = nn.Linear(7, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        if self.training:
            self.count += 1
        output: Tensor = self.head(torch.tanh(self.body(x))) * scale
        return output


def _build() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return _Model()


@dataclass(kw_only=True)
class SmokeRun:
    """A smoke run in one rank."""

    adapter: type[Adapter]
    rank: int
    world_size: int
    device: str
    subject: Any = field(init=False)
    """The adapter in use. Not typed, because the checks judge whether it returns what the protocol requires."""
    problems: list[str] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)

    def run(self, results: list[dict[str, Any]]) -> None:
        """Append one dict per entry of CHECKS to `results`, with what was found and how far the check came."""
        stopped = ""
        for check, title in CHECKS.items():
            self.problems, self.breaches = [], []
            result = {
                "check": check, "title": title, "problems": self.problems, "breaches": self.breaches,
                "not_run": stopped, "done": False,
            }  # fmt: skip
            # Appended before it is done, so that its findings survive if the ranks diverge in the middle of it.
            results.append(result)
            if not stopped:
                self._guarded(getattr(self, _BODIES[check]))
                if self._anywhere(bool(self.problems)) and check in ("ADAPTER-01", "ADAPTER-02", "ADAPTER-04"):
                    stopped = f"{check} found problems, and the checks after it depend on it"
            result["done"] = True

    # The checks.

    def _protocol(self) -> None:
        for sentence in validate(self.adapter):
            self._breach(sentence)

    def _setup(self) -> None:
        plan = self._plan()
        self.device_object = compute_device(plan)
        self.declared = self.adapter.declared() | flags_of_names(self.device, cuda_names=self.adapter.cuda_names)
        needed = [flag for flag in sorted(plan.capabilities()) if flag not in self.declared]
        if needed:
            self._problem(f"{', '.join(needed)} must be declared, because the ranks compute on {self.device}")
            return
        self._begin(plan)
        module = self.subject.module()
        if not isinstance(module, nn.Module):
            self._returned("module()", "the wrapped nn.Module", module)
        if "orig_params" in self.declared:
            names = {name for name, _ in _build().named_parameters()}
            self._names("parameters()", set(self.subject.parameters()), names)
        for mode in (False, True):
            self.subject.train(mode)
            if isinstance(module, nn.Module) and module.training != mode:
                self._breach(f"module().training after train({mode}): expected {mode}, got {module.training}")

    def _plan(self, **changes: Any) -> Plan:
        defaults: dict[str, Any] = {"init_mode": InitMode.BEFORE, "units": ("body.0", "body.2"), "micro_batch_size": 4}
        return Plan(device=self.device, **{**defaults, **changes})

    def _begin(self, plan: Plan) -> None:
        self.subject = self.adapter()
        self.subject.setup(_build, lambda params: SGD(params, lr=0.5, momentum=0.9), plan)

    def _parameters(self) -> None:
        initial = {name: parameter.detach() for name, parameter in _build().named_parameters()}
        got = self._full("full_params()", self.subject.full_params(), initial)
        for name, tensor in got.items():
            if tensor.shape == initial[name].shape and not torch.equal(tensor, initial[name]):
                self._problem(f"full_params()[{name!r}] differs from the model's initial value before any step")
        self._clones("full_params()", got, self.subject.full_params)
        self._equal_on_ranks("full_params()", got)
        if "full_buffers" in self.declared:
            buffers = {name: buffer.detach() for name, buffer in _build().named_buffers()}
            self._full("full_buffers()", self.subject.full_buffers(), buffers)
        if "write_params" in self.declared:
            self._written(initial)

    def _written(self, initial: Mapping[str, Tensor]) -> None:
        doubled = {name: value * 2 for name, value in initial.items()}
        self.subject.write_params(doubled)
        for name, tensor in self.subject.full_params().items():
            if name in doubled and not _same(tensor, doubled[name]):
                self._problem(f"write_params() did not change {name!r}: full_params() does not return what was written")
        self.subject.write_params(initial)

    def _gradients(self) -> None:
        shapes = {name: parameter.detach() for name, parameter in _build().named_parameters()}
        self._microbatch(step=0)
        if "full_grads" not in self.declared:
            return
        grads = self.subject.full_grads()
        if not isinstance(grads, dict):
            self._returned("full_grads()", "a dict of names to tensors or None", grads)
            return
        self._names("full_grads()", set(grads), set(shapes), "the names of full_params(), None for no gradient")
        present = {name: grad for name, grad in grads.items() if grad is not None and name in shapes}
        if not present:
            self._problem("full_grads() contains no gradients after a backward")
        present = self._full("full_grads()", present, {name: shapes[name] for name in present})
        for name, grad in present.items():
            if not grad.isfinite().all():
                self._problem(f"full_grads()[{name!r}] has non-finite values")
        self._clones("full_grads()", present, lambda: self.subject.full_grads() or {})
        self._equal_on_ranks("full_grads()", present, why="; return the reduced gradient, not this rank's own")

    def _step(self) -> None:
        before = self.subject.full_params()
        copies = {name: tensor.clone() for name, tensor in before.items()}
        moved = self._steps()
        after = self.subject.full_params()
        self._unchanged("full_params()", before, copies, "after step()")
        unchanged = [name for name in moved if name in after and name in copies and _same(after[name], copies[name])]
        if moved and len(unchanged) == len(moved):
            self._problem(
                "step() must step the optimizer, but changed no parameter; does the optimizer hold the parameters of "
                "the wrapped model?"
            )
        elif unchanged:
            self._problem(f"step() did not change {_listed(unchanged)}, although the gradients are not zero")
        grads = {name: parameter.grad for name, parameter in self.subject.parameters().items()}
        not_dropped = [name for name, grad in grads.items() if grad is not None and local_part(grad).any()]
        if not_dropped:
            self._problem(f"step() must drop the gradients, but kept those of {_listed(not_dropped)}")
        self._microbatch(step=1)
        self.subject.step()

    def _steps(self) -> list[str]:
        """Step once; returns the names of parameters that should have changed."""
        moved = [name for name, parameter in _build().named_parameters() if parameter.requires_grad]
        if "full_grads" in self.declared:
            moved = [name for name, grad in self.subject.full_grads().items() if grad is not None and grad.any()]
        norm = self.subject.step()
        if norm is not None and not (isinstance(norm, int | float | Tensor) and torch.as_tensor(norm).numel() == 1):
            self._returned("step()", "a scalar tensor or None", norm)
        return moved

    def _local(self) -> None:
        held = self.subject.local_tensors()
        if not isinstance(held, dict):
            self._returned("local_tensors()", "a dict of lists", held)
            return
        for kind in ("params", "optim"):
            if kind not in held:
                self._breach(f"local_tensors() must have 'params' and 'optim', but has no {kind!r}")
        usable: dict[str, list[Tensor]] = {}
        for kind, tensors in held.items():
            if not isinstance(tensors, list) or not all(isinstance(tensor, Tensor) for tensor in tensors):
                self._breach(f"local_tensors()[{kind!r}] must be a list of tensors, got {_kind(tensors)}")
            elif any(isinstance(tensor, DTensor) for tensor in tensors):
                self._breach(f"local_tensors()[{kind!r}] must contain plain tensors, got DTensors: use to_local()")
            else:
                usable[kind] = tensors
        # One rank's shards may all be empty, but not those of all ranks.
        if not self._anywhere("optim" not in usable or any(tensor.numel() for tensor in usable["optim"])):
            self._problem("local_tensors()['optim'] must have the momentum buffers after two steps, but is empty")
        second_call = self.subject.local_tensors()
        for kind in ("params", "optim"):
            first = {_address(tensor) for tensor in usable.get(kind, ()) if tensor.numel()}
            second = {_address(tensor) for tensor in second_call.get(kind, ()) if tensor.numel()}
            if first and not first & second:
                self._problem(
                    f"local_tensors()[{kind!r}] must return the rank's own storage, but returns clones: its storage is "
                    "new in every call"
                )

    def _deferred(self) -> None:
        """Count reductions: an adapter that enters no context has as many of them in every micro-batch."""
        if "no_sync" not in self.declared:
            return
        self.subject.close()
        self._begin(self._plan(micro_batches=2, defer_reduction=True))
        counts = []
        for last in (False, True):
            before = len(log().records)
            self._microbatch(step=int(last), last=last, reduced=last)
            counts.append(sum(bool(record.reduce_op) for record in log().records[before:]))
        deferred, reduced = counts
        if deferred and deferred >= reduced:
            self._problem(
                f"microbatch(False, reduced=False) must keep gradients from being reduced, as the capability no_sync "
                f"promises, but this micro-batch issued {deferred} reductions, and the last one {reduced}"
            )

    # What the checks share.

    def _microbatch(self, step: int, *, last: bool = True, reduced: bool = True) -> None:
        """Run one forward and backward, as the suite runs them."""
        context = self.subject.microbatch(last, reduced=reduced)
        if not (hasattr(context, "__enter__") and hasattr(context, "__exit__")):
            self._returned("microbatch()", "a context manager", context)
            return
        generator = torch.Generator().manual_seed(10 * step + self.rank)
        x = torch.randn(4, 5, generator=generator).to(self.device_object)
        with context:
            output = self.subject.forward(x, scale=2.0)
            if not isinstance(output, Tensor) or output.shape != (4, 3):
                self._returned("forward()", "the model's output of shape (4, 3)", output)
                return
            loss = output.pow(2).mean()
            if not loss.requires_grad:
                self._problem("forward() must run the model with gradients enabled, but its output has no graph")
                return
            self.subject.backward(loss)

    def _full(self, call: str, got: Any, expected_values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Check names, types, shapes, dtypes and devices; returns the tensors that later checks can use."""
        if not isinstance(got, dict):
            self._returned(call, "a dict of names to tensors", got)
            return {}
        self._names(call, set(got), set(expected_values))
        usable = {}
        for name in [name for name in expected_values if name in got]:
            tensor, expected, what = got[name], expected_values[name], f"{call}[{name!r}]"
            if not isinstance(tensor, Tensor):
                self._breach(f"{what} must be a tensor, got {_kind(tensor)}")
            elif isinstance(tensor, DTensor):
                self._breach(f"{what} must be a plain tensor, got a DTensor: use full_tensor()")
            else:
                if tensor.requires_grad:
                    self._breach(f"{what} must be detached, but requires a gradient")
                if tensor.device.type != "cpu":
                    self._breach(f"{what} must be on the CPU, got {tensor.device}")
                if tensor.dtype != expected.dtype:
                    self._problem(f"{what} must have dtype {expected.dtype}, got {tensor.dtype}")
                if tensor.shape != expected.shape:
                    # If it is too large, the engine may have forgotten to remove padding: its defect. Returning a part
                    # is the adapter's mistake.
                    tell = self._breach if tensor.numel() <= expected.numel() else self._problem
                    tell(
                        f"{what} must have the full shape {tuple(expected.shape)}, got {tuple(tensor.shape)}"
                        + _looks_like(tensor.detach().cpu(), expected)
                    )
                usable[name] = tensor.detach()
        return usable

    def _names(
        self, call: str, got: set[str], names: set[str],
        expected: str = "the names that named_parameters() had before wrapping",
    ) -> None:  # fmt: skip
        missing, extra = sorted(names - got), sorted(got - names)
        if not missing and not extra:
            return
        parts = [f"lacks {_listed(missing)}"] if missing else []
        parts += [f"has {_listed(extra)}"] if extra else []
        prefixed = sorted(name for name in extra if any(name.endswith(f".{other}") for other in missing))
        hint = f"; {prefixed[0]!r} seems to have a wrapper's prefix" if prefixed else ""
        self._breach(f"{call} must have {expected}, but {' and '.join(parts)}{hint}")

    def _clones(self, call: str, got: Mapping[str, Tensor], read: Callable[[], Mapping[str, Tensor | None]]) -> None:
        """Writing into the returned tensors must not affect the engine."""
        originals = {name: tensor.clone() for name, tensor in got.items()}
        for tensor in got.values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        second_read = read()
        changed = [
            name
            for name, value in originals.items()
            if second_read.get(name) is not None and not _same(second_read[name], value)
        ]
        with torch.no_grad():
            for name, tensor in got.items():
                tensor.copy_(originals[name])
        if changed:
            self._breach(f"{call} must return clones, but writing into {_listed(changed)} changed the model")

    def _unchanged(self, call: str, held: Mapping[str, Tensor], copies: Mapping[str, Tensor], when: str) -> None:
        changed = [name for name, value in copies.items() if not _same(held[name], value)]
        if changed:
            self._breach(f"{call} must return clones, but earlier results changed {when}: {_listed(changed)}")

    def _equal_on_ranks(self, call: str, got: Mapping[str, Tensor], why: str = "") -> None:
        digests = {name: hashlib.sha256(repr(tensor.tolist()).encode()).hexdigest() for name, tensor in got.items()}
        digests_by_rank: list[Any] = [None] * self.world_size
        dist.all_gather_object(digests_by_rank, digests)
        differing = sorted(
            {name for name in digests if any(other.get(name) != digests[name] for other in digests_by_rank)}
        )
        if differing:
            self._problem(f"{call} must be equal on all ranks, but differs in {_listed(differing)}{why}")

    def _guarded(self, body: Callable[[], None]) -> None:
        """Run a check; an exception from the adapter becomes a problem."""
        try:
            body()
        except Unsupported as refused:
            self._problem(f"the adapter rejected the plan of the smoke run: {refused}")
        except Exception as error:  # noqa: BLE001 - any exception from an adapter is a finding about it
            frames = traceback.extract_tb(error.__traceback__)
            source = inspect.getsourcefile(self.adapter)
            own = [frame for frame in frames if frame.filename == source] or frames[-1:]
            calls = [frame.name for frame in frames if frame.filename == source][:1]
            what = f"{calls[0]}()" if calls else body.__name__.strip("_")
            # An AdapterError says itself that the adapter is at fault.
            tell = self._breach if isinstance(error, AdapterError) else self._problem
            tell(f"{what} raised {type(error).__name__}: {error} [{own[-1].filename}:{own[-1].lineno}]")

    def _anywhere(self, flag: bool) -> bool:
        """True if the flag is set on any rank, so that either all ranks continue or none."""
        flags: list[Any] = [None] * self.world_size
        dist.all_gather_object(flags, flag)
        return any(flags)

    def _problem(self, sentence: str) -> None:
        self.problems.append(sentence)

    def _breach(self, sentence: str) -> None:
        """A problem of which the engine cannot be the cause."""
        self.problems.append(sentence)
        self.breaches.append(sentence)

    def _returned(self, call: str, expected: str, got: object) -> None:
        self._breach(f"{call} must return {expected}, got {_kind(got)}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _same(got: Tensor | None, expected: Tensor) -> bool:
    return got is not None and got.shape == expected.shape and torch.equal(got.detach().cpu(), expected.detach().cpu())


def _kind(value: object) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"{type(value).__name__}{shape}"


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _looks_like(part: Tensor, full: Tensor) -> str:
    """Describes which part of the full tensor this is, if it is one."""
    rows = part.shape[0] if part.dim() else 0
    if rows and part.dim() == full.dim() and part.shape[1:] == full.shape[1:] and rows < full.shape[0]:
        for begin in range(full.shape[0] - rows + 1):
            if torch.equal(part, full[begin : begin + rows]):
                return f"; these are rows {begin} to {begin + rows - 1}: this rank's shard?"
        return f"; {rows} of {full.shape[0]} rows: this rank's shard?"
    if part.dim() == 1 and part.numel() <= full.numel():
        flat = full.flatten()
        for begin in range(flat.numel() - part.numel() + 1):
            if part.numel() and torch.equal(part, flat[begin : begin + part.numel()]):
                return f"; these are elements {begin} to {begin + part.numel() - 1} of the flattened one: a flat shard?"
    return "; empty: this rank's shard?" if not part.numel() else ""
