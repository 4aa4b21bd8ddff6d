"""
Guard: what must not stand in any file of the project, and forms of code that cannot fail or must not be used.

Each rule has a test that it speaks. A rule over text reads every file that git tracks or would add, a rule over code
the syntax trees of the package.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import Module, called_name

pytestmark = checkout.required

#: Longer files hide more than one noun.
MAX_LINES = 800

#: This file names what it forbids.
_OWN = "fsdp_conformance/tests/guards/test_text.py"

#: Pattern to what is wrong with it.
FORBIDDEN_TEXT: dict[str, str] = {
    r"(?<![\w.~-])/(root|Users/\w+|home/\w+|mnt/\w+)/": "a path of one machine; take it from the environment",
    r"\b(pythonhosted|pypi|download\.pytorch|npmjs|proxy\.golang)\.(com|org)\b": "a registry host; pip and npm know it",
    r"\b(TODO|FIXME|XXX|HACK)\b": "unfinished work",
    r"<<<<<<< |>>>>>>> ": "a conflict left by a merge",
}

#: Words that no engineer would say to a colleague, and what to write instead.
TICS: dict[str, str] = {
    r"\banew\b": "write `again`",
    r"\bmend(s|ed|ing)?\b": "write `fix`",
    r"\bin vain\b": "say what failed",
    r"\b(some|no)body\b": "say who, or use the passive",
}

#: A docstring that begins like this is half a question: write `Return ...`, `True if ...`, or name the thing.
_QUESTION = re.compile(r"\s*(What|Whether)\b")

#: Directory to the number of TICS and questions that its files still have; 0 where it is not listed. Lower a number
#: when you clean files, and never raise one. Titles of cases (in suites) stay, because the profiles pin them.
TICS_LEFT: dict[str, int] = {
    "fsdp_conformance": 2,
    "suites": 5,
}

#: The files that people read: code, pages, scripts and settings.
_PROSE = frozenset({"", ".cpp", ".h", ".jinja", ".md", ".py", ".sbatch", ".sh", ".toml", ".yaml", ".yml"})

_SKIPS = frozenset({"skip", "skipIf", "skipUnless", "skipTest", "SkipTest", "skipif", "importorskip"})

Rule = Callable[[Module], Iterator[tuple[int, str]]]


def forbidden_text(text: str) -> list[tuple[int, str]]:
    """Line number and reason for everything in `text` that must not be there."""
    return [
        (text.count("\n", 0, match.start()) + 1, f"{match.group()!r}: {reason}")
        for pattern, reason in FORBIDDEN_TEXT.items()
        for match in re.finditer(pattern, text)
    ]


def tics(text: str) -> list[tuple[int, str]]:
    """Line number and advice for each of TICS in `text`."""
    return [
        (text.count("\n", 0, match.start()) + 1, f"{match.group()!r}: {advice}")
        for pattern, advice in TICS.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]


def questions(nodes: Iterable[ast.AST]) -> list[tuple[int, str]]:
    """Line number and advice for each docstring, also of an attribute, that begins with `What` or `Whether`."""
    return [
        (
            node.lineno,
            f"a docstring that begins with {match[1]!r}: write `Return ...`, `True if ...`, or name the thing",
        )
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if (match := _QUESTION.match(node.value.value))
    ]


def vacuous_assert(module: Module) -> Iterator[tuple[int, str]]:
    """`assertTrue(len(a), len(b))` cannot fail: the second argument is the message."""
    for node in module.nodes():
        if not isinstance(node, ast.Call) or not called_name(node).endswith((".assertTrue", ".assertFalse")):
            continue
        if any(not _is_text(message) for message in node.args[1:]):
            yield node.lineno, "the second argument is the message; compare with assertEqual, or name it msg="


def assert_without_message(module: Module) -> Iterator[tuple[int, str]]:
    """A bare assert in package code: pytest does not rewrite it in an installed package, and the message is empty."""
    if module.part != "tests":
        for node in module.nodes():
            if isinstance(node, ast.Assert) and node.msg is None:
                yield node.lineno, "an assert without a message; say what holds, or raise a class of errors.py"


def sleeping_test(module: Module) -> Iterator[tuple[int, str]]:
    """
    A test, a case or a fixture that sleeps: slow when the machine is fast, wrong when it is slow.

    A rank that hangs on purpose sleeps for FOREVER_S, until it is ended from outside; a loop that has a deadline and
    nothing to wait on looks again after POLL_S.
    """
    if module.part in {"tests", "suites", "fixtures"}:
        for node in module.nodes():
            if not isinstance(node, ast.Call) or called_name(node) not in {"time.sleep", "sleep"}:
                continue
            if [checkout.dotted(given) for given in node.args] not in (["FOREVER_S"], ["POLL_S"]):
                yield node.lineno, "sleeps; wait for the event itself, with a deadline"


def unsafe_load(module: Module) -> Iterator[tuple[int, str]]:
    """A tensor file read with its pickled code."""
    for node in module.nodes():
        if isinstance(node, ast.Call) and called_name(node) == "torch.load":
            given = {word.arg: word.value for word in node.keywords}
            if ast.dump(given.get("weights_only", ast.Pass())) != ast.dump(ast.Constant(True)):
                yield node.lineno, "torch.load without weights_only=True"


def silent_skip(module: Module) -> Iterator[tuple[int, str]]:
    """A case that skips by itself: absent devices and undeclared flags have verdicts, and the gate gives them."""
    if module.part == "suites":
        for node in module.nodes():
            name = checkout.dotted(node)
            if name.rpartition(".")[2] in _SKIPS:
                yield getattr(node, "lineno", 0), f"{name}: a case declares what it needs and never skips itself"


def early_exit(module: Module) -> Iterator[tuple[int, str]]:
    """A case that ends its process with success before it has judged."""
    if module.part in {"suites", "fixtures", "checks"}:
        for node in module.nodes():
            if isinstance(node, ast.Call) and called_name(node) in {"exit", "quit", "sys.exit", "os._exit"}:
                yield node.lineno, f"{called_name(node)}() ends the rank"


RULES: tuple[Rule, ...] = (vacuous_assert, assert_without_message, sleeping_test, unsafe_load, silent_skip, early_exit)


@pytest.mark.slow
def test_no_file_holds_forbidden_text() -> None:
    """No tracked file names one machine, a registry host, unfinished work, or how the work is organised."""
    problems = []
    for file in checkout.files():
        if file.as_posix() != _OWN:
            text = (checkout.ROOT / file).read_bytes().decode("utf-8", errors="replace")
            problems += [f"{file}:{line}: {reason}" for line, reason in forbidden_text(text)]

    assert problems == []


@pytest.mark.slow
def test_tics_only_become_fewer() -> None:
    """No directory has more of TICS, or of docstrings that are questions, than TICS_LEFT allows."""
    places: dict[str, list[str]] = {}
    for file in checkout.files():
        if file.as_posix() == _OWN or file.suffix not in _PROSE:
            continue
        findings = tics((checkout.ROOT / file).read_text(encoding="utf-8", errors="replace"))
        findings += questions(checkout.nodes_of(checkout.ROOT / file)) if file.suffix == ".py" else []
        directory = "fsdp_conformance/tests" if file.parts[:2] == ("fsdp_conformance", "tests") else file.parts[0]
        places.setdefault(directory, []).extend(f"{file}:{line}: {advice}" for line, advice in findings)
    counts = {directory: len(lines) for directory, lines in places.items() if lines}
    more = {name: places[name] for name, count in counts.items() if count > TICS_LEFT.get(name, 0)}

    assert not more, f"counts are {counts}; look among {more}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_module_breaks_the_rule(rule: Rule) -> None:
    """The rule is silent on every module of the package."""
    problems = [f"{module.place}:{line}: {reason}" for module in checkout.modules() for line, reason in rule(module)]

    assert problems == []


def test_a_file_is_one_noun() -> None:
    """No module is longer than MAX_LINES."""
    lengths = {module.place: module.path.read_text(encoding="utf-8").count("\n") for module in checkout.modules()}

    assert {place: length for place, length in lengths.items() if length > MAX_LINES} == {}


@pytest.mark.parametrize(
    "text",
    [
        "see /mnt/data/x.py",
        "open('/root/.cache')",
        "cd /home/ann/src",
        "--index-url https://download.pytorch.org/whl/cpu",
        "# TODO: later",
        ">>>>>>> theirs",
    ],
)
def test_the_text_guard_speaks(text: str) -> None:
    """Each kind of forbidden text is found, on its line."""
    assert [line for line, _ in forbidden_text(f"first\n{text}\n")] == [2]


@pytest.mark.parametrize("text", ["frame/home/main", "~/src/", "/tmp/results", "to do", "pytorch#174862", "sub/root/x"])
def test_the_text_guard_leaves_other_text_alone(text: str) -> None:
    """What only looks alike is not reported."""
    assert forbidden_text(text) == []


@pytest.mark.parametrize("text", ["Trained anew.", "it was mended", "tried in vain", "for somebody", "Nobody reads it"])
def test_each_tic_is_reported(text: str) -> None:
    """Each word is reported once, on its line."""
    assert [line for line, _ in tics(f"first\n{text}\n")] == [2]


@pytest.mark.parametrize("text", ["a newer torch", "amend the commit", "recommended", "invaluable", "everybody"])
def test_words_that_contain_a_tic_are_left_alone(text: str) -> None:
    """Only whole words are reported."""
    assert tics(text) == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('def f():\n    """What it is."""', [2]),
        ('class A:\n    x: int\n    """Whether x."""', [3]),
        ('def f():\n    """\n    What it is.\n    """', [2]),
        ('"""Whatever comes."""\ntext = "What is it?"', []),
        ('def f():\n    """True if it is what it says."""', []),
    ],
)
def test_docstrings_that_are_questions_are_reported(source: str, lines: list[int]) -> None:
    """Docstrings of modules, classes, functions and attributes count, other strings do not."""
    assert [line for line, _ in questions(checkout.walk(ast.parse(source)))] == lines


@pytest.mark.parametrize(
    ("rule", "part", "source"),
    [
        (vacuous_assert, "suites", "self.assertTrue(len(a), len(b))"),
        (vacuous_assert, "tests", "self.assertFalse(a, b)"),
        (assert_without_message, "checks", "assert a == b"),
        (sleeping_test, "tests", "time.sleep(1)"),
        (sleeping_test, "suites", "sleep(0.1)"),
        (unsafe_load, "adapters", "torch.load(file)"),
        (unsafe_load, "adapters", "torch.load(file, weights_only=False)"),
        (silent_skip, "suites", "self.skipTest('no GPU')"),
        (silent_skip, "suites", "@unittest.skipIf(True, 'no')\ndef f(): pass"),
        (early_exit, "suites", "sys.exit(0)"),
    ],
)
def test_each_rule_speaks(rule: Rule, part: str, source: str, tmp_path: Path) -> None:
    """The form that a rule forbids is found."""
    assert [reason for _, reason in rule(_module(part, source, tmp_path))] != []


@pytest.mark.parametrize(
    ("rule", "part", "source"),
    [
        (vacuous_assert, "suites", "self.assertTrue(a, f'{a} is empty')"),
        (vacuous_assert, "suites", "self.assertTrue(a, msg=text)"),
        (assert_without_message, "checks", "assert a == b, 'a is b by construction'"),
        (assert_without_message, "tests", "assert a == b"),
        (sleeping_test, "harness", "time.sleep(1)"),
        (sleeping_test, "tests", "time.sleep(FOREVER_S)"),
        (unsafe_load, "adapters", "torch.load(file, weights_only=True)"),
        (silent_skip, "tests", "pytest.skip('no GPU')"),
    ],
)
def test_each_rule_leaves_the_right_form_alone(rule: Rule, part: str, source: str, tmp_path: Path) -> None:
    """What a rule is not about is not reported."""
    assert list(rule(_module(part, source, tmp_path))) == []


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _module(part: str, source: str, directory: Path) -> Module:
    path = directory / "some.py"
    path.write_text(source, encoding="utf-8")
    checkout.parse.cache_clear()
    return Module(f"{checkout.PACKAGE}.{part}.some", path)
