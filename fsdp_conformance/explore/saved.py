"""
A failure that was found, as a test file in a user's repository: pytest collects it, and it is judged like a case.

    from fsdp_conformance.explore import saved

    class TestExplored1a2b3c4d(saved.SavedCase):
        implementation = "my_engine.py:MyEngine"
        example_json = '{"format": 1, ...}'
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from fsdp_conformance import run_settings
from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.explore.case import DrawnCase, bind
from fsdp_conformance.explore.example import Example, example_from_json, features

_FILE = '''\
"""
Found by `fsdp-conformance explore`:

    {signature}

It takes: {needs}.
"""

from fsdp_conformance.explore import saved


class TestExplored{digest}(saved.SavedCase):
    """A drawn model, sharded and trained as drawn, is at parity, or the combination is refused."""

    implementation = {implementation!r}
    example_json = """\\
{json}
"""
'''


class SavedCase(DrawnCase):
    """The base class of saved cases. Runs on `implementation`, whatever pytest's --implementation is."""

    implementation: ClassVar[str] = ""
    example_json: ClassVar[str] = ""

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if cls.example_json:
            bind(cls, example_from_json(cls.example_json))

    def setUp(self) -> None:
        before, description = run_settings.current(), run_settings.description()
        self.addCleanup(run_settings.use, before, description)
        if self.implementation and self.implementation != before.implementation:
            run_settings.use(replace(before, implementation=self.implementation))
        super().setUp()

    @classmethod
    def method_names(cls) -> list[str]:
        """The names of its test methods: one, in a class that has an example."""
        return ["test_drawn"] if cls.example_json else []


def save(directory: Path, example: Example, *, implementation: str, signature: str) -> Path:
    """
    Write the test file of an example, and return its path; the same example is written to the same file.

    Raises EnvironmentUnavailable if it cannot be written.
    """
    path = directory / f"test_explored_{example.digest}.py"
    text = _FILE.format(
        signature=signature.replace('"""', "'''").replace("\\", "/"),
        needs=", ".join(sorted(features(example))) or "nothing special",
        digest=example.digest,
        implementation=implementation,
        json=example.to_json().replace("\\", "\\\\"),
    )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentUnavailable(f"{path} cannot be written: {error.strerror}. Choose another --save.") from error
    return path
