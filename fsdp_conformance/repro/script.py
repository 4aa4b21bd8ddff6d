"""The script: a workload's source, an engine's calls or its adapter's code, a plain reference, the comparison."""

from __future__ import annotations

import ast
import builtins
import math
import re
import symtable
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
from fsdp_conformance.repro.refused import NoScript
from fsdp_conformance.repro.sources import SHORT, Sources, names_of
from fsdp_conformance.repro.workloads import written
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.selftest.cases import BoundCase
from fsdp_conformance.workload.definition import Regime
from fsdp_conformance.workload.events import Action

#: What a script can do between the passes of a step, by its name there; the others only with an adapter's code.
_FORWARDS = {Action.EVALUATE: "eval", Action.INFER: "eval", Action.FORWARD: "train"}
_THROUGH_ADAPTERS = {Action.FREEZE: "freeze", Action.DROP: "drop"}

#: The methods of an adapter that do these.
_METHODS = {Action.FREEZE: "set_requires_grad", Action.DROP: "drop_grads"}

#: Fields of a regime that a script follows; a case with another one at other than its default is refused.
_FOLLOWED = frozenset({
    "optimizer", "steps", "micro_batches", "reduced", "max_norm", "norm_type", "eval_before", "eval_between",
    "idle_forwards", "events", "keep_outputs", "unused_parameters", "frozen_at", "gradient_to_none",
})  # fmt: skip

_ENGINES = {"fully_shard": "FSDP2", "FullyShardedDataParallel": "FSDP1", "DistributedDataParallel": "DDP"}

#: How parameters are read in full, and how the reduction of a micro-batch is deferred.
_READING = {
    "fully_shard": """\
def full_parameters(model):
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: (each.full_tensor() if isinstance(each, DTensor) else each).clone() for name, each in tensors.items()}

@contextlib.contextmanager  #? deferral
def no_sync(model):  #? deferral
    model.set_requires_gradient_sync(False)  #? deferral
    yield  #? deferral
    model.set_requires_gradient_sync(True)  #? deferral
""",
    "FullyShardedDataParallel": """\
def full_parameters(model):
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        named = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {name.replace("_fsdp_wrapped_module.", ""): parameter for name, parameter in named.items()}

def no_sync(model):  #? deferral
    return model.no_sync()  #? deferral

def wrap_unit(model, name, **options):
    module = model.get_submodule(name)
    wrapped = FullyShardedDataParallel(module, **options)
    for parent in list(model.modules()):
        parent._modules.update({key: wrapped for key, child in parent._modules.items() if child is module})
""",
    "DistributedDataParallel": """\
def full_parameters(model):
    return {name.removeprefix("module."): parameter.detach().clone() for name, parameter in model.named_parameters()}

def no_sync(model):  #? deferral
    return model.no_sync()  #? deferral
""",
}

_PLAIN_CLIPPING = "torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, NORM_TYPE)"
_CLIPPING = {
    "fully_shard": _PLAIN_CLIPPING,
    "FullyShardedDataParallel": f"model.clip_grad_norm_(MAX_NORM, NORM_TYPE) if sharded else {_PLAIN_CLIPPING}",
    "DistributedDataParallel": _PLAIN_CLIPPING,
}

#: Of torch's engines: the calls that wrap the model, and a training as a user would write it.
_TORCH = """\
# The engine.
def wrap(model):
{calls}

{reading}"""

#: Of other engines: their adapter's code, and a training through it.
_CARRIED = """\
# The engine, with the code of its adapter.
{definitions}

def full_parameters(model):
    return {{name: parameter.detach().clone() for name, parameter in model.named_parameters()}}

def train_engine(rank, extra):
    engine = {adapter}()
    engine.setup(lambda: WORKLOAD.build(rank), WORKLOAD.optimizers[{optimizer!r}], PLAN)
    def happen(moment, step, micro=0):  #? events
        for kind, *names in extra.get((moment, step, micro), ()):  #? events
            if kind in ("freeze", "drop"):  #? freeze
                (engine.set_requires_grad if kind == "freeze" else engine.drop_grads)(names)  #? freeze
                continue  #? freeze
            batch = batch_of(WORKLOAD, step, micro, rank)  #? events
            engine.train(kind == "train")  #? events
            with torch.no_grad() if kind == "eval" else contextlib.nullcontext():  #? events
                engine.forward(*batch.args, **batch.kwargs)  #? events
            engine.train(True)  #? events
    engine.full_params()  # read before training, too, as in the case
    engine.train(True)
    for step in range(STEPS):
        losses = {{}}
        happen("before the step", step)  #? before the step
        for micro in range(MICRO_BATCHES):
            happen("before the forward", step, micro)  #? before the forward
            with engine.microbatch(micro == MICRO_BATCHES - 1, reduced={reduced}):
                batch = batch_of(WORKLOAD, step, micro, rank)
                loss = WORKLOAD.loss(engine.forward(*batch.args, **batch.kwargs), batch)
                losses[f"loss of micro-batch {{micro}}"] = loss.detach().clone()
                happen("between forward and backward", step, micro)  #? between forward and backward
                engine.backward(loss)
            happen("after the backward", step, micro)  #? after the backward
        happen("before the optimizer", step)  #? before the optimizer
        engine.step({clipping})
        happen("after the optimizer", step)  #? after the optimizer
        yield losses, engine.full_params()
    engine.close()
"""

#: Lines that end in `#? FEATURE` are left out of a script without that feature; a moment of an event is one.
_SCRIPT = '''\
"""
{engine}: {title}

Expected: losses and full parameters are those of a plain training of the same model on all ranks' batches.{left_out}
Run: OMP_NUM_THREADS=1 torchrun --nproc-per-node {world_size} {name}
Written by fsdp-conformance {version} from {case} ({implementation}), with torch {torch}.{changes}
"""
{imports}

# The model, its batches, its loss.
{sources}

WORLD_SIZE, STEPS, MICRO_BATCHES = {world_size}, {steps}, {micro_batches}
WORKLOAD = {workload}
REFERENCE = {reference}
REDUCED = {reduced!r}  # whether a micro-batch's gradients are reduced at once  #? later
MAX_NORM, NORM_TYPE = {max_norm}, {norm_type}  #? clipping
# Besides training, by (moment, step, micro-batch): "eval": a forward in eval mode under no_grad;  #? events
# "train": one without a backward; "freeze": from now on exactly these; "drop": gradients set to None  #? events
TRAININGS = {trainings}

{engine_section}
# One loop for the engine, and for plain copies of the model with every rank's batch, whose gradients are averaged.
def train(models, ranks, workload, extra, *, sharded):
    parameters = [list(model.parameters()) for model in models]
    optimizers = [workload.optimizers[{optimizer!r}](each) for each in parameters if each]
    def happen(moment, step, micro=0):  #? events
        for kind, *names in extra.get((moment, step, micro), ()):  #? events
            for rank, model in zip(ranks, models):  #? events
                if kind == "freeze":  #? freeze
                    for name, parameter in model.named_parameters():  #? freeze
                        parameter.requires_grad_(name not in names)  #? freeze
                if kind == "drop":  #? freeze
                    for name in names:  #? freeze
                        model.get_parameter(name).grad = None  #? freeze
                if kind in ("eval", "train"):  #? events
                    batch = batch_of(workload, step, micro, rank)  #? events
                    with torch.set_grad_enabled(kind == "train"):  #? events
                        model.train(kind == "train")(*batch.args, **batch.kwargs)  #? events
                    model.train()  #? events
    for step in range(STEPS):
        losses = {{}}
        happen("before the step", step)  #? before the step
        for micro in range(MICRO_BATCHES):
            happen("before the forward", step, micro)  #? before the forward
            for rank, model in zip(ranks, models):
                batch = batch_of(workload, step, micro, rank)
                with no_sync(model) if sharded and not REDUCED[micro] else contextlib.nullcontext():  #? deferral
                    loss = workload.loss(model(*batch.args, **batch.kwargs), batch)  #? deferral
                    happen("between forward and backward", step, micro)  #? between and deferral
                    loss.backward()  #? deferral
                loss = workload.loss(model(*batch.args, **batch.kwargs), batch)  #? at once
                happen("between forward and backward", step, micro)  #? between and at once
                loss.backward()  #? at once
                if rank == dist.get_rank():
                    losses[f"loss of micro-batch {{micro}}"] = loss.detach().clone()
            happen("after the backward", step, micro)  #? after the backward
        happen("before the optimizer", step)  #? before the optimizer
        for copies in () if sharded else zip(*(model.parameters() for model in models)):
            gradients = [copy.grad for copy in copies if copy.grad is not None]
            for copy in copies:
                copy.grad = sum(gradients) / WORLD_SIZE if gradients else None
        for model, optimizer in zip(models, optimizers):
            {clipping}  #? clipping
            optimizer.step()
            optimizer.zero_grad()
        happen("after the optimizer", step)  #? after the optimizer
        yield losses, full_parameters(models[list(ranks).index(dist.get_rank())])

def batch_of(workload, step, micro, rank):
    return workload.batch(BatchKey(step=step, micro=micro, rank=rank, world_size=WORLD_SIZE))

def differences(rank, extra):
    got = train([wrap(WORKLOAD.build(rank)).train()], [rank], WORKLOAD, extra, sharded=True)  #? torch
    got = train_engine(rank, extra)  #? adapter
    copies = [REFERENCE.build(each).train() for each in range(WORLD_SIZE)]
    expected = train(copies, range(WORLD_SIZE), REFERENCE, extra, sharded=False)
    for step, both in enumerate(zip(got, expected)):
        for kind, ours, theirs in zip(("", "parameter "), *both):
            for name in dict.fromkeys([*theirs, *ours]):
                one, other = ours.get(name), theirs.get(name)
                if one is None or other is None or not torch.equal(one, other):
                    yield f"step {{step}}, {{kind}}{{name}}: expected {{some(other, one)}}, got {{some(one, other)}}"

def some(tensor, other):
    if tensor is None or other is None or tensor.shape != other.shape:
        return "nothing" if tensor is None else f"shape {{tuple(tensor.shape)}}"
    place = tuple((tensor != other).nonzero()[0].tolist())
    return f"{{tensor[place].item()!r}}" + (f" at {{list(place)}}" if place else "")

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
if dist.get_world_size() != WORLD_SIZE:
    sys.exit(f"this script is for {{WORLD_SIZE}} ranks, got {{dist.get_world_size()}}")
everywhere = [None] * WORLD_SIZE
dist.all_gather_object(everywhere, [line for extra in TRAININGS for line in differences(dist.get_rank(), extra)])
if dist.get_rank() == 0:
    for each, lines in enumerate(everywhere):
        if lines:
            print(f"rank {{each}}, {{lines[0]}} ({{len(lines)}} differences in all)")
    print("WRONG" if any(everywhere) else "right: losses and parameters are equal, bit for bit")
dist.barrier()
dist.destroy_process_group()
sys.exit(int(any(everywhere)))
'''


@dataclass(frozen=True, kw_only=True, slots=True)
class _Section:
    """The engine's part of a script."""

    title: str
    """The engine, as a reader knows it."""
    text: str
    imports: Set[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are set before anything is imported."""
    clipping: str = _PLAIN_CLIPPING
    """The statement that clips, in the loop for the engine and for plain copies."""
    changes: tuple[str, ...] = ()
    """The changes that the adapter makes to the engine or to torch."""


def script(bound: BoundCase, chosen: RunSettings, *, name: str) -> str:
    """The script for a case. Raises NoScript with the reason if it cannot be written."""
    import torch

    import fsdp_conformance

    adapter = registry.load(chosen.implementation)
    captured = capture(bound, chosen)
    by_calls = engine_of(adapter)
    followed = _FORWARDS if by_calls else _FORWARDS | _THROUGH_ADAPTERS
    first = _the_same_but_for_events(bound, captured.trainings, followed)
    sources, workloads = _workloads(captured, first, SHORT, of_adapter=not by_calls)
    if "from dataclasses import replace" in sources.imports:
        # It takes no other kind of class.
        sources, workloads = _workloads(captured, first, {}, of_adapter=not by_calls)
    definitions = list(sources.definitions)
    if by_calls:
        section = _by_calls(bound, by_calls, first, chosen)
    else:
        section = _by_code(bound, adapter, captured.trainings, sources)
    regime = first.regime
    trainings = [_extra(each.regime) for each in captured.trainings]
    text = _SCRIPT.format(
        engine=section.title,
        title=bound.case.title,
        left_out=f"\nNot in here, but in the case: {', '.join(captured.left_out)}." if captured.left_out else "",
        world_size=bound.case.world_size,
        name=name,
        version=fsdp_conformance.__version__,
        case=bound.case.id,
        implementation=chosen.implementation,
        torch=torch.__version__,
        changes="".join(f"\nTo run here: {each}." for each in section.changes),
        imports="{imports}",
        sources=_constants_first(definitions),
        workload=workloads[0],
        reference="WORKLOAD" if workloads[0] == workloads[1] else workloads[1],
        optimizer=regime.optimizer,
        steps=regime.steps,
        micro_batches=regime.micro_batches,
        reduced=tuple(regime.is_reduced(micro) for micro in range(regime.micro_batches)),
        max_norm=_number(regime.max_norm),
        norm_type=_number(regime.norm_type),
        clipping=section.clipping,
        trainings="[\n" + "".join(f"    {each!r},\n" for each in trainings) + "]" if any(trainings) else "[{}]",
        engine_section=section.text,
    )
    used = {moment for each in trainings for moment, _, _ in each}
    later = not all(map(regime.is_reduced, range(regime.micro_batches)))
    deferral = later and by_calls is not None
    kinds = {kind for each in trainings for happens in each.values() for kind, *_ in happens}
    text = _without_unused(
        text,
        used
        | {"torch" if by_calls else "adapter", "deferral" if deferral else "at once"}
        | ({"events"} if used else set())
        | ({"later"} if later else set())
        | ({"freeze"} if kinds & {"freeze", "drop"} else set())
        | ({"clipping"} if regime.max_norm is not None else set())
        | ({f"between and {'deferral' if deferral else 'at once'}"} if _MOMENTS["LOSS"] in used else set()),
    )
    text = text.replace(
        "{imports}", _imported({*sources.imports, *section.imports} | _USUAL, text, section.environment)
    )
    _refuse_what_cannot_stand_alone(text)
    return text


def _workloads(
    captured: Captured, first: Training, short: Mapping[tuple[str, str], str], *, of_adapter: bool
) -> tuple[Sources, list[str]]:
    """The engine's workload and the reference's as expressions, and what they need, some of it in a `short` form."""
    sources = sources_for_adapters(short) if of_adapter else Sources(provided=short)
    workloads = [
        written(workload, captured.maker(workload), first.regime.optimizer, sources)
        for workload in (first.workload, first.reference or first.workload)
    ]
    sources.need("fsdp_conformance.workload.definition", "BatchKey")
    return sources, workloads


def _constants_first(definitions: Sequence[str]) -> str:
    """The definitions, with the constants that need no other definition in a block at the beginning."""
    constants = [each for each in definitions if re.fullmatch(r"[A-Z_]+ = [-\d.e]+", each)]
    others = [each for each in definitions if each not in constants]
    return "\n\n".join(["\n".join(constants), *others] if constants else others)


def _number(value: float | None) -> str:
    """A number as source: `repr` of an infinite one is a name that nothing defines."""
    return f'float("{value}")' if value is not None and not math.isfinite(value) else repr(value)


def _without_unused(text: str, features: Set[str]) -> str:
    """The text without the lines of other features, and without more than one blank line in a row."""
    lines = []
    for line in text.split("\n"):
        kept, _, feature = line.partition("  #? ")
        if not feature or feature in features:
            lines.append(kept)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def _by_calls(bound: BoundCase, engine: type[Adapter], first: Training, chosen: RunSettings) -> _Section:
    """One of torch's engines, as a user would call it."""
    _refuse_beyond(first, beyond_calls(engine, first.plan.capabilities() | first.workload.capabilities & _NEVER))
    calls = _calls(bound, first, chosen)
    function = calls.made[-1][0]
    text = _TORCH.format(calls="\n".join(f"    {line}" for line in _wrapping(calls)), reading=_READING[function])
    return _Section(
        title=_ENGINES[function], text=text, imports=_imports(function, calls), clipping=_CLIPPING[function]
    )


def _by_code(bound: BoundCase, adapter: type[Adapter], trainings: Sequence[Training], sources: Sources) -> _Section:
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
    clipping = [] if regime.max_norm is None else ["max_norm=MAX_NORM"]
    if clipping and regime.norm_type != 2.0:
        clipping.append("norm_type=NORM_TYPE")
    text = _CARRIED.format(
        definitions="\n\n".join([*sources.definitions[before:], classes]),
        adapter=adapter.__name__,
        optimizer=regime.optimizer,
        reduced="True" if all(map(regime.is_reduced, range(regime.micro_batches))) else "REDUCED[micro]",
        clipping=", ".join(clipping),
    )
    version = adapter.version()
    return _Section(
        title=adapter.display_name() + (f" ({adapter.package} {version})" if adapter.package and version else ""),
        text=text,
        imports={"import torch", "import torch.distributed as dist", "from torch.distributed.tensor import DTensor"},
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
        if not re.search(rf"\b{bound}\b", text):
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
    for number, (function, names, given) in enumerate(calls.made):
        written = "".join(f", {name}={value}" for name, value in given.items())
        if function != "DistributedDataParallel" and len(names) == 1 and names != ("",):
            units.append(names[0])
            following = calls.made[number + 1] if number + 1 < len(calls.made) else None
            if (
                following is not None
                and (following[0], len(following[1]), following[2]) == (function, 1, given)
                and (following[1] != ("",))
            ):
                continue
            called = "fully_shard(model.get_submodule(name)" if function == "fully_shard" else "wrap_unit(model, name"
            yield f"for name in {units!r}:"
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


_MOMENTS = {
    "STEP": "before the step",
    "FORWARD": "before the forward",
    "LOSS": "between forward and backward",
    "BACKWARD": "after the backward",
    "OPTIMIZER": "before the optimizer",
    "END": "after the optimizer",
}


def _extra(regime: Regime) -> dict[tuple[str, int, int], tuple[tuple[str, ...], ...]]:
    """The events besides training, by moment, step and micro-batch: each one's name in a script, and its parameters."""
    extra: dict[tuple[str, int, int], tuple[tuple[str, ...], ...]] = {}
    for step in range(regime.steps):
        for event in regime.in_step(step):
            key = (_MOMENTS[event.moment.name], step, event.micro)
            happens = ((_FORWARDS | _THROUGH_ADAPTERS)[event.action], *event.names)
            extra[key] = (*extra.get(key, ()), happens)
    return extra
