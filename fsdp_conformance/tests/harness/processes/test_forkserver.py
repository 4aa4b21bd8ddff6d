"""The warm process: what it has imported, what happens when it cannot, and that a longer list leaks no server."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.harness.probe import run_in_child
from fsdp_conformance.harness.processes import cuda_driver, forkserver, preload, socket_directory
from fsdp_conformance.references.sharing import is_untouched

#: For waits that must end by themselves; nothing is judged by it.
PATIENCE_S = 240.0
POLL_S = 0.01


def facts() -> dict[str, object]:
    """State of a forked process; runs in the child."""
    import torch

    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "threads": len(os.listdir("/proc/self/task")),
        "missing": [name for name in preload.BASE if name not in sys.modules],
        "failures": preload.failures,
        "main": getattr(sys.modules["__main__"], "__file__", None),
        "cuda": (torch.cuda.is_initialized(), cuda_driver.cuda_is_initialised(), preload.cuda_initialised_by),
        "marker": os.environ.get("FSDP_CONFORMANCE_TEST_VARIABLE"),
        "start_method": __import__("multiprocessing").get_start_method(allow_none=True),
    }


def wait_for_end(pid: int) -> None:
    """Wait until a process is gone, or is a zombie that its parent has not reaped yet."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(POLL_S)
    raise TimeoutError(f"process {pid} did not end")


@pytest.mark.slow
def test_child_has_everything_imported() -> None:
    """A case finds its imports loaded, and the controller's own __main__ was not run again."""
    child_facts = run_in_child(facts)

    assert (child_facts["missing"], child_facts["failures"]) == ([], {})
    assert child_facts["main"] is None


@pytest.mark.nightly
def test_server_has_one_thread_and_no_cuda() -> None:
    """A fork copies one thread alone, and a driver that was started cannot be used in the copy."""
    child_facts = run_in_child(facts)

    # the second thread is the rank's own: it watches the controller
    assert (child_facts["threads"], child_facts["cuda"]) == (2, [False, False, None])


def test_child_gets_the_environment_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that was set after the server's start reaches a child; one that was removed does not."""
    run_in_child(facts)
    monkeypatch.setenv("FSDP_CONFORMANCE_TEST_VARIABLE", "now")

    assert run_in_child(facts)["marker"] == "now"

    monkeypatch.delenv("FSDP_CONFORMANCE_TEST_VARIABLE")

    assert run_in_child(facts)["marker"] is None
    assert run_in_child(facts, environment={"FSDP_CONFORMANCE_TEST_VARIABLE": "given"})["marker"] == "given"


def test_server_is_used_again() -> None:
    """Two children of the same list come from one server."""
    first, second = run_in_child(facts), run_in_child(facts)

    assert first["parent"] == second["parent"]
    assert first["pid"] != second["pid"]


def module_file(directory: Path, name: str, text: str) -> str:
    """A file of Python source."""
    path = directory / f"{name}.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def value_of(path: str) -> object:
    """Runs in the child: whether a file was imported before, and what it holds."""
    loaded = preload.module_name_of_file(Path(path)) in sys.modules
    return {"loaded": loaded, "value": preload.import_file(Path(path)).VALUE, "parent": os.getppid()}


@pytest.mark.nightly
def test_longer_list_grows_a_server_and_retires_the_last(tmp_path: Path) -> None:
    """A new module costs its own import; of the servers grown for it only the newest stays."""
    first = module_file(tmp_path, "first", "VALUE = 1")
    second = module_file(tmp_path, "second", "VALUE = 2")
    base = run_in_child(facts)["parent"]
    one = run_in_child(value_of, first, preload=(first,))
    two = run_in_child(value_of, second, preload=(second,))
    again = run_in_child(value_of, first, preload=(first,))

    assert [(item["loaded"], item["value"]) for item in (one, two, again)] == [(True, 1), (True, 2), (True, 1)]
    # what was asked for before is in the newest server too
    assert two["parent"] == again["parent"]
    assert len({base, one["parent"], two["parent"]}) == 3
    wait_for_end(one["parent"])
    assert base == run_in_child(facts)["parent"]


@pytest.mark.nightly
@pytest.mark.slow
def test_server_that_was_killed_is_started_again(tmp_path: Path) -> None:
    """The next child gets a new server, grown or not."""
    path = module_file(tmp_path, "third", "VALUE = 3")
    grown = run_in_child(value_of, path, preload=(path,))["parent"]
    os.kill(grown, 9)
    wait_for_end(grown)
    child_facts = run_in_child(value_of, path, preload=(path,))

    assert (child_facts["loaded"], child_facts["value"]) == (True, 3)
    assert grown != child_facts["parent"]


@pytest.mark.nightly
@pytest.mark.slow
def test_environment_of_the_imports_has_a_server_of_its_own(tmp_path: Path) -> None:
    """A module that reads a variable when it is imported finds it, in the server already."""
    variables = {"FSDP_CONFORMANCE_TEST_VARIABLE": "early"}
    path = module_file(tmp_path, "engine", "import os\nVALUE = os.environ.get('FSDP_CONFORMANCE_TEST_VARIABLE')")
    server = forkserver.server_for((path,), variables)

    assert server is forkserver.server_for((path,), variables)
    assert server is not forkserver.server_for((), {})

    answer = answer_from(server, path)

    assert {"loaded": True, "value": "early"}.items() <= answer.items()


@pytest.mark.slow
def test_code_under_test_has_a_server_of_its_own(tmp_path: Path) -> None:
    """A server that is asked for without an engine has never imported one, whatever was asked for before."""
    ours = module_file(tmp_path, "cases", "VALUE = 1")
    engine = module_file(tmp_path, "engine", "VALUE = 2")

    with_engine = forkserver.server_for((ours,), {}, engine=(engine,))
    without = forkserver.server_for((ours,), {})

    assert answer_from(with_engine, engine)["loaded"] is True
    assert answer_from(without, ours)["loaded"] is True
    assert answer_from(without, engine)["loaded"] is False


@pytest.mark.slow
def test_engines_share_no_server(tmp_path: Path) -> None:
    """A change that one engine makes when it is imported does not reach the next; a few servers are kept."""
    engines = [module_file(tmp_path, f"engine{number}", "VALUE = 2") for number in range(forkserver.MAX_ENGINES + 1)]

    servers = [forkserver.server_for((), {}, engine=(engine,)) for engine in engines]

    for server, engine in zip(servers[1:], engines[1:], strict=True):
        assert forkserver.server_for((), {}, engine=(engine,)) is server
        assert answer_from(server, engine)["loaded"] is True
        assert answer_from(server, engines[0])["loaded"] is False
    assert forkserver.server_for((), {}, engine=(engines[0],)) is not servers[0]


@pytest.mark.nightly
def test_an_engine_gets_a_server_after_the_suites_was_killed(tmp_path: Path) -> None:
    """Code under test runs under the same user, and may end any of them. Servers of other engines go on."""
    ours = module_file(tmp_path, "cases", "VALUE = 1")
    first, second = (module_file(tmp_path, name, "VALUE = 2") for name in ("first", "second"))
    of_first = forkserver.server_for((ours,), {}, engine=(first,))
    suites = answer_from(forkserver.server_for((ours,), {}), ours)["parent"]

    assert answer_from(of_first, first)["loaded"] is True

    assert isinstance(suites, int)
    os.kill(suites, signal.SIGKILL)
    wait_for_end(suites)

    assert answer_from(forkserver.server_for((ours,), {}, engine=(first,)), first)["loaded"] is True
    again = answer_from(forkserver.server_for((ours,), {}, engine=(second,)), second)
    assert (again["loaded"], again["value"]) == (True, 2)


@pytest.mark.nightly
@pytest.mark.slow
def test_expected_modules_are_imported_with_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of cases cost one server, and not one for each."""
    # Later tests in this process expect none of these.
    monkeypatch.setattr(forkserver, "_servers", type(forkserver._servers)())
    paths = [module_file(tmp_path, f"expected{number}", f"VALUE = {number}") for number in range(3)]
    forkserver.server_for()
    try:
        forkserver.expect(paths)
        servers = [forkserver.server_for((path,), {}) for path in paths]

        assert len(set(map(id, servers))) == 1
        assert [answer_from(servers[0], path)["loaded"] for path in paths] == [True] * 3
    finally:
        forkserver.stop_servers()


def answer_from(server: forkserver.WarmServer, path: str) -> dict[str, object]:
    """The result of `value_of` in a process of that server."""
    import multiprocessing

    ours, theirs = multiprocessing.Pipe()
    process = forkserver.start_process(send_value, path, theirs, server=server, name="value")
    theirs.close()
    try:
        if not ours.poll(PATIENCE_S):
            raise TimeoutError("no answer")
        return dict(json.loads(ours.recv_bytes()))
    finally:
        process.join(PATIENCE_S)
        ours.close()


def send_value(path: str, pipe: object) -> None:
    """Runs in the child."""
    pipe.send_bytes(json.dumps(value_of(path)).encode())  # type: ignore[attr-defined]


@pytest.mark.daily(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise ValueError('at import')", "ValueError: at import"),
        ("import pytest\npytest.skip('not here', allow_module_level=True)", "Skipped: not here"),
    ],
)
def test_failure_at_preload_is_kept(tmp_path: Path, text: str, reason: str) -> None:
    """A module that cannot be imported does not stop the server; every child knows of it."""
    path = module_file(tmp_path, "broken", text)

    assert reason == run_in_child(facts, preload=(path,))["failures"][path]


@pytest.mark.nightly
@pytest.mark.slow
def test_module_that_starts_cuda_is_named(tmp_path: Path) -> None:
    """A server whose driver is started knows who did it: ranks on GPUs need another (`test_cuda_imports`)."""
    path = module_file(
        tmp_path, "gpu", "import torch\ntorch.cuda.is_initialized = lambda: True  # as after a call to the driver"
    )

    assert [True, True, path] == run_in_child(facts, preload=(path,))["cuda"]
    # grown servers keep what they have imported: this one must not serve the tests after this one
    forkserver.stop_servers()


_IN_ITS_OWN_FORK = """
import json, os, sys
from fsdp_conformance.harness.processes import forkserver

output = os.dup(1)
before = [os.environ.get(name) for name in forkserver.SERVER_ENVIRONMENT]
forkserver.import_and_fork()
server = forkserver.server_for()._forkserver_pid
from fsdp_conformance.harness.probe import run_in_child
from fsdp_conformance.tests.harness.processes.test_forkserver import facts, wait_for_end

first = run_in_child(facts)
os.kill(server, 9)
wait_for_end(server)
second = run_in_child(facts)
told = {"server": server, "first": first, "second": second, "here": "torch" in sys.modules,
        "same": before == [os.environ.get(name) for name in forkserver.SERVER_ENVIRONMENT], "pid": os.getpid()}
os.write(output, json.dumps(told).encode())
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_server_that_was_forked_from_this_process() -> None:
    """It serves as one that was started would; if it dies, a new process takes its place."""
    done = subprocess.run(
        [sys.executable, "-c", _IN_ITS_OWN_FORK], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    child_facts = json.loads(done.stdout)

    assert child_facts["here"]
    assert child_facts["same"], "what only the imports needed is still set"
    assert child_facts["first"]["parent"] == child_facts["server"]
    assert child_facts["second"]["parent"] not in (child_facts["server"], child_facts["pid"])
    for child in (child_facts["first"], child_facts["second"]):
        assert (child["missing"], child["failures"], child["threads"]) == ([], {}, 2)
        assert child["cuda"] == [False, False, None]
    for pid in (child_facts["server"], child_facts["second"]["parent"]):
        wait_for_end(pid)


_IN_A_PROCESS_THAT_HAS_TORCH = """
import os, sys
import torch

torch.mark = 5417  # stands for what torch caches
from fsdp_conformance.harness.processes import forkserver

forkserver.import_and_fork()
from fsdp_conformance.harness.probe import run_in_child
from fsdp_conformance.tests.harness.processes.test_forkserver import has_mark

print(run_in_child(has_mark))
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_a_process_that_has_used_torch_is_not_forked() -> None:
    """Ranks would take what it has cached for their own."""
    done = subprocess.run(
        [sys.executable, "-c", _IN_A_PROCESS_THAT_HAS_TORCH],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )

    assert done.stdout.strip() == "False"


def has_mark() -> bool:
    """Runs in the child."""
    import torch

    return hasattr(torch, "mark")


@pytest.mark.nightly
@pytest.mark.slow
def test_server_that_dies_at_its_imports_is_reported(tmp_path: Path) -> None:
    """A module that ends the process is named, with the output of the server."""
    path = module_file(
        tmp_path, "fatal", "import os, sys\nprint('last words', file=sys.stderr, flush=True)\nos._exit(9)"
    )

    with pytest.raises(EnvironmentUnavailable, match="last words") as raised:
        run_in_child(facts, preload=(path,))

    assert "fatal.py" in str(raised.value)

    base = forkserver.server_for((path,), {"FSDP_CONFORMANCE_TEST_VARIABLE": "fatal"})
    with pytest.raises(EnvironmentUnavailable, match="last words"):
        answer_from(base, path)
    forkserver.stop_servers()
    assert run_in_child(facts)["missing"] == []


def test_file_is_executed_once_per_process(tmp_path: Path) -> None:
    """Two imports of a file give one module; a file that raises leaves none behind."""
    path = Path(module_file(tmp_path, "once", "VALUE = object()"))
    broken = Path(module_file(tmp_path, "raises", "raise ValueError('no')"))

    assert preload.import_file(path) is preload.import_target(str(path))
    with pytest.raises(ValueError, match="no"):
        preload.import_file(broken)
    assert preload.module_name_of_file(broken) not in sys.modules
    with pytest.raises(FileNotFoundError):
        preload.import_file(tmp_path / "absent.py")


def test_preload_module_needs_no_torch() -> None:
    """The controller may ask for names of files before torch is wanted."""
    code = (
        "import sys; from fsdp_conformance.harness import deadlines; "
        "from fsdp_conformance.harness.processes import preload; print('torch' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )

    assert answer.stdout.strip() == "False"


@pytest.mark.nightly
@pytest.mark.slow
def test_a_long_temporary_directory(tmp_path: Path) -> None:
    """Sockets are bound elsewhere, and nothing is left there or here."""
    long = tmp_path / ("long" * 30)
    long.mkdir()
    text = (
        "import multiprocessing.util, os\n"
        "from fsdp_conformance.harness.probe import run_in_child\n"
        "from fsdp_conformance.tests.harness.processes.test_forkserver import facts\n"
        "if __name__ == '__main__':\n"
        "    assert run_in_child(facts)['missing'] == []\n"
        "    print(multiprocessing.util.get_temp_dir())\n"
    )
    script = tmp_path / "script.py"
    script.write_text(text, encoding="utf-8")

    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "TMPDIR": str(long)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert not Path(done.stdout.strip()).exists()
    assert Path(done.stdout.strip()).parent != long
    assert [path.name for path in long.iterdir() if path.name.startswith(("pymp-", "fsdp-conformance-"))] == []


def test_no_short_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said what to do."""
    monkeypatch.setattr(socket_directory, "SHORT", ("/nowhere",))
    monkeypatch.setattr(tempfile, "tempdir", "/" + "long" * 30)
    monkeypatch.setattr(multiprocessing.process.current_process(), "_config", {})

    with pytest.raises(EnvironmentUnavailable, match=r"TMPDIR must be at most .* bytes long, got '/long"):
        socket_directory.prepare()


def test_a_server_without_an_engine_may_write_references() -> None:
    """Nothing that every server imports counts as code under test: no case would share its references."""
    assert is_untouched((*preload.BASE, *preload.OPTIONAL))
