"""The script: a workload's source, an engine's calls or its adapter's code, a plain reference, the comparison."""

from __future__ import annotations

import ast
import builtins
import math
import pprint
import re
import symtable
import textwrap
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from fsdp_conformance.adapters import registry
from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.adapters.vendors.torch_calls import Calls, beyond_calls, engine_of, recorded
from fsdp_conformance.errors import ConformanceError
from fsdp_conformance.harness.single_process_world import imaginary_world
from fsdp_conformance.plan import Plan
from fsdp_conformance.repro.capture import Captured, Training, capture
from fsdp_conformance.repro.carried import beyond_code, carried, sources_for_adapters
from fsdp_conformance.repro.loop import FORWARDS, Loop
from fsdp_conformance.repro.refused import NoScript
from fsdp_conformance.repro.smaller import applied, smaller
from fsdp_conformance.repro.sources import SHORT, Sources, names_of
from fsdp_conformance.repro.workloads import Written, is_its_own_reference, written
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.selftest.cases import BoundCase
from fsdp_conformance.workload.definition import Regime
from fsdp_conformance.workload.events import Action

#: What an adapter's code can do besides forwards, and the methods that do it.
_METHODS = {Action.FREEZE: "set_requires_grad", Action.DROP: "drop_grads"}

#: Functions of the fixtures whose results a script has in the place of their calls, where it knows the arguments.
_EVALUATED = ("loss_scale", "seed_of")

#: Fields of a regime that a script follows; a case with another one at other than its default is refused.
_FOLLOWED = frozenset({
    "optimizer", "steps", "micro_batches", "reduced", "max_norm", "norm_type", "eval_before", "eval_between",
    "idle_forwards", "events", "keep_outputs", "unused_parameters", "frozen_at", "gradient_to_none",
})  # fmt: skip

_ENGINES = {"fully_shard": "FSDP2", "FullyShardedDataParallel": "FSDP1", "DistributedDataParallel": "DDP"}

#: How parameters are read in full.
_READING = {
    "fully_shard": """\
def full_parameters(model):
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: (each.full_tensor() if isinstance(each, DTensor) else each).clone() for name, each in tensors.items()}
""",
    "FullyShardedDataParallel": """\
def full_parameters(model):
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        named = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {name.replace("_fsdp_wrapped_module.", ""): parameter for name, parameter in named.items()}
""",
    "DistributedDataParallel": """\
def full_parameters(model):
    return {name.removeprefix("module."): parameter.detach().clone() for name, parameter in model.named_parameters()}
""",
}
_READING_PLAIN = """\
def full_parameters(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
"""

#: How FSDP1 puts a unit in the place of a module.
_WRAP_UNIT = """\
def wrap_unit(model, name, **options):
    module = model.get_submodule(name)
    wrapped = FullyShardedDataParallel(module, **options)
    for parent in list(model.modules()):
        parent._modules.update({key: wrapped for key, child in parent._modules.items() if child is module})
"""

#: How the reduction of a micro-batch is deferred.
_NO_SYNC = """\
def no_sync(model):
    return model.no_sync()
"""
_DEFERRING = {
    "fully_shard": """\
@contextlib.contextmanager
def no_sync(model):
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)
""",
    "FullyShardedDataParallel": _NO_SYNC,
    "DistributedDataParallel": _NO_SYNC,
}

_PLAIN_CLIPPING = "torch.nn.utils.clip_grad_norm_(model.parameters(), {max_norm}, {norm_type})"
_CLIPPING = {
    "fully_shard": _PLAIN_CLIPPING,
    "FullyShardedDataParallel": f"model.clip_grad_norm_({{max_norm}}, {{norm_type}}) if sharded else {_PLAIN_CLIPPING}",
    "DistributedDataParallel": _PLAIN_CLIPPING,
}

_SCRIPT = '''\
"""
{engine}: {title}

Expected: losses and full parameters are those of a plain training of the same model on all ranks' batches.{left_out}
Run: OMP_NUM_THREADS=1 torchrun --nproc-per-node {world_size} {name}
{source}{changes}
"""
{imports}

# The model, its batches, its loss.
{sources}

{engine_section}

{loop}

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
assert dist.get_world_size() == {world_size}, f"this script is for {world_size} ranks, got {{dist.get_world_size()}}"
got = {got}
expected = {expected}
wrong = torch.tensor(0)
try:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
except AssertionError as difference:
    print(f"rank {{dist.get_rank()}}: {{difference}}", flush=True)
    wrong += 1
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right: losses and parameters are equal, bit for bit")
dist.destroy_process_group()
sys.exit(int(wrong > 0))
'''


@dataclass(frozen=True, kw_only=True, slots=True)
class _Section:
    """The engine's part of a script."""

    title: str
    """The engine, as a reader knows it."""
    text: str
    training: str
    """The expression that trains."""
    imports: Set[str]
    clipping: str
    """The statement that clips, in the loop for the engine and for the plain model."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are set before anything is imported."""
    changes: tuple[str, ...] = ()
    """The changes that the adapter makes to the engine or to torch."""


def script(bound: BoundCase, chosen: RunSettings, *, name: str) -> str:
    """The script for a case. Raises NoScript with the reason if it cannot be written."""
    import torch

    import fsdp_conformance

    adapter = registry.load(chosen.implementation)
    captured = capture(bound, chosen)
    by_calls = engine_of(adapter)
    followed = FORWARDS.keys() if by_calls else FORWARDS.keys() | _METHODS.keys()
    first = _the_same_but_for_events(bound, captured.trainings, followed)
    sources, workload, reference = _workloads(captured, first, SHORT, of_adapter=not by_calls)
    if "from dataclasses import replace" in sources.imports:
        # It takes no other kind of class.
        sources, workload, reference = _workloads(captured, first, {}, of_adapter=not by_calls)
    if is_its_own_reference(first.workload, first.reference or first.workload, bound.case.world_size):
        reference = workload
    roots = _roots(workload, reference, bound, first.regime)
    evaluated = {name: function for name in _EVALUATED if (function := sources.function(name)) is not None}
    definitions = _without_kwargs(smaller([*sources.definitions, *workload.before], roots, evaluated))
    has_parameters = any(True for _ in first.workload.build(0).parameters())
    loop = Loop(
        regimes=[each.regime for each in captured.trainings],
        inputs="*batch.args, **batch.kwargs" if "kwargs" in "".join(definitions) else "*batch.args",
        loss=lambda output: applied(f"loss_of({output}, batch)", definitions),
        optimizer=applied("make_optimizer(model.parameters())", definitions) if has_parameters else "",
    )
    if by_calls:
        section = _by_calls(bound, by_calls, first, chosen, loop)
    else:
        section = _by_code(bound, adapter, captured.trainings, sources, loop)
    text = _SCRIPT.format(
        engine=section.title,
        title=textwrap.fill(bound.case.title, width=100),
        left_out=f"\nNot in here, but in the case: {', '.join(captured.left_out)}." if captured.left_out else "",
        world_size=bound.case.world_size,
        name=name,
        source=textwrap.fill(
            f"Written by fsdp-conformance {fsdp_conformance.__version__} from {bound.case.id} "
            f"({chosen.implementation}), with torch {torch.__version__}.",
            width=120,
            break_on_hyphens=False,
        ),
        changes="".join(f"\nTo run here: {each}." for each in section.changes),
        imports="{imports}",
        sources="{sources}",
        engine_section=section.text,
        loop=loop.of_model(
            clipping=section.clipping if first.regime.max_norm is not None else "", wrapped=by_calls is not None
        ),
        got=section.training,
        expected=loop.call(
            "train",
            "make_model()" if reference is workload else "make_reference()",
            f"range({bound.case.world_size})",
            "sharded=False" if by_calls else "",
        ),
    )
    text = re.sub(r"\n{3,}", "\n\n", text.replace("{sources}", "\n\n".join(_called(definitions, text))))
    text = text.replace(
        "{imports}", _imported({*sources.imports, *section.imports} | _USUAL, text, section.environment)
    )
    _refuse_what_cannot_stand_alone(text)
    return text


def _workloads(
    captured: Captured, first: Training, short: Mapping[tuple[str, str], str], *, of_adapter: bool
) -> tuple[Sources, Written, Written]:
    """The engine's workload and the reference's, and what they need, some of it in a `short` form."""
    sources = sources_for_adapters(short) if of_adapter else Sources(provided=short)
    workload, reference = (
        written(each, captured.maker(each), first.regime.optimizer, sources, name)
        for each, name in ((first.workload, "WORKLOAD"), (first.reference or first.workload, "REFERENCE"))
    )
    sources.need("fsdp_conformance.workload.definition", "BatchKey")
    return sources, workload, reference


def _roots(workload: Written, reference: Written, bound: BoundCase, regime: Regime) -> list[str]:
    """The functions that the script calls of a workload."""
    place = "step, micro, rank" if regime.micro_batches > 1 else "step, rank"
    micro = "micro" if regime.micro_batches > 1 else "0"
    key = f"BatchKey(step=step, micro={micro}, rank=rank, world_size={bound.case.world_size})"
    roots = [
        f"def make_model():\n    return {workload.build}(0)",
        f"def make_batch({place}):\n    return {workload.batch}({key})",
        f"def loss_of(output, batch):\n    return {workload.loss}(output, batch)",
        f"def make_optimizer(parameters):\n    return {workload.optimizer}(parameters)",
    ]
    if reference is not workload:
        if (reference.batch, reference.loss, reference.optimizer) != (
            workload.batch,
            workload.loss,
            workload.optimizer,
        ):
            raise NoScript(f"{bound.case.id} compares with a training that has another batch, loss or optimizer")
        roots.append(f"def make_reference():\n    return {reference.build}(0)")
    return roots


def _without_kwargs(definitions: Sequence[str]) -> list[str]:
    """Batches without a field that none of them has, if all of them name their fields."""
    whole = "\n".join(definitions)
    if whole.count("kwargs") > 1 or whole.count("Batch(") != whole.count("Batch(args="):
        return [*definitions]
    return [re.sub(r"Batch = .*", 'Batch = namedtuple("Batch", "args target")', each) for each in definitions]


def _called(definitions: Sequence[str], text: str) -> list[str]:
    """The definitions, without functions that the text has in the place of their calls."""
    return [each for each in definitions if not each.startswith(("def loss_of(", "def make_optimizer(")) or
            each.removeprefix("def ").partition("(")[0] in text]  # fmt: skip


def _number(value: float | None) -> str:
    """A number as source: `repr` of an infinite one is a name that nothing defines."""
    return f'float("{value}")' if value is not None and not math.isfinite(value) else repr(value)


def _by_calls(bound: BoundCase, engine: type[Adapter], first: Training, chosen: RunSettings, loop: Loop) -> _Section:
    """One of torch's engines, as a user would call it."""
    _refuse_beyond(first, beyond_calls(engine, first.plan.capabilities() | first.workload.capabilities & _NEVER))
    calls = _calls(bound, first, chosen)
    function = calls.made[-1][0]
    wrapping = "\n".join(["# The engine.", "def wrap(model):", *(f"    {line}" for line in _wrapping(calls)), ""])
    parts = [wrapping, _READING[function]]
    if "wrap_unit(" in wrapping:
        parts.append(_WRAP_UNIT)
    if loop.deferred:
        parts.append(_DEFERRING[function])
    clip = _CLIPPING[function].format(
        max_norm=_number(first.regime.max_norm), norm_type=_number(first.regime.norm_type)
    )
    return _Section(
        title=_ENGINES[function],
        text="\n".join(parts),
        training=loop.call("train", "wrap(make_model())", "[dist.get_rank()]", "sharded=True"),
        imports=_imports(function, calls),
        clipping=clip,
    )


def _by_code(
    bound: BoundCase, adapter: type[Adapter], trainings: Sequence[Training], sources: Sources, loop: Loop
) -> _Section:
    """Any other engine, with the code of its adapter."""
    first = trainings[0]
    plan, regime = _planned(first), first.regime
    try:
        adapter.refuse_undeclared(plan)
    except ConformanceError as error:
        raise NoScript(f"the adapter refuses the plan of {bound.case.id}: {error}") from error
    _refuse_beyond(first, beyond_code(plan.capabilities() | first.workload.capabilities & _NEVER))
    before = len(sources.definitions)
    events = {event.action for each in trainings for step in range(regime.steps) for event in each.regime.in_step(step)}
    called = [method for action, method in _METHODS.items() if action in events]
    classes = carried(adapter, plan, sources, called)
    clipping = [] if regime.max_norm is None else [f"max_norm={_number(regime.max_norm)}"]
    if clipping and regime.norm_type != 2.0:
        clipping.append(f"norm_type={_number(regime.norm_type)}")
    training = loop.of_engine(adapter.__name__, clipping=", ".join(clipping))
    title = "# The engine, with the code of its adapter."
    parts = [title, *sources.definitions[before:], classes, _READING_PLAIN, training]
    version = adapter.version()
    return _Section(
        title=adapter.display_name() + (f" ({adapter.package} {version})" if adapter.package and version else ""),
        text="\n\n".join(parts),
        training=loop.call("train_engine"),
        imports={"import torch", "import torch.distributed as dist", "from torch.distributed.tensor import DTensor"},
        clipping=_PLAIN_CLIPPING.format(max_norm=_number(regime.max_norm), norm_type=_number(regime.norm_type)),
        environment=adapter.environment,
        changes=adapter.shims,
    )


def _imported(imports: Set[str], text: str, environment: Mapping[str, str]) -> str:
    """The imports that the text uses, a line for each module, after the variables that must be set before them."""
    modules: list[str] = []
    names: dict[str, list[str]] = {}
    for line in sorted(imports - {"import os"} if environment else imports):
        source, _, name = line.removeprefix("from ").partition(" import ")
        bound = (name or line.removeprefix("import ")).rpartition(" as ")[2].partition(".")[0]
        if not re.search(rf"(?<![.\w]){bound}\b", text):
            continue
        if name:
            names.setdefault(source, []).append(name)
        else:
            modules.append(line)
    before = ["import os", f"os.environ.update({dict(environment)!r})"] if environment else []
    return "\n".join(
        [*before, *modules, *(f"from {source} import {', '.join(each)}" for source, each in names.items())]
    )


def _refuse_what_cannot_stand_alone(text: str) -> None:
    """Raise NoScript for a script that imports this package, lacks a name that it uses, or gives one two meanings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if any(module.partition(".")[0] == "fsdp_conformance" for module in modules):
            raise NoScript(f"a function imports {', '.join(modules)} when it runs")
    defined = Counter(
        name for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom) for name in names_of(node)
    )
    twice = sorted(name for name, times in defined.items() if times > 1)
    if twice:
        raise NoScript(f"the code that it needs and the script itself both define {', '.join(twice)}")
    top = symtable.symtable(text, "script", "exec")
    present = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    missing = sorted(_global_names(top) - present - vars(builtins).keys() - _OF_A_MODULE)
    if missing:
        raise NoScript(
            f"the code that it needs uses {', '.join(missing)}, which no statement at the top of a module defines or "
            "imports by name"
        )


#: Names that every module has.
_OF_A_MODULE = frozenset({"__name__", "__file__", "__doc__"})


def _global_names(scope: symtable.SymbolTable) -> set[str]:
    """Names that a scope, or one inside it, looks up in the module."""
    inside = [_global_names(child) for child in scope.get_children() if str(child.get_type()) != "annotation"]
    own = {symbol.get_name() for symbol in scope.get_symbols() if symbol.is_referenced() and symbol.is_global()}
    return own.union(*inside)


#: Capabilities of a model that the script's loop cannot provide.
_NEVER = frozenset({"subgroups", "move_inputs"})

#: What the script's own text and the short forms may use.
_USUAL = frozenset({
    "import contextlib", "import sys", "import torch", "from datetime import timedelta",
    "from collections import namedtuple",
})  # fmt: skip


def _the_same_but_for_events(bound: BoundCase, trainings: list[Training], followed: Container[Action]) -> Training:
    first = trainings[0]
    for each in trainings:
        alike = (each.workload.name, each.plan, replace(each.regime, events=()))
        if alike != (first.workload.name, first.plan, replace(first.regime, events=())):
            raise NoScript(f"{bound.case.id} trains several configurations, and a script has one")
    workload, regime = first.workload, first.regime
    if not workload.exact or regime.optimizer != "sgd" or regime.steps > workload.exact_steps:
        raise NoScript(
            f"{workload.name} with {regime.optimizer} is not exact: the suite measures its bounds, a script has none"
        )
    if "batch_norm" in workload.traits:
        raise NoScript(f"{workload.name} has buffers of each rank, which the script's reference does not have")
    default = Regime(optimizer=regime.optimizer, steps=regime.steps, micro_batches=regime.micro_batches)
    odd = [name for name in Regime.__dataclass_fields__ if name not in _FOLLOWED and
           getattr(regime, name) != getattr(default, name)]  # fmt: skip
    actions = {str(event.action) for each in trainings for step in range(regime.steps)
               for event in each.regime.in_step(step) if event.action not in followed}  # fmt: skip
    if odd or actions:
        raise NoScript(f"the training of {bound.case.id} has {', '.join([*odd, *sorted(actions)])}")
    return first


def _refuse_beyond(training: Training, beyond: list[str]) -> None:
    if beyond:
        raise NoScript(f"the plan for {training.workload.name} asks for {', '.join(beyond)}")


def _calls(bound: BoundCase, training: Training, chosen: RunSettings) -> Calls:
    """The calls that wrap the model, on rank 0."""
    calls, plan, workload = Calls(), _planned(training), training.workload

    def build() -> object:
        model = workload.build(0)
        calls.name_modules(model)
        return model

    adapter = registry.load(chosen.implementation)()
    try:
        with imaginary_world(bound.case.world_size), recorded(calls):
            adapter.setup(build, workload.optimizers[training.regime.optimizer], plan)  # type: ignore[arg-type]
            adapter.close()
    except ConformanceError as error:
        raise NoScript(f"the adapter refuses the plan of {bound.case.id}: {error}") from error
    if not calls.made or calls.unwritable:
        raise NoScript(f"the engine is called with {', '.join(calls.unwritable) or 'nothing'}")
    return calls


def _planned(training: Training) -> Plan:
    from fsdp_conformance.driver.session import plan_for

    return plan_for(training.workload, training.regime, training.plan)


def _wrapping(calls: Calls) -> Iterator[str]:
    """The body of `wrap`."""
    root, units = "model", list[str]()
    made = calls.made
    meshes = {given.get("mesh", "") for _, _, given in made}
    if len(made) > 1 and len(meshes) == 1 and "" not in meshes:
        yield f"mesh = {meshes.pop()}"
        made = [(function, names, {**given, "mesh": "mesh"}) for function, names, given in made]
    for number, (function, names, given) in enumerate(made):
        written = "".join(f", {name}={value}" for name, value in given.items())
        if function != "DistributedDataParallel" and len(names) == 1 and names != ("",):
            units.append(names[0])
            following = made[number + 1] if number + 1 < len(made) else None
            if (
                following is not None
                and (following[0], len(following[1]), following[2]) == (function, 1, given)
                and (following[1] != ("",))
            ):
                continue
            called = "fully_shard(model.get_submodule(name)" if function == "fully_shard" else "wrap_unit(model, name"
            yield from f"for name in {pprint.pformat(units, width=96, compact=True)}:".split("\n")
            yield f"    {called}{written})"
            units = []
            continue
        modules = ["model" if not name else f"model.get_submodule({name!r})" for name in names]
        target = modules[0] if len(modules) == 1 else f"[{', '.join(modules)}]"
        if function == "fully_shard":
            yield f"fully_shard({target}{written})"
        else:
            root = f"{function}({target}{written})"
    yield f"return {root}"


def _imports(function: str, calls: Calls) -> set[str]:
    imports = {"import torch", "import torch.distributed as dist"}
    fsdp = sorted(calls.types | ({function} - {"DistributedDataParallel"}))
    if any("init_device_mesh" in value for _, _, given in calls.made for value in given.values()):
        imports.add("from torch.distributed.device_mesh import init_device_mesh")
    imports |= {f"from torch.distributed.fsdp import {name}" for name in fsdp}
    if function == "fully_shard":
        imports.add("from torch.distributed.tensor import DTensor")
    if function == "DistributedDataParallel":
        imports.add("from torch.nn.parallel import DistributedDataParallel")
    return imports
