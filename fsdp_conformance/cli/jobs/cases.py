"""The job of `run` itself: like `python -m pytest WORDS...` in a process that has imported torch."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import NoReturn

from fsdp_conformance.cli.child import Answer


def run(answer: Answer, words: Sequence[str]) -> NoReturn:
    """Become pytest, with its exit status."""
    import pytest

    # pytest collects garbage ten times when it ends, which takes 70 ms each over all that torch has imported.
    gc.freeze()
    sys.argv = ["pytest", *words]
    sys.exit(int(pytest.main([*words])))
