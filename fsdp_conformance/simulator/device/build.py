"""
The C++ extension of the simulated accelerator: compiled on first use, then cached.

`require()` returns the path of the shared object, and compiles it if the cache has none; `unavailable()` checks cheaply
whether that is possible. A cached object is valid for one version of torch, Python, the compiler and the sources. One
process compiles while others wait for it. An interrupted build does no harm: the shared object appears under its name
only when it is complete.
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
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Final

from fsdp_conformance.errors import EnvironmentUnavailable

__all__ = ["NAME", "active", "cache_directory", "is_built", "load", "loaded", "require", "sources", "unavailable"]

#: The name of the extension module.
NAME: Final = "_fsdp_conformance_simulator"

#: The path of a shared object compiled elsewhere, for machines without a compiler. With it nothing is compiled.
EXTENSION: Final = "FSDP_CONFORMANCE_SIM_EXTENSION"

#: The program that compiles. It runs in its own process group, and ends with the process that started it.
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

#: Seconds that a compilation may take on a slow and busy machine, and that other processes wait for it.
DEADLINE_S: Final = 1200

#: Seconds between two attempts to take the lock.
_POLL_S: Final = 0.2

#: How many of the compiler's last lines are shown when a compilation fails.
_LOG_LINES: Final = 60

_CSRC: Final = Path(__file__).parent / "csrc"

#: -O1: higher levels take longer to compile and make nothing measurably faster. NDEBUG because torch is built with it:
#: without it, classes in torch's headers (at::RecordFunction) have additional members.
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
    The source files of the extension, including headers.

    Each `.cc` file is a translation unit that includes several `.cpp` files, because torch's headers take longer to
    compile than all of them.
    """
    return sorted(path for path in _CSRC.iterdir() if path.suffix in {".cc", ".cpp", ".h"})


def cache_directory() -> Path:
    """Where shared objects are cached: `FSDP_CONFORMANCE_CACHE`, or the user's cache directory."""
    if own := os.environ.get("FSDP_CONFORMANCE_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fsdp-conformance"


def unavailable() -> str | None:
    """Why the extension is missing and cannot be compiled; None if it can, as far as is known without trying."""
    if given := os.environ.get(EXTENSION):
        return None if Path(given).is_file() else f"{EXTENSION} must be the path of a shared object, got {given!r}."
    compiler = _compiler()
    if shutil.which(compiler) is None:
        return f"no C++ compiler: {compiler!r} is not on PATH. Install g++, or set CXX to a compiler."
    if _ninja_directory() is None:
        return "ninja is not installed: run `pip install ninja`."
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not headers.exists():
        return f"no Python headers: {headers} is missing. Install the python3-dev package for this Python."
    # `is_built` imports torch, which takes longer than the probe: commands that have not imported it only probe.
    if not ("torch" in sys.modules and is_built()) and _links_a_private_runtime(compiler):
        return (
            f"the compiler {compiler!r} links its own copy of the C++ standard library, and a process with two copies "
            "crashes. Set CXX to a compiler that uses the shared one, for instance CXX=/usr/bin/g++."
        )
    return None


def is_built() -> bool:
    """True if the extension has been compiled already."""
    given = os.environ.get(EXTENSION)
    target = Path(given) if given else _target()
    return target is not None and target.is_file()


def require() -> Path:
    """
    The path of the shared object, compiled now if the cache has none (about a minute).

    Raises EnvironmentUnavailable if it cannot be compiled, with the reason and the end of the compiler's output.
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
    Load the extension, compiling it if necessary. `activation.activate` registers its device with torch.

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
    """The extension, if this process has loaded it."""
    return sys.modules.get(NAME)


def active() -> ModuleType:
    """The loaded extension. Raises EnvironmentUnavailable if this process has not loaded it."""
    extension = loaded()
    if extension is None:
        raise EnvironmentUnavailable(
            "the simulated accelerator is not active: call fsdp_conformance.simulator.activation.activate() first"
        )
    return extension


def _target() -> Path | None:
    """The path of the shared object. None without a compiler, whose version is part of the path."""
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
    """Everything that a shared object depends on in addition to its sources."""
    import torch

    tag = sys.implementation.cache_tag
    version = hashlib.sha256(f"{compiler} {_compiler_version(compiler)}".encode()).hexdigest()[:8]
    return f"torch-{torch.__version__}-{tag}-{version}"


def _compiler() -> str:
    return os.environ.get("CXX") or "c++"


@cache
def _compiler_version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout


@cache
def _links_a_private_runtime(compiler: str) -> bool:
    """
    True if shared objects of this compiler do not need the shared C++ standard library (`-static-libstdc++`).

    Such compilers come with some CUDA images. torch uses the shared library, and with a second copy, streams of text
    look up their facets under the numbers of the other one.
    """
    with tempfile.TemporaryDirectory(prefix="fsdp-conformance-") as directory:
        result = Path(directory) / "probe.so"
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(result)],
                input=b"#include <iostream>\nvoid print(long number) { std::cout << number; }\n",
                capture_output=True,
                check=False,
                timeout=60,
            )
        # Without an object, the compiler's own words follow when the extension is compiled.
        return result.exists() and not any(name in result.read_bytes() for name in (b"libstdc++.so", b"libc++."))


def _ninja_directory() -> Path | None:
    """The directory of the program `ninja`: on PATH, or in the package `ninja`, whose script may not be on PATH."""
    if executable := shutil.which("ninja"):
        return Path(executable).parent
    if importlib.util.find_spec("ninja") is None:
        return None
    import ninja

    return Path(ninja.BIN_DIR)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """
    Inside, no other process compiles. Yields the lock's descriptor: a process that inherits it holds the lock too.

    Raises EnvironmentUnavailable if another process is compiling and does not finish before the deadline.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + DEADLINE_S
    try:
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise EnvironmentUnavailable(
                    f"another process has been compiling the simulated accelerator for more than {DEADLINE_S} s "
                    f"[{path}]. End that process, and try again."
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
    """Compile next to `target`, keeping objects for the next build, and move the complete shared object into place."""
    work = target.parent / "build"
    copies = _copy_sources(work / "csrc")
    (work / "lock").unlink(missing_ok=True)  # torch's own lock, left behind by a killed compilation; we hold ours
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
    """Copy the sources, which could be edited meanwhile. Unchanged copies are kept, so their objects are reused."""
    directory.mkdir(parents=True, exist_ok=True)
    source_paths = {path.name: path for path in sources()}
    for path in directory.iterdir():
        if path.name not in source_paths:
            path.unlink()
    copies = []
    for name, path in source_paths.items():
        copy = directory / name
        content = path.read_bytes()
        if not copy.exists() or copy.read_bytes() != content:
            copy.write_bytes(content)
        copies.append(copy)
    return copies


def _run_compiler(work: Path, files: list[Path], lock: int) -> str:
    """
    Let torch compile in a separate process, which also loads the result to check that it can be loaded.

    That process holds the lock too. If this process is killed, it ends together with everything it has started, and
    only then can another process take the lock. Returns its output.
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
        start_new_session=True,  # so that its compilers can be ended with it
    )
    try:
        log = process.communicate(timeout=DEADLINE_S)[0]
        (work / "log.txt").write_text(log)
        return log
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
