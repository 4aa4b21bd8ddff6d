"""
A failure that was found, as a test file in a user's repository: pytest collects it, and it is judged like a case.

    from fsdp_conformance.explore import saved

    class TestExplored1a2b3c4d(saved.SavedCase):
        implementation = "my_engine.py:MyEngine"
        scenario_json = '{"format": 2, ...}'
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from fsdp_conformance import run_settings
from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.explore.case import DrawnCase, bind
from fsdp_conformance.scenarios.scenario import Scenario, scenario_from_json

_FILE = '''\
"""
Found by `fsdp-conformance explore`:

    {signature}

It takes: {needs}.
"""

from fsdp_conformance.explore import saved


class TestExplored{digest}(saved.SavedCase):
    """A drawn scenario is at parity with unsharded training, or the combination is refused."""

    implementation = {implementation!r}
    scenario_json = """\\
{json}
"""
'''


class SavedCase(DrawnCase):
    """The base class of saved cases. Runs on `implementation`, whatever pytest's --implementation is."""

    implementation: ClassVar[str] = ""
    scenario_json: ClassVar[str] = ""

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if cls.scenario_json:
            bind(cls, scenario_from_json(cls.scenario_json))

    def setUp(self) -> None:
        before, description = run_settings.current(), run_settings.description()
        self.addCleanup(run_settings.use, before, description)
        if self.implementation and self.implementation != before.implementation:
            run_settings.use(replace(before, implementation=self.implementation))
        super().setUp()


def save(directory: Path, scenario: Scenario, *, implementation: str, signature: str) -> Path:
    """
    Write the test file of a scenario, and return its path; the same scenario is written to the same file.

    Raises EnvironmentUnavailable if it cannot be written.
    """
    path = directory / f"test_explored_{scenario.digest}.py"
    text = _FILE.format(
        signature=signature.replace('"""', "'''").replace("\\", "/"),
        needs=scenario.describe(),
        digest=scenario.digest,
        implementation=implementation,
        json=scenario.to_json().replace("\\", "\\\\"),
    )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentUnavailable(f"{path} cannot be written: {error.strerror}. Choose another --save.") from error
    return path
