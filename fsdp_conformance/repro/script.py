"""The script: a workload's source, an engine's calls or its adapter's code, a plain reference, the comparison."""

from __future__ import annotations

import ast
import builtins
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
from fsdp_conformance.repro.capture import Training, capture
from fsdp_conformance.repro.carried import beyond_code, carried, sources_for_adapters
from fsdp_conformance.repro.refused import NoScript
from fsdp_conformance.repro.sources import Sources, names_of
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
    parameters = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        parameters[name] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    return parameters


@contextlib.contextmanager
def no_sync(model):
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
""",
    "FullyShardedDataParallel": """\
def full_parameters(model):
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {
            name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
            for name, parameter in model.named_parameters()
        }


def no_sync(model):
    return model.no_sync()


def wrap_unit(model, name, **options):
    module = model.get_submodule(name)
    wrapped = FullyShardedDataParallel(module, **options)
    for parent in list(model.modules()):
        if parent is not wrapped:
            for key, child in list(parent._modules.items()):
                if child is module:
                    setattr(parent, key, wrapped)
""",
    "DistributedDataParallel": """\
def full_parameters(model):
    return {name.removeprefix("module."): parameter.detach().clone() for name, parameter in model.named_parameters()}


def no_sync(model):
    return model.no_sync()
""",
}

_CLIPPING = {
    "fully_shard": "torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, NORM_TYPE)",
    "FullyShardedDataParallel": "model.clip_grad_norm_(MAX_NORM, NORM_TYPE)",
    "DistributedDataParallel": "torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, NORM_TYPE)",
}

#: Of torch's engines: the calls that wrap the model, and a training as a user would write it.
_TORCH = '''\
# --- the engine -----------------------------------------------------------------------------------


def wrap(model):
{calls}


{reading}

def train(rank, extra):
    """The losses of this rank and the full parameters after each step."""
    model = wrap(WORKLOAD.build(rank))
    parameters = list(model.parameters())
    optimizer = WORKLOAD.optimizers[OPTIMIZER](parameters) if parameters else None

    def forwards(moment, step, micro=0):
        for (kind,) in extra.get((moment, step, micro), ()):
            forward(model, batch_of(WORKLOAD, step, micro, rank), kind)

    model.train()
    for step in range(STEPS):
        losses = []
        forwards("before the step", step)
        for micro in range(MICRO_BATCHES):
            forwards("before the forward", step, micro)
            with contextlib.nullcontext() if REDUCED[micro] else no_sync(model):
                batch = batch_of(WORKLOAD, step, micro, rank)
                loss = WORKLOAD.loss(model(*batch.args, **batch.kwargs), batch)
                losses.append(loss.detach().clone())
                forwards("between forward and backward", step, micro)
                loss.backward()
            forwards("after the backward", step, micro)
        forwards("before the optimizer", step)
        if MAX_NORM is not None:
            {clipping}
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        forwards("after the optimizer", step)
        yield losses, full_parameters(model)
'''

#: Of other engines: their adapter's code, and a training through it.
_CARRIED = '''\
# --- the engine, with the code of its adapter -----------------------------------------------------

{definitions}


def train(rank, extra):
    """The losses of this rank and the full parameters after each step."""
    engine = {adapter}()
    engine.setup(lambda: WORKLOAD.build(rank), WORKLOAD.optimizers[OPTIMIZER], PLAN)

    def happen(moment, step, micro=0):
        for kind, *names in extra.get((moment, step, micro), ()):
            if kind in ("freeze", "drop"):
                (engine.set_requires_grad if kind == "freeze" else engine.drop_grads)(names)
                continue
            batch = batch_of(WORKLOAD, step, micro, rank)
            engine.train(kind == "train")
            with torch.no_grad() if kind == "eval" else contextlib.nullcontext():
                engine.forward(*batch.args, **batch.kwargs)
            engine.train(True)

    engine.full_params()  # read before training, too, as in the case
    engine.train(True)
    for step in range(STEPS):
        losses = []
        happen("before the step", step)
        for micro in range(MICRO_BATCHES):
            happen("before the forward", step, micro)
            with engine.microbatch(micro == MICRO_BATCHES - 1, reduced=REDUCED[micro]):
                batch = batch_of(WORKLOAD, step, micro, rank)
                loss = WORKLOAD.loss(engine.forward(*batch.args, **batch.kwargs), batch)
                losses.append(loss.detach().clone())
                happen("between forward and backward", step, micro)
                engine.backward(loss)
            happen("after the backward", step, micro)
        happen("before the optimizer", step)
        engine.step({clipping})
        happen("after the optimizer", step)
        yield losses, engine.full_params()
    engine.close()
'''

_SCRIPT = '''\
"""
{engine}: {title}

Expected: losses and full parameters are those of a plain training of the same model on all ranks' batches.{left_out}
Run: torchrun --nproc-per-node {world_size} {name}
Written by fsdp-conformance {version} from {case} ({implementation}), with torch {torch}.{changes}
"""

from __future__ import annotations

import contextlib
import sys
from datetime import timedelta
{imports}

# --- the model, its batches, its loss -------------------------------------------------------------

{sources}


WORKLOAD = {workload}
REFERENCE = {reference}
WORLD_SIZE = {world_size}
OPTIMIZER = {optimizer!r}
STEPS = {steps}
MICRO_BATCHES = {micro_batches}
REDUCED = {reduced!r}  # whether a micro-batch's gradients are reduced at once
MAX_NORM, NORM_TYPE = {max_norm!r}, {norm_type!r}
# What else happens in each training, by (moment, step, micro-batch): a forward in eval mode under no_grad ("eval"), or
# in training mode without a backward ("train"); "freeze": from now on exactly these parameters are frozen; "drop":
# their gradients are set to None.
TRAININGS = {trainings}


{engine_section}

# --- the reference: every rank's batch through a plain model, in this process ---------------------


def reference(rank, extra):
    """The same for a plain model: one copy per rank, their gradients averaged by hand."""
    models = [REFERENCE.build(each).train() for each in range(WORLD_SIZE)]
    optimizers = [REFERENCE.optimizers[OPTIMIZER](list(model.parameters())) for model in models]

    def happen(moment, step, micro=0):
        for kind, *names in extra.get((moment, step, micro), ()):
            for each, model in enumerate(models):
                if kind == "freeze":
                    for name, parameter in model.named_parameters():
                        parameter.requires_grad_(name not in names)
                elif kind == "drop":
                    for name in names:
                        model.get_parameter(name).grad = None
                else:
                    forward(model, batch_of(REFERENCE, step, micro, each), kind)

    for step in range(STEPS):
        losses = []
        happen("before the step", step)
        for micro in range(MICRO_BATCHES):
            happen("before the forward", step, micro)
            for each, model in enumerate(models):
                batch = batch_of(REFERENCE, step, micro, each)
                loss = REFERENCE.loss(model(*batch.args, **batch.kwargs), batch)
                losses += [loss.detach().clone()] if each == rank else []
                loss.backward()
            happen("after the backward", step, micro)
        happen("before the optimizer", step)
        for copies in zip(*(model.parameters() for model in models)):
            gradients = [copy.grad for copy in copies if copy.grad is not None]
            for copy in copies:
                copy.grad = sum(gradients) / WORLD_SIZE if gradients else None
        for model, optimizer in zip(models, optimizers):
            if MAX_NORM is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, NORM_TYPE)
            optimizer.step()
            optimizer.zero_grad()
        happen("after the optimizer", step)
        yield losses, {{name: parameter.detach().clone() for name, parameter in models[rank].named_parameters()}}


# --- both, step by step ---------------------------------------------------------------------------


def batch_of(workload, step, micro, rank):
    return workload.batch(BatchKey(step=step, micro=micro, rank=rank, world_size=WORLD_SIZE))


def forward(model, batch, kind):
    model.train(kind == "train")
    with torch.no_grad() if kind == "eval" else contextlib.nullcontext():
        model(*batch.args, **batch.kwargs)
    model.train()


def differences(rank, extra):
    """Where the engine differs from the reference, in order."""
    for step, (got, expected) in enumerate(zip(train(rank, extra), reference(rank, extra))):
        for micro, (ours, theirs) in enumerate(zip(got[0], expected[0])):
            if not torch.equal(ours, theirs):
                values = f"expected {{theirs.item()!r}}, got {{ours.item()!r}}"
                yield f"step {{step}}, loss of micro-batch {{micro}}: {{values}}"
        if got[1].keys() != expected[1].keys():
            yield f"step {{step}}: expected the parameters {{sorted(expected[1])}}, got {{sorted(got[1])}}"
        for name, theirs in expected[1].items():
            ours = got[1].get(name)
            if ours is not None and (ours.shape != theirs.shape or not torch.equal(ours, theirs)):
                yield f"step {{step}}, parameter {{name}}: expected {{some(theirs, ours)}}, got {{some(ours, theirs)}}"


def some(tensor, other):
    """The shape, or the first element that differs and where."""
    if tensor.shape != other.shape:
        return f"shape {{tuple(tensor.shape)}}"
    place = tuple((tensor != other).nonzero()[0].tolist())
    return f"{{tensor[place].item()!r}} at {{list(place)}}"


dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank = dist.get_rank()
if dist.get_world_size() != WORLD_SIZE:
    sys.exit(f"this script is for {{WORLD_SIZE}} ranks, got {{dist.get_world_size()}}")
found = [line for extra in TRAININGS for line in differences(rank, extra)]
everywhere = [None] * WORLD_SIZE
dist.all_gather_object(everywhere, found)
if rank == 0:
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
    sources = Sources() if by_calls else sources_for_adapters()
    made = [captured.maker(workload) for workload in (first.workload, first.reference or first.workload)]
    for each in made:
        sources.need(each.module, each.function)
    sources.need("fsdp_conformance.workload.definition", "BatchKey")
    definitions = list(sources.definitions)
    if by_calls:
        section = _by_calls(bound, by_calls, first, chosen)
    else:
        section = _by_code(bound, adapter, captured.trainings, sources)
    regime = first.regime
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
        imports=_imported({*sources.imports, *section.imports} - _PRESENT, section.environment),
        sources="\n\n\n".join(definitions),
        workload=made[0].expression,
        reference=made[1].expression,
        optimizer=regime.optimizer,
        steps=regime.steps,
        micro_batches=regime.micro_batches,
        reduced=tuple(regime.is_reduced(micro) for micro in range(regime.micro_batches)),
        max_norm=regime.max_norm,
        norm_type=regime.norm_type,
        trainings="[\n" + "".join(f"    {_extra(each.regime)!r},\n" for each in captured.trainings) + "]",
        engine_section=section.text,
    )
    _refuse_what_cannot_stand_alone(text)
    return text


def _by_calls(bound: BoundCase, engine: type[Adapter], first: Training, chosen: RunSettings) -> _Section:
    """One of torch's engines, as a user would call it."""
    _refuse_beyond(first, beyond_calls(engine, first.plan.capabilities() | first.workload.capabilities & _NEVER))
    calls = _calls(bound, first, chosen)
    function = calls.made[-1][0]
    text = _TORCH.format(
        calls="\n".join(f"    {line}" for line in _wrapping(calls)),
        reading=_READING[function],
        clipping=_CLIPPING[function],
    )
    return _Section(title=_ENGINES[function], text=text, imports=_imports(function, calls))


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
        definitions="\n\n\n".join([*sources.definitions[before:], classes]),
        adapter=adapter.__name__,
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


def _imported(imports: Set[str], environment: Mapping[str, str]) -> str:
    """The imports, after the variables that must be set before them."""
    lines = sorted(imports - {"import os"} if environment else imports)
    before = ["import os", "", f"os.environ.update({dict(environment)!r})", ""] if environment else []
    return "\n".join([*before, *lines])


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

#: Imports of every script.
_PRESENT = frozenset({"from __future__ import annotations", "import contextlib", "import sys"})


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
    root = "model"
    for function, names, given in calls.made:
        written = "".join(f", {name}={value}" for name, value in given.items())
        modules = ["model" if not name else f"model.get_submodule({name!r})" for name in names]
        target = modules[0] if len(modules) == 1 else f"[{', '.join(modules)}]"
        if function == "FullyShardedDataParallel" and names != ("",):
            yield f"wrap_unit(model, {names[0]!r}{written})"
        elif function == "fully_shard":
            yield f"fully_shard({target}{written})"
        else:
            root = f"{function}({target}{written})"
    yield f"return {root}"


def _imports(function: str, calls: Calls) -> set[str]:
    imports = {"import torch", "import torch.distributed as dist"}
    fsdp = sorted(calls.types | ({function} - {"DistributedDataParallel"}))
    if any("init_device_mesh" in value for _, _, given in calls.made for value in given.values()):
        imports.add("from torch.distributed.device_mesh import init_device_mesh")
    if fsdp:
        imports.add(f"from torch.distributed.fsdp import {', '.join(fsdp)}")
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
