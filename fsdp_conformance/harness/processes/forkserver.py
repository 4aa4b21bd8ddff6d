"""
The warm server: a process that has already imported torch and the case modules, and forks ranks.

It is `multiprocessing`'s forkserver, with three differences. It imports through `preload`, whose failures are not
silent. Its children do not import the controller's `__main__` again (pytest's console script costs 0.5 s per rank),
unless the test class is defined there. And a longer preload list does not start from scratch: the first server forks
another one, which imports only what is new.

The server never initialises CUDA: a forked child cannot use a driver that its parent started. Importing
torch.testing._internal.common_utils calls `torch.cuda.is_available()`, which starts the driver unless
PYTORCH_NVML_BASED_CUDA_CHECK=1 makes torch ask NVML, so the server sets that variable. Where NVML knows nothing, a
child of the server asks the driver (`cuda_driver`). If a module starts the driver all the same,
`preload.cuda_initialised_by` names it, and ranks on GPUs get a server without it (`cuda_imports`).
"""

from __future__ import annotations

import atexit
import inspect
import io
import json
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.popen_forkserver
import multiprocessing.process
import multiprocessing.reduction
import multiprocessing.resource_tracker
import multiprocessing.spawn
import multiprocessing.util
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn, TypeAlias

from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.harness.processes import preload, socket_directory

#: Set for the server, so that importing libraries starts no threads: a fork copies only the calling thread.
SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Otherwise torch's TestCase adds four lines about torch's repository to every exception. Read at import.
    "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
}

#: How long the first rank waits for the server's imports. They take 5 s on two idle cores, and more with an engine's.
START_TIMEOUT_S = 300.0

#: How often a wait for the first fork checks that the server is alive.
_SLICE_S = 0.5

#: A server that has not ended this long after it was asked to is killed.
STOP_TIMEOUT_S = 5.0

#: Since Python 3.14 a server and its clients prove to each other that they know a key.
_HAS_KEY = "authkey_r" in inspect.signature(multiprocessing.forkserver.main).parameters
_KEY_BYTES = 32

#: The most servers kept at once, one per environment: each takes 300 MB.
MAX_SERVERS = 3

#: Servers with an engine that are kept for each environment.
MAX_ENGINES = 3

_Environment: TypeAlias = frozenset[tuple[str, str]]
_Engine: TypeAlias = tuple[str, ...]
"""The modules of an engine that the suite's own server has not imported."""


class WarmServer(multiprocessing.forkserver.ForkServer):
    """A forkserver with its own preload list and environment."""

    def __init__(self, modules: Iterable[str], environment: Mapping[str, str]) -> None:
        super().__init__()
        self.modules = tuple(modules)
        self.environment = dict(environment)
        self.set_forkserver_preload([preload.__name__])
        # Attributes of the base class, which its stubs leave out.
        self._lock: threading.Lock = threading.Lock()
        self._forkserver_pid: int | None = None
        self._forkserver_address: str | None = None
        self._forkserver_alive_fd: int | None = None
        self._forkserver_authkey: bytes | None = None
        self._owner = os.getpid()
        self._log: IO[str] | None = None
        self._log_path = Path()
        self._last_words = ""

    @property
    def imported(self) -> frozenset[str]:
        """Everything that the server has imported, or will have at its first fork."""
        return frozenset(self.modules)

    def ensure_running(self) -> None:
        """Start the server unless it is running. Returns at once; the first fork waits for the imports."""
        socket_directory.prepare()
        if self._forkserver_pid is None or self._has_ended():
            self._open_log()
        orders = {"modules": self.modules, "sys_path": absolute_sys_path(), "log": str(self._log_path)}
        with environment({**SERVER_ENVIRONMENT, **self.environment, preload.ORDERS_VARIABLE: json.dumps(orders)}):
            super().ensure_running()

    def connect_to_new_process(self, fds: Any) -> Any:
        """
        As in the base class, but with a deadline: with a key, the caller waits until the server has finished its
        imports.

        Raises EOFError if the server ends in the meantime.
        """
        self.ensure_running()
        if self._forkserver_authkey is None:
            return super().connect_to_new_process(fds)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(self._forkserver_address or "")
            try:
                _await_answer(client.fileno(), self)
                _prove_key(client, self._forkserver_authkey)
                return self._send_pipes(client, fds)
            except ConnectionError as error:
                raise EOFError("the server has ended") from error

    def _send_pipes(self, client: socket.socket, fds: list[int]) -> tuple[int, int]:
        """Ask for a process. Returns where its pid and its exit code can be read, and where its data is written."""
        parent_r, child_w = os.pipe()
        child_r, parent_w = os.pipe()
        alive: Any = self._forkserver_alive_fd
        tracker: Any = multiprocessing.resource_tracker.getfd()
        try:
            multiprocessing.reduction.sendfds(client, [child_r, child_w, alive, tracker, *fds])
        except BaseException:
            _close_all(parent_r, parent_w)
            raise
        finally:
            _close_all(child_r, child_w)
        return parent_r, parent_w

    def log_tail(self) -> str:
        """The end of what the server wrote to stdout and stderr."""
        if self._log is None:
            return self._last_words
        self._log.seek(0)
        return self._log.read()[-2000:]

    def _open_log(self) -> None:
        """Create a file for the server's output. The server unlinks it, so it cannot outlive a killed controller."""
        self._close_log()
        descriptor, path = tempfile.mkstemp(prefix="fsdp-conformance-warm-", suffix=".log")
        self._log, self._log_path = os.fdopen(descriptor, "r", errors="replace"), Path(path)

    def _close_log(self) -> None:
        if self._log is not None:
            self._last_words = self.log_tail()
            self._log.close()
            self._log_path.unlink(missing_ok=True)
            self._log = None

    def retire(self) -> None:
        """Ask the server to end, which it does when the last process forked from it has ended."""
        if self._forkserver_alive_fd is not None and self._owner == os.getpid():
            os.close(self._forkserver_alive_fd)
            self._forkserver_alive_fd = None

    def reap(self) -> bool:
        """True if a retired server has ended; does not wait."""
        pid = self._forkserver_pid
        if pid is not None:
            try:
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    return False
            except ChildProcessError:
                pass
            self._forget()
        return True

    def is_lost(self) -> bool:
        """True if a server that should run has ended. Does not wait. The next use starts a lost server again."""
        if not self._has_ended():
            return False
        self.retire()
        return self.reap()

    def _has_ended(self) -> bool:
        if self._forkserver_pid is None:
            return True
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT  # does not reap it
        try:
            return os.waitid(os.P_PID, self._forkserver_pid, flags) is not None
        except ChildProcessError:
            return True

    def kill(self) -> None:
        """End a retired server that did not end by itself."""
        if self._forkserver_pid is not None:
            os.kill(self._forkserver_pid, signal.SIGKILL)
            os.waitpid(self._forkserver_pid, 0)
            self._forget()

    def _forget(self) -> None:
        """Forget a server that has ended, and remove its socket and its log."""
        self._forkserver_pid = self._forkserver_authkey = None
        address, self._forkserver_address = self._forkserver_address, None
        if address is not None and not multiprocessing.util.is_abstract_socket_namespace(address):
            Path(address).unlink(missing_ok=True)
        self._close_log()


class ForkedServer(WarmServer):
    """A forkserver forked from this process, which has imported the modules. If it dies, a new process replaces it."""

    def __init__(self) -> None:
        super().__init__((*preload.BASE, *preload.OPTIONAL), {})
        socket_directory.prepare()
        multiprocessing.resource_tracker.ensure_running()
        self._open_log()
        self._forkserver_authkey = _new_key()
        with _listening() as (listener, address, alive_r, alive_w):
            pid = os.fork()
            if pid == 0:
                self._serve(listener, alive_r, alive_w)
        self._forkserver_address = address
        self._forkserver_alive_fd = alive_w
        self._forkserver_pid = pid

    def _serve(self, listener: socket.socket, alive_r: int, alive_w: int) -> NoReturn:
        """In the child: bring the process into the state of a new one, then serve."""
        try:
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(signum, signal.SIG_DFL)
            os.close(alive_w)
            preload.redirect_output(str(self._log_path))
            os.environ.update(SERVER_ENVIRONMENT)
            sys.path[:] = absolute_sys_path()
            _run(listener.detach(), alive_r, self._forkserver_authkey)
        finally:
            os._exit(0)


class GrownServer(WarmServer):
    """A forkserver forked from another one, with more modules imported."""

    def __init__(self, base: WarmServer, modules: Iterable[str]) -> None:
        super().__init__(modules, base.environment)
        self._base = base
        self._process: WarmProcess | None = None

    def connect_to_new_process(self, fds: Any) -> Any:
        """As in the base class, but start a server again that has just died, before its parent has noticed."""
        try:
            return super().connect_to_new_process(fds)
        except (ConnectionRefusedError, ConnectionResetError):
            with self._lock:
                self.retire()
                self._forget()
                self._process = None
            return super().connect_to_new_process(fds)

    def ensure_running(self) -> None:
        """Start the server unless it runs."""
        socket_directory.prepare()
        with self._lock:
            if self._process is not None and self._process.exitcode is None:
                return
            if self._process is not None:
                self.retire()
                self._forget()
            key = _new_key()
            with _listening() as (listener, address, alive_r, alive_w):
                self._process = WarmProcess(
                    self._base,
                    target=_serve,
                    args=(_Descriptor(listener.fileno()), _Descriptor(alive_r), key, self.modules, absolute_sys_path()),
                    name="fsdp-conformance-warm",
                )
                self._process.start()
            self._forkserver_address = address
            self._forkserver_alive_fd = alive_w
            self._forkserver_authkey = key
            self._forkserver_pid = self._process.pid

    @property
    def imported(self) -> frozenset[str]:
        """Its own modules, and those of the server that it was forked from."""
        return self._base.imported.union(self.modules)

    def is_grown_from(self, base: WarmServer) -> bool:
        """True if it was forked from that server."""
        return self._base is base

    def log_tail(self) -> str:
        """The end of what the servers wrote to stdout and stderr: both use the base's log."""
        return self._base.log_tail()

    def reap(self) -> bool:
        """True if a retired server has ended; does not wait."""
        if self._process is not None:
            if self._process.exitcode is None:
                return False
            self._process = None
            self._forget()
        return True

    def _has_ended(self) -> bool:
        return self._process is None or self._process.exitcode is not None

    def kill(self) -> None:
        """End a retired server that did not end by itself."""
        if self._process is not None:
            self._process.kill()
            self._process.join(STOP_TIMEOUT_S)
            self._process = None
            self._forget()


@contextmanager
def _listening() -> Iterator[tuple[socket.socket, str, int, int]]:
    """
    A socket for a server that is being started, its address, and the two ends of the pipe that keeps the server alive.

    Afterwards, this process has the pipe's end for writing, unless the server could not be started.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        address = multiprocessing.connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        listener.bind(address)
        if not multiprocessing.util.is_abstract_socket_namespace(address):
            os.chmod(address, 0o600)
        listener.listen()
        alive_r, alive_w = os.pipe()
        try:
            yield listener, address, alive_r, alive_w
        except BaseException:
            os.close(alive_w)
            raise
        finally:
            os.close(alive_r)


class _Descriptor:
    """A file descriptor to be passed to a process that is being started."""

    def __init__(self, fd: int) -> None:
        self._duplicate = multiprocessing.reduction.DupFd(fd)

    def detach(self) -> int:
        return int(self._duplicate.detach())


class WarmPopen(multiprocessing.popen_forkserver.Popen):
    """Starts a process from a WarmServer."""

    _fds: list[int]
    """Descriptors for the child, gathered while its arguments are pickled."""

    def _launch(self, process_obj: WarmProcess) -> None:
        buffer = io.BytesIO()
        multiprocessing.context.set_spawning_popen(self)
        try:
            multiprocessing.reduction.dump(preparation_data(process_obj), buffer)
            multiprocessing.reduction.dump(process_obj, buffer)
        finally:
            multiprocessing.context.set_spawning_popen(None)
        server = process_obj.server
        try:
            self._send(buffer.getbuffer(), server)
            _await_answer(self.sentinel, server)
            self.pid = multiprocessing.forkserver.read_signed(self.sentinel)
        except (EOFError, BrokenPipeError) as error:
            raise EnvironmentUnavailable(_server_text(server, "ended")) from error

    def _send(self, orders: memoryview, server: WarmServer) -> None:
        """Have the server fork a child, and send it what it needs."""
        self.sentinel, data_w = server.connect_to_new_process(self._fds)
        # The child watches the other end, which becomes readable when the controller has ended.
        alive_w = os.dup(data_w)
        self.finalizer = multiprocessing.util.Finalize(self, _close_all, (alive_w, self.sentinel))
        with open(data_w, "wb", closefd=True) as pipe:
            pipe.write(orders)


def _await_answer(descriptor: int, server: WarmServer) -> None:
    """Wait until the server has written there, which it does after its imports."""
    deadline = time.monotonic() + START_TIMEOUT_S
    # In slices: when a server ends, not every kernel refuses the requests that it has not accepted (gVisor keeps them).
    while not multiprocessing.connection.wait([descriptor], _SLICE_S):
        if server.is_lost():
            raise EOFError("the server has ended")
        if time.monotonic() > deadline:
            raise EnvironmentUnavailable(_server_text(server, f"forked nothing in {START_TIMEOUT_S:.0f} s"))


def _server_text(server: WarmServer, what: str) -> str:
    return (
        f"the warm process {what} while it imported {', '.join(server.modules)}. "
        f"Its output ends with:\n{server.log_tail()}"
    )


def _close_all(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class WarmProcess(multiprocessing.context.ForkServerProcess):
    """
    A process forked from a WarmServer.

    In the controller it is a daemon, so that a controller that ends does not wait for a rank that hangs. In the process
    itself the flag is reset, so that a rank can have children.
    """

    _start_method = None  # type: ignore[assignment]  # the child's default start method stays the controller's

    def __init__(self, server: WarmServer, *, imports_main: bool = False, **kwargs: Any) -> None:
        super().__init__(daemon=True, **kwargs)
        self.server = server
        self.imports_main = imports_main

    def _Popen(self, process_obj: Any) -> WarmPopen:  # type: ignore[override]  # noqa: N802
        return WarmPopen(process_obj)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "server"}

    def run(self) -> None:
        """Called in the child."""
        self._config["daemon"] = False  # type: ignore[attr-defined]
        super().run()


def preparation_data(process: WarmProcess) -> dict[str, Any]:
    """
    The data that the child needs before it unpickles its target.

    As `multiprocessing.spawn.get_preparation_data`, but `__main__` is included only if the child needs it, and the call
    does not fix the controller's own start method.
    """
    if process.imports_main:
        return multiprocessing.spawn.get_preparation_data(process.name)
    data: dict[str, Any] = {
        "name": process.name,
        "authkey": multiprocessing.process.current_process().authkey,
        "sys_path": absolute_sys_path(),
        "sys_argv": sys.argv,
        "orig_dir": multiprocessing.process.ORIGINAL_DIR,  # type: ignore[attr-defined]
        "dir": os.getcwd(),
    }
    start_method = multiprocessing.get_start_method(allow_none=True)
    if start_method is not None:
        data["start_method"] = start_method
    return data


def absolute_sys_path() -> list[str]:
    """sys.path with the current directory in place of the empty entry, which depends on the process."""
    return [entry or os.getcwd() for entry in sys.path]


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """os.environ with these variables set, for as long as the block runs."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _serve(
    listener: _Descriptor, alive: _Descriptor, key: bytes | None, modules: tuple[str, ...], sys_path: list[str]
) -> None:
    """The body of a grown server."""
    sys.path[:] = sys_path
    preload.load(modules)
    _run(listener.detach(), alive.detach(), key)


def _run(listener: int, alive: int, key: bytes | None) -> None:
    """Serve until no process uses this server any more. Python 3.14 takes the key from a pipe."""
    keyword = {}
    if key is not None:
        keyword["authkey_r"], key_w = os.pipe()
        os.write(key_w, key)
        os.close(key_w)
    multiprocessing.forkserver.main(listener, alive, None, **keyword)  # type: ignore[arg-type]


def _new_key() -> bytes | None:
    return os.urandom(_KEY_BYTES) if _HAS_KEY else None


def _prove_key(client: socket.socket, key: bytes) -> None:
    """Prove to the server, which has asked, that this process knows the key, and demand the same of the server."""
    with multiprocessing.connection.Connection(os.dup(client.fileno())) as connection:
        multiprocessing.connection.answer_challenge(connection, key)
        multiprocessing.connection.deliver_challenge(connection, key)


class _Servers:
    """
    The servers of this process. Each environment has a base, a server grown from it with the suite alone, from which
    referees come, and a server grown from that one for each engine, up to `MAX_ENGINES`.

    No two engines share a server, because a module may change torch when it is imported.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: dict[str, None] = {}
        self._bases: dict[_Environment, WarmServer] = {}
        self._suites: dict[_Environment, GrownServer] = {}
        self._engines: dict[tuple[_Environment, _Engine], GrownServer] = {}
        self._retired: list[WarmServer] = []

    def expect(self, modules: Iterable[str]) -> None:
        with self._lock:
            self._expected.update(dict.fromkeys(modules))

    def get(self, modules: Iterable[str], variables: Mapping[str, str], engine: _Engine) -> WarmServer:
        key = frozenset(variables.items())
        requested = tuple(dict.fromkeys(name for name in modules if name != "__main__"))
        with self._lock:
            self._retired = [server for server in self._retired if not server.reap()]
            suite = self._suite(key, self._base(key, requested, variables), requested)
            missing = tuple(name for name in dict.fromkeys(engine) if name not in suite.imported)
            return self._with_engine(key, suite, missing) if missing else suite

    def _base(self, key: _Environment, requested: tuple[str, ...], variables: Mapping[str, str]) -> WarmServer:
        base = self._bases.pop(key, None)
        if base is None:
            if len(self._bases) >= MAX_SERVERS:
                self._retire(next(iter(self._bases)))
            base = WarmServer((*preload.BASE, *preload.OPTIONAL, *requested), variables)
        self._bases[key] = base  # the most recently used one is last
        return base

    def _suite(self, key: _Environment, base: WarmServer, requested: tuple[str, ...]) -> WarmServer:
        """The base, if it has all that is requested, or the server that was grown from it for the suite."""
        if base.imported.issuperset(requested):
            return base
        grown = self._suites.get(key)
        if grown is None or not grown.imported.issuperset(requested):
            loaded = grown.modules if grown is not None else ()
            self._end([*self._engines_of(key), self._suites.pop(key, None)])
            names = dict.fromkeys((*loaded, *requested, *self._expected))
            grown = GrownServer(base, [name for name in names if name not in base.imported])
            self._suites[key] = grown
        return grown

    def _with_engine(self, key: _Environment, suite: WarmServer, engine: _Engine) -> WarmServer:
        grown = self._engines.pop((key, engine), None)
        if grown is None or not grown.is_grown_from(suite):
            self._end([grown, *self._engines_above_limit(key)])
            grown = GrownServer(suite, engine)
        self._engines[key, engine] = grown  # the most recently used one is last
        return grown

    def _engines_above_limit(self, key: _Environment) -> list[GrownServer]:
        """The servers of engines that were not used for longest, so that there is room for one more."""
        kinds = [kind for kind in self._engines if kind[0] == key]
        return [self._engines.pop(kind) for kind in kinds[: max(0, len(kinds) + 1 - MAX_ENGINES)]]

    def _engines_of(self, key: _Environment) -> list[GrownServer]:
        """The servers of engines in an environment, which are forgotten."""
        return [self._engines.pop(kind) for kind in list(self._engines) if kind[0] == key]

    def put(self, base: WarmServer) -> None:
        with self._lock:
            self._bases[frozenset(base.environment.items())] = base

    def _retire(self, key: _Environment) -> None:
        # Grown servers first, because they keep their base alive.
        self._end([*self._engines_of(key), self._suites.pop(key, None), self._bases.pop(key, None)])

    def _end(self, servers: Iterable[WarmServer | None]) -> None:
        for server in servers:
            if server is not None:
                server.retire()
                self._retired.append(server)

    def stop(self) -> None:
        with self._lock:
            for key in list(self._bases):
                self._retire(key)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while self._retired and time.monotonic() < deadline:
                self._retired = [server for server in self._retired if not server.reap()]
                time.sleep(0.005 if self._retired else 0)
            for server in self._retired:
                server.kill()
            self._retired = []


_servers = _Servers()


def server_for(
    modules: Iterable[str] = (), variables: Mapping[str, str] | None = None, *, engine: tuple[str, ...] = ()
) -> WarmServer:
    """
    A server that has imported `modules` (names, or paths of files) under the environment `variables`.

    `engine` are modules of code under test. A server has never imported those of another engine, and one that is asked
    for without any has imported none.

    The first call for an environment decides what its base server imports. A later call that needs more gets a server
    grown from it, and the one grown before is retired.
    """
    return _servers.get(modules, variables or {}, engine)


def expect(modules: Iterable[str]) -> None:
    """
    Name modules that later calls of `server_for` will request, none of an engine: the next server that is grown imports
    all of them. Otherwise each case module costs a server that imports those before it once more.
    """
    _servers.expect(modules)


def may_have_used_torch() -> bool:
    """True if this process has imported torch. A process that knows that it has only imported it replaces this."""
    return "torch" in sys.modules


def import_and_fork() -> None:
    """
    Import what every rank needs into this process, and fork the first server from it: torch is imported once for both.

    If this process may have used torch already, or has other threads, nothing is forked, and the first server will be
    a new process. A fork would copy what torch has cached here, such as the layouts of a DTensor on another rank, and
    locks without the threads that would release them.
    """
    is_fresh = not may_have_used_torch() and threading.active_count() == 1
    with environment(SERVER_ENVIRONMENT):
        preload.load((*preload.BASE, *preload.OPTIONAL))
    if is_fresh:
        _servers.put(ForkedServer())


def start_process(
    target: Callable[..., None], *args: Any, server: WarmServer, name: str, imports_main: bool = False
) -> WarmProcess:
    """A running process that calls `target(*args)`. Raises EnvironmentUnavailable if the server cannot fork it."""
    process = WarmProcess(server, imports_main=imports_main, target=target, args=args, name=name)
    process.start()
    return process


def stop_servers() -> None:
    """End every server of this process. A later `server_for` starts new ones."""
    _servers.stop()


atexit.register(stop_servers)
