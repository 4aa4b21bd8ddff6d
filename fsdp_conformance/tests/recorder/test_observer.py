"""A recorded training has its events, and computes what it computes without."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.parity.runs import Run
from fsdp_conformance.recorder import observer as observer_module
from fsdp_conformance.recorder.hooks import watch_unit
from fsdp_conformance.recorder.names import named_leaves
from fsdp_conformance.recorder.process import recording
from fsdp_conformance.recordings import files
from fsdp_conformance.recordings.events import ALIAS, Backward, Clip, Event, Forward, Initial, Mark, Step
from fsdp_conformance.tests.parity.trainings import as_rank


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 6)
        self.drop = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(6)
        self.outer = nn.Linear(6, 2)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.outer(self.norm(self.drop(self.inner(x))))
        return {"logits": hidden if scale is None else hidden * scale}


def train(model: nn.Module, steps: int = 3) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        output = model(torch.randn(4, 5), scale=torch.tensor(2.0))
        nn.MSELoss()(output["logits"], torch.zeros(4, 2)).backward()
        nn.utils.clip_grad_norm_((parameter for parameter in model.parameters()), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def events(directory: Path) -> tuple[Event, ...]:
    return files.read(directory).ranks[0].events


def of(kind: type[Any], directory: Path) -> list[Any]:
    return [event for event in events(directory) if isinstance(event, kind)]


class Answer(OrderedDict[str, Any]):
    """As Hugging Face's outputs: registered, but without names for what it holds."""


class Pair:
    """The same, and no mapping."""

    def __init__(self, *items: Any) -> None:
        self.items = items


pytree.register_pytree_node(
    Answer,
    lambda answer: (list(answer.values()), list(answer)),
    lambda items, keys: Answer(zip(keys, items, strict=True)),
)
pytree.register_pytree_node(Pair, lambda pair: (list(pair.items), None), lambda items, _: Pair(*items))


@pytest.mark.parametrize(
    ("value", "places"),
    [
        ({"a": (1, [2])}, {"['a'][0]": 1, "['a'][1][0]": 2}),
        (Answer(loss=1, hidden=(2, 3)), {"['loss']": 1, "['hidden'][0]": 2, "['hidden'][1]": 3}),
        ([Answer(loss=1), {"b": Pair(2, 3)}], {"[0]['loss']": 1, "[1]['b'][0]": 2, "[1]['b'][1]": 3}),
        (Pair(Answer(loss=1), 2), {"[0]": 1, "[1]": 2}),
        (1, {"": 1}),
    ],
)
def test_everything_in_an_output_has_a_place(value: object, places: dict[str, int]) -> None:
    assert dict(named_leaves(value)) == places


def test_outputs_of_classes_without_names_are_recorded(tmp_path: Path) -> None:
    class Answering(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return Answer(loss=super().forward(x).sum())

    with recording(tmp_path):
        model = Answering(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2))["loss"].backward()
        optimizer.step()

    assert [set(forward.outputs) for forward in of(Forward, tmp_path)] == [{"['loss']"}]


def test_a_recorded_training_computes_the_same_bits(tmp_path: Path) -> None:
    results = []
    for is_recorded in (False, True):
        torch.manual_seed(0)
        model = Model()
        if is_recorded:
            with recording(tmp_path / "run"):
                optimizer = train(model)
        else:
            optimizer = train(model)
        states = [state["momentum_buffer"] for state in optimizer.state.values()]
        results.append((list(model.state_dict().values()), states, torch.get_rng_state()))

    (values, states, random), (recorded, recorded_states, recorded_random) = results
    assert all(map(torch.equal, values, recorded))
    assert all(map(torch.equal, states, recorded_states))
    assert torch.equal(random, recorded_random)


def test_everything_is_put_back(tmp_path: Path) -> None:
    before = (nn.Module.__call__, torch.autograd.backward, nn.utils.clip_grad_norm_, torch.save, torch.load)

    with recording(tmp_path / "run"):
        assert nn.Module.__call__ is not before[0]
        train(Model(), 1)

    assert before == (nn.Module.__call__, torch.autograd.backward, nn.utils.clip_grad_norm_, torch.save, torch.load)


def test_a_step_has_its_events_in_order(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with recording(tmp_path / "run"):
        train(Model(), 2)

    kinds = [type(event) for event in events(tmp_path / "run") if not isinstance(event, Mark)]
    assert kinds == [Initial, Forward, Backward, Clip, Step, Forward, Backward, Clip, Step]
    forward, step = of(Forward, tmp_path / "run")[0], of(Step, tmp_path / "run")[1]
    assert (forward.module, forward.training, forward.with_gradients) == ("Model", True, True)
    assert forward.inputs.keys() == {"[0][0]", "[1]['scale']"}
    assert len(forward.inputs["[0][0]"].samples) == 4
    assert forward.outputs.keys() == {"['logits']"}
    assert forward.line.partition(":")[0].endswith("test_observer.py")
    names = ["inner.weight", "inner.bias", "norm.weight", "norm.bias", "outer.weight", "outer.bias"]
    assert list(step.gradients) == list(step.parameters) == names
    assert list(step.state) == [f"{name}/momentum_buffer" for name in names]
    assert list(step.buffers) == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert step.groups[0].settings["momentum"] == 0.9
    assert (step.step, step.optimizer, step.untrained, step.kept) == (1, "SGD", (), 0)


def test_names_are_those_of_the_unwrapped_model(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Model()
    model.inner = checkpoint_wrapper(model.inner)  # type: ignore[assignment]
    with recording(tmp_path / "run"):
        train(model, 1)

    assert list(of(Step, tmp_path / "run")[0].parameters)[:2] == ["inner.weight", "inner.bias"]


def test_several_modules_and_optimizers_are_told_apart(tmp_path: Path) -> None:
    with recording(tmp_path / "run"):
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (first, second)]
        second(first(torch.ones(1, 2))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    steps = of(Step, tmp_path / "run")
    assert [step.optimizer for step in steps] == ["SGD", "SGD 2"]
    assert [list(step.parameters) for step in steps] == [["weight", "bias"], ["Linear(2).weight", "Linear(2).bias"]]
    assert [step.untrained for step in steps] == [("Linear(2).weight", "Linear(2).bias"), ()]


@pytest.mark.slow
def test_evaluation_is_marked_and_does_not_pile_up(tmp_path: Path) -> None:
    model = Model().eval()
    with recording(tmp_path / "run"):
        with torch.no_grad():
            for _ in range(200):
                model(torch.ones(1, 5))
        model.train()
        train(model, 1)

    forwards = of(Forward, tmp_path / "run")
    assert [forward.with_gradients for forward in forwards] == [False] * 200 + [True]
    assert [forward.training for forward in forwards] == [False] * 200 + [True]


def test_a_closure_is_part_of_its_step(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    with recording(tmp_path / "run"):
        optimizer.step(closure)

    steps = of(Step, tmp_path / "run")
    assert [step.optimizer for step in steps] == ["LBFGS"]
    assert len(of(Backward, tmp_path / "run")) >= 2


@pytest.mark.parametrize("is_named", [False, True], ids=["positional", "named"])
def test_a_closure_makes_the_gradients_of_its_step(is_named: bool, tmp_path: Path) -> None:
    """As in Lightning, whose closures add to the gradients of earlier micro-batches, and clip them."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(factor: float) -> Tensor:
        loss: Tensor = model(torch.full((2, 3), factor)).sum()
        loss.backward()
        return loss

    def closure() -> Tensor:
        loss = backward(2.0)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return loss

    with recording(tmp_path / "run"):
        backward(1.0)
        optimizer.step(closure=closure) if is_named else optimizer.step(closure)

    (step,), (clip,) = of(Step, tmp_path / "run"), of(Clip, tmp_path / "run")
    assert sum(value.square for value in step.gradients.values()) == pytest.approx(0.25, rel=1e-3)
    # Clipping saw the gradients of both micro-batches, and nothing has changed them before.
    assert clip.gradients["weight"].square == pytest.approx(3 * (2 + 4) ** 2)
    assert step.changed == step.rewritten == ""


def test_a_closure_of_an_optimizer_inside_another_one_is_part_of_the_outer_step(tmp_path: Path) -> None:
    class Outer(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    model = nn.Linear(3, 1, bias=False)
    optimizer = Outer(torch.optim.SGD(model.parameters(), lr=0.1))

    def closure() -> Tensor:
        loss: Tensor = model(torch.ones(2, 3)).sum()
        loss.backward()
        return loss

    with recording(tmp_path / "run"):
        optimizer.step(closure)

    (step,) = of(Step, tmp_path / "run")
    assert (step.optimizer, step.gradients["weight"].square) == ("Outer", pytest.approx(12.0))


def test_a_state_of_one_element_is_on_one_rank_alone(tmp_path: Path) -> None:
    """The other rank has an empty shard of it."""
    for rank in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            mesh = init_device_mesh("cpu", (2,))
            local = torch.ones(1 - rank)
            module = nn.Module()
            module.scale = nn.Parameter(_one_element(local, mesh))
            module.forward = lambda x, local=local: x * local.sum()
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, foreach=False)
            with as_rank(rank, 2), recording(tmp_path / "run"):
                module(torch.ones(2))
                module.scale.grad = _one_element(local, mesh)
                optimizer.step()
        finally:
            dist.destroy_process_group()

    for rank, recorded in enumerate(files.read(tmp_path / "run").ranks):
        (step,) = [event for event in recorded.events if isinstance(event, Step)]
        elements = {name: value.elements for name, value in step.state.items()}
        assert elements == {"scale/exp_avg": 1 - rank, "scale/exp_avg_sq": 1 - rank}
        assert step.counters == {"scale/step": 1.0}


def _one_element(local: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size([1]), stride=(1,))


def test_a_step_that_raises_is_not_a_part_of_later_ones(tmp_path: Path) -> None:
    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise RuntimeError("a gradient is not finite")
            return super().step(closure)

    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with contextlib.suppress(RuntimeError):
                failing.step()
            return super().step(closure)

    model = nn.Linear(3, 1)
    failing, outer = Failing(model.parameters(), lr=0.1), Outer(model.parameters(), lr=0.1)
    with recording(tmp_path / "run"):
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            with pytest.raises(RuntimeError, match="not finite"):
                failing.step()
            outer.step()
        failing.fails = False
        failing.step()

    assert [step.optimizer for step in of(Step, tmp_path / "run")] == ["Outer", "Outer", "Failing"]


def test_a_loss_has_the_scale_of_its_gradient_scaler(tmp_path: Path) -> None:
    """The comparison divides by it if it covers all backwards of a step."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    enabled = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with recording(tmp_path / "run"):
        for scalers in ([enabled, enabled], [enabled, None], [torch.amp.GradScaler("cpu", enabled=False)]):
            for scaler in scalers:
                loss = model(torch.ones(2, 3)).square().sum() + 1
                (scaler.scale(loss) if scaler is not None else loss).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert [backward.scale for backward in of(Backward, tmp_path / "run")] == [1024.0, 1024.0, 1024.0, 1.0, 1.0]
    both, one, none = Run(files.read(tmp_path / "run")).steps
    for step, are_scaled in ((both, [False, False]), (one, [True, False]), (none, [False])):
        assert [(each.loss or 0) > 1000 for each in step.backwards[0]] == are_scaled


def test_saves_and_loads_are_marked(tmp_path: Path) -> None:
    model = Model()
    with recording(tmp_path / "run"):
        train(model, 1)
        torch.save(model.state_dict(), tmp_path / "model.pt")
        model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))

    kinds = [mark.kind for mark in of(Mark, tmp_path / "run")]
    assert [kind for kind in kinds if kind != "forward"] == ["clear", "save", "load", "load state"]


def test_the_line_that_loads_a_first_state_is_part_of_the_initial_values(tmp_path: Path) -> None:
    model = Model()
    with recording(tmp_path / "run"):
        model.load_state_dict(Model().state_dict())
        train(model, 1)
        model.load_state_dict(Model().state_dict())

    (initial,) = of(Initial, tmp_path / "run")
    assert "test_observer.py:" in initial.loaded


@pytest.mark.parametrize(("copies", "detail"), [(lambda state: state, ALIAS), (copy.deepcopy, ""), (len, "")])
def test_a_state_that_is_the_model_itself_is_marked(copies: Any, detail: str, tmp_path: Path) -> None:
    """Loading it has no effect. Whatever is given in place of a state, the error is torch's."""
    model = Model()
    with recording(tmp_path / "run"):
        train(model, 1)
        with contextlib.suppress(TypeError):
            model.load_state_dict(copies(model.state_dict()))

    details = [mark.detail for mark in of(Mark, tmp_path / "run") if mark.kind == "load state"]
    assert details == [detail]


def test_units_that_are_resharded_in_a_loop_have_one_mark_until_the_next_forward(tmp_path: Path) -> None:
    """A second call from the same line counts again after an evaluation."""
    model = Model()

    def reshard() -> None:
        for _ in range(3):
            with contextlib.suppress(AttributeError):
                fsdp.FSDPModule.reshard(model)  # type: ignore[arg-type]

    with recording(tmp_path / "run"):
        train(model, 1)
        reshard()
        with torch.no_grad():
            model(torch.ones(2, 5))
        reshard()
        train(model, 1)

    shown = [
        "reshard" if isinstance(event, Mark) else "forward"
        for event in events(tmp_path / "run")
        if isinstance(event, Forward) or (isinstance(event, Mark) and event.kind == "resharded")
    ]
    assert shown == ["forward", "reshard", "forward", "reshard", "forward"]


def test_a_rank_that_destroys_its_process_group_has_left(tmp_path: Path) -> None:
    """Before its group is gone, and not with a group of some ranks; what it has recorded is in its file by then."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with recording(tmp_path / "run"):
            train(Model(), steps=1)
            dist.destroy_process_group(dist.new_group([0]))
            model = nn.Linear(5, 2)
            model(torch.ones(1, 5))
            dist.destroy_process_group()
            *_, forward, last = events(tmp_path / "run")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()

    assert isinstance(forward, Forward)
    assert isinstance(last, Mark)
    assert (last.kind, last.step) == ("left", 1)
    assert "test_observer.py:" in last.line
    assert sum(isinstance(event, Mark) and event.kind == "left" for event in events(tmp_path / "run")) == 1


def test_a_deferred_reduction_is_seen_inside_a_wrapper(tmp_path: Path) -> None:
    """As Lightning Fabric puts one around DDP and FSDP1."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with recording(tmp_path / "run"):
            inner = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
            model = nn.Sequential(inner)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with inner.no_sync():
                model(torch.ones(1, 3)).sum().backward()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    finally:
        dist.destroy_process_group()

    assert [backward.is_reduced for backward in of(Backward, tmp_path / "run")] == [False, True]


def test_hooks_of_units_are_copied_and_saved_with_them(tmp_path: Path) -> None:
    unit = nn.Linear(2, 2)
    watch_unit(unit)
    with recording(tmp_path / "run"):
        nn.Sequential(copy.deepcopy(unit), pickle.loads(pickle.dumps(unit)))(torch.ones(1, 2))

    assert list(of(Forward, tmp_path / "run")[0].units) == ["0", "1"]


def test_hooks_of_parameters_that_never_run_are_named(tmp_path: Path) -> None:
    """As where an engine sets the gradients of its shards itself."""
    with recording(tmp_path / "run"):
        model = nn.Linear(5, 2)
        model.weight.register_hook(torch.neg)
        model.weight.register_hook(lambda gradient: 2 * gradient)
        model.bias.register_hook(lambda gradient: 3 * gradient)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (model(torch.ones(1, 5)) * model.weight.sum()).sum().backward()
        optimizer.step()
        nn.functional.linear(torch.ones(1, 5), model.weight).sum().backward()
        optimizer.step()

    first, second = of(Step, tmp_path / "run")
    assert len(first.hooks) == 2
    assert (first.silent_hooks, second.silent_hooks) == ((), first.hooks[1:])


@pytest.mark.slow
def test_a_compiled_model_is_recorded_at_its_boundary(tmp_path: Path) -> None:
    model = Model()
    with recording(tmp_path / "run"):
        train(torch.compile(model, backend="eager"), 1)  # type: ignore[arg-type]

    step = of(Step, tmp_path / "run")[0]
    assert list(step.parameters)[:2] == ["inner.weight", "inner.bias"]
    assert of(Forward, tmp_path / "run")[0].module == "Model"


def test_an_exception_is_the_end_and_leaves_nothing_behind(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> None:
            raise ValueError("no forward")

    call = nn.Module.__call__
    model = nn.Sequential(Broken())
    with pytest.raises(ValueError, match="no forward"), recording(tmp_path / "run"):
        model(torch.ones(1))

    end = files.read(tmp_path / "run").ranks[0].end
    assert end is not None
    assert end.error == "ValueError: no forward"
    assert nn.Module.__call__ is call


def test_a_forked_process_writes_nothing(tmp_path: Path) -> None:
    with recording(tmp_path / "run"):
        model = Model()
        train(model, 1)
        child = os.fork()
        if not child:
            try:
                # The threads that torch computes with exist in its parent alone.
                torch.set_num_threads(1)
                train(model, 1)
            finally:
                os._exit(0)
        os.waitpid(child, 0)

    assert len(of(Step, tmp_path / "run")) == 1
    assert len(list((tmp_path / "run").iterdir())) == 1


def test_training_goes_on_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: Path, *args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", full)
    with recording(tmp_path / "run"):
        train(Model(), 1)

    assert "the recording is incomplete: [Errno 28] No space left on device" in capsys.readouterr().err


def test_one_recording_at_a_time(tmp_path: Path) -> None:
    with (
        recording(tmp_path / "run"),
        pytest.raises(ConfigError, match="records already"),
        recording(tmp_path / "other"),
    ):
        pass
    with recording(tmp_path / "run"):
        train(Model(), 1)
    with pytest.raises(ConfigError, match="has recorded here before"), recording(tmp_path / "run"):
        pass


def test_a_nudge_is_a_rounding_error_of_every_parameter() -> None:
    torch.manual_seed(0)
    model = Model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    state = torch.get_rng_state()

    observer_module.nudge(model, 0.0)

    assert torch.equal(torch.get_rng_state(), state)
    for parameter, value in zip(model.parameters(), before, strict=True):
        if not value.any():
            assert torch.equal(parameter, value)
            continue
        changed = ((parameter.detach() - value) / value).abs()
        assert 0.9 * 2**-24 < float(changed[value != 0].min())
        assert float(changed[value != 0].max()) < 2.1 * 2**-23
