"""
What a rank looks at when an adapter is tried out: the checks of `smoke`, on a small model of odd sizes.

Every sentence is about the adapter. Where it cannot be told from its engine (gradients that differ between ranks), the
sentence says what was asked for.
"""

from __future__ import annotations

import hashlib
import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.adapters.sharded import local_part
from fsdp_conformance.adapters.torch_like import compute_device
from fsdp_conformance.adapters.validator import validate
from fsdp_conformance.config import InitMode, Plan
from fsdp_conformance.errors import Unsupported

#: What is looked at, in order. A check is not run if one that it needs has found problems.
CHECKS = {
    "ADAPTER-01": "the class keeps to the protocol",
    "ADAPTER-02": "setup, module and parameters",
    "ADAPTER-03": "full parameters and buffers are full, named, cloned and equal on all ranks",
    "ADAPTER-04": "forward, backward and full gradients",
    "ADAPTER-05": "step moves the parameters and drops the gradients",
    "ADAPTER-06": "local tensors are what this rank stores",
}


class _Model(nn.Module):
    """5-7-7-3: no dimension divides by two, one parameter is frozen, one buffer is written by forward."""

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
    """The adapter at work. Not typed: whether it returns what the protocol says is what is looked at."""
    problems: list[str] = field(default_factory=list)

    def run(self, results: list[dict[str, Any]]) -> None:
        """Add one dict for each of CHECKS to `results`: check, title, problems, not_run, and whether it is done."""
        steps: tuple[Callable[[], None], ...] = (
            self._protocol, self._setup, self._parameters, self._gradients, self._step, self._local
        )  # fmt: skip
        stopped = ""
        for (check, title), body in zip(CHECKS.items(), steps, strict=True):
            self.problems = []
            result = {"check": check, "title": title, "problems": self.problems, "not_run": stopped, "done": False}
            # Listed before it is done: what it has found is known even if the ranks part in the middle of it.
            results.append(result)
            if not stopped:
                self._guarded(body)
                if self._anywhere(bool(self.problems)) and check in ("ADAPTER-01", "ADAPTER-02", "ADAPTER-04"):
                    stopped = f"{check} found problems, on which this depends"
            result["done"] = True

    # The checks.

    def _protocol(self) -> None:
        self.problems += validate(self.adapter)

    def _setup(self) -> None:
        plan = Plan(device=self.device, init_mode=InitMode.BEFORE, units=("body.0", "body.2"), micro_batch_size=4)
        self.device_object = compute_device(plan)
        self.declared = self.adapter.declared()
        needed = [flag for flag in sorted(plan.capabilities()) if flag not in self.declared]
        if needed:
            self._problem(f"{', '.join(needed)} not declared, but should be: the ranks compute on {self.device}")
            return
        self.subject = self.adapter()
        self.subject.setup(_build, lambda params: SGD(params, lr=0.5, momentum=0.9), plan)
        module = self.subject.module()
        if not isinstance(module, nn.Module):
            self._problem(f"module() returned {_kind(module)}, but should return the wrapped nn.Module")
        names = {name for name, _ in _build().named_parameters()}
        self._names("parameters()", set(self.subject.parameters()), names)
        for mode in (False, True):
            self.subject.train(mode)
            if isinstance(module, nn.Module) and module.training != mode:
                self._problem(f"train({mode}) left module().training={module.training}, but should set it")

    def _parameters(self) -> None:
        initial = {name: parameter.detach() for name, parameter in _build().named_parameters()}
        got = self._full("full_params()", self.subject.full_params(), initial)
        for name, tensor in got.items():
            if tensor.shape == initial[name].shape and not torch.equal(tensor, initial[name]):
                self._problem(f"full_params()[{name!r}] is not what the model was built with, after setup and no step")
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
                self._problem(f"write_params() did not change {name!r}: full_params() does not give what was written")
        self.subject.write_params(initial)

    def _gradients(self) -> None:
        shapes = {name: parameter.detach() for name, parameter in _build().named_parameters()}
        self._microbatch(step=0)
        if "full_grads" not in self.declared:
            return
        grads = self.subject.full_grads()
        if not isinstance(grads, dict):
            self._problem(f"full_grads() returned {_kind(grads)}, but should return a dict of names to tensors or None")
            return
        self._names("full_grads()", set(grads), set(shapes), otherwise="as full_params() has; None where there is none")
        present = {name: grad for name, grad in grads.items() if grad is not None and name in shapes}
        if not present:
            self._problem("full_grads() has no gradient at all after a backward")
        present = self._full("full_grads()", present, {name: shapes[name] for name in present})
        for name, grad in present.items():
            if not grad.isfinite().all():
                self._problem(f"full_grads()[{name!r}] has values that are not finite")
        self._clones("full_grads()", present, lambda: self.subject.full_grads() or {})
        self._equal_on_ranks("full_grads()", present, why="; the reduced gradient is asked, not this rank's own")

    def _step(self) -> None:
        before = self.subject.full_params()
        kept = {name: tensor.clone() for name, tensor in before.items()}
        moved = self._steps()
        after = self.subject.full_params()
        self._unchanged("full_params()", before, kept, "after step()")
        still = [name for name in moved if name in after and name in kept and _same(after[name], kept[name])]
        if moved and len(still) == len(moved):
            self._problem(
                "step() changed no parameter, but should step the optimizer; does it hold the parameters of the "
                "wrapped model?"
            )
        elif still:
            self._problem(
                f"step() left {', '.join(map(repr, still))} as they were, although their gradients are not zero"
            )
        grads = {name: parameter.grad for name, parameter in self.subject.parameters().items()}
        left = [name for name, grad in grads.items() if grad is not None and local_part(grad).any()]
        if left:
            self._problem(f"step() left gradients of {', '.join(map(repr, left))}, but should drop them")
        self._microbatch(step=1)
        self.subject.step()

    def _steps(self) -> list[str]:
        """Step once; the names of parameters that should have moved."""
        moved = [name for name, parameter in self.subject.parameters().items() if parameter.requires_grad]
        if "full_grads" in self.declared:
            moved = [name for name, grad in self.subject.full_grads().items() if grad is not None and grad.any()]
        norm = self.subject.step()
        if norm is not None and not (isinstance(norm, int | float | Tensor) and torch.as_tensor(norm).numel() == 1):
            self._problem(f"step() returned {_kind(norm)}, but should return a scalar tensor or None")
        return moved

    def _local(self) -> None:
        held = self.subject.local_tensors()
        if not isinstance(held, dict):
            self._problem(f"local_tensors() returned {_kind(held)}, but should return a dict of lists")
            return
        for kind in ("params", "optim"):
            if kind not in held:
                self._problem(f"local_tensors() has no {kind!r}, but should have 'params' and 'optim'")
        usable: dict[str, list[Tensor]] = {}
        for kind, tensors in held.items():
            if not isinstance(tensors, list) or not all(isinstance(tensor, Tensor) for tensor in tensors):
                self._problem(f"local_tensors()[{kind!r}] is {_kind(tensors)}, but should be a list of tensors")
            elif any(isinstance(tensor, DTensor) for tensor in tensors):
                self._problem(f"local_tensors()[{kind!r}] has DTensors, but should have their to_local()")
            else:
                usable[kind] = tensors
        # One rank's shards may all be empty; those of all ranks are not.
        if not self._anywhere("optim" not in usable or any(tensor.numel() for tensor in usable["optim"])):
            self._problem(
                "local_tensors()['optim'] is empty after two steps with momentum, but should have its buffers"
            )
        again = self.subject.local_tensors()
        for kind in ("params", "optim"):
            first = {_address(tensor) for tensor in usable.get(kind, ()) if tensor.numel()}
            second = {_address(tensor) for tensor in again.get(kind, ()) if tensor.numel()}
            if first and not first & second:
                self._problem(
                    f"local_tensors()[{kind!r}] has new storage at every call, but should have what the rank stores: "
                    "bytes of clones say nothing"
                )

    # What the checks share.

    def _microbatch(self, step: int) -> None:
        """One forward and backward, as the suite does it."""
        context = self.subject.microbatch(True, reduced=True)
        if not (hasattr(context, "__enter__") and hasattr(context, "__exit__")):
            self._problem(f"microbatch() returned {_kind(context)}, but should return a context manager")
            return
        generator = torch.Generator().manual_seed(10 * step + self.rank)
        x = torch.randn(4, 5, generator=generator).to(self.device_object)
        with context:
            output = self.subject.forward(x, scale=2.0)
            if not isinstance(output, Tensor) or output.shape != (4, 3):
                self._problem(f"forward() returned {_kind(output)}, but should return what the model does: (4, 3)")
                return
            loss = output.pow(2).mean()
            if not loss.requires_grad:
                self._problem("forward() returned a tensor without a graph, but should run the model with gradients on")
                return
            self.subject.backward(loss)

    def _full(self, call: str, got: Any, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Look at names, types, shapes, dtypes and devices; what is fit for more is returned."""
        if not isinstance(got, dict):
            self._problem(f"{call} returned {_kind(got)}, but should return a dict of names to tensors")
            return {}
        self._names(call, set(got), set(wanted))
        usable = {}
        for name in [name for name in wanted if name in got]:
            tensor, expected, what = got[name], wanted[name], f"{call}[{name!r}]"
            if not isinstance(tensor, Tensor):
                self._problem(f"{what} is {_kind(tensor)}, but should be a tensor")
            elif isinstance(tensor, DTensor):
                self._problem(f"{what} is a DTensor, but should be a plain tensor: full_tensor()")
            else:
                if tensor.requires_grad:
                    self._problem(f"{what} requires a gradient, but should be detached")
                if tensor.device.type != "cpu":
                    self._problem(f"{what} is on {tensor.device}, but should be on the CPU")
                if tensor.dtype != expected.dtype:
                    self._problem(f"{what} is {tensor.dtype}, but should be {expected.dtype}")
                if tensor.shape != expected.shape:
                    self._problem(
                        f"{what} has shape {tuple(tensor.shape)}, but should be in full, {tuple(expected.shape)}"
                        + _looks_like(tensor.detach().cpu(), expected)
                    )
                usable[name] = tensor.detach()
        return usable

    def _names(self, call: str, got: set[str], wanted: set[str], otherwise: str = "") -> None:
        missing, extra = sorted(wanted - got), sorted(got - wanted)
        if not missing and not extra:
            return
        parts = [f"misses {', '.join(map(repr, missing))}"] if missing else []
        parts += [f"has {', '.join(map(repr, extra))}"] if extra else []
        prefixed = sorted(name for name in extra if any(name.endswith(f".{other}") for other in missing))
        hint = f"; {prefixed[0]!r} looks like a wrapper's prefix" if prefixed else ""
        reason = otherwise or "the names that named_parameters() had before the wrap"
        self._problem(f"{call} {' and '.join(parts)}, but should have {reason}{hint}")

    def _clones(self, call: str, got: Mapping[str, Tensor], read: Callable[[], Mapping[str, Tensor | None]]) -> None:
        """Writing into what was returned must not reach the engine."""
        originals = {name: tensor.clone() for name, tensor in got.items()}
        for tensor in got.values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        again = read()
        changed = [
            name for name, value in originals.items() if again.get(name) is not None and not _same(again[name], value)
        ]
        with torch.no_grad():
            for name, tensor in got.items():
                tensor.copy_(originals[name])
        if changed:
            self._problem(
                f"{call} gives live storage of {', '.join(map(repr, changed))}, but should give clones: "
                "writing into them changed the model"
            )

    def _unchanged(self, call: str, held: Mapping[str, Tensor], kept: Mapping[str, Tensor], when: str) -> None:
        changed = [name for name, value in kept.items() if not _same(held[name], value)]
        if changed:
            self._problem(
                f"{call} gave live storage of {', '.join(map(repr, changed))}, but should give clones: "
                f"what was read before changed {when}"
            )

    def _equal_on_ranks(self, call: str, got: Mapping[str, Tensor], why: str = "") -> None:
        mine = {name: hashlib.sha256(repr(tensor.tolist()).encode()).hexdigest() for name, tensor in got.items()}
        everybody: list[Any] = [None] * self.world_size
        dist.all_gather_object(everybody, mine)
        differing = sorted({name for name in mine if any(other.get(name) != mine[name] for other in everybody)})
        if differing:
            self._problem(
                f"{call} differs between ranks in {', '.join(map(repr, differing))}, but should be the same "
                f"everywhere{why}"
            )

    def _guarded(self, body: Callable[[], None]) -> None:
        """Run a check; an exception that the adapter lets out is a problem of its own."""
        try:
            body()
        except Unsupported as refused:
            self._problem(f"the plan of the smoke run was refused: {refused}")
        except Exception as error:  # noqa: BLE001 - whatever an adapter raises is a finding about it
            frames = traceback.extract_tb(error.__traceback__)
            source = inspect.getsourcefile(self.adapter)
            own = [frame for frame in frames if frame.filename == source] or frames[-1:]
            calls = [frame.name for frame in frames if frame.filename == source][:1]
            what = f"{calls[0]}()" if calls else body.__name__.strip("_")
            self._problem(f"{what} raised {type(error).__name__}: {error} [{own[-1].filename}:{own[-1].lineno}]")

    def _anywhere(self, flag: bool) -> bool:
        """Whether the flag is set on some rank: all ranks go on or none."""
        flags: list[Any] = [None] * self.world_size
        dist.all_gather_object(flags, flag)
        return any(flags)

    def _problem(self, sentence: str) -> None:
        self.problems.append(sentence)


def _same(got: Tensor | None, expected: Tensor) -> bool:
    return got is not None and got.shape == expected.shape and torch.equal(got.detach().cpu(), expected.detach().cpu())


def _kind(value: object) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"{type(value).__name__}{shape}"


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _looks_like(part: Tensor, full: Tensor) -> str:
    """Which part of the full tensor this is, in words, where it is one."""
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
