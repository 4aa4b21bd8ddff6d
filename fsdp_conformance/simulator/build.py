"""
The extension of the simulated accelerator: compiled on first use, kept in a cache.

`require()` gives the path of the shared object, compiling it where the cache has none; `unavailable()` tells cheaply
why it could not. What is in the cache belongs to one version of torch, of Python, of the compiler, and of the sources.
One process compiles while the others wait for it. A build that is cut off leaves nothing that is taken for whole: the
shared object appears under its name when it is complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Final

from fsdp_conformance.errors import EnvironmentUnavailable

__all__ = ["NAME", "cache_directory", "is_built", "require", "sources", "unavailable"]

#: The name of the extension module.
NAME: Final = "_fsdp_conformance_simulator"

#: A shared object compiled elsewhere, for machines without a compiler. Nothing is compiled then.
EXTENSION: Final = "FSDP_CONFORMANCE_SIM_EXTENSION"

#: What compiles: in a process group of its own, which ends with the process that asked for it.
_PROGRAM: Final = """
import ctypes, os, signal, sys

def end(*_):
    os.killpg(0, signal.SIGKILL)

signal.signal(signal.SIGTERM, end)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    end()
from torch.utils import cpp_extension
cpp_extension.load(
    name=sys.argv[2], build_directory=sys.argv[3], extra_cflags=sys.argv[4].split(), sources=sys.argv[5:],
    with_cuda=False, verbose=True,
)
"""

#: Seconds that a compilation may take, on a slow machine with every core in use; and that others wait for it.
DEADLINE_S: Final = 1200

#: Seconds between two looks at the lock.
_POLL_S: Final = 0.2

#: Lines of a failed compilation that are shown.
_LOG_LINES: Final = 60

_CSRC: Final = Path(__file__).parent / "csrc"

#: Optimised a little: more makes the compilation longer and nothing measurably faster. Without debug information. With
#: NDEBUG as torch is built: classes of its headers (at::RecordFunction) have further members without.
_FLAGS: Final = (
    "-O1",
    "-g0",
    "-DNDEBUG",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-stringop-overflow",
    "-Wno-subobject-linkage",
)


def sources() -> list[Path]:
    """
    The files that the extension is made of, headers included.

    Each `.cc` file is one translation unit, made of several `.cpp` files: torch's headers cost more than all of these.
    """
    return sorted(path for path in _CSRC.iterdir() if path.suffix in {".cc", ".cpp", ".h"})


def cache_directory() -> Path:
    """Where shared objects are kept: `FSDP_CONFORMANCE_CACHE`, or the user's cache directory."""
    if own := os.environ.get("FSDP_CONFORMANCE_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fsdp-conformance"


def unavailable() -> str | None:
    """Why there is no extension here and none can be compiled; None if it can, as far as is known without trying."""
    if given := os.environ.get(EXTENSION):
        return None if Path(given).is_file() else f"{EXTENSION}={given}, but should be the path of a shared object."
    compiler = _compiler()
    if shutil.which(compiler) is None:
        return f"no C++ compiler: {compiler!r} is not in PATH. Install g++, or name a compiler in CXX."
    if _ninja_directory() is None:
        return "no ninja: `pip install ninja`."
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not headers.exists():
        return f"no headers of Python: {headers} is missing. Install the python3-dev package of this Python."
    return None


def is_built() -> bool:
    """Whether the extension is there, so that nothing is compiled when it is asked for."""
    given = os.environ.get(EXTENSION)
    target = Path(given) if given else _target()
    return target is not None and target.is_file()


def require() -> Path:
    """
    The path of the shared object, compiled now where the cache has none (about a minute).

    Raises EnvironmentUnavailable where it cannot be compiled, with the reason and the end of the compiler's output.
    """
    if (given := os.environ.get(EXTENSION)) and Path(given).is_file():
        return Path(given)
    target = _target()
    if target is not None and target.exists():
        return target
    problem = unavailable()
    if problem or target is None:
        raise EnvironmentUnavailable(f"the simulated accelerator cannot be compiled: {problem}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / "lock") as lock:
        if not target.exists():
            _compile(target, lock)
    return target


def load() -> ModuleType:
    """
    The extension, compiled if necessary. With it torch has a backend for PrivateUse1, for good: see `device.activate`.

    Raises EnvironmentUnavailable as `require` does, and for a shared object that cannot be loaded.
    """
    if (module := loaded()) is not None:
        return module
    path = require()
    import torch  # noqa: F401 - the shared object needs its libraries

    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None, "a loader was given"
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise EnvironmentUnavailable(f"the simulated accelerator cannot be loaded: {error} [{path}]") from error
    sys.modules[NAME] = module
    return module


def loaded() -> ModuleType | None:
    """The extension if this process has loaded it."""
    return sys.modules.get(NAME)


def _target() -> Path | None:
    """Where the shared object is kept. None without a compiler: its version is part of the place."""
    compiler = shutil.which(_compiler())
    if compiler is None:
        return None
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    digest.update(" ".join(_FLAGS).encode())
    return cache_directory() / "simulator" / _environment(compiler) / f"{digest.hexdigest()[:16]}.so"


def _environment(compiler: str) -> str:
    """What a shared object is bound to, beside its sources."""
    import torch

    tag = sys.implementation.cache_tag
    version = hashlib.sha256(f"{compiler} {_compiler_version(compiler)}".encode()).hexdigest()[:8]
    return f"torch-{torch.__version__}-{tag}-{version}"


def _compiler() -> str:
    return os.environ.get("CXX") or "c++"


@cache
def _compiler_version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout


def _ninja_directory() -> Path | None:
    """Where the program `ninja` is: in PATH, or in the package of that name, whose script may be outside of PATH."""
    if found := shutil.which("ninja"):
        return Path(found).parent
    if importlib.util.find_spec("ninja") is None:
        return None
    import ninja

    return Path(ninja.BIN_DIR)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """
    Inside, no other process compiles. Yields the lock's descriptor: whoever inherits it holds the lock as well.

    Raises EnvironmentUnavailable if another process compiles and does not end before the deadline.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + DEADLINE_S
    try:
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise EnvironmentUnavailable(
                    f"the simulated accelerator is being compiled by another process, which has not ended after "
                    f"{DEADLINE_S} s [{path}]"
                )
            time.sleep(_POLL_S)
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _compile(target: Path, lock: int) -> None:
    """Compile beside `target`, keeping objects for the next time, and put the shared object there when it is whole."""
    work = target.parent / "build"
    copies = _copy_sources(work / "csrc")
    (work / "lock").unlink(missing_ok=True)  # torch's own, left behind if a compilation was killed: we hold ours
    result = work / f"{NAME}.so"
    result.unlink(missing_ok=True)
    log = _run_compiler(work, [path for path in copies if path.suffix == ".cc"], lock)
    if not result.exists():
        end = "\n".join(log.splitlines()[-_LOG_LINES:])
        raise EnvironmentUnavailable(f"the simulated accelerator cannot be compiled. The compiler's last lines:\n{end}")
    temporary = target.with_suffix(f".{os.getpid()}.tmp")
    shutil.copy2(result, temporary)
    temporary.replace(target)


def _copy_sources(directory: Path) -> list[Path]:
    """A copy that nobody edits while it is compiled. Equal files are left alone, so that their objects are used."""
    directory.mkdir(parents=True, exist_ok=True)
    wanted = {path.name: path for path in sources()}
    for path in directory.iterdir():
        if path.name not in wanted:
            path.unlink()
    copies = []
    for name, path in wanted.items():
        copy = directory / name
        content = path.read_bytes()
        if not copy.exists() or copy.read_bytes() != content:
            copy.write_bytes(content)
        copies.append(copy)
    return copies


def _run_compiler(work: Path, files: list[Path], lock: int) -> str:
    """
    Let torch compile in a process of its own, which loads the result as well: that it can be loaded is part of it.

    That process holds the lock, too. If this one is killed, it ends with all that it has started, and only then does
    whoever compiles next get the lock. Returns its output.
    """
    ninja = _ninja_directory()
    environment = {**os.environ, "PATH": f"{ninja}{os.pathsep}{os.environ.get('PATH', '')}", "CXX": _compiler()}
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(os.getpid()), NAME, str(work), " ".join(_FLAGS), *map(str, files)],
        env=environment,
        cwd=work,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        pass_fds=(lock,),
        start_new_session=True,  # so that the compilers it has started can be ended with it
    )
    try:
        log = process.communicate(timeout=DEADLINE_S)[0]
        (work / "log.txt").write_text(log)
        return log
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
