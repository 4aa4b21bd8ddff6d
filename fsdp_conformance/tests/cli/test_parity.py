"""`parity` and `record` as a user types them, with FSDP2 on two ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import psutil
import pytest

from fsdp_conformance.recordings.events import Step
from fsdp_conformance.recordings.files import read
from fsdp_conformance.tests import warm_interpreter
from fsdp_conformance.tests.cli.cli_runs import answered, said, words
from fsdp_conformance.tests.parity.trainings import SAMPLES, Script, record

pytestmark = pytest.mark.slow

#: Accumulation without reduction, clipping, activation checkpoints, dropout and evaluation: all in one.
SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

queue = torch.autograd.Variable._execution_engine.queue_callback


def thrice(model):
    for parameter in model.parameters():
        if hasattr(parameter, "device_mesh"):
            parameter.grad.mul_(3)


def main(mistake):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(17, 17), nn.GELU(), nn.Dropout(0.1)) for _ in range(2)]
    model = nn.Sequential(*map(checkpoint_wrapper, blocks), nn.Linear(17, 5))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(3, 2, 2, 4, 17, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(rank)
    # An evaluation leaves the root unit gathered, so the first step begins with other parameters in its modules.
    model.eval()
    with torch.no_grad():
        model(data[0, 0, 0])
    model.train()
    for step in range(3):
        for number in range(2):
            model.set_requires_gradient_sync(number == 1)
            loss = model(data[step, number, rank]).square().mean() / 2
            if mistake == "sum" and number == 1:
                # Behind FSDP2's own callback, at the end of the backward.
                loss.register_hook(lambda gradient: queue(lambda: queue(lambda: thrice(model))))
            loss.backward()
        if mistake == "turned" and hasattr(model[2].weight, "device_mesh"):
            shard = model[2].weight.grad.to_local()
            shard.copy_(shard.roll(1, 1))
        if mistake == "own norm":
            shards = [parameter.grad.to_local() for parameter in model.parameters()]
            norm = torch.stack([shard.norm() for shard in shards]).norm()
            for shard in shards:
                shard.mul_((0.01 / norm).clamp(max=1.0))
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(data[0, 0, 0])
        model.train()
    # In one piece: both ranks write to one pipe.
    sys.stdout.write(f"trained {sys.argv[1:]}\\n")
    if mistake == "fails":
        raise ValueError("at the end")
    dist.destroy_process_group()


main(sys.argv[1] if len(sys.argv) > 1 else "")
"""

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.mark.nightly
def test_fsdp2_is_equal_bit_for_bit_to_the_script_without_it(script: Path, tmp_path: Path) -> None:
    run = said("parity", "--output", str(tmp_path / "out"), str(script), "none", "{run}")

    assert run.status == 0, run.output
    assert "EQUAL  3 steps of 2 ranks, bit for bit" in run.output
    assert run.output.count("trained ['none', 'run']") == run.output.count("trained ['none', 'reference']") == 2

    again = answered("parity", str(tmp_path / "out/run"), str(tmp_path / "out/reference"))

    assert again.status == 0, again.output
    assert "EQUAL  3 steps of 2 ranks, bit for bit" in again.output


@pytest.mark.nightly
def test_a_mistake_of_the_engine_is_named(script: Path) -> None:
    run = said("parity", str(script), "sum")

    assert run.status == 1, run.output
    assert "✗ The gradients differ, from step 0 on" in run.output
    assert "whose     the engine" in run.output
    assert "every element is 3 times the expected one" in run.output
    assert re.search(r"noticed   \S*train\.py:\d+\n", run.output)
    assert "DIFFERENT from step 0" in run.output


@pytest.mark.nightly
def test_a_norm_of_this_ranks_shard_is_the_mistake_of_the_script(script: Path) -> None:
    run = said("parity", str(script), "own norm")

    assert run.status == 1, run.output
    assert "✗ The gradients agree after the backward, but not after the script has changed them" in run.output
    assert "whose     the script" in run.output
    assert "clipped by a norm of this rank's shard alone" in run.output
    number = SCRIPT.splitlines().index("                shard.mul_((0.01 / norm).clamp(max=1.0))") + 1
    assert f"train.py:{number}\n" in run.output


@pytest.mark.nightly
def test_a_script_that_fails_in_the_end_is_recorded(script: Path, tmp_path: Path) -> None:
    command = words("record", "--output", str(tmp_path / "out"), "--", *TORCHRUN, str(script), "fails")
    # The traceback is the script's.
    done = warm_interpreter.run(command, timeout=240)

    assert done.returncode == 5, done.stdout + done.stderr
    assert "recorded 3 steps of 2 ranks" in done.stdout
    compared = answered("parity", str(tmp_path / "out"), str(tmp_path / "out"))
    assert compared.status == 0, compared.output


def test_a_suspicion_fails_where_it_should(tmp_path: Path) -> None:
    record(Script(samples=lambda data, rank: data[:SAMPLES]), tmp_path / "run")
    recordings = [str(tmp_path / "run")] * 2

    assert answered("parity", *recordings).status == 0
    strict = answered("parity", "--strict-suspicions", *recordings)

    assert strict.status == 1
    assert "? Every rank trains the same samples" in strict.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the path of a script, or -m and the name of a module, or two recordings"),
        (["none.py"], "there is no script 'none.py'"),
        (["--world-size", "0", "train.py"], "--world-size must be from 1 to 127, got 0"),
        (["--world-size", "two", "train.py"], "--world-size must be from 1 to 127, got two"),
        (["--timeout", "-1", "train.py"], "--timeout must be a positive number of seconds, got '-1'"),
        (["--reference", "none.py", "train.py"], "--reference must be a script with its arguments, a recording, or"),
        (["--nudged", ".", "train.py"], "--nudged is only for comparing two recordings"),
        (["."], "'.' is a directory"),
        ([".", "."], "it has no recording"),
    ],
)
def test_wrong_words_are_answered(
    arguments: list[str], message: str, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(script.parent)

    run = answered("parity", *arguments)

    assert run.status == 2
    assert message in run.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "out"], "give the command that trains, after --"),
        (["--output", "full", "--", "true"], "--output must be a new or an empty directory, got 'full'"),
        (["--output", "out", "--", "no-such-command"], "the command cannot be started: No such file"),
        (["--output", "out", "--timeout", "soon", "--", "true"], "--timeout must be a positive number"),
        (
            ["--output", "out", "--as-cuda", "0", "--", "true"],
            "--as-cuda must be a number of GPUs from 1 to 127, got 0",
        ),
        (["--output", "out", "--", "true"], "it has no recording: no process with this environment"),
    ],
)
def test_record_answers_wrong_words(
    arguments: list[str], message: str, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(script.parent)
    (script.parent / "full").mkdir()
    (script.parent / "full/file").touch()

    run = answered("record", *arguments)

    assert run.status == 2
    assert message in run.output


#: Breaks the recorder in its second step.
_BREAKS_RECORDER = """
import sys
import torch
from fsdp_conformance.recorder.observer import Observer

original = Observer._state_of
def broken(observer, optimizer):
    if observer._step == 1:
        raise RuntimeError("broken on purpose")
    return original(observer, optimizer)
Observer._state_of = broken

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("trained to the end")
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("status_of_script", "status"), [(0, 4), (1, 5)])
def test_training_goes_on_when_the_recorder_fails(status_of_script: int, status: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_BREAKS_RECORDER)
    script = [sys.executable, str(tmp_path / "train.py"), str(status_of_script)]

    run = answered("record", "--output", str(tmp_path / "out"), "--", *script)

    assert "trained to the end" in run.output
    message = (
        r"the recording ends in step 1, at .*train\.py:17, because the recorder failed: RuntimeError: broken on purpose"
    )
    assert re.search(message, run.output)
    assert "recorded 1 step of 1 rank" in run.output
    assert "the recorder failed on rank 0, so later steps are not recorded" in run.output
    assert run.status == status
    compared = answered("parity", str(tmp_path / "out"), str(tmp_path / "out"))
    assert compared.status == 4
    assert "ERROR_SUITE after 1 step of 1 rank" in compared.output


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    run = answered("record", "--output", str(tmp_path / "out"), "--timeout", "0.5", "--", "sleep", "600")

    assert run.status == 5, run.output
    assert "the command was ended after 0.5 s (--timeout) before it trained a step" in run.output


#: The model computes its loss, a mean over its rank's tokens; the ranks have other numbers of them.
UNEVEN = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(7, 5)

    def forward(self, x, y):
        output = self.layer(x)
        return output, nn.functional.cross_entropy(output, y, ignore_index=-100)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = Net()
if sys.argv[1] == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
elif sys.argv[1] == "fsdp1":
    model = FullyShardedDataParallel(module=model, device_id=torch.device("cpu"), use_orig_params=True)
else:
    fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
generator = torch.Generator().manual_seed(1)
for step in range(2):
    x, y = torch.randn(8, 7, generator=generator), torch.randint(0, 5, (8,), generator=generator)
    if sys.argv[1] == "fsdp2":
        y[:3] = -100
    size = 8 // dist.get_world_size()
    part = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
    scaler.scale(model(x[part], y[part])[1]).backward()
    if sys.argv[1] == "fsdp1" and sys.argv[2:] != ["of shards"]:
        model.clip_grad_norm_(1e6)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    path = tmp_path / "uneven.py"
    path.write_text(UNEVEN, encoding="utf-8")
    return path


@pytest.mark.nightly
def test_one_process_weighs_every_token_equally(uneven: Path, tmp_path: Path) -> None:
    run = said("parity", "--reference", "one-process", "--output", str(tmp_path / "out"), str(uneven), "fsdp2")

    assert run.status == 1, run.output
    assert "✗ The gradients differ, from step 0 on" in run.output
    assert "whose     the script" in run.output
    assert "a mean over the tokens or samples of each rank" in run.output
    assert "outputs agree" in run.output
    assert "? The loss is averaged over each batch by itself" in run.output
    assert "rank 0 micro-batch 0: 1, rank 1 micro-batch 0: 4" in run.output
    assert "? The gradients are clipped before they are unscaled" in run.output
    page = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert "The gradients differ, from step 0 on" in page
    assert "layer.weight" in page


@pytest.mark.nightly
def test_another_number_of_ranks_is_compared_by_samples(uneven: Path) -> None:
    run = said("parity", "--reference-world-size", "1", str(uneven), "fsdp1")

    assert run.status == 0, run.output
    assert "EQUAL  2 steps of 2 ranks, but for rounding" in run.output


@pytest.mark.nightly
def test_a_script_that_shards_nothing_has_no_reference(uneven: Path) -> None:
    run = said("parity", str(uneven), "ddp")

    assert run.status == 2, run.output
    assert "NOTHING COMPARED: the script shards nothing" in run.output


@pytest.mark.nightly
def test_a_norm_of_shards_alone_is_the_mistake_of_the_script(uneven: Path) -> None:
    run = said("parity", str(uneven), "fsdp1", "of shards")

    assert run.status == 1, run.output
    assert "✗ The norm of the gradients differs although the gradients agree, from step 0 on" in run.output
    assert "whose     the script" in run.output
    assert "each rank computed the norm of only its own shards" in run.output


#: FSDP1, whose state torch's checkpoints read; the second step of the reference fails.
CHECKPOINTED = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for step in range(2):
    if step == 1 and sys.argv[1:] == ["fails"]:
        assert model._exec_order_data is not None
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    get_state_dict(model, optimizer)
dist.destroy_process_group()
"""


@pytest.mark.nightly
def test_torchs_functions_for_checkpoints_take_the_reference(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CHECKPOINTED, encoding="utf-8")

    run = said("parity", str(tmp_path / "train.py"))

    assert run.status == 0, run.output
    assert "EQUAL  2 steps of 2 ranks" in run.output


@pytest.mark.nightly
def test_a_reference_that_fails_is_compared_as_far_as_it_comes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CHECKPOINTED, encoding="utf-8")

    # The traceback is the script's.
    done = warm_interpreter.run(words("parity", str(tmp_path / "train.py"), "fails"), timeout=240)

    assert done.returncode == 5, done.stdout + done.stderr
    assert "✗ The reference ended early, from step 1 on" in done.stdout
    assert "reference failed: status 1, AttributeError" in done.stdout + done.stderr


@pytest.mark.nightly
def test_a_run_that_never_trains_differs(tmp_path: Path) -> None:
    """It has begun to train, so there is something to compare, and no reference runs more than once."""
    (tmp_path / "plain.py").write_text(CHECKPOINTED, encoding="utf-8")
    wrong = CHECKPOINTED.replace("    optimizer.step()", "    raise ValueError('before the first step')")
    (tmp_path / "train.py").write_text(wrong, encoding="utf-8")

    command = words("parity", "--reference", str(tmp_path / "plain.py"), str(tmp_path / "train.py"))
    # The traceback is the script's.
    done = warm_interpreter.run(command, timeout=240)

    assert done.returncode == 1, done.stdout + done.stderr
    assert "DIFFERENT from step 0: the run ended early" in done.stdout
    assert "again: " not in done.stdout


@pytest.mark.nightly
def test_runs_that_fail_alike_before_they_train_leave_nothing_to_compare(tmp_path: Path) -> None:
    wrong = CHECKPOINTED.replace("    optimizer.step()", "    raise ValueError('before the first step')")
    (tmp_path / "train.py").write_text(wrong, encoding="utf-8")

    # The traceback is the script's.
    done = warm_interpreter.run(words("parity", str(tmp_path / "train.py")), timeout=240)

    assert done.returncode == 5, done.stdout + done.stderr
    assert "NOTHING COMPARED: no step was recorded on every rank" in done.stdout
    assert "before the first step" in done.stdout


HANGING = """
import time
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 0 and dist.get_rank() == 1:
        time.sleep(1000)
"""


@pytest.mark.nightly
def test_a_hang_shows_where_each_rank_is(tmp_path: Path) -> None:
    (tmp_path / "hang.py").write_text(HANGING, encoding="utf-8")
    command = ("--output", str(tmp_path / "out"), "--timeout", "40", "--", *TORCHRUN, str(tmp_path / "hang.py"))

    run = said("record", *command)

    assert run.status == 5, run.output
    assert "recorded 1 step of 2 ranks" in run.output
    for rank, line in ((0, 12), (1, 16)):
        _, _, rest = run.output.partition(f"rank {rank} (process ")
        assert f"hang.py:{line} in <module>" in rest.partition("rank ")[0], run.output
    assert not list((tmp_path / "out").glob("stack.*"))


@pytest.mark.nightly
def test_a_second_run_names_the_first_wrong_element(script: Path, tmp_path: Path) -> None:
    """Both sides run again up to the step; --no-values leaves that out."""
    run = said("parity", "--output", str(tmp_path / "out"), str(script), "turned")

    assert run.status == 1, run.output
    assert "in '2.weight', element [0, 0] of rank 0 is the first wrong one" in run.output
    assert "likely    shards in the wrong place: all columns are turned by 1" in run.output
    ranks = read(tmp_path / "out/run-values").ranks
    assert [sum(isinstance(event, Step) for event in rank.events) for rank in ranks] == [1, 1]

    without = said("parity", "--no-values", str(script), "turned")

    assert without.status == 1, without.output
    assert "run-values" not in without.output
    assert "first wrong one" not in without.output


#: Rank 0 evaluates alone when rank 1 has left: it returns, or it goes on without a process group, and rank 0 hangs.
LEFT = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    with torch.no_grad():
        model(torch.ones(1, 4))
elif sys.argv[1].startswith("destroyed"):
    dist.destroy_process_group()
    if sys.argv[1] == "destroyed in run":
        open("pid", "w").write(str(os.getpid()))
        time.sleep(1000)  # lives on until it is killed at the timeout
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "words_of_it"),
    [("returned", "rank 1 had ended"), ("destroyed", "rank 1 had destroyed its process group · train.py:20")],
)
def test_rank_0_evaluates_when_the_others_have_left(how: str, words_of_it: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LEFT, encoding="utf-8")

    # The traceback is the script's.
    command = words("parity", "--timeout", "60", "train.py", f"{how} in {{run}}")
    done = warm_interpreter.run(command, cwd=tmp_path, timeout=240)

    assert done.returncode == 1, done.stdout + done.stderr
    assert "✗ The ranks ran different forwards, from step 2 on" in done.stdout
    assert "rank 0 ran a forward that rank 1 did not · evaluation at train.py:18" in done.stdout
    assert words_of_it in done.stdout
    if how == "destroyed":
        assert not psutil.pid_exists(int((tmp_path / "pid").read_text(encoding="utf-8")))
