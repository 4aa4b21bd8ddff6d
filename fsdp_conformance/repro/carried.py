"""
The code of an adapter, carried into a script: the methods that a training uses, with all that they use of this package.

For engines other than torch's three, whose calls are written down (`adapters.vendors.torch_calls`). The protocol's
base classes are not copied: BASES has short ones in their place, with what a training needs of them.
"""

from __future__ import annotations

import ast
import enum
import inspect
from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from types import CodeType
from typing import Any, Generic

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.adapters.torch_like import TorchAdapter
from fsdp_conformance.plan import Plan
from fsdp_conformance.repro.refused import NoScript
from fsdp_conformance.repro.sources import LEFT_OUT, SHORT, Sources

#: What a script calls of an adapter.
CALLED = ("setup", "train", "microbatch", "forward", "backward", "step", "full_params", "close")

#: What stands in a script for the base classes of adapters, and for `OriginalNames`.
BASES = '''\
def full_copy(tensor):
    """A full copy of a DTensor, or of a tensor that is full already."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).to("cpu", copy=True)


class OriginalNames:
    """The names of parameters before the model was wrapped: an engine may change them, but keeps the modules."""

    def __init__(self, model):
        self.paths, self.listed, first = {}, {}, {}
        for path, module in model.named_modules(remove_duplicate=False):
            self.paths.setdefault(module, path)
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    name = f"{path}.{key}" if path else key
                    self.listed[name] = first.setdefault(id(parameter), name)

    def parameters_of(self, wrapped):
        """Its parameters by original name; one with several names has the first of them."""
        found, others = {}, {}
        for path, module in wrapped.named_modules(remove_duplicate=False):
            path = self.paths.get(module, path)
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    name = f"{path}.{key}" if path else key
                    listed = self.listed.get(name, name)
                    (found if listed == name else others).setdefault(listed, parameter)
        return {**others, **found}


class Adapter:
    def microbatch(self, last, *, reduced=True):
        return contextlib.nullcontext()

    def train(self, mode=True):
        self.module().train(mode)

    def close(self):
        pass

    def set_requires_grad(self, frozen):
        for name, parameter in self.parameters().items():
            parameter.requires_grad_(name not in frozen)

    def drop_grads(self, names):
        for name in names:
            self.parameters()[name].grad = None
'''

#: The same for adapters of torch-like engines.
TORCH_BASE = """\
class TorchAdapter(Adapter):
    def setup(self, model_fn, optim_fn, plan):
        self.plan, self.device = plan, torch.device("cpu")
        model = model_fn()
        self.names = OriginalNames(model)
        self.model = self.wrap(model, plan)
        has_parameters = next(self.model.parameters(), None) is not None
        self.optimizer = self.make_optimizer(optim_fn) if has_parameters else None

    def make_optimizer(self, optim_fn):
        return optim_fn(list(self.model.parameters()))

    @contextlib.contextmanager
    def microbatch(self, last, *, reduced=True):
        with contextlib.nullcontext() if reduced else self.no_sync():
            yield

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def backward(self, loss, *, retain_graph=False):
        loss.backward(retain_graph=retain_graph)

    def clip(self, max_norm, norm_type):
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)

    def step(self, max_norm=None, *, norm_type=2.0):
        if max_norm is not None:
            self.clip(max_norm, norm_type)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def gathered(self, *, writeback=False):
        return contextlib.nullcontext()

    def full(self, tensor):
        return full_copy(tensor)

    def full_params(self):
        with self.gathered():
            return {name: self.full(parameter) for name, parameter in self.parameters().items()}

    def parameters(self):
        return self.names.parameters_of(self.model)

    def module(self):
        return self.model
"""

#: The capabilities of a plan that a script has: it does what a training of one model in float32 on the CPU needs.
_IN_A_SCRIPT = frozenset({
    "zero1", "zero2", "zero3", "no_shard", "hsdp", "reshard_after_forward", "reshard_int", "multi_module_unit",
    "prefetch_backward", "prefetch_forward", "prefetch_explicit", "shard_dim", "persist_small", "auto_wrap",
    "cpu_compute", "no_sync", "clip_grad_norm",
})  # fmt: skip

_PROTOCOL: tuple[type, ...] = (TorchAdapter, Adapter)
_ROOTS = (*_PROTOCOL, ABC, Generic, object)

#: Attributes that `setup` of the script's base class sets.
_SET = frozenset({"plan", "device", "names", "model", "optimizer"})

_ERROR = """\
class {name}(Exception):
    def __init__(self, *what, **where):
        super().__init__(*what, *where.values())
"""

#: What a script has in another form: (module, name) to the source, or "" for what BASES has.
PROVIDED = {
    ("fsdp_conformance.adapters.names", "OriginalNames"): "",
    ("fsdp_conformance.adapters.sharded", "full_copy"): "",
    ("fsdp_conformance.adapters.torch_like", "compute_device"): (
        'def compute_device(plan):\n    return torch.device("cpu")\n'
    ),
    **{
        ("fsdp_conformance.errors", name): _ERROR.format(name=name)
        for name in ("AdapterError", "ConfigError", "EnvironmentUnavailable", "Unsupported")
    },
}


def sources_for_adapters(provided: Mapping[tuple[str, str], str] = SHORT) -> Sources:
    """Sources for a script that has BASES, and what else is `provided`."""
    return Sources(provided={**provided, **PROVIDED}, refused=("fsdp_conformance.engine", "fsdp_conformance.harness"))


def beyond_code(capabilities: frozenset[str]) -> list[str]:
    """The capabilities that a plan asks for and that a script does not have."""
    return sorted(capabilities - _IN_A_SCRIPT)


def carried(adapter: type[Adapter], plan: Plan, sources: Sources, called: Sequence[str] = ()) -> str:
    """
    The adapter's classes and its plan as source, to stand after BASES and what is added to `sources`.

    `called`: methods that the script calls in addition to CALLED.

    Without `clip` and `no_sync` of torch-like engines if the plan has neither.

    Raises NoScript for an adapter that uses more of its base classes than a script has.
    """
    unused = {"clip"} if plan.max_norm is None else set()
    members = _Members(adapter, sources, unused=unused if plan.defer_reduction else {*unused, "no_sync"})
    for name in (*CALLED, *called):
        members.want(name)
    classes = members.source()
    needs_torch = any(issubclass(each, TorchAdapter) for each in adapter.__mro__[1:])
    written = _plan(plan, "\n".join([*sources.definitions, classes]), sources)
    return "\n\n".join([BASES, *([TORCH_BASE] if needs_torch else []), written, classes])


class _Members:
    """The members of an adapter's classes that a training uses, by class."""

    def __init__(self, adapter: type[Adapter], sources: Sources, *, unused: set[str]) -> None:
        self.adapter = adapter
        self.sources = sources
        self.unused = unused
        """Methods that the script's base class calls, but not in this training."""
        self.classes = [each for each in adapter.__mro__ if each not in _ROOTS]
        self.texts: dict[type, dict[str, str]] = {each: {} for each in self.classes}
        for each in (*self.classes, *_PROTOCOL):
            sources.provide(each.__module__, each.__name__)
        of_torch = TORCH_BASE if issubclass(adapter, TorchAdapter) else ""
        self._provided = {**_methods(BASES), **_methods(of_torch)}
        self._followed: set[str] = set()

    def want(self, name: str, above: type | None = None) -> None:
        """Carry what the adapter calls `name`, or the class `above` calls `super().name`, and all that this uses."""
        start = 0 if above is None else self.classes.index(above) + 1
        owner = next((each for each in self.classes[start:] if name in vars(each)), None)
        if owner is None:
            self._want_of_base(name)
            return
        if name in self.texts[owner]:
            return
        self.texts[owner][name] = ""  # begun: two methods may call each other
        nodes = self._nodes(owner, name)
        self.texts[owner][name] = "\n\n".join(self.sources.text_of(owner.__module__, node) for node in nodes)
        for node in nodes:
            for used, inherited in _own_uses(node, {"self", "cls", *(each.__name__ for each in self.classes)}):
                self.want(used, owner if inherited else None)

    def source(self) -> str:
        """The classes, base classes first, without those of which nothing is used."""
        return "\n\n\n".join(self._class(each) for each in reversed(self.classes) if self._is_kept(each))

    def _class(self, cls: type) -> str:
        bases = [base.__name__ for base in self._bases(cls)]
        texts = sorted(self.texts[cls].items(), key=lambda item: self._nodes(cls, item[0])[0].lineno)
        body = "\n\n".join(text for _, text in texts) if texts else "    pass"
        return f"class {cls.__name__}({', '.join(bases)}):\n{body}"

    def _is_kept(self, cls: type) -> bool:
        return cls is self.adapter or bool(self.texts[cls])

    def _bases(self, cls: type) -> list[type]:
        """The bases of the class in the script: those without used members are replaced by their own bases."""
        flat = list(dict.fromkeys(self._flattened(cls)))
        # A base of another base would come too early in the order of classes.
        return [each for each in flat if not any(other is not each and issubclass(other, each) for other in flat)]

    def _flattened(self, cls: type) -> Iterator[type]:
        for base in cls.__bases__:
            if base in _PROTOCOL or (base in self.texts and self._is_kept(base)):
                yield base
            elif base in self.texts:
                yield from self._flattened(base)

    def _nodes(self, cls: type, name: str) -> list[ast.stmt]:
        """Where the class defines it: several times if it is a property that can be set."""
        definition = self.sources.definition(cls.__module__, cls.__name__)
        if not isinstance(definition, ast.ClassDef):
            raise NoScript(f"{cls.__qualname__} is not a class at the top of {cls.__module__}")
        nodes = [node for node in definition.body if name in _bound(node)]
        if not nodes:
            raise NoScript(f"{cls.__name__}.{name} has no definition in its class that can be copied")
        code = _code_of(vars(cls)[name])
        if code is not None and not any(node.lineno <= code.co_firstlineno <= (node.end_lineno or 0) or
                                        code.co_firstlineno in _decorated(node) for node in nodes):  # fmt: skip
            raise NoScript(f"{cls.__name__}.{name} is not what its class defines: it was replaced later")
        return nodes

    def _want_of_base(self, name: str) -> None:
        """The script's base class has it, and calls other members; or it is set on the object."""
        if name in self._provided and name not in self._followed:
            self._followed.add(name)
            for used, _ in _own_uses(self._provided[name], {"self"}):
                if used not in self.unused:
                    self.want(used)
        in_protocol = any(hasattr(base, name) for base in _PROTOCOL if issubclass(self.adapter, base))
        if in_protocol and name not in self._provided and name not in _SET:
            raise NoScript(f"{self.adapter.display_name()} uses {name} of its base class, which a script does not have")


def _plan(plan: Plan, text: str, sources: Sources) -> str:
    """The plan as a class with the attributes that the text reads, or that the case asks for."""
    read = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    methods = {name for name in read if callable(vars(Plan).get(name))}
    definition = sources.definition(Plan.__module__, Plan.__name__)
    assert isinstance(definition, ast.ClassDef), f"Plan must be a class, got {definition}"
    nodes = [node for node in definition.body if methods & set(_bound(node))]
    read |= {node.attr for each in nodes for node in ast.walk(each) if isinstance(node, ast.Attribute)}
    default = Plan()
    lines = ["class Plan:", '    """What the case asks of the engine."""', ""]
    for field in fields(Plan):
        value = getattr(plan, field.name)
        if field.name in read or value != getattr(default, field.name):
            lines.append(f"    {field.name} = {_literal(field.name, value, sources)}")
    texts = ["", *(sources.text_of(Plan.__module__, node) for node in nodes)] if nodes else []
    return "\n".join([*lines, *texts, "", "", "PLAN = Plan()"])


def _literal(name: str, value: Any, sources: Sources) -> str:
    if isinstance(value, enum.Enum):
        sources.need(type(value).__module__, type(value).__name__)
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, bool | int | float | str) or value == {}:
        return repr(value)
    if isinstance(value, tuple):
        return "(" + "".join(f"{_literal(name, each, sources)}, " for each in value).rstrip(" ") + ")"
    raise NoScript(f"the plan has {name}={value!r}, which has no short source")


def _bound(node: ast.stmt) -> list[str]:
    """The names that a statement of a class's body gives a value."""
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def _code_of(member: Any) -> CodeType | None:
    """The code of a method, below its decorators; None for anything but a function."""
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    return getattr(inspect.unwrap(function), "__code__", None)


def _decorated(node: ast.stmt) -> list[int]:
    """The lines of its decorators, where its code begins."""
    return [each.lineno for each in getattr(node, "decorator_list", [])]


def _own_uses(node: ast.stmt, own: set[str]) -> Iterator[tuple[str, bool]]:
    """Attributes that a method reads of its object or class, by these names, and whether through `super()`."""
    for each in ast.walk(node):
        if not isinstance(each, ast.Attribute) or not isinstance(each.ctx, ast.Load):
            continue
        if each.attr in LEFT_OUT:
            continue
        of = each.value
        if isinstance(of, ast.Name) and of.id in own:
            yield each.attr, False
        elif isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "super":
            yield each.attr, True


def _methods(text: str) -> dict[str, ast.stmt]:
    """Methods of the classes in a text."""
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name != "OriginalNames"]
    return {each.name: each for node in classes for each in node.body if isinstance(each, ast.FunctionDef)}
