"""Declared methods become the methods of their cases when the class is complete."""

from __future__ import annotations

import unittest

import pytest

from fsdp_conformance.cases.declaration import DeclaresCases, conformance_case
from fsdp_conformance.contract.case import case_of
from fsdp_conformance.errors import ConfigError


class Declared(DeclaresCases, unittest.TestCase):
    """A class with one method for two cases, and one for a single case."""

    @conformance_case("R001", chapter="A", axes={"late": (True, False)}, world_size=2, starts_early=True)
    def test_probe(self, late: bool) -> None:
        """Losses are equal."""
        self.assertTrue(late)

    @conformance_case("R002", chapter="A", world_size=3)
    def test_other(self) -> None:
        """Gradients are equal."""


class Derived(Declared):
    """Inherits the cases."""


def test_one_method_for_each_case() -> None:
    """The declared method itself is gone, and a subclass has the same cases."""
    names = unittest.TestLoader().getTestCaseNames(Declared)

    assert names == ["test_other", "test_probe_late_ws2", "test_probe_no_late_ws2"]
    assert not hasattr(Declared, "test_probe")
    assert unittest.TestLoader().getTestCaseNames(Derived) == names
    cases = [case_of(getattr(Derived, name)) for name in names]
    assert [(case.id, case.starts_early) for case in cases if case is not None] == [
        ("R002/other-ws3", False),
        ("R001/probe-late-ws2", True),
        ("R001/probe-no-late-ws2", True),
    ]


def test_the_method_gets_its_axis_values() -> None:
    """Positions follow the order of the axes."""
    result = unittest.TestResult()
    for name in ("test_probe_late_ws2", "test_probe_no_late_ws2"):
        Declared(name).run(result)

    assert [test.id().rpartition(".")[2] for test, _ in result.failures] == ["test_probe_no_late_ws2"]


@pytest.mark.parametrize(
    ("axes", "world_size", "message"),
    [
        ({"name": ("Upper",)}, 2, "must consist of lower-case"),
        ({"k": (1, 1)}, 2, "distinct names"),
        ({}, None, "got None"),
    ],
)
def test_a_case_without_a_stable_id_is_an_error(
    axes: dict[str, tuple[object, ...]], world_size: int | None, message: str
) -> None:
    """The class cannot be made, and the message names the method."""
    with pytest.raises(ConfigError, match=rf"(?s)test_bad.*{message}|{message}.*test_bad"):

        class Bad(DeclaresCases):
            @conformance_case("R001", chapter="A", axes=axes, world_size=world_size)
            def test_bad(self, **values: object) -> None:
                """It never runs."""


def test_a_method_without_a_docstring_is_an_error() -> None:
    """The docstring is the title of the case."""
    with pytest.raises(ConfigError, match="must have a docstring"):

        @conformance_case("R001", chapter="A", world_size=2)
        def test_bad(self: object) -> None:
            pass
