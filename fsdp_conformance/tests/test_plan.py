"""Plans name what they need, and impossible ones are rejected with every problem."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.plan import Plan


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"units": ("a",), "defer_reduction": True, "deferred_units": ("",)}, "no_sync_per_unit"),
        ({"reshard_after_backward": False}, "reshard_after_backward"),
        ({"tensor_parallel": 2, "tensor_styles": (("a", "row"),)}, "tp"),
        ({"stages": ("a", "b")}, "pp"),
    ],
)
def test_a_field_needs_its_flag(fields: dict[str, Any], flag: str) -> None:
    """The plan needs the flag, and the default plan does not."""
    assert flag in Plan(**fields).capabilities()
    assert flag not in Plan().capabilities()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"units": ("a",), "deferred_units": ("", "a", "b")}, "deferred_units must be units, .* got b "),
        ({"tensor_parallel": 2}, "tensor_parallel must be above 1 with tensor_styles .* got 2 with 0 styles"),
        ({"tensor_styles": (("a", "row"),)}, "got 1 with 1 styles"),
        (
            {"tensor_parallel": 2, "tensor_styles": (("a", "diagonal"),)},
            "must be column or row, got 'diagonal' for 'a'",
        ),
        ({"stages": ("a",)}, "stages must be none or at least two, got 'a' alone"),
        ({"stages": ("a", "b", "a")}, "stages must be separate submodules, got a, b, a"),
        ({"stages": ("a", "a.b")}, "stages must be separate submodules, got a, a.b"),
        ({"stages": ("", "b")}, "stages must be separate submodules, got , b"),
        ({"stages": ("a", "b"), "local_units": ("a.c",)}, "got local_units"),
        ({"stages": ("a", "b"), "param_dtype": "bfloat16"}, "got param_dtype"),
    ],
)
def test_impossible_plans(fields: dict[str, Any], problem: str) -> None:
    """The message says what was expected and what was given."""
    with pytest.raises(ConfigError, match=problem):
        Plan(**fields)
