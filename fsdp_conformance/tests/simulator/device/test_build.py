"""
The extension's cache: who compiles, who waits, and the messages when it fails.

The compiler in here is a script. It makes objects that hold nothing, and links by copying the real shared object, so
that what is loaded in the end is whole.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.simulator.activation import activate
from fsdp_conformance.simulator.device import build
from fsdp_conformance.simulator.device import devices as device
from fsdp_conformance.tests.simulator.simulator_process import compiled

#: How long a test waits for another process.
DEADLINE_S = 600
#: Between two looks at a file that another process writes.
POLL_S = 0.1

COMPILER = """#!/bin/sh
case "$*" in
  *--version*) echo "script 1.0"; exit 0 ;;
  *-dumpversion*) echo "12.2.0"; exit 0 ;;
  -v) echo "clang version 12.2.0"; exit 0 ;;
esac
while [ $# -gt 0 ]; do
  case "$1" in
    -o) out="$2"; shift ;;
    -MF) deps="$2"; shift ;;
  esac
  shift
done
echo "$out" >> "$LOG"
if [ -n "$deps" ]; then echo "$out:" > "$deps"; fi
case "$out" in
  */probe.so) cp "$REAL" "$out" ;;
  *.so) while [ -e "$HOLD" ]; do sleep 0.1; done; cp "$REAL" "$out" ;;
  *) : > "$out" ;;
esac
"""

REQUIRE = "from fsdp_conformance.simulator.device import build; print(build.require())"


class Machine:
    """A separate cache, and a compiler that can be paused before it links."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache = directory / "cache"
        self.log = directory / "log"
        self.hold = directory / "hold"
        self.compiler = directory / "compiler"
        real = build.require()
        self.install(COMPILER)
        monkeypatch.delenv(build.EXTENSION, raising=False)
        monkeypatch.setenv("FSDP_CONFORMANCE_CACHE", str(self.cache))
        for name, path in {"CXX": self.compiler, "LOG": self.log, "HOLD": self.hold, "REAL": real}.items():
            monkeypatch.setenv(name, str(path))

    def install(self, script: str) -> None:
        self.compiler.write_text(script)
        self.compiler.chmod(self.compiler.stat().st_mode | stat.S_IXUSR)

    def num_links(self) -> int:
        """How often the extension was linked; the probe of the compiler does not count."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return sum(line.endswith(f"{build.NAME}.so") for line in lines)

    def shared_objects(self) -> list[Path]:
        """The complete objects, which are outside the build directory."""
        return [path for path in self.cache.rglob("*.so") if path.parent.name != "build"]

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", REQUIRE], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def wait_for_link(self, *processes: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self.num_links() == 0:
            for process in processes:
                assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "the compiler does not come to linking"
            time.sleep(POLL_S)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@compiled
class TestCache:
    @pytest.mark.nightly
    @pytest.mark.slow
    def test_it_is_compiled_once(self, machine: Machine) -> None:
        """The second time nothing is compiled; the path depends on everything that the object depends on."""
        assert not build.is_built()
        path = build.require()

        assert path == build.require()
        assert build.is_built()
        assert [path] == machine.shared_objects()
        assert 1 == machine.num_links()
        assert path.is_relative_to(machine.cache / "simulator")

    def test_other_sources_are_another_object(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        """One more file, or one more character in a file, gives another object."""
        target = build._target()
        extra = machine.cache.parent / "extra.h"
        files = build.sources()
        monkeypatch.setattr(build, "sources", lambda: [*files, extra])

        extra.write_text("// one")
        first = build._target()
        extra.write_text("// two")

        assert 3 == len({target, first, build._target()})

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_others_wait_for_the_one_that_compiles(self, machine: Machine) -> None:
        """Of three processes one compiles, and all have its result."""
        machine.hold.touch()
        processes = [machine.start() for _ in range(3)]
        machine.wait_for_link(*processes)
        machine.hold.unlink()

        outputs = {process.communicate(timeout=DEADLINE_S)[0] for process in processes}

        assert {f"{path}\n" for path in machine.shared_objects()} == outputs
        assert 1 == machine.num_links()

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_a_kill_leaves_nothing_that_is_taken_for_whole(self, machine: Machine) -> None:
        """The children of the killed process end first; then the next process completes the build."""
        machine.hold.touch()
        killed = machine.start()
        machine.wait_for_link(killed)
        killed.send_signal(signal.SIGKILL)
        killed.communicate(timeout=DEADLINE_S)
        assert [] == machine.shared_objects()
        assert not build.is_built()
        machine.hold.unlink()

        path = build.require()

        assert [path] == machine.shared_objects()
        assert path.read_bytes() == Path(os.environ["REAL"]).read_bytes()

    def test_waiting_has_an_end(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        """A process that waits too long for the lock raises an error that names it."""
        monkeypatch.setattr(build, "DEADLINE_S", 0.3)
        target = build._target()
        assert target is not None
        target.parent.mkdir(parents=True)
        with (target.parent / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)

            with pytest.raises(
                EnvironmentUnavailable, match=r"another process has been compiling .* for more than 0\.3 s"
            ):
                build.require()


def test_every_source_is_compiled_once() -> None:
    """Each .cpp is included by exactly one of the units that the compiler is given."""
    units = [path.read_text() for path in build.sources() if path.suffix == ".cc"]
    names = [path.name for path in build.sources() if path.suffix == ".cpp"]

    assert names
    assert [1] * len(names) == [sum(unit.count(f'#include "{name}"') for unit in units) for name in names]


@compiled
class TestFailure:
    @pytest.mark.nightly
    @pytest.mark.slow
    def test_the_compilers_last_words_are_told(self, machine: Machine) -> None:
        """The error quotes the end of the compiler's output, and no build is stored."""
        machine.install(
            '#!/bin/sh\ncase "$*" in *version*) echo 12.2.0; exit 0;; -v) echo clang version; exit 0;; esac\n'
            'echo "error: no such header" >&2; exit 1\n'
        )

        with pytest.raises(EnvironmentUnavailable, match=r"cannot be compiled(.|\n)*error: no such header"):
            build.require()

        assert [] == machine.shared_objects()

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_an_object_that_cannot_be_loaded_is_told_of(self, tmp_path: Path) -> None:
        """The error has its path."""
        broken = tmp_path / "broken.so"
        broken.write_bytes(b"not a shared object")

        ended = subprocess.run(
            [sys.executable, "-c", "from fsdp_conformance.simulator.device import build; build.load()"],
            env={**os.environ, build.EXTENSION: str(broken)},
            capture_output=True, text=True, check=False, timeout=DEADLINE_S,
        )  # fmt: skip

        assert "EnvironmentUnavailable: the simulated accelerator cannot be loaded" in ended.stderr
        assert str(broken) in ended.stderr


class TestUnavailable:
    """The reason is known without compiling, and activation raises it."""

    @pytest.fixture(autouse=True)
    def _nothing_given(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv(build.EXTENSION, raising=False)
        monkeypatch.setenv("FSDP_CONFORMANCE_CACHE", str(tmp_path))

    def test_without_a_compiler(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """No PATH has one, or CXX names none: no case on the device runs, and the reason is said."""
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert "no C++ compiler: 'c++' is not on PATH" in str(build.unavailable())
        assert not build.is_built()
        with pytest.raises(EnvironmentUnavailable, match="no C\\+\\+ compiler"):
            build.require()

        monkeypatch.setenv("CXX", "nowhere-c++")
        assert "'nowhere-c++' is not on PATH" in str(build.unavailable())

    @pytest.mark.slow
    def test_a_compiler_with_its_own_runtime(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """A second C++ standard library in the process would end it with SIGSEGV in the first collective."""
        compiler = tmp_path / "c++"
        monkeypatch.setenv("CXX", str(compiler))
        for option, is_rejected in (("-static-libstdc++", True), ("-O0", False)):
            compiler.write_text(f'#!/bin/sh\nexec c++ {option} "$@"\n')
            compiler.chmod(0o755)
            build._links_a_private_runtime.cache_clear()

            reason = build.unavailable()

            assert ("links its own copy of the C++ standard library" in (reason or "")) is is_rejected, reason
        monkeypatch.undo()
        build._links_a_private_runtime.cache_clear()

    def test_activation_says_so(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Activation raises the same reason and leaves torch unchanged."""
        if build.loaded() is not None:
            pytest.skip("another test of this process has loaded the extension")
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))

        with pytest.raises(EnvironmentUnavailable, match="no C\\+\\+ compiler"):
            activate()

        assert not device.is_active()

    def test_an_object_that_is_given_must_be_there(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """It is used unchanged, and no compiler is needed."""
        given = tmp_path / "given.so"
        monkeypatch.setenv(build.EXTENSION, str(given))
        monkeypatch.setenv("PATH", str(tmp_path))
        assert f"{build.EXTENSION} must be the path of a shared object, got '{given}'" in str(build.unavailable())
        with pytest.raises(EnvironmentUnavailable, match="must be the path of a shared object"):
            build.require()

        given.touch()

        assert build.unavailable() is None
        assert build.is_built()
        assert given == build.require()


#: What begins or ends a namespace without a name, and the definition of a type outside of other types.
_NAMESPACE = re.compile(r"namespace \{|\}  // namespace$")
_TYPE = re.compile(r"(?:template <.*> )?(?:struct|class|enum|enum class) (\w+)(?: final)?(?: :[^:].*)? \{")


def types_of(text: str) -> list[str]:
    """The names of the types that a C++ source file defines, without those in namespaces without a name."""
    names, is_local = [], False
    for line in text.splitlines():
        if _NAMESPACE.match(line):
            is_local = line.startswith("namespace")
        elif not is_local and (match := _TYPE.match(line)):
            names.append(match[1])
    return names


def test_names_of_types_are_found() -> None:
    """Declarations, local types and nested ones do not count."""
    text = (
        "class Later;\nstruct One {\n  struct Inner {\nenum class Two : uint8_t { A, B };\nnamespace {\n"
        "struct Local {\n}  // namespace\nclass Three : public One {\nstruct One::Four {\n"
        "template <typename T> struct Five {\n"
    )

    assert types_of(text) == ["One", "Two", "Three", "Five"]


def test_each_type_has_a_name_of_its_own() -> None:
    """
    Two translation units may not define different types of the same name.

    The linker keeps one copy of what both make of a template, such as `std::vector<Argument>::push_back`, and the other
    unit corrupts its memory, depending on the compiler and on torch: that is how ranks died on 2.11 with SIGSEGV.
    """
    owners: dict[str, list[str]] = {}
    for path in build.sources():
        for name in types_of(path.read_text(encoding="utf-8")):
            owners.setdefault(name, []).append(path.name)

    assert {name: files for name, files in owners.items() if len(files) > 1} == {}
